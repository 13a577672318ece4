"""Scenarios 40-49: one story of preemptors that overtake each other in the pinned pair."""

from __future__ import annotations

from scheduler.hived.groups import GroupState
from tests.support.hived import Answer, Cluster
from tests.support.hived_design import FIRST, SECOND, design, on_pin

JOBS = {
    scenario: on_pin(f"g{scenario}", priority, (pods, 16), lazy=scenario not in {40, 47})
    for scenario, priority, pods in [
        (40, 1, 2),
        (41, 2, 1),
        (42, 1, 1),
        (43, 2, 1),
        (44, 2, 1),
        (45, 3, 2),
        (47, 4, 1),
        (48, 5, 2),
    ]
}


def told(last: int) -> tuple[Cluster, Answer]:
    """The cluster after scenarios 40 to `last`, and the last answer."""
    cluster = Cluster(design())
    for scenario in range(40, last + 1):
        if scenario == 46:
            cluster.delete("pod-40")
        elif scenario == 49:
            cluster.delete("pod-48")
        else:
            answer = cluster.ask(JOBS[scenario], pod=f"pod-{scenario}")
    return cluster, answer


def states(cluster: Cluster, node: str) -> tuple[set[str], set[str], set[str]]:
    """The states of a node's leaves, their users and their claimants."""
    leaves = cluster.leaves(node)
    users = {leaf.user.name for leaf in leaves if leaf.user}
    return {str(leaf.state) for leaf in leaves}, users, {leaf.claimant.name for leaf in leaves if leaf.claimant}


def test_a_gang_holds_the_places_of_pods_that_are_not_there_yet() -> None:
    """Scenario 40: one pod of two came: it has the first node, and the group holds both."""
    cluster, answer = told(40)
    assert answer.place == f"{FIRST}:0-15"
    assert states(cluster, FIRST) == states(cluster, SECOND) == ({"Used"}, {"g40"}, set())


def test_a_preemptor_claims_one_node() -> None:
    """Scenario 41: a stronger pod claims the first node and waits until its user is gone."""
    cluster, answer = told(41)
    assert answer.victims == {"pod-40"}
    assert states(cluster, FIRST) == ({"Reserving"}, {"g40"}, {"g41"})
    assert states(cluster, SECOND) == ({"Used"}, {"g40"}, set())
    assert cluster.group("g40").state == GroupState.BEING_PREEMPTED


def test_equal_priorities_do_not_preempt() -> None:
    """Scenario 42: a pod of the victim's own priority waits."""
    cluster, answer = told(42)
    assert answer.waits
    assert "g42" not in cluster.groups


def test_a_second_preemptor_claims_the_other_node() -> None:
    """Scenario 43: another stronger pod claims the second node, of the same victim."""
    cluster, answer = told(43)
    assert answer.victims == {"pod-40"}
    assert states(cluster, SECOND) == ({"Reserving"}, {"g40"}, {"g43"})


def test_nothing_is_left_to_claim() -> None:
    """Scenario 44: both nodes are claimed at the pod's own priority, so it waits."""
    cluster, answer = told(44)
    assert answer.waits
    assert "g44" not in cluster.groups


def test_a_stronger_preemptor_overrides_weaker_ones() -> None:
    """Scenario 45: a gang claims both nodes; the two weaker preemptions are cancelled."""
    cluster, answer = told(45)
    assert answer.victims == {"pod-40"}
    assert set(cluster.groups) == {"g40", "g45"}
    assert states(cluster, FIRST) == states(cluster, SECOND) == ({"Reserving"}, {"g40"}, {"g45"})


def test_claimed_cells_are_kept_for_the_claimant() -> None:
    """Scenario 46: the victim is gone: all its cells are reserved, also those of the pod that never came."""
    cluster, _ = told(46)
    assert set(cluster.groups) == {"g45"}
    assert states(cluster, FIRST) == states(cluster, SECOND) == ({"Reserved"}, set(), {"g45"})


def test_a_reservation_is_overridden() -> None:
    """Scenario 47: a still stronger pod is bound at once on a reserved node; the weaker preemption is cancelled."""
    cluster, answer = told(47)
    assert answer.place == f"{FIRST}:0-15"
    assert set(cluster.groups) == {"g47"}
    assert states(cluster, SECOND) == ({"Free"}, set(), set())


def test_a_gang_preempts_over_used_and_free_nodes() -> None:
    """Scenario 48: of the pair one node is in use and one free: both are claimed."""
    cluster, answer = told(48)
    assert answer.victims == {"pod-47"}
    assert states(cluster, FIRST) == ({"Reserving"}, {"g47"}, {"g48"})
    assert states(cluster, SECOND) == ({"Reserved"}, set(), {"g48"})


def test_a_preemptor_that_is_deleted_gives_everything_back() -> None:
    """Scenario 49: the victim has its node at its own priority again, the other node is free."""
    cluster, _ = told(49)
    assert set(cluster.groups) == {"g47"}
    assert cluster.group("g47").state == GroupState.ALLOCATED
    assert states(cluster, FIRST) == ({"Used"}, {"g47"}, set())
    assert {leaf.priority for leaf in cluster.leaves(FIRST)} == {4}
    assert states(cluster, SECOND) == ({"Free"}, set(), set())
    assert {leaf.priority for leaf in cluster.leaves(SECOND)} == {-2}
