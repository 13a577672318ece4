"""Retries, back-off, token buckets, and turns of the event loop.

The model: `Backoff` and `TokenBucket` are arithmetic of one caller; they never wait, and chance and time come from
outside, so a loop that uses them runs in virtual time. `retried` waits by the event loop's clock. A loop that runs
until it is cancelled takes its pauses from a `Backoff` and resets it after a success.

No task holds the event loop for long: code that computes for more than a few milliseconds without waiting (a worker
that goes through a queue, a view that reads a large answer) calls `give_way` between its steps. It returns at once
while the slice of this turn lasts; later the caller continues in the next turn, after timers and I/O, so that leases
are renewed and probes answered under any load. All tasks of a loop share one slice per turn, so that a hundred workers
don't take a hundred slices.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from tenacity import RetryCallState

T = TypeVar("T")

SLICE = 0.005  # seconds of each turn that callers of `give_way` may use
WOKEN = 16  # tasks that may continue in a turn: about as many as fit into its slice
_MAX_EXPONENT = 512  # 2.0 ** 512 is far above any cap and far below the overflow of a float
_ALMOST = 1e-9  # tokens that rounding may cost


def doubled(base: float, cap: float, times: int) -> float:
    """Return `base`, doubled so often, but at most `cap`."""
    return float(min(cap, base * 2.0 ** min(times, _MAX_EXPONENT)))


class Backoff:
    """Growing pauses between attempts: `base` seconds, doubled after each failure up to `cap`.

    `spread`: the range of the factor that `rng` draws for each pause; without an `rng` pauses are exact. `reset_after`:
    seconds by `clock` without a pause after which the next one is the first again. `failures`: since the last reset.
    """

    def __init__(
        self,
        base: float,
        cap: float,
        *,
        rng: random.Random | None = None,
        spread: tuple[float, float] = (0.5, 1.0),
        reset_after: float | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.failures = 0
        self._base, self._cap = base, cap
        self._rng, self._spread = rng, spread
        self._reset_after, self._clock = reset_after, clock
        self._asked = clock() if clock else 0.0

    def pause(self, at_least: float | None = None) -> float:
        """Count a failure and return the seconds to wait after it. `at_least`: what the server asks for."""
        if self._clock is not None and self._reset_after is not None:
            now = self._clock()
            if now - self._asked > self._reset_after:
                self.reset()
            self._asked = now
        pause = self.delay()
        self.failures += 1
        return max(pause, at_least or 0.0)

    def delay(self) -> float:
        """Return the next pause without counting a failure."""
        exact = doubled(self._base, self._cap, self.failures)
        return exact if self._rng is None else exact * self._rng.uniform(*self._spread)

    def reset(self) -> None:
        """Start again at `base`: an attempt succeeded."""
        self.failures = 0


def contention(rng: random.Random) -> Backoff:
    """Return the pauses between attempts after conflicts with other clients. Each pause is drawn between zero and a
    growing limit, so that the clients do not retry at the same time."""
    return Backoff(0.02, 3.0, rng=rng, spread=(0.0, 1.0))


class TokenBucket:
    """`burst` tokens at once, then `rate` per second. Times are seconds of any one clock, passed by the caller."""

    def __init__(self, rate: float, burst: float, now: float | None = None) -> None:
        self._rate, self._burst = rate, burst
        self._tokens, self._at = burst, now

    def take(self, now: float, tokens: float = 1.0) -> float:
        """Take tokens that may not be there yet: debt is allowed. Return the seconds until they are earned."""
        self._accrue(now)
        self._tokens -= tokens
        return self.delay(now)

    def try_take(self, now: float) -> bool:
        """Take one token if it is there."""
        if not self.has_token(now):
            return False
        self._tokens -= 1.0
        return True

    def has_token(self, now: float) -> bool:
        """Return whether a token is there."""
        self._accrue(now)
        return self._tokens >= 1.0 - _ALMOST

    def delay(self, now: float) -> float:
        """Return the seconds until no token is owed."""
        self._accrue(now)
        return max(0.0, -self._tokens / self._rate)

    def put_back(self) -> None:
        """Return a token that was taken and not used."""
        self._tokens = min(self._burst, self._tokens + 1.0)

    def grant(self) -> None:
        """Add a token if there is none."""
        self._tokens = max(1.0, self._tokens)

    def _accrue(self, now: float) -> None:
        if self._at is not None:
            self._tokens = min(self._burst, self._tokens + max(0.0, now - self._at) * self._rate)
        self._at = now


async def retried(
    attempt: Callable[[], Awaitable[T]],
    *,
    on: type[Exception] | tuple[type[Exception], ...],
    backoff: Backoff,
    attempts: int | None = None,
    within: float | None = None,
) -> T:
    """Return what `attempt` returns, calling it again after each error of `on`. The last error is raised.

    `attempts`: calls at most. `within`: seconds after which no further call begins. An error's `retry_after`, if it has
    one, takes the place of the pause.
    """
    from tenacity import AsyncRetrying, retry_if_exception_type  # 8 ms, which commands that only read need not pay

    now = asyncio.get_running_loop().time
    deadline = math.inf if within is None else now() + within

    async def call() -> T:  # tenacity asks whether a function is a coroutine function, which a lambda is not
        return await attempt()

    def pause(state: RetryCallState) -> float:
        error, drawn = state.outcome and state.outcome.exception(), backoff.pause()
        return getattr(error, "retry_after", None) or drawn

    def is_last(state: RetryCallState) -> bool:
        return state.attempt_number == attempts or now() + state.upcoming_sleep > deadline

    retry = retry_if_exception_type(on)
    return await AsyncRetrying(retry=retry, wait=pause, stop=is_last, sleep=asyncio.sleep, reraise=True)(call)


class _Turn:
    """The present turn of one loop, and the tasks that wait for a later one, in order."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.waiters: deque[asyncio.Future[None]] = deque()
        self._loop = loop
        self._began: float | None = None
        self._ends = False  # `_end` is scheduled

    def is_spent(self) -> bool:
        now = time.perf_counter()
        if self._began is None:
            self._began = now
            self._schedule()
            return False
        return now - self._began >= SLICE

    def _schedule(self) -> None:
        if not self._ends:
            self._ends = True
            self._loop.call_soon(self._end)  # runs in the next turn

    def _end(self) -> None:
        self._began, self._ends = None, False
        for _ in range(min(WOKEN, len(self.waiters))):
            waiter = self.waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
        if self.waiters:
            self._schedule()


_turns: WeakKeyDictionary[asyncio.AbstractEventLoop, _Turn] = WeakKeyDictionary()


async def give_way() -> None:
    """Let other tasks run, if this turn of the running loop has used its slice; otherwise return at once."""
    loop = asyncio.get_running_loop()
    turn = _turns.get(loop)
    if turn is None:
        turn = _turns[loop] = _Turn(loop)
    while turn.is_spent():
        waiter: asyncio.Future[None] = loop.create_future()
        turn.waiters.append(waiter)
        await waiter


async def in_turns(items: Iterable[T], *, step: int = 500) -> AsyncIterator[T]:
    """Yield the items, giving way after every `step` of them."""
    for number, item in enumerate(items):
        if number % step == 0:
            await give_way()
        yield item
