"""Turns of the event loop: no task holds the loop for long.

Code that computes for longer than a few milliseconds without waiting (a worker that goes through a queue, a view that
reads a large answer) calls `give_way` between its steps. It returns at once while the slice of this turn lasts; later
the caller continues in the next turn, after timers and I/O, so that leases are renewed and probes answered under any
load. All tasks of a loop share one slice per turn, so that a hundred workers don't take a hundred slices.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable
from typing import TypeVar
from weakref import WeakKeyDictionary

SLICE = 0.005  # seconds of each turn that callers of `give_way` may use
WOKEN = 16  # tasks that may continue in a turn: about as many as fit into its slice


T = TypeVar("T")


class _Turn:
    """The present turn of one loop, and the tasks that wait for a later one, in order."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._began: float | None = None
        self._ends = False  # `_end` is scheduled
        self._waiters: deque[asyncio.Future[None]] = deque()

    def is_spent(self) -> bool:
        now = time.perf_counter()
        if self._began is None:
            self._began = now
            self._schedule()
            return False
        return now - self._began >= SLICE

    async def wait(self) -> None:
        """Wait for a later turn."""
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._waiters.append(waiter)
        await waiter

    def _schedule(self) -> None:
        if not self._ends:
            self._ends = True
            self._loop.call_soon(self._end)  # runs in the next turn

    def _end(self) -> None:
        self._began, self._ends = None, False
        for _ in range(min(WOKEN, len(self._waiters))):
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
        if self._waiters:
            self._schedule()


_turns: WeakKeyDictionary[asyncio.AbstractEventLoop, _Turn] = WeakKeyDictionary()


async def give_way() -> None:
    """Let other tasks run, if this turn of the running loop has used its slice; otherwise return at once."""
    loop = asyncio.get_running_loop()
    turn = _turns.get(loop)
    if turn is None:
        turn = _turns[loop] = _Turn(loop)
    while turn.is_spent():
        await turn.wait()


async def in_turns(items: Iterable[T], *, step: int = 500) -> AsyncIterator[T]:
    """Yield the items, giving way after every `step` of them."""
    for number, item in enumerate(items):
        if number % step == 0:
            await give_way()
        yield item
