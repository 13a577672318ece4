"""Looking at RCs: `rcfarm rc list | get | status | owner | history | explain`."""

from __future__ import annotations

import asyncio
from collections.abc import Container, Sequence
from typing import Annotated, Any

import typer
from rich.text import Text

from rcfarm import rc_view
from rcfarm.cli.arguments import RCId, Since, parse_time
from rcfarm.cli.command import Cli
from rcfarm.cli.explain import explain_rc
from rcfarm.cli.output import state
from rcfarm.cli.views import PodInfo, RCInfo, RCStatusInfo, owner_info, pod_info, rc_info, unanswered
from rcfarm.cli.words import ago, labels, times
from rcfarm.overview import ids_with_spec, listed, pods_without_rc, read_farms, why_unowned
from rcfarm.rc_apply import as_yaml
from rcfarm.rc_errors import NoSuchRC
from rcfarm.rc_view import RCSnapshot
from store.records import AuditEvent
from store.selectors import Selector

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
    shown = [rc_info(snap, farms.farms) for snap in snaps if _is_wanted(snap, wanted)]
    cli.out.show(shown, lambda: _table_of_rcs(cli, shown))
    if not shown and snaps:
        cli.out.note(f"no replication controller has labels that match {selector}")
    elif not shown and not lost.rcs:
        cli.out.note("no replication controllers; create one with `rcfarm rc apply -f FILE`")
    if lost.rcs:
        cli.out.note(str(lost))


def _is_wanted(snap: RCSnapshot, selector: Selector) -> bool:
    return selector.matches(snap.spec.rc_labels) if snap.spec else not str(selector)


def _table_of_rcs(cli: Cli, rcs: Sequence[RCInfo]) -> None:
    if not rcs:
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
        for rc in rcs
    ]
    cli.out.table(("RC", "STATE", "PLACED>", "HEALTHY>", "POD", "OWNER", "NODES"), rows)


async def get(
    cli: Cli,
    rc: RCId,
    manifest: Annotated[bool, typer.Option("--manifest", "-m", help="Only the manifest's exact bytes.")] = False,
) -> None:
    """Show what an RC desires, as a file that `rc apply` takes."""
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
    realities, farms = await asyncio.gather(cli.rcs.realities(rc_view.pod_id_of(snap)), read_farms(cli.store, cli.keys))
    pods = [pod_info(pod) for pod in rc_view.pods(snap, realities)]
    info = rc_info(snap, farms.farms)
    cli.out.show(RCStatusInfo(rc=info, pods=pods), lambda: _status(cli, info, pods))


def _status(cli: Cli, rc: RCInfo, pods: Sequence[PodInfo]) -> None:
    cli.out.line(Text.assemble(f"{rc.id}  ", state(rc.state), f"  {rc.counts}"))
    owner = rc.owner
    held = f"{owner.farm} since {ago(owner.since)}" if owner and owner.held else "nobody"
    behind = " (its owner has not acted on it yet)" if rc.observed_generation < rc.generation else ""
    cli.out.line(f"owner: {held}; generation {rc.generation}{behind}; updated {ago(rc.updated_at)}")
    for reason in rc.reasons:
        cli.out.hanging(Text.assemble("  ", (f"{reason.code}: ", "yellow")), reason.message + times(reason))
    if rc.mutation_holder:
        cli.out.line(f"  being changed by {rc.mutation_holder}")
    if pods:
        dead = unanswered(rc.reasons)
        cli.out.line()
        cli.out.table(
            ("NODE", "POD", "HEALTH", "PROCESSES", "ADDRESS", "DETAIL"), [_pod_row(pod, dead) for pod in pods]
        )


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
    """Show what was done to an RC, and by whom. Works for an RC that is gone, too."""
    events = await cli.rcs.history(rc, last=last, since=parse_time("--since", since), all_lives=all_lives)
    if not events:
        within = f" since {since}" if since else ""
        raise NoSuchRC(f"the audit log has no event of rc {rc}{within}")
    if len(events) == last:
        cli.out.note(f"the last {last} events; --last 0 shows all")
    rows = [(ago(e.timestamp), e.timestamp[:19] + "Z", _event(e), _actor(e), _details(e)) for e in events]
    cli.out.show(events, lambda: cli.out.table(("WHEN", "TIME", "EVENT", "BY", "DETAILS"), rows))


def _event(event: AuditEvent) -> str:
    return _words(event.event_type.removeprefix("REPLICATION_CONTROLLER_").lower())


def _actor(event: AuditEvent) -> str:
    """The claimed name, with what can be checked beside it."""
    known = [f"uid {event.uid}"] if isinstance(event.uid, int) else []
    known += [f"token {event.accessor[:8]}"] if isinstance(event.accessor, str) else []
    return f"{event.actor or '-'} ({', '.join(known)})" if known else event.actor or "-"


def _details(event: AuditEvent) -> str:
    details = dict(event.event_details)
    changes = details.pop("changes", {})
    if isinstance(digests := details.get("manifest"), list):  # where it was changed, the changes show it
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
    """Explain why an RC is as it is, node by node."""
    explanation = await explain_rc(cli, rc)
    cli.out.show(explanation, lambda: explanation.render(cli.out))
