"""Defects of HiveD around pods that are recovered, edited or contradictory, shown absent by their effects on users."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import structlog
import yaml

from scheduler.hived.cells.groups import GroupState
from scheduler.hived.contract import POD_BIND_INFO, POD_SCHEDULING_SPEC
from scheduler.hived.errors import UserError
from store.kube.api.objects import Object, name_of
from tests.support.hived.cluster import PREEMPTING, Cluster, Job, ownership, pod_object, snapshot
from tests.support.hived.design_cluster import (
    CT1,
    DGX2,
    FIRST,
    PIN,
    PIN_CT1,
    PIN_IB,
    SECOND,
    VC1,
    design,
    on_pin,
    played,
    quota,
)

in_any_order = pytest.mark.parametrize("order", [list, lambda pods: pods[::-1]], ids=["in-order", "reversed"])


def two_pods() -> Cluster:
    cluster = Cluster(design())
    cluster.ask_all(on_pin("gang", 1, (2, 16)))
    return cluster


@in_any_order
def test_recovered_pods_are_in_their_own_slots(order: Callable[[list[Object]], list[Object]]) -> None:
    """In any order of recovery, each pod is in the slot of its place, and the state is as before."""
    cluster = two_pods()
    other = cluster.restarted(order=order)
    assert ownership(other.algorithm) == ownership(cluster.algorithm)
    for slot in other.group("gang").slots:
        assert slot.pod is not None
        assert slot.pod["spec"]["nodeName"] == slot.node


@in_any_order
@pytest.mark.parametrize("gone", [FIRST, SECOND])
def test_a_group_lives_until_its_last_pod_is_gone(order: Callable[[list[Object]], list[Object]], gone: str) -> None:
    """After recovery one pod is deleted: the other's devices stay taken, and a new pod of the group gets exactly the
    place that is free.
    """
    other = two_pods().restarted(order=order)
    (deleted,) = [name for name, pod in other.bound.items() if pod["spec"]["nodeName"] == gone]
    other.delete(deleted)
    assert other.ask(Job("thief", "VC1", 1, ((1, 1),), DGX2, PIN)).waits
    assert other.ask(on_pin("gang", 1, (2, 16)), pod="again").node == gone
    other.delete(*list(other.bound))
    assert not other.groups


def test_one_of_two_pods_is_found() -> None:
    """Only the second pod of a gang still runs: it is in its own slot, and the first slot is kept for a new pod."""
    cluster = two_pods()
    (first,) = [name for name, pod in cluster.bound.items() if pod["spec"]["nodeName"] == FIRST]
    del cluster.bound[first]
    other = cluster.restarted()
    assert [slot.node for slot in other.group("gang").slots if slot.pod] == [SECOND]
    assert other.ask(on_pin("gang", 1, (2, 16)), pod="again").node == FIRST


@in_any_order
def test_a_pod_that_was_bound_after_its_group_was_downgraded(order: Callable[[list[Object]], list[Object]]) -> None:
    """In any order of recovery, the group regains its quota, which no other group uses by then."""
    cluster = Cluster(design())
    weak = Job("weak", "VC2", 0, ((2, 1),), CT1)
    cluster.ask(weak, pod="weak-0")
    cluster.ask(Job("strong", "VC2", 1, ((1, 2),), CT1), pod="strong-0")
    assert cluster.group("weak").is_opportunistic
    cluster.ask(weak, pod="weak-1")
    cluster.delete("strong-0")
    other = cluster.restarted(order=order)
    assert not other.group("weak").is_opportunistic
    assert len(other.group("weak").pods()) == 2


@pytest.mark.parametrize(
    "annotations",
    [
        pytest.param({}, id="by-hand"),
        pytest.param({POD_SCHEDULING_SPEC: "virtualCluster: VC1\npriority: 0\nleafCellNumber: 1\n"}, id="no-bind-info"),
        pytest.param({POD_SCHEDULING_SPEC: "{", POD_BIND_INFO: "{"}, id="malformed"),
        pytest.param({POD_SCHEDULING_SPEC: "- 1", POD_BIND_INFO: "7"}, id="other-shapes"),
    ],
)
def test_a_pod_that_was_bound_by_hand(annotations: dict[str, str]) -> None:
    """An enabled pod that a user bound without HiveD is a user error that names it; its deletion is harmless."""
    cluster = played(6)
    before = snapshot(cluster.algorithm)
    pod = pod_object("by-hand", annotations, node="0.0.1.0")
    with pytest.raises(UserError, match="test/by-hand"):
        cluster.algorithm.restore(pod)
    assert snapshot(cluster.algorithm) == before
    cluster.algorithm.delete_allocated_pod(pod)
    assert snapshot(cluster.algorithm) == before


class TracedPod(dict[str, object]):
    """A pod whose deallocation can be observed."""


@pytest.mark.parametrize("text", ["", "{", "virtualCluster: VC1\npriority: high\n", "virtualCluster: nobody\n"])
def test_a_waiting_pod_with_a_malformed_spec_leaves_nothing(text: str) -> None:
    """The pod is refused when it is scheduled, and nothing of it is kept once it is deleted."""
    cluster = Cluster(design())
    pod = TracedPod(pod_object("odd", {POD_SCHEDULING_SPEC: text}))
    cluster.algorithm.add_unallocated_pod(pod)
    with pytest.raises(UserError):
        cluster.algorithm.schedule(pod, cluster.node_names, PREEMPTING)
    cluster.algorithm.delete_unallocated_pod(pod)
    trace = weakref.ref(pod)
    del pod
    gc.collect()
    assert trace() is None


@pytest.mark.parametrize("is_bound", [False, True])
def test_a_pod_whose_annotations_became_invalid(is_bound: bool) -> None:
    """It is deleted: a bound pod's devices are freed, and a preempting pod's preemption ends, all the same."""
    cluster = Cluster(design())
    if not is_bound:
        cluster.ask_all(on_pin("victim", 1, (2, 16), lazy=False))
    before = snapshot(cluster.algorithm)
    cluster.ask(on_pin("strong", 2, (1, 16)), pod="strong")
    pod = (cluster.bound if is_bound else cluster.waiting)["strong"]
    pod["metadata"]["annotations"] |= {POD_SCHEDULING_SPEC: "{", POD_BIND_INFO: "{"}
    cluster.delete("strong")
    assert snapshot(cluster.algorithm) == before


DISAGREEING = [
    pytest.param(Job("gang", "VC2", 1, ((2, 16),), DGX2, PIN), id="virtual-cluster"),
    pytest.param(on_pin("gang", 7, (2, 16)), id="priority"),
    pytest.param(on_pin("gang", 1, (3, 16)), id="members"),
    pytest.param(on_pin("gang", 1, (2, 16), (1, 1)), id="more-members"),
    pytest.param(on_pin("gang", 1, (2, 16), lazy=False), id="lazy-preemption"),
    pytest.param(on_pin("gang", 1, (2, 16), ignore=True), id="suggested-nodes"),
]


@pytest.mark.parametrize("preempts", [False, True])
@pytest.mark.parametrize("job", DISAGREEING)
def test_a_pod_that_disagrees_with_its_group(job: Job, preempts: bool) -> None:
    """A pod whose request differs from that of its allocated or preempting group is refused; the group is unchanged."""
    cluster = Cluster(design())
    if preempts:
        cluster.ask_all(on_pin("victim", 0, (2, 16), lazy=False))
    cluster.ask(on_pin("gang", 1, (2, 16)), 16)
    before = snapshot(cluster.algorithm)
    with pytest.raises(UserError, match="gang"):
        cluster.ask(job, 16, pod="other")
    assert snapshot(cluster.algorithm) == before


def test_a_bound_pod_that_disagrees_with_its_group() -> None:
    """A pod that is found bound in a place of a group, but with another priority, keeps the place, since it runs there;
    the difference is logged, with what to do.
    """
    cluster = two_pods()
    second = cluster.bound["gang-1"]
    spec = yaml.safe_load(second["metadata"]["annotations"][POD_SCHEDULING_SPEC])
    second["metadata"]["annotations"][POD_SCHEDULING_SPEC] = yaml.safe_dump({**spec, "priority": 7})
    with structlog.testing.capture_logs() as logs:
        other = cluster.restarted()
    assert len(other.group("gang").pods()) == 2
    assert other.group("gang").priority == 1
    (line,) = [line for line in logs if line["log_level"] == "warning"]
    assert "test/gang-1: priority 7" in line["reason"]


def test_a_pinned_cell_given_to_another_tenant() -> None:
    """The pinned pair belongs to another VC now: the group in it continues without a guarantee, and takes none of the
    new owner's cells.
    """
    vc1 = {**VC1, "pinnedCells": [{"pinnedCellId": PIN_CT1}, {"pinnedCellId": PIN_IB}]}
    vc2 = quota(("CT1-NODE", 1), pinned=(PIN,))
    other = two_pods().restarted(design(vc1, vc2))
    gang = other.group("gang")
    assert gang.is_opportunistic
    assert all(slot.pod for slot in gang.slots)
    assert {leaf.user.name for leaf in other.leaves(FIRST) if leaf.user} == {"gang"}
    assert {leaf.priority for leaf in other.leaves(FIRST)} == {-1}
    owner = Job("owner", "VC2", 0, ((2, 16),), DGX2, pinned=PIN)
    assert other.ask(owner).victims <= {name_of(pod) for pod in gang.pods()}
    assert other.group("owner").state == GroupState.PREEMPTING


@pytest.mark.parametrize("reverse", [False, True])
def test_two_groups_that_claim_the_same_leaf(reverse: bool) -> None:
    """Two bound pods claim the same device (an old process may have bound one): no leaf is given to both, and deleting
    either leaves the other's state intact.
    """
    cluster, rival = Cluster(design()), Cluster(design())
    cluster.ask(Job("one", "VC1", 1, ((1, 4),), DGX2), pod="one-0")
    rival.ask(Job("two", "VC1", 1, ((1, 2),), DGX2), pod="two-0")
    pods = [cluster.bound["one-0"], rival.bound["two-0"]]
    third = Cluster(design())
    accepted: list[str] = []
    for pod in reversed(pods) if reverse else pods:
        try:
            third.recover(pod)
            accepted.append(name_of(pod))
        except UserError:
            continue
    held = [leaf.user.name for leaf in third.leaves("0.0.1.0") if leaf.user]
    assert accepted
    first = accepted[0].removesuffix("-0")
    assert held.count(first) == {"one": 4, "two": 2}[first]
    third.delete(*accepted)
    assert not third.groups
    assert snapshot(third.algorithm) == snapshot(Cluster(design()).algorithm)


def test_a_place_that_another_group_used_at_recovery_is_not_filled_again() -> None:
    """A gang's second place is found in use by another pod, and its own pod there is gone: a new pod of the gang waits
    instead of sharing the device, even after the other pod is gone, as another group may have the device by then.
    """
    cluster, rival = Cluster(design()), Cluster(design())
    gang = Job("gang", "VC2", 1, ((2, 1),), CT1)
    cluster.ask_all(gang)
    for name in ("first", "other"):
        rival.ask(Job(name, "VC2", 1, ((1, 1),), CT1), pod=name)
    third = Cluster(design())
    third.recover(rival.bound["other"])
    third.recover(cluster.bound["gang-0"])
    assert third.ask(gang, pod="late").waits
    third.delete("other")
    assert third.ask(gang, pod="late").waits
    assert third.ask(Job("next", "VC2", 1, ((1, 1),), CT1), pod="next").place == "0.0.0.0:1"
    third.delete("gang-0")
    assert third.ask(gang, pod="late").waits
    third.delete("next")
    assert third.ask(gang, pod="late").place == "0.0.0.0:0"
