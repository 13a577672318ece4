"""One suite for every store: in memory, in a file, through the façade, and a real Consul behave alike.

Each test works under its own root.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from store.consul.client import ConsulSettings
from store.consul.store import ConsulStore
from store.embedded.consul_api.app import serve_consul_api
from store.embedded.store import EmbeddedStore
from store.kv import ops
from store.kv.protocol import (
    MAX_TXN_OPS,
    MAX_VALUE_BYTES,
    Entry,
    Invalid,
    Op,
    OpFailure,
    OwnershipLost,
    SessionExpired,
    SessionSpec,
    Store,
    TooLarge,
    TxnConflict,
)

NO_SESSION = "00000000-0000-0000-0000-000000000000"
BLINK = 0.15  # seconds in which a watch that should sleep would have answered


@pytest.fixture(params=["memory", "sqlite", "facade", "consul"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    """The same store four times."""
    async with AsyncExitStack() as stack:
        if request.param == "consul":
            store: Store = connect(request.getfixturevalue("consul").url)
        elif request.param == "facade":
            embedded = EmbeddedStore()
            stack.push_async_callback(embedded.close)
            store = connect(await stack.enter_async_context(serve_consul_api(embedded)))
        else:
            store = EmbeddedStore(tmp_path / "store.db" if request.param == "sqlite" else None)
        stack.push_async_callback(store.close)
        yield store


def connect(address: str) -> ConsulStore:
    return ConsulStore(ConsulSettings.from_env(address, environ={}))


@pytest.fixture
def k(root: str) -> Callable[[str], str]:
    """A key under this test's own root."""
    return lambda name: f"{root}/{name}"


Key = Callable[[str], str]


async def present(store: Store, key: str) -> Entry:
    """Return the entry of a key that must exist."""
    entry = await store.get(key)
    assert entry is not None, f"{key} does not exist"
    return entry


async def session(store: Store, *, lease: float = 60.0, **options: Any) -> str:
    """Create a session that outlives the test unless its lease is shorter."""
    return (await store.create_session(SessionSpec("test", ttl=max(lease, 10.0), check_ttl=lease, **options))).id


async def refused(store: Store, *operations: Op) -> TxnConflict:
    """Return the refusal of a transaction that must be refused."""
    with pytest.raises(TxnConflict) as caught:
        await store.txn(operations)
    return caught.value


async def watching(store: Store, prefix: str, wait: float = 30.0) -> asyncio.Task[list[str]]:
    """Start a watch that sleeps on the current state of `prefix`. Its result is the list of keys at its wake-up."""
    index = (await store.list(prefix)).index

    async def keys() -> list[str]:
        return [entry.key for entry in (await store.watch(prefix, index, wait)).entries]

    watch = asyncio.create_task(keys())
    await asyncio.sleep(BLINK)
    assert not watch.done(), "the watch answered though nothing changed"
    return watch


class TestEntries:
    async def test_a_put_is_read_back(self, store: Store, k: Key) -> None:
        """Value and flags come back as they were written, with the index of creation and of the last change."""
        await store.put(k("a"), b"\x00\xffone", flags=2**64 - 1)
        first = await present(store, k("a"))
        assert (first.key, first.value, first.flags) == (k("a"), b"\x00\xffone", 2**64 - 1)
        assert (first.lock_index, first.session) == (0, None)
        assert first.create_index == first.modify_index > 0
        await store.put(k("a"), b"two")
        second = await present(store, k("a"))
        assert (second.value, second.flags, second.create_index) == (b"two", 0, first.create_index)
        assert second.modify_index > first.modify_index
        assert await store.get(k("a"), consistent=True) == second

    async def test_an_absent_key_is_none_and_an_empty_value_is_a_value(self, store: Store, k: Key) -> None:
        """Reading an absent key is no error, and b"" is distinguished from it."""
        assert await store.get(k("nothing")) is None
        assert (await store.list(k("nothing/"))).entries == []
        assert await store.keys(k("nothing/")) == []
        await store.put(k("empty"), b"")
        assert (await present(store, k("empty"))).value == b""

    @pytest.mark.parametrize("name", ["with space", "ünïcode/ключ", "100%25", "a?b=c&d#e", "x+y", "quote\"'"])
    async def test_keys_are_any_text(self, store: Store, k: Key, name: str) -> None:
        """A key with characters that mean something in a URL is stored under exactly that name."""
        await store.put(k(name), b"v")
        assert (await present(store, k(name))).key == k(name)
        assert await store.keys(k("")) == [k(name)]
        result = await store.txn([ops.get(k(name))])
        assert result.entries[0].value == b"v"
        await store.delete(k(name))
        assert await store.get(k(name)) is None

    async def test_a_list_is_everything_below_a_prefix_in_order(self, store: Store, k: Key) -> None:
        """A prefix is text, not a folder; order is that of the bytes."""
        names = ["a", "a!", "a/", "a/1", "a/10", "a/2", "ab", "aé", "b"]
        for name in reversed(names):
            await store.put(k(name), name.encode())
        listing = await store.list(k("a"), consistent=True)
        assert [(entry.key, entry.value) for entry in listing.entries] == [(k(n), n.encode()) for n in names[:-1]]
        assert await store.keys(k("a/")) == [k("a/"), k("a/1"), k("a/10"), k("a/2")]
        assert listing.index == max(entry.modify_index for entry in listing.entries)

    async def test_a_large_list_of_keys_of_any_text_is_whole(self, store: Store, k: Key) -> None:
        """Keys that look like the end of an object do not cut a listing that is decoded in parts."""
        names = [
            f"{number:03}{text}" for number, text in enumerate(['},{"A', '"},{', "},{", '\\"},{"', "]", "plain"] * 20)
        ]
        value = b"." * 4000
        for start in range(0, len(names), MAX_TXN_OPS):
            await store.txn([ops.put(k(name), value) for name in names[start : start + MAX_TXN_OPS]])
        entries = (await store.list(k(""))).entries
        assert [entry.key for entry in entries] == [k(name) for name in names]
        assert {entry.value for entry in entries} == {value}

    async def test_writing_the_same_again_changes_nothing(self, store: Store, k: Key) -> None:
        """A write that leaves an entry as it is changes no index and wakes no watch."""
        await store.put(k("a"), b"v")
        before = await present(store, k("a"))
        watch = await watching(store, k("a"))
        await store.put(k("a"), b"v")
        result = await store.txn([ops.cas(k("a"), b"v", before.modify_index)])
        assert result.entries[0].modify_index == before.modify_index
        assert await present(store, k("a")) == before
        await asyncio.sleep(BLINK)
        assert not watch.done()
        watch.cancel()

    async def test_deleting_is_idempotent(self, store: Store, k: Key) -> None:
        """Deleting removes the key; deleting an absent key is no error. A key created again starts with new indexes."""
        await store.put(k("a"), b"v")
        created = (await present(store, k("a"))).create_index
        await store.delete(k("a"))
        assert await store.get(k("a")) is None
        await store.delete(k("a"))
        await store.put(k("a"), b"v")
        assert (await present(store, k("a"))).create_index > created

    async def test_a_value_may_have_512_kib_and_no_more(self, store: Store, k: Key) -> None:
        """The largest value is accepted; one byte more is refused and nothing is written."""
        await store.put(k("big"), b"x" * MAX_VALUE_BYTES)
        assert len((await present(store, k("big"))).value) == MAX_VALUE_BYTES
        with pytest.raises(TooLarge, match=str(MAX_VALUE_BYTES + 1)):
            await store.put(k("bigger"), b"x" * (MAX_VALUE_BYTES + 1))
        assert await store.get(k("bigger")) is None


class TestTransactions:
    async def test_the_index_of_a_transaction_is_that_of_its_writes(self, store: Store, k: Key) -> None:
        """An empty transaction is no error; it has no index, nor have reads alone."""
        assert await store.txn([]) == ([], 0)
        written = await store.txn([ops.create(k("a"), b"1")])
        assert (await store.txn([ops.get(k("a"))])).index == 0 < written.index

    async def test_each_verb_answers_its_entry(self, store: Store, k: Key) -> None:
        """Reads return the entry; writes and checks return it without its value; deletes return nothing."""
        holder = await session(store)
        for name in ("read", "tree/1", "tree/2", "gone", "gone-cas", "doomed/1"):
            await store.put(k(name), name.encode())
        gone_cas = (await present(store, k("gone-cas"))).modify_index
        read = await present(store, k("read"))
        result = await store.txn(
            [
                ops.put(k("set"), b"1", flags=7),
                ops.create(k("cas"), b"2"),
                ops.lock(k("lock"), b"3", holder),
                ops.check_session(k("lock"), holder),
                ops.get(k("read")),
                ops.get_tree(k("tree/")),
                ops.check_index(k("read"), read.modify_index),
                ops.check_not_exists(k("absent")),
                ops.delete(k("gone")),
                ops.delete_cas(k("gone-cas"), gone_cas),
                ops.delete_tree(k("doomed/")),
                ops.unlock(k("lock"), b"4", holder),
            ]
        )
        assert [(entry.key, entry.value) for entry in result.entries] == [
            (k("set"), b""),
            (k("cas"), b""),
            (k("lock"), b""),
            (k("lock"), b""),
            (k("read"), b"read"),
            (k("tree/1"), b"tree/1"),
            (k("tree/2"), b"tree/2"),
            (k("read"), b""),
            (k("lock"), b""),
        ]
        assert result.entries[0].flags == 7
        assert [result.entries[number].session for number in (2, 3, 8)] == [holder, holder, None]
        assert {entry.modify_index for entry in result.entries[:4]} == {result.index}
        left = {entry.key: entry.value for entry in (await store.list(k(""))).entries}
        expected = {"set": b"1", "cas": b"2", "lock": b"4", "read": b"read", "tree/1": b"tree/1", "tree/2": b"tree/2"}
        assert left == {k(name): value for name, value in expected.items()}

    async def test_operations_see_those_before_them(self, store: Store, k: Key) -> None:
        """Within a transaction a later operation works on what the earlier ones did."""
        result = await store.txn(
            [
                ops.create(k("t/a"), b"1"),
                ops.get(k("t/a")),
                ops.put(k("t/b"), b"2"),
                ops.get_tree(k("t/")),
                ops.delete_tree(k("t/")),
                ops.check_not_exists(k("t/a")),
                ops.create(k("t/a"), b"3"),
            ]
        )
        assert [entry.value for entry in result.entries] == [b"", b"1", b"", b"1", b"2", b""]
        assert [entry.key for entry in (await store.list(k(""))).entries] == [k("t/a")]

    async def test_a_transaction_is_all_or_nothing_and_names_every_failure(self, store: Store, k: Key) -> None:
        """One failing operation leaves everything as it was; the refusal names all failed operations by position."""
        await store.put(k("a"), b"v")
        index = (await present(store, k("a"))).modify_index
        before = await store.list(k(""))
        conflict = await refused(
            store,
            ops.put(k("new"), b"v"),
            ops.create(k("a"), b"w"),
            ops.cas(k("absent"), b"w", 5),
            ops.cas(k("a"), b"w", index),
            ops.check_index(k("a"), index),
            ops.check_index(k("absent"), 1),
            ops.check_not_exists(k("new")),
            ops.get(k("absent")),
            ops.delete_cas(k("a"), index - 1),
            ops.delete_cas(k("absent"), 77),
            ops.unlock(k("a"), b"", NO_SESSION),
            ops.delete(k("a")),
        )
        assert not isinstance(conflict, OwnershipLost)
        # `check-index` (4) fails because operation 3 has written the key; `delete-cas` of an absent key (9) succeeds.
        assert [failure.op_index for failure in conflict.failures] == [1, 2, 4, 5, 6, 7, 8, 10]
        assert conflict.failures[0] == OpFailure(1, f'failed to set key "{k("a")}", index is stale')
        assert (conflict.op_index, conflict.reason) == conflict.failures[0]
        assert k("absent") in conflict.failures[3].reason
        assert await store.list(k("")) == before

    async def test_create_is_only_for_what_does_not_exist(self, store: Store, k: Key) -> None:
        """Of two transactions that create the same key, one succeeds."""
        first = await store.txn([ops.create(k("a"), b"first")])
        await refused(store, ops.create(k("a"), b"second"))
        await store.txn([ops.cas(k("a"), b"third", first.entries[0].modify_index)])
        await refused(store, ops.cas(k("a"), b"fourth", first.entries[0].modify_index))
        assert (await present(store, k("a"))).value == b"third"

    async def test_a_delete_is_rolled_back_when_the_record_has_changed(self, store: Store, k: Key) -> None:
        """A deletion guarded by the index that was read does nothing once another client has written."""
        await store.put(k("rc/spec"), b"v1")
        await store.put(k("rc/status"), b"s")
        read = await present(store, k("rc/spec"))
        await store.put(k("rc/spec"), b"v2")
        conflict = await refused(store, ops.delete(k("rc/status")), ops.delete_cas(k("rc/spec"), read.modify_index))
        assert conflict.op_index == 1
        assert await store.keys(k("rc/")) == [k("rc/spec"), k("rc/status")]

    async def test_concurrent_compare_and_set_loses_no_update(self, store: Store, k: Key) -> None:
        """Ten writers that increment one counter by CAS, retrying on refusal, leave the sum."""
        await store.put(k("counter"), b"0")

        async def increment() -> None:
            while True:
                entry = await present(store, k("counter"))
                try:
                    await store.txn([ops.cas(entry.key, str(int(entry.value) + 1).encode(), entry.modify_index)])
                except TxnConflict:
                    continue
                return

        await asyncio.gather(*(increment() for _ in range(10)))
        assert (await present(store, k("counter"))).value == b"10"

    async def test_64_operations_and_no_more(self, store: Store, k: Key) -> None:
        """A full transaction is applied; with one operation more it is refused as a whole."""
        await store.txn([ops.put(k(f"{number}"), b"") for number in range(MAX_TXN_OPS)])
        assert len(await store.keys(k(""))) == MAX_TXN_OPS
        with pytest.raises(TooLarge, match="65"):
            await store.txn([ops.put(k(f"more/{number}"), b"") for number in range(MAX_TXN_OPS + 1)])
        assert await store.keys(k("more/")) == []

    async def test_512_kib_of_request_and_no_more(self, store: Store, k: Key) -> None:
        """A request of exactly the limit, values in base64, is applied; a larger one is refused before it is sent."""
        fits = [ops.put(k(f"{number}"), b"x" * 5900) for number in range(MAX_TXN_OPS)]
        assert 0.98 * MAX_VALUE_BYTES < sum(map(ops.encoded_size, fits)) < MAX_VALUE_BYTES
        await store.txn(fits)
        with pytest.raises(TooLarge):
            await store.txn([ops.put(k(f"more/{number}"), b"x" * 100_000) for number in range(4)])
        assert len(await store.keys(k(""))) == MAX_TXN_OPS

    async def test_a_key_is_needed(self, store: Store, k: Key) -> None:
        """An operation without a key is the caller's mistake."""
        with pytest.raises(Invalid, match="key"):
            await store.txn([ops.put(k("a"), b""), ops.put("", b"v")])
        assert await store.keys(k("")) == []


class TestLocks:
    async def test_a_lock_has_one_holder(self, store: Store, k: Key) -> None:
        """While one session holds a key, another is denied, also in part of a transaction; a plain write is not."""
        first, second = await session(store), await session(store)
        await store.txn([ops.lock(k("lock"), b"first", first)])
        assert (await present(store, k("lock"))).session == first
        conflict = await refused(store, ops.put(k("other"), b""), ops.lock(k("lock"), b"second", second))
        assert conflict.failures == (OpFailure(1, f'failed to lock key "{k("lock")}", lock is already held'),)
        await refused(store, ops.unlock(k("lock"), b"", second))
        await store.put(k("lock"), b"anybody")
        entry = await present(store, k("lock"))
        assert (entry.value, entry.session) == (b"anybody", first)

    async def test_the_fence_holds_before_the_lock_and_after_the_unlock(self, store: Store, k: Key) -> None:
        """`check-session` passes only while its session holds the key; refused, it reports that ownership is lost."""
        holder = await session(store)
        fence = ops.check_session(k("lock"), holder)
        write = ops.put(k("work"), b"done")
        for entry_exists in (False, True):
            if entry_exists:
                await store.put(k("lock"), b"")
            assert isinstance(await refused(store, fence, write), OwnershipLost)
        await store.txn([ops.lock(k("lock"), b"", holder)])
        await store.txn([fence, write])
        await store.txn([ops.unlock(k("lock"), b"", holder)])
        lost = await refused(store, write, fence, ops.get(k("nothing")))
        assert isinstance(lost, OwnershipLost)
        assert [failure.op_index for failure in lost.failures] == [1, 2]

    async def test_the_lock_index_counts_acquisitions(self, store: Store, k: Key) -> None:
        """Each new acquisition raises the lock index, locking again as holder does not, and release keeps it."""
        first, second = await session(store), await session(store)
        seen: list[int] = []
        for holder in (first, first, second):
            await store.txn([ops.lock(k("lock"), str(len(seen)).encode(), holder)])
            seen.append((await present(store, k("lock"))).lock_index)
            if len(seen) > 1:
                await store.txn([ops.unlock(k("lock"), b"history", holder)])
        assert seen == [1, 1, 2]
        entry = await present(store, k("lock"))
        assert (entry.value, entry.session, entry.lock_index) == (b"history", None, 2)

    async def test_a_plain_write_resets_the_lock_index(self, store: Store, k: Key) -> None:
        """As in Consul, `set` and `cas` of a held key keep the holder but reset the lock index to 0."""
        holder = await session(store)
        await store.txn([ops.lock(k("lock"), b"1", holder)])
        await store.txn([ops.put(k("lock"), b"2")])
        entry = await present(store, k("lock"))
        assert (entry.session, entry.lock_index) == (holder, 0)

    async def test_locks_race_and_one_wins(self, store: Store, k: Key) -> None:
        """Of ten sessions that lock a free key at once exactly one holds it."""
        contenders = [await session(store) for _ in range(10)]
        answers = await asyncio.gather(
            *(store.txn([ops.lock(k("lock"), each.encode(), each)]) for each in contenders), return_exceptions=True
        )
        winners = [each for each, answer in zip(contenders, answers, strict=True) if not isinstance(answer, Exception)]
        assert len(winners) == 1
        entry = await present(store, k("lock"))
        assert (entry.session, entry.value) == (winners[0], winners[0].encode())

    @pytest.mark.parametrize("unknown", [NO_SESSION, "no-uuid"])
    async def test_an_unknown_session_gets_no_lock(self, store: Store, k: Key, unknown: str) -> None:
        """Locking for a session that does not exist is reported as such, unless a lost fence is reported first."""
        with pytest.raises(SessionExpired):
            await store.txn([ops.put(k("a"), b""), ops.lock(k("lock"), b"", unknown)])
        both = await refused(store, ops.check_session(k("a"), NO_SESSION), ops.lock(k("lock"), b"", NO_SESSION))
        assert isinstance(both, OwnershipLost)
        assert await store.keys(k("")) == []

    async def test_deleting_a_held_key_frees_it(self, store: Store, k: Key) -> None:
        """A key is gone for its holder, too; the next lock starts with new indexes."""
        first, second = await session(store), await session(store)
        await store.txn([ops.lock(k("lock"), b"", first)])
        await store.delete(k("lock"))
        await store.txn([ops.lock(k("lock"), b"", second)])
        await store.destroy_session(first)
        assert (await present(store, k("lock"))).session == second


class TestSessions:
    async def test_destroying_releases_what_is_held(self, store: Store, k: Key) -> None:
        """The keys stay, with their values and without their holder; destroying again is no error."""
        holder = await session(store)
        await store.txn([ops.lock(k("a"), b"1", holder), ops.lock(k("b"), b"2", holder)])
        before = (await store.list(k(""))).index
        await store.destroy_session(holder)
        await store.destroy_session(holder)
        listing = await store.list(k(""))
        assert [(entry.value, entry.session, entry.lock_index) for entry in listing.entries] == [
            (b"1", None, 1),
            (b"2", None, 1),
        ]
        assert listing.index > before

    async def test_behaviour_delete_takes_the_keys_along(self, store: Store, k: Key) -> None:
        """A session created with behaviour `delete` leaves none of its held keys behind."""
        holder = await session(store, behavior="delete")
        await store.txn([ops.lock(k("held"), b"", holder), ops.put(k("other"), b"")])
        await store.destroy_session(holder)
        assert await store.keys(k("")) == [k("other")]

    async def test_a_session_is_known_while_it_lives(self, store: Store) -> None:
        """Name, TTL and behaviour of a live session are returned. An ended or unknown one is None, and renewing it
        reports to the holder that it holds nothing any more."""
        created = await store.create_session(SessionSpec("a name", ttl=30, check_ttl=20, behavior="delete"))
        assert created.lease == 20
        info = await store.session_info(created.id)
        assert info is not None
        assert (info.id, info.name, info.ttl, info.behavior) == (created.id, "a name", 30.0, "delete")
        await store.destroy_session(created.id)
        for ended in (created.id, NO_SESSION):
            assert await store.session_info(ended) is None
            with pytest.raises(SessionExpired, match=ended):
                await store.renew_session(ended)

    async def test_a_crashed_holder_is_freed_after_its_lease(self, store: Store, k: Key) -> None:
        """Without renewal the lock is free soon after the lease, not before, and watches wake up."""
        started = time.monotonic()
        holder = await session(store, lease=1.0)
        await store.txn([ops.lock(k("lock"), b"v", holder)])
        index = (await store.list(k("lock"))).index
        freed = await store.watch(k("lock"), index, 20)
        assert time.monotonic() - started >= 1.0
        assert (freed.entries[0].session, freed.entries[0].value) == (None, b"v")
        with pytest.raises(SessionExpired):
            await store.renew_session(holder)

    async def test_renewing_keeps_a_session_alive(self, store: Store, k: Key) -> None:
        """Renewed within its lease, a session outlives many leases."""
        holder = await session(store, lease=1.5)
        await store.txn([ops.lock(k("lock"), b"", holder)])
        for _ in range(4):
            await asyncio.sleep(0.5)
            await store.renew_session(holder)
        assert (await present(store, k("lock"))).session == holder
        await store.destroy_session(holder)

    async def test_a_lock_delay_keeps_others_out_for_a_while(self, store: Store, k: Key) -> None:
        """A key freed by the end of a session with a lock-delay can be written, but not locked until the delay has
        passed."""
        first, second = await session(store, lock_delay=1.0), await session(store)
        await store.txn([ops.lock(k("lock"), b"", first)])
        started = time.monotonic()
        await store.destroy_session(first)
        conflict = await refused(store, ops.get(k("nothing")), ops.lock(k("lock"), b"", second))
        assert conflict.failures == (OpFailure(1, f'failed to lock key "{k("lock")}" due to lock delay'),)
        await store.put(k("lock"), b"still writable")
        async with asyncio.timeout(60):
            while True:
                try:
                    await store.txn([ops.lock(k("lock"), b"", second)])
                except TxnConflict:
                    await asyncio.sleep(0.02)
                else:
                    break
        assert time.monotonic() - started > 0.9


class TestWatches:
    async def test_a_watch_that_is_behind_is_answered_at_once(self, store: Store, k: Key) -> None:
        """Index 0, or one below the prefix's, returns the present state."""
        await store.put(k("a"), b"1")
        old = (await store.list(k(""))).index
        await store.put(k("a"), b"2")
        async with asyncio.timeout(20):
            for index in (0, old):
                listing = await store.watch(k(""), index, 60)
                assert [entry.value for entry in listing.entries] == [b"2"]
                assert listing.index > old

    async def test_every_kind_of_change_wakes(self, store: Store, k: Key) -> None:
        """A creation, an update, a lock, a release, a deletion, a deleted tree and the end of a session are changes."""
        holder = await session(store)
        await store.put(k("a/old"), b"")
        changes: list[Callable[[], Awaitable[object]]] = [
            lambda: store.put(k("a/new"), b""),
            lambda: store.put(k("a/new"), b"changed"),
            lambda: store.txn([ops.lock(k("a/new"), b"changed", holder)]),
            lambda: store.txn([ops.unlock(k("a/new"), b"changed", holder)]),
            lambda: store.delete(k("a/new")),
            lambda: store.txn([ops.lock(k("a/locked"), b"", holder)]),
            lambda: store.destroy_session(holder),
            lambda: store.txn([ops.delete_tree(k("a/"))]),
        ]
        for change in changes:
            watch = await watching(store, k("a/"))
            await change()
            async with asyncio.timeout(20):
                await watch
        assert await store.keys(k("")) == []

    async def test_changes_elsewhere_do_not_wake(self, store: Store, k: Key) -> None:
        """A watch sleeps through changes outside its prefix."""
        await store.put(k("a/1"), b"")
        watch = await watching(store, k("a/"))
        for name in ("a", "a0", "b/1"):
            await store.put(k(name), b"")
        await asyncio.sleep(BLINK)
        assert not watch.done()
        await store.put(k("a/2"), b"")
        async with asyncio.timeout(20):
            assert await watch == [k("a/1"), k("a/2")]

    async def test_an_absent_prefix_can_be_watched(self, store: Store, k: Key) -> None:
        """Its index is at least 1, so that a client can wait for the first key."""
        listing = await store.list(k("later/"))
        assert listing.entries == []
        assert listing.index >= 1
        watch = asyncio.create_task(store.watch(k("later/"), listing.index, 30))
        await store.put(k("later/first"), b"")
        async with asyncio.timeout(20):
            while not (listing := await watch).entries:
                watch = asyncio.create_task(store.watch(k("later/"), listing.index, 30))
        assert [entry.key for entry in listing.entries] == [k("later/first")]

    async def test_the_index_of_a_prefix_never_falls(self, store: Store, k: Key) -> None:
        """Deletions count: after each change the prefix has an index above all before."""
        seen = 0
        for change in (
            store.put(k("a/1"), b""),
            store.put(k("a/2"), b""),
            store.delete(k("a/2")),
            store.put(k("a/2"), b""),
            store.txn([ops.delete_tree(k("a/"))]),
            store.put(k("a/3"), b""),
        ):
            await change
            index = (await store.list(k("a/"))).index
            assert index > seen
            seen = index

    async def test_a_watch_without_news_ends_after_its_wait(self, store: Store, k: Key) -> None:
        """The present state is returned again, with the same index."""
        await store.put(k("a"), b"v")
        before = await store.list(k(""))
        started = time.monotonic()
        async with asyncio.timeout(60):
            assert await store.watch(k(""), before.index, 0.4) == before
        assert time.monotonic() - started >= 0.4

    @pytest.mark.parametrize("separator", ["", "/"])
    async def test_keys_can_be_watched(self, store: Store, k: Key, separator: str) -> None:
        """Every kind of change wakes, with the index that the tree has then; the answer has the keys alone, each folder
        as one with a separator."""
        await store.put(k("a/1"), b"")
        await store.put(k("b"), b"")
        keys, index = await store.watch_keys(k(""), 0, 30, separator=separator)
        assert keys == ([k("a/"), k("b")] if separator else [k("a/1"), k("b")])
        assert index == (await store.list(k(""))).index
        for change in (store.put(k("a/1"), b"changed"), store.put(k("a/2"), b""), store.delete(k("a/1"))):
            watch = asyncio.create_task(store.watch_keys(k(""), index, 30, separator=separator))
            await asyncio.sleep(BLINK)
            assert not watch.done()
            await change
            async with asyncio.timeout(20):
                keys, index = await watch
            assert index == (await store.list(k(""))).index
        assert keys == ([k("a/"), k("b")] if separator else [k("a/2"), k("b")])
        started = time.monotonic()
        assert await store.watch_keys(k(""), index, 0.4, separator=separator) == (keys, index)
        assert time.monotonic() - started >= 0.4

    async def test_many_watchers_of_one_prefix_all_wake(self, store: Store, k: Key) -> None:
        """Twenty watchers see one write."""
        await store.put(k("a"), b"")
        index = (await store.list(k(""))).index
        watches = [asyncio.create_task(store.watch(k(""), index, 30)) for _ in range(20)]
        await asyncio.sleep(BLINK)
        await store.put(k("a"), b"new")
        async with asyncio.timeout(20):
            for listing in await asyncio.gather(*watches):
                assert [entry.value for entry in listing.entries] == [b"new"]
