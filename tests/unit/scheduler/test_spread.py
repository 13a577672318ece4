"""Spreading: the next pods go to the nodes with the fewest, and to the label's value under which there are fewest."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from scheduler.spread import NodeLoads

NAMES = [f"n{number}" for number in range(8)]
RACKS = {name: f"r{number % 3}" for number, name in enumerate(NAMES)}


def test_the_node_with_the_fewest_pods_is_first_and_names_decide_ties() -> None:
    loads = NodeLoads(["n1", "n1", "n2"])
    assert loads.first(("n1", "n2", "n3", "n4"), set(), 9) == ("n3", "n4", "n2", "n1")
    loads.change("n3", 2)
    assert loads.first(("n1", "n2", "n3", "n4"), {"n2"}, 2) == ("n4", "n1")
    loads.change("n3", -2)
    assert loads.first(("n2", "n3"), set(), 1) == ("n3",)


def test_a_rack_that_has_none_of_the_pods_comes_before_an_empty_node() -> None:
    loads = NodeLoads(["n2", "n2", "n5"])
    first = loads.first(tuple(NAMES), {"n0", "n1"}, 3, value_of=RACKS.__getitem__, has=["n0", "n1"])
    assert first == ("n5", "n3", "n4"), "r2 has none; then the others, one each"


@given(
    st.lists(st.tuples(st.sampled_from(NAMES), st.integers(-1, 3), st.booleans()), max_size=12),
    st.frozensets(st.sampled_from(NAMES)),
    st.frozensets(st.sampled_from(NAMES)),
    st.integers(0, 9),
)
def test_the_order_is_that_of_a_sort(
    changes: list[tuple[str, int, bool]], may: frozenset[str], avoid: frozenset[str], number: int
) -> None:
    """Whether it is asked after each change, or after several of one node that cancel out."""
    loads, counts = NodeLoads(), Counter[str]()
    placeable = tuple(sorted(may))
    for name, count, is_asked in [*changes, (NAMES[0], 0, True)]:
        loads.change(name, count)
        counts[name] += count
        if is_asked:
            expected = sorted(may - avoid, key=lambda node: (counts[node], node))[:number]
            assert loads.first(placeable, avoid, number) == tuple(expected)


@given(st.frozensets(st.sampled_from(NAMES)), st.integers(0, 8))
def test_racks_differ_by_one_pod_at_most_while_nodes_are_free(has: frozenset[str], number: int) -> None:
    free = tuple(name for name in NAMES if name not in has)
    chosen = NodeLoads().first(free, has, number, value_of=RACKS.__getitem__, has=has)
    assert len(chosen) == min(number, len(free))
    counts = Counter(RACKS[name] for name in has)
    for name in chosen:
        open_racks = {RACKS[each] for each in free if each not in chosen or each == name}
        assert counts[RACKS[name]] == min(counts[rack] for rack in open_racks | {RACKS[name]})
        counts[RACKS[name]] += 1
