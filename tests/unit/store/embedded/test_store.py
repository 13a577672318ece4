"""The embedded store on virtual time: leases, lock-delays and watches to the second, and its bounds.

What it shares with Consul is held by the conformance suite; here is what only it promises.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from store.embedded import state
from store.embedded.store import EmbeddedStore
from store.kv import ops
from store.kv.protocol import Invalid, Listing, SessionExpired, SessionSpec, TxnConflict, Unavailable
from tests.support import require
from tests.support.waiting import loop_time

pytestmark = pytest.mark.looptime


async def in_background(store: EmbeddedStore, prefix: str, index: int, wait: float = 300.0) -> asyncio.Task[Listing]:
    """A watch that is waiting already."""
    watch = asyncio.create_task(store.watch(prefix, index, wait))
    await asyncio.sleep(0.001)
    return watch


async def test_a_lease_ends_exactly_when_it_is_over() -> None:
    """The lease is the shorter one of TTL and check TTL; its keys are free at that moment, not earlier, not later."""
    store = EmbeddedStore()
    started = loop_time()
    session = await store.create_session(SessionSpec("holder", ttl=10, check_ttl=3))
    await store.txn([ops.lock("k", b"v", session.id)])
    index = (await store.list("k")).index
    assert session.lease == 3
    freed = await store.watch("k", index, 60)
    assert loop_time() - started == pytest.approx(3)
    assert freed.entries[0].session is None
    assert freed.entries[0].value == b"v"


async def test_renewing_moves_the_end_of_the_lease() -> None:
    """A session lives for as long as it is renewed within its lease, and ends one lease after the last renewal."""
    store = EmbeddedStore()
    session = await store.create_session(SessionSpec("holder", check_ttl=3))
    for _ in range(5):
        await asyncio.sleep(2.9)
        await store.renew_session(session.id)
    await asyncio.sleep(2.9)
    assert await store.session_info(session.id) is not None
    await asyncio.sleep(0.1)
    assert await store.session_info(session.id) is None


async def test_a_renewal_at_the_end_of_the_lease_comes_too_late() -> None:
    """At its deadline a lease has ended, even when the renewal is handled before the timer."""
    time = 0.0
    store = EmbeddedStore(clock=lambda: time)
    session = await store.create_session(SessionSpec("holder", check_ttl=3))
    time = 3.0
    with pytest.raises(SessionExpired):
        await store.renew_session(session.id)


async def test_sessions_end_in_the_order_of_their_deadlines() -> None:
    """One timer serves all sessions: each ends at its own time, whatever the order of creation."""
    store = EmbeddedStore()
    started = loop_time()
    leases = [5.0, 1.0, 3.0, 1.0, 4.0]
    names = {(await store.create_session(SessionSpec("s", check_ttl=lease))).id: lease for lease in leases}
    alive = dict(names)
    for moment in range(1, 6):
        await asyncio.sleep(started + moment - loop_time() + 0.01)
        alive = {name: lease for name, lease in names.items() if await store.session_info(name)}
        assert sorted(alive.values()) == sorted(lease for lease in leases if lease > moment)
    assert not alive


async def test_lock_delay_counts_from_the_end_of_the_session() -> None:
    """After a session with a lock-delay ends, its keys can't be locked for exactly that long."""
    store = EmbeddedStore()
    first = await store.create_session(SessionSpec("first", check_ttl=3, lock_delay=7))
    second = await store.create_session(SessionSpec("second", ttl=1000, check_ttl=None))
    await store.txn([ops.lock("k", b"", first.id)])
    await asyncio.sleep(9.9)
    with pytest.raises(TxnConflict):
        await store.txn([ops.lock("k", b"", second.id)])
    await asyncio.sleep(0.2)
    await store.txn([ops.lock("k", b"", second.id)])


@pytest.mark.parametrize("spec", [SessionSpec("s", ttl=0), SessionSpec("s", check_ttl=-1)])
async def test_a_lease_of_no_length_is_refused(spec: SessionSpec) -> None:
    """TTL and check TTL must be above zero."""
    with pytest.raises(Invalid, match="above 0 seconds"):
        await EmbeddedStore().create_session(spec)


async def test_a_watch_waits_exactly_as_long_as_asked() -> None:
    """With nothing changing under its prefix, a watch answers after its wait with what is there."""
    store = EmbeddedStore()
    await store.put("a/1", b"x")
    index = (await store.list("a/")).index
    started = loop_time()
    watch = await in_background(store, "a/", index, 42)
    await store.put("b/1", b"")
    listing = await watch
    assert loop_time() - started == pytest.approx(42)
    assert [entry.key for entry in listing.entries] == ["a/1"]
    assert listing.index == index


async def test_a_write_wakes_only_the_watches_above_it() -> None:
    """Watches of the key, of its prefixes and of everything wake; those of siblings and of longer keys sleep on. A
    cancelled watch leaves nothing behind."""
    store = EmbeddedStore()
    await store.put("x", b"")
    prefixes = ["", "a", "a/", "a/b", "a/b/", "a/bc", "b", "a/b/key", "a/b/key2"]
    watches = {prefix: await in_background(store, prefix, store.state.index_of(prefix)) for prefix in prefixes}
    await store.put("a/b/key", b"")
    await asyncio.sleep(0.001)
    assert {prefix for prefix, watch in watches.items() if watch.done()} == {"", "a", "a/", "a/b", "a/b/", "a/b/key"}
    for watch in watches.values():
        watch.cancel()
    await asyncio.wait(watches.values())
    assert not store.watcher_count


async def test_a_watch_from_another_store_is_answered_at_once() -> None:
    """An index above everything that this store ever gave out means that the store was replaced: no deaf watcher."""
    store = EmbeddedStore()
    await store.put("a", b"")
    started = loop_time()
    listing = await store.watch("a", 10_000, 300)
    assert loop_time() == started
    assert listing.index < 10_000


async def test_an_answer_is_handed_over_after_others_had_their_turn() -> None:
    """Between a read and what its reader does with it, other tasks run, as with a real server."""
    store = EmbeddedStore()
    await store.put("counter", b"0")

    async def increment() -> None:
        entry = require(await store.get("counter"))
        await store.put("counter", str(int(entry.value) + 1).encode())

    await asyncio.gather(increment(), increment())
    entry = require(await store.get("counter"))
    assert entry.value == b"1", "the lost update that a missing CAS deserves"


async def test_dropped_tombstones_wake_a_watcher_but_never_deafen_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tombstones are bounded; where they were dropped, a prefix's index rises and never falls."""
    monkeypatch.setattr(state, "MAX_TOMBSTONES", 8)
    store = EmbeddedStore()
    await store.put("a/kept", b"")
    await store.put("a/gone", b"")
    await store.delete("a/gone")
    seen = (await store.list("a/")).index
    for number in range(40):
        await store.put(f"b/{number}", b"")
        await store.delete(f"b/{number}")
        index = (await store.list("a/")).index
        assert index >= seen
        seen = index
    watch = await in_background(store, "a/", seen)
    assert not watch.done()
    await store.put("a/kept", b"new")
    assert (await watch).entries[0].value == b"new"


async def test_closing_ends_what_waits_and_refuses_the_rest() -> None:
    """After `close` every call says so, watches in flight included, and no lease ends any more."""
    store = EmbeddedStore()
    await store.put("a", b"")
    await store.create_session(SessionSpec("holder", check_ttl=3))
    watch = await in_background(store, "a", store.state.index)
    await store.close()
    await store.close()
    calls: list[Any] = [watch, store.get("a"), store.put("a", b""), store.watch("a", 1, 1), store.list("")]
    for call in calls:
        with pytest.raises(Unavailable, match="closed"):
            await call
