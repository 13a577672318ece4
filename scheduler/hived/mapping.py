"""From chosen virtual cells to physical ones: buddy allocation, with safe relaxation, around bad and unsuggested nodes.

The unbound ancestors of the chosen leaves form trees. A tree below a bound cell is mapped among the children of what
that is bound to; a tree from a preassigned cell first gets a cell of the buddy free list. Where that has only unusable
cells, larger ones are split, as long as every other tenant's guarantee stays satisfiable.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import islice

from scheduler.hived.cells import PhysicalCell, VirtualCell
from scheduler.hived.draft import Draft
from scheduler.hived.errors import PlatformError
from scheduler.hived.matching import match
from scheduler.hived.usable_nodes import UsableNodes

_TRIED_FIRST = 4  # free cells, before it is counted which of them have enough usable nodes at all


class Unmappable(Exception):
    """No usable physical cell is left for `cell`, an unbound virtual one. `given`: preassigned cells that got one."""

    def __init__(self, cell: VirtualCell, given: Collection[VirtualCell] = ()) -> None:
        super().__init__(f"no usable physical cell for {cell.address}")
        self.cell = cell
        self.given = given


class Mapping:
    """One attempt, on a draft."""

    def __init__(self, draft: Draft, usable: UsableNodes) -> None:
        self._draft = draft
        self._chain = draft.chain
        self._usable = usable
        self._wanted: dict[VirtualCell, list[VirtualCell]] = {}
        self._roots: list[VirtualCell] = []
        self._below: dict[VirtualCell, list[VirtualCell]] = {}
        self._given: dict[VirtualCell, PhysicalCell] = {}
        self._fitting: dict[tuple[VirtualCell, PhysicalCell], bool] = {}

    def map(self, leaves: Sequence[VirtualCell]) -> None:
        """Bind every leaf, and what is above it, in the draft. Raises `Unmappable`, with the draft half changed."""
        for leaf in leaves:
            self._want(leaf)
        for parent, children in self._below.items():
            physical = self._draft.physical_of(parent)
            assert physical is not None
            self._assign(children, physical.children)
        for root in sorted(self._roots, key=lambda root: (-root.level, -len(self._wanted.get(root, ())))):
            if not self._preassign(root, set()):
                raise Unmappable(self._most_crowded(root), self._given)
        for root, physical in self._given.items():
            self._bind(root, physical)

    def _want(self, leaf: VirtualCell) -> None:
        """Note the unbound ancestors of a leaf as part of a tree that is to be mapped."""
        cell = leaf
        while self._draft.physical_of(cell) is None:
            parent = cell.parent
            if parent is None:
                self._roots.append(cell)
                return
            branch = self._below if self._draft.physical_of(parent) is not None else self._wanted
            siblings = branch.get(parent)
            if siblings is not None:
                siblings.append(cell)
                return
            branch[parent] = [cell]
            cell = parent

    def _most_crowded(self, cell: VirtualCell) -> VirtualCell:
        """Of a tree that can't be mapped, the unit to do without: the last one where most are wanted."""
        while cell.units is None:
            cell = max(reversed(self._wanted[cell]), key=lambda child: len(self._wanted.get(child, ())))
        return cell

    def _bind(self, virtual: VirtualCell, physical: PhysicalCell) -> None:
        self._draft.bind(virtual, physical)
        children = self._wanted.get(virtual)
        if children:
            self._assign(children, physical.children)

    def _assign(self, virtual: Sequence[VirtualCell], among: Sequence[PhysicalCell]) -> None:
        """Bind each of some sibling cells to one of the children of their parent's physical cell."""
        cells = self._ordered(among)
        if virtual[0].level < self._chain.topology.node_level:
            if not all(cell in self._usable for cell in cells[:1]) or len(cells) < len(virtual):
                raise Unmappable(virtual[-1])
            chosen = list(range(len(virtual)))
        else:
            candidates = [[index for index, cell in enumerate(cells) if self._fits(v, cell)] for v in virtual]
            matched = match(len(candidates), candidates)
            if matched is None:
                raise Unmappable(self._most_crowded(virtual[-1]))
            chosen = matched
        for cell, index in zip(virtual, chosen, strict=True):
            self._bind(cell, cells[index])

    def _ordered(self, cells: Sequence[PhysicalCell]) -> list[PhysicalCell]:
        unbound = [cell for cell in cells if self._draft.virtual_of(cell) is None]
        return sorted(unbound, key=self._draft.opportunistic)

    def _fits(self, virtual: VirtualCell, physical: PhysicalCell) -> bool:
        """Whether a virtual cell, with all that is wanted below it, can be mapped to an unbound physical one."""
        if physical.level <= self._chain.topology.node_level:
            return physical in self._usable
        if physical.healthy and self._usable.are_all_healthy:
            return True
        known = self._fitting.get((virtual, physical))
        if known is None:
            wanted = self._wanted.get(virtual, ())
            cells = [cell for cell in physical.children if self._draft.virtual_of(cell) is None]
            candidates = [[index for index, cell in enumerate(cells) if self._fits(v, cell)] for v in wanted]
            known = match(len(candidates), candidates) is not None
            self._fitting[virtual, physical] = known
        return known

    def _preassign(self, root: VirtualCell, tried: set[PhysicalCell]) -> bool:
        """Give a preassigned cell a free physical one; if need be, by moving those already given in this mapping."""
        physical = self._find(root)
        if physical is not None:
            self._give(root, physical)
            return True
        if root.level <= self._chain.topology.node_level:
            return False
        for other, taken in list(self._given.items()):
            if other.level == root.level and taken not in tried and self._fits(root, taken):
                tried.add(taken)
                self._given[root] = taken
                del self._given[other]
                if self._preassign(other, tried):
                    return True
                del self._given[root]
                self._given[other] = taken
        return False

    def _give(self, root: VirtualCell, physical: PhysicalCell) -> None:
        self._draft.take(physical)
        self._given[root] = physical

    def _find(self, root: VirtualCell) -> PhysicalCell | None:
        """A free cell that the root fits: from the lowest level that has any, else from the next that may be split."""
        free, level = self._draft.free, root.level
        source = next((up for up in range(level, free.top_level + 1) if free.free[up]), None)
        if source is None:
            raise PlatformError(f"chain {self._chain.name}: no free cell for {root.address}: its quota can't be served")
        found = next(self._candidates(root, source), None)
        splittable = self._draft.splittable() if found is None else []
        while found is None and source < free.top_level:
            source += 1
            if splittable[source] < 1:
                break  # a split from here or above takes one cell of this level, and none is to spare
            found = next(self._candidates(root, source), None)
        return found

    def _candidates(self, root: VirtualCell, source: int) -> Iterator[PhysicalCell]:
        """Cells of the root's level inside free cells of a level, that it fits, the preferred first."""
        free = self._draft.free.free[source]
        if source <= self._chain.topology.node_level:
            free &= self._chain.healthy[source]
        for cell in islice(self._draft.by_opportunistic(source, free), _TRIED_FIRST):
            free ^= 1 << cell.index
            yield from self._inside(root, cell)
        if free:
            free &= self._usable.cells(source, self._nodes_wanted(root))
            for cell in self._draft.by_opportunistic(source, free):
                yield from self._inside(root, cell)

    def _nodes_wanted(self, virtual: VirtualCell) -> int:
        """How many nodes the tree that is wanted below a cell takes."""
        if virtual.level <= self._chain.topology.node_level:
            return 1
        return sum(map(self._nodes_wanted, self._wanted.get(virtual, ())))

    def _inside(self, root: VirtualCell, cell: PhysicalCell) -> Iterator[PhysicalCell]:
        if cell.level <= self._chain.topology.node_level and cell not in self._usable:
            return
        if cell.level == root.level:
            if self._fits(root, cell):
                yield cell
            return
        for child in sorted(cell.children, key=self._draft.opportunistic):
            yield from self._inside(root, child)
