"""The refresher: reads the remote jobs of all executions of a plugin, and wakes an execution when its job has changed.

The model: a job that is followed has one `Item`. Each remote system has a lane, a queue by due time with one task that
takes what is due, in batches if the plugin can read several jobs in one call, waits for the rate limit of the remote
system and starts the read. Reads of all lanes share the plugin's workers, so a lane that is throttled holds up no
other. What was read is shown through `status`, which has no I/O; if that is another phase, reason or info than before,
the execution is signalled, and only then: an execution that runs for a day costs its reads, and no round.

A young job is read after a second, and then after half of its age, up to the resync period. A push reads the job at
once. Failed reads are counted until one succeeds. A job that no execution asks for any more, because another engine
has it, is dropped after two hours; a signal is tried before.

A lane's task exists while the lane has items. `close` ends all of them.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import msgspec
import structlog

from controllers.tasks.api.errors import TaskError
from controllers.tasks.api.phase import PhaseInfo
from controllers.tasks.api.plugin import SignalAsync
from controllers.tasks.patterns.remote import RESOLUTION, Limits, RemoteGone, RemoteThrottled, WebApiConfig
from store.timing import doubled

log = structlog.get_logger(__name__)

FIRST_LOOK = 1.0  # seconds
FORGET_AFTER = 3600.0  # seconds without a round, after which the execution is signalled, and after twice that dropped


@dataclass(slots=True, eq=False)
class Item:
    """One job that is followed. `reading` and `meta`: what the plugin's read needs. `resource`: what was read last.

    `failures`: failed reads in a row, `error` the last one's text. `gone`: why the job does not exist any more.
    """

    key: str
    remote: str
    reading: Any
    meta: Any
    signal: SignalAsync
    began: float
    handled_at: float
    resource: Any = None
    is_synced: bool = False
    failures: int = 0
    error: str = ""
    gone: str = ""
    shown: PhaseInfo | None = None
    due: float = 0.0
    is_reading: bool = False
    is_pushed: bool = False

    @property
    def is_ended(self) -> bool:
        """Return whether nothing more can be read of the job."""
        return bool(self.gone) or (self.shown is not None and self.shown.phase.is_terminal())


Read = Callable[[Sequence[Item]], Awaitable[Sequence[Any]]]
"""Returns for each item what was read, or the exception that the read of this item raised."""


@dataclass(slots=True)
class _Lane:
    """The items of one remote system by due time. `moved` is set when an item becomes due earlier, `reads` are in
    flight."""

    heap: list[tuple[float, int, Item]] = field(default_factory=list)
    moved: asyncio.Event = field(default_factory=asyncio.Event)
    reads: int = 0
    task: asyncio.Task[None] | None = None


class Refresher:
    """Follows the jobs of one plugin. `read`: one call for up to `batch_size` jobs of one remote system. `status`:
    shows a resource. `on_failure(error)`: counts failed reads."""

    def __init__(
        self,
        config: WebApiConfig,
        limits: Limits,
        read: Read,
        status: Callable[[Any, Any], PhaseInfo],
        *,
        on_failure: Callable[[Exception], None] = lambda error: None,
        rng: random.Random | None = None,
    ) -> None:
        self._config, self._limits, self._read, self._status = config, limits, read, status
        self._on_failure, self._rng = on_failure, rng or random.Random()
        self._items: dict[str, Item] = {}
        self._lanes: dict[str, _Lane] = {}
        self._workers = asyncio.Semaphore(config.workers)
        self._reads: set[asyncio.Task[None]] = set()
        self._order = count()

    def __len__(self) -> int:
        return len(self._items)

    def follow(self, key: str, remote: str, reading: Any, meta: Any, signal: SignalAsync) -> Item | None:
        """Return the job's item, a new one if the job is not followed yet; None if no more jobs can be followed."""
        now = _now()
        item = self._items.get(key)
        if item is None:
            if len(self._items) >= self._config.cache_size:
                ended = next((other for other, item in self._items.items() if item.is_ended), None)
                if ended is None:
                    return None
                self.forget(ended)
            item = self._items[key] = Item(key, remote, reading, meta, signal, began=now, handled_at=now)
            self._schedule(item, now)
        item.reading, item.meta, item.signal, item.handled_at = reading, meta, signal, now
        return item

    def seed(self, item: Item, resource: Any) -> None:
        """Take over what the creation of the job answered, as if it had been read."""
        self._keep(item, resource, _now())

    def forget(self, key: str) -> None:
        """Follow the job no longer."""
        item = self._items.pop(key, None)
        if item is not None and (lane := self._lanes.get(item.remote)):
            lane.moved.set()

    def push(self, key: str) -> bool:
        """Read the job at once: the remote system says that it has changed. Returns whether the job is followed."""
        item = self._items.get(key)
        if item is None:
            return False
        item.is_pushed = True
        if not item.is_reading:
            self._schedule(item, _now())
        return True

    async def close(self) -> None:
        """Stop reading."""
        tasks = [lane.task for lane in self._lanes.values() if lane.task] + list(self._reads)
        self._items.clear()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _schedule(self, item: Item, due: float) -> None:
        lane = self._lanes.setdefault(item.remote, _Lane())
        item.due = due
        heapq.heappush(lane.heap, (due, next(self._order), item))
        lane.moved.set()
        if lane.task is None:
            lane.task = asyncio.create_task(self._run(item.remote, lane))

    async def _run(self, remote: str, lane: _Lane) -> None:
        """Start the reads of one remote system, until it has no items."""
        limiter = self._limits.read(remote)
        try:
            while await self._is_due(lane):
                await limiter.acquire()
                await self._workers.acquire()
                batch = self._due(lane)
                if not batch:
                    self._workers.release()
                    continue
                lane.reads += 1
                task = asyncio.create_task(self._refresh(lane, batch))
                self._reads.add(task)
                task.add_done_callback(self._reads.discard)
                task.add_done_callback(lambda _: self._workers.release())
        finally:
            self._lanes.pop(remote, None)

    def _stale(self, entry: tuple[float, int, Item]) -> bool:
        due, _, item = entry
        return self._items.get(item.key) is not item or due != item.due or item.is_reading

    async def _is_due(self, lane: _Lane) -> bool:
        """Wait until an item is due. Returns false once the lane has no items, and none in flight."""
        while True:
            lane.moved.clear()
            while lane.heap and self._stale(lane.heap[0]):
                heapq.heappop(lane.heap)
            if lane.heap and lane.heap[0][0] <= _now() + RESOLUTION:
                return True
            if not lane.heap and not lane.reads:
                return False
            left = lane.heap[0][0] - _now() if lane.heap else None
            try:
                async with asyncio.timeout(left):
                    await lane.moved.wait()
            except TimeoutError:
                continue

    def _due(self, lane: _Lane) -> list[Item]:
        """Take up to a batch of due items from the queue."""
        batch: list[Item] = []
        now = _now()
        while lane.heap and len(batch) < max(1, self._config.batch_size):
            if not self._stale(lane.heap[0]):
                if lane.heap[0][0] > now + RESOLUTION:
                    break
                item = lane.heap[0][2]
                idle = now - item.handled_at
                if item.is_ended or idle >= 2 * FORGET_AFTER:
                    self.forget(item.key)
                else:
                    if idle >= FORGET_AFTER:
                        item.signal()
                    item.is_reading, item.is_pushed = True, False
                    batch.append(item)
            heapq.heappop(lane.heap)
        return batch

    async def _refresh(self, lane: _Lane, batch: Sequence[Item]) -> None:
        """Read the jobs, and schedule their next reads."""
        try:
            async with asyncio.timeout(self._config.call_timeout or None):
                answers = await self._read(batch)
            if len(answers) != len(batch):
                raise ValueError(f"{len(batch)} jobs were asked for, and {len(answers)} were answered")
        except TimeoutError:
            late = TimeoutError(f"not answered within {self._config.call_timeout:g} s")
            answers = [late] * len(batch)
        except Exception as error:
            answers = [error] * len(batch)
        lane.reads -= 1
        now = _now()
        for item, answer in zip(batch, answers, strict=True):
            item.is_reading = False
            if isinstance(answer, Exception):
                self._failed(item, answer, now)
            else:
                self._keep(item, answer, now)

    def _keep(self, item: Item, resource: Any, now: float) -> None:
        item.resource, item.failures, item.error = resource, 0, ""
        shown: PhaseInfo | None
        try:
            shown = self._status(item.meta, resource)
            if not isinstance(shown, PhaseInfo):
                raise TypeError(f"status returned {type(shown).__name__} instead of PhaseInfo")
            if shown.info is not None:  # two phases that differ in their times alone are the same for people
                info = msgspec.structs.replace(shown.info, occurred_at=None, reported_at=None, additional_reasons=())
                shown = msgspec.structs.replace(shown, info=info)
        except Exception:  # the round calls `status`, too, and reports what is wrong
            log.warning("A status can't be derived; the round will report it", job=item.key, exc_info=True)
            shown = None
        if not item.is_synced or shown is None or shown != item.shown:
            item.signal()
        item.is_synced, item.shown = True, shown
        period = min(self._config.resync_seconds, max(FIRST_LOOK, (now - item.began) / 2))
        self._again(item, now, FORGET_AFTER if item.is_ended else period * self._rng.uniform(0.9, 1.0))

    def _failed(self, item: Item, error: Exception, now: float) -> None:
        self._on_failure(error)
        if isinstance(error, RemoteThrottled):
            self._limits.read(item.remote).pause(error.retry_after)
            return self._again(item, now, error.retry_after)
        item.error = str(error) or type(error).__name__
        if isinstance(error, RemoteGone):
            item.gone = item.error
            item.signal()
            return self._again(item, now, FORGET_AFTER)
        is_final = isinstance(error, TaskError) and not error.retryable
        item.failures = self._config.max_system_failures + 1 if is_final else item.failures + 1
        if item.failures > self._config.max_system_failures:
            item.signal()
        return self._again(item, now, doubled(FIRST_LOOK, self._config.resync_seconds, item.failures - 1))

    def _again(self, item: Item, now: float, delay: float) -> None:
        if self._items.get(item.key) is item:
            self._schedule(item, now if item.is_pushed else now + delay)
        elif lane := self._lanes.get(item.remote):
            lane.moved.set()


def _now() -> float:
    return asyncio.get_running_loop().time()
