"""Where commands get a scheduler's state from, and `rcfarm hived snapshot`."""

from __future__ import annotations

import sys
from http import HTTPStatus
from pathlib import Path
from typing import Annotated

import aiohttp
import msgspec
import typer

from rcfarm.cli.arguments import read_file
from rcfarm.cli.errors import UsageProblem
from rcfarm.cli.local import LocalCli
from scheduler.hived.errors import UserError
from scheduler.hived.snapshot import PATH, Snapshot, decode_snapshot
from store.http import cause_of

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
    """Print the whole state of a running extender as JSON. Configuration, healthy nodes, groups and waiting pods:
    `explain` and `simulate` read it with --snapshot."""
    sys.stdout.buffer.write(await _fetch(extender))
    sys.stdout.buffer.write(b"\n")


async def load_snapshot(extender: str, file: Path | None) -> Snapshot:
    """Raises `UsageProblem` for an extender that does not answer, and for a file that can't be read or is none."""
    text, source = (
        (await _fetch(extender), f"--extender {extender}")
        if file is None
        else (read_file("--snapshot", file), f"--snapshot {file}")
    )
    try:
        return decode_snapshot(text)
    except UserError as error:
        raise UsageProblem(f"{source}: {error}") from error


async def _fetch(extender: str) -> bytes:
    if not extender.startswith(("http://", "https://")):
        raise UsageProblem(f"--extender {extender!r}: is not a URL; write it like {DEFAULT_EXTENDER}")
    timeout = aiohttp.ClientTimeout(total=FETCH_TIMEOUT)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(extender.rstrip("/") + PATH) as response,
        ):
            body = await response.read()
    except (TimeoutError, aiohttp.ClientError, ValueError) as error:
        raise UsageProblem(
            f"--extender {extender}: does not answer: {cause_of(error)}; say where `rcfarm extender` runs, "
            "or give a saved --snapshot"
        ) from error
    if response.status != 200:
        raise UsageProblem(f"--extender {extender}: {_refusal(response.status, body)}")
    return body


def _refusal(status: int, body: bytes) -> str:
    if status == HTTPStatus.NOT_FOUND:
        return f"has no {PATH}; give the address that HiveD's file has as webServerAddress, HiveD's is :9096"
    try:
        told = msgspec.json.decode(body, type=str)  # as the extender words its errors
    except msgspec.MsgspecError:
        told = body[:200].decode(errors="replace").strip()
    hint = "; of several under one --lease only the leader can tell" if status == HTTPStatus.SERVICE_UNAVAILABLE else ""
    return f"answers {status}: {told}{hint}"
