"""The audit log: read by pages whatever its size, and kept within bounds of age and size by one farm."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, date, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rcfarm.farm.housekeeping import AuditRetention
from rcfarm.operations.rcs import ReplicationControllers
from store.embedded.store import EmbeddedStore
from store.kv import ops
from store.kv.protocol import OwnershipLost, SessionSpec
from store.schema import audit
from store.schema.keys import Keys
from tests.support.consul.scripted_store import ScriptedStore

pytestmark = pytest.mark.looptime

KEYS = Keys()
NOON = datetime(2026, 3, 10, 12, tzinfo=UTC)


@pytest.fixture
async def store() -> AsyncIterator[ScriptedStore]:
    scripted = ScriptedStore(EmbeddedStore())
    yield scripted
    await scripted.inner.close()


async def log(store: ScriptedStore, *times: datetime, event: str = "TEST", rc: str = "web") -> None:
    for start in range(0, len(times), 60):
        batch = times[start : start + 60]
        await store.inner.txn([audit.event_op(KEYS, event, {"rc": rc}, actor="me", now=at) for at in batch])


async def farm(store: ScriptedStore) -> str:
    session = (await store.inner.create_session(SessionSpec("farm", ttl=86400.0, check_ttl=None))).id
    await store.inner.txn([ops.lock(KEYS.farm("farm-a"), b"{}", session)])
    return session


def retention(store: ScriptedStore, *, max_age: float = 0, max_size: int = 0) -> AuditRetention:
    return AuditRetention(
        store, KEYS, "farm-a", max_age=max_age, max_size=max_size, is_ours=lambda: True, today=lambda: date(2026, 3, 10)
    )


async def days(store: ScriptedStore) -> list[str]:
    return await audit.days(store.inner, KEYS)


@given(st.sets(st.text("ab/", min_size=1, max_size=6)), st.integers(1, 5))
def test_pages_cover_each_name_once_and_in_order(tails: set[str], most: int) -> None:
    """Whatever the names: every one is under exactly one prefix, pages are in order, and none is larger than it must
    be. Only a name that begins others may make a page larger."""
    names = sorted(f"audit/{tail}" for tail in tails)
    pages = list(audit.page_prefixes("audit/", names, most))
    under = {prefix: [name for name in names if name.startswith(prefix)] for prefix, _ in pages}
    assert [name for prefix, _ in pages for name in under[prefix]] == names
    for prefix, count in pages:
        assert count == len(under[prefix])
        assert count <= most or prefix in names


async def test_events_are_read_by_pages(store: ScriptedStore) -> None:
    """A day of more than a page is never listed as a whole; both directions give every event once, in order."""
    times = [NOON + timedelta(milliseconds=40 * number) for number in range(audit.PAGE + 500)]
    await log(store, *times)
    store.calls.clear()
    sizes = [len(page) async for page in audit.pages(store, KEYS)]
    assert sum(sizes) == len(times)
    assert max(sizes) <= audit.PAGE
    forward, backward = [
        [one.event.timestamp async for page in audit.pages(store, KEYS, newest_first=newest_first) for one in page]
        for newest_first in (False, True)
    ]
    assert forward == sorted(forward)
    assert backward == forward[::-1]


async def test_since_and_until_bound_what_is_read(store: ScriptedStore) -> None:
    """`since` is included, `until` is not; days that can't hold an asked event are not read."""
    times = [NOON + timedelta(hours=12 * number) for number in range(-6, 7)]
    await log(store, *times)
    since, until = NOON - timedelta(hours=12), NOON + timedelta(hours=12)
    store.calls.clear()
    found = [one async for page in audit.pages(store, KEYS, since=since, until=until) for one in page]
    assert [one.event.timestamp for one in found] == ["2026-03-10T00:00:00.000Z", "2026-03-10T12:00:00.000Z"]
    assert store.calls["list"] <= 2


async def test_what_is_no_event_hides_no_neighbour(store: ScriptedStore) -> None:
    """Other keys under the log, values of every kind, times beyond the calendar: left out, and the rest is there."""
    await log(store, NOON)
    for name in ("x", "x/y", "2026-03-10/x", "2026-03-10/", "9999-99-99/x", "2026-03-10"):
        await store.inner.put(KEYS.audit + name, b"nonsense")
    early = b'{"event_type":"X","event_details":{},"timestamp":"0001-01-01T00:00:00+23:00"}'
    await store.inner.put(f"{KEYS.audit}2026-03-10/00000000000000000000000000", early)
    assert [event.event_type for event in await audit.events(store, KEYS)] == ["TEST"]


async def test_a_history_is_read_backwards_and_no_further_than_needed(store: ScriptedStore) -> None:
    """The last events of an RC are found without the days before; its latest creation ends its history."""
    created = "REPLICATION_CONTROLLER_CREATED"
    await log(store, NOON - timedelta(days=40), event=created)
    await log(store, *[NOON - timedelta(days=number) for number in range(39, 2, -1)])
    await log(store, NOON - timedelta(days=2), event=created)
    await log(store, NOON - timedelta(days=1), NOON)
    rcs = ReplicationControllers(store, KEYS, actor="me")
    store.calls.clear()
    assert [event.event_type for event in await rcs.history("web", all_lives=False)] == [created, "TEST", "TEST"]
    assert store.calls["list"] == 3
    assert len(await rcs.history("web", last=5)) == 5
    assert len(await rcs.history("web")) == 41
    assert len(await rcs.history("web", since=NOON - timedelta(days=1))) == 2


async def test_old_events_are_removed(store: ScriptedStore) -> None:
    """Days beyond the age go as a whole; the removal is an event itself; the next look finds nothing to do."""
    session = await farm(store)
    await log(store, *[NOON - timedelta(days=number) for number in range(100)])
    keeper = retention(store, max_age=30 * 86400.0)
    assert await keeper.trim(KEYS.farm("farm-a"), session) == 69
    assert min(await days(store)) == "2026-02-08"
    trimmed = [one for one in await audit.events(store, KEYS) if one.event_type == "AUDIT_TRIMMED"]
    assert [one.event_details for one in trimmed] == [{"removed": 69, "until": "2026-02-07"}]
    assert await keeper.trim(KEYS.farm("farm-a"), session) == 0


async def test_the_oldest_events_beyond_the_size_are_removed(store: ScriptedStore) -> None:
    """Also within one day, by pages; the newest events stay, within the bound."""
    session = await farm(store)
    times = [NOON + timedelta(milliseconds=3 * number) for number in range(3 * audit.PAGE)]
    await log(store, NOON - timedelta(days=3), *times)
    entries = (await store.inner.list(KEYS.audit)).entries
    size = sum(len(entry.key) + len(entry.value) for entry in entries)
    removed = await retention(store, max_size=size // 2).trim(KEYS.farm("farm-a"), session)
    left = [event for event in await audit.events(store, KEYS) if event.event_type == "TEST"]
    assert removed + len(left) == len(times) + 1
    assert len(times) / 4 <= len(left) <= len(times) / 2
    assert left[-1].timestamp == max(times).isoformat(timespec="milliseconds").replace("+00:00", "Z")


async def test_a_farm_that_lost_its_lease_removes_nothing(store: ScriptedStore) -> None:
    """Each removal is fenced by the member record. A bound of 0 means none."""
    session = await farm(store)
    await log(store, NOON - timedelta(days=100))
    assert await retention(store).trim(KEYS.farm("farm-a"), session) == 0
    await store.inner.destroy_session(session)
    with pytest.raises(OwnershipLost):
        await retention(store, max_age=86400.0).trim(KEYS.farm("farm-a"), session)
    assert await days(store) == ["2025-11-30"]
