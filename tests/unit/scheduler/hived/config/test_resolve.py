"""Reasons to refuse a configuration: each problem comes with the path in the file and what to do."""

from __future__ import annotations

import re

import pytest

from scheduler.hived.config.resolve import advice
from tests.support.hived.config import RACKS, problems, racks, read, resolved

TYPES = "physicalCluster.cellTypes"
CELLS = "physicalCluster.physicalCells"
HOST_B0 = "  - {cellType: HOST, cellAddress: b0}\n"
Edits = tuple[tuple[str, str], ...]


def also(cell: str) -> tuple[str, str]:
    """Return one more physical cell."""
    return HOST_B0, f"{HOST_B0}  - {cell}\n"


REFUSED: dict[str, tuple[Edits, str, str]] = {
    "type without children": (
        (("PAIR: {childCellType: GPU, childCellNumber: 2}", "PAIR: {childCellType: GPU, childCellNumber: 0}"),),
        f"{TYPES}.PAIR.childCellNumber",
        "is 0; a cell has at least 1 child",
    ),
    "type without a number": ((("GPU, childCellNumber: 2", "GPU"),), f"{TYPES}.PAIR.childCellNumber", "is 0; "),
    "type without a child type": ((("childCellType: GPU, ", ""),), f"{TYPES}.PAIR.childCellType", "is missing; name"),
    "type without a name": ((("    PAIR:", "    '':"),), TYPES, "a cell type has an empty name"),
    "types in a circle": (
        (("childCellType: GPU", "childCellType: RACK"),),
        f"{TYPES}.PAIR.childCellType",
        "would contain itself: PAIR > RACK > HOST > PAIR",
    ),
    "type that contains itself, in no use": (
        (("    RACK:", "    SELF: {childCellType: SELF, childCellNumber: 2}\n    RACK:"),),
        f"{TYPES}.SELF.childCellType",
        "would contain itself: SELF > SELF",
    ),
    "two node levels": (
        (("GPU, childCellNumber: 2", "GPU, childCellNumber: 2, isNodeLevel: true"),),
        f"{TYPES}.PAIR.isNodeLevel",
        "HOST, which contains it, is a node already",
    ),
    "no node level": (
        (("    RACK:", "    BOX: {childCellType: TPU, childCellNumber: 2}\n    RACK:"), also("{cellType: BOX}")),
        f"{CELLS}[2].cellType",
        "no type from BOX down to TPU is a node.*set isNodeLevel",
    ),
    "top below the node level": (
        (also("{cellType: PAIR, cellAddress: 0}"),),
        f"{CELLS}[2].cellType",
        "no type from PAIR down to GPU is a node.*begin with a type that contains nodes",
    ),
    "unknown top type": (
        (also("{cellType: BOX, cellAddress: c0}"),),
        f"{CELLS}[2].cellType",
        "'BOX' is not in physicalCluster.cellTypes; add it there",
    ),
    "top without a type": ((also("{cellAddress: c0}"),), f"{CELLS}[2].cellType", "is missing"),
    "too few children": (
        (("    - {cellAddress: a0}\n", ""),),
        f"{CELLS}[0].cellChildren",
        "lists 1, but a cell of type RACK has 2 of HOST",
    ),
    "too many children": (
        (("{cellAddress: a0}", "{cellAddress: a0}\n    - {cellAddress: a2}"),),
        f"{CELLS}[0].cellChildren",
        "lists 3, but a cell of type RACK has 2 of HOST; list them all, or correct childCellNumber",
    ),
    "wrong number of children in a node": (
        (("{cellAddress: a0}", "{cellAddress: a0, cellChildren: [{cellChildren: [{}, {}, {}]}, {}]}"),),
        f"{CELLS}[0].cellChildren[0].cellChildren[0].cellChildren",
        "lists 3, but a cell of type PAIR has 2 of GPU",
    ),
    "leaf with children": (
        (("cellAddress: b0", "cellAddress: b0, cellChildren: [{cellChildren: [{cellChildren: [{}]}, {}]}, {}]"),),
        f"{CELLS}[1].cellChildren[0].cellChildren[0].cellChildren",
        "GPU is one device",
    ),
    "contradicting type of a child": (
        (("{cellAddress: a0}", "{cellAddress: a0, cellType: RACK}"),),
        f"{CELLS}[0].cellChildren[0].cellType",
        "is RACK, but the cell around it consists of HOST; leave it out",
    ),
    "node without a name": (
        (("{cellAddress: a0}", "{}"),),
        f"{CELLS}[0].cellChildren[0].cellAddress",
        "is missing; a cell of the node level needs the name of its Kubernetes node",
    ),
    "nodes that are not listed": (
        (also("{cellType: RACK}"),),
        f"{CELLS}[2].cellChildren",
        "is missing; list the 2 of HOST down to the names of their nodes",
    ),
    "device that is no number": (
        (("cellAddress: b0", "cellAddress: b0, cellChildren: [{}, {cellChildren: [{}, {cellAddress: gpu3}]}]"),),
        f"{CELLS}[1].cellChildren[1].cellChildren[1].cellAddress",
        "is 'gpu3'; a leaf needs the number of its device",
    ),
    "device with a number beyond 32 bits": (
        (("cellAddress: b0", "cellAddress: b0, cellChildren: [{cellChildren: [{cellAddress: 2147483648}, {}]}, {}]"),),
        f"{CELLS}[1].cellChildren[0].cellChildren[0].cellAddress",
        "is '2147483648'",
    ),
    "node twice in a tree": (
        (("cellAddress: a0", "cellAddress: a1"),),
        f"{CELLS}[0].cellChildren[1].cellAddress",
        r"node 'a1' is at physicalCluster.physicalCells\[0\].cellChildren\[0\], too",
    ),
    "node twice in a chain": (
        (also("{cellType: HOST, cellAddress: b0}"),),
        f"{CELLS}[2].cellAddress",
        r"node 'b0' is at physicalCluster.physicalCells\[1\], too; a node can be once only in a chain \(HOST\)",
    ),
    "device twice in a node": (
        (("cellAddress: b0", "cellAddress: b0, cellChildren: [{}, {cellChildren: [{cellAddress: 0}, {}]}]"),),
        f"{CELLS}[1].cellChildren",
        "node 'b0' has device 0 here twice; give every leaf its own cellAddress",
    ),
    "device in two chains": (
        (("cellAddress: b0", "cellAddress: a0"),),
        f"{CELLS}[1].cellChildren",
        r"node 'a0' has device 0, 1, 2, 3 also in physicalCluster.physicalCells\[0\].cellChildren\[0\]; ",
    ),
    "pinned id twice in a chain": (
        (("{cellAddress: a0}", "{cellAddress: a0, pinnedCellId: pin}"),),
        f"{CELLS}[0].cellChildren[1].pinnedCellId",
        "'pin' is the id of .*, too; ids must be unique",
    ),
    "pinned id in two chains": (
        (("cellAddress: b0", "cellAddress: b0, pinnedCellId: pin"),),
        f"{CELLS}[1].pinnedCellId",
        r"'pin' is the id of physicalCluster.physicalCells\[0\].cellChildren\[1\], too",
    ),
    "pinned cell in a pinned cell": (
        (("  - cellType: RACK\n", "  - cellType: RACK\n    pinnedCellId: all\n"),),
        f"{CELLS}[0].cellChildren[1].pinnedCellId",
        "'pin' is inside of the pinned cell 'all'.*unpin one",
    ),
    "too many leaves": (
        (
            ("    RACK:", "    BOX: {childCellType: TPU, childCellNumber: 2000000000, isNodeLevel: true}\n    RACK:"),
            also("{cellType: BOX, cellAddress: c0}"),
        ),
        f"{CELLS}[2]",
        "2,000,000,000 leaves in all, more than 4,194,304; correct a childCellNumber",
    ),
    "virtual cluster without a name": ((("  one:", "  '':"),), "virtualClusters", "has an empty name"),
    "virtual cells without a type": (
        (("{cellType: RACK.HOST, ", "{"),),
        "virtualClusters.one.virtualCells[0].cellType",
        "is missing; name a chain",
    ),
    "unknown chain": (
        (("RACK.HOST", "ROCK.HOST"),),
        "virtualClusters.one.virtualCells[0].cellType",
        "begins with 'ROCK', which no physical cell has as its cellType; there are: RACK, HOST",
    ),
    "type that is no chain": (
        (("RACK.HOST", "PAIR"),),
        "virtualClusters.one.virtualCells[0].cellType",
        "begins with 'PAIR', which no physical cell has",
    ),
    "type that is not in the chain": (
        (("HOST.PAIR", "HOST.RACK"),),
        "virtualClusters.one.virtualCells[1].cellType",
        "'RACK' is not in the chain HOST, which consists of: HOST, PAIR, GPU",
    ),
    "less than no cells": (
        (("HOST.PAIR, cellNumber: 1", "HOST.PAIR, cellNumber: -1"),),
        "virtualClusters.one.virtualCells[1].cellNumber",
        "is -1; a quota is at least 0",
    ),
    "pinned cell without an id": (
        (("- {pinnedCellId: pin}", "- {}"),),
        "virtualClusters.two.pinnedCells[0].pinnedCellId",
        "is missing",
    ),
    "unknown pinned cell": (
        (("- {pinnedCellId: pin}", "- {pinnedCellId: pon}"),),
        "virtualClusters.two.pinnedCells[0].pinnedCellId",
        "'pon' is not the pinnedCellId of a physical cell; there are: pin",
    ),
    "pinned cell given twice": (
        (("- {pinnedCellId: pin}", "- {pinnedCellId: pin}\n    - {pinnedCellId: pin}"),),
        "virtualClusters.two.pinnedCells[1].pinnedCellId",
        r"is at virtualClusters.two.pinnedCells\[0\].pinnedCellId, too",
    ),
    "pinned cell given to two": (
        (("  two:\n", "    pinnedCells: [{pinnedCellId: pin}]\n  two:\n"),),
        "virtualClusters.two.pinnedCells[0].pinnedCellId",
        r"is at virtualClusters.one.pinnedCells\[0\].pinnedCellId, too; a pinned cell is given once",
    ),
    "quota above capacity, pinned cells counted": (
        (("RACK.HOST, cellNumber: 1", "RACK.HOST, cellNumber: 2"),),
        "virtualClusters.one.virtualCells[0].cellNumber",
        r"want 2 of HOST in RACK \(one 2\), but beside pinned cells and quotas of larger cells there are 1",
    ),
    "a whole rack, of which a part is pinned": (
        (("RACK.HOST, cellNumber: 1", "RACK, cellNumber: 1"),),
        "virtualClusters.one.virtualCells[0].cellNumber",
        r"want 1 of RACK in RACK \(one 1\), but .* there are 0",
    ),
    "sum of two virtual clusters above capacity": (
        (("  two:\n", "  two:\n    virtualCells: [{cellType: HOST.PAIR, cellNumber: 2}]\n"),),
        "virtualClusters.two.virtualCells[0].cellNumber",
        r"want 3 of PAIR in HOST \(one 1, two 2\), but .* there are 2; lower a cellNumber, or add physical cells",
    ),
    "a virtual cluster that wants none of it": (
        (
            ("RACK.HOST, cellNumber: 1", "RACK.HOST, cellNumber: 2"),
            ("  two:\n", "  two:\n    virtualCells: [{cellType: RACK.HOST, cellNumber: 0}]\n"),
        ),
        "virtualClusters.one.virtualCells[0].cellNumber",
        r"want 2 of HOST in RACK \(one 2\)",
    ),
    "parts above what larger cells leave": (
        (("  two:\n", "  two:\n    virtualCells: [{cellType: HOST, cellNumber: 1}]\n"),),
        "virtualClusters.one.virtualCells[1].cellNumber",
        r"want 1 of PAIR in HOST \(one 1\), but beside pinned cells and quotas of larger cells there are 0",
    ),
    "far more cells than there can be": (
        (("HOST.PAIR, cellNumber: 1", "HOST.PAIR, cellNumber: 9000000000000000000"),),
        "virtualClusters.one.virtualCells[1].cellNumber",
        "want 9000000000000000000 of PAIR",
    ),
}


@pytest.mark.parametrize(("edits", "path", "problem"), REFUSED.values(), ids=REFUSED)
def test_refused(edits: Edits, path: str, problem: str) -> None:
    """The configuration has one error; it is reported with its path, and no other path is blamed."""
    found = problems(racks(*edits))
    assert list(found) == [path]
    assert re.search(problem, found[path])


def test_the_unchanged_configuration_is_right() -> None:
    """Without this test, the cases above would prove nothing."""
    assert not problems(RACKS)


def test_every_problem_is_reported_at_once() -> None:
    """One reading of the file finds all problems: types, cells, devices, quotas and pinned cells."""
    together = (
        "type that contains itself, in no use",
        "top without a type",
        "device that is no number",
        "unknown chain",
        "pinned cell given to two",
    )
    found = problems(racks(*(edit for name in together for edit in REFUSED[name][0])))
    assert set(found) == {REFUSED[name][1] for name in together}


def test_quota_of_an_unpinned_cell() -> None:
    """The quota that is refused beside a pinned cell is accepted without it."""
    assert not problems(racks(("RACK.HOST, cellNumber: 1", "RACK.HOST, cellNumber: 2"), ("- {pinnedCellId: pin}", "")))


SCATTERED = """\
physicalCluster:
  cellTypes:
    HOST: {childCellType: GPU, childCellNumber: 4, isNodeLevel: true}
    RACK: {childCellType: HOST, childCellNumber: 2}
  physicalCells:
  - {cellType: RACK, cellChildren: [{cellAddress: a0, pinnedCellId: first}, {cellAddress: a1}]}
  - {cellType: RACK, cellChildren: [{cellAddress: b0, pinnedCellId: second}, {cellAddress: b1}]}
virtualClusters:
  pins: {pinnedCells: [{pinnedCellId: first}, {pinnedCellId: second}]}
  rack: {virtualCells: [{cellType: RACK, cellNumber: 1}]}
"""


def test_pinned_cells_count_where_they_are() -> None:
    """Two hosts of four are free, but no rack is whole: cell counts alone would accept the quota."""
    found = problems(SCATTERED)
    assert list(found) == ["virtualClusters.rack.virtualCells[0].cellNumber"]
    assert "there are 0" in found["virtualClusters.rack.virtualCells[0].cellNumber"]
    together = SCATTERED.replace("{cellAddress: b0, pinnedCellId: second}", "{cellAddress: b0}")
    assert not problems(together.replace("{cellAddress: a1}", "{cellAddress: a1, pinnedCellId: second}"))


NESTED = """\
physicalCluster:
  cellTypes:
    HOST: {childCellType: GPU, childCellNumber: 4, isNodeLevel: true}
    RACK: {childCellType: HOST, childCellNumber: 2}
  physicalCells:
  - {cellType: RACK, pinnedCellId: outer, cellChildren: [{cellAddress: a0, pinnedCellId: inner}, {cellAddress: a1}]}
  - {cellType: RACK, cellChildren: [{cellAddress: b0}, {cellAddress: b1}]}
virtualClusters:
  pins: {pinnedCells: [{pinnedCellId: FIRST}, {pinnedCellId: SECOND}]}
  hosts: {virtualCells: [{cellType: RACK.HOST, cellNumber: 3}]}
"""


@pytest.mark.parametrize(("first", "second"), [("outer", "inner"), ("inner", "outer")])
def test_of_nested_pinned_cells_the_inner_counts(first: str, second: str) -> None:
    """In any order of use: a quota that fits once the outer cell is unpinned is not reported as well."""
    found = problems(NESTED.replace("FIRST", first).replace("SECOND", second))
    assert list(found) == ["physicalCluster.physicalCells[0].cellChildren[0].pinnedCellId"]


def test_a_chain_that_no_virtual_cluster_uses_is_fine() -> None:
    """Such a chain is for opportunistic pods; a cluster in which no tenant has a quota is valid, too."""
    without = racks(("    - {cellType: HOST.PAIR, cellNumber: 1}\n", ""))
    assert list(resolved(without).chains) == ["RACK", "HOST"]
    assert not problems(RACKS[: RACKS.index("virtualClusters")] + "virtualClusters: {}\n")


def test_a_node_in_two_chains_with_different_devices_is_fine() -> None:
    """One machine can hold devices of several types."""
    other = (
        "[{cellChildren: [{cellAddress: 4}, {cellAddress: 5}]}, {cellChildren: [{cellAddress: 6}, {cellAddress: 7}]}]"
    )
    topology = resolved(racks(("cellAddress: b0", f"cellAddress: a0, cellChildren: {other}")))
    assert topology.chains["HOST"].nodes == ["a0"]
    assert topology.chains["HOST"].leaf_indices == [4, 5, 6, 7]


def test_parts_between_chain_and_type_are_ignored() -> None:
    """HiveD does the same."""
    assert resolved(racks(("RACK.HOST,", "RACK.NONSENSE.HOST,"))) == resolved(RACKS)


def test_a_quota_of_no_cells_is_ignored() -> None:
    """Administrators use it to keep the line in the file."""
    assert not problems(racks(("HOST.PAIR, cellNumber: 1", "HOST.PAIR, cellNumber: 0")))


def test_advice_on_probable_mistakes() -> None:
    """Unused types, chains and pinned cells are reported; the file stays valid."""
    text = racks(
        ("    RACK:", "    PAIT: {childCellType: GPU, childCellNumber: 2}\n    RACK:"),
        ("    - {cellType: HOST.PAIR, cellNumber: 1}\n", ""),
        ("- {pinnedCellId: pin}", ""),
    )
    config = read(f"skuTypes: {{}}\n{text}")
    assert [warning.path for warning in advice(config, resolved(text))] == [
        "skuTypes",
        f"{TYPES}.PAIT",
        f"{CELLS}[1]",
        f"{CELLS}[0].cellChildren[1].pinnedCellId",
    ]
    assert not list(advice(read(RACKS), resolved(RACKS)))
