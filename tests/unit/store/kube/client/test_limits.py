"""The client's own rate of requests."""

from __future__ import annotations

from store.kube.client.transport import Throttle


def test_a_burst_then_the_rate() -> None:
    """A burst of requests goes at once, later ones wait in order, and a pause earns them back, up to the burst."""
    now = 0.0
    throttle = Throttle(10.0, 3, lambda: now)
    assert [throttle.delay() for _ in range(5)] == [0.0, 0.0, 0.0, 0.1, 0.2]
    now = 0.2
    assert throttle.delay() == 0.1
    now = 100.0
    assert [throttle.delay() for _ in range(4)] == [0.0, 0.0, 0.0, 0.1]


def test_no_limit() -> None:
    """Without a rate no request waits."""
    throttle = Throttle(0.0, 1, lambda: 0.0)
    assert [throttle.delay() for _ in range(1000)] == [0.0] * 1000
