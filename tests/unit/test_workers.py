"""Workers: each key in one pair of hands, and a bad one alone with its trouble."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from controllers.workers import Workers
from controllers.workqueue import WorkQueue
from store.kube.errors import ServerError

pytestmark = pytest.mark.looptime


def loop_time() -> float:
    return asyncio.get_running_loop().time()


@asynccontextmanager
async def working(workers: Workers) -> AsyncIterator[asyncio.Task[None]]:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(workers.run())
        yield task
        if not task.cancelling():
            task.cancel()


async def test_a_bad_key_is_retried_and_harms_no_other() -> None:
    """It fails at 5 ms, 10 ms, 20 ms...; the good key is worked on once, and its failures are forgotten."""
    queue, done = WorkQueue[str](), list[tuple[str, float]]()

    async def sync(key: str) -> None:
        done.append((key, round(loop_time(), 3)))
        if key == "bad":
            raise ValueError("no")

    async with working(Workers(queue, sync, count=1)):
        queue.add("bad")
        queue.add("good")
        await asyncio.sleep(0.05)

    assert done == [("bad", 0.0), ("good", 0.0), ("bad", 0.005), ("bad", 0.015), ("bad", 0.035)]
    assert queue.num_requeues("bad") == 4
    assert queue.num_requeues("good") == 0


async def test_success_clears_the_failures() -> None:
    """The next trouble starts with the shortest delay again."""
    queue, attempts = WorkQueue[str](), 0

    async def sync(key: str) -> None:
        nonlocal attempts
        attempts += 1
        if attempts < 3:
            raise ServerError("away")

    async with working(Workers(queue, sync)):
        queue.add("x")
        await asyncio.sleep(1.0)

    assert attempts == 3
    assert queue.num_requeues("x") == 0


async def test_as_many_keys_at_once_as_workers() -> None:
    """Three workers take three keys; a fourth waits, and no key is in two hands."""
    queue, in_work, most = WorkQueue[str](), set[str](), 0

    async def sync(key: str) -> None:
        nonlocal most
        assert key not in in_work
        in_work.add(key)
        most = max(most, len(in_work))
        queue.add(key) if loop_time() < 2.0 else None
        await asyncio.sleep(1.0)
        in_work.discard(key)

    async with working(Workers(queue, sync, count=3)):
        for key in "abcde":
            queue.add(key)
        await asyncio.sleep(10.0)

    assert most == 3


async def test_cancelling_lets_work_in_flight_end() -> None:
    """A sync of a second is finished, and the key behind it too; nothing new is taken in."""
    queue, ended = WorkQueue[str](), list[str]()

    async def sync(key: str) -> None:
        await asyncio.sleep(1.0)
        ended.append(key)

    async with working(Workers(queue, sync, count=1, drain=5.0)) as task:
        queue.add("a")
        queue.add("b")
        await asyncio.sleep(0.5)
        task.cancel()
        await asyncio.sleep(0)
        queue.add("late")

    assert ended == ["a", "b"]
    assert loop_time() == pytest.approx(2.0, abs=0.01)


async def test_a_second_cancellation_cuts_the_draining_short() -> None:
    """Whoever insists does not wait: the sync in flight is cancelled, and awaited."""
    queue, cancelled = WorkQueue[str](), asyncio.Event()

    async def sync(key: str) -> None:
        try:
            await asyncio.sleep(1e6)
        finally:
            cancelled.set()

    async with working(Workers(queue, sync, drain=100.0)) as task:
        queue.add("a")
        await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.sleep(0.1)
        task.cancel()

    assert cancelled.is_set()
    assert loop_time() == pytest.approx(0.2, abs=0.01)


async def test_draining_has_a_deadline() -> None:
    """A sync that hangs is cancelled, and awaited, when the time is up."""
    queue, cancelled = WorkQueue[str](), asyncio.Event()

    async def sync(key: str) -> None:
        try:
            await asyncio.sleep(1e6)
        finally:
            cancelled.set()

    async with working(Workers(queue, sync, drain=2.0)):
        queue.add("a")
        await asyncio.sleep(0.1)

    assert cancelled.is_set()
    assert loop_time() == pytest.approx(2.1, abs=0.01)


async def test_a_queue_that_is_shut_down_ends_the_workers() -> None:
    """What is queued is worked on first."""
    queue, seen = WorkQueue[str](), list[str]()

    async def sync(key: str) -> None:
        seen.append(key)

    queue.add("a")
    queue.shut_down()
    await Workers(queue, sync).run()

    assert seen == ["a"]
