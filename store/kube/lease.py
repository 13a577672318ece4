"""Leader election by a Lease: of many candidates at most one leads.

The model: a candidate looks at the Lease about every `retry_period`. It takes one that nobody holds, or whose record
has not changed for as long as the record promises, measured on the candidate's own monotonic clock since it saw the
last change. Times that others wrote are never compared with ours, so clocks may differ. All writes carry the resource
version, so of two candidates that try at once one is refused.

The leader renews each `retry_period`. Once the last renewal that succeeded was *sent* `renew_deadline` ago, it
must not act any more, and its work is cancelled; others wait for `lease_duration`, which is longer, since a later
moment. Losing the lease ends `run` with `LeadershipLost`: what was known under it is not to be trusted, so the process
should start anew. The lease is released only after the work has ended.

A process that was stopped and continued knows nothing of it until its timers ring, so a write must ask first:
`store.kube.fence.FencedApi` looks at the clock before each one. What remains is a request that was already on its way,
for Kubernetes can't check a fencing token on other objects.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

from store.kube.api import KubeApi
from store.kube.errors import Conflict, KubeError, NotFound
from store.kube.objects import Object
from store.kube.resources import LEASES
from store.kube.times import format_micro_time

log = structlog.get_logger(__name__)

JITTER = 1.2  # a candidate waits between once and 1 + JITTER times its retry period, as in client-go
TOLERANCE = 20.0  # seconds after the lease's end for which work that was cancelled may still be ending
RELEASE_TIMEOUT = 2.0  # seconds that an orderly end may spend on the release

Lead = Callable[[], Coroutine[Any, Any, None]]


class LeadershipLost(KubeError):
    """We do not lead, or can't be sure any more: nothing may be written."""


class Election:
    """One candidate for the Lease `namespace`/`name`. `identity`: unlike every other candidate's, in each process anew.

    Durations in seconds; raises `ValueError` for those that can't work together. `clock`: monotonic seconds, must
    advance as the event loop's does. `wall_clock`: Unix seconds, only written for people to read.
    For messages: `leader` (who held the lease when we last looked, "" for nobody), `last_error` ("" when all is well).
    """

    def __init__(
        self,
        api: KubeApi,
        namespace: str,
        name: str,
        identity: str,
        *,
        lease_duration: float = 15.0,
        renew_deadline: float = 10.0,
        retry_period: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        rng: random.Random | None = None,
    ) -> None:
        check_timings(lease_duration, renew_deadline, retry_period)
        self.namespace, self.name, self.identity = namespace, name, identity
        self.leader = self.last_error = ""
        self._api, self._clock, self._wall_clock, self._rng = api, clock, wall_clock, rng or random.Random()
        self._lease_duration, self._renew_deadline, self._retry_period = lease_duration, renew_deadline, retry_period
        self._seen: Object = {}  # the lease's spec when we last looked, and when it was first seen like this
        self._seen_at = 0.0
        self._held: Object | None = None  # the lease as we wrote it last, while we lead
        self._renewed_at = -math.inf  # when the last renewal that succeeded was sent
        self._working = False

    @property
    def is_leader(self) -> bool:
        """Whether it is safe to act at this moment."""
        return self._held is not None and self._clock() < self._deadline()

    def check(self) -> None:
        """Raise `LeadershipLost` unless it is safe to act at this moment."""
        if not self.is_leader:
            raise self._lost()

    def stalled(self) -> str:
        """Why a restart is needed: the work goes on though others may lead by now. Else ""."""
        overdue = self._clock() - self._renewed_at - self._lease_duration
        if self._working and overdue > TOLERANCE:
            return f"the lease {self._where} ended {overdue:.0f} s ago, but the work done under it has not"
        return ""

    async def run(self, lead: Lead) -> None:
        """Wait for the lease, then run `lead` under it; returns when that does.

        Raises `LeadershipLost` after `lead` was cancelled and has ended, and whatever `lead` raises. When cancelled,
        cancels `lead`, goes on renewing until it has ended, and releases; a further cancellation is passed on to it.
        """
        await self._acquire()
        self._working = True
        work = asyncio.create_task(lead(), name=f"work under the lease {self._where}")
        keeping = asyncio.create_task(self._keep(), name=f"renewals of the lease {self._where}")
        try:
            await asyncio.wait([work, keeping], return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _end(work, keeping)
            self._working = False
            keeping.cancel()
            await asyncio.wait([keeping])
            await self._release()
            if not work.cancelled():
                work.result()
        if not keeping.cancelled():
            keeping.result()
            raise self._lost()

    async def _acquire(self) -> None:
        told = ""
        while not await self._attempt(self._take, self._renew_deadline):
            if self.leader not in ("", told):
                log.info("Another leads; we wait", lease=self._where, identity=self.identity, leader=self.leader)
                told = self.leader
            await asyncio.sleep(self._rng.uniform(1.0, 1.0 + JITTER) * self._retry_period)
        log.info("We lead", lease=self._where, identity=self.identity)

    async def _keep(self) -> None:
        """Renew the lease until it is lost."""
        while self.is_leader:
            await asyncio.sleep(min(self._retry_period, self._deadline() - self._clock()))
            if (left := self._deadline() - self._clock()) > 0:
                await self._attempt(self._renew, min(left, self._renew_deadline / 2))
        log.error("The lease is lost", lease=self._where, identity=self.identity, leader=self.leader)

    async def _attempt(self, call: Callable[[], Coroutine[Any, Any, bool]], patience: float) -> bool:
        """Whether the call says that we hold the lease; not when it fails or takes longer than `patience` seconds."""
        try:
            async with asyncio.timeout(patience):
                held = await call()
        except (KubeError, TimeoutError) as error:
            reason = str(error) or "no answer in time"
            if not self.last_error:
                log.warning("The lease can't be taken or renewed", lease=self._where, error=reason)
            self.last_error = reason
            return False
        self.last_error = ""
        return held

    async def _renew(self) -> bool:
        assert self._held is not None
        sent = self._clock()
        try:
            self._hold(await self._api.replace(LEASES, self._claim(self._held)), sent)
        except (Conflict, NotFound):  # changed by somebody, or by a renewal of ours whose answer was lost
            if not await self._take():
                self._held = None
        return self._held is not None

    async def _take(self) -> bool:
        """Take the lease if it is there for us; whether we hold it now."""
        found = await self._look()
        if not self._is_free():
            return False
        sent = self._clock()
        if found is None:
            self._hold(await self._api.create(LEASES, self._claim(None), self.namespace), sent)
        else:
            self._hold(await self._api.replace(LEASES, self._claim(found)), sent)
        return True

    async def _look(self) -> Object | None:
        try:
            found: Object | None = await self._api.get(LEASES, self.name, self.namespace)
        except NotFound:
            found = None
        spec = (found or {}).get("spec") or {}
        if spec != self._seen:
            self._seen, self._seen_at = spec, self._clock()
        self.leader = spec.get("holderIdentity") or ""
        return found

    def _is_free(self) -> bool:
        if self.leader in ("", self.identity):
            return True
        promised = float(self._seen.get("leaseDurationSeconds") or self._lease_duration)
        return self._clock() - self._seen_at >= promised

    def _claim(self, found: Object | None) -> Object:
        """The lease with us as its holder. What others may have written beside that stays."""
        now = format_micro_time(self._wall_clock())
        spec: Object = dict((found or {}).get("spec") or {})
        if spec.get("holderIdentity") != self.identity:
            spec["acquireTime"] = now
            spec["leaseTransitions"] = int(spec.get("leaseTransitions") or 0) + 1 if found else 0
        spec |= {
            "holderIdentity": self.identity,
            "leaseDurationSeconds": math.ceil(self._lease_duration),
            "renewTime": now,
        }
        return self._with_spec(found, spec)

    def _with_spec(self, found: Object | None, spec: Object) -> Object:
        metadata = found["metadata"] if found else {"name": self.name, "namespace": self.namespace}
        return {"apiVersion": LEASES.api_version, "kind": LEASES.kind, "metadata": metadata, "spec": spec}

    def _hold(self, stored: Object, sent: float) -> None:
        self._held, self._renewed_at, self.leader = stored, sent, self.identity

    async def _release(self) -> None:
        """Leave the lease to others, if it is still ours."""
        if self._held is None:
            return
        held, self._held = self._held, None
        now = format_micro_time(self._wall_clock())
        spec = held["spec"] | {"leaseDurationSeconds": 1, "renewTime": now, "acquireTime": now}
        del spec["holderIdentity"]
        try:
            async with asyncio.timeout(RELEASE_TIMEOUT):
                await self._api.replace(LEASES, self._with_spec(held, spec))
        except (KubeError, TimeoutError) as error:
            log.warning("The lease was not released; it will run out", lease=self._where, error=str(error))
        else:
            self.leader = ""
            log.info("The lease is released", lease=self._where)

    def _deadline(self) -> float:
        return self._renewed_at + self._renew_deadline

    def _lost(self) -> LeadershipLost:
        held = f"; {self.leader} holds it" if self.leader not in ("", self.identity) else ""
        reason = f": {self.last_error}" if self.last_error else ""
        return LeadershipLost(f"the lease {self._where} is not ours, or was not renewed in time{held}{reason}")

    @property
    def _where(self) -> str:
        return f"{self.namespace}/{self.name}"


async def _end(work: asyncio.Task[None], keeping: asyncio.Task[None]) -> None:
    """Cancel `work` and wait for its end; cancel it once more when we are cancelled, or when `keeping` ends before."""
    while not work.done():
        work.cancel()
        try:
            await asyncio.wait(
                [task for task in (work, keeping) if not task.done()], return_when=asyncio.FIRST_COMPLETED
            )
        except asyncio.CancelledError:
            continue


def check_timings(lease_duration: float, renew_deadline: float, retry_period: float) -> None:
    """Raise `ValueError` unless a leader gives up before others may take over, and has time for a second attempt."""
    if retry_period <= 0:
        raise ValueError(f"retry period: {retry_period:g} s must be above 0")
    if not lease_duration > renew_deadline > JITTER * retry_period:
        raise ValueError(
            f"the lease ({lease_duration:g} s) must be longer than the renew deadline ({renew_deadline:g} s), and that "
            f"longer than {JITTER} times the retry period ({retry_period:g} s)"
        )
