"""Choice of a unit for each pod of a gang, with or without victims. Pure: works on a copy of the buckets of one index.

Largest pods first, each into the fitting unit that the index ranks first. If that fails for a gang of mixed sizes, a
bounded search over available amounts (not over units) finds the packings that it misses.

To evict no pod, a gang is packed by the pods on the hardware of its quota: free quota does not imply free devices,
because opportunistic pods may use them. Where a bound unit has free leaves, each unbound virtual leaf in it stands for
the physical one that it would be mapped to, and counts only if no pod uses that one. An unbound unit may get any cell,
so all of its leaves count, and the mapping decides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence

from scheduler.hived.cells.cells import Cell, PhysicalCell, PhysicalLeaf, VirtualCell
from scheduler.hived.cells.chain import Chain
from scheduler.hived.cells.pack_index import Key, TightestFit, UnitIndex, Units, mask_of, move_bit
from scheduler.hived.contract.names import OPPORTUNISTIC_PRIORITY

_SEARCH_STEPS = 2000  # about 20 ms; gangs are small with few sizes, so most searches end long before
_SEARCHED_PODS = 64


class Packing:
    """One attempt. `excluded`: mask of unusable units; `allowed` is called once for each other unit."""

    def __init__(self, index: UnitIndex, excluded: int, allowed: Callable[[int], bool] | None = None) -> None:
        self._index = index
        self._excluded = excluded
        self._allowed = allowed
        self._known = 0

    def pack(self, sizes: Sequence[int]) -> list[int] | None:
        """Return the unit of each pod, None if they don't all fit. `sizes`: leaves per pod, descending."""
        units = self._take(sizes, [None] * len(sizes))
        if units is None and 1 < len(sizes) <= _SEARCHED_PODS and sizes[0] != sizes[-1]:
            # Count usable units by available leaves, at most one per pod of each.
            availability: Counter[int] = Counter()
            for key, bucket in self._index.buckets.items():
                candidates = bucket & ~self._excluded
                while candidates and availability[key.available] < len(sizes):
                    bit = candidates & -candidates
                    availability[key.available] += self._usable(bit) is not None
                    candidates ^= bit
            plan = fit_exactly(tuple(sizes), availability)
            units = plan and self._take(sizes, plan)
        return units

    def _take(self, sizes: Sequence[int], wanted: Sequence[int | None]) -> list[int] | None:
        """Take a unit for each pod, in ranking order; `wanted`: amount that must be available in the unit, None for
        any.
        """
        buckets, moved = dict(self._index.buckets), dict[int, Key]()
        chosen: list[int] = []
        for size, exactly in zip(sizes, wanted, strict=True):
            unit = self._first(buckets, size, exactly)
            if unit is None:
                return None
            chosen.append(unit)
            key = moved.get(unit, self._index.keys[unit])
            moved[unit] = self._index.ranking.after(key, size)
            move_bit(buckets, 1 << unit, key, moved[unit])
        return chosen

    def _first(self, buckets: dict[Key, int], size: int, exactly: int | None) -> int | None:
        for key in sorted(buckets):
            if key.available >= size if exactly is None else key.available == exactly:
                unit = self._usable(buckets[key])
                if unit is not None:
                    return unit
        return None

    def _usable(self, bucket: int) -> int | None:
        candidates = bucket & ~self._excluded
        while candidates:
            bit = candidates & -candidates
            unit = bit.bit_length() - 1
            if self._allowed is None or self._known & bit or self._allowed(unit):
                self._known |= bit
                return unit
            self._excluded |= bit
            candidates ^= bit
        return None


def fit_exactly(sizes: tuple[int, ...], available: Counter[int]) -> list[int] | None:
    """Return, for each pod, the available leaves of the unit that it goes to; None if no packing is found.

    Complete within its bound of steps: a gang that would need more must wait.
    """
    if sum(sizes) > sum(room * count for room, count in available.items()):
        return None
    dead: set[tuple[int, tuple[tuple[int, int], ...]]] = set()
    steps = 0

    def search(pod: int, rooms: Counter[int]) -> list[int] | None:
        nonlocal steps
        if pod == len(sizes):
            return []
        state = (pod, tuple(sorted((+rooms).items())))
        steps += 1
        if state in dead or steps > _SEARCH_STEPS:
            return None
        for room in sorted(rooms):
            if room >= sizes[pod] and rooms[room]:
                rest = rooms.copy()
                rest[room] -= 1
                rest[room - sizes[pod]] += 1
                tail = search(pod + 1, rest)
                if tail is not None:
                    return [room, *tail]
        dead.add(state)
        return None

    return search(0, available)


class VacantFit(TightestFit):
    """Prefers the unit with the fewest free leaves; leaves used by pods of other quotas are not free."""

    def __init__(self) -> None:
        super().__init__(OPPORTUNISTIC_PRIORITY)

    def key(self, cell: Cell) -> Key:
        key = super().key(cell)
        if not isinstance(cell, VirtualCell) or cell.physical is None:
            return key
        available = min(key.available, cell.leaves - sum(cell.physical.used.values()))
        return Key(available, 0, available)


def vacant_leaves(unit: VirtualCell) -> int:
    """Return the mask of a unit's leaves, in tree order, whose devices, bound or to be mapped, no pod uses."""
    vacant: list[bool] = []
    _collect(unit, unit.physical, vacant)
    return mask_of((position for position, is_vacant in enumerate(vacant) if is_vacant), len(vacant))


def _collect(cell: VirtualCell, physical: PhysicalCell | None, vacant: list[bool]) -> None:
    if not cell.children:
        vacant.append(not isinstance(physical, PhysicalLeaf) or physical.user is None)
        return
    others = [] if physical is None else [child for child in physical.children if child.virtual is None]
    unbound = iter(sorted(others, key=lambda child: child.opportunistic))  # in the order of `Mapping`
    for child in cell.children:
        _collect(child, child.physical or next(unbound, None), vacant)


def vacant_devices(chain: Chain) -> int:
    """Return the number of devices of a chain that no pod uses and no gang has claimed."""
    return sum(cell.leaves - sum(cell.used.values()) for cell in chain.levels[-1])


def competitors(units: Units[VirtualCell], chosen: Collection[int], displacing: Sequence[int]) -> int:
    """Return the mask of units to exclude because, of the `chosen` units, those of `displacing` displaced pods.

    Excluded are the displacing units, and the unbound units that were not chosen but compete with a displacing one for
    the same physical cells. The mapping takes the emptiest cells first.
    """
    taken = frozenset(chosen)
    pools = {pool for unit in displacing if (pool := _pool(units.cells[unit])) is not None}
    rivals = (unit for unit, cell in enumerate(units.cells) if unit not in taken and _pool(cell) in pools)
    return mask_of((*displacing, *rivals), len(units.cells))


def _pool(unit: VirtualCell) -> VirtualCell | int | None:
    """Return what identifies the physical cells among which an unbound unit is mapped: the nearest bound cell above it,
    or else the level of its preassigned cell. Return None for a bound unit.
    """
    if unit.physical is not None:
        return None
    cell = unit
    while cell.parent is not None and cell.physical is None:
        cell = cell.parent
    return cell if cell.physical is not None else cell.level
