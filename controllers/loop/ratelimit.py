"""Rate limiters, which compute the delay before a key is retried, as in client-go.

Limiters are pure arithmetic: the caller passes the time and schedules the retry. `when` counts a failure of the key;
`forget` clears its count after a success. A limiter with a budget shared by all keys takes a token in `when`; `refund`
returns it when the caller does not need the delay, because the key is due earlier anyway.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, Protocol, TypeVar

from store.timing import TokenBucket, doubled

K = TypeVar("K", bound=Hashable)
K_contra = TypeVar("K_contra", bound=Hashable, contravariant=True)


class RateLimiter(Protocol[K_contra]):
    """Decides the delay of a retry."""

    def when(self, key: K_contra, now: float) -> float:
        """Count a failure of `key` and return its delay in seconds, from `now` (monotonic seconds)."""

    def refund(self, key: K_contra) -> None:
        """Return the token that the last `when` took from a shared budget. Failure counts stay."""

    def forget(self, key: K_contra) -> None:
        """Clear the failure count of `key`."""

    def num_requeues(self, key: K_contra) -> int:
        """Return the failures of `key` since it was last forgotten."""


class ExponentialRateLimiter(Generic[K]):
    """`base` · 2ⁿ seconds for a key that failed n times before, never above `cap` seconds."""

    def __init__(self, base: float = 0.005, cap: float = 1000.0) -> None:
        self._base = base
        self._cap = cap
        self._failures: dict[K, int] = {}

    def when(self, key: K, now: float) -> float:
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        return doubled(self._base, self._cap, failures)

    def refund(self, key: K) -> None:
        """Do nothing: no budget is shared between keys."""

    def forget(self, key: K) -> None:
        self._failures.pop(key, None)

    def num_requeues(self, key: K) -> int:
        return self._failures.get(key, 0)


class BucketRateLimiter:
    """A token bucket over all keys: `burst` at once, then `rate` per second. Debt is allowed: it becomes the delay."""

    def __init__(self, rate: float = 10.0, burst: int = 100) -> None:
        self._bucket = TokenBucket(rate, burst)

    def when(self, key: Hashable, now: float) -> float:
        return self._bucket.take(now)

    def refund(self, key: Hashable) -> None:
        self._bucket.put_back()

    def forget(self, key: Hashable) -> None:
        """Do nothing: a bucket keeps no counts per key."""

    def num_requeues(self, key: Hashable) -> int:
        return 0


class MaxOfRateLimiter(Generic[K]):
    """The longest delay that any of the limiters asks for."""

    def __init__(self, *limiters: RateLimiter[K]) -> None:
        self._limiters = limiters

    def when(self, key: K, now: float) -> float:
        return max(limiter.when(key, now) for limiter in self._limiters)

    def refund(self, key: K) -> None:
        for limiter in self._limiters:
            limiter.refund(key)

    def forget(self, key: K) -> None:
        for limiter in self._limiters:
            limiter.forget(key)

    def num_requeues(self, key: K) -> int:
        return max(limiter.num_requeues(key) for limiter in self._limiters)


def default_rate_limiter(
    *, base: float = 0.005, cap: float = 1000.0, rate: float = 10.0, burst: int = 100
) -> MaxOfRateLimiter[Hashable]:
    """Return client-go's default: an exponential limiter per key, and a bucket over all keys.

    `base` and `cap` in seconds; `rate` in retries per second once `burst` of them are spent.
    """
    return MaxOfRateLimiter[Hashable](ExponentialRateLimiter[Hashable](base, cap), BucketRateLimiter(rate, burst))
