"""The outbox: events leave the store for sinks, each at least once, and in order per execution.

The model: an event is written in the transaction of the state that it reports, so the store has every event, and the
state says which of them have left (`sent`). Each sink has a lane: a queue of executions, a few workers, and per
execution the number of the next event to send. A worker sends an execution's events one after the other; an error is
retried with a growing pause, and delays only that execution in that lane. A sink that fails for one execution after the
other is paused as a whole (`controllers.tasks.circuit`). When all lanes have an event behind them,
`on_progress` says so, and the engine records it with the execution's next state. An engine that takes an execution over
begins at the recorded number, so events may arrive twice: their identity tells the receiver.

Memory is bounded: only numbers are kept per execution with unsent events. The newest events are kept, too, up to
`KEPT` of them, and those that were read last; an execution whose events are not among them is read from the store.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

import aiohttp
import msgspec
import structlog

from controllers.loop.workqueue import ExponentialRateLimiter, ShutDown, WorkQueue
from controllers.tasks.circuit import Circuit, Pause
from store.errors import RcfarmError
from store.http import cause_of
from store.kv.protocol import StoreError
from store.schema.tasks import TaskEvent, TaskSpec

log = structlog.get_logger(__name__)

KEPT = 4096  # events kept in memory for all lanes
FIRST_RETRY = 0.5  # seconds
MAX_RETRY = 30.0  # seconds between attempts on an execution while a sink does not take its events
SEND_TIMEOUT = 10.0  # seconds per event
LANE_WORKERS = 8
# Answers that a repetition will not change; 401, 403 and 404 are faults of the configuration, which can be repaired.
_REFUSED = frozenset({400, 405, 410, 413, 414, 415, 422, 431})


class SinkError(RcfarmError):
    """The sink did not take the event; it is sent again."""


class EventRefused(SinkError):
    """The sink will never take this event; it is counted, logged, and left in the store only."""


class EventSink(Protocol):
    """Takes events from the outbox. `name` is the label of its metrics and logs."""

    name: str

    async def send(self, spec: TaskSpec, event: TaskEvent) -> None:
        """Deliver the event. Raises `SinkError`; any other exception is treated alike."""

    async def close(self) -> None:
        """Release connections."""


def identity_of(event: TaskEvent, execution: str) -> str:
    """Return the event's identity, equal at each delivery."""
    return f"{execution}/{event.attempt}/{event.n}"


class LogSink:
    """Writes each event to the structured log."""

    name = "log"

    async def send(self, spec: TaskSpec, event: TaskEvent) -> None:
        """Log the event."""
        log.info(
            "Task event",
            execution=spec.id,
            type=spec.type,
            n=event.n,
            attempt=event.attempt,
            phase=event.phase,
            version=event.version,
            reason=event.reason,
            kind=event.kind,
        )

    async def close(self) -> None:
        """Nothing is held."""


class WebhookSink:
    """Posts each event as JSON: `{"execution": {...}, "event": {...}}`.

    The header `Idempotency-Key` carries the event's identity. Any 2xx answer, or 409 (the receiver has it already),
    means delivered. `headers`: sent with each request, such as an authorization.
    """

    def __init__(
        self,
        url: str,
        *,
        name: str = "webhook",
        headers: Mapping[str, str] | None = None,
        timeout: float = SEND_TIMEOUT,
    ) -> None:
        self.name = name
        self._url, self._headers, self._timeout = url, dict(headers or {}), aiohttp.ClientTimeout(total=timeout)
        parts = urlsplit(url)
        self._where = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"  # a path may be a secret
        self._session: aiohttp.ClientSession | None = None

    async def send(self, spec: TaskSpec, event: TaskEvent) -> None:
        """Post the event."""
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=self._timeout, headers=self._headers)
        execution = {
            "id": spec.id,
            "type": spec.type,
            "project": spec.project,
            "domain": spec.domain,
            "name": spec.name or spec.id,
            "labels": spec.labels,
        }
        body = msgspec.json.encode({"execution": execution, "event": event})
        headers = {"Content-Type": "application/json", "Idempotency-Key": identity_of(event, spec.id)}
        try:
            async with self._session.post(self._url, data=body, headers=headers) as answer:
                status = answer.status
        except (aiohttp.ClientError, TimeoutError) as error:
            raise SinkError(f"{self._where}: {cause_of(error)}") from error
        if status in _REFUSED:
            raise EventRefused(f"{self._where} answered {status}")
        if status != 409 and not 200 <= status < 300:
            raise SinkError(f"{self._where} answered {status}")

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()


class OutboxMetrics(Protocol):
    """What the outbox counts, by sink. What is not overridden is not counted."""

    def sent(self, sink: str) -> None:
        """Count a delivered event."""
        return

    def failed(self, sink: str, *, refused: bool) -> None:
        """Count a failed attempt; `refused`: the event is not sent again."""
        return


class NoOutboxMetrics(OutboxMetrics):
    """Counts nothing."""


@dataclass(slots=True)
class _Backlog:
    """An execution with events that some lane has not delivered yet: the events below `end`."""

    spec: TaskSpec
    end: int


class _Lane:
    """One sink's queue. `position`: per execution the number of the next event to send."""

    def __init__(
        self,
        sink: EventSink,
        clock: Callable[[], float],
        wall: Callable[[], float],
        on_pause: Callable[[], None],
    ) -> None:
        self.sink = sink
        self.position: dict[str, int] = {}
        self.error = ""
        self.queue: WorkQueue[str] = WorkQueue(
            f"outbox-{sink.name}", rate_limiter=ExponentialRateLimiter(FIRST_RETRY, MAX_RETRY), clock=clock
        )
        self.circuit = Circuit(f"sink {sink.name}", self.queue.add, clock=clock, wall=wall, on_change=on_pause)


class Outbox:
    """Sends the events of the executions that an engine owns. Run `run()` once.

    `read(execution, first, end)`: returns the events with these numbers from the store. `on_progress(execution, end)`:
    all lanes have delivered all of the execution's events, which are those below `end`. Without sinks everything counts
    as delivered at once: the store has it. `on_pause()`: a sink was paused, tried, or goes on.
    """

    def __init__(
        self,
        sinks: Sequence[EventSink],
        read: Callable[[str, int, int], Awaitable[Sequence[TaskEvent]]],
        on_progress: Callable[[str, int], None],
        *,
        clock: Callable[[], float],
        wall: Callable[[], float] = time.time,
        metrics: OutboxMetrics | None = None,
        on_pause: Callable[[], None] = lambda: None,
    ) -> None:
        self.has_sinks = bool(sinks)
        self._lanes = [_Lane(sink, clock, wall, on_pause) for sink in sinks]
        self._read, self._on_progress = read, on_progress
        self._metrics = metrics or NoOutboxMetrics()
        self._backlog: dict[str, _Backlog] = {}
        self._recent: OrderedDict[tuple[str, int], TaskEvent] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of executions with unsent events."""
        return len(self._backlog)

    @property
    def pauses(self) -> dict[str, Pause | None]:
        """Return the pause of each sink, by its name; None for one that takes events."""
        return {lane.sink.name: lane.circuit.pause for lane in self._lanes}

    def add(self, spec: TaskSpec, sent: int, end: int, events: Sequence[TaskEvent] = ()) -> None:
        """Deliver the events of an execution from number `sent` up to, not including, `end`.

        What a lane has delivered already is not sent again. `events`: those of them that are at hand.
        """
        if not self._lanes or sent >= end:
            return
        backlog = self._backlog.get(spec.id)
        if backlog is None:
            self._backlog[spec.id] = _Backlog(spec, end)
        else:
            backlog.spec, backlog.end = spec, max(end, backlog.end)
        self._keep(spec.id, events)
        for lane in self._lanes:
            lane.position.setdefault(spec.id, sent)
            lane.queue.add(spec.id)

    def waits_for(self, execution: str) -> bool:
        """Return whether the execution has unsent events."""
        return execution in self._backlog

    def forget(self, execution: str) -> None:
        """Drop an execution that this engine does not own any more; its owner sends the rest."""
        self._backlog.pop(execution, None)
        for lane in self._lanes:
            lane.position.pop(execution, None)
            lane.queue.forget(execution)
            lane.circuit.forget(execution)

    async def run(self) -> None:
        """Send until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                for lane in self._lanes:
                    for _ in range(LANE_WORKERS):
                        group.create_task(self._work(lane))
        finally:
            for lane in self._lanes:
                lane.queue.shut_down()
                lane.circuit.close()
                await lane.sink.close()

    async def _work(self, lane: _Lane) -> None:
        while True:
            try:
                execution = await lane.queue.get()
            except ShutDown:
                return
            try:
                if lane.circuit.passes(execution):
                    await self._send_all(lane, execution)
                    lane.queue.forget(execution)
            except Exception as error:  # whatever a sink raises, the event is kept and nothing else is delayed
                text = str(error) or type(error).__name__
                if isinstance(error, TimeoutError):
                    text = f"no answer within {SEND_TIMEOUT:g} s"
                if lane.error != text:  # one warning per change of the cause, however many executions wait
                    known = isinstance(error, SinkError | StoreError | TimeoutError)
                    log.warning(
                        "A sink does not take events; retrying", sink=lane.sink.name, error=text, exc_info=not known
                    )
                    lane.error = text
                self._metrics.failed(lane.sink.name, refused=False)
                if isinstance(error, StoreError) or lane.circuit.failed(execution, text):
                    lane.queue.add_rate_limited(execution)  # otherwise it gets its turn, since the sink is paused
            finally:
                lane.circuit.left(execution)
                lane.queue.done(execution)

    async def _send_all(self, lane: _Lane, execution: str) -> None:
        """Send the execution's events that this lane has not delivered."""
        while (backlog := self._backlog.get(execution)) is not None and lane.position[execution] < backlog.end:
            for event in await self._events(execution, lane.position[execution], backlog.end):
                try:
                    async with asyncio.timeout(SEND_TIMEOUT):
                        await lane.sink.send(backlog.spec, event)
                except EventRefused as error:
                    self._metrics.failed(lane.sink.name, refused=True)
                    identity = identity_of(event, execution)
                    log.error(
                        "The sink refused an event for good", sink=lane.sink.name, identity=identity, error=str(error)
                    )
                else:
                    self._metrics.sent(lane.sink.name)
                lane.circuit.succeeded(execution)
                if lane.error:
                    log.info("The sink takes events again", sink=lane.sink.name)
                    lane.error = ""
                if execution not in lane.position:
                    return  # forgotten while it was being sent
                lane.position[execution] = event.n + 1
        if backlog is not None and all(other.position[execution] >= backlog.end for other in self._lanes):
            for n in range(backlog.end - 1, -1, -1):
                if self._recent.pop((execution, n), None) is None:
                    break
            self.forget(execution)
            self._on_progress(execution, backlog.end)

    async def _events(self, execution: str, first: int, end: int) -> Sequence[TaskEvent]:
        """Return the events from `first` on; none is missing among them."""
        at_hand = []
        for n in range(first, end):
            event = self._recent.get((execution, n))
            if event is None:
                break
            at_hand.append(event)
        if at_hand:
            return at_hand
        events = await self._read(execution, first, end)
        if not events:
            log.error("Events of an execution are missing in the store", execution=execution, first=first, end=end)
            for lane in self._lanes:
                lane.position[execution] = max(lane.position[execution], end)
        self._keep(execution, events)
        return events

    def _keep(self, execution: str, events: Sequence[TaskEvent]) -> None:
        for event in events:
            self._recent[execution, event.n] = event
        while len(self._recent) > KEPT:
            self._recent.popitem(last=False)
