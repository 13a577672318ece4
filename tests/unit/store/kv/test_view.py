"""TreeView: a cached, decoded copy of a prefix that is never behind its own process and never believes nonsense."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
from structlog.testing import capture_logs

from store.embedded.store import EmbeddedStore
from store.kv import ops
from store.kv.protocol import BadRecord, Denied, Invalid, KeyListing, Listing, Op, SessionSpec, StoreError, Unavailable
from store.kv.view import (
    BUSY_LIMIT,
    CATCH_UP_LIMIT,
    CATCH_UP_MOST,
    CATCH_UP_SHARE,
    EMPTY_PAUSE,
    ENTRY_COST,
    FEW,
    MAX_BACKOFF,
    OWN_ANSWER,
    REFRESH_COST,
    ROUNDING,
    Change,
    RefreshBudget,
    TreeView,
    Watched,
)
from tests.support.consul.scripted_store import ScriptedStore
from tests.support.waiting import background, loop_time, until

pytestmark = pytest.mark.looptime


def decode(key: str, value: bytes) -> str:
    if value == b"nonsense":
        raise BadRecord(key, "nonsense")
    return value.decode()


class Reader:
    """A view under `a/` and the changes that it reported."""

    def __init__(self, store: ScriptedStore, **options: object) -> None:
        self.store = store
        self.changes: list[Change[str]] = []
        self.complaints: list[str] = []
        self.view: TreeView[str] = TreeView(
            store,
            "a/",
            on_change=self.changes.extend,
            on_bad=lambda error: self.complaints.append(error.key),
            clock=loop_time,
            **{"decode": decode, **options},  # type: ignore[arg-type]
        )

    @property
    def values(self) -> dict[str, str]:
        return {key: record.value for key, record in self.view.records.items()}

    async def write(self, *writing: Op, origin: str = "") -> None:
        """Commit, and show it to the view."""
        self.view.apply(await self.store.txn(writing), writing, origin=origin)

    async def shows(self, values: dict[str, str]) -> None:
        await until(lambda: self.values == values, every=0.001)


@contextlib.asynccontextmanager
async def watching(store: ScriptedStore, **options: object) -> AsyncIterator[Reader]:
    watched = Reader(store, **options)
    async with background(watched.view.run()):
        await watched.view.synced()
        yield watched


@pytest.fixture
async def store() -> AsyncIterator[ScriptedStore]:
    scripted = ScriptedStore(EmbeddedStore())
    yield scripted
    await scripted.close()


async def test_the_tree_and_every_change_of_it_are_shown(store: ScriptedStore) -> None:
    """The first batch is the whole tree; afterwards creations, changes and deletions come as they happen."""
    await store.put("a/1", b"one")
    await store.put("b/1", b"elsewhere")
    async with watching(store) as watched:
        assert watched.values == {"a/1": "one"}
        await store.put("a/2", b"two")
        await watched.shows({"a/1": "one", "a/2": "two"})
        await store.put("a/1", b"uno")
        await watched.shows({"a/1": "uno", "a/2": "two"})
        await store.delete("a/2")
        await watched.shows({"a/1": "uno"})
    kinds = [(change.key, change.old is None, change.new is None) for change in watched.changes]
    assert kinds == [("a/1", True, False), ("a/2", True, False), ("a/1", False, False), ("a/2", False, True)]


async def test_a_lock_is_part_of_the_record(store: ScriptedStore) -> None:
    """The holder of a key, its loss, and how often the key was locked are seen; a key
    without a session is not locked."""
    session = await store.create_session(SessionSpec("holder"))
    await store.txn([ops.lock("a/1", b"one", session.id)])
    async with watching(store) as watched:
        record = watched.view.records["a/1"]
        assert (record.session, record.lock_index) == (session.id, 1)
        await store.destroy_session(session.id)
        await until(lambda: watched.view.records["a/1"].session is None)
        assert watched.view.records["a/1"].lock_index == 1


async def test_only_what_changed_is_decoded_again(store: ScriptedStore) -> None:
    """A change of one record costs one decoding, not one per record."""
    decoded: list[str] = []

    def counting(key: str, value: bytes) -> str:
        decoded.append(key)
        return value.decode()

    for number in range(10):
        await store.put(f"a/{number}", b"x")
    async with watching(store, decode=counting) as watched:
        decoded.clear()
        await store.put("a/3", b"y")
        await until(lambda: watched.values["a/3"] == "y")
    assert decoded == ["a/3"]


async def test_own_writes_are_visible_at_once(store: ScriptedStore) -> None:
    """An own transaction is shown without waiting for the watch, and reported once. delete-tree takes every known
    record under its prefix, the undecodable ones, too."""
    for key, value in {"a/old": b"x", "a/x/1": b"one", "a/x/2": b"nonsense"}.items():
        await store.put(key, value)
    async with watching(store) as watched:
        store.keep_back("watch")
        watched.changes.clear()
        writing = [ops.put("a/1", b"one"), ops.delete("a/old"), ops.delete_tree("a/x/"), ops.put("b/1", b"not ours")]
        await watched.write(*writing)
        assert watched.values == {"a/1": "one"}
        assert watched.view.bad == {}
        store.deliver("watch")
        await store.put("a/2", b"two")
        await watched.shows({"a/1": "one", "a/2": "two"})
        assert [change.key for change in watched.changes] == ["a/1", "a/old", "a/x/1", "a/x/2", "a/2"]


async def test_a_change_names_its_writer(store: ScriptedStore) -> None:
    """A writer that passes its name finds it in the changes that its write causes, and in no others; listeners get it,
    too."""
    heard: list[tuple[set[str], str]] = []
    async with watching(store) as watched:
        with watched.view.listening(lambda keys, origin: heard.append((set(keys), origin))):
            await watched.write(ops.put("a/1", b"one"), origin="web")
            await store.put("a/2", b"two")
            await watched.shows({"a/1": "one", "a/2": "two"})
    assert [(change.key, change.origin) for change in watched.changes] == [("a/1", "web"), ("a/2", "")]
    assert heard == [({"a/1"}, "web"), ({"a/2"}, "")]


async def test_a_late_answer_does_not_undo_an_own_write(store: ScriptedStore) -> None:
    """An answer that the store gave before our write, and that arrives after it, takes nothing back."""
    async with watching(store) as watched:
        store.keep_back("watch")
        await store.put("a/1", b"one")
        await store.kept("watch")
        await watched.write(ops.put("a/2", b"two"))
        await watched.write(ops.put("a/1", b"ours"))
        watched.changes.clear()
        store.deliver("watch")
        await asyncio.sleep(0.05)
        assert watched.values == {"a/1": "ours", "a/2": "two"}
        assert watched.changes == []


async def test_a_late_answer_does_not_bring_back_what_we_deleted(store: ScriptedStore) -> None:
    """A deletion of ours stays a deletion when an answer from before it arrives."""
    await store.put("a/1", b"one")
    async with watching(store) as watched:
        store.keep_back("watch")
        await store.put("a/2", b"two")
        await store.kept("watch")
        await watched.write(ops.delete("a/1"), ops.put("b/1", b"an index to know it by"))
        watched.changes.clear()
        store.deliver("watch")
        await watched.shows({"a/2": "two"})
        assert [change.key for change in watched.changes] == ["a/2"]


async def test_a_late_commit_does_not_undo_what_came_after_it(store: ScriptedStore) -> None:
    """When the watch is faster than the answer to our own transaction, a later write of another process stands. Of two
    own writes of a key the later one counts, whichever answer comes first."""
    async with watching(store) as watched:
        writing = [ops.put("a/1", b"ours")]
        result = await store.txn(writing)
        await store.put("a/1", b"theirs")
        await watched.shows({"a/1": "theirs"})
        watched.view.apply(result, writing)
        assert watched.values == {"a/1": "theirs"}
        await store.delete("a/1")
        await watched.shows({})
        watched.view.apply(result, writing)
        assert watched.values == {}
        store.keep_back("watch")
        first, second = [ops.put("a/1", b"first")], [ops.put("a/1", b"second")]
        earlier, later = await store.txn(first), await store.txn(second)
        watched.view.apply(later, second)
        watched.view.apply(earlier, first)
        assert watched.values == {"a/1": "second"}


async def test_a_written_value_that_the_writer_knows_is_not_decoded(store: ScriptedStore) -> None:
    """The writer's own object is shown, with the index and the lock of its write; other values are decoded."""
    known = "not what the bytes say"
    async with watching(store) as watched:
        session = await store.create_session(SessionSpec("holder"))
        writing = [ops.lock("a/1", b"one", session.id), ops.put("a/2", b"two")]
        result = await store.txn(writing)
        watched.view.apply(result, writing, known={b"one": known})
        assert watched.values == {"a/1": known, "a/2": "two"}
        record = watched.view.records["a/1"]
        assert (record.session, record.lock_index, record.modify_index) == (session.id, 1, result.index)


@pytest.mark.parametrize(
    ("bad", "reason"), [(b"nonsense", "nonsense"), (b"\xff", "its decoder failed: UnicodeDecodeError")]
)
async def test_a_bad_record_is_isolated_and_is_no_deletion(store: ScriptedStore, bad: bytes, reason: str) -> None:
    """Whatever the decoder raises: the last good value stays, the neighbours change, the next good value is shown. It
    is reported when it turns up, not with every refresh. Its deletion is a change: a task may wait for it."""
    await store.put("a/1", b"one")
    async with watching(store) as watched:
        await store.put("a/1", bad)
        await store.put("a/2", b"two")
        await watched.shows({"a/1": "one", "a/2": "two"})
        assert list(watched.view.bad) == watched.complaints == ["a/1"]
        assert reason in watched.view.bad["a/1"].reason
        assert all(change.new is not None for change in watched.changes)
        await store.put("a/1", b"good again")
        await watched.shows({"a/1": "good again", "a/2": "two"})
        assert watched.view.bad == {}
        await store.put("a/3", bad)
        await until(lambda: watched.view.bad)
        await store.put("a/2", b"due")
        await watched.shows({"a/1": "good again", "a/2": "due"})
        assert watched.complaints == ["a/1", "a/3"]
        await store.delete("a/3")
        await until(lambda: watched.view.bad == {})
        assert watched.changes[-1] == Change("a/3", None, None)


async def test_a_lock_is_seen_to_end_with_a_value_that_cannot_be_read(store: ScriptedStore) -> None:
    """The last good value stays, but without its holder: who holds a key does not depend on what is written there."""
    holder = (await store.create_session(SessionSpec("holder", ttl=10.0, check_ttl=None))).id
    async with watching(store) as watched:
        await store.txn([ops.lock("a/1", b"good", holder)])
        await until(lambda: "a/1" in watched.values)

        await store.txn([ops.unlock("a/1", b"nonsense", holder)])
        await until(lambda: watched.complaints)

        record = watched.view.records["a/1"]
        assert (record.value, record.session) == ("good", None)
        assert watched.changes[-1].new == record


class Restored(ScriptedStore):
    """A store whose tree can be replaced by another one, as a restore from a snapshot does."""

    def restore(self, inner: EmbeddedStore) -> None:
        self.inner.answer_watches()
        self.inner = inner


async def test_a_restored_store_is_read_again() -> None:
    """After the index went backwards the view shows what is there now, also where an index that it
    knows stands for something else, and it hears of later changes."""
    store, other = Restored(EmbeddedStore()), EmbeddedStore()
    for key in ("a/1", "a/2", "a/3"):
        await store.put(key, b"before")
    await other.put("a/1", b"after")
    async with watching(store) as watched:
        assert watched.view.records["a/1"].modify_index == (await other.get("a/1")).modify_index  # type: ignore[union-attr]
        store.restore(other)
        await watched.shows({"a/1": "after"})
        await store.put("a/4", b"later")
        await watched.shows({"a/1": "after", "a/4": "later"})


async def test_what_other_writes_got_the_same_index_while_the_store_was_away() -> None:
    """It came back with older data, and new writes have raised its index again: a record of which only the value is
    another one is shown, and announced; what is equal is neither, and a bad record may be good now."""
    store, other = Restored(EmbeddedStore()), EmbeddedStore()
    for key, value in (("a/1", b"before"), ("a/2", b"same"), ("a/3", b"nonsense")):
        await store.put(key, value)
    for key, value in (("a/1", b"after"), ("a/2", b"same"), ("a/3", b"good"), ("a/4", b"new")):
        await other.put(key, value)
    async with watching(store) as watched:
        assert watched.values == {"a/1": "before", "a/2": "same"}
        same = watched.view.records["a/1"].modify_index
        store.faults |= {"watch": Unavailable("away"), "list": Unavailable("away")}
        store.restore(other)
        await until(lambda: watched.view.error)
        store.faults.clear()
        await watched.shows({"a/1": "after", "a/2": "same", "a/3": "good", "a/4": "new"})
        assert watched.view.records["a/1"].modify_index == same
        assert "a/2" not in [change.key for change in watched.changes[2:]]


class Lagging(ScriptedStore):
    """A store of which some answers come from a server that lags behind."""

    stale: Listing | None = None

    async def watch(self, prefix: str, index: int, wait: float) -> Listing:
        listing = await super().watch(prefix, index, wait)
        if self.stale:
            listing, self.stale = self.stale, None
        return listing


async def test_a_lagging_server_is_not_believed() -> None:
    """An answer from before what was seen already changes nothing: a consistent read decides."""
    store = Lagging(EmbeddedStore())
    await store.put("a/1", b"one")
    old = await store.list("a/")
    await store.put("a/2", b"two")
    async with watching(store) as watched:
        watched.changes.clear()
        store.stale = old
        await store.put("a/3", b"three")
        await watched.shows({"a/1": "one", "a/2": "two", "a/3": "three"})
        assert [change.key for change in watched.changes] == ["a/3"]


@pytest.mark.parametrize("what", ["tree", "key"])
async def test_a_consistent_read_is_current_and_never_turns_the_view_back(store: ScriptedStore, what: str) -> None:
    """After a refresh the view shows all that was written or deleted before; one that the watch has overtaken shows
    nothing old."""
    async with watching(store) as watched:

        async def refresh() -> None:
            await (watched.view.refresh() if what == "tree" else watched.view.refresh_key("a/1"))

        store.keep_back("watch")
        for write, values in ((store.put("a/1", b"one"), {"a/1": "one"}), (store.delete("a/1"), dict[str, str]())):
            await write
            await refresh()
            assert watched.values == values
        store.deliver("watch")
        for write, values in ((store.put("a/1", b"two"), {"a/1": "two"}), (store.delete("a/1"), dict[str, str]())):
            store.keep_back("list")
            reading = asyncio.create_task(refresh())
            await store.kept("list")
            await write
            await watched.shows(values)
            store.deliver("list")
            await reading
            assert watched.values == values


async def test_refresh_key_shows_one_key(store: ScriptedStore) -> None:
    """A key, and only that, is brought up to date, and the late answer of the watch does not undo it."""
    await store.put("a/1", b"one")
    async with watching(store) as watched:
        store.keep_back("watch")
        await store.put("a/10", b"ten")
        await store.kept("watch")
        await store.put("a/1", b"uno")
        await watched.view.refresh_key("a/1")
        assert watched.values == {"a/1": "uno"}
        store.deliver("watch")
        await watched.shows({"a/1": "uno", "a/10": "ten"})
        assert [change.new.value for change in watched.changes if change.new] == ["one", "uno", "ten"]


@pytest.mark.parametrize("error", [Unavailable("away"), Denied("no"), Invalid("what?")])
async def test_a_failing_store_ends_no_view(store: ScriptedStore, error: StoreError) -> None:
    """After any error of the store the view keeps its data, reports the error, and is current again soon after."""
    await store.put("a/1", b"one")
    async with watching(store) as watched:
        store.faults = dict.fromkeys(("list", "watch"), error)
        await store.put("a/2", b"two")
        while watched.view.error is None:
            await store.inner.put("a/2", b"two")
            store.inner.answer_watches()
            await asyncio.sleep(0.01)
        contact = watched.view.last_contact
        await asyncio.sleep(60.0)
        assert watched.view.error is error
        assert watched.values["a/1"] == "one"
        assert watched.view.last_contact == contact
        store.faults = {}
        await store.put("a/3", b"three")
        began = loop_time()
        await until(lambda: "a/3" in watched.values)
        assert loop_time() - began <= MAX_BACKOFF + 0.02
        assert watched.view.error is None


async def test_a_store_that_is_away_is_one_warning(store: ScriptedStore) -> None:
    """An outage is logged once, whatever the number of views, and so is its end; a missing permission is logged per
    view."""
    with capture_logs() as logs:
        async with AsyncExitStack() as stack:
            views = [await stack.enter_async_context(watching(store)) for _ in range(5)]
            for error in (Unavailable("away"), Denied("no")):
                store.faults = dict.fromkeys(("list", "watch"), error)
                await store.inner.put("a/1", repr(error).encode())
                await until(lambda: all(watched.view.error for watched in views))
                store.faults = {}
                await until(lambda: not any(watched.view.error for watched in views))
    logged = [(line["log_level"], line["event"]) for line in logs if line["log_level"] != "debug"]
    assert logged == [
        ("warning", "Could not read the store; cached data may be stale"),
        ("info", "The store is available again; all views are current"),
        *[("warning", "Could not refresh the view; its data may be stale")] * 5,
        *[("info", "The view is current again")] * 5,
    ]


async def test_retries_back_off(store: ScriptedStore) -> None:
    """A store that is unavailable for an hour is asked about every five seconds, not in a busy loop."""
    store.faults = {"list": Unavailable("away")}
    view: TreeView[str] = TreeView(store, "a/", decode, clock=loop_time)
    task = asyncio.create_task(view.run())
    await asyncio.sleep(3600.0)
    task.cancel()
    assert 3600 / MAX_BACKOFF <= store.calls["list"] <= 2 * 3600 / MAX_BACKOFF + 20


async def test_an_answer_makes_the_next_pause_short(store: ScriptedStore) -> None:
    """An outage of a moment costs a moment, also after a long one."""
    async with watching(store) as watched:
        for value, outage in (("1", 60.0), ("2", 0.01)):
            store.faults = {"list": Unavailable("away"), "watch": Unavailable("away")}
            await store.inner.put("a/x", value.encode())  # ends the watch under way
            await asyncio.sleep(outage)
            store.faults = {}
            await store.inner.put("a/y", value.encode())
            since = loop_time()
            await watched.shows({"a/x": value, "a/y": value})
        assert loop_time() - since < 1.0


async def test_an_empty_tree_is_not_read_with_every_write(store: ScriptedStore) -> None:
    """Consul ends a watch of an empty tree with each write elsewhere: the view pauses, but a doubt ends the pause."""
    async with watching(store) as watched:
        for _ in range(200):
            await store.put("a/1", b"one")
            await store.delete("a/1")
            await asyncio.sleep(0.01)
        assert 2 <= store.calls["watch"] <= 2.0 / EMPTY_PAUSE + 2
        await store.put("a/1", b"two")
        began = loop_time()
        watched.view.doubt()
        await watched.shows({"a/1": "two"})
        assert loop_time() - began < 0.05


async def test_own_writes_are_not_read_back(store: ScriptedStore) -> None:
    """A view of the tree's `INDEX` reads the tree only for what others write, and that at once."""
    async with watching(store, watched=Watched.INDEX) as watched:
        reads = store.calls["list"]
        for number in range(10):
            await watched.write(ops.put(f"a/{number % 3}", b"ours"))
            await asyncio.sleep(0.01)
        assert store.calls["list"] == reads
        began = loop_time()
        await store.put("a/x", b"theirs")
        await until(lambda: "a/x" in watched.values, every=0.001)
        assert loop_time() - began < 0.01
        await store.delete("a/x")
        await watched.shows({f"a/{number}": "ours" for number in range(3)})
        assert loop_time() - began < 0.02


async def test_what_own_writes_conceal_is_read_later(store: ScriptedStore) -> None:
    """What another process wrote before the watch could say so, and an own write after it, shows the own write's index:
    the tree is read once, as soon as its cost is a small share of the time."""
    async with watching(store, watched=Watched.INDEX) as watched:
        store.keep_back("watch_keys")
        await watched.write(ops.put("a/0", b"ours"))
        await store.kept("watch_keys")
        await store.put("a/1", b"theirs")
        await watched.write(ops.put("a/2", b"ours"))
        reads, began = store.calls["list"], loop_time()
        store.deliver("watch_keys")
        await watched.shows({"a/0": "ours", "a/1": "theirs", "a/2": "ours"})
        most = (REFRESH_COST + 3 * ENTRY_COST) / CATCH_UP_SHARE
        assert most * 0.8 - 0.01 <= loop_time() - began <= most + 0.01
        await asyncio.sleep(60.0)
        assert store.calls["list"] == reads + 1


@pytest.mark.parametrize(("entries", "limit"), [(3000, CATCH_UP_LIMIT), (15000, 15000 * ENTRY_COST / CATCH_UP_MOST)])
@pytest.mark.parametrize("busy", [False, True])
async def test_what_a_stream_of_own_writes_conceals_is_read_within_seconds(
    store: ScriptedStore, entries: int, limit: float, busy: bool
) -> None:
    """Also in a tree of thousands of entries, and while the reader is always busy. Only a very large one is later."""
    for number in range(entries):
        await store.put(f"a/{number}", b"old")
    working = False
    store.keep_back("watch_keys")
    async with watching(store, watched=Watched.INDEX, busy=lambda: working) as watched:
        await watched.write(ops.put("a/0", b"ours"))
        await store.kept("watch_keys")
        await store.put("a/x", b"theirs")
        await watched.write(ops.put("a/1", b"ours"))
        working, began = busy, loop_time()
        store.deliver("watch_keys")
        while "a/x" not in watched.values:
            await watched.write(ops.put("a/2", str(loop_time()).encode()))
            await asyncio.sleep(0.02)
        assert limit * 0.8 - 0.1 <= loop_time() - began <= limit + 0.1


async def test_the_time_without_a_watch_counts(store: ScriptedStore) -> None:
    """A busy reader's view begins to watch late; what was written meanwhile waits no longer for that."""
    for number in range(3000):
        await store.put(f"a/{number}", b"old")
    async with watching(store, watched=Watched.INDEX, busy=lambda: True) as watched:
        await watched.write(ops.put("a/0", b"ours"))
        await store.put("a/x", b"theirs")
        await watched.write(ops.put("a/1", b"ours"))
        await until(lambda: "a/x" in watched.values)
        assert loop_time() <= BUSY_LIMIT + 0.1


class Early(ScriptedStore):
    """A store whose waits end a little early, as timers of a coarser clock than the view's do."""

    async def watch_keys(self, prefix: str, index: int, wait: float, *, separator: str = "") -> KeyListing:
        assert self.calls["watch_keys"] < 50, "the view asks without end"
        return await super().watch_keys(prefix, index, max(0.0, wait - ROUNDING / 2), separator=separator)


async def test_a_timer_that_fires_early_is_not_set_again() -> None:
    """What is left of the wait for what own writes conceal may be too short to pass: the tree is read then."""
    store = Early(EmbeddedStore())
    async with watching(store, watched=Watched.INDEX) as watched:
        await until(lambda: store.calls["watch_keys"] == 1)
        reads = store.calls["list"]
        await watched.write(ops.put("a/0", b"ours"))
        await until(lambda: store.calls["list"] > reads)
    await store.close()


@pytest.mark.parametrize("entries", [100, 5000])
async def test_the_answer_to_an_own_write_may_be_late(store: ScriptedStore, entries: int) -> None:
    """The watch can be faster than the answer to the write that ended it, which is awaited for a tenth of the time that
    reading the tree would take."""
    for number in range(entries):
        await store.put(f"a/{number}", b"old")
    pause = min(OWN_ANSWER, (REFRESH_COST + ENTRY_COST * entries) / 10)
    async with watching(store, watched=Watched.INDEX) as watched:
        await until(lambda: store.calls["watch_keys"] == 1)
        reads = store.calls["list"]
        writing = [ops.put("a/0", b"ours")]
        result = await store.inner.txn(writing)
        await asyncio.sleep(pause * 0.9)
        watched.view.apply(result, writing)
        await asyncio.sleep(pause)
        assert store.calls["list"] == reads
        await store.put("a/1", b"theirs")
        await asyncio.sleep(pause * 0.9)
        assert store.calls["list"] == reads
        await asyncio.sleep(pause * 0.2)
        assert watched.values["a/1"] == "theirs"


@pytest.mark.parametrize("count", [1, FEW, FEW + 1])
async def test_few_new_keys_are_read_alone(store: ScriptedStore, count: int) -> None:
    """A view of `KEYS` shows new keys without reading the tree, up to `FEW` of them. Later the tree is read once, for
    what they may conceal."""
    await store.put("a/old", b"old")
    async with watching(store, watched=Watched.KEYS) as watched:
        reads = store.calls["list"]
        writing = [ops.put(f"a/{number}", b"new") for number in range(count)]
        await store.txn(writing)
        await watched.shows({"a/old": "old"} | {op.key: "new" for op in writing})
        alone = count <= FEW
        assert store.calls["list"] - reads == (count if alone else 1)
        await asyncio.sleep(60.0)
        assert store.calls["list"] - reads == (count + 1 if alone else 1)


async def test_changed_and_deleted_keys_are_seen_beside_new_ones(store: ScriptedStore) -> None:
    """What else has changed when a new key is seen is read at once if the keys or their indexes show it."""
    for name in ("a/gone", "a/changed"):
        await store.put(name, b"old")
    async with watching(store, watched=Watched.KEYS) as watched:
        store.keep_back("watch_keys")
        await store.put("a/first", b"new")
        await store.kept("watch_keys")
        await store.put("a/new", b"new")
        await store.delete("a/gone")
        began = loop_time()
        store.deliver("watch_keys")
        values = {"a/changed": "old", "a/first": "new", "a/new": "new"}
        await watched.shows(values)
        await store.put("a/changed", b"new")
        await watched.shows(values | {"a/changed": "new"})
        assert loop_time() - began < 0.1


async def test_while_own_writes_are_expected_no_watch_is_begun(store: ScriptedStore) -> None:
    """A reader at work is not interrupted by its own writes; what another process writes is seen after `BUSY_LIMIT`
    at the latest, or as soon as the work is done."""
    busy = True
    async with watching(store, watched=Watched.INDEX, busy=lambda: busy) as watched:
        began = loop_time()
        for number in range(10):
            await watched.write(ops.put(f"a/{number}", b"ours"))
            await asyncio.sleep(0.1)
        assert store.calls["watch_keys"] == 0
        await store.put("a/x", b"theirs")
        await until(lambda: "a/x" in watched.values)
        assert BUSY_LIMIT <= loop_time() - began <= BUSY_LIMIT + 0.3
        await watched.write(ops.put("a/0", b"again"))
        await asyncio.sleep(0.5)
        busy = False
        await store.put("a/y", b"theirs")
        began = loop_time()
        await until(lambda: "a/y" in watched.values)
        assert loop_time() - began <= 0.3


async def test_a_doubt_does_not_wait_for_expected_writes(store: ScriptedStore) -> None:
    """A rewritten history is read at once, however busy the reader is."""
    async with watching(store, watched=Watched.INDEX, busy=lambda: True) as watched:
        await watched.write(ops.put("a/0", b"ours"))
        await asyncio.sleep(0.3)
        await store.put("a/1", b"theirs")
        began = loop_time()
        watched.view.doubt()
        await watched.shows({"a/0": "ours", "a/1": "theirs"})
        assert loop_time() - began < 0.05


def test_a_burst_is_paid_from_what_was_saved_and_the_rest_by_the_share() -> None:
    """Small trees are read as often as they change, until the burst is spent. A tree that always changes is refreshed
    so often that the cost stays within the share of the time."""
    now = 0.0
    budget = RefreshBudget(share=0.2, burst=0.5, clock=lambda: now)
    refreshes = 0
    while budget.delay() == 0.0:
        budget.spend(0)
        refreshes += 1
    assert refreshes == pytest.approx(0.5 / REFRESH_COST, abs=1.5)
    refreshes = 0
    while now < 1000.0:
        now += budget.delay()
        budget.spend(10_000)
        refreshes += 1
    assert refreshes * (REFRESH_COST + 10_000 * ENTRY_COST) == pytest.approx(0.2 * 1000.0, rel=0.01)
    now += 3600.0
    assert budget.delay() == 0.0


async def test_a_large_tree_that_always_changes_is_not_read_all_the_time(store: ScriptedStore) -> None:
    """The view itself keeps the pace: many changes are seen together."""
    for number in range(500):
        await store.put(f"a/{number}", b"x")
    budget = RefreshBudget(share=0.05, burst=0.01, clock=loop_time)
    async with watching(store, budget=budget) as watched:
        reads = store.calls["watch"]
        for number in range(1000):
            await store.put("a/1", str(number).encode())
            await asyncio.sleep(0.01)
        seconds, cost = 10.0, REFRESH_COST + 500 * ENTRY_COST
        assert store.calls["watch"] - reads <= seconds * 0.05 / cost + 3
        await asyncio.sleep(1.0)
        assert watched.values["a/1"] == "999"


class Rewound(ScriptedStore):
    """A store that comes back with older data: without the key, and with indexes far below those of before."""

    def __init__(self, inner: EmbeddedStore) -> None:
        super().__init__(inner)
        self.listing: Listing | None = None

    async def list(self, prefix: str, *, consistent: bool = False) -> Listing:
        return await self._call("list", self._older) if self.listing else await super().list(prefix)

    async def watch(self, prefix: str, index: int, wait: float) -> Listing:
        return await self._call("watch", self._sleeps) if self.listing else await super().watch(prefix, index, wait)

    async def _older(self) -> Listing:
        assert self.listing is not None
        return self.listing

    async def _sleeps(self) -> Listing:
        await asyncio.sleep(300.0)
        return await self._older()


async def test_own_writes_of_a_lost_history_hide_nothing() -> None:
    """A view that has been in error, or whose data is doubted, shows what a consistent read has, not what its process
    remembers having written."""
    store = Rewound(EmbeddedStore())
    await store.put("a/1", b"one")
    old = await store.list("a/")
    async with watching(store) as watched:
        store.keep_back("watch")
        await watched.write(ops.put("a/1", b"uno"), ops.put("a/2", b"due"))
        assert watched.values == {"a/1": "uno", "a/2": "due"}
        store.listing = old
        store.deliver("watch")
        watched.view.doubt(from_scratch=True)
        await watched.shows({"a/1": "one"})
    store.listing = None
    async with watching(store) as watched:
        store.faults["watch"] = Unavailable("away")
        await store.inner.put("a/1", b"wakes the watch")
        await until(lambda: watched.view.error)
        await watched.write(ops.put("a/3", b"tre"))
        store.listing = old
        store.faults.clear()
        await watched.shows({"a/1": "one"})


async def test_doubt_ends_the_watch_that_is_under_way(store: ScriptedStore) -> None:
    """The tree is read again at once, and the watch goes on from what was read. A cancelled view has no watch in the
    store any more."""
    await store.put("a/1", b"one")
    async with watching(store) as watched:
        await until(lambda: store.inner.watcher_count == 1)
        reads = store.calls["list"]
        began = loop_time()
        watched.view.doubt()
        await until(lambda: store.calls["list"] == reads + 1)
        assert loop_time() - began < 0.1
        await store.put("a/2", b"two")
        await watched.shows({"a/1": "one", "a/2": "two"})
        await until(lambda: store.inner.watcher_count == 1)
    assert store.inner.watcher_count == 0
