"""Units: the cells that pods are packed into, found by fit without scanning all of them.

A unit is a node-level cell, or a preassigned cell below node level: a pod has all its leaves in one unit. An index
sorts units into buckets by the criteria of one kind of request; a bucket is a bit mask, so finding the first fitting
unit in configuration order takes a few operations on integers. Changed units move to their buckets when an index is
next used: most indexes are used rarely.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from scheduler.hived.cells.cells import Cell
from scheduler.hived.contract.names import MIN_GUARANTEED_PRIORITY, OPPORTUNISTIC_PRIORITY

C = TypeVar("C", bound=Cell)

_KEPT_INDEXES = 32  # of units of one quota: one per recently preempting priority


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
