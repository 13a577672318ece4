"""The requests of HiveD's own examples and feature tour, on clusters of the same shape, with their outcomes."""

from __future__ import annotations

from collections import Counter

import pytest

from scheduler.hived.cells.groups import GroupState
from tests.support.hived.cluster import Answer, Cluster, Job
from tests.support.hived.design_cluster import DGX2, PIN_IB, design, quota, regular

FIRST, PINNED, LAST = "10.151.41.20", "10.151.41.21", "10.151.41.22"


def basic() -> Cluster:
    """Return three nodes of four K80: one for each of two tenants, and one pinned to the second."""
    node = ("3-K80-NODE.K80-NODE", 1)
    vc1, vc2 = quota(node), quota(node, pinned=["VC2-K80"])
    config = regular("K80 2 K80-2GPU 2 K80-NODE* 3 3-K80-NODE", [FIRST, PINNED, LAST], VC1=vc1, VC2=vc2)
    config["physicalCluster"]["physicalCells"][0]["cellChildren"][1]["pinnedCellId"] = "VC2-K80"
    return Cluster(config)


def two_types(default_nodes: int = 2) -> Cluster:
    """Return four K80 nodes and one M60 node: VC1 has one of each, the tenant `default` some of the K80 nodes."""
    vc1 = quota(("K80-POOL.K80-NODE", 1), ("M60-POOL.M60-NODE", 1))
    default = quota(("K80-POOL.K80-NODE", default_nodes))
    config = regular("K80 2 K80-2GPU 2 K80-NODE* 4 K80-POOL", ["k0", "k1", "k2", "k3"], VC1=vc1, default=default)
    other = regular("M60 2 M60-2GPU 2 M60-NODE* 1 M60-POOL", ["m0"])["physicalCluster"]
    config["physicalCluster"]["cellTypes"] |= other["cellTypes"]
    config["physicalCluster"]["physicalCells"] += other["physicalCells"]
    return Cluster(config)


def singles(virtual_cluster: str, name: str, priority: int = 1000, leaf_type: str = "K80", pinned: str = "") -> Job:
    """Return a job whose pods are scheduled independently."""
    return Job(name, virtual_cluster, priority, (), leaf_type, pinned, ignore=True)


def gang(virtual_cluster: str, name: str, *members: tuple[int, int], priority: int = 100) -> Job:
    return Job(name, virtual_cluster, priority, members, "K80", ignore=True)


def ask(cluster: Cluster, job: Job, pods: int, leaves: int = 1) -> list[Answer]:
    return [cluster.ask(job, leaves) for _ in range(pods)]


def nodes_of(answers: list[Answer]) -> Counter[str]:
    """Count the pods on each node; "" is for waiting pods."""
    return Counter("" if answer.waits else answer.node for answer in answers)


def test_five_single_pods_of_each_kind() -> None:
    """Basic example: of five single pods four fill VC1's node (demo1), VC2's unpinned one (demo2nopinned) and its
    pinned one (demo2pinned); each fifth waits for its quota.
    """
    cluster = basic()
    assert nodes_of(ask(cluster, singles("VC1", "demo1"), 5)) == {FIRST: 4, "": 1}
    assert nodes_of(ask(cluster, singles("VC2", "demo2nopinned"), 5)) == {LAST: 4, "": 1}
    answers = ask(cluster, singles("VC2", "demo2pinned", leaf_type="", pinned="VC2-K80"), 5)
    assert nodes_of(answers) == {PINNED: 4, "": 1}


def test_a_parameter_server_and_its_worker() -> None:
    """TensorFlow example: both pods run on one node, on devices 0 and 1."""
    cluster = basic()
    server, worker = (cluster.ask(singles("VC2", name), 1) for name in ("ps", "worker"))
    assert server.node == worker.node != PINNED
    assert (server.devices, worker.devices) == ((0,), (1,))


def designed() -> tuple[Cluster, dict[str, list[Answer]]]:
    """Submit the design example's jobs in turn. Return the answers to each."""
    cluster = Cluster(design())
    jobs = {
        "ABC": Job("JOBX/ABC", "VC1", 1000, ((1, 16), (3, 8), (1, 4)), DGX2, ignore=True),
        "D": Job("JOBX/D", "VC1", 1000, ((2, 3),), ignore=True),
        "F": Job("JOBX/F", "VC1", 1000, ((2, 3),), pinned=PIN_IB, ignore=True),
    }
    answers = {name: cluster.ask_all(job) for name, job in jobs.items()}
    answers["E"] = ask(cluster, singles("VC1", "JOBX-E", leaf_type=DGX2), 2, 16)
    return cluster, answers


def is_aligned(answer: Answer) -> bool:
    """Return whether a placement is exactly one cell of the binary node."""
    first, leaves = answer.devices[0], len(answer.devices)
    return answer.devices == tuple(range(first, first + leaves)) and first % leaves == 0


def test_a_gang_of_three_sizes() -> None:
    """Design example, roles A, B and C: 16, three 8 and 4 leaves fill three nodes of one chain without a gap that
    packing could avoid: the 16 have a node, two 8 fill another, and one 8 shares the third with the 4.
    """
    _, answers = designed()
    by_node: dict[str, list[int]] = {}
    for answer in answers["ABC"]:
        assert is_aligned(answer), answer.place
        by_node.setdefault(answer.node, []).append(len(answer.devices))
    assert sorted(map(sorted, by_node.values())) == [[4, 8], [8, 8], [16]]
    assert set(by_node) < {"0.0.3.2", "0.0.3.3", "0.0.4.0", "0.0.4.1", "0.0.4.2", "0.0.4.3"}
    devices = [(answer.node, device) for answer in answers["ABC"] for device in answer.devices]
    assert len(devices) == len(set(devices)) == 44


def test_whole_nodes_on_their_own() -> None:
    """Design example, role E: one pod gets the free single node, the other the rest of VC1's next chain."""
    _, answers = designed()
    first, second = answers["E"]
    assert first.place == "0.0.5.0:0-15"
    assert second.devices == tuple(range(16))
    used = {answer.node for answer in answers["ABC"]}
    assert second.node in {"0.0.3.2", "0.0.3.3", "0.0.4.0", "0.0.4.1", "0.0.4.2", "0.0.4.3"} - used


@pytest.mark.parametrize(("role", "node"), [("D", "0.0.1.0"), ("F", "0.1.0.0")])
def test_a_gang_of_threes(role: str, node: str) -> None:
    """Design example, roles D (any type) and F (the pinned pair with InfiniBand): two pods of three leaves are each
    within four leaves of one node.
    """
    assert [answer.place for answer in designed()[1][role]] == [f"{node}:0-2", f"{node}:4-6"]


def test_a_gang_that_does_not_fit_blocks_no_other() -> None:
    """Feature tour, gang scheduling: of a gang of six none runs where four fit; a later gang of four runs."""
    cluster = two_types()
    assert all(answer.waits for answer in cluster.ask_all(gang("VC1", "six", (6, 1))))
    assert nodes_of(cluster.ask_all(gang("VC1", "four", (4, 1)))) == {"k0": 4}


@pytest.mark.parametrize(("leaf_type", "places"), [("K80", {"k0": 4, "": 2}), ("", {"k0": 4, "m0": 2})])
def test_six_singles(leaf_type: str, places: dict[str, int]) -> None:
    """Feature tour, SKU type: of six pods that want K80 four run within the quota; without a type all run, on both."""
    assert nodes_of(ask(two_types(), singles("VC1", "six", leaf_type=leaf_type), 6)) == places


def test_opportunistic_pods_beyond_the_quota() -> None:
    """Feature tour, opportunistic jobs: six run where the tenant's quota is one node of four."""
    answers = ask(two_types(), singles("VC1", "oppo", priority=-1), 6)
    assert not any(answer.waits for answer in answers)
    assert len(nodes_of(answers)) == 2


def test_downgraded_then_evicted() -> None:
    """Feature tour, lazy preemption: VC1's production job takes the quota of its test job, which keeps running
    elsewhere; the other tenant's three nodes then need that place, and the test job is evicted.
    """
    cluster = two_types(default_nodes=3)
    test = cluster.ask(gang("VC1", "test", (1, 4), priority=0), pod="test")
    prod = cluster.ask(gang("VC1", "prod", (1, 4)), pod="prod")
    assert prod.node != test.node
    assert cluster.group("test").is_opportunistic
    assert cluster.group("test").state == GroupState.ALLOCATED

    other = gang("default", "prod2", (3, 4))
    assert cluster.ask(other, pod="prod2-0").victims == {"test"}
    assert set(cluster.places("prod2")) == {f"{node}:0-3" for node in ("k0", "k1", "k2", "k3") if node != prod.node}
    cluster.delete("test")
    assert cluster.ask(other, pod="prod2-0").place


def test_a_tenant_of_one_node_on_two() -> None:
    """Feature tour, VC safety: whatever VC1 submits, it stays within its node, and VC2 gets its own node whole."""
    cluster = basic()
    assert set(nodes_of(ask(cluster, singles("VC1", "greedy"), 16))) == {FIRST, ""}
    assert cluster.ask(singles("VC2", "whole"), 4).place == f"{LAST}:0-3"


def test_two_pods_of_a_gang_are_buddies() -> None:
    """Feature tour, topology: two single pods of one gang get two devices of one pair."""
    answers = two_types().ask_all(gang("VC1", "buddies", (2, 1)))
    assert [answer.place for answer in answers] == ["k0:0", "k0:1"]


def test_a_bad_node_and_its_return() -> None:
    """Feature tour, bad hardware: the only M60 node is bad, so its pod waits; when it heals, the same pod is bound."""
    cluster = two_types()
    cluster.break_("m0")
    job = Job("m60", "VC1", 100, ((1, 4),), "M60", ignore=True)
    answer = cluster.ask(job, pod="patient")
    assert answer.waits
    assert "m0" in answer.reason
    cluster.heal("m0")
    assert cluster.ask(job, pod="patient").place == "m0:0-3"


def test_the_other_tenants_of_a_cluster_preempt_opportunistic_pods() -> None:
    """Feature tour, inter-VC preemption: two opportunistic pods hold two nodes; enough guaranteed ones to leave them no
    place evict one, from the claimed place.
    """
    cluster = two_types(default_nodes=3)
    opportunistic = [cluster.ask(singles("VC1", f"oppo{number}", -1), 4) for number in range(2)]
    answer = cluster.ask(gang("default", "prod", (3, 4)), pod="prod")
    assert len(answer.victims) == 1
    assert answer.victims < {job.pod for job in opportunistic}
