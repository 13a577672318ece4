"""Gangs: the object that declares a job's pods a gang, what the pods must carry, and how it is kept.

- `DisruptionBudget`: a PodDisruptionBudget over the job's pods, for schedulers such as kube-batch that read it.
- `VolcanoPodGroup`: Volcano's PodGroup; no pod is created before Volcano has admitted the group.
- `SchedulerPluginsPodGroup`: the PodGroup of kubernetes-sigs/scheduler-plugins.

The kinds are pure. `GangControl` keeps the object. A job whose annotation asks HiveD for cells has no such object: its
pods carry their affinity group with them (`join_affinity_group`; see `scheduler.hived`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from typing import ClassVar, Protocol

import msgspec
import structlog

from controllers.jobs.api import (
    BadSpec,
    Gang,
    HivedRequest,
    JobEvent,
    JobView,
    NotServed,
    ReplicaSpec,
    SchedulingPolicy,
)
from controllers.jobs.control import ChildControl, Identity, set_scheduler
from controllers.jobs.namesake import NamesakeControl
from scheduler.hived.contract import (
    POD_LEAF_CELL_ISOLATION,
    POD_SCHEDULING_ENABLE,
    POD_SCHEDULING_SPEC,
    AffinityGroupMember,
    AffinityGroupSpec,
    PodSchedulingSpec,
)
from store.kube.api.errors import KubeError, NotFound
from store.kube.api.objects import (
    POD_DISRUPTION_BUDGETS,
    Object,
    Resource,
    annotations_of,
)
from store.kube.api.protocol import KubeApi
from store.kube.informer.informer import Informer
from store.quantity import format_quantity, parse_quantity

log = structlog.get_logger(__name__)

VOLCANO_POD_GROUPS = Resource("scheduling.volcano.sh", "v1beta1", "podgroups", "PodGroup")
SCHEDULER_PLUGINS_POD_GROUPS = Resource("scheduling.x-k8s.io", "v1alpha1", "podgroups", "PodGroup")

DEFAULT_QUEUE = "default"  # Volcano creates it

PRIORITY_CLASSES = Resource("scheduling.k8s.io", "v1", "priorityclasses", "PriorityClass", namespaced=False)

DEVICES = "NVIDIA_VISIBLE_DEVICES"

_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"  # as large as the job, and not for the gang


@dataclass(frozen=True, slots=True)
class GangSize:
    """`min_member`: pods that must be able to run together. `min_resources`: their requests; None if unknown."""

    min_member: int
    min_resources: Mapping[str, str] | None = None


class GangKind(Protocol):
    """A kind of gang."""

    @property
    def resources(self) -> tuple[Resource, ...]:
        """The object's resource, in each version that may be served, the preferred one first."""

    @property
    def needs_resources(self) -> bool:
        """True if the object's spec holds the gang's resource requests."""

    @property
    def kept(self) -> tuple[str, ...]:
        """Fields of the spec that stay as they are in an object that has them."""
        return ()

    def spec(self, policy: SchedulingPolicy, size: GangSize, labels: Mapping[str, str]) -> Object:
        """Return our fields of the spec; None for one that must be absent. `labels`: those of the job's pods."""

    def decorate(self, pod: Object, group: str, replica_type: str) -> JobEvent | None:
        """Add the pod to the group. Return a warning, or None."""

    def holds_creation(self, current: Object | None) -> bool:
        """Return whether pods must wait until the scheduler admits the group. `current`: the object, if it exists."""
        return False


@dataclass(frozen=True)
class DisruptionBudget(GangKind):
    """`scheduler`: the scheduler that reads budgets as gangs, set in pods; "" leaves pods as they are."""

    scheduler: str = ""

    resources: ClassVar[tuple[Resource, ...]] = (POD_DISRUPTION_BUDGETS, POD_DISRUPTION_BUDGETS.in_version("v1beta1"))
    needs_resources: ClassVar[bool] = False

    def spec(self, policy: SchedulingPolicy, size: GangSize, labels: Mapping[str, str]) -> Object:
        return {"minAvailable": size.min_member, "selector": {"matchLabels": dict(labels)}}

    def decorate(self, pod: Object, group: str, replica_type: str) -> JobEvent | None:
        return set_scheduler(pod, self.scheduler) if self.scheduler else None


@dataclass(frozen=True)
class VolcanoPodGroup(GangKind):
    """Volcano's PodGroup. `scheduler`: its name in pods. The queue of a group that exists stays."""

    scheduler: str = "volcano"

    resources: ClassVar[tuple[Resource, ...]] = (VOLCANO_POD_GROUPS,)
    needs_resources: ClassVar[bool] = True
    kept: ClassVar[tuple[str, ...]] = ("queue",)

    def spec(self, policy: SchedulingPolicy, size: GangSize, labels: Mapping[str, str]) -> Object:
        return {
            "minMember": size.min_member,
            "minResources": size.min_resources,
            "queue": policy.queue or DEFAULT_QUEUE,
            "priorityClassName": policy.priority_class or None,
        }

    def decorate(self, pod: Object, group: str, replica_type: str) -> JobEvent | None:
        annotations = pod["metadata"].setdefault("annotations", {})
        annotations |= {"scheduling.k8s.io/group-name": group, "volcano.sh/task-spec": replica_type.lower()}
        return set_scheduler(pod, self.scheduler)

    def holds_creation(self, current: Object | None) -> bool:
        phase = ((current or {}).get("status") or {}).get("phase")
        return phase in (None, "", "Pending")


@dataclass(frozen=True)
class SchedulerPluginsPodGroup(GangKind):
    """The PodGroup of scheduler-plugins. `scheduler`: the name under which the scheduler with the plugin runs."""

    scheduler: str = "scheduler-plugins-scheduler"

    resources: ClassVar[tuple[Resource, ...]] = (SCHEDULER_PLUGINS_POD_GROUPS,)
    needs_resources: ClassVar[bool] = True

    def spec(self, policy: SchedulingPolicy, size: GangSize, labels: Mapping[str, str]) -> Object:
        return {
            "minMember": size.min_member,
            "minResources": size.min_resources,
            "scheduleTimeoutSeconds": policy.schedule_timeout_seconds,
        }

    def decorate(self, pod: Object, group: str, replica_type: str) -> JobEvent | None:
        pod["metadata"].setdefault("labels", {})["scheduling.x-k8s.io/pod-group"] = group
        return set_scheduler(pod, self.scheduler)


class GangControl(NamesakeControl):
    """Keeps the gang's object of each job."""

    def __init__(self, control: ChildControl, kind: GangKind, *, cache: Informer | None = None) -> None:
        super().__init__(control, cache=cache, kept=kind.kept)
        self.kind = kind
        self._priorities: dict[str, int] = {}

    async def observe(self, identity: Identity, view: JobView) -> Gang:
        """Return the state of the job's object, for a decision. Raises `BadSpec`."""
        current, wanted = self.seen(identity.job), await self._wanted(identity, view, view.min_available)
        return Gang(
            exists=current is not None,
            current=self.is_current(identity.job, wanted),
            holds_creation=self.kind.holds_creation(current),
        )

    async def sync(self, identity: Identity, view: JobView, min_available: int) -> Object:
        """Bring the job's object into the state that the view requires. Raises `KubeError`, `JobError`, `BadSpec`."""
        return await self.apply(identity, await self._wanted(identity, view, min_available))

    def body(self, identity: Identity, policy: SchedulingPolicy, size: GangSize) -> Object:
        """Return the desired state of the object. A new one has the job's annotations, as in kubeflow."""
        annotations = {key: value for key, value in annotations_of(identity.job).items() if key != _LAST_APPLIED}
        return {"metadata": {"annotations": annotations}, "spec": self.kind.spec(policy, size, identity.labels)}

    async def _wanted(self, identity: Identity, view: JobView, min_available: int) -> Object:
        policy = view.run_policy.scheduling_policy
        resources = policy.min_resources
        if resources is None and self.kind.needs_resources:
            names = {priority_class(spec) for spec in view.replica_specs.values()}
            # Their order matters if there are several. The value of a class never changes, so each is read once.
            for name in sorted(names - self._priorities.keys() - {""}) if len(names) > 1 else ():
                with suppress(NotFound):
                    self._priorities[name] = int((await self.api.get(PRIORITY_CLASSES, name)).get("value") or 0)
            resources = min_resources(view.replica_specs, min_available, lambda name: self._priorities.get(name, 0))
        return self.body(identity, policy, GangSize(min_available, resources))


def join_affinity_group(pod: Object, replica_type: str, request: HivedRequest, view: JobView) -> JobEvent | None:
    """Write the pod's request into it: the extender's annotation, the resource that enables it, the devices that its
    first container sees, and the scheduler. Return a warning if the template names another one."""
    cells = request.cells(replica_type)
    if not cells:
        return None
    spec = PodSchedulingSpec(
        virtual_cluster=request.virtual_cluster,
        priority=request.priority,
        pinned_cell_id=request.pinned_cell_id,
        leaf_cell_type=request.leaf_cell_type,
        leaf_cell_number=cells,
        lazy_preemption_enable=request.lazy_preemption_enable,
        ignore_k8s_suggested_nodes=request.ignore_k8s_suggested_nodes,
    )
    written = msgspec.to_builtins(spec)
    del written["affinityGroup"]
    if request.gang:
        members = tuple(
            AffinityGroupMember(other.replicas, request.cells(name))
            for name, other in view.replica_specs.items()
            if other.replicas and request.cells(name)
        )
        name = f"{view.namespace}/{view.name}.{view.kind.lower()}"
        written["affinityGroup"] = msgspec.to_builtins(AffinityGroupSpec(name, members))
    pod["metadata"]["annotations"][POD_SCHEDULING_SPEC] = msgspec.json.encode(written).decode()
    container = pod["spec"]["containers"][0]
    limits = container.setdefault("resources", {}).setdefault("limits", {})
    limits[POD_SCHEDULING_ENABLE] = 1
    variables = container.setdefault("env", [])
    if all(variable.get("name") != DEVICES for variable in variables):
        field = {"fieldPath": f"metadata.annotations['{POD_LEAF_CELL_ISOLATION}']"}
        variables.append({"name": DEVICES, "valueFrom": {"fieldRef": field}})
    return set_scheduler(pod, request.scheduler) if request.scheduler else None


def min_resources(
    specs: Mapping[str, ReplicaSpec], min_member: int, priority_of: Callable[[str], int]
) -> dict[str, str]:
    """Return the requests of the first `min_member` pods by descending priority. `priority_of`: value of a class.

    A container without requests counts with its limits. Init containers and overhead are left out, as in kubeflow.
    Raises `BadSpec` for an invalid quantity.
    """
    total: dict[str, Decimal] = {}
    left = min_member
    for replica_type, spec in sorted(specs.items(), key=lambda item: -priority_of(priority_class(item[1]))):
        count = min(spec.replicas, left)
        left -= count
        for number, container in enumerate((spec.template.get("spec") or {}).get("containers") or ()):
            resources: Mapping[str, Mapping[str, str]] = container.get("resources") or {}
            amounts = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
            for name, quantity in amounts.items():
                try:
                    total[name] = total.get(name, Decimal(0)) + parse_quantity(quantity) * count
                except ValueError as error:
                    path = f"{replica_type}.template.spec.containers[{number}].resources"
                    raise BadSpec(f"{path}: {name}: {error}") from None
    return {name: format_quantity(amount) for name, amount in total.items() if amount}


def priority_class(spec: ReplicaSpec) -> str:
    """Return the priority class of the pods; "" for the cluster's default."""
    return str((spec.template.get("spec") or {}).get("priorityClassName") or "")


async def served_resource(api: KubeApi, resources: Iterable[Resource]) -> Resource:
    """Return the first resource that the API server serves. Raises `NotServed`."""
    wanted = []
    for resource in resources:
        if await api.served(resource):
            return resource
        wanted.append(f"{resource.plural} in {resource.api_version}")
    raise NotServed(f"The API server does not serve {' or '.join(wanted)}: install it, or disable what needs it")


async def discover_resource(api: KubeApi, resources: Iterable[Resource], *, retry_period: float = 2.0) -> Resource:
    """Retry `served_resource` every `retry_period` seconds until the API server answers. Raises `NotServed`."""
    candidates = tuple(resources)
    while True:
        try:
            return await served_resource(api, candidates)
        except KubeError as error:
            log.warning("Could not discover the API server's resources", kind=candidates[0].kind, error=str(error))
        await asyncio.sleep(retry_period)
