"""Where commands get a scheduler's state from, and `rcfarm hived snapshot`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import aiohttp
import typer

from rcfarm.cli.arguments import read_file
from rcfarm.cli.errors import UsageProblem
from rcfarm.cli.local import LocalCli
from scheduler.hived.snapshot import PATH, Snapshot, decode_snapshot

FETCH_TIMEOUT = 60.0  # seconds; the snapshot of 65,536 leaf cells is some 10 MB

Extender = Annotated[
    str,
    typer.Option(
        "--extender",
        metavar="URL",
        envvar="RCFARM_EXTENDER",
        help="Where `rcfarm extender` answers.",
        show_default=True,
    ),
]
SnapshotFile = Annotated[
    Path | None,
    typer.Option("--snapshot", metavar="FILE", help="A saved snapshot instead; - is standard input."),
]

DEFAULT_EXTENDER = "http://127.0.0.1:9096"


async def snapshot(cli: LocalCli, extender: Extender = DEFAULT_EXTENDER) -> None:
    """Print the whole state of a running extender: configuration, healthy nodes, groups, waiting pods. `explain` and
    `simulate` read it with --snapshot."""
    sys.stdout.buffer.write(await _fetch(extender))
    sys.stdout.buffer.write(b"\n")


async def load_snapshot(extender: str, file: Path | None) -> Snapshot:
    """Raises `UsageProblem` for an extender that does not answer and a file that can't be read; `UserError` for what is
    not a snapshot.
    """
    return decode_snapshot(await _fetch(extender) if file is None else read_file("--snapshot", file))


async def _fetch(extender: str) -> bytes:
    timeout = aiohttp.ClientTimeout(total=FETCH_TIMEOUT)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(extender.rstrip("/") + PATH) as response,
        ):
            body = await response.read()
    except (TimeoutError, aiohttp.ClientError, ValueError) as error:
        raise UsageProblem(
            f"--extender {extender}: does not answer: {str(error) or type(error).__name__}; say where "
            "`rcfarm extender` runs, or give a saved --snapshot"
        ) from error
    if response.status != 200:
        raise UsageProblem(f"--extender {extender}: answers {response.status} {body[:200].decode(errors='replace')}")
    return body
