"""Affinity groups as inspection shows them: HiveD's fields, in HiveD's order."""

from __future__ import annotations

import msgspec

from scheduler.hived.groups import AffinityGroup
from store.kube.objects import uid_of
from store.kube.times import format_time


class GroupMetadata(msgspec.Struct):
    name: str


class LazyPreemption(msgspec.Struct, rename="camel"):
    """`preemption_time`: as Kubernetes writes times."""

    preemptor: str
    preemption_time: str


class AffinityGroupStatus(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """`physical_placement`: device indices by node. `virtual_placement`: leaf addresses by preassigned cell.

    `priority`: as the group asked for it, also when it was downgraded.
    """

    vc: str
    priority: int
    state: str
    physical_placement: dict[str, list[int]] = {}
    virtual_placement: dict[str, list[str]] = {}
    allocated_pods: list[str] = []
    preempting_pods: list[str] = []
    lazy_preemption_status: LazyPreemption | None = None


class AffinityGroupInfo(msgspec.Struct):
    """A group."""

    metadata: GroupMetadata
    status: AffinityGroupStatus


def group_info(group: AffinityGroup) -> AffinityGroupInfo:
    """The group as it is now."""
    physical: dict[str, list[int]] = {}
    virtual: dict[str, list[str]] = {}
    for slot in group.slots:
        physical.setdefault(slot.node, []).extend(slot.devices)
        for cell in slot.virtual:
            virtual.setdefault(cell.preassigned.address, []).append(cell.address)
    lazy = group.lazy_preemption
    status = AffinityGroupStatus(
        vc=group.virtual_cluster,
        priority=group.spec.priority,
        state=group.state,
        physical_placement=physical,
        virtual_placement=virtual,
        allocated_pods=[uid_of(pod) for pod in group.pods()],
        preempting_pods=list(group.preempting_pods),
        lazy_preemption_status=None
        if lazy is None
        else LazyPreemption(lazy.preemptor, format_time(lazy.preemption_time)),
    )
    return AffinityGroupInfo(GroupMetadata(group.name), status)
