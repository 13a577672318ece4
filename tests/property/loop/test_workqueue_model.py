"""The work queue against a model of dirty and processing sets, over random operations on virtual time."""

from __future__ import annotations

import asyncio
from collections import deque

import looptime
from hypothesis import given, settings
from hypothesis import strategies as st

from controllers.loop.workqueue import WorkQueue

Operation = tuple[str, int] | tuple[str, int, int]

KEYS = st.integers(0, 3)
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), KEYS),
        st.tuples(st.just("add_after"), KEYS, st.integers(0, 4)),
        st.tuples(st.just("get"), st.just(0)),
        st.tuples(st.just("cancel"), st.integers(0, 3)),
        st.tuples(st.just("done"), st.integers(0, 3)),
        st.tuples(st.just("sleep"), st.integers(0, 3)),
    ),
    max_size=60,
)


class Model:
    """client-go's guarantees in their simplest form."""

    def __init__(self) -> None:
        self.fifo: deque[int] = deque()
        self.dirty: set[int] = set()
        self.processing: set[int] = set()
        self.timers: dict[int, float] = {}

    def add(self, key: int) -> None:
        if key not in self.dirty:
            self.dirty.add(key)
            if key not in self.processing:
                self.fifo.append(key)

    def add_after(self, key: int, due: float, now: float) -> None:
        if due <= now:
            self.add(key)
        elif due < self.timers.get(key, float("inf")):
            self.timers.pop(key, None)  # of timers for one moment the one that was set first comes first
            self.timers[key] = due

    def advance(self, now: float) -> None:
        for key, due in sorted(self.timers.items(), key=lambda timer: timer[1]):
            if due <= now:
                del self.timers[key]
                self.add(key)

    def get(self) -> int:
        key = self.fifo.popleft()
        self.dirty.remove(key)
        self.processing.add(key)
        return key

    def done(self, key: int) -> None:
        self.processing.remove(key)
        if key in self.dirty:
            self.fifo.append(key)


class Run:
    """Applies the same operations to a queue and its model, and compares what the getters receive."""

    def __init__(self) -> None:
        self.queue = WorkQueue[int]()
        self.model = Model()
        self.getters: list[asyncio.Task[int]] = []
        self.received: list[int] = []

    async def step(self, operation: Operation) -> None:
        match operation:
            case ("add", key):
                self.queue.add(key)
                self.model.add(key)
            case ("add_after", key, delay):
                now = asyncio.get_running_loop().time()
                self.queue.add_after(key, delay)
                self.model.add_after(key, now + delay, now)
            case ("get", _):
                self.getters.append(asyncio.create_task(self.queue.get()))
            case ("cancel", index) if index < len(self.getters):
                await self.cancel(self.getters.pop(index))
            case ("done", index) if self.received[index:]:
                key = self.received.pop(index)
                self.queue.done(key)
                self.model.done(key)
            case ("sleep", seconds):
                # Half a unit more, so that no timer is due in the turn of the comparison.
                await asyncio.sleep(seconds + 0.5)
                self.model.advance(asyncio.get_running_loop().time())
        await self.deliver()

    async def cancel(self, getter: asyncio.Task[int]) -> None:
        """Cancel a getter in the same turn in which a key may be on its way to it."""
        getter.cancel()
        await asyncio.wait([getter])
        assert getter.cancelled(), "a waiting getter that is cancelled must not have taken a key"

    async def deliver(self) -> None:
        for _ in range(2 * len(self.getters) + 4):
            await asyncio.sleep(0)
        for getter in [getter for getter in self.getters if getter.done()]:
            self.getters.remove(getter)
            self.received.append(getter.result())
            self.model.get()
        assert sorted(self.received) == sorted(self.model.processing)
        assert len(self.queue) == len(self.model.fifo)
        assert not (self.getters and self.model.fifo), "a key is queued while a getter waits"


def run_on_virtual_time(operations: list[Operation]) -> None:
    async def main() -> None:
        run = Run()
        for operation in operations:
            await run.step(operation)
        for getter in run.getters:
            await run.cancel(getter)

    with asyncio.Runner(loop_factory=looptime.new_event_loop) as runner:
        runner.run(main())


@settings(max_examples=400, deadline=None)
@given(OPERATIONS)
def test_dirty_and_processing_follow_the_model(operations: list[Operation]) -> None:
    """Deduplication, exclusion, order, delays and waiting getters behave as the model for every interleaving."""
    run_on_virtual_time(operations)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["add", "cancel", "both"]), st.integers(0, 4)), max_size=30))
def test_no_interleaving_of_cancellation_loses_a_key(steps: list[tuple[str, int]]) -> None:
    """Adds and cancellations in one turn: every added key is received exactly once."""

    async def main() -> None:
        queue = WorkQueue[int]()
        getters = [asyncio.create_task(queue.get()) for _ in range(5)]
        await asyncio.sleep(0)
        added: set[int] = set()
        for number, (what, index) in enumerate(steps):
            if what != "cancel":
                queue.add(number)
                added.add(number)
            if what != "add":
                getters[index].cancel()
            if number % 3 == 0:
                await asyncio.sleep(0)
        for _ in range(10):
            await asyncio.sleep(0)
        received = [getter.result() for getter in getters if getter.done() and not getter.cancelled()]
        waiting = [getter for getter in getters if not getter.done()]
        assert not (waiting and len(queue))
        received += [await queue.get() for _ in range(len(queue))]
        assert sorted(received) == sorted(added)
        for getter in waiting:
            getter.cancel()
        await asyncio.gather(*getters, return_exceptions=True)

    asyncio.run(main())
