"""The work queue of every control loop: client-go's semantics on one event loop.

The model: a key is *dirty* when it needs work and *processing* while a worker has it. Adding a dirty key changes
nothing; adding a key that is processing makes it dirty, and `done` then queues it again. So a key is never worked on
twice at once, and any number of adds during a run cause exactly one more run. The order is first in, first
out; a key that is queued again goes last. Only `add_first` passes the line.

Delayed keys wait in a heap with one loop timer for its head; a key waits once, a second delay can only bring it
forward, and an immediate `add` leaves the timer alone.

A key that an event has woken (`wake`, rather than `add` or `add_after`) carries the time of the first event until its
sync takes it (`take_wake_time`), so that the reaction time to events can be measured.

A rate limiter computes the delay before a key is retried, as in client-go. Limiters are pure arithmetic: the queue
passes the time and schedules the retry. `when` counts a failure of the key; `forget` clears its count after a success.
A limiter with a budget shared by all keys takes a token in `when`; `refund` returns it when the queue does not need the
delay, because the key is due earlier anyway.

Everything runs on one event loop, without locks. A worker loops `get` → work → `forget` or `add_rate_limited` → `done`.
`get` does not yield to the loop while keys are queued. Waiters get wake-ups, never items: a waiter that is cancelled
passes its wake-up on, so neither a key nor a wake-up is lost.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Hashable
from itertools import count
from typing import Generic, NamedTuple, Protocol, TypeVar

from store.timing import TokenBucket, doubled

K = TypeVar("K", bound=Hashable)
K_contra = TypeVar("K_contra", bound=Hashable, contravariant=True)

_TIMER_SLACK = 0.001  # seconds: uvloop's timers are that coarse and may fire early; setting them again would spin
_COMPACT_ABOVE = 64  # superseded heap entries that are always tolerated


def loop_time() -> float:
    """Return the running event loop's monotonic time, in seconds."""
    return asyncio.get_running_loop().time()


class ShutDown(Exception):
    """The queue was shut down and holds nothing more."""


class RateLimiter(Protocol[K_contra]):
    """Decides the delay of a retry. By default it has no shared budget, and counts no failures per key."""

    def when(self, key: K_contra, now: float) -> float:
        """Count a failure of `key` and return its delay in seconds, from `now` (monotonic seconds)."""

    def refund(self, key: K_contra) -> None:
        """Return the token that the last `when` took from a shared budget. Failure counts stay."""
        return

    def forget(self, key: K_contra) -> None:
        """Clear the failure count of `key`."""
        return

    def num_requeues(self, key: K_contra) -> int:
        """Return the failures of `key` since it was last forgotten."""
        return 0


class ExponentialRateLimiter(RateLimiter[K]):
    """`base` · 2ⁿ seconds for a key that failed n times before, never above `cap` seconds."""

    def __init__(self, base: float = 0.005, cap: float = 1000.0) -> None:
        self._base = base
        self._cap = cap
        self._failures: dict[K, int] = {}

    def when(self, key: K, now: float) -> float:
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        return doubled(self._base, self._cap, failures)

    def forget(self, key: K) -> None:
        self._failures.pop(key, None)

    def num_requeues(self, key: K) -> int:
        return self._failures.get(key, 0)


class BucketRateLimiter(RateLimiter[Hashable]):
    """A token bucket over all keys: `burst` at once, then `rate` per second. Debt is allowed: it becomes the delay."""

    def __init__(self, rate: float = 10.0, burst: int = 100) -> None:
        self._bucket = TokenBucket(rate, burst)

    def when(self, key: Hashable, now: float) -> float:
        return self._bucket.take(now)

    def refund(self, key: Hashable) -> None:
        self._bucket.put_back()


class MaxOfRateLimiter(RateLimiter[K]):
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


class QueueMetrics(Protocol):
    """Receives a named queue's measurements. Durations are in seconds."""

    def added(self) -> None:
        """`workqueue_adds_total`: a key became dirty."""

    def retried(self) -> None:
        """`workqueue_retries_total`: a delayed add."""

    def waited(self, seconds: float) -> None:
        """`workqueue_queue_duration_seconds`: from when the key became dirty until a worker took it."""

    def worked(self, seconds: float) -> None:
        """`workqueue_work_duration_seconds`: from get to done."""


class MetricsProvider(Protocol):
    """Makes the metrics of a queue, under client-go's names. The gauges are computed when they are scraped."""

    def queue_metrics(
        self,
        name: str,
        *,
        depth: Callable[[], float],
        unfinished_work: Callable[[], float],
        longest_running_processor: Callable[[], float],
    ) -> QueueMetrics:
        """`workqueue_depth`, `workqueue_unfinished_work_seconds`, `workqueue_longest_running_processor_seconds`."""


class _Delayed(NamedTuple, Generic[K]):
    due: float
    order: int  # breaks ties: keys need not be comparable
    key: K
    rate_limited: bool


class WorkQueue(Generic[K]):
    """A rate-limited, delaying, deduplicating queue of keys.

    `name`: the metrics' label; without a name, or without `metrics`, nothing is measured. `clock`: monotonic seconds,
    by default those of the running loop. `rate_limiter`: by default client-go's, 5 ms·2ⁿ up to 1000 s and at most 10
    retries per second after a burst of 100.
    """

    def __init__(
        self,
        name: str = "",
        *,
        rate_limiter: RateLimiter[K] | None = None,
        clock: Callable[[], float] = loop_time,
        metrics: MetricsProvider | None = None,
    ) -> None:
        self.completed = 0  # keys done since the start: it stands still when the workers do
        self.shutting_down = False
        self._limiter = rate_limiter or default_rate_limiter()
        self._clock = clock
        self._fifo: deque[K] = deque()
        self._dirty: dict[K, float] = {}  # key -> when it became dirty; 0.0 without metrics
        self._processing: dict[K, float] = {}  # key -> when a worker took it
        self._woken: dict[K, float] = {}  # key -> the first event since its last sync began
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._delayed: dict[K, _Delayed[K]] = {}
        self._heap: list[_Delayed[K]] = []  # may hold superseded entries; `_delayed` has the valid ones
        self._order = count()
        self._timer: asyncio.TimerHandle | None = None
        self._drained: asyncio.Future[None] | None = None
        self._metrics: QueueMetrics | None = None
        if name and metrics is not None:
            self._metrics = metrics.queue_metrics(
                name,
                depth=lambda: float(len(self._dirty)),
                unfinished_work=lambda: sum(self._ages(), 0.0),
                longest_running_processor=lambda: max(self._ages(), default=0.0),
            )

    def __len__(self) -> int:
        """Return the number of keys ready for a worker, without those in work or delayed."""
        return len(self._fifo)

    def __bool__(self) -> bool:
        return True  # an empty queue is still a queue: `queue or default` must not replace it

    @property
    def is_busy(self) -> bool:
        """True while keys are queued or in work."""
        return bool(self._fifo or self._processing)

    def _ages(self) -> list[float]:
        """Return the ages, in seconds, of all work in flight."""
        now = self._clock() if self._processing else 0.0  # an idle queue may be scraped where no loop runs
        return [now - started for started in self._processing.values()]

    def add(self, key: K) -> None:
        """Mark `key` as needing work. Ignored after a shutdown, and when it is marked already."""
        if self.shutting_down or key in self._dirty:
            return
        if self._metrics is None:
            self._dirty[key] = 0.0
        else:
            self._dirty[key] = self._clock()
            self._metrics.added()
        if key not in self._processing:
            self._fifo.append(key)
            self._wake_one()

    def add_first(self, key: K) -> None:
        """Mark `key` as needing work, before all keys that are queued. Costs time in proportion to these if it is one
        of them. For a key that is in work it is `add`."""
        if key not in self._dirty:
            self.add(key)
            if self._fifo and self._fifo[-1] == key:
                self._fifo.rotate(1)
        elif key not in self._processing:
            self._fifo.remove(key)
            self._fifo.appendleft(key)

    async def get(self) -> K:
        """Wait for the next key and return it; call `done` when finished with it. Raises `ShutDown`."""
        while not self._fifo:
            if self.shutting_down:
                raise ShutDown
            wake_up: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(wake_up)
            try:
                await wake_up
            except asyncio.CancelledError:
                if not wake_up.cancelled():  # woken and cancelled in one turn: the wake-up belongs to the next waiter
                    self._wake_one()
                elif wake_up in self._waiters:
                    self._waiters.remove(wake_up)
                raise
        key = self._fifo.popleft()
        dirtied = self._dirty.pop(key)
        if self._metrics is None:
            self._processing[key] = 0.0
        else:
            now = self._processing[key] = self._clock()
            self._metrics.waited(now - dirtied)
        return key

    def _wake_one(self) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    def done(self, key: K) -> None:
        """Mark `key` as finished. If it became dirty during the work, it is queued again, last.

        Raises ValueError for a key that is not in work.
        """
        started = self._processing.pop(key, None)
        if started is None:
            raise ValueError(f"done({key!r}): the key is not in work; call done once for each get")
        self.completed += 1
        if self._metrics is not None:
            self._metrics.worked(self._clock() - started)
        if key in self._dirty:
            self._fifo.append(key)
            self._wake_one()
        elif self._drained is not None:
            self._check_drained()

    def add_after(self, key: K, delay: float) -> None:
        """Add `key` in `delay` seconds; at once when that is not positive. Ignored after a shutdown."""
        if not self.shutting_down:
            self._schedule(key, delay, rate_limited=False)

    def wake(self, key: K, delay: float = 0.0) -> None:
        """Add `key` upon an event, which may wait `delay` seconds for others. Ignored after a shutdown."""
        if self.shutting_down:
            return
        self._woken.setdefault(key, self._clock())
        if delay > 0:
            self.add_after(key, delay)
        else:
            self.add(key)

    def take_wake_time(self, key: K) -> float | None:
        """Return when the first event since the last call woke `key`, on the queue's clock; None without an event."""
        return self._woken.pop(key, None)

    def add_rate_limited(self, key: K) -> None:
        """Count a failure of `key` and add it after the rate limiter's delay. Ignored after a shutdown.

        When the key is due earlier anyway, the limiter's token is returned.
        """
        if not self.shutting_down:
            self._schedule(key, self._limiter.when(key, self._clock()), rate_limited=True)

    def forget(self, key: K) -> None:
        """Clear the failure count of `key`; its timer, its work in flight and spent tokens stay."""
        self._limiter.forget(key)

    def num_requeues(self, key: K) -> int:
        """Return the failures of `key` since it was last forgotten."""
        return self._limiter.num_requeues(key)

    def _schedule(self, key: K, delay: float, *, rate_limited: bool) -> None:
        if self._metrics is not None:
            self._metrics.retried()
        if delay <= 0:
            self.add(key)
            return
        entry = _Delayed(self._clock() + delay, next(self._order), key, rate_limited)
        pending = self._delayed.get(key)
        later = entry if pending is not None and pending.due <= entry.due else pending
        if later is not None and later.rate_limited:
            self._limiter.refund(key)
        if later is not entry:
            self._delayed[key] = entry
            heapq.heappush(self._heap, entry)
            if len(self._heap) > 2 * len(self._delayed) + _COMPACT_ABOVE:  # most of it is superseded
                self._heap = list(self._delayed.values())
                heapq.heapify(self._heap)
            if self._heap[0] is entry:
                self._arm()

    def _arm(self) -> None:
        """Point the one timer at the heap's head."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._heap:
            delay = max(0.0, self._heap[0].due - self._clock())
            self._timer = asyncio.get_running_loop().call_later(delay, self._add_due)

    def _add_due(self) -> None:
        now = self._clock() + _TIMER_SLACK
        while self._heap and self._heap[0].due <= now:
            entry = heapq.heappop(self._heap)
            if self._delayed.get(entry.key) is entry:
                del self._delayed[entry.key]
                self.add(entry.key)
        self._timer = None
        self._arm()

    def shut_down(self) -> None:
        """Refuse new keys and discard the delayed ones. What is queued is still handed out, then `get` raises.

        Ends a `shut_down_with_drain` that is waiting.
        """
        self._stop_intake()
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    async def shut_down_with_drain(self) -> None:
        """Shut down, and wait until everything queued or in work is done. Bound it with `asyncio.timeout`."""
        self._stop_intake()
        self._drained = self._drained or asyncio.get_running_loop().create_future()
        self._check_drained()
        await asyncio.shield(self._drained)

    def _stop_intake(self) -> None:
        self.shutting_down = True
        self._heap.clear()
        self._delayed.clear()
        self._arm()
        while self._waiters:
            self._wake_one()

    def _check_drained(self) -> None:
        if self._drained is not None and not self._drained.done() and not self._fifo and not self._processing:
            self._drained.set_result(None)
