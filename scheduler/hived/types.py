"""The scheduler algorithm's interface (the seed's `SchedulerAlgorithm`) and what it answers.

Pods and nodes are Kubernetes objects as they came; nobody changes them. The methods are called by one writer, one after
another; only `schedule` decides, all others report what has happened.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from scheduler.hived.groups import AffinityGroup
from scheduler.hived.pod_contract import PodBindInfo
from store.kube.objects import Object


class SchedulingPhase(StrEnum):
    """On which of kube-scheduler's calls a decision is taken: only Preempting may claim what others use."""

    FILTERING = "Filtering"
    PREEMPTING = "Preempting"


@dataclass(frozen=True, slots=True)
class PodWaitInfo:
    """Nothing fits now. `reason` is for the pod's owner (HiveD's later form of the seed's `FailedNodeReasons`)."""

    reason: str


@dataclass(frozen=True, slots=True)
class PodPreemptInfo:
    """The pods that must go first: `victim_pods` those of one node, the first by configuration that has any.

    Never empty, for kube-scheduler takes victims of one node only. The next call names those of the next node, when
    this one's are gone; `elsewhere` has all of them at once.
    """

    node: str
    victim_pods: tuple[Object, ...]
    elsewhere: tuple[Object, ...] = ()


@dataclass(frozen=True, slots=True)
class PodScheduleResult:
    """Exactly one of the first three is set (the seed's `PodScheduleResult`).

    `downgraded`: the groups that lose their quota to the pod's, and nothing else, by this decision.
    """

    pod_wait_info: PodWaitInfo | None = None
    pod_preempt_info: PodPreemptInfo | None = None
    pod_bind_info: PodBindInfo | None = None
    downgraded: tuple[str, ...] = ()


class SchedulerAlgorithm(Protocol):
    """Decides by a view of the whole cluster that it builds from these calls (the seed's `SchedulerAlgorithm`)."""

    @property
    def groups(self) -> Mapping[str, AffinityGroup]:
        """The groups that have or claim a place, by name."""

    def schedule(self, pod: Object, suggested_nodes: Collection[str], phase: SchedulingPhase) -> PodScheduleResult:
        """What is to be done with a pod that is not allocated. Raises `UserError`, `PlatformError`.

        A bind result must be followed by `add_allocated_pod` with that bind info, before any other call. A wait result
        has changed nothing.
        """

    def add_node(self, node: Object) -> None:
        """A node is there."""

    def update_node(self, old_node: Object, new_node: Object) -> None:
        """A node has changed."""

    def delete_node(self, node: Object) -> None:
        """A node is gone."""

    def add_unallocated_pod(self, pod: Object) -> None:
        """A pod waits to be scheduled. Never raises: a malformed one is refused when it is scheduled."""

    def delete_unallocated_pod(self, pod: Object) -> None:
        """A pod that was never allocated is gone. Never raises."""

    def add_allocated_pod(self, pod: Object) -> None:
        """A pod has its place, which its annotations tell: right after `schedule`, or found bound (recovery).

        Raises `UserError` when its annotations can't be read.
        """

    def delete_allocated_pod(self, pod: Object) -> None:
        """A pod that had its place is gone. Unknown pods are ignored."""
