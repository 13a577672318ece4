"""Scenarios 61-66: the pods of scenarios 1-19 are found by a process with another configuration; all keep running."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from structlog.testing import capture_logs

from scheduler.hived.errors import InvalidConfig
from scheduler.hived.groups import GroupState
from store.kube.objects import Object
from tests.support.hived import Cluster, Job, snapshot, topology_of
from tests.support.hived_design import (
    DGX2,
    FOUR,
    NODE_OF_FOUR,
    P100_DEVICES,
    P100_NODE,
    P100_SOCKET,
    PAIR_OF_FOUR,
    PIN,
    PIN_CT1,
    PIN_IB,
    VC1,
    VC2,
    design,
    nodes,
    played,
    pod_of,
    quota,
)

FEWER_P100_NODES = quota((P100_NODE, 1), (P100_SOCKET, 2), ("CT1-NODE", 1))


def flatten(config: Object) -> None:
    """A DGX2 node has its 16 leaves as direct children."""
    config["physicalCluster"]["cellTypes"]["DGX2-V100-NODE"]["childCellType"] = DGX2
    config["physicalCluster"]["cellTypes"]["DGX2-V100-NODE"]["childCellNumber"] = 16


def rename(config: Object) -> None:
    """The first node of the pinned pair has another name."""
    pair = fours(config)[0]["cellChildren"][0]
    pair["cellChildren"][0]["cellAddress"] = "0.0.3.100"


def split(config: Object) -> None:
    """The nodes of the second cell of four stand alone; others take their places."""
    cell = fours(config)[1]
    old = [node["cellAddress"] for pair in cell["cellChildren"] for node in pair["cellChildren"]]
    cell["cellChildren"] = [{"cellChildren": nodes("n100", "n101")}, {"cellChildren": nodes("n102", "n103")}]
    config["physicalCluster"]["physicalCells"] += [{"cellType": "DGX2-V100-NODE", **node} for node in nodes(*old)]


def take_p100(config: Object) -> None:
    """VC2 may have one P100 node, where it had two."""
    config["virtualClusters"]["VC2"] = FEWER_P100_NODES


def fours(config: Object) -> list[Object]:
    return [cell for cell in config["physicalCluster"]["physicalCells"] if cell["cellType"] == FOUR]


def changed(*changes: Callable[[Object], None]) -> Object:
    config = design()
    for change in changes:
        change(config)
    return config


def reconfigured(*changes: Callable[[Object], None]) -> Cluster:
    """The process after scenarios 1-19, started again with these changes."""
    return played(19).restarted(changed(*changes))


def downgraded(cluster: Cluster) -> set[str]:
    """The groups that asked for a guarantee and have none now."""
    return {group.name for group in cluster.groups.values() if group.spec.priority >= 0 and group.is_opportunistic}


def assert_all_run(cluster: Cluster) -> None:
    """Every bound pod has a slot, in an allocated group, at its place."""
    slots = {
        slot.pod["metadata"]["name"]: slot for group in cluster.groups.values() for slot in group.slots if slot.pod
    }
    assert set(slots) == set(cluster.bound)
    for name, slot in slots.items():
        assert slot.node == cluster.bound[name]["spec"]["nodeName"]
    assert {group.state for group in cluster.groups.values()} == {GroupState.ALLOCATED}


def test_the_same_configuration() -> None:
    """Without a change only the group of scenario 18 is downgraded, as it was before; preemptors are forgotten."""
    cluster = reconfigured()
    assert_all_run(cluster)
    assert downgraded(cluster) == {"g18"}
    assert "g10" not in cluster.groups


def test_levels_are_found_by_the_names_of_their_types() -> None:
    """Scenario 61: DGX2 nodes have no inner levels any more, and all groups on them keep their guarantees."""
    cluster = reconfigured(flatten)
    assert_all_run(cluster)
    assert downgraded(cluster) == {"g18"}
    node = cluster.leaves("0.0.1.0")[0].parent
    assert node is not None
    assert node.cell_type == "DGX2-V100-NODE"
    assert node.used == {0: 1, 1: 1, 2: 8}


def test_leaves_that_are_not_there_any_more() -> None:
    """Scenario 62: a node was renamed: its leaves are ignored, the rest of the group keeps its guarantee."""
    cluster = reconfigured(rename)
    assert_all_run(cluster)
    assert downgraded(cluster) == {"g18"}
    gone, kept = cluster.group("g5").slots
    assert (gone.leaves, gone.virtual) == ((), ())
    assert len(kept.leaves) == len(kept.virtual) == 16
    assert {leaf.user.name for leaf in cluster.leaves("0.0.3.1") if leaf.user} == {"g5"}
    assert not any(leaf.user for leaf in cluster.leaves("0.0.3.100"))


def test_what_a_pod_lost_is_one_line_of_the_log() -> None:
    """Scenario 62: sixteen leaves of a pod's node are gone for the same reason, which is said once."""
    with capture_logs() as logs:
        reconfigured(rename)
    (reason,) = [entry["reason"] for entry in logs if entry["event"] == "A group lost leaf cells"]
    assert reason.startswith("leaf cells of node 0.0.3.0 not configured any more: 0, 1, 2, ")


def test_a_smaller_quota() -> None:
    """Scenario 63: the VC may have one of the two nodes: the whole group is downgraded, and runs on."""
    cluster = reconfigured(take_p100)
    assert_all_run(cluster)
    assert downgraded(cluster) == {"g8", "g18"}
    leaves = [leaf for node in P100_DEVICES for leaf in cluster.leaves(node)]
    assert [leaf.priority for leaf in leaves if leaf.user and leaf.user.name == "g8"] == [-1] * 12


def test_nodes_that_moved_to_another_chain() -> None:
    """Scenario 64: the nodes are in single cells of another chain, where the quota does not reach: downgraded."""
    cluster = reconfigured(split)
    assert_all_run(cluster)
    assert downgraded(cluster) == {"g14", "g18"}
    assert {leaf.chain.name for leaf in cluster.leaves("0.0.4.0")} == {"DGX2-V100-NODE"}
    assert {leaf.user.name for leaf in cluster.leaves("0.0.4.0") if leaf.user} == {"g14"}


@pytest.mark.parametrize("order", ["first", "last", *range(5)])
def test_everything_changes_at_once(order: str | int) -> None:
    """Scenario 65: all changes together, pods found in any order: who is downgraded does not depend on it, and then
    all pods are deleted cleanly.
    """
    orders: dict[str, Callable[[list[Object]], list[Object]]] = {"first": list, "last": lambda pods: pods[::-1]}
    shuffled = lambda pods: random.Random(order).sample(pods, len(pods))  # noqa: E731 - one of three short orders
    cluster = played(19).restarted(changed(flatten, rename, split, take_p100), orders.get(str(order), shuffled))
    assert_all_run(cluster)
    assert downgraded(cluster) == {"g8", "g14", "g18"}
    cluster.delete(*list(cluster.bound))
    assert not cluster.groups
    fresh = Cluster(changed(flatten, rename, split, take_p100))
    assert snapshot(cluster.algorithm) == snapshot(fresh.algorithm)


def test_a_downgraded_group_yields_to_the_quota_s_new_owner() -> None:
    """After scenario 63: the other VC's pods evict whom the new quota does not cover, and nobody else."""
    config = changed(take_p100)
    config["virtualClusters"]["VC1"]["virtualCells"].append({"cellType": P100_NODE, "cellNumber": 1})
    cluster = played(19).restarted(config)
    answer = cluster.ask(Job("new", "VC1", 0, ((1, 8),), "DGX1-P100"))
    assert answer.place or answer.victims < {pod_of(8), pod_of(9)}


@pytest.mark.parametrize("order", ["first", "last"])
def test_a_guarantee_that_running_pods_would_break(order: str) -> None:
    """After scenario 63: a tenant now has a pair, and another's pods run in every pair, within their own quota: as many
    of them lose their guarantee as the pair needs, and only they yield to it.
    """
    cells = (NODE_OF_FOUR, 4)
    pinned = (PIN_CT1, PIN, PIN_IB)
    cluster = Cluster(design(quota(cells, pinned=pinned), quota(("CT1-NODE", 1))))
    for number, node in enumerate(("0.0.3.2", "0.0.4.0", "0.0.4.2")):
        cluster.ask(Job(f"one{number}", "VC1", 1, ((1, 16),), DGX2), pod=f"one{number}", suggested=[node])
    config = design(quota(cells, pinned=pinned), quota((PAIR_OF_FOUR, 1), ("CT1-NODE", 1)))
    other = cluster.restarted(config, list if order == "first" else lambda pods: pods[::-1])
    (yields,) = downgraded(other)
    assert other.ask(Job("pair", "VC2", 0, ((2, 16),), DGX2)).victims == {yields}


def test_a_quota_above_capacity() -> None:
    """Scenario 66: three whole CT1 nodes and single leaves of them are promised where three nodes are: refused at
    start, with the names of what does not fit.
    """
    vc1 = quota(("CT1-NODE", 2), ("CT1-NODE.CT1", 2), pinned=(PIN_CT1,))
    with pytest.raises(InvalidConfig, match="CT1"):
        topology_of(design(vc1, VC2))
    topology_of(design(VC1, VC2))
