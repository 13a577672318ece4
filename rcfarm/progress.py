"""Whether work moves on: what the watchdog is fed by."""

from __future__ import annotations

import time
from collections.abc import Callable


class Progress:
    """Looks at a counter of finished work and says for how long it has stood still though there was work.

    `patience`: seconds that work may take before it counts as stuck. `clock`: monotonic, in seconds.
    """

    def __init__(self, patience: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._patience, self._clock = patience, clock
        self._seen: int | None = None
        self._moved = clock()

    def stalled_for(self, completed: int, *, busy: bool) -> float:
        """Seconds without progress, once they exceed the patience; else 0.0. To be asked every few seconds."""
        now = self._clock()
        if not busy or completed != self._seen:
            self._seen, self._moved = completed, now
        silent = now - self._moved
        return silent if silent > self._patience else 0.0
