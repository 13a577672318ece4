"""The order in which the fair keys of one resource are due, kept up to date key by key.

The model: a lane's *turn* is the water level at which its key's share covers one unit more, then the age of its oldest
ticket. Turns stand in a heap per priority. Grants, tickets and weights only mark their key; its lanes get new turns
when the order is asked for, and former ones are dropped as they come up. So a decision costs time in proportion to what
has changed since the last one and to the lanes that are held back before the first that is not, not to all lanes.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Generator
from itertools import count
from typing import Generic, Protocol, TypeVar

Turn = tuple[float, str, str]  # level, age, token


class Lane(Protocol):
    """Tickets that differ only in age. `turn`: its place in the order, None before it has one."""

    turn: Turn | None

    def __len__(self) -> int:
        """Return the number of tickets."""

    def first(self) -> tuple[str, str]:
        """Return the age and the token of the oldest ticket."""


L = TypeVar("L", bound=Lane)


class Turns(Generic[L]):
    """The lanes by priority, and the weights of their keys.

    `weight(key)` and `used(key)`: the key's weight, and the units that it holds; `lives(key)`: it holds or waits. Call
    `mark` whenever one of these, or a lane of the key, has changed.
    """

    def __init__(
        self, weight: Callable[[str], float], used: Callable[[str], int], lives: Callable[[str], bool]
    ) -> None:
        self._weight, self._used, self._lives = weight, used, lives
        self._heaps: dict[int, list[tuple[Turn, int, L]]] = {}
        self._lanes: dict[str, list[tuple[int, L]]] = {}
        self._sizes: Counter[int] = Counter()  # lanes per priority
        self._marked: dict[str, None] = {}
        self._weights: dict[str, float] = {}
        self._distinct: Counter[float] = Counter()
        self._total = 0.0
        self._ticks = count()

    def add(self, key: str, priority: int, lane: L) -> None:
        """Add a lane of the key."""
        self._lanes.setdefault(key, []).append((priority, lane))
        self._sizes[priority] += 1

    def drop(self, key: str, priority: int, lane: L) -> None:
        """Remove a lane that has no tickets any more."""
        self._lanes[key].remove((priority, lane))
        if not self._lanes[key]:
            del self._lanes[key]
        self._sizes[priority] -= 1

    def mark(self, key: str) -> None:
        """Note that the key's units, weight or lanes have changed."""
        self._marked[key] = None

    def mark_all(self) -> None:
        """Note that any weight may have changed."""
        self._marked.update(dict.fromkeys((*self._lanes, *self._weights)))

    def in_order(self, priority: int) -> Generator[L, None, None]:
        """Yield the lanes of a priority, in turn. Nothing may change until the caller closes the iterator."""
        self._refresh()
        heap = self._heaps.get(priority, [])
        taken: list[tuple[Turn, int, L]] = []
        try:
            while heap:
                entry = heapq.heappop(heap)
                turn, _, lane = entry
                if len(lane) and lane.turn == turn and not (taken and taken[-1][2] is lane):
                    taken.append(entry)
                    yield lane
        finally:
            for entry in taken:
                heapq.heappush(heap, entry)

    def is_below(self, key: str, used: int, units: int) -> bool:
        """Return True if the key, first in turn and holding `used`, certainly holds less than its share of `units` in
        all. False: the shares have to be computed."""
        return len(self._distinct) == 1 or used / self._weights[key] * self._total < units * (1 - 1e-6)

    def _refresh(self) -> None:
        marked, self._marked = self._marked, {}
        for key in marked:
            former = self._weights.pop(key, None)
            if former is not None:
                self._total -= former
                self._distinct[former] -= 1
                if not self._distinct[former]:
                    del self._distinct[former]
            if self._lives(key):
                weight = self._weights[key] = self._weight(key)
                self._total += weight
                self._distinct[weight] += 1
            if not self._weights:
                self._total = 0.0
            for priority, lane in self._lanes.get(key, ()):
                turn = ((self._used(key) + 1) / self._weights[key], *lane.first())
                if turn == lane.turn:
                    continue
                lane.turn = turn
                heap = self._heaps.setdefault(priority, [])
                heapq.heappush(heap, (turn, next(self._ticks), lane))
                if len(heap) > 2 * self._sizes[priority] + 64:  # most of it is former turns
                    heap[:] = {id(entry[2]): entry for entry in heap if entry[2].turn == entry[0]}.values()
                    heapq.heapify(heap)
