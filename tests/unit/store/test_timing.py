"""Back-off, token buckets and retries, on virtual time; turns of the event loop on the real one."""

from __future__ import annotations

import asyncio
import itertools
import random
import time

import pytest

from store.timing import SLICE, Backoff, TokenBucket, contention, give_way, retried
from tests.support.waiting import loop_time

pytestmark = pytest.mark.looptime


class Refused(Exception):
    """An attempt failed."""

    retry_after: float | None = None


def test_pauses_double_up_to_the_cap_and_start_again() -> None:
    """Without chance they are exact; a success makes the next one the first again. What the server asks for lengthens a
    pause, and never shortens it."""
    backoff = Backoff(1, 60)
    assert [backoff.pause() for _ in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert backoff.failures == 8
    backoff.reset()
    assert [backoff.delay(), backoff.pause(), backoff.pause(5.0), backoff.pause(0.1)] == [1, 1, 5, 4]


def test_a_thousand_failures_do_not_overflow() -> None:
    """The cap holds however long the server is away."""
    backoff = Backoff(0.1, 5.0)
    assert list(itertools.islice(iter(backoff.pause, None), 5000))[-1] == 5.0


def test_pauses_are_spread() -> None:
    """Each is drawn from the given part of the exact one, so that clients do not come at once."""
    pauses = [Backoff(8, 60, rng=random.Random(seed)).pause() for seed in range(200)]
    assert 4 <= min(pauses) < 4.2
    assert 7.8 < max(pauses) <= 8


def test_rivals_come_one_by_one() -> None:
    """After a conflict some retry at once and others later."""
    pauses = [contention(random.Random(seed)).pause() for seed in range(200)]
    assert min(pauses) < 0.001
    assert 0.018 < max(pauses) <= 0.02


def test_debt_becomes_delay() -> None:
    """After the burst each token is waited for; a quiet time earns tokens back, up to the burst."""
    bucket = TokenBucket(10.0, 2)
    assert [bucket.take(0.0) for _ in range(4)] == pytest.approx([0.0, 0.0, 0.1, 0.2])
    assert bucket.delay(0.1) == pytest.approx(0.1)
    assert not bucket.has_token(0.2)
    assert [bucket.try_take(0.3), bucket.try_take(0.3)] == [True, False]
    bucket.put_back()
    assert bucket.try_take(0.3)
    bucket.grant()
    assert bucket.has_token(0.3)
    assert [bucket.try_take(1000.0) for _ in range(3)] == [True, True, False]


def test_rounding_costs_no_token() -> None:
    """A token that was earned in many small steps is there in time."""
    bucket = TokenBucket(1.0 / 300.0, 1, 0.0)
    assert bucket.try_take(0.0)
    assert [bucket.has_token(float(now)) for now in range(1, 301)] == [False] * 299 + [True]


async def test_a_call_is_repeated_until_it_succeeds() -> None:
    """The pauses are those of the back-off."""
    began, times = loop_time(), list[float]()

    async def attempt() -> int:
        times.append(loop_time() - began)
        if len(times) < 4:
            raise Refused
        return len(times)

    assert await retried(attempt, on=Refused, backoff=Backoff(1, 60)) == 4
    assert times == pytest.approx([0, 1, 3, 7], abs=0.1)


@pytest.mark.parametrize(("limits", "calls", "seconds"), [({"attempts": 3}, 3, 3), ({"within": 10.0}, 4, 7)])
async def test_the_last_error_is_raised(limits: dict[str, float], calls: int, seconds: float) -> None:
    """After that number of calls, or when the next one would begin too late, at once."""
    errors, began = list[Refused](), loop_time()

    async def attempt() -> None:
        errors.append(Refused(len(errors)))
        raise errors[-1]

    with pytest.raises(Refused) as caught:
        await retried(attempt, on=Refused, backoff=Backoff(1, 60), **limits)  # type: ignore[arg-type]
    assert caught.value is errors[-1]
    assert len(errors) == calls
    assert loop_time() - began == pytest.approx(seconds, abs=0.1)


async def test_other_errors_end_the_attempts() -> None:
    """On the first call and on a later one."""
    raising = iter((Refused(), KeyError("a"), ValueError()))

    async def attempt() -> None:
        raise next(raising)

    for expected in (KeyError, ValueError):
        with pytest.raises(expected):
            await retried(attempt, on=Refused, backoff=Backoff(1, 60))


async def test_the_server_says_when() -> None:
    """A `retry_after` takes the place of the pause, and counts as a failure."""
    refused, began = Refused(), loop_time()
    refused.retry_after = 0.25
    raising = iter([refused])

    async def attempt() -> None:
        for error in raising:
            raise error

    backoff = Backoff(100, 100)
    await retried(attempt, on=Refused, backoff=backoff)
    assert loop_time() - began == pytest.approx(0.25, abs=0.1)
    assert backoff.failures == 1


async def test_a_cancellation_ends_the_wait() -> None:
    """The task ends, and no further call is made."""
    calls = itertools.count()

    async def attempt() -> None:
        next(calls)
        raise Refused

    task = asyncio.create_task(retried(attempt, on=Refused, backoff=Backoff(1, 60)))
    await asyncio.sleep(1.5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert next(calls) == 2


async def _work(steps: int, done: list[int]) -> None:
    for step in range(steps):
        await give_way()
        until = time.thread_time() + SLICE / 10
        while time.thread_time() < until:
            pass
        done.append(step)


@pytest.mark.looptime(False)
async def test_others_run_between_the_steps() -> None:
    """A hundred workers share a slice: whatever else is ready runs after it, not after all of them."""
    done: list[int] = []
    workers = [asyncio.create_task(_work(10, done)) for _ in range(100)]
    await asyncio.sleep(0)
    most = last = 0
    while not all(worker.done() for worker in workers):
        await asyncio.sleep(0)
        most, last = max(most, len(done) - last), len(done)
    assert len(done) == 1000
    assert most <= 21, "steps in one turn: about ten of them fill a slice"


@pytest.mark.looptime(False)
async def test_a_young_turn_goes_on() -> None:
    """Work that is done within the slice is not put off."""
    done: list[int] = []
    other = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(other.set_result, None)
    for step in range(20):
        await give_way()
        done.append(step)
    assert not other.done()
    await other
