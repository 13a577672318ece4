"""Bad nodes as virtual clusters see them, and safe splits of higher cells around them."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from scheduler.hived.cells.cells import Cell, PhysicalCell, VirtualCell
from tests.support.hived.cluster import Cluster, Job, snapshot
from tests.support.hived.design_cluster import (
    DGX2,
    FOUR,
    NODE_OF_FOUR,
    NODE_OF_THREE,
    P100_NODE,
    PAIR_OF_FOUR,
    PIN,
    PIN_CT1,
    PIN_IB,
    THREE,
    VC1,
    design,
    quota,
)

SHARED_THREE = quota((P100_NODE, 2), (NODE_OF_THREE, 1))
WHOLE_NODE = ((1, 16),)


def shared(*, healthy: bool = True) -> Cluster:
    """Return a cluster where VC1 has two nodes of the chain of three, and VC2 one."""
    return Cluster(design(VC1, SHARED_THREE), healthy=healthy)


def story(last: int) -> Cluster:
    """Play the story on that cluster up to the step `last`."""
    cluster = shared()
    cluster.ask(Job("g50", "VC1", 0, WHOLE_NODE, DGX2), pod="pod-50", suggested=["0.0.2.0"])
    for step in range(51, last + 1):
        match step:
            case 51:
                cluster.break_("0.0.2.1")
            case 52:
                cluster.ask(Job("g52", "VC2", 0, WHOLE_NODE, DGX2), pod="pod-52", suggested=["0.0.2.2"])
            case 53:
                cluster.delete("pod-52")
            case 54:
                cluster.break_("0.0.2.2")
            case 55:
                cluster.heal("0.0.2.2")
            case 56:
                cluster.break_("0.0.2.0", "0.0.2.2")
                cluster.delete("pod-50")
    return cluster


def seen(cluster: Cluster, virtual_cluster: str) -> list[str]:
    """Return how a VC sees its quota in the chain of three: health, use, and the node that a cell is bound to."""
    found = []
    for cell in cluster.preassigned(virtual_cluster, THREE):
        health = "healthy" if cell.healthy else "bad"
        bound = f" on {cell.physical.node}" if cell.physical else ""
        found.append(f"{'used' if cell.used else 'free'} {health}{bound}")
    return sorted(found)


def test_a_node_where_it_is_suggested() -> None:
    """One of VC1's cells is in use on the suggested node."""
    cluster = story(50)
    assert cluster.places("g50") == ["0.0.2.0:0-15"]
    assert seen(cluster, "VC1") == ["free healthy", "used healthy on 0.0.2.0"]


def test_one_bad_node_is_seen_by_no_tenant() -> None:
    """Each VC has one free cell, and one node is healthy and free: neither sees the bad one."""
    cluster = story(51)
    assert seen(cluster, "VC1") == ["free healthy", "used healthy on 0.0.2.0"]
    assert seen(cluster, "VC2") == ["free healthy"]


def test_the_last_free_node_is_bad() -> None:
    """VC2 takes the last healthy node, so VC1's free cell is bound to the bad one."""
    cluster = story(52)
    assert cluster.places("g52") == ["0.0.2.2:0-15"]
    assert seen(cluster, "VC1") == ["free bad on 0.0.2.1", "used healthy on 0.0.2.0"]
    assert seen(cluster, "VC2") == ["used healthy on 0.0.2.2"]


def test_a_doomed_cell_is_released_when_a_healthy_one_is_free() -> None:
    """VC2's pod is deleted, and VC1's cell is healthy and unbound again."""
    cluster = story(53)
    assert snapshot(cluster.algorithm) == snapshot(story(51).algorithm)
    assert seen(cluster, "VC1") == ["free healthy", "used healthy on 0.0.2.0"]


def test_no_healthy_node_is_left() -> None:
    """Both free nodes are bad, and so are the free cells of both VCs."""
    cluster = story(54)
    (first, used), (second,) = seen(cluster, "VC1"), seen(cluster, "VC2")
    assert used == "used healthy on 0.0.2.0"
    assert {first, second} == {"free bad on 0.0.2.1", "free bad on 0.0.2.2"}


def test_a_node_heals() -> None:
    """With one node healthy again, both VCs' free cells are healthy and unbound."""
    cluster = story(55)
    assert snapshot(cluster.algorithm) == snapshot(story(53).algorithm)


def test_every_node_of_a_chain_is_bad() -> None:
    """The used node becomes bad, too, then its pod is deleted: every cell of both quotas is bound to a bad node of its
    own.
    """
    cluster = story(56)
    cells = [*seen(cluster, "VC1"), *seen(cluster, "VC2")]
    assert len(seen(cluster, "VC1")) == 2
    assert sorted(cells) == ["free bad on 0.0.2.0", "free bad on 0.0.2.1", "free bad on 0.0.2.2"]


def with_descendants(cells: Iterable[Cell]) -> Iterable[Cell]:
    for cell in cells:
        assert isinstance(cell, PhysicalCell | VirtualCell)
        yield cell
        yield from with_descendants(cell.children)


def test_before_any_node_is_seen_all_cells_are_bad() -> None:
    """At start-up every physical and every virtual cell is bad, until nodes are reported."""
    cluster = shared(healthy=False)
    for chain in cluster.algorithm.chains.values():
        for level in chain.levels:
            assert not any(cell.healthy for cell in level)
    for virtual_cluster in cluster.algorithm.virtual_clusters.values():
        for cell in with_descendants(virtual_cluster.preassigned):
            assert isinstance(cell, VirtualCell)
            assert not cell.healthy, cell.address


def test_all_cells_are_healthy_once_all_nodes_are() -> None:
    """Once all nodes are healthy, in any order of reports, only pinned cells are bound."""
    cluster = shared(healthy=False)
    cluster.heal(*reversed(cluster.node_names))
    assert snapshot(cluster.algorithm) == snapshot(shared().algorithm)
    for virtual_cluster in cluster.algorithm.virtual_clusters.values():
        for cell in with_descendants(virtual_cluster.preassigned):
            assert isinstance(cell, VirtualCell)
            assert cell.healthy, cell.address
            assert cell.physical is None or cell.pinned_id, cell.address


@pytest.mark.parametrize("how", ["cordon", "break_", "remove_node"])
def test_what_makes_a_node_bad(how: str) -> None:
    """A cordoned, unready or deleted node is bad: it gets no new pods until it is healthy again."""
    cluster = shared()
    before = snapshot(cluster.algorithm)
    getattr(cluster, how)("0.0.1.0")
    assert cluster.ask(Job("g", "VC1", 0, WHOLE_NODE, DGX2), pod="pod").node == "0.0.5.0"
    cluster.delete("pod")
    cluster.heal("0.0.1.0")
    assert snapshot(cluster.algorithm) == before


SUGGESTED = ["0.0.3.2", "0.0.3.3", "0.0.4.2", "0.0.4.3"]
FOUR_NODES = quota((NODE_OF_FOUR, 4), pinned=(PIN_CT1, PIN, PIN_IB))
ONE_PAIR = quota((PAIR_OF_FOUR, 1))


def node_story(last: int) -> tuple[Cluster, list[str]]:
    """Play up to the step `last` and return the places of VC1's pods, where VC1 has four nodes and VC2 a pair."""
    cluster = Cluster(design(FOUR_NODES, ONE_PAIR))
    suggested = SUGGESTED
    places: list[str] = []
    for step in range(58, last + 1):
        if step == 59:
            cluster.break_("0.0.3.3")
        elif step == 60:
            cluster.break_("0.0.4.3" if "0.0.4.2" in places[-1] else "0.0.4.2")
            suggested = [*SUGGESTED, "0.0.4.0", "0.0.4.1"]
        places.append(cluster.ask(Job(f"g{step}", "VC1", 0, WHOLE_NODE, DGX2), suggested=suggested).place)
    return cluster, places


def test_a_node_by_buddy_allocation() -> None:
    """The first node comes from the pair next to the pinned one: no larger cell is split."""
    _, places = node_story(58)
    assert places == ["0.0.3.2:0-15"]


def test_a_higher_cell_is_split_if_all_quotas_still_fit() -> None:
    """The buddy is bad, so the other cell of four is split, at its suggested pair."""
    _, places = node_story(59)
    assert places[-1] in {"0.0.4.2:0-15", "0.0.4.3:0-15"}


def test_a_higher_cell_is_not_split_against_another_quota() -> None:
    """The last whole pair is VC2's guarantee: VC1 waits for its bad nodes instead, and VC2 gets it."""
    cluster, places = node_story(60)
    assert places[-1] == ""
    pair = Job("pair", "VC2", 0, ((2, 16),), DGX2)
    assert {answer.node for answer in cluster.ask_all(pair)} == {"0.0.4.0", "0.0.4.1"}
    assert cluster.preassigned("VC2", FOUR)[0].physical is not None
