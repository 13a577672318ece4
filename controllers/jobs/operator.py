"""The base class of operators: a complete operator for one kind of job.

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
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Collection
from datetime import datetime
from typing import ClassVar, cast, get_args

from controllers.jobs.api.names import GroupVersion, GroupVersionKind
from controllers.jobs.api.types import (
    BadSpec,
    JobView,
    SuccessPolicy,
    decode_replica_specs,
    decode_run_policy,
    decode_status,
)
from controllers.jobs.children.informers import JobInformers
from controllers.jobs.controller import JobController
from controllers.jobs.gang import GangKind
from controllers.jobs.reconciler import JobReconciler, utc_now
from controllers.loop.control_loop import JobMetrics, ObjectHandler
from controllers.loop.workqueue import MetricsProvider
from store.kube.api.objects import Object, Resource, is_deleting, join_key, name_of, namespace_of
from store.kube.api.protocol import KubeApi
from store.kube.events import EventRecorder
from store.kube.informer.informer import Informer


class JobOperator:
    """Runs the jobs of `resource` in one namespace or, with "", in all.

    `gang`: how pods of a job become a gang; None: each is scheduled separately. `reconciler_sync_period`: seconds, see
    `JobControllerConfiguration`. `clock`: the time, in UTC; `timer`: monotonic seconds.
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

    def __init__(
        self,
        api: KubeApi,
        *,
        namespace: str = "",
        workers: int = 4,
        gang: GangKind | None = None,
        reconciler_sync_period: float = 15.0,
        metrics: JobMetrics | None = None,
        queue_metrics: MetricsProvider | None = None,
        clock: Callable[[], datetime] = utc_now,
        timer: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self.api, self.workers = api, workers
        self.recorder = EventRecorder(api, self.controller_name(), clock=lambda: clock().timestamp(), rng=rng)
        self.informer = Informer(api, self.resource, namespace=namespace, clock=timer, rng=rng)
        self.jobs = JobController(
            self,
            reconciler_sync_period,
            gang is not None,
            api,
            JobInformers(api, self, namespace=namespace, clock=timer, rng=rng),
            self.resource.plural,
            recorder=self.recorder,
            gang_kind=gang,
            metrics=metrics,
            queue_metrics=queue_metrics,
            clock=timer,
        )
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

    def view(self, job: Object) -> JobView:
        """Return the job as decisions see it. This reads kubeflow's form: `replicaSpecs`, `runPolicy`, `successPolicy`.

        Raises `BadSpec`, naming the field, or `BadStatus`.
        """
        spec, path = job.get("spec") or {}, f"spec.{self.replica_specs_field}"
        return JobView(
            name=name_of(job),
            kind=self.resource.kind,
            replica_specs=decode_replica_specs(spec.get(self.replica_specs_field), path),
            type_label=self.get_replica_type_label_key(),
            index_label=self.get_replica_index_label_key(),
            run_policy=decode_run_policy(spec.get("runPolicy"), "spec.runPolicy"),
            status=decode_status(job.get("status")),
            success_policy=_success_policy(spec.get("successPolicy")),
            deleting=is_deleting(job),
            chief_types=self.chief_types,
            worker_type=self.worker_type,
            service_types=self.service_types,
            default_container=self.default_container,
        )

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
        self.jobs.metrics.job(self.resource.kind, "deleted", namespace_of(job))


def _success_policy(raw: object) -> SuccessPolicy:
    policy = raw or ""
    if policy not in get_args(SuccessPolicy):
        raise BadSpec(
            f"spec.successPolicy: {policy!r} is not one of {', '.join(filter(None, get_args(SuccessPolicy)))}"
        )
    return cast(SuccessPolicy, policy)
