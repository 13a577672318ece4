"""`rcfarm ds`: daemon sets, which are RCs with `replicas: all`, in the words that p2's users know."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rcfarm.cli.kit.command import Cli, command
from rcfarm.cli.kit.options import (
    DEFAULT_TIMEOUT,
    DEFAULT_WAIT_HEALTHY,
    Detach,
    RCId,
    Timeout,
    UsageProblem,
    WaitHealthy,
    Yes,
    confirm,
)
from rcfarm.cli.rc import change, show, status
from rcfarm.operations.rc_spec import canonical_selector
from scheduler.label import obstacle
from store.schema.records import ALL_NODES
from store.schema.selectors import Selector

app = typer.Typer(rich_markup_mode=None)


async def create(
    cli: Cli,
    manifest: Annotated[
        Path, typer.Option("--manifest", "-m", metavar="FILE", help="The pod's manifest, YAML or JSON.")
    ],
    selector: Annotated[
        str, typer.Option("--selector", "-s", metavar="SELECTOR", help="Label selector of the nodes, as in pool=web.")
    ] = "",
    everywhere: Annotated[bool, typer.Option("--everywhere", help="On all nodes.")] = False,
    ds: Annotated[str, typer.Option("--id", metavar="DS", help="Its id; derived from the pod's id when absent.")] = "",
    max_unavailable: Annotated[
        int, typer.Option("--max-unavailable", metavar="N", help="Pods that may be away at a time during an update.")
    ] = 1,
    disabled: Annotated[bool, typer.Option("--disabled", help="Create it disabled.")] = False,
    detach: Detach = False,
    timeout: Timeout = DEFAULT_TIMEOUT,
    wait_healthy: WaitHealthy = DEFAULT_WAIT_HEALTHY,
) -> int:
    """Create a daemon set: a pod on each node that matches, also on those that join later."""
    if bool(selector) == everywhere:
        raise UsageProblem("--selector, --everywhere: give one of them, to say on which nodes its pods run")
    return await change.create(
        cli,
        manifest,
        rc=ds,
        replicas=ALL_NODES,
        node_selector=selector,
        max_unavailable=max_unavailable,
        disabled=disabled,
        detach=detach,
        timeout=timeout,
        wait_healthy=wait_healthy,
    )


async def list_(cli: Cli, selector: show.LabelSelector = "") -> None:
    """List the daemon sets."""
    await show.list_rcs(cli, selector, only_daemon_sets=True)


async def test_selector(
    cli: Cli, selector: Annotated[str, typer.Argument(metavar="SELECTOR", help="As in pool=web.")]
) -> None:
    """Show the nodes on which a daemon set with this selector would have pods."""
    wanted = Selector.parse(canonical_selector(selector))
    found = await cli.nodes.list()
    names = [name for name, node in sorted(found.nodes.items()) if not obstacle(node.state(), wanted)]
    cli.out.show(names, lambda: cli.out.line("\n".join(names)))
    cli.out.note(f"{len(names)} of {len(found.nodes)} nodes would have a pod")


async def shrink(cli: Cli, ds: RCId, yes: Yes = False) -> None:
    """Let a daemon set remove its pods from nodes that do not match any more."""
    snap = await cli.rcs.snapshot(ds)
    if snap.spec is not None and snap.spec.is_daemon_set and len(snap.pods) > snap.desired:
        confirm(f"ds {ds}: {snap.desired} of {len(snap.pods)} pods would be left. Remove the others?", yes=yes)
    left = await cli.rcs.shrink(ds)
    cli.out.note(f"ds {ds}: confirmed for ten minutes: its owner may remove pods until {left} are left")


command(app, "create", creates_store=True)(create)
command(app, "list", lists=True)(list_)
command(app, "get", lists=True)(show.get)
command(app, "status", lists=True)(status.status)
command(app, "enable")(change.enable)
command(app, "disable")(change.disable)
command(app, "delete")(change.delete)
command(app, "test-selector")(test_selector)
command(app, "shrink")(shrink)
