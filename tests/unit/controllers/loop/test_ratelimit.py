"""The delays that client-go's rate limiters give, with the clock passed in."""

from __future__ import annotations

import pytest

from controllers.loop.ratelimit import (
    BucketRateLimiter,
    ExponentialRateLimiter,
    MaxOfRateLimiter,
    default_rate_limiter,
)


def test_delays_double_per_failure_of_each_key() -> None:
    """Failures of one key double its delay; another key, or a forgotten one, starts afresh."""
    limiter = ExponentialRateLimiter[str](base=0.001, cap=1.0)

    assert [limiter.when("a", 0.0) for _ in range(5)] == [0.001, 0.002, 0.004, 0.008, 0.016]
    assert limiter.num_requeues("a") == 5
    assert limiter.when("b", 0.0) == 0.001
    limiter.forget("a")
    assert limiter.num_requeues("a") == 0
    assert limiter.when("a", 0.0) == 0.001


def test_the_cap_holds_after_a_thousand_failures() -> None:
    """The delay never overflows and never exceeds the cap."""
    limiter = ExponentialRateLimiter[str]()

    delays = [limiter.when("a", 0.0) for _ in range(1000)]

    assert delays[17] < 1000.0
    assert set(delays[18:]) == {1000.0}
    assert sum(delays[:18]) == pytest.approx(0.005 * (2**18 - 1))


def test_the_bucket_delays_what_exceeds_its_burst() -> None:
    """Call 100 + m waits m tenths of a second; a bucket at rest fills up again, no
    further than its burst."""
    bucket = BucketRateLimiter(rate=10.0, burst=100)

    assert [bucket.when(key, 0.0) for key in range(100)] == [0.0] * 100
    assert [bucket.when(key, 0.0) for key in range(3)] == pytest.approx([0.1, 0.2, 0.3])
    assert [bucket.when(key, 1000.0) for key in range(101)][-2:] == pytest.approx([0.0, 0.1])


def test_a_refunded_token_is_there_for_the_next_key() -> None:
    """A refund cancels the reservation, and never fills the bucket beyond its burst."""
    bucket = BucketRateLimiter(rate=1.0, burst=1)
    bucket.refund("a")

    assert bucket.when("a", 0.0) == 0.0
    assert bucket.when("b", 0.0) == 1.0
    bucket.refund("b")
    assert bucket.when("c", 0.0) == 1.0


def test_the_longest_delay_wins() -> None:
    """The combination asks every limiter, and knows the failures of the one that counts them."""
    limiter = MaxOfRateLimiter[str](ExponentialRateLimiter[str](base=4.0, cap=8.0), BucketRateLimiter(1.0, 1))

    assert [limiter.when("a", 0.0) for _ in range(3)] == [4.0, 8.0, 8.0]
    assert limiter.when("b", 0.0) == 4.0
    assert limiter.num_requeues("a") == 3
    limiter.forget("a")
    assert limiter.num_requeues("a") == 0


def test_the_default_is_that_of_client_go() -> None:
    """It is 5 ms doubling up to 1000 s, at most 10 per second after a burst of 100."""
    limiter = default_rate_limiter()

    assert limiter.when("a", 0.0) == 0.005
    assert [limiter.when(key, 0.0) for key in range(100)][-1] == pytest.approx(0.1)
