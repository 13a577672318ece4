"""Trees of cells as JSON in pieces, so that a change re-encodes only the pieces that show it.

A node-level cell with everything below it is one piece; so is a preassigned cell below node level. A cell above those
is two pieces, one before and one after its children's. The pieces of a list of trees, in order, form a JSON array.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

import msgspec

from scheduler.hived.cells.cells import CellState, PhysicalCell, PhysicalLeaf, VirtualCell, combined
from scheduler.hived.inspection.status import (
    PhysicalCellStatus,
    VirtualCellStatus,
    opportunistic_status,
    opportunistic_user,
    physical_status,
    physical_tree,
    virtual_status,
    virtual_tree,
)

C = TypeVar("C", PhysicalCell, VirtualCell)

_CHILDREN = b'"cellChildren":['  # unambiguous: quotes inside a JSON string are escaped
_encode = msgspec.json.Encoder().encode


class CellPieces(ABC, Generic[C]):
    """The pieces of `arrays`, in order, all stale at first.

    `pieces` is current except for stale cells. `bounds`: where each array begins, and where the last one ends.
    """

    def __init__(self, arrays: Sequence[Iterable[C]]) -> None:
        self.pieces: list[bytes] = []
        self.bounds: list[int] = []
        self._places: dict[C, tuple[int, int]] = {}
        self._first: set[C] = set()
        self._stale: list[set[C]] = []  # by number of levels above the one-piece cells: children are refreshed first
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
        """Mark a cell of one or more pieces as stale."""
        height = _height(cell)
        while len(self._stale) <= height:
            self._stale.append(set())
        self._stale[height].add(cell)

    def refresh_one(self) -> bool:
        """Re-encode one stale cell. Return False if none is stale."""
        cells = next((stale for stale in self._stale if stale), None)
        if cells is None:
            return False
        cell = cells.pop()
        begin, end = self._places[cell]
        comma = b"" if cell in self._first else b","
        if begin == end:
            self.pieces[begin] = comma + self._whole(cell)
        else:
            status = self._alone(cell)
            status.cell_children = []
            before, bracket, after = _encode(status).partition(_CHILDREN)
            self.pieces[begin], self.pieces[end] = comma + before + bracket, after
        return True

    @abstractmethod
    def _whole(self, cell: C) -> bytes:
        """Return the JSON of a one-piece cell."""

    @abstractmethod
    def _alone(self, cell: C) -> PhysicalCellStatus | VirtualCellStatus:
        """Return the status of a two-piece cell, without its children."""


class PhysicalPieces(CellPieces[PhysicalCell]):
    """Pieces of the physical trees. `opportunistic`: by tenant and by the node's position in `pieces`, the
    comma-separated JSON of the cells that inspection shows for the tenant's opportunistic pods.
    """

    def __init__(self, tops: Iterable[PhysicalCell]) -> None:
        self.opportunistic: dict[str, dict[int, bytes]] = {}
        self._states: dict[PhysicalCell, CellState] = {}
        super().__init__([tops])

    def state(self, cell: PhysicalCell) -> CellState:
        """Return the state of a cell at node level or above, as of its last refresh."""
        return self._states[cell]

    def _whole(self, cell: PhysicalCell) -> bytes:
        status, self._states[cell] = physical_tree(cell)
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
        return _encode(status)

    def _alone(self, cell: PhysicalCell) -> PhysicalCellStatus:
        state = self._states[cell] = combined(self._states[child] for child in cell.children)
        return physical_status(cell, state)


class VirtualPieces(CellPieces[VirtualCell]):
    """Pieces with one array for each tenant. Refresh `physical` before a cell here."""

    def __init__(self, arrays: Sequence[Iterable[VirtualCell]], physical: PhysicalPieces) -> None:
        self._physical = physical
        super().__init__(arrays)

    def _whole(self, cell: VirtualCell) -> bytes:
        return _encode(virtual_tree(cell))

    def _alone(self, cell: VirtualCell) -> VirtualCellStatus:
        bound = cell.physical
        return virtual_status(cell, CellState.FREE if bound is None else self._physical.state(bound))


def _height(cell: PhysicalCell | VirtualCell) -> int:
    """Return the number of levels above the one-piece cells."""
    return max(0, cell.level - cell.chain.topology.node_level)
