"""Exempt long-lived objects from garbage collection (`gc.freeze`) in processes that keep millions of them.

A full collection of all of them takes longer than any decision: tens of milliseconds, in the middle of some call.
Objects that have survived a full collection are exempt from the next ones, which can then be frequent and short.

Exempt objects are still freed when nothing refers to them; only reference cycles stay. So this is for a program that
creates no cycles as it works, or that exempts objects only when many have survived (`least`), so that short-lived ones
are a small part of them.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping

THRESHOLDS = (700, 4, 1)  # a full collection after some 7,000 new objects: 3 ms


def freeze_survivors(*, thresholds: tuple[int, int, int] = THRESHOLDS, least: int = 0) -> None:
    """Exempt the survivors of each later full collection, if they are at least `least` objects."""

    def freeze(phase: str, info: Mapping[str, int]) -> None:
        if phase == "stop" and info["generation"] == 2 and (not least or len(gc.get_objects(2)) >= least):
            gc.freeze()

    gc.set_threshold(*thresholds)
    gc.callbacks.append(freeze)


def freeze_all(*, collect_before: bool = True) -> None:
    """Exempt all objects, except the garbage that a collection finds before, if `collect_before`."""
    if collect_before:
        gc.collect()
    gc.freeze()
    gc.collect()  # resets the count of survivors: else the next full one waits for a quarter as many new objects
