"""What a pod says to HiveD and what HiveD writes on it: the annotations, as types."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AffinityGroupMember:
    """So many pods of the group, each with so many leaf cells."""

    pod_number: int
    leaf_cell_number: int


@dataclass(frozen=True, slots=True)
class AffinityGroupSpec:
    """Pods that are placed all or none. Members of equal `leaf_cell_number` are merged, ascending by it."""

    name: str
    members: tuple[AffinityGroupMember, ...]


@dataclass(frozen=True, slots=True)
class PodSchedulingSpec:
    """The annotation `pod-scheduling-spec`, with HiveD's defaults. `priority` -1 is opportunistic."""

    virtual_cluster: str
    priority: int
    pinned_cell_id: str
    leaf_cell_type: str
    leaf_cell_number: int
    gang_release_enable: bool
    lazy_preemption_enable: bool
    ignore_k8s_suggested_nodes: bool
    affinity_group: AffinityGroupSpec


@dataclass(frozen=True, slots=True)
class PodPlacementInfo:
    """Where one pod of the group is. `preassigned_cell_types` has a type per leaf, all "" if opportunistic."""

    physical_node: str
    physical_leaf_cell_indices: tuple[int, ...]
    preassigned_cell_types: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AffinityGroupMemberBindInfo:
    """The pods of one `leaf_cell_number`."""

    pod_placements: tuple[PodPlacementInfo, ...]


@dataclass(frozen=True, slots=True)
class PodBindInfo:
    """The annotation `pod-bind-info`: this pod's place and its whole group's: any pod can restore the group."""

    node: str
    leaf_cell_isolation: tuple[int, ...]
    cell_chain: str
    affinity_group_bind_info: tuple[AffinityGroupMemberBindInfo, ...]
