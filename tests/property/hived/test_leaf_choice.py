"""The choice of leaves compared with trying every choice."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from scheduler.hived.planning.packing import choose_leaves

Choice = tuple[int, ...]

fanouts = st.sampled_from(
    [(), (1,), (2,), (5,), (2, 2), (3, 2), (2, 3), (1, 4), (2, 2, 2), (3, 2, 2), (2, 1, 3), (2, 2, 3)]
)


@st.composite
def questions(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int, int]:
    """Draw a unit, its free and preemptible leaves and a number of available leaves."""
    unit = draw(fanouts)
    states = draw(
        st.lists(st.sampled_from(["free", "preemptible", "used"]), min_size=(n := math.prod(unit)), max_size=n)
    )
    masks = [sum(1 << at for at, state in enumerate(states) if state == kind) for kind in ("free", "preemptible")]
    available = sum(state != "used" for state in states)
    return unit, masks[0], masks[1], draw(st.integers(min(1, available), available))


def cells(unit: tuple[int, ...]) -> list[list[set[int]]]:
    """Return the leaves of every cell, by level from the leaves upward."""
    size, total = 1, math.prod(unit)
    levels = [[{at} for at in range(total)]]
    for fanout in reversed(unit):
        size *= fanout
        levels.append([set(range(at, at + size)) for at in range(0, total, size)])
    return levels


def rank(unit: tuple[int, ...], free: int, preemptible: int, choice: Choice) -> tuple[int, int, int, Choice]:
    """Return the criteria that the choice minimises, by definition."""
    taken, available = set(choice), set(members(free | preemptible))
    level = next(level for level, row in enumerate(cells(unit)) for cell in row if taken <= cell)
    every = itertools.chain.from_iterable(cells(unit))
    broken = sum(cell <= available and bool(cell & taken) and not cell <= taken for cell in every)
    return level, len(taken & set(members(preemptible))), broken, choice


def members(mask: int) -> Iterable[int]:
    return (at for at in range(mask.bit_length()) if mask >> at & 1)


@given(questions())
@example(((2, 2, 2), 0b11110001, 0, 3))
def test_no_choice_is_better(question: tuple[tuple[int, ...], int, int, int]) -> None:
    """The choice is minimal by level, preemptible leaves, broken cells and positions, in this order."""
    unit, free, preemptible, count = question
    every = itertools.combinations(members(free | preemptible), count)
    assert choose_leaves(*question) == min(every, key=lambda choice: rank(unit, free, preemptible, choice))


@given(questions(), st.integers(1, 3))
def test_too_few_leaves(question: tuple[tuple[int, ...], int, int, int], more: int) -> None:
    """More leaves than are available can't be chosen."""
    unit, free, preemptible, _ = question
    with pytest.raises(ValueError, match="are available"):
        choose_leaves(unit, free, preemptible, (free | preemptible).bit_count() + more)


@pytest.mark.parametrize(
    ("unit", "free", "preemptible", "count", "expected"),
    [
        ((2, 2, 2), 0b11111111, 0, 2, (0, 1)),
        ((2, 2, 2), 0b11110110, 0, 1, (1,)),
        ((2, 2), 0b1011, 0, 1, (3,)),
        ((2, 2, 2), 0b11110001, 0, 2, (4, 5)),
        ((2, 2, 2), 0b11110001, 0, 3, (4, 5, 6)),
        ((2, 2, 2), 0b11110101, 0, 2, (4, 5)),
        ((2, 2, 2), 0b11010101, 0, 2, (6, 7)),
        ((2, 2, 2), 0b00010110, 0, 3, (1, 2, 4)),
        ((2, 2), 0b0010, 0b1101, 2, (0, 1)),
        ((4,), 0b1000, 0b0111, 2, (0, 3)),
        ((2, 2, 2), 0b01110101, 0, 5, (0, 2, 4, 5, 6)),
        ((2, 2, 2, 2), 0xFFFF, 0, 7, (0, 1, 2, 3, 4, 5, 6)),
        ((), 1, 0, 1, (0,)),
    ],
)
def test_choices(unit: tuple[int, ...], free: int, preemptible: int, count: int, expected: Choice) -> None:
    """Close together first; then free leaves; then those that leave whole cells unbroken; then the first positions."""
    assert choose_leaves(unit, free, preemptible, count) == expected


@pytest.mark.parametrize("unit", [(22,), (64,), (2, 2, 2, 2, 2, 2), (4, 4, 4)])
def test_the_choice_is_not_exponential(unit: tuple[int, ...]) -> None:
    """Every other leaf is free, and half of those are chosen; trying every choice of 16 among 32 would not end."""
    leaves = math.prod(unit)
    free = sum(1 << position for position in range(0, leaves, 2))
    assert choose_leaves(unit, free, 0, leaves // 4) == tuple(range(0, leaves, 2))[: leaves // 4]
