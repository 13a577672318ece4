"""Differences between two configurations, in words, and which of them a running scheduler can apply."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from scheduler.hived.cells.topology import ChainTopology, PreassignedCell, Topology
from scheduler.hived.config.types import HivedConfig

NAMES_SHOWN = 8

_AT_ONCE = {
    "force_pod_bind_threshold": "forcePodBindThreshold",
    "waiting_pod_scheduling_block_milli_sec": "waitingPodSchedulingBlockMilliSec",
}
_AT_START = {
    "kube_api_server_address": "kubeApiServerAddress",
    "kube_config_file_path": "kubeConfigFilePath",
    "web_server_address": "webServerAddress",
}


@dataclass(frozen=True, slots=True)
class ConfigChange:
    """`cells`: changes for which cells are rebuilt. `settings`: applied at once. `restart`: applied after a restart."""

    cells: tuple[str, ...]
    settings: tuple[str, ...]
    restart: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.cells or self.settings or self.restart)


def config_change(old: HivedConfig, old_topology: Topology, new: HivedConfig, new_topology: Topology) -> ConfigChange:
    """Return the differences between two valid configurations; none if only formatting differs."""
    cells = [*_chains(old_topology.chains, new_topology.chains), *_quotas(old_topology, new_topology)]
    if not cells and old_topology != new_topology:
        cells = ["the order of chains, cells or virtual clusters"]
    return ConfigChange(tuple(cells), tuple(_fields(_AT_ONCE, old, new)), needs_restart(old, new))


def needs_restart(old: HivedConfig, new: HivedConfig) -> tuple[str, ...]:
    """Return the changed settings that a scheduler started with `old` can't apply without a restart."""
    return tuple(_fields(_AT_START, old, new))


def _fields(names: Mapping[str, str], old: HivedConfig, new: HivedConfig) -> Iterator[str]:
    for field, name in names.items():
        before, after = getattr(old, field), getattr(new, field)
        if before != after:
            yield f"{name}: {before} -> {after}"


def _chains(old: Mapping[str, ChainTopology], new: Mapping[str, ChainTopology]) -> Iterator[str]:
    for name in old.keys() - new.keys():
        yield f"chain {name}: gone, with {_names(old[name].nodes, 'node')}"
    for name, chain in new.items():
        if name not in old:
            yield f"chain {name}: new, with {_names(chain.nodes, 'node')}"
        elif old[name] != chain:
            yield f"chain {name}: {'; '.join(_within_chain(old[name], chain)) or 'cells are rearranged'}"


def _within_chain(old: ChainTopology, new: ChainTopology) -> Iterator[str]:
    if gone := _missing(old.nodes, new.nodes):
        yield f"without {_names(gone, 'node')}"
    if added := _missing(new.nodes, old.nodes):
        yield f"with {_names(added, 'node')} more"
    if (old.cell_types, old.fanouts, old.node_level) != (new.cell_types, new.fanouts, new.node_level):
        yield f"cell types {_shape(old)} -> {_shape(new)}"
    if old.pinned.keys() != new.pinned.keys():
        yield f"pinned cells {_listed(sorted(old.pinned))} -> {_listed(sorted(new.pinned))}"


def _shape(chain: ChainTopology) -> str:
    parts = [f"{fanout}x {below}" for below, fanout in zip(chain.cell_types, chain.fanouts[1:], strict=False)]
    return " > ".join([chain.name, *reversed(parts)])


def _missing(nodes: Sequence[str], others: Sequence[str]) -> list[str]:
    """Return the nodes not in `others`, in the order of `nodes`."""
    present = set(others)
    return [node for node in dict.fromkeys(nodes) if node not in present]


def _quotas(old: Topology, new: Topology) -> Iterator[str]:
    for name in old.virtual_clusters.keys() - new.virtual_clusters.keys():
        yield f"virtual cluster {name}: gone"
    for name, cells in new.virtual_clusters.items():
        if name not in old.virtual_clusters:
            yield f"virtual cluster {name}: new"
            continue
        before, after = _quota(old, old.virtual_clusters[name]), _quota(new, cells)
        for kind in dict.fromkeys([*before, *after]):
            if before[kind] != after[kind]:
                yield f"virtual cluster {name}: {kind} {before[kind]} -> {after[kind]}"


def _quota(topology: Topology, cells: Sequence[PreassignedCell]) -> Counter[str]:
    """Count the quota's cells by kind."""
    return Counter(
        f"pinned cell {cell.pinned_cell_id}"
        if cell.pinned_cell_id
        else f"{cell.chain}.{topology.chains[cell.chain].cell_types[cell.level - 1]}"
        for cell in cells
    )


def _names(names: Sequence[str], kind: str) -> str:
    distinct = list(dict.fromkeys(names))
    return f"{len(distinct)} {kind}{'' if len(distinct) == 1 else 's'} ({_listed(distinct)})"


def _listed(names: Sequence[str]) -> str:
    more = ", ..." if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + more or "none"
