"""The cells with enough usable nodes, none of them missed."""

from __future__ import annotations

import random

import pytest

from scheduler.hived.planning.mapping import UsableNodes
from tests.support.hived.cluster import Cluster, Job
from tests.support.hived.design_cluster import quota, regular

RACKS, NODES = 12, 3  # racks of 3 nodes, each with 2 pairs

NAMES = [f"n{rack}-{node}" for rack in range(RACKS) for node in range(NODES)]
CONFIG = regular(f"GPU 2 PAIR 2 HOST* {NODES} RACK", NAMES, a=quota(("RACK", RACKS)))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("heeds", [True, False])
def test_cells_with_enough_usable_nodes(seed: int, heeds: bool) -> None:
    """At every level exactly the cells with at least that many healthy, and suggested, nodes."""
    rng = random.Random(seed)
    cluster = Cluster(CONFIG)
    cluster.break_(*rng.sample(cluster.node_names, 12))
    suggested = frozenset(rng.sample(cluster.node_names, 20)) | {"elsewhere"} if heeds else None
    chain = cluster.algorithm.chains["RACK"]
    usable = UsableNodes(chain, suggested)
    allowed = {name for name in cluster.algorithm.healthy_nodes if suggested is None or name in suggested}
    for level, cells in enumerate(chain.levels, start=1):
        for needed in range(1, NODES + 1 if level == 4 else 2):
            expected = {
                cell.index for cell in cells if len({leaf.node for leaf in cell.leaf_cells()} & allowed) >= needed
            }
            assert usable.cells(level, needed) == sum(1 << index for index in expected), (level, needed)


def test_the_only_suitable_rack_is_found() -> None:
    """However many others are tried first: two nodes of the eleventh rack are suggested, and one of each other."""
    cluster = Cluster(CONFIG)
    suggested = [f"n{rack}-0" for rack in range(RACKS)] + ["n10-2"]
    answers = cluster.ask_all(Job("job", "a", 0, members=((2, 4),)), suggested=suggested)
    assert {answer.node for answer in answers} == {"n10-0", "n10-2"}


@pytest.mark.parametrize("priority", [-1, 0])
def test_a_few_suggested_nodes_are_found(priority: int) -> None:
    """Each is used, whatever the state of the many others; then the job has to wait."""
    cluster = Cluster(CONFIG)
    nodes = ["n3-1", "n11-2"]
    jobs = [Job(f"job-{number}", "a", priority, members=((1, 4),)) for number in range(3)]
    answers = [cluster.ask(job, suggested=nodes) for job in jobs]
    assert {answer.node for answer in answers[:2]} == set(nodes)
    assert answers[2].waits
