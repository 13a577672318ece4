"""Recovery: a group's place, rebuilt from the annotations of one of its pods, under the current configuration.

However the configuration has changed, running pods keep their devices. A leaf that is no longer configured is left out.
A group whose virtual cluster, cell type or quota is gone, or that would break another tenant's guarantee, continues as
an opportunistic one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from scheduler.hived.cells.cells import PhysicalCell, PhysicalLeaf, VirtualCell
from scheduler.hived.cells.chain import Chain, VirtualCluster
from scheduler.hived.cells.groups import Placement, PodPlace, PodSlot, users_of
from scheduler.hived.contract import (
    OPPORTUNISTIC_PRIORITY,
    PodBindInfo,
    PodSchedulingSpec,
)
from scheduler.hived.planning.mapping import Draft

Leaves = Mapping[tuple[str, int], PhysicalLeaf]


@dataclass(frozen=True, slots=True)
class Recovered:
    """The placement to apply. `lost`: why the group could not keep its quota, for an operator; "" if it did."""

    placement: Placement
    lost: str


class _LostError(Exception):
    """The group can't have its quota; the message says why."""


def read_slots(info: PodBindInfo, leaves: Leaves) -> tuple[list[PodSlot], list[str]]:
    """Return the slots of a group's pods by its bind info, each with those of its leaves that are still configured and
    unused, and notes on the others.

    `leaves`: by node and device index, of all chains: a node may have moved to another chain.
    """
    notes: list[str] = []
    members = sorted(
        info.affinity_group_bind_info, key=lambda member: len(member.pod_placements[0].physical_leaf_cell_indices)
    )
    slots: list[PodSlot] = []
    for placement in (placement for member in members for placement in member.pod_placements):
        node, devices, found = placement.physical_node, placement.physical_leaf_cell_indices, list[PhysicalLeaf]()
        lost: dict[str, list[int]] = {}
        for device in devices:
            leaf = leaves.get((node, device))
            if leaf is None:
                lost.setdefault("no longer configured", []).append(device)
            elif leaf.user is not None:
                lost.setdefault(f"used by group {leaf.user.name}", []).append(device)
            else:
                found.append(leaf)
        notes += [f"leaf cells of node {node} {why}: {', '.join(map(str, indices))}" for why, indices in lost.items()]
        slots.append(PodSlot(len(devices), node, devices, tuple(found), placement.preassigned_cell_types))
    return slots, notes


def is_contested(slot: PodSlot, leaves: Leaves) -> bool:
    """Return whether another group had some of a slot's devices at recovery."""
    held = {leaf.device for leaf in slot.leaves}
    return any(device not in held and (slot.node, device) in leaves for device in slot.devices)


def recover(
    spec: PodSchedulingSpec, slots: list[PodSlot], tenant: VirtualCluster | None, chains: Mapping[str, Chain]
) -> Recovered:
    """Return the group's placement with its virtual side. `tenant`: its virtual cluster if it still exists."""
    found = dict.fromkeys(leaf.chain.name for slot in slots for leaf in slot.leaves)
    chain = chains[next(iter(found), next(iter(chains)))]
    lost = ""
    had_quota = any(any(slot.preassigned_types) for slot in slots)
    if spec.priority != OPPORTUNISTIC_PRIORITY and had_quota:
        try:
            return Recovered(_find_quota(spec, tenant, chain, slots), lost)
        except _LostError as error:
            lost = str(error)
    return Recovered(Placement(chain, tuple(PodPlace(slot.leaves) for slot in slots)), lost)


def _find_quota(
    spec: PodSchedulingSpec, tenant: VirtualCluster | None, chain: Chain, slots: Sequence[PodSlot]
) -> Placement:
    """Return the group's placement with its virtual side, and the groups downgraded for it. Raises `_LostError`."""
    if tenant is None:
        raise _LostError(f"virtual cluster {spec.virtual_cluster} no longer exists")
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
            cell = quota.top(physical)
            for level in range(cell.level - 1, 0, -1):  # bind the unbound cells between it and the leaf
                below = leaf.ancestor(level)
                child = draft.virtual_of(below)
                if child is None:
                    child = next(each for each in cell.children if draft.physical_of(each) is None)
                    draft.bind(child, below)
                cell = child
            draft.vacate(cell, -1)
            virtual.append(cell)
        places.append(PodPlace(slot.leaves, tuple(virtual)))
    if not draft.free.is_safe(draft.reserved):
        raise _LostError(f"its place in chain {chain.name} is needed for the guarantees of other virtual clusters")
    return Placement(chain, tuple(places), tuple(draft.downgraded))


def preassigned_cells(slots: Sequence[PodSlot]) -> list[PhysicalCell]:
    """Return the cells, still configured, that contained the group's quota."""
    cells = (_preassigned_cell(leaf, cell_type) for slot in slots for leaf, cell_type in _typed_leaves(slot))
    return list(dict.fromkeys(cell for cell in cells if cell is not None))


def _typed_leaves(slot: PodSlot) -> Iterator[tuple[PhysicalLeaf, str]]:
    """Return the leaves that are still configured, each with the type of its former preassigned cell."""
    types = dict(zip(slot.devices, slot.preassigned_types, strict=True))
    return ((leaf, types[leaf.device]) for leaf in slot.leaves)


def _preassigned_cell(leaf: PhysicalLeaf, cell_type: str) -> PhysicalCell | None:
    """Return the cell of that type around a leaf, if its chain still has such cells."""
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
        """Return the preassigned cell bound to a physical one, binding one if need be. Raises `_LostError`."""
        top = self.draft.virtual_of(physical)
        if top is None:
            if self.spec.pinned_cell_id:
                raise _LostError(f"{physical.address} is no longer pinned cell {self.spec.pinned_cell_id}")
            if not self.draft.free.is_obtainable(physical.level, physical.index):
                raise _LostError(f"a part of {physical.address}, or a cell around it, is another virtual cell's now")
            top = self._unbound(physical.level)
            self.draft.take(physical)
            self.draft.bind(top, physical)
        elif top.virtual_cluster is not self.tenant or top.parent or top.pinned_id != self.spec.pinned_cell_id:
            raise _LostError(f"{physical.address} belongs to {top.address} now")
        self.tops.add(top)
        return top

    def _unbound(self, level: int) -> VirtualCell:
        """Return an unbound cell, else the one of the lowest priority below ours, whose groups are downgraded."""
        draft, tenant, chain = self.draft, self.tenant, self.draft.chain
        for cell in tenant.unbound(chain.name, level):
            if draft.physical_of(cell) is None:
                return cell
        used = [cell for cell in tenant.at(chain.name, level) if cell.used and cell not in self.tops]
        for cell in sorted(used, key=lambda cell: cell.priority):
            if cell.priority >= self.spec.priority:
                break
            if (physical := draft.physical_of(cell)) is not None and physical is cell.physical:
                for group in users_of(leaf for leaf in physical.leaf_cells() if leaf.virtual is not None):
                    if group not in draft.downgraded:
                        draft.downgrade(group)
            if draft.physical_of(cell) is None:
                return cell
        cell_type = chain.topology.cell_types[level - 1]
        raise _LostError(f"virtual cluster {tenant.name} has no cell {cell_type} in chain {chain.name} left")
