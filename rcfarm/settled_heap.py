"""Keeping what is there for good out of the garbage collector's sight, where a million objects live for weeks.

To look at them all takes longer than any decision: tens of milliseconds, in the middle of some call. What is set aside
is still freed when nothing refers to it any more; only circles among it stay. So it is for what holds no circles that
come and go.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping


def set_aside() -> None:
    """What is not garbage now is there for good."""
    gc.collect()
    gc.freeze()
    gc.collect()  # of nothing: else the next full one waits until there is a quarter as much again, and is that long


def set_survivors_aside(phase: str, info: Mapping[str, int]) -> None:
    """For `gc.callbacks`: what has survived a full collection is not looked at again."""
    if phase == "stop" and info["generation"] == 2:
        gc.freeze()
