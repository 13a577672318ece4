"""Ownership serves any kind of items: clerks share notes, hand them over, and take them from a clerk that is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from structlog.testing import capture_logs

from controllers.ownership.membership import assignment
from store.embedded.store import EmbeddedStore
from store.kv import ops
from store.kv.protocol import SessionSpec
from store.schema.keys import all_shards, shard_of
from store.schema.records import decode, encode
from tests.support.consul.scripted_store import ScriptedStore
from tests.support.ownership.notes import (
    CLAIM_GRACE,
    CLERKS,
    SHARDS,
    Clerk,
    Office,
    Signature,
    Text,
    at_work,
    owner_key,
    signed_key,
    spec_key,
)
from tests.support.waiting import loop_time, until

pytestmark = pytest.mark.looptime

NOTES = {f"note-{number}" for number in range(40)}
SOON = 1.0  # seconds of virtual time in which anything that does not wait on purpose has happened


@pytest.fixture
async def truth() -> AsyncIterator[EmbeddedStore]:
    """Return the store behind every clerk's network."""
    store = EmbeddedStore()
    for note in sorted(NOTES):
        await store.put(spec_key(note), encode(Text()))
    yield store
    await store.close()


def preferring(clerk: str, *clerks: str) -> set[str]:
    """Return the notes whose shard prefers the clerk among these."""
    preferred = assignment(all_shards(SHARDS), clerks)
    return {note for note in NOTES if preferred[shard_of(note, SHARDS)] == clerk}


async def signer(truth: EmbeddedStore, note: str) -> str | None:
    entry = await truth.get(signed_key(note))
    return decode(Signature, entry.key, entry.value).clerk if entry else None


async def holder(truth: EmbeddedStore, note: str) -> str | None:
    entry = await truth.get(owner_key(note))
    return entry.session if entry else None


async def test_two_share_and_one_takes_over_from_the_other(truth: EmbeddedStore) -> None:
    """Each clerk holds the notes of its shards; when one is cut off, the other holds all once the lease has ended. What
    the lost one still had in flight is refused, and it takes its share again under a new session."""
    lost_network = ScriptedStore(truth)
    async with at_work(Office(truth, "ann")) as ann, at_work(Office(lost_network, "bob")) as bob:
        theirs = preferring("bob", "ann", "bob")
        await until(lambda: bob.owned == theirs and ann.owned == NOTES - theirs)
        slow = min(theirs)
        assert await signer(truth, slow) == "bob"
        bob.gates[slow] = asyncio.Event()
        await truth.put(spec_key(slow), encode(Text({"edited": "yes"})))
        await until(lambda: slow in bob.waiting)

        lost_network.cut()
        bob.gates[slow].set()
        began = loop_time()
        await until(lambda: ann.owned == NOTES)
        assert loop_time() - began < 10.0 + SOON
        await until(lambda: bob.term is None)
        assert await holder(truth, slow) == ann.keeper.session_id
        await asyncio.sleep(SOON)
        assert await signer(truth, slow) == "ann"

        lost_network.reconnect()
        await until(lambda: bob.owned == theirs and ann.owned == NOTES - theirs)


async def test_a_write_under_a_lost_lock_is_refused(truth: EmbeddedStore) -> None:
    """A lock that is taken away while work is in flight fences its write off; the note is dropped, then claimed as any
    free note is."""
    network = ScriptedStore(truth)
    async with at_work(Office(network, "ann")) as ann:
        await until(lambda: ann.owned == NOTES)
        await asyncio.sleep(SOON)
        ann.gates["note-0"] = asyncio.Event()
        await truth.put(spec_key("note-0"), encode(Text({"edited": "yes"})))
        await until(lambda: "note-0" in ann.waiting)
        thief = (await truth.create_session(SessionSpec("thief", ttl=60.0, check_ttl=None))).id
        assert ann.keeper.session_id
        network.keep_back("watch")
        value = encode(Signature("thief"))
        await truth.txn([ops.unlock(owner_key("note-0"), value, ann.keeper.session_id)])
        await truth.txn([ops.lock(owner_key("note-0"), value, thief)])
        assert "note-0" in ann.owned
        ann.gates.pop("note-0").set()
        await until(lambda: ann.owned == NOTES - {"note-0"})
        assert ann.refused == ["note-0"]
        network.deliver("watch")
        await truth.destroy_session(thief)
        await until(lambda: ann.owned == NOTES)


async def test_a_hand_over_waits_for_the_work_in_flight(truth: EmbeddedStore) -> None:
    """A note goes to the clerk who joins when the work on it has ended; the notes at rest go at once."""
    theirs = preferring("bob", "ann", "bob")
    slow = min(theirs)
    async with at_work(Office(truth, "ann")) as ann:
        await until(lambda: ann.owned == NOTES)
        await asyncio.sleep(SOON)
        ann.gates[slow] = asyncio.Event()
        await truth.put(spec_key(slow), encode(Text({"edited": "yes"})))
        await until(lambda: slow in ann.waiting)
        async with at_work(Office(truth, "bob")) as bob:
            await until(lambda: ann.owned == NOTES - theirs | {slow})
            await asyncio.sleep(60.0)
            assert await holder(truth, slow) == ann.keeper.session_id
            ann.gates[slow].set()
            await until(lambda: bob.owned == theirs)
            assert ann.refused == bob.refused == []


async def test_a_clerk_that_stops_ends_its_work_first(truth: EmbeddedStore) -> None:
    """An orderly stop lets the work in flight end, and the other clerk holds everything at once."""
    theirs = preferring("bob", "ann", "bob")
    slow = min(theirs)
    async with at_work(Office(truth, "ann")) as ann:
        async with at_work(Office(truth, "bob")) as bob:
            await until(lambda: bob.owned == theirs and ann.owned == NOTES - theirs)
            await asyncio.sleep(SOON)
            await truth.delete(signed_key(slow))
            bob.gates[slow] = asyncio.Event()
            await truth.put(spec_key(slow), encode(Text({"edited": "yes"})))
            await until(lambda: slow in bob.waiting)
            asyncio.get_running_loop().call_later(0.3, bob.gates[slow].set)
            ann.gates[slow] = asyncio.Event()
            began = loop_time()
        await until(lambda: slow in ann.waiting)
        assert await signer(truth, slow) == "bob"
        await until(lambda: ann.owned == NOTES)
        assert loop_time() - began < 2 * SOON
        ann.gates[slow].set()


async def test_notes_that_a_live_clerk_leaves_are_rescued(truth: EmbeddedStore) -> None:
    """The messages and fields name the kind: a clerk, its notes."""
    lame = (await truth.create_session(SessionSpec("lame", ttl=86400.0, check_ttl=None))).id
    await truth.txn([ops.lock(CLERKS + "bob", encode(Clerk("bob")), lame)])
    theirs = preferring("bob", "ann", "bob")
    with capture_logs() as logs:
        async with at_work(Office(truth, "ann")) as ann:
            await until(lambda: ann.owned == NOTES - theirs)
            await until(lambda: ann.owned == NOTES, within=CLAIM_GRACE * (SHARDS + 2))
    rescues = [line for line in logs if "unclaimed" in line["event"]]
    assert {line["event"] for line in rescues} == {"The preferred clerk leaves notes unclaimed; taking over its shard"}
    assert {note for line in rescues for note in line["notes"]} == theirs


async def test_a_selector_divides_the_work(truth: EmbeddedStore) -> None:
    """A clerk with a selector claims only the notes whose labels match, in every shard."""
    await truth.put(spec_key("note-1"), encode(Text({"team": "a"})))
    async with at_work(Office(truth, "ann", "team=a")) as ann, at_work(Office(truth, "bob", "team=b")) as bob:
        await until(lambda: ann.owned == {"note-1"})
        await asyncio.sleep(SOON)
        assert (ann.owned, bob.owned) == ({"note-1"}, set())
