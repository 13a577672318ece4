"""Executions in the shards of other engines: watched, a few at once, and never lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import structlog

from controllers.tasks.engine.foreign import LOOK, WATCHES, ForeignExecutions
from store.embedded.store import EmbeddedStore
from store.kv.protocol import Listing, Unavailable
from store.schema.keys import Keys
from store.schema.records import encode
from store.schema.tasks import TaskState
from tests.support.waiting import background, loop_time

pytestmark = pytest.mark.looptime

KEYS = Keys()


class Others(EmbeddedStore):
    """What other engines write. `watched`: queries in flight; `most`: at once."""

    def __init__(self) -> None:
        super().__init__()
        self.watched = self.most = 0
        self.is_cut_off = False

    async def watch(self, prefix: str, index: int, wait: float) -> Listing:
        if self.is_cut_off:
            raise Unavailable("cut off")
        self.watched += 1
        self.most = max(self.most, self.watched)
        try:
            return await super().watch(prefix, index, wait)
        finally:
            self.watched -= 1

    async def write(self, execution: str, step: str, phase: str = "PhaseRunning") -> None:
        state = TaskState(step=step, phase=phase)  # type: ignore[arg-type]
        await self.put(KEYS.task_state(execution), encode(state))


@asynccontextmanager
async def following(store: Others, wanted: set[str]) -> AsyncIterator[tuple[ForeignExecutions, dict[str, float]]]:
    ended: dict[str, float] = {}
    foreign = ForeignExecutions(
        store, KEYS, lambda: wanted, lambda each: ended.setdefault(each, loop_time()), structlog.get_logger()
    )
    async with background(foreign.run()):
        yield foreign, ended


async def test_an_end_is_reported_at_once_and_a_new_one_takes_the_place() -> None:
    """Of more executions than may be watched, the others are read."""
    store = Others()
    wanted = {f"e{number:02}" for number in range(WATCHES + 2)}
    for each in wanted:
        await store.write(each, "running")
    async with following(store, wanted) as (foreign, ended):
        await asyncio.sleep(3 * LOOK)
        assert {foreign.status(each) for each in wanted} == {"pending"}
        delays = list[float]()
        for each in sorted(wanted):
            began = loop_time()
            await store.write(each, "done", "PhaseSuccess")
            await asyncio.sleep(LOOK + 0.1)
            delays.append(ended[each] - began)
        assert sum(delay < 0.01 for delay in delays) >= WATCHES
        assert max(delays) <= LOOK
        assert {foreign.status(each) for each in wanted} == {"succeeded"}
        wanted.clear()
        wanted.add("new")
        foreign.look()
        await store.write("new", "running")
        await asyncio.sleep(0.3)
        began = loop_time()
        await store.write("new", "done", "PhasePermanentFailure")
        await asyncio.sleep(0.3)
        assert foreign.status("new") == "failed"
        assert ended["new"] - began < 0.25
    assert store.most == WATCHES
    assert store.watched == 0


async def test_what_is_not_wanted_any_more_is_not_watched() -> None:
    store, wanted = Others(), {"one"}
    await store.write("one", "running")
    async with following(store, wanted) as (foreign, _):
        await asyncio.sleep(0.1)
        assert store.watched == 1
        wanted.clear()
        await asyncio.sleep(LOOK)
        assert store.watched == 0
        assert foreign.status("one") is None


async def test_a_store_that_was_cut_off_and_an_unreadable_state_lose_no_end() -> None:
    store = Others()
    store.is_cut_off = True
    await store.put(KEYS.task_state("one"), b"{")
    async with following(store, {"one"}) as (foreign, ended):
        await asyncio.sleep(3 * LOOK)
        store.is_cut_off = False
        await asyncio.sleep(LOOK)
        assert foreign.status("one") is None
        await store.write("one", "done", "PhaseSuccess")
        await asyncio.sleep(0.1)
        assert list(ended) == ["one"]
