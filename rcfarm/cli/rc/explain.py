"""`rcfarm rc explain`: the reasons for an RC's state, from its records and those of every node.

The owner's reasons come from the RC's status. In addition, every node is checked with the label scheduler's own rules,
so the output lists every node that exists.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import msgspec
from rich.text import Text

from rcfarm.cli.kit.command import Cli
from rcfarm.cli.kit.formatting import times
from rcfarm.cli.kit.json_views import PodInfo, RCInfo, pod_info, rc_info, unanswered
from rcfarm.cli.kit.output import Output, state
from rcfarm.operations import rc_snapshot
from rcfarm.operations.fleet import listed, read_brake, read_farms
from rcfarm.operations.nodes import NodeView
from rcfarm.operations.rc_snapshot import TROUBLE, RCSnapshot
from scheduler.label import obstacle
from store.schema.records import Intent, Reason, decode
from store.schema.selectors import BadSelector, Selector


class NodeVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """One node. `has_pod`: the RC has a pod there. `obstacle`: why the node can't take a new pod of the RC, or ""."""

    node: str
    has_pod: bool
    obstacle: str


class RCExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """The RC, the reasons for its state (`why`), a verdict on every node, and the pods that crash or do not pass."""

    rc: RCInfo
    why: list[Reason]
    nodes: list[NodeVerdict]
    pods: list[PodInfo] = []

    def render(self, out: Output) -> None:
        rc = self.rc
        out.line(
            Text.assemble(
                f"rc {rc.id} is ",
                state(rc.state),
                f": {rc.counts}",
            )
        )
        for reason in self.why:
            out.hanging(Text.assemble("  ", (f"{reason.code}: ", "yellow")), reason.message + times(reason))
        if not self.why:
            out.line("  no known problem")
        if self.pods:
            out.line()
            out.line("pods that need attention:")
            dead = unanswered(self.why)
            rows = [(pod.node, state(pod.state), state(pod.health), "; ".join(pod.details(dead))) for pod in self.pods]
            out.table(("NODE", "POD", "HEALTH", "DETAIL"), rows, indent=2)
        out.line()
        if not self.nodes:
            out.line("no node is registered; start an agent (`rcfarm agent`)")
            return
        out.line(f"nodes, by the selector {rc.node_selector}:" if rc.node_selector else "nodes (no selector: all):")
        places = [
            (v.node, "has a pod" if v.has_pod else "free" if not v.obstacle else "no", v.obstacle) for v in self.nodes
        ]
        out.table(("NODE", "PLACE", "WHY NOT"), places, indent=2)


async def explain_rc(cli: Cli, rc_id: str) -> RCExplanation:
    """Read the records and explain the RC. Raises `NoSuchRC`."""
    snap = await cli.rcs.snapshot(rc_id)
    farms, nodes, brake = await asyncio.gather(
        read_farms(cli.store, cli.keys), cli.nodes.list(), read_brake(cli.store, cli.keys)
    )
    pod_id = rc_snapshot.pod_id_of(snap)
    taken, realities = await asyncio.gather(_taken(cli, pod_id, rc_id), cli.rcs.realities(pod_id))
    info = rc_info(snap, farms.farms)
    pods = [pod_info(pod) for pod in rc_snapshot.pods(snap, realities)]
    troubled = [pod for pod in pods if pod.health != "passing" or pod.condition in TROUBLE]
    why = _why(snap, info, troubled)
    if brake:
        why.append(Reason("brake", f"the brake is on ({brake.message}): nothing is removed; see `rcfarm brake status`"))
    return RCExplanation(rc=info, why=why, nodes=verdicts(snap, nodes.nodes, taken), pods=troubled)


async def _taken(cli: Cli, pod_id: str, rc_id: str) -> dict[str, str]:
    """Return the nodes where another RC uses the pod id, and that RC."""
    names = [name for name in await cli.store.keys(cli.keys.intents) if cli.keys.parse_pod(name).pod_id == pod_id]
    entries = await asyncio.gather(*(cli.store.get(name) for name in names))
    intents = {entry.key: decode(Intent, entry.key, entry.value) for entry in entries if entry}
    return {cli.keys.parse_pod(key).node: intent.rc for key, intent in intents.items() if intent.rc != rc_id}


def _why(snap: RCSnapshot, info: RCInfo, troubled: Sequence[PodInfo]) -> list[Reason]:
    """Return the reasons of the RC's status and records; if there are none, what its pods say."""
    why = list(info.reasons)
    if snap.mutation:
        doing = f" ({snap.mutation.reason})" if snap.mutation.reason else ""
        why.append(
            Reason("locked", f"{snap.mutation.holder} holds the mutation lock{doing}; edits wait until it is free")
        )
    if snap.spec and snap.status and snap.status.generation < snap.spec.generation and snap.owner.held:
        why.append(Reason("behind", f"{snap.owner.farm} has not acted on the latest change yet"))
    for key, error in snap.bad.items():
        if not key.endswith("/spec"):
            why.append(Reason("unreadable", str(error)))
    if why or info.state in ("converged", "completed"):
        return why
    if not troubled:
        return [Reason("progressing", "its owner has not processed the latest change of its pods yet")]
    details = (f"{pod.node} {'; '.join([pod.state, *pod.details()])}" for pod in troubled)
    return [Reason("progressing", f"pods do not pass yet: {listed(details)}", tuple(pod.node for pod in troubled))]


def verdicts(snap: RCSnapshot, nodes: Mapping[str, NodeView], taken: Mapping[str, str]) -> list[NodeVerdict]:
    """Return the verdict on each node for the RC, in order of name."""
    try:
        selector = Selector.parse(snap.spec.node_selector if snap.spec else "")
    except BadSelector as error:
        return [NodeVerdict(node=name, has_pod=name in snap.pods, obstacle=str(error)) for name in nodes]
    found = {
        name: NodeVerdict(
            node=name,
            has_pod=name in snap.pods,
            obstacle=obstacle(node.state(), selector)
            or (f"the pod id is used by rc {taken[name]}" if name in taken else ""),
        )
        for name, node in nodes.items()
    }
    for name in snap.pods.keys() - nodes.keys():
        found[name] = NodeVerdict(node=name, has_pod=True, obstacle="the node has no record; start its agent")
    return [found[name] for name in sorted(found)]
