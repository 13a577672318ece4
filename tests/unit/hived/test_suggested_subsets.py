"""A gang gets nodes of whole racks whenever enough of them are suggested, whichever they are."""

from __future__ import annotations

import itertools

import pytest

from store.kube.objects import Object
from tests.support.hived import Cluster, Job

NODES = [f"n{number}" for number in range(6)]


def three_pairs(quota: str, number: int) -> Object:
    """One rack of three pairs of nodes with two devices, all for one tenant."""
    pairs = [
        {"cellChildren": [{"cellAddress": node} for node in NODES[first : first + 2]]}
        for first in range(0, len(NODES), 2)
    ]
    return {
        "physicalCluster": {
            "cellTypes": {
                "NODE": {"childCellType": "GPU", "childCellNumber": 2, "isNodeLevel": True},
                "PAIR": {"childCellType": "NODE", "childCellNumber": 2},
                "RACK": {"childCellType": "PAIR", "childCellNumber": 3},
            },
            "physicalCells": [{"cellType": "RACK", "cellChildren": pairs}],
        },
        "virtualClusters": {"one": {"virtualCells": [{"cellType": quota, "cellNumber": number}]}},
    }


@pytest.mark.parametrize(("quota", "number"), [("RACK.PAIR", 3), ("RACK", 1)])
@pytest.mark.parametrize("pods", [1, 2, 3])
def test_any_subset_of_nodes_is_enough(quota: str, number: int, pods: int) -> None:
    """Units are chosen before physical nodes are known: a choice that can't be mapped is not the last one."""
    for size in range(len(NODES) + 1):
        for suggested in itertools.combinations(NODES, size):
            cluster = Cluster(three_pairs(quota, number))
            answer = cluster.ask(Job("gang", "one", 0, ((pods, 2),)), suggested=suggested)
            assert answer.waits == (size < pods), suggested
            if not answer.waits:
                assert {place.partition(":")[0] for place in cluster.places("gang")} <= set(suggested)
