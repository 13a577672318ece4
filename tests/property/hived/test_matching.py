"""Matching compared with trying everything."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from scheduler.hived.planning.mapping import match

Candidates = list[list[int]]

candidates = st.lists(st.lists(st.integers(0, 5), unique=True, max_size=4), max_size=5)


def is_possible(wanted: Candidates) -> bool:
    return any(len(set(choice)) == len(wanted) for choice in itertools.product(*wanted))


@given(candidates)
def test_complete_whenever_possible(wanted: Candidates) -> None:
    """A matching is found if there is one: each node has one of its own candidates, and no two share one."""
    found = match(len(wanted), wanted)
    assert (found is not None) == is_possible(wanted)
    if found is not None:
        assert len(set(found)) == len(wanted)
        assert all(one in own for one, own in zip(found, wanted, strict=True))


@given(candidates)
def test_preferences_are_followed(wanted: Candidates) -> None:
    """If no node needs another's candidate, each has its first free one in turn."""
    greedy: list[int] = []
    for own in wanted:
        greedy += [one for one in own if one not in greedy][:1]
    if len(greedy) == len(wanted):
        assert match(len(wanted), wanted) == greedy


def test_earlier_nodes_move() -> None:
    """A node that chose first moves if it has another candidate, however long the chain of moves."""
    assert match(3, [[0, 1], [0, 2], [0]]) == [1, 2, 0]
    assert match(3, [[0, 1], [1, 2], [0]]) == [1, 2, 0]


def test_a_shortage_is_found() -> None:
    """Three can't share two, and no node can have none."""
    assert match(3, [[0, 1], [0, 1], [0, 1]]) is None
    assert match(1, [[]]) is None
    assert match(0, []) == []


def test_long_chains_do_not_overflow() -> None:
    """As many moves as there are nodes: the last one's candidate moves all others."""
    count = 3000
    assert match(count, [*([one, one + 1] for one in range(count - 1)), [0]]) == [*range(1, count), 0]
