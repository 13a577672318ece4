"""The units of a quota worth choosing for a request that heeds which nodes kube-scheduler suggests.

An unbound unit has no node yet, and can get any that is left below what its nearest bound ancestor is bound to. Of the
units below one cell no more are worth choosing than there are usable nodes left for them: those beyond could not be
mapped, and a choice of them would only be found out one by one.
"""

from __future__ import annotations

from itertools import islice

from scheduler.hived.cells import PhysicalCell, VirtualCell
from scheduler.hived.free_list import bits
from scheduler.hived.units import Units
from scheduler.hived.usable_nodes import UsableNodes


class UsableUnits:
    """As of one decision. `counts_all`: units without any bound ancestor are counted too, which takes longer: those of
    each preassigned cell against the nodes of one that could be had for it, where most are usable first.
    """

    def __init__(self, units: Units[VirtualCell], usable: UsableNodes) -> None:
        self.counts_all = False
        self._units = units
        self._usable = usable
        self._obtainable: dict[VirtualCell, int] = {}
        self._left: dict[tuple[VirtualCell, int], int] = {}
        self._worthwhile: dict[VirtualCell, frozenset[VirtualCell]] = {}

    def __contains__(self, unit: int) -> bool:
        """Whether a unit, by its number, is on a usable node or may get one."""
        cell = self._units.cells[unit]
        if cell.physical is not None:
            return cell.physical in self._usable
        parent = cell.parent
        if parent is None or (not self.counts_all and cell.preassigned.physical is None):
            return True
        if parent not in self._worthwhile:
            unbound = (child for child in parent.children if child.physical is None)
            self._worthwhile[parent] = frozenset(islice(unbound, self._nodes_left(parent)))
        return cell in self._worthwhile[parent]

    def _nodes_left(self, parent: VirtualCell) -> int:
        """How many usable nodes the unbound units right below a cell can get at most."""
        bound = next((cell for cell in parent.upward() if cell.physical is not None), None)
        if bound is None or bound.physical is None:
            return len(parent.children) if parent.parent else self._nodes_obtainable(parent)
        key = bound, parent.level
        if key not in self._left:
            cells = [bound.physical]
            for _ in range(bound.level - parent.level):
                cells = [child for cell in cells for child in _unbound(cell)]
            self._left[key] = max((sum(node in self._usable for node in _unbound(cell)) for cell in cells), default=0)
        return self._left[key]

    def _nodes_obtainable(self, top: VirtualCell) -> int:
        """The same for an unbound preassigned cell: the first of its kind gets the cell with most usable nodes."""
        if top not in self._obtainable:
            chain, level = top.chain, top.level
            nodes = self._usable.cells(chain.topology.node_level)
            inside = (
                chain.free.cells_below(level, index, chain.topology.node_level)
                for index in bits(chain.free.obtainable[level])
            )
            left = sorted(((nodes & cells).bit_count() for cells in inside), reverse=True)
            unbound = top.virtual_cluster.unbound(chain.name, level)
            self._obtainable.update(zip(unbound, left, strict=False))
        return self._obtainable.get(top, 0)


def _unbound(cell: PhysicalCell) -> list[PhysicalCell]:
    return [child for child in cell.children if child.virtual is None]
