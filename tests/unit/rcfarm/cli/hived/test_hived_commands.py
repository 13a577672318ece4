"""`rcfarm hived validate | show`: the reports on a configuration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.hived.config import RACKS, racks
from tests.support.programs import cli
from tests.support.programs.cli import Ran


def run(*arguments: str, stdin: str = "") -> Ran:
    """Run `rcfarm hived …`."""
    return cli.run("hived", *arguments, stdin=stdin)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Write a valid configuration."""
    path = tmp_path / "hived.yaml"
    path.write_text(RACKS)
    return path


def test_a_valid_file(file: Path) -> None:
    """One line says that the file is valid, and sums up its contents."""
    ran = run("validate", str(file))
    assert ran.code == 0
    assert ran.out == f"{file} is valid: 2 chains, 3 nodes, 12 leaves, 2 virtual clusters\n"


def test_all_errors_are_reported_in_the_order_of_the_file(file: Path) -> None:
    """Each error is one line that editors can parse: file, line, path, advice; the exit code is 1."""
    file.write_text(racks(("RACK.HOST", "ROCK.HOST"), ("{cellAddress: a0}", "{}")))
    ran = run("validate", str(file))
    assert ran.code == 1
    node, chain, verdict = ran.out.splitlines()
    assert node.startswith(
        f"{file}:9: error: physicalCluster.physicalCells[0].cellChildren[0].cellAddress: is missing; "
    )
    assert chain.startswith(f"{file}:15: error: virtualClusters.one.virtualCells[0].cellType: begins with 'ROCK'")
    assert verdict == f"{file} can't be used: 2 errors"


def test_warnings_do_not_make_a_file_wrong(file: Path) -> None:
    """Warnings are printed and counted; the exit code is 0."""
    file.write_text(f"skuTypes: {{}}\n{RACKS}")
    ran = run("validate", str(file))
    assert ran.code == 0
    assert ran.out.splitlines() == [
        f"{file}:1: warning: skuTypes: is not a field of this file and has no effect",
        f"{file} is valid: 2 chains, 3 nodes, 12 leaves, 2 virtual clusters; 1 warning",
    ]


def test_validate_for_programs(file: Path) -> None:
    """The JSON output has the same findings, for a valid and for an invalid file."""
    right = run("validate", str(file), "--output", "json")
    assert (right.code, right.json["valid"], right.json["leaves"], right.json["errors"]) == (0, True, 12, [])
    file.write_text(racks(("childCellNumber: 2", 'childCellNumber: "2"')))
    wrong = run("validate", str(file), "--output", "json")
    assert (wrong.code, wrong.json["valid"]) == (1, False)
    (error,) = wrong.json["errors"]
    assert error["line"] == 3
    assert error["path"] == "physicalCluster.cellTypes.PAIR.childCellNumber"


def test_a_file_that_is_no_yaml(file: Path) -> None:
    """The error names the line where the YAML is malformed."""
    file.write_text("physicalCluster:\n  cellTypes: [\n")
    ran = run("validate", str(file))
    assert ran.code == 1
    assert ran.out.startswith(f"{file}: error: is not YAML: line 3, column 1: ")


@pytest.mark.parametrize(
    ("content", "message"), [(None, "can't be read: No such file"), (b"\xff\xfe", "UTF-8"), (b"", "is empty")]
)
def test_a_file_that_is_no_text(tmp_path: Path, content: bytes | None, message: str) -> None:
    """The error is one line, without a traceback."""
    path = tmp_path / "hived.yaml"
    if content is not None:
        path.write_bytes(content)
    for command in ("validate", "show"):
        ran = run(command, str(path))
        assert ran.code == 1
        assert ran.err.startswith(f"error: FILE {path}: ")
        assert message in ran.err
        assert len(ran.err.splitlines()) == 1


def test_standard_input() -> None:
    """`-` reads standard input, as for other commands."""
    assert run("validate", "-", stdin=RACKS).out.startswith("- is valid: ")


def test_show_folds_cells_that_look_the_same(tmp_path: Path) -> None:
    """Forty racks are one line, and so are their hosts; a pinned device and its parents have lines of their own."""
    path = tmp_path / "hived.yaml"
    extra = "".join(
        f"  - {{cellType: RACK, cellChildren: [{{cellAddress: c{number}}}, {{cellAddress: d{number}}}]}}\n"
        for number in range(40)
    )
    host = "  - {cellType: HOST, cellAddress: b0}\n"
    pinned = host.replace("b0", "b0, cellChildren: [{}, {cellChildren: [{}, {pinnedCellId: gpu}]}]")
    path.write_text(racks((host, pinned + extra), ("    - {cellType: HOST.PAIR, cellNumber: 1}\n", "")))
    ran = run("show", str(path))
    assert ran.code == 0
    assert [line.rstrip() for line in ran.out.splitlines()] == [
        "RACK: 82 nodes, 328 leaves: 8 guaranteed, 320 left for opportunistic pods only",
        "  RACK > 2 HOST (node) > 2 PAIR > 2 GPU",
        "  CELL    ADDRESS        DEVICES  PINNED",
        "  RACK    0",
        "    HOST  a0             0-3",
        "    HOST  a1             0-3      pin",
        "  RACK    2 … 41 (40)",
        "    HOST  c0 … d39 (80)  0-3",
        "",
        "HOST: 1 node, 4 leaves: 0 guaranteed, 4 left for opportunistic pods only",
        "  HOST (node) > 2 PAIR > 2 GPU",
        "  CELL     ADDRESS  DEVICES  PINNED",
        "  HOST     b0       0-3",
        "    PAIR   0        0,1",
        "    PAIR   1        2,3",
        "      GPU  2        2",
        "      GPU  3        3        gpu",
        "",
        "VIRTUAL CLUSTER  CHAIN  CELL TYPE  CELLS  LEAVES  PINNED",
        "one              RACK   HOST           1       4",
        "two              RACK   HOST           1       4  pin",
    ]


def test_what_is_below_a_pinned_cell_is_shown_as_its_own(file: Path) -> None:
    """The nodes of a pinned rack, and the devices of a pinned node and of nodes in that rack, have their lines. They
    are not folded with equal cells that are free, and count as guaranteed.
    """
    pair = "{{cellChildren: [{{cellAddress: {}}}, {{cellAddress: {}}}]}}".format
    racks_of = [("c", "pinnedCellId: whole, "), ("d", ""), ("e", "")]
    more = "".join(
        f"  - {{cellType: RACK, {pinned}cellChildren: [{{cellAddress: {name}0}}, {{cellAddress: {name}1}}]}}\n"
        for name, pinned in racks_of
    )
    host = "  - {cellType: HOST, cellAddress: b0}\n"
    pinned_host = ("a1, pinnedCellId: pin}", f"a1, pinnedCellId: pin, cellChildren: [{pair(4, 5)}, {pair(6, 7)}]}}")
    given = ("- {pinnedCellId: pin}", "- {pinnedCellId: pin}\n    - {pinnedCellId: whole}")
    file.write_text(racks((host, more + host), pinned_host, given))
    lines = [line.rstrip() for line in run("show", str(file)).out.splitlines()]
    assert lines[:12] == [
        "RACK: 8 nodes, 32 leaves: 16 guaranteed, 16 left for opportunistic pods only",
        "  RACK > 2 HOST (node) > 2 PAIR > 2 GPU",
        "  CELL    ADDRESS      DEVICES  PINNED",
        "  RACK    0",
        "    HOST  a0           0-3",
        "    HOST  a1           4-7      pin",
        "  RACK    1                     whole",
        "    HOST  c0 … c1 (2)  0-3",
        "  RACK    2 … 3 (2)",
        "    HOST  d0 … e1 (4)  0-3",
        "",
        "HOST: 1 node, 4 leaves: 2 guaranteed, 2 left for opportunistic pods only",
    ]
    shown = run("show", str(file), "--output", "json").json["chains"][0]["cells"]
    below = [host["devices"] for rack in shown[:2] for host in rack["children"]]
    assert below == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]]


def test_devices_in_another_order_look_different(file: Path) -> None:
    """Nodes are folded only if equal device indices have equal places in them."""
    other = (
        "  - {cellType: HOST, cellAddress: b1, cellChildren: [{cellChildren: [{cellAddress: 3}, {cellAddress: 1}]}, "
    )
    other += "{cellChildren: [{cellAddress: 2}, {cellAddress: 0}]}]}\n"
    host = "  - {cellType: HOST, cellAddress: b0}\n"
    file.write_text(racks((host, f"{host}{host.replace('b0', 'b2')}{other}")))
    lines = run("show", str(file)).out.splitlines()
    assert "  HOST  b0 … b2 (2)  0-3" in [line.rstrip() for line in lines]
    assert "  HOST  b1           3,1,2,0" in [line.rstrip() for line in lines]


def test_show_for_programs(file: Path) -> None:
    """The JSON output has every address, folded or not."""
    shown = run("show", str(file), "--output", "json").json
    rack, host = shown["chains"]
    assert [(kind["cell_type"], kind["cells"]) for kind in rack["types"]] == [
        ("RACK", 1), ("HOST", 2), ("PAIR", 4), ("GPU", 8),
    ]  # fmt: skip
    assert (host["guaranteed"], host["opportunistic_only"]) == (2, 2)
    assert [cells["addresses"] for cells in rack["cells"][0]["children"]] == [["0/a0"], ["0/a1"]]
    assert shown["quotas"][1] == {
        "virtual_cluster": "one", "chain": "HOST", "cell_type": "PAIR", "cells": 1, "leaves": 2, "pinned_cell_id": "",
    }  # fmt: skip


def test_show_of_an_invalid_file_reports_its_errors(file: Path) -> None:
    """`show` reports the errors as `validate` does, also as JSON."""
    file.write_text(racks(("RACK.HOST", "ROCK.HOST")))
    ran = run("show", str(file))
    assert ran.code == 1
    assert "begins with 'ROCK'" in ran.out
    assert json.loads(run("show", str(file), "-o", "json").out)["valid"] is False


def test_a_cluster_without_quotas(file: Path) -> None:
    """A cluster without quotas is shown, with a note."""
    file.write_text(RACKS[: RACKS.index("virtualClusters")] + "virtualClusters: {}\n")
    ran = run("show", str(file))
    assert ran.code == 0
    assert "no virtual cluster has a quota" in ran.err
