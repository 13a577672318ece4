"""The witness of extenders sees what it is there to see."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from store.kube.objects import Object
from tests.support.hived_witness import History, Place, Seen

A, B = ("n1", (0, 1)), ("n2", (3,))


def pod(name: str, own: Place, *others: Place, group: str = "g", **changes: Any) -> Object:
    """A pod that was bound. Its group has its own place and `others`."""
    places = [own, *others]
    sizes = sorted({len(indices) for _, indices in places})
    members = [{"podNumber": sum(len(p[1]) == size for p in places), "leafCellNumber": size} for size in sizes]
    spec = {
        "virtualCluster": "a",
        "leafCellNumber": len(own[1]),
        "affinityGroup": {"name": group, "members": members},
    }
    info = {
        "node": own[0],
        "leafCellIsolation": list(own[1]),
        "cellChain": "HOST",
        "affinityGroupBindInfo": [
            {"podPlacements": [placement(place) for place in places if len(place[1]) == size]} for size in sizes
        ],
    }
    annotations = {
        "pod-scheduling-spec": json.dumps(spec),
        "pod-bind-info": json.dumps({**info, **changes}),
        "pod-leaf-cell-isolation": ",".join(map(str, own[1])),
    }
    named = {f"hivedscheduler.microsoft.com/{key}": value for key, value in annotations.items()}
    return {"metadata": {"name": name, "uid": name, "annotations": named}, "spec": {"nodeName": own[0]}}


def placement(place: Place) -> Object:
    node, indices = place
    types = ["HOST"] * len(indices)
    return {"physicalNode": node, "physicalLeafCellIndices": list(indices), "preassignedCellTypes": types}


def history(*pods: Object | tuple[str, None]) -> Seen:
    """What there was when the pods appeared one after the other; `(name, None)` stands for a deletion."""
    told = History()
    for each in pods:
        if isinstance(each, tuple):
            told.see(*each)
        else:
            told.see(each["metadata"]["name"], each)
    return told.seen


def ended(of: Object) -> Object:
    return of | {"status": {"phase": "Succeeded"}}


def deleting(of: Object) -> Object:
    return of | {"metadata": of["metadata"] | {"deletionTimestamp": "2020-11-25T08:00:00Z"}}


def test_a_gang_that_comes_and_goes() -> None:
    """What is held is counted; devices of pods that ended are free for others."""
    seen = history(
        pod("a", A, B), pod("b", B, A), ended(pod("a", A, B)), ("b", None), pod("c", A, group="other"), ("c", None)
    )
    assert (seen.most_held, seen.groups) == (3, {"g": 2, "other": 1})
    assert (seen.finished, seen.ended) == ({"a"}, {"b", "c"})


def test_a_pod_whose_deletion_was_asked_for() -> None:
    """It holds its devices until it has stopped, and does not count as one that was let finish."""
    seen = history(pod("a", A), deleting(pod("a", A)), ended(deleting(pod("a", A))), pod("b", A), ("a", None))
    assert (seen.finished, seen.ended) == (set(), {"a"})
    with pytest.raises(AssertionError, match="held by a and by b"):
        history(pod("a", A), deleting(pod("a", A)), pod("b", A))


def test_a_device_that_two_pods_hold() -> None:
    """Whether they are of one group or of two."""
    with pytest.raises(AssertionError, match="held by a and by b"):
        history(pod("a", A), pod("b", A))
    with pytest.raises(AssertionError, match="held by a and by b"):
        history(pod("a", A), pod("b", ("n1", (1,)), group="other"))


def test_a_place_that_two_groups_have() -> None:
    """The place of a pod that is not bound yet is its group's already."""
    with pytest.raises(AssertionError, match="is of g and of other"):
        history(pod("a", A, B), pod("c", B, group="other"))


def test_pods_of_a_group_that_disagree() -> None:
    """They tell different places of their group."""
    with pytest.raises(AssertionError, match="pods of g differ"):
        history(pod("a", A, B), pod("b", ("n2", (4,)), A))


def test_what_a_pod_holds_never_changes() -> None:
    """Nobody writes its annotations anew."""
    with pytest.raises(AssertionError, match="then"):
        history(pod("a", A), pod("a", ("n1", (2, 3))))


@pytest.mark.parametrize(
    "change",
    [
        {"node": "n9"},
        {"leafCellIsolation": [1, 0]},
        {"cellChain": ""},
        {"affinityGroupBindInfo": []},
        {"affinityGroupBindInfo": [{"podPlacements": [{"physicalNode": "n1", "physicalLeafCellIndices": [0, 1]}]}]},
        {"affinityGroupBindInfo": [{"podPlacements": [placement(A), placement(("n1", (4, 5)))]}]},
        {"more": 1},
    ],
)
def test_annotations_that_a_reader_of_hiveds_would_not_expect(change: Object) -> None:
    """Another node or order, fields missing or too many, places that are not those asked for."""
    whole = pod("a", A)
    assert history(copy.deepcopy(whole)).bound
    with pytest.raises(AssertionError):
        history(pod("a", A, **change))
