"""Defects of HiveD around preemption, shown absent by their effects on users."""

from __future__ import annotations

import pytest

from scheduler.hived.cells.groups import GroupState
from tests.support.hived.cluster import FILTERING, PREEMPTING, Cluster, Job, snapshot
from tests.support.hived.design_cluster import FIRST, SECOND, design, on_pin, played, pod_of, quota, regular
from tests.support.hived.invariants import violations

BOTH = [f"{FIRST}:0-15", f"{SECOND}:0-15"]


@pytest.mark.parametrize("lazy", [False, True])
def test_a_victim_continues_after_a_cancelled_preemption(lazy: bool) -> None:
    """The preemptor is deleted: its victim is allocated again, and the victim's next pod gets its place."""
    cluster = Cluster(design())
    victim = on_pin("victim", 1, (2, 16), lazy=lazy)
    cluster.ask(victim, pod="victim-0")
    cluster.ask(on_pin("strong", 2, (1, 16)), pod="strong-0")
    assert cluster.group("victim").state == GroupState.BEING_PREEMPTED
    cluster.delete("strong-0")
    assert cluster.group("victim").state == GroupState.ALLOCATED
    assert cluster.ask(victim, pod="victim-1").place == f"{SECOND}:0-15"


def test_a_victim_s_next_pod_while_it_is_being_preempted() -> None:
    """A late pod of a group that is being preempted gets an answer, not an error, and is a victim like the others if it
    was bound.
    """
    cluster = Cluster(design())
    victim = on_pin("victim", 1, (2, 16), lazy=False)
    cluster.ask(victim, pod="victim-0")
    strong = on_pin("strong", 2, (2, 16))
    cluster.ask(strong, pod="strong-0")
    cluster.ask(victim, pod="victim-1")
    cluster.delete(*(name for name in ("victim-0", "victim-1")))
    assert [answer.place for answer in (cluster.ask(strong, pod=f"strong-{n}") for n in range(2))] == BOTH


def test_a_victim_continues_after_its_preemptor_is_overridden() -> None:
    """A stronger preemptor of one of the two nodes replaces that of both, and is deleted: no claim is left behind."""
    cluster = Cluster(design())
    victim = on_pin("victim", 1, (2, 16), lazy=False)
    cluster.ask_all(victim)
    before = snapshot(cluster.algorithm)
    cluster.ask(on_pin("strong", 2, (2, 16)), pod="strong-0")
    cluster.ask(on_pin("stronger", 3, (1, 16)), pod="stronger-0")
    assert set(cluster.groups) == {"victim", "stronger"}
    cluster.delete("stronger-0")
    assert snapshot(cluster.algorithm) == before


def test_a_bind_over_reserved_cells_cancels_the_weaker_preemptor() -> None:
    """In the Filtering phase a stronger pod is bound on a reserved node: the weaker preemption ends, and does not list
    the stronger pod as its victim.
    """
    cluster = Cluster(design())
    weak = on_pin("weak", 2, (1, 16))
    cluster.ask(on_pin("victim", 1, (2, 16), lazy=False), pod="victim-0")
    cluster.ask(weak, pod="weak-0")
    cluster.delete("victim-0")
    fill = on_pin("fill", 3, (1, 16), lazy=False)
    assert cluster.ask(fill, pod="fill-0", suggested=[SECOND], phase=FILTERING).place == f"{SECOND}:0-15"
    assert "weak" in cluster.groups
    strong = on_pin("strong", 3, (1, 16), lazy=False)
    assert cluster.ask(strong, pod="strong-0", phase=FILTERING).place == f"{FIRST}:0-15"
    assert "weak" not in cluster.groups
    assert cluster.ask(weak, pod="weak-0").waits
    assert {leaf.user.name for leaf in cluster.leaves(FIRST) if leaf.user} == {"strong"}
    assert not any(leaf.claimant for leaf in cluster.leaves(FIRST))


def test_a_bind_that_cancels_a_preemptor_with_bad_nodes() -> None:
    """One of the weaker preemptor's two nodes is bad: what it gives back does not upset the decision."""
    cluster = Cluster(regular("GPU 2 NODE*", ["n0", "n1", "n2"], A=quota(("NODE", 3))))
    cluster.ask_all(Job("victim", "A", 1, ((2, 2),), lazy=False))
    cluster.ask(Job("weak", "A", 2, ((2, 2),)), suggested=["n0", "n1"])
    cluster.delete_group("victim")
    cluster.break_("n1")
    cluster.ask_all(Job("strong", "A", 3, ((2, 2),)))
    assert {slot.node for slot in cluster.group("strong").slots} == {"n0", "n2"}
    assert set(cluster.groups) == {"strong"}
    assert violations(cluster.algorithm) == []


def test_a_preemption_that_ignores_suggestions_is_not_cancelled_by_them() -> None:
    """The group ignores suggestions, so a node that is no longer suggested changes nothing."""
    cluster = Cluster(design())
    cluster.ask_all(on_pin("victim", 1, (2, 16), lazy=False))
    strong = on_pin("strong", 2, (2, 16), ignore=True)
    cluster.ask(strong, pod="strong-0", suggested=[])
    claimed = cluster.group("strong")
    assert cluster.ask(strong, pod="strong-0", suggested=[FIRST]).victims
    assert cluster.ask(strong, pod="strong-1", suggested=[]).victims
    assert cluster.group("strong") is claimed
    assert cluster.places("strong") == BOTH


def test_naming_victims_while_filtering_downgrades_no_group() -> None:
    """A Filtering-phase answer that names victims changes nothing: groups to be downgraded keep their quota."""
    cluster = played(6)
    before = snapshot(cluster.algorithm)
    strong = on_pin("strong", 2, (2, 16))
    assert cluster.ask(strong, pod="strong-0", phase=FILTERING).victims == {pod_of(5)}
    assert snapshot(cluster.algorithm) == before
    assert cluster.ask(strong, pod="strong-0", phase=PREEMPTING).victims == {pod_of(5)}
    assert cluster.group("g5").is_opportunistic
