"""The ways to make one gang of a job's pods: what object says so, and what the pods have to carry. Pure.

- `DisruptionBudget`: a PodDisruptionBudget over the job's pods, for schedulers such as kube-batch that read it.
- `VolcanoPodGroup`: Volcano's PodGroup; no pod is created before Volcano has let the group in.
- `SchedulerPluginsPodGroup`: the PodGroup of kubernetes-sigs/scheduler-plugins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from controllers.job_types import JobEvent, SchedulingPolicy
from store.kube.objects import Object
from store.kube.resources import POD_DISRUPTION_BUDGETS, Resource

VOLCANO_POD_GROUPS = Resource("scheduling.volcano.sh", "v1beta1", "podgroups", "PodGroup")
SCHEDULER_PLUGINS_POD_GROUPS = Resource("scheduling.x-k8s.io", "v1alpha1", "podgroups", "PodGroup")


@dataclass(frozen=True, slots=True)
class GangSize:
    """`min_member`: pods that must be able to run together. `min_resources`: what they request, None for unknown."""

    min_member: int
    min_resources: Mapping[str, str] | None = None


class GangKind(Protocol):
    """One way to make a gang."""

    @property
    def resources(self) -> tuple[Resource, ...]:
        """What the object is, in the versions that may be served, the best first."""

    @property
    def needs_resources(self) -> bool:
        """Whether the object says what the gang requests."""

    def spec(self, policy: SchedulingPolicy, size: GangSize, labels: Mapping[str, str]) -> Object:
        """The fields of the spec that are ours; None for one that should be absent. `labels`: of the job's pods."""

    def decorate(self, pod: Object, group: str, replica_type: str) -> JobEvent | None:
        """Make the pod a member of the group; what to warn of, if anything."""

    def holds_creation(self, current: Object | None) -> bool:
        """Whether pods have to wait for the scheduler's word about the group. `current`: the object, if it exists."""


@dataclass(frozen=True, slots=True)
class DisruptionBudget:
    """`scheduler`: the scheduler that reads budgets as gangs, set in pods; "" leaves pods as they are."""

    scheduler: str = ""

    @property
    def resources(self) -> tuple[Resource, ...]:
        return POD_DISRUPTION_BUDGETS, POD_DISRUPTION_BUDGETS.in_version("v1beta1")

    @property
    def needs_resources(self) -> bool:
        return False

    def spec(self, policy: SchedulingPolicy, size: GangSize, labels: Mapping[str, str]) -> Object:
        return {"minAvailable": size.min_member, "selector": {"matchLabels": dict(labels)}}

    def decorate(self, pod: Object, group: str, replica_type: str) -> JobEvent | None:
        return _set_scheduler(pod, self.scheduler) if self.scheduler else None

    def holds_creation(self, current: Object | None) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class VolcanoPodGroup:
    """Volcano's PodGroup. `scheduler`: its name in pods."""

    scheduler: str = "volcano"

    @property
    def resources(self) -> tuple[Resource, ...]:
        return (VOLCANO_POD_GROUPS,)

    @property
    def needs_resources(self) -> bool:
        return True

    def spec(self, policy: SchedulingPolicy, size: GangSize, labels: Mapping[str, str]) -> Object:
        return {
            "minMember": size.min_member,
            "minResources": size.min_resources,
            "queue": policy.queue or None,
            "priorityClassName": policy.priority_class or None,
        }

    def decorate(self, pod: Object, group: str, replica_type: str) -> JobEvent | None:
        annotations = pod["metadata"].setdefault("annotations", {})
        annotations |= {"scheduling.k8s.io/group-name": group, "volcano.sh/task-spec": replica_type.lower()}
        return _set_scheduler(pod, self.scheduler)

    def holds_creation(self, current: Object | None) -> bool:
        phase = ((current or {}).get("status") or {}).get("phase")
        return phase in (None, "", "Pending")


@dataclass(frozen=True, slots=True)
class SchedulerPluginsPodGroup:
    """The PodGroup of scheduler-plugins. `scheduler`: the name under which the scheduler with the plugin runs."""

    scheduler: str = "scheduler-plugins-scheduler"

    @property
    def resources(self) -> tuple[Resource, ...]:
        return (SCHEDULER_PLUGINS_POD_GROUPS,)

    @property
    def needs_resources(self) -> bool:
        return True

    def spec(self, policy: SchedulingPolicy, size: GangSize, labels: Mapping[str, str]) -> Object:
        return {
            "minMember": size.min_member,
            "minResources": size.min_resources,
            "scheduleTimeoutSeconds": policy.schedule_timeout_seconds,
        }

    def decorate(self, pod: Object, group: str, replica_type: str) -> JobEvent | None:
        pod["metadata"].setdefault("labels", {})["scheduling.x-k8s.io/pod-group"] = group
        return _set_scheduler(pod, self.scheduler)

    def holds_creation(self, current: Object | None) -> bool:
        return False


def _set_scheduler(pod: Object, scheduler: str) -> JobEvent | None:
    """Only where the template leaves it open: another scheduler was asked for, and may know gangs too."""
    written = pod["spec"].setdefault("schedulerName", scheduler) or scheduler
    pod["spec"]["schedulerName"] = written
    if written == scheduler:
        return None
    return JobEvent(
        "Warning",
        "SettedPodTemplateSchedulerName",
        f"The pod template asks for the scheduler {written}; the gang is scheduled by {scheduler}",
    )
