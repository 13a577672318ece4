"""The pods of the longest story are recovered by a process with another configuration; all keep running."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from structlog.testing import capture_logs

from scheduler.hived.cells.groups import GroupState
from store.kube.api.objects import Object
from tests.support.hived.cluster import Cluster, Job, snapshot
from tests.support.hived.design_cluster import (
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
    design,
    nodes,
    played,
    pod_of,
    quota,
)

FEWER_P100_NODES = quota((P100_NODE, 1), (P100_SOCKET, 2), ("CT1-NODE", 1))


def flatten(config: Object) -> None:
    """Make the 16 leaves of a DGX2 node its direct children."""
    config["physicalCluster"]["cellTypes"]["DGX2-V100-NODE"]["childCellType"] = DGX2
    config["physicalCluster"]["cellTypes"]["DGX2-V100-NODE"]["childCellNumber"] = 16


def rename(config: Object) -> None:
    """Rename the first node of the pinned pair."""
    pair = fours(config)[0]["cellChildren"][0]
    pair["cellChildren"][0]["cellAddress"] = "0.0.3.100"


def split(config: Object) -> None:
    """Move the nodes of the second cell of four to top cells of their own, and put others in their places."""
    cell = fours(config)[1]
    old = [node["cellAddress"] for pair in cell["cellChildren"] for node in pair["cellChildren"]]
    cell["cellChildren"] = [{"cellChildren": nodes("n100", "n101")}, {"cellChildren": nodes("n102", "n103")}]
    config["physicalCluster"]["physicalCells"] += [{"cellType": "DGX2-V100-NODE", **node} for node in nodes(*old)]


def take_p100(config: Object) -> None:
    """Reduce VC2's P100 nodes from two to one."""
    config["virtualClusters"]["VC2"] = FEWER_P100_NODES


def fours(config: Object) -> list[Object]:
    return [cell for cell in config["physicalCluster"]["physicalCells"] if cell["cellType"] == FOUR]


def changed(*changes: Callable[[Object], None]) -> Object:
    config = design()
    for change in changes:
        change(config)
    return config


def reconfigured(*changes: Callable[[Object], None]) -> Cluster:
    """Restart the process at the end of the story with these changes."""
    return played(19).restarted(changed(*changes))


def downgraded(cluster: Cluster) -> set[str]:
    """Return the groups that requested a guarantee and have none now."""
    return {group.name for group in cluster.groups.values() if group.spec.priority >= 0 and group.is_opportunistic}


def assert_all_run(cluster: Cluster) -> None:
    """Check that every bound pod has a slot, in an allocated group, at its place."""
    slots = {
        slot.pod["metadata"]["name"]: slot for group in cluster.groups.values() for slot in group.slots if slot.pod
    }
    assert set(slots) == set(cluster.bound)
    for name, slot in slots.items():
        assert slot.node == cluster.bound[name]["spec"]["nodeName"]
    assert {group.state for group in cluster.groups.values()} == {GroupState.ALLOCATED}


def test_the_same_configuration() -> None:
    """Without a change only the group g18 is downgraded, as it was before; preemptors are forgotten."""
    cluster = reconfigured()
    assert_all_run(cluster)
    assert downgraded(cluster) == {"g18"}
    assert "g10" not in cluster.groups


def test_levels_are_found_by_the_names_of_their_types() -> None:
    """DGX2 nodes lose their inner levels, and all groups on them keep their guarantees."""
    cluster = reconfigured(flatten)
    assert_all_run(cluster)
    assert downgraded(cluster) == {"g18"}
    node = cluster.leaves("0.0.1.0")[0].parent
    assert node is not None
    assert node.cell_type == "DGX2-V100-NODE"
    assert node.used == {0: 1, 1: 1, 2: 8}


def test_leaves_that_no_longer_exist() -> None:
    """A node is renamed: its leaves are ignored, with one line in the log; the rest of the group keeps its quota."""
    with capture_logs() as logs:
        cluster = reconfigured(rename)
    (reason,) = [entry["reason"] for entry in logs if entry["event"] == "Group lost leaf cells"]
    assert reason.startswith("leaf cells of node 0.0.3.0 no longer configured: 0, 1, 2, ")
    assert_all_run(cluster)
    assert downgraded(cluster) == {"g18"}
    gone, kept = cluster.group("g5").slots
    assert (gone.leaves, gone.virtual) == ((), ())
    assert len(kept.leaves) == len(kept.virtual) == 16
    assert {leaf.user.name for leaf in cluster.leaves("0.0.3.1") if leaf.user} == {"g5"}
    assert not any(leaf.user for leaf in cluster.leaves("0.0.3.100"))


def test_a_smaller_quota() -> None:
    """The VC has one of its two nodes left: the whole group is downgraded, and keeps running."""
    cluster = reconfigured(take_p100)
    assert_all_run(cluster)
    assert downgraded(cluster) == {"g8", "g18"}
    leaves = [leaf for node in P100_DEVICES for leaf in cluster.leaves(node)]
    assert [leaf.priority for leaf in leaves if leaf.user and leaf.user.name == "g8"] == [-1] * 12


def test_nodes_that_moved_to_another_chain() -> None:
    """The nodes are in single cells of another chain, where the VC has no quota: the group is downgraded."""
    cluster = reconfigured(split)
    assert_all_run(cluster)
    assert downgraded(cluster) == {"g14", "g18"}
    assert {leaf.chain.name for leaf in cluster.leaves("0.0.4.0")} == {"DGX2-V100-NODE"}
    assert {leaf.user.name for leaf in cluster.leaves("0.0.4.0") if leaf.user} == {"g14"}


@pytest.mark.parametrize("order", ["first", "last", *range(5)])
def test_everything_changes_at_once(order: str | int) -> None:
    """All changes together, pods recovered in any order: the same groups are downgraded, and then all pods are deleted
    cleanly.
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
    """The other VC's pods evict only groups that the reduced quota does not cover."""
    config = changed(take_p100)
    config["virtualClusters"]["VC1"]["virtualCells"].append({"cellType": P100_NODE, "cellNumber": 1})
    cluster = played(19).restarted(config)
    answer = cluster.ask(Job("new", "VC1", 0, ((1, 8),), "DGX1-P100"))
    assert answer.place or answer.victims < {pod_of(8), pod_of(9)}


@pytest.mark.parametrize("order", ["first", "last"])
def test_a_guarantee_that_running_pods_would_break(order: str) -> None:
    """A tenant now has a pair, and another tenant's pods run in every pair, within their own quota: only as many of
    them lose their guarantee as the pair needs, and only they yield to it.
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
