"""Clocks, and waiting for a condition."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

T = TypeVar("T")


def loop_time() -> float:
    return asyncio.get_running_loop().time()


async def until(condition: Callable[[], Any], what: str = "", *, within: float = 60.0, every: float = 0.005) -> Any:
    """Wait for the condition, which may be a coroutine function. Return its first true value.

    It is seen at most `every` seconds, or a hundredth of the waiting time, late. Fails with `what` after `within`
    seconds.
    """
    began = loop_time()
    try:
        async with asyncio.timeout(within):
            while True:
                answer = condition()
                if asyncio.iscoroutine(answer):
                    answer = await answer
                if answer:
                    return answer
                await asyncio.sleep(max(every, (loop_time() - began) / 100))
    except TimeoutError:
        raise AssertionError(f"not within {within:g} s: {what}") from None


@asynccontextmanager
async def background(work: Coroutine[Any, Any, T]) -> AsyncIterator[asyncio.Task[T]]:
    """Run `work` as a task for the duration of the block, which raises the error that ended it, if any."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


class Clock:
    """Seconds that a test sets."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


class SkewedClock:
    """A monotonic clock, `skew` seconds ahead of what its timers have seen: the process was stopped for that long."""

    skew = 0.0

    def __call__(self) -> float:
        return loop_time() + self.skew
