"""A gang within its quota evicts no opportunistic pod if it can be placed without."""

from __future__ import annotations

import pytest

from store.kube.api.objects import Object
from tests.support.hived.cluster import Cluster, Job
from tests.support.hived.design_cluster import P100, design, quota, regular
from tests.support.hived.invariants import violations

OPPORTUNIST = Job("opportunist", "B", -1, ((1, 1),))


def small(number: int, *cells: tuple[str, int]) -> Object:
    """Return nodes of two pairs of devices, and A's quota of them."""
    return regular("GPU 2 PAIR 2 NODE*", [f"n{index}" for index in range(number)], A=quota(*cells), B=quota())


def test_idle_devices_of_a_bound_node_come_before_used_devices() -> None:
    """VC2 has a node with one device in use, and sockets without hardware yet. All other nodes are full of
    opportunistic pods: the gang goes to the idle devices, though the sockets would be the tighter fit.
    """
    cluster = Cluster(design())
    cluster.ask_all(Job("large", "VC2", 1, ((1, 5),), P100))
    cluster.ask_all(Job("small", "VC2", 1, ((1, 1),), P100))
    cluster.delete_group("large")
    cluster.ask_all(Job("opportunists", "VC1", -1, ((2, 8),), P100))
    answers = cluster.ask_all(Job("gang", "VC2", 5, ((3, 2),), P100))
    assert {answer.node for answer in answers} == {"1.0.0.2"}
    assert len(cluster.places("opportunists")) == 2
    assert violations(cluster.algorithm) == []


def test_within_a_node_unused_leaves_come_first() -> None:
    """The device beside the tenant's own is used by an opportunistic pod; one in the other pair is idle."""
    cluster = Cluster(small(1, ("NODE", 1)))
    assert cluster.ask(Job("first", "A", 1, ((1, 1),))).place == "n0:0"
    assert cluster.ask(OPPORTUNIST).place == "n0:1"
    assert cluster.ask(Job("second", "A", 1, ((1, 1),))).place == "n0:2"
    assert cluster.ask(Job("third", "A", 1, ((1, 2),))).victims == {"opportunist-1"}


def test_a_larger_unit_that_is_idle_comes_before_a_tight_one_that_is_used() -> None:
    """A's node is bound and has two idle pairs, one of them used by an opportunistic pod."""
    cluster = Cluster(small(2, ("NODE", 2)))
    cluster.ask_all(Job("first", "A", 1, ((1, 1),)))
    cluster.ask(Job("opportunists", "B", -1, ((1, 2),)), suggested=["n0"])
    answer = cluster.ask(Job("pair", "A", 1, ((1, 2),)))
    assert answer.node == "n1"
    assert not answer.victims


@pytest.mark.parametrize("is_full", [False, True])
def test_another_chain_that_is_idle_comes_before_one_that_is_used(is_full: bool) -> None:
    """A job that takes any device goes to the chain where no pod is evicted, and to the first if there is none."""
    config = small(1, ("NODE", 1))
    config["physicalCluster"]["cellTypes"] |= {
        "OTHER": {"childCellType": "OTHER-GPU", "childCellNumber": 4, "isNodeLevel": True}
    }
    config["physicalCluster"]["physicalCells"].append({"cellType": "OTHER", "cellAddress": "m0"})
    config["virtualClusters"]["A"] = quota(("NODE", 1), ("OTHER", 1))
    cluster = Cluster(config)
    first, second = (next(iter(chain.nodes.cells)).node for chain in cluster.algorithm.chains.values())
    cluster.ask(OPPORTUNIST, suggested=[first])
    if is_full:
        cluster.ask(Job("other", "B", -1, ((1, 1),)), suggested=[second])
    answer = cluster.ask(Job("any", "A", 1, ((1, 4),)))
    assert answer.victims if is_full else answer.node == second
    assert is_full or not answer.victims


def test_without_another_way_the_quota_is_served_by_eviction() -> None:
    """A tenant gets its guarantee, whichever pods use the devices."""
    cluster = Cluster(small(2, ("NODE", 2)))
    cluster.ask_all(Job("opportunists", "B", -1, ((2, 3),)))
    assert cluster.ask(Job("whole", "A", 1, ((2, 4),))).victims
