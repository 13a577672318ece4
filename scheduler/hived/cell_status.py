"""Cells as inspection shows them: HiveD's fields, in HiveD's order. Source: `pkg/api/types.go` of hivedscheduler."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from scheduler.hived.cells import CellState, PhysicalCell, PhysicalLeaf, VirtualCell, combined
from scheduler.hived.constants import OPPORTUNISTIC_PRIORITY

HEALTHY = "Healthy"
BAD = "Bad"
OPPORTUNISTIC_SUFFIX = "-opp"


class _CellStatus(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel", gc=False):
    """What both kinds of cells show. `leaf_cell_type` only of a top cell."""

    leaf_cell_type: str = ""
    cell_type: str
    is_node_level: bool = False
    cell_address: str
    cell_state: str
    cell_healthiness: str
    cell_priority: int


class PhysicalCellStatus(_CellStatus, kw_only=True, omit_defaults=True, rename="camel", gc=False):
    """A physical cell. `vc`, `virtual_cell`: whose it is now, and as what."""

    cell_children: list[PhysicalCellStatus] | None = None
    vc: str = ""
    virtual_cell: VirtualCellStatus | None = None


class VirtualCellStatus(_CellStatus, kw_only=True, omit_defaults=True, rename="camel", gc=False):
    """A virtual cell. `physical_cell`: what it is bound to now, without its children."""

    cell_children: list[VirtualCellStatus] | None = None
    physical_cell: PhysicalCellStatus | None = None


S = TypeVar("S", PhysicalCellStatus, VirtualCellStatus)


def physical_status(cell: PhysicalCell, state: CellState) -> PhysicalCellStatus:
    """The cell without its children."""
    status = _bare_physical(cell, state)
    if cell.virtual is not None:
        status.virtual_cell = _bare_virtual(cell.virtual, state)
    return status


def physical_tree(cell: PhysicalCell) -> tuple[PhysicalCellStatus, CellState]:
    """The cell with all below it."""
    if not cell.children:
        return physical_status(cell, cell.state), cell.state
    children = [physical_tree(child) for child in cell.children]
    state = combined(below for _, below in children)
    status = physical_status(cell, state)
    status.cell_children = [child for child, _ in children]
    return status, state


def virtual_status(cell: VirtualCell, state: CellState) -> VirtualCellStatus:
    """The cell without its children. `state`: that of what it is bound to."""
    status = _bare_virtual(cell, state)
    if cell.physical is not None:
        status.physical_cell = _bare_physical(cell.physical, state)
    return status


def virtual_tree(cell: VirtualCell) -> VirtualCellStatus:
    """The cell with all below it."""
    status = virtual_status(cell, CellState.FREE if cell.physical is None else cell.physical.state)
    if cell.children:
        status.cell_children = [virtual_tree(child) for child in cell.children]
    return status


def opportunistic_status(leaf: PhysicalLeaf) -> VirtualCellStatus:
    """An opportunistic leaf as it is shown among the cells of the tenant that uses it."""
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
    """The tenant whose opportunistic pod a leaf is for, "" if it is for none."""
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
