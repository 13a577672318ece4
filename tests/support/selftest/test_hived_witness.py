"""The witness of extenders reports what it is meant to find."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from store.kube.api.objects import Object
from tests.support.extender.witness import History, Place, Seen

A, B, C, D, E = ("n1", (0, 1)), ("n2", (3,)), ("n1", (1,)), ("n2", (4,)), ("n1", (2, 3))


def pod(name: str, own: Place, *others: Place, group: str = "g", **changes: Any) -> Object:
    """Return a bound pod. Its group has its own place and `others`."""
    places = [own, *others]
    sizes = sorted({len(indices) for _, indices in places})
    members = [{"podNumber": sum(len(p[1]) == size for p in places), "leafCellNumber": size} for size in sizes]
    spec = {"virtualCluster": "a", "leafCellNumber": len(own[1]), "affinityGroup": {"name": group, "members": members}}
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
    """Return what a witness sees of pods that appear in turn; `(name, None)` is a deletion."""
    history = History()
    for each in pods:
        if isinstance(each, tuple):
            history.see(*each)
        else:
            history.see(each["metadata"]["name"], each)
    return history.seen


def ended(of: Object) -> Object:
    return of | {"status": {"phase": "Succeeded"}}


def deleting(of: Object) -> Object:
    return of | {"metadata": of["metadata"] | {"deletionTimestamp": "2020-11-25T08:00:00Z"}}


def test_a_gang_that_comes_and_goes() -> None:
    """Held devices are counted; devices of ended pods are free for other pods."""
    seen = history(
        pod("a", A, B), pod("b", B, A), ended(pod("a", A, B)), ("b", None), pod("c", A, group="other"), ("c", None)
    )
    assert (seen.most_held, seen.groups) == (3, {"g": 2, "other": 1})
    assert (seen.finished, seen.ended) == ({"a"}, {"b", "c"})


def test_a_pod_that_is_being_deleted() -> None:
    """It holds its devices until it has stopped, and does not count as finished."""
    seen = history(pod("a", A), deleting(pod("a", A)), ended(deleting(pod("a", A))), pod("b", A), ("a", None))
    assert (seen.finished, seen.ended) == (set(), {"a"})
    with pytest.raises(AssertionError, match="held by a and by b"):
        history(pod("a", A), deleting(pod("a", A)), pod("b", A))


@pytest.mark.parametrize(
    ("first", "second", "violation"),
    [
        pytest.param(pod("a", A), pod("b", A), "held by a and by b", id="a-device-twice-in-a-group"),
        pytest.param(pod("a", A), pod("b", C, group="other"), "held by a and by b", id="a-device-in-two-groups"),
        pytest.param(pod("a", A, B), pod("c", B, group="other"), "is of g and of other", id="an-unbound-pod-s"),
        pytest.param(pod("a", A, B), pod("b", D, A), "pods of g differ", id="placements-that-disagree"),
        pytest.param(pod("a", A), pod("a", E), "then", id="a-placement-that-changes"),
    ],
)
def test_violations(first: Object, second: Object, violation: str) -> None:
    """No device and no place is held twice; a placement is written once, equally for each pod of its group."""
    with pytest.raises(AssertionError, match=violation):
        history(first, second)


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
    """Another node or order, missing or extra fields, places of other sizes than requested."""
    whole = pod("a", A)
    assert history(copy.deepcopy(whole)).bound
    with pytest.raises(AssertionError):
        history(pod("a", A, **change))
