"""The control loop: changes become keys, each key is in one sync at a time, and a failing key affects no other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from controllers.loop.control_loop import ChildHandler, ControlLoop, ObjectHandler
from controllers.loop.workqueue import WorkQueue
from store.kube.api.errors import ServerError
from store.kube.api.objects import Object, labels_of, name_of
from store.kube.informer.informer import DeletedFinalStateUnknown
from tests.support.waiting import background, loop_time

pytestmark = pytest.mark.looptime


@asynccontextmanager
async def working(loop: ControlLoop) -> AsyncIterator[asyncio.Task[None]]:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(loop.run())
        yield task
        if not task.cancelling():
            task.cancel()


async def test_a_bad_key_is_retried_and_harms_no_other() -> None:
    """It is tried after 5, 10, 20 ms until it succeeds, which clears its failures; the good key is synced once."""
    queue, done = WorkQueue[str](), list[tuple[str, float]]()

    async def sync(key: str) -> None:
        done.append((key, round(loop_time(), 3)))
        if key == "bad" and len(done) < 5:
            raise ValueError("no") if len(done) < 4 else ServerError("away")

    async with working(ControlLoop(queue, sync, workers=1)):
        queue.add("bad")
        queue.add("good")
        await asyncio.sleep(0.02)
        assert queue.num_requeues("bad") == 3
        await asyncio.sleep(1.0)

    assert done == [("bad", 0.0), ("good", 0.0), ("bad", 0.005), ("bad", 0.015), ("bad", 0.035)]
    assert queue.num_requeues("bad") == queue.num_requeues("good") == 0


async def test_as_many_keys_at_once_as_workers() -> None:
    """Three workers take three keys; a fourth waits, and no key has two workers."""
    queue, in_work, most = WorkQueue[str](), set[str](), 0

    async def sync(key: str) -> None:
        nonlocal most
        assert key not in in_work
        in_work.add(key)
        most = max(most, len(in_work))
        queue.add(key) if loop_time() < 2.0 else None
        await asyncio.sleep(1.0)
        in_work.discard(key)

    async with working(ControlLoop(queue, sync, workers=3)):
        for key in "abcde":
            queue.add(key)
        await asyncio.sleep(10.0)

    assert most == 3


async def test_cancelling_lets_work_in_flight_end() -> None:
    """A sync of a second is finished, and the key behind it too; no new key is accepted."""
    queue, ended = WorkQueue[str](), list[str]()

    async def sync(key: str) -> None:
        await asyncio.sleep(1.0)
        ended.append(key)

    async with working(ControlLoop(queue, sync, workers=1, drain=5.0)) as task:
        queue.add("a")
        queue.add("b")
        await asyncio.sleep(0.5)
        task.cancel()
        await asyncio.sleep(0)
        queue.add("late")

    assert ended == ["a", "b"]
    assert loop_time() == pytest.approx(2.0, abs=0.01)


@pytest.mark.parametrize(("drain", "cancellations", "end"), [(100.0, 2, 0.2), (2.0, 1, 2.1)])
async def test_draining_is_cut_short(drain: float, cancellations: int, end: float) -> None:
    """A sync that hangs is cancelled, and awaited, at a second cancellation, and when the time is up."""
    queue, cancelled = WorkQueue[str](), asyncio.Event()

    async def sync(key: str) -> None:
        try:
            await asyncio.sleep(1e6)
        finally:
            cancelled.set()

    async with working(ControlLoop(queue, sync, drain=drain)) as task:
        queue.add("a")
        for _ in range(cancellations):
            await asyncio.sleep(0.1)
            task.cancel()

    assert cancelled.is_set()
    assert loop_time() == pytest.approx(end, abs=0.01)


async def test_a_queue_that_is_shut_down_ends_the_workers() -> None:
    """Queued keys are synced first."""
    queue, seen = WorkQueue[str](), list[str]()

    async def sync(key: str) -> None:
        seen.append(key)

    queue.add("a")
    queue.shut_down()
    await ControlLoop(queue, sync).run()

    assert seen == ["a"]


async def test_a_sync_says_when_its_key_is_due_again() -> None:
    """The key comes back after that time without an event; a key whose sync returns None does not."""
    queue, syncs = WorkQueue[str](), list[tuple[str, float]]()

    async def sync(key: str) -> float | None:
        syncs.append((key, round(loop_time(), 3)))
        return 2.0 if key == "timed" else None

    async with working(ControlLoop(queue, sync)):
        queue.add("timed")
        queue.add("other")
        await asyncio.sleep(5.0)

    assert syncs == [("timed", 0.0), ("other", 0.0), ("timed", 2.0), ("timed", 4.0)]


class SlowSource:
    """Is filled `seconds` after its start, and records when it started and ended."""

    def __init__(self, seconds: float) -> None:
        self.started = self.ended = -1.0
        self._seconds, self._filled = seconds, asyncio.Event()

    async def run(self) -> None:
        self.started = loop_time()
        try:
            await asyncio.sleep(self._seconds)
            self._filled.set()
            await asyncio.sleep(1e6)
        finally:
            self.ended = loop_time()

    async def synced(self) -> None:
        await self._filled.wait()


async def test_sources_start_in_stages_and_outlive_the_last_sync() -> None:
    """A stage starts when the one before is filled, the syncs when all are; sources end after the drain."""
    queue, syncs = WorkQueue[str](), list[float]()
    first, second, slowest = SlowSource(3.0), SlowSource(1.0), SlowSource(2.0)

    async def sync(key: str) -> None:
        syncs.append(loop_time())
        await asyncio.sleep(4.0)

    loop = ControlLoop(queue, sync)
    queue.add("key")
    async with background(loop.run([first], [second, slowest])):
        await asyncio.sleep(4.5)
        has_synced = [loop.has_synced]
        await asyncio.sleep(1.5)
        has_synced.append(loop.has_synced)

    assert (first.started, second.started, slowest.started) == pytest.approx((0.0, 3.0, 3.0), abs=0.01)
    assert has_synced == [False, True]
    assert syncs == pytest.approx([5.0], abs=0.01)
    assert (first.ended, second.ended, slowest.ended) == pytest.approx((9.0, 9.0, 9.0), abs=0.01)


def state(version: int, owner: str = "") -> Object:
    labels = {"owner": owner} if owner else {}
    return {"metadata": {"name": "x", "namespace": "default", "resourceVersion": str(version), "labels": labels}}


def test_each_new_state_is_reported_once() -> None:
    """A resync shows the same state again; a tombstone counts as a deletion."""
    changed, gone = list[str](), list[str]()
    handler = ObjectHandler(
        lambda obj: changed.append(obj["metadata"]["resourceVersion"]), lambda o: gone.append(name_of(o))
    )

    handler.added(state(1))
    handler.updated(state(1), state(1))
    handler.updated(state(1), state(2))
    handler.deleted(state(2))
    handler.deleted(DeletedFinalStateUnknown("default/x", state(2)))

    assert changed == ["1", "2"]
    assert gone == ["x", "x"]


def test_a_child_wakes_its_former_and_its_present_owner() -> None:
    """Each once; a child without an owner wakes none."""
    woken: list[str] = []
    handler = ChildHandler(lambda obj: labels_of(obj).get("owner"), woken.append)

    handler.added(state(1, "a"))
    handler.updated(state(1, "a"), state(1, "a"))
    handler.updated(state(1, "a"), state(2, "a"))
    assert woken == ["a", "a"]
    handler.updated(state(2, "a"), state(3, "b"))
    assert woken[2:] == ["a", "b"]
    handler.updated(state(3, "b"), state(4))
    handler.added(state(5))
    handler.deleted(DeletedFinalStateUnknown("default/x", state(6, "c")))
    assert woken[4:] == ["b", "c"]
