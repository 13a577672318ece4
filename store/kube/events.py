"""Kubernetes Events: what a controller tells the people who look at an object.

The model: `EventRecorder.event` counts the occurrence in its series (see `store.kube.event_series`) and returns; it
never waits and never fails. `run` writes series whose count the API server does not know yet. Like a work queue it is
level-triggered: while a series waits or is being written, more occurrences only raise its count.

Each object has a lane. Lanes are written concurrently, a few at a time, and the series of one lane one after the other
in the order of their first occurrence. A lane whose request got no answer waits and tries again by itself, so trouble
with one object delays no other. What the API server refuses is given up at once. What waits is bounded; beyond that,
occurrences are dropped and counted.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from typing import Literal, Protocol

import structlog

from store.kube.api import KubeApi
from store.kube.errors import AlreadyExists, KubeError, NotFound, ServerError, TooManyRequests, Unreachable
from store.kube.event_series import Correlator, Reference, Series
from store.kube.objects import Object
from store.kube.resources import EVENTS
from store.kube.times import format_time

log = structlog.get_logger(__name__)

Severity = Literal["Normal", "Warning"]

CAPACITY = 1000  # series that may wait at once, as in client-go
CONCURRENCY = 8  # requests on their way at once
ATTEMPTS = 12  # requests for one series that got no answer, before it is given up
FIRST_BACKOFF = 1.0  # seconds
MAX_BACKOFF = 30.0  # seconds
DRAIN = 2.0  # seconds that the end of `run` may spend on what waits
_DEFAULT_NAMESPACE = "default"  # where events about objects of the whole cluster are kept


class Recorder(Protocol):
    """What controllers tell events to."""

    def event(
        self, obj: Object, event_type: Severity, reason: str, message: str, *, api_version: str, kind: str
    ) -> None:
        """Tell that something happened to `obj`. `reason`: a machine's word in CamelCase. Never blocks or raises.

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
        self._lanes: dict[Reference, dict[Series, None]] = {}  # what waits, in order, by object
        self._idle: list[Reference] = []  # lanes that nobody writes yet
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
            self._drop(series)
            return
        self._waiting += 1
        if about not in self._lanes:
            self._lanes[about] = {}
            self._idle.append(about)
            self._wake.set()
        self._lanes[about][series] = None

    def _drop(self, series: Series) -> None:
        if not self.dropped:
            log.warning("Too many events wait to be written; from now on some are dropped", waiting=self._waiting)
        self.dropped += 1

    async def run(self) -> None:
        """Write events until cancelled; what waits then has `DRAIN` seconds."""
        tasks: set[asyncio.Task[None]] = set()
        async with asyncio.TaskGroup() as group:
            try:
                while True:
                    await self._wake.wait()
                    self._wake.clear()
                    for about in self._idle:
                        task = group.create_task(self._write_lane(about), name=f"events of {about.name}")
                        tasks.add(task)
                        task.add_done_callback(tasks.discard)
                    self._idle.clear()
            finally:
                if tasks:
                    await asyncio.wait(tasks, timeout=DRAIN)

    async def _write_lane(self, about: Reference) -> None:
        lane = self._lanes[about]
        while lane:
            series = next(iter(lane))
            answered = await self._write(series)
            if not answered or series.stored == series.count:
                del lane[series]
                self._waiting -= 1
        del self._lanes[about]

    async def _write(self, series: Series) -> bool:
        """Bring the API server to the series' count; False when that is given up."""
        for attempt in range(ATTEMPTS):
            try:
                async with self._slots:
                    await self._send(series)
            except (Unreachable, ServerError, TooManyRequests) as error:
                pause = error.retry_after or self._backoff(attempt)
            except KubeError as error:
                self.rejected += 1
                _give_up(series, error)
                return False
            else:
                self.written += 1
                return True
            if attempt + 1 < ATTEMPTS:
                await asyncio.sleep(pause)
        self.abandoned += 1
        _give_up(series, None)
        return False

    async def _send(self, series: Series) -> None:
        count, namespace = series.count, series.about.namespace or _DEFAULT_NAMESPACE
        if series.stored:
            change = {"count": count, "lastTimestamp": format_time(series.last), "message": series.message}
            try:
                await self._api.patch(EVENTS, series.name, namespace, change)
            except NotFound:
                series.stored = 0  # it has outlived its time on the API server
        if not series.stored:
            try:
                await self._api.create(EVENTS, self._body(series, namespace), namespace)
            except AlreadyExists:  # an earlier try went in though its answer was lost, with the count of that time
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

    def _backoff(self, attempt: int) -> float:
        return self._rng.uniform(0.5, 1.0) * min(MAX_BACKOFF, FIRST_BACKOFF * 2.0**attempt)


def _give_up(series: Series, error: KubeError | None) -> None:
    about = series.about
    where = f"{about.kind} {about.namespace}/{about.name}"
    reason = str(error) if error else f"no answer in {ATTEMPTS} tries"
    log.warning("An event was not recorded", object=where, event_reason=series.reason, error=reason)
