"""Where commands read HiveD's state from: a running extender, or a file.

What decodes it takes 50 ms to import, so that is done when there is an answer: `rcfarm explain` also asks where no
extender runs.
"""

from __future__ import annotations

from base64 import b64encode
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import quote, unquote, urlsplit

import typer

from rcfarm.cli.kit.options import UsageProblem, read_file
from scheduler.hived.inspection import SNAPSHOT_PATH
from store.decoding import Undecodable, from_json, json_decoder
from store.http_client import ConnectionLost, HttpClient, NeverSent
from store.tls import TlsContexts

if TYPE_CHECKING:
    from scheduler.hived.inspection.snapshot import Snapshot

FETCH_TIMEOUT = 60.0  # seconds; the snapshot of 65,536 leaf cells is some 10 MB
DEFAULT_EXTENDER = "http://127.0.0.1:9096"

Extender = Annotated[
    str,
    typer.Option(
        "--extender",
        metavar="URL",
        envvar="RCFARM_EXTENDER",
        help="URL of `rcfarm extender`.",
    ),
]
SnapshotFile = Annotated[
    Path | None,
    typer.Option("--snapshot", metavar="FILE", help="Read a saved snapshot instead; - is standard input."),
]


async def load_snapshot(extender: str, file: Path | None) -> Snapshot:
    """Load the snapshot. Raises `UsageProblem` if the extender does not answer, or if the file can't be read or is not
    a snapshot."""
    text, source = (
        (await fetch(extender), f"--extender {extender}")
        if file is None
        else (read_file("--snapshot", file), f"--snapshot {file}")
    )
    from scheduler.hived.errors import UserError
    from scheduler.hived.inspection.snapshot import decode_snapshot

    try:
        return decode_snapshot(text)
    except UserError as error:
        raise UsageProblem(f"{source}: {error}") from error


async def fetch(extender: str) -> bytes:
    """Return the snapshot of a running extender, as it sends it. Raises `UsageProblem` if there is none."""
    try:
        url = urlsplit(extender.rstrip("/"))
        port = url.port or (443 if url.scheme == "https" else 80)
    except ValueError:  # the port
        url = urlsplit("")
    if url.scheme not in ("http", "https") or not url.hostname:
        raise UsageProblem(f"--extender {extender!r}: is not a URL; write it like {DEFAULT_EXTENDER}")
    headers = {}
    if url.username is not None:  # of a proxy before the extender
        given = f"{unquote(url.username)}:{unquote(url.password or '')}"
        headers["Authorization"] = f"Basic {b64encode(given.encode()).decode()}"
    client = HttpClient(host=url.hostname, port=port, headers=headers)
    tls = TlsContexts().context(None) if url.scheme == "https" else None
    try:
        response = await client.call("GET", quote(url.path, safe="/%") + SNAPSHOT_PATH, tls=tls, timeout=FETCH_TIMEOUT)
    except (TimeoutError, ConnectionLost, NeverSent) as error:
        raise UsageProblem(
            f"--extender {extender}: does not answer: {error or 'no answer in time'}; say where `rcfarm extender` "
            "runs, or give a saved --snapshot"
        ) from error
    finally:
        await client.close()
    body = response.body
    if response.status == HTTPStatus.OK:
        return body
    if response.status == HTTPStatus.NOT_FOUND:
        raise UsageProblem(
            f"--extender {extender}: has no {SNAPSHOT_PATH}; give the address that HiveD's file has as "
            "webServerAddress, HiveD's is :9096"
        )
    try:
        message = from_json(json_decoder(str), body)  # the extender's errors are JSON strings
    except Undecodable:
        message = body[:200].decode(errors="replace").strip()
    is_follower = response.status == HTTPStatus.SERVICE_UNAVAILABLE
    hint = "; of several under one --lease only the leader answers" if is_follower else ""
    raise UsageProblem(f"--extender {extender}: answers {response.status}: {message}{hint}")
