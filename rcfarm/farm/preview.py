"""What a change of an RC would do: the real planner on a virtual fleet, until nothing moves any more.

The model: agents act at once, and each pod passes `starts_in` seconds after it was given a manifest; dead nodes stay
dead, analyses succeed, and nothing else changes. Time jumps from one moment at which something may happen to the next.
So the result is what the farm does if nothing fails, wave by wave, and what it would then still wait for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

import msgspec

from rcfarm.farm.planner import Plan, PlanInput, plan, preferred
from rcfarm.farm.rollout import Ages, Placement, Since
from rcfarm.operations.analysis import all_passed
from rcfarm.operations.rc_snapshot import State, word_of
from scheduler.protocol import Absence, Eligibility
from scheduler.spread import NodeLoads
from store.schema.records import Health, NodeTransfer, RCSpec, Reason, Rollout, rfc3339

MAX_STEPS = 200_000  # plans of one preview; a rollout of 10,000 pods one by one has 20,000
SHORTEST = 0.001  # seconds between two moments


class Wave(msgspec.Struct, frozen=True, kw_only=True):
    """What is written at one moment, `after` seconds from the change: nodes in ascending order.

    `update`: pods that get the changed manifest; `back`: pods that get the former one again; `surge`: pods beyond the
    replicas. `state`: of the rollout afterwards, "" without one.
    """

    after: float
    add: tuple[str, ...] = ()
    surge: tuple[str, ...] = ()
    update: tuple[str, ...] = ()
    back: tuple[str, ...] = ()
    remove: tuple[str, ...] = ()
    move: tuple[tuple[str, str], ...] = ()
    state: str = ""


class Preview(msgspec.Struct, frozen=True, kw_only=True):
    """The effect of a change. `state` and `reasons`: the RC's, when nothing happens any more; `seconds`: until then.

    `digest` identifies the waves and the end without their times: it is the same while the farm would do the same.
    """

    waves: tuple[Wave, ...]
    state: State
    reasons: tuple[Reason, ...]
    seconds: float
    placed: int
    desired: int
    digest: str


@dataclass(frozen=True, slots=True)
class PreviewInput:
    """The RC and the fleet before the change. `current`: the manifest of each placed pod's intent, None where it is
    lost. `passing`: the nodes whose pod passes. `absent`: nodes with a pod whose agent does not answer. `taken`: nodes
    where the pod id belongs to another RC. `drained`: nodes that an operator empties. `domains`, `canary_nodes`: see
    `PlanInput`. `hold`: why farms remove nothing, or "". `now`: Unix seconds. `loads`: of all pods of the fleet.
    `values`: of the label `spread`, by node."""

    spec: RCSpec
    eligibility: Eligibility
    current: Mapping[str, str | None]
    passing: frozenset[str] = frozenset()
    absent: Mapping[str, Absence] = field(default_factory=dict)
    taken: tuple[str, ...] = ()
    drained: frozenset[str] = frozenset()
    domains: Mapping[str, str] = field(default_factory=dict)
    hold: str = ""
    rollout: Rollout | None = None
    now: float = 0.0
    loads: NodeLoads = field(default_factory=NodeLoads)
    values: Mapping[str, str] = field(default_factory=dict)
    moving: NodeTransfer | None = None
    canary_nodes: frozenset[str] = frozenset()


def preview(given: PreviewInput, *, starts_in: float = 1.0) -> Preview:
    """Return what the farm would do."""
    fleet = _Fleet(given, starts_in)
    policy = given.spec.policy
    patience = 2 * policy.progress_deadline + policy.healthy_deadline + policy.soak
    waves: list[Wave] = []
    decision, moved_at = Plan(), 0.0
    for _ in range(MAX_STEPS):
        before, decision = decision, fleet.decide()
        wave, is_changed = fleet.apply(decision)
        waves += [wave] if wave else []
        if is_changed or decision.state != before.state:
            moved_at = fleet.now
        if is_changed:
            continue
        if fleet.now - moved_at > patience or not fleet.advance(decision):
            break
    # What only says that pods are not reported yet is no obstacle where every pod is.
    reasons = tuple(why for why in decision.reasons if why.code != "starting")
    outcome = [[msgspec.structs.replace(wave, after=0.0) for wave in waves], decision.state, sorted(fleet.pods)]
    return Preview(
        waves=tuple(waves),
        state=word_of(decision.state, reasons),
        reasons=reasons,
        seconds=round(moved_at, 1),
        placed=len(fleet.pods),
        desired=decision.desired,
        digest=hashlib.sha256(msgspec.json.encode([given.spec.id, given.spec.manifest, outcome])).hexdigest()[:16],
    )


class _Fleet:
    """The RC's pods as the planner sees them, and the times at which those that were changed will pass.

    Only what changes is computed again from one moment to the next: a rollout of a thousand pods one by one has three
    thousand of them.
    """

    def __init__(self, given: PreviewInput, starts_in: float) -> None:
        self.given, self.now, self.rollout = given, 0.0, given.rollout
        self.moving = given.moving
        self.pods: dict[str, Placement] = {}
        self._starts_in = starts_in
        self._passes_at: dict[str, float] = {}  # of pods that do not pass yet, and will
        self._since: dict[str, Since] = {}
        # What does not pass now may never: only what the farm changes is assumed to become healthy.
        for node, manifest in given.current.items():
            self._set(node, manifest, passes_at=0.0 if node in given.passing else float("inf"))

    def decide(self) -> Plan:
        """Plan for the fleet as it is at this moment."""
        if beginning := [node for node, at in self._passes_at.items() if at <= self.now]:
            self._begin_to_pass(beginning)
        given = self.given
        return plan(
            PlanInput(
                spec=given.spec,
                current=self.pods,
                eligibility=given.eligibility,
                taken=given.taken,
                hold=given.hold,
                absent={node: absence for node, absence in given.absent.items() if node in self.pods},
                rollout=self.rollout,
                ages=Ages(self.now, self._since),
                drained=given.drained,
                domains=given.domains,
                canary_nodes=given.canary_nodes,
                analysis=all_passed(given.spec.policy),
                now=given.now + self.now,
                moving=self.moving,
                preferred=preferred(
                    given.spec,
                    self.pods,
                    given.taken,
                    given.eligibility,
                    given.loads,
                    lambda node: given.values.get(node, ""),
                ),
            )
        )

    def apply(self, decision: Plan) -> tuple[Wave | None, bool]:
        """Carry the plan out. Return what it wrote, and whether anything changed, be it only the rollout's record."""
        rolled, transfer, before = decision.rolled, decision.transfer, self.rollout
        self.rollout = rolled.record or self.rollout
        stage = transfer.stage if transfer and transfer.new_node else ""
        ends = (transfer.old_node, transfer.new_node) if transfer and transfer.new_node else ("", "")
        moves = (ends,) if stage in ("move", "start") else ()  # shown when it begins
        self.moving = NodeTransfer("", *ends) if stage == "start" else decision.moving
        gone = {"move": ends[:1], "complete": ends[:1], "rollback": ends[1:]}.get(stage, ())
        for node in (*decision.remove, *gone):
            self._drop(node)
        for node in (*decision.add, *decision.repair, *(new for _, new in moves)):
            self._order(node, rolled.base)
        for node in (*decision.update, *decision.surge):
            self._order(node, rolled.target)
        goes_back = rolled.target != self.given.spec.manifest
        wave = Wave(
            after=round(self.now, 1),
            add=(*decision.add, *decision.repair),
            surge=decision.surge,
            update=() if goes_back else decision.update,
            back=decision.update if goes_back else (),
            remove=tuple(sorted(decision.remove)),
            move=moves,
            state=self.rollout.state if self.rollout and self.rollout.is_of(self.given.spec) else "",
        )
        if not any((wave.add, wave.surge, wave.update, wave.back, wave.remove, wave.move)):
            return None, bool(gone) or (self.rollout != before and _state(self.rollout) != _state(before))
        return wave, True

    def advance(self, decision: Plan) -> bool:
        """Let time pass until something may happen. Return whether anything can."""
        moments = list(self._passes_at.values())
        if decision.wake is not None:
            moments.append(self.now + max(decision.wake, SHORTEST))
        if not moments:
            return False
        self.now = min(moments)
        return True

    def _order(self, node: str, manifest: str) -> None:
        """Give a node a pod with this manifest, or its pod this manifest."""
        self._set(node, manifest, passes_at=float("inf") if node in self.given.absent else self.now + self._starts_in)

    def _set(self, node: str, manifest: str | None, passes_at: float) -> None:
        self.pods[node] = Placement(manifest)
        self._since[node] = Since(None, None, self.now, self.now)
        self._passes_at.pop(node, None)
        if manifest is not None and passes_at < float("inf"):
            self._passes_at[node] = passes_at

    def _begin_to_pass(self, nodes: list[str]) -> None:
        verdicts: dict[str, Health] = {}  # by manifest
        since = rfc3339(datetime.fromtimestamp(self.given.now + self.now, UTC))
        for node in nodes:
            manifest = self.pods[node].manifest
            assert manifest is not None
            verdict = verdicts.setdefault(manifest, Health("passing", manifest, since=since))
            self.pods[node] = Placement(manifest, "passing", verdict)
            self._since[node] = self._since[node]._replace(passing=self.now)
            del self._passes_at[node]

    def _drop(self, node: str) -> None:
        for of_pods in (self.pods, self._passes_at, self._since):
            of_pods.pop(node, None)


def _state(rollout: Rollout | None) -> str:
    return rollout.state if rollout else ""
