"""Kubernetes Events: a controller's messages to the people who look at an object, recorded and correlated.

The model: `EventRecorder.event` counts the occurrence in its series and returns; it never waits and never fails. `run`
writes series whose count the API server does not know yet. Like a work queue it is level-triggered: while a series
waits or is being written, more occurrences only raise its count.

Each object has a lane. Lanes are written concurrently, a few at a time, and the series of one lane one after the other
in the order of their first occurrence. A lane whose request got no answer waits and tries again on its own, so trouble
with one object delays no other. A series that the API server refuses is given up at once. The number of waiting series
is bounded; beyond that, occurrences are dropped and counted.

The correlator makes each occurrence a new Event, one more count of an existing Event, or nothing, without I/O or a
clock: the caller passes `now`, in Unix seconds. A clock that is set back only delays. The rules are those of
client-go's EventCorrelator, in its order:

1. *Aggregate*: from the 10th distinct message about one object with one type and reason, new messages go into one
   combined event, until ten minutes pass without such an occurrence.
2. *Dedup*: an occurrence that is equal to an earlier one, message included, raises that one's count.
3. *Spam filter*: each object has 25 occurrences at once, then one each five minutes. More are counted, not written.

Everything is kept for the 4096 latest of its kind, so memory is bounded.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple, Protocol, TypeVar

import structlog

from store.kube.api.errors import AlreadyExists, KubeError, NotFound, ServerError, TooManyRequests, Unreachable
from store.kube.api.objects import EVENTS, Object, format_time
from store.kube.api.protocol import KubeApi
from store.timing import Backoff, TokenBucket, retried

log = structlog.get_logger(__name__)

Severity = Literal["Normal", "Warning"]
CAPACITY = 1000  # series that may wait at once, as in client-go
CONCURRENCY = 8  # requests on their way at once
ATTEMPTS = 12  # requests for one series that got no answer, before it is given up
FIRST_BACKOFF = 1.0  # seconds
MAX_BACKOFF = 30.0  # seconds
DRAIN = 2.0  # seconds that the end of `run` may spend on waiting series
_NO_ANSWER = (Unreachable, ServerError, TooManyRequests)
_DEFAULT_NAMESPACE = "default"  # where events about objects of the whole cluster are kept
REMEMBERED = 4096  # series, groups and budgets that are remembered, each
SINGLE_MESSAGES = 9  # distinct messages that get an event of their own
QUIET_GAP = 600.0  # seconds
COMBINED = "(combined from similar events): "  # as in client-go
SPAM_BURST = 25.0
SPAM_INTERVAL = 300.0  # seconds until one more occurrence may be written
_NAME_LIMIT = 253 - 17  # a DNS subdomain, without the dot and the sixteen digits that we append
_MESSAGE_LIMIT = 1024  # characters; the limit of `events.k8s.io/v1`
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Recorder(Protocol):
    """Records the events of controllers."""

    def event(
        self, obj: Object, event_type: Severity, reason: str, message: str, *, api_version: str, kind: str
    ) -> None:
        """Record an event about `obj`. `reason`: for programs, in CamelCase. Never blocks or raises.

        Version and kind are passed in: items of a list do not carry them."""


class EventRecorder:
    """Writes events as `component` (on `host`). `clock`: Unix seconds.

    For metrics: `written`, `dropped` (too many waited), `rejected` (the API server refused), `abandoned` (no answer in
    `ATTEMPTS` tries), and `skipped` (held back by the spam filter).
    """

    def __init__(
        self,
        api: KubeApi,
        component: str,
        *,
        host: str = "",
        clock: Callable[[], float] = time.time,
        rng: random.Random | None = None,
    ) -> None:
        self.written = self.dropped = self.rejected = self.abandoned = 0
        self._api, self._component, self._host = api, component, host
        self._clock, self._rng = clock, rng or random.Random()
        self._correlator = Correlator()
        self._lanes: dict[Reference, dict[Series, None]] = {}  # waiting series, in order, by object
        self._idle: list[Reference] = []  # lanes without a writing task
        self._waiting = 0
        self._wake = asyncio.Event()
        self._slots = asyncio.Semaphore(CONCURRENCY)

    @property
    def skipped(self) -> int:
        return self._correlator.skipped

    def event(
        self, obj: Object, event_type: Severity, reason: str, message: str, *, api_version: str, kind: str
    ) -> None:
        about = Reference.to(obj, api_version, kind)
        series = self._correlator.observe(about, event_type, reason, message, self._clock())
        if series is None or series in self._lanes.get(about, ()):
            return
        if self._waiting >= CAPACITY:
            if not self.dropped:
                log.warning("Too many events are waiting; dropping new ones", waiting=self._waiting)
            self.dropped += 1
            return
        self._waiting += 1
        if about not in self._lanes:
            self._lanes[about] = {}
            self._idle.append(about)
            self._wake.set()
        self._lanes[about][series] = None

    async def run(self) -> None:
        """Write events until cancelled; then spend up to `DRAIN` seconds on the waiting ones."""
        tasks: set[asyncio.Task[None]] = set()

        def start_idle_lanes() -> None:
            for about in self._idle:
                task = group.create_task(self._write_lane(about), name=f"events of {about.name}")
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            self._idle.clear()

        async with asyncio.TaskGroup() as group:
            try:
                while True:
                    await self._wake.wait()
                    self._wake.clear()
                    start_idle_lanes()
            finally:
                start_idle_lanes()  # of events that came in the same turn of the loop as the end
                if tasks:
                    await asyncio.wait(tasks, timeout=DRAIN)

    async def _write_lane(self, about: Reference) -> None:
        """Write the counts of the lane's series to the API server, until none waits."""
        lane = self._lanes[about]
        while lane:
            series, backoff = next(iter(lane)), Backoff(FIRST_BACKOFF, MAX_BACKOFF, rng=self._rng)
            is_given_up = False
            try:
                await retried(partial(self._send, series), on=_NO_ANSWER, backoff=backoff, attempts=ATTEMPTS)
            except KubeError as error:
                is_given_up, reason = True, str(error)
                if isinstance(error, _NO_ANSWER):
                    self.abandoned += 1
                    reason = f"no answer in {ATTEMPTS} tries"
                else:
                    self.rejected += 1
                where = f"{about.kind} {about.namespace}/{about.name}"
                log.warning("Could not write an event", object=where, event_reason=series.reason, error=reason)
            else:
                self.written += 1
            if is_given_up or series.stored == series.count:
                del lane[series]
                self._waiting -= 1
        del self._lanes[about]

    async def _send(self, series: Series) -> None:
        async with self._slots:
            count, namespace = series.count, series.about.namespace or _DEFAULT_NAMESPACE
            if series.stored:
                change = {"count": count, "lastTimestamp": format_time(series.last), "message": series.message}
                try:
                    await self._api.patch(EVENTS, series.name, namespace, change)
                except NotFound:
                    series.stored = 0  # the API server has expired the event
            if not series.stored:
                try:
                    await self._api.create(EVENTS, self._body(series, namespace), namespace)
                except AlreadyExists:  # an earlier try was applied, its answer lost, with the count of that time
                    count = min(count, 1)
            series.stored = count

    def _body(self, series: Series, namespace: str) -> Object:
        about = series.about
        involved = {
            "apiVersion": about.api_version,
            "kind": about.kind,
            "name": about.name,
            "namespace": about.namespace,
            "uid": about.uid,
        }
        return {
            "apiVersion": EVENTS.api_version,
            "kind": EVENTS.kind,
            "metadata": {"name": series.name, "namespace": namespace},
            "involvedObject": {field: value for field, value in involved.items() if value},
            "type": series.type,
            "reason": series.reason,
            "message": series.message,
            "count": series.count,
            "firstTimestamp": format_time(series.first),
            "lastTimestamp": format_time(series.last),
            "source": {"component": self._component} | ({"host": self._host} if self._host else {}),
            "reportingComponent": self._component,
        }


class Reference(NamedTuple):
    """The object that an event is about."""

    api_version: str
    kind: str
    namespace: str
    name: str
    uid: str

    @classmethod
    def to(cls, obj: Object, api_version: str, kind: str) -> Reference:
        """Return a reference to an object, which may be incomplete: recording an event must not fail."""
        metadata = obj.get("metadata") or {}
        namespace, name, uid = (str(metadata.get(field) or "") for field in ("namespace", "name", "uid"))
        return cls(api_version, kind, namespace, name, uid)


@dataclass(slots=True, eq=False)
class Series:
    """One Event object: how often it occurred, and as of which count the API server knows it (0: not at all)."""

    name: str
    about: Reference
    type: str
    reason: str
    message: str
    first: float
    last: float
    count: int = 0
    stored: int = 0


class Correlator:
    """Assigns each occurrence to its series. `skipped`: how many the spam filter held back."""

    def __init__(self) -> None:
        self.skipped = 0
        self._groups: _Latest[Hashable, _Group] = _Latest()
        self._series: _Latest[Hashable, Series] = _Latest()
        self._budgets: _Latest[Reference, TokenBucket] = _Latest()  # of occurrences that may still be written
        self._last_serial = 0

    def observe(self, about: Reference, event_type: str, reason: str, message: str, now: float) -> Series | None:
        """Count an occurrence. Return its series, or None when the spam filter holds it back."""
        group = (about, event_type, reason)
        if len(message) > _MESSAGE_LIMIT:
            message = message[: _MESSAGE_LIMIT - 1] + "…"
        similar = self._groups.recall(group, _Group)
        if now - similar.last > QUIET_GAP:
            similar.messages.clear()
        similar.last = now
        if len(similar.messages) < SINGLE_MESSAGES:
            similar.messages.add(message)
        is_single = message in similar.messages
        text = message if is_single else (COMBINED + message)[:_MESSAGE_LIMIT]

        def new_series() -> Series:  # its name is as client-go's, the object's name and the nanosecond, but unique
            self._last_serial = max(self._last_serial + 1, int(now * 1e9))
            name = f"{about.name[:_NAME_LIMIT].rstrip('.-')}.{self._last_serial:016x}"
            return Series(name, about, event_type, reason, text, first=now, last=now)

        series = self._series.recall((group, message if is_single else None), new_series)
        series.count, series.last, series.message = series.count + 1, now, text
        if self._budgets.recall(about, lambda: TokenBucket(1.0 / SPAM_INTERVAL, SPAM_BURST, now)).try_take(now):
            return series
        self.skipped += 1
        return None


@dataclass(slots=True)
class _Group:
    """Messages about one object that differ in nothing else."""

    messages: set[str] = field(default_factory=set)
    last: float = 0.0


class _Latest(OrderedDict[K, V]):
    """A map that drops the least recently used entry."""

    def recall(self, key: K, make: Callable[[], V]) -> V:
        if key in self:
            self.move_to_end(key)
        else:
            self[key] = make()
            if len(self) > REMEMBERED:
                self.popitem(last=False)
        return self[key]
