"""`rcfarm events`: one timeline of operators, farms and agents."""

from __future__ import annotations

import sys
from datetime import UTC, datetime, timedelta
from typing import Annotated

import msgspec
import typer
from rich.text import Text

from rcfarm.cli.kit.command import Cli, command
from rcfarm.cli.kit.completion import complete_node, complete_rc
from rcfarm.cli.kit.options import parse_time
from rcfarm.daemon.visible import visible_json
from rcfarm.operations.events import FleetEvent, Timeline

app = typer.Typer(rich_markup_mode=None)
WIDTH = 16  # columns for who recorded an event; a longer name takes what it needs
DEFAULT = timedelta(hours=1)
_BAD = frozenset({"POD_EXITED", "POD_FAILED", "NODES_DEAD", "NODES_LOST", "FARMS_LOST", "BRAKE_ENGAGED"})


async def events(
    cli: Cli,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with the events that come.")] = False,
    since: Annotated[
        str,
        typer.Option(
            "--since",
            metavar="TIME",
            help="Events from this time on: an RFC 3339 time, a date, or a duration before now (90m, 24h, 7d). "
            "Default: 1h.",
        ),
    ] = "",
    rc: Annotated[
        str, typer.Option("--rc", metavar="RC", help="Only those about this RC.", autocompletion=complete_rc)
    ] = "",
    node: Annotated[
        str, typer.Option("--node", metavar="NODE", help="Only those about this node.", autocompletion=complete_node)
    ] = "",
) -> None:
    """Show what happened, oldest first: what operators did, what farms decided, and what agents saw.

    With --output json and --follow, each event is one line of JSON.
    """
    start = parse_time("--since", since) or datetime.now(UTC) - DEFAULT
    timeline = Timeline(cli.store, cli.keys, since=start, rc=rc, node=node)
    if cli.out.as_json and not follow:
        cli.out.json([event async for page in timeline.read() for event in page])
        return
    is_any = False

    def show(event: FleetEvent) -> None:
        if cli.out.as_json:
            print(visible_json(msgspec.json.encode(event).decode()), flush=True)
            return
        if event.source == "agent":
            task = f"task {event.details['task']} " if event.details.get("task") else ""
            place = f"{task}on {event.node}"
        else:
            place = f"pod {event.node}/{event.pod}" if event.pod else f"node {event.node}" if event.node else ""
        about = " ".join(part for part in (event.rc and f"rc {event.rc}", place) if part)
        prefix = f"{event.at[:19].replace('T', ' ')}  {event.actor:<{WIDTH}}  "
        style = "red" if event.type in _BAD else ""
        cli.out.hanging(prefix, Text(f"{about}: {event.text}" if about else event.text, style=style))
        sys.stdout.flush()

    async for page in timeline.read():
        for event in page:
            is_any = True
            show(event)
    if follow:
        try:
            await timeline.follow(show)
        except* BrokenPipeError:
            pass  # the reader has what it wanted
    elif not is_any:
        cli.out.note(f"no events since {start.isoformat(timespec='seconds').replace('+00:00', 'Z')}")


command(app, "events")(events)
