"""Scenarios 1-20: one story of guaranteed, opportunistic, pinned, downgraded and preempting groups, step by step.

Each test plays the steps before its own on a new cluster, then asks for its own pod. Where the reference's outcome
depends on the order of its lists, any equivalent outcome is accepted.
"""

from __future__ import annotations

from scheduler.hived.groups import GroupState
from tests.support.hived import Answer, Cluster
from tests.support.hived_design import JOBS, P100_DEVICES, PODS, played, pod_of

CT1_NODES = {"0.0.0.0", "0.0.0.1"}  # The third CT1 node has a pinned leaf, so it can't be had whole.


def step(scenario: int) -> tuple[Cluster, Answer]:
    """The cluster after this scenario, and what was answered in it."""
    cluster = played(scenario - 1)
    job, leaves = PODS[scenario]
    return cluster, cluster.ask(JOBS[job], leaves, pod=pod_of(scenario))


def test_the_first_leaf() -> None:
    """Scenario 1: a guaranteed pod of one leaf gets the first leaf of the first chain."""
    assert step(1)[1].place == "0.0.1.0:0"


def test_a_buddy_leaf() -> None:
    """Scenario 2: the next single leaf is the buddy of the first: no pair is broken without need."""
    assert step(2)[1].place == "0.0.1.0:1"


def test_no_preemption_where_leaves_are_free() -> None:
    """Scenario 3: eight leaves of a higher priority take the free half of the node and disturb nobody."""
    cluster, answer = step(3)
    assert answer.place == "0.0.1.0:8-15"
    assert {group.state for group in cluster.groups.values()} == {GroupState.ALLOCATED}


def test_opportunistic_pods_avoid_guaranteed_ones() -> None:
    """Scenario 4: an opportunistic pod goes to the node that no guaranteed pod uses."""
    assert step(4)[1].place == "0.0.5.0:0"


def test_a_pinned_cell() -> None:
    """Scenarios 5 and 6: a gang of two whole nodes fills the pinned pair."""
    assert step(5)[1].place == "0.0.3.0:0-15"
    assert step(6)[1].place == "0.0.3.1:0-15"


def test_a_gang_beyond_the_quota_waits() -> None:
    """Scenario 7: three P100 nodes are there, but the VC may have two, so the gang waits whole."""
    cluster, answer = step(7)
    assert answer.waits
    assert answer.reason
    assert "g7" not in cluster.groups


def test_a_gang_of_any_type_and_of_two_sizes() -> None:
    """Scenario 8: a gang of 7 and 5 leaves fits only on P100 nodes: the 7 are the first ones of such a node."""
    answer = step(8)[1]
    assert answer.devices == P100_DEVICES[answer.node][:7]


def test_the_other_pod_of_that_gang() -> None:
    """Scenario 9: the 5 are the first ones of another P100 node."""
    cluster, answer = step(9)
    assert answer.devices == P100_DEVICES[answer.node][:5]
    seven = cluster.bound[pod_of(8)]["spec"]["nodeName"]
    assert answer.node != seven


def test_preemption_in_a_pinned_cell() -> None:
    """Scenario 10: a stronger gang claims the pair at once; its victims are downgraded first, as they allow it."""
    cluster, answer = step(10)
    assert answer.victims == {pod_of(5)}  # Those of one node, the first by configuration.
    assert cluster.group("g10").state == GroupState.PREEMPTING
    assert cluster.places("g10") == ["0.0.3.0:0-15", "0.0.3.1:0-15"]
    victim = cluster.group("g5")
    assert victim.state == GroupState.BEING_PREEMPTED
    assert victim.is_opportunistic
    assert victim.lazy_preemption is not None
    assert victim.lazy_preemption.preemptor == "g10"


def test_the_second_pod_of_a_preemptor() -> None:
    """Scenario 11: the gang's other pod gets the same answer, and both are remembered as preempting."""
    cluster, answer = step(11)
    assert answer.victims == {pod_of(5)}
    assert set(cluster.group("g10").preempting_pods) == {pod_of(10), pod_of(11)}


def test_two_nodes_of_a_chain() -> None:
    """Scenarios 12 and 13: no two DGX2 nodes are left in the first chain, so the gang goes to a pair of the next."""
    assert step(12)[1].place == "0.0.3.2:0-15"
    assert step(13)[1].place == "0.0.3.3:0-15"


def test_the_rest_of_the_quota_in_that_chain() -> None:
    """Scenarios 14 and 15: a second such gang uses what the VC has left there; the nodes are of one pair."""
    assert step(14)[1].place == "0.0.4.0:0-15"
    cluster, answer = step(15)
    assert answer.place == "0.0.4.1:0-15"
    types = {slot.preassigned_types for name in ("g12", "g14") for slot in cluster.group(name).slots}
    assert {names[0] for names in types} == {"DGX2-V100-NODE", "2-DGX2-V100-NODE"}


def test_an_opportunistic_gang_beyond_every_quota() -> None:
    """Scenarios 16 and 17: an opportunistic gang takes the two nodes that nobody uses."""
    assert step(16)[1].place == "0.0.4.2:0-15"
    assert step(17)[1].place == "0.0.4.3:0-15"


def test_a_whole_small_node() -> None:
    """Scenario 18: a CT1 node is a free one that is whole."""
    answer = step(18)[1]
    assert answer.node in CT1_NODES
    assert answer.devices == (0, 1)


def test_a_lazy_preemption() -> None:
    """Scenario 19: a stronger pod takes the quota, not the node: the weaker one runs on, as an opportunistic pod."""
    cluster, answer = step(19)
    downgraded = cluster.group("g18")
    assert {answer.node, downgraded.slots[0].node} == CT1_NODES
    assert answer.devices == (0, 1)
    assert downgraded.state == GroupState.ALLOCATED
    assert downgraded.priority == -1
    assert downgraded.slots[0].pod is not None
    assert downgraded.lazy_preemption is not None
    assert downgraded.lazy_preemption.preemptor == "g19"
    assert downgraded.lazy_preemption.preemption_time == cluster.now


def test_a_group_that_refuses_lazy_preemption() -> None:
    """Scenario 20: the pod of 19 may not be downgraded, so it is preempted by a stronger one."""
    cluster, answer = step(20)
    assert answer.victims == {pod_of(19)}
    assert cluster.group("g19").state == GroupState.BEING_PREEMPTED
    assert not cluster.group("g19").is_opportunistic
