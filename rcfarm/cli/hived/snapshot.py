"""Load an extender's state for a command; `rcfarm hived snapshot`."""

from __future__ import annotations

import sys
from http import HTTPStatus
from pathlib import Path
from typing import Annotated

import aiohttp
import typer

from rcfarm.cli.kit.command import LocalCli
from rcfarm.cli.kit.errors import UsageProblem
from rcfarm.cli.kit.options import read_file
from scheduler.hived.errors import UserError
from scheduler.hived.inspection.snapshot import PATH, Snapshot, decode_snapshot
from store.decoding import Undecodable, from_json, json_decoder
from store.http import cause_of

FETCH_TIMEOUT = 60.0  # seconds; the snapshot of 65,536 leaf cells is some 10 MB

Extender = Annotated[
    str,
    typer.Option(
        "--extender",
        metavar="URL",
        envvar="RCFARM_EXTENDER",
        help="URL of `rcfarm extender`.",
        show_default=True,
    ),
]
SnapshotFile = Annotated[
    Path | None,
    typer.Option("--snapshot", metavar="FILE", help="Read a saved snapshot instead; - is standard input."),
]

DEFAULT_EXTENDER = "http://127.0.0.1:9096"


async def snapshot(cli: LocalCli, extender: Extender = DEFAULT_EXTENDER) -> None:
    """Print the whole state of a running extender as JSON. It has the configuration, healthy nodes, groups and waiting
    pods. `explain` and `simulate` read it with --snapshot.
    """
    sys.stdout.buffer.write(await _fetch(extender))
    sys.stdout.buffer.write(b"\n")


async def load_snapshot(extender: str, file: Path | None) -> Snapshot:
    """Load the snapshot. Raises `UsageProblem` if the extender does not answer, or if the file can't be read or is not
    a snapshot."""
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
        message = from_json(json_decoder(str), body)  # the extender's errors are JSON strings
    except Undecodable:
        message = body[:200].decode(errors="replace").strip()
    hint = "; of several under one --lease only the leader answers" if status == HTTPStatus.SERVICE_UNAVAILABLE else ""
    return f"answers {status}: {message}{hint}"
