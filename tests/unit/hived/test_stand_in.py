"""What a bound pod counts as whose request can't be read any more."""

from __future__ import annotations

from scheduler.hived.constants import POD_SCHEDULING_SPEC
from scheduler.hived.pod_contract import extract_pod_bind_info, extract_pod_scheduling_spec
from scheduler.hived.stand_in import stand_in
from store.kube.objects import Object
from tests.support.hived import Cluster, Job
from tests.support.hived_design import PIN, design

GANG = Job("gang", "VC1", 5, ((2, 16),), pinned=PIN)


def spoilt(pod: Object) -> Object:
    """The pod with a request that nobody can read."""
    annotations = pod["metadata"]["annotations"] | {POD_SCHEDULING_SPEC: "{"}
    return pod | {"metadata": pod["metadata"] | {"annotations": annotations}}


def found() -> tuple[Cluster, Object, Object]:
    """Both bound pods of a gang, and a process that has found the first of them."""
    cluster = Cluster(design())
    for name in ("first", "second"):
        cluster.ask(GANG, 16, pod=name)
    first, second = cluster.bound["first"], cluster.bound["second"]
    other = Cluster(design())
    other.recover(first)
    return other, first, second


def test_a_pod_that_can_be_read_needs_none() -> None:
    """It counts as what it says."""
    cluster, _, second = found()
    assert stand_in(second, cluster.groups.values()) is None


def test_a_free_place_of_a_group_is_the_pod_s() -> None:
    """The group says what the pod said."""
    cluster, _, second = found()
    counts_as = stand_in(spoilt(second), cluster.groups.values())
    assert counts_as is not None
    assert extract_pod_scheduling_spec(counts_as) == extract_pod_scheduling_spec(second)
    cluster.recover(counts_as)
    assert len(cluster.group("gang").pods()) == 2


def test_a_place_that_another_pod_has_is_not() -> None:
    """A copy of a bound pod, bound by hand: it is on its own, without quota, and the group is as it was."""
    cluster, first, _ = found()
    counts_as = stand_in(spoilt(first), cluster.groups.values())
    assert counts_as is not None
    spec, info = extract_pod_scheduling_spec(counts_as), extract_pod_bind_info(counts_as)
    assert (spec.affinity_group.name, spec.priority) == ("test/first", -1)
    assert info.leaf_cell_isolation == extract_pod_bind_info(first).leaf_cell_isolation
