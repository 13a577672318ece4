"""The next step of a replication controller, as a pure decision.

`plan` maps a `PlanInput` to a `Plan`. Its phases are independent: a shortage blocks neither repair nor transfer, and
every step that is *not* taken leaves a `Reason` that an operator can act on.

Invariants (from p2's replication controller): static membership changes only through
the replica count; `disabled` means no add, no remove, no repair; while the farm holds (the brake), nothing is removed;
a node where the pod id belongs to another RC is never used. A pod that runs by an intent of this RC, but whose
placement is lost (the tree of RCs was deleted, and its RC was applied again), is adopted as it is before any other node
is chosen.

A daemon set (`replicas: all`) is an RC that wants a pod on each eligible node, no more and no fewer; everything else is
the same. When labels change so that it would lose most of its pods at once, it keeps them until an operator confirms.

Pods that are not healthy leave a reason, too. Each is in one class, and each class is one `Reason`: how many pods, and
the causes of the first few. Agents publish a condition seldom (see `store.schema.records.Health`), so these reasons
change seldom, too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import islice
from typing import NamedTuple

import msgspec

from rcfarm.farm import transfer as transfers
from rcfarm.farm.rollout import Ages, Placement, RolloutInput, RolloutStep, amount, step
from rcfarm.farm.transfer import Transfer
from rcfarm.operations.fleet import listed
from rcfarm.operations.rc_snapshot import TROUBLE, describe
from scheduler.protocol import Absence, Eligibility
from scheduler.spread import NodeLoads
from store.schema.records import AnalysisResult, NodeTransfer, RCSpec, RCState, Reason, Rollout, RolloutRequest

HEALTH_CODES = TROUBLE | {"starting"}  # of the reasons that concern health
REASON_NODES = 10  # nodes listed in a reason; the message says how many there are
SHOWN_CAUSES = 3
MOST_LOST = 0.5  # of a daemon set's pods that may go at once because nodes do not match any more
SETTLED_AFTER = 10.0  # seconds without a further node that leaves a daemon set, before it loses pods
CONFIRMED_FOR = 600.0  # seconds for which the confirmation of such a loss holds, if no node comes or goes
CLOCKS_DIFFER = 5.0  # seconds between the clocks of the operator and the farm, at most
NOTHING = RolloutStep("", "")


@dataclass(frozen=True, slots=True)
class PlanInput:
    """The input of a plan.

    `taken`: nodes where the RC's pod id belongs to another RC. `strays`: nodes with an intent of this RC, but without a
    placement record. `hold`: why the farm removes nothing, or "". `mutation_holder`: the holder of the RC's mutation
    lock, or "". `absent`: nodes with a pod whose agent does not answer. `drained`: nodes with a pod that an operator
    empties. `unchanged`: for how many seconds the nodes that match a daemon set have been the same. `rollout`,
    `request`, `ages`, `domains`, `canary_nodes`, `analysis` and `now`: see `rcfarm.farm.rollout`. `moving`: the
    node transfer in progress. `resting`: nodes that are no target of a transfer, and for how many seconds. `preferred`:
    the nodes that are to get the next pods, in this order; where they do not suffice, the others come by name.
    """

    spec: RCSpec
    current: Mapping[str, Placement]
    eligibility: Eligibility
    taken: Collection[str] = ()
    strays: Collection[str] = ()
    hold: str = ""
    mutation_holder: str = ""
    absent: Mapping[str, Absence] = field(default_factory=dict)
    rollout: Rollout | None = None
    request: RolloutRequest | None = None
    ages: Ages = field(default_factory=Ages)
    drained: Collection[str] = ()
    unchanged: float = SETTLED_AFTER
    domains: Mapping[str, str] = field(default_factory=dict)
    analysis: Mapping[str, AnalysisResult] = field(default_factory=dict)
    now: float = 0.0
    moving: NodeTransfer | None = None
    resting: Mapping[str, float] = field(default_factory=dict)
    preferred: tuple[str, ...] = ()
    canary_nodes: Collection[str] = ()

    def in_order(self) -> Iterator[str]:
        """Yield the nodes that may take pods, the preferred ones first."""
        first = set(self.preferred)
        yield from self.preferred
        yield from (node for node in self.eligibility.placeable if node not in first)


@dataclass(frozen=True, slots=True)
class Plan:
    """The next step. `desired`: pods that are wanted; `missing`: those of them without a node. `repair`: nodes whose
    intent is lost, and to be written again.

    `adopt`: nodes whose intent gets its placement back, without an effect on the pod. `update`: nodes whose intent gets
    another manifest, `rolled.target`; `surge`: nodes that get a pod with it, beyond the replicas. All others that are
    written get `rolled.base`. `moving`: the node transfer that goes on without a step. `wake`: seconds until the next
    plan may differ although nothing changed.
    """

    add: tuple[str, ...] = ()
    adopt: tuple[str, ...] = ()
    remove: tuple[str, ...] = ()
    repair: tuple[str, ...] = ()
    update: tuple[str, ...] = ()
    surge: tuple[str, ...] = ()
    transfer: Transfer | None = None
    missing: int = 0
    reasons: tuple[Reason, ...] = ()
    state: RCState = "converged"
    completed: int = 0
    rolled: RolloutStep = NOTHING
    desired: int = 0
    moving: NodeTransfer | None = None
    wake: float | None = None

    @property
    def is_change(self) -> bool:
        """Return whether carrying it out changes more than the RC's status."""
        nodes = self.add or self.adopt or self.remove or self.repair or self.update or self.surge
        return bool(nodes or self.transfer or self.rolled.record) or self.state == "deleting"


@dataclass(slots=True)
class _Phases:
    """Collects the reasons of the phases during `plan`, and when it is to be looked at again."""

    reasons: list[Reason] = field(default_factory=list)
    wakes: list[float] = field(default_factory=list)

    def because(self, code: str, message: str, nodes: Sequence[str] = ()) -> None:
        self.reasons.append(Reason(code, message, tuple(nodes[:REASON_NODES])))


def plan(given: PlanInput) -> Plan:
    """Decide the next step of one RC. Source: the reconcile order of p2's replication controller."""
    spec, phases = given.spec, _Phases()
    is_daemon_set = spec.is_daemon_set
    if spec.deleting and given.hold:
        phases.because("held", f"deletion waits: {given.hold}")
        return Plan(reasons=tuple(phases.reasons), state="held")
    if spec.deleting:
        return Plan(remove=tuple(sorted({*given.current, *given.strays})), state="deleting")
    if spec.disabled:
        enable = f"`rcfarm rc enable {spec.id}` ends that"
        phases.because("disabled", f"disabled: nothing is added, removed or repaired; {enable}")
        wanted = len(given.current) if is_daemon_set else max(0, spec.replicas_desired)
        return Plan(reasons=tuple(phases.reasons), state="disabled", moving=given.moving, desired=wanted)
    if is_daemon_set:
        given = _on_every_node(given, phases)
        spec = given.spec
    whole, moving = given, given.moving if given.moving and {*given.moving.ends} <= given.current.keys() else None
    if moving:  # the new pod is no concern of the other phases
        others = {node: pod for node, pod in given.current.items() if node != moving.new_node}
        given = replace(given, current=others, taken=[*given.taken, moving.new_node])
    usurped = sorted({node for node in given.taken if node in given.current})
    leaving = _leaving(given) if is_daemon_set else ()
    wanted = max(0, spec.replicas_desired - (len(given.current) - len(usurped) - len(leaving)))
    by_worth = sorted(given.strays, key=lambda node: (node not in given.eligibility.eligible, node))
    adopt = tuple(by_worth[:wanted])  # strays that fill a missing replica, those on eligible nodes first
    if adopt:
        given = replace(given, strays=[node for node in given.strays if node not in adopt])
    # Half a placement: only the record, as another RC has taken the pod over, or only the intent.
    if usurped:
        phases.because("pod_id_taken", f"another RC has taken over the pod on {listed(usurped)}", usurped)
    leftovers = (*usurped, *sorted(given.strays))
    if leftovers and given.hold:
        phases.because("held", f"incomplete placements on {listed(leftovers)} stay: {given.hold}", leftovers)
    if leftovers:
        ours = {node: placement for node, placement in given.current.items() if node not in leftovers}
        given = replace(given, current=ours)
    add, free, missing = _additions(given, adopt, len(leaving), phases)
    rolled = _rollout(given, len(free), missing, leaving, is_daemon_set)
    phases.reasons += rolled.reasons
    surplus = len(given.current) + len(adopt) + len(add) - max(0, spec.replicas_desired)
    remove = _removals(given, surplus, rolled, phases)
    if moving:  # it goes when its transfer ends, though there may be fewer replicas now
        remove = tuple(node for node in remove if node != moving.old_node)
    removed = set(remove)
    kept = [node for node in given.current if node not in removed]
    surge = free[: max(0, spec.replicas_desired + rolled.surge - len(kept) - len(adopt) - len(add))] if kept else ()
    eligible = given.eligibility.eligible
    repair = tuple(sorted(node for node in kept if given.current[node].manifest is None and node in eligible))
    update = tuple(node for node in rolled.update if node not in removed)
    changes = (*add, *surge, *adopt, *leftovers, *remove, *repair)
    transfer, wake = None, None
    if moving:
        transfer, wake = _proceed(whole, moving, phases)
    elif not update and not is_daemon_set:  # one after the other: both take a healthy pod away
        transfer, wake = _transfer(given, kept, changes, phases)
    phases.wakes += [each for each in (wake, rolled.wake) if each is not None]
    changing = {*repair, *update}
    unchanged = [node for node in kept if node not in changing]
    placing = (*add, *surge, *adopt, *repair, *update)
    health = pod_health(spec, given.current, unchanged, placing, given.absent, is_daemon_set=is_daemon_set)
    phases.reasons += health.reasons
    is_pending = not rolled.is_settled or transfer or moving or health.away
    is_pending = is_pending or any(reason.code == "node_left" for reason in phases.reasons)
    state: RCState = "progressing" if is_pending else "converged"
    if given.hold and surplus > 0:
        state = "held"
    elif missing:
        state = "short"
    return Plan(
        add=add,
        adopt=adopt,
        remove=remove if given.hold else (*leftovers, *remove),
        repair=repair,
        update=update,
        surge=surge,
        transfer=transfer,
        missing=missing,
        reasons=tuple(phases.reasons),
        state=state,
        completed=health.completed,
        rolled=rolled,
        desired=max(0, spec.replicas_desired),
        moving=None if transfer else moving,
        wake=min(phases.wakes, default=None),
    )


def preferred(
    spec: RCSpec,
    current: Collection[str],
    taken: Collection[str],
    eligibility: Eligibility,
    loads: NodeLoads,
    value_of: Callable[[str], str],
) -> tuple[str, ...]:
    """Return the nodes for further pods, as many as a plan may ask for: missing replicas, a surge, and a transfer.
    `value_of`: a node's value of the label by which the RC is spread, if it is."""
    if spec.is_daemon_set:
        return ()
    missing = max(0, spec.replicas_desired - len(current))
    surge = amount(spec.policy.max_surge, spec.replicas_desired, up=True)
    moves = spec.allocation_strategy == "dynamic" and any(node not in eligibility.eligible for node in current)
    return loads.first(
        eligibility.placeable,
        {*current, *taken},
        missing + surge + moves,
        value_of=value_of if spec.spread else None,
        has=current,
    )


def _on_every_node(given: PlanInput, phases: _Phases) -> PlanInput:
    """Return the daemon set's input as that of an RC that wants as many pods as it has, or may get, nodes."""
    spec, eligible, taken = given.spec, given.eligibility.eligible, set(given.taken)
    stays = [node for node in given.current if node in eligible and node not in taken]
    known = eligible.intersection(given.strays).difference(given.current)
    fresh = known.union(given.eligibility.placeable).difference(given.current, taken)
    wanted = len(stays) + len(fresh)
    _name_taken(given, phases)
    lost = sorted(node for node in _leaving(given) if node not in given.drained)
    hold, left = given.hold, f"most of its nodes do not match any more: {listed(lost)}"
    if lost and not hold and len(lost) > MOST_LOST * len(given.current) and not _may_shrink(given, len(stays)):
        hold = f"{left}; label them again, or confirm with `rcfarm ds shrink {spec.id}`"
    elif lost and not hold and given.unchanged < SETTLED_AFTER:
        wanted, eligible = wanted + len(lost), eligible.union(lost)
        lose = ("does not match any more; it loses its pod", "do not match any more; they lose their pods")
        message = f"{listed(lost)} {lose[len(lost) > 1]} when no further node has changed for {SETTLED_AFTER:g} s"
        phases.because("node_left", message, lost)
        phases.wakes.append(SETTLED_AFTER - given.unchanged)
    elif not wanted and not given.current:
        where = f"matches the selector {spec.node_selector!r}" if spec.node_selector else "is registered"
        phases.because("no_node_matches", f"no node that may take pods {where}")
    spec = msgspec.structs.replace(spec, replicas_desired=wanted)
    return replace(given, spec=spec, eligibility=Eligibility(eligible, given.eligibility.placeable), hold=hold)


def _name_taken(given: PlanInput, phases: _Phases, adopted: Collection[str] = ()) -> None:
    """Leave a reason for the nodes that may take pods, but where the pod id belongs to another."""
    nodes = sorted(set(given.taken).intersection(given.eligibility.placeable).difference(given.current, adopted))
    if nodes:
        phases.because("pod_id_taken", f"the pod id is used by another RC, or a task, on {listed(nodes)}", nodes)


def _leaving(given: PlanInput) -> tuple[str, ...]:
    """Return the nodes of a daemon set's pods that it has none for: they go, unless the farm holds."""
    return tuple(node for node in given.current if node not in given.eligibility.eligible and node not in given.taken)


def _may_shrink(given: PlanInput, left: int) -> bool:
    """Return whether an operator has confirmed, not long ago, that so few pods may be left. What was confirmed is the
    loss of the nodes that have left by then: it does not hold for those that leave later."""
    request = given.request
    if request is None or request.verb != "shrink" or left < request.least:
        return False
    try:
        age = given.now - datetime.fromisoformat(request.at).timestamp()
    except ValueError:
        return False
    return -CLOCKS_DIFFER <= age <= min(CONFIRMED_FOR, given.unchanged + CLOCKS_DIFFER)


def _rollout(given: PlanInput, spare: int, missing: int, leaving: tuple[str, ...], is_daemon_set: bool) -> RolloutStep:
    """Return the step of the RC's rollout. `spare`: further nodes that may take a pod; `missing`: see `Plan`.
    `leaving`: a daemon set's pods that take no part in it, or, as long as they are held, do as all others."""
    spec = given.spec
    if leaving and given.hold:
        spec = msgspec.structs.replace(spec, replicas_desired=spec.replicas_desired + len(leaving))
    elif leaving:
        given = replace(given, current={node: pod for node, pod in given.current.items() if node not in leaving})
    return step(
        RolloutInput(
            spec=spec,
            rollout=given.rollout,
            request=given.request,
            current=given.current,
            ages=given.ages,
            absent={
                node: max(0.0, given.now - datetime.fromisoformat(absence.since).timestamp())
                for node, absence in given.absent.items()
            },
            leaving=[node for node in given.current if node not in given.eligibility.eligible]
            if given.spec.allocation_strategy == "dynamic"
            else (),
            spare=spare,
            missing=missing,
            domains=given.domains,
            canary_nodes=given.canary_nodes,
            is_daemon_set=is_daemon_set,
            analysis=given.analysis,
            now=given.now,
        )
    )


def _additions(
    given: PlanInput, adopted: tuple[str, ...], leaving: int, phases: _Phases
) -> tuple[tuple[str, ...], tuple[str, ...], int]:
    """Return the first free nodes, the other free ones, and the number of replicas without one. `leaving`: how many
    of the pods are none of the replicas any more."""
    current = given.current
    wanted = max(0, given.spec.replicas_desired + leaving - len(current) - len(adopted))
    taken = set(given.taken)
    avoid = {*taken, *given.strays, *adopted}
    free = (node for node in given.in_order() if node not in current and node not in avoid)
    if not wanted and not given.spec.policy.surges:
        return (), (), 0
    candidates = tuple(free if given.spec.policy.surges else islice(free, wanted))
    add, spare = candidates[:wanted], candidates[wanted:]
    missing = wanted - len(add)
    if missing:
        _name_taken(given, phases, adopted)
        spec, count = given.spec, len(given.eligibility.placeable)
        where = f"by the selector {spec.node_selector!r}" if spec.node_selector else "in the fleet"
        why = f"no node {where} may take pods"
        if count:
            why = f"each of the {count} nodes that may take pods {where} has one"
        have = "has" if missing == 1 else "have"
        wanting = f"{missing} of {spec.replicas_desired} replicas {have} no node"
        more = "add nodes, bring some back (`rcfarm node uncordon NODE`)"
        fewer = f"lower the replicas (`rcfarm rc scale {spec.id} N`)"
        phases.because("short", f"{wanting}: {why}; {more}, or {fewer}")
    return add, spare, missing


def _removals(given: PlanInput, surplus: int, rolled: RolloutStep, phases: _Phases) -> tuple[str, ...]:
    """Return the nodes of surplus pods: the ineligible ones first, then those that do not count, then those of another
    manifest, then the last names."""
    surplus -= rolled.surge
    if given.spec.replicas_desired < 0:
        desired = given.spec.replicas_desired
        remedy = f"`rcfarm rc scale {given.spec.id} 0` sets it"
        phases.because("negative_replicas", f"replicas_desired is {desired}; it is taken as 0: {remedy}")
    if surplus <= 0:
        return ()
    if given.hold:
        what = "1 surplus pod stays" if surplus == 1 else f"{surplus} surplus pods stay"
        phases.because("held", f"{what}: {given.hold}")
        return ()
    eligible = given.eligibility.eligible
    by_worth = sorted(given.current, reverse=True)
    pods, counting = given.current, rolled.counting

    def worth(node: str) -> tuple[bool, bool, bool]:
        counts = pods[node].health == "passing" if counting is None else node in counting
        return node in eligible, counts, pods[node].manifest == rolled.base

    by_worth.sort(key=worth)
    return tuple(by_worth[:surplus])


def _proceed(given: PlanInput, moving: NodeTransfer, phases: _Phases) -> tuple[Transfer | None, float | None]:
    """Go on with the transfer in progress, if the brake and the mutation lock allow it."""
    progress = transfers.proceed(moving, given.current, given.ages, given.eligibility.eligible, given.spec)
    if progress.reason:
        phases.reasons.append(progress.reason)
    if progress.step and given.hold:
        phases.because("held", f"a pod stays on {moving.old_node}, and another on {moving.new_node}: {given.hold}")
        return None, None
    if progress.step and given.mutation_holder:
        phases.because(
            "transfer_waits_for_lock", f"the mutation lock is held by {given.mutation_holder}", list(moving.ends)
        )
        return None, None
    return progress.step, progress.wake


def _transfer(
    given: PlanInput, kept: list[str], changes: tuple[str, ...], phases: _Phases
) -> tuple[Transfer | None, float | None]:
    """Begin to move at most one pod off an ineligible node, if health, the mutation lock and the brake allow it."""
    ineligible = sorted(node for node in kept if node not in given.eligibility.eligible)
    if not ineligible:
        return None, None
    if given.spec.allocation_strategy == "static":
        verb = "is" if len(ineligible) == 1 else "are"
        message = f"{listed(ineligible)} {verb} no longer eligible; a static RC keeps its pods there"
        phases.because("ineligible_kept", message, ineligible)
        return None, None
    if given.hold:
        phases.because("held", f"pods stay on ineligible nodes: {given.hold}", ineligible)
        return None, None
    away = [node for node in ineligible if given.current[node].health != "passing"]
    elsewhere = sorted(n for n in kept if n not in ineligible and given.current[n].health != "passing")
    if not away and elsewhere:
        phases.because(
            "transfer_waits_for_health",
            f"moving off {ineligible[0]} waits until {listed(elsewhere)} is passing",
            elsewhere,
        )
        return None, None
    if given.mutation_holder:
        phases.because("transfer_waits_for_lock", f"the mutation lock is held by {given.mutation_holder}", ineligible)
        return None, None
    if not away and changes:
        return None, None  # the record of the transfer and the pod are written in one transaction, without others
    avoid = {*given.current, *given.taken, *given.strays, *changes}
    free = [node for node in given.in_order() if node not in avoid]
    target = next((node for node in free if node not in given.resting), None)
    if target is None and free:
        phases.reasons.append(transfers.resting({node: given.resting[node] for node in free}))
    wake = min((given.resting[node] for node in free), default=None) if target is None else None
    return Transfer((away or ineligible)[0], target, "move" if away else "start"), wake


class PodHealth(NamedTuple):
    """A summary of pods. `away`: how many do not pass; `completed`: how many pass because their processes ended with
    success."""

    reasons: tuple[Reason, ...]
    away: int
    completed: int


def pod_health(
    spec: RCSpec,
    current: Mapping[str, Placement],
    kept: Iterable[str],
    added: Iterable[str],
    absent: Mapping[str, Absence],
    *,
    is_daemon_set: bool = False,
) -> PodHealth:
    """Classify the pods that stay and those that are about to be placed. `absent`: nodes with a dead agent, which no
    daemon set waits for."""
    classes: dict[str, list[str]] = {}
    away = completed = total = 0
    for node in kept:
        total += 1
        manifest, status, verdict = current[node]
        passes = status == "passing"
        if passes and (verdict is None or not verdict.condition):
            continue
        is_current = verdict is not None and verdict.manifest == manifest  # about its intent's manifest
        condition = verdict.condition if verdict and is_current else ""
        away += not passes and not (is_daemon_set and node in absent)
        completed += passes and condition == "completed"
        if verdict and verdict.condition == "blocked":
            code = "disk_full" if verdict.is_blocked_by_disk else "blocked"
        elif passes:
            code = "restarted" if condition == "restarted" else ""
        elif node in absent:
            code = "node_dead"
        elif condition in ("crashing", "failed"):
            code = condition
        else:
            code = "unhealthy" if is_current else "starting"
        if code:
            classes.setdefault(code, []).append(node)
    for node in added:
        total, away = total + 1, away + 1
        classes.setdefault("starting", []).append(node)
    reasons = [
        _reason(code, sorted(classes[code]), total, spec, current, absent, is_daemon_set)
        for code in _ORDER
        if code in classes
    ]
    return PodHealth(tuple(reasons), away, completed)


_SENTENCES: dict[str, tuple[str, str]] = {  # for one pod, for several
    "failed": ("has failed and is not restarted", "have failed and are not restarted"),
    "disk_full": ("has no space on its node's disk", "have no space on their nodes' disks"),
    "blocked": ("can't be reconciled with its manifest", "can't be reconciled with their manifest"),
    "crashing": ("crashes", "crash"),
    "node_dead": ("is on a node whose agent does not answer", "are on nodes whose agents do not answer"),
    "unhealthy": ("does not pass", "do not pass"),
    "starting": ("is not reported by its agent yet", "are not reported by their agents yet"),
    "restarted": ("passes, but has crashed repeatedly", "pass, but have crashed repeatedly"),
}
_ORDER = tuple(_SENTENCES)


def _reason(
    code: str,
    nodes: list[str],
    total: int,
    spec: RCSpec,
    current: Mapping[str, Placement],
    absent: Mapping[str, Absence],
    is_daemon_set: bool,
) -> Reason:
    sentence = f"{len(nodes)} of {total} {'pod' if total == 1 else 'pods'} {_SENTENCES[code][len(nodes) > 1]}"
    shown = tuple(nodes[:REASON_NODES])
    if code == "starting":
        return Reason(code, f"{sentence}: {listed(nodes)}", shown)
    if code == "node_dead":
        awaited = [absent[node].lost_at for node in nodes if not absent[node].is_lost]
        several, until = len(nodes) > 1, ""
        if is_daemon_set:
            then = (
                "it is not waited for, and keeps its pod: start the agent (`rcfarm agent`)",
                "they are not waited for, and keep their pods: start the agents (`rcfarm agent`)",
            )[several]
        elif spec.allocation_strategy == "static":
            then = f"a static RC keeps its pods there: start the {'agents' if several else 'agent'} (`rcfarm agent`)"
        elif awaited:
            until = min(awaited)
            then = (
                "unless it comes back, the node is lost and its pod is moved",
                "unless they come back, the nodes are lost and their pods are moved",
            )[several]
        else:
            then = (
                "the node is lost: its pod is moved as soon as there is another node for it",
                "the nodes are lost: their pods are moved as soon as there are other nodes for them",
            )[several]
        message = f"{sentence}: {listed(nodes)}; {then}"
        return Reason(code, message, shown, min(absent[node].since for node in nodes), until)
    verdicts = {node: verdict for node in nodes if (verdict := current[node].verdict)}
    by_cause: dict[str, list[str]] = {}
    for node, verdict in verdicts.items():
        by_cause.setdefault(describe(verdict), []).append(node)
    causes = [f"{listed(where)}: {cause}" for cause, where in list(by_cause.items())[:SHOWN_CAUSES]]
    causes += [f"and {len(by_cause) - SHOWN_CAUSES} other causes"] if len(by_cause) > SHOWN_CAUSES else []
    since = min((verdict.since for verdict in verdicts.values() if verdict.status != "passing"), default="")
    return Reason(code, f"{sentence}: {'; '.join(causes)}", shown, since)
