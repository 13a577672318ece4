"""JobController: the mechanics that every operator of jobs needs, after kubeflow's `JobController`.

The model: informers show pods, services and gang objects; handlers turn their events into keys of jobs in one
rate-limited queue; workers take the keys and call the operator's `sync`, which gets the job's pods and services from
here and acts through `pod_control` and `service_control`. `expectations` holds the effects that the cache does not show
yet. Everything runs on one event loop; one worker at a time has a job, and one bad job delays no other.

What dies when: `run` owns every task. Cancelling it drains the workers, then stops the informers.
`JobReconciler` has the `sync` for operators that only describe their jobs.

Which pods and services are a job's is known from three things: the caches that show them, the calls whose effects the
caches do not show yet, and a decision about each candidate.

*Informers.* Only objects with the operator's group label are watched. They are indexed by the UID of the controlling
job and, for orphans, by the job that their labels name, so the cost of a sync depends on the number of the job's own
pods only.

*Expectations*, so that a controller never acts twice on a stale cache. Before each call the controller registers its
effect: a creation by name, a deletion by UID. The informer's handlers remove the entry when they see the effect; a call
that certainly failed removes it at once. While any entry of a job is outstanding, under any key, the job is not
reconciled. All operations are idempotent: an event that is seen twice, or that was never expected, changes nothing.
A key is `JOB_UID/REPLICA_TYPE/pods` or `.../services`, so a job that was deleted and created again under its name
inherits nothing. Each entry expires, because an event may be lost:

- after `ttl`, when the call succeeded;
- after `uncertain_ttl`, when no answer came. Names are deterministic and deletions carry the UID, so at worst the API
  server rejects a repeated call; nothing is created or deleted twice.

*Claims.* Candidates are the cached objects under the job's UID and under its labels. A pure rule classifies each; then
owner references are patched where needed. A patch carries the candidate's UID and, for an adoption, its resource
version. So the API server rejects a patch that would touch a successor of the same name, an object that has changed
since, or an object that already has a controller. Before the first adoption of a sync the job itself is read live, once
for all of its pods and services: the cached job may look alive when the real one is being deleted or is another job of
the same name. The result, a success or an error, holds until the sync ends.

Source: client-go's ControllerExpectations, which counts instead of naming, and its controller reference managers.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, Literal, NamedTuple

import structlog

from controllers.jobs.api import (
    AdoptionRefused,
    ClaimFailed,
    ControllerInterface,
    JobError,
    JobEvent,
    SchedulingPolicy,
    label_value,
)
from controllers.jobs.control import ChildControl, Identity
from controllers.jobs.gang import DisruptionBudget, GangControl, GangKind, GangSize, discover_resource, served_resource
from controllers.jobs.namesake import NamesakeControl
from controllers.jobs.replicas import replica_index
from controllers.loop import control_loop
from controllers.loop.control_loop import ControlLoop, JobMetrics, NoJobMetrics, Source, attempt_all
from controllers.loop.workqueue import MetricsProvider, WorkQueue, loop_time
from store.kube.api.errors import Invalid, KubeError, NotFound
from store.kube.api.objects import (
    PODS,
    SERVICES,
    Object,
    PodPhase,
    Resource,
    controller_of,
    is_deleting,
    key_of,
    labels_of,
    name_of,
    namespace_of,
    owner_reference,
    phase_of,
    resource_version_of,
    uid_of,
)
from store.kube.api.protocol import KubeApi
from store.kube.events import Recorder
from store.kube.informer.informer import DeletedFinalStateUnknown, Informer, by_controller, by_label, last_state

log = structlog.get_logger(__name__)

OWNER, ORPHANS = "owner", "orphans"  # indexes of the caches

TTL = 300.0  # seconds
UNCERTAIN_TTL = 10.0  # seconds

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
    a PodDisruptionBudget. `companion`: the kind of one more object that jobs may have. `clock`: monotonic seconds, by
    which the work queue's delays end, too; they must pass as the event loop's do. Attributes are named as in kubeflow;
    the listers are informers.
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
        companion: Resource | None = None,
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
        self.pod_control, self.service_control = self._control(PODS), self._control(SERVICES)
        self.gang_kind = gang_kind or DisruptionBudget()
        self.gang: GangControl | None = None  # known once `prepare` has asked the API server for its version
        self.companion: NamesakeControl | None = None  # the same
        self._companion_kind = companion
        self._namesakes: list[Informer] = []
        self._loop: ControlLoop | None = None
        self._informers = informers
        self.pod_lister, self.service_lister = informers.pods, informers.services
        pods, services = ChildHandler(self, PODS), ChildHandler(self, SERVICES)
        self.pod_lister.add_handler(pods)
        self.service_lister.add_handler(services)
        # As kubeflow's AddPod and so on, for operators that pass events on themselves.
        self.add_pod, self.update_pod, self.delete_pod = pods.added, pods.updated, pods.deleted
        self.add_service, self.update_service, self.delete_service = services.added, services.updated, services.deleted

    @property
    def pod_informer_synced(self) -> bool:
        return self.pod_lister.has_synced

    @property
    def service_informer_synced(self) -> bool:
        return self.service_lister.has_synced

    @property
    def has_synced(self) -> bool:
        """Whether all caches were filled, so that syncs have begun."""
        return self._loop is not None and self._loop.has_synced

    @property
    def child_informers(self) -> list[Informer]:
        """The informers of pods, services and, once it is discovered, of the gangs' objects."""
        return [self.pod_lister, self.service_lister, *self._namesakes]

    async def run(
        self, sync: Callable[[str], Awaitable[float | None]], *sources: Source, workers: int = 4, drain: float = 5.0
    ) -> None:
        """Call `sync(key)` for each job that needs work, until cancelled.

        `sync` returns the seconds after which the job is due again without an event, or None. `sources`: the informer
        of the jobs, and other caches that `sync` reads; they run and are awaited with our own. `drain`: seconds that
        syncs in flight get when cancelled. Raises `NotServed`.
        """
        await self.prepare()
        self._loop = ControlLoop(self.work_queue, sync, workers=workers, drain=drain, expected=(KubeError, JobError))
        await self._loop.run([*self.child_informers, *sources])

    async def prepare(self) -> None:
        """Discover the resources of gang objects and companions, however long that takes. `run` does it if the caller
        did not. Raises `NotServed`.
        """
        if self.config.enable_gang_scheduling and self.gang is None:
            resource = await discover_resource(self.kube_client, self.gang_kind.resources)
            cache = self._watch_namesakes(resource)
            self.gang = GangControl(self._control(resource), self.gang_kind, cache=cache)
        if self._companion_kind is not None and self.companion is None:
            resource = await discover_resource(self.kube_client, [self._companion_kind])
            self.companion = NamesakeControl(self._control(resource), cache=self._watch_namesakes(resource))

    def _watch_namesakes(self, resource: Resource) -> Informer:
        informer = self._informers.make(resource)
        informer.add_handler(ChildHandler(self, resource))
        self._namesakes.append(informer)
        return informer

    def _control(self, resource: Resource) -> ChildControl:
        return ChildControl(self.kube_client, resource, self.kind, self.recorder, self.metrics)

    def watch_again(self, silence: float) -> None:
        """Renew the watches of pods and services that brought nothing for `silence` seconds."""
        for informer in (self.pod_lister, self.service_lister):
            if informer.age >= silence:
                informer.renew()

    def enqueue(self, key: str) -> None:
        """Queue the job under this key."""
        self.work_queue.wake(key)

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

    def expectations_key(self, job: Object, resource: Resource, child: Object) -> str:
        """Return the key of the expectations about this pod or service."""
        replica_type = labels_of(child).get(self.controller.get_replica_type_label_key(), "")
        return f"{uid_of(job)}/{replica_type.lower()}/{resource.plural}"

    def resolve_controller_ref(self, namespace: str, reference: Object | None) -> Object | None:
        """Return the cached job that the owner reference names; None for another kind, group or UID."""
        if reference is None or reference.get("kind") != self.kind.kind:
            return None
        if str(reference.get("apiVersion", "")).rpartition("/")[0] != self.kind.group:
            return None
        job = self.controller.get_job_from_informer_cache(namespace, str(reference.get("name")))
        return job if job is not None and uid_of(job) == reference.get("uid") else None

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
        named = f"{namespace_of(job)}/{labels[self.controller.get_job_name_label_key()]}"
        return await manager.claim(children.by_index(OWNER, uid_of(job)) + children.by_index(ORPHANS, named))

    def get_pod_slices(self, pods: list[Object], replicas: int) -> dict[int, list[Object]]:
        """Return pods (or services) by index: every index below `replicas`, empty or not, and existing ones above it.

        An object without a valid index is in no slice; it is logged.
        """
        label = self.controller.get_replica_index_label_key()
        found: dict[int, list[Object]] = {index: [] for index in range(replicas)}
        for obj in pods:
            index = replica_index(obj, label)
            if index is None:
                value = labels_of(obj).get(label)
                log.warning("Replica without a valid index ignored", object=key_of(obj), label=label, value=value)
            else:
                found.setdefault(index, []).append(obj)
        return found

    def filter_pods_for_replica_type(self, pods: list[Object], replica_type: str) -> list[Object]:
        """Return the pods (or services) whose label names the type; labels carry it in lower case."""
        label, wanted = self.controller.get_replica_type_label_key(), replica_type.lower()
        return [obj for obj in pods if labels_of(obj).get(label) == wanted]

    get_service_slices = get_pod_slices
    filter_services_for_replica_type = filter_pods_for_replica_type

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
        return GangControl(self._control(await served_resource(self.kube_client, kind.resources)), kind)


class ChildHandler(control_loop.ChildHandler):
    """Queues jobs upon events about one kind of child.

    Besides waking its job, an event about a pod or service removes the expectation that it fulfils. An object whose
    controller changed wakes both the former and the present one; an orphan wakes the jobs that its labels named before
    and name now. Source: the handlers of Kubernetes' ReplicaSet controller, as kubeflow's AddPod, UpdatePod, DeletePod.
    """

    def __init__(self, jobs: JobController, resource: Resource) -> None:
        super().__init__(self._job_key, self._enqueue)
        self._jobs, self._resource = jobs, resource

    def added(self, obj: Object) -> None:
        """Handle a new object. If it is being deleted already, it counts as a deletion: it existed before our start."""
        self._cross_off(obj, created=not is_deleting(obj), deleted=is_deleting(obj))
        super().added(obj)
        if controller_of(obj) is None and not is_deleting(obj):
            self._wake_by_labels(obj)

    def updated(self, old: Object, new: Object) -> None:
        if resource_version_of(old) == resource_version_of(new):
            return
        self._cross_off(new, deleted=is_deleting(new))
        super().updated(old, new)
        was_released = controller_of(old) is not None
        if controller_of(new) is None and (was_released or labels_of(old) != labels_of(new)):
            self._wake_by_labels(old)
            self._wake_by_labels(new)
        failed = self._resource == PODS and phase_of(new) == PodPhase.FAILED != phase_of(old)
        if failed and controller_of(new) is not None:
            self._jobs.metrics.pod_failed(self._jobs.kind.kind, namespace_of(new))

    def deleted(self, obj: Object | DeletedFinalStateUnknown) -> None:
        """Handle a deletion. It also counts as the creation, whose event may have been missed."""
        self._cross_off(last_state(obj), created=True, deleted=True)
        super().deleted(obj)

    def _job_key(self, obj: Object) -> str | None:
        job = self._jobs.resolve_controller_ref(namespace_of(obj), controller_of(obj))
        return None if job is None else key_of(job)

    def _cross_off(self, obj: Object, *, created: bool = False, deleted: bool = False) -> None:
        if self._resource not in (PODS, SERVICES) or not (created or deleted):
            return
        job = self._jobs.resolve_controller_ref(namespace_of(obj), controller_of(obj))
        if job is None:
            return
        key = self._jobs.expectations_key(job, self._resource, obj)
        if created:
            self._jobs.expectations.cross_off(Expected(key, "create", name_of(obj)))
        if deleted:
            self._jobs.expectations.cross_off(Expected(key, "delete", uid_of(obj)))

    def _wake_by_labels(self, obj: Object) -> None:
        """Queue the job that an orphan's labels name, if there is one."""
        controller, labels = self._jobs.controller, labels_of(obj)
        name = labels.get(controller.get_job_name_label_key(), "")
        job = controller.get_job_from_informer_cache(namespace_of(obj), name) if name else None
        if job is not None and self._jobs.gen_labels(name).items() <= labels.items():
            self._enqueue(key_of(job))

    def _enqueue(self, key: str) -> None:
        self._jobs.enqueue(key)  # looked up at each event: an operator may replace it


class JobInformers:
    """Informers in one namespace or, with "", in all. `clock`: monotonic seconds."""

    def __init__(
        self,
        api: KubeApi,
        controller: ControllerInterface,
        *,
        namespace: str = "",
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self._api, self._namespace, self._clock, self._rng = api, namespace, clock, rng
        self._selector = f"{controller.get_group_name_label_key()}={controller.get_group_name_label_value()}"
        self._job_label = controller.get_job_name_label_key()
        self.pods, self.services = self._of_children(PODS), self._of_children(SERVICES)

    def make(self, resource: Resource, **options: Any) -> Informer:
        """Make an informer on all objects of one kind. `options`: see `Informer`."""
        return Informer(self._api, resource, namespace=self._namespace, clock=self._clock, rng=self._rng, **options)

    def _of_children(self, resource: Resource) -> Informer:
        """Make an informer on one kind of child. Orphans are indexed by `NAMESPACE/VALUE` of the job's label."""
        named = by_label(self._job_label)
        indexers = {OWNER: by_controller, ORPHANS: lambda obj: named(obj) if controller_of(obj) is None else ()}
        return self.make(resource, label_selector=self._selector, indexers=indexers)


class Expected(NamedTuple):
    """One outstanding effect. `what`: the name of the object to create, or the UID of the object to delete."""

    key: str
    verb: Literal["create", "delete"]
    what: str


class Expectations:
    """The outstanding effects of all jobs. `clock`: monotonic seconds, by default those of the running loop."""

    def __init__(
        self, *, ttl: float = TTL, uncertain_ttl: float = UNCERTAIN_TTL, clock: Callable[[], float] = loop_time
    ) -> None:
        self._ttl, self._uncertain_ttl, self._clock = ttl, uncertain_ttl, clock
        self._deadlines: dict[str, dict[Expected, float]] = {}  # by job UID

    def expect(self, entries: Iterable[Expected]) -> None:
        """Register effects, before the calls are made."""
        deadline = self._clock() + self._ttl
        for expected in entries:
            self._deadlines.setdefault(_job_of(expected.key), {})[expected] = deadline

    def cross_off(self, expected: Expected) -> None:
        """Remove the entry: its effect was seen, or will not come."""
        job_uid = _job_of(expected.key)
        entries = self._deadlines.get(job_uid)
        if entries is not None:
            entries.pop(expected, None)
            if not entries:
                del self._deadlines[job_uid]

    def uncertain(self, expected: Expected) -> None:
        """Let the entry expire within `uncertain_ttl`, because the call got no answer."""
        entries = self._deadlines.get(_job_of(expected.key), {})
        if expected in entries:
            entries[expected] = min(entries[expected], self._clock() + self._uncertain_ttl)

    def outstanding(self, job_uid: str) -> list[Expected]:
        """Return the job's outstanding entries, under any key. Expired ones are dropped."""
        entries = self._deadlines.get(job_uid)
        if not entries:
            return []
        now = self._clock()
        for expired in [expected for expected, deadline in entries.items() if deadline <= now]:
            self.cross_off(expired)
        return list(entries)

    def expires_in(self, job_uid: str) -> float | None:
        """Return the seconds until the job's last entry expires, or None when nothing is outstanding."""
        if not self.outstanding(job_uid):
            return None
        return max(self._deadlines[job_uid].values()) - self._clock()

    def unseen_for(self, job_uid: str) -> float:
        """Return the seconds since the job's oldest outstanding entry was registered; 0 without one."""
        if not self.outstanding(job_uid):
            return 0.0
        return self._clock() + self._ttl - min(self._deadlines[job_uid].values())

    def forget(self, job_uid: str) -> None:
        """Drop all entries of a job that is gone."""
        self._deadlines.pop(job_uid, None)


def _job_of(key: str) -> str:
    return key.partition("/")[0]


class Claim(Enum):
    """The verdict on a candidate."""

    SKIP = "skip"
    KEEP = "keep"
    ADOPT = "adopt"
    RELEASE = "release"


def classify(candidate: Object, owner: Object, selector: Mapping[str, str]) -> Claim:
    """Decide what the owner does with the candidate. `selector`: labels that its objects must carry."""
    controller = controller_of(candidate)
    matches = selector.items() <= labels_of(candidate).items()
    if controller is None:
        unwanted = is_deleting(owner) or not matches or is_deleting(candidate)
        return Claim.SKIP if unwanted else Claim.ADOPT
    if controller.get("uid") != uid_of(owner):
        return Claim.SKIP
    if matches:
        return Claim.KEEP
    return Claim.SKIP if is_deleting(owner) else Claim.RELEASE


def recheck_deletion_timestamp(get_object: Callable[[], Awaitable[Object]], uid: str) -> Callable[[], Awaitable[None]]:
    """Return a check to await before an adoption: `get_object` must find the object with `uid`, and not being deleted.

    The check reads once; every later call has the same result, as in kubeflow's `RecheckDeletionTimestamp`. It raises
    `AdoptionRefused`, or the `KubeError` of the read.
    """
    answers: list[Exception | None] = []
    lock = asyncio.Lock()

    async def can_adopt() -> None:
        async with lock:
            if not answers:
                try:
                    live = await get_object()
                except KubeError as error:
                    answers.append(error)
                else:
                    refusal = ""
                    if uid_of(live) != uid:
                        refusal = f"deleted and created again: its UID is {uid_of(live)}, not {uid}"
                    elif is_deleting(live):
                        refusal = f"being deleted since {live['metadata']['deletionTimestamp']}"
                    answers.append(AdoptionRefused(f"{key_of(live)}: {refusal}") if refusal else None)
        if answers[0] is not None:
            raise answers[0]

    return can_adopt


class ClaimManager:
    """Claims objects of one resource for one owner, during one sync.

    `reference`: the owner reference that an adoption adds. `can_adopt`: see `recheck_deletion_timestamp`; share it
    between the managers of a sync. `released`: called with each object that no longer belongs to the owner.
    """

    def __init__(
        self,
        api: KubeApi,
        resource: Resource,
        owner: Object,
        *,
        reference: Object,
        selector: Mapping[str, str],
        can_adopt: Callable[[], Awaitable[None]],
        released: Callable[[Object], None] = lambda obj: None,
    ) -> None:
        self._api, self._resource, self._owner = api, resource, owner
        self._reference, self._selector = reference, selector
        self._can_adopt, self._released = can_adopt, released

    async def claim(self, candidates: Iterable[Object]) -> list[Object]:
        """Adopt and release. Return the candidates that belong to the owner. Raises `ClaimFailed` at the end."""
        claims: dict[Claim, list[Object]] = {claim: [] for claim in Claim}
        for candidate in candidates:
            claims[classify(candidate, self._owner, self._selector)].append(candidate)
        adoptions = await attempt_all(claims[Claim.ADOPT], self._adopt, errors=(KubeError, AdoptionRefused))
        releases = await attempt_all(claims[Claim.RELEASE], self._release, errors=(KubeError,))
        adopted = [result for result in adoptions if isinstance(result, dict)]
        claimed = claims[Claim.KEEP] + adopted
        if errors := [result for result in (*adoptions, *releases) if isinstance(result, Exception)]:
            raise ClaimFailed(self._owner, self._resource, claimed, errors)
        return claimed

    async def _adopt(self, obj: Object) -> Object | None:
        """Adopt the object and return its new state, or None when it is gone."""
        await self._can_adopt()
        metadata = {
            "uid": uid_of(obj),
            "resourceVersion": resource_version_of(obj),
            "ownerReferences": [self._reference],
        }
        try:
            return await self._patch(obj, {"metadata": metadata})
        except NotFound:
            return None

    async def _release(self, obj: Object) -> None:
        """Remove our owner reference. `NotFound`, or `Invalid` for another UID, means there is nothing to release."""
        reference = {"$patch": "delete", "uid": uid_of(self._owner)}
        metadata = {"uid": uid_of(obj), "ownerReferences": [reference]}
        with suppress(NotFound, Invalid):
            await self._patch(obj, {"metadata": metadata})
        self._released(obj)

    async def _patch(self, obj: Object, patch: Object) -> Object:
        return await self._api.patch(self._resource, name_of(obj), namespace_of(obj), patch, patch_type="strategic")
