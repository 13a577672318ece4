"""Wall clocks that jump: an engine goes on, whatever the time was when it wrote what it waits for."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from controllers.tasks.api.phase import (
    Transition,
    do_transition,
    phase_info_running,
    phase_info_success,
)
from controllers.tasks.api.plugin import TaskExecutionContext
from store.embedded.store import EmbeddedStore
from store.schema.keys import Keys
from store.schema.quota import Rate
from tests.support.tasks import engines
from tests.support.tasks.engines import JobPlugin, Remote, ScriptedPlugin, World, engine_on, running
from tests.support.waiting import loop_time

pytestmark = pytest.mark.looptime(noop_cycles=0)

HOURS = 3600.0


@pytest.fixture
def jump(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return a function that sets the wall clock of all engines forward, or back."""
    shift = 0.0

    def jump(seconds: float) -> None:
        nonlocal shift
        shift += seconds

    monkeypatch.setattr(engines, "wall", lambda: engines.EPOCH + loop_time() + shift)
    return jump


@pytest.mark.parametrize("by", [-3 * HOURS, 3 * HOURS])
async def test_polls_go_on(
    store: EmbeddedStore, keys: Keys, world: World, jump: Callable[[float], None], by: float
) -> None:
    async with running(engine_on(store, keys, JobPlugin(Remote()))):
        await world.begin("polled", "job", config={"seconds": 20.0, "poll": 1.0})
        jump(by)
        assert (await world.until_done("polled")).phase == "PhaseSuccess"
    assert loop_time() < 30.0


async def test_a_back_off_ends_after_a_clock_was_set_back(
    store: EmbeddedStore, keys: Keys, world: World, jump: Callable[[float], None]
) -> None:
    calls = []

    async def fails_twice(context: TaskExecutionContext) -> Transition:
        calls.append(loop_time())
        if len(calls) < 3:
            raise RuntimeError("boom")
        return do_transition(phase_info_success())

    async with running(engine_on(store, keys, ScriptedPlugin(fails_twice))):
        await world.submit("failing")
        await world.until_state("failing", lambda state: state.round_errors == 2)
        jump(-3 * HOURS)
        assert (await world.until_done("failing")).phase == "PhaseSuccess"
    assert loop_time() < 60.0


async def test_an_attempt_follows_after_a_clock_was_set_back(
    store: EmbeddedStore, keys: Keys, world: World, jump: Callable[[float], None]
) -> None:
    async with running(engine_on(store, keys, JobPlugin(Remote()))):
        await world.submit("again", "job", retries=1, config={"outcomes": ["user", "success"], "seconds": 1.0})
        await world.until_state("again", lambda state: state.attempt == 1)
        jump(-3 * HOURS)
        assert (await world.until_done("again")).phase == "PhaseSuccess"
    assert loop_time() < 60.0


async def test_a_rate_limit_permits_grants_after_a_clock_was_set_back(
    store: EmbeddedStore, keys: Keys, world: World, jump: Callable[[float], None]
) -> None:
    await world.quota("gpu", 10, rate=Rate(1, 10.0))
    async with running(engine_on(store, keys, JobPlugin(Remote()))):
        for number in range(3):
            await world.submit(f"rated-{number}", "job", quotas={"gpu": 1}, config={"seconds": 1.0})
        await world.until_done("rated-0")
        jump(-3 * HOURS)
        await world.until_done("rated-1", "rated-2")
    assert 10.0 < loop_time() < 60.0


async def test_a_deadline_that_a_jump_brings_ends_the_execution(
    store: EmbeddedStore, keys: Keys, world: World, jump: Callable[[float], None]
) -> None:
    async def runs(context: TaskExecutionContext) -> Transition:
        return do_transition(phase_info_running(0), poll_after=1.0)

    async with running(engine_on(store, keys, ScriptedPlugin(runs))):
        await world.begin("late", active_deadline=HOURS)
        jump(2 * HOURS)
        state = await world.until_done("late")
    assert state.error is not None
    assert state.error.code == "ActiveDeadlineExceeded"
