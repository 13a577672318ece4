"""Turns of the event loop: no task holds the loop for long.

Whatever computes for longer than a few milliseconds without waiting for anything (a worker that goes through a queue, a
view that reads a large answer) calls `give_way` between its steps. It returns at once while this turn of the loop is
young; later the caller continues in the next turn, after timers and I/O: leases are renewed and probes answered
however much there is to do. All tasks of a loop share one slice per turn, so that a hundred workers don't take a
hundred slices.
"""

from __future__ import annotations

import asyncio
import time
from weakref import WeakKeyDictionary

SLICE = 0.005  # seconds of each turn that callers of `give_way` may use


class _Turn:
    """The present turn of one loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._began: float | None = None

    def is_spent(self) -> bool:
        now = time.perf_counter()
        if self._began is None:
            self._began = now
            self._loop.call_soon(self._end)  # runs in the next turn
            return False
        return now - self._began >= SLICE

    def _end(self) -> None:
        self._began = None


_turns: WeakKeyDictionary[asyncio.AbstractEventLoop, _Turn] = WeakKeyDictionary()


async def give_way() -> None:
    """Let other tasks run, if this turn of the running loop has used its slice; otherwise return at once."""
    loop = asyncio.get_running_loop()
    turn = _turns.get(loop)
    if turn is None:
        turn = _turns[loop] = _Turn(loop)
    while turn.is_spent():  # noqa: ASYNC110  # each look is one turn of the loop, which is what is waited for
        await asyncio.sleep(0)
