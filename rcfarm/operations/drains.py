"""What happens to the pods of nodes that are emptied: which move, which leave, which stay, and why. Pure.

A drain marks nodes, and the owners of the RCs do the rest: they place another pod before they remove the one that
leaves, one pod of an RC at a time and never below what it may do without (`rcfarm.farm.transfer`). So what is known
here is a forecast by the records, and, while the drain goes on, what the owners report.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from rcfarm.operations.nodes import NodeView
from rcfarm.operations.rc_snapshot import RCSnapshot, pod_id_of
from scheduler.label import obstacle
from scheduler.protocol import NodeState
from store.schema.records import ROLLING_OUT, Brake, Intent
from store.schema.selectors import BadSelector, Selector

Kind = Literal["moves", "leaves", "ends", "tolerant", "static", "disabled", "no_place", "unreadable"]
STAYS: frozenset[Kind] = frozenset({"static", "disabled", "unreadable"})  # until an operator acts
STUCK = frozenset(
    {"allocation_failed", "held", "ineligible_kept", "no_node_matches", "pod_id_taken", "manifest_unusable"}
)


class Departure(msgspec.Struct, frozen=True, kw_only=True):
    """A pod on a node that is emptied. `rc`: "" for a pod of a task, which `task` names.

    `kind`: moves (another pod takes its place first), leaves (of a daemon set, or of an RC that is being deleted), ends
    (of a task: stays until the task ends), tolerant (of a daemon set with `tolerate_drain`: stays); or it stays,
    although it should not: static, disabled, no_place (no other node may take it now), unreadable. `waits_for`: what
    has to pass before it moves, or "". `act`: the command, or the change, that lets it move.
    """

    node: str
    pod_id: str
    rc: str
    task: str = ""
    kind: Kind
    waits_for: str = ""
    act: str = ""


class PodAt(NamedTuple):
    """A pod on a node, by its intent; `intent` None: it can't be read."""

    node: str
    pod_id: str
    intent: Intent | None


def departures(
    pods: Iterable[PodAt],
    snaps: Mapping[str, RCSnapshot],
    nodes: Mapping[str, NodeView],
    brake: Brake | None,
    draining: Collection[str] = (),
) -> list[Departure]:
    """Return what happens to the pods, in the order given. `snaps`: of their RCs, by id; `nodes`: of the whole fleet.
    `draining`: nodes that are about to be emptied, too, so that no pod moves there."""
    states = {name: node.state() for name, node in nodes.items() if name not in draining}
    return [_departure(pod, snaps.get(pod.intent.rc if pod.intent else ""), states, brake) for pod in pods]


def _departure(pod: PodAt, snap: RCSnapshot | None, states: Mapping[str, NodeState], brake: Brake | None) -> Departure:
    intent, node = pod.intent, pod.node
    if intent is not None and intent.task:
        act = f"`rcfarm task abort {intent.task}` ends it at once"
        return Departure(node=node, pod_id=pod.pod_id, rc="", task=intent.task, kind="ends", act=act)
    rc_id = intent.rc if intent else ""
    spec = snap.spec if snap else None

    def of(kind: Kind, waits_for: str = "", act: str = "") -> Departure:
        return Departure(node=node, pod_id=pod.pod_id, rc=rc_id, kind=kind, waits_for=waits_for, act=act)

    if snap is None or spec is None:
        return of("unreadable", act="see `rcfarm doctor`")
    waits_for = _waits_for(snap, brake)
    if spec.disabled:
        return of("disabled", act=f"`rcfarm rc enable {rc_id}`")
    if spec.deleting:
        return of("leaves", waits_for)
    if spec.is_daemon_set:
        return of("tolerant") if spec.tolerate_drain else of("leaves", waits_for)
    if spec.allocation_strategy == "static":
        change = "set `allocation_strategy: dynamic` in its file and apply it with `rcfarm rc apply -f FILE`"
        return of("static", act=change)
    is_moving = snap.status is not None and snap.status.node_transfer is not None
    try:
        selector = Selector.parse(spec.node_selector)
        has_place = any(name not in snap.pods and not obstacle(state, selector) for name, state in states.items())
    except BadSelector:
        has_place = False
    if not is_moving and not has_place:
        return of("no_place", waits_for, f"add or uncordon nodes; `rcfarm rc explain {rc_id}` has every node")
    return of("moves", waits_for)


def _waits_for(snap: RCSnapshot, brake: Brake | None) -> str:
    if brake is not None:
        return "the brake (`rcfarm brake status`)"
    if not snap.owner.held:
        return "a farm that owns the RC (`rcfarm farm`)"
    if snap.mutation is not None:
        return f"{snap.mutation.holder}, which holds the mutation lock"
    if snap.present_rollout is not None and snap.present_rollout.state in ROLLING_OUT:
        return f"its rollout of revision {snap.present_rollout.revision} (`rcfarm rollout status {snap.rc_id}`)"
    return ""


def stuck(snap: RCSnapshot) -> str:
    """Return why the owner can't move the RC's pods for now, or ""."""
    if not snap.owner.held:
        return "no farm owns the RC"
    if snap.status is None:
        return ""
    if snap.status.state == "quarantined":
        return "; ".join(reason.message for reason in snap.status.reasons)
    return "; ".join(reason.message for reason in snap.status.reasons if reason.code in STUCK)


def of_rcs(snaps: Sequence[RCSnapshot], node: str) -> list[PodAt]:
    """Return the pods that the RCs have placed on the node, by their own records."""
    found = [
        PodAt(node, pod_id_of(snap), Intent(manifest="", rc=snap.rc_id, shard=""))
        for snap in snaps
        if node in snap.pods
    ]
    return sorted(found, key=lambda pod: pod.pod_id)
