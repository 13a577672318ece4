"""Defects of HiveD around configurations and placements, shown absent by their effects on users. Defects of the process
around the algorithm are tested with that process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scheduler.hived.errors import InvalidConfig
from tests.support.hived.cluster import Cluster, Job, topology_of
from tests.support.hived.design_cluster import FOUR, VC1, design, quota, regular


def test_a_chain_without_quota() -> None:
    """A chain that no VC uses does not crash start-up: opportunistic pods run there."""
    cluster = Cluster(design(VC1, quota(("CT1-NODE", 1))))
    job = Job("opportunist", "VC2", -1, ((1, 8),), "DGX1-P100")
    assert cluster.ask(job).place == "1.0.0.2:0-7"


@pytest.mark.parametrize("cell_type", ["NO-SUCH-TYPE", f"{FOUR}.NO-SUCH-TYPE", "CT1-NODE.DGX2-V100-NODE"])
def test_a_virtual_cell_of_an_unknown_type(cell_type: str) -> None:
    """A quota of a type that does not exist, or not in that chain, is refused at start-up, with its path."""
    with pytest.raises(InvalidConfig, match=r"virtualClusters\.VC2\.virtualCells\[0\]"):
        topology_of(design(VC1, quota((cell_type, 1))))


def test_a_mapping_that_only_a_matching_finds() -> None:
    """One node of the first virtual pair and both of the two others are to be mapped to pairs of which the second has
    one suggested node: the first virtual pair must yield the first physical one, after the others have failed.
    """
    names = [f"{pair}{number}" for pair in "xyz" for number in range(2)]
    cluster = Cluster(regular("GPU 2 NODE* 2 PAIR 3 ROW", names, A=quota(("ROW", 1)), B=quota()))
    cluster.ask(Job("filler", "A", 0, ((1, 2),)), pod="filler", suggested=["y1"])
    cluster.ask_all(Job("victim", "A", 0, ((2, 2),)), suggested=["y0", "x0"])
    assert cluster.places("victim") == ["y0:0-1", "x0:0-1"]
    cluster.delete("filler")
    suggested = ["x0", "x1", "y1", "z0", "z1"]
    answer = cluster.ask(Job("five", "A", 1, ((5, 2),)), suggested=suggested)
    assert not answer.waits, answer.reason
    assert {slot.node for slot in cluster.group("five").slots} == set(suggested)


def test_leaves_are_chosen_without_trying_all_combinations() -> None:
    """16 of 32 free leaves that are scattered over a node are found at once: trying all 600 million combinations would
    take longer than any test may.
    """
    cluster = Cluster(regular("GPU 2 PAIR 32 NODE*", ["n"], A=quota(("NODE", 1))))
    for number in range(64):
        cluster.ask(Job(f"one{number}", "A", 0), pod=f"one{number}")
    cluster.delete(*(f"one{number}" for number in range(0, 64, 2)))
    answer = cluster.ask(Job("many", "A", 0, ((1, 16),)))
    assert answer.devices == tuple(range(0, 32, 2))


@pytest.mark.parametrize(
    "jobs", [[Job("two", "nlp", 0, ((2, 4),))], [Job(f"one{n}", "nlp", 0, ((1, 4),)) for n in "ab"]]
)
def test_the_smaller_unit_is_preferred(jobs: list[Job]) -> None:
    """A tenant has a host and two single quads. Two pods of four, of one gang or of two, use the two quads, so that a
    pod of eight still finds the host.
    """
    nlp, vision = quota(("RACK.HOST", 1), ("RACK.HOST.QUAD", 2)), quota(("RACK.HOST", 2))
    names = ["a0", "a1", "a2", "a3"]
    cluster = Cluster(regular("A100 2 PAIR 2 QUAD 2 HOST* 4 RACK", names, nlp=nlp, vision=vision))
    for job in jobs:
        cluster.ask_all(job)
    assert cluster.ask(Job("whole", "nlp", 0, ((1, 8),))).devices == tuple(range(8))


@pytest.mark.parametrize(
    ("leaves", "members"),
    [
        pytest.param(4, ((1, 1), (2, 2), (1, 3)), id="3+1-2+2"),
        pytest.param(4, ((2, 1), (2, 3)), id="3+1-3+1"),
        pytest.param(7, ((4, 2), (2, 3)), id="3+2+2-3+2+2"),  # largest first with best fit misses it, too
    ],
)
@pytest.mark.parametrize("priority", [0, -1])
def test_a_packing_that_ascending_greedy_misses(
    leaves: int, members: tuple[tuple[int, int], ...], priority: int
) -> None:
    """A gang that fills two nodes exactly is placed, whatever order of its pods that takes."""
    cluster = Cluster(regular(f"GPU {leaves} NODE*", ["n0", "n1"], A=quota(("NODE", 2))))
    answers = cluster.ask_all(Job("gang", "A", priority, members))
    devices = [(answer.node, device) for answer in answers for device in answer.devices]
    assert len(devices) == len(set(devices)) == 2 * leaves


TRANSCRIPT = """
import json
from tests.support.hived.cluster import snapshot
from tests.support.hived.design_cluster import played
cluster = played(20)
print(json.dumps([cluster.bound, snapshot(cluster.algorithm)], sort_keys=True))
"""


def test_every_process_decides_alike() -> None:
    """The same story gives the same decisions and states in processes with different string hashes."""
    root = Path(__file__).parents[5]
    said = []
    for seed in ("1", "2"):
        environ = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(root)}
        said.append(
            subprocess.run([sys.executable, "-c", TRANSCRIPT], env=environ, check=True, capture_output=True).stdout
        )
    assert said[0] == said[1]
    assert json.loads(said[0])[0]
