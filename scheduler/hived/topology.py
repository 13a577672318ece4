"""The configuration resolved: chains of regular cell trees, and what of them each virtual cluster may have.

A chain is all the physical trees of one top type. Its cells are counted level by level in the order of the
configuration, so that the children of cell i of a level are i * fanout ... i * fanout + fanout - 1 of the level below:
no object is needed to walk it, and the cells below any cell are one range.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """What a cell of the last of `cell_types` is made of. Levels count from 1, the leaves; sequences by level start
    with level 1.

    `fanouts`: children of one cell, 0 for a leaf. `node_level`: the level whose cells are Kubernetes nodes.
    """

    cell_types: tuple[str, ...]
    fanouts: tuple[int, ...]
    node_level: int

    @property
    def top_level(self) -> int:
        return len(self.cell_types)

    @property
    def leaf_cell_type(self) -> str:
        return self.cell_types[0]

    def level_of(self, cell_type: str) -> int | None:
        """The level of a type, None if there are no such cells."""
        return self.cell_types.index(cell_type) + 1 if cell_type in self.cell_types else None

    def cells_in(self, upper: int, lower: int) -> int:
        """How many cells of the level `lower` one of the level `upper` has."""
        return prod(self.fanouts[lower:upper])

    def leaves_at(self, level: int) -> int:
        """How many leaves a cell of that level has."""
        return self.cells_in(level, 1)


@dataclass(frozen=True, slots=True)
class ChainTopology(Hierarchy):
    """The physical trees of one top type.

    `addresses`: full ones (`parent/segment`), by level. `nodes`: the Kubernetes node of each node-level cell.
    `leaf_indices`: the device index of each leaf. `pinned`: id -> (level, position).
    """

    name: str
    addresses: tuple[Sequence[str], ...]
    nodes: Sequence[str]
    leaf_indices: Sequence[int]
    pinned: Mapping[str, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class PreassignedCell:
    """One top cell of a virtual cluster, with its virtual address (`VC/n`). `pinned_cell_id` "" if it may move."""

    address: str
    chain: str
    level: int
    pinned_cell_id: str = ""


@dataclass(frozen=True, slots=True)
class Topology:
    """Chains in order of first mention; virtual clusters and their cells in the order of the file, pinned ones last."""

    chains: Mapping[str, ChainTopology]
    virtual_clusters: Mapping[str, tuple[PreassignedCell, ...]]
