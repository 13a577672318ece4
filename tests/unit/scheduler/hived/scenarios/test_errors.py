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
        pytest.param(Job("g", "VC1", -1, pinned="vc1-ct1"), 1, "pinnedCellId", id="opportunistic-in-a-pinned-cell"),
        pytest.param(Job("g", "VC1", -1, ((1, 1),), "H900"), 1, "leafCellType", id="opportunistic-unknown-type"),
        pytest.param(JOBS[12], 16, "g12", id="more-pods-than-members"),
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


def test_deleting_all_pods() -> None:
    """With all bound pods deleted, the last one first, only preempting groups are left; deleting the last preempting
    pod of a group deletes the group, and the cluster is as at first.
    """
    cluster = played(20)
    cluster.delete(*(pod_of(step) for step in reversed(BOUND)))
    states = {name: group.state for name, group in cluster.groups.items()}
    assert states == {"g10": GroupState.PREEMPTING, "g20": GroupState.PREEMPTING}
    cluster.delete(pod_of(10))
    assert "g10" in cluster.groups
    cluster.delete(pod_of(11), pod_of(20))
    assert not cluster.groups
    assert snapshot(cluster.algorithm) == snapshot(Cluster(design()).algorithm)


def test_an_opportunistic_request_for_a_type_outside_of_the_quota() -> None:
    """Opportunistic pods may use types that their VC has no quota of."""
    cluster = Cluster(design())
    assert cluster.ask(Job("g", "VC1", -1, ((1, 2),), CT1)).place == "0.0.0.0:0-1"
