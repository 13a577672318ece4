"""Explanations: the reason, what excluded each cell, and the victims, computed by the planner without changes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest

from scheduler.hived.algorithm import SchedulingPhase
from scheduler.hived.inspection.explain import PodExplanation, explain
from tests.support.hived.cluster import Cluster, Job, pod_object, snapshot
from tests.support.hived.design_cluster import CT1, DGX2, P100, PIN, design, played


def explained(cluster: Cluster, job: Job, leaves: int, suggested: Collection[str] | None = None) -> PodExplanation:
    """Return the explanation of a job's new pod, after checking that explaining changed nothing."""
    before = snapshot(cluster.algorithm)
    found = explain(cluster.algorithm, job.pod("asked", leaves), suggested)
    assert snapshot(cluster.algorithm) == before
    return found


def test_a_waiting_pod_s_explanation_excludes_each_cell() -> None:
    """Chain by chain, in scheduling order: the quota, and the number and reasons of excluded cells."""
    found = explained(played(19), Job("new", "VC1", 0, ((3, 16),)), 16)
    assert (found.verdict, found.places, found.victims) == ("wait", [], [])
    assert [chain.chain for chain in found.chains] == ["DGX2-V100-NODE", "4-DGX2-V100-NODE", "3-DGX2-V100-NODE"]
    nodes, pairs, _ = found.chains
    assert nodes.scope == "quota of VC1: 2 DGX2-V100-NODE"
    assert [(each.cells, each.examples) for each in nodes.excluded] == [
        (1, ["VC1/4 on 0.0.1.0 (6 of 16 left; used by g1, g2, g3)"])
    ]
    assert (pairs.usable_cells, pairs.excluded[0].cells, len(pairs.excluded[0].examples)) == (0, 4, 3)


def test_hints_are_true() -> None:
    """A pod with the hinted priority gets the hinted result."""
    cluster = played(19)
    higher, opportunistic = explained(cluster, Job("new", "VC1", 0, ((3, 16),)), 16).hints
    assert higher == "with priority 2 it would take the place of g14, g12"
    assert opportunistic == "as an opportunistic pod (priority -1) it would run now, on 0.0.2.0, 0.0.2.1, 0.0.2.2"
    cluster.ask(Job("new", "VC1", 2, ((3, 16),), lazy=False), pod="higher")
    assert {name for name, group in cluster.groups.items() if group.lazy_preemption} >= {"g12", "g14"}
    nodes = [cluster.ask(Job("other", "VC1", -1, ((3, 16),)), pod=f"other-{number}").node for number in range(3)]
    assert sorted(nodes) == ["0.0.2.0", "0.0.2.1", "0.0.2.2"]


def test_victims_are_named() -> None:
    """With tenant, priority, pods and their nodes; the scheduler then names the same victims."""
    cluster = played(19)
    job = Job("new", "VC2", 2, ((1, 2),), leaf_type=CT1)
    found = explained(cluster, job, 2)
    assert found.verdict == "preempt"
    (victim,) = found.victims
    assert (victim.group, victim.virtual_cluster, victim.priority, victim.downgraded) == ("g19", "VC2", 1, False)
    assert victim.pods == ["test/pod-19 on 0.0.0.1"]
    assert cluster.ask(job, 2).victims == {"pod-19"}


def test_a_group_that_only_loses_its_quota_is_distinguished() -> None:
    """Lazy preemption evicts no pod."""
    cluster = played(18)
    found = explained(cluster, Job("new", "VC2", 1, ((1, 2),), leaf_type=CT1), 2)
    assert (found.verdict, [(victim.group, victim.downgraded) for victim in found.victims]) == ("bind", [("g18", True)])


def test_bad_and_unsuggested_nodes_are_separate_reasons() -> None:
    """A pinned pair with a bad node and an unsuggested one."""
    cluster = Cluster(design())
    cluster.ask(Job("first", "VC1", 5, ((2, 16),), pinned=PIN), pod="first-0")
    cluster.ask(Job("first", "VC1", 5, ((2, 16),), pinned=PIN), pod="first-1")
    cluster.break_("0.0.3.0")
    found = explained(cluster, Job("new", "VC1", 6, ((1, 16),), pinned=PIN), 16, suggested=["0.0.3.0"])
    (chain,) = found.chains
    assert chain.scope == f"pinned cell {PIN} of VC1"
    assert {each.reason for each in chain.excluded} == {"its node is bad", "kube-scheduler does not suggest its node"}


def test_a_group_that_has_its_places() -> None:
    """Its other pods go to the group's places, and the free ones are named."""
    cluster = played(5)
    found = explained(cluster, Job("g5", "VC1", 1, ((2, 16),), DGX2, pinned=PIN), 16)
    assert (found.verdict, [place.partition(":")[0] for place in found.places]) == ("bind", ["0.0.3.1"])


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, "affinity group pair (2x16) already has all its pods of 16 leaf cells"),
        ({"priority": 2}, "priority 2 is not that of the other pods of affinity group pair, 1"),
        ({"leaf_type": DGX2}, "leafCellType DGX2-V100 is not that of the other pods of affinity group pair, none"),
    ],
)
def test_a_pod_that_contradicts_its_group_is_refused(changes: dict[str, Any], why: str) -> None:
    """The explanation is the error for kube-scheduler, with both values as written in a pod, and promises no place. So
    it is for a pod more than the group's members.
    """
    cluster = Cluster(design())
    job = Job("pair", "VC1", 1, ((2, 16),), pinned=PIN)
    for _ in range(1 if changes else 2):
        cluster.ask(job, 16)
    found = explained(cluster, replace(job, **changes), 16)
    assert (found.verdict, found.summary.partition(";")[0]) == ("refused", why)


def test_a_group_that_claims_places_waits_for_their_users() -> None:
    """The remaining users are named; the explanation of the victims' further pods names the preemptor."""
    cluster = played(10)
    found = explained(cluster, Job("g10", "VC1", 2, ((2, 16),), DGX2, pinned=PIN), 16)
    assert (found.verdict, [victim.group for victim in found.victims]) == ("preempt", ["g5"])
    victim = explained(cluster, Job("g5", "VC1", 1, ((2, 16),), DGX2, pinned=PIN), 16)
    assert (victim.verdict, "preempted by g10" in victim.summary) == ("wait", True)


def test_all_that_preempt_a_group_are_named() -> None:
    """Each preemptor is named once, in the order of the places that they claim."""
    cluster = Cluster(design())
    victim = Job("victim", "VC1", 1, ((2, 16),), pinned=PIN, lazy=False)
    cluster.ask(victim, 16)
    for name in ("one", "other"):
        cluster.ask(Job(name, "VC1", 2, ((1, 16),), pinned=PIN), 16)
    assert "preempted by one, other:" in explained(cluster, victim, 16).summary


def test_an_invalid_request_is_refused_with_its_error() -> None:
    """The message is the same as for kube-scheduler."""
    cluster = played(0)
    assert explain(cluster.algorithm, pod_object("bare")).verdict == "refused"
    found = explained(cluster, Job("new", "VC9", 0), 1)
    assert (found.verdict, "there is no virtual cluster 'VC9'" in found.summary) == ("refused", True)


def test_explanations_match_decisions() -> None:
    """At every step of the longest story, verdict and place are those of the decision that follows."""
    cluster = played(0)
    for job, leaves in [
        (Job("a", "VC1", 0), 1),
        (Job("b", "VC1", 2, ((1, 8),)), 8),
        (Job("c", "VC2", 1, ((1, 7), (1, 5))), 7),
        (Job("d", "VC1", -1, ((2, 16),)), 16),
        (Job("e", "VC2", 1, ((3, 8),), leaf_type="DGX1-P100"), 8),
    ]:
        found = explained(cluster, job, leaves)
        done = cluster.ask(job, leaves, phase=SchedulingPhase.FILTERING)
        assert found.verdict == ("wait" if done.waits else "bind"), job.name
        if not done.waits:
            assert f"{done.node}: {','.join(map(str, done.devices))}" in found.places


@pytest.mark.parametrize(
    ("job", "never"),
    [
        (Job("new", "VC2", 0, ((3, 8),), leaf_type=P100), True),  # the quota is 2 nodes and 2 sockets
        (Job("new", "VC2", 0, ((2, 8),), leaf_type=P100), False),
        (Job("new", "VC2", 0, ((2, 8), (2, 4)), leaf_type=P100), False),
        (Job("new", "VC2", 0, ((2, 8), (3, 4)), leaf_type=P100), True),
        (Job("new", "VC1", -1, ((1, 17),), leaf_type=DGX2), True),
        (Job("new", "VC1", -1, ((1, 16),), leaf_type=DGX2), False),
    ],
)
def test_a_request_that_can_never_fit(job: Job, never: bool) -> None:
    """Its pods would wait forever; a request that only waits for other pods, or for nodes, has no such note."""
    cluster = Cluster(design(), healthy=False)
    (chain, *_) = explained(cluster, job, job.members[0][1]).chains
    assert ("not even when it is empty: ask for less" in chain.outcome) is never


def test_groups_that_hold_cells_without_running_are_shown() -> None:
    """A gang holds its places from its first pod on; a claimant holds them before it has any pod."""
    cluster = Cluster(design())
    cluster.ask(Job("gang", "VC1", 5, ((2, 16),), pinned=PIN, lazy=False), 16)
    asked = Job("new", "VC1", 5, ((1, 16),), pinned=PIN)
    (chain,) = explained(cluster, asked, 16).chains
    assert "used by gang [1 of 2 pods missing])" in chain.excluded[0].examples[0]
    cluster.ask(Job("boss", "VC1", 9, ((2, 16),), pinned=PIN), 16)
    (chain,) = explained(cluster, asked, 16).chains
    assert "used by boss [waits for its victims])" in chain.excluded[0].examples[0]
