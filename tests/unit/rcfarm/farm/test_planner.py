"""The pure decision of a replication controller."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rcfarm.farm.planner import Plan, PlanInput, plan
from rcfarm.farm.rollout import Placement
from rcfarm.farm.transfer import Transfer
from rcfarm.operations.rc_snapshot import state_word
from scheduler.protocol import Absence, Eligibility
from store.schema.records import (
    ALL_NODES,
    NO_SPACE,
    Health,
    HealthState,
    RCSpec,
    RCStatus,
    Rollout,
    RolloutRequest,
    rfc3339,
)

NEW, OLD = "new-manifest", "old-manifest"
BRAKE = "the brake is on"
NOW = 1_800_000_000.0
AT = rfc3339(datetime.fromtimestamp(NOW - 1000.0, UTC))


def spec(desired: int, **fields: Any) -> RCSpec:
    return RCSpec(id="web", manifest=NEW, replicas_desired=desired, **fields)


def nodes(*numbers: int) -> list[str]:
    return [f"node{number:03}" for number in numbers]


def eligible(names: Iterable[str], placeable: Iterable[str] | None = None) -> Eligibility:
    return Eligibility(frozenset(names), tuple(sorted(names if placeable is None else placeable)))


def placed(names: Iterable[str], health: HealthState = "passing", manifest: str | None = NEW) -> dict[str, Placement]:
    return {name: Placement(manifest, health) for name in names}


def codes(decision: Plan) -> list[str]:
    return [reason.code for reason in decision.reasons]


def dynamic(desired: int) -> RCSpec:
    return spec(desired, allocation_strategy="dynamic")


DECISIONS: dict[str, tuple[PlanInput, dict[str, object]]] = {
    "a disabled daemon set wants the pods that it has": (
        PlanInput(spec(ALL_NODES, disabled=True), placed(nodes(1, 2)), eligible(nodes(1, 2, 3))),
        {"state": "disabled", "desired": 2},
    ),
    "placement goes in ascending node name": (
        PlanInput(spec(2), {}, eligible(nodes(7, 3, 5))),
        {"add": ("node003", "node005")},
    ),
    "a node that is eligible but dead or cordoned keeps its pods and gets no new one": (
        PlanInput(spec(2), placed(nodes(1)), eligible(nodes(1, 2, 3), placeable=nodes(3))),
        {"add": ("node003",)},
    ),
    "desired -1 is taken as 0, with a reason": (
        PlanInput(spec(-1), placed(nodes(1)), eligible(nodes(1))),
        {"remove": ("node001",), "codes": ["negative_replicas"]},
    ),
    "of 1000 pods the one on an ineligible node is removed first": (
        PlanInput(spec(999), placed(nodes(*range(1000))), eligible({*nodes(*range(1000))} - {"node503"})),
        {"remove": ("node503",)},
    ),
    "an unhealthy pod is removed before healthy ones": (
        PlanInput(spec(2), placed(nodes(1, 2, 3)) | placed(nodes(2), "critical"), eligible(nodes(1, 2, 3))),
        {"remove": ("node002",)},
    ),
    "then the last names are removed": (
        PlanInput(spec(1), placed(nodes(1, 2, 3)) | placed(nodes(2), "critical"), eligible(nodes(1, 2, 3))),
        {"remove": ("node002", "node003")},
    ),
    "a lost intent is restored whatever the health": (
        PlanInput(spec(3), placed(nodes(1, 2), "critical") | placed(nodes(3), manifest=None), eligible(nodes(1, 2, 3))),
        {"repair": ("node003",)},
    ),
    "replacing a critical pod can't make the RC less available, so it never waits": (
        PlanInput(spec(2), placed(nodes(1), "critical", OLD) | placed(nodes(2), "passing", OLD), eligible(nodes(1, 2))),
        {"update": ("node001",)},
    ),
    "a transfer waits while it is unknown whether the other pods pass": (
        PlanInput(dynamic(2), placed(nodes(1)) | placed(nodes(2), "unknown"), eligible(nodes(2, 3))),
        {"transfer": None, "codes": ["transfer_waits_for_health", "starting"]},
    ),
    "of several ineligible pods the unhealthy one moves first": (
        PlanInput(dynamic(2), placed(nodes(1)) | placed(nodes(2), "critical"), eligible(nodes(3, 4))),
        {"transfer": Transfer("node002", "node003", "move")},
    ),
    "a pod that does not pass itself moves": (
        PlanInput(dynamic(2), placed(nodes(1), "critical") | placed(nodes(2)), eligible(nodes(2, 3))),
        {"transfer": Transfer("node001", "node003", "move")},
    ),
    "a static RC keeps the pod on an ineligible node, with a reason": (
        PlanInput(spec(1), placed(nodes(1)), eligible(nodes(2))),
        {"add": (), "remove": (), "transfer": None, "codes": ["ineligible_kept"]},
    ),
    "a transfer without a target asks the scheduler for an allocation": (
        PlanInput(dynamic(1), placed(nodes(1)), eligible([])),
        {"transfer": Transfer("node001", None, "start")},
    ),
    "a shortage blocks neither repair nor transfer": (
        PlanInput(dynamic(9), placed(nodes(1), "critical") | placed(nodes(2), manifest=None), eligible(nodes(2))),
        {"repair": ("node002",), "transfer": Transfer("node001", None), "codes": ["short", "starting"]},
    ),
    "a pod that another RC has taken over is given up, and the replica placed elsewhere": (
        PlanInput(spec(2), placed(nodes(1)) | {"node002": Placement(None)}, eligible(nodes(1, 2, 3)), ["node002"]),
        {"add": ("node003",), "remove": ("node002",), "repair": ()},
    ),
    "while the brake is on, the record of a pod that another RC took over is only not counted": (
        PlanInput(spec(1), placed(nodes(1)), eligible(nodes(1, 2)), taken=nodes(1), hold=BRAKE),
        {"add": ("node002",), "remove": (), "repair": ()},
    ),
    "while the brake is on nothing is removed, but repairs go on": (
        PlanInput(spec(1), placed(nodes(1, 2)) | placed(nodes(3), manifest=None), eligible(nodes(1, 2, 3)), hold=BRAKE),
        {"remove": (), "repair": ("node003",), "state": "held"},
    ),
    "while the brake is on no deletion begins": (
        PlanInput(spec(3, deleting=True), placed(nodes(1)), eligible([]), hold=BRAKE),
        {"remove": (), "state": "held"},
    ),
    "while the brake is on no pod moves": (
        PlanInput(dynamic(1), placed(nodes(1)), eligible(nodes(2)), hold=BRAKE),
        {"transfer": None},
    ),
    "a deletion overrides `disabled`": (
        PlanInput(spec(3, deleting=True, disabled=True), placed(nodes(2, 1)), eligible([])),
        {"remove": ("node001", "node002"), "state": "deleting"},
    ),
}


@pytest.mark.parametrize(("observed", "expected"), DECISIONS.values(), ids=DECISIONS)
def test_a_decision(observed: PlanInput, expected: dict[str, object]) -> None:
    """Each decision is as its id says."""
    decision = plan(observed)
    found = {field: codes(decision) if field == "codes" else getattr(decision, field) for field in expected}
    assert found == expected


def daemon_set(
    names: Iterable[str], node_names: Iterable[str], placeable: Iterable[str] | None = None, **fields: Any
) -> PlanInput:
    """Return a daemon set with pods on some nodes, and the nodes that match."""
    rollout = Rollout(
        revision=1, manifest=NEW, stable=OLD, state="reverted", since=AT, started=AT, progressed=AT
    )  # a plan decides about nodes that join, too
    pods = placed(names, manifest=OLD)
    return PlanInput(spec(ALL_NODES), pods, eligible(node_names, placeable), rollout=rollout, now=NOW, **fields)


def test_a_daemon_set_gets_a_node_that_joins_whatever_leaves_at_the_same_time() -> None:
    """One that joins and one that is drained do not make up for each other."""
    decision = plan(daemon_set(nodes(1, 2, 3), nodes(2, 3, 4), drained=nodes(1)))
    assert (decision.add, decision.remove, decision.desired) == (("node004",), ("node001",), 3)
    held = plan(daemon_set(nodes(1, 2, 3), nodes(2, 3, 4), hold=BRAKE))
    assert (held.add, held.remove, held.state, held.desired) == (("node004",), (), "held", 3)
    assert "held" in codes(held)


def test_a_daemon_set_whose_pod_another_rc_has_taken_lacks_no_node() -> None:
    observed = daemon_set(nodes(1, 2, 3), nodes(1, 2, 3), taken=nodes(1))
    decision = plan(observed)
    assert (decision.remove, decision.missing, decision.desired) == (("node001",), 0, 2)
    held = plan(replace(observed, hold=BRAKE))
    assert (held.remove, held.missing, held.state) == ((), 0, "converged")


def test_a_pod_of_a_daemon_set_without_a_placement_is_adopted_also_where_none_would_be_placed() -> None:
    """On a cordoned or dead node; and one on a node that does not match goes."""
    observed = daemon_set(nodes(1, 2), nodes(1, 2, 3), placeable=nodes(1, 2), strays=nodes(3, 4))
    decision = plan(observed)
    assert (decision.adopt, decision.add, decision.remove) == (("node003",), (), ("node004",))


def test_while_pods_leave_a_daemon_set_its_rollout_counts_the_others_only() -> None:
    """The pod on a node that left is not available a moment later; while it is held, it takes part."""
    observed = daemon_set(nodes(1, 2, 3), nodes(2, 3, 4), drained=nodes(1))
    observed = replace(observed, spec=msgspec.structs.replace(observed.spec, revision=2, manifest="next"))
    decision = plan(observed)
    assert (decision.add, decision.remove, decision.update) == (("node004",), ("node001",), ())
    held = plan(replace(observed, drained=(), hold=BRAKE))
    assert (held.remove, held.rolled.record and held.rolled.record.state) == ((), "canary")


@pytest.mark.parametrize(
    ("asked", "unchanged", "goes"),
    [(20.0, 100.0, True), (20.0, 12.0, False), (700.0, 1000.0, False), (-60.0, 100.0, False), (None, 100.0, False)],
    ids=["confirmed", "nodes left later", "long ago", "in the future", "no time"],
)
def test_a_confirmed_loss_is_of_the_nodes_that_had_left(asked: float | None, unchanged: float, goes: bool) -> None:
    """The labels vanish, an operator confirms, the labels come back, and vanish again: that needs another word."""
    at = "lately" if asked is None else rfc3339(datetime.fromtimestamp(NOW - asked, UTC))
    request = RolloutRequest(id="1", verb="shrink", revision=1, at=at, least=1)
    decision = plan(daemon_set(nodes(1, 2, 3), nodes(3), request=request, unchanged=unchanged))
    assert sorted(decision.remove) == (nodes(1, 2) if goes else [])
    assert ("held" in codes(decision)) is not goes


def test_a_pod_that_runs_without_a_placement_is_adopted_before_any_other_node_is_chosen() -> None:
    """The tree of RCs was lost, and its RC was applied again: running pods are adopted, also while the brake is on."""
    observed = PlanInput(spec(3), placed(nodes(4)), eligible(nodes(1, 2, 3, 4)), strays=nodes(2))
    for decision in (plan(observed), plan(replace(observed, hold="the brake is on"))):
        assert (decision.adopt, decision.add, decision.remove) == (("node002",), ("node001",), ())
        assert [reason.code for reason in decision.reasons] == ["starting"]


def test_of_pods_without_a_placement_those_on_eligible_nodes_are_adopted() -> None:
    """Surplus pods are removed, or kept by the brake, with a reason."""
    observed = PlanInput(spec(2), placed(nodes(1)), eligible(nodes(1, 3, 4)), strays=nodes(2, 3, 4))
    decision = plan(observed)
    assert (decision.adopt, decision.add, decision.remove) == (("node003",), (), ("node002", "node004"))
    held = plan(replace(observed, hold="the brake is on"))
    assert (held.adopt, held.add, held.remove) == (("node003",), (), ())
    assert [reason.code for reason in held.reasons] == ["held", "starting"]
    deleting = plan(replace(observed, spec=spec(2, deleting=True)))
    assert (deleting.adopt, deleting.remove) == ((), ("node001", "node002", "node003", "node004"))


names = st.integers(0, 12).map(lambda number: f"node{number:03}")
healths = st.sampled_from(["passing", "warning", "critical", "unknown"])
verdicts = st.none() | st.builds(
    Health,
    healths,
    st.sampled_from([NEW, OLD]),
    condition=st.sampled_from(["", "crashing", "restarted", "blocked", "failed", "completed", "of-the-future"]),
)
placements = st.builds(Placement, st.sampled_from([NEW, OLD, None]), healths, verdicts)


@st.composite
def plan_inputs(draw: st.DrawFn) -> PlanInput:
    eligible_names = draw(st.frozensets(names))
    placeable = draw(st.frozensets(st.sampled_from(sorted(eligible_names)))) if eligible_names else frozenset()
    current = draw(st.dictionaries(names, placements, max_size=8))
    taken = draw(st.lists(names, max_size=3))
    return PlanInput(
        spec=spec(
            draw(st.integers(-1, 8)),
            disabled=draw(st.booleans()),
            deleting=draw(st.booleans()),
            allocation_strategy=draw(st.sampled_from(["static", "dynamic"])),
            max_unavailable=draw(st.integers(0, 3)),
        ),
        current=current,
        eligibility=Eligibility(eligible_names, tuple(sorted(placeable))),
        taken=taken,
        strays=draw(st.frozensets(names, max_size=3)) - current.keys() - set(taken),
        hold=draw(st.sampled_from(["", "held"])),
        mutation_holder=draw(st.sampled_from(["", "another client"])),
    )


@given(plan_inputs())
def test_safety_of_every_plan(observed: PlanInput) -> None:
    """No overshoot, no theft, no removal while held or disabled, and a reason for every non-action."""
    decision, rc = plan(observed), observed.spec
    current, desired = set(observed.current), max(0, observed.spec.replicas_desired)
    usurped, strays = current & set(observed.taken), set(observed.strays)
    assert not set(decision.add) & (current | set(observed.taken) | strays)
    assert set(decision.add) <= set(observed.eligibility.placeable)
    assert set(decision.remove) <= current | strays
    assert set(decision.adopt) <= strays - set(decision.remove)
    assert set(decision.repair) <= current - set(decision.remove)
    if observed.hold:
        assert decision.remove == ()
        assert decision.transfer is None
    if rc.deleting:
        assert observed.hold or set(decision.remove) == current | strays
        return
    if rc.disabled:
        assert decision == Plan(reasons=decision.reasons, state="disabled", desired=desired)
        return
    assert observed.hold or usurped | strays <= {*decision.remove, *decision.adopt}
    ours = current - usurped
    assert not decision.add or strays <= set(decision.adopt)
    after = len(ours) + len(decision.add) + len(decision.adopt) - len(ours & set(decision.remove))
    assert after == desired or decision.reasons
    assert min(desired, len(ours)) <= after <= max(desired, len(ours))
    if rc.allocation_strategy == "static":
        assert decision.transfer is None


@given(plan_inputs())
def test_updates_keep_the_health_budget(observed: PlanInput) -> None:
    """An update never brings more than max_unavailable pods away from passing, beyond those that are away already."""
    decision = plan(observed)
    others = {*decision.remove, *observed.taken}
    kept = {node: p for node, p in observed.current.items() if node not in others}
    assert not {*decision.repair, *decision.update} & set(observed.taken)
    away = sum(placement.health != "passing" for placement in kept.values())
    harmed = [n for n in decision.update if kept[n].health == "passing"]
    assert not harmed or away + len(harmed) <= max(1, observed.spec.max_unavailable)


def verdict(condition: str, cause: str = "", *, manifest: str = NEW, **fields: Any) -> Health:
    status: HealthState = "passing" if condition in ("", "completed", "restarted") else "critical"
    return Health(**{"status": status, "manifest": manifest, "condition": condition, "cause": cause, **fields})


def pods(*verdicts: Health | None) -> dict[str, Placement]:
    """Return one pod per verdict, on node000, node001, …, each ordered with the new manifest."""
    healths = [found.status if found and found.manifest == NEW else "unknown" for found in verdicts]
    return {f"node{n:03}": Placement(NEW, healths[n], found) for n, found in enumerate(verdicts)}


def health_plan(current: dict[str, Placement], **fields: Any) -> Plan:
    return plan(PlanInput(spec(len(current), **fields.pop("spec", {})), current, eligible(current), **fields))


def word(decision: Plan, placed: int) -> str:
    status = RCStatus(
        state=decision.state,
        generation=1,
        desired=placed,
        placed=placed,
        healthy=0,
        farm="f",
        token=1,
        reasons=decision.reasons,
        completed=decision.completed,
    )
    return state_word(status)


def test_a_crash_loop_is_a_reason_with_its_cause_and_count() -> None:
    """Pods that crash are named with exit and restarts, once for all of them; the RC is not converged."""
    crash = verdict("crashing", "web exited with code 1", restarts=5, since="2026-01-01T00:00:09Z")
    decision = health_plan(pods(crash, verdict(""), crash))
    assert codes(decision) == ["crashing"]
    reason = decision.reasons[0]
    assert reason.message == ("2 of 3 pods crash: node000, node002: web exited with code 1 (at least 5 restarts)")
    assert (reason.nodes, reason.since) == (("node000", "node002"), "2026-01-01T00:00:09Z")
    assert (decision.state, word(decision, 3)) == ("progressing", "unhealthy")
    former = verdict("crashing", "web exited with code 1", manifest=OLD)
    assert codes(health_plan(pods(former))) == ["starting"], "its agent has not reported on the new manifest yet"


def test_a_pod_that_passes_after_many_crashes_is_named_though_the_rc_is_converged() -> None:
    """A pod that crashes now and then is seen while it passes."""
    decision = health_plan(pods(verdict("restarted", "web ended by SIGSEGV", restarts=3)))
    assert decision.reasons[0].message == (
        "1 of 1 pod passes, but has crashed repeatedly: node000: web ended by SIGSEGV (at least 3 restarts)"
    )
    assert (decision.state, word(decision, 1)) == ("converged", "converged")


def test_a_check_that_fails_is_a_reason_with_its_output() -> None:
    """The check's output is in the reason, in one line."""
    failing = Health("critical", NEW, "GET http://127.0.0.1:80/:\n  Connection refused")
    decision = health_plan(pods(failing, verdict("")))
    assert decision.reasons[0].code == "unhealthy"
    assert decision.reasons[0].message == (
        "1 of 2 pods does not pass: node000: critical: GET http://127.0.0.1:80/: Connection refused"
    )
    assert word(decision, 2) == "unhealthy"


def test_completed_and_failed_one_offs_are_named() -> None:
    """An RC whose pods have all ended with success is completed; one that failed for good says with which exit."""
    decision = health_plan(pods(verdict("completed"), verdict("completed")))
    assert (decision.reasons, decision.state, word(decision, 2)) == ((), "converged", "completed")
    decision = health_plan(pods(verdict("completed"), verdict("failed", "web exited with code 4")))
    assert [reason.message for reason in decision.reasons] == [
        "1 of 2 pods has failed and is not restarted: node001: web exited with code 4"
    ]
    assert word(decision, 2) == "failed"


def test_a_change_that_is_stuck_says_what_stops_it() -> None:
    """The pod that can't take the new manifest is named with its obstacle, beside those that wait for it."""
    blocked = verdict("blocked", "'./bin/nope' is not an executable file", manifest=OLD, status="passing")
    old = Placement(OLD, "passing", Health("passing", OLD))
    decision = health_plan({**pods(blocked), "node001": old, "node002": old})
    assert [reason.code for reason in decision.reasons] == ["rollout_in_progress", "blocked"]
    assert decision.reasons[0].message == "revision 1 runs on 1 of 3 pods; waits until node000 has passed for 10 s"
    assert decision.reasons[1].message == (
        "1 of 3 pods can't be reconciled with its manifest: node000: './bin/nope' is not an executable file"
    )
    assert word(decision, 3) == "unhealthy"


def test_a_full_disk_has_a_code_of_its_own() -> None:
    """The agent's health record stays as programs of before know it: blocked, with the cause."""
    full = verdict("blocked", f"artifact x: {NO_SPACE} of /var/lib/rcfarm: free some", status="critical")
    decision = health_plan(pods(full, verdict("")))
    assert [reason.code for reason in decision.reasons][-1] == "disk_full"
    assert decision.reasons[-1].message.startswith("1 of 2 pods has no space on its node's disk: node000: artifact x")
    assert word(decision, 2) == "unhealthy"


def test_a_pod_that_is_about_to_move_is_not_changed_and_none_moves_beside_a_change() -> None:
    """Both write the same intent, and both take a healthy pod away."""
    current = placed(nodes(1, 2, 3), manifest=OLD)
    decision = plan(PlanInput(dynamic(3), current, eligible(nodes(2, 3, 4))))
    assert (decision.update, decision.transfer) == (("node002",), None)
    moving = plan(PlanInput(dynamic(3), current | placed(nodes(2), "unknown"), eligible(nodes(2, 3, 4))))
    assert (moving.update, moving.transfer) == ((), None)
    drained = plan(PlanInput(dynamic(1), placed(nodes(1), manifest=OLD), eligible(nodes(2))))
    assert (drained.update, drained.transfer) == ((), Transfer("node001", "node002", "start"))


def test_the_first_step_of_a_change_names_the_pod_that_is_changed() -> None:
    """While all pods pass, the waiting ones name the first one to be changed."""
    decision = plan(PlanInput(spec(3), placed(nodes(1, 2, 3), manifest=OLD), eligible(nodes(1, 2, 3))))
    assert decision.update == ("node001",)
    assert decision.reasons[0].message == "revision 1 runs on 0 of 3 pods; waits until node001 has passed for 10 s"


def test_pods_on_a_dead_node_say_since_when_and_until_when() -> None:
    """Before the node is lost the reason has both times; a static RC keeps its pods there and says so."""
    absent = {"node001": Absence("2026-01-01T00:00:00Z", "2026-01-01T00:01:00Z")}
    current = pods(verdict(""), None)
    reason = health_plan(current, absent=absent, spec={"allocation_strategy": "dynamic"}).reasons[0]
    assert (reason.code, reason.since, reason.until) == ("node_dead", "2026-01-01T00:00:00Z", "2026-01-01T00:01:00Z")
    assert "node001" in reason.message
    assert "unless it comes back, the node is lost and its pod is moved" in reason.message
    reason = health_plan(current, absent=absent).reasons[0]
    assert (reason.since, reason.until) == ("2026-01-01T00:00:00Z", "")
    assert "a static RC keeps its pods there: start the agent" in reason.message
    absent["node001"] = absent["node001"]._replace(is_lost=True)
    reason = health_plan(current, absent=absent, spec={"allocation_strategy": "dynamic"}).reasons[-1]
    assert (reason.code, reason.until) == ("node_dead", "")
    assert "moved as soon as there is another node for it" in reason.message
    absent["node000"] = absent["node001"]
    reason = health_plan(pods(None, None), absent=absent, spec={"allocation_strategy": "dynamic"}).reasons[-1]
    assert "the nodes are lost: their pods are moved as soon as there are other nodes for them" in reason.message


@given(st.lists(verdicts, max_size=20))
def test_an_rc_that_is_not_converged_has_a_reason(found: list[Health | None]) -> None:
    """Whatever the agents report, there is a reason for every pod that does not pass."""
    decision = health_plan(pods(*found))
    assert decision.reasons or decision.state == "converged"
    assert (decision.state == "converged") == all(it and it.status == "passing" and it.manifest == NEW for it in found)
