"""Virtual clusters: the cells that a tenant is guaranteed, as trees of the same shape as the physical ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from scheduler.hived.cells import VirtualCell
from scheduler.hived.chain import Chain
from scheduler.hived.free_list import bits, span
from scheduler.hived.topology import PreassignedCell
from scheduler.hived.units import Units


class VirtualCluster:
    """One tenant. `preassigned`: its cells in the order of the configuration, pinned ones last.

    `quotas`: the units of its movable cells by chain; `pinned`: those of each pinned cell by id.
    """

    def __init__(self, name: str, cells: Sequence[PreassignedCell], chains: Mapping[str, Chain]) -> None:
        self.name = name
        self.preassigned: list[VirtualCell] = []
        self.quotas: dict[str, Units[VirtualCell]] = {}
        self.pinned: dict[str, Units[VirtualCell]] = {}
        self._by_level: dict[tuple[str, int], list[VirtualCell]] = {}
        self._unbound: dict[tuple[str, int], int] = {}
        for cell in cells:
            self._add(cell, chains[cell.chain])
        for key, virtual in self._by_level.items():
            self._unbound[key] = span(0, len(virtual))

    def _add(self, cell: PreassignedCell, chain: Chain) -> None:
        virtual = self._grow(chain, cell)
        self.preassigned.append(virtual)
        if cell.pinned_cell_id:
            units = self.pinned.setdefault(cell.pinned_cell_id, Units())
        else:
            siblings = self._by_level.setdefault((chain.name, cell.level), [])
            virtual.number = len(siblings)
            siblings.append(virtual)
            units = self.quotas.setdefault(chain.name, Units())
        for unit in _units_of(virtual):
            units.add(unit)

    def _grow(self, chain: Chain, cell: PreassignedCell) -> VirtualCell:
        """The whole tree of a preassigned cell. Indices in addresses run on within a level of the tree."""
        leaves = chain.topology.leaves_at(cell.level)
        top = VirtualCell(self, chain, cell.level, cell.address, leaves, cell.pinned_cell_id)
        parents = [top]
        for level in range(cell.level - 1, 0, -1):
            fanout = chain.topology.fanouts[level]
            leaves //= fanout
            below: list[VirtualCell] = []
            for parent in parents:
                first = len(below)
                for index in range(first, first + fanout):
                    child = VirtualCell(self, chain, level, f"{parent.address}/{index}", leaves, cell.pinned_cell_id)
                    child.parent, child.preassigned = parent, top
                    below.append(child)
                parent.children = tuple(below[first:])
            parents = below
        return top

    def levels(self) -> Iterator[tuple[str, int, int]]:
        """(chain, level, how many) of its movable preassigned cells."""
        for (chain, level), cells in self._by_level.items():
            yield chain, level, len(cells)

    def at(self, chain: str, level: int) -> Sequence[VirtualCell]:
        """Its movable preassigned cells of a level, in the order of the configuration."""
        return self._by_level.get((chain, level), ())

    def unbound(self, chain: str, level: int) -> Iterator[VirtualCell]:
        """Those of them that are not bound, in that order."""
        return (self._by_level[chain, level][number] for number in bits(self._unbound.get((chain, level), 0)))

    def last_unbound(self, chain: str, level: int) -> VirtualCell:
        """The unbound one that is asked for last. Raises `IndexError` if there is none."""
        return self._by_level[chain, level][self._unbound[chain, level].bit_length() - 1]

    def note_bound(self, cell: VirtualCell, *, bound: bool) -> None:
        """Keep count of what is unbound; the chain calls it for movable preassigned cells."""
        bit = 1 << cell.number
        if bound:
            self._unbound[cell.chain.name, cell.level] &= ~bit
        else:
            self._unbound[cell.chain.name, cell.level] |= bit


def _units_of(cell: VirtualCell) -> Iterator[VirtualCell]:
    if cell.level <= cell.chain.topology.node_level:
        yield cell
    else:
        for child in cell.children:
            yield from _units_of(child)
