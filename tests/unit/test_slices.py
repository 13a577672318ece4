"""Pods by type and index, from labels that anybody may have written."""

from __future__ import annotations

import pytest

from controllers.slices import filter_for_replica_type, replica_index, slices
from store.kube.objects import Object, name_of


def labelled(name: str, **labels: str) -> Object:
    return {"metadata": {"name": name, "namespace": "ns", "labels": labels}}


def test_every_index_below_the_replicas_has_a_slice() -> None:
    """An empty slice is a replica to create; several in one slice are duplicates; above are the superfluous."""
    found = slices([labelled("a", i="0"), labelled("b", i="0"), labelled("c", i="4")], 3, "i")

    assert {index: [name_of(obj) for obj in objects] for index, objects in found.items()} == {
        0: ["a", "b"],
        1: [],
        2: [],
        4: ["c"],
    }


@pytest.mark.parametrize("value", ["abc", "-1", "", "+1", " 1", "1.0", "1_0", "١", "9" * 5000])
def test_an_unusable_index_is_ignored_safely(value: str) -> None:
    """Scenario 47: no crash, no slice, and the neighbours are seen."""
    found = slices([labelled("bad", i=value), labelled("none"), labelled("good", i="1")], 0, "i")

    assert [name_of(obj) for obj in found[1]] == ["good"]
    assert len(found) == 1


def test_a_huge_index_costs_nothing() -> None:
    """Scenario 47: no list of a thousand million slices."""
    found = slices([labelled("far", i="1000000000")], 2, "i")

    assert sorted(found) == [0, 1, 1_000_000_000]


def test_replica_index_reads_decimal_numbers() -> None:
    """Leading zeros are harmless; an object without labels has no index."""
    assert replica_index(labelled("a", i="007"), "i") == 7
    assert replica_index({"metadata": {"name": "a"}}, "i") is None


def test_filter_takes_the_exact_type_in_lower_case() -> None:
    """`PS` in a spec is `ps` in labels; a type that only begins alike is another type."""
    pods = [labelled("a", t="ps"), labelled("b", t="psx"), labelled("c", t="PS"), labelled("d")]

    assert [name_of(pod) for pod in filter_for_replica_type(pods, "PS", "t")] == ["a"]
