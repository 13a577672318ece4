"""A restored snapshot continues the saved state."""

from __future__ import annotations

import json

import pytest
import yaml

from scheduler.hived.algorithm import HivedAlgorithm
from scheduler.hived.errors import UserError
from scheduler.hived.inspection.snapshot import decode_snapshot, restore, take_snapshot
from store.kube.api.objects import Object
from tests.support.hived.cluster import Cluster, Job, snapshot, topology_of
from tests.support.hived.design_cluster import PIN, design, nodes, played, quota
from tests.support.hived.invariants import violations


def saved_and_restored(cluster: Cluster) -> HivedAlgorithm:
    """Return the algorithm restored from a snapshot, in the same state."""
    text = b"".join(take_snapshot(cluster.algorithm, yaml.safe_dump(cluster.config, sort_keys=False)).pieces())
    saved = decode_snapshot(text)
    found = restore(saved, topology_of(yaml.safe_load(saved.config)), clock=lambda: cluster.now)
    assert snapshot(found) == snapshot(cluster.algorithm)
    assert violations(found) == []
    return found


@pytest.mark.parametrize("last", [0, 4, 9, 11, 17, 20])
def test_the_whole_state_is_restored(last: int) -> None:
    """After each step of the story: groups, claims, downgrades, bindings and counters are those of the original."""
    cluster = played(last)
    saved_and_restored(cluster)


def test_bad_nodes_and_doomed_cells_are_restored() -> None:
    """A tenant sees the same failures at the same cells."""
    cluster = played(15)
    cluster.break_("0.0.2.0", "0.0.2.1", "0.0.3.3", "1.0.0.1")
    cluster.remove_node("0.0.0.0")
    assert any(mask for chain in cluster.algorithm.chains.values() for mask in chain.doomed.values())
    saved_and_restored(cluster)


RACK_TYPES: Object = {
    "HOST": {"childCellType": "GPU", "childCellNumber": 2, "isNodeLevel": True},
    "RACK": {"childCellType": "HOST", "childCellNumber": 2},
    "ROW": {"childCellType": "HOST", "childCellNumber": 2},
}


def test_doomed_cells_of_all_levels_and_chains_are_restored() -> None:
    """Also where cells of two chains have the same address."""
    cells = [
        {"cellType": "RACK", "cellAddress": "0", "cellChildren": nodes("a0", "a1")},
        {"cellType": "RACK", "cellAddress": "1", "cellChildren": nodes("b0", "b1")},
        {"cellType": "ROW", "cellAddress": "0", "cellChildren": nodes("c0", "c1")},
    ]
    quotas = {"V": quota(("RACK", 1), ("RACK.HOST", 2), ("ROW", 1))}
    cluster = Cluster({"physicalCluster": {"cellTypes": RACK_TYPES, "physicalCells": cells}, "virtualClusters": quotas})
    cluster.break_(*cluster.node_names)
    assert len(take_snapshot(cluster.algorithm, "").doomed) == 4
    saved_and_restored(cluster)


@pytest.mark.parametrize("bad", [("a0", "b0"), ("b0",), ("a1",)])
def test_doomed_cells_that_share_an_address_are_distinguished(bad: tuple[str, ...]) -> None:
    """Above nodes an address need not be unique: each doomed cell is bound to a physical cell of its own."""
    racks = [{"cellType": "RACK", "cellAddress": "row", "cellChildren": nodes(f"{each}0", f"{each}1")} for each in "ab"]
    quotas = {"V": quota(("RACK", 2))}
    cluster = Cluster({"physicalCluster": {"cellTypes": RACK_TYPES, "physicalCells": racks}, "virtualClusters": quotas})
    cluster.break_(*bad)
    saved_and_restored(cluster)


def test_a_claim_on_cells_that_are_still_used_is_kept() -> None:
    """When the victim of a restored preemption is deleted, its leaves go to the claimant."""
    cluster = Cluster(design())
    cluster.ask(Job("low", "VC1", 1, ((1, 16),), pinned=PIN, lazy=False), pod="victim")
    cluster.ask(Job("high", "VC1", 2, ((2, 16),), pinned=PIN), pod="preemptor")
    found = saved_and_restored(cluster)
    (victim,) = found.groups["low"].pods()
    found.delete_allocated_pod(victim)
    cluster.delete("victim")
    assert snapshot(found) == snapshot(cluster.algorithm)


@pytest.mark.parametrize("text", [b"", b"[]", b'{"version": 1}', b"not json"])
def test_other_files_are_refused(text: bytes) -> None:
    """One clear error, whatever the file is."""
    with pytest.raises(UserError, match="not a snapshot"):
        decode_snapshot(text)


def test_another_version_is_refused() -> None:
    """A program of another version may give it another meaning."""
    document = json.loads(b"".join(take_snapshot(Cluster(design()).algorithm, "").pieces()))
    document["version"] = 99
    with pytest.raises(UserError, match="version 99"):
        decode_snapshot(json.dumps(document).encode())


def test_cells_that_are_not_configured_are_named() -> None:
    """A snapshot does not fit another cluster."""
    cluster = played(1)
    saved = take_snapshot(cluster.algorithm, "")
    other = design()
    nodes = other["physicalCluster"]["physicalCells"]
    for cell in nodes:
        if cell.get("cellAddress") == "0.0.1.0":
            cell["cellAddress"] = "renamed"
    with pytest.raises(UserError, match=r"no leaf cell 0 of node 0\.0\.1\.0"):
        restore(saved, topology_of(other), clock=lambda: 0.0)


def test_a_doomed_cell_that_is_not_configured_is_named() -> None:
    """It is an error: leaving it out would change the state."""
    cluster = Cluster(design())
    cluster.break_(*cluster.node_names)
    saved = take_snapshot(cluster.algorithm, "")
    virtual, _ = saved.doomed[0]
    saved.doomed[0] = virtual, "elsewhere/0"
    with pytest.raises(UserError, match="no free cell elsewhere/0"):
        restore(saved, topology_of(cluster.config), clock=lambda: 0.0)
