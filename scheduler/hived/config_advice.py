"""What is right in a configuration but hardly meant: `rcfarm hived validate` tells it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from scheduler.hived.cell_types import CELL_TYPES
from scheduler.hived.config import ConfigWarning, HivedConfig, PhysicalCellSpec
from scheduler.hived.physical_trees import PHYSICAL_CELLS
from scheduler.hived.topology import Topology


def advice(config: HivedConfig, topology: Topology) -> Iterator[ConfigWarning]:
    """First what was odd in reading `config`, then what its `topology` leaves unused."""
    yield from config.warnings
    used_types = {name for chain in topology.chains.values() for name in chain.cell_types}
    for name in config.cell_types:
        if name not in used_types:
            yield ConfigWarning(f"{CELL_TYPES}.{name}", "no physical cell consists of it")
    yield from _chains_without_quota(config, topology)
    used_ids = {name for cluster in config.virtual_clusters.values() for name in cluster.pinned_cells}
    for path, name in _pinned(config.physical_cells, PHYSICAL_CELLS):
        if name not in used_ids:
            yield ConfigWarning(
                f"{path}.pinnedCellId", f"no virtual cluster has {name!r} among its pinnedCells: it is an ordinary cell"
            )


def _chains_without_quota(config: HivedConfig, topology: Topology) -> Iterator[ConfigWarning]:
    promised = {cell.chain for cells in topology.virtual_clusters.values() for cell in cells}
    tops = [cell.cell_type for cell in config.physical_cells]
    for name in topology.chains:
        if name not in promised:
            yield ConfigWarning(
                f"{PHYSICAL_CELLS}[{tops.index(name)}]",
                f"no virtual cluster has a quota in the chain {name}: only opportunistic pods can use it",
            )


def _pinned(cells: Sequence[PhysicalCellSpec], path: str) -> Iterator[tuple[str, str]]:
    """Path and id of each cell that can be pinned."""
    for number, cell in enumerate(cells):
        if cell.pinned_cell_id:
            yield f"{path}[{number}]", cell.pinned_cell_id
        if cell.cell_children:
            yield from _pinned(cell.cell_children, f"{path}[{number}].cellChildren")
