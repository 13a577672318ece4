"""What-if analysis on a restored snapshot: nodes are lost, cells are added, pods arrive. Nothing real is changed."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from scheduler.hived.algorithm import HivedAlgorithm
from scheduler.hived.config.reader import read_config
from scheduler.hived.config.resolve import resolve
from scheduler.hived.config.types import HivedConfig, PhysicalCellSpec
from scheduler.hived.errors import HivedError, UserError
from scheduler.hived.inspection.explain import PodExplanation, explain
from scheduler.hived.inspection.snapshot import Snapshot, restore
from scheduler.hived.protocol import SchedulingPhase
from store.kube.api.objects import Object, key_of


class HitGroup(msgspec.Struct, rename="camel"):
    """A group with devices on a lost node. `pods`: those on that node."""

    group: str
    virtual_cluster: str
    priority: int
    pods: list[str]


class UnservedQuota(msgspec.Struct, rename="camel"):
    """Cells of a quota for which only bad hardware is left. `before`: their number without the change."""

    virtual_cluster: str
    chain: str
    cell_type: str
    cells: int
    before: int


class Simulation(msgspec.Struct, rename="camel"):
    """Result of a simulation. `pods`: their decisions in turn, each after applying the previous ones."""

    lost_nodes: list[str]
    added_cells: list[str]
    hit_groups: list[HitGroup]
    unserved_quotas: list[UnservedQuota]
    pods: list[PodExplanation]


def read_snapshot_config(snapshot: Snapshot) -> HivedConfig:
    """Parse a snapshot's configuration; the address of its API server is irrelevant."""
    return read_config(snapshot.config, environ={}, home=Path("/"))


def restored(snapshot: Snapshot, config: HivedConfig | None = None) -> HivedAlgorithm:
    """Restore a snapshot's scheduler, optionally under a configuration with more cells. Raises `HivedError`."""
    return restore(snapshot, resolve(config or read_snapshot_config(snapshot)), time.time)


def simulate(
    snapshot: Snapshot, pods: Sequence[Object], *, lose: Collection[str] = (), add: Sequence[str] = ()
) -> Simulation:
    """Simulate changes. `lose`: nodes; `add`: physical cells as `CELL_TYPE=NODE` (comma-separated nodes, as many as the
    type has). Raises `HivedError`.
    """
    config = read_snapshot_config(snapshot)
    cells = (*config.physical_cells, *(_new_cell(config, cell) for cell in add))
    algorithm = restored(snapshot, replace(config, physical_cells=cells))
    before = _unserved(algorithm)
    known = {node for chain in algorithm.topology.chains.values() for node in chain.nodes}
    for node in lose:
        if node not in known:
            raise UserError(f"--lose {node}: the configuration has no such node")
    added = {node for cell in add for node in cell.partition("=")[2].split(",")}
    algorithm.set_health((algorithm.healthy_nodes | added) - set(lose))
    hit: list[HitGroup] = []
    for group in algorithm.groups.values():
        slots = [slot for slot in group.slots if slot.node in lose]
        if on_lost := [f"{key_of(slot.pod)} on {slot.node}" for slot in slots if slot.pod is not None]:
            hit.append(HitGroup(group.name, group.virtual_cluster, group.priority, on_lost))
    chains = algorithm.topology.chains
    unserved = [
        UnservedQuota(tenant, chain, chains[chain].cell_types[level - 1], cells, before.get((tenant, chain, level), 0))
        for (tenant, chain, level), cells in _unserved(algorithm).items()
    ]
    return Simulation(
        lost_nodes=list(lose),
        added_cells=list(add),
        hit_groups=hit,
        unserved_quotas=unserved,
        pods=[_decide(algorithm, pod) for pod in pods],
    )


def _decide(algorithm: HivedAlgorithm, pod: Object) -> PodExplanation:
    """Explain a pod's decision, then apply it for the pods that follow. Pods in a snapshot have no spec."""
    found = explain(algorithm, pod)
    if found.verdict in ("bind", "preempt"):
        try:
            decision = algorithm.schedule({"spec": {}, **pod}, algorithm.healthy_nodes, SchedulingPhase.PREEMPTING)
            if decision.result.pod_bind_info is not None:
                algorithm.commit(decision)
        except HivedError as error:
            return PodExplanation(pod=key_of(pod), verdict="refused", summary=str(error))
    return found


def _new_cell(config: HivedConfig, text: str) -> PhysicalCellSpec:
    cell_type, separator, names = text.partition("=")
    nodes = [name for name in names.split(",") if name]
    chains = dict.fromkeys(cell.cell_type for cell in config.physical_cells)
    if not separator or cell_type not in chains:
        raise UserError(
            f"--add {text}: write CELL_TYPE=NODE, or CELL_TYPE=NODE,NODE... for a type above node level, with one of "
            f"the cell types {', '.join(chains)}"
        )
    number = _nodes_of_type(config, cell_type)
    if len(nodes) != number:
        raise UserError(f"--add {text}: a cell of type {cell_type} has {number} nodes, here are {len(nodes)}")
    return _tree(config, cell_type, nodes, top=True)


def _nodes_of_type(config: HivedConfig, cell_type: str) -> int:
    spec = config.cell_types[cell_type]
    return 1 if spec.is_node_level else spec.child_cell_number * _nodes_of_type(config, spec.child_cell_type)


def _tree(config: HivedConfig, cell_type: str, nodes: Sequence[str], *, top: bool) -> PhysicalCellSpec:
    """Return a cell with these nodes; cells below nodes get defaults."""
    spec = config.cell_types[cell_type]
    written = cell_type if top else ""
    if spec.is_node_level:
        return PhysicalCellSpec(cell_type=written, cell_address=nodes[0])
    share = len(nodes) // spec.child_cell_number
    children = tuple(
        _tree(config, spec.child_cell_type, nodes[start : start + share], top=False)
        for start in range(0, len(nodes), share)
    )
    return PhysicalCellSpec(cell_type=written, cell_children=children)


Quota = tuple[str, str, int]  # virtual cluster, chain, level


def _unserved(algorithm: HivedAlgorithm) -> Mapping[Quota, int]:
    return {
        (tenant, chain.name, level): mask.bit_count()
        for chain in algorithm.chains.values()
        for (tenant, level), mask in chain.doomed.items()
        if mask
    }
