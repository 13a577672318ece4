"""Node transfers, as a pure decision: a pod of a dynamic RC leaves a node that is not eligible any more.

A pod that passes is replaced before it is removed: another one is placed on a free node, beyond the replicas, and
when that has passed for `min_healthy_time`, the former one goes. If it does not within `healthy_deadline`, it is
removed itself, the node is left alone for a while, and the former pod stays. A pod that does not pass has nothing to
wait for: one transaction moves it.

The transfer in progress is in the RC's status, written in the transaction that places the pod; a farm that takes the
RC over goes on with it. Until it ends, the new pod does not exist for the planner's other phases.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal, NamedTuple

from rcfarm.farm.rollout import Ages, Placement
from rcfarm.operations.fleet import listed
from rcfarm.operations.rc_snapshot import describe
from store.schema.records import NodeTransfer, RCSpec, Reason

FIRST_REST, LONGEST_REST = 60.0, 3600.0  # seconds for which a node on which a pod did not get healthy is left alone

SHOWN_NODES = 10

Stage = Literal["move", "start", "complete", "rollback"]


class Transfer(NamedTuple):
    """A step of a transfer off `old_node`. `new_node` None: the scheduler must allocate one first.

    `stage`: move in one transaction; start by placing the new pod; complete by removing the old one; roll back by
    removing the new one.
    """

    old_node: str
    new_node: str | None
    stage: Stage = "move"


class Progress(NamedTuple):
    """The next step of a transfer in progress, or why there is none, and after how many seconds there may be one."""

    step: Transfer | None = None
    reason: Reason | None = None
    wake: float | None = None


def proceed(
    moving: NodeTransfer,
    current: Mapping[str, Placement],
    ages: Ages,
    eligible: Collection[str],
    spec: RCSpec,
) -> Progress:
    """Decide about a transfer in progress. `current` has both of its pods, and all others."""
    old, new = moving.ends
    age, policy = ages.of(new), spec.policy
    passing = {node for node, pod in current.items() if pod.health == "passing"}
    late = policy.healthy_deadline - age.awaited
    if (old in eligible or new not in eligible) and (old in passing or new not in passing):
        step, leaves = Transfer(old, new, "rollback"), new
    elif old not in passing or (new in passing and ages.passing(new) >= policy.min_healthy_time):
        step, leaves = Transfer(old, new, "complete"), old
    elif late <= 0:
        step, leaves = Transfer(old, new, "rollback"), new
    else:
        text = (
            f"a pod moves from {old} to {new}: it waits until the new one has passed for {policy.min_healthy_time:g} s"
        )
        verdict = current[new].verdict
        if verdict is not None and verdict.status != "passing":
            text += f" ({describe(verdict)})"
        left = late if age.passing is None else min(late, policy.min_healthy_time - age.passing)
        return Progress(None, Reason("transfer_in_progress", text, (old, new)), left)
    others = sorted(current.keys() - passing - {leaves})
    if leaves in passing and len(passing) - 1 < min(spec.replicas_desired, len(current) - 1):
        text = f"the pod on {leaves} stays until {listed(others)} is passing"
        return Progress(None, Reason("transfer_waits_for_health", text, tuple(others[:SHOWN_NODES])))
    return Progress(step)


class Resting:
    """The nodes that get no pods by transfers for a while. They are not stored: another owner of the RC tries them."""

    def __init__(self) -> None:
        self._nodes: dict[str, tuple[int, float]] = {}  # node -> failures in a row, and the time until when it rests

    def failed(self, node: str, now: float) -> None:
        """Note that a pod did not get healthy on the node; it rests twice as long as the last time."""
        failures = self._nodes.get(node, (0, 0.0))[0] + 1
        self._nodes[node] = failures, now + min(LONGEST_REST, FIRST_REST * 2 ** (failures - 1))

    def left(self, now: float) -> dict[str, float]:
        """Return the resting nodes, each with the seconds for which it still rests."""
        self._nodes = {node: known for node, known in self._nodes.items() if now < known[1] + LONGEST_REST}
        return {node: until - now for node, (_, until) in self._nodes.items() if until > now}


def resting(nodes: Mapping[str, float]) -> Reason:
    """Return the reason for a transfer that waits for a node on which a pod did not get healthy."""
    names = sorted(nodes)
    return Reason("transfer_in_progress", f"a pod did not get healthy on {listed(names)}; it is tried again later")
