"""The longest time one turn held a test's event loop, in processor time, so that a busy machine does not count."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import AsyncIterator

from tests.support.waiting import background


class Holds:
    """`most`: seconds of processor time between two looks of a task that is always ready."""

    def __init__(self) -> None:
        self.most = 0.0


@contextlib.asynccontextmanager
async def held() -> AsyncIterator[Holds]:
    """Watch the loop; garbage collections, which are due to the whole test session, are excluded."""
    holds = Holds()

    async def watch() -> None:
        before = time.thread_time()
        while True:
            await asyncio.sleep(0.001)
            now = time.thread_time()
            holds.most, before = max(holds.most, now - before), now

    gc.disable()
    try:
        async with background(watch()):
            yield holds
    finally:
        gc.enable()
