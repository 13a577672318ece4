"""A rewritten history of the store is noticed although no watch reports it; an unchanged one costs no write."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator

import pytest

from store.embedded.store import EmbeddedStore
from store.kv import ops
from store.kv.protocol import Denied, Listing, SessionSpec, Unavailable
from store.kv.view import MAX_BACKOFF, Change, TreeView
from store.schema.history import BEAT, ECHOES, GRACE, INTERVAL, LINKS, Belief, HistoryWatch
from store.schema.keys import Keys
from store.schema.records import History, decode, encode
from tests.support.consul.scripted_store import ScriptedStore
from tests.support.waiting import loop_time

pytestmark = pytest.mark.looptime

KEYS = Keys("r")
MEMBER = KEYS.farm("farm-a")
SOON = INTERVAL + GRACE + 0.1  # seconds


class Deaf(ScriptedStore):
    """A store whose blocking queries never notice anything, as Consul's after a restore. `cut` ends those under way."""

    def __init__(self, inner: EmbeddedStore) -> None:
        super().__init__(inner)
        self._ended = asyncio.Event()

    def end_watches(self) -> None:
        self._ended.set()
        self._ended = asyncio.Event()

    async def watch(self, prefix: str, index: int, wait: float) -> Listing:
        before = await self.inner.list(prefix)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait):
                await self._ended.wait()
        return Listing(before.entries, index)


class Process:
    """A view under `r/rcs/0a/` and what watches the history for it."""

    def __init__(self, store: ScriptedStore) -> None:
        self.changes: list[Change[bytes]] = []
        self.contradicted = 0
        self.rewritten = 0
        self.index = 0  # of the record `r/mine` that this process believes in; 0: none
        self.view: TreeView[bytes] = TreeView(
            store, "r/rcs/0a/", lambda _, value: value, on_change=self.changes.extend, clock=loop_time
        )
        self.history = HistoryWatch(
            store,
            KEYS,
            lambda: [self.view],
            beliefs=lambda: [Belief("r/mine", self.index, self._note_contradicted)] if self.index else [],
            on_rewritten=self._note_rewritten,
            clock=loop_time,
            rng=random.Random(0),
        )

    @property
    def shown(self) -> dict[str, bytes]:
        return {key: record.value for key, record in self.view.records.items()}

    def _note_contradicted(self) -> None:
        self.contradicted += 1
        self.index = 0

    def _note_rewritten(self) -> None:
        self.rewritten += 1


@pytest.fixture
async def store() -> AsyncIterator[Deaf]:
    scripted = Deaf(EmbeddedStore())
    yield scripted
    await scripted.close()


@contextlib.asynccontextmanager
async def at_work(store: Deaf) -> AsyncIterator[Process]:
    """A process that knows two records and three links."""
    await store.put("r/rcs/0a/web/spec", b"one")
    await store.put("r/rcs/0a/web/owner", b"two")
    await chain(store, "a", "b", "c")
    process = Process(store)
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(process.view.run()), tasks.create_task(process.history.run())]
        await process.view.synced()
        await asyncio.sleep(SOON)
        yield process
        for task in running:
            task.cancel()


async def chain(store: ScriptedStore, *links: str) -> None:
    await store.inner.put(KEYS.history, encode(History(list(links))))


async def links(store: ScriptedStore) -> list[str]:
    entry = await store.inner.get(KEYS.history)
    return decode(History, entry.key, entry.value).links if entry else []


@pytest.mark.parametrize(("deleted", "rewritten"), [("r/rcs/", 0), ("r/", 1)])
async def test_a_parent_that_was_deleted_is_noticed(store: Deaf, deleted: str, rewritten: int) -> None:
    """One key of a view is looked for, and it is gone with all the others. Without its record the history is another
    one."""
    async with at_work(store) as process:
        await store.inner.txn([ops.delete_tree(deleted)])
        await asyncio.sleep(SOON)
        assert (process.shown, process.rewritten) == ({}, rewritten)


async def test_a_history_without_the_last_link_is_another_one(store: Deaf) -> None:
    """Everything is read and announced again, at once and some seconds later, for servers that lag behind."""
    async with at_work(store) as process:
        await store.inner.put("r/rcs/0a/web/owner", b"older")
        await chain(store, "a", "b")
        await asyncio.sleep(SOON)
        assert process.shown == {"r/rcs/0a/web/spec": b"one", "r/rcs/0a/web/owner": b"older"}
        assert [change.key for change in process.changes[-2:]] == ["r/rcs/0a/web/owner", "r/rcs/0a/web/spec"]
        assert process.rewritten == 1
        await store.inner.put("r/rcs/0a/web/owner", b"of the server that lagged")
        await asyncio.sleep(ECHOES[0] + INTERVAL)
        assert process.shown["r/rcs/0a/web/owner"] == b"of the server that lagged"
        await asyncio.sleep(60.0)
        assert process.rewritten == 1


async def test_a_chain_that_goes_on_is_the_same_history(store: Deaf) -> None:
    """New links, and a record that can't be read, cost nothing."""
    async with at_work(store) as process:
        reads = store.calls["list"]
        await chain(store, "b", "c", "d")
        await asyncio.sleep(SOON)
        await store.inner.put(KEYS.history, b"nonsense")
        await asyncio.sleep(SOON)
        await chain(store, "d", "e")
        await asyncio.sleep(SOON)
        assert (process.rewritten, store.calls["list"]) == (0, reads)


async def test_watches_that_the_store_cuts_short_reveal_a_restore(store: Deaf) -> None:
    """A restore that undoes only the last beat leaves the chain intact."""
    async with at_work(store) as process:
        await store.inner.put("r/rcs/0a/web/owner", b"older")
        store.end_watches()
        await asyncio.sleep(SOON)
        assert process.shown["r/rcs/0a/web/owner"] == b"older"
        assert process.rewritten == 1


async def test_a_record_of_ours_is_compared_with_what_the_store_has(store: Deaf) -> None:
    """A replaced or deleted record is contradicted; an unchanged one, or one that is being written, is not."""
    async with at_work(store) as process:
        await store.put("r/mine", b"ours")
        process.index = await index(store, "r/mine")
        await asyncio.sleep(3 * SOON)
        assert process.contradicted == 0
        await store.put("r/mine", b"older")
        await asyncio.sleep(SOON)
        assert process.contradicted == 1
        process.index = await index(store, "r/mine")
        store.keep_back("txn")
        await asyncio.sleep(INTERVAL)
        await store.inner.put("r/mine", b"our next write")
        process.index = await index(store, "r/mine")
        store.deliver("txn")
        await asyncio.sleep(3 * SOON)
        assert process.contradicted == 1
        await store.delete("r/mine")
        await asyncio.sleep(SOON)
        assert process.contradicted == 2


async def test_looking_writes_nothing(store: Deaf) -> None:
    """One transaction every two seconds, of reads alone, however many views there are."""
    async with at_work(store):
        before = (await store.list("r/")).index
        transactions = store.calls["txn"]
        await asyncio.sleep(100 * INTERVAL)
        assert 100 <= store.calls["txn"] - transactions <= 125
        await store.put("elsewhere", b"")
        assert (await store.list("elsewhere")).index == (await store.list("r/")).index + 1 == before + 1


async def test_a_store_that_is_away_is_nothing_to_conclude_from(store: Deaf) -> None:
    """The history is checked again once the store is back."""
    async with at_work(store) as process:
        store.faults["txn"] = Unavailable("away")
        await asyncio.sleep(5 * SOON)
        assert process.rewritten == 0
        store.faults.clear()
        await chain(store, "x")
        await asyncio.sleep(SOON)
        assert process.rewritten == 1


async def test_a_view_that_cannot_read_is_behind_and_believes_nothing(
    store: Deaf, capsys: pytest.CaptureFixture[str]
) -> None:
    """What others removed during an outage is no lost data: the view reads everything again anyway."""
    async with at_work(store) as process:
        store.faults["list"] = Unavailable("away")
        process.view.doubt()
        await asyncio.sleep(1)
        assert process.view.error is not None
        await store.inner.txn([ops.delete_tree("r/rcs/0a/")])
        await asyncio.sleep(3 * SOON)
        assert "lost data" not in capsys.readouterr().out
        store.faults.clear()
        await asyncio.sleep(MAX_BACKOFF)
        assert (process.shown, process.rewritten) == ({}, 0)


async def test_the_leading_farm_lengthens_the_chain(store: Deaf) -> None:
    """A link per beat, as long as it leads and is a member; the oldest go. One that can't be read begins again."""
    session = await member(store)
    history, leads = Process(store).history, [True]
    keeping = asyncio.create_task(history.keep(MEMBER, session, lambda: leads[0]))
    await asyncio.sleep((LINKS + 5.5) * BEAT)
    assert len(set(await links(store))) == LINKS
    await store.inner.put(KEYS.history, b"nonsense")
    await asyncio.sleep(BEAT)
    assert len(await links(store)) == 1
    leads[0] = False
    await asyncio.sleep(5 * BEAT)
    assert len(await links(store)) == 1
    leads[0] = True
    await store.inner.destroy_session(session)
    await asyncio.sleep(5 * BEAT)
    assert len(await links(store)) == 1
    keeping.cancel()


async def test_a_farm_that_may_not_write_the_history_goes_on(store: Deaf, capsys: pytest.CaptureFixture[str]) -> None:
    """A missing permission is logged once."""
    store.faults["txn"] = Denied("Permission denied: key rcfarm/history")
    keeping = asyncio.create_task(Process(store).history.keep(MEMBER, "s", lambda: True))
    await asyncio.sleep(10 * BEAT)
    assert not keeping.done()
    keeping.cancel()
    assert capsys.readouterr().out.count("Could not write the history") == 1


async def member(store: ScriptedStore) -> str:
    session = (await store.inner.create_session(SessionSpec("farm", ttl=86400.0, check_ttl=None))).id
    await store.inner.txn([ops.lock(MEMBER, b"{}", session)])
    return session


async def index(store: ScriptedStore, key: str) -> int:
    entry = await store.inner.get(key)
    assert entry is not None
    return entry.modify_index
