"""A HiveD configuration for people: trees of cells with equal ones folded, and the quotas. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby

import msgspec

from scheduler.hived.cells.topology import ChainTopology, Topology


class ProblemInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An error or warning about the file. `path`: such as `virtualClusters.a.virtualCells[0].cellType`; `line`: its
    line, from 1; null if it has none."""

    path: str
    line: int | None
    problem: str


class HivedFileInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The validity and size of a configuration; the counts are 0 when it is invalid."""

    file: str
    valid: bool
    errors: list[ProblemInfo]
    warnings: list[ProblemInfo]
    chains: int = 0
    nodes: int = 0
    leaves: int = 0
    virtual_clusters: int = 0


class CellTypeInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One level of a chain. `children`: of one cell, 0 for a leaf; `cells`: how many the chain has."""

    cell_type: str
    level: int
    children: int
    is_node_level: bool
    cells: int


class CellsInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Cells with equal subtrees. `addresses`: of each one; `devices`: of one of them if they are nodes, of all in one
    node if they are below nodes, none above nodes.

    `children`: their common subtree, again folded; empty from the nodes down, unless a cell is pinned there.
    """

    cell_type: str
    addresses: list[str]
    pinned_cell_id: str
    devices: list[int]
    children: list[CellsInfo]


class ChainInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A chain. `types`: from the top down; `guaranteed`: leaves in some virtual cluster's quota; `opportunistic_only`:
    the leaves that are in none."""

    chain: str
    nodes: int
    leaves: int
    guaranteed: int
    opportunistic_only: int
    types: list[CellTypeInfo]
    cells: list[CellsInfo]


class QuotaInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A virtual cluster's guarantee of one kind of cell; `leaves` in all. `pinned_cell_id`: "" if the cells may
    move."""

    virtual_cluster: str
    chain: str
    cell_type: str
    cells: int
    leaves: int
    pinned_cell_id: str


class HivedClusterInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A configuration resolved."""

    chains: list[ChainInfo]
    quotas: list[QuotaInfo]


def file_info(file: str, topology: Topology, warnings: Sequence[ProblemInfo]) -> HivedFileInfo:
    """Return the size of a valid configuration. A node that is in several chains counts once."""
    chains = topology.chains.values()
    return HivedFileInfo(
        file=file,
        valid=True,
        errors=[],
        warnings=list(warnings),
        chains=len(chains),
        nodes=len({node for chain in chains for node in chain.nodes}),
        leaves=sum(len(chain.leaf_indices) for chain in chains),
        virtual_clusters=len(topology.virtual_clusters),
    )


def cluster_info(topology: Topology) -> HivedClusterInfo:
    quotas: list[QuotaInfo] = []
    guaranteed: Counter[str] = Counter()
    for name, cells in topology.virtual_clusters.items():
        kinds = Counter((cell.chain, cell.level, cell.pinned_cell_id) for cell in cells)
        for (chain_name, level, pinned), number in kinds.items():
            chain = topology.chains[chain_name]
            leaves = number * chain.leaves_at(level)
            guaranteed[chain_name] += leaves
            quota = QuotaInfo(
                virtual_cluster=name,
                chain=chain_name,
                cell_type=chain.cell_types[level - 1],
                cells=number,
                leaves=leaves,
                pinned_cell_id=pinned,
            )
            quotas.append(quota)
    chains = [_chain(chain, guaranteed[chain.name]) for chain in topology.chains.values()]
    return HivedClusterInfo(chains=chains, quotas=quotas)


def _chain(chain: ChainTopology, guaranteed: int) -> ChainInfo:
    levels = range(chain.top_level, 0, -1)
    leaves = len(chain.leaf_indices)
    return ChainInfo(
        chain=chain.name,
        nodes=len(chain.nodes),
        leaves=leaves,
        guaranteed=guaranteed,
        opportunistic_only=leaves - guaranteed,
        types=[
            CellTypeInfo(
                cell_type=chain.cell_types[level - 1],
                level=level,
                children=chain.fanouts[level - 1],
                is_node_level=level == chain.node_level,
                cells=len(chain.addresses[level - 1]),
            )
            for level in levels
        ],
        cells=_Folding(chain).all(),
    )


class _Folding:
    """Finds the equal cells of a chain: same devices in the same order, and nothing pinned."""

    def __init__(self, chain: ChainTopology) -> None:
        self._chain = chain
        self._pinned = {cell: name for name, cell in chain.pinned.items()}
        self._around_pinned = set()
        for level, position in self._pinned:
            for upper in range(level + 1, chain.top_level + 1):
                position //= chain.fanouts[upper - 1]
                self._around_pinned.add((upper, position))
        self._shapes: list[list[object]] = []
        for level in range(1, chain.top_level + 1):
            self._shapes.append([self._shape(level, position) for position in range(len(chain.addresses[level - 1]))])

    def all(self) -> list[CellsInfo]:
        """Return the folded tree, from the top cells down."""
        top = self._chain.top_level
        return [*self._fold(top, [0], len(self._chain.addresses[top - 1]))]

    def _shape(self, level: int, position: int) -> object:
        """Return a value that is equal for equal cells. Devices are compared per node, not below."""
        cell = level, position
        if cell in self._pinned or cell in self._around_pinned:
            return ("unique", *cell)
        if level == self._chain.node_level:
            return tuple(self._devices(level, position, 1))
        if level < self._chain.node_level:
            return None
        fanout = self._chain.fanouts[level - 1]
        shapes = self._shapes[level - 2][position * fanout : (position + 1) * fanout]
        return shapes[0] if shapes.count(shapes[0]) == fanout else tuple(shapes)

    def _fold(self, level: int, firsts: Sequence[int], siblings: int) -> Iterator[CellsInfo]:
        """Fold equal groups of `siblings` cells; `firsts` are the positions of their first cells."""
        start = firsts[0]
        for _, run in groupby(range(start, start + siblings), self._shapes[level - 1].__getitem__):
            same = [position - start for position in run]
            positions = [first + offset for first in firsts for offset in same]
            chain, cell = self._chain, (level, positions[0])
            children: list[CellsInfo] = []
            if level > chain.node_level or cell in self._around_pinned:
                fanout = chain.fanouts[level - 1]
                children = [*self._fold(level - 1, [position * fanout for position in positions], fanout)]
            yield CellsInfo(
                cell_type=chain.cell_types[level - 1],
                addresses=[chain.addresses[level - 1][position] for position in positions],
                pinned_cell_id=self._pinned.get(cell, ""),
                devices=self._devices(level, positions[0], 1 if level == chain.node_level else len(same)),
                children=children,
            )

    def _devices(self, level: int, position: int, siblings: int) -> list[int]:
        if level > self._chain.node_level:
            return []
        leaves = self._chain.leaves_at(level)
        return list(self._chain.leaf_indices[position * leaves : (position + siblings) * leaves])
