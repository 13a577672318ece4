"""Ownership on virtual time: joining, claims, hand-overs, and RCs that their preferred farm leaves unclaimed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from controllers.ownership.membership import assignment
from controllers.ownership.ownership import CLAIM_RETRY, HANDOVER_RETRY
from rcfarm.config.settings import FarmSettings
from rcfarm.farm.farm import Farm
from store.kv import ops
from store.kv.protocol import Op, SessionSpec, Unavailable
from store.kv.view import BUSY_LOOK
from store.schema.keys import Keys, all_shards, shard_of
from store.schema.records import Owner, encode
from tests.support import require
from tests.support.consul.scripted_store import ScriptedStore
from tests.support.farm.fleet import Fleet, running_farm
from tests.support.farm.stage import KEYS, SOON, Stage, member_that_does_nothing, owned, owner
from tests.support.waiting import loop_time

pytestmark = pytest.mark.looptime

DEFAULTS = FarmSettings(name="farm-a")


def rc_for(farm: str, *farms: str, beside: Sequence[str] = ()) -> str:
    """Return an RC id in a shard for which `farm` is preferred among `farms`, and in another shard than those
    `beside`."""
    avoided = {shard_of(rc_id, KEYS.shards) for rc_id in beside}
    names = (f"rc-{number}" for number in range(1000))
    return next(
        name
        for name in names
        if (shard := shard_of(name, KEYS.shards)) not in avoided
        and assignment(all_shards(KEYS.shards), farms)[shard] == farm
    )


async def test_a_hand_over_waits_for_the_work_in_flight(store: ScriptedStore, fleet: Fleet, stage: Stage) -> None:
    """An RC that should go to another farm goes when its reconcile has ended, whatever has changed since that began;
    nothing is written for it after its release, and both farms never own it at once."""
    await fleet.add_nodes(["n1"])
    rc_id = rc_for("farm-b", "farm-a", "farm-b")
    stage.gates[rc_id] = asyncio.Event()
    await fleet.create(rc_id, 1)
    async with running_farm(store, KEYS, "farm-a", make_scheduler=stage.scheduler) as first:
        await fleet.until(lambda: stage.hanging[rc_id])
        async with running_farm(store, KEYS, "farm-b") as second:
            await asyncio.sleep(60.0)
            assert await owner(store, rc_id) == first.keeper.session_id
            await fleet.rcs.set_replicas(rc_id, 0)
            await asyncio.sleep(SOON)
            store.transactions.clear()
            stage.gates[rc_id].set()
            await fleet.until(lambda: owned(second) == [rc_id])
            assert owned(first) == []
            mine = [sent for sent in store.transactions if any(op.session == first.keeper.session_id for op in sent)]
    assert [sent[0].verb for sent in mine] == ["check-session", "unlock"]


async def test_a_hand_over_that_fails_loses_no_rc(store: ScriptedStore, fleet: Fleet) -> None:
    """An RC that could not be released is worked on as before, and handed over by the next attempt."""
    await fleet.add_nodes(["n1"])
    rc_id = rc_for("farm-b", "farm-a", "farm-b")
    await fleet.create(rc_id, 0)

    async def refuse(sent: Sequence[Op]) -> None:
        if any(op.verb == "unlock" for op in sent):
            raise Unavailable("away")

    async with running_farm(store, KEYS, "farm-a") as first:
        await fleet.until(lambda: owned(first) == [rc_id])
        store.before_txn = refuse
        await member_that_does_nothing(store, "farm-b")
        await asyncio.sleep(SOON / 2)
        assert owned(first) == [rc_id]
        await fleet.rcs.set_replicas(rc_id, 1)
        await fleet.until_placed(rc_id, ["n1"])
        store.before_txn = None
        await asyncio.sleep(HANDOVER_RETRY + SOON)
        assert await owner(store, rc_id) is None


async def test_an_rc_that_is_being_released_is_left_alone(store: ScriptedStore, fleet: Fleet) -> None:
    """What changes while the store is asked to release an RC is for its next owner."""
    await fleet.add_nodes(["n1"])
    rc_id = rc_for("farm-b", "farm-a", "farm-b")
    await fleet.create(rc_id, 0)

    async def change_it_first(sent: Sequence[Op]) -> None:
        if any(op.verb == "unlock" for op in sent):
            await fleet.rcs.set_replicas(rc_id, 1)
            await asyncio.sleep(SOON)

    async with running_farm(store, KEYS, "farm-a") as first:
        await fleet.until_state(rc_id, "converged")
        store.before_txn = change_it_first
        await member_that_does_nothing(store, "farm-b")
        await asyncio.sleep(3 * SOON)
        assert await owner(store, rc_id) is None
        assert await fleet.nodes_of(rc_id) == []
        assert owned(first) == []


async def test_work_that_hangs_delays_no_take_over(store: ScriptedStore, stage: Stage) -> None:
    """While an RC whose work hangs waits for its hand-over, the farm takes over from another that dies."""
    farms = "farm-a", "farm-b", "farm-c"
    preferred, then = assignment(all_shards(32), farms), assignment(all_shards(32), farms[:2])
    orphaned = next(shard for shard in all_shards(32) if (preferred[shard], then[shard]) == ("farm-c", "farm-a"))
    of_second = {shard for shard in all_shards(32) if preferred[shard] == then[shard] == "farm-b"}
    stuck = rc_in(min(shard for shard in of_second if shard > orphaned))
    stage.gates[stuck] = asyncio.Event()
    keys = Keys()
    fleet = Fleet(store.inner, keys)
    await fleet.add_nodes(["n1"])
    await fleet.create(stuck, 1)
    async with running_farm(store, keys, "farm-a", make_scheduler=stage.scheduler, handover_interval=0.01) as first:
        await fleet.until(lambda: stage.hanging[stuck])
        third = await member_that_does_nothing(store, "farm-c")
        await asyncio.sleep(SOON)
        await member_that_does_nothing(store, "farm-b")
        await asyncio.sleep(SOON)
        assert orphaned not in require(first.term).ownership.shards
        await fleet.create(rc_in(orphaned), 1)
        await store.inner.destroy_session(third)
        await fleet.until_placed(rc_in(orphaned), ["n1"])
        assert owned(first) == sorted([rc_in(orphaned), stuck])
        stage.gates[stuck].set()


async def test_rcs_at_rest_do_not_wait_for_one_that_hangs(store: ScriptedStore, fleet: Fleet, stage: Stage) -> None:
    """Balance: of the shards that go to a farm that joins, everything but the RC whose work hangs is there at once."""
    await fleet.add_nodes(["n1"])
    rc_ids = [f"rc-{number}" for number in range(40)]
    theirs = [rc_id for rc_id in rc_ids if is_for(rc_id, "farm-b", "farm-a", "farm-b")]
    stage.gates[theirs[0]] = asyncio.Event()
    for rc_id in rc_ids:
        await fleet.create(rc_id, 1)
    async with running_farm(store, KEYS, "farm-a", make_scheduler=stage.scheduler) as first:
        await fleet.until(lambda: stage.hanging[theirs[0]] and len(owned(first)) == 40)
        for rc_id in set(rc_ids) - {theirs[0]}:
            await fleet.until_placed(rc_id, ["n1"])
        async with running_farm(store, KEYS, "farm-b"):
            began = loop_time()
            await fleet.until(lambda: len(owned(first)) == 40 - len(theirs) + 1)
            assert loop_time() - began < 2 * SOON
            assert theirs[0] in owned(first)
            stage.gates[theirs[0]].set()


async def test_a_fleet_settles_within_seconds_of_a_join(store: ScriptedStore) -> None:
    """Balance: with all 32 shards in use, each of two, then three farms has its share a few seconds after the join."""
    keys = Keys()
    fleet = Fleet(store.inner, keys)
    for number in range(200):
        await fleet.create(f"rc-{number}", 0)
    async with running_farm(store, keys, "farm-a") as first:
        await fleet.until(lambda: len(owned(first)) == 200)
        async with running_farm(store, keys, "farm-b") as second:
            began = loop_time()
            await fleet.until(lambda: shards_of(first, second) == [16, 16])
            await fleet.until(lambda: len(owned(first)) + len(owned(second)) == 200)
            assert loop_time() - began < 5.0
            async with running_farm(store, keys, "farm-c") as third:
                began = loop_time()
                await fleet.until(lambda: shards_of(first, second, third) == [10, 11, 11])
                await fleet.until(lambda: sum(map(len, map(owned, (first, second, third)))) == 200)
                assert loop_time() - began < 5.0


def shards_of(*farms: Farm) -> list[int]:
    """Return how many shards the farms watch, the fewest first."""
    return sorted(len(farm.term.ownership.shards) if farm.term else 0 for farm in farms)


def is_for(rc_id: str, farm: str, *farms: str) -> bool:
    return assignment(all_shards(KEYS.shards), farms)[shard_of(rc_id, KEYS.shards)] == farm


def rc_in(shard: str) -> str:
    """Return an RC id that belongs to the shard, of 32."""
    return next(name for number in range(1000) if shard_of(name := f"rc-{number}") == shard)


async def test_a_farm_that_lives_and_does_not_claim_is_stood_in_for(store: ScriptedStore, fleet: Fleet) -> None:
    """An RC that its preferred farm leaves free is left to that for the grace time, and then taken."""
    await member_that_does_nothing(store, "farm-b")
    await fleet.add_nodes(["n1"])
    rc_id = rc_for("farm-b", "farm-a", "farm-b")
    async with running_farm(store, KEYS, "farm-a") as farm:
        await asyncio.sleep(SOON)
        created = loop_time()
        await fleet.create(rc_id, 1)
        await asyncio.sleep(DEFAULTS.claim_grace)
        assert await owner(store, rc_id) is None
        await fleet.until(lambda: owned(farm) == [rc_id])
        around = KEYS.shards * DEFAULTS.claim_grace / 4  # until every shard was looked at
        assert loop_time() - created <= around + DEFAULTS.claim_grace * 1.25 + SOON
        await fleet.until_placed(rc_id, ["n1"])


async def test_a_farm_that_claims_in_time_is_not_stood_in_for(store: ScriptedStore, fleet: Fleet) -> None:
    """RCs that are free for a short time in foreign shards are left alone, whatever their number."""
    async with running_farm(store, KEYS, "farm-a") as first, running_farm(store, KEYS, "farm-b") as second:
        for number in range(40):
            await fleet.create(f"rc-{number}", 0)
            await asyncio.sleep(DEFAULTS.claim_grace / 3)
        assert first.term is not None
        assert len(first.term.ownership.shards) + len(require(second.term).ownership.shards) == KEYS.shards
        assert len(owned(first)) + len(owned(second)) == 40


async def test_a_shard_that_was_stood_in_for_goes_back(store: ScriptedStore, fleet: Fleet) -> None:
    """When the members change, the preferred farm is determined again; shards taken in the meantime are handed over."""
    lame = await member_that_does_nothing(store, "farm-b")
    rc_id = rc_for("farm-b", "farm-a", "farm-b")
    await fleet.create(rc_id, 0)
    async with running_farm(store, KEYS, "farm-a") as first:
        await fleet.until(lambda: owned(first) == [rc_id])
        await store.inner.destroy_session(lame)
        async with running_farm(store, KEYS, "farm-b") as second:
            await fleet.until(lambda: owned(second) == [rc_id])
            assert owned(first) == []


async def test_a_claim_that_is_denied_is_tried_again(store: ScriptedStore, fleet: Fleet) -> None:
    """A lock that was refused, because it was released a moment ago, is requested again without another event."""
    former = await store.inner.create_session(SessionSpec("former", lock_delay=3.0, check_ttl=None))
    await fleet.create("web", 0)
    await store.inner.txn([ops.lock(KEYS.owner("web"), encode(Owner("farm-b", "")), former.id)])
    await store.inner.destroy_session(former.id)
    async with running_farm(store, KEYS, "farm-a") as farm:
        began = loop_time()
        await fleet.until(lambda: owned(farm) == ["web"])
        assert 3.0 - SOON <= loop_time() - began <= 3.0 + 2 * CLAIM_RETRY


async def test_a_refused_claim_shows_that_the_view_is_behind(store: ScriptedStore, fleet: Fleet) -> None:
    """If another farm claims first, the shard is watched at once, however many claims are still wanted: what happens
    to the RC next is no surprise."""
    await fleet.create("web", 0)
    thief = await member_that_does_nothing(store, "farm-b")

    async def be_first(sent: Sequence[Op]) -> None:
        if any(op.key == KEYS.owner("web") for op in sent):
            store.before_txn = None
            await store.inner.txn([ops.lock(KEYS.owner("web"), encode(Owner("farm-b", "")), thief)])

    store.before_txn = be_first
    async with running_farm(store, KEYS, "farm-a") as farm:
        await fleet.until(lambda: store.before_txn is None)
        began = loop_time()
        await fleet.until(lambda: owner_seen(farm, "web") == thief)
        assert loop_time() - began < 3 * BUSY_LOOK


def owner_seen(farm: Farm, rc_id: str) -> str | None:
    """Return the RC's owner as the farm sees it."""
    shard = farm.term.ownership.shards.get(shard_of(rc_id, KEYS.shards)) if farm.term else None
    rc = shard.rcs.get(rc_id) if shard else None
    return rc.session if rc else None


async def test_claims_survive_a_store_that_is_away(store: ScriptedStore, fleet: Fleet) -> None:
    """Nothing is forgotten while no transaction gets through."""
    async with running_farm(store, KEYS, "farm-a") as farm:
        await fleet.until(lambda: farm.term and len(farm.term.ownership.shards) == KEYS.shards)
        store.faults["txn"] = Unavailable("away")
        for rc_id in ("web", "db", "cache"):
            await fleet.create(rc_id, 0)
        await asyncio.sleep(10.0)
        assert owned(farm) == []
        store.faults.clear()
        await asyncio.sleep(2 * CLAIM_RETRY)
        assert owned(farm) == ["cache", "db", "web"]


async def test_a_lock_that_expires_is_seen_without_any_other_write(store: ScriptedStore, fleet: Fleet) -> None:
    """The RCs of a dead farm are taken over as soon as its lease ends, without any other write."""
    session = (await store.inner.create_session(SessionSpec("dead", ttl=10.0, check_ttl=None))).id
    await fleet.create("web", 0)
    await store.inner.txn([ops.lock(KEYS.owner("web"), encode(Owner("farm-b", "")), session)])
    began = loop_time()
    async with running_farm(store, KEYS, "farm-a") as farm:
        await asyncio.sleep(9.0)
        assert owned(farm) == []
        await fleet.until(lambda: owned(farm) == ["web"])
        assert loop_time() - began < 11.0


async def test_a_member_record_that_is_taken_away_is_written_again(store: ScriptedStore, fleet: Fleet) -> None:
    """If the member record of an idle farm is removed, it joins again, and claims new RCs."""
    async with running_farm(store, KEYS, "farm-a") as farm:
        await fleet.until(lambda: farm.term and len(farm.term.ownership.shards) == KEYS.shards)
        await store.inner.delete(KEYS.farm("farm-a"))
        await asyncio.sleep(SOON)
        assert farm.membership.group() == ["farm-a"]
        await fleet.create("web", 0)
        await fleet.until(lambda: owned(farm) == ["web"])


async def test_a_farm_whose_name_is_in_use_waits_for_it(store: ScriptedStore, fleet: Fleet) -> None:
    """It claims nothing while another farm of its name is live, and begins when that one has ended."""
    former = await member_that_does_nothing(store, "farm-a")
    await fleet.create("web", 0)
    async with running_farm(store, KEYS, "farm-a") as farm:
        await asyncio.sleep(60.0)
        assert await owner(store, "web") is None
        await store.inner.destroy_session(former)
        await asyncio.sleep(SOON)
        assert owned(farm) == ["web"]


async def test_no_membership_is_waited_for_under_a_dead_session(store: ScriptedStore, fleet: Fleet) -> None:
    """A session that is lost before the farm could join is given up for the next one."""
    former = await member_that_does_nothing(store, "farm-a")
    async with running_farm(store, KEYS, "farm-a") as farm:
        await asyncio.sleep(SOON)
        session = require(farm.keeper.session_id)
        await store.inner.destroy_session(session)
        await store.inner.destroy_session(former)
        await fleet.create("web", 0)
        await fleet.until(lambda: owned(farm) == ["web"])
