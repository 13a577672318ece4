"""When work counts as standing still."""

from __future__ import annotations

from rcfarm.daemon.health_server import StallDetector


def test_a_counter_that_stands_still_while_there_is_work_is_a_stall() -> None:
    """Only silence with work waiting, beyond the limit, is a stall; being idle is none, however long."""
    now = 0.0
    detector = StallDetector(60.0, lambda: now)

    assert detector.stalled_for(0, busy=True) == 0.0
    now = 60.0
    assert detector.stalled_for(0, busy=True) == 0.0
    now = 61.0
    assert detector.stalled_for(0, busy=True) == 61.0
    assert detector.stalled_for(1, busy=True) == 0.0
    now = 1000.0
    assert detector.stalled_for(1, busy=False) == 0.0
    now = 1059.0
    assert detector.stalled_for(1, busy=True) == 0.0
    now = 1061.0
    assert detector.stalled_for(1, busy=True) == 61.0
