"""Keeping what is there for good out of the garbage collector's sight, where a million objects live for weeks.

To look at them all takes longer than any decision: tens of milliseconds, in the middle of some call. What has survived
a full collection is not looked at again, and with little left to look at, full collections can be frequent and short.

What is set aside is still freed when nothing refers to it any more; only circles of references stay. So it is for a
program that makes none as it works, or that sets aside only when much has come that stays (`least`): what is in passing
at that moment is a small part of it then.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping

THRESHOLDS = (700, 4, 1)  # some 7,000 new objects are looked at in a full collection: 3 ms


def settle(*, thresholds: tuple[int, int, int] = THRESHOLDS, least: int = 0) -> None:
    """From now on, whatever survives a full collection is set aside, if that is at least so many objects."""

    def set_survivors_aside(phase: str, info: Mapping[str, int]) -> None:
        if phase == "stop" and info["generation"] == 2 and (not least or len(gc.get_objects(2)) >= least):
            gc.freeze()

    gc.set_threshold(*thresholds)
    gc.callbacks.append(set_survivors_aside)


def set_aside() -> None:
    """What is not garbage now is there for good."""
    gc.collect()
    gc.freeze()
    gc.collect()  # of nothing: else the next full one waits until there is a quarter as much again, and is that long
