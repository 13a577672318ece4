"""The cluster of HiveD's own test story, and the jobs of its longest part.

Chains are in descending order of their names, the order in which the story tries them. VC1 has DGX2 nodes of several
chains and three pinned cells; VC2 has P100 nodes and sockets and a CT1 node.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable

from store.kube.api.objects import Object
from tests.support.hived.cluster import Cluster, Job

PIN = "vc1-pair"
FIRST, SECOND = "0.0.3.0", "0.0.3.1"  # the nodes of the pinned pair
PIN_CT1 = "vc1-ct1"
PIN_IB = "vc1-ib-pair"
DGX2 = "DGX2-V100"
P100 = "DGX1-P100"
CT1 = "CT1"
FOUR = "4-DGX2-V100-NODE"
THREE = "3-DGX2-V100-NODE"
NODE_OF_FOUR = f"{FOUR}.2-DGX2-V100-NODE.DGX2-V100-NODE"
PAIR_OF_FOUR = f"{FOUR}.2-DGX2-V100-NODE"
NODE_OF_THREE = f"{THREE}.DGX2-V100-NODE"
P100_NODE = "3-DGX1-P100-NODE.DGX1-P100-NODE"
P100_SOCKET = f"{P100_NODE}.DGX1-P100-SOCKET"
# The devices of the P100 nodes in the order of their cells.
P100_DEVICES = {
    "1.0.0.2": (0, 1, 2, 3, 4, 5, 6, 7),
    "1.0.0.1": (0, 1, 2, 3, 4, 5, 6, 7),
    "1.0.0.0": (1, 3, 4, 7, 0, 2, 6, 5),
}


def quota(*cells: tuple[str, int], pinned: Iterable[str] = ()) -> Object:
    """Return a virtual cluster: (type, number) pairs and pinned cells."""
    return {
        "virtualCells": [{"cellType": cell_type, "cellNumber": number} for cell_type, number in cells if number],
        "pinnedCells": [{"pinnedCellId": pinned_id} for pinned_id in pinned],
    }


def regular(shape: str, names: Iterable[str], **quotas: Object) -> Object:
    """Return a configuration of equal trees over nodes of these names. `shape`: the types and fan-outs from the leaf
    upward, the node's type with a star, such as `GPU 2 PAIR 2 NODE* 3 RACK`. `quotas`: by virtual cluster.
    """
    words = shape.replace("*", "").split()
    types: dict[str, Object] = {
        kind: {"childCellType": below, "childCellNumber": int(number), "isNodeLevel": f"{kind}*" in shape.split()}
        for below, number, kind in zip(words[::2], words[1::2], words[2::2], strict=False)
    }
    cells = nodes(*names)
    for kind in list(types)[list(types).index(shape.partition("*")[0].split()[-1]) + 1 :]:
        fanout = types[kind]["childCellNumber"]
        cells = [{"cellChildren": cells[at : at + fanout]} for at in range(0, len(cells), fanout)]
    tops = [{"cellType": words[-1], **cell} for cell in cells]
    return {"physicalCluster": {"cellTypes": types, "physicalCells": tops}, "virtualClusters": quotas}


VC1 = quota(
    (NODE_OF_FOUR, 2), (NODE_OF_THREE, 2), ("DGX2-V100-NODE", 2), (PAIR_OF_FOUR, 1), pinned=(PIN_CT1, PIN, PIN_IB)
)
VC2 = quota((P100_NODE, 2), (P100_SOCKET, 2), ("CT1-NODE", 1))


def design(vc1: Object = VC1, vc2: Object = VC2) -> Object:
    """Return the configuration, as in the file; the caller may change it."""
    return {
        "physicalCluster": {"cellTypes": _cell_types(), "physicalCells": _physical_cells()},
        "virtualClusters": copy.deepcopy({"VC1": vc1, "VC2": vc2}),
    }


def _cell_types() -> Object:
    def of(child: str, number: int, is_node: bool = False) -> Object:
        return {"childCellType": child, "childCellNumber": number, **({"isNodeLevel": True} if is_node else {})}

    def binary(node: str, leaf: str) -> Object:
        halves = [f"{node}-{size}-GPU" for size in (2, 4, 8)]
        return {
            halves[0]: of(leaf, 2),
            halves[1]: of(halves[0], 2),
            halves[2]: of(halves[1], 2),
            node: of(halves[2], 2, is_node=True),
        }

    return {
        "CT1-NODE": of("CT1", 2, is_node=True),
        "DGX1-P100-SWITCH": of("DGX1-P100", 2),
        "DGX1-P100-SOCKET": of("DGX1-P100-SWITCH", 2),
        "DGX1-P100-NODE": of("DGX1-P100-SOCKET", 2, is_node=True),
        "3-DGX1-P100-NODE": of("DGX1-P100-NODE", 3),
        **binary("DGX2-V100-NODE", DGX2),
        "2-DGX2-V100-NODE": of("DGX2-V100-NODE", 2),
        "3-DGX2-V100-NODE": of("DGX2-V100-NODE", 3),
        "4-DGX2-V100-NODE": of("2-DGX2-V100-NODE", 2),
        **binary("IB-DGX2-V100-NODE", "IB-DGX2-V100-V100"),
        "2-IB-DGX2-V100-NODE": of("IB-DGX2-V100-NODE", 2),
    }


def nodes(*names: str) -> list[Object]:
    """Return node-level cells as children."""
    return [{"cellAddress": name} for name in names]


def _physical_cells() -> list[Object]:
    def pair(first: str, second: str, **more: str) -> Object:
        return {"cellChildren": nodes(first, second), **more}

    return [
        {"cellType": "DGX2-V100-NODE", "cellAddress": "0.0.1.0"},
        {"cellType": "DGX2-V100-NODE", "cellAddress": "0.0.5.0"},
        {"cellType": "CT1-NODE", "cellAddress": "0.0.0.0"},
        {"cellType": "CT1-NODE", "cellAddress": "0.0.0.1"},
        {
            "cellType": "CT1-NODE",
            "cellAddress": "1.0.0.2",
            "cellChildren": [{"cellAddress": 8, "pinnedCellId": PIN_CT1}, {"cellAddress": 9}],
        },
        {"cellType": FOUR, "cellChildren": [pair("0.0.3.0", "0.0.3.1", pinnedCellId=PIN), pair("0.0.3.2", "0.0.3.3")]},
        {"cellType": FOUR, "cellChildren": [pair("0.0.4.0", "0.0.4.1"), pair("0.0.4.2", "0.0.4.3")]},
        {"cellType": THREE, "cellChildren": nodes("0.0.2.0", "0.0.2.1", "0.0.2.2")},
        {"cellType": "3-DGX1-P100-NODE", "cellChildren": [_p100(node) for node in P100_DEVICES]},
        {"cellType": "2-IB-DGX2-V100-NODE", "pinnedCellId": PIN_IB, "cellChildren": nodes("0.1.0.0", "0.1.0.1")},
    ]


def _p100(node: str) -> Object:
    """Return a node of two sockets of two switches of two devices, with its devices in their order."""
    devices = iter(P100_DEVICES[node])
    return {
        "cellAddress": node,
        "cellChildren": [
            {"cellChildren": [{"cellChildren": [{"cellAddress": next(devices)} for _ in "ab"]} for _ in "ab"]}
            for _ in "ab"
        ],
    }


def on_pin(name: str, priority: int, *members: tuple[int, int], lazy: bool = True, ignore: bool = False) -> Job:
    """Return a job of VC1 for its pinned pair."""
    return Job(name, "VC1", priority, members, DGX2, PIN, lazy=lazy, ignore=ignore)


# The jobs of steps 1-20; a gang's pods have consecutive numbers, so that step 6 is a pod of job 5.
JOBS = {
    1: Job("g1", "VC1", 0, ((1, 1),), DGX2),
    2: Job("g2", "VC1", 1, ((1, 1),), DGX2),
    3: Job("g3", "VC1", 2, ((1, 8),), DGX2),
    4: Job("g4", "VC1", -1, ((1, 1),), DGX2),
    5: Job("g5", "VC1", 1, ((2, 16),), DGX2, pinned=PIN),
    7: Job("g7", "VC2", 1, ((3, 8),), P100),
    8: Job("g8", "VC2", 1, ((1, 7), (1, 5))),
    10: Job("g10", "VC1", 2, ((2, 16),), DGX2, pinned=PIN),
    12: Job("g12", "VC1", 1, ((2, 16),), DGX2),
    14: Job("g14", "VC1", 1, ((2, 16),), DGX2),
    16: Job("g16", "VC1", -1, ((2, 16),), DGX2),
    18: Job("g18", "VC2", 0, ((1, 2),), CT1),
    19: Job("g19", "VC2", 1, ((1, 2),), CT1, lazy=False),
    20: Job("g20", "VC2", 2, ((1, 2),), CT1, lazy=False),
}
# The pod of each of these steps: its job, and its number of leaves.
PODS = {
    **{1: (1, 1), 2: (2, 1), 3: (3, 8), 4: (4, 1), 5: (5, 16), 6: (5, 16), 7: (7, 8), 8: (8, 7), 9: (8, 5)},
    **{10: (10, 16), 11: (10, 16), 12: (12, 16), 13: (12, 16), 14: (14, 16), 15: (14, 16), 16: (16, 16), 17: (16, 16)},
    **{18: (18, 2), 19: (19, 2), 20: (20, 2)},
}


def pod_of(step: int) -> str:
    """Return the name of the pod of a step from 1 to 20."""
    return f"pod-{step}"


def play(cluster: Cluster, step: int) -> str:
    """Play one step from 1 to 20: ask for its pod. Return the place, "" if it got none."""
    job, leaves = PODS[step]
    return cluster.ask(JOBS[job], leaves, pod=pod_of(step)).place


def played(last: int) -> Cluster:
    """Return the cluster after steps 1 to `last`, each on the state that the previous one left."""
    cluster = Cluster(design())
    for step in range(1, last + 1):
        play(cluster, step)
    return cluster
