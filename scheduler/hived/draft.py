"""A draft: what bindings and the free list would be after steps that are only thought of. The cells stay as they are.

A plan and a recovery are worked out on a draft of one chain; what comes of it is a list of pairs to bind.
"""

from __future__ import annotations

from collections.abc import Iterator

from scheduler.hived.cells import PhysicalCell, PhysicalLeaf, VirtualCell
from scheduler.hived.chain import Chain
from scheduler.hived.groups import AffinityGroup


class Draft:
    """A view over a chain with changes. `downgraded`: groups that would lose their quota, in the order of the steps."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.free = chain.free.copy()
        self.downgraded: list[AffinityGroup] = []
        self._reserved = chain.all_vc_free.copy()
        self._bound: dict[VirtualCell, PhysicalCell] = {}
        self._owner: dict[PhysicalCell, VirtualCell] = {}
        self._dropped: set[VirtualCell] = set()
        self._left: set[PhysicalCell] = set()
        self._vacated: dict[VirtualCell, int] = {}
        self._opportunistic: dict[PhysicalCell, int] = {}

    def physical_of(self, virtual: VirtualCell) -> PhysicalCell | None:
        if virtual in self._bound:
            return self._bound[virtual]
        return None if virtual in self._dropped else virtual.physical

    def virtual_of(self, physical: PhysicalCell) -> VirtualCell | None:
        if physical in self._owner:
            return self._owner[physical]
        return None if physical in self._left else physical.virtual

    def leaf_of(self, virtual: VirtualCell) -> PhysicalLeaf:
        """What a virtual leaf is bound to, which it must be."""
        physical = self.physical_of(virtual)
        assert isinstance(physical, PhysicalLeaf)
        return physical

    def opportunistic(self, physical: PhysicalCell) -> int:
        """Leaves with opportunistic pods, those that would become so included."""
        return physical.opportunistic + self._opportunistic.get(physical, 0)

    def by_opportunistic(self, level: int, candidates: int) -> Iterator[PhysicalCell]:
        """Candidates of a level (a mask), fewest opportunistic leaves first, then in the order of the configuration."""
        cells = self.chain.levels[level - 1]
        moved = [cell for cell in self._opportunistic if cell.level == level and candidates >> cell.index & 1]
        for cell in moved:
            candidates &= ~(1 << cell.index)
        waiting = sorted(moved, key=lambda cell: (-self.opportunistic(cell), -cell.index))
        for count, index in self.chain.by_opportunistic(level, candidates):
            while waiting and (self.opportunistic(waiting[-1]), waiting[-1].index) < (count, index):
                yield waiting.pop()
            yield cells[index]
        yield from reversed(waiting)

    def bind(self, virtual: VirtualCell, physical: PhysicalCell) -> None:
        self._bound[virtual] = physical
        self._owner[physical] = virtual

    def occupy(self, leaf: VirtualCell) -> None:
        """A virtual leaf is needed, and all above it, whoever else is downgraded."""
        self._vacate(leaf, -1)

    def take(self, physical: PhysicalCell) -> None:
        """Allocate a physical cell to some preassigned one of its level."""
        self.free.take(physical.level, physical.index)
        self._reserved[physical.level] -= 1

    def give_back(self, physical: PhysicalCell) -> None:
        """Undo `take`."""
        self.free.give_back(physical.level, physical.index)
        self._reserved[physical.level] += 1

    def splittable(self) -> list[int]:
        """As `FreeList.splittable`, with what is taken and given back here."""
        return self.free.splittable(self._reserved)

    def is_safe(self) -> bool:
        """Whether every tenant could still get all that it is guaranteed."""
        return self.free.is_safe(self._reserved)

    def downgrade(self, group: AffinityGroup) -> None:
        """A group goes on as an opportunistic one: its virtual leaves are free for others."""
        self.downgraded.append(group)
        tops: dict[VirtualCell, None] = {}
        for leaf, virtual in group.pairs():
            if virtual is not None and leaf.claimant is None:
                self._count_opportunistic(leaf)
                self._vacate(virtual, 1)
                tops[virtual.preassigned] = None
        for top in tops:
            self._loosen(top)

    def _count_opportunistic(self, leaf: PhysicalLeaf) -> None:
        for cell in leaf.upward():
            self._opportunistic[cell] = self._opportunistic.get(cell, 0) + 1

    def _vacate(self, leaf: VirtualCell, change: int) -> None:
        for cell in leaf.upward():
            self._vacated[cell] = self._vacated.get(cell, 0) + change

    def _is_used(self, virtual: VirtualCell) -> bool:
        return sum(virtual.used.values()) > self._vacated.get(virtual, 0)

    def _loosen(self, virtual: VirtualCell) -> None:
        """Drop, from the top, what nothing needs any more (as `occupancy.loosen` does from a leaf)."""
        physical = self.physical_of(virtual)
        if physical is None:
            return
        if not self._is_used(virtual):
            if virtual.parent is None and not virtual.pinned_id:
                self._drop(virtual)
                self.give_back(physical)
                return
            if virtual.parent is not None and (physical.healthy or virtual.level < self.chain.topology.node_level):
                self._drop(virtual)
                return
        for child in virtual.children:
            if child in self._vacated:
                self._loosen(child)

    def _drop(self, virtual: VirtualCell) -> None:
        physical = self.physical_of(virtual)
        if physical is None:
            return
        self._dropped.add(virtual)
        self._left.add(physical)
        self._bound.pop(virtual, None)
        self._owner.pop(physical, None)
        for child in virtual.children:
            self._drop(child)
