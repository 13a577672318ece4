"""Long-lived objects are exempt from garbage collection."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Mapping

import pytest

from rcfarm.daemon.daemon import freeze_all, freeze_survivors


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    """Restore the garbage collector's settings at the end."""
    callbacks, thresholds = [*gc.callbacks], gc.get_threshold()
    yield
    gc.callbacks[:] = callbacks
    gc.set_threshold(*thresholds)
    gc.unfreeze()


def test_what_survives_a_full_collection_is_exempt() -> None:
    """The next one does not look at it, so no pause grows with the pods that came since the start; a lesser collection
    exempts nothing.
    """
    freeze_survivors()
    gc.disable()
    kept = [{"pod": [number]} for number in range(1000)]
    try:
        gc.collect(1)
        assert any(found is kept for found in gc.get_objects())
        gc.collect()
        assert not any(found is kept for found in gc.get_objects())
    finally:
        gc.enable()


def test_a_few_survivors_are_not_exempt() -> None:
    """Short-lived objects that survive a collection must still be collected when they become garbage."""
    freeze_survivors(least=1000)
    gc.disable()
    try:
        few = [{"pod": [number]} for number in range(100)]
        freeze_all()
        few = [{"pod": [number]} for number in range(100)]
        gc.collect()
        assert any(found is few for found in gc.get_objects())
        many = [{"pod": [number]} for number in range(1000)]
        gc.collect()
        assert not any(found is many for found in gc.get_objects())
    finally:
        gc.enable()


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="this Python collects in increments, which are short anyway")
def test_full_collections_stay_short() -> None:
    """Full collections are short, however many objects were exempted before, or are created after."""
    kept = [[number] for number in range(500_000)]
    looked_at: list[int] = []

    def count(phase: str, info: Mapping[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            looked_at.append(len(gc.get_objects()))

    freeze_survivors()
    freeze_all()
    gc.callbacks.append(count)
    kept += [[number] for number in range(200_000)]
    assert len(looked_at) > 10
    assert max(looked_at) < 15_000
