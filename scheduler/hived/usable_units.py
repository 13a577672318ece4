"""The units of a quota worth choosing for a request that heeds which nodes kube-scheduler suggests.

An unbound unit has no node yet. So that a choice of units can be mapped, each unbound cell stands for a physical one
that it might get: of unbound siblings the first for the one with most usable nodes, and so on. A unit that stands for
no usable node is not worth choosing; that it can't be mapped would only be found out one by one.
"""

from __future__ import annotations

from itertools import zip_longest

from scheduler.hived.cells import PhysicalCell, VirtualCell
from scheduler.hived.free_list import bits
from scheduler.hived.units import Units
from scheduler.hived.usable_nodes import UsableNodes


class UsableUnits:
    """As of one decision. `counts_all`: it holds for units without any bound ancestor too, which takes longer."""

    def __init__(self, units: Units[VirtualCell], usable: UsableNodes) -> None:
        self.counts_all = False
        self._units = units
        self._usable = usable
        self._stands_for: dict[VirtualCell, PhysicalCell | None] = {}

    def __contains__(self, unit: int) -> bool:
        """Whether a unit, by its number, is on a usable node or may get one."""
        cell = self._units.cells[unit]
        if cell.physical is None and (cell.parent is None or not (self.counts_all or cell.preassigned.physical)):
            return True
        physical = self._physical(cell)
        return physical is not None and physical in self._usable

    def _physical(self, cell: VirtualCell) -> PhysicalCell | None:
        """What a cell is bound to, else what it stands for."""
        if cell.physical is not None:
            return cell.physical
        if cell not in self._stands_for:
            self._settle(cell)
        return self._stands_for[cell]

    def _settle(self, cell: VirtualCell) -> None:
        """Find what an unbound cell and its unbound siblings stand for."""
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

    def _count(self, cell: PhysicalCell) -> int:
        """How many usable nodes are inside an unbound cell."""
        node_level = cell.chain.topology.node_level
        if cell.level <= node_level:
            return int(cell in self._usable)
        inside = cell.chain.free.cells_below(cell.level, cell.index, node_level)
        return (self._usable.cells(node_level) & inside).bit_count()
