"""A resolved configuration: chains of regular cell trees, and the quotas of the virtual clusters.

A chain is all the physical trees of one top type. Its cells are counted level by level in the order of the
configuration, so that the children of cell i of a level are i * fanout ... i * fanout + fanout - 1 of the level below:
walking it needs no objects, and the cells below any cell are one range. Sets of its cells are bit masks, one bit per
cell of a level: plain integers, so copying the free list for a draft costs one short list.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """The structure below a cell of the last of `cell_types`. Levels count from 1, the leaves; sequences by level start
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
        """Return the level of a type, None if there are no such cells."""
        return self.cell_types.index(cell_type) + 1 if cell_type in self.cell_types else None

    def cells_in(self, upper: int, lower: int) -> int:
        """Return the number of cells of level `lower` in one of level `upper`."""
        return prod(self.fanouts[lower:upper])

    def leaves_at(self, level: int) -> int:
        """Return the number of leaves of a cell of that level."""
        return self.cells_in(level, 1)


@dataclass(frozen=True, slots=True)
class ChainTopology(Hierarchy):
    """The physical trees of one top type.

    `addresses`: full ones (`parent/segment`), by level. `nodes`: the Kubernetes node of each node-level cell.
    `leaf_indices`: the device index of each leaf. `pinned`: ID -> (level, position).
    """

    name: str
    addresses: tuple[Sequence[str], ...]
    nodes: Sequence[str]
    leaf_indices: Sequence[int]
    pinned: Mapping[str, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class PreassignedCell:
    """One top cell of a virtual cluster, with its virtual address (`VC/n`). `pinned_cell_id` is "" for cells that may
    move.
    """

    address: str
    chain: str
    level: int
    pinned_cell_id: str = ""


@dataclass(frozen=True, slots=True)
class Topology:
    """Chains in order of first use; virtual clusters and their cells in file order, pinned cells last."""

    chains: Mapping[str, ChainTopology]
    virtual_clusters: Mapping[str, tuple[PreassignedCell, ...]]


def bits(mask: int) -> Iterator[int]:
    """Yield the positions of set bits, ascending."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def span(start: int, length: int) -> int:
    """Return the mask of a range of positions."""
    return ((1 << length) - 1) << start


class FreeList:
    """The buddy free list of a chain: the physical cells that can still be given to a virtual cluster's quota.

    Two masks per level; index 0 is unused. `obtainable`: cells of which no part is taken. `free`: the largest of those,
    the buddy free list itself. Taking a cell splits the free cell around it; giving it back merges siblings.
    """

    __slots__ = ("_fanouts", "free", "obtainable")

    def __init__(self, fanouts: Sequence[int], free: list[int], obtainable: list[int]) -> None:
        self._fanouts = fanouts  # by level, of a cell of that level
        self.free = free
        self.obtainable = obtainable

    @classmethod
    def whole(cls, topology: ChainTopology) -> FreeList:
        """Create the free list of a chain with nothing taken."""
        everything = [0, *(span(0, len(addresses)) for addresses in topology.addresses)]
        free = [0] * topology.top_level + [everything[-1]]
        return cls((0, *topology.fanouts), free, everything)

    def copy(self) -> FreeList:
        return FreeList(self._fanouts, self.free.copy(), self.obtainable.copy())

    @property
    def top_level(self) -> int:
        return len(self.free) - 1

    def is_obtainable(self, level: int, index: int) -> bool:
        return bool(self.obtainable[level] >> index & 1)

    def take(self, level: int, index: int) -> None:
        """Take an obtainable cell: its ancestors are split, their other children become free."""
        self._mark_below(level, index, taken=True)
        self.obtainable[level] ^= 1 << index
        while not self.free[level] >> index & 1:
            fanout = self._fanouts[level + 1]
            parent = index // fanout
            self.free[level] |= span(parent * fanout, fanout) ^ (1 << index)
            level, index = level + 1, parent
            self.obtainable[level] ^= 1 << index
        self.free[level] ^= 1 << index

    def give_back(self, level: int, index: int) -> None:
        """Undo `take`: siblings that are all obtainable merge into their parent."""
        self._mark_below(level, index, taken=False)
        self.obtainable[level] |= 1 << index
        while level < self.top_level:
            fanout = self._fanouts[level + 1]
            parent = index // fanout
            siblings = span(parent * fanout, fanout)
            if self.obtainable[level] & siblings != siblings:
                break
            self.free[level] &= ~siblings
            level, index = level + 1, parent
            self.obtainable[level] |= 1 << index
        self.free[level] |= 1 << index

    def cells_below(self, level: int, index: int, lower: int) -> int:
        """Return the mask, at a lower level, of the cells inside a cell."""
        length = prod(self._fanouts[lower + 1 : level + 1])
        return span(index * length, length)

    def _mark_below(self, level: int, index: int, *, taken: bool) -> None:
        start, length = index, 1
        for lower in range(level - 1, 0, -1):
            fanout = self._fanouts[lower + 1]
            start, length = start * fanout, length * fanout
            cells = span(start, length)
            if taken:
                self.obtainable[lower] &= ~cells
            else:
                self.obtainable[lower] |= cells

    def splittable(self, reserved: Sequence[int]) -> list[int]:
        """Return, by level, the free cells left after serving every quota of that level and above, from the top down.

        `reserved`: unbound preassigned cells of all virtual clusters by level. Safe while none is negative; where it is
        positive, a free cell of that level may be split without taking another tenant's guarantee.
        """
        left = [0] * len(self.free)
        above = 0
        for level in range(self.top_level, 0, -1):
            above = self.free[level].bit_count() - reserved[level] + above
            left[level] = above
            above *= self._fanouts[level]
        return left

    def is_safe(self, reserved: Sequence[int]) -> bool:
        """Return whether every virtual cluster can still get all its unbound preassigned cells, bad hardware aside."""
        return min(self.splittable(reserved)) >= 0
