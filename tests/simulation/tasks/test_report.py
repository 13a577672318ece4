"""What engines report of themselves, as operators' commands read it."""

from __future__ import annotations

import asyncio

import pytest

from controllers.tasks.api.phase import Transition, do_transition, phase_info_running, phase_info_success
from controllers.tasks.api.plugin import TaskExecutionContext
from rcfarm.operations.tasks import Tasks, states_of
from store.embedded.store import EmbeddedStore
from store.schema.keys import Keys
from tests.support.tasks.engines import ScriptedPlugin, World, engine_on, running

pytestmark = pytest.mark.looptime


async def test_an_engine_reports_what_it_has_in_hand_and_then_rests(
    store: EmbeddedStore, keys: Keys, world: World
) -> None:
    """Within seconds after a change; in ten minutes without one nothing is written."""
    may_end = asyncio.Event()

    async def handle(context: TaskExecutionContext) -> Transition:
        if may_end.is_set():
            return do_transition(phase_info_success())
        return do_transition(phase_info_running(0), poll_after=1e6)

    async def load() -> tuple[int, dict[str, int], dict[str, int]]:
        [engine] = await Tasks(store, keys).engines()
        return engine.member.load.owned, states_of([engine.member.load]), engine.member.load.waits

    await world.quota("gpu", 2)
    engine = engine_on(store, keys, ScriptedPlugin(handle))
    async with running(engine):
        for number in range(5):
            await world.submit(f"e{number}", quotas={"gpu": 1})
        await asyncio.sleep(10)
        assert await load() == (5, {"waiting": 3, "running": 2}, {"LimitReached": 3})
        entry = await store.get(keys.engine("engine-a"))
        await asyncio.sleep(600)
        assert await store.get(keys.engine("engine-a")) == entry

        may_end.set()
        for number in range(5):
            engine.enqueue(f"e{number}")
        await world.until_done(*(f"e{number}" for number in range(5)))
        await asyncio.sleep(10)
        assert await load() == (0, {}, {})
