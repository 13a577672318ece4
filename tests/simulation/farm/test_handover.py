"""Handing RCs over between farms: no RC may stay locked by a farm that does not reconcile it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from controllers.ownership.membership import assignment
from rcfarm.farm.farm import Farm
from store.embedded.store import EmbeddedStore
from store.kv import ops
from store.kv.protocol import Op, SessionSpec, Unavailable
from store.kv.session import SessionKeeper
from store.schema.keys import Keys, all_shards
from store.schema.records import Owner, encode
from tests.support.consul.scripted_store import ScriptedStore
from tests.support.farm.fleet import Fleet, running_farm

HANDOVER_INTERVAL = 0.01  # seconds


@pytest.fixture
def keys() -> Keys:
    return Keys(shards=8)


def names_for(farm: str, keys: Keys, count: int) -> list[str]:
    """Return RC ids in shards for which this one of farm-a and farm-b is preferred."""
    names = (f"rc-{number}" for number in range(1000))
    shard_names = ((name, keys.rc(name).split("/")[-3]) for name in names)
    preferred = assignment(all_shards(keys.shards), ["farm-a", "farm-b"])
    mine = [name for name, shard in shard_names if preferred[shard] == farm]
    return mine[:count]


async def owned_by(fleet: Fleet, rc_ids: list[str], session: str | None) -> bool:
    return session is not None and all([await fleet.owner_session(rc_id) == session for rc_id in rc_ids])


async def test_a_claim_on_its_way_when_its_shard_is_handed_over(store: EmbeddedStore, keys: Keys, fleet: Fleet) -> None:
    """A farm that joins gets the RCs of its shards, also those that the other farm was claiming at that moment."""
    slow, gate, held = ScriptedStore(store), asyncio.Event(), list[Sequence[Op]]()
    await fleet.add_nodes(["n1", "n2"])

    async def hold_claims(sent: Sequence[Op]) -> None:
        if any(op.verb == "lock" and op.key.endswith("/owner") for op in sent):
            held.append(sent)
            await gate.wait()

    async with running_farm(slow, keys, "farm-a", handover_interval=HANDOVER_INTERVAL) as first:
        await fleet.until(lambda: first.term and len(first.term.ownership.shards) == keys.shards)
        slow.before_txn = hold_claims
        rc_ids = names_for("farm-b", keys, 5)
        await asyncio.gather(*(fleet.create(rc_id, 1) for rc_id in rc_ids))
        await fleet.until(lambda: held)
        async with running_farm(store, keys, "farm-b", handover_interval=HANDOVER_INTERVAL) as second:
            await fleet.until(lambda: first.membership.group() == ["farm-a", "farm-b"])
            gate.set()
            await fleet.until(lambda: owned_by(fleet, rc_ids, second.keeper.session_id))
            for rc_id in rc_ids:
                await fleet.rcs.set_replicas(rc_id, 2)
                await fleet.until_placed(rc_id, ["n1", "n2"])


async def test_a_session_that_survived_gives_back_what_it_held(store: EmbeddedStore, keys: Keys, fleet: Fleet) -> None:
    """A farm that could not renew for a while releases everything; when the session turns out to have survived, so have
    its locks. Locks in the shards of a farm that joined in between are handed over, and all RCs are reconciled."""
    deaf = ScriptedStore(store)
    spec = SessionSpec("farm-a", ttl=60.0, check_ttl=None)
    keeper = SessionKeeper(deaf, spec, margin=59.5, renew_interval=0.1)
    await fleet.add_nodes(["n1", "n2"])
    rc_ids = [f"rc-{number}" for number in range(20)]
    async with running_farm(store, keys, keeper=keeper, handover_interval=HANDOVER_INTERVAL) as first:
        for number, rc_id in enumerate(rc_ids):
            await fleet.create(rc_id, 1)
            await fleet.until_placed(rc_id, [f"n{1 + number % 2}"])
        survivor = keeper.session_id
        deaf.faults["renew_session"] = Unavailable("no answer")
        await fleet.until(lambda: first.term is None)
        async with running_farm(store, keys, "farm-b", handover_interval=HANDOVER_INTERVAL) as second:
            await fleet.until(lambda: first.membership.group() == ["farm-a", "farm-b"])
            deaf.faults.clear()
            await fleet.until(lambda: keeper.session_id == survivor)
            for rc_id in rc_ids:
                await fleet.rcs.set_replicas(rc_id, 2)
                await fleet.until_placed(rc_id, ["n1", "n2"])
            theirs = names_for("farm-b", keys, 3)
            await fleet.until(lambda: owned_by(fleet, theirs, second.keeper.session_id))


async def test_a_claim_that_was_applied_late_is_given_back(store: EmbeddedStore, keys: Keys, fleet: Fleet) -> None:
    """A lock that our session holds in a shard that we do not watch is found and released, and the shard's farm
    reconciles the RC."""
    await fleet.add_nodes(["n1"])
    async with (
        running_farm(store, keys, "farm-a", handover_interval=HANDOVER_INTERVAL) as first,
        running_farm(store, keys, "farm-b", claim_grace=0.1, handover_interval=HANDOVER_INTERVAL) as second,
    ):
        await fleet.until(lambda: first.term and second.term and _all_watched(first, second, keys))
        [rc_id] = names_for("farm-a", keys, 1)
        late = encode(Owner("farm-b", ""))
        assert second.keeper.session_id is not None
        await store.txn([ops.lock(keys.owner(rc_id), late, second.keeper.session_id)])
        await fleet.create(rc_id, 1)
        await fleet.until_placed(rc_id, ["n1"])
        assert await fleet.owner_session(rc_id) == first.keeper.session_id


def _all_watched(first: Farm, second: Farm, keys: Keys) -> bool:
    watched = [set(farm.term.ownership.shards) if farm.term else set() for farm in (first, second)]
    return len(watched[0]) + len(watched[1]) == keys.shards and bool(watched[0]) and bool(watched[1])
