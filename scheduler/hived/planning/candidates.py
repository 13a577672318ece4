"""The nodes of a chain that a request may use, the cells with enough of them, and the units worth a try.

A node may be used if it is healthy and, unless the request ignores suggestions, suggested by kube-scheduler. Cells are
counted lazily, once per request: usually the first cells tried suffice.
"""

from __future__ import annotations

from itertools import zip_longest

from scheduler.hived.cells.cells import PhysicalCell, VirtualCell
from scheduler.hived.cells.chain import Chain
from scheduler.hived.cells.pack_index import Units, mask_of
from scheduler.hived.cells.topology import bits, span


class UsableNodes:
    """Valid for one decision. `suggested`: None for all nodes."""

    def __init__(self, chain: Chain, suggested: frozenset[str] | None) -> None:
        self._chain = chain
        self._suggested = suggested
        self._node_level = chain.topology.node_level
        self._found: dict[tuple[int, int], int] = {}

    @property
    def are_all_healthy(self) -> bool:
        """Return whether health is the only criterion."""
        return self._suggested is None

    def __contains__(self, cell: PhysicalCell) -> bool:
        """Return whether a cell, a node or part of one, may be used."""
        return cell.healthy and (self._suggested is None or cell.node in self._suggested)

    def are_few(self) -> bool:
        """Return whether looking them up is faster than trying nodes until one may be used."""
        return self._suggested is not None and len(self._suggested) < len(self._chain.topology.nodes) // 4

    def cells(self, level: int, needed: int = 1) -> int:
        """Return the mask of the cells of a level with at least `needed` usable nodes, below node level of those on
        one.
        """
        key = (level, needed if level > self._node_level else 1)
        if key not in self._found:
            self._found[key] = self._count(*key)
        return self._found[key]

    def _count(self, level: int, needed: int) -> int:
        healthy, total = self._chain.healthy[level], len(self._chain.levels[level - 1])
        cells_in = self._chain.topology.cells_in
        if level <= self._node_level:
            if self._suggested is None:
                return healthy
            known, each = self._chain.node_numbers, cells_in(self._node_level, level)
            numbers = (known[name] * each + part for name in self._suggested if name in known for part in range(each))
            return mask_of(numbers, total) & healthy
        nodes, length = self.cells(self._node_level), cells_in(level, self._node_level)
        block = span(0, length)
        # Without suggestions, only cells that are not fully healthy have to be counted.
        counted = range(total) if self._suggested is not None else bits(span(0, total) & ~healthy)
        enough = (index for index in counted if (nodes >> index * length & block).bit_count() >= needed)
        return mask_of(enough, total) | (healthy if self._suggested is None else 0)


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
