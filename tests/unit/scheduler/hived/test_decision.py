"""A decision is applied as it was made: its annotations are written, and read only by another process."""

from __future__ import annotations

import pytest

from scheduler.hived import algorithm, contract
from scheduler.hived.cells.groups import GroupState
from scheduler.hived.errors import UserError
from store.kube.api.objects import Object
from tests.support.hived.cluster import FILTERING, Cluster, Job, snapshot
from tests.support.hived.design_cluster import P100, PIN, design
from tests.support.hived.invariants import violations

GANG = Job("gang", "VC2", 1, ((2, 2),), P100)


def test_a_decision_is_applied_without_reading_its_annotations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the first pod of a gang nor a further one has its placement parsed."""

    def fail(pod: Object) -> None:
        raise AssertionError("the placement was parsed")

    monkeypatch.setattr(algorithm, "extract_pod_bind_info", fail)
    cluster = Cluster(design())
    assert all(answer.place for answer in cluster.ask_all(GANG))
    assert violations(cluster.algorithm) == []


def test_the_pod_of_a_decision_restores_it() -> None:
    """Another process that finds any pod of the gang gives all of it the same devices."""
    cluster = Cluster(design())
    cluster.ask_all(GANG)
    for pod in cluster.bound.values():
        other = Cluster(design())
        other.recover(pod)
        assert other.places("gang") == cluster.places("gang")


def test_a_group_too_large_for_an_annotation_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its owner gets an error when it would be bound, and it can be scheduled once it fits."""
    cluster = Cluster(design())
    pod = GANG.pod("first", 2)
    cluster.announce(pod)
    before = snapshot(cluster.algorithm)
    decision = cluster.algorithm.schedule(pod, cluster.node_names, FILTERING)
    with monkeypatch.context() as limits:
        limits.setattr(contract, "MAX_ANNOTATIONS", 100)
        with pytest.raises(UserError, match="use a smaller group"):
            cluster.algorithm.commit(decision)
    assert snapshot(cluster.algorithm) == before
    assert cluster.schedule("first").place


def test_a_preemptor_whose_victims_are_gone_uses_what_it_had_claimed() -> None:
    """Its first pod turns the claims of the whole group into its devices."""
    cluster = Cluster(design())
    cluster.ask(Job("low", "VC1", 1, ((1, 16),), pinned=PIN, lazy=False), pod="victim")
    high = Job("high", "VC1", 2, ((2, 16),), pinned=PIN)
    assert cluster.ask(high, pod="first").victims == {"victim"}
    claimed = cluster.places("high")
    cluster.delete("victim")
    assert [cluster.ask(high, pod=name, phase=FILTERING).place for name in ("first", "second")] == claimed
    assert cluster.group("high").state is GroupState.ALLOCATED
    assert violations(cluster.algorithm) == []
