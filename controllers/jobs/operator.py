"""The base class of operators, a complete operator for one kind of job, and the reconciler that it runs.

The model: a `JobOperator` is the `ControllerInterface` of a `JobController` and the hooks of a `JobReconciler`, and
owns both, with the informer of its jobs. A derived class names its resource and overrides, where the defaults do not
fit, how a job is read (`view`) and what its pods must know about each other (`set_cluster_spec`). `run` owns every
task.

    class TrainJobs(JobOperator):
        resource = Resource("example.dev", "v1", "trainjobs", "TrainJob")

    async with await KubeClient.connect() as api:
        await TrainJobs(api).run()

Several replicas of an operator need an `Election` and a `FencedApi` of `store.kube.leaderelection.election` around
their client.

The reconciler does this for one key, which no two workers have at once: nothing while expectations are outstanding;
claim the job's objects; decide (`controllers.jobs.decision`, pure); write the status, so that every fact is stored
before the actions that rely on it; set the timer for when time alone changes the decision; act. A job that needs no
change costs no request. Errors are raised, and the worker retries the key later. An exception in a hook is contained:
it affects only that job.

A job that needs human action (its spec is invalid, its pods are rejected, a name that it needs is taken) carries the
condition Blocked, with the reason, until it continues.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, ClassVar, get_args

import structlog

from controllers.jobs.api import (
    RESTART_ANNOTATION,
    ActionsFailed,
    BadSpec,
    CleanPodPolicy,
    Companion,
    CreatePod,
    CreateService,
    GroupVersion,
    GroupVersionKind,
    HookFailed,
    JobError,
    JobEvent,
    JobView,
    NameTaken,
    RestartPolicy,
    RunPolicy,
    SuccessPolicy,
    SuccessRule,
    Wording,
    decode,
    decode_replica_specs,
    hived_request,
    is_retryable,
)
from controllers.jobs.control import Amend, Identity, build_pod, build_service
from controllers.jobs.controller import JobController, JobInformers
from controllers.jobs.decision import decide
from controllers.jobs.executor import JobExecutor
from controllers.jobs.gang import GangKind, join_affinity_group
from controllers.jobs.replicas import SIZE_ANNOTATION, size_of
from controllers.jobs.status import (
    BadStatus,
    ConditionStatus,
    ConditionType,
    JobStatus,
    decode_status,
    set_condition,
    status_patch,
)
from controllers.loop.control_loop import JobMetrics, JobOutcome, ObjectHandler, ReconcileResult, StatusWriter
from controllers.loop.workqueue import MetricsProvider, WorkQueue
from store.kube.api.errors import Invalid, KubeError
from store.kube.api.objects import (
    Object,
    Resource,
    annotations_of,
    is_deleting,
    join_key,
    key_of,
    name_of,
    namespace_of,
    split_key,
    uid_of,
)
from store.kube.api.protocol import KubeApi
from store.kube.events import EventRecorder
from store.kube.informer.informer import Informer

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
OVERDUE = 10.0  # seconds without an expected event after which its watch counts as forgotten by the API server
_JITTER = 0.2


utc_now = partial(datetime.now, UTC)


class JobOperator:
    """Runs the jobs of `resource` in one namespace or, with "", in all.

    `gang`: how pods of a job become a gang; None: each is scheduled separately. `reconciler_sync_period`: seconds, see
    `JobControllerConfiguration`. `force_delete_after`: seconds, see `JobView`. `clock`: the time, in UTC; `timer`:
    monotonic seconds.
    """

    resource: Resource
    """The jobs: a custom resource with a status subresource."""
    replica_specs_field: ClassVar[str] = "replicaSpecs"
    """Where the spec has its replicas, by type."""
    default_container: ClassVar[str] = ""
    """The container whose exit code and ports count; "" for the first."""
    chief_types: ClassVar[Collection[str]] = ("Chief", "Master")
    """Types whose success is the job's."""
    worker_type: ClassVar[str] = "Worker"
    """The type whose first replica acts as the chief if there is none."""
    service_types: ClassVar[Collection[str] | None] = None
    """Types whose replicas get a service each; None for all."""
    success_rule: ClassVar[SuccessRule] = "FirstWorker"
    """The workers that decide about success if there is no chief and the job's `successPolicy` is empty."""
    leaders_only: ClassVar[bool] = False
    """Whether chiefs, or without them workers, alone make a job Running or Succeeded."""
    wording: ClassVar[Wording] = Wording()
    """The reasons and messages of conditions."""
    default_restart_policy: ClassVar[RestartPolicy] = "Never"
    default_clean_pod_policy: ClassVar[CleanPodPolicy] = "Running"
    reports_selectors: ClassVar[bool] = False
    """Whether `replicaStatuses` has the selector of each type's pods, for the scale subresource."""
    status_is_pruned: ClassVar[bool] = False
    """Whether the CRD may drop the status fields that kubeflow does not have; they are then kept in a condition."""
    companion: Resource | None = None
    """The kind of the one more object that a job may have, under the job's name; see `companion_body`."""

    def __init__(
        self,
        api: KubeApi,
        *,
        namespace: str = "",
        workers: int = 4,
        gang: GangKind | None = None,
        reconciler_sync_period: float = 15.0,
        force_delete_after: float | None = None,
        metrics: JobMetrics | None = None,
        queue_metrics: MetricsProvider | None = None,
        clock: Callable[[], datetime] = utc_now,
        timer: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self.api, self.workers, self.force_delete_after = api, workers, force_delete_after
        self.recorder = EventRecorder(api, self.controller_name(), clock=lambda: clock().timestamp(), rng=rng)
        self.informer = Informer(api, self.resource, namespace=namespace, clock=timer, rng=rng)
        self.jobs = JobController(
            self,
            reconciler_sync_period,
            gang is not None,
            api,
            JobInformers(api, self, namespace=namespace, clock=timer, rng=rng),
            f"{self.resource.plural}/{namespace}".rstrip("/"),
            recorder=self.recorder,
            gang_kind=gang,
            companion=self.companion,
            metrics=metrics,
            queue_metrics=queue_metrics,
            clock=timer,
        )
        self.queue: WorkQueue[str] = self.jobs.work_queue
        self.reconciler = JobReconciler(self.jobs, self, clock=clock, timer=timer, rng=rng)
        self.informer.add_handler(ObjectHandler(self.reconciler.job_changed, self._gone))

    async def run(self) -> None:
        """Operate until cancelled. Raises `NotServed` when the API server does not know what gangs need."""
        await self.jobs.prepare()
        async with asyncio.TaskGroup() as group:
            events = group.create_task(self.recorder.run())
            try:
                await self.jobs.run(self.reconciler.sync, self.informer, workers=self.workers)
            finally:
                events.cancel()

    @property
    def informers(self) -> list[Informer]:
        return [self.informer, *self.jobs.child_informers]

    def problems(self) -> Mapping[str, str]:
        """Return why the operator does not work, by component; "" for a component without a problem."""
        waiting = "" if self.jobs.has_synced else "the caches are not complete yet"
        return {"operator": waiting, **{each.resource.plural: each.problem for each in self.informers}}

    def view(self, job: Object) -> JobView:
        """Return the job as decisions see it. This reads kubeflow's form: `replicaSpecs`, `runPolicy`, `successPolicy`.

        Raises `BadSpec`, naming the field, or `BadStatus`.
        """
        spec, path = job.get("spec") or {}, f"spec.{self.replica_specs_field}"
        success_policy = spec.get("successPolicy") or ""
        if success_policy not in get_args(SuccessPolicy):
            known = ", ".join(filter(None, get_args(SuccessPolicy)))
            raise BadSpec(f"spec.successPolicy: {success_policy!r} is not one of {known}")
        replica_specs = decode_replica_specs(
            spec.get(self.replica_specs_field), path, restart_policy=self.default_restart_policy
        )
        run_policy = {} if spec.get("runPolicy") is None else spec["runPolicy"]
        if isinstance(run_policy, dict):
            run_policy = {"cleanPodPolicy": self.default_clean_pod_policy} | run_policy
        return JobView(
            name=name_of(job),
            namespace=namespace_of(job),
            kind=self.resource.kind,
            replica_specs=replica_specs,
            type_label=self.get_replica_type_label_key(),
            index_label=self.get_replica_index_label_key(),
            run_policy=decode(run_policy, RunPolicy, "spec.runPolicy"),
            status=decode_status(job.get("status")),
            success_rule="AllWorkers" if success_policy == "AllWorkers" else self.success_rule,
            leaders_only=self.leaders_only,
            wording=self.wording,
            is_retryable=self.is_retryable,
            deleting=is_deleting(job),
            chief_types=self.chief_types,
            worker_type=self.worker_type,
            service_types=self.service_types,
            default_container=self.default_container,
            selector=self.jobs.gen_labels(name_of(job)) if self.reports_selectors else None,
            force_delete_after=self.force_delete_after,
            restart_whole=annotations_of(job).get(RESTART_ANNOTATION) == "job",
        )

    def manages(self, job: Object) -> bool:
        """Return whether the job is this operator's; it makes no request about others."""
        return True

    def is_retryable(self, code: int | None) -> bool:
        """Return whether a replica with the policy `ExitCode` is retried; None: the container reported no exit code."""
        return is_retryable(code)

    def companion_body(self, job: Object, view: JobView) -> Object | None:
        """Return our fields (such as `{"spec": …}`) of the job's `companion`; None if the active job needs none."""
        return None

    def set_cluster_spec(self, job: Object, pod: Object, replica_type: str, index: int) -> None:
        """Do nothing. Override this to write into `pod`, before its creation, what it must know about the others."""

    def controller_name(self) -> str:
        return f"{self.resource.kind.lower()}-controller"

    def get_api_group_version_kind(self) -> GroupVersionKind:
        return GroupVersionKind(self.resource.group, self.resource.version, self.resource.kind)

    def get_api_group_version(self) -> GroupVersion:
        return self.get_api_group_version_kind().group_version

    def get_group_name_label_key(self) -> str:
        return f"{self.resource.group}/operator-name"

    def get_group_name_label_value(self) -> str:
        return self.controller_name()

    def get_job_name_label_key(self) -> str:
        return f"{self.resource.group}/job-name"

    def get_replica_type_label_key(self) -> str:
        return f"{self.resource.group}/replica-type"

    def get_replica_index_label_key(self) -> str:
        return f"{self.resource.group}/replica-index"

    def get_job_from_informer_cache(self, namespace: str, name: str) -> Object | None:
        return self.informer.get(join_key(namespace, name))

    async def get_job_from_api_client(self, namespace: str, name: str) -> Object:
        return await self.api.get(self.resource, name, namespace)

    def _gone(self, job: Object) -> None:
        self.reconciler.forget(job)
        if self.manages(job):
            self.jobs.metrics.job(self.resource.kind, "deleted", namespace_of(job))


class JobReconciler:
    """Reconciles the jobs of one operator. `clock`: the time, in UTC; `rng`: spreads the periodic syncs."""

    def __init__(
        self,
        jobs: JobController,
        hooks: JobOperator,
        *,
        clock: Callable[[], datetime] = utc_now,
        timer: Callable[[], float],
        rng: random.Random | None = None,
    ) -> None:
        self._jobs, self._hooks, self._clock, self._timer = jobs, hooks, clock, timer
        self._statuses = StatusWriter(jobs.kube_client, hooks.resource)
        self._executor = JobExecutor(jobs, hooks.resource, self._build, self._companion_body)
        self._resync = Resync(jobs.config.reconciler_sync_loop_period, rng or random.Random())
        self._generations: dict[str, Any] = {}  # of specs whose warnings are known, by the UID of the job

    async def sync(self, key: str) -> None:
        """Reconcile the job under `key` once. Raises `KubeError`, `JobError`, or a defect's exception."""
        started = self._timer()
        woken = self._jobs.work_queue.take_wake_time(key)
        result: ReconcileResult = "error"
        try:
            cached = self._jobs.controller.get_job_from_informer_cache(*split_key(key))
            if cached is None or not self._hooks.manages(cached):
                result = "ok"
                return
            job = self._statuses.latest(cached)
            if self._jobs.expectations.outstanding(uid_of(job)):
                self._wait_for_expectations(key, job)
                result = "waiting"
                return
            try:
                await self._reconcile(key, job, started if woken is None else woken)
            except (BadSpec, BadStatus) as error:  # no retry: only a change of the job helps, and that wakes it
                await self._block(job, error)
            except JobError as failure:
                errors = failure.errors if isinstance(failure, ActionsFailed) else (failure,)
                lasting = next(filter(_blocking_reason, errors), None)
                if lasting is not None:
                    await self._block(job, lasting)
                raise
            else:
                result = "ok"
            finally:
                self._wait_for_expectations(key, job)
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
        self._resync.forget(key_of(job))
        self._jobs.expectations.forget(uid_of(job))
        self._generations.pop(uid_of(job), None)

    def _wait_for_expectations(self, key: str, job: Object) -> None:
        """Set the timer that wakes the job if an expected event is lost; watch again when one is overdue. Forget a job
        that was deleted by now."""
        cached = self._jobs.controller.get_job_from_informer_cache(*split_key(key))
        if cached is None or uid_of(cached) != uid_of(job):
            self.forget(job)
        elif (seconds := self._jobs.expectations.expires_in(uid_of(job))) is not None:
            if self._jobs.expectations.unseen_for(uid_of(job)) >= OVERDUE:
                self._jobs.watch_again(OVERDUE)
            self._wake_after(key, min(seconds, OVERDUE))

    async def _reconcile(self, key: str, job: Object, woken: float) -> None:
        with _guarded("view", key):
            view = self._hooks.view(job)
        # Warnings about a new or changed spec. Jobs that an earlier operator started are known.
        uid, generation = uid_of(job), job["metadata"].get("generation")
        is_news = self._generations[uid] != generation if uid in self._generations else view.status.start_time is None
        self._generations[uid] = generation
        for warning in view.warnings if is_news and not view.status.finished else ():
            self._jobs.tell(job, JobEvent("Warning", f"{view.kind}SpecWarning", warning))
        gang = None if hived_request(job) is not None else self._jobs.gang
        if gang is not None:
            view = replace(view, gang=await gang.observe(self._jobs.identity(job), view))
        companion = self._jobs.companion
        if companion is not None:
            body = self._companion_body(job, view)
            current = body is not None and companion.is_current(job, body)
            exists = companion.seen(job) is not None
            view = replace(view, companion=Companion(wanted=body is not None, exists=exists, current=current))
        can_adopt = self._jobs.can_adopt(job)
        pods = await self._jobs.get_pods_for_job(job, can_adopt)
        services = await self._jobs.get_services_for_job(job, can_adopt)
        decision = decide(view, pods, services, self._clock())
        changes = status_patch(view.status, decision.status, pruned=self._hooks.status_is_pruned)
        recorded = await self._statuses.write(job, changes) if changes else job
        for event in decision.events:
            self._jobs.tell(recorded, event)
        for condition, outcome in _OUTCOMES.items():
            if decision.status.has(condition) and not view.status.has(condition):
                self._jobs.metrics.job(self._jobs.kind.kind, outcome, namespace_of(recorded))
        if decision.next_wake is not None:
            self._wake_after(key, decision.next_wake)
        if not decision.status.finished:
            idle = not changes and not decision.actions
            self._wake_after(key, self._resync.after(key, idle=idle))
        if decision.actions:
            self._jobs.metrics.acted(self._jobs.kind.kind, self._timer() - woken)
        await self._executor.execute(self._jobs.identity(recorded), view, decision.actions, [*pods, *services])
        if decision.status.has("Blocked"):
            await self._change_status(recorded, decision.status, "False", "Unblocked", "The job continues")

    def _build(self, identity: Identity, view: JobView, creation: CreatePod | CreateService) -> Object:
        """Build the object to create. Overruled template fields become Events. Raises `BadSpec`, `HookFailed`."""
        spec, job = view.replica_specs[creation.type], identity.job
        if isinstance(creation, CreateService):
            container = view.default_container
            return build_service(identity, creation.type, creation.index, spec, default_container=container)

        def set_cluster_spec(pod: Object) -> None:
            with _guarded("set_cluster_spec", name_of(pod)):
                self._hooks.set_cluster_spec(job, pod, creation.type, creation.index)

        def set_size(pod: Object) -> None:
            pod["metadata"]["annotations"][SIZE_ANNOTATION] = size_of(view)

        amendments: list[Amend] = [set_size, set_cluster_spec] if view.fixed_size else [set_cluster_spec]
        hived = hived_request(job)
        if hived is not None:
            amendments.append(partial(join_affinity_group, replica_type=creation.type, request=hived, view=view))
        elif self._jobs.gang is not None:
            decorate = self._jobs.gang.kind.decorate
            amendments.append(partial(decorate, group=name_of(job), replica_type=creation.type))
        pod, warnings = build_pod(identity, creation.type, creation.index, spec, amendments=amendments)
        for warning in warnings:
            self._jobs.tell(job, warning)
        return pod

    def _companion_body(self, job: Object, view: JobView) -> Object | None:
        with _guarded("companion_body", key_of(job)):
            return self._hooks.companion_body(job, view)

    def _wake_after(self, key: str, seconds: float) -> None:
        self._jobs.work_queue.add_after(key, max(seconds, _SHORTEST_WAIT))

    async def _block(self, job: Object, error: Exception) -> None:
        """Record on the job, once, why it is blocked."""
        reason = _blocking_reason(error)
        if isinstance(error, BadSpec):
            reason = self._hooks.wording.invalid_reason.format(kind=self._jobs.kind.kind)
        event = JobEvent("Warning", reason, str(error))
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
        changes = status_patch(status, changed, pruned=self._hooks.status_is_pruned)
        if changes:
            await self._statuses.write(job, changes)
        return bool(changes)


class Resync:
    """The periodic syncs of each key: less frequent while nothing changes. `period` and `longest` are in seconds."""

    def __init__(self, period: float, rng: random.Random, *, longest: float = LONGEST) -> None:
        self._period, self._longest, self._rng = period, max(longest, period), rng
        self._delays: dict[str, float] = {}

    def after(self, key: str, *, idle: bool) -> float:
        """Return the seconds until the next sync. `idle`: this sync changed nothing."""
        delay = min(self._delays.get(key, self._period / 2) * 2, self._longest) if idle else self._period
        self._delays[key] = delay
        return delay * (1 + self._rng.random() * _JITTER)

    def forget(self, key: str) -> None:
        self._delays.pop(key, None)


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
