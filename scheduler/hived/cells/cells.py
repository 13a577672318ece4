"""Cells: the nodes of physical and virtual trees, what the trees count, and the units that pods are packed into.

A cell counts its used leaves by priority, so its own priority is the highest that it counts. Only `chain` and
`groups` change cells, and always from a leaf upward, so that every ancestor agrees with its leaves.

A physical leaf has a user (the group whose pods may run on it), a claimant (the preempting group that gets it next),
both, or none; its state follows from the two.

A unit is a node-level cell, or a preassigned cell below node level: a pod has all its leaves in one unit. An index
sorts units into buckets by the criteria of one kind of request; a bucket is a bit mask, so finding the first fitting
unit in configuration order takes a few operations on integers. Changed units move to their buckets when an index is
next used: most indexes are used rarely.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

from scheduler.hived.contract import FREE_PRIORITY, MIN_GUARANTEED_PRIORITY, OPPORTUNISTIC_PRIORITY

if TYPE_CHECKING:
    from scheduler.hived.cells.chain import Chain, VirtualCluster
    from scheduler.hived.cells.groups import AffinityGroup


class CellState(StrEnum):
    """State of a physical leaf: whether a group uses it and whether a preemptor has claimed it."""

    FREE = "Free"
    USED = "Used"
    RESERVING = "Reserving"
    RESERVED = "Reserved"


_BY_WEIGHT = (CellState.USED, CellState.RESERVING, CellState.RESERVED)


def combined(states: Iterable[CellState]) -> CellState:
    """Return a cell's state from its children's: the first of Used, Reserving, Reserved among them, else Free."""
    found = set(states)
    return next((state for state in _BY_WEIGHT if state in found), CellState.FREE)


class Cell(ABC):
    """Base of physical and virtual cells. `used`: number of leaves by priority, without free ones.

    `units`, `unit`: if pods are packed into the cell as a unit, the set of units and the cell's number in it.
    """

    __slots__ = ("address", "chain", "leaves", "level", "unit", "units", "used")

    def __init__(self, chain: Chain, level: int, address: str, leaves: int) -> None:
        self.chain = chain
        self.level = level
        self.address = address
        self.leaves = leaves
        self.used: dict[int, int] = {}
        self.units: Units[Any] | None = None
        self.unit = -1

    @property
    def priority(self) -> int:
        """Return the highest priority of its leaves, -2 if all are free."""
        return max(self.used) if self.used else FREE_PRIORITY

    @property
    def cell_type(self) -> str:
        return self.chain.topology.cell_types[self.level - 1]

    @property
    def is_node_level(self) -> bool:
        return self.level == self.chain.topology.node_level

    @property
    @abstractmethod
    def healthy(self) -> bool:
        """Return whether no known node failure affects the cell."""

    def count(self, priority: int, change: int) -> None:
        """Add `change` to the count of leaves at a priority, in this cell only."""
        left = self.used.get(priority, 0) + change
        if left:
            self.used[priority] = left
        else:
            del self.used[priority]
        self.touch()

    def touch(self) -> None:
        """Notify the set of units of a change that a choice among units depends on."""
        if self.units is not None:
            self.units.touch(self.unit)

    def __repr__(self) -> str:
        return f"<{self.cell_type} {self.address}>"


class PhysicalCell(Cell):
    """A cell of hardware. `index`: its position within its level. `node`: "" above node level.

    `host`: the node-level cell that it is part of; above node level, itself. `bad_nodes`: how many of its nodes are
    bad, kept from node level upward. `virtual`: the virtual cell bound to it.
    """

    __slots__ = ("bad_nodes", "children", "host", "index", "node", "parent", "pinned_id", "virtual")

    def __init__(self, chain: Chain, level: int, index: int, address: str, leaves: int) -> None:
        super().__init__(chain, level, address, leaves)
        self.index = index
        self.parent: PhysicalCell | None = None
        self.children: tuple[PhysicalCell, ...] = ()
        self.host: PhysicalCell = self
        self.node = ""
        self.pinned_id = ""
        self.bad_nodes = 0
        self.virtual: VirtualCell | None = None

    @property
    def healthy(self) -> bool:
        return self.host.bad_nodes == 0

    @property
    def opportunistic(self) -> int:
        """Return the number of its leaves that opportunistic pods use."""
        return self.used.get(OPPORTUNISTIC_PRIORITY, 0)

    @property
    def state(self) -> CellState:
        """Return the state combined from the children's; a leaf's state follows from its user and claimant."""
        return combined(child.state for child in self.children)

    def count(self, priority: int, change: int) -> None:
        before = self.opportunistic
        super().count(priority, change)
        if priority == OPPORTUNISTIC_PRIORITY:
            self.chain.count_opportunistic(self, before)

    def ancestor(self, level: int) -> PhysicalCell:
        """Return the ancestor at that level, or itself. Raises LookupError above the top."""
        cell = self
        while cell.level < level:
            if cell.parent is None:
                raise LookupError(f"{self.address} has no ancestor at level {level}")
            cell = cell.parent
        return cell

    def upward(self) -> Iterator[PhysicalCell]:
        """Yield the cell and its ancestors."""
        cell: PhysicalCell | None = self
        while cell is not None:
            yield cell
            cell = cell.parent

    def leaf_cells(self) -> Iterator[PhysicalLeaf]:
        """Yield its leaves, in tree order."""
        for child in self.children:
            yield from child.leaf_cells()


class PhysicalLeaf(PhysicalCell):
    """One device. `device`: its index on the node."""

    __slots__ = ("claimant", "device", "user")

    def __init__(self, chain: Chain, index: int, address: str, device: int) -> None:
        super().__init__(chain, 1, index, address, 1)
        self.device = device
        self.user: AffinityGroup | None = None
        self.claimant: AffinityGroup | None = None

    @property
    def state(self) -> CellState:
        if self.claimant is not None:
            return CellState.RESERVED if self.user is None else CellState.RESERVING
        return CellState.FREE if self.user is None else CellState.USED

    def leaf_cells(self) -> Iterator[PhysicalLeaf]:
        yield self


class VirtualCell(Cell):
    """A cell of a quota. `preassigned`: the top of its tree. `physical`: the physical cell bound to it.

    `number`: position of an unpinned preassigned cell among those of its level in its chain and VC.
    """

    __slots__ = ("children", "number", "parent", "physical", "pinned_id", "preassigned", "virtual_cluster")

    def __init__(
        self, virtual_cluster: VirtualCluster, chain: Chain, level: int, address: str, leaves: int, pinned_id: str
    ) -> None:
        super().__init__(chain, level, address, leaves)
        self.virtual_cluster = virtual_cluster
        self.pinned_id = pinned_id
        self.number = -1
        self.preassigned: VirtualCell = self
        self.parent: VirtualCell | None = None
        self.children: tuple[VirtualCell, ...] = ()
        self.physical: PhysicalCell | None = None

    @property
    def healthy(self) -> bool:
        """Return whether the bound physical cell, its own or that of an ancestor on the same node, is healthy; True if
        unbound.
        """
        cell: VirtualCell | None = self
        while cell is not None and cell.level <= self.chain.topology.node_level:
            if cell.physical is not None:
                return cell.physical.healthy
            cell = cell.parent
        return self.physical is None or self.physical.healthy

    @property
    def host(self) -> VirtualCell:
        """Return its node-level ancestor, or the preassigned cell if that is smaller. A cell above them
        returns itself.
        """
        cell = self
        while cell.level < cell.chain.topology.node_level and cell.parent is not None:
            cell = cell.parent
        return cell

    def upward(self) -> Iterator[VirtualCell]:
        """Yield the cell and its ancestors."""
        cell: VirtualCell | None = self
        while cell is not None:
            yield cell
            cell = cell.parent

    def leaf_cells(self) -> Iterator[VirtualCell]:
        """Yield its leaves, in tree order."""
        if not self.children:
            yield self
        for child in self.children:
            yield from child.leaf_cells()


class Key(NamedTuple):
    """A bucket: lower ranks are preferred. `available`: leaves that a request may use."""

    rank: int
    second: int
    available: int


class Ranking(Protocol):
    """The preference of one kind of request among units."""

    def key(self, cell: Cell) -> Key:
        """Return the bucket of a unit."""

    def after(self, key: Key, taken: int) -> Key:
        """Return the bucket of a unit after taking `taken` more leaves."""


class TightestFit:
    """For guaranteed requests: prefers the unit with the fewest leaves left, then the fewest leaves to preempt.

    Leaves of a priority below `threshold` are available; with -1 only the free ones.
    """

    def __init__(self, threshold: int) -> None:
        self._threshold = threshold

    def key(self, cell: Cell) -> Key:
        kept = preempted = 0
        for priority, count in cell.used.items():
            if priority < self._threshold:
                preempted += count
            else:
                kept += count
        available = cell.leaves - kept
        return Key(available, preempted, available)

    def after(self, key: Key, taken: int) -> Key:
        available = key.available - taken
        return Key(available, min(key.second, available), available)


class OpportunisticTogether:
    """For opportunistic requests: prefers units with most opportunistic and fewest guaranteed leaves. Uses free leaves
    only.
    """

    def key(self, cell: Cell) -> Key:
        opportunistic = cell.used.get(OPPORTUNISTIC_PRIORITY, 0)
        guaranteed = sum(count for priority, count in cell.used.items() if priority >= MIN_GUARANTEED_PRIORITY)
        return Key(-opportunistic, guaranteed, cell.leaves - opportunistic - guaranteed)

    def after(self, key: Key, taken: int) -> Key:
        return Key(key.rank - taken, key.second, key.available - taken)


class UnitIndex:
    """Units by bucket. Callers must not change it, but may copy `buckets` for a draft.

    `stale`: units changed since `catch_up`.
    """

    def __init__(self, ranking: Ranking, cells: Sequence[Cell]) -> None:
        self.ranking = ranking
        self.keys = [ranking.key(cell) for cell in cells]
        self.stale: set[int] = set()
        self._cells = cells
        positions: dict[Key, list[int]] = {}
        for unit, key in enumerate(self.keys):
            positions.setdefault(key, []).append(unit)
        self.buckets = {key: mask_of(units, len(cells)) for key, units in positions.items()}

    def catch_up(self) -> None:
        """Move changed units to their current buckets."""
        for unit in self.stale:
            old, new = self.keys[unit], self.ranking.key(self._cells[unit])
            if old != new:
                self.keys[unit] = new
                move_bit(self.buckets, 1 << unit, old, new)
        self.stale.clear()


C = TypeVar("C", bound=Cell)

_KEPT_INDEXES = 32  # of units of one quota: one per recently preempting priority


class Units(Generic[C]):
    """The units of a virtual cluster in one chain, of a pinned cell, or the nodes of a chain."""

    def __init__(self) -> None:
        self.cells: list[C] = []
        self._bad = 0
        self._changed: set[int] = set()
        self._indexes: dict[int, UnitIndex] = {}  # by threshold, least recently used first
        self._opportunistic: UnitIndex | None = None

    def add(self, cell: C) -> None:
        """Add a unit; only while the trees are built."""
        cell.units, cell.unit = self, len(self.cells)
        self.cells.append(cell)
        self._changed.add(cell.unit)

    def touch(self, unit: int) -> None:
        self._changed.add(unit)

    @property
    def bad(self) -> int:
        """Return the mask of units whose hardware is known to be bad."""
        self._refresh()
        return self._bad

    def for_guaranteed(self, threshold: int) -> UnitIndex:
        """Return the index for a request that may take leaves used below `threshold` (-1: free leaves only)."""
        self._refresh()
        index = self._indexes.pop(threshold, None) or UnitIndex(TightestFit(threshold), self.cells)
        index.catch_up()
        self._indexes[threshold] = index
        if len(self._indexes) > _KEPT_INDEXES:
            del self._indexes[next(iter(self._indexes))]
        return index

    def for_opportunistic(self) -> UnitIndex:
        self._refresh()
        if self._opportunistic is None:
            self._opportunistic = UnitIndex(OpportunisticTogether(), self.cells)
        self._opportunistic.catch_up()
        return self._opportunistic

    def _refresh(self) -> None:
        if not self._changed:
            return
        if len(self._changed) == len(self.cells):
            self._bad = mask_of((unit for unit, cell in enumerate(self.cells) if not cell.healthy), len(self.cells))
        else:
            for unit in self._changed:
                bit = 1 << unit
                self._bad = self._bad & ~bit if self.cells[unit].healthy else self._bad | bit
        for index in self._indexes.values():
            index.stale |= self._changed
        if self._opportunistic is not None:
            self._opportunistic.stale |= self._changed
        self._changed.clear()


def mask_of(positions: Iterable[int], length: int) -> int:
    """Return the mask with these positions set, in one pass."""
    octets = bytearray(length // 8 + 1)
    for position in positions:
        octets[position >> 3] |= 1 << (position & 7)
    return int.from_bytes(octets, "little")


def move_bit(buckets: dict[Key, int], bit: int, old: Key, new: Key) -> None:
    """Move a unit between buckets; empty buckets are dropped."""
    left = buckets[old] & ~bit
    if left:
        buckets[old] = left
    else:
        del buckets[old]
    buckets[new] = buckets.get(new, 0) | bit
