"""What-if analysis on a copy: nodes lost, cells added, pods one after the other."""

from __future__ import annotations

import pytest
import yaml

from scheduler.hived.errors import UserError
from scheduler.hived.inspection.explain import simulate
from scheduler.hived.inspection.snapshot import Snapshot, take_snapshot
from tests.support.hived.cluster import Cluster, Job, snapshot
from tests.support.hived.design_cluster import design, played


def saved(cluster: Cluster) -> Snapshot:
    return take_snapshot(cluster.algorithm, yaml.safe_dump(cluster.config, sort_keys=False))


def test_pods_see_the_places_of_earlier_ones() -> None:
    """Three pods for two nodes: the third waits. The original is unchanged."""
    cluster = Cluster(design())
    before = snapshot(cluster.algorithm)
    jobs = [Job(f"job-{number}", "VC1", 0, ((1, 16),), lazy=False) for number in range(8)]
    found = simulate(saved(cluster), [job.pod(f"pod-{number}", 16) for number, job in enumerate(jobs)])
    verdicts = [pod.verdict for pod in found.pods]
    assert len({place for pod in found.pods for place in pod.places}) == verdicts.count("bind") == 8
    assert snapshot(cluster.algorithm) == before


def test_a_gang_is_placed_once() -> None:
    """Its second pod goes to the place allocated by its first one."""
    job = Job("gang", "VC1", 0, ((2, 16),))
    first, second = simulate(saved(Cluster(design())), [job.pod("g-0", 16), job.pod("g-1", 16)]).pods
    assert (len(first.places), second.places) == (2, first.places[1:])


def test_a_lost_node_hits_the_groups_on_it() -> None:
    """They are named with their pods; a quota is reported only if no healthy hardware is left for it."""
    cluster = played(17)
    found = simulate(saved(cluster), [], lose=["0.0.3.2", "0.0.4.2"])
    assert [(hit.group, hit.pods) for hit in found.hit_groups] == [
        ("g12", ["test/pod-12 on 0.0.3.2"]),
        ("g16", ["test/pod-16 on 0.0.4.2"]),
    ]
    assert found.unserved_quotas == []


def test_quotas_that_lose_their_last_hardware_are_reported() -> None:
    """They are counted as by the scheduler, with the number before the change."""
    cluster = Cluster(design())
    cluster.break_("0.0.2.0", "0.0.2.1")
    (quota,) = simulate(saved(cluster), [], lose=["0.0.2.2"]).unserved_quotas
    assert (quota.virtual_cluster, quota.cell_type, quota.cells, quota.before) == ("VC1", "DGX2-V100-NODE", 2, 1)


def test_added_cells_can_be_used() -> None:
    """An opportunistic gang without room gets it on the nodes of a new cell, which are healthy."""
    cluster = played(17)
    job = Job("wide", "VC1", -1, ((4, 16),))
    pods = [job.pod("wide-0", 16)]
    assert simulate(saved(cluster), pods).pods[0].verdict == "wait"
    (found,) = simulate(saved(cluster), pods, add=["4-DGX2-V100-NODE=n0,n1,n2,n3"]).pods
    assert [place.partition(":")[0] for place in found.places] == ["n0", "n1", "n2", "n3"]


@pytest.mark.parametrize(
    ("add", "message"),
    [
        ("n0", "write CELL_TYPE=NODE"),
        ("UNKNOWN=n0", "with one of the cell types DGX2-V100-NODE"),
        ("4-DGX2-V100-NODE=n0,n1", "has 4 nodes, here are 2"),
    ],
)
def test_impossible_cells_are_refused(add: str, message: str) -> None:
    """The error says what to write."""
    with pytest.raises(UserError, match=message):
        simulate(saved(Cluster(design())), [], add=[add])


def test_an_unknown_node_is_refused() -> None:
    """A misspelt name would otherwise change nothing."""
    with pytest.raises(UserError, match="--lose nowhere: the configuration has no such node"):
        simulate(saved(Cluster(design())), [], lose=["nowhere"])
