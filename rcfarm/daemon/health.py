"""What a daemon reports about itself: the conditions of its readiness, and whether it makes progress.

`rcfarm.daemon.health_server` shows them over HTTP; what has them imports no HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple


class Condition(NamedTuple):
    """A condition of readiness. `reason`: why it does not hold, and what it waits for; if it holds, a note for
    operators.
    """

    name: str
    holds: bool
    reason: str = ""


class Health(NamedTuple):
    """The functions that the endpoints call. `stalled`: why the daemon makes no progress, or "". `conditions`: those of
    readiness."""

    stalled: Callable[[], str]
    conditions: Callable[[], Sequence[Condition]]


class StallDetector:
    """Measures for how long a counter of finished work has not moved while there was work.

    `stall_after`: seconds without progress before work counts as stuck. `clock`: monotonic, in seconds.
    """

    def __init__(self, stall_after: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._stall_after, self._clock = stall_after, clock
        self._seen: int | None = None
        self._moved = clock()

    def stalled_for(self, completed: int, *, busy: bool) -> float:
        """Return the seconds without progress if they exceed `stall_after`, else 0.0. Call it every few seconds."""
        now = self._clock()
        if not busy or completed != self._seen:
            self._seen, self._moved = completed, now
        silent = now - self._moved
        return silent if silent > self._stall_after else 0.0
