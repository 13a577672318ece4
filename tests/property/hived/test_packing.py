"""A gang is placed if and only if a packing of its pods into the free leaves exists."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.hived.cluster import Cluster, Job
from tests.support.hived.design_cluster import quota, regular

SIZE = 6  # leaves of a node


@cache
def fits(sizes: tuple[int, ...], rooms: tuple[int, ...]) -> bool:
    """Return whether the sizes fit, by trying everything."""
    if not sizes:
        return True
    return any(
        room >= sizes[0] and fits(sizes[1:], tuple(sorted((*rooms[:unit], room - sizes[0], *rooms[unit + 1 :]))))
        for unit, room in enumerate(rooms)
    )


@pytest.mark.parametrize("priority", [0, -1])
@given(
    used=st.lists(st.integers(0, SIZE), min_size=1, max_size=4),
    sizes=st.lists(st.integers(1, SIZE), min_size=1, max_size=7),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_a_gang_is_placed_if_and_only_if_it_fits(priority: int, used: list[int], sizes: list[int]) -> None:
    """Guaranteed and opportunistic: the planner agrees with a search through all packings."""
    names = [f"n{node}" for node in range(len(used))]
    cluster = Cluster(regular(f"GPU {SIZE} NODE*", names, A=quota(("NODE", len(names)))))
    for node, leaves in enumerate(used):
        if leaves:
            filler = Job(f"filler{node}", "A", priority, ((1, leaves),))
            assert cluster.ask(filler, suggested=[f"n{node}"]).place
    members = tuple((sizes.count(size), size) for size in dict.fromkeys(sizes))
    answers = cluster.ask_all(Job("gang", "A", priority, members, ignore=True))
    rooms = tuple(sorted(SIZE - leaves for leaves in used))
    assert all(bool(answer.place) == fits(tuple(sorted(sizes, reverse=True)), rooms) for answer in answers)
