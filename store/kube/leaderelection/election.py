"""Leader election by a Lease: of many candidates at most one leads, and only it can write.

The model: a candidate reads the Lease about every `retry_period`. It takes a Lease that is free, or whose record did
not change for its lease duration, measured on the candidate's own monotonic clock since the last change it saw.
Times written by other candidates are never compared with ours, so clocks may differ. All writes carry the resource
version, so of two candidates that try at once one is refused.

The leader renews each `retry_period`. Once the last successful renewal was *sent* `renew_deadline` ago, it must not act
any more, and its work is cancelled; other candidates wait for `lease_duration`, which is longer and starts later.
Losing the lease ends `run` with `LeadershipLost`: the state read under it is not reliable, so the process should
restart. The lease is released only after the work has ended.

A process that was stopped and continued does not notice until its timers fire, so each write checks first: `FencedApi`
reads the clock when the caller requests a write, and again when it is sent, maybe much later. A request that was
already on its way remains possible, because Kubernetes can't check a fencing token on other objects.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import structlog

from store.kube.api.errors import Conflict, KubeError, NotFound
from store.kube.api.objects import LEASES, Object, Resource, format_micro_time
from store.kube.api.protocol import KubeApi, PatchType, Propagation, checked_on_send

log = structlog.get_logger(__name__)

JITTER = 1.2  # a candidate waits between once and 1 + JITTER times its retry period, as in client-go
TOLERANCE = 20.0  # seconds after the lease's end for which cancelled work may still be running
RELEASE_TIMEOUT = 2.0  # seconds that an orderly end may spend on the release

Lead = Callable[[], Coroutine[Any, Any, None]]


class LeadershipLost(KubeError):
    """The candidate does not lead, or can't be sure: nothing may be written."""


class Election:
    """One candidate for the Lease `namespace`/`name`. `identity`: unique to this candidate and process.

    Durations in seconds; raises `ValueError` for those that can't work together. `clock`: monotonic seconds, must
    advance as the event loop's does. `wall_clock`: Unix seconds, only written for people to read.
    For messages: `leader` (the holder at the last read, "" without one), `last_error` ("" without one).
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
        self._where = f"{namespace}/{name}"
        self.leader = self.last_error = ""
        self._api, self._clock, self._wall_clock, self._rng = api, clock, wall_clock, rng or random.Random()
        self._lease_duration, self._renew_deadline, self._retry_period = lease_duration, renew_deadline, retry_period
        self._seen: Object = {}  # the lease's spec at the last read, and the time when this spec was first seen
        self._seen_at = 0.0
        self._held: Object | None = None  # the lease as last written by us, while we lead
        self._may_hold = False  # a write of ours that takes the lease was sent, and no later read shows another holder
        self._renewed_at = -math.inf  # when the last successful renewal was sent
        self._deadline = -math.inf  # until when it counts
        self._working = False

    @property
    def is_leader(self) -> bool:
        """Return whether it is safe to act at this moment."""
        return self._held is not None and self._clock() < self._deadline

    def check(self) -> None:
        """Raise `LeadershipLost` unless it is safe to act at this moment."""
        if not self.is_leader:
            raise self._lost()

    def stalled(self) -> str:
        """Return why a restart is needed, or "": the work continues although another candidate may lead by now."""
        overdue = self._clock() - self._renewed_at - self._lease_duration
        if self._working and overdue > TOLERANCE:
            return f"the lease {self._where} ended {overdue:.0f} s ago, but the work done under it has not"
        return ""

    async def run(self, lead: Lead) -> None:
        """Wait for the lease, then run `lead` under it. Return when `lead` does.

        Raises `LeadershipLost` after `lead` was cancelled and has ended, and the errors of `lead`. When cancelled,
        cancels `lead`, renews until it has ended, and releases the lease; further cancellations are passed to `lead`.
        """
        last_logged = ""
        try:
            while not await self._attempt(self._take, self._renew_deadline):
                if self.leader not in ("", last_logged):
                    last_logged = self.leader
                    log.info(
                        "Waiting; another candidate leads",
                        lease=self._where,
                        identity=self.identity,
                        leader=self.leader,
                    )
                await asyncio.sleep(self._rng.uniform(1.0, 1.0 + JITTER) * self._retry_period)
        except asyncio.CancelledError:
            await self._release()
            raise
        log.info("Lease acquired; this process leads", lease=self._where, identity=self.identity)
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

    async def _keep(self) -> None:
        """Renew the lease until it is lost."""
        while self.is_leader:
            await asyncio.sleep(min(self._retry_period, self._deadline - self._clock()))
            if (left := self._deadline - self._clock()) > 0:
                await self._attempt(self._renew, min(left, self._renew_deadline / 2))
        log.error("Lease lost", lease=self._where, identity=self.identity, leader=self.leader)

    async def _attempt(self, call: Callable[[], Coroutine[Any, Any, bool]], timeout: float) -> bool:
        """Return whether we hold the lease after the call; False when it fails or takes over `timeout` seconds."""
        try:
            async with asyncio.timeout(timeout):
                held = await call()
        except (KubeError, TimeoutError) as error:
            reason = str(error) or "no answer in time"
            if not self.last_error:
                log.warning("Could not acquire or renew the lease", lease=self._where, error=reason)
            self.last_error = reason
            return False
        self.last_error = ""
        return held

    async def _renew(self) -> bool:
        assert self._held is not None
        sent = self._clock()
        try:
            self._hold(await self._api.replace(LEASES, self._claim(self._held)), sent)
        except (Conflict, NotFound):  # changed by another client, or by our own renewal whose answer was lost
            if not await self._take():
                self._held = None
        return self._held is not None

    async def _take(self) -> bool:
        """Take the lease if it is free. Return whether we hold it now."""
        found = await self._look()
        promised = float(self._seen.get("leaseDurationSeconds") or self._lease_duration)
        if self.leader not in ("", self.identity) and self._clock() - self._seen_at < promised:
            return False
        self._may_hold, sent = True, self._clock()
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
        self._may_hold = self.leader == self.identity
        return found

    def _claim(self, found: Object | None) -> Object:
        """Return the lease with us as its holder. Fields written by other clients stay."""
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
        self._held, self.leader = stored, self.identity
        self._renewed_at, self._deadline = sent, sent + self._renew_deadline

    async def _release(self) -> None:
        """Release the lease, if it is still ours."""
        lease, self._held = self._held, None
        try:
            async with asyncio.timeout(RELEASE_TIMEOUT):
                while self._may_hold:
                    found = lease or await self._look()
                    spec: Object = dict((found or {}).get("spec") or {})
                    if spec.pop("holderIdentity", "") != self.identity:
                        return
                    now = format_micro_time(self._wall_clock())
                    spec |= {"leaseDurationSeconds": 1, "renewTime": now, "acquireTime": now}
                    try:
                        await self._api.replace(LEASES, self._with_spec(found, spec))
                    except (Conflict, NotFound):
                        lease = None  # changed by a write of ours that was cancelled or not answered, or by another
                    else:
                        self.leader, self._may_hold = "", False
                        log.info("Lease released", lease=self._where)
        except (KubeError, TimeoutError) as error:
            reason = str(error) or "no answer in time"
            log.warning("Could not release the lease; it will expire", lease=self._where, error=reason)

    def _lost(self) -> LeadershipLost:
        held = f"; {self.leader} holds it" if self.leader not in ("", self.identity) else ""
        reason = f": {self.last_error}" if self.last_error else ""
        return LeadershipLost(f"the lease {self._where} is not ours, or was not renewed in time{held}{reason}")


async def _end(work: asyncio.Task[None], keeping: asyncio.Task[None]) -> None:
    """Cancel `work` and wait for its end; cancel it again when this task is cancelled, or when `keeping` ends first."""
    while not work.done():
        work.cancel()
        try:
            await asyncio.wait(
                [task for task in (work, keeping) if not task.done()], return_when=asyncio.FIRST_COMPLETED
            )
        except asyncio.CancelledError:
            continue


def check_timings(lease_duration: float, renew_deadline: float, retry_period: float) -> None:
    """Raise `ValueError` unless a leader stops before another may take over, and has time for a second attempt."""
    if retry_period <= 0:
        raise ValueError(f"retry period: {retry_period:g} s must be above 0")
    if not lease_duration > renew_deadline > JITTER * retry_period:
        raise ValueError(
            f"the lease ({lease_duration:g} s) must be longer than the renew deadline ({renew_deadline:g} s), and that "
            f"longer than {JITTER} times the retry period ({retry_period:g} s)"
        )


class FencedApi:
    """A `KubeApi` that writes only while `election` is won; every other write raises `LeadershipLost`. Reads pass."""

    def __init__(self, api: KubeApi, election: Election) -> None:
        self._api, self._election = api, election
        self.get, self.list, self.watch, self.served = api.get, api.list, api.watch, api.served

    async def create(
        self, resource: Resource, body: Object, namespace: str = "", *, name: str = "", subresource: str = ""
    ) -> Object:
        with checked_on_send(self._election.check):
            return await self._api.create(resource, body, namespace, name=name, subresource=subresource)

    async def replace(self, resource: Resource, body: Object, *, subresource: str = "") -> Object:
        with checked_on_send(self._election.check):
            return await self._api.replace(resource, body, subresource=subresource)

    async def patch(
        self,
        resource: Resource,
        name: str,
        namespace: str,
        patch: Object | Sequence[Any],
        *,
        patch_type: PatchType = "merge",
        subresource: str = "",
    ) -> Object:
        with checked_on_send(self._election.check):
            return await self._api.patch(
                resource, name, namespace, patch, patch_type=patch_type, subresource=subresource
            )

    async def delete(
        self,
        resource: Resource,
        name: str,
        namespace: str = "",
        *,
        uid: str = "",
        grace_period: int | None = None,
        propagation: Propagation | None = None,
    ) -> None:
        with checked_on_send(self._election.check):
            await self._api.delete(
                resource, name, namespace, uid=uid, grace_period=grace_period, propagation=propagation
            )
