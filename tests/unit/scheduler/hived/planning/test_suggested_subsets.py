"""A gang gets nodes of whole racks whenever enough of them are suggested, whichever they are."""

from __future__ import annotations

import itertools
import random

import pytest

from store.kube.api.objects import Object
from tests.support.hived.cluster import Cluster, Job
from tests.support.hived.design_cluster import quota, regular

NODES = [f"n{number}" for number in range(6)]


@pytest.mark.parametrize(("cell_type", "number"), [("RACK.PAIR", 3), ("RACK", 1)])
@pytest.mark.parametrize("pods", [1, 2, 3])
def test_any_subset_of_nodes_is_enough(cell_type: str, number: int, pods: int) -> None:
    """Units are chosen before physical nodes are known: after a choice that can't be mapped, another is tried."""
    config = regular("GPU 2 NODE* 2 PAIR 3 RACK", NODES, one=quota((cell_type, number)))
    for size in range(len(NODES) + 1):
        for suggested in itertools.combinations(NODES, size):
            cluster = Cluster(config)
            answer = cluster.ask(Job("gang", "one", 0, ((pods, 2),)), suggested=suggested)
            assert answer.waits == (size < pods), suggested
            if not answer.waits:
                assert {place.partition(":")[0] for place in cluster.places("gang")} <= set(suggested)


def racks(number: int) -> Object:
    """Return racks of eight nodes with one device, all for one tenant."""
    names = [f"r{rack}n{node}" for rack in range(number) for node in range(8)]
    return regular("GPU 1 NODE* 8 RACK", names, one=quota(("RACK", number)))


def test_the_only_suggested_node_is_found_whatever_racks_are_in_use() -> None:
    """Racks in use with room on other nodes come first, however many: none of them hides the suitable rack."""
    cluster = Cluster(racks(6))
    for rack in range(6):
        assert cluster.ask(Job(f"job-{rack}", "one", 0), suggested=[f"r{rack}n0"]).node == f"r{rack}n0"
    assert cluster.ask(Job("last", "one", 0), suggested=["r5n7"]).node == "r5n7"


def test_a_gang_is_spread_over_what_is_suggested_of_racks_in_use() -> None:
    """Two suggested nodes are left in each of six racks in use: twelve pods that need them all get them."""
    cluster = Cluster(racks(6))
    for rack in range(6):
        cluster.ask(Job(f"job-{rack}", "one", 0), suggested=[f"r{rack}n0"])
    suggested = {f"r{rack}n{node}" for rack in range(6) for node in (3, 6)}
    assert not cluster.ask(Job("gang", "one", 0, ((12, 1),)), suggested=suggested).waits
    assert {place.partition(":")[0] for place in cluster.places("gang")} == suggested


def test_a_quota_with_room_on_other_nodes_is_not_reported_as_full() -> None:
    """The reason is correct: there is room, but kube-scheduler suggests none of its nodes."""
    cluster = Cluster(racks(1))
    cluster.ask(Job("first", "one", 0), suggested=["r0n0"])
    answer = cluster.ask(Job("next", "one", 0), suggested=["r0n0"])
    assert answer.waits
    assert "has room for pods of 1x1 leaf cells, but no healthy node that kube-scheduler suggests" in answer.reason


def test_a_gang_is_spread_over_what_is_suggested_of_racks_not_in_use() -> None:
    """Of six racks half the nodes are suggested: a gang that needs them all gets them."""
    cluster = Cluster(racks(6))
    suggested = {f"r{rack}n{node}" for rack in range(6) for node in range(0, 8, 2)}
    assert not cluster.ask(Job("gang", "one", 0, ((24, 1),)), suggested=suggested).waits
    assert {place.partition(":")[0] for place in cluster.places("gang")} == suggested


def test_a_rack_in_use_is_found_behind_racks_that_have_no_suggested_node() -> None:
    """The quota's other racks have no place on suggested nodes, which are all in the rack in use."""
    cluster = Cluster(racks(6))
    for rack in (5, 4, 3):
        cluster.ask(Job(f"job-{rack}", "one", 0), suggested=[f"r{rack}n0"])
    cluster.delete_group("job-5")
    cluster.delete_group("job-4")
    assert cluster.ask(Job("last", "one", 0), suggested=["r3n7"]).node == "r3n7"


@pytest.mark.parametrize("seed", range(40))
def test_all_suggested_nodes_of_rows_of_racks_can_be_used(seed: int) -> None:
    """With quota of all three rows of racks, some in use, a gang gets as many nodes as are suggested, anywhere."""
    config = regular("GPU 1 NODE* 8 RACK 3 ROW", [f"n{number}" for number in range(72)], one=quota(("ROW", 3)))
    cluster, choices = Cluster(config), random.Random(seed)
    nodes = choices.sample(cluster.node_names, 32)
    for node in nodes[: seed % 8]:
        assert cluster.ask(Job(f"on-{node}", "one", 0), suggested=[node]).node == node
    assert not cluster.ask(Job("gang", "one", 0, ((24, 1),)), suggested=nodes[8:]).waits
    assert {place.partition(":")[0] for place in cluster.places("gang")} == set(nodes[8:])
