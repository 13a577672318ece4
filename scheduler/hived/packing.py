"""Which unit each pod of a gang goes to. Pure: works on a copy of the buckets of one index.

Largest pods first, each into the unit that the index's ranking prefers among those it fits in. Where that fails for a
gang of mixed sizes, a bounded search over how much is available (not over units) finds the packings that it misses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from scheduler.hived.units import Key, UnitIndex, move_bit

_SEARCH_STEPS = 2000  # some 20 ms; gangs are small and sizes few, so that most searches end long before
_SEARCHED_PODS = 64


class Packing:
    """One attempt. `excluded`: mask of units that can't be used; `allowed` is asked once for each other one."""

    def __init__(self, index: UnitIndex, excluded: int, allowed: Callable[[int], bool] | None = None) -> None:
        self._index = index
        self._excluded = excluded
        self._allowed = allowed
        self._known = 0

    def pack(self, sizes: Sequence[int]) -> list[int] | None:
        """The unit of each pod, None if they don't all fit. `sizes`: leaves per pod, descending."""
        units = self._take(sizes, [None] * len(sizes))
        if units is None and 1 < len(sizes) <= _SEARCHED_PODS and sizes[0] != sizes[-1]:
            plan = fit_exactly(tuple(sizes), self._availability(len(sizes)))
            units = plan and self._take(sizes, plan)
        return units

    def _take(self, sizes: Sequence[int], wanted: Sequence[int | None]) -> list[int] | None:
        """Units one after another, as the ranking prefers; `wanted`: exactly so much must be available in the unit."""
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

    def _availability(self, most: int) -> Counter[int]:
        """How many usable units have how much available, counting at most `most` of each."""
        available: Counter[int] = Counter()
        for key, bucket in self._index.buckets.items():
            candidates = bucket & ~self._excluded
            while candidates and available[key.available] < most:
                bit = candidates & -candidates
                available[key.available] += self._usable(bit) is not None
                candidates ^= bit
        return available


def fit_exactly(sizes: tuple[int, ...], available: Counter[int]) -> list[int] | None:
    """For each pod, how much is available in the unit that it goes to; None if no packing is found.

    Complete for what it visits in its bound of steps: a gang that needs more is told to wait.
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
