"""Artifacts: verified while they stream, there as a whole or not at all, fetched once."""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rcfarm.agent.errors import BadArtifact, InstallFailed
from rcfarm.agent.install import Artifacts, Downloads
from rcfarm.agent.state import TRASH, Trash
from store.schema.manifest import Artifact
from tests.support.agent.archives import Member, pack

LIMIT = 100_000
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@pytest.fixture
async def artifacts(tmp_path: Path) -> AsyncIterator[Artifacts]:
    (tmp_path / "cache").mkdir()
    async with aiohttp.ClientSession() as http:
        yield cache(tmp_path, http)


def cache(
    tmp_path: Path, http: aiohttp.ClientSession, *sources: str, timeout: float = 10, limit: int = LIMIT
) -> Artifacts:
    """Artifacts from `sources`, by default from everywhere."""
    root = tmp_path / "cache"
    downloads = Downloads(http, sources or ("http://", "file:///"), limit=limit, timeout=timeout)
    return Artifacts(root, downloads, Trash((root,)), limit=limit, timeout=timeout)


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    return pack(tmp_path / "archive.tar.gz", Member("bin/run", b"#!/bin/sh\n", mode=0o755), mode="w:gz")


def file_artifact(path: Path, sha256: str | None = None) -> Artifact:
    return Artifact(url=f"file://{path}", sha256=sha256 or hashlib.sha256(path.read_bytes()).hexdigest())


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[str]:
    """Yield the URL of a server, without a slash at its end."""
    app = web.Application()
    app.router.add_get("/{name:.*}", handler)
    async with TestServer(app) as server:
        yield f"http://127.0.0.1:{server.port}"


def content(tmp_path: Path) -> list[str]:
    """Return the paths in the cache, with unfinished downloads, but without the trash."""
    found = (path for path in (tmp_path / "cache").rglob("*") if TRASH not in path.parts)
    return sorted(path.name for path in found if path.name != "tmp")


async def test_a_file_archive_is_unpacked_once(artifacts: Artifacts, archive: Path) -> None:
    """The second fetch answers from the cache, also when the source is gone."""
    artifact = file_artifact(archive)
    path = await artifacts.fetch(artifact)
    assert (path / "bin/run").read_bytes() == b"#!/bin/sh\n"
    archive.unlink()
    assert await artifacts.fetch(artifact) == path


async def test_a_single_file_is_kept_under_its_name(artifacts: Artifacts, tmp_path: Path) -> None:
    """A file that is not an archive is a program: executable, under the last part of its URL."""
    (tmp_path / "tool").write_bytes(b"#!/bin/sh\n")
    path = await artifacts.fetch(file_artifact(tmp_path / "tool"))
    assert os.access(path / "tool", os.X_OK)


async def test_an_archive_over_http_is_fetched_once_for_all(artifacts: Artifacts, archive: Path) -> None:
    """Pods that want the same artifact at the same time share one download."""
    requests = []

    async def handler(request: web.Request) -> web.StreamResponse:
        requests.append(request.path)
        return web.FileResponse(archive)

    async with serving(handler) as url:
        artifact = Artifact(url=f"{url}/a.tar.gz", sha256=file_artifact(archive).sha256)
        paths = await asyncio.gather(*(artifacts.fetch(artifact) for _ in range(5)))
    assert len(set(paths)) == 1
    assert requests == ["/a.tar.gz"]


async def test_a_wrong_digest_is_a_clear_failure(artifacts: Artifacts, archive: Path, tmp_path: Path) -> None:
    """The downloaded digest is not shown (the file may be secret), and the next attempt starts from scratch."""
    with pytest.raises(BadArtifact, match="its sha256 is not the one that the manifest names") as failed:
        await artifacts.fetch(file_artifact(archive, "0" * 64))
    assert file_artifact(archive).sha256 not in str(failed.value)
    assert content(tmp_path) == []
    await artifacts.fetch(file_artifact(archive))


async def test_a_download_is_stopped_at_the_limit(artifacts: Artifacts, tmp_path: Path) -> None:
    """A server that never stops sending is cut off at the limit, not at the end of the disk."""

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(bytes(50_000))

    async with serving(handler) as url:
        assert f"more than {LIMIT} bytes" in await failure(artifacts, f"{url}/endless")
    assert content(tmp_path) == []


async def test_an_unsafe_archive_leaves_nothing(artifacts: Artifacts, tmp_path: Path) -> None:
    """A bad member is named with its artifact; members unpacked before it are removed."""
    bad = pack(tmp_path / "bad.tar", Member("fine", b"x"), Member("../evil", b"x"))
    with pytest.raises(BadArtifact, match=r"artifact file://.*bad\.tar: member '../evil'"):
        await artifacts.fetch(file_artifact(bad))
    assert content(tmp_path) == []
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("file:///nowhere/a.tar", "/nowhere/a.tar: No such file"),
        ("ftp://host/a.tar", "use an https://, http:// or file:/// URL"),
        ("http://user:secret@127.0.0.1:1/a?key=secret", "artifact http://127.0.0.1/a: "),
    ],
)
async def test_what_can_not_be_fetched_is_named_without_its_secrets(
    artifacts: Artifacts, url: str, message: str
) -> None:
    """The URL is in the message; the user, password and query in it are not."""
    found = await failure(artifacts, url)
    assert message in found
    assert "secret" not in found


async def test_a_servers_refusal_is_named(artifacts: Artifacts) -> None:
    """An HTTP status other than 200 is the reason."""

    async def handler(request: web.Request) -> web.StreamResponse:
        raise web.HTTPNotFound

    async with serving(handler) as url:
        assert "the server answers 404 Not Found" in await failure(artifacts, f"{url}/a")


async def test_a_cancelled_download_leaves_nothing(artifacts: Artifacts, tmp_path: Path) -> None:
    """Cancelling ends the connection and removes the unfinished download; a later fetch works."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/a"
        fetching = asyncio.create_task(artifacts.fetch(Artifact(url=url, sha256="0" * 64)))
        silent.setblocking(False)
        await asyncio.get_running_loop().sock_accept(silent)
        assert content(tmp_path) != []
        fetching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetching
    assert content(tmp_path) == []


async def test_what_is_used_is_kept(artifacts: Artifacts, archive: Path, tmp_path: Path) -> None:
    """Pruning removes only artifacts that no pod has used for the time to keep."""
    used, unused = file_artifact(archive), file_artifact(pack(tmp_path / "b.tar", Member("b", b"b")))
    for artifact in (used, unused):
        await artifacts.fetch(artifact)
    artifacts.prune({used.sha256}, keep=3600)
    assert artifacts.path(unused.sha256).exists()
    artifacts.prune({used.sha256}, keep=0)
    assert artifacts.path(used.sha256).exists()
    assert not artifacts.path(unused.sha256).exists()


async def test_unfinished_downloads_of_a_killed_agent_are_removed(artifacts: Artifacts, tmp_path: Path) -> None:
    """Half-finished downloads do not stay for ever."""
    (tmp_path / "cache/tmp/half").mkdir(parents=True)
    (tmp_path / "cache/tmp/half/download").write_bytes(b"x")
    artifacts.clean()
    assert content(tmp_path) == []


async def failure(artifacts: Artifacts, url: str) -> str:
    """Return the reason for which nothing can be fetched from the URL."""
    with pytest.raises(InstallFailed) as failed:
        await artifacts.fetch(Artifact(url=url, sha256="0" * 64))
    return str(failed.value)


async def test_errors_of_servers_and_redirections_quote_no_secrets(
    artifacts: Artifacts, archive: Path, tmp_path: Path
) -> None:
    """Redirections in a circle, to a broken URL, to a file and to another scheme, a connection that breaks off: each
    has its reason, and none quotes the signature of a URL."""

    async def handler(request: web.Request) -> web.StreamResponse:
        where = {
            "loop": "/loop?X-Amz-Signature=SECRET",
            "broken": "http://[x?X-Amz-Signature=SECRET",
            "file": f"file://{archive}?SECRET",
            "ftp": "ftp://inner/SECRET",
        }.get(request.path[1:])
        if where is not None:
            return web.Response(status=302, headers={"Location": where})
        response = web.StreamResponse(headers={"Content-Length": "100"})
        await response.prepare(request)
        await response.write(b"x")
        assert request.transport is not None
        request.transport.close()
        return response

    expected = {
        "loop": "the server redirects more than 10 times",
        "broken": "the server redirects to an invalid URL",
        "file": "the server redirects to a source that is not allowed",
        "ftp": "the server redirects to a source that is not allowed",
        "short": "the connection broke off",
    }
    async with serving(handler) as url:
        for path, reason in expected.items():
            message = await failure(artifacts, f"{url}/{path}?X-Amz-Signature=SECRET")
            assert reason in message
            assert "SECRET" not in message
    assert content(tmp_path) == []


async def test_a_dripping_server_is_given_up_with_a_reason(tmp_path: Path, archive: Path) -> None:
    """A server that sends a byte now and then is cut off after the time for a download, and the setting is named."""

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"x")
            await asyncio.sleep(0.05)

    (tmp_path / "cache").mkdir()
    async with aiohttp.ClientSession() as http, serving(handler) as url:
        message = await failure(cache(tmp_path, http, timeout=0.5), f"{url}/drip")
    assert message.endswith("/drip: not downloaded within 0.5 s: see agent.artifact_timeout")


async def test_only_allowed_sources_are_asked(tmp_path: Path, archive: Path) -> None:
    """Scheme, host, port and directories count, for redirections as well; URLs with merely the same beginning are
    refused."""
    asked = []

    async def handler(request: web.Request) -> web.StreamResponse:
        asked.append(request.path)
        if request.path == "/good/away":
            return web.Response(status=307, headers={"Location": "/secret"})
        return web.FileResponse(archive)

    (tmp_path / "cache").mkdir()
    async with aiohttp.ClientSession() as http, serving(handler) as base:
        port = base.rpartition(":")[2]
        artifacts = cache(tmp_path, http, f"{base}/good/")
        for url in (
            f"{base}/goodness/a",
            f"{base}/good/../a",
            f"{base}/good/%2e%2e/a",
            f"http://localhost:{port}/good/a",
            f"http://127.0.0.1:{port}@localhost/good/a",
            f"https://127.0.0.1:{port}/good/a",
            f"file://{archive}",
        ):
            assert f"agent.artifact_sources allows {base}/good/" in await failure(artifacts, url)
        assert asked == []
        assert "redirects to a source that is not allowed" in await failure(artifacts, f"{base}/good/away")
        assert asked == ["/good/away"]
        await artifacts.fetch(Artifact(url=f"{base}/good/a.tar.gz", sha256=file_artifact(archive).sha256))
