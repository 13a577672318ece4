"""One story of preemptors that override each other in the pinned pair."""

from __future__ import annotations

from scheduler.hived.cells.groups import GroupState
from tests.support.hived.cluster import Answer, Cluster
from tests.support.hived.design_cluster import FIRST, SECOND, design, on_pin

JOBS = {
    step: on_pin(f"g{step}", priority, (pods, 16), lazy=step not in {40, 47})
    for step, priority, pods in [
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


def story(last: int) -> tuple[Cluster, Answer]:
    """Play the story up to the step `last`. Return the cluster and the last answer."""
    cluster = Cluster(design())
    for step in range(40, last + 1):
        if step == 46:
            cluster.delete("pod-40")
        elif step == 49:
            cluster.delete("pod-48")
        else:
            answer = cluster.ask(JOBS[step], pod=f"pod-{step}")
    return cluster, answer


def states(cluster: Cluster, node: str) -> tuple[set[str], set[str], set[str]]:
    """Return the states of a node's leaves, their users and their claimants."""
    leaves = cluster.leaves(node)
    users = {leaf.user.name for leaf in leaves if leaf.user}
    return {str(leaf.state) for leaf in leaves}, users, {leaf.claimant.name for leaf in leaves if leaf.claimant}


def test_a_gang_holds_the_places_of_pods_that_do_not_exist_yet() -> None:
    """One pod of two is bound: it has the first node, and the group holds both."""
    cluster, answer = story(40)
    assert answer.place == f"{FIRST}:0-15"
    assert states(cluster, FIRST) == states(cluster, SECOND) == ({"Used"}, {"g40"}, set())


def test_a_preemptor_claims_one_node() -> None:
    """A stronger pod claims the first node and waits until its user is deleted."""
    cluster, answer = story(41)
    assert answer.victims == {"pod-40"}
    assert states(cluster, FIRST) == ({"Reserving"}, {"g40"}, {"g41"})
    assert states(cluster, SECOND) == ({"Used"}, {"g40"}, set())
    assert cluster.group("g40").state == GroupState.BEING_PREEMPTED


def test_equal_priorities_do_not_preempt() -> None:
    """A pod of the victim's own priority waits."""
    cluster, answer = story(42)
    assert answer.waits
    assert "g42" not in cluster.groups


def test_a_second_preemptor_claims_the_other_node() -> None:
    """Another stronger pod claims the second node, of the same victim."""
    cluster, answer = story(43)
    assert answer.victims == {"pod-40"}
    assert states(cluster, SECOND) == ({"Reserving"}, {"g40"}, {"g43"})


def test_nothing_is_left_to_claim() -> None:
    """Both nodes are claimed at the pod's own priority, so it waits."""
    cluster, answer = story(44)
    assert answer.waits
    assert "g44" not in cluster.groups


def test_a_stronger_preemptor_overrides_weaker_ones() -> None:
    """A gang claims both nodes; the two weaker preemptions are cancelled."""
    cluster, answer = story(45)
    assert answer.victims == {"pod-40"}
    assert set(cluster.groups) == {"g40", "g45"}
    assert states(cluster, FIRST) == states(cluster, SECOND) == ({"Reserving"}, {"g40"}, {"g45"})


def test_claimed_cells_are_kept_for_the_claimant() -> None:
    """The victim is deleted: all its cells are reserved, including those of the pod that never came."""
    cluster, _ = story(46)
    assert set(cluster.groups) == {"g45"}
    assert states(cluster, FIRST) == states(cluster, SECOND) == ({"Reserved"}, set(), {"g45"})


def test_a_reservation_is_overridden() -> None:
    """A still stronger pod is bound at once on a reserved node; the weaker preemption is cancelled."""
    cluster, answer = story(47)
    assert answer.place == f"{FIRST}:0-15"
    assert set(cluster.groups) == {"g47"}
    assert states(cluster, SECOND) == ({"Free"}, set(), set())


def test_a_gang_preempts_over_used_and_free_nodes() -> None:
    """Of the pair one node is in use and one free: both are claimed."""
    cluster, answer = story(48)
    assert answer.victims == {"pod-47"}
    assert states(cluster, FIRST) == ({"Reserving"}, {"g47"}, {"g48"})
    assert states(cluster, SECOND) == ({"Reserved"}, set(), {"g48"})


def test_a_preemptor_that_is_deleted_gives_everything_back() -> None:
    """The victim has its node at its own priority again; the other node is free."""
    cluster, _ = story(49)
    assert set(cluster.groups) == {"g47"}
    assert cluster.group("g47").state == GroupState.ALLOCATED
    assert states(cluster, FIRST) == ({"Used"}, {"g47"}, set())
    assert {leaf.priority for leaf in cluster.leaves(FIRST)} == {4}
    assert states(cluster, SECOND) == ({"Free"}, set(), set())
    assert {leaf.priority for leaf in cluster.leaves(SECOND)} == {-2}
