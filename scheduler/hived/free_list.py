"""The buddy free list of a chain: which physical cells can still be given to a virtual cluster's quota.

Two bit masks per level, a bit per cell in the order of the configuration. `obtainable`: cells of which no part was
taken. `free`: the largest of those, the buddy free list itself. Taking a cell splits the free cell around it; giving it
back merges siblings. Masks are plain integers, so a copy for a what-if costs one short list.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from scheduler.hived.topology import ChainTopology


def bits(mask: int) -> Iterator[int]:
    """The positions that are set, ascending."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def span(start: int, length: int) -> int:
    """The mask of a range of positions."""
    return ((1 << length) - 1) << start


class FreeList:
    """Masks by level; index 0 is unused."""

    __slots__ = ("_fanouts", "free", "obtainable")

    def __init__(self, fanouts: Sequence[int], free: list[int], obtainable: list[int]) -> None:
        self._fanouts = fanouts  # by level, of a cell of that level
        self.free = free
        self.obtainable = obtainable

    @classmethod
    def whole(cls, topology: ChainTopology) -> FreeList:
        """Nothing is taken."""
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
        """The mask, at a lower level, of the cells inside a cell."""
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
        """By level, how many free cells are left when every quota of that level and above is served from the top down.

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
        """Whether every virtual cluster can still get each of its unbound preassigned cells (bad hardware aside)."""
        return min(self.splittable(reserved)) >= 0
