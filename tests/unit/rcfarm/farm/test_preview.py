"""What a change would do: the waves of a rollout, shortages, and a digest of the outcome."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from rcfarm.farm.preview import Preview, PreviewInput, preview
from scheduler.protocol import Absence, Eligibility
from store.schema.records import NodeTransfer, RCSpec, Rollout, UpdatePolicy
from tests.support.farm.virtual_fleet import as_shown

NODES = [f"node-{number}" for number in range(1, 7)]


def situation(replicas: int, running: int, *, nodes: list[str] = NODES, **fields: Any) -> PreviewInput:
    """Return an RC whose pods run the former manifest and pass."""
    update = UpdatePolicy(**fields.pop("update", {}))
    spec = RCSpec(id="web", manifest="new", replicas_desired=replicas, revision=2, update=update)
    current = dict.fromkeys(nodes[:running], "old")
    given: dict[str, Any] = {"passing": frozenset(current), "now": 1_800_000_000.0, **fields}
    return PreviewInput(spec, Eligibility(frozenset(nodes), tuple(nodes)), current, **given)


def steps(shown: Preview) -> list[tuple[float, str, tuple[str, ...]]]:
    kinds = ("add", "surge", "update", "back", "remove")
    return [(wave.after, kind, nodes) for wave in shown.waves for kind in kinds if (nodes := getattr(wave, kind))]


def test_a_canary_and_its_waves_with_their_times() -> None:
    """One second until a pod passes, and ten for which it must."""
    shown = preview(situation(4, 4, update={"max_unavailable": "2"}))
    assert steps(shown) == [
        (0.0, "update", ("node-1",)),
        (11.0, "update", ("node-2", "node-3")),
        (22.0, "update", ("node-4",)),
    ]
    assert (shown.state, shown.seconds, shown.placed) == ("converged", 33.0, 4)


def test_a_surge_changes_nothing_that_is_not_replaced_before() -> None:
    """In the end the pods that were left out make room, without having been restarted."""
    shown = preview(situation(4, 4, update={"max_unavailable": "0", "max_surge": "2", "canary": "0"}))
    assert steps(shown) == [
        (0.0, "surge", ("node-5", "node-6")),
        (11.0, "update", ("node-1", "node-2")),
        (22.0, "remove", ("node-3", "node-4")),
    ]


def test_a_shortage_is_known_before_anything_is_written() -> None:
    shown = preview(situation(9, 0))
    assert (shown.placed, shown.state) == (6, "short")
    assert "3 of 9 replicas have no node" in shown.reasons[0].message


def test_a_dead_node_slows_it_down_as_it_will() -> None:
    """It uses the budget up, is not waited for, and is no canary: the others are changed one by one."""
    given = situation(
        3, 3, absent={"node-2": Absence("2027-01-15T08:00:00Z", "")}, passing=frozenset({"node-1", "node-3"})
    )
    shown = preview(given)
    assert [nodes for _, _, nodes in steps(shown)] == [("node-1",), ("node-2", "node-3")]


def test_nothing_to_do() -> None:
    given = situation(3, 3)
    spec = msgspec.structs.replace(given.spec, manifest="old")
    shown = preview(PreviewInput(spec, given.eligibility, given.current, given.passing, now=given.now))
    assert (shown.waves, shown.state, shown.seconds) == ((), "converged", 0.0)


@pytest.mark.parametrize("other", [situation(4, 3), situation(4, 4, nodes=NODES[1:])])
def test_the_digest_is_that_of_the_outcome(other: PreviewInput) -> None:
    """The same while the farm would do the same, at whatever time; another one when it would not."""
    digest = preview(situation(4, 4)).digest
    assert preview(situation(4, 4, now=1_900_000_000.0), starts_in=7.0).digest == digest
    assert preview(other).digest != digest


def test_the_fleet_does_what_was_shown() -> None:
    """Random fleets, none of which fails: the changes, their order, and the nodes in the end are those of the plan."""
    for seed in range(40):
        as_shown(random.Random(seed))


def test_a_drained_node_is_left_when_the_next_one_has_taken_over() -> None:
    """A pod that passes is replaced first, one after the other; what does not pass moves at once."""
    spec = RCSpec(id="web", manifest="old", replicas_desired=3, allocation_strategy="dynamic")
    nodes = NODES[2:]
    current = dict.fromkeys(NODES[:3], "old")
    shown = preview(PreviewInput(spec, Eligibility(frozenset(nodes), tuple(nodes)), current, frozenset(current)))
    assert [(wave.after, wave.move) for wave in shown.waves] == [
        (0.0, (("node-1", "node-4"),)),
        (11.0, (("node-2", "node-5"),)),
    ]
    assert (shown.state, shown.placed, shown.seconds) == ("converged", 3, 22.0)
    absent = {"node-2": Absence("2027-01-15T08:00:00Z", "", is_lost=True)}
    passing = frozenset({"node-1", "node-3"})
    dead = preview(
        PreviewInput(spec, Eligibility(frozenset(nodes), tuple(nodes)), current, passing=passing, absent=absent)
    )
    assert [(wave.after, wave.move) for wave in dead.waves] == [
        (0.0, (("node-2", "node-4"),)),
        (1.0, (("node-1", "node-5"),)),
    ]


def test_a_moment_is_as_short_as_the_policy_says() -> None:
    shown = preview(situation(2, 2, update={"min_healthy_time": 0.3}))
    assert steps(shown) == [(0.0, "update", ("node-1",)), (1.3, "update", ("node-2",))]


def test_a_lost_intent_is_written_again() -> None:
    given = situation(2, 0)
    spec = msgspec.structs.replace(given.spec, manifest="old")
    current = {"node-1": None, "node-2": "old"}
    shown = preview(PreviewInput(spec, given.eligibility, current, frozenset({"node-2"})))
    assert (steps(shown), shown.state) == ([(0.0, "add", ("node-1",))], "converged")


def test_the_way_back_is_shown_as_such() -> None:
    at = "2027-01-15T08:00:00Z"
    rollout = Rollout(
        revision=2,
        manifest="new",
        stable="old",
        stable_revision=1,
        state="reverting",
        since=at,
        started=at,
        progressed=at,
    )
    given = situation(2, 2, rollout=rollout)
    shown = preview(replace(given, current={"node-1": "new", "node-2": "old"}))
    assert steps(shown) == [(0.0, "back", ("node-1",))]


def test_a_transfer_that_is_taken_back_leaves_the_former_pod() -> None:
    """Its node is eligible again: the outcome is that of the RC without the other pod."""
    spec = RCSpec(id="web", manifest="old", replicas_desired=1, allocation_strategy="dynamic")
    eligibility, both = Eligibility(frozenset(NODES), tuple(NODES)), ("node-1", "node-4")
    alone = preview(PreviewInput(spec, eligibility, {"node-1": "old"}, frozenset({"node-1"})))
    moving = PreviewInput(
        spec, eligibility, dict.fromkeys(both, "old"), frozenset(both), moving=NodeTransfer("", *both)
    )
    assert preview(moving).digest == alone.digest


def test_a_pod_of_which_nothing_is_known_is_not_called_unreported() -> None:
    """It may be so for another reason, which the preview does not read."""
    given = situation(2, 2, passing=frozenset({"node-1"}))
    shown = preview(replace(given, spec=msgspec.structs.replace(given.spec, manifest="old")))
    assert (shown.state, shown.reasons) == ("progressing", ())
