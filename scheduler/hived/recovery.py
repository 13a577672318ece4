"""Recovery: a group's place, rebuilt from what is written on one of its pods, under today's configuration.

Whatever the configuration has become, running pods keep their devices. A leaf that is not configured any more is left
out. A group whose virtual cluster, cell type or quota is gone, or that would break another tenant's guarantee, goes on
as an opportunistic one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from scheduler.hived.cells import PhysicalCell, PhysicalLeaf, VirtualCell
from scheduler.hived.chain import Chain
from scheduler.hived.constants import OPPORTUNISTIC_PRIORITY
from scheduler.hived.draft import Draft
from scheduler.hived.groups import AffinityGroup, PodSlot, users_of
from scheduler.hived.placement import Placement, PodPlace
from scheduler.hived.pod_contract import (
    AffinityGroupMemberBindInfo,
    PodBindInfo,
    PodPlacementInfo,
    PodSchedulingSpec,
)
from scheduler.hived.virtual_cluster import VirtualCluster

Leaves = Mapping[tuple[str, int], PhysicalLeaf]


@dataclass(frozen=True, slots=True)
class Recovered:
    """What to apply. `lost`: why the group could not keep its quota, in words for an operator; "" if it did."""

    placement: Placement
    lost: str


class _LostError(Exception):
    """The group can't have its quota; the message says why."""


def read_slots(info: PodBindInfo, leaves: Leaves) -> tuple[list[PodSlot], list[str]]:
    """The places of a group's pods as its bind info tells them, and what is not as it was.

    `leaves`: by node and device index, of all chains: a node may have come to another one.
    """
    notes: list[str] = []
    slots = [
        _slot(placement, leaves, notes)
        for member in sorted(info.affinity_group_bind_info, key=_leaf_cell_number)
        for placement in member.pod_placements
    ]
    return slots, notes


def is_contested(slot: PodSlot, leaves: Leaves) -> bool:
    """Whether another group had some of a place's devices when it was found."""
    held = {leaf.device for leaf in slot.leaves}
    return any(device not in held and (slot.node, device) in leaves for device in slot.devices)


def recover(
    spec: PodSchedulingSpec, slots: list[PodSlot], tenant: VirtualCluster | None, chains: Mapping[str, Chain]
) -> Recovered:
    """The virtual side of a group's places. `tenant`: its virtual cluster if there still is one."""
    found = dict.fromkeys(leaf.chain.name for slot in slots for leaf in slot.leaves)
    chain = chains[next(iter(found), next(iter(chains)))]
    lost = ""
    if is_guaranteed(spec, slots):
        try:
            return Recovered(_find_quota(spec, tenant, chain, slots), lost)
        except _LostError as error:
            lost = str(error)
    return Recovered(Placement(chain, tuple(PodPlace(slot.leaves) for slot in slots)), lost)


def is_guaranteed(spec: PodSchedulingSpec, slots: Sequence[PodSlot]) -> bool:
    """Whether the group had quota when its pod was bound."""
    return spec.priority != OPPORTUNISTIC_PRIORITY and any(any(slot.preassigned_types) for slot in slots)


def _leaf_cell_number(member: AffinityGroupMemberBindInfo) -> int:
    return len(member.pod_placements[0].physical_leaf_cell_indices)


def _slot(placement: PodPlacementInfo, leaves: Leaves, notes: list[str]) -> PodSlot:
    """One pod's place, as far as its leaves are still configured and nobody else's."""
    node, devices, found = placement.physical_node, placement.physical_leaf_cell_indices, list[PhysicalLeaf]()
    lost: dict[str, list[int]] = {}
    for device in devices:
        leaf = leaves.get((node, device))
        if leaf is None:
            lost.setdefault("not configured any more", []).append(device)
        elif leaf.user is not None:
            lost.setdefault(f"used by group {leaf.user.name}", []).append(device)
        else:
            found.append(leaf)
    notes += [f"leaf cells of node {node} {why}: {', '.join(map(str, indices))}" for why, indices in lost.items()]
    return PodSlot(len(devices), node, devices, tuple(found), placement.preassigned_cell_types)


def _find_quota(
    spec: PodSchedulingSpec, tenant: VirtualCluster | None, chain: Chain, slots: Sequence[PodSlot]
) -> Placement:
    """The group's places with their virtual side, and the groups that lose their quota to it. Raises `_LostError`."""
    if tenant is None:
        raise _LostError(f"there is no virtual cluster {spec.virtual_cluster} any more")
    quota = _Quota(spec, tenant, Draft(chain))
    draft = quota.draft
    places: list[PodPlace] = []
    for slot in slots:
        virtual: list[VirtualCell] = []
        for leaf, cell_type in _typed_leaves(slot):
            if leaf.chain is not chain:
                raise _LostError(f"its leaf cells are in chains {chain.name} and {leaf.chain.name} now")
            physical = _preassigned_cell(leaf, cell_type)
            if physical is None:
                raise _LostError(f"chain {chain.name} has no cells of type {cell_type}")
            virtual.append(_descend(draft, quota.top(physical), leaf))
        places.append(PodPlace(slot.leaves, tuple(virtual)))
    if not draft.is_safe():
        raise _LostError(f"its place in chain {chain.name} is needed for what other virtual clusters are guaranteed")
    return Placement(chain, tuple(places), tuple(draft.downgraded))


def preassigned_cells(slots: Sequence[PodSlot]) -> list[PhysicalCell]:
    """The cells, still configured, that a group's quota was in."""
    cells = (_preassigned_cell(leaf, cell_type) for slot in slots for leaf, cell_type in _typed_leaves(slot))
    return list(dict.fromkeys(cell for cell in cells if cell is not None))


def _typed_leaves(slot: PodSlot) -> Iterator[tuple[PhysicalLeaf, str]]:
    """The leaves that are still configured, each with the type of the preassigned cell that it was part of."""
    types = dict(zip(slot.devices, slot.preassigned_types, strict=True))
    return ((leaf, types[leaf.device]) for leaf in slot.leaves)


def _preassigned_cell(leaf: PhysicalLeaf, cell_type: str) -> PhysicalCell | None:
    """The cell of that type around a leaf, if its chain still has such cells."""
    level = leaf.chain.topology.level_of(cell_type)
    return None if level is None else leaf.ancestor(level)


@dataclass(slots=True)
class _Quota:
    """The search for a group's preassigned cells, on a draft. `tops`: those found so far."""

    spec: PodSchedulingSpec
    tenant: VirtualCluster
    draft: Draft
    tops: set[VirtualCell] = field(default_factory=set)

    def top(self, physical: PhysicalCell) -> VirtualCell:
        """The preassigned cell that a physical one is, or now becomes, bound to. Raises `_LostError`."""
        top = self.draft.virtual_of(physical)
        if top is None:
            top = self._bind(physical)
        elif top.virtual_cluster is not self.tenant or top.parent or top.pinned_id != self.spec.pinned_cell_id:
            raise _LostError(f"{physical.address} belongs to {top.address} now")
        self.tops.add(top)
        return top

    def _bind(self, physical: PhysicalCell) -> VirtualCell:
        if self.spec.pinned_cell_id:
            raise _LostError(f"{physical.address} is not pinned cell {self.spec.pinned_cell_id} any more")
        if not self.draft.free.is_obtainable(physical.level, physical.index):
            raise _LostError(f"a part of {physical.address}, or a cell around it, is another's quota now")
        top = self._unbound(physical.level)
        self.draft.take(physical)
        self.draft.bind(top, physical)
        return top

    def _unbound(self, level: int) -> VirtualCell:
        """A cell that nobody has, else that of the lowest priority below ours, whose groups are downgraded."""
        draft, tenant, chain = self.draft, self.tenant, self.draft.chain
        for cell in tenant.unbound(chain.name, level):
            if draft.physical_of(cell) is None:
                return cell
        used = [cell for cell in tenant.at(chain.name, level) if cell.used and cell not in self.tops]
        for cell in sorted(used, key=lambda cell: cell.priority):
            if cell.priority >= self.spec.priority:
                break
            if draft.physical_of(cell) is cell.physical:
                for group in _occupants(cell):
                    if group not in draft.downgraded:
                        draft.downgrade(group)
            if draft.physical_of(cell) is None:
                return cell
        cell_type = chain.topology.cell_types[level - 1]
        raise _LostError(f"virtual cluster {tenant.name} has no cell {cell_type} in chain {chain.name} left")


def _occupants(cell: VirtualCell) -> list[AffinityGroup]:
    """The groups that use a preassigned cell."""
    assert cell.physical is not None
    return users_of(leaf for leaf in cell.physical.leaf_cells() if leaf.virtual is not None)


def _descend(draft: Draft, top: VirtualCell, leaf: PhysicalLeaf) -> VirtualCell:
    """Bind what is not bound yet between a preassigned cell and a leaf."""
    virtual = top
    for level in range(top.level - 1, 0, -1):
        physical = leaf.ancestor(level)
        child = draft.virtual_of(physical)
        if child is None:
            child = next(cell for cell in virtual.children if draft.physical_of(cell) is None)
            draft.bind(child, physical)
        virtual = child
    draft.occupy(virtual)
    return virtual
