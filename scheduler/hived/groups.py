"""Affinity groups: pods that are placed all or none, and the leaves that they hold or claim."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from scheduler.hived.cells import PhysicalLeaf, VirtualCell
from scheduler.hived.constants import OPPORTUNISTIC_PRIORITY
from scheduler.hived.pod_contract import PodBindInfo, PodSchedulingSpec
from store.kube.objects import Object


class GroupState(StrEnum):
    """As HiveD reports it. Groups that wait are not tracked."""

    ALLOCATED = "Allocated"
    PREEMPTING = "Preempting"
    BEING_PREEMPTED = "BeingPreempted"


@dataclass(slots=True)
class PodSlot:
    """The place of one pod of a group. `preassigned_types`: of each device as it was placed, "" if without quota;
    a downgraded group keeps them, so that recovery does not depend on which of its pods is found first.

    `leaves` and `virtual` go together; a leaf that a new configuration lacks is left out of both, and `virtual` is
    empty for an opportunistic or downgraded group.
    """

    leaf_cell_number: int
    node: str
    devices: tuple[int, ...]
    leaves: tuple[PhysicalLeaf, ...]
    preassigned_types: tuple[str, ...]
    virtual: tuple[VirtualCell, ...] = ()
    pod: Object | None = None


@dataclass(slots=True)
class LazyPreemptionStatus:
    """Who took this group's quota while it kept its devices, and when (seconds since the epoch)."""

    preemptor: str
    preemption_time: float


@dataclass(slots=True, eq=False)
class AffinityGroup:
    """A group that has its place. `slots` ascend by `leaf_cell_number`; `preempting_pods` by UID.

    `is_contested`: another one had some of its devices when it was found, so pods of both may share them.
    """

    name: str
    spec: PodSchedulingSpec
    chain: str
    state: GroupState
    slots: list[PodSlot]
    preempting_pods: dict[str, Object] = field(default_factory=dict)
    lazy_preemption: LazyPreemptionStatus | None = None
    is_contested: bool = False

    @property
    def virtual_cluster(self) -> str:
        return self.spec.virtual_cluster

    @property
    def priority(self) -> int:
        """The one that counts now: -1 for an opportunistic group and for one that was downgraded."""
        return OPPORTUNISTIC_PRIORITY if self.is_opportunistic else self.spec.priority

    @property
    def is_opportunistic(self) -> bool:
        return not any(slot.virtual for slot in self.slots)

    def pairs(self) -> list[tuple[PhysicalLeaf, VirtualCell | None]]:
        """Its leaves, each with its virtual leaf if it has one."""
        return [
            (leaf, slot.virtual[number] if slot.virtual else None)
            for slot in self.slots
            for number, leaf in enumerate(slot.leaves)
        ]

    def leaves(self) -> Iterator[PhysicalLeaf]:
        """Those of all its places, in their order."""
        for slot in self.slots:
            yield from slot.leaves

    def pods(self) -> list[Object]:
        """Its allocated pods."""
        return [slot.pod for slot in self.slots if slot.pod is not None]

    def slot_of(self, info: PodBindInfo) -> PodSlot | None:
        """The place that a pod's bind info tells, by node and devices; None if it is none of the group's."""
        own = (info.node, info.leaf_cell_isolation)
        return next((slot for slot in self.slots if (slot.node, slot.devices) == own), None)


def users_of(leaves: Iterable[PhysicalLeaf]) -> list[AffinityGroup]:
    """The groups whose pods are on some leaves, each once, in the order of the leaves."""
    return list(dict.fromkeys(leaf.user for leaf in leaves if leaf.user is not None))


def claimants_of(leaves: Iterable[PhysicalLeaf]) -> list[AffinityGroup]:
    """The groups that have claimed some leaves, likewise."""
    return list(dict.fromkeys(leaf.claimant for leaf in leaves if leaf.claimant is not None))
