"""Node transfers in virtual time: nodes stop being eligible and come back, pods fail, farms take over."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from rcfarm.farm.planner import PlanInput, plan
from rcfarm.farm.rollout import Placement, PodClock
from rcfarm.farm.transfer import Resting
from scheduler.protocol import Eligibility
from store.schema.records import Health, NodeTransfer, RCSpec, UpdatePolicy

POLICY = UpdatePolicy(min_healthy_time=2.0, healthy_deadline=6.0, progress_deadline=20.0)


class Fleet:
    """One dynamic RC. `bad`: nodes on which no pod passes; `evicted`: those that pods should leave."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.now = rng, 0.0
        self.replicas = rng.randint(1, 6)
        self.names = [f"n{number}" for number in range(self.replicas + rng.randint(1, 3))]
        self.bad: set[str] = set()
        self.evicted: set[str] = set()
        self.started: dict[str, float] = {}
        self.since: dict[str, float] = {}  # when each pod was first seen to work without interruption
        self.moving: NodeTransfer | None = None
        self.clock, self.resting = PodClock(), Resting()
        self.stages: list[str] = []
        self.hold = ""

    def passes(self, node: str) -> bool:
        return node not in self.bad and self.now - self.started[node] >= 1.0

    def decide(self) -> None:
        current = {}
        for node, started in self.started.items():
            passes = self.passes(node)
            verdict = Health("passing" if passes else "critical", "m", since=f"{started}{passes}")
            current[node] = Placement("m", verdict.status, verdict)
        eligible = frozenset(self.names) - self.evicted
        decision = plan(
            PlanInput(
                spec=RCSpec(
                    id="web",
                    manifest="m",
                    replicas_desired=self.replicas,
                    allocation_strategy="dynamic",
                    update=POLICY,
                ),
                current=current,
                eligibility=Eligibility(eligible, tuple(sorted(eligible))),
                hold=self.hold,
                ages=self.clock.read(current, self.now, POLICY.min_healthy_time),
                moving=self.moving,
                resting=self.resting.left(self.now),
            )
        )
        transfer = decision.transfer
        self.moving = decision.moving
        removed = {*decision.remove}
        if transfer and transfer.new_node:
            self.stages.append(transfer.stage)
            gone = {"move": transfer.old_node, "complete": transfer.old_node, "rollback": transfer.new_node}
            removed |= {gone[transfer.stage]} if transfer.stage in gone else set()
        before = len(self.started)
        working = {node for node in self.started if self.passes(node)}
        assert not removed or not self.hold
        self.since = {node: self.since.get(node, self.now) for node in working}
        if transfer and transfer.stage == "complete" and transfer.old_node in working:
            assert self.now - self.since[str(transfer.new_node)] >= POLICY.min_healthy_time, transfer
        left = removed - {*decision.remove}  # which of the pods that are too many go is not the transfer's
        assert not left & working or len(working - left) >= min(len(working), self.replicas), (decision, current)
        for node in removed:
            del self.started[node]
        for node in decision.add:
            self.started[node] = self.now
        if transfer and transfer.new_node and transfer.stage in ("move", "start"):
            assert transfer.new_node not in self.resting.left(self.now)
            self.started[transfer.new_node] = self.now
        if transfer and transfer.new_node and transfer.stage == "start":
            self.moving = NodeTransfer("id", transfer.old_node, transfer.new_node)
        if transfer and transfer.new_node and transfer.stage == "rollback":
            self.resting.failed(transfer.new_node, self.now)
        most = max(before, self.replicas) + (transfer is not None and transfer.stage == "start")
        assert len(self.started) <= most, (decision, self.started)
        assert self.moving is None or {*self.moving.ends} <= self.started.keys() or not decision.moving

    def disturb(self) -> None:
        node, act = self.rng.choice(self.names), self.rng.random()
        if act < 0.15:
            self.evicted ^= {node}
        elif act < 0.25:
            self.bad ^= {node}
        elif act < 0.3:
            self.clock, self.resting = PodClock(), Resting()  # another farm takes over
        elif act < 0.35:
            self.hold = "" if self.hold else "the brake is on"
        elif act < 0.38 and not self.moving:
            self.replicas = max(0, self.replicas + self.rng.choice([-1, 1]))


@given(st.integers(0, 2**32).map(random.Random))
def test_no_transfer_takes_a_pod_away_before_another_one_works(rng: random.Random) -> None:
    """No step leaves fewer working pods than there were, or than are desired; there is one pod beyond the replicas at
    most; in the end no pod is where it may not be, if there is another node."""
    fleet = Fleet(rng)
    for _ in range(rng.randint(20, 80)):
        fleet.disturb()
        fleet.decide()
        fleet.now += rng.choice([0.0, 0.5, 2.0])
    fleet.bad.clear()
    fleet.hold = ""
    fleet.resting = Resting()
    for _ in range(200):
        fleet.decide()
        fleet.now += 0.5
    left = fleet.started.keys() & fleet.evicted
    assert not left or len(fleet.evicted) > len(fleet.names) - fleet.replicas, (fleet.started, fleet.evicted)
    assert fleet.moving is None
    assert len(fleet.started) <= fleet.replicas


def test_a_record_of_a_transfer_whose_pods_are_gone_is_dropped() -> None:
    """Removed by hand, or by another program: what is there decides."""
    spec = RCSpec(id="web", manifest="m", replicas_desired=1, allocation_strategy="dynamic", update=POLICY)
    current = {"n1": Placement("m", "passing", Health("passing", "m"))}
    given_ = PlanInput(spec, current, Eligibility(frozenset({"n1"}), ("n1",)), moving=NodeTransfer("id", "n1", "n2"))
    decision = plan(given_)
    assert (decision.moving, decision.transfer, decision.state) == (None, None, "converged")
