"""The next step of a replication controller, as a pure decision.

`plan` maps a `Situation` to a `Plan`. Its phases are independent: a shortage blocks neither repair nor transfer, and
every step that is *not* taken leaves a `Reason` that an operator can act on.

Invariants (from p2's replication controller): placement in ascending node name; static membership changes only through
the replica count; `disabled` means no add, no remove, no repair; while the farm holds (the brake), nothing is removed;
a node where the pod id belongs to another RC is never used. A pod that runs by an intent of this RC, but whose
placement is lost (the tree of RCs was deleted, and its RC was applied again), is adopted as it is before any other node
is chosen.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import NamedTuple

from rcfarm.operations.pod_health import REASON_NODES, Placement, pod_health
from scheduler.protocol import Absence, Eligibility
from store.schema.records import RCSpec, RCState, Reason


@dataclass(frozen=True, slots=True)
class Situation:
    """The input of a plan.

    `taken`: nodes where the RC's pod id belongs to another RC. `strays`: nodes with an intent of this RC, but without a
    placement record. `hold`: why the farm removes nothing, or "". `mutation_holder`: the holder of the RC's mutation
    lock, or "". `absent`: nodes with a pod whose agent does not answer.
    """

    spec: RCSpec
    current: Mapping[str, Placement]
    eligibility: Eligibility
    taken: Collection[str] = ()
    strays: Collection[str] = ()
    hold: str = ""
    mutation_holder: str = ""
    absent: Mapping[str, Absence] = field(default_factory=dict)


class Transfer(NamedTuple):
    """Move one pod off a node that is not eligible any more. `new_node` None: the scheduler must allocate one first."""

    old_node: str
    new_node: str | None


@dataclass(frozen=True, slots=True)
class Plan:
    """The next step. `missing`: replicas without a node. `repair`: nodes whose intent is to be rewritten.

    `adopt`: nodes whose intent gets its placement back, without an effect on the pod.
    """

    add: tuple[str, ...] = ()
    adopt: tuple[str, ...] = ()
    remove: tuple[str, ...] = ()
    repair: tuple[str, ...] = ()
    transfer: Transfer | None = None
    missing: int = 0
    reasons: tuple[Reason, ...] = ()
    state: RCState = "converged"
    completed: int = 0

    @property
    def is_empty(self) -> bool:
        return not (self.add or self.adopt or self.remove or self.repair or self.transfer)


@dataclass(slots=True)
class _Phases:
    """Collects the reasons of the phases during `plan`."""

    reasons: list[Reason] = field(default_factory=list)

    def because(self, code: str, message: str, nodes: Sequence[str] = ()) -> None:
        self.reasons.append(Reason(code, message, tuple(nodes[:REASON_NODES])))


def plan(situation: Situation) -> Plan:
    """Decide the next step of one RC. Source: the reconcile order of p2's replication controller."""
    spec, phases = situation.spec, _Phases()
    if spec.deleting:
        return _plan_deletion(situation, phases)
    if spec.disabled:
        phases.because("disabled", "disabled: nothing is added, removed or repaired; enable it to go on")
        return Plan(reasons=tuple(phases.reasons), state="disabled")
    adopt = _adoptions(situation)
    if adopt:
        situation = replace(situation, strays=[node for node in situation.strays if node not in adopt])
    leftovers = _leftovers(situation, phases)
    if leftovers:
        ours = {node: placement for node, placement in situation.current.items() if node not in leftovers}
        situation = replace(situation, current=ours)
    remove = _removals(situation, phases)
    add, missing = _additions(situation, adopt, phases)
    removed = set(remove)
    kept = [node for node in situation.current if node not in removed]
    repair, waiting = _repairs(situation, kept, phases)
    transfer = _transfer(situation, kept, (*add, *adopt), phases)
    changing = set(repair)
    unchanged = [node for node in kept if node not in changing]
    health = pod_health(spec, situation.current, unchanged, (*add, *adopt, *repair), situation.absent)
    phases.reasons += health.reasons
    state = _state(situation, missing, busy=bool(waiting or transfer or health.away))
    remove = remove if situation.hold else (*leftovers, *remove)
    return Plan(add, adopt, remove, repair, transfer, missing, tuple(phases.reasons), state, health.completed)


def _state(situation: Situation, missing: int, *, busy: bool) -> RCState:
    if situation.hold and len(situation.current) > situation.spec.replicas_desired:
        return "held"
    if missing:
        return "short"
    return "progressing" if busy else "converged"


def _plan_deletion(situation: Situation, phases: _Phases) -> Plan:
    if situation.hold:
        phases.because("held", f"deletion waits: {situation.hold}")
        return Plan(reasons=tuple(phases.reasons), state="held")
    return Plan(remove=tuple(sorted({*situation.current, *situation.strays})), state="deleting")


def _adoptions(situation: Situation) -> tuple[str, ...]:
    """Return the strays that fill a missing replica, those on eligible nodes first."""
    ours = set(situation.current).difference(situation.taken)
    wanted = max(0, situation.spec.replicas_desired - len(ours))
    eligible = situation.eligibility.eligible
    return tuple(sorted(situation.strays, key=lambda node: (node not in eligible, node))[:wanted])


def _leftovers(situation: Situation, phases: _Phases) -> tuple[str, ...]:
    """Return the nodes with half a placement: only the record, as another RC has taken the pod over, or only the
    intent."""
    usurped = sorted(set(situation.current).intersection(situation.taken))
    if usurped:
        phases.because("pod_id_taken", f"another RC has taken over the pod on {_nodes(usurped)}", usurped)
    leftovers = (*usurped, *sorted(situation.strays))
    if leftovers and situation.hold:
        phases.because("held", f"incomplete placements on {_nodes(leftovers)} stay: {situation.hold}", leftovers)
    return leftovers


def _additions(situation: Situation, adopted: tuple[str, ...], phases: _Phases) -> tuple[tuple[str, ...], int]:
    """Return the first free nodes in ascending name, and the number of replicas without one."""
    current, wanted = situation.current, situation.spec.replicas_desired - len(situation.current) - len(adopted)
    if wanted <= 0:
        return (), 0
    taken = set(situation.taken)
    avoid = {*taken, *situation.strays, *adopted}
    free = (node for node in situation.eligibility.placeable if node not in current and node not in avoid)
    add = tuple(islice(free, wanted))
    missing = wanted - len(add)
    if missing:
        blocked = sorted(taken.intersection(situation.eligibility.placeable).difference(current, adopted))
        if blocked:
            phases.because("pod_id_taken", f"the pod id is used by another RC on {_nodes(blocked)}", blocked)
        phases.because("short", _shortage(situation, missing))
    return add, missing


def _shortage(situation: Situation, missing: int) -> str:
    spec, count = situation.spec, len(situation.eligibility.placeable)
    where = f"by the selector {spec.node_selector!r}" if spec.node_selector else "in the fleet"
    why = f"each of the {count} nodes that may take pods {where} has one" if count else f"no node {where} may take pods"
    wanted = f"{missing} of {spec.replicas_desired} replicas have no node"
    return f"{wanted}: {why}; add or uncordon nodes, or lower the replicas"


def _removals(situation: Situation, phases: _Phases) -> tuple[str, ...]:
    """Return the nodes of surplus pods: the ineligible ones first, then the unhealthy, then the last names."""
    surplus = len(situation.current) - max(0, situation.spec.replicas_desired)
    if situation.spec.replicas_desired < 0:
        desired = situation.spec.replicas_desired
        phases.because("negative_replicas", f"replicas_desired is {desired}; it is taken as 0: set it to 0 or more")
    if surplus <= 0:
        return ()
    if situation.hold:
        phases.because("held", f"{surplus} surplus pods stay: {situation.hold}")
        return ()
    eligible = situation.eligibility.eligible
    by_worth = sorted(situation.current, reverse=True)
    by_worth.sort(key=lambda node: (node in eligible, situation.current[node].health == "passing"))
    return tuple(by_worth[:surplus])


def _repairs(situation: Situation, kept: list[str], phases: _Phases) -> tuple[tuple[str, ...], list[str]]:
    """Return the nodes whose intents to rewrite, and those whose outdated intent has to wait for health.

    A lost intent is restored at once. A changed manifest is rolled out within the health budget: pods that do not pass
    go first, as that makes nothing worse; of the passing ones, only as many as `max_unavailable` allows.
    """
    spec = situation.spec
    lost: list[str] = []
    outdated: list[str] = []
    away = 0
    for node in kept:
        placement = situation.current[node]
        away += placement.health != "passing"
        if placement.manifest == spec.manifest or node not in situation.eligibility.eligible:
            continue
        (lost if placement.manifest is None else outdated).append(node)
    if not (lost or outdated):
        return (), []
    outdated.sort()
    harmless = [node for node in outdated if situation.current[node].health != "passing"]
    passing = [node for node in outdated if situation.current[node].health == "passing"]
    budget = max(0, spec.max_unavailable - away)
    waiting = passing[budget:]
    repair = sorted(lost) + harmless + passing[:budget]
    if waiting:
        not_passing = sorted({*repair, *(node for node in kept if situation.current[node].health != "passing")})
        what = f"until {_nodes(not_passing)} {_is(not_passing)} passing " if not_passing else ""
        phases.because(
            "repair_waits_for_health",
            f"{len(waiting)} of {len(kept)} pods keep the old manifest {what}"
            f"(max_unavailable is {spec.max_unavailable})",
            waiting,
        )
    return tuple(repair), waiting


def _transfer(situation: Situation, kept: list[str], add: tuple[str, ...], phases: _Phases) -> Transfer | None:
    """Move at most one pod off an ineligible node, if health, the mutation lock and the brake allow it."""
    ineligible = sorted(node for node in kept if node not in situation.eligibility.eligible)
    if not ineligible:
        return None
    if situation.spec.allocation_strategy == "static":
        phases.because(
            "ineligible_kept", f"{_nodes(ineligible)} no longer eligible; a static RC keeps its pods there", ineligible
        )
        return None
    if situation.hold:
        phases.because("held", f"pods stay on ineligible nodes: {situation.hold}", ineligible)
        return None
    away = [node for node in ineligible if situation.current[node].health != "passing"]
    elsewhere = [n for n in kept if n not in ineligible and situation.current[n].health != "passing"]
    if not away and elsewhere:
        phases.because(
            "transfer_waits_for_health",
            f"moving off {ineligible[0]} waits until {_nodes(elsewhere)} is passing",
            elsewhere,
        )
        return None
    if situation.mutation_holder:
        phases.because(
            "transfer_waits_for_lock", f"the mutation lock is held by {situation.mutation_holder}", ineligible
        )
        return None
    avoid = {*situation.current, *situation.taken, *situation.strays, *add}
    target = next((node for node in situation.eligibility.placeable if node not in avoid), None)
    return Transfer((away or ineligible)[0], target)


def _is(nodes: Sequence[str]) -> str:
    return "is" if len(nodes) == 1 else "are"


def _nodes(nodes: Sequence[str]) -> str:
    shown = ", ".join(nodes[:3])
    return shown if len(nodes) <= 3 else f"{shown} and {len(nodes) - 3} more"
