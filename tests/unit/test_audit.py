"""The audit log: order, filters, and events that nobody can read."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest

from store import ops
from store.audit import UlidGenerator, event_op, events, new_ulid
from store.embedded import EmbeddedStore
from store.keys import Keys
from store.kv import TxnConflict

NOON = datetime(2024, 5, 6, 12, 0, tzinfo=UTC)
keys = Keys()


async def _record(store: EmbeddedStore, event_type: str, at: datetime, rc: str = "web") -> None:
    await store.txn([event_op(keys, event_type, {"rc": rc}, actor="farm-1", now=at)])


def test_ulids_of_a_process_only_grow() -> None:
    """Within a millisecond, when the clock is set back, and at the end of the random range."""
    generate = UlidGenerator(lambda bits: (1 << bits) - 1)
    times = [NOON, NOON, NOON - timedelta(hours=1), NOON + timedelta(milliseconds=5), NOON]
    ulids = [generate(at) for at in times]
    assert ulids == sorted(ulids)
    assert len(set(ulids)) == len(ulids)
    assert {len(ulid) for ulid in ulids} == {26}
    assert new_ulid() < new_ulid()


def test_a_ulid_tells_its_time() -> None:
    """The first ten characters are the milliseconds since 1970, as the ULID specification has it."""
    ulid = UlidGenerator(lambda bits: 0)(datetime.fromtimestamp(1469918176.385, UTC))
    assert ulid == "01ARYZ6S41" + "0" * 16


async def test_an_event_is_written_with_what_it_records_or_not_at_all() -> None:
    """A refused transaction leaves no event."""
    store = EmbeddedStore()
    await store.put("a", b"1")
    with pytest.raises(TxnConflict):
        await store.txn([ops.create("a", b"2"), event_op(keys, "NEVER", {}, actor="farm-1")])
    assert await events(store, keys) == []


async def test_events_are_read_in_order_and_filtered() -> None:
    """By day and time, by RC; each with its actor and an RFC 3339 time in UTC."""
    store = EmbeddedStore()
    await _record(store, "FIRST", NOON - timedelta(days=400))
    await _record(store, "SECOND", NOON.astimezone(timezone(timedelta(hours=14))))
    await _record(store, "OTHER", NOON + timedelta(seconds=1), rc="db")
    await _record(store, "THIRD", NOON + timedelta(days=1))
    names = [event.event_type for event in await events(store, keys, rc="web")]
    assert names == ["FIRST", "SECOND", "THIRD"]
    since = await events(store, keys, since=NOON, now=NOON + timedelta(days=1))
    assert [(event.event_type, event.timestamp) for event in since] == [
        ("SECOND", "2024-05-06T12:00:00.000Z"),
        ("OTHER", "2024-05-06T12:00:01.000Z"),
        ("THIRD", "2024-05-07T12:00:00.000Z"),
    ]
    assert {event.actor for event in since} == {"farm-1"}
    assert len(await events(store, keys, since=NOON - timedelta(days=500), now=NOON)) == 4


async def test_an_unreadable_event_hides_no_other() -> None:
    """Bad JSON and a bad time are left out, wherever they are."""
    store = EmbeddedStore()
    await store.put(keys.audit_event("2024-05-06", "0"), b"{")
    await store.put(keys.audit_event("2024-05-06", "1"), b'{"event_type":"X","event_details":{},"timestamp":"soon"}')
    await _record(store, "GOOD", NOON)
    assert [event.event_type for event in await events(store, keys)] == ["GOOD"]
