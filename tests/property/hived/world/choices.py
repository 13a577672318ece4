"""Sources of random decisions: hypothesis, a seed, or the record of an earlier run that is replayed shorter."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

from hypothesis import strategies as st

T = TypeVar("T")
Step = list[int]


class Choices(Protocol):
    """Source of decisions. Every decision is a number below a limit; 0 is the simplest choice."""

    def below(self, limit: int) -> int:
        """Return a number from 0 to `limit` - 1."""


class Drawn:
    """Decisions by hypothesis, which shrinks them."""

    def __init__(self, data: st.DataObject) -> None:
        self._data = data

    def below(self, limit: int) -> int:
        return self._data.draw(st.integers(0, limit - 1)) if limit > 1 else 0


class Seeded:
    """Decisions by a seeded generator. `record`: all decisions of the current step."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.record: Step = []

    def below(self, limit: int) -> int:
        self.record.append(int(self._rng.random() * limit))
        return self.record[-1]


class Recorded:
    """Decisions of a record; missing ones are 0."""

    def __init__(self, record: Step) -> None:
        self._left = iter(record)

    def below(self, limit: int) -> int:
        return next(self._left, 0) % limit


def pick(choices: Choices, options: Sequence[T]) -> T:
    """Return one of the options."""
    return options[choices.below(len(options))]


def one_in(choices: Choices, number: int) -> bool:
    """Return True with probability 1 / `number`."""
    return choices.below(number) == number - 1


def shuffled(choices: Choices, items: Iterable[T]) -> list[T]:
    """Return all items in any order."""
    left = list(items)
    return [left.pop(choices.below(len(left))) for _ in range(len(left))]


def subset(choices: Choices, items: Iterable[T]) -> list[T]:
    """Return some of the items, in their order."""
    return [item for item in items if not choices.below(2)]


def shrink(steps: list[Step], fails: Callable[[list[Step]], bool]) -> list[Step]:
    """Return fewer steps that still fail: the longest runs of steps are left out first, then shorter ones."""
    size = len(steps) // 2
    while size:
        start = 0
        while start < len(steps):
            shorter = steps[:start] + steps[start + size :]
            if fails(shorter):
                steps = shorter
            else:
                start += size
        size //= 2
    return steps
