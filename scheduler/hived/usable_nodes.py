"""The nodes of a chain that a request may use, for the question which cells have enough of them.

A node may be used if it is healthy and, where the request heeds kube-scheduler, suggested. Counting is put off until it
is asked for, and then done once per request: mostly the first cells that are tried will do.
"""

from __future__ import annotations

from collections.abc import Iterable

from scheduler.hived.cells import PhysicalCell
from scheduler.hived.chain import Chain
from scheduler.hived.free_list import bits, span
from scheduler.hived.units import mask_of


class UsableNodes:
    """As of one decision. `suggested`: None if all nodes are."""

    def __init__(self, chain: Chain, suggested: frozenset[str] | None) -> None:
        self._chain = chain
        self._suggested = suggested
        self._node_level = chain.topology.node_level
        self._found: dict[tuple[int, int], int] = {}

    @property
    def are_all_healthy(self) -> bool:
        """Whether nothing but health counts."""
        return self._suggested is None

    def __contains__(self, cell: PhysicalCell) -> bool:
        """Whether a cell, a node or part of one, may be used."""
        return cell.healthy and (self._suggested is None or cell.node in self._suggested)

    def are_few(self) -> bool:
        """Whether it is quicker to look them up than to try nodes until one may be used."""
        return self._suggested is not None and len(self._suggested) < len(self._chain.topology.nodes) // 4

    def cells(self, level: int, needed: int = 1) -> int:
        """The mask of the cells of a level with at least so many usable nodes, below node level of those on one."""
        key = (level, needed if level > self._node_level else 1)
        if key not in self._found:
            self._found[key] = self._count(*key)
        return self._found[key]

    def _count(self, level: int, needed: int) -> int:
        healthy = self._chain.healthy
        if level <= self._node_level:
            return healthy[level] if self._suggested is None else self._suggested_cells(level) & healthy[level]
        nodes = self.cells(self._node_level)
        length = self._chain.topology.cells_in(level, self._node_level)
        block = span(0, length)
        enough = (
            index for index in self._worth_counting(level) if (nodes >> index * length & block).bit_count() >= needed
        )
        return mask_of(enough, len(self._chain.levels[level - 1])) | (healthy[level] if self._suggested is None else 0)

    def _worth_counting(self, level: int) -> Iterable[int]:
        """Cells above node level that are not plainly with or without usable nodes."""
        total = len(self._chain.levels[level - 1])
        if self._suggested is None:
            return bits(span(0, total) & ~self._chain.healthy[level])
        return range(total)

    def _suggested_cells(self, level: int) -> int:
        """The mask of all cells of a level on suggested nodes."""
        assert self._suggested is not None
        known = self._chain.node_numbers
        each = self._chain.topology.cells_in(self._node_level, level)
        numbers = (known[name] * each + part for name in self._suggested if name in known for part in range(each))
        return mask_of(numbers, len(self._chain.levels[level - 1]))
