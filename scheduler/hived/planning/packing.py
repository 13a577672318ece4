"""Packing of a gang: a unit for each pod, with or without victims, and the leaves of the unit that the pod gets.

Nothing is changed: units are chosen on a copy of the buckets of one index.

Largest pods first, each into the fitting unit that the index ranks first. If that fails for a gang of mixed sizes, a
bounded search over available amounts (not over units) finds the packings that it misses.

To evict no pod, a gang is packed by the pods on the hardware of its quota: free quota does not imply free devices,
because opportunistic pods may use them. Where a bound unit has free leaves, each unbound virtual leaf in it stands for
the physical one that it would be mapped to, and counts only if no pod uses that one. An unbound unit may get any cell,
so all of its leaves count, and the mapping decides.

In its unit a pod gets leaves that are close together and leave the most usable rest. The unit is a regular tree given
by its fanouts, and sets of its leaves are bit masks. Of all choices of `count` leaves, the best, in this order,

1. lies in a cell of the lowest level,
2. takes the fewest preemptible leaves,
3. breaks the fewest cells: cells of the unit, all of whose leaves were available, of which it takes some only,
4. has the lexicographically first positions.

The first two are decided by counting: the smallest cells with enough available leaves are compared by their free ones,
and either no preemptible leaf is needed or every free one is. It remains to choose how many of the *optional* leaves,
either the free or the preemptible ones, each cell gives. The costs of 3 and 4 add up over cells: they are one integer,
broken cells above the weights of positions. The cheapest ways to take leaves of a cell follow from those of its
children (a min-plus convolution), level by level: quadratic in the leaves of a unit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from operator import mul

from scheduler.hived.cells.cells import (
    Cell,
    Key,
    PhysicalCell,
    PhysicalLeaf,
    TightestFit,
    UnitIndex,
    Units,
    VirtualCell,
    mask_of,
    move_bit,
)
from scheduler.hived.cells.chain import Chain
from scheduler.hived.contract import OPPORTUNISTIC_PRIORITY

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
            for bucket in sorted(buckets):
                if bucket.available >= size if exactly is None else bucket.available == exactly:
                    unit = self._usable(buckets[bucket])
                    if unit is not None:
                        break
            else:
                return None
            chosen.append(unit)
            key = moved.get(unit, self._index.keys[unit])
            moved[unit] = self._index.ranking.after(key, size)
            move_bit(buckets, 1 << unit, key, moved[unit])
        return chosen

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


@lru_cache(maxsize=65536)
def choose_leaves(fanouts: tuple[int, ...], free: int, preemptible: int, count: int) -> tuple[int, ...]:
    """Return the best positions of `count` leaves, ascending.

    `fanouts`: children per cell from the unit's own level down to level 2; () for a unit that is one leaf. `free`,
    `preemptible`: disjoint masks, bit 0 is the first leaf in tree order. Raises ValueError if fewer are available.
    """
    sizes = tuple(accumulate(reversed(fanouts), mul, initial=1))  # leaves of a cell of each level, from 1 for a leaf
    available = free | preemptible
    if available.bit_count() < count:
        raise ValueError(f"{count} leaves are wanted, {available.bit_count()} are available")
    level, starts = -1, list[int]()
    while not starts:  # find the lowest level with cells that have enough leaves
        level += 1
        whole = (1 << sizes[level]) - 1
        starts = [at for at in range(0, sizes[-1], sizes[level]) if (available >> at & whole).bit_count() >= count]
    taken = {start: max(0, count - (free >> start & whole).bit_count()) for start in starts}
    fewest = min(taken.values())
    required, optional = (free, preemptible) if fewest else (0, free)
    choice = _Choice(sizes, available, required, optional)
    cost = min(
        choice.cost(level, start, count) + choice.breaking_around(level, start, count)
        for start in starts
        if taken[start] == fewest
    )
    return choice.positions(cost)


@dataclass(frozen=True, slots=True)
class _Choice:
    """The choice that remains once the `required` leaves are taken. All three are masks; a cost is the sum of `_broken`
    and `_weight`, and the lowest is the best.
    """

    sizes: tuple[int, ...]
    available: int
    required: int
    optional: int

    def cost(self, level: int, start: int, count: int) -> int:
        """Return the cost of the best `count` leaves in one cell, not counting that cell as broken."""
        whole = ((1 << self.sizes[level]) - 1) << start
        costs = self._costs(level, start)
        return costs[count - (self.required & whole).bit_count()]

    def breaking_around(self, level: int, start: int, count: int) -> int:
        """Return the cost of the cells that taking `count` leaves of a cell breaks: itself and those around it."""
        cost = 0
        for size in self.sizes[level:]:
            whole = ((1 << size) - 1) << start // size * size
            if self.available & whole != whole:
                break
            cost += self._broken * (count < size)
        return cost

    def positions(self, cost: int) -> tuple[int, ...]:
        """Return the leaves that a cost consists of: its weights, below the broken cells."""
        weights = -cost & (self._broken - 1)
        last = self.sizes[-1] - 1
        return tuple(position for position in range(last + 1) if weights >> (last - position) & 1)

    @property
    def _broken(self) -> int:
        """Return the cost of breaking a cell, above all weights."""
        return 1 << self.sizes[-1]

    def _weight(self, mask: int) -> int:
        """Return the cost of leaves: of two sets, the one with the first position that they do not share is cheaper."""
        last = self.sizes[-1] - 1
        weight = 0
        while mask:
            weight -= 1 << last - ((mask & -mask).bit_length() - 1)
            mask &= mask - 1
        return weight

    def _costs(self, level: int, start: int) -> list[int]:
        """Return the lowest costs of taking 0, 1, ... optional leaves of a cell, which itself does not count
        as broken.
        """
        size = self.sizes[level]
        whole = ((1 << size) - 1) << start
        if not self.optional & whole:
            return [self._weight(self.required & whole)]
        if level <= 1:  # of a cell of leaves, the first ones are the best
            costs = [self._weight(self.required & whole)]
            optional = self.optional & whole
            while optional:
                costs.append(costs[-1] + self._weight(optional & -optional))
                optional &= optional - 1
            return costs
        step = self.sizes[level - 1]
        costs = [0]
        for at in range(start, start + size, step):
            child, whole = self._costs(level - 1, at), ((1 << step) - 1) << at
            if step > 1 and self.available & whole == whole:  # broken unless none or all of it is taken
                taken = (self.required & whole).bit_count()
                child = [cost + self._broken if 0 < taken + extra < step else cost for extra, cost in enumerate(child)]
            costs = _sum(costs, child)
        return costs


def _sum(left: list[int], right: list[int]) -> list[int]:
    """Return the min-plus convolution: the lowest cost of taking 0, 1, ... leaves of two cells together."""
    if len(right) == 1:
        return [cost + right[0] for cost in left]
    best = [left[0] + cost for cost in right]
    for shift, base in enumerate(left[1:], start=1):
        for more, cost in enumerate(right[:-1]):
            best[shift + more] = min(best[shift + more], base + cost)
        best.append(base + right[-1])
    return best
