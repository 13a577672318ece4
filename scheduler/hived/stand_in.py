"""A bound pod whose request was made unreadable while it ran: it still runs, so its devices are not to be given away.

Anybody who may annotate a pod can do that, and it shows only when the next process reads the pod. If the pod's group
was read from another of its pods, it is still the one that has this place; else the pod counts as an opportunistic one
by itself, and the group, once it is read, goes without that place.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from scheduler.hived.constants import OPPORTUNISTIC_PRIORITY, POD_SCHEDULING_SPEC
from scheduler.hived.errors import UserError
from scheduler.hived.groups import AffinityGroup
from scheduler.hived.pod_contract import (
    AffinityGroupMember,
    AffinityGroupMemberBindInfo,
    AffinityGroupSpec,
    PodBindInfo,
    PodPlacementInfo,
    PodSchedulingSpec,
    extract_pod_bind_info,
    extract_pod_scheduling_spec,
    new_binding_pod,
)
from store.kube.objects import Object, annotations_of, key_of

UNKNOWN_TENANT = "unknown"


def stand_in(pod: Object, groups: Iterable[AffinityGroup]) -> Object | None:
    """What a bound pod counts as whose request can't be read. None when it can be, or when the pod's place can't.

    `groups`: those that are known.
    """
    try:
        extract_pod_scheduling_spec(pod)
    except UserError:
        pass
    else:
        return None
    try:
        info = extract_pod_bind_info(pod)
    except UserError:
        return None
    group = next((group for group in groups if _has_place(group, info)), None)
    if group is not None:
        size = len(info.leaf_cell_isolation)
        return _with_request(pod, msgspec.structs.replace(group.spec, leaf_cell_number=size))
    return _by_itself(pod, info)


def _has_place(group: AffinityGroup, info: PodBindInfo) -> bool:
    """Whether the place is the group's, and none of its pods was found there."""
    slot = group.slot_of(info)
    return slot is not None and slot.pod is None


def _by_itself(pod: Object, info: PodBindInfo) -> Object:
    devices = info.leaf_cell_isolation
    alone = AffinityGroupSpec(key_of(pod), (AffinityGroupMember(1, len(devices)),))
    spec = PodSchedulingSpec(
        virtual_cluster=UNKNOWN_TENANT,
        priority=OPPORTUNISTIC_PRIORITY,
        leaf_cell_number=len(devices),
        affinity_group=alone,
    )
    place = AffinityGroupMemberBindInfo((PodPlacementInfo(info.node, devices, ("",) * len(devices)),))
    return new_binding_pod(_with_request(pod, spec), PodBindInfo(info.node, devices, info.cell_chain, (place,)))


def _with_request(pod: Object, spec: PodSchedulingSpec) -> Object:
    annotations = annotations_of(pod) | {POD_SCHEDULING_SPEC: msgspec.json.encode(spec).decode()}
    return pod | {"metadata": pod["metadata"] | {"annotations": annotations}}
