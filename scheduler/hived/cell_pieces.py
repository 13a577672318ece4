"""Trees of cells as JSON in pieces, so that a change costs the pieces that show it and not the whole document.

A node-level cell with all below it is one piece; so is a preassigned cell below node level. A cell above is two pieces,
one before and one after its children's. All pieces of a list of trees, in order, are the elements of a JSON array.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

import msgspec

from scheduler.hived.cell_status import (
    PhysicalCellStatus,
    VirtualCellStatus,
    opportunistic_status,
    opportunistic_user,
    physical_status,
    physical_tree,
    virtual_status,
    virtual_tree,
)
from scheduler.hived.cells import CellState, PhysicalCell, PhysicalLeaf, VirtualCell, combined

C = TypeVar("C", PhysicalCell, VirtualCell)

_CHILDREN = b'"cellChildren":['  # can't be part of a string, whose quotes are escaped
_encode = msgspec.json.Encoder().encode


class CellPieces(ABC, Generic[C]):
    """The pieces of `arrays`, one after the other. Everything is stale at first.

    `pieces`: current but for what is stale. `bounds`: where each array begins, and where the last one ends.
    """

    def __init__(self, arrays: Sequence[Iterable[C]]) -> None:
        self.pieces: list[bytes] = []
        self.bounds: list[int] = []
        self._places: dict[C, tuple[int, int]] = {}
        self._first: set[C] = set()
        self._stale: list[set[C]] = []  # by how many levels above the cells that are one piece: children come first
        for tops in arrays:
            self.bounds.append(len(self.pieces))
            for number, top in enumerate(tops):
                self._lay_out(top, is_first=number == 0)
        self.bounds.append(len(self.pieces))

    def _lay_out(self, cell: C, *, is_first: bool) -> None:
        begin = len(self.pieces)
        self.pieces.append(b"")
        if is_first:
            self._first.add(cell)
        if _height(cell):
            for number, child in enumerate(cell.children):
                self._lay_out(child, is_first=number == 0)
            self.pieces.append(b"")
        self._places[cell] = begin, len(self.pieces) - 1
        self.mark(cell)

    def mark(self, cell: C) -> None:
        """The cell looks different now. It must be one piece or more."""
        height = _height(cell)
        while len(self._stale) <= height:
            self._stale.append(set())
        self._stale[height].add(cell)

    def refresh_one(self) -> bool:
        """Make one stale cell current; False if all are."""
        for stale in self._stale:
            if stale:
                self._refresh(stale.pop())
                return True
        return False

    def _refresh(self, cell: C) -> None:
        begin, end = self._places[cell]
        comma = b"" if cell in self._first else b","
        if begin == end:
            self.pieces[begin] = comma + self._whole(cell)
            return
        status = self._alone(cell)
        status.cell_children = []
        before, bracket, after = _encode(status).partition(_CHILDREN)
        self.pieces[begin], self.pieces[end] = comma + before + bracket, after

    @abstractmethod
    def _whole(self, cell: C) -> bytes:
        """The JSON of a cell that is one piece."""

    @abstractmethod
    def _alone(self, cell: C) -> PhysicalCellStatus | VirtualCellStatus:
        """The status of a cell that is two pieces, without its children."""


class PhysicalPieces(CellPieces[PhysicalCell]):
    """`opportunistic`: for each tenant, the cells that inspection shows for its opportunistic pods, by the place of the
    node in `pieces`; as elements of an array, with commas between.
    """

    def __init__(self, tops: Iterable[PhysicalCell]) -> None:
        self.opportunistic: dict[str, dict[int, bytes]] = {}
        self._states: dict[PhysicalCell, CellState] = {}
        super().__init__([tops])

    def state(self, cell: PhysicalCell) -> CellState:
        """Of a cell at node level or above, as it was when it was made current."""
        return self._states[cell]

    def _whole(self, cell: PhysicalCell) -> bytes:
        status, self._states[cell] = physical_tree(cell)
        self._show_opportunistic(cell)
        return _encode(status)

    def _alone(self, cell: PhysicalCell) -> PhysicalCellStatus:
        state = self._states[cell] = combined(self._states[child] for child in cell.children)
        return physical_status(cell, state)

    def _show_opportunistic(self, cell: PhysicalCell) -> None:
        by_tenant: dict[str, list[PhysicalLeaf]] = {}
        if cell.opportunistic:
            for leaf in cell.leaf_cells():
                if tenant := opportunistic_user(leaf):
                    by_tenant.setdefault(tenant, []).append(leaf)
        place, _ = self._places[cell]
        for tenant in self.opportunistic:
            self.opportunistic[tenant].pop(place, None)
        for tenant, leaves in by_tenant.items():
            shown = b",".join(_encode(opportunistic_status(leaf)) for leaf in leaves)
            self.opportunistic.setdefault(tenant, {})[place] = shown


class VirtualPieces(CellPieces[VirtualCell]):
    """An array for each tenant. `physical`: must be current when a cell is made current here."""

    def __init__(self, arrays: Sequence[Iterable[VirtualCell]], physical: PhysicalPieces) -> None:
        self._physical = physical
        super().__init__(arrays)

    def _whole(self, cell: VirtualCell) -> bytes:
        return _encode(virtual_tree(cell))

    def _alone(self, cell: VirtualCell) -> VirtualCellStatus:
        bound = cell.physical
        return virtual_status(cell, CellState.FREE if bound is None else self._physical.state(bound))


def _height(cell: PhysicalCell | VirtualCell) -> int:
    """How many levels above those cells that are one piece."""
    return max(0, cell.level - cell.chain.topology.node_level)
