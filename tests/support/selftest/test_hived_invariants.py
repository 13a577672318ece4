"""The invariants detect every kind of damage to a state, and find none in sound states."""

from __future__ import annotations

import pytest

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


def test_a_sound_state_has_no_violations() -> None:
    """At the start, in use with preemption and a bad node, and after all pods are deleted."""
    assert violations(Cluster(config(), healthy=False).algorithm) == []
    cluster = busy()
    assert cluster.group("strong").state is GroupState.PREEMPTING
    assert violations(cluster.algorithm) == []
    cluster.delete(*cluster.bound, *cluster.waiting)
    assert violations(cluster.algorithm) == []


def damage(cluster: Cluster, kind: str) -> None:
    """Damage the state of `busy`."""
    chain, cheap, strong = cluster.algorithm.chains[CHAIN], cluster.group("cheap"), cluster.group("strong")
    slot = cluster.group("user").slots[0]
    leaf = slot.virtual[0]
    match kind:
        case "a leaf has lost its user":
            cluster.leaves("n0")[0].user = None
        case "a leaf has a claimant that no group is":
            cluster.leaves("n3")[0].claimant = strong
        case "a cell is miscounted":
            chain.levels[1][0].used[7] = 1
        case "a virtual cell is miscounted":
            leaf.preassigned.used[7] = 1
        case "a used cell is free":
            chain.free.free[3] |= 1
        case "a free cell is forgotten":
            chain.free.obtainable[1] = 0
        case "more is promised than there is":
            chain.vc_free["W"][2] += 1
        case "a cell is taken for none":
            chain.free.take(2, 2)
        case "a binding is forgotten":
            leaf.physical = None
        case "an idle cell is bound":
            idle = next(other for other in leaf.preassigned.leaf_cells() if other.physical is None)
            chain.bind(idle, chain.levels[0][7])
        case "a quota is stolen":
            slot.virtual = tuple(cluster.algorithm.virtual_clusters["W"].preassigned[1].leaf_cells())
        case "a bad node is healthy":
            cluster.algorithm.healthy_nodes.add("n3")
        case "a healthy cell is doomed":
            chain.doomed["V", 3] = 1
        case "a preemption has no victim":
            cheap.state = GroupState.ALLOCATED
        case "a group has lost its pods":
            slot.pod = None
        case "a device is taken twice":
            other = cheap.slots[0]
            other.leaves = (*other.leaves[:1], *slot.leaves)
        case "the stronger is preempted":
            spec = strong.spec
            cheap.spec = type(spec)(virtual_cluster="V", priority=9, affinity_group=spec.affinity_group)
            cheap.slots[0].virtual = strong.slots[0].virtual
        case "a downgrade never happened":
            cluster.group("user").lazy_preemption = LazyPreemptionStatus("nobody", 0.0)
        case _:
            raise AssertionError(kind)


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("a leaf has lost its user", "P1"),
        ("a leaf has a claimant that no group is", "P1"),
        ("a downgrade never happened", "P2"),
        ("a cell is miscounted", "P3"),
        ("a virtual cell is miscounted", "P3"),
        ("a used cell is free", "P4"),
        ("a free cell is forgotten", "P5"),
        ("a cell is taken for none", "P6"),
        ("more is promised than there is", "P7"),
        ("a binding is forgotten", "P8"),
        ("a quota is stolen", "P9"),
        ("an idle cell is bound", "P10"),
        ("a bad node is healthy", "P10"),
        ("a healthy cell is doomed", "P10"),
        ("a preemption has no victim", "P11"),
        ("a group has lost its pods", "P11"),
        ("a device is taken twice", "P11"),
        ("a device is taken twice", "P14"),
        ("the stronger is preempted", "P15"),
    ],
)
def test_damage_is_named(kind: str, named: str) -> None:
    """Each damage violates, among others, the invariant of that name."""
    cluster = busy()
    damage(cluster, kind)
    assert named in {message.split()[0] for message in violations(cluster.algorithm)}
