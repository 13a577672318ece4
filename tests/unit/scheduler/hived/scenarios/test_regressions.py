"""Defects found by random testing of the algorithm, each with the shortest story that shows it."""

from __future__ import annotations

from structlog.testing import capture_logs

from scheduler.hived.cells.groups import GroupState
from scheduler.hived.contract import AffinityGroupMemberBindInfo, PodBindInfo, PodPlacementInfo, new_binding_pod
from scheduler.hived.inspection.explain import explain
from store.kube.api.objects import Object
from tests.support.hived.cluster import Cluster, Job
from tests.support.hived.design_cluster import quota, regular
from tests.support.hived.invariants import violations


def boxes(number: int, size: int = 2, **quotas: Object) -> Object:
    """Return nodes n0, n1... of type BOX with leaves of type A."""
    return regular(f"A {size} BOX*", [f"n{node}" for node in range(number)], **quotas)


def test_an_opportunistic_group_is_evicted_and_never_downgraded() -> None:
    """A pinned leaf is bound even while an opportunistic pod that allows lazy preemption uses it."""
    config = boxes(1, V=quota(pinned=["pin"]))
    config["physicalCluster"]["physicalCells"][0]["cellChildren"] = [{}, {"pinnedCellId": "pin"}]
    cluster = Cluster(config)
    cluster.ask(Job("cheap", "V", -1, ((1, 2),), lazy=True))
    answer = cluster.ask(Job("owner", "V", 0, pinned="pin"))
    assert answer.victims == {"cheap-0"}
    assert cluster.group("cheap").lazy_preemption is None
    assert violations(cluster.algorithm) == []


def test_a_group_without_quota_at_recovery_shows_that_it_was_downgraded() -> None:
    """Under a smaller quota it continues as an opportunistic group, with itself as the preemptor."""
    cluster = Cluster(boxes(1, V=quota(("BOX", 1))))
    cluster.ask(Job("job", "V", 5, ((1, 2),)))
    group = cluster.restarted(boxes(1, V=quota())).group("job")
    assert group.priority == -1
    assert group.lazy_preemption is not None
    assert group.lazy_preemption.preemptor == "job"


def test_recovery_does_not_make_room_where_the_group_itself_is() -> None:
    """Two cells for a quota of one: the first is shared with a weaker group, which must not lose it for the second."""
    cluster = Cluster(boxes(2, V=quota(("BOX", 2))))
    cluster.ask(Job("weak", "V", 0))
    cluster.ask_all(Job("strong", "V", 5, ((3, 1),)))
    for order in (iter, reversed):
        smaller = cluster.restarted(boxes(2, V=quota(("BOX", 1))), order=order)
        assert violations(smaller.algorithm) == []
        assert smaller.group("strong").priority == -1
        assert smaller.group("weak").priority == 0


def bound(job: Job, places: list[tuple[str, tuple[int, ...]]], cell_type: str = "BOX") -> list[Object]:
    """Return bound pods of a job, in the order of its places, as another process left them."""
    members = tuple(
        AffinityGroupMemberBindInfo((PodPlacementInfo(node, devices, (cell_type,) * len(devices)),))
        for node, devices in places
    )
    return [
        new_binding_pod(job.pod(f"{job.name}-{number}", len(devices)), PodBindInfo(node, devices, cell_type, members))
        for number, (node, devices) in enumerate(places)
    ]


def test_recovery_keeps_the_cells_that_a_downgraded_group_shared_with_the_recovered_one() -> None:
    """The weak group loses two cells; the strong group, recovered later, shares one of them."""
    cluster = Cluster(boxes(3, 8, V=quota(("BOX", 2))))
    cluster.recover(*bound(Job("weak", "V", 0, ((2, 1),)), [("n0", (0,)), ("n1", (0,))]))
    job = Job("strong", "V", 5, ((1, 1), (1, 2), (1, 3)))
    cluster.recover(*bound(job, [("n1", (1,)), ("n2", (0, 1)), ("n1", (2, 3, 4))]))
    assert violations(cluster.algorithm) == []
    assert cluster.group("strong").priority == 5
    assert cluster.group("weak").priority == -1


def test_recovery_leaves_an_opportunistic_group_beside_a_downgraded_one_alone() -> None:
    """It has no quota to lose, so its owner gets no Event about lost quota."""
    cluster = Cluster(boxes(2, V=quota(("BOX", 1))))
    cluster.recover(*bound(Job("weak", "V", 0), [("n0", (0,))]))
    cluster.recover(*bound(Job("cheap", "V", -1), [("n0", (1,))], cell_type=""))
    cluster.recover(*bound(Job("strong", "V", 5), [("n1", (0,))]))
    assert [name for name, group in cluster.groups.items() if group.lazy_preemption] == ["weak"]


def test_a_victim_that_recovery_downgrades_gets_its_leaves_back_without_quota() -> None:
    """One of its cells is claimed, the other goes to a stronger recovered group; then the claim is cancelled."""
    cluster = Cluster(boxes(3, V=quota(("BOX", 2))))
    cluster.recover(*bound(Job("victim", "V", 0, ((2, 2),), lazy=False), [("n0", (0, 1)), ("n1", (0, 1))]))
    cluster.ask(Job("preemptor", "V", 5, ((1, 2),)), pod="preemptor")
    cluster.recover(*bound(Job("strong", "V", 9), [("n2", (0,))]))
    assert violations(cluster.algorithm) == []
    assert {name: group.priority for name, group in cluster.groups.items()} == {
        "victim": -1,
        "preemptor": 5,
        "strong": 9,
    }
    cluster.delete("preemptor")
    assert violations(cluster.algorithm) == []
    assert {leaf.priority for node in ("n0", "n1") for leaf in cluster.leaves(node)} == {-1}


def test_a_preemptor_that_is_bound_before_its_victim_is_gone_does_not_share_its_leaves() -> None:
    """A user bound it by hand, with our annotation: the devices still count for the victim."""
    cluster = Cluster(boxes(1, V=quota(("BOX", 1))))
    cluster.recover(*bound(Job("victim", "V", 0, ((1, 2),), lazy=False), [("n0", (0, 1))]))
    job = Job("preemptor", "V", 5, ((1, 2),))
    cluster.ask(job)
    cluster.recover(*bound(job, [("n0", (0, 1))]))
    assert violations(cluster.algorithm) == []
    assert {leaf.user.name for leaf in cluster.leaves("n0") if leaf.user} == {"victim"}
    assert cluster.group("victim").state is GroupState.ALLOCATED


def tight() -> Object:
    """Return a cluster in which node n1 has a pinned leaf, so that no promised quad needs its other leaf."""
    v, w = quota(("RACK.A", 1), pinned=["pin"]), quota(("RACK.QUAD", 3))
    config = regular("A 2 QUAD 2 BOX* 2 RACK", ["n0", "n1"], V=v, W=w)
    pinned = [{"cellChildren": [{"pinnedCellId": "pin"}, {}]}, {"cellChildren": [{}, {}]}]
    config["physicalCluster"]["physicalCells"][0]["cellChildren"][1]["cellChildren"] = pinned
    return config


def test_a_larger_cell_is_only_split_if_every_level_below_it_can_spare_one() -> None:
    """Around a bad node: splitting a whole node for one leaf would break the guarantee of a quad."""
    cluster = Cluster(tight())
    cluster.break_("n1")
    assert violations(cluster.algorithm) == []
    answer = cluster.ask(Job("leaf", "V", 0))
    assert answer.waits
    assert violations(cluster.algorithm) == []


def test_a_pinned_cell_of_racks_without_usable_nodes_is_waited_for() -> None:
    """The unmappable cell is a rack inside the pinned cell, larger than the units that pods are packed into."""
    nodes = ["n0", "n1", "n2", "n3"]
    config = regular("A 2 QUAD 2 BOX* 2 RACK 2 ROW", nodes, V=quota(pinned=["pin"]))
    config["physicalCluster"]["physicalCells"][0]["pinnedCellId"] = "pin"
    answer = Cluster(config).ask(Job("job", "V", 0, pinned="pin"), suggested=[])
    assert answer.waits


def test_recovery_downgrades_no_more_than_it_must() -> None:
    """A weaker group in a cell that the recovered one shares anyway keeps its quota there."""
    cluster = Cluster(boxes(3, 8, V=quota(("BOX", 2))))
    cluster.recover(*bound(Job("beside", "V", 0), [("n0", (0,))]))
    cluster.recover(*bound(Job("weak", "V", 1), [("n1", (0,))]))
    cluster.recover(*bound(Job("strong", "V", 5, ((2, 1),)), [("n0", (1,)), ("n2", (0,))]))
    assert {name: group.priority for name, group in cluster.groups.items()} == {"beside": 0, "weak": -1, "strong": 5}


def test_recovery_takes_no_quota_from_equals() -> None:
    """Where quota has become scarce, the first recovered of equal groups keeps it."""
    cluster = Cluster(boxes(2, V=quota(("BOX", 1))))
    cluster.recover(*bound(Job("first", "V", 3), [("n0", (0,))]))
    cluster.recover(*bound(Job("second", "V", 3), [("n1", (0,))]))
    assert {name: group.priority for name, group in cluster.groups.items()} == {"first": 3, "second": -1}


def test_two_groups_recovered_on_the_same_device() -> None:
    """Two extenders may cause it: the log has an error that names group and device, and both keep running. A further
    pod of the second group gets the group's uncontested place, then none, and `explain` agrees.
    """
    cluster = Cluster(boxes(3, V=quota(("BOX", 3))))
    job = Job("second", "V", 0, ((3, 2),))
    pods = bound(job, [("n0", (0, 1)), ("n1", (0, 1)), ("n2", (0, 1))])
    with capture_logs() as logs:
        cluster.recover(*bound(Job("first", "V", 0), [("n0", (1,))]))
        assert not [entry for entry in logs if entry["log_level"] == "error"]
        cluster.recover(pods[2])
    assert [(entry["group"], entry["pod"]) for entry in logs if entry["log_level"] == "error"] == [
        ("second", "test/second-2")
    ]
    assert [entry["reason"] for entry in logs if entry["event"] == "Group lost leaf cells"] == [
        "leaf cells of node n0 used by group first: 1"
    ]
    assert [name for name, group in cluster.groups.items() if group.is_contested] == ["second"]
    assert violations(cluster.algorithm) == []

    assert explain(cluster.algorithm, job.pod("next", 2)).verdict == "bind"
    assert cluster.ask(job, 2, pod="next").node == "n1"
    found = explain(cluster.algorithm, job.pod("last", 2))
    answer = cluster.ask(job, 2, pod="last")
    assert (found.verdict, found.places) == ("wait", [])
    assert "has a place for it on n0, but other pods used leaf cells there" in found.summary
    assert answer.reason == found.summary


def test_devices_that_are_no_longer_configured_are_not_contested() -> None:
    """A group that lost them has no rival."""
    cluster = Cluster(boxes(2, V=quota(("BOX", 2))))
    cluster.ask_all(Job("job", "V", 0, ((2, 2),)))
    assert not cluster.restarted(boxes(1, V=quota(("BOX", 1)))).group("job").is_contested
