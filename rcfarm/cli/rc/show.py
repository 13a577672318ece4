"""Show RCs: `rcfarm rc list | get | status | owner | history | explain`."""

from __future__ import annotations

import asyncio
from collections.abc import Container
from typing import Annotated, Any

import typer
from rich.text import Text

from rcfarm.cli.kit.command import Cli
from rcfarm.cli.kit.formatting import ago, labels, times
from rcfarm.cli.kit.json_views import PodInfo, RCStatusInfo, owner_info, pod_info, rc_info, unanswered
from rcfarm.cli.kit.options import RCId, Since, parse_time
from rcfarm.cli.kit.output import state
from rcfarm.cli.rc.explain import explain_rc
from rcfarm.operations import rc_snapshot
from rcfarm.operations.errors import NoSuchRC
from rcfarm.operations.fleet import ids_with_spec, listed, pods_without_rc, read_farms, why_unowned
from rcfarm.operations.rc_apply import as_yaml
from store.schema.records import AuditEvent
from store.schema.selectors import Selector

_NOT_SHOWN = ("rc", "token", "generation", "node_count")
_AS = {"nodes": "now on"}
LabelSelector = Annotated[
    str,
    typer.Option("--selector", "-l", metavar="SELECTOR", help="Only RCs whose labels match, as in team=web,!canary."),
]


async def list_(cli: Cli, selector: LabelSelector = "") -> None:
    """List the replication controllers."""
    wanted = Selector.parse(selector)
    snaps, farms = await asyncio.gather(cli.rcs.snapshots(), read_farms(cli.store, cli.keys))
    lost = await pods_without_rc(cli.store, cli.keys, ids_with_spec(snaps))
    shown = [
        rc_info(snap, farms.farms)
        for snap in snaps
        if (wanted.matches(snap.spec.rc_labels) if snap.spec else not str(wanted))
    ]

    def render() -> None:
        if not shown:
            return
        rows = [
            (
                rc.id,
                state(rc.state),
                f"{rc.placed}/{rc.replicas_desired}" if rc.state != "unreadable" else "-",
                str(rc.healthy),
                rc.pod_id or "-",
                rc.owner.farm if rc.owner and rc.owner.held else "-",
                rc.node_selector or "-",
            )
            for rc in shown
        ]
        cli.out.table(("RC", "STATE", "PLACED>", "HEALTHY>", "POD", "OWNER", "NODES"), rows)

    cli.out.show(shown, render)
    if not shown and snaps:
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
    if cli.out.as_json:
        cli.out.json(rc_info(await cli.rcs.snapshot(rc)))
        return
    cli.out.text(as_yaml(spec, await cli.rcs.manifest(spec.manifest)))


async def status(cli: Cli, rc: RCId) -> None:
    """Show an RC's state, the reasons for it, and its pods."""
    snap = await cli.rcs.snapshot(rc)
    realities, farms = await asyncio.gather(
        cli.rcs.realities(rc_snapshot.pod_id_of(snap)), read_farms(cli.store, cli.keys)
    )
    pods = [pod_info(pod) for pod in rc_snapshot.pods(snap, realities)]
    info = rc_info(snap, farms.farms)

    def render() -> None:
        cli.out.line(Text.assemble(f"{info.id}  ", state(info.state), f"  {info.counts}"))
        owner = info.owner
        held = f"{owner.farm} since {ago(owner.since)}" if owner and owner.held else "none"
        behind = " (its owner has not acted on it yet)" if info.observed_generation < info.generation else ""
        cli.out.line(f"owner: {held}; generation {info.generation}{behind}; updated {ago(info.updated_at)}")
        for reason in info.reasons:
            cli.out.hanging(Text.assemble("  ", (f"{reason.code}: ", "yellow")), reason.message + times(reason))
        if info.mutation_holder:
            cli.out.line(f"  being changed by {info.mutation_holder}")
        if pods:
            dead = unanswered(info.reasons)
            cli.out.line()
            cli.out.table(
                ("NODE", "POD", "HEALTH", "PROCESSES", "ADDRESS", "DETAIL"), [_pod_row(pod, dead) for pod in pods]
            )

    cli.out.show(RCStatusInfo(rc=info, pods=pods), render)


def _pod_row(pod: PodInfo, dead: Container[str]) -> tuple[str | Text, ...]:
    processes = ", ".join(
        f"{name} {process.state}" + (f" (pid {process.pid})" if process.pid else "")
        for name, process in sorted(pod.launchables.items())
    )
    ports = ", ".join(f"{pod.address}:{port}" if pod.address else f"{name} {port}" for name, port in pod.ports.items())
    return (
        pod.node,
        state(pod.state),
        state(pod.health),
        processes or "-",
        ports or "-",
        "; ".join(pod.details(dead)),
    )


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


async def history(
    cli: Cli,
    rc: RCId,
    last: Annotated[int, typer.Option("--last", metavar="N", min=0, help="Only the last N events; 0: all.")] = 100,
    since: Since = "",
    all_lives: Annotated[
        bool, typer.Option("--all", help="Also events from before the RC was created, if it existed earlier.")
    ] = False,
) -> None:
    """Show what was done to an RC, and by whom. Also works for deleted RCs."""
    events = await cli.rcs.history(rc, last=last, since=parse_time("--since", since), all_lives=all_lives)
    if not events:
        within = f" since {since}" if since else ""
        raise NoSuchRC(f"the audit log has no event of rc {rc}{within}")
    if len(events) == last:
        cli.out.note(f"the last {last} events; --last 0 shows all")
    rows = [
        (
            ago(e.timestamp),
            e.timestamp[:19] + "Z",
            _words(e.event_type.removeprefix("REPLICATION_CONTROLLER_").lower()),
            _actor(e),
            _details(e),
        )
        for e in events
    ]
    cli.out.show(events, lambda: cli.out.table(("WHEN", "TIME", "EVENT", "BY", "DETAILS"), rows))


def _actor(event: AuditEvent) -> str:
    """Return the claimed name, followed by the identity that can be checked."""
    known = [f"uid {event.uid}"] if isinstance(event.uid, int) else []
    known += [f"token {event.accessor[:8]}"] if isinstance(event.accessor, str) else []
    return f"{event.actor or '-'} ({', '.join(known)})" if known else event.actor or "-"


def _details(event: AuditEvent) -> str:
    details = dict(event.event_details)
    changes = details.pop("changes", {})
    if isinstance(digests := details.get("manifest"), list):  # if the manifest was changed, the changes show it
        details["manifest"] = digests[-1] if digests[:1] == [None] else None
    parts = [f"{_words(field)} {_value(old)} → {_value(new)}" for field, (old, new) in changes.items()]
    parts += [
        f"{_AS.get(key) or _words(key)} {_value(value)}"
        for key, value in details.items()
        if key not in _NOT_SHOWN and value not in ([], {}, "", None)
    ]
    return "; ".join(parts)


def _words(field: str) -> str:
    return field.replace("_", " ")


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return labels(value)
    if isinstance(value, list):
        return listed(map(str, value), shown=5)
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text[:12] if len(text) == 64 and text.isalnum() else text or "none"


async def explain(cli: Cli, rc: RCId) -> None:
    """Explain an RC's state, node by node."""
    explanation = await explain_rc(cli, rc)
    cli.out.show(explanation, lambda: explanation.render(cli.out))
