"""One RC on nodes in virtual time: the farm's planner decides, and simple agents carry it out. No store, no processes.

What a version of the program does is part of its manifest's name: `good-2` passes two seconds after its start. Each
plan is checked against what was promised, by a count of its own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from rcfarm.farm.analysis import Results
from rcfarm.farm.planner import Plan, PlanInput, plan
from rcfarm.farm.preview import PreviewInput, preview
from rcfarm.farm.rollout import BLAME, Placement, PodClock
from rcfarm.operations.analysis import Measured
from scheduler.protocol import Absence, Eligibility
from store.schema.records import (
    ALL_NODES,
    Analysis,
    AnalysisOutcome,
    Health,
    RCSpec,
    Rollout,
    RolloutRequest,
    UpdatePolicy,
    rfc3339,
)

EPOCH = 1_800_000_000.0
SOON = 0.05  # seconds until an agent acts, and until the farm sees it
ENDS = ("done", "reverted", "aborted", "failed", "paused", "awaiting_promotion")  # until an operator acts
CANARIES = ("pending", "canary", "awaiting_promotion")


@dataclass(slots=True)
class Node:
    """One node. `runs` since `started`; `died`: when it died, None while it lives. `matches`: the RC's selector.
    `rack`: the value of a label. `drained`: an operator empties it."""

    runs: str = ""
    started: float = 0.0
    died: float | None = None
    matches: bool = True
    rack: str = ""
    drained: bool = False

    @property
    def is_eligible(self) -> bool:
        return self.matches and not self.drained


@dataclass(slots=True)
class Fleet:
    """The RC, its intents and its nodes. `touched`: the nodes that each manifest was ever ordered for, by revision."""

    policy: UpdatePolicy
    replicas: int
    nodes: dict[str, Node]
    manifest: str = "good-0"
    revision: int = 1
    now: float = 0.0
    intents: dict[str, str] = field(default_factory=dict)
    rollout: Rollout | None = None
    request: RolloutRequest | None = None
    clock: PodClock = field(default_factory=PodClock)
    passing_since: dict[str, tuple[str, float, float]] = field(default_factory=dict)
    touched: dict[int, set[str]] = field(default_factory=dict)
    ordered: dict[str, float] = field(default_factory=dict)  # when each intent became as it is
    updated_at: float = 0.0
    matched: tuple[frozenset[str], float] = frozenset(), 0.0
    states: list[str] = field(default_factory=list)
    changed_at: dict[str, float] = field(default_factory=dict)  # when each state was entered last
    plans: int = 0
    restarts: int = 0
    max_unavailable: int = 1
    is_daemon_set: bool = False
    answer: Callable[[str], Measured] = lambda name: Measured("success", "1")  # to each run of an analysis
    results: Results = field(default_factory=Results)
    due: dict[str, float] = field(default_factory=dict)  # when each analysis runs next
    passed: set[str] = field(default_factory=set)  # the analyses that have succeeded since the state was entered

    @property
    def spec(self) -> RCSpec:
        return RCSpec(
            id="web",
            manifest=self.manifest,
            replicas_desired=ALL_NODES if self.is_daemon_set else self.replicas,
            max_unavailable=self.max_unavailable,
            update=self.policy,
            revision=self.revision,
        )

    def verdict(self, name: str) -> Health | None:
        """Return what the node's agent says about its pod."""
        node = self.nodes[name]
        if node.died is not None or not node.runs:
            return None
        kind, _, number = node.runs.partition("-")
        age, since = self.now - node.started, rfc3339(datetime.fromtimestamp(EPOCH + node.started, UTC))
        if kind == "good":
            return Health("passing", node.runs, since=since) if age >= float(number) else None
        if kind == "sick":  # runs, and never passes
            return Health("critical", node.runs, "not today", since=since)
        if kind == "brief":  # passes for a while
            passes = age < float(number)
            return Health("passing" if passes else "critical", node.runs, "no more", since=f"{since}{passes}")
        if kind == "crash":
            restarts = int(age)
            return Health("critical", node.runs, since=since, condition="crashing", cause="exit 3", restarts=restarts)
        return Health("critical", node.runs, since=since, condition="blocked", cause="no such program")

    def placements(self) -> dict[str, Placement]:
        found = {}
        for name, manifest in self.intents.items():
            verdict = self.verdict(name)
            is_current = verdict is not None and verdict.manifest == manifest
            found[name] = Placement(manifest, verdict.status if verdict and is_current else "unknown", verdict)
        return found

    def decide(self) -> Plan:
        """Plan once, check the plan, and carry it out."""
        current = self.placements()
        matching = [name for name, node in self.nodes.items() if node.is_eligible]
        live = [name for name in matching if self.nodes[name].died is None]
        if self.is_daemon_set:
            self.replicas = len({*live, *self.intents}.intersection(matching).difference(self._excused()))
        if (known := frozenset(matching)) != self.matched[0]:
            self.matched = known, self.now
        absent = {
            name: Absence(rfc3339(datetime.fromtimestamp(EPOCH + died, UTC)), "")
            for name in current
            if (died := self.nodes[name].died) is not None
        }
        given = PlanInput(
            spec=self.spec,
            current=current,
            eligibility=Eligibility(known, tuple(sorted(live))),
            absent=absent,
            rollout=self.rollout,
            request=self.request,
            ages=self.clock.read(current, self.now, self.policy.min_healthy_time, absent),
            drained=[name for name in current if self.nodes[name].drained],
            unchanged=self.now - self.matched[1],
            domains={name: self.nodes[name].rack for name in current},
            canary_nodes=self.selected(current),
            analysis=self.results.of(self.rollout),
            now=EPOCH + self.now,
        )
        decision = plan(given)
        self._check(given, decision)
        self.plans += 1
        self._apply(decision)
        return decision

    def counting(self, current: dict[str, Placement]) -> tuple[set[str], set[str]]:
        """Return the pods that surely are available, counted apart from the planner, and those that may be: at the very
        moment a sum of times is a little more or less."""
        surely: set[str] = set()
        perhaps: set[str] = set()
        for name, pod in current.items():
            if pod.health != "passing":
                self.passing_since.pop(name, None)
                continue
            known = self.passing_since.get(name)
            key = (str(pod.manifest), self.nodes[name].started)
            if known is None or known[:2] != key:
                known = self.passing_since[name] = (*key, self.now)
            is_new = pod.manifest == self.manifest and not self._is_done()
            for found, slack in ((surely, 1e-6), (perhaps, -1e-6)):
                if not is_new or self.now - known[2] >= self.policy.min_healthy_time + slack:
                    found.add(name)
        return surely, perhaps

    def _is_done(self) -> bool:
        return self.rollout is None or (self.rollout.is_of(self.spec) and self.rollout.state == "done")

    def may_be_away(self, surges: bool = False) -> int:
        """Return how many pods may be away; `surges`: further pods are, or can be, placed for them."""
        away = self.max_unavailable
        if (text := self.policy.max_unavailable) is not None:
            away = int(text[:-1]) * self.replicas // 100 if text.endswith("%") else int(text)
        return away if surges else max(1, away)

    def selected(self, names: Iterable[str]) -> frozenset[str]:
        """Return those of the nodes that match the `canary_selector`, which names one rack."""
        rack = self.policy.canary_selector.removeprefix("rack=")
        return frozenset(name for name in names if rack and self.nodes[name].rack == rack)

    def canaries(self) -> int:
        """Return how many canaries there may be; a daemon set keeps pods for a while that it will not want."""
        text, of = self.policy.canary, max(self.replicas, len(self.intents) if self.is_daemon_set else 0)
        if self.policy.canary_selector:
            of = max(1, len(self.selected(self.intents)))
        number = -(-int(text[:-1]) * of // 100) if text.endswith("%") else int(text)
        return min(number, of)

    def _check(self, given: PlanInput, decision: Plan) -> None:
        surely, perhaps = self.counting(dict(given.current))
        # It is not the rollout that takes these.
        left = {name for name in given.current if not self.nodes[name].is_eligible}
        changed = {*decision.update, *decision.remove} - left
        surely, perhaps = surely - left, perhaps - left
        surges = bool(decision.surge) or (len(given.current) > self.replicas and not self.is_daemon_set)
        least = self.replicas - self.may_be_away(surges)
        # A shortage that waiting does not end: one pod at a time, and only while all others count.
        slowly = len(changed & surely) == 1 and not decision.remove and {*perhaps, *self._excused()} >= {*given.current}
        short = 0 if self.is_daemon_set else max(0, self.replicas - len(given.current))
        slowly = slowly and not decision.add and short == decision.missing
        assert not changed & surely or len(perhaps - changed) >= least or slowly, (given, decision, surely)
        record = decision.rolled.record or given.rollout
        if record is None or not record.is_of(given.spec):
            assert not decision.update, decision
            return
        if record.state in CANARIES and record.state != "pending":
            on_it = {name for name, pod in given.current.items() if pod.manifest == self.manifest}
            on_it |= {*decision.update, *decision.surge}
            on_it -= {*record.late, *given.absent, *decision.remove}
            before = {name for name, pod in given.current.items() if pod.manifest == self.manifest}
            assert len(on_it) <= max(self.canaries(), len(before)), (on_it, record)
            if self.policy.canary_selector and record.state == "canary":
                ordered = {*decision.update, *decision.surge} if decision.rolled.target == self.manifest else set()
                assert ordered <= self.selected(self.nodes), (ordered, record)
        if record.state == "done" and (given.rollout is None or given.rollout.state != "done"):
            missing = [name for name, pod in given.current.items() if pod.manifest != self.manifest]
            assert not missing, missing
        if record.state not in ("done",):
            assert decision.reasons, record
            assert decision.rolled.wake is None or all(reason.until for reason in decision.rolled.reasons), decision
        self._check_analyses(given, record)

    def _check_analyses(self, given: PlanInput, record: Rollout) -> None:
        before = given.rollout if given.rollout and given.rollout.is_of(given.spec) else None
        names = {each.name for each in self.policy.analysis} if record.stable else set()
        if not names or before is None:
            return
        promoted = given.request is not None and given.request.id == record.request != before.request
        went_on = before.state == "canary" and record.state in ("rolling", "awaiting_promotion", "soaking", "done")
        ended = record.state == "done" != before.state
        if (went_on and self.canaries() and not promoted) or ended:
            assert names <= self.passed, (record, self.passed)
        assert not ended or before.state == "soaking", (before, record)
        resumed = promoted and given.request is not None and given.request.verb == "resume"
        for each in self.policy.analysis:
            result = given.analysis.get(each.name)
            if result is not None and result.failures > each.failure_limit and not resumed:
                assert record.is_stopped or record.state == "done", (record, result)
            if result is not None and result.outcome == "no_data" and not promoted:
                assert record.is_stopped or record.state in ("paused", "done"), (record, result)

    def _excused(self) -> set[str]:
        """Return the dead nodes that are not waited for: they died before their change, or long after it."""
        dead = {name: died for name in self.intents if (died := self.nodes[name].died) is not None}
        since = {name: max(self.ordered[name], self.updated_at) for name in dead}
        return {name for name, died in dead.items() if not 0.0 < died - since[name] <= BLAME}

    def _apply(self, decision: Plan) -> None:
        rolled = decision.rolled
        if rolled.record is not None:
            if self.rollout is None or rolled.record.state != self.rollout.state:
                self.passed.clear()
                self.states.append(rolled.record.state)
                self.changed_at[rolled.record.state] = self.now
            self.rollout = rolled.record
        if not rolled.analyse or self.rollout is None:
            self.results, self.due = Results(), {}
        else:
            if self.results.enter(self.rollout):
                self.passed &= {each.name for each in self.rollout.analysis if each.passed}  # an owner before saw it
                self.due = {}
            self.due = {each.name: self.due.get(each.name, self.now) for each in rolled.analyse}
        for name in decision.remove:
            del self.intents[name]
        for name in decision.add:
            self.intents[name], self.ordered[name] = rolled.base, self.now
        for name in (*decision.update, *decision.surge):
            self.intents[name], self.ordered[name] = rolled.target, self.now
            if rolled.target == self.manifest:
                self.touched.setdefault(self.revision, set()).add(name)

    def agents_act(self) -> bool:
        """Bring every living node to its intent, and run the analyses that are due. Return whether there were any."""
        has_result = False
        for each in self.policy.analysis:
            if self.due.get(each.name, self.now + 1.0) <= self.now:
                measured, has_result = self.answer(each.name), True
                self.due[each.name] = self.now + each.interval
                self.results.note(each.name, measured, "", self.results.stage)
                self.passed |= {each.name} if measured.outcome == "success" else set()
        for name, node in self.nodes.items():
            wanted = self.intents.get(name, "")
            if node.died is None and node.runs != wanted:
                node.runs, node.started, self.restarts = wanted, self.now, self.restarts + 1
                if wanted.startswith("killer"):
                    node.died = self.now
        return has_result

    def run(self, seconds: float, *, every: float = 0.5) -> None:
        """Let time pass: the farm decides when something may have changed, and when it asked to be woken."""
        end = self.now + seconds
        while self.now < end:
            decision = self.decide()
            has_result = self.agents_act()
            pause = every if decision.rolled.wake is None else min(every, max(SOON, decision.rolled.wake))
            pause = SOON if has_result else min([pause, *(max(SOON, at - self.now) for at in self.due.values())])
            self.now += min(pause, max(end - self.now, SOON))

    def update(self, manifest: str) -> None:
        """Give the RC another manifest."""
        self.manifest, self.revision, self.updated_at = manifest, self.revision + 1, self.now

    def ask(self, verb: Any) -> None:
        """Ask for something, as an operator does."""
        self.request = RolloutRequest(id=f"r{self.now}", verb=verb, revision=self.revision, by="me")

    def restart_farm(self) -> None:
        """Another farm takes the RC over: it has seen nothing yet."""
        self.clock = PodClock()
        self.passing_since.clear()
        self.results, self.due = Results(), {}


def fleet(
    count: int,
    replicas: int | None,
    *,
    max_unavailable: int = 1,
    policy_max: str | None = None,
    racks: int = 1,
    **policy: Any,
) -> Fleet:
    """Return a fleet whose pods run and pass. `replicas` None: a daemon set. `policy_max`: the `max_unavailable` of the
    policy. The nodes are in one of the `racks` each."""
    made = Fleet(
        UpdatePolicy(max_unavailable=policy_max, **policy),
        replicas or 0,
        {f"node-{number:03}": Node(rack=f"r{number % racks}") for number in range(count)},
        max_unavailable=max_unavailable,
        is_daemon_set=replicas is None,
    )
    made.run(2.0)
    return made


def life(rng: random.Random) -> Fleet:
    """Play a random life: updates, requests, deaths and returns of nodes, take-overs, scaling. Return the fleet."""
    replicas, is_daemon_set = rng.randint(1, 12), rng.random() < 0.3
    made = fleet(
        replicas + rng.randint(0, 4),
        None if is_daemon_set else replicas,
        max_unavailable=rng.randint(1, 4),
        racks=rng.randint(1, 3),
        wave_by=rng.choice(["", "rack"]),
        canary=(canary := rng.choice(["0", "1", "2", "25%", "100%"])),
        canary_selector=(selects := rng.choice(["", "", "rack=r0"]) if canary != "0" else ""),
        max_surge=(surge := "0" if is_daemon_set else rng.choice(["0", "0", "1", "50%"])),
        policy_max=None if surge == "0" or rng.random() < 0.5 else "25%" if selects else rng.choice(["0", "25%"]),
        min_healthy_time=rng.choice([0.0, 1.0, 3.0]),
        healthy_deadline=rng.choice([8.0, 15.0]),
        progress_deadline=rng.choice([20.0, 40.0]),
        auto_promote=rng.random() < 0.8,
        auto_revert=rng.random() < 0.8,
        soak=rng.choice([0.0, 0.0, 4.0]),
        analysis=some_analyses(rng),
    )
    made.answer = lambda name: Measured(rng.choice(answers), "1")
    answers: list[AnalysisOutcome] = ["success"]
    kinds = ["good-0", "good-1", "good-2", "sick-0", "brief-2", "brief-6", "crash-0", "blocked-0", "killer-0"]
    for number in range(rng.randint(1, 5)):
        made.update(_version(rng, kinds, number))
        answers = rng.choice(
            [
                ["success"],
                ["success"],
                ["success", "error"],
                ["failure"],
                ["success", "no_data"],
                ["no_data"],
                ["error"],
            ]
        )
        for _ in range(rng.randint(1, 6)):
            made.run(rng.choice([0.2, 1.0, 3.0, 10.0]))
            act = rng.random()
            names = list(made.nodes)
            if act < 0.15:
                node = made.nodes[rng.choice(names)]
                node.died = made.now if node.died is None else node.died
            elif act < 0.3:
                node = made.nodes[rng.choice(names)]
                if node.died is not None:
                    node.died, node.runs = None, ""
            elif act < 0.4:
                made.restart_farm()
            elif act < 0.5:
                made.ask(rng.choice(["pause", "resume", "promote", "abort"]))
            elif act < 0.55 and is_daemon_set:
                node = made.nodes[rng.choice(names)]
                node.matches = not node.matches
            elif act < 0.55:
                made.replicas = max(0, made.replicas + rng.randint(-2, 2))
            elif act < 0.6 and is_daemon_set:
                node = made.nodes[rng.choice(names)]
                node.drained = not node.drained
            elif act < 0.65 and is_daemon_set:
                made.nodes[f"joined-{len(names):03}"] = Node(rack=f"r{len(names) % 2}")
    answers = ["success"]
    made.run(4 * made.policy.progress_deadline)
    last = made.decide()
    explained = any("wait" in reason.message for reason in last.rolled.reasons) and not last.rolled.update
    assert made.rollout is None or made.rollout.state in ENDS or explained, (made.rollout, made.policy, last)
    return made


def some_analyses(rng: random.Random) -> tuple[Analysis, ...]:
    """Return no analysis, or a few."""
    return tuple(
        Analysis(name=f"a{number}", command="ask", interval=rng.choice([1.0, 3.0]), failure_limit=rng.choice([0, 0, 2]))
        for number in range(rng.choice([0, 0, 1, 2]))
    )


def _version(rng: random.Random, kinds: list[str], number: int) -> str:
    kind, _, after = rng.choice(kinds).partition("-")
    return f"{kind}-{after}.{number}"


def bad_version(rng: random.Random) -> None:
    """Roll out a version that never passes to a healthy fleet: it touches few pods, and is taken back in time."""
    replicas = rng.randint(1, 40)
    made = fleet(
        replicas + rng.randint(0, 5),
        replicas,
        canary=rng.choice(["0", "1", "3", "10%"]),
        max_unavailable=rng.choice([1, 2, 5]),
        max_surge=rng.choice(["0", "0", "2"]),
        min_healthy_time=rng.choice([0.0, 2.0]),
        healthy_deadline=rng.choice([5.0, 20.0]),
        progress_deadline=60.0,
    )
    made.update(rng.choice(["sick-0", "crash-0", "blocked-0"]))
    began = made.now
    while made.rollout is None or made.rollout.state not in ENDS:
        assert made.now - began < 200.0, made.rollout
        made.run(0.25, every=0.25)
    assert made.rollout.state == "reverted", made.rollout
    most = max(made.canaries(), made.may_be_away()) + int(made.policy.max_surge)
    assert len(made.touched[2]) <= most, (made.touched, made.policy)
    stopped = made.changed_at["reverting"] - began
    assert stopped <= made.policy.healthy_deadline + 2.0, (stopped, made.policy)
    assert all(node.runs in ("good-0", "") for node in made.nodes.values()), made.nodes


def killing_update(rng: random.Random) -> None:
    """Give a daemon set a version that kills its nodes, some of which were dead before: few more die, the others go on,
    and those that return have the right version."""
    count = rng.randint(3, 40)
    made = fleet(
        count,
        None,
        canary=rng.choice(["0", "1", "3", "10%"]),
        max_unavailable=rng.choice([1, 2, 5]),
        min_healthy_time=rng.choice([0.5, 2.0]),
        healthy_deadline=5.0,
        progress_deadline=20.0,
        racks=rng.randint(1, 4),
        wave_by=rng.choice(["", "rack"]),
    )
    dead = rng.sample(sorted(made.nodes), rng.randint(0, count // 3))
    for name in dead:
        made.nodes[name].died = made.now
    made.run(rng.choice([0.5, 10.0]))
    made.update("killer-0")
    made.run(60.0)
    killed = [name for name, node in made.nodes.items() if node.died is not None and name not in dead]
    assert len(killed) <= made.may_be_away() + made.canaries(), (killed, made.policy)
    assert made.rollout is not None, made
    assert made.rollout.state in ("failed", "reverted", "reverting"), made.rollout
    for name in killed:
        made.nodes[name].died, made.nodes[name].runs = None, ""
    made.update("good-0.2")
    made.run(60.0 + 5.0 * count)
    assert made.states[-1] == "done", made.rollout
    for name in dead:
        made.nodes[name].died, made.nodes[name].runs = None, ""
    made.run(1.0)
    assert {node.runs for node in made.nodes.values()} == {"good-0.2"}, made.nodes


def wiped(rng: random.Random) -> None:
    """Take the labels of most nodes of a daemon set away, at once or one by one: no pod is removed before an operator
    has confirmed it."""
    count = rng.randint(3, 30)
    made = fleet(count, None, max_unavailable=rng.randint(1, 3))
    names = rng.sample(sorted(made.nodes), rng.randint(count // 2 + 1, count))
    pause = rng.choice([0.0, 0.3, 3.0, 9.0])
    for name in names:
        made.nodes[name].matches = False
        made.run(pause)
    made.run(60.0)
    if rng.random() < 0.3:
        made.restart_farm()
        made.run(30.0)
    assert set(made.intents) == set(made.nodes), (names, made.intents)
    reasons = made.decide().reasons
    assert "held" in [reason.code for reason in reasons], reasons
    at = rfc3339(datetime.fromtimestamp(EPOCH + made.now, UTC))
    made.request = RolloutRequest(id="s", verb="shrink", revision=1, at=at, least=count - len(names))
    made.run(30.0)
    assert set(made.intents) == set(made.nodes) - set(names), (names, made.intents)


def interrupted(rng: random.Random) -> int:
    """Kill the farm again and again during a rollout, which changes each pod once. Return how often it was killed."""
    replicas, kills = rng.randint(2, 12), 0
    made = fleet(
        replicas,
        replicas,
        min_healthy_time=1.0,
        max_unavailable=rng.randint(1, 3),
        healthy_deadline=30.0,
        analysis=some_analyses(rng),
    )
    before = made.restarts
    made.update("good-0.5")
    while made.rollout is None or not made.rollout.is_of(made.spec) or made.rollout.state not in ENDS:
        made.run(rng.choice([0.1, 0.6, 1.2, 1.4]))
        if rng.random() < 0.4:
            made.restart_farm()
            kills += 1
    assert made.rollout.state == "done", made.rollout
    assert made.restarts - before == replicas, (made.restarts, before, replicas)
    return kills


def as_shown(rng: random.Random) -> None:
    """Compare a rollout in which nothing fails with what the preview had shown: of an RC or a daemon set, some of whose
    nodes are drained or dead at the same time, and which gets others."""
    replicas, is_daemon_set = rng.randint(1, 20), rng.random() < 0.4
    made = fleet(
        replicas + rng.randint(0, 5),
        None if is_daemon_set else replicas,
        racks=rng.randint(1, 4),
        wave_by=rng.choice(["", "rack"]),
        max_unavailable=rng.randint(1, 5),
        canary=(canary := rng.choice(["0", "1", "3", "10%"])),
        canary_selector=rng.choice(["", "rack=r0"]) if canary != "0" else "",
        max_surge="0" if is_daemon_set else rng.choice(["0", "1", "20%"]),
        min_healthy_time=rng.choice([0.0, 2.0]),
        analysis=some_analyses(rng),
    )
    made.manifest = "good-1.0"  # as long as the next one takes
    for name in made.intents:
        made.intents[name] = made.nodes[name].runs = made.manifest
    made.update("good-1")
    made.replicas -= rng.randint(0, 1)
    names = sorted(made.nodes)
    if is_daemon_set:
        for name in rng.sample(names, rng.randint(0, len(names))):
            made.nodes[name].drained = rng.random() < 0.3
        for name in rng.sample(names, rng.randint(0, len(names))):
            made.nodes[name].died = made.now if rng.random() < 0.2 else None
        made.nodes |= {f"joined-{number}": Node(rack=f"r{number}") for number in range(rng.randint(0, 3))}
    eligible = sorted(name for name, node in made.nodes.items() if node.is_eligible)
    dead = {name for name in made.intents if made.nodes[name].died is not None}
    shown = preview(
        PreviewInput(
            made.spec,
            Eligibility(frozenset(eligible), tuple(name for name in eligible if name not in dead)),
            dict(made.intents),
            frozenset(made.intents) - dead,
            absent={name: Absence(rfc3339(datetime.fromtimestamp(EPOCH + made.now, UTC)), "") for name in dead},
            drained=frozenset(name for name in made.intents if made.nodes[name].drained),
            domains={name: node.rack for name, node in made.nodes.items()},
            canary_nodes=made.selected(made.nodes),
            now=EPOCH + made.now,
        )
    )
    seen: list[list[str]] = []
    quiet = 0
    while quiet < 60:  # longer than anything takes
        decision = made.decide()
        changed = [sorted(nodes) for nodes in (decision.add, decision.surge, decision.update, decision.remove) if nodes]
        seen += changed
        quiet = 0 if changed else quiet + 1
        made.agents_act()
        if not changed:  # a farm decides again within milliseconds
            made.now += 0.25
    expected = [
        list(nodes) for wave in shown.waves for nodes in (wave.add, wave.surge, wave.update, wave.remove) if nodes
    ]
    assert seen == expected, (seen, expected)
    assert shown.placed == len(made.intents), (shown, made.intents)
