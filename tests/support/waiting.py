"""Clocks, and waiting for a condition."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


def loop_time() -> float:
    return asyncio.get_running_loop().time()


async def until(condition: Callable[[], object], *, within: float = 30.0, every: float = 0.005) -> None:
    """Wait until the condition holds, looking again after `every` seconds. Raises `TimeoutError`."""
    async with asyncio.timeout(within):
        while not condition():
            await asyncio.sleep(every)


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
