"""Two RCs on nodes in virtual time: the pods of one pass to the other. No store, no processes.

The decision of the hand-over and the planner of the new RC are the real ones. What works is counted here, also where
an agent can't report it: the farm may only know less than that.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Literal

from rcfarm.farm.handover import AT_ONCE, HandoverInput, step
from rcfarm.farm.planner import PlanInput, plan
from rcfarm.farm.rollout import Placement, PodClock
from scheduler.protocol import Eligibility
from store.schema.records import Handover, Health, RCSpec, UpdatePolicy

TICK = 0.5  # seconds


@dataclass(slots=True)
class Pod:
    """A pod, since it was ordered. `works_after`: seconds until it works; `until`: when it ceases to."""

    rc: Literal["old", "new"]
    ordered: float
    works_after: float
    until: float = float("inf")


@dataclass(slots=True)
class Pair:
    """Both RCs. `dead`: nodes without power; `silent`: nodes whose agents can't report, though the pods work."""

    record: Handover
    nodes: list[str]
    usable: frozenset[str]
    pods: dict[str, Pod]
    works_after: float
    lives: float
    min_healthy_time: float
    replicas: int
    old_replicas: int
    now: float = 100.0
    dead: set[str] = field(default_factory=set)
    silent: set[str] = field(default_factory=set)
    clock: PodClock = field(default_factory=PodClock)
    steps: int = 0
    passed: list[str] = field(default_factory=list)

    def works(self, node: str) -> bool:
        pod = self.pods[node]
        return node not in self.dead and self.now >= pod.ordered + pod.works_after and self.now < pod.until

    def of(self, rc: str) -> list[str]:
        return [node for node, pod in self.pods.items() if pod.rc == rc]

    def decide(self) -> bool:
        """Take one step, check it, and carry it out. Return whether the hand-over is done."""
        self.steps += 1
        reported = {node for node in self.pods if node not in self.dead | self.silent}
        old = {node: self.works(node) if node in reported else None for node in self.of("old")}
        placements = {node: self._placement(node, node in reported) for node in self.of("new")}
        ages = self.clock.read(placements, self.now, self.min_healthy_time)
        new = {node: (ages.of(node).passing or -1.0) >= self.min_healthy_time for node in placements}
        usable = self.usable & old.keys()
        decision = step(HandoverInput(self.record, old, new, usable, self.replicas))
        working = {node for node in self.pods if self.works(node)}
        touched = working & {*decision.nodes}
        assert not touched or len(working - touched) >= self.record.minimum, (self.record, decision, working)
        assert len(decision.nodes) <= AT_ONCE
        assert {*decision.nodes} <= usable
        assert len(placements) + len(decision.nodes) <= max(self.record.desired, len(placements)), decision
        assert self.replicas <= decision.replicas <= max(self.record.desired, self.replicas)
        assert decision.reason.message
        if decision.is_done:
            assert sum(self.works(node) for node in placements) >= self.record.desired
            return True
        for node in decision.nodes:
            self._order(node)
            self.passed.append(node)
            self.old_replicas -= 1
        self.replicas = decision.replicas
        self._place()
        return False

    def _placement(self, node: str, is_reported: bool) -> Placement:
        if is_reported and self.works(node):
            return Placement("v2", "passing", Health("passing", "v2", since=str(self.pods[node].ordered)))
        return Placement("v2")

    def _place(self) -> None:
        """Let the new RC's planner place what is missing."""
        spec = RCSpec(id="new", manifest="v2", replicas_desired=self.replicas, update=UpdatePolicy())
        live = tuple(node for node in sorted(self.usable) if node not in self.dead)
        current = {node: self._placement(node, True) for node in self.of("new")}
        taken = self.of("old")
        decision = plan(PlanInput(spec, current, Eligibility(self.usable, live), taken=taken, mutation_holder="farm"))
        assert not decision.remove, decision
        assert not decision.transfer, decision
        for node in decision.add:
            self._order(node)

    def _order(self, node: str) -> None:
        self.pods[node] = Pod("new", self.now, self.works_after, self.now + self.lives)


def pair(rng: random.Random) -> Pair:
    """Return two RCs whose pods work, or mostly, at the beginning of a hand-over that may begin."""
    count, mine = rng.randint(1, 40), rng.choice([0, 0, 0, 2])
    desired = max(mine, count + mine + rng.choice([-2, -1, 0, 0, 0, 1, 3]), 1)
    most = max(count + mine, desired)
    minimum = rng.randint(0, min(desired, most - 1))
    nodes = [f"n{number:02}" for number in range(count + mine + rng.randint(0, 5))]
    usable = frozenset(nodes) if rng.random() < 0.7 else frozenset(node for node in nodes if rng.random() < 0.8)
    pods = {node: Pod("old", 0.0, 0.0) for node in nodes[:count]}
    pods |= {node: Pod("new", 0.0, 0.0) for node in nodes[count : count + mine]}
    record = Handover(old="old", new="new", desired=desired, minimum=minimum, state="running")
    return Pair(
        record=record,
        nodes=nodes,
        usable=usable | {*nodes[count : count + mine]},
        pods=pods,
        works_after=rng.choice([0.0, 1.0, 4.0]),
        lives=rng.choice([float("inf"), float("inf"), float("inf"), 3.0, 0.0]),
        min_healthy_time=rng.choice([0.0, 1.0, 5.0]),
        replicas=mine,
        old_replicas=count,
    )


def life(rng: random.Random) -> Pair:
    """Play a random life: nodes die and return, agents fall silent, old pods fail, farms take over. Return the pair;
    where the new version is good, and everything works again, the hand-over has ended."""
    made = pair(rng)
    is_done = False
    for _ in range(rng.randint(5, 60)):
        node, act = rng.choice(made.nodes), rng.random()
        if act < 0.06:
            made.dead ^= {node}
        elif act < 0.15:
            made.silent ^= {node} if rng.random() < 0.7 else {*made.nodes}
        elif act < 0.2 and node in made.pods and made.pods[node].rc == "old":
            made.pods[node].until = made.now + rng.choice([0.0, 2.0])
        elif act < 0.25:
            made.clock = PodClock()  # another farm takes over
        is_done = made.decide()
        made.now += rng.choice([0.0, TICK, TICK])
        if is_done:
            break
    made.dead.clear()
    made.silent.clear()
    for pod in made.pods.values():
        pod.until = float("inf") if made.lives == float("inf") or pod.rc == "old" else pod.until
    room = len(made.usable) >= made.record.desired - len([n for n in made.of("new") if n not in made.usable])
    for _ in range(40 * len(made.nodes) + 40):
        if is_done or made.lives < float("inf"):
            break
        is_done = made.decide()
        made.now += TICK
    headroom = len(made.of("old")) + len(made.of("new")) > made.record.minimum
    assert is_done or made.lives < float("inf") or not (room and headroom), (made, made.of("old"), made.of("new"))
    assert len(made.passed) == len({*made.passed}), "no pod passes twice"
    return made
