"""The guard: whatever a plugin does, its call ends with an answer or a typed error."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from controllers.tasks.engine.guard import (
    BadAnswer,
    NoGuardMetrics,
    PluginGuard,
    PluginHung,
    PluginRaised,
    PluginTimedOut,
    Verb,
)
from tests.support.waiting import loop_time


class Counted(NoGuardMetrics):
    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.holds: list[str] = []

    def called(self, plugin: str, verb: Verb, seconds: float, outcome: str) -> None:
        self.outcomes[outcome] += 1

    def held(self, plugin: str, seconds: float) -> None:
        self.holds.append(plugin)


def guard_with(metrics: Counted | None = None, **options: Any) -> PluginGuard:
    return PluginGuard(**{"timeout": 10.0, "metrics": metrics, "clock": loop_time, **options})


@pytest.mark.looptime
async def test_an_answer_is_returned() -> None:
    async def answers() -> int:
        await asyncio.sleep(5.0)
        return 7

    metrics = Counted()
    assert await guard_with(metrics).call("job", "handle", "e", answers, int) == 7
    assert metrics.outcomes == {"ok": 1}


@pytest.mark.parametrize("error", [RuntimeError("boom"), asyncio.CancelledError()])
async def test_an_exception_is_an_error_with_its_text(error: Any) -> None:
    async def raises() -> int:
        raise error

    with pytest.raises(PluginRaised, match=r"job\.handle of e"):
        await guard_with().call("job", "handle", "e", raises, int)


async def test_another_type_is_an_error() -> None:
    async def answers() -> Any:
        return "nonsense"

    with pytest.raises(BadAnswer, match="returned str instead of int"):
        await guard_with().call("job", "handle", "e", answers, int)


async def test_a_plain_function_is_an_error() -> None:
    with pytest.raises(BadAnswer, match="async def"):
        await guard_with().call("job", "handle", "e", cast("Any", lambda: 7), int)


@pytest.mark.looptime
async def test_a_call_that_hangs_is_cancelled() -> None:
    cancelled = []

    async def hangs() -> int:
        try:
            await asyncio.sleep(1e6)
        except asyncio.CancelledError:
            cancelled.append(loop_time())
            raise
        return 7

    metrics = Counted()
    with pytest.raises(PluginTimedOut, match="not finished after 10 s"):
        await guard_with(metrics).call("job", "handle", "e", hangs, int)
    assert cancelled == [10.0]
    assert metrics.outcomes == {"PluginTimedOut": 1}


@pytest.mark.looptime
async def test_a_call_that_ignores_its_cancellation_is_left_behind() -> None:
    """The error carries the task, so that the execution is not called again before it has ended."""

    async def ignores() -> int:
        while loop_time() < 60.0:
            try:
                await asyncio.sleep(60.0 - loop_time())
            except asyncio.CancelledError:
                continue
        return 7

    with pytest.raises(PluginHung) as caught:
        await guard_with().call("job", "handle", "e", ignores, int)
    assert loop_time() == pytest.approx(11.0)
    assert not caught.value.task.done()
    await caught.value.task
    assert loop_time() == pytest.approx(60.0)


@pytest.mark.looptime
async def test_the_end_of_the_engine_cancels_the_call() -> None:
    ended = []

    async def works() -> int:
        try:
            await asyncio.sleep(1e6)
        finally:
            ended.append(True)
        return 7

    task = asyncio.create_task(guard_with(timeout=0.0).call("job", "handle", "e", works, int))
    await asyncio.sleep(1.0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == [True]


async def test_a_turn_that_holds_the_loop_is_logged_with_the_plugins_name() -> None:
    async def holds() -> int:
        time.sleep(0.02)
        await asyncio.sleep(0)
        return 7

    metrics = Counted()
    with capture_logs() as logs:
        assert await guard_with(metrics, hold_limit=0.01).call("greedy", "handle", "e", holds, int) == 7
    assert metrics.holds == ["greedy"]
    assert [entry["call"] for entry in logs if entry["log_level"] == "error"] == ["greedy.handle of e"]


async def test_the_watchdog_names_a_plugin_while_it_holds_the_loop() -> None:
    async def holds() -> int:
        for _ in range(1000):
            if not logs:
                time.sleep(0.005)
        return 7

    guard = guard_with(hold_limit=60.0)
    with capture_logs() as logs, guard.watchdog(after=0.01):
        assert await guard.call("greedy", "handle", "e", holds, int) == 7
    assert [entry["call"] for entry in logs] == ["greedy.handle of e"]
    assert "test_guard.py" in logs[0]["at"]
