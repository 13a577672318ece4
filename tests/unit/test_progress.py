"""When work counts as standing still."""

from __future__ import annotations

from rcfarm.progress import Progress


def test_progress_is_a_counter_that_moves_while_there_is_work() -> None:
    """Only silence with work waiting, beyond the patience, is a stall; being idle is none, however long."""
    now = 0.0
    progress = Progress(60.0, lambda: now)

    assert progress.stalled_for(0, busy=True) == 0.0
    now = 60.0
    assert progress.stalled_for(0, busy=True) == 0.0
    now = 61.0
    assert progress.stalled_for(0, busy=True) == 61.0
    assert progress.stalled_for(1, busy=True) == 0.0
    now = 1000.0
    assert progress.stalled_for(1, busy=False) == 0.0
    now = 1059.0
    assert progress.stalled_for(1, busy=True) == 0.0
    now = 1061.0
    assert progress.stalled_for(1, busy=True) == 61.0
