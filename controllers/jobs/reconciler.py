"""Reconciles one job: the `sync` of operators that only describe their jobs, by hooks.

The model, for one key, which no two workers have at once: do nothing while expectations are outstanding; claim the
job's objects; decide (`controllers.jobs.decision`, pure); write the status, so that every fact is stored before the
actions that rely on it; set the timer for when time alone changes the decision; act. A job that needs no change costs
no request. Errors are raised, and the worker retries the key later. An exception in a hook is contained: it affects
only that job.

A job that needs human action (its spec is invalid, its pods are rejected, a name that it needs is taken) carries the
condition Blocked, with the reason, until it continues.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Protocol

import structlog

from controllers.jobs.api.errors import ActionsFailed, HookFailed, JobError, NameTaken
from controllers.jobs.api.types import (
    BadSpec,
    BadStatus,
    ConditionStatus,
    ConditionType,
    CreatePod,
    CreateService,
    Decision,
    JobEvent,
    JobStatus,
    JobView,
    decode_status,
    status_patch,
)
from controllers.jobs.children.control import Amend, Identity, build_pod, build_service
from controllers.jobs.controller import JobController
from controllers.jobs.decision import decide, set_condition
from controllers.jobs.executor import JobExecutor
from controllers.loop.control_loop import JobOutcome, ReconcileResult
from controllers.loop.writes import StatusWriter
from store.kube.api.errors import Invalid, KubeError
from store.kube.api.objects import Object, Resource, key_of, name_of, namespace_of, split_key, uid_of

log = structlog.get_logger(__name__)

_SHORTEST_WAIT = 0.01  # seconds: the queue's timers may fire early, and a job that comes too early must not spin
_OUTCOMES: dict[ConditionType, JobOutcome] = {
    "Created": "created",
    "Restarting": "restarted",
    "Succeeded": "successful",
    "Failed": "failed",
}
_BLOCKING: dict[type[Exception], str] = {
    BadSpec: "InvalidSpec",
    BadStatus: "InvalidStatus",
    HookFailed: "HookFailed",
    Invalid: "Rejected",
    NameTaken: "NameTaken",
}

LONGEST = 300.0  # seconds
_JITTER = 0.2


class JobHooks(Protocol):
    """The functions that the reconciler calls on an operator."""

    resource: Resource

    def view(self, job: Object) -> JobView:
        """Return the job as a decision sees it, without its gang. Raises `BadSpec`, `BadStatus`."""

    def set_cluster_spec(self, job: Object, pod: Object, replica_type: str, index: int) -> None:
        """Write into `pod`, before its creation, what it must know about the job's other pods."""


def utc_now() -> datetime:
    return datetime.now(UTC)


class JobReconciler:
    """Reconciles the jobs of one operator. `clock`: the time, in UTC; `rng`: spreads the periodic syncs."""

    def __init__(
        self,
        jobs: JobController,
        hooks: JobHooks,
        *,
        clock: Callable[[], datetime] = utc_now,
        timer: Callable[[], float],
        rng: random.Random | None = None,
    ) -> None:
        self._jobs, self._clock, self._timer = jobs, clock, timer
        self._statuses = StatusWriter(jobs.kube_client, hooks.resource)
        self._hooks = GuardedHooks(jobs, hooks)
        self._executor = JobExecutor(jobs, hooks.resource, self._hooks.build)
        self._audit = Audit(jobs.config.reconciler_sync_loop_period, rng or random.Random())

    async def sync(self, key: str) -> None:
        """Reconcile the job under `key` once. Raises `KubeError`, `JobError`, or a defect's exception."""
        started = self._timer()
        woken = self._jobs.take_wake_time(key)
        result: ReconcileResult = "error"
        try:
            result = await self._sync(key, started if woken is None else woken)
        except (KubeError, JobError):
            result = "retry"
            raise
        finally:
            self._jobs.metrics.reconciled(self._jobs.kind.kind, result, self._timer() - started)

    def job_changed(self, job: Object) -> None:
        """Queue the job, unless this state is only the echo of our own last write."""
        if not self._statuses.wrote(job):
            self._jobs.enqueue(key_of(job))

    def forget(self, job: Object) -> None:
        """Drop everything known about a deleted job."""
        self._statuses.forget(uid_of(job))
        self._audit.forget(key_of(job))
        self._jobs.expectations.forget(uid_of(job))

    async def _sync(self, key: str, woken: float) -> ReconcileResult:
        cached = self._jobs.controller.get_job_from_informer_cache(*split_key(key))
        if cached is None:
            return "ok"
        job = self._statuses.latest(cached)
        if not self._jobs.expectations.satisfied(uid_of(job)):
            self._wait_for_expectations(key, job)
            return "waiting"
        try:
            await self._reconcile(key, job, woken)
        except (BadSpec, BadStatus) as error:  # no retry: only a change of the job helps, and that wakes it
            await self._block(job, error)
            return "error"
        except JobError as failure:
            errors = failure.errors if isinstance(failure, ActionsFailed) else (failure,)
            lasting = next(filter(_blocking_reason, errors), None)
            if lasting is not None:
                await self._block(job, lasting)
            raise
        else:
            return "ok"
        finally:
            self._wait_for_expectations(key, job)

    def _wait_for_expectations(self, key: str, job: Object) -> None:
        """Set the timer that wakes the job if an expected event is lost. Forget a job that was deleted by now."""
        cached = self._jobs.controller.get_job_from_informer_cache(*split_key(key))
        if cached is None or uid_of(cached) != uid_of(job):
            self.forget(job)
        elif (seconds := self._jobs.expectations.expires_in(uid_of(job))) is not None:
            self._wake_after(key, seconds)

    async def _reconcile(self, key: str, job: Object, woken: float) -> None:
        view, gang = self._hooks.view(job), self._jobs.gang
        if gang is not None:
            view = replace(view, gang=await gang.observe(self._jobs.identity(job), view))
        can_adopt = self._jobs.can_adopt(job)
        pods = await self._jobs.get_pods_for_job(job, can_adopt)
        services = await self._jobs.get_services_for_job(job, can_adopt)
        decision = decide(view, pods, services, self._clock())
        changes = status_patch(view.status, decision.status)
        recorded = await self._statuses.write(job, changes) if changes else job
        self._announce(recorded, view.status, decision)
        if decision.next_wake is not None:
            self._wake_after(key, decision.next_wake)
        if not decision.status.finished:
            idle = not changes and not decision.actions
            self._wake_after(key, self._audit.next_look(key, idle=idle))
        if decision.actions:
            self._jobs.metrics.acted(self._jobs.kind.kind, self._timer() - woken)
        await self._executor.execute(self._jobs.identity(recorded), view, decision.actions, [*pods, *services])
        if decision.status.has("Blocked"):
            await self._change_status(recorded, decision.status, "False", "Unblocked", "The job continues")

    def _announce(self, job: Object, before: JobStatus, decision: Decision) -> None:
        for event in decision.events:
            self._jobs.tell(job, event)
        for condition, outcome in _OUTCOMES.items():
            if decision.status.has(condition) and not before.has(condition):
                self._jobs.metrics.job(self._jobs.kind.kind, outcome, namespace_of(job))

    def _wake_after(self, key: str, seconds: float) -> None:
        self._jobs.work_queue.add_after(key, max(seconds, _SHORTEST_WAIT))

    async def _block(self, job: Object, error: Exception) -> None:
        """Record on the job, once, why it is blocked."""
        event = JobEvent("Warning", _blocking_reason(error), str(error))
        job = self._statuses.latest(job)
        try:
            news = await self._change_status(job, decode_status(job.get("status")), "True", event.reason, event.message)
        except BadStatus:
            news = True
        if news:
            self._jobs.tell(job, event)

    async def _change_status(
        self, job: Object, status: JobStatus, blocked: ConditionStatus, reason: str, message: str
    ) -> bool:
        changed = set_condition(status, "Blocked", blocked, reason, message, self._clock())
        changes = status_patch(status, changed)
        if changes:
            await self._statuses.write(job, changes)
        return bool(changes)


class Audit:
    """Computes when each key is synced next. `period` and `longest` are in seconds."""

    def __init__(self, period: float, rng: random.Random, *, longest: float = LONGEST) -> None:
        self._period, self._longest, self._rng = period, max(longest, period), rng
        self._delays: dict[str, float] = {}

    def next_look(self, key: str, *, idle: bool) -> float:
        """Return the seconds until the next sync. `idle`: this sync changed nothing."""
        delay = min(self._delays.get(key, self._period / 2) * 2, self._longest) if idle else self._period
        self._delays[key] = delay
        return delay * (1 + self._rng.random() * _JITTER)

    def forget(self, key: str) -> None:
        self._delays.pop(key, None)


class GuardedHooks:
    """Calls the hooks, and builds objects with them. An unexpected exception of a hook becomes `HookFailed`."""

    def __init__(self, jobs: JobController, hooks: JobHooks) -> None:
        self._jobs, self._hooks = jobs, hooks

    def view(self, job: Object) -> JobView:
        """See `JobHooks.view`."""
        with _guarded("view", key_of(job)):
            return self._hooks.view(job)

    def build(self, identity: Identity, view: JobView, creation: CreatePod | CreateService) -> Object:
        """Build the object to create. Overruled template fields become Events. Raises `BadSpec`, `HookFailed`."""
        spec = view.replica_specs[creation.type]
        if isinstance(creation, CreateService):
            container = view.default_container
            return build_service(identity, creation.type, creation.index, spec, default_container=container)
        amendments = self._amendments(identity.job, creation)
        pod, warnings = build_pod(identity, creation.type, creation.index, spec, amendments=amendments)
        for warning in warnings:
            self._jobs.tell(identity.job, warning)
        return pod

    def _amendments(self, job: Object, creation: CreatePod) -> Iterator[Amend]:
        yield partial(self._set_cluster_spec, job, creation)
        if self._jobs.gang is not None:
            yield partial(self._jobs.gang.kind.decorate, group=name_of(job), replica_type=creation.type)

    def _set_cluster_spec(self, job: Object, creation: CreatePod, pod: Object) -> None:
        with _guarded("set_cluster_spec", name_of(pod)):
            self._hooks.set_cluster_spec(job, pod, creation.type, creation.index)


@contextmanager
def _guarded(hook: str, about: str) -> Iterator[None]:
    try:
        yield
    except (BadSpec, BadStatus):
        raise
    except Exception as error:  # of any type: it must not pass for an error of ours
        log.exception("Operator hook failed", hook=hook, about=about)
        raise HookFailed(f"{hook} failed for {about}: {error!r}") from error


def _blocking_reason(error: Exception) -> str:
    """Return the reason of the condition Blocked; "" for an error that may pass without human action."""
    return next((reason for kind, reason in _BLOCKING.items() if isinstance(error, kind)), "")
