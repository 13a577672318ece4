"""The cells, addresses, devices and quotas of known configurations."""

from __future__ import annotations

import time

from scheduler.hived.config.file import CellTypeSpec, HivedConfig, PhysicalCellSpec, VirtualCellSpec, VirtualClusterSpec
from scheduler.hived.config.resolve import resolve
from tests.support.hived.cluster import topology_of
from tests.support.hived.config import racks, resolved
from tests.support.hived.design_cluster import FOUR, P100_DEVICES, PIN, PIN_CT1, PIN_IB, design


def test_the_design_example() -> None:
    """Every feature of the file: mixed hierarchies, explicit devices, a node in two chains, three pinned cells."""
    topology = topology_of(design())

    leaves = {name: len(chain.leaf_indices) for name, chain in topology.chains.items()}
    assert leaves == {
        "DGX2-V100-NODE": 32,
        "CT1-NODE": 6,
        "4-DGX2-V100-NODE": 128,
        "3-DGX2-V100-NODE": 48,
        "3-DGX1-P100-NODE": 24,
        "2-IB-DGX2-V100-NODE": 32,
    }
    assert topology.chains["CT1-NODE"].leaf_indices == [0, 1, 0, 1, 8, 9]
    p100 = topology.chains["3-DGX1-P100-NODE"]
    assert p100.nodes == list(P100_DEVICES)
    assert p100.leaf_indices == [device for devices in P100_DEVICES.values() for device in devices]
    assert topology.chains["CT1-NODE"].pinned == {PIN_CT1: (1, 4)}
    assert topology.chains[FOUR].pinned == {PIN: (6, 0)}
    assert topology.chains["2-IB-DGX2-V100-NODE"].pinned == {PIN_IB: (6, 0)}
    vc1 = topology.virtual_clusters["VC1"]
    assert [cell.level for cell in vc1] == [5, 5, 5, 5, 5, 5, 6, 1, 6, 6]
    assert [cell.pinned_cell_id for cell in vc1[-3:]] == [PIN_CT1, PIN, PIN_IB]


def test_default_addresses_above_nodes_count_as_if_all_top_cells_were_alike() -> None:
    """The second level of the top cell at position 7 counts from 14, whatever the earlier cells are."""
    config = design()
    config["physicalCluster"]["physicalCells"].sort(key=lambda cell: cell["cellType"] == FOUR)
    four = topology_of(config).chains[FOUR]
    assert four.addresses[6] == ["8", "9"]
    assert four.addresses[5] == ["8/16", "8/17", "9/18", "9/19"]
    assert four.addresses[4][:2] == ["8/16/0.0.3.0", "8/16/0.0.3.1"]
    assert four.addresses[3][:2] == ["8/16/0.0.3.0/0", "8/16/0.0.3.0/1"]


def test_addresses_that_are_given_replace_the_default_and_change_no_other() -> None:
    """Naming a socket does not shift the devices below it."""
    topology = resolved(racks(("cellAddress: b0", "cellAddress: b0, cellChildren: [{cellAddress: left}, {}]")))
    assert topology.chains["HOST"].addresses[0] == ["b0/left/0", "b0/left/1", "b0/1/2", "b0/1/3"]
    assert topology.chains["HOST"].leaf_indices == [0, 1, 2, 3]


def test_resolving_is_quick_for_65536_gpus() -> None:
    """There are 15 cells in each of 8,192 nodes. It takes about 0.1 s; the limit leaves room for a busy machine."""
    types = {
        "PAIR": CellTypeSpec("GPU", 2),
        "QUAD": CellTypeSpec("PAIR", 2),
        "HOST": CellTypeSpec("QUAD", 2, is_node_level=True),
    }
    hosts = tuple(PhysicalCellSpec("HOST", f"node-{number}") for number in range(8192))
    clusters = {
        f"vc-{number}": VirtualClusterSpec((VirtualCellSpec("HOST", 400), VirtualCellSpec("HOST.PAIR", 200)))
        for number in range(10)
    }
    began = time.process_time()
    topology = resolve(HivedConfig(types, hosts, clusters))
    assert time.process_time() - began < 2
    assert topology.chains["HOST"].addresses[0][-1] == "node-8191/1/3/7"
    assert sum(map(len, topology.virtual_clusters.values())) == 6000
