"""Artifacts: verified while they stream, there as a whole or not at all, fetched once."""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rcfarm.agent.artifacts import Artifacts
from rcfarm.agent.errors import BadArtifact, InstallFailed
from store.manifest import Artifact
from tests.support.archives import Member, pack

LIMIT = 100_000
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@pytest.fixture
async def artifacts(tmp_path: Path) -> AsyncIterator[Artifacts]:
    (tmp_path / "cache").mkdir()
    async with aiohttp.ClientSession() as http:
        yield Artifacts(tmp_path / "cache", http, limit=LIMIT, timeout=10)


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    return pack(tmp_path / "archive.tar.gz", Member("bin/run", b"#!/bin/sh\n", mode=0o755), mode="w:gz")


def file_artifact(path: Path, sha256: str | None = None) -> Artifact:
    return Artifact(url=f"file://{path}", sha256=sha256 or hashlib.sha256(path.read_bytes()).hexdigest())


async def serve(handler: Handler) -> TestServer:
    app = web.Application()
    app.router.add_get("/{name:.*}", handler)
    server = TestServer(app)
    await server.start_server()
    return server


def content(tmp_path: Path) -> list[str]:
    """What is in the cache, begun downloads included."""
    return sorted(path.name for path in (tmp_path / "cache").rglob("*") if path.name != "tmp")


async def test_a_file_archive_is_unpacked_once(artifacts: Artifacts, archive: Path) -> None:
    """The second fetch answers from the cache, also when the source is gone."""
    artifact = file_artifact(archive)
    path = await artifacts.fetch(artifact)
    assert (path / "bin/run").read_bytes() == b"#!/bin/sh\n"
    archive.unlink()
    assert await artifacts.fetch(artifact) == path


async def test_a_single_file_is_kept_under_its_name(artifacts: Artifacts, tmp_path: Path) -> None:
    """What is not an archive is a program: executable, under the last part of its URL."""
    (tmp_path / "tool").write_bytes(b"#!/bin/sh\n")
    path = await artifacts.fetch(file_artifact(tmp_path / "tool"))
    assert os.access(path / "tool", os.X_OK)


async def test_an_archive_over_http_is_fetched_once_for_all(artifacts: Artifacts, archive: Path) -> None:
    """Pods that want the same artifact at the same time share one download."""
    requests = []

    async def handler(request: web.Request) -> web.StreamResponse:
        requests.append(request.path)
        return web.FileResponse(archive)

    server = await serve(handler)
    artifact = Artifact(url=str(server.make_url("/a.tar.gz")), sha256=file_artifact(archive).sha256)
    paths = await asyncio.gather(*(artifacts.fetch(artifact) for _ in range(5)))
    await server.close()
    assert len(set(paths)) == 1
    assert requests == ["/a.tar.gz"]


async def test_a_wrong_digest_is_a_clear_failure(artifacts: Artifacts, archive: Path, tmp_path: Path) -> None:
    """Both digests are named, nothing of the artifact stays, and the next attempt starts afresh."""
    with pytest.raises(BadArtifact, match=f"its sha256 is {file_artifact(archive).sha256}, not {'0' * 64}"):
        await artifacts.fetch(file_artifact(archive, "0" * 64))
    assert content(tmp_path) == []
    await artifacts.fetch(file_artifact(archive))


async def test_a_download_is_stopped_at_the_limit(artifacts: Artifacts, tmp_path: Path) -> None:
    """A server that never stops sending is cut off at the limit, not at the end of the disk."""
    sent = 0

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(bytes(50_000))
            sent += 50_000

    server = await serve(handler)
    with pytest.raises(BadArtifact, match=f"more than {LIMIT} bytes"):
        await artifacts.fetch(Artifact(url=str(server.make_url("/endless")), sha256="0" * 64))
    await server.close()
    assert content(tmp_path) == []


async def test_an_unsafe_archive_leaves_nothing(artifacts: Artifacts, tmp_path: Path) -> None:
    """A bad member is named with its artifact; what was unpacked before it is removed."""
    bad = pack(tmp_path / "bad.tar", Member("fine", b"x"), Member("../evil", b"x"))
    with pytest.raises(BadArtifact, match=r"artifact file://.*bad\.tar: member '../evil'"):
        await artifacts.fetch(file_artifact(bad))
    assert content(tmp_path) == []
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("file:///nowhere/a.tar", "/nowhere/a.tar: No such file"),
        ("ftp://host/a.tar", "use a file:///, http:// or https:// URL"),
        ("http://user:secret@127.0.0.1:1/a?key=secret", r"artifact http://127.0.0.1/a: "),
    ],
)
async def test_what_can_not_be_fetched_is_named_without_its_secrets(
    artifacts: Artifacts, url: str, message: str
) -> None:
    """The URL is in the message; the user, password and query in it are not."""
    with pytest.raises(InstallFailed, match=message) as failed:
        await artifacts.fetch(Artifact(url=url, sha256="0" * 64))
    assert "secret" not in str(failed.value)


async def test_a_servers_refusal_is_named(artifacts: Artifacts) -> None:
    """An HTTP status other than 200 is the reason."""

    async def handler(request: web.Request) -> web.StreamResponse:
        raise web.HTTPNotFound

    server = await serve(handler)
    with pytest.raises(InstallFailed, match="the server answers 404 Not Found"):
        await artifacts.fetch(Artifact(url=str(server.make_url("/a")), sha256="0" * 64))
    await server.close()


async def test_a_cancelled_download_leaves_nothing(artifacts: Artifacts, tmp_path: Path) -> None:
    """Cancelling ends the connection and removes what was begun; a later fetch is not in the way."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/a"
        fetching = asyncio.create_task(artifacts.fetch(Artifact(url=url, sha256="0" * 64)))
        await asyncio.get_running_loop().sock_accept(_nonblocking(silent))
        assert content(tmp_path) != []
        fetching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetching
    assert content(tmp_path) == []


async def test_what_is_used_is_kept(artifacts: Artifacts, archive: Path, tmp_path: Path) -> None:
    """Pruning removes what no pod uses once its time is over, and nothing else."""
    used, unused = file_artifact(archive), file_artifact(pack(tmp_path / "b.tar", Member("b", b"b")))
    for artifact in (used, unused):
        await artifacts.fetch(artifact)
    await artifacts.prune({used.sha256}, keep=3600)
    assert artifacts.path(unused.sha256).exists()
    await artifacts.prune({used.sha256}, keep=0)
    assert artifacts.path(used.sha256).exists()
    assert not artifacts.path(unused.sha256).exists()


async def test_what_a_killed_agent_had_begun_is_removed(artifacts: Artifacts, tmp_path: Path) -> None:
    """Half-finished downloads do not stay for ever."""
    (tmp_path / "cache/tmp/half").mkdir(parents=True)
    (tmp_path / "cache/tmp/half/download").write_bytes(b"x")
    await artifacts.clean()
    assert content(tmp_path) == []


def _nonblocking(server: socket.socket) -> socket.socket:
    server.setblocking(False)
    return server
