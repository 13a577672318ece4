"""JobController: the mechanics that every operator of jobs needs (the seed's `JobController`).

The model: informers show pods, services and gang objects; handlers turn what happens to them into keys of jobs in one
rate-limited queue; workers take the keys and call the operator's `sync`, which asks here for the job's pods and
services and acts through `pod_control` and `service_control`. What was asked for and not seen yet is in `expectations`.
Everything runs on one event loop; a job is in the hands of one worker at a time, and one bad job delays no other.

What dies when: `run` owns every task. Cancelling it drains the workers, then stops the informers.
`controllers.job_reconciler` is the `sync` for operators that describe their jobs and leave the rest to us.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from controllers.child_control import ChildControl
from controllers.claiming import ClaimManager, recheck_deletion_timestamp
from controllers.controller_interface import ControllerInterface
from controllers.expectations import Expectations
from controllers.gang import GangControl, discover_resource, served_resource
from controllers.gang_kinds import DisruptionBudget, GangKind, GangSize
from controllers.job_errors import JobError
from controllers.job_handlers import ChildHandler, PodHandler
from controllers.job_informers import JobInformers, candidates
from controllers.job_metrics import JobMetrics, NoJobMetrics
from controllers.job_objects import Identity
from controllers.job_types import JobEvent, SchedulingPolicy
from controllers.naming import gen_expectation_pods_key, gen_expectation_services_key, label_value
from controllers.slices import filter_for_replica_type, slices
from controllers.workers import Workers
from controllers.workqueue import MetricsProvider, WorkQueue
from store.kube.api import KubeApi
from store.kube.errors import KubeError
from store.kube.events import Recorder
from store.kube.handlers import DeletedFinalStateUnknown
from store.kube.informer import Informer
from store.kube.objects import Object, key_of, labels_of, name_of, namespace_of, owner_reference, uid_of
from store.kube.resources import PODS, SERVICES, Resource

CanAdopt = Callable[[], Awaitable[None]]


class Source(Protocol):
    """Something that has to be known before jobs are worked on: an informer."""

    async def run(self) -> None:
        """Until cancelled."""

    async def synced(self) -> None:
        """Wait until it is known."""


@dataclass(frozen=True, slots=True)
class JobControllerConfiguration:
    """`reconciler_sync_loop_period`: seconds until a job is looked at again without an event; it grows, up to five
    minutes, while nothing changes. `enable_gang_scheduling`: whether each job gets an object that makes it a gang.
    """

    reconciler_sync_loop_period: float = 15.0
    enable_gang_scheduling: bool = False


class JobController:
    """See the module. `informers`: of pods and services, not started. `gang_kind`: for gang scheduling; the default is
    a PodDisruptionBudget. `clock`: monotonic seconds. Attributes are named as in the seed; the listers are informers.
    """

    def __init__(
        self,
        controller: ControllerInterface,
        reconciler_sync_period: float,
        enable_gang_scheduling: bool,
        kube_client: KubeApi,
        informers: JobInformers,
        work_queue_name: str,
        *,
        recorder: Recorder,
        gang_kind: GangKind | None = None,
        expectations: Expectations | None = None,
        metrics: JobMetrics | None = None,
        queue_metrics: MetricsProvider | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.controller, self.kube_client, self.recorder = controller, kube_client, recorder
        self.config = JobControllerConfiguration(reconciler_sync_period, enable_gang_scheduling)
        self.metrics: JobMetrics = metrics or NoJobMetrics()
        self.expectations = expectations or Expectations()
        self.work_queue = WorkQueue[str](work_queue_name, metrics=queue_metrics)
        self._woken: dict[str, float] = {}  # when the first event since its last sync woke a job
        self.kind = controller.get_api_group_version_kind()
        control = partial(ChildControl, kube_client, job_kind=self.kind, recorder=recorder, metrics=self.metrics)
        self.pod_control, self.service_control = control(PODS), control(SERVICES)
        self.gang_kind = gang_kind or DisruptionBudget()
        self.gang: GangControl | None = None  # known once `prepare` has asked the API server for its version
        self._gang_informers: list[Informer] = []
        self._informers, self._clock = informers, clock
        self.pod_lister, self.service_lister = informers.pods, informers.services
        self._pods = PodHandler(self, self.expectations, self.pods_key, self._pod_failed)
        self._services = ChildHandler(self, self.expectations, self.services_key)
        self.pod_lister.add_handler(self._pods)
        self.service_lister.add_handler(self._services)

    @property
    def pod_informer_synced(self) -> bool:
        return self.pod_lister.has_synced

    @property
    def service_informer_synced(self) -> bool:
        return self.service_lister.has_synced

    async def run(
        self, sync: Callable[[str], Awaitable[None]], *sources: Source, workers: int = 4, drain: float = 5.0
    ) -> None:
        """Call `sync(key)` for each job that needs work, until cancelled.

        `sources`: the informer of the jobs, and whatever else `sync` reads; they are run, and awaited, with our own.
        `drain`: seconds for what is in flight when cancelled. Raises `NotServed`.
        """
        await self.prepare()
        everything: list[Source] = [self.pod_lister, self.service_lister, *self._gang_informers, *sources]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(source.run()) for source in everything]
            try:
                for source in everything:
                    await source.synced()
                expected = (KubeError, JobError)
                await Workers(self.work_queue, sync, count=workers, drain=drain, expected=expected).run()
            finally:
                for task in tasks:
                    task.cancel()

    async def prepare(self) -> None:
        """Find out how the API server serves what gangs need, however long that takes. `run` does it if nobody did.

        Raises `NotServed`.
        """
        if self.config.enable_gang_scheduling and self.gang is None:
            resource = await discover_resource(self.kube_client, self.gang_kind.resources)
            informer = self._informers.make(resource)
            informer.add_handler(ChildHandler(self, self.expectations))
            self.gang = self._gang_control(self.gang_kind, resource, informer)
            self._gang_informers.append(informer)

    def _gang_control(self, kind: GangKind, resource: Resource, cache: Informer | None) -> GangControl:
        return GangControl(self.kube_client, kind, resource, self.kind, self.recorder, self.metrics, cache=cache)

    def enqueue(self, key: str) -> None:
        """The job under this key needs work."""
        self._woken.setdefault(key, self._clock())
        self.work_queue.add(key)

    def take_wake_time(self, key: str) -> float | None:
        """When, on the clock, the first event since the last call woke the job; None when it was only time to look."""
        return self._woken.pop(key, None)

    def tell(self, job: Object, event: JobEvent) -> None:
        """Record an Event on the job."""
        version, kind = str(self.controller.get_api_group_version()), self.kind.kind
        self.recorder.event(job, event.type, event.reason, event.message, api_version=version, kind=kind)

    def gen_labels(self, job_name: str) -> dict[str, str]:
        """The labels that select everything of one job."""
        return {
            self.controller.get_group_name_label_key(): self.controller.get_group_name_label_value(),
            self.controller.get_job_name_label_key(): label_value(job_name),
        }

    def gen_owner_reference(self, job: Object) -> Object:
        """What makes a job the controller of an object."""
        return owner_reference(job, api_version=str(self.controller.get_api_group_version()), kind=self.kind.kind)

    def identity(self, job: Object) -> Identity:
        """What marks the job's objects."""
        return Identity(
            job,
            self.gen_owner_reference(job),
            self.gen_labels(name_of(job)),
            self.controller.get_replica_type_label_key(),
            self.controller.get_replica_index_label_key(),
        )

    def pods_key(self, job: Object, pod: Object) -> str:
        """Where expectations about this pod are kept."""
        return gen_expectation_pods_key(uid_of(job), self._replica_type(pod))

    def services_key(self, job: Object, service: Object) -> str:
        """Where expectations about this service are kept."""
        return gen_expectation_services_key(uid_of(job), self._replica_type(service))

    def _replica_type(self, obj: Object) -> str:
        return labels_of(obj).get(self.controller.get_replica_type_label_key(), "")

    def resolve_controller_ref(self, namespace: str, reference: Object | None) -> Object | None:
        """The cached job that the owner reference means; None for another kind or group, or another job of its name."""
        if reference is None or reference.get("kind") != self.kind.kind:
            return None
        if str(reference.get("apiVersion", "")).rpartition("/")[0] != self.kind.group:
            return None
        job = self.controller.get_job_from_informer_cache(namespace, str(reference.get("name")))
        return job if job is not None and uid_of(job) == reference.get("uid") else None

    def job_key_by_labels(self, obj: Object) -> str | None:
        """The key of the job that an orphan's labels name; None when there is no such job."""
        labels = labels_of(obj)
        name = labels.get(self.controller.get_job_name_label_key(), "")
        job = self.controller.get_job_from_informer_cache(namespace_of(obj), name) if name else None
        return key_of(job) if job is not None and self.gen_labels(name).items() <= labels.items() else None

    def can_adopt(self, job: Object) -> CanAdopt:
        """The check before adopting anything for the job; one for all claims of a sync."""
        read = partial(self.controller.get_job_from_api_client, namespace_of(job), name_of(job))
        return recheck_deletion_timestamp(read, uid_of(job))

    async def get_pods_for_job(self, job: Object, can_adopt: CanAdopt | None = None) -> list[Object]:
        """The pods that the job should manage, after adopting and releasing. Raises `ClaimFailed`."""
        return await self._claim(job, PODS, self.pod_lister, can_adopt)

    async def get_services_for_job(self, job: Object, can_adopt: CanAdopt | None = None) -> list[Object]:
        """The services that the job should manage, after adopting and releasing. Raises `ClaimFailed`."""
        return await self._claim(job, SERVICES, self.service_lister, can_adopt)

    async def _claim(
        self, job: Object, resource: Resource, children: Informer, can_adopt: CanAdopt | None
    ) -> list[Object]:
        labels = self.gen_labels(name_of(job))
        manager = ClaimManager(
            self.kube_client,
            resource,
            job,
            reference=self.gen_owner_reference(job),
            selector=labels,
            can_adopt=can_adopt or self.can_adopt(job),
            released=lambda obj: children.discard(key_of(obj), uid_of(obj)),
        )
        named = labels[self.controller.get_job_name_label_key()]
        return await manager.claim(candidates(children, uid_of(job), namespace_of(job), named))

    def get_pod_slices(self, pods: list[Object], replicas: int) -> dict[int, list[Object]]:
        """Pods by index: all below `replicas`, and those above that exist."""
        return slices(pods, replicas, self.controller.get_replica_index_label_key())

    def get_service_slices(self, services: list[Object], replicas: int) -> dict[int, list[Object]]:
        """Services by index: all below `replicas`, and those above that exist."""
        return slices(services, replicas, self.controller.get_replica_index_label_key())

    def filter_pods_for_replica_type(self, pods: list[Object], replica_type: str) -> list[Object]:
        return filter_for_replica_type(pods, replica_type, self.controller.get_replica_type_label_key())

    def filter_services_for_replica_type(self, services: list[Object], replica_type: str) -> list[Object]:
        return filter_for_replica_type(services, replica_type, self.controller.get_replica_type_label_key())

    async def sync_pdb(self, job: Object, min_available_replicas: int) -> Object:
        """The job's PodDisruptionBudget, created or brought up to date. Raises `KubeError`, `JobError`."""
        control = await self._budgets()
        identity = self.identity(job)
        body = control.body(identity, SchedulingPolicy(), GangSize(min_available_replicas))
        return await control.apply(identity, body)

    async def delete_pdb(self, job: Object) -> None:
        """Delete the job's PodDisruptionBudget, if it has one. Raises `KubeError`, `NotServed`."""
        await (await self._budgets()).delete(job)

    async def _budgets(self) -> GangControl:
        if self.gang is not None and isinstance(self.gang.kind, DisruptionBudget):
            return self.gang
        kind = DisruptionBudget()
        return self._gang_control(kind, await served_resource(self.kube_client, kind.resources), None)

    def add_pod(self, pod: Object) -> None:
        """A pod was created: wake the job that controls it, and cross off what was expected."""
        self._pods.added(pod)

    def update_pod(self, old: Object, current: Object) -> None:
        """A pod changed: wake its job and, when it changed hands, the former one."""
        self._pods.updated(old, current)

    def delete_pod(self, pod: Object | DeletedFinalStateUnknown) -> None:
        """A pod is gone, or a tombstone says so: wake its job, and cross off what was expected."""
        self._pods.deleted(pod)

    def add_service(self, service: Object) -> None:
        """A service was created: wake the job that controls it, and cross off what was expected."""
        self._services.added(service)

    def update_service(self, old: Object, current: Object) -> None:
        """A service changed: wake its job and, when it changed hands, the former one."""
        self._services.updated(old, current)

    def delete_service(self, service: Object | DeletedFinalStateUnknown) -> None:
        """A service is gone, or a tombstone says so: wake its job, and cross off what was expected."""
        self._services.deleted(service)

    def _pod_failed(self, pod: Object) -> None:
        self.metrics.pod_failed(self.kind.kind, namespace_of(pod))
