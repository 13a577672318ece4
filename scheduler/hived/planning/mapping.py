"""Mapping of chosen virtual cells to physical ones: safe relaxed buddy allocation around bad and unsuggested nodes.

A node may be used if it is healthy and, unless the request ignores suggestions, suggested by kube-scheduler. Cells with
enough usable nodes are counted lazily, once per request: usually the first cells tried suffice.

The unbound ancestors of the chosen leaves form trees. A tree below a bound cell is mapped among the children of its
physical cell; a tree from a preassigned cell first gets a cell of the buddy free list. If that level has only unusable
cells, larger ones are split, as long as every other tenant's guarantee stays satisfiable.

A plan and a recovery are computed on a `Draft` of one chain, which changes no cell; the result is a list of pairs to
bind.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import islice, zip_longest

from scheduler.hived.cells.cells import PhysicalCell, Units, VirtualCell, mask_of
from scheduler.hived.cells.chain import Chain
from scheduler.hived.cells.groups import AffinityGroup
from scheduler.hived.cells.topology import bits, span
from scheduler.hived.errors import PlatformError

_TRIED_FIRST = 4  # free cells to try before counting which of them have enough usable nodes


class UsableNodes:
    """Valid for one decision. `suggested`: None for all nodes."""

    def __init__(self, chain: Chain, suggested: frozenset[str] | None) -> None:
        self._chain = chain
        self.suggested = suggested
        self._node_level = chain.topology.node_level
        self._found: dict[tuple[int, int], int] = {}

    def __contains__(self, cell: PhysicalCell) -> bool:
        """Return whether a cell, a node or part of one, may be used."""
        return cell.healthy and (self.suggested is None or cell.node in self.suggested)

    def cells(self, level: int, needed: int = 1) -> int:
        """Return the mask of the cells of a level with at least `needed` usable nodes, below node level of those on
        one.
        """
        key = (level, needed if level > self._node_level else 1)
        if key in self._found:
            return self._found[key]
        found, total = self._chain.healthy[level], len(self._chain.levels[level - 1])
        cells_in = self._chain.topology.cells_in
        if level > self._node_level:
            nodes, length = self.cells(self._node_level), cells_in(level, self._node_level)
            block = span(0, length)
            # Without suggestions, only cells that are not fully healthy have to be counted.
            counted = range(total) if self.suggested is not None else bits(span(0, total) & ~found)
            enough = (index for index in counted if (nodes >> index * length & block).bit_count() >= needed)
            found = mask_of(enough, total) | (found if self.suggested is None else 0)
        elif self.suggested is not None:
            known, each = self._chain.node_numbers, cells_in(self._node_level, level)
            numbers = (known[name] * each + part for name in self.suggested if name in known for part in range(each))
            found &= mask_of(numbers, total)
        self._found[key] = found
        return found


class UsableUnits:
    """Valid for one decision. `counts_all`: also check units without any bound ancestor, which takes longer."""

    def __init__(self, units: Units[VirtualCell], usable: UsableNodes) -> None:
        self.counts_all = False
        self._units = units
        self._usable = usable
        self._stands_for: dict[VirtualCell, PhysicalCell | None] = {}

    def __contains__(self, unit: int) -> bool:
        """Return whether a unit, by its number, is on a usable node or may get one."""
        cell = self._units.cells[unit]
        if cell.physical is None and (cell.parent is None or not (self.counts_all or cell.preassigned.physical)):
            return True
        physical = self._physical(cell)
        return physical is not None and physical in self._usable

    def _physical(self, cell: VirtualCell) -> PhysicalCell | None:
        """Return the physical cell that a cell is bound to, else the one it stands for."""
        if cell.physical is not None:
            return cell.physical
        if cell not in self._stands_for:
            # Choose the physical cells that an unbound cell and its unbound siblings stand for
            chain, parent = cell.chain, cell.parent
            if parent is None:
                siblings = list(cell.virtual_cluster.unbound(chain.name, cell.level))
                found = [chain.levels[cell.level - 1][index] for index in bits(chain.free.obtainable[cell.level])]
            else:
                above = self._physical(parent)
                siblings = [child for child in parent.children if child.physical is None]
                found = [] if above is None else [child for child in above.children if child.virtual is None]
            found.sort(key=self._count, reverse=True)
            self._stands_for.update(zip_longest(siblings, found[: len(siblings)]))
        return self._stands_for[cell]

    def _count(self, cell: PhysicalCell) -> int:
        """Return the number of usable nodes inside an unbound cell."""
        node_level = cell.chain.topology.node_level
        if cell.level <= node_level:
            return int(cell in self._usable)
        inside = cell.chain.free.cells_below(cell.level, cell.index, node_level)
        return (self._usable.cells(node_level) & inside).bit_count()


class Draft:
    """Bindings and the free list of a chain as they would be after tentative steps.

    `downgraded`: groups that would lose their quota, in the order of the steps. `reserved`: by level, the preassigned
    cells of all tenants that stay unbound.
    """

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.free = chain.free.copy()
        self.downgraded: list[AffinityGroup] = []
        self.reserved = chain.all_vc_free.copy()
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

    def opportunistic(self, physical: PhysicalCell) -> int:
        """Return the number of leaves used by opportunistic pods, including those of downgraded groups."""
        return physical.opportunistic + self._opportunistic.get(physical, 0)

    def by_opportunistic(self, level: int, candidates: int) -> Iterator[PhysicalCell]:
        """Yield candidates of a level (a mask), fewest opportunistic leaves first, then in configuration order."""
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

    def take(self, physical: PhysicalCell) -> None:
        """Allocate a physical cell to some preassigned one of its level."""
        self.free.take(physical.level, physical.index)
        self.reserved[physical.level] -= 1

    def give_back(self, physical: PhysicalCell) -> None:
        """Undo `take`."""
        self.free.give_back(physical.level, physical.index)
        self.reserved[physical.level] += 1

    def downgrade(self, group: AffinityGroup) -> None:
        """Downgrade a group to opportunistic, which frees its virtual leaves."""
        self.downgraded.append(group)
        tops: dict[VirtualCell, None] = {}
        for leaf, virtual in group.pairs():
            if virtual is not None and leaf.claimant is None:
                for cell in leaf.upward():
                    self._opportunistic[cell] = self._opportunistic.get(cell, 0) + 1
                self.vacate(virtual, 1)
                tops[virtual.preassigned] = None
        for top in tops:
            self._loosen(top)

    def vacate(self, leaf: VirtualCell, change: int) -> None:
        """Count one user that leaves a virtual leaf and its ancestors (1), or take that back (-1)."""
        for cell in leaf.upward():
            self._vacated[cell] = self._vacated.get(cell, 0) + change

    def _loosen(self, virtual: VirtualCell) -> None:
        """Drop unneeded bindings from the top (as `Allocations` does from a leaf)."""
        physical = self.physical_of(virtual)
        if physical is None:
            return
        if sum(virtual.used.values()) <= self._vacated.get(virtual, 0):
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


class Unmappable(Exception):
    """No usable physical cell is left for `cell`, an unbound virtual one. `given`: preassigned cells that got one."""

    def __init__(self, cell: VirtualCell, given: Collection[VirtualCell] = ()) -> None:
        super().__init__(f"no usable physical cell for {cell.address}")
        self.cell = cell
        self.given = given


class CellMapping:
    """One attempt to map virtual cells, on a draft."""

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
        """Bind every leaf and its ancestors in the draft. Raises `Unmappable` and leaves the draft partly changed."""
        for cell in leaves:
            while self._draft.physical_of(cell) is None:  # add it and its unbound ancestors to the trees to map
                parent = cell.parent
                if parent is None:
                    self._roots.append(cell)
                    break
                branch = self._below if self._draft.physical_of(parent) is not None else self._wanted
                siblings = branch.get(parent)
                if siblings is not None:
                    siblings.append(cell)
                    break
                branch[parent] = [cell]
                cell = parent
        for parent, children in self._below.items():
            physical = self._draft.physical_of(parent)
            assert physical is not None
            self._assign(children, physical.children)
        for root in sorted(self._roots, key=lambda root: (-root.level, -len(self._wanted.get(root, ())))):
            if not self._preassign(root, set()):
                raise Unmappable(self._most_crowded(root), self._given)
        for root, physical in self._given.items():
            self._bind(root, physical)

    def _most_crowded(self, cell: VirtualCell) -> VirtualCell:
        """Return the unit to exclude from a tree that can't be mapped: the last one where most cells are wanted."""
        while cell.units is None:
            cell = max(reversed(self._wanted[cell]), key=lambda child: len(self._wanted.get(child, ())))
        return cell

    def _bind(self, virtual: VirtualCell, physical: PhysicalCell) -> None:
        self._draft.bind(virtual, physical)
        children = self._wanted.get(virtual)
        if children:
            self._assign(children, physical.children)

    def _assign(self, virtual: Sequence[VirtualCell], among: Sequence[PhysicalCell]) -> None:
        """Bind each of the sibling cells to one of the children of their parent's physical cell."""
        unbound = (cell for cell in among if self._draft.virtual_of(cell) is None)
        cells = sorted(unbound, key=self._draft.opportunistic)
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

    def _fits(self, virtual: VirtualCell, physical: PhysicalCell) -> bool:
        """Return whether a virtual cell, with all wanted cells below it, can be mapped to an unbound physical one."""
        if physical.level <= self._chain.topology.node_level:
            return physical in self._usable
        if physical.healthy and self._usable.suggested is None:
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
        """Give a preassigned cell a free physical one, if need be by moving those already given in this mapping."""
        free, level = self._draft.free, root.level
        source = next((up for up in range(level, free.top_level + 1) if free.free[up]), None)
        if source is None:
            raise PlatformError(f"chain {self._chain.name}: no free cell for {root.address}: its quota can't be served")
        # From the lowest level that has a free cell, else from the next that may be split.
        physical = next(self._candidates(root, source), None)
        splittable = self._draft.free.splittable(self._draft.reserved) if physical is None else []
        while physical is None and source < free.top_level:
            source += 1
            if splittable[source] < 1:
                break  # a split from here or above takes one cell of this level, and none can be spared
            physical = next(self._candidates(root, source), None)
        if physical is not None:
            self._draft.take(physical)
            self._given[root] = physical
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

    def _candidates(self, root: VirtualCell, source: int) -> Iterator[PhysicalCell]:
        """Yield fitting cells of the root's level inside free cells of level `source`, preferred ones first."""
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
        """Return the number of nodes that the wanted tree below a cell takes."""
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


def match(left: int, candidates: Sequence[Sequence[int]]) -> list[int] | None:
    """Return one candidate for each of `left` nodes, no candidate twice; None if that is impossible.

    `candidates[i]` are in order of preference: each node in turn takes its first free candidate; only if none is free,
    earlier nodes move. Deterministic.
    """
    chosen = [-1] * left
    holders: dict[int, int] = {}
    if all(_place(node, candidates, chosen, holders) for node in range(left)):
        return chosen
    return None


def _place(node: int, candidates: Sequence[Sequence[int]], chosen: list[int], holders: dict[int, int]) -> bool:
    """Search breadth first for a free candidate, so that as few nodes as possible move."""
    takers: dict[int, int] = {}
    queue = [node]
    for taker in queue:
        for candidate in candidates[taker]:
            if candidate in takers:
                continue
            takers[candidate] = taker
            if candidate in holders:
                queue.append(holders[candidate])
                continue
            free = candidate
            while True:  # move every node on the path to its new candidate, back to `node`, which had none
                taker = takers[free]
                given_up = chosen[taker]
                chosen[taker], holders[free] = free, taker
                if taker == node:
                    return True
                free = given_up
    return False
