"""Single steps of a rollout, and the clock of its pods: cases in which one condition decides."""

from __future__ import annotations

from typing import Any

import pytest

from rcfarm.farm.rollout import BLAME, BLOCKED, Ages, Placement, PodClock, RolloutInput, RolloutStep, Since, step
from rcfarm.operations.analysis import Measured
from store.schema.records import Analysis, Health, RCSpec, Rollout, UpdatePolicy
from tests.support.farm.virtual_fleet import Node, fleet

SPEC = RCSpec(id="web", manifest="new", replicas_desired=1, revision=2, update=UpdatePolicy())


def passes(manifest: str, since: str = "") -> Placement:
    return Placement(manifest, "passing", Health("passing", manifest, since=since))


def blocked(cause: str) -> Placement:
    return Placement("new", "unknown", Health("critical", "new", condition="blocked", cause=cause))


def crashing(manifest: str) -> Placement:
    """A pod on the new manifest, whose verdict is about one."""
    return Placement("new", "unknown", Health("critical", manifest, condition="crashing", cause="exit 3", restarts=5))


def record(**fields: Any) -> Rollout:
    at = "2027-01-15T08:00:00Z"
    known = {"revision": 2, "manifest": "new", "state": "rolling", "since": at, "started": at, "progressed": at}
    return Rollout(**{**known, **fields})


def decided(spec: RCSpec = SPEC, **given: Any) -> RolloutStep:
    return step(RolloutInput(spec, **{"rollout": None, "request": None, "now": 1_800_000_000.0, **given}))


def test_another_revision_of_the_same_manifest_has_its_own_rollout() -> None:
    """Though all pods have the manifest, and the rollout before was done: the record is of the present revision."""
    before = record(revision=1, manifest="old", state="done")
    found = decided(current={"n1": passes("new")}, rollout=before).record
    assert found is not None
    assert (found.revision, found.manifest) == (2, "new")


def test_a_rollout_without_pods_and_without_a_way_back_is_done() -> None:
    """Nothing is there that could show anything."""
    found = decided(current={}, rollout=record(revision=1, manifest="bad", state="failed")).record
    assert found is not None
    assert found.state == "done"


def test_a_late_pod_on_the_way_back_fails_it_only_when_the_others_are_back() -> None:
    """As long as some are on the new manifest, it goes on with those."""
    pods = {"n1": Placement("old"), "n2": passes("new"), "n3": passes("new")}
    ages = Ages(1000.0, {"n1": Since(None, None, 0.0, 0.0), "n2": Since(0.0, None, 0.0, 0.0)})
    spec = RCSpec(id="web", manifest="new", replicas_desired=3, revision=2)
    rollout = record(state="reverting", stable="old", stable_revision=1)
    assert decided(spec, current=pods, ages=ages, rollout=rollout).record is None
    back = {node: Placement("old") if node == "n1" else passes("old") for node in pods}
    found = decided(spec, current=back, ages=ages, rollout=rollout).record
    assert found is not None
    assert found.state == "failed"


def test_a_pod_that_was_restarted_has_to_pass_again() -> None:
    """It passed whenever it was looked at, but its verdict is of another time."""
    clock = PodClock()
    clock.read({"n1": passes("new", "t0")}, 0.0, 10.0)
    assert clock.read({"n1": passes("new", "t0")}, 8.0, 10.0).passing("n1") == 8.0
    assert clock.read({"n1": passes("new", "t1")}, 9.0, 10.0).passing("n1") == 0.0


def test_a_pod_that_had_just_counted_has_its_deadline_again() -> None:
    clock = PodClock()
    clock.read({"n1": passes("new")}, 0.0, 10.0)
    assert clock.read({"n1": Placement("new", "critical")}, 10.0, 10.0).of("n1").awaited == 0.0


def test_a_pod_stays_blocked_while_the_cause_changes() -> None:
    clock = PodClock()
    clock.read({"n1": blocked("no such program")}, 0.0)
    assert clock.read({"n1": blocked("no such user")}, 2.0).of("n1").blocked == 2.0


def test_a_canary_whose_node_dies_much_later_is_replaced() -> None:
    """It shows nothing any more, and does not blame the version either."""
    made = fleet(3, None, auto_promote=False, min_healthy_time=1.0)
    made.update("good-0.1")
    made.run(5.0)
    made.run(BLAME + 10.0, every=10.0)
    made.nodes["node-000"].died = made.now
    made.run(0.5)
    assert [name for name, ordered in made.intents.items() if ordered == "good-0.1"] == ["node-000", "node-001"]


def test_a_dead_node_is_none_of_the_selected_canaries() -> None:
    made = fleet(6, None, racks=2, canary="100%", canary_selector="rack=r1", min_healthy_time=1.0, max_unavailable=3)
    made.nodes["node-003"].died = made.now
    made.update("good-0.1")
    made.run(0.05)
    assert made.intents["node-003"] == "good-0"
    made.run(3.0)
    assert made.states[-1] != "canary"


def test_the_last_pods_get_no_surge() -> None:
    """A node that joins while only they are waited for gets no pod that would go at once."""
    made = fleet(2, 2, canary="0", max_surge="1", max_unavailable=2, min_healthy_time=5.0)
    made.update("good-0.1")
    made.run(1.0)
    assert set(made.intents.values()) == {"good-0.1"}
    made.nodes["node-009"] = Node()
    made.run(1.0)
    assert sorted(made.intents) == ["node-000", "node-001"]


def test_a_long_proof_lengthens_the_time_for_which_a_death_is_blamed() -> None:
    """On a version, by a node that dies after its change: twice `min_healthy_time`, if that is more."""
    update = UpdatePolicy(min_healthy_time=200.0, healthy_deadline=900.0, progress_deadline=2000.0)
    spec = RCSpec(id="web", manifest="new", replicas_desired=2, revision=2, update=update)
    pods = {"n1": Placement("new"), "n2": passes("old")}
    rollout = record(state="canary", stable="old", stable_revision=1)
    for lived, late in ((399.0, False), (401.0, True)):
        ages = Ages(lived, {"n1": Since(None, None, 0.0, 0.0)})
        found = decided(spec, current=pods, ages=ages, rollout=rollout, absent={"n1": 0.0}, is_daemon_set=True).record
        assert ("n1" in (found or rollout).late) == late, lived


def test_pods_that_come_while_it_soaks_get_what_soaks() -> None:
    made = fleet(4, 3, soak=60.0, min_healthy_time=0.0, max_unavailable=3)
    made.update("good-0.1")
    made.run(3.0)
    assert made.states[-1] == "soaking"
    made.replicas = 4
    made.decide()
    assert len(made.intents) == 4
    assert set(made.intents.values()) == {"good-0.1"}


def test_a_rollout_that_an_analysis_stopped_begins_again_with_none_of_its_results() -> None:
    ask = Analysis(name="errors", command="ask", interval=1.0)
    made = fleet(2, 2, analysis=(ask,), min_healthy_time=1.0, healthy_deadline=8.0, progress_deadline=20.0)
    made.answer = lambda name: Measured("failure", "1")
    made.update("good-0.1")
    made.run(10.0)
    assert made.states[-1] == "reverted"
    made.answer = lambda name: Measured("success", "1")
    made.ask("resume")
    made.run(30.0)
    assert made.states[-1] == "done"


STOPS: dict[
    str, tuple[Placement, float, bool]
] = {  # the pod, the seconds for which it is so, whether that is a failure
    "just before its deadline": (Placement("new"), 299.9, False),
    "at its deadline": (Placement("new"), 300.0, True),
    "blocked for a moment": (blocked("no such program"), BLOCKED - 0.1, False),
    "blocked for as long as that is tolerated": (blocked("no such program"), BLOCKED, True),
    "in a crash loop": (crashing("new"), 1.0, True),
    "in a crash loop of the former manifest": (crashing("old"), 1.0, False),
}


@pytest.mark.parametrize("case", STOPS)
def test_what_stops_a_rollout(case: str) -> None:
    """Exactly when it is said to be so."""
    pod, age, fails = STOPS[case]
    ages = Ages(age, {"n1": Since(None, 0.0, 0.0, 0.0)})
    rollout = record(state="canary", stable="old", stable_revision=1)
    found = decided(current={"n1": pod}, rollout=rollout, ages=ages).record
    assert ((found or rollout).state == "reverting") == fails
