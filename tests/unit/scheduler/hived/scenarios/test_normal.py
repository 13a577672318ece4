"""One story of guaranteed, opportunistic, pinned, downgraded and preempting groups, step by step.

Each test plays the steps before its own on a new cluster, then asks for its own pod. Where HiveD's outcome depends on
the order of its lists, any equivalent outcome is accepted.
"""

from __future__ import annotations

import pytest

from scheduler.hived.cells.groups import GroupState
from tests.support.hived.cluster import Answer, Cluster
from tests.support.hived.design_cluster import JOBS, P100_DEVICES, PODS, played, pod_of

CT1_NODES = {"0.0.0.0", "0.0.0.1"}  # The third CT1 node has a pinned leaf, so it can't be allocated whole.


def step(number: int) -> tuple[Cluster, Answer]:
    """Return the cluster after this step of the story, and the step's answer."""
    cluster = played(number - 1)
    job, leaves = PODS[number]
    return cluster, cluster.ask(JOBS[job], leaves, pod=pod_of(number))


@pytest.mark.parametrize(
    ("number", "place"),
    [
        pytest.param(1, "0.0.1.0:0", id="the-first-leaf-of-the-first-chain"),
        pytest.param(2, "0.0.1.0:1", id="its-buddy-so-that-no-pair-is-broken-without-need"),
        pytest.param(4, "0.0.5.0:0", id="opportunistic-pods-go-where-no-guaranteed-pod-is"),
        pytest.param(5, "0.0.3.0:0-15", id="a-pinned-pair"),
        pytest.param(6, "0.0.3.1:0-15", id="its-other-node"),
        pytest.param(12, "0.0.3.2:0-15", id="no-two-nodes-are-left-in-the-first-chain"),
        pytest.param(13, "0.0.3.3:0-15", id="the-other-node-of-that-pair"),
        pytest.param(14, "0.0.4.0:0-15", id="the-rest-of-the-quota-in-that-chain"),
        pytest.param(16, "0.0.4.2:0-15", id="an-opportunistic-gang-beyond-every-quota"),
        pytest.param(17, "0.0.4.3:0-15", id="its-other-unused-node"),
    ],
)
def test_places(number: int, place: str) -> None:
    """Each step's pod gets the place that its test's name describes."""
    assert step(number)[1].place == place


def test_no_preemption_where_leaves_are_free() -> None:
    """Eight leaves at a higher priority take the free half of the node and preempt no pod."""
    cluster, answer = step(3)
    assert answer.place == "0.0.1.0:8-15"
    assert {group.state for group in cluster.groups.values()} == {GroupState.ALLOCATED}


def test_a_gang_beyond_the_quota_waits() -> None:
    """The chain has three P100 nodes, but the VC's quota is two, so the whole gang waits."""
    cluster, answer = step(7)
    assert answer.waits
    assert answer.reason
    assert "g7" not in cluster.groups


def test_a_gang_of_any_type_and_of_two_sizes() -> None:
    """A gang of 7 and 5 leaves fits only on P100 nodes: each pod gets the first leaves of such a node."""
    cluster, five = step(9)
    (seven,) = (slot for slot in cluster.group("g8").slots if slot.leaf_cell_number == 7)
    assert seven.devices == P100_DEVICES[seven.node][:7]
    assert five.devices == P100_DEVICES[five.node][:5]
    assert five.node != seven.node


def test_preemption_in_a_pinned_cell() -> None:
    """A stronger gang claims the pair at once; its victims are downgraded first, as they allow it."""
    cluster, answer = step(10)
    assert answer.victims == {pod_of(5)}  # The pods of one node, the first in configuration order.
    assert cluster.group("g10").state == GroupState.PREEMPTING
    assert cluster.places("g10") == ["0.0.3.0:0-15", "0.0.3.1:0-15"]
    victim = cluster.group("g5")
    assert victim.state == GroupState.BEING_PREEMPTED
    assert victim.is_opportunistic
    assert victim.lazy_preemption is not None
    assert victim.lazy_preemption.preemptor == "g10"


def test_the_second_pod_of_a_preemptor() -> None:
    """The gang's other pod gets the same answer, and both are recorded as preempting."""
    cluster, answer = step(11)
    assert answer.victims == {pod_of(5)}
    assert set(cluster.group("g10").preempting_pods) == {pod_of(10), pod_of(11)}


def test_the_rest_of_the_quota_in_that_chain() -> None:
    """A second such gang uses the rest of the VC's quota there; the nodes are of one pair."""
    cluster, answer = step(15)
    assert answer.place == "0.0.4.1:0-15"
    types = {slot.preassigned_types for name in ("g12", "g14") for slot in cluster.group(name).slots}
    assert {names[0] for names in types} == {"DGX2-V100-NODE", "2-DGX2-V100-NODE"}


def test_a_whole_small_node() -> None:
    """A whole pod gets a CT1 node that is free as a whole."""
    answer = step(18)[1]
    assert answer.node in CT1_NODES
    assert answer.devices == (0, 1)


def test_a_lazy_preemption() -> None:
    """A stronger pod takes the quota, not the node: the weaker one keeps running, as an opportunistic pod."""
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
    """A pod that may not be downgraded is preempted by a stronger one."""
    cluster, answer = step(20)
    assert answer.victims == {pod_of(19)}
    assert cluster.group("g19").state == GroupState.BEING_PREEMPTED
    assert not cluster.group("g19").is_opportunistic
