"""The slow safety net under exact wake-ups: every job is looked at again from time to time, whatever events say.

A job that a sync changed nothing about is looked at after `period`, then twice that, and so on up to `longest`; one
about which something happens starts anew. Each wait is stretched by up to a fifth, so that jobs that were found
together do not come back together.
"""

from __future__ import annotations

import random

LONGEST = 300.0  # seconds
_JITTER = 0.2


class Audit:
    """When each key is next looked at. `period`, `longest` in seconds."""

    def __init__(self, period: float, rng: random.Random, *, longest: float = LONGEST) -> None:
        self._period, self._longest, self._rng = period, max(longest, period), rng
        self._delays: dict[str, float] = {}

    def next_look(self, key: str, *, idle: bool) -> float:
        """Seconds until the next look. `idle`: this one changed nothing."""
        delay = min(self._delays.get(key, self._period / 2) * 2, self._longest) if idle else self._period
        self._delays[key] = delay
        return delay * (1 + self._rng.random() * _JITTER)

    def forget(self, key: str) -> None:
        self._delays.pop(key, None)
