"""Membership: the live farms, and the preferred farm of each shard."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controllers.ownership.membership import Membership, NameTaken, assignment, leader_of
from store.kv import ops
from store.kv.protocol import OwnershipLost, SessionExpired, SessionSpec
from store.schema.keys import Keys, all_shards
from store.schema.records import FarmMember
from tests.support.consul.scripted_store import ScriptedStore
from tests.support.waiting import background

KEYS = Keys()
names = st.text("abcdefghijklmnopqrstuvwxyz0123456789-", min_size=1, max_size=12)


def moved(before: Mapping[str, str], after: Mapping[str, str]) -> int:
    return sum(before[shard] != after[shard] for shard in before)


@given(st.sets(names, min_size=1, max_size=40), st.sampled_from([1, 4, 32]))
def test_bounded_loads(farms: set[str], shards: int) -> None:
    """Property: every shard has one farm, and no farm has more than one shard more than another; so none has more than
    its share, rounded up."""
    preferred = assignment(all_shards(shards), farms)
    counts = Counter(dict.fromkeys(farms, 0))
    counts.update(preferred.values())
    assert preferred.keys() == set(all_shards(shards))
    assert counts.keys() == farms
    assert max(counts.values()) - min(counts.values()) <= 1
    assert max(counts.values()) <= math.ceil(shards / len(farms))


@given(st.sets(names, min_size=1, max_size=40), st.randoms())
def test_every_farm_comes_to_the_same_answer(farms: set[str], random: Random) -> None:
    """Property: the answer depends on the live farms, not on their order."""
    shuffled, shards = list(farms), list(all_shards(32))
    random.shuffle(shuffled)
    random.shuffle(shards)
    assert assignment(shards, shuffled) == assignment(all_shards(32), sorted(farms))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8, 15, 16, 31])
def test_a_join_or_a_leave_moves_little_more_than_its_share(count: int) -> None:
    """With random names: the shards that a joining farm gets must move, and those that a leaving farm had. On average
    fewer than four shards of 32 more do, to keep the others even."""
    random = Random(count)
    share, moves = 32 / (count + 1), []
    for _ in range(100):
        *farms, newcomer = (f"farm-{random.getrandbits(32):x}" for _ in range(count + 1))
        before, after = assignment(all_shards(32), farms), assignment(all_shards(32), [*farms, newcomer])
        moves.append(moved(before, after))
    assert sum(moves) / len(moves) < share + 4.5
    assert max(moves) < share + 10


def test_without_a_live_farm_none_is_preferred() -> None:
    """Without a live farm no shard has a preferred farm, and no task a leader."""
    assert assignment(["00"], []) == {}
    assert leader_of("manifests", []) is None


@given(st.sets(names, min_size=2, max_size=8))
def test_a_task_for_all_is_done_by_one(farms: set[str]) -> None:
    """Property: it stays with its farm while that lives."""
    leader = leader_of("manifests", farms)
    assert leader in farms
    for farm in farms - {leader}:
        assert leader_of("manifests", farms - {farm}) == leader


@contextlib.asynccontextmanager
async def membership(
    store: ScriptedStore, farm: str, selector: str = ""
) -> AsyncIterator[tuple[Membership[FarmMember], str, asyncio.Event]]:
    """Yield a farm's membership at work, its session, and an event that is set on changes."""
    changed = asyncio.Event()
    members = Membership(store, KEYS.farms, FarmMember(farm=farm, selector=selector), changed.set, kind="farm")
    session = (await store.create_session(SessionSpec(farm, ttl=10.0, check_ttl=None))).id
    async with background(members.view.run()):
        yield members, session, changed


async def until_group(members: Membership[FarmMember], changed: asyncio.Event, group: list[str]) -> None:
    async with asyncio.timeout(10.0):
        while members.group() != group:
            await changed.wait()
            changed.clear()


async def test_a_farm_counts_itself_as_soon_as_it_has_joined(store: ScriptedStore) -> None:
    """No answer of the watch is needed for one's own membership."""
    async with membership(store, "farm-a") as (members, session, changed):
        assert members.group() == []
        await members.join(session)
        assert members.group() == ["farm-a"]
        assert members.preferred(all_shards(32)) == set(all_shards(32))
        assert changed.is_set()


async def test_farms_see_each_other_come_and_go(store: ScriptedStore) -> None:
    """A join, an orderly leave and the end of a lease are seen; the shards are divided among the remaining farms."""
    async with (
        membership(store, "farm-a") as (first, one, changed),
        membership(store, "farm-b") as (second, two, _),
        membership(store, "farm-c") as (third, three, _),
    ):
        await asyncio.gather(first.join(one), second.join(two), third.join(three))
        await until_group(first, changed, ["farm-a", "farm-b", "farm-c"])
        await second.leave(two)
        await until_group(first, changed, ["farm-a", "farm-c"])
        assert await store.get(KEYS.farm("farm-b")) is None
        await store.destroy_session(three)
        await until_group(first, changed, ["farm-a"])
        assert first.preferred(all_shards(32)) == set(all_shards(32))


async def test_groups_go_by_selector(store: ScriptedStore) -> None:
    """Farms of another selector do other work: they don't take part in sharing ours."""
    async with (
        membership(store, "farm-a", "team=a") as (first, one, changed),
        membership(store, "farm-b", "team=b") as (second, two, _),
        membership(store, "farm-c", "team=a") as (third, three, _),
    ):
        await asyncio.gather(first.join(one), second.join(two), third.join(three))
        await until_group(first, changed, ["farm-a", "farm-c"])


async def test_a_name_in_use_is_refused_until_it_is_free(store: ScriptedStore) -> None:
    """Two live farms of one name would act as the same member: the second one waits, and claims nothing."""
    async with membership(store, "farm-a") as (first, one, _), membership(store, "farm-a") as (second, two, _):
        await first.join(one)
        with pytest.raises(NameTaken, match="farm-a"):
            await second.join(two)
        entry = await store.get(first.key)
        assert entry is not None
        assert entry.session == one
        await store.destroy_session(one)
        await second.join(two)


async def test_joining_twice_is_no_error(store: ScriptedStore) -> None:
    """A farm whose record was taken away joins again, under the same session."""
    async with membership(store, "farm-a") as (members, session, _):
        await members.join(session)
        await members.join(session)
        await store.delete(members.key)
        await members.join(session)
        assert members.group() == ["farm-a"]


async def test_a_farm_can_not_join_under_a_session_that_has_ended(store: ScriptedStore) -> None:
    """The store's error is an ended session, not a name in use."""
    async with membership(store, "farm-a") as (members, session, _):
        await store.destroy_session(session)
        with pytest.raises(SessionExpired):
            await members.join(session)


async def test_only_the_member_itself_can_deregister(store: ScriptedStore) -> None:
    """A farm that lost its name to another does not remove the other's record."""
    async with membership(store, "farm-a") as (first, one, _), membership(store, "farm-a") as (second, two, _):
        await first.join(one)
        await store.destroy_session(one)
        await second.join(two)
        with pytest.raises(OwnershipLost):
            await first.leave(one)
        assert await store.get(second.key) is not None


async def test_a_record_without_a_session_is_not_a_member(store: ScriptedStore) -> None:
    """The record of a dead farm does not count; nor does an undecodable one, or one with another farm's name."""
    await store.put(KEYS.farm("dead"), b'{"farm":"dead"}')
    session = (await store.create_session(SessionSpec("odd", ttl=60.0, check_ttl=None))).id
    odd = [ops.lock(KEYS.farm("odd"), b"nonsense", session), ops.lock(KEYS.farm("copy"), b'{"farm":"farm-x"}', session)]
    await store.txn(odd)
    async with membership(store, "farm-a") as (members, session, changed):
        await members.join(session)
        await members.view.synced()
        await until_group(members, changed, ["farm-a"])
