"""The guarantees of the work queue, on virtual time where time matters, and the delays of client-go's rate limiters."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from controllers.loop.workqueue import (
    BucketRateLimiter,
    ExponentialRateLimiter,
    MaxOfRateLimiter,
    ShutDown,
    WorkQueue,
    default_rate_limiter,
)


class Recorder:
    """Keeps a queue's measurements, as a metrics provider."""

    def __init__(self) -> None:
        self.adds = self.retries = 0
        self.waits: list[float] = []
        self.works: list[float] = []
        self.names: list[str] = []
        self.gauges: dict[str, Callable[[], float]] = {}

    def queue_metrics(self, name: str, **gauges: Callable[[], float]) -> Recorder:
        self.names.append(name)
        self.gauges = gauges
        return self

    def added(self) -> None:
        self.adds += 1

    def retried(self) -> None:
        self.retries += 1

    def waited(self, seconds: float) -> None:
        self.waits.append(seconds)

    def worked(self, seconds: float) -> None:
        self.works.append(seconds)

    def gauge(self, name: str) -> float:
        return self.gauges[name]()


async def settle() -> None:
    """Let every task that can run do so."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_key_is_queued_once_and_worked_on_by_one() -> None:
    """Adding a key that needs work already changes nothing. Any number of adds while it is in work make it run once
    more; until then no second worker gets it.
    """
    queue = WorkQueue[str]()
    queue.add("x")
    queue.add("x")
    assert len(queue) == 1
    assert await queue.get() == "x"
    for _ in range(5):
        queue.add("x")
    second = asyncio.create_task(queue.get())
    await settle()
    assert not second.done()

    queue.done("x")
    assert await second == "x"
    queue.done("x")
    assert len(queue) == 0


async def test_order_is_first_in_first_out_and_reruns_go_last() -> None:
    """Keys come in the order of their adds; a key that became dirty in work queues behind the others."""
    queue = WorkQueue[str]()
    for key in "abc":
        queue.add(key)
    assert await queue.get() == "a"
    queue.add("a")
    queue.add("d")
    queue.done("a")

    assert [await queue.get() for _ in range(4)] == ["b", "c", "d", "a"]


async def test_a_key_that_is_added_first_passes_the_line_once() -> None:
    """Also one that is queued already; one that is in work is queued again as any other, and none after a shutdown."""
    queue: WorkQueue[str] = WorkQueue()
    queue.add("busy")
    assert await queue.get() == "busy"
    for key in "abc":
        queue.add(key)
    for key in ("new", "c", "busy"):
        queue.add_first(key)
    queue.done("busy")
    queue.shut_down()
    queue.add_first("late")
    assert [await queue.get() for _ in range(len(queue))] == ["c", "new", "a", "b", "busy"]


async def test_done_without_get_is_an_error() -> None:
    """A second `done`, or one for a key never taken, is refused with the key's name."""
    queue = WorkQueue[str]()
    with pytest.raises(ValueError, match="'x'"):
        queue.done("x")


@pytest.mark.looptime
async def test_after_shutdown_the_rest_is_handed_out_then_getters_quit() -> None:
    """A shutdown refuses adds and events, discards delayed keys, drains the queue, then every getter quits."""
    queue = WorkQueue[str](clock=asyncio.get_running_loop().time)
    queue.add("a")
    queue.add_after("delayed", 1.0)
    queue.shut_down()
    queue.add("b")
    queue.add_after("c", 0.01)
    queue.add_rate_limited("d")
    queue.wake("e")

    assert queue.shutting_down
    assert queue.num_requeues("d") == 0
    assert queue.take_wake_time("e") is None
    await asyncio.sleep(5)
    assert await queue.get() == "a"
    for _ in range(2):
        with pytest.raises(ShutDown):
            await queue.get()


async def test_shutdown_wakes_every_waiting_getter() -> None:
    """No worker stays behind waiting for a key that can't come."""
    queue = WorkQueue[str]()
    getters = [asyncio.create_task(queue.get()) for _ in range(5)]
    await settle()
    queue.shut_down()

    results = await asyncio.gather(*getters, return_exceptions=True)
    assert all(isinstance(result, ShutDown) for result in results)


async def test_a_rerun_requested_before_shutdown_still_happens() -> None:
    """A key that became dirty in work before the shutdown is handed out once more."""
    queue = WorkQueue[str]()
    queue.add("x")
    await queue.get()
    queue.add("x")
    queue.shut_down()
    queue.done("x")

    assert await queue.get() == "x"


async def test_drain_waits_for_queued_and_running_work() -> None:
    """`shut_down_with_drain` returns only when the last key is done, reruns included."""
    queue = WorkQueue[str]()
    queue.add("a")
    queue.add("b")
    await queue.get()
    queue.add("a")
    drain = asyncio.create_task(queue.shut_down_with_drain())
    await settle()

    for key in ("b", "a"):
        queue.done("a" if key == "b" else "b")
        assert await queue.get() == key
        await settle()
        assert not drain.done()
    queue.done("a")
    await asyncio.wait_for(drain, 1)


async def test_a_plain_shutdown_releases_a_drain() -> None:
    """After `shut_down` the drain returns though work is in flight."""
    queue = WorkQueue[str]()
    queue.add("a")
    await queue.get()
    drain = asyncio.create_task(queue.shut_down_with_drain())
    await settle()
    assert not drain.done()

    queue.shut_down()
    await asyncio.wait_for(drain, 1)
    await queue.shut_down_with_drain()


async def test_a_drain_with_nothing_to_do_returns_at_once() -> None:
    """An idle queue is drained already; a cancelled drain does not affect later ones."""
    queue = WorkQueue[str]()
    await asyncio.wait_for(queue.shut_down_with_drain(), 1)

    busy = WorkQueue[str]()
    busy.add("a")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await busy.shut_down_with_drain()
    busy.done(await busy.get())
    await asyncio.wait_for(busy.shut_down_with_drain(), 1)


async def test_a_getter_cancelled_while_waking_passes_the_key_on() -> None:
    """A getter that is cancelled in the turn in which a key arrives loses neither the key nor the wake-up."""
    queue = WorkQueue[str]()
    first = asyncio.create_task(queue.get())
    second = asyncio.create_task(queue.get())
    await settle()

    queue.add("x")
    first.cancel()

    assert await asyncio.wait_for(second, 1) == "x"
    with pytest.raises(asyncio.CancelledError):
        await first


@pytest.mark.looptime
@pytest.mark.parametrize(
    ("delays", "due"), [((0.05,), 0.05), ((0.05, 0.07), 0.05), ((0.05, 0.03), 0.03), ((1.0, 0.0), 0.0)]
)
async def test_a_second_delay_only_brings_forward(delays: tuple[float, ...], due: float) -> None:
    """The key is ready after its delay, to the millisecond, and once. Of two delays the shorter counts."""
    queue = WorkQueue[str]()
    for delay in delays:
        queue.add_after("x", delay)
    assert len(queue) == (due == 0)

    assert await queue.get() == "x"
    assert asyncio.get_running_loop().time() == pytest.approx(due)
    queue.done("x")
    if due:
        await asyncio.sleep(10)
        assert len(queue) == 0


@pytest.mark.looptime
async def test_retries_back_off_and_forget_resets() -> None:
    """Each failure doubles the wait; `forget` starts afresh."""
    queue = WorkQueue[str](rate_limiter=ExponentialRateLimiter(base=1.0, cap=60.0))
    loop = asyncio.get_running_loop()
    times = []
    for _ in range(4):
        queue.add_rate_limited("x")
        queue.done(await queue.get())
        times.append(loop.time())
    assert times == pytest.approx([1, 3, 7, 15])
    assert queue.num_requeues("x") == 4

    queue.forget("x")
    assert queue.num_requeues("x") == 0
    queue.add_rate_limited("x")
    await queue.get()
    assert loop.time() == pytest.approx(16)


@pytest.mark.looptime
async def test_an_hour_of_back_off_follows_the_documented_schedule() -> None:
    """A key that always fails is tried after 5 ms·2ⁿ, at most every 1000 s, and not once more."""
    queue = WorkQueue[str]()
    runs = 0

    async def always_failing() -> None:
        nonlocal runs
        while True:
            key = await queue.get()
            runs += 1
            queue.add_rate_limited(key)
            queue.done(key)

    queue.add("x")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(always_failing(), 3600)
    assert runs == 1 + 18 + 2


@pytest.mark.looptime
@pytest.mark.parametrize(
    ("burst", "again"),
    [
        pytest.param(2, lambda queue: [queue.add_rate_limited("x") for _ in range(49)], id="failed again"),
        pytest.param(1, lambda queue: queue.add_after("x", 0.5), id="brought forward"),
    ],
)
async def test_the_token_of_an_unneeded_retry_is_given_back(burst: int, again: Callable[[Any], object]) -> None:
    """Another failure while an earlier timer runs costs no token, nor does a retry that an explicit delay beats: the
    next key is not delayed for it.
    """
    limiter = MaxOfRateLimiter(ExponentialRateLimiter(1.0, 60.0), BucketRateLimiter(0.1, burst))
    queue = WorkQueue[str](rate_limiter=limiter)
    queue.add_rate_limited("x")
    again(queue)
    queue.add_rate_limited("y")

    assert [await queue.get() for _ in range(2)] == ["x", "y"]
    assert asyncio.get_running_loop().time() == pytest.approx(1.0)


@pytest.mark.looptime
async def test_bringing_keys_forward_again_and_again_keeps_the_heap_small() -> None:
    """Superseded timers don't pile up: each key still comes once, at its earliest time."""
    queue = WorkQueue[int]()
    for step in range(1000):
        for key in range(3):
            queue.add_after(key, 2000.0 - step)

    assert len(queue._heap) <= 100
    assert [await queue.get() for _ in range(3)] == [0, 1, 2]
    assert asyncio.get_running_loop().time() == pytest.approx(1001.0)
    await asyncio.sleep(2000)
    assert len(queue) == 0


def test_coarse_timers_do_not_spin() -> None:
    """On uvloop, whose timers may fire a millisecond early, a delayed key costs a timer or two, not hundreds."""
    uvloop = pytest.importorskip("uvloop", reason="uvloop is not installed; install the extra `uvloop`")

    class Counting(WorkQueue[int]):
        fired = 0

        def _add_due(self) -> None:
            self.fired += 1
            super()._add_due()

    async def main() -> int:
        queue = Counting()
        for number in range(50):
            queue.add_after(number, 0.0031 + number * 1e-5)
            await queue.get()
        return queue.fired

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(main()) <= 100


async def test_metrics_are_exact() -> None:
    """Depth counts dirty keys, adds count what was not deduplicated, durations start at the first dirtying."""
    now = 100.0
    metrics = Recorder()
    queue = WorkQueue[str]("reconcile", clock=lambda: now, metrics=metrics)
    queue.add("x")
    now = 101.0
    queue.add("x")
    assert (metrics.adds, metrics.gauge("depth")) == (1, 1)

    await queue.get()
    assert metrics.waits == [1.0]
    for _ in range(5):
        now += 1
        queue.add("x")
    assert (metrics.adds, metrics.gauge("depth")) == (2, 1)
    assert metrics.gauge("unfinished_work") == metrics.gauge("longest_running_processor") == 5.0

    queue.done("x")
    assert metrics.works == [5.0]
    now += 1
    await queue.get()
    assert metrics.waits == [1.0, 5.0]
    queue.done("x")
    assert metrics.gauge("unfinished_work") == metrics.gauge("longest_running_processor") == 0.0
    queue.add_after("y", 0)
    assert (metrics.retries, metrics.adds) == (1, 3)


def test_an_idle_queue_can_be_scraped_where_no_loop_runs() -> None:
    """The page of metrics is rendered without one, too."""
    metrics = Recorder()
    WorkQueue[str]("idle", metrics=metrics)
    assert metrics.gauge("unfinished_work") == metrics.gauge("longest_running_processor") == 0.0


async def test_an_unnamed_queue_measures_nothing() -> None:
    """Without a name there are no metrics, even when a provider is given."""
    metrics = Recorder()
    queue = WorkQueue[str](metrics=metrics)
    queue.add("x")
    queue.done(await queue.get())

    assert (metrics.names, metrics.adds, metrics.works) == ([], 0, [])


async def test_an_empty_queue_is_true() -> None:
    """`queue or default` never replaces a queue for being empty."""
    assert WorkQueue[str]()


@pytest.mark.looptime
async def test_the_first_event_counts_and_timers_do_not() -> None:
    """A key keeps the time of its first event until that is taken; an add or a timer is no event."""
    queue = WorkQueue[str](clock=asyncio.get_running_loop().time)
    queue.add("timed")
    queue.add_after("timed", 1.0)
    await asyncio.sleep(3.0)
    queue.wake("woken", 10.0)
    await asyncio.sleep(1.0)
    queue.wake("woken")

    assert queue.take_wake_time("timed") is None
    assert queue.take_wake_time("woken") == pytest.approx(3.0, abs=0.01)
    assert queue.take_wake_time("woken") is None
    assert len(queue) == 2


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
    """Call 100 + m waits m tenths of a second; a bucket at rest fills up again, no further than its burst. A refund
    cancels a reservation, and never fills the bucket beyond its burst.
    """
    bucket = BucketRateLimiter(rate=10.0, burst=100)
    bucket.refund("a")

    assert [bucket.when(key, 0.0) for key in range(100)] == [0.0] * 100
    assert [bucket.when(key, 0.0) for key in range(3)] == pytest.approx([0.1, 0.2, 0.3])
    bucket.refund("a")
    assert bucket.when("b", 0.0) == pytest.approx(0.3)
    assert [bucket.when(key, 1000.0) for key in range(101)][-2:] == pytest.approx([0.0, 0.1])


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
