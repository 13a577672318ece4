"""What-if: nodes are lost, cells are added, pods come; on a restored snapshot, so that nothing real is touched."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from scheduler.hived.algorithm import HivedAlgorithm
from scheduler.hived.config import HivedConfig, PhysicalCellSpec
from scheduler.hived.config_file import read_config
from scheduler.hived.errors import HivedError, UserError
from scheduler.hived.explain import PodExplanation, explain
from scheduler.hived.groups import AffinityGroup
from scheduler.hived.pod_contract import new_binding_pod
from scheduler.hived.resolving import resolve
from scheduler.hived.snapshot import Snapshot, restore
from scheduler.hived.types import SchedulingPhase
from store.kube.objects import Object, key_of


class HitGroup(msgspec.Struct, rename="camel"):
    """A group with devices on a lost node. `pods`: those that are there."""

    group: str
    virtual_cluster: str
    priority: int
    pods: list[str]


class UnservedQuota(msgspec.Struct, rename="camel"):
    """Cells of a quota that only bad hardware is left for. `before`: how many there were without the change."""

    virtual_cluster: str
    chain: str
    cell_type: str
    cells: int
    before: int


class Simulation(msgspec.Struct, rename="camel"):
    """`pods`: what each would be told, one after the other, each seeing what those before it took."""

    lost_nodes: list[str]
    added_cells: list[str]
    hit_groups: list[HitGroup]
    unserved_quotas: list[UnservedQuota]
    pods: list[PodExplanation]


def read_snapshot_config(snapshot: Snapshot) -> HivedConfig:
    """The configuration that a snapshot was taken under; where its API server is does not matter."""
    return read_config(snapshot.config, environ={}, home=Path("/"))


def restored(snapshot: Snapshot, config: HivedConfig | None = None) -> HivedAlgorithm:
    """The scheduler of a snapshot, maybe under a configuration with more cells. Raises `HivedError`."""
    return restore(snapshot, resolve(config or read_snapshot_config(snapshot)), time.time)


def simulate(
    snapshot: Snapshot, pods: Sequence[Object], *, lose: Collection[str] = (), add: Sequence[str] = ()
) -> Simulation:
    """What would happen. `lose`: nodes; `add`: physical cells as `CELL_TYPE=NODE` (as many nodes as the type has, with
    commas between). Raises `HivedError`.
    """
    config = _with_cells(read_snapshot_config(snapshot), add)
    algorithm = restored(snapshot, config)
    before = _unserved(algorithm)
    known = {node for chain in algorithm.topology.chains.values() for node in chain.nodes}
    for node in lose:
        if node not in known:
            raise UserError(f"--lose {node}: the configuration has no such node")
    added = {node for cell in add for node in cell.partition("=")[2].split(",")}
    algorithm.set_health((algorithm.healthy_nodes | added) - set(lose))
    hit = [found for group in algorithm.groups.values() if (found := _hit(group, lose)) is not None]
    return Simulation(
        lost_nodes=list(lose),
        added_cells=list(add),
        hit_groups=hit,
        unserved_quotas=_unserved_now(algorithm, before),
        pods=[_decide(algorithm, pod) for pod in pods],
    )


def _decide(algorithm: HivedAlgorithm, pod: Object) -> PodExplanation:
    """Explain, then do it, so that the next pod sees what this one took. Of a pod in a snapshot there is no spec."""
    found = explain(algorithm, pod)
    if found.verdict in ("bind", "preempt"):
        try:
            result = algorithm.schedule(pod, algorithm.healthy_nodes, SchedulingPhase.PREEMPTING)
            if result.pod_bind_info is not None:
                algorithm.add_allocated_pod(new_binding_pod({"spec": {}, **pod}, result.pod_bind_info))
        except HivedError as error:
            return PodExplanation(pod=key_of(pod), verdict="refused", summary=str(error))
    return found


def _with_cells(config: HivedConfig, add: Sequence[str]) -> HivedConfig:
    return replace(config, physical_cells=(*config.physical_cells, *(_new_cell(config, cell) for cell in add)))


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
    """A cell with these nodes; what is below nodes is left to the defaults."""
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


def _hit(group: AffinityGroup, lost: Collection[str]) -> HitGroup | None:
    pods = [f"{key_of(slot.pod)} on {slot.node}" for slot in group.slots if slot.node in lost and slot.pod is not None]
    return HitGroup(group.name, group.virtual_cluster, group.priority, pods) if pods else None


Quota = tuple[str, str, int]  # virtual cluster, chain, level


def _unserved(algorithm: HivedAlgorithm) -> Mapping[Quota, int]:
    return {
        (tenant, chain.name, level): mask.bit_count()
        for chain in algorithm.chains.values()
        for (tenant, level), mask in chain.doomed.items()
        if mask
    }


def _unserved_now(algorithm: HivedAlgorithm, before: Mapping[Quota, int]) -> list[UnservedQuota]:
    return [
        UnservedQuota(tenant, chain, algorithm.topology.chains[chain].cell_types[level - 1], cells, before.get(key, 0))
        for key, cells in _unserved(algorithm).items()
        for tenant, chain, level in [key]
    ]
