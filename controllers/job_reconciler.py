"""One job brought nearer to what it should be: the `sync` of operators that describe their jobs.

The model, for one key, which no two workers have at once: nothing while something asked for earlier is not seen yet;
claim what is the job's; decide (`controllers.job_decision`, pure); write the status, so that every fact is on record
before the actions that rely on it; set the timer for when time alone changes the decision; act. A job that needs
nothing costs no request. Whatever fails is raised, and the worker tries the key again later.

A job that can't go on until a person does something (its spec is not understood, its pods are refused, a name that it
needs belongs to somebody else) carries the condition Blocked, with the reason, until it goes on.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime

from controllers.audit import Audit
from controllers.job_conditions import set_condition
from controllers.job_controller import JobController
from controllers.job_decision import decide
from controllers.job_errors import ActionsFailed, HookFailed, JobError, NameTaken
from controllers.job_executor import JobExecutor
from controllers.job_hooks import GuardedHooks, JobHooks
from controllers.job_metrics import JobOutcome, ReconcileResult
from controllers.job_status import BadStatus, ConditionStatus, ConditionType, JobStatus, decode_status, status_patch
from controllers.job_types import BadSpec, Decision, JobEvent, JobView
from controllers.status_writer import StatusWriter
from store.kube.errors import Invalid, KubeError
from store.kube.objects import Object, key_of, namespace_of, split_key, uid_of

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


def _blocking_reason(error: Exception) -> str:
    """Why it takes a person to go on; "" for what may pass by itself."""
    return next((reason for kind, reason in _BLOCKING.items() if isinstance(error, kind)), "")


def utc_now() -> datetime:
    return datetime.now(UTC)


class JobReconciler:
    """Reconciles the jobs of one operator. `clock`: the time, in UTC; `rng`: spreads the audits."""

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
        """Bring the job under `key` nearer to its spec. Raises what it met, `KubeError` or `JobError` above all."""
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
        """Wake the job, unless it only shows what was just written on it."""
        if not self._statuses.wrote(job):
            self._jobs.enqueue(key_of(job))

    def forget(self, job: Object) -> None:
        """The job was deleted."""
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
        except (BadSpec, BadStatus) as error:  # nothing to try again before somebody changes the job, which wakes it
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
        """Events will wake the job; should one be lost, time does. A job that went meanwhile waits for nothing."""
        cached = self._jobs.controller.get_job_from_informer_cache(*split_key(key))
        if cached is None or uid_of(cached) != uid_of(job):
            self.forget(job)
        elif (seconds := self._jobs.expectations.expires_in(uid_of(job))) is not None:
            self._wake_after(key, seconds)

    async def _reconcile(self, key: str, job: Object, woken: float) -> None:
        view = await self._view(job)
        can_adopt = self._jobs.can_adopt(job)
        pods = await self._jobs.get_pods_for_job(job, can_adopt)
        services = await self._jobs.get_services_for_job(job, can_adopt)
        decision = decide(view, pods, services, self._clock())
        changes = status_patch(view.status, decision.status)
        recorded = await self._statuses.write(job, changes) if changes else job
        self._announce(recorded, view.status, decision)
        self._set_timers(key, decision, idle=not changes and not decision.actions)
        if decision.actions:
            self._jobs.metrics.acted(self._jobs.kind.kind, self._timer() - woken)
        await self._act(recorded, view, decision, [*pods, *services])

    async def _view(self, job: Object) -> JobView:
        view, gang = self._hooks.view(job), self._jobs.gang
        return view if gang is None else replace(view, gang=await gang.observe(self._jobs.identity(job), view))

    def _announce(self, job: Object, before: JobStatus, decision: Decision) -> None:
        for event in decision.events:
            self._jobs.tell(job, event)
        for condition, outcome in _OUTCOMES.items():
            if decision.status.has(condition) and not before.has(condition):
                self._jobs.metrics.job(self._jobs.kind.kind, outcome, namespace_of(job))

    def _set_timers(self, key: str, decision: Decision, *, idle: bool) -> None:
        if decision.next_wake is not None:
            self._wake_after(key, decision.next_wake)
        if not decision.status.finished:
            self._wake_after(key, self._audit.next_look(key, idle=idle))

    def _wake_after(self, key: str, seconds: float) -> None:
        self._jobs.work_queue.add_after(key, max(seconds, _SHORTEST_WAIT))

    async def _act(self, job: Object, view: JobView, decision: Decision, children: list[Object]) -> None:
        await self._executor.execute(self._jobs.identity(job), view, decision.actions, children)
        if decision.status.has("Blocked"):
            await self._change_status(job, decision.status, "False", "Unblocked", "The job goes on")

    async def _block(self, job: Object, error: Exception) -> None:
        """Say on the job why it can't go on, once."""
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
