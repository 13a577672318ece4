"""Nodes that kube-scheduler suggests or not, and mappings that must try more than the first cell."""

from __future__ import annotations

import pytest

from scheduler.hived.cells.groups import GroupState
from tests.support.hived.cluster import Cluster, Job, snapshot
from tests.support.hived.design_cluster import (
    DGX2,
    FIRST,
    NODE_OF_THREE,
    PAIR_OF_FOUR,
    PIN,
    PIN_CT1,
    PIN_IB,
    SECOND,
    design,
    on_pin,
    quota,
)

THREE_PAIRS = quota((PAIR_OF_FOUR, 3), (NODE_OF_THREE, 2), ("DGX2-V100-NODE", 2), pinned=(PIN_CT1, PIN, PIN_IB))


def all_but(cluster: Cluster, *names: str) -> list[str]:
    return [name for name in cluster.node_names if name not in names]


def test_an_opportunistic_pod_goes_where_it_is_suggested() -> None:
    """The only suggested node is taken."""
    cluster = Cluster(design())
    job = Job("g28", "VC1", -1)
    assert cluster.ask(job, suggested=["0.0.1.0"]).place == "0.0.1.0:0"


def test_suggestions_override_packing() -> None:
    """A pod on one node of the pinned pair does not attract the next one there if only the other node is suggested."""
    cluster = Cluster(design())
    assert cluster.ask(on_pin("g29", 0, (1, 1)), suggested=[FIRST]).place == f"{FIRST}:0"
    assert cluster.ask(on_pin("g30", 0, (1, 1)), suggested=[SECOND]).place == f"{SECOND}:0"


def test_a_gang_waits_for_a_node_that_is_not_suggested() -> None:
    """Half of the pinned pair is not suggested: the gang waits, and the reason names the node. The same pod is bound
    once all nodes are suggested.
    """
    cluster = Cluster(design())
    before = snapshot(cluster.algorithm)
    job = on_pin("g31", 1, (2, 16))
    answer = cluster.ask(job, pod="waiter", suggested=all_but(cluster, SECOND))
    assert answer.waits
    assert SECOND in answer.reason
    assert snapshot(cluster.algorithm) == before
    assert cluster.ask(job, pod="waiter").place == f"{FIRST}:0-15"


def test_no_preemption_on_nodes_that_are_not_suggested() -> None:
    """An unsuggested node is not claimed in the Preempting phase, either."""
    cluster = Cluster(design())
    cluster.ask_all(on_pin("g31", 1, (2, 16)))
    before = snapshot(cluster.algorithm)
    assert cluster.ask(on_pin("g33", 3, (2, 16)), suggested=all_but(cluster, SECOND)).waits
    assert snapshot(cluster.algorithm) == before


@pytest.mark.parametrize("goes_bad", [False, True])
def test_a_preemption_ends_when_its_node_can_not_be_used(goes_bad: bool) -> None:
    """A claimed node is no longer suggested, or goes bad, which counts for a group that ignores suggestions, too: the
    preemption is cancelled, and the pair is its user's again.
    """
    cluster = Cluster(design())
    cluster.ask_all(on_pin("g31", 1, (2, 16)))
    job = on_pin("g33", 3, (2, 16), ignore=goes_bad)
    assert cluster.ask(job, pod="strong").victims
    assert cluster.group("g33").state == GroupState.PREEMPTING
    if goes_bad:
        cluster.break_(SECOND)
    assert cluster.ask(job, pod="strong", suggested=None if goes_bad else all_but(cluster, SECOND)).waits
    assert "g33" not in cluster.groups
    assert cluster.group("g31").state == GroupState.ALLOCATED
    assert {leaf.state for leaf in cluster.leaves(FIRST)} == {"Used"}


def pairs() -> Cluster:
    """Return a cluster where VC1 has three pairs of the chain of four, and no single nodes there."""
    cluster = Cluster(design(THREE_PAIRS))
    pair = Job("g37", "VC1", 1, ((2, 16),), DGX2)
    answers = cluster.ask_all(pair, suggested=["0.0.3.2", "0.0.3.3"])
    assert [answer.place for answer in answers] == ["0.0.3.2:0-15", "0.0.3.3:0-15"]
    return cluster


def test_the_second_node_of_a_pair() -> None:
    """Only the second node of a pair is suggested, so the first one is refused."""
    cluster = pairs()
    assert cluster.ask(Job("g38", "VC1", 1, ((1, 16),), DGX2), suggested=["0.0.4.3"]).place == "0.0.4.3:0-15"


def test_a_mapping_that_fails_downgrades_no_group() -> None:
    """Four nodes would need a fourth suggested one: the gang waits, and both groups have kept their state, their
    priority and their virtual cells.
    """
    cluster = pairs()
    cluster.ask(Job("g38", "VC1", 1, ((1, 16),), DGX2), suggested=["0.0.4.3"])
    before = snapshot(cluster.algorithm)
    suggested = ["0.0.3.2", "0.0.3.3", "0.0.4.3"]
    assert cluster.ask(Job("g39", "VC1", 2, ((4, 16),), DGX2), suggested=suggested).waits
    for name in ("g37", "g38"):
        assert cluster.group(name).state == GroupState.ALLOCATED
        assert not cluster.group(name).is_opportunistic
    assert snapshot(cluster.algorithm) == before


def test_larger_cells_are_mapped_first() -> None:
    """A pair and two nodes of the quota each get suggested nodes, though the nodes, if they chose first, would leave no
    pair for it.
    """
    cluster = Cluster(design())
    suggested = {"0.0.3.2", "0.0.4.0", "0.0.4.1"}
    answers = cluster.ask_all(Job("three", "VC1", 1, ((3, 16),), DGX2), suggested=suggested)
    assert {answer.node for answer in answers if answer.place} == suggested
