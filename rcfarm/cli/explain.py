"""`rcfarm rc explain`: why an RC is as it is, from its records and those of every node.

The owner's reasons come from its status. Beside them every node is judged anew with the label scheduler's own rules, so
that a node that is missing from the answer is always one that does not exist.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import msgspec
from rich.text import Text

from rcfarm import rc_view
from rcfarm.cli.command import Cli
from rcfarm.cli.output import Output, state
from rcfarm.cli.views import PodInfo, RCInfo, pod_info, rc_info, unanswered
from rcfarm.cli.words import times
from rcfarm.node_store import NodeView
from rcfarm.overview import Farm, listed, read_brake, read_farms
from rcfarm.pod_health import TROUBLE
from rcfarm.rc_view import RCSnapshot
from scheduler.label import obstacle
from store.records import Intent, Reason, decode
from store.selectors import BadSelector, Selector


class NodeVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """One node. `has_pod`: the RC has a pod there. `obstacle`: why it would get no (other) pod, or ""."""

    node: str
    has_pod: bool
    obstacle: str


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """The RC, why it is so, what every node is to it, and the pods that do not pass, or crash."""

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


async def explain_rc(cli: Cli, rc_id: str) -> Explanation:
    """Read what there is to know. Raises `NoSuchRC`."""
    snap = await cli.rcs.snapshot(rc_id)
    farms, nodes, brake = await asyncio.gather(
        read_farms(cli.store, cli.keys), cli.nodes.list(), read_brake(cli.store, cli.keys)
    )
    pod_id = rc_view.pod_id_of(snap)
    taken, realities = await asyncio.gather(_taken(cli, pod_id, rc_id), cli.rcs.realities(pod_id))
    info = rc_info(snap, farms.farms)
    pods = [pod_info(pod) for pod in rc_view.pods(snap, realities)]
    troubled = [pod for pod in pods if pod.health != "passing" or pod.condition in TROUBLE]
    why = _why(snap, info, farms.farms)
    if not why and info.state not in ("converged", "completed"):
        why = _of_pods(info, troubled)
    if brake:
        why.append(Reason("brake", f"the brake is on ({brake.message}): nothing is removed; see `rcfarm brake status`"))
    return Explanation(rc=info, why=why, nodes=verdicts(snap, nodes.nodes, taken), pods=troubled)


def _of_pods(rc: RCInfo, troubled: Sequence[PodInfo]) -> list[Reason]:
    """Why an RC is not converged whose owner has not said so yet."""
    if not troubled:
        return [Reason("progressing", "its owner has not looked at the latest change of its pods yet")]
    details = (f"{pod.node} {'; '.join([pod.state, *pod.details()])}" for pod in troubled)
    return [Reason("progressing", f"pods do not pass yet: {listed(details)}", [pod.node for pod in troubled])]


async def _taken(cli: Cli, pod_id: str, rc_id: str) -> dict[str, str]:
    """Nodes where the pod id belongs to another RC, and to which."""
    names = [name for name in await cli.store.keys(cli.keys.intents) if name.rpartition("/")[2] == pod_id]
    entries = await asyncio.gather(*(cli.store.get(name) for name in names))
    intents = {entry.key: decode(Intent, entry.key, entry.value) for entry in entries if entry}
    return {
        key.removeprefix(cli.keys.intents).partition("/")[0]: intent.rc
        for key, intent in intents.items()
        if intent.rc != rc_id
    }


def _why(snap: RCSnapshot, info: RCInfo, farms: Sequence[Farm]) -> list[Reason]:
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
    return why


def verdicts(snap: RCSnapshot, nodes: Mapping[str, NodeView], taken: Mapping[str, str]) -> list[NodeVerdict]:
    """What each node is to the RC, in order of name."""
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
