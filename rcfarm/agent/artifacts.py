"""Artifacts: fetched once per digest, verified while they stream, unpacked, and kept for every pod that names them.

The model: an artifact's directory is the name of its digest, and appears by one rename when all of it is good; whatever
is there is whole. Downloads of different digests run at once, those of one digest only once. What is begun lies in
`tmp/`, which is emptied at the start; a download that is cancelled or fails removes its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import shutil
import tempfile
import threading
import time
from collections.abc import AsyncGenerator, Callable, Collection
from pathlib import Path, PurePosixPath
from typing import BinaryIO
from urllib.parse import unquote, urlsplit

import aiohttp

from rcfarm.agent import archive
from rcfarm.agent.errors import BadArtifact, InstallFailed, describe_os_error
from store.manifest import Artifact

_CHUNK = 256 * 1024
_STALLED = 30.0  # seconds without a byte


class Artifacts:
    """The cache of one agent. `limit` in bytes, of a download and of what it unpacks to; `timeout` in seconds."""

    def __init__(self, root: Path, http: aiohttp.ClientSession, *, limit: int, timeout: float) -> None:
        self._root = root
        self._http = http
        self._limit = limit
        self._timeout = timeout
        self._fetching: dict[str, asyncio.Lock] = {}

    def path(self, sha256: str) -> Path:
        """Where the artifact is, or will be: a directory with the unpacked archive, or with the one file."""
        return self._root / sha256

    async def fetch(self, artifact: Artifact) -> Path:
        """Make sure that the artifact is here, and return its directory. Raises `BadArtifact`, `InstallFailed`."""
        path = self.path(artifact.sha256)
        lock = self._fetching.setdefault(artifact.sha256, asyncio.Lock())
        async with lock:
            if not path.exists():
                await self._install(artifact, path)
        os.utime(path)  # last use, for `prune`
        return path

    async def clean(self) -> None:
        """Remove what an agent that was killed had begun."""
        await asyncio.to_thread(shutil.rmtree, self._root / "tmp", ignore_errors=True)

    async def prune(self, used: Collection[str], *, keep: float) -> None:
        """Remove artifacts that are neither in `used` nor were used within the last `keep` seconds."""
        for entry in list(self._root.iterdir()):
            busy = (lock := self._fetching.get(entry.name)) and lock.locked()
            if entry.name in used or entry.name == "tmp" or busy or time.time() - entry.stat().st_mtime < keep:
                continue
            self._fetching.pop(entry.name, None)
            trash = Path(tempfile.mkdtemp(dir=self._temporary())) / entry.name
            os.rename(entry, trash)
            await asyncio.to_thread(shutil.rmtree, trash.parent, ignore_errors=True)

    async def _install(self, artifact: Artifact, path: Path) -> None:
        try:
            work = Path(tempfile.mkdtemp(dir=self._temporary(), prefix=artifact.sha256[:12] + "-"))
            try:
                await self._install_in(work, artifact, path)
            finally:
                shutil.rmtree(work, ignore_errors=True)
        except OSError as error:
            raise InstallFailed(f"artifact {_shown(artifact.url)}: {describe_os_error(error, self._root)}") from error
        except BadArtifact as error:
            raise BadArtifact(f"artifact {_shown(artifact.url)}: {error}") from error

    async def _install_in(self, work: Path, artifact: Artifact, path: Path) -> None:
        download, content = work / "download", work / "content"
        await self._download(artifact, download)
        content.mkdir(mode=0o755)
        await _in_thread(_unpack, download, content, artifact, self._limit)
        os.rename(content, path)

    async def _download(self, artifact: Artifact, target: Path) -> None:
        sink = _Sink(await asyncio.to_thread(open, target, "wb"), self._limit)
        with sink.file:
            async with contextlib.aclosing(self._stream(artifact.url)) as chunks:
                async for chunk in chunks:
                    await asyncio.to_thread(sink.write, chunk)
        found = sink.digest.hexdigest()
        if found != artifact.sha256:
            raise BadArtifact(f"its sha256 is {found}, not {artifact.sha256} as the manifest says")

    def _stream(self, url: str) -> AsyncGenerator[bytes, None]:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https"):
            return self._stream_http(url)
        if parts.scheme == "file" and parts.netloc in ("", "localhost"):
            return _stream_file(Path(unquote(parts.path)))
        raise InstallFailed(f"artifact {_shown(url)}: use a file:///, http:// or https:// URL")

    async def _stream_http(self, url: str) -> AsyncGenerator[bytes, None]:
        timeout = aiohttp.ClientTimeout(total=self._timeout, sock_connect=_STALLED, sock_read=_STALLED)
        try:
            async with self._http.get(url, timeout=timeout) as response:
                if response.status != 200:
                    raise InstallFailed(
                        f"artifact {_shown(url)}: the server answers {response.status} {response.reason}"
                    )
                async for chunk in response.content.iter_chunked(_CHUNK):
                    yield chunk
        except (aiohttp.ClientError, TimeoutError) as error:
            raise InstallFailed(f"artifact {_shown(url)}: {error or 'timed out'}") from error

    def _temporary(self) -> Path:
        directory = self._root / "tmp"
        directory.mkdir(mode=0o700, exist_ok=True)
        return directory


async def _stream_file(path: Path) -> AsyncGenerator[bytes, None]:
    with await asyncio.to_thread(open, path, "rb") as file:
        while chunk := await asyncio.to_thread(file.read, _CHUNK):
            yield chunk


class _Sink:
    """A download being written, hashed and counted. `write` runs in threads, one at a time."""

    def __init__(self, file: BinaryIO, limit: int) -> None:
        self.file = file
        self.digest = hashlib.sha256()
        self._room = limit
        self._limit = limit

    def write(self, chunk: bytes) -> None:
        self._room -= len(chunk)
        if self._room < 0:
            raise BadArtifact(f"it has more than {self._limit} bytes: see agent.artifact_limit")
        self.digest.update(chunk)
        self.file.write(chunk)


def _unpack(download: Path, content: Path, artifact: Artifact, limit: int, abandoned: threading.Event) -> None:
    if archive.is_archive(download):
        archive.unpack(download, content, limit=limit, abandoned=abandoned)
        return
    name = PurePosixPath(unquote(urlsplit(artifact.url).path)).name or "artifact"
    os.rename(download, content / name)
    os.chmod(content / name, 0o755)


async def _in_thread(work: Callable[..., None], *arguments: object) -> None:
    """Run `work(*arguments, abandoned)` in a thread; a cancellation sets `abandoned` and waits for the thread's end."""
    abandoned = threading.Event()
    task = asyncio.create_task(asyncio.to_thread(work, *arguments, abandoned))
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        abandoned.set()
        await asyncio.wait([task])
        task.exception()  # of no interest any more
        raise


def _shown(url: str) -> str:
    """The URL without what may be secret in it: user, password and query."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname or ''}{parts.path}"
