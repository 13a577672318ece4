"""Bounds of a client: time, connections, and its own rate of requests."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """`call_timeout`, `connect_timeout`: seconds. `stream_silence`: seconds without a byte after which a watch counts
    as dead; servers send bookmarks about every minute. `max_connections`: of calls; each watch has one more.
    `qps` and `burst`: requests per second, and how many at once after a pause; `qps` 0 leaves it to the server, which
    sheds load by 429.
    """

    call_timeout: float = 30.0
    connect_timeout: float = 10.0
    stream_silence: float = 150.0
    max_connections: int = 64
    qps: float = 0.0
    burst: int = 100


class Throttle:
    """A token bucket in the order of asking. Debt is allowed: it becomes the delay."""

    def __init__(self, qps: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._qps, self._burst, self._clock = qps, float(max(burst, 1)), clock
        self._tokens, self._at = self._burst, clock()

    def delay(self) -> float:
        """Take a token; seconds until it counts."""
        if not self._qps:
            return 0.0
        now = self._clock()
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._qps) - 1.0
        self._at = now
        return max(0.0, -self._tokens / self._qps)
