"""Which of the free nodes get the next pods: those with the fewest pods, names in ascending order where equal.

With a label, the values of it come first: the next pod goes to the value under which the RC has the fewest. So an RC is
spread over its racks, and the fleet's pods over its nodes.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Sequence

MAX_KNOWN = 64  # lists of nodes that were seen, remembered to skip them


class NodeLoads:
    """How many pods each node has. `first` takes time in proportion to the nodes that it has to pass over.

    A change moves its node in the order only when `first` is called next: while a pod is written, its place is planned,
    then seen to be taken, then no longer planned, and most of that cancels out.
    """

    def __init__(self, nodes: Iterable[str] = ()) -> None:
        """`nodes`: the node of each pod."""
        self._loads: Counter[str] = Counter(nodes)
        self._order = sorted((load, node) for node, load in self._loads.items())
        self._ordered: dict[str, int] = dict(self._loads)  # the load under which each node is in the order
        self._changed: set[str] = set()
        self._known: dict[int, Sequence[str]] = {}

    def change(self, node: str, number: int) -> None:
        """Count further pods on a node, or fewer."""
        self._loads[node] += number
        self._changed.add(node)

    def _sort(self) -> None:
        """Move the nodes whose load has changed to their places in the order."""
        for node in self._changed:
            load, before = self._loads[node], self._ordered.get(node)
            if load == before:
                continue
            if before is not None:
                del self._order[bisect_left(self._order, (before, node))]
            insort(self._order, (load, node))
            self._ordered[node] = load
        self._changed.clear()

    def first(
        self,
        placeable: Sequence[str],
        avoid: Container[str],
        number: int,
        *,
        value_of: Callable[[str], str] | None = None,
        has: Iterable[str] = (),
    ) -> tuple[str, ...]:
        """Return at most `number` nodes of `placeable`, which is sorted, without those in `avoid`.

        `value_of`: the value of the label by which an RC is spread, "" without it; `has`: the nodes of its pods.
        """
        if number <= 0:
            return ()
        if self._known.get(id(placeable)) is not placeable:
            for node in placeable:
                if node not in self._loads:  # it has never had a pod
                    self.change(node, 0)
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            self._known[id(placeable)] = placeable
        self._sort()
        free = (node for _, node in self._order if node not in avoid and _contains(placeable, node))
        if value_of is None:
            return tuple(node for node, _ in zip(free, range(number), strict=False))
        used, queues = Counter(map(value_of, has)), dict[str, deque[str]]()
        for node in free:
            queues.setdefault(value_of(node), deque()).append(node)
        found: list[str] = []
        while queues and len(found) < number:
            value = min(queues, key=lambda each: (used[each], self._loads[queues[each][0]], queues[each][0]))
            found.append(queues[value].popleft())
            used[value] += 1
            if not queues[value]:
                del queues[value]
        return tuple(found)


def _contains(names: Sequence[str], name: str) -> bool:
    place = bisect_left(names, name)
    return place < len(names) and names[place] == name
