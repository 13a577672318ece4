"""Show what an RC's pods write, and run commands in them: `rcfarm rc logs | exec`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Annotated

import typer

from rcfarm.cli.kit.command import Cli
from rcfarm.cli.kit.options import RCId, UsageProblem
from rcfarm.cli.pod_exec import run_in
from rcfarm.cli.pod_logs import (
    PATIENCE,
    Follow,
    LaunchableName,
    LogsSince,
    Place,
    Previous,
    Printer,
    Tail,
    follow,
    log_options,
    show,
)
from rcfarm.cli.rc.follow import watched
from rcfarm.operations import rc_snapshot
from rcfarm.operations.errors import NotFound
from rcfarm.operations.fleet import listed
from rcfarm.operations.rc_snapshot import RCSnapshot, pod_id_of
from store.schema.records import Reality

OnNodes = Annotated[
    list[str] | None, typer.Option("--node", metavar="NODE", help="Only the pod on this node; may be repeated.")
]


async def logs(
    cli: Cli,
    rc: RCId,
    node: OnNodes = None,
    follow_: Follow = False,
    previous: Previous = False,
    since: LogsSince = "",
    tail: Tail = None,
    launchable: LaunchableName = "",
) -> int:
    """Show what the pods of an RC write on stdout and stderr. If there are several pods, each line begins with its
    node. The lines come from the nodes' agents; restarts and gaps are noted on standard error."""
    options = log_options(follow=follow_, previous=previous, since=since, tail=tail, launchable=launchable)
    snap = await cli.rcs.snapshot(rc)
    realities = await cli.rcs.realities(pod_id_of(snap))
    places = _places(snap, realities, node or [])
    if not places and not follow_:
        raise NotFound(f"rc {rc} has no pods, so there are no logs; `rcfarm rc status {rc}` shows why")
    several = max((len(reality.launchables) for reality in realities.values()), default=1) > 1 and not launchable
    follows_all = follow_ and not node
    printer = Printer(cli, places, labels=len(places) > 1 or follows_all, shows_launchable=several)
    if not follow_:
        return await show(cli, places, options, printer)
    if not places:
        cli.out.note(f"rc {rc} has no pods yet; waiting for them")
    return await follow(cli, places, options, printer, (lambda: _placements(cli, rc)) if follows_all else None)


async def exec_(
    cli: Cli,
    rc: RCId,
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND…", help="The program and its arguments.")],
    node: Annotated[
        str, typer.Option("--node", metavar="NODE", help="In the pod on this node; default: the first one.")
    ] = "",
    launchable: Annotated[
        str, typer.Option("--launchable", metavar="NAME", help="As this process of the pod; default: the first one.")
    ] = "",
    stdin: Annotated[bool, typer.Option("--stdin", "-i", help="Pass standard input on.")] = False,
    tty: Annotated[bool, typer.Option("--tty", "-t", help="On a terminal.")] = False,
) -> int:
    """Run a command in a pod of an RC. It has the environment, the user and the working directory of the pod's process.
    Exits with the command's exit code. The command is written to the audit log."""
    if cli.out.as_json:
        raise UsageProblem("--output: a command's streams are passed on as they are; leave it out")
    snap = await cli.rcs.snapshot(rc)
    places = _places(snap, await cli.rcs.realities(pod_id_of(snap)), [node] if node else [])
    if not places:
        raise NotFound(f"rc {rc} has no pods to run a command in; `rcfarm rc status {rc}` shows why")
    passing = [place for place in places if place.node in snap.health]
    place = (passing or places)[0]
    if len(places) > 1:
        cli.out.note(f"in the pod on {place.node}; --node chooses another of {listed([each.node for each in places])}")
    return await run_in(cli, place, command, rc=rc, launchable=launchable, stdin=stdin, tty=tty)


def _places(snap: RCSnapshot, realities: dict[str, Reality], nodes: Sequence[str]) -> list[Place]:
    """Return where the RC has pods, of these nodes only if some are given. Raises `NotFound`."""
    pod_id = pod_id_of(snap)
    found = [pod.node for pod in rc_snapshot.pods(snap, realities)]
    if unknown := [node for node in nodes if node not in found]:
        has = f"it has pods on {listed(found)}" if found else "it has no pods"
        raise NotFound(f"rc {snap.rc_id} has no pod on node {unknown[0]}; {has}")
    return [Place(node, pod_id) for node in found if not nodes or node in nodes]


async def _placements(cli: Cli, rc: str) -> AsyncIterator[Sequence[Place]]:
    """Yield where the RC has pods, now and after each change, until it is deleted."""
    folder = cli.keys.rc(rc)
    concerns = (f"{folder}pods/", f"{folder}spec")
    async with watched(cli.store, folder, lambda key: key.startswith(concerns)) as tree:
        while True:
            tree.event.clear()
            now = asyncio.get_running_loop().time()
            snap = rc_snapshot.snapshot(cli.keys, rc, await tree.entries(now + PATIENCE))
            pod_id = pod_id_of(snap)
            yield [Place(node, pod_id) for node in sorted(snap.pods) if pod_id]
            if snap.spec is None and not snap.pods:
                return
            await tree.changed(now + 3600)
