"""`rcfarm audit`: the audit log as a whole."""

from __future__ import annotations

import sys
from typing import Annotated

import msgspec
import typer

from rcfarm.cli.kit.command import Cli, command
from rcfarm.cli.kit.completion import complete_rc
from rcfarm.cli.kit.options import Since, Until, parse_time
from store.schema import audit

app = typer.Typer(rich_markup_mode=None)


@app.callback()
def _group() -> None:
    """The audit log: export."""


async def export(
    cli: Cli,
    since: Since = "",
    until: Until = "",
    rc: Annotated[
        str, typer.Option("--rc", metavar="RC", help="Only events of this RC.", autocompletion=complete_rc)
    ] = "",
) -> None:
    """Write the events to standard output, as JSON lines. The oldest comes first.

    The log is read page by page, so that one of any size can be exported.
    """
    start, end = parse_time("--since", since), parse_time("--until", until)
    async for page in audit.pages(cli.store, cli.keys, since=start, until=end, rc=rc or None):
        lines = [msgspec.json.encode({"key": key} | msgspec.to_builtins(event)) + b"\n" for key, event in page]
        sys.stdout.buffer.write(b"".join(lines))
    sys.stdout.buffer.flush()


command(app, "export")(export)
