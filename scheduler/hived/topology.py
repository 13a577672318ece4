"""The configuration resolved: chains of regular cell trees, and what of them each virtual cluster may have.

A chain is all the physical trees of one top type. Its cells are counted level by level in the order of the
configuration, so that the children of cell i of a level are i * fanout ... i * fanout + fanout - 1 of the level below:
no object is needed to walk it, and the cells below any cell are one range.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChainTopology:
    """The physical trees of one top type. Levels count from 1, the leaves; sequences by level start with level 1.

    `fanouts`: children of one cell, 0 for a leaf. `addresses`: full ones (`parent/segment`). `nodes`: the Kubernetes
    node of each node-level cell. `leaf_indices`: the device index of each leaf. `pinned`: id -> (level, position).
    """

    name: str
    cell_types: tuple[str, ...]
    fanouts: tuple[int, ...]
    node_level: int
    addresses: tuple[Sequence[str], ...]
    nodes: Sequence[str]
    leaf_indices: Sequence[int]
    pinned: Mapping[str, tuple[int, int]]

    @property
    def top_level(self) -> int:
        return len(self.cell_types)

    @property
    def leaf_cell_type(self) -> str:
        return self.cell_types[0]

    def level_of(self, cell_type: str) -> int | None:
        """The level of a type, None if the chain has no such cells."""
        return self.cell_types.index(cell_type) + 1 if cell_type in self.cell_types else None

    def leaves_at(self, level: int) -> int:
        """How many leaves a cell of that level has."""
        leaves = 1
        for fanout in self.fanouts[1:level]:
            leaves *= fanout
        return leaves


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
