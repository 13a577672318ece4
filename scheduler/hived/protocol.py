"""The scheduler algorithm's interface (HiveD's `SchedulerAlgorithm`) and its results.

Pods and nodes are Kubernetes objects and are never changed. One writer calls the methods, one after another. `schedule`
decides, `commit` applies what was decided, `restore` reads what an earlier process decided; all others report changes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from scheduler.hived.cells.groups import AffinityGroup, Placement
from scheduler.hived.contract.pods import PodBindInfo, PodSchedulingSpec
from store.kube.api.objects import Object


class SchedulingPhase(StrEnum):
    """The call of kube-scheduler for which a decision is made: only Preempting may claim used leaves."""

    FILTERING = "Filtering"
    PREEMPTING = "Preempting"


@dataclass(frozen=True, slots=True)
class PodWaitInfo:
    """The pod must wait. `reason` is for the pod's owner (HiveD's `PodWaitInfo`)."""

    reason: str


@dataclass(frozen=True, slots=True)
class PodPreemptInfo:
    """The victims: `victim_pods` are those of one node, the first in configuration order that has any.

    Never empty. kube-scheduler takes victims of one node only; once they are gone, the next call names those of the
    next node. `elsewhere` has the victims of all other nodes.
    """

    node: str
    victim_pods: tuple[Object, ...]
    elsewhere: tuple[Object, ...] = ()


@dataclass(frozen=True, slots=True)
class PodScheduleResult:
    """The answer for a pod: exactly one of the first three is set (HiveD's `PodScheduleResult`).

    `downgraded`: the groups that keep their devices but lose their quota to the pod's group by this decision.
    """

    pod_wait_info: PodWaitInfo | None = None
    pod_preempt_info: PodPreemptInfo | None = None
    pod_bind_info: PodBindInfo | None = None
    downgraded: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Decision:
    """The result for a pod, with what `commit` needs to apply a bind result.

    `spec`: the pod's request. `placement`: of the whole group, if the pod is the first of it to be bound.
    """

    pod: Object
    spec: PodSchedulingSpec
    result: PodScheduleResult
    placement: Placement | None = None


class SchedulerAlgorithm(Protocol):
    """Makes decisions on the cluster state that these calls report (HiveD's `SchedulerAlgorithm`)."""

    @property
    def groups(self) -> Mapping[str, AffinityGroup]:
        """Return the groups that have or have claimed a place, by name."""

    def schedule(self, pod: Object, suggested_nodes: Collection[str], phase: SchedulingPhase) -> Decision:
        """Decide on a pod that is not allocated. Raises `UserError`, `PlatformError`.

        A wait or bind result changes nothing, unless the pod's group has claimed leaves before.
        """

    def commit(self, decision: Decision) -> Object:
        """Apply a bind result. Return the pod as it will be when bound, with the decision in its annotations.

        A decision is valid only until the next call of any method: commit it at once, or drop it. Raises `UserError`,
        and changes nothing, if the group is too large for an annotation.
        """

    def restore(self, pod: Object) -> None:
        """Add a pod that was found bound, with the place in its annotations.

        Raises `UserError` if they are unreadable, or the place is another pod's.
        """

    def add_node(self, node: Object) -> None:
        """Add a node."""

    def update_node(self, old_node: Object, new_node: Object) -> None:
        """Update a node."""

    def delete_node(self, node: Object) -> None:
        """Remove a node."""

    def add_unallocated_pod(self, pod: Object) -> None:
        """Add a pod that waits to be scheduled. Never raises: a malformed pod is refused when it is scheduled."""

    def delete_unallocated_pod(self, pod: Object) -> None:
        """Remove a pod that was never allocated. Never raises."""

    def delete_allocated_pod(self, pod: Object) -> None:
        """Remove a pod that had a place. Unknown pods are ignored."""
