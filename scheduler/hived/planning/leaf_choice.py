"""Choice of a unit's leaves for a pod: the closest together, and those that leave the most usable rest.

A unit is a regular tree given by its fanouts, and sets of its leaves are bit masks. Of all choices of `count` leaves,
the best, in this order,

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

from dataclasses import dataclass
from functools import lru_cache


@lru_cache(maxsize=65536)
def choose_leaves(fanouts: tuple[int, ...], free: int, preemptible: int, count: int) -> tuple[int, ...]:
    """Return the best positions of `count` leaves, ascending.

    `fanouts`: children per cell from the unit's own level down to level 2; () for a unit that is one leaf. `free`,
    `preemptible`: disjoint masks, bit 0 is the first leaf in tree order. Raises ValueError if fewer are available.
    """
    sizes = _sizes(fanouts)
    level, starts = _smallest_cells(sizes, free | preemptible, count)
    whole = (1 << sizes[level]) - 1
    taken = {start: max(0, count - (free >> start & whole).bit_count()) for start in starts}
    fewest = min(taken.values())
    required, optional = (free, preemptible) if fewest else (0, free)
    choice = _Choice(sizes, free | preemptible, required, optional)
    cost = min(
        choice.cost(level, start, count) + choice.breaking_around(level, start, count)
        for start in starts
        if taken[start] == fewest
    )
    return choice.positions(cost)


@lru_cache(maxsize=256)
def _sizes(fanouts: tuple[int, ...]) -> tuple[int, ...]:
    """Return the number of leaves of a cell of each level, from 1 for a leaf to those of the unit."""
    sizes = [1]
    for fanout in reversed(fanouts):
        sizes.append(sizes[-1] * fanout)
    return tuple(sizes)


def _smallest_cells(sizes: tuple[int, ...], available: int, count: int) -> tuple[int, list[int]]:
    """Return the lowest level (from 0) with cells that have `count` available leaves, and their first positions."""
    for level, size in enumerate(sizes):
        whole = (1 << size) - 1
        starts = [at for at in range(0, sizes[-1], size) if (available >> at & whole).bit_count() >= count]
        if starts:
            return level, starts
    raise ValueError(f"{count} leaves are wanted, {available.bit_count()} are available")


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
            costs = _sum(costs, self._with_breaking(level - 1, at, self._costs(level - 1, at)))
        return costs

    def _with_breaking(self, level: int, start: int, costs: list[int]) -> list[int]:
        """Return the costs of a cell that is broken unless none or all of it is taken."""
        size = self.sizes[level]
        whole = ((1 << size) - 1) << start
        if size == 1 or self.available & whole != whole:
            return costs
        taken = (self.required & whole).bit_count()
        return [cost + self._broken if 0 < taken + extra < size else cost for extra, cost in enumerate(costs)]


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
