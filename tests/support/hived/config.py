"""Small HiveD configurations as text, and helpers to read them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from scheduler.hived.cells.topology import Topology
from scheduler.hived.config.file import HivedConfig, read_config
from scheduler.hived.config.resolve import resolve
from scheduler.hived.errors import InvalidConfig

NOWHERE = Path("/nonexistent")

RACKS = """\
physicalCluster:
  cellTypes:
    PAIR: {childCellType: GPU, childCellNumber: 2}
    HOST: {childCellType: PAIR, childCellNumber: 2, isNodeLevel: true}
    RACK: {childCellType: HOST, childCellNumber: 2}
  physicalCells:
  - cellType: RACK
    cellChildren:
    - {cellAddress: a0}
    - {cellAddress: a1, pinnedCellId: pin}
  - {cellType: HOST, cellAddress: b0}
virtualClusters:
  one:
    virtualCells:
    - {cellType: RACK.HOST, cellNumber: 1}
    - {cellType: HOST.PAIR, cellNumber: 1}
  two:
    pinnedCells:
    - {pinnedCellId: pin}
"""
"""A rack of two hosts, one of them pinned, and a host that is a chain of its own; every tree is binary."""


def read(text: str, environ: Mapping[str, str] | None = None, home: Path = NOWHERE) -> HivedConfig:
    """Parse the text, on a machine without defaults unless given."""
    return read_config(text, environ=environ or {}, home=home)


def resolved(text: str) -> Topology:
    return resolve(read(text))


def racks(*edits: tuple[str, str]) -> str:
    """Return `RACKS` with the first occurrence of each old text replaced by the new one."""
    text = RACKS
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new, 1)
    return text


def problems(text: str) -> dict[str, str]:
    """Return each problem by its path; empty for a valid file."""
    try:
        resolved(text)
    except InvalidConfig as invalid:
        return {error.path: error.problem for error in invalid.errors}
    return {}
