"""JobController: the mechanics that every operator of jobs needs, after kubeflow's `JobController`.

The model: informers show pods, services and gang objects; handlers turn their events into keys of jobs in one
rate-limited queue; workers take the keys and call the operator's `sync`, which gets the job's pods and services from
here and acts through `pod_control` and `service_control`. `expectations` holds the effects that the cache does not show
yet. Everything runs on one event loop; one worker at a time has a job, and one bad job delays no other.

What dies when: `run` owns every task. Cancelling it drains the workers, then stops the informers.
`controllers.jobs.reconciler` is the `sync` for operators that only describe their jobs.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from controllers.jobs.api.errors import JobError
from controllers.jobs.api.names import (
    ControllerInterface,
    filter_for_replica_type,
    gen_expectation_pods_key,
    gen_expectation_services_key,
    label_value,
    slices,
)
from controllers.jobs.api.types import JobEvent, SchedulingPolicy
from controllers.jobs.children.adoption import ClaimManager, recheck_deletion_timestamp
from controllers.jobs.children.control import ChildControl, Identity
from controllers.jobs.children.expectations import Expectations
from controllers.jobs.children.informers import ChildHandler, JobInformers, PodHandler, candidates
from controllers.jobs.gang import DisruptionBudget, GangControl, GangKind, GangSize, discover_resource, served_resource
from controllers.loop.control_loop import ControlLoop, JobMetrics, NoJobMetrics, Source
from controllers.loop.workqueue import MetricsProvider, WorkQueue
from store.kube.api.errors import KubeError
from store.kube.api.objects import (
    PODS,
    SERVICES,
    Object,
    Resource,
    key_of,
    labels_of,
    name_of,
    namespace_of,
    owner_reference,
    uid_of,
)
from store.kube.api.protocol import KubeApi
from store.kube.events import Recorder
from store.kube.informer.informer import DeletedFinalStateUnknown, Informer

CanAdopt = Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class JobControllerConfiguration:
    """`reconciler_sync_loop_period`: seconds until a job is synced again without an event; it grows, up to five
    minutes, while nothing changes. `enable_gang_scheduling`: whether each job gets an object that makes it a gang.
    """

    reconciler_sync_loop_period: float = 15.0
    enable_gang_scheduling: bool = False


class JobController:
    """See the module. `informers`: of pods and services, not started. `gang_kind`: for gang scheduling; the default is
    a PodDisruptionBudget. `clock`: monotonic seconds, by which the work queue's delays end, too; they must pass as the
    event loop's do. Attributes are named as in kubeflow; the listers are informers.
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
        self.work_queue = WorkQueue[str](work_queue_name, metrics=queue_metrics, clock=clock)
        self.kind = controller.get_api_group_version_kind()
        control = partial(ChildControl, kube_client, job_kind=self.kind, recorder=recorder, metrics=self.metrics)
        self.pod_control, self.service_control = control(PODS), control(SERVICES)
        self.gang_kind = gang_kind or DisruptionBudget()
        self.gang: GangControl | None = None  # known once `prepare` has asked the API server for its version
        self._gang_informers: list[Informer] = []
        self._informers = informers
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
        self, sync: Callable[[str], Awaitable[float | None]], *sources: Source, workers: int = 4, drain: float = 5.0
    ) -> None:
        """Call `sync(key)` for each job that needs work, until cancelled.

        `sync` returns the seconds after which the job is due again without an event, or None. `sources`: the informer
        of the jobs, and other caches that `sync` reads; they run and are awaited with our own. `drain`: seconds that
        syncs in flight get when cancelled. Raises `NotServed`.
        """
        await self.prepare()
        loop = ControlLoop(self.work_queue, sync, workers=workers, drain=drain, expected=(KubeError, JobError))
        await loop.run([self.pod_lister, self.service_lister, *self._gang_informers, *sources])

    async def prepare(self) -> None:
        """Discover the resource of the gang objects, however long that takes. `run` does it if the caller did not.

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
        """Queue the job under this key."""
        self.work_queue.wake(key)

    def take_wake_time(self, key: str) -> float | None:
        """Return when the first event since the last call arrived; None if the job was only due for a periodic sync."""
        return self.work_queue.take_wake_time(key)

    def tell(self, job: Object, event: JobEvent) -> None:
        """Record an Event on the job."""
        version, kind = str(self.controller.get_api_group_version()), self.kind.kind
        self.recorder.event(job, event.type, event.reason, event.message, api_version=version, kind=kind)

    def gen_labels(self, job_name: str) -> dict[str, str]:
        """Return the labels that select everything of one job."""
        return {
            self.controller.get_group_name_label_key(): self.controller.get_group_name_label_value(),
            self.controller.get_job_name_label_key(): label_value(job_name),
        }

    def gen_owner_reference(self, job: Object) -> Object:
        """Return the owner reference that makes the job the controller of an object."""
        return owner_reference(job, api_version=str(self.controller.get_api_group_version()), kind=self.kind.kind)

    def identity(self, job: Object) -> Identity:
        """Return the metadata that marks the job's objects."""
        return Identity(
            job,
            self.gen_owner_reference(job),
            self.gen_labels(name_of(job)),
            self.controller.get_replica_type_label_key(),
            self.controller.get_replica_index_label_key(),
        )

    def pods_key(self, job: Object, pod: Object) -> str:
        """Return the key of the expectations about this pod."""
        return gen_expectation_pods_key(uid_of(job), self._replica_type(pod))

    def services_key(self, job: Object, service: Object) -> str:
        """Return the key of the expectations about this service."""
        return gen_expectation_services_key(uid_of(job), self._replica_type(service))

    def _replica_type(self, obj: Object) -> str:
        return labels_of(obj).get(self.controller.get_replica_type_label_key(), "")

    def resolve_controller_ref(self, namespace: str, reference: Object | None) -> Object | None:
        """Return the cached job that the owner reference names; None for another kind, group or UID."""
        if reference is None or reference.get("kind") != self.kind.kind:
            return None
        if str(reference.get("apiVersion", "")).rpartition("/")[0] != self.kind.group:
            return None
        job = self.controller.get_job_from_informer_cache(namespace, str(reference.get("name")))
        return job if job is not None and uid_of(job) == reference.get("uid") else None

    def job_key_by_labels(self, obj: Object) -> str | None:
        """Return the key of the job that an orphan's labels name; None when there is no such job."""
        labels = labels_of(obj)
        name = labels.get(self.controller.get_job_name_label_key(), "")
        job = self.controller.get_job_from_informer_cache(namespace_of(obj), name) if name else None
        return key_of(job) if job is not None and self.gen_labels(name).items() <= labels.items() else None

    def can_adopt(self, job: Object) -> CanAdopt:
        """Return the check before adopting anything for the job; use one for all claims of a sync."""
        read = partial(self.controller.get_job_from_api_client, namespace_of(job), name_of(job))
        return recheck_deletion_timestamp(read, uid_of(job))

    async def get_pods_for_job(self, job: Object, can_adopt: CanAdopt | None = None) -> list[Object]:
        """Adopt and release pods. Return those that the job manages. Raises `ClaimFailed`."""
        return await self._claim(job, PODS, self.pod_lister, can_adopt)

    async def get_services_for_job(self, job: Object, can_adopt: CanAdopt | None = None) -> list[Object]:
        """Adopt and release services. Return those that the job manages. Raises `ClaimFailed`."""
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
        """Return pods by index: every index below `replicas`, and existing pods above it."""
        return slices(pods, replicas, self.controller.get_replica_index_label_key())

    def get_service_slices(self, services: list[Object], replicas: int) -> dict[int, list[Object]]:
        """Return services by index: every index below `replicas`, and existing services above it."""
        return slices(services, replicas, self.controller.get_replica_index_label_key())

    def filter_pods_for_replica_type(self, pods: list[Object], replica_type: str) -> list[Object]:
        return filter_for_replica_type(pods, replica_type, self.controller.get_replica_type_label_key())

    def filter_services_for_replica_type(self, services: list[Object], replica_type: str) -> list[Object]:
        return filter_for_replica_type(services, replica_type, self.controller.get_replica_type_label_key())

    async def sync_pdb(self, job: Object, min_available_replicas: int) -> Object:
        """Create the job's PodDisruptionBudget or bring it up to date. Raises `KubeError`, `JobError`."""
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
        """Handle a created pod: queue the job that controls it, and remove its expectation."""
        self._pods.added(pod)

    def update_pod(self, old: Object, current: Object) -> None:
        """Handle a changed pod: queue its job and, if the controller changed, the former one."""
        self._pods.updated(old, current)

    def delete_pod(self, pod: Object | DeletedFinalStateUnknown) -> None:
        """Handle a deleted pod or its tombstone: queue its job, and remove its expectation."""
        self._pods.deleted(pod)

    def add_service(self, service: Object) -> None:
        """Handle a created service: queue the job that controls it, and remove its expectation."""
        self._services.added(service)

    def update_service(self, old: Object, current: Object) -> None:
        """Handle a changed service: queue its job and, if the controller changed, the former one."""
        self._services.updated(old, current)

    def delete_service(self, service: Object | DeletedFinalStateUnknown) -> None:
        """Handle a deleted service or its tombstone: queue its job, and remove its expectation."""
        self._services.deleted(service)

    def _pod_failed(self, pod: Object) -> None:
        self.metrics.pod_failed(self.kind.kind, namespace_of(pod))
