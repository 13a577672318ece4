"""Out of the garbage collector's sight."""

from __future__ import annotations

import gc
from collections.abc import Mapping

from rcfarm.settled_heap import set_aside, set_survivors_aside


def test_what_survives_a_full_collection_is_set_aside() -> None:
    """The next one does not look at it, so no pause grows with the pods that came since the start; a lesser collection
    sets nothing aside.
    """
    kept = [{"pod": [number]} for number in range(1000)]
    gc.callbacks.append(set_survivors_aside)
    try:
        gc.collect(1)
        assert any(found is kept for found in gc.get_objects())
        gc.collect()
        assert not any(found is kept for found in gc.get_objects())
    finally:
        gc.callbacks.remove(set_survivors_aside)
        gc.unfreeze()


def test_after_setting_aside_the_next_full_collection_does_not_wait_for_a_quarter_more() -> None:
    """With half a million objects set aside, it comes in its turn while there are few new ones, so that it is short."""
    kept = [[number] for number in range(500_000)]
    full: list[int] = []

    def count(phase: str, info: Mapping[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            full.append(len(gc.get_objects()))

    try:
        set_aside()
        gc.callbacks.append(count)
        new = [[number] for number in range(120_000)]
        gc.callbacks.remove(count)
    finally:
        gc.unfreeze()
    assert full
    assert len(kept) > len(new) > full[0]
