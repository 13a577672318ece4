"""Invalid requests, and the end of the longest story."""

from __future__ import annotations

import pytest

from scheduler.hived.cells.groups import GroupState
from scheduler.hived.errors import UserError
from tests.support.hived.cluster import Cluster, Job, snapshot
from tests.support.hived.design_cluster import CT1, DGX2, JOBS, P100, design, played, pod_of

BOUND = [step for step in range(1, 20) if step not in {7, 10, 11}]


@pytest.mark.parametrize(
    ("job", "leaves", "says"),
    [
        pytest.param(Job("g21", "VC2", 1, ((1, 1),), DGX2), 1, DGX2, id="21-type-that-the-VC-lacks"),
        pytest.param(Job("g22", "VC2", 1, ((1, 8),), P100), 2, "leafCellNumber", id="size-not-among-members"),
        pytest.param(Job("g23", "surprise!", 1, ((1, 1),), P100), 1, "surprise!", id="unknown-VC"),
        pytest.param(Job("g24", "VC2", 1, ((1, 1),), P100, pinned="surprise!"), 1, "surprise!", id="unknown-pin"),
        pytest.param(Job("g25", "VC2", 1001, ((1, 1),), P100), 1, "1001", id="priority-1001"),
    ],
)
def test_an_invalid_request(job: Job, leaves: int, says: str) -> None:
    """A user error names the pod and the problem, and nothing has changed."""
    cluster = played(19)
    before = snapshot(cluster.algorithm)
    with pytest.raises(UserError) as error:
        cluster.ask(job, leaves, pod="strange")
    assert "test/strange" in str(error.value)
    assert says in str(error.value)
    assert snapshot(cluster.algorithm) == before


def test_deleting_all_that_was_allocated() -> None:
    """All bound pods are deleted, the last one first: only preempting groups are left."""
    cluster = played(20)
    cluster.delete(*(pod_of(step) for step in reversed(BOUND)))
    assert {name: group.state for name, group in cluster.groups.items()} == {
        "g10": GroupState.PREEMPTING,
        "g20": GroupState.PREEMPTING,
    }


def test_deleting_pods_that_preempt() -> None:
    """Deleting the last preempting pod of a group deletes the group; the cluster is as at first."""
    cluster = played(20)
    cluster.delete(*(pod_of(step) for step in reversed(BOUND)))
    cluster.delete(pod_of(10))
    assert "g10" in cluster.groups
    cluster.delete(pod_of(11), pod_of(20))
    assert not cluster.groups
    assert snapshot(cluster.algorithm) == snapshot(Cluster(design()).algorithm)


def test_a_pinned_cell_is_no_place_for_opportunistic_requests() -> None:
    """A request for a pinned cell with priority -1 is a user error: it has no guarantee to pin."""
    cluster = Cluster(design())
    with pytest.raises(UserError, match="pinnedCellId"):
        cluster.ask(Job("g", "VC1", -1, ((1, 1),), pinned="vc1-ct1"))


def test_a_type_that_the_cluster_lacks() -> None:
    """A leaf type that no node has is a user error, for opportunistic pods too."""
    cluster = Cluster(design())
    with pytest.raises(UserError, match="leafCellType"):
        cluster.ask(Job("g", "VC1", -1, ((1, 1),), "H900"))


def test_an_opportunistic_request_for_a_type_outside_of_the_quota() -> None:
    """Opportunistic pods may use types that their VC has no quota of."""
    cluster = Cluster(design())
    assert cluster.ask(Job("g", "VC1", -1, ((1, 2),), CT1)).place == "0.0.0.0:0-1"


def test_a_group_whose_slots_are_taken() -> None:
    """One pod more than the group's members is a user error; the group's own pods stay."""
    cluster = played(6)
    with pytest.raises(UserError, match="g5"):
        cluster.ask(JOBS[5], 16, pod="one-too-many")
    assert len(cluster.group("g5").pods()) == 2
