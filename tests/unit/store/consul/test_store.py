"""More watches than a ConsulStore has connections for, against a served embedded store."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple

import pytest

from store.consul.store import ConsulSettings, ConsulStore
from store.embedded.consul_api.app import serve_consul_api
from store.embedded.store import EmbeddedStore
from store.kv.protocol import Listing
from store.kv.view import TreeView
from tests.support.consul.server import opened
from tests.support.waiting import until

LONG = 600.0  # seconds: a watch that sleeps through its wait fails its test


class Query(NamedTuple):
    """A query that reached the store. `above`: the index to answer from, 0 for one that does not block."""

    prefix: str
    above: int
    wait: float


class Embedded(EmbeddedStore):
    """`queries`: all that were asked, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.queries: list[Query] = []

    async def watch(self, prefix: str, index: int, wait: float) -> Listing:
        self.queries.append(Query(prefix, index, wait))
        return await super().watch(prefix, index, wait)

    def polled(self, prefix: str) -> list[Query]:
        return [query for query in self.queries if query.prefix == f"{prefix}/" and not query.above]

    def blocked(self, prefix: str) -> list[Query]:
        return [query for query in self.queries if query.prefix == f"{prefix}/" and query.above]


@pytest.fixture
async def embedded() -> AsyncIterator[Embedded]:
    store = Embedded()
    for prefix in "abc":
        await store.put(f"{prefix}/x", b"old")
    yield store
    await store.close()


@asynccontextmanager
async def one_watch_at_a_time(
    embedded: Embedded, clock: Callable[[], float] = lambda: 0.0
) -> AsyncIterator[ConsulStore]:
    """A client with one connection for watches and one for calls."""
    async with serve_consul_api(embedded) as address:
        settings = ConsulSettings(url=f"http://{address}", max_connections=2, max_watches=1)
        async with opened(settings, clock=clock) as store:
            yield store


def watching(store: ConsulStore, embedded: Embedded, prefix: str) -> asyncio.Task[Listing]:
    return asyncio.create_task(store.watch(f"{prefix}/", embedded.state.index_of(f"{prefix}/"), LONG))


async def test_a_watch_that_had_to_poll_answers_only_at_a_change(embedded: Embedded) -> None:
    """It gets the connection of a watch that ends, sleeps on there, and answers with an index above its own."""
    async with one_watch_at_a_time(embedded) as store:
        first = watching(store, embedded, "a")
        await until(lambda: embedded.blocked("a"))
        before = embedded.state.index_of("b/")
        second = watching(store, embedded, "b")
        await until(lambda: embedded.polled("b"))
        await embedded.put("a/x", b"new")
        assert (await first).entries[0].value == b"new"
        await until(lambda: embedded.blocked("b") or second.done())
        assert not second.done(), "nothing has changed under its prefix, and its wait is not over"
        await embedded.put("b/x", b"new")
        async with asyncio.timeout(20):
            listing = await second
        assert (listing.index > before, listing.entries[0].value) == (True, b"new")


async def test_polling_counts_towards_the_wait(embedded: Embedded) -> None:
    """A watch that gets a connection late blocks only for what is left of its wait."""
    now = 0.0
    async with one_watch_at_a_time(embedded, lambda: now) as store:
        first = watching(store, embedded, "a")
        await until(lambda: embedded.blocked("a"))
        second = watching(store, embedded, "b")
        await until(lambda: embedded.polled("b"))
        now = LONG - 0.01
        await embedded.put("a/x", b"new")
        await first
        async with asyncio.timeout(20):
            assert (await second).index == embedded.state.index_of("b/")
    assert embedded.blocked("b")[-1].wait == pytest.approx(0.01)


async def test_a_cancelled_watch_passes_its_connection_on(embedded: Embedded) -> None:
    """Watches that are cancelled, blocking or still polling, never use up the connections for watches."""
    async with one_watch_at_a_time(embedded) as store:
        blocking = watching(store, embedded, "a")
        await until(lambda: embedded.blocked("a"))
        polling, last = watching(store, embedded, "b"), watching(store, embedded, "c")
        await until(lambda: embedded.polled("b") and embedded.polled("c"))
        for watch in (polling, blocking):
            watch.cancel()
            await asyncio.wait([watch])
        await until(lambda: embedded.blocked("c"))
        last.cancel()
        await asyncio.wait([last])


def shown_by(views: list[TreeView[bytes]]) -> dict[str, bytes]:
    return {key: record.value for view in views for key, record in view.records.items()}


async def test_views_that_share_connections_miss_nothing(embedded: Embedded) -> None:
    """Eight views on two connections for watches: what is written while they come and go, all show in the end."""
    rng = random.Random(7)
    async with serve_consul_api(embedded) as address:
        store = ConsulStore(ConsulSettings(url=f"http://{address}", max_connections=4, max_watches=2))
        views = [TreeView(store, f"{n}/", lambda _, value: value) for n in range(8)]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(view.run()) for view in views]
            for number in range(80):
                await embedded.put(f"{rng.randrange(8)}/{rng.randrange(5)}", str(number).encode())
                await asyncio.sleep(rng.choice([0.0, 0.005, 0.02]))
            written = {key: entry.value for key, entry in embedded.state.entries.items() if key[0].isdecimal()}
            await until(lambda: shown_by(views) == written)
            for task in tasks:
                task.cancel()
        await store.close()
