"""The step of a rollout: canary, waves, promotion, failure, the way back, and what operators ask for.

The fleet is virtual: its agents act at once, and what a version does is part of its name.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from rcfarm.farm.rollout import BLOCKED, CRASHES, amount
from store.schema.records import rfc3339
from tests.support.farm.virtual_fleet import ENDS, EPOCH, Fleet, Node, fleet

NOW = 0.05  # seconds: long enough for one plan


def started(manifest: str, replicas: int = 4, *, nodes: int = 0, seconds: float = NOW, **policy: Any) -> Fleet:
    """Return a healthy fleet a moment after it was given another manifest."""
    made = fleet(nodes or replicas, replicas, **{"min_healthy_time": 10.0, **policy})
    made.update(manifest)
    made.run(seconds)
    return made


def state(made: Fleet) -> str:
    assert made.rollout is not None
    return made.rollout.state


def on(made: Fleet, manifest: str) -> list[str]:
    return [name for name, ordered in sorted(made.intents.items()) if ordered == manifest]


def message(made: Fleet) -> str:
    return made.decide().rolled.reasons[0].message


def test_a_canary_goes_first_then_waves_then_it_is_done() -> None:
    """One pod, and nothing else until it has passed for `min_healthy_time`; then `max_unavailable` at a time."""
    made = started("good-1", replicas=5, max_unavailable=2)
    assert (state(made), on(made, "good-1")) == ("canary", ["node-000"])
    made.run(10.8)
    assert on(made, "good-1") == ["node-000"]
    made.run(1.0)
    assert (state(made), on(made, "good-1")) == ("rolling", ["node-000", "node-001", "node-002"])
    assert message(made).startswith(
        "revision 2 runs on 3 of 5 pods; waits until node-001, node-002 have passed for 10 s"
    )
    made.run(12.0)
    assert len(on(made, "good-1")) == 5
    made.run(12.0)
    assert (state(made), made.states) == ("done", ["canary", "rolling", "done"])
    assert made.decide().rolled.reasons == ()


def test_canaries_are_on_the_nodes_that_the_selector_names() -> None:
    """All of a rack with a share of 100%, within the budget; nothing else before they have passed."""
    made = fleet(6, 6, racks=2, min_healthy_time=10.0, canary="100%", canary_selector="rack=r1", max_unavailable=2)
    made.update("good-1")
    made.run(NOW)
    assert (state(made), on(made, "good-1")) == ("canary", ["node-001", "node-003"])
    made.run(12.0)
    assert (state(made), on(made, "good-1")) == ("canary", ["node-001", "node-003", "node-005"])
    made.run(12.0)
    assert (state(made), len(on(made, "good-1"))) == ("rolling", 5)


def test_selected_canaries_take_no_surge() -> None:
    """A further node may be any: the canary is changed in place, and the others with a surge."""
    made = fleet(5, 3, racks=3, min_healthy_time=1.0, canary_selector="rack=r2", max_surge="2")
    made.update("good-0.1")
    made.run(NOW)
    assert (state(made), on(made, "good-0.1")) == ("canary", ["node-002"])
    made.run(2.0)
    assert {"node-003", "node-004"} <= set(on(made, "good-0.1"))


def test_a_canary_without_a_node_is_waited_for() -> None:
    """No pod is where a canary may be, or only on a dead node: nothing is changed, and the reason says how to go on."""
    made = fleet(4, 4, racks=2, min_healthy_time=1.0, canary_selector="rack=r9")
    made.update("good-0.1")
    made.run(5.0)
    waits = "it waits for a pod on a live node that matches the canary_selector 'rack=r9'"
    assert (state(made), on(made, "good-0.1")) == ("canary", [])
    assert waits in message(made)
    made.nodes["node-003"].rack, made.nodes["node-003"].died = "r9", made.now
    made.run(5.0)
    assert (on(made, "good-0.1"), waits in message(made)) == ([], True)
    made.nodes["node-003"].died = None
    made.run(1.0)
    assert on(made, "good-0.1") == ["node-003"]
    made.nodes["node-003"].rack = "r0"
    made.run(0.5)
    assert on(made, "good-0.1") == ["node-003"], "a canary stays one"
    made.run(20.0)
    assert state(made) == "done"


def test_an_operator_promotes_without_a_canary() -> None:
    made = fleet(2, 2, min_healthy_time=1.0, canary_selector="rack=r9")
    made.update("good-0.1")
    made.run(1.0)
    made.ask("promote")
    made.run(10.0)
    assert state(made) == "done"


def test_it_is_woken_exactly_when_a_pod_counts() -> None:
    """Nobody looks in between: the next step is due when the pod has passed for long enough."""
    made = started("good-0.1", min_healthy_time=10.0)
    made.run(0.1, every=0.1)
    step = made.decide().rolled
    wake = step.wake
    assert wake == pytest.approx(10.0, abs=0.2)
    due = datetime.fromtimestamp(EPOCH + made.now + (wake or 0.0), UTC)
    assert [reason.until for reason in step.reasons] == [rfc3339(due)], "and the reason says when"
    made.now += wake or 0.0
    assert len(made.decide().update) == 1


def test_a_version_in_a_crash_loop_is_taken_back_at_once() -> None:
    """After `CRASHES` restarts, not after the deadline, and by name of the pod and the cause. One pod was touched."""
    made = started("crash-0", healthy_deadline=300.0)
    made.run(CRASHES + 2.0)
    assert (state(made), made.touched[2]) == ("reverted", {"node-000"})
    assert message(made) == "revision 2: node-000: exit 3 (at least 2 restarts); the pods run revision 1 again"
    assert on(made, "good-0") == [f"node-00{n}" for n in range(4)]


def test_a_version_that_can_not_be_started_is_taken_back_at_once() -> None:
    """Unless it is only for a moment, as when an artifact's server is away."""
    made = started("blocked-0", healthy_deadline=300.0)
    made.run(BLOCKED - 0.5)
    assert state(made) == "canary"
    made.run(2.0)
    assert state(made) == "reverted"
    assert "no such program" in message(made)


def test_a_version_that_never_passes_is_taken_back_at_the_deadline() -> None:
    made = started("sick-0", healthy_deadline=20.0, progress_deadline=60.0)
    made.run(19.0)
    assert state(made) == "canary"
    made.run(2.5)
    assert state(made) == "reverted"
    assert "did not pass for 10 s within the healthy_deadline of 20 s (node-000: critical: not today)" in message(made)


def test_a_rollout_that_others_hold_up_is_stuck_after_its_deadline() -> None:
    """Its only agent was dead before: nothing blames the version, but the reason is another one, exactly then, until
    the agent is back."""
    made = fleet(1, 1, min_healthy_time=1.0, healthy_deadline=5.0, progress_deadline=20.0)
    made.nodes["node-000"].died = made.now
    made.update("good-0.1")
    made.run(15.0)
    decision = made.decide()
    assert [reason.code for reason in decision.rolled.reasons] == ["rollout_in_progress"]
    assert decision.rolled.wake is not None
    made.now += decision.rolled.wake
    [reason] = made.decide().rolled.reasons
    assert (reason.code, state(made)) == ("rollout_stuck", "canary")
    assert "it waits until an agent answers: node-000" in reason.message
    made.nodes["node-000"].died = None
    made.run(5.0)
    assert "rollout_stuck" not in [reason.code for reason in made.decide().rolled.reasons]


def test_a_version_that_fails_after_the_last_pod_is_taken_back_while_it_soaks() -> None:
    made = started("brief-9", 2, min_healthy_time=1.0, healthy_deadline=5.0, progress_deadline=20.0, soak=60.0)
    made.run(8.0)
    assert state(made) == "soaking"
    made.run(20.0)
    assert state(made) == "reverted"


def test_without_auto_revert_everything_stays_as_it_is() -> None:
    made = started("crash-0", auto_revert=False)
    made.run(10.0)
    assert (state(made), on(made, "crash-0")) == ("failed", ["node-000"])
    assert message(made).endswith("auto_revert is off")
    made.nodes["node-009"] = Node()
    made.replicas = 5
    made.run(1.0)
    assert made.intents["node-009"] == "good-0", "further pods get the stable manifest"


def test_a_bad_revision_before_is_named_and_a_later_one_goes_forward() -> None:
    """The way back leads to pods that fail, too: the rollout has failed; the next manifest is rolled out."""
    made = fleet(2, 2, min_healthy_time=1.0, canary="0", max_unavailable=2)
    made.manifest = "crash-0"
    for node in made.nodes.values():
        node.runs, node.started = "crash-0", made.now
    made.intents = dict.fromkeys(made.nodes, "crash-0")
    made.update("crash-1")
    made.run(30.0)
    assert state(made) == "failed"
    assert "the revision before is unhealthy, too" in message(made)
    made.update("good-0.9")
    made.run(10.0)
    assert (state(made), len(on(made, "good-0.9"))) == ("done", 2)


def test_promotion_is_waited_for() -> None:
    """It says which commands go on; one that was asked for another revision is not obeyed."""
    made = started("good-0.1", auto_promote=False, min_healthy_time=1.0)
    made.run(3.0)
    assert (state(made), len(on(made, "good-0.1"))) == ("awaiting_promotion", 1)
    assert "`rcfarm rollout promote web` goes on" in message(made)
    made.revision -= 1
    made.ask("promote")
    made.revision += 1
    made.run(1.0)
    assert state(made) == "awaiting_promotion"
    made.ask("promote")
    made.run(20.0)
    assert state(made) == "done"


def test_a_canary_that_fails_while_promotion_is_waited_for_is_taken_back() -> None:
    made = started("brief-5", auto_promote=False, min_healthy_time=1.0, healthy_deadline=4.0, progress_deadline=20.0)
    made.run(3.0)
    assert state(made) == "awaiting_promotion"
    made.run(10.0)
    assert state(made) == "reverted"


def test_a_pause_changes_nothing_until_it_is_resumed() -> None:
    """Deadlines do not end a pause, and begin again after it."""
    made = started("good-0.1", 6, min_healthy_time=1.0, healthy_deadline=5.0, progress_deadline=10.0)
    made.run(2.5)
    before = on(made, "good-0.1")
    made.ask("pause")
    made.run(60.0)
    assert (state(made), on(made, "good-0.1")) == ("paused", before)
    assert "paused by me" in message(made)
    made.ask("resume")
    made.run(20.0)
    assert state(made) == "done"


def test_an_abort_goes_back_and_a_resume_begins_again() -> None:
    made = started("good-0.1", 6, min_healthy_time=1.0)
    made.run(4.0)
    assert len(on(made, "good-0.1")) > 1
    made.ask("abort")
    made.run(10.0)
    assert (state(made), on(made, "good-0.1")) == ("aborted", [])
    assert "aborted by me; the pods run revision 1 again" in message(made)
    made.ask("resume")
    made.run(30.0)
    assert state(made) == "done"


def test_updates_in_a_row_add_no_pods_that_are_away_and_go_back_to_what_was_stable() -> None:
    """The one in between never counts as stable."""
    made = started("sick-0", 6, healthy_deadline=20.0, progress_deadline=60.0, max_unavailable=2)
    made.update("crash-0")
    made.run(NOW)
    assert made.rollout is not None
    assert made.rollout.stable == "good-0"
    made.run(30.0)
    assert (state(made), len(on(made, "good-0"))) == ("reverted", 6)
    assert made.rollout.stable_revision == 1


def test_the_manifest_before_needs_no_canary() -> None:
    """An operator who gives the stable manifest again gets it everywhere, within the budget."""
    made = started("good-0.1", 4, min_healthy_time=1.0)
    made.run(5.0)
    made.update("good-0")
    made.run(NOW)
    assert state(made) in ("rolling", "done")
    made.run(10.0)
    assert (state(made), len(on(made, "good-0"))) == ("done", 4)


def test_pods_that_do_not_pass_go_first_and_cost_nothing() -> None:
    made = fleet(4, 4, min_healthy_time=1.0, canary="0")
    made.nodes["node-003"].runs = "sick-0"
    made.update("good-0.1")
    made.run(NOW)
    assert on(made, "good-0.1") == ["node-003"], "with one pod away, no other may be touched"


def test_a_dead_node_is_not_waited_for() -> None:
    """It was dead before its intent was changed; when it returns, it has the new manifest."""
    made = fleet(4, 4, min_healthy_time=1.0, max_unavailable=2, healthy_deadline=5.0, progress_deadline=60.0)
    made.nodes["node-002"].died = made.now
    made.update("good-0.1")
    made.run(20.0)
    assert state(made) == "done"
    assert len(on(made, "good-0.1")) == 4


@pytest.mark.parametrize("shortage", ["no nodes for half of the replicas", "nodes that are dead"])
def test_a_shortage_slows_a_rollout_down_and_does_not_stop_it(shortage: str) -> None:
    """What can't be had is not waited for: it goes on with one pod at a time, and only while all others count."""
    made = fleet(4, 8 if shortage.startswith("no nodes") else 4, min_healthy_time=3.0, canary="0")
    if shortage == "nodes that are dead":
        made.nodes["node-002"].died = made.nodes["node-003"].died = made.now
    made.now += 1.0
    made.update("good-0.1")
    made.run(1.0)
    assert len([node for node in on(made, "good-0.1") if made.nodes[node].died is None]) == 1
    made.run(1.8)
    assert len([node for node in on(made, "good-0.1") if made.nodes[node].died is None]) == 1
    made.run(20.0)
    assert (state(made), len(on(made, "good-0.1"))) == ("done", 4)


def test_a_node_that_returns_has_its_time_to_become_healthy() -> None:
    """What it missed while it was dead is not held against the version."""
    made = fleet(4, 4, canary="0", max_unavailable=2, min_healthy_time=1.0, healthy_deadline=5.0, soak=60.0)
    made.nodes["node-002"].died = made.now
    made.update("good-3.1")
    made.run(30.0)
    assert state(made) == "soaking"
    made.nodes["node-002"].died, made.nodes["node-002"].runs = None, ""
    made.run(90.0)
    assert (state(made), made.states) == ("done", ["rolling", "soaking", "rolling", "soaking", "done"])


def test_a_version_that_kills_its_node_is_taken_back() -> None:
    made = started("killer-0", 4, min_healthy_time=1.0, healthy_deadline=5.0, progress_deadline=60.0)
    made.run(10.0)
    assert (state(made), made.touched[2]) == ("reverted", {"node-000"})


def test_a_surge_needs_no_pod_to_be_away() -> None:
    """With `max_unavailable` 0 further nodes carry the replicas; at the end there are as many pods as before."""
    made = started("good-0.1", 4, nodes=6, canary="0", max_surge="2", min_healthy_time=1.0)
    assert len(made.intents) == 6
    made.run(30.0)
    assert (state(made), len(made.intents), len(on(made, "good-0.1"))) == ("done", 4, 4)


def test_no_surge_without_a_free_node() -> None:
    """Then the pods are changed in place, one at a time, as `max_unavailable` allows."""
    made = started("good-0.1", 4, nodes=4, canary="0", max_surge="2", min_healthy_time=1.0)
    assert (len(made.intents), len(on(made, "good-0.1"))) == (4, 1)


def test_a_new_rc_has_no_rollout() -> None:
    made = fleet(3, 3)
    assert made.rollout is None
    assert made.decide().rolled.record is None


@pytest.mark.parametrize(
    ("text", "of", "up", "number"),
    [("3", 10, True, 3), ("25%", 10, True, 3), ("25%", 10, False, 2), ("1%", 10, False, 0)],
)
def test_shares_are_rounded(text: str, of: int, up: bool, number: int) -> None:
    assert amount(text, of, up=up) == number


def test_every_end_is_final_until_someone_acts() -> None:
    made = started("crash-0")
    made.run(20.0)
    states = list(made.states)
    made.run(2000.0, every=20.0)
    assert (state(made) in ENDS, made.states) == (True, states)


def test_a_pod_that_had_counted_gets_its_deadline_again() -> None:
    """A process that is restarted long after its change, or an agent, is no failure of the version."""
    made = started("good-1", 30, min_healthy_time=2.0, healthy_deadline=20.0, progress_deadline=40.0)
    made.run(60.0)
    assert state(made) == "rolling"
    made.nodes["node-000"].started = made.now  # restarted
    made.run(10.0)
    assert state(made) == "rolling"
    made.run(120.0)
    assert (state(made), "reverting" in made.states) == ("done", False)


def test_an_owner_that_has_just_begun_blames_nothing_on_the_version() -> None:
    """Farms were away for longer than any deadline; a node died long after its change, which the record says."""
    made = started("good-1", 6, min_healthy_time=2.0, healthy_deadline=20.0, progress_deadline=40.0, max_unavailable=2)
    made.run(6.0)
    made.now += 1000.0
    made.restart_farm()
    made.run(1.0)
    assert state(made) == "rolling"
    made.ask("pause")
    made.run(400.0, every=5.0)
    made.nodes["node-000"].died = made.now
    made.ask("resume")
    made.run(1.0)
    made.restart_farm()
    made.run(60.0)
    assert (state(made), "reverting" in made.states) == ("done", False)


def test_a_scale_down_and_an_update_never_add_up() -> None:
    made = started("good-1", 5, canary="0", min_healthy_time=2.0)
    made.run(6.0)
    made.replicas = 3
    made.run(60.0)  # each plan is checked
    assert (state(made), len(made.intents)) == ("done", 3)


def test_a_pause_keeps_the_pods_beyond_the_replicas() -> None:
    made = started("good-5", 4, nodes=6, canary="0", max_surge="2", policy_max="0", min_healthy_time=1.0)
    assert len(made.intents) == 6
    made.ask("pause")
    made.run(30.0)
    assert (state(made), len(made.intents)) == ("paused", 6)
    made.ask("resume")
    made.run(60.0)
    assert (state(made), len(made.intents)) == ("done", 4)


def test_an_abort_ends_although_no_pod_may_be_away() -> None:
    """The surge is gone on the way back, so one pod at a time may be."""
    made = started("good-1", 3, nodes=4, canary="0", max_surge="1", policy_max="0", min_healthy_time=1.0)
    made.run(4.0)
    assert len(on(made, "good-1")) >= 2
    made.ask("abort")
    made.run(30.0)
    assert (state(made), on(made, "good-1")) == ("aborted", [])


def test_an_rc_without_pods_shows_nothing_good_of_a_version() -> None:
    """Scaled to nothing and up again, it goes on with its canary, and has a way back."""
    made = started("sick-0", 3, healthy_deadline=20.0, progress_deadline=60.0)
    made.replicas = 0
    made.run(5.0)
    assert state(made) == "canary"
    made.replicas = 3
    made.run(5.0)
    assert len(on(made, "sick-0")) <= 1
    made.run(40.0)
    assert (state(made), len(on(made, "good-0"))) == ("reverted", 3)


def test_promotion_is_asked_for_again_after_a_pause() -> None:
    made = started("good-0.1", auto_promote=False, min_healthy_time=1.0)
    made.run(3.0)
    made.ask("pause")
    made.run(1.0)
    made.ask("resume")
    made.run(3.0)
    assert state(made) == "awaiting_promotion"
    assert "`rcfarm rollout promote web` goes on" in message(made)


def test_a_request_is_about_one_rollout() -> None:
    """Another program changes the manifest without a new revision: what was asked of the one before is not repeated."""
    made = started("good-0.1", auto_promote=False, min_healthy_time=1.0)
    made.run(3.0)
    made.ask("promote")
    made.run(20.0)
    assert state(made) == "done"
    made.manifest = "good-0.2"
    made.run(5.0)
    assert (state(made), len(on(made, "good-0.2"))) == ("awaiting_promotion", 1)


def test_a_node_that_returned_and_dies_with_the_new_manifest_counts_against_it() -> None:
    """It was dead when its intent was changed, so that nothing waited for it; that ends with its return."""
    made = fleet(4, 4, canary="0", min_healthy_time=5.0, healthy_deadline=20.0, progress_deadline=60.0)
    made.nodes["node-000"].died = made.now
    made.run(1.0)
    made.update("good-1")
    made.run(2.0)
    assert made.rollout is not None
    assert made.rollout.late == ("node-000",)
    made.nodes["node-000"].died, made.nodes["node-000"].runs = None, ""
    made.run(2.0)
    made.nodes["node-000"].died = made.now
    made.run(40.0)
    assert state(made) == "reverted"
    assert "node-000" in message(made)
