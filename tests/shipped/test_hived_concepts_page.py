"""The concepts page's drawings and statements hold on the cluster that it draws."""

from __future__ import annotations

import itertools
import re

import pytest
import yaml

from scheduler.hived.cells.chain import Chain
from scheduler.hived.cells.groups import GroupState
from scheduler.hived.contract import PodSchedulingSpec
from tests.support.extender.manifests import EXAMPLES
from tests.support.hived.cluster import Cluster, Job
from tests.support.kube.shipped_manifests import ROOT

PAGES = ROOT / "docs" / "pages"
PAGE = (PAGES / "hived.md").read_text()
DRAWN = re.findall(r"<text[^>]*>([^<]+)", (PAGES / "assets" / "hived-cells.svg").read_text())
NODE, SOCKET = ((1, 8),), ((1, 4),)


@pytest.fixture
def cluster() -> Cluster:
    return Cluster(yaml.safe_load((EXAMPLES / "hived.yaml").read_text()))


def job(
    name: str, virtual_cluster: str, priority: int, members: tuple[tuple[int, int], ...], *, lazy: bool = False
) -> Job:
    return Job(name, virtual_cluster, priority, members, "A100", lazy=lazy)


def rack(cluster: Cluster) -> Chain:
    return cluster.algorithm.chains["A100-RACK"]


def free(cluster: Cluster) -> set[str]:
    """Return the addresses of the rack's cells in the free list."""
    chain = rack(cluster)
    return {
        cell.address
        for level, cells in enumerate(chain.levels, start=1)
        for cell in cells
        if chain.free.free[level] >> cell.index & 1
    }


def bindings(cluster: Cluster) -> dict[str, str]:
    """Return the physical cell of each cell of prod's quota in the rack, "" if it is not bound."""
    cells = cluster.algorithm.virtual_clusters["prod"].preassigned
    return {
        cell.address: cell.physical.address if cell.physical else "" for cell in cells if cell.chain is rack(cluster)
    }


def test_the_cells_are_those_of_the_drawing(cluster: Cluster) -> None:
    """Every address on the page is a cell's, and the types are at their levels."""
    chain = rack(cluster)
    drawn = [(text, kind) for text, kind in itertools.pairwise(DRAWN) if text.startswith("level ")]
    assert drawn == [(f"level {level}", chain.topology.cell_types[level - 1]) for level in (4, 3, 2, 1)]
    (address,) = re.findall(r"`(0/\S+)` is device 5", PAGE)
    assert address in chain.topology.addresses[0]
    for virtual in set(re.findall(r"\b(?:prod|research)/\d\b", "\n".join([PAGE, *DRAWN]))):
        name = virtual.partition("/")[0]
        assert virtual in [cell.address for cell in cluster.algorithm.virtual_clusters[name].preassigned]


def test_buddy_splitting(cluster: Cluster) -> None:
    """The four lines of the drawing: a node is split for a socket, the next node goes to prod, and the cell that
    research releases merges.
    """
    assert free(cluster) == {"0/a100-1", "0/a100-2", "0/a100-3"}
    socket = cluster.ask(job("tune", "research", 100, SOCKET))
    assert socket.place == "a100-1:0-3"
    assert free(cluster) == {"0/a100-1/1", "0/a100-2", "0/a100-3"}
    assert cluster.ask(job("train", "prod", 100, NODE)).place == "a100-2:0-7"
    cluster.delete(socket.pod)
    assert free(cluster) == {"0/a100-1", "0/a100-3"}


def test_the_other_socket_belongs_to_no_quota(cluster: Cluster) -> None:
    """research's second socket job waits, because its quota is one socket; opportunistic jobs run there and on pinned
    cells.
    """
    cluster.ask(job("tune", "research", 100, SOCKET))
    assert cluster.ask(job("more", "research", 100, SOCKET)).waits
    cluster.ask_all(job("train", "prod", 100, ((2, 8),)))
    sweep = cluster.ask_all(job("sweep", "research", -1, ((3, 4),)))
    assert {answer.place for answer in sweep} == {"a100-1:4-7", "a100-4:0-3", "a100-4:4-7"}


def test_lazy_preemption(cluster: Cluster) -> None:
    """Before and after: the quota changes hands, and all of `batch` keeps running in place."""
    assert [answer.place for answer in cluster.ask_all(job("batch", "prod", 0, ((2, 8),), lazy=True))] == [
        "a100-1:0-7",
        "a100-2:0-7",
    ]
    assert cluster.ask(job("urgent", "prod", 1000, NODE)).place == "a100-3:0-7"
    assert (cluster.group("batch").state, cluster.group("batch").is_opportunistic) == (GroupState.ALLOCATED, True)
    assert bindings(cluster) == {"prod/0": "0/a100-3", "prod/1": "", "prod/3": "0/a100-4"}


def test_doomed_bad_cells(cluster: Cluster) -> None:
    """prod has two nodes left and one of them breaks: one cell of its quota is bound to it until it heals."""
    cluster.ask(job("tune", "research", 100, SOCKET))
    cluster.break_("a100-3")
    assert bindings(cluster) == {"prod/0": "", "prod/1": "0/a100-3", "prod/3": "0/a100-4"}
    cluster.heal("a100-3")
    assert bindings(cluster) == {"prod/0": "", "prod/1": "", "prod/3": "0/a100-4"}


def test_every_field_of_a_request_is_documented() -> None:
    """The table has each field of a request under the annotation's name, except the one without effect."""
    documented = re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)
    assert set(PodSchedulingSpec.__struct_encode_fields__) - set(documented) == {"gangReleaseEnable"}


def test_every_example_is_listed() -> None:
    """The page lists no other file."""
    listed = set(re.findall(r"^\| `([\w-]+\.yaml)` \|", PAGE, re.MULTILINE))
    assert listed == {path.name for path in EXAMPLES.iterdir()} - {"hived.yaml"}
