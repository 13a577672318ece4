"""The invariants detect every kind of damage to a state, and find none in sound states."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from scheduler.hived.cells.cells import VirtualCell
from scheduler.hived.cells.groups import GroupState, LazyPreemptionStatus
from store.kube.api.objects import Object
from tests.support.hived.cluster import Cluster, Job
from tests.support.hived.invariants import violations

CHAIN = "RACK"


def config() -> Object:
    """Return two racks of two nodes of two leaves: a rack and a node for V, a node and a pinned leaf for W."""
    pinned = {"cellChildren": [{"cellAddress": "n3", "cellChildren": [{}, {"pinnedCellId": "pin"}]}]}
    racks = [
        {"cellType": CHAIN, "cellChildren": [{"cellAddress": "n0"}, {"cellAddress": "n1"}]},
        {"cellType": CHAIN, "cellChildren": [{"cellAddress": "n2"}, *pinned["cellChildren"]]},
    ]
    types = {
        "BOX": {"childCellType": "A", "childCellNumber": 2, "isNodeLevel": True},
        CHAIN: {"childCellType": "BOX", "childCellNumber": 2},
    }
    return {
        "physicalCluster": {"cellTypes": types, "physicalCells": racks},
        "virtualClusters": {
            "V": {"virtualCells": [{"cellType": CHAIN, "cellNumber": 1}]},
            "W": {
                "virtualCells": [{"cellType": f"{CHAIN}.BOX", "cellNumber": 1}],
                "pinnedCells": [{"pinnedCellId": "pin"}],
            },
        },
    }


def busy() -> Cluster:
    """n3 is bad; V uses a leaf of n0 and its rack shows no failure; an opportunistic pod on n1 is being preempted."""
    cluster = Cluster(config())
    cluster.ask(Job("user", "V", 1, lazy=False))
    cluster.ask(Job("cheap", "W", -1, ((2, 2),)), 2)
    cluster.ask(Job("cheap", "W", -1, ((2, 2),)), 2)
    cluster.ask(Job("strong", "V", 5, ((1, 2),), ignore=True))
    cluster.break_("n3")
    return cluster


def user_leaf(cluster: Cluster) -> VirtualCell:
    return cluster.group("user").slots[0].virtual[0]


def test_a_sound_state_has_no_violations() -> None:
    """At the start, in use with preemption and a bad node, and after all pods are deleted."""
    assert violations(Cluster(config(), healthy=False).algorithm) == []
    cluster = busy()
    assert cluster.group("strong").state is GroupState.PREEMPTING
    assert violations(cluster.algorithm) == []
    cluster.delete(*cluster.bound, *cluster.waiting)
    assert violations(cluster.algorithm) == []


def lose_user(cluster: Cluster) -> None:
    cluster.leaves("n0")[0].user = None


def claim_nothing(cluster: Cluster) -> None:
    cluster.leaves("n3")[0].claimant = cluster.group("strong")


def miscount(cluster: Cluster) -> None:
    cluster.algorithm.chains[CHAIN].levels[1][0].used[7] = 1


def miscount_virtual(cluster: Cluster) -> None:
    user_leaf(cluster).preassigned.used[7] = 1


def free_twice(cluster: Cluster) -> None:
    cluster.algorithm.chains[CHAIN].free.free[3] |= 1


def forget_free(cluster: Cluster) -> None:
    cluster.algorithm.chains[CHAIN].free.obtainable[1] = 0


def promise_more(cluster: Cluster) -> None:
    cluster.algorithm.chains[CHAIN].vc_free["W"][2] += 1


def take_for_no_cell(cluster: Cluster) -> None:
    cluster.algorithm.chains[CHAIN].free.take(2, 2)


def forget_binding(cluster: Cluster) -> None:
    user_leaf(cluster).physical = None


def bind_idle(cluster: Cluster) -> None:
    chain = cluster.algorithm.chains[CHAIN]
    virtual = next(leaf for leaf in user_leaf(cluster).preassigned.leaf_cells() if leaf.physical is None)
    chain.bind(virtual, chain.levels[0][7])


def steal_quota(cluster: Cluster) -> None:
    slot = cluster.group("user").slots[0]
    slot.virtual = tuple(cluster.algorithm.virtual_clusters["W"].preassigned[1].leaf_cells())


def ignore_bad_node(cluster: Cluster) -> None:
    cluster.algorithm.healthy_nodes.add("n3")


def doom_healthy(cluster: Cluster) -> None:
    cluster.algorithm.chains[CHAIN].doomed["V", 3] = 1


def end_preemption(cluster: Cluster) -> None:
    cluster.group("cheap").state = GroupState.ALLOCATED


def lose_pods(cluster: Cluster) -> None:
    cluster.group("user").slots[0].pod = None


def take_device_twice(cluster: Cluster) -> None:
    other = cluster.group("cheap").slots[0]
    other.leaves = (*other.leaves[:1], *cluster.group("user").slots[0].leaves)


def preempt_the_strong(cluster: Cluster) -> None:
    spec = cluster.group("strong").spec
    cluster.group("cheap").spec = type(spec)(virtual_cluster="V", priority=9, affinity_group=spec.affinity_group)
    cluster.group("cheap").slots[0].virtual = cluster.group("strong").slots[0].virtual


def pretend_downgrade(cluster: Cluster) -> None:
    cluster.group("user").lazy_preemption = LazyPreemptionStatus("nobody", 0.0)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lose_user, "P1"),
        (claim_nothing, "P1"),
        (miscount, "P3"),
        (miscount_virtual, "P3"),
        (free_twice, "P4"),
        (forget_free, "P5"),
        (take_for_no_cell, "P6"),
        (promise_more, "P7"),
        (forget_binding, "P8"),
        (bind_idle, "P10"),
        (steal_quota, "P9"),
        (ignore_bad_node, "P10"),
        (doom_healthy, "P10"),
        (end_preemption, "P11"),
        (lose_pods, "P11"),
        (take_device_twice, "P11"),
        (take_device_twice, "P14"),
        (preempt_the_strong, "P15"),
        (pretend_downgrade, "P2"),
    ],
)
def test_damage_is_named(damage: Callable[[Cluster], None], named: str) -> None:
    """Each damage violates, among others, the invariant of that name."""
    cluster = busy()
    damage(cluster)
    assert named in {message.split()[0] for message in violations(cluster.algorithm)}
