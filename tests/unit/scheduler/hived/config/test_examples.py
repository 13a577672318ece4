"""The cells, addresses, devices and quotas of known configurations."""

from __future__ import annotations

import time

from scheduler.hived.cells.topology import ChainTopology, PreassignedCell
from scheduler.hived.config.file import (
    CellTypeSpec,
    HivedConfig,
    PhysicalCellSpec,
    VirtualCellSpec,
    VirtualClusterSpec,
)
from scheduler.hived.config.resolve import resolve
from tests.support.hived.cluster import topology_of
from tests.support.hived.config import racks, read, resolved
from tests.support.hived.design_cluster import FOUR, P100_DEVICES, PIN, PIN_CT1, PIN_IB, design

SMALL = """\
physicalCluster:
  cellTypes:
    T4-BOX: {childCellType: T4, childCellNumber: 4, isNodeLevel: true}
  physicalCells:
  - {cellType: T4-BOX, cellAddress: gpu-a}
  - {cellType: T4-BOX, cellAddress: gpu-b}
virtualClusters:
  research: {virtualCells: [{cellType: T4-BOX, cellNumber: 1}]}
  prod: {virtualCells: [{cellType: T4-BOX, cellNumber: 1}]}
"""

REALISTIC = """\
webServerAddress: ":9096"
waitingPodSchedulingBlockMilliSec: 50
physicalCluster:
  cellTypes:
    A100-PAIR: {childCellType: A100, childCellNumber: 2}
    A100-QUAD: {childCellType: A100-PAIR, childCellNumber: 2}
    A100-HOST: {childCellType: A100-QUAD, childCellNumber: 2, isNodeLevel: true}
    A100-RACK: {childCellType: A100-HOST, childCellNumber: 4}
    L4-HOST: {childCellType: L4, childCellNumber: 4, isNodeLevel: true}
  physicalCells:
  - cellType: A100-RACK
    cellChildren:
    - {cellAddress: a0}
    - {cellAddress: a1}
    - {cellAddress: a2}
    - {cellAddress: a3, pinnedCellId: vision-a3}
  - cellType: L4-HOST
    cellAddress: l0
    cellChildren: [{cellAddress: 4}, {cellAddress: 5}, {cellAddress: 6}, {cellAddress: 7}]
virtualClusters:
  vision:
    virtualCells:
    - {cellType: A100-RACK.A100-HOST, cellNumber: 1}
    - {cellType: L4-HOST, cellNumber: 1}
    pinnedCells: [{pinnedCellId: vision-a3}]
  nlp:
    virtualCells:
    - {cellType: A100-RACK.A100-HOST, cellNumber: 1}
    - {cellType: A100-RACK.A100-HOST.A100-QUAD, cellNumber: 2}
"""


def test_two_boxes() -> None:
    """The smallest cluster: each node is a top cell, and its devices count from 0."""
    topology = resolved(SMALL)

    boxes = [f"gpu-{box}/{device}" for box in "ab" for device in range(4)]
    assert topology.chains == {
        "T4-BOX": ChainTopology(
            name="T4-BOX",
            cell_types=("T4", "T4-BOX"),
            fanouts=(0, 4),
            node_level=2,
            addresses=(boxes, ["gpu-a", "gpu-b"]),
            nodes=["gpu-a", "gpu-b"],
            leaf_indices=[0, 1, 2, 3, 0, 1, 2, 3],
            pinned={},
        )
    }
    assert topology.virtual_clusters == {
        "research": (PreassignedCell("research/0", "T4-BOX", 2),),
        "prod": (PreassignedCell("prod/0", "T4-BOX", 2),),
    }


def test_racks_and_a_pinned_host() -> None:
    """Virtual cells are in file order, pinned ones last; default indices count through the node."""
    assert read(REALISTIC).waiting_pod_scheduling_block_milli_sec == 50
    topology = resolved(REALISTIC)

    rack, l4 = topology.chains.values()
    assert rack.nodes == ["a0", "a1", "a2", "a3"]
    assert rack.addresses[0][8:16] == [f"0/a1/{quad}/{pair}/{2 * pair + gpu}" for quad, pair, gpu in _octet()]
    assert rack.leaf_indices == [*range(8)] * 4
    assert rack.pinned == {"vision-a3": (4, 3)}
    assert (l4.addresses[0], l4.leaf_indices) == (["l0/4", "l0/5", "l0/6", "l0/7"], [4, 5, 6, 7])
    assert topology.virtual_clusters == {
        "vision": (
            PreassignedCell("vision/0", "A100-RACK", 4),
            PreassignedCell("vision/1", "L4-HOST", 2),
            PreassignedCell("vision/2", "A100-RACK", 4, "vision-a3"),
        ),
        "nlp": (
            PreassignedCell("nlp/0", "A100-RACK", 4),
            PreassignedCell("nlp/1", "A100-RACK", 3),
            PreassignedCell("nlp/2", "A100-RACK", 3),
        ),
    }


def _octet() -> list[tuple[int, int, int]]:
    """Return quad, pair counted through the node, and device within the pair, for each of eight devices."""
    return [(quad, 2 * quad + pair, gpu) for quad in (0, 1) for pair in (0, 1) for gpu in (0, 1)]


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
