"""The pure decision of a replication controller."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rcfarm.planner import Placement, Plan, Situation, plan
from scheduler.base import Eligibility
from store.records import HealthState, RCSpec

NEW, OLD = "new-manifest", "old-manifest"


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


def test_nothing_desired_and_nothing_there_is_converged() -> None:
    """Scenario 1: desired 0 places nothing and has nothing to say."""
    decision = plan(Situation(spec(0), {}, eligible(nodes(1, 2))))
    assert decision.is_empty
    assert decision.reasons == ()
    assert decision.state == "converged"


def test_no_matching_node_is_a_shortage_with_its_reason() -> None:
    """Scenario 2: desired 1 without a node places nothing and says what to do."""
    decision = plan(Situation(spec(1, node_selector="pool=web"), {}, eligible([])))
    assert decision.is_empty
    assert decision.state == "short"
    assert codes(decision) == ["short"]
    assert "pool=web" in decision.reasons[0].message


def test_placement_goes_in_ascending_node_name() -> None:
    """The first free node names are taken, whatever order they were learned in."""
    decision = plan(Situation(spec(2), {}, eligible(nodes(7, 3, 5))))
    assert decision.add == ("node003", "node005")


def test_a_shortage_places_what_it_can() -> None:
    """Scenario 4: desired 2 with one eligible node places one and says that one is missing."""
    decision = plan(Situation(spec(2), {}, eligible(nodes(1))))
    assert decision.add == ("node001",)
    assert decision.missing == 1
    assert decision.state == "short"


def test_new_pods_go_only_where_pods_may_be_placed() -> None:
    """A node that is eligible but dead or cordoned keeps its pods and gets no new one."""
    decision = plan(Situation(spec(2), placed(nodes(1)), eligible(nodes(1, 2, 3), placeable=nodes(3))))
    assert decision.add == ("node003",)


def test_negative_desired_removes_everything_and_says_so() -> None:
    """Scenario 5: desired -1 is taken as 0, with a reason."""
    decision = plan(Situation(spec(-1), placed(nodes(1)), eligible(nodes(1))))
    assert decision.remove == ("node001",)
    assert codes(decision) == ["negative_replicas"]


def test_the_ineligible_pod_is_removed_first() -> None:
    """Scenario 8: of 1000 pods with one on an ineligible node, scaling by one removes that one."""
    everywhere = nodes(*range(1000))
    decision = plan(Situation(spec(999), placed(everywhere), eligible(set(everywhere) - {"node503"})))
    assert decision.remove == ("node503",)


def test_unhealthy_pods_are_removed_before_healthy_ones() -> None:
    """Weakness 21: a removal weighs health."""
    current = placed(nodes(1, 2, 3)) | placed(nodes(2), "critical")
    assert plan(Situation(spec(2), current, eligible(nodes(1, 2, 3)))).remove == ("node002",)
    assert plan(Situation(spec(1), current, eligible(nodes(1, 2, 3)))).remove == ("node002", "node003")


def test_a_lost_intent_is_restored_whatever_the_health() -> None:
    """Scenario 11: repair of a lost intent is not budgeted."""
    current = placed(nodes(1, 2), "critical") | placed(nodes(3), manifest=None)
    decision = plan(Situation(spec(3), current, eligible(nodes(1, 2, 3))))
    assert decision.repair == ("node003",)


def test_a_matching_intent_is_left_alone() -> None:
    """Scenario 9: nothing to repair, nothing done."""
    assert plan(Situation(spec(1), placed(nodes(1)), eligible(nodes(1)))).is_empty


def test_a_changed_manifest_goes_out_within_the_health_budget() -> None:
    """Weakness 12: at most max_unavailable pods of the RC are away from passing."""
    current = placed(nodes(1, 2, 3), manifest=OLD)
    decision = plan(Situation(spec(3, max_unavailable=1), current, eligible(nodes(1, 2, 3))))
    assert decision.repair == ("node001",)
    assert codes(decision) == ["repair_waits_for_health"]
    assert decision.state == "progressing"

    current["node001"] = Placement(NEW, "unknown")
    assert plan(Situation(spec(3, max_unavailable=1), current, eligible(nodes(1, 2, 3)))).repair == ()

    current["node001"] = Placement(NEW, "passing")
    assert plan(Situation(spec(3, max_unavailable=1), current, eligible(nodes(1, 2, 3)))).repair == ("node002",)


def test_a_pod_that_is_down_already_may_get_the_new_manifest() -> None:
    """Replacing a critical pod can't make the RC less available, so it never waits."""
    current = placed(nodes(1), "critical", OLD) | placed(nodes(2), "passing", OLD)
    assert plan(Situation(spec(2), current, eligible(nodes(1, 2)))).repair == ("node001",)


def test_static_membership_changes_only_through_the_replica_count() -> None:
    """Scenario 14: a static RC stays where it is when eligibility moves."""
    decision = plan(Situation(spec(1), placed(nodes(1)), eligible(nodes(2))))
    assert decision.is_empty
    assert codes(decision) == ["ineligible_kept"]


def test_disabled_does_nothing() -> None:
    """Scenario 15: a disabled RC adds, removes and repairs nothing."""
    for desired in (0, 3):
        current = placed(nodes(1), manifest=None)
        decision = plan(Situation(spec(desired, disabled=True), current, eligible(nodes(1, 2, 3))))
        assert decision.is_empty
        assert decision.state == "disabled"


def dynamic(current: dict[str, Placement], eligibility: Eligibility, **fields: Any) -> Plan:
    return plan(Situation(spec(len(current), allocation_strategy="dynamic"), current, eligibility, **fields))


def test_a_dynamic_rc_moves_one_pod_off_an_ineligible_node() -> None:
    """Scenario 16: all healthy, one ineligible: it moves to the first free node."""
    decision = dynamic(placed(nodes(1, 2)), eligible(nodes(2, 3, 4)))
    assert decision.transfer == ("node001", "node003")


def test_a_critical_pod_on_an_ineligible_node_moves() -> None:
    """Scenario 17: a pod that is down already may move, whatever the others do."""
    current = placed(nodes(1, 2), "critical")
    decision = dynamic(current, eligible(nodes(2, 3)))
    assert decision.transfer == ("node001", "node003")


def test_a_passing_pod_waits_while_another_is_critical() -> None:
    """Scenario 18: moving a passing pod needs all the others to pass; the reason says which does not."""
    decision = dynamic(placed(nodes(1)) | placed(nodes(2), "critical"), eligible(nodes(2, 3)))
    assert decision.transfer is None
    assert decision.reasons[0].code == "transfer_waits_for_health"
    assert decision.reasons[0].nodes == ["node002"]


def test_a_transfer_waits_while_the_health_of_the_others_is_not_known() -> None:
    """Scenario 20: before their agents have reported, nobody knows whether the others can do without one."""
    decision = dynamic(placed(nodes(1)) | placed(nodes(2), "unknown"), eligible(nodes(2, 3)))
    assert decision.transfer is None
    assert decision.reasons[0].code == "transfer_waits_for_health"
    assert decision.reasons[0].nodes == ["node002"]


def test_of_several_ineligible_pods_the_unhealthy_one_moves_first() -> None:
    """Weakness 21: a transfer weighs every ineligible node, not only the first."""
    decision = dynamic(placed(nodes(1)) | placed(nodes(2), "critical"), eligible(nodes(3, 4)))
    assert decision.transfer == ("node002", "node003")


def test_a_held_mutation_lock_defers_the_transfer() -> None:
    """Scenario 19: somebody else is changing the RC; the transfer waits and says for whom."""
    decision = dynamic(placed(nodes(1)), eligible(nodes(2)), mutation_holder="rollout-7")
    assert decision.transfer is None
    assert "rollout-7" in decision.reasons[0].message


def test_a_transfer_without_a_target_asks_for_an_allocation() -> None:
    """No free node is eligible: the scheduler has to allocate one."""
    assert dynamic(placed(nodes(1)), eligible([])).transfer == ("node001", None)


def test_a_shortage_blocks_neither_repair_nor_transfer() -> None:
    """Weakness 11: the phases are independent."""
    current = placed(nodes(1)) | placed(nodes(2), manifest=None)
    situation = Situation(spec(9, allocation_strategy="dynamic"), current, eligible(nodes(2)))
    decision = plan(situation)
    assert decision.repair == ("node002",)
    assert "short" in codes(decision)
    assert "transfer_waits_for_health" not in codes(decision)


def test_a_pod_id_of_another_rc_is_never_taken() -> None:
    """Weakness 13: overlapping RCs do not fight; the reason names the nodes."""
    decision = plan(Situation(spec(2), {}, eligible(nodes(1, 2)), taken=["node001"]))
    assert decision.add == ("node002",)
    assert codes(decision) == ["pod_id_taken", "short"]


def test_a_pod_that_another_rc_has_taken_over_is_given_up() -> None:
    """Weakness 13: our record of it goes, its intent is not touched, and the replica is placed elsewhere."""
    current = placed(nodes(1)) | {"node002": Placement(None)}
    decision = plan(Situation(spec(2), current, eligible(nodes(1, 2, 3)), taken=["node002"]))
    assert (decision.add, decision.remove, decision.repair) == (("node003",), ("node002",), ())


def test_while_the_farm_holds_nothing_is_removed_but_repairs_go_on() -> None:
    """The brake: removals, transfers and deletions wait; adding and repairing go on."""
    current = placed(nodes(1, 2)) | placed(nodes(3), manifest=None)
    decision = plan(Situation(spec(1), current, eligible(nodes(1, 2, 3)), hold="the brake is on"))
    assert decision.remove == ()
    assert decision.repair == ("node003",)
    assert decision.state == "held"
    assert plan(Situation(spec(3, deleting=True), current, eligible([]), hold="the brake is on")).remove == ()
    assert dynamic(placed(nodes(1)), eligible(nodes(2)), hold="the brake is on").transfer is None


def test_deletion_empties_the_rc_even_when_it_is_disabled() -> None:
    """A deletion is an explicit wish: it overrides `disabled`."""
    decision = plan(Situation(spec(3, deleting=True, disabled=True), placed(nodes(2, 1)), eligible([])))
    assert decision.remove == ("node001", "node002")
    assert decision.state == "deleting"


def test_an_intent_without_a_record_goes_and_its_node_is_avoided_until_then() -> None:
    """What no placement tells of is not counted and not built upon; the brake keeps it, with a reason."""
    situation = Situation(spec(2), placed(nodes(1)), eligible(nodes(1, 2, 3)), strays=nodes(2))
    decision = plan(situation)
    assert (decision.add, decision.remove) == (("node003",), ("node002",))
    held = plan(replace(situation, hold="the brake is on"))
    assert (held.add, held.remove) == (("node003",), ())
    assert [reason.code for reason in held.reasons] == ["held"]
    assert plan(replace(situation, spec=spec(2, deleting=True))).remove == ("node001", "node002")


def test_what_another_rc_took_over_is_given_up_but_not_while_the_farm_holds() -> None:
    """The record of a pod that is another RC's now goes; while the brake is on it only does not count."""
    situation = Situation(spec(1), placed(nodes(1)), eligible(nodes(1, 2)), taken=nodes(1))
    decision = plan(situation)
    assert (decision.add, decision.remove, decision.repair) == (("node002",), ("node001",), ())
    held = plan(replace(situation, hold="the brake is on"))
    assert (held.add, held.remove, held.repair) == (("node002",), (), ())


names = st.integers(0, 12).map(lambda number: f"node{number:03}")
healths = st.sampled_from(["passing", "warning", "critical", "unknown"])
placements = st.builds(Placement, st.sampled_from([NEW, OLD, None]), healths)


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    eligible_names = draw(st.frozensets(names))
    placeable = draw(st.frozensets(st.sampled_from(sorted(eligible_names)))) if eligible_names else frozenset()
    current = draw(st.dictionaries(names, placements, max_size=8))
    taken = draw(st.lists(names, max_size=3))
    return Situation(
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
        mutation_holder=draw(st.sampled_from(["", "somebody"])),
    )


@given(situations())
def test_safety_of_every_plan(situation: Situation) -> None:
    """No overshoot, no theft, no removal while held or disabled, and a reason for every non-action."""
    decision, rc = plan(situation), situation.spec
    current, desired = set(situation.current), max(0, situation.spec.replicas_desired)
    usurped, strays = current & set(situation.taken), set(situation.strays)
    assert not set(decision.add) & (current | set(situation.taken) | strays)
    assert set(decision.add) <= set(situation.eligibility.placeable)
    assert set(decision.remove) <= current | strays
    assert set(decision.repair) <= current - set(decision.remove)
    if situation.hold:
        assert decision.remove == ()
        assert decision.transfer is None
    if rc.deleting:
        assert situation.hold or set(decision.remove) == current | strays
        return
    if rc.disabled:
        assert decision.is_empty
        return
    assert situation.hold or usurped | strays <= set(decision.remove)
    ours = current - usurped
    after = len(ours) + len(decision.add) - len(ours & set(decision.remove))
    assert after == desired or decision.reasons
    assert min(desired, len(ours)) <= after <= max(desired, len(ours))
    if rc.allocation_strategy == "static":
        assert decision.transfer is None


@given(situations())
def test_repairs_keep_the_health_budget(situation: Situation) -> None:
    """Repairing never brings more than max_unavailable pods away from passing, beyond those that are away already."""
    decision = plan(situation)
    kept = {node: p for node, p in situation.current.items() if node not in decision.remove}
    assert not set(decision.repair) & set(situation.taken)
    away = sum(placement.health != "passing" for placement in kept.values())
    harmed = [n for n in decision.repair if kept[n].health == "passing" and kept[n].manifest is not None]
    assert not harmed or away + len(harmed) <= situation.spec.max_unavailable
