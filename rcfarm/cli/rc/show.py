"""Show RCs: `rcfarm rc list | get | owner | explain`.

`explain` takes the owner's reasons from the RC's status. In addition, every node is checked with the label scheduler's
own rules, so the output lists every node that exists.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec
import typer
from rich.text import Text

from rcfarm.cli.kit.command import Cli
from rcfarm.cli.kit.json_views import PodInfo, RCInfo, owner_info, pod_info, rc_info, unanswered
from rcfarm.cli.kit.options import RCId
from rcfarm.cli.kit.output import Output, ago, labels, state, times
from rcfarm.operations import rc_snapshot
from rcfarm.operations.analysis import described
from rcfarm.operations.fleet import ids_with_spec, listed, pods_without_rc, read_brake, read_farms, why_unowned
from rcfarm.operations.nodes import NodeView
from rcfarm.operations.rc_apply import as_yaml
from rcfarm.operations.rc_snapshot import TROUBLE, RCSnapshot
from scheduler.label import obstacle
from store.schema.records import Intent, Reason, decode
from store.schema.selectors import BadSelector, Selector

SHOWN_LOGS = 3  # processes whose last lines are shown
LabelSelector = Annotated[
    str,
    typer.Option("--selector", "-l", metavar="SELECTOR", help="Only RCs whose labels match, as in team=web,!canary."),
]


async def list_(cli: Cli, selector: LabelSelector = "") -> None:
    """List the replication controllers."""
    await list_rcs(cli, selector)


async def list_rcs(cli: Cli, selector: str, *, only_daemon_sets: bool = False) -> None:
    """List the RCs whose labels match."""
    wanted = Selector.parse(selector)
    snaps, farms = await asyncio.gather(cli.rcs.snapshots(), read_farms(cli.store, cli.keys))
    lost = await pods_without_rc(cli.store, cli.keys, ids_with_spec(snaps))
    shown = [
        rc_info(snap, farms.farms)
        for snap in snaps
        if (wanted.matches(snap.spec.rc_labels) if snap.spec else not str(wanted))
        and not (only_daemon_sets and not (snap.spec and snap.spec.is_daemon_set))
    ]
    rows = (
        (
            rc.id,
            state(rc.state),
            f"{rc.placed}/{rc.replicas_desired}" if rc.state != "unreadable" else "-",
            str(rc.healthy),
            rc.pod_id or "-",
            rc.owner.farm if rc.owner and rc.owner.held else "-",
            rc.node_selector or "-",
            str(rc.revision),
            rc.manifest[:12] or "-",
            labels(rc.rc_labels),
            ago(rc.updated_at),
        )
        for rc in shown
    )
    wide = ("+REVISION>", "+MANIFEST", "+LABELS", "+UPDATED")
    columns = ("RC", "STATE", "PLACED>", "HEALTHY>", "POD", "OWNER", "NODES", *wide)
    cli.out.show(shown, lambda: cli.out.table(columns, rows), (rc.id for rc in shown))
    if only_daemon_sets and not shown:
        cli.out.note("no daemon sets; create one with `rcfarm ds create`, or as an RC with `replicas: all`")
    elif not shown and snaps:
        cli.out.note(f"no replication controller has labels that match {selector}")
    elif not shown and not lost.rcs:
        cli.out.note("no replication controllers; create one with `rcfarm rc apply -f FILE`")
    if lost.rcs:
        cli.out.note(str(lost))


async def get(
    cli: Cli,
    rc: RCId,
    manifest: Annotated[bool, typer.Option("--manifest", "-m", help="Only the manifest's exact bytes.")] = False,
) -> None:
    """Show an RC's desired state, as a file for `rc apply`."""
    spec = await cli.rcs.get(rc)
    if manifest:
        cli.out.text(await cli.rcs.manifest(spec.manifest))
        return
    if cli.out.form == "json":
        cli.out.json(rc_info(await cli.rcs.snapshot(rc)))
        return
    if cli.out.form == "name":
        cli.out.line(rc)
        return
    cli.out.text(as_yaml(spec, await cli.rcs.manifest(spec.manifest)))


def print_reasons(out: Output, reasons: Sequence[Reason]) -> None:
    """Print each reason with its code and times."""
    for reason in reasons:
        out.hanging(Text.assemble("  ", (f"{reason.code}: ", "yellow")), reason.message + times(reason))


def print_last_words(out: Output, pods: Sequence[PodInfo]) -> None:
    """Print the last lines of the processes that have failed, and where all of them are."""
    found = [(pod.node, *each) for pod in pods for each in pod.last_words()]
    for node, name, lines, log in found[:SHOWN_LOGS]:
        out.line()
        out.line(f"last lines of {name} on {node}, of {log}:")
        for line in lines.splitlines():
            out.hanging("  ", line)
    if len(found) > SHOWN_LOGS:
        out.line()
        out.line(f"and {len(found) - SHOWN_LOGS} more; `rcfarm rc logs` shows those of all pods")


def print_analyses(out: Output, analyses: Sequence[str]) -> None:
    """Print a line for each analysis."""
    for line in analyses:
        out.hanging("  ", f"analysis {line}")


def analyses_of(snap: RCSnapshot) -> list[str]:
    """Return each analysis of the present rollout with its last outcome, in words."""
    rollout = snap.present_rollout
    return described(snap.spec.policy, rollout.analysis) if snap.spec and rollout and rollout.stable else []


async def owner(cli: Cli, rc: RCId) -> None:
    """Show which farm holds an RC."""
    snap, farms = await asyncio.gather(cli.rcs.snapshot(rc), read_farms(cli.store, cli.keys))
    info = owner_info(snap)

    def render() -> None:
        if info and info.held:
            cli.out.line(f"{info.farm}  since {ago(info.since)}, fencing token {info.token}")
            return
        cli.out.line(why_unowned(snap, farms.farms))
        if info:
            cli.out.line(f"last owner: {info.farm}, since {ago(info.since)}, fencing token {info.token}")

    cli.out.show(info, render)


class NodeVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """One node. `has_pod`: the RC has a pod there. `obstacle`: why the node can't take a new pod of the RC, or ""."""

    node: str
    has_pod: bool
    obstacle: str


class RCExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """The RC, the reasons for its state (`why`), a verdict on every node, and the pods that crash or do not pass.
    `analyses`: those of its rollout, each with its last outcome, in words."""

    rc: RCInfo
    why: list[Reason]
    nodes: list[NodeVerdict]
    pods: list[PodInfo] = []
    analyses: list[str] = []

    def render(self, out: Output) -> None:
        rc = self.rc
        out.line(Text.assemble(f"rc {rc.id} is ", state(rc.state), f": {rc.counts}"))
        print_reasons(out, self.why)
        if not self.why:
            out.line("  no known problem")
        self.render_places(out)

    def render_places(self, out: Output) -> None:
        """Print what is behind the reasons: analyses, pods and nodes."""
        print_analyses(out, self.analyses)
        if self.pods:
            out.line()
            out.line("pods that need attention:")
            dead = unanswered(self.why)
            rows = [(pod.node, state(pod.state), state(pod.health), "; ".join(pod.details(dead))) for pod in self.pods]
            out.table(("NODE", "POD", "HEALTH", "DETAIL"), rows, indent=2)
            print_last_words(out, self.pods)
        out.line()
        if not self.nodes:
            out.line("no node is registered; start an agent (`rcfarm agent`)")
            return
        out.line(
            f"nodes, by the selector {self.rc.node_selector}:" if self.rc.node_selector else "nodes (no selector: all):"
        )
        places = [
            (v.node, "has a pod" if v.has_pod else "free" if not v.obstacle else "no", v.obstacle) for v in self.nodes
        ]
        out.table(("NODE", "PLACE", "WHY NOT"), places, indent=2)


async def explain(cli: Cli, rc: RCId) -> None:
    """Explain an RC's state, node by node."""
    found = await explanation(cli, rc)
    cli.out.show(found, lambda: found.render(cli.out))


async def explanation(cli: Cli, rc: str) -> RCExplanation:
    """Return what explains an RC. Raises `NoSuchRC`."""
    snap = await cli.rcs.snapshot(rc)
    farms, nodes, brake = await asyncio.gather(
        read_farms(cli.store, cli.keys), cli.nodes.list(), read_brake(cli.store, cli.keys)
    )
    pod_id = rc_snapshot.pod_id_of(snap)
    entries, realities = await asyncio.gather(cli.rcs.intents(pod_id), cli.rcs.realities(pod_id))
    taken = {}  # nodes where another RC, or a task, uses the pod id
    for entry in entries:
        intent = decode(Intent, entry.key, entry.value)
        if intent.rc != rc:
            taken[cli.keys.parse_pod(entry.key).node] = intent.belongs_to
    info = rc_info(snap, farms.farms)
    pods = [pod_info(pod) for pod in rc_snapshot.pods(snap, realities)]
    troubled = [pod for pod in pods if pod.health != "passing" or pod.condition in TROUBLE]
    why = _why(snap, info, troubled)
    if brake:
        why.append(Reason("brake", f"the brake is on ({brake.words}): nothing is removed; see `rcfarm brake status`"))
    return RCExplanation(
        rc=info, why=why, nodes=verdicts(snap, nodes.nodes, taken), pods=troubled, analyses=analyses_of(snap)
    )


def _why(snap: RCSnapshot, info: RCInfo, troubled: Sequence[PodInfo]) -> list[Reason]:
    """Return the reasons of the RC's status and records; if there are none, what its pods say."""
    why = list(info.reasons)
    if snap.lock:
        held = f"{snap.lock.holder} has locked it ({snap.lock.reason}): changes are refused"
        why.append(Reason("locked", f"{held} until `rcfarm rc unlock {snap.rc_id}`", since=snap.lock.since))
    elif snap.mutation:
        doing = f" ({snap.mutation.reason})" if snap.mutation.reason else ""
        why.append(
            Reason("locked", f"{snap.mutation.holder} holds the mutation lock{doing}; edits wait until it is free")
        )
    if snap.spec and snap.status and snap.status.generation < snap.spec.generation and snap.owner.held:
        why.append(Reason("behind", f"{snap.owner.farm} has not acted on the latest change yet"))
    why += unreadable(snap)
    if why or info.state in ("converged", "completed"):
        return why
    if not troubled:
        return [Reason("progressing", "its owner has not processed the latest change of its pods yet")]
    details = (f"{pod.node} {'; '.join([pod.state, *pod.details()])}" for pod in troubled)
    return [Reason("progressing", f"pods do not pass yet: {listed(details)}", tuple(pod.node for pod in troubled))]


def unreadable(snap: RCSnapshot) -> list[Reason]:
    """Return a reason for each record that can't be read, but the spec, without which nothing else is shown."""
    return [Reason("unreadable", str(error)) for key, error in snap.bad.items() if not key.endswith("/spec")]


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
            or (f"the pod id is used by {taken[name]}" if name in taken else ""),
        )
        for name, node in nodes.items()
    }
    for name in snap.pods.keys() - nodes.keys():
        found[name] = NodeVerdict(
            node=name, has_pod=True, obstacle="the node has no record; start its agent (`rcfarm agent`)"
        )
    return [found[name] for name in sorted(found)]
