"""Cells and groups in the inspection API: HiveD's fields, in the order of hivedscheduler's `pkg/api/types.go`."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from scheduler.hived.cells.cells import CellState, PhysicalCell, PhysicalLeaf, VirtualCell, combined
from scheduler.hived.cells.groups import AffinityGroup
from scheduler.hived.contract.names import OPPORTUNISTIC_PRIORITY
from store.kube.api.objects import format_time, uid_of

HEALTHY = "Healthy"
BAD = "Bad"
OPPORTUNISTIC_SUFFIX = "-opp"


class _CellStatus(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel", gc=False):
    """Fields of both kinds of cells. `leaf_cell_type` is set on top cells only."""

    leaf_cell_type: str = ""
    cell_type: str
    is_node_level: bool = False
    cell_address: str
    cell_state: str
    cell_healthiness: str
    cell_priority: int


class PhysicalCellStatus(_CellStatus, kw_only=True, omit_defaults=True, rename="camel", gc=False):
    """A physical cell. `vc`, `virtual_cell`: the tenant that has it now, and the virtual cell bound to it."""

    cell_children: list[PhysicalCellStatus] | None = None
    vc: str = ""
    virtual_cell: VirtualCellStatus | None = None


class VirtualCellStatus(_CellStatus, kw_only=True, omit_defaults=True, rename="camel", gc=False):
    """A virtual cell. `physical_cell`: the physical cell bound to it, without its children."""

    cell_children: list[VirtualCellStatus] | None = None
    physical_cell: PhysicalCellStatus | None = None


S = TypeVar("S", PhysicalCellStatus, VirtualCellStatus)


def physical_status(cell: PhysicalCell, state: CellState) -> PhysicalCellStatus:
    """Return the status of a cell without its children."""
    status = _bare_physical(cell, state)
    if cell.virtual is not None:
        status.virtual_cell = _bare_virtual(cell.virtual, state)
    return status


def physical_tree(cell: PhysicalCell) -> tuple[PhysicalCellStatus, CellState]:
    """Return the status and the state of a cell with all below it."""
    if not cell.children:
        return physical_status(cell, cell.state), cell.state
    children = [physical_tree(child) for child in cell.children]
    state = combined(below for _, below in children)
    status = physical_status(cell, state)
    status.cell_children = [child for child, _ in children]
    return status, state


def virtual_status(cell: VirtualCell, state: CellState) -> VirtualCellStatus:
    """Return the status of a cell without its children. `state`: of the physical cell bound to it."""
    status = _bare_virtual(cell, state)
    if cell.physical is not None:
        status.physical_cell = _bare_physical(cell.physical, state)
    return status


def virtual_tree(cell: VirtualCell) -> VirtualCellStatus:
    """Return the status of a cell with all below it."""
    status = virtual_status(cell, CellState.FREE if cell.physical is None else cell.physical.state)
    if cell.children:
        status.cell_children = [virtual_tree(child) for child in cell.children]
    return status


def opportunistic_status(leaf: PhysicalLeaf) -> VirtualCellStatus:
    """Return the status of an opportunistic leaf as one of the cells of the tenant that uses it."""
    physical = _bare_physical(leaf, leaf.state)
    return VirtualCellStatus(
        leaf_cell_type=physical.leaf_cell_type,
        cell_type=physical.cell_type,
        cell_address=leaf.address + OPPORTUNISTIC_SUFFIX,
        cell_state=CellState.USED,
        cell_healthiness=physical.cell_healthiness,
        cell_priority=OPPORTUNISTIC_PRIORITY,
        physical_cell=physical,
    )


def opportunistic_user(cell: PhysicalCell) -> str:
    """Return the tenant whose opportunistic pod has the leaf, or ""."""
    if isinstance(cell, PhysicalLeaf) and cell.user is not None and OPPORTUNISTIC_PRIORITY in cell.used:
        return cell.user.virtual_cluster
    return ""


def _bare_physical(cell: PhysicalCell, state: CellState) -> PhysicalCellStatus:
    status = _bare(PhysicalCellStatus, cell, state)
    status.vc = opportunistic_user(cell) or ("" if cell.virtual is None else cell.virtual.virtual_cluster.name)
    return status


def _bare_virtual(cell: VirtualCell, state: CellState) -> VirtualCellStatus:
    return _bare(VirtualCellStatus, cell, state)


def _bare(kind: type[S], cell: PhysicalCell | VirtualCell, state: CellState) -> S:
    chain = cell.chain.topology
    return kind(
        leaf_cell_type=chain.leaf_cell_type if cell.parent is None else "",
        cell_type=cell.cell_type,
        is_node_level=cell.is_node_level,
        cell_address=cell.address,
        cell_state=state,
        cell_healthiness=HEALTHY if cell.healthy else BAD,
        cell_priority=cell.priority,
    )


class GroupMetadata(msgspec.Struct):
    name: str


class LazyPreemption(msgspec.Struct, rename="camel"):
    """The last downgrade. `preemption_time`: in Kubernetes' time format."""

    preemptor: str
    preemption_time: str


class AffinityGroupStatus(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """`physical_placement`: device indices by node. `virtual_placement`: leaf addresses by preassigned cell.

    `priority`: as requested, even if the group was downgraded.
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
    """A group's name and status."""

    metadata: GroupMetadata
    status: AffinityGroupStatus


def group_info(group: AffinityGroup) -> AffinityGroupInfo:
    """Return the group's current status."""
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
