"""The expected inspection, computed naively from the state: every cell walked, fields in HiveD's order."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Iterable
from typing import Any

from scheduler.hived.algorithm import HivedAlgorithm
from scheduler.hived.cells.cells import Cell, CellState, PhysicalCell, PhysicalLeaf, VirtualCell
from store.kube.api.objects import Object, format_time, uid_of


async def shown(pieces: Awaitable[Iterable[bytes]]) -> Any:
    """Return a snapshot, decoded."""
    return json.loads(b"".join(await pieces))


def expected_cluster(algorithm: HivedAlgorithm) -> Object:
    """Return all cells."""
    tops = [top for chain in algorithm.chains.values() for top in chain.levels[-1]]
    virtual = {
        name: [_virtual(cell) for cell in cluster.preassigned] for name, cluster in algorithm.virtual_clusters.items()
    }
    for leaf in (leaf for top in tops for leaf in top.leaf_cells()):
        if leaf.priority == -1:
            assert leaf.user is not None
            virtual.setdefault(leaf.user.virtual_cluster, []).append(_opportunistic(leaf))
    return {"physicalCluster": [_physical(top) for top in tops], "virtualClusters": virtual}


def expected_groups(algorithm: HivedAlgorithm) -> Object:
    """Return all groups."""
    groups = []
    for group in algorithm.groups.values():
        status: Object = {"vc": group.virtual_cluster, "priority": group.spec.priority, "state": str(group.state)}
        for slot in group.slots:
            status.setdefault("physicalPlacement", {}).setdefault(slot.node, []).extend(slot.devices)
            for cell in slot.virtual:
                placement = status.setdefault("virtualPlacement", {})
                placement.setdefault(cell.preassigned.address, []).append(cell.address)
        if pods := group.pods():
            status["allocatedPods"] = [uid_of(pod) for pod in pods]
        if group.preempting_pods:
            status["preemptingPods"] = list(group.preempting_pods)
        if lazy := group.lazy_preemption:
            time = format_time(lazy.preemption_time)
            status["lazyPreemptionStatus"] = {"preemptor": lazy.preemptor, "preemptionTime": time}
        groups.append({"metadata": {"name": group.name}, "status": status})
    return {"items": groups or None}


def _bare(cell: Cell, *, is_top: bool, state: CellState) -> Object:
    found: Object = {"leafCellType": cell.chain.topology.leaf_cell_type} if is_top else {}
    found["cellType"] = cell.cell_type
    if cell.is_node_level:
        found["isNodeLevel"] = True
    return found | {
        "cellAddress": cell.address,
        "cellState": str(state),
        "cellHealthiness": "Healthy" if cell.healthy else "Bad",
        "cellPriority": cell.priority,
    }


def _bare_physical(cell: PhysicalCell, *children: Object) -> Object:
    found = _bare(cell, is_top=cell.parent is None, state=cell.state)
    if children:
        found["cellChildren"] = list(children)
    if isinstance(cell, PhysicalLeaf) and cell.user is not None and cell.priority == -1:
        found["vc"] = cell.user.virtual_cluster
    elif cell.virtual is not None:
        found["vc"] = cell.virtual.virtual_cluster.name
    return found


def _bare_virtual(cell: VirtualCell) -> Object:
    state = CellState.FREE if cell.physical is None else cell.physical.state
    return _bare(cell, is_top=cell.parent is None, state=state)


def _physical(cell: PhysicalCell) -> Object:
    found = _bare_physical(cell, *map(_physical, cell.children))
    if cell.virtual is not None:
        found["virtualCell"] = _bare_virtual(cell.virtual)
    return found


def _virtual(cell: VirtualCell) -> Object:
    found = _bare_virtual(cell)
    if cell.children:
        found["cellChildren"] = [_virtual(child) for child in cell.children]
    if cell.physical is not None:
        found["physicalCell"] = _bare_physical(cell.physical)
    return found


def _opportunistic(leaf: PhysicalLeaf) -> Object:
    physical = _bare_physical(leaf)
    fake = {"cellAddress": f"{leaf.address}-opp", "cellState": "Used", "cellPriority": -1}
    return {field: value for field, value in physical.items() if field != "vc"} | fake | {"physicalCell": physical}
