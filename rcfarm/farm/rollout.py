"""The next step of a rollout, as a pure decision: which pods of an RC get which manifest now.

`step` maps a `RolloutInput` to a `RolloutStep`, which `rcfarm.farm.planner` carries into its plan. The owner writes the
step's record in the same transaction as the intents, so a farm that takes the RC over goes on where the former one was.

    pending → canary → awaiting_promotion → rolling → soaking → done
                  └────────────┴──────────────┴─────────┴→ reverting → reverted, or aborted if an operator asked for it
                                                                     → failed: nothing to revert to, or it is bad, too

A pod *counts* when it passes, and, on the new manifest, has done so for `min_healthy_time` without interruption.
Whatever else it is (failing, unknown, restarting, on a dead node), it is unavailable. A healthy pod is only touched
while more pods count than `max_unavailable` requires; changing one that does not count makes nothing worse, so those go
first. This budget covers all manifests that the RC has: several updates in a row never add up. A shortage that waiting
does not end (replicas that no node can take, pods on nodes that were dead before) slows a rollout down to one pod at a
time, and does not stop it: what an operator rolls out to a fleet in trouble may be what helps it.

Analyses (`rcfarm.operations.analysis`) run beside the step, which has their results as an input and says which are to
run. Each must succeed once in the canary and once in the soak; soaking comes also without a time if there are any.

The spec is the operator's, and is never changed here: an RC whose rollout was reverted keeps the manifest that it was
given, and its pods run the one before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from math import ceil
from typing import NamedTuple

import msgspec

from rcfarm.operations import analysis
from rcfarm.operations.fleet import listed
from rcfarm.operations.rc_snapshot import describe
from store.schema.records import (
    BEFORE_PROMOTION,
    ROLLING_OUT,
    ROLLOUT_STOPPED,
    Analysis,
    AnalysisResult,
    Health,
    HealthState,
    RCSpec,
    Reason,
    Rollout,
    RolloutRequest,
    RolloutState,
    rfc3339,
)

CRASHES = 2  # restarts after which a changed pod is in a crash loop
BLOCKED = 3.0  # seconds for which a pod can't be brought to its manifest until it counts as failed
_BROKEN = frozenset({"blocked", "crashing", "failed"})  # conditions of pods that may not become healthy
BLAME = 300.0  # seconds after its change within which a node's death counts against the rollout


class Placement(NamedTuple):
    """One pod of the RC: the manifest of its intent (None: the intent is lost), and its health on that manifest.

    `verdict`: its agent's health record, for any manifest; None while there is none.
    """

    manifest: str | None
    health: HealthState = "unknown"
    verdict: Health | None = None


class Age(NamedTuple):
    """For how many seconds a pod has passed (None: it does not), been blocked, had its intent as it is, and been
    expected to count: since its change, since it stopped passing after it had counted, or since its owner began."""

    passing: float | None = None
    blocked: float = 0.0
    changed: float = 0.0
    awaited: float = 0.0


class Since(NamedTuple):
    """The moments since when a pod has been as it is: seconds of its owner's clock. See `Age`."""

    passing: float | None
    blocked: float | None
    changed: float
    awaited: float


@dataclass(frozen=True, slots=True)
class Ages:
    """The ages of pods at the moment `now` of their owner's clock. What has not changed stays the same thing from one
    plan to the next, however much time passes."""

    now: float = 0.0
    since: Mapping[str, Since] = field(default_factory=dict)

    def of(self, node: str) -> Age:
        """Return the age of the pod on a node; one that was never seen begins now."""
        if (since := self.since.get(node)) is None:
            return Age()
        return Age(
            None if since.passing is None else self.now - since.passing,
            0.0 if since.blocked is None else self.now - since.blocked,
            self.now - since.changed,
            self.now - since.awaited,
        )

    def passing(self, node: str) -> float:
        """Return for how many seconds the pod on a node has passed, 0 if it does not pass."""
        since = self.since.get(node)
        return 0.0 if since is None or since.passing is None else self.now - since.passing


class _Seen(NamedTuple):
    """A pod as it was seen last, and since when each thing has been so."""

    pod: Placement
    is_absent: bool
    since: Since


class PodClock:
    """Measures ages on the owner's own monotonic clock, in seconds. An owner that has just begun knows of no time
    before, so that a pod may have to pass for `min_healthy_time` once more."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def forget(self) -> None:
        """Forget everything, as nothing is rolled out."""
        self._seen.clear()

    def read(
        self,
        current: Mapping[str, Placement],
        now: float,
        min_healthy_time: float = 0.0,
        absent: Collection[str] = (),
    ) -> Ages:
        """Return the ages of the pods as they are now. To be called whenever one of them has changed. `absent`: nodes
        whose agent does not answer; once it does, the pod has its deadline again."""
        seen: dict[str, _Seen] = {}
        for node, pod in current.items():
            before, is_absent = self._seen.get(node), node in absent
            if before is not None and before.pod == pod and before.is_absent == is_absent:
                seen[node] = before
            else:
                seen[node] = _Seen(pod, is_absent, _since(pod, before, now, min_healthy_time, is_absent))
        self._seen = seen
        return Ages(now, {node: one.since for node, one in seen.items()})


def _since(pod: Placement, before: _Seen | None, now: float, min_healthy_time: float, is_absent: bool) -> Since:
    """Return the moments of a pod that is not as it was seen before."""
    is_blocked = pod.verdict is not None and pod.verdict.condition == "blocked"
    passes = pod.health == "passing"
    if before is None or before.pod.manifest != pod.manifest:
        return Since(now if passes else None, now if is_blocked else None, now, now)
    known = before.since
    stays = _verdict(before.pod) == _verdict(pod) and known.passing is not None
    passing = None if not passes else known.passing if stays else now
    blocked = None if not is_blocked else now if known.blocked is None else known.blocked
    counted = known.passing is not None and now - known.passing >= min_healthy_time
    lapsed = counted and passing != known.passing
    returns = before.is_absent and not is_absent
    return Since(passing, blocked, known.changed, now if lapsed or returns else known.awaited)


def _verdict(pod: Placement) -> tuple[str, ...]:
    """Return what a verdict says. While that stays, the pod has passed for as long as before."""
    return (pod.verdict.manifest, pod.verdict.status, pod.verdict.since) if pod.verdict else ()


def is_steady(spec: RCSpec, rollout: Rollout | None, current: Mapping[str, Placement]) -> bool:
    """Return whether there is nothing to roll out, and no pod that differs."""
    is_done = rollout is None or (rollout.is_of(spec) and rollout.state == "done")
    return is_done and all(pod.manifest in (None, spec.manifest) for pod in current.values())


@dataclass(frozen=True, slots=True)
class RolloutInput:
    """The input of a step.

    `absent`: nodes whose agent does not answer, and for how many seconds. `leaving`: nodes off which the pods are about
    to be moved. `spare`: further nodes that may take a pod. `missing`: replicas that no node can take. `domains`: the
    value of the label `wave_by` of nodes that have it. `canary_nodes`: that match the policy's `canary_selector`, if it
    has one. `is_daemon_set`: a dead node has no replica anywhere else.
    `analysis`: the results for the rollout as it is recorded, by analysis. `now`: Unix seconds.
    """

    spec: RCSpec
    rollout: Rollout | None
    request: RolloutRequest | None
    current: Mapping[str, Placement]
    ages: Ages = field(default_factory=Ages)
    absent: Mapping[str, float] = field(default_factory=dict)
    leaving: Collection[str] = ()
    spare: int = 0
    missing: int = 0
    domains: Mapping[str, str] = field(default_factory=dict)
    canary_nodes: Collection[str] = ()
    is_daemon_set: bool = False
    analysis: Mapping[str, AnalysisResult] = field(default_factory=dict)
    now: float = 0.0


@dataclass(frozen=True, slots=True)
class RolloutStep:
    """What to do. `base`: the manifest of pods that are placed or restored. `update`: the nodes whose intents get
    `target`. `surge`: how many pods beyond the replicas are wanted, which get `target`, too. `record`: to be written.
    `wake`: seconds until the next step may differ although nothing changed. `counting`: the pods that count; None: all
    that pass. `analyse`: the analyses that are to run from now on."""

    base: str
    target: str
    update: tuple[str, ...] = ()
    surge: int = 0
    record: Rollout | None = None
    reasons: tuple[Reason, ...] = ()
    wake: float | None = None
    is_settled: bool = True
    counting: frozenset[str] | None = None
    analyse: tuple[Analysis, ...] = ()


def amount(text: str, of: int, *, up: bool) -> int:
    """Return a number of pods from its text: `3`, or `25%` of `of`."""
    if not text.endswith("%"):
        return int(text)
    share = int(text[:-1]) * of / 100
    return ceil(share) if up else int(share)


def may_be_away(spec: RCSpec, replicas: int) -> int:
    """Return how many of the pods may be unavailable at a time, which is none only if further pods are placed."""
    if spec.policy.max_unavailable is None:
        return spec.max_unavailable
    return amount(spec.policy.max_unavailable, replicas, up=False)


def step(given: RolloutInput) -> RolloutStep:
    """Decide the next step of one RC's rollout; without one, which intents to bring back to the spec's manifest."""
    spec, rollout = given.spec, given.rollout
    if is_steady(spec, rollout, given.current):
        return RolloutStep(spec.manifest, spec.manifest)
    return _Decision(given, rollout if rollout and rollout.is_of(spec) else _begun(given)).step()


def _begun(given: RolloutInput) -> Rollout:
    """Return the record of a new rollout, of the spec's manifest."""
    spec, last = given.spec, given.rollout
    if last is not None and last.state == "done":
        stable, number = last.manifest, last.revision
    elif last is not None and last.stable:
        stable, number = last.stable, last.stable_revision
    else:
        running = Counter(pod.manifest for pod in given.current.values() if pod.manifest is not None)
        stable = min(running, key=lambda manifest: (-running[manifest], manifest), default="")
        number = max(0, spec.revision - 1) if stable else 0
    at = _time(given.now)
    # What is known to be good needs no canary: the way back, and what nothing else could be kept instead of.
    known = stable in ("", spec.manifest)
    return Rollout(
        revision=spec.revision,
        manifest=spec.manifest,
        stable="" if stable == spec.manifest else stable,
        stable_revision=0 if known else number,
        state="rolling" if known else "canary",
        since=at,
        started=at,
        progressed=at,
        late=tuple(sorted(node for node in given.current if node in given.absent)),
        request=given.request.id if given.request else "",  # it was about another rollout
    )


class _Decision:
    """One step: the input, the record as it becomes, and what was counted."""

    def __init__(self, given: RolloutInput, rollout: Rollout) -> None:
        self.given, self.spec, self.policy = given, given.spec, given.spec.policy
        self.rollout, self.before = rollout, given.rollout
        self.pods = {node: pod for node, pod in given.current.items() if pod.manifest is not None}
        self.replicas, self.present = given.spec.replicas_desired, len(given.current)
        if given.is_daemon_set:
            excused = sum(self._is_excused(node) for node in given.absent if node in self.pods)
            self.replicas, self.present = self.replicas - excused, self.present - excused
        self.done = [node for node, pod in self.pods.items() if pod.manifest == rollout.manifest]
        # The pods on the new manifest must have proved themselves.
        new = rollout.manifest if rollout.state != "done" else None
        ages, enough = given.ages, self.policy.min_healthy_time
        self.counting = {
            node
            for node, pod in self.pods.items()
            if pod.health == "passing" and (pod.manifest != new or ages.passing(node) >= enough)
        }
        self.beyond = max(0, self.present - self.replicas)
        self.wakes: list[float] = []

    def step(self) -> RolloutStep:
        if self.rollout is self.before:  # else the results are of another rollout
            known = {result.name: result for result in self.rollout.analysis} | dict(self.given.analysis)
            self._set(analysis=tuple(known[each.name] for each in self.policy.analysis if each.name in known))
        self._obey()
        update: list[str] = []
        surge = 0
        while True:  # a state that has nothing to wait for leads to the next one at once
            state, update, surge = self.rollout.state, [], 0
            if state in ROLLING_OUT:
                update, surge = self._forward()
            elif state == "reverting":
                update, surge = self._back()
            elif state == "done":
                update = self._within_budget(self._not_on(self.spec.manifest), 0)
            elif state == "paused":
                surge = min(self._most_surge(), self.beyond)
                self._wait_for_analyses()
            if self.rollout.state == state:
                break
        if update:
            self._set(progressed=_time(self.given.now))
        base, target = self._manifests()
        # Also for the next owner, which is younger.
        excused = {node for node in self.given.absent if node in self.pods and self._is_excused(node)}
        late = {*self.rollout.late, *excused, *(node for node in update if node in self.given.absent)}
        self._set(late=tuple(sorted(late.intersection(self.given.absent))))
        record = self.rollout if self.rollout != self.before else None
        is_settled = (self.rollout.state in ROLLOUT_STOPPED | {"done"} and not update) or not self.spec.replicas_desired
        reasons = self._reasons(update)
        wake = max(0.0, min(self.wakes)) if self.wakes else None
        if wake is not None:
            until = _time(self.given.now + wake)
            reasons = tuple(msgspec.structs.replace(reason, until=until) for reason in reasons)
        return RolloutStep(
            base,
            target,
            tuple(sorted(update)),
            surge,
            record,
            reasons,
            wake,
            is_settled,
            frozenset(self.counting),
            self._analyses(),
        )

    def _obey(self) -> None:
        """Carry out the operator's request, once."""
        request, rollout = self.given.request, self.rollout
        if request is None or request.id == rollout.request or request.revision != rollout.revision:
            return
        self._set(request=request.id)
        by = f" by {request.by}" if request.by else ""
        if request.verb == "pause" and rollout.state in ROLLING_OUT:
            hint = f"`rcfarm rollout resume {self.spec.id}` goes on"
            self._enter("paused", Reason("rollout_paused", f"paused{by}; {hint}"))
            self._set(resumes=rollout.state)
        elif request.verb == "resume" and rollout.state == "paused":
            self._resume()
            self._set(analysis=())
        elif request.verb == "resume" and rollout.state in ROLLOUT_STOPPED:
            self._enter("canary" if rollout.stable else "rolling")  # again, from the beginning
            self._set(progressed=_time(self.given.now), updated=0, analysis=())
        elif request.verb == "promote" and rollout.state in BEFORE_PROMOTION:
            self._enter("rolling")
            self._set(progressed=_time(self.given.now))
        elif request.verb == "abort" and rollout.state in ROLLING_OUT | {"paused"}:
            self._stop(Reason("rollout_aborted", f"aborted{by}"))

    def _resume(self) -> None:
        """Go on where the rollout was paused."""
        resumes = self.rollout.resumes
        self._enter("canary" if resumes == "awaiting_promotion" else resumes)
        self._set(progressed=_time(self.given.now))

    @property
    def _is_analysed(self) -> bool:
        """Return whether analyses decide on the rollout. Without a revision to go back to, they could only leave it
        halfway."""
        return bool(self.policy.analysis and self.rollout.stable)

    @property
    def _waits_for_analysis(self) -> bool:
        rollout = self.rollout
        return rollout.state == "paused" and rollout.reason is not None and rollout.reason.code in analysis.PAUSES

    def _analyses(self) -> tuple[Analysis, ...]:
        """Return the analyses that are to run: all, while a pod passes on the new manifest, or until data comes."""
        runs = any(pod.manifest == self.spec.manifest and pod.health == "passing" for pod in self.pods.values())
        is_active = self.rollout.state in ROLLING_OUT and runs
        return self.policy.analysis if self._is_analysed and (is_active or self._waits_for_analysis) else ()

    def _lacking(self) -> list[str]:
        """Return the analyses that must still succeed in this state."""
        return analysis.lacking(self.policy, self.rollout.analysis) if self._is_analysed else []

    def _wait_for_analyses(self) -> None:
        """Leave a pause that an analysis has caused, if nothing is missing any more. Pods that fail end it, too."""
        if not self._waits_for_analysis:
            return
        if failure := self._failure():
            self._stop(failure)
            return
        self._watch(self._waited_for())
        why = analysis.pause(self.spec.id, self.policy, self.rollout.analysis, is_paused=True)
        if why is None or not self._is_analysed:
            self._resume()
        elif why != self.rollout.reason:
            self._set(reason=why)

    def _forward(self) -> tuple[list[str], int]:
        """Go on with an active rollout. Return the nodes to update, and how many pods beyond the replicas to place."""
        target, rollout, done = self.spec.manifest, self.rollout, self.done
        counted = len(self.counting.intersection(self.done))
        if counted > self.rollout.updated:
            self._set(progressed=_time(self.given.now))
        self._set(updated=counted)
        if failure := self._failure():
            self._stop(failure)
            return [], 0
        why = analysis.pause(self.spec.id, self.policy, rollout.analysis, is_paused=False)
        if why is not None and self._is_analysed:
            self._enter("paused", why)
            self._set(resumes=rollout.state)
            return [], 0
        waiting = self._waited_for()
        surge = min(self._most_surge(), self.beyond + self.given.spare)
        if rollout.stable and all(map(self._is_excused, self.pods)):
            return [], 0  # nothing can show that the manifest is good
        if rollout.state in BEFORE_PROMOTION:
            canaries = self._canaries()
            missing = max(0, canaries - len([node for node in done if not self._is_excused(node)]))
            most, surge = surge, min(surge, self.beyond + missing)
            if self.policy.canary_selector:  # they are changed where they are
                most = surge = min(surge, self.beyond)
            if missing:
                self._set_state("canary")
                self._watch(waiting)
                in_place = missing - max(0, surge - self.beyond)
                alive = [node for node in self._canary_candidates() if self.pods[node].manifest != target]
                return self._within_budget(alive, surge, most)[:in_place], surge
            if waiting:
                self._watch(waiting)
                return [], surge
            if canaries and rollout.state != "awaiting_promotion" and self._lacking():
                self._set_state("canary")
                return [], surge
            if canaries and not self.policy.auto_promote:
                hint = (
                    f"`rcfarm rollout promote {self.spec.id}` goes on, `rcfarm rollout abort {self.spec.id}` goes back"
                )
                message = f"{_pods(canaries)} of revision {rollout.revision} passed as a canary; {hint}"
                if rollout.state != "awaiting_promotion":
                    self._enter("awaiting_promotion", Reason("awaiting_promotion", message))
                return [], surge
            self._enter("rolling")
            return [], 0
        outdated = self._not_on(target)
        changing = outdated[: max(0, len(outdated) - self.beyond)]  # the others are surplus in the end
        if changing or waiting:
            self._set_state("rolling")
            self._watch(waiting)
            changing = self._of_first_domain(changing, waiting)
            return self._within_budget(changing, surge), surge if changing else min(surge, self.beyond)
        if outdated:
            return [], 0
        if (self.policy.soak or self._is_analysed) and rollout.state != "soaking":
            self._enter("soaking")
        left = self.policy.soak - self._since(self.rollout.since) if self.policy.soak else 0.0
        if left > 0:
            self.wakes.append(left)
        elif not self._lacking():
            self._enter("done")
        return [], 0

    def _canaries(self) -> int:
        """Return how many canaries there are: at least one where a selector names their nodes, even if none matches."""
        if not self.policy.canary_selector:
            return min(amount(self.policy.canary, self.replicas, up=True), self.replicas)
        of = len([node for node in self.pods if node in self.given.canary_nodes and not self._is_excused(node)])
        return max(1, min(amount(self.policy.canary, of, up=True), of))

    def _canary_candidates(self) -> list[str]:
        """Return the nodes whose pods may be canaries now."""
        alive = sorted(node for node in self.pods if node not in self.given.absent)
        selected = self.policy.canary_selector
        return [node for node in alive if node in self.given.canary_nodes] if selected else alive

    def _back(self) -> tuple[list[str], int]:
        """Go on with reverting. Return the nodes to change back, and how many pods beyond the replicas to keep."""
        rollout, stable = self.rollout, self.rollout.stable
        back = [node for node, pod in self.pods.items() if pod.manifest == stable]
        waiting = [node for node in back if self.pods[node].health != "passing" and not self._is_excused(node)]
        outdated = self._not_on(stable)
        changing = outdated[: max(0, len(outdated) - self.beyond)]  # the others are surplus in the end
        left = self.policy.healthy_deadline - max((self.given.ages.of(node).awaited for node in waiting), default=0.0)
        trouble = "" if changing else self._broken(back)
        if not trouble and waiting and not changing and left <= 0:
            trouble = f"{listed(sorted(waiting))} did not pass within {self.policy.healthy_deadline:g} s"
        if trouble:
            why = rollout.reason.message if rollout.reason else ""
            message = f"{why}; the revision before is unhealthy, too: {trouble}; apply another manifest"
            self._enter("failed", Reason("stable_unhealthy", message))
            return [], 0
        if changing or waiting:
            surge = min(self._most_surge(), self.beyond)
            self.wakes.append(left if left > 0 else self.policy.healthy_deadline)
            return self._within_budget(changing, surge), surge
        if outdated:
            return [], 0
        aborted = rollout.reason is not None and rollout.reason.code == "rollout_aborted"
        self._enter("aborted" if aborted else "reverted", rollout.reason)
        return [], 0

    def _stop(self, why: Reason) -> None:
        """Go back to the revision before, if that is known and wanted, or leave everything as it is."""
        rollout = self.rollout
        asked = why.code == "rollout_aborted"
        if rollout.stable and (self.policy.auto_revert or asked):
            self._enter("reverting", why)
            self._set(progressed=_time(self.given.now))
        else:
            hint = "no revision to go back to" if not rollout.stable else "auto_revert is off"
            self._enter("failed", Reason(why.code, f"{why.message}; {hint}", why.nodes))

    def _waited_for(self) -> list[str]:
        """Return the nodes that have the new manifest, and whose pods do not count yet."""
        return [node for node in self.done if node not in self.counting and not self._is_excused(node)]

    def _failure(self) -> Reason | None:
        """Return why the rollout must stop, or None."""
        waiting = self._waited_for()
        late = sorted(node for node in waiting if self.given.ages.of(node).awaited >= self.policy.healthy_deadline)
        text = self._broken(self.done)
        if not text and self._is_analysed:
            text = analysis.failure(self.policy, self.rollout.analysis)
        if not text and late:
            text = f"{listed(late)} did not pass for {self.policy.min_healthy_time:g} s within "
            text += f"the healthy_deadline of {self.policy.healthy_deadline:g} s{self._why(late)}"
        awaited = [self.given.ages.of(node).awaited for node in waiting]
        if awaited and self.rollout.state in ("canary", "rolling"):  # what waits for others is not to blame
            # Only time that this owner has seen counts: farms may have been away, and a clock may be wrong.
            left = self.policy.progress_deadline - min(self._since(self.rollout.progressed), max(awaited))
            if not text and left <= 0:
                deadline = f"the progress_deadline of {self.policy.progress_deadline:g} s"
                text = f"no further pod became healthy within {deadline}"
            self.wakes.append(left)
        return Reason("rollout_failed", f"revision {self.rollout.revision}: {text}") if text else None

    def _broken(self, nodes: Iterable[str]) -> str:
        """Return which of the pods can't become healthy, and why; "" if all may."""
        found = []
        suspects = [node for node in nodes if (verdict := self.pods[node].verdict) and verdict.condition in _BROKEN]
        for node in sorted(suspects):
            pod = self.pods[node]
            verdict = pod.verdict
            if verdict is None or self._is_excused(node):
                continue
            if verdict.condition == "blocked":
                blocked = self.given.ages.of(node).blocked
                if blocked < BLOCKED:
                    self.wakes.append(BLOCKED - blocked)
                    continue
            elif verdict.manifest != pod.manifest or not _is_hopeless(verdict):
                continue
            found.append(f"{node}: {describe(verdict)}")
        return "; ".join(found[:3]) + (f"; and {len(found) - 3} more" if len(found) > 3 else "")

    def _why(self, nodes: Iterable[str]) -> str:
        causes = [f"{node}: {describe(verdict)}" for node in nodes if (verdict := self.pods[node].verdict)]
        return f" ({'; '.join(causes[:3])})" if causes else ""

    def _within_budget(self, nodes: Iterable[str], surge: int, most: int = 0) -> list[str]:
        """Return the nodes that may be changed now: those that do not count, and as many others as may be away.

        `surge`: pods beyond the replicas that are wanted now; `most`: that could be had.
        """
        nodes = sorted(set(nodes).difference(self.given.leaving) if self.given.leaving else nodes)
        free = [node for node in nodes if node not in self.counting]
        healthy = [node for node in nodes if node in self.counting]
        if self.present > self.replicas + surge:
            return free  # the same plan removes pods, which may have counted
        limit = may_be_away(self.spec, self.replicas)
        if not max(surge, most):
            limit = max(1, limit)  # no further pod can be placed for it
        budget = len(self.counting) - (self.replicas - limit)
        is_full = self.present - self.beyond + self.given.missing >= self.replicas
        is_full = is_full and self.beyond >= max(surge, most)
        if is_full and all(self._is_excused(node) for node in self.pods.keys() - self.counting):
            budget = max(1, budget)  # waiting would not bring back more
        return free + healthy[: max(0, budget)]

    def _of_first_domain(self, nodes: list[str], waiting: list[str]) -> list[str]:
        """Return those of the nodes that are in the first domain where a pod is still to be changed, or waited for."""
        if not self.policy.wave_by:
            return nodes
        domains = self.given.domains
        first = min(domains.get(node, "") for node in (*nodes, *waiting))
        return [node for node in nodes if domains.get(node, "") == first]

    def _not_on(self, manifest: str) -> list[str]:
        return sorted([node for node, pod in self.pods.items() if pod.manifest != manifest])

    def _most_surge(self) -> int:
        return amount(self.policy.max_surge, self.replicas, up=True)

    def _is_excused(self, node: str) -> bool:
        """Return whether nothing waits for the pod: its node was dead before the change, or died long after it."""
        if node not in self.given.absent:
            return False
        lived = self.given.ages.of(node).changed - self.given.absent[node]
        return node in self.rollout.late or lived > max(BLAME, 2 * self.policy.min_healthy_time)

    def _watch(self, nodes: Iterable[str]) -> None:
        """Look again when one of these pods may count, or is late."""
        for node in nodes:
            age = self.given.ages.of(node)
            if age.passing is not None:
                self.wakes.append(self.policy.min_healthy_time - age.passing)
            self.wakes.append(self.policy.healthy_deadline - age.awaited)

    def _manifests(self) -> tuple[str, str]:
        """Return the manifest of pods that are placed or restored, and the one that updates bring."""
        rollout, target = self.rollout, self.spec.manifest
        state = rollout.resumes if rollout.state == "paused" else rollout.state
        if not rollout.stable or state in {"rolling", "soaking", "done"}:
            return target, target
        return rollout.stable, target if state in BEFORE_PROMOTION else rollout.stable

    def _reasons(self, update: list[str]) -> tuple[Reason, ...]:
        rollout, total = self.rollout, max(self.replicas, len(self.pods))
        if rollout.state == "done":
            return ()
        if rollout.state in {"paused", "awaiting_promotion", *ROLLOUT_STOPPED} and rollout.reason is not None:
            code = {"reverted": "rollout_reverted", "failed": "rollout_failed"}.get(rollout.state, rollout.reason.code)
            back = f"; the pods run revision {rollout.stable_revision} again" if rollout.state != "failed" else ""
            text = rollout.reason.message + (back if rollout.state in ROLLOUT_STOPPED else "")
            return (Reason(code, text, rollout.reason.nodes, rollout.since),)
        if rollout.state == "reverting":
            why = rollout.reason.message if rollout.reason else "asked for"
            left = len(self._not_on(rollout.stable))
            text = f"{why}; going back to revision {rollout.stable_revision}, {left} of {_pods(total)} left"
            text += f"; {self._too_many_away()}" if left and not update else ""
            return (Reason("rollout_reverting", text, (), rollout.since),)
        waits = sorted({*update, *self._waited_for()})
        text = f"revision {rollout.revision} runs on {len(self.done)} of {_pods(total)}"
        if not self.pods:
            text += "; it waits until its replicas have nodes" if self.replicas else "; it waits until it has replicas"
        elif self.given.absent.keys() >= self.pods.keys():
            text += f"; it waits until an agent answers: {listed(sorted(self.given.absent))}"
        elif rollout.state == "soaking" and self._since(rollout.since) < self.policy.soak:
            text += f"; it is done after {self.policy.soak:g} s without a failure"
        elif waits:
            have = "has" if len(waits) == 1 else "have"
            text += f"; waits until {listed(waits)} {have} passed for {self.policy.min_healthy_time:g} s"
        elif rollout.state == "canary" and not self.done and not self._canary_candidates():
            where = f"a live node that matches the canary_selector {self.policy.canary_selector!r}"
            text += f"; it waits for a pod on {where}: label one, or `rcfarm rollout promote {self.spec.id}`"
        elif rollout.state in {"canary", "soaking"} and (lacking := self._lacking()):
            text += f"; waits until its analyses succeed: {listed(lacking)}"
        elif self._not_on(rollout.manifest):
            text += f"; {self._too_many_away()}"
        elif self.present < self.replicas:
            text += "; it waits until its replicas have nodes"
        if rollout.state != "soaking" and self.replicas:
            due = self.policy.progress_deadline - self._since(rollout.progressed)
            if due <= 0:  # `_failure` has not ended it, so that its own pods are not to blame
                return (Reason("rollout_stuck", text, tuple(waits[:10]), rollout.progressed),)
            self.wakes.append(due)
        return (Reason("rollout_in_progress", text, tuple(waits[:10]), rollout.started),)

    def _too_many_away(self) -> str:
        away = sorted(node for node in self.given.current if node not in self.counting)
        missing = self.replicas - self.present
        where = [listed(away)] if away else []
        where += [f"{missing} without a node"] if missing > 0 else []
        if not where:
            return f"waits until the pods on {listed(sorted(self.given.leaving))} have left their nodes"
        limit = max(1, may_be_away(self.spec, self.replicas))
        return f"waits for pods that are away: {', '.join(where)} (max_unavailable is {limit})"

    def _enter(self, state: RolloutState, reason: Reason | None = None) -> None:
        results = analysis.renewed(self.rollout.analysis)
        self._set(state=state, since=_time(self.given.now), reason=reason, analysis=results)

    def _set_state(self, state: RolloutState) -> None:
        if self.rollout.state != state:
            self._enter(state)

    def _set(self, **fields: object) -> None:
        self.rollout = msgspec.structs.replace(self.rollout, **fields)

    def _since(self, at: str) -> float:
        """Return the seconds since a time of the record; 0 if that can't be read."""
        try:
            return self.given.now - datetime.fromisoformat(at).timestamp()
        except ValueError:
            return 0.0


def _is_hopeless(verdict: Health) -> bool:
    """Return whether the processes have failed for good, or crash again and again."""
    return verdict.condition == "failed" or (verdict.condition == "crashing" and verdict.restarts >= CRASHES)


def _pods(number: int) -> str:
    return f"{number} pod{'' if number == 1 else 's'}"


def _time(now: float) -> str:
    return rfc3339(datetime.fromtimestamp(now, UTC))
