"""Install what a pod needs before it can start: its manifest and its artifacts, verified, on this machine's disk.

The model: an artifact's directory is the name of its digest, and appears by one rename when it is complete and
verified, so every directory present is whole, and serves every pod that names it. Downloads of different digests run
concurrently; one digest is downloaded only once. Unfinished downloads lie in `tmp/`, which goes into the trash at the
start, as does a download that is cancelled or fails.

`agent.artifact_sources` names the allowed sources; each redirection is checked against it as well. Remote data (error
texts, digests of downloads, URLs with signatures in their queries) is never shown: this machine may reach more than the
authors of manifests are allowed to see.

Files of unknown origin are read only by child processes (`rcfarm.agent.unpack`), which can be limited and killed; a few
run at once. A child that does not end after SIGKILL, because it hangs in a file system, is abandoned: neither the
agent's work nor its stop waits for it.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from http.client import responses
from pathlib import Path, PurePosixPath
from typing import NamedTuple
from urllib.parse import SplitResult, unquote, urljoin, urlsplit

import aiohttp

from rcfarm.agent.errors import BadArtifact, InstallFailed, describe_os_error
from rcfarm.agent.process import ExitStatus, LaunchSpec, spawn
from rcfarm.agent.state import TRASH, StateDir, Trash, report_left
from rcfarm.agent.unpack import BAD, MEMORY, NOT_AN_ARCHIVE, REFUSED
from store.kv.protocol import Store
from store.schema.keys import Keys
from store.schema.manifest import Artifact, BadManifest, Manifest, digest, parse, problem_of_url

_UNPACKING = 8  # children that unpack at once
_CHUNK = 256 * 1024
_STALLED = 30.0  # seconds without a byte
_HOPS = 10
_REDIRECTS = {301, 302, 303, 307, 308}
_PORTS = {"http": 80, "https": 443}
_REPORT = 4096  # bytes that are read of a child's report
_LAST_WAIT = 2.0  # seconds that a killed child gets to end


class Installed(NamedTuple):
    """A manifest that can be started. `artifacts`: a directory per launchable that has one."""

    manifest_id: str
    manifest: Manifest
    artifacts: dict[str, Path]


class Installer:
    """Brings manifests and artifacts to this machine."""

    def __init__(self, store: Store, keys: Keys, state: StateDir, artifacts: Artifacts) -> None:
        self._store, self._keys = store, keys
        self._state = state
        self._artifacts = artifacts

    async def install(self, manifest_id: str) -> Installed:
        """Fetch the manifest and its artifacts, unless they are installed.

        Raises `InstallFailed`, and the store's errors when the manifest has to be read there.
        """
        found = self.find(manifest_id)
        if found is None:
            name = f"manifest {manifest_id[:12]}"
            entry = await self._store.get(self._keys.manifest(manifest_id))
            if entry is None:
                raise InstallFailed(f"{name} is not in the store: apply the RC again")
            if digest(entry.value) != manifest_id:
                raise InstallFailed(
                    f"{name} is damaged in the store: its bytes have another digest; apply the RC again"
                )
            try:
                manifest = parse(entry.value)
            except BadManifest as error:
                raise InstallFailed(f"{name}: {error}") from error
            try:
                self._state.save_manifest(manifest_id, entry.value)
            except OSError as error:
                raise InstallFailed(f"{name}: {describe_os_error(error, self._state.manifests)}") from error
            found = self._installed(manifest_id, manifest)
        for launchable in found.manifest.launchables.values():
            if launchable.artifact is not None:
                await self._artifacts.fetch(launchable.artifact)
        return found

    def find(self, manifest_id: str) -> Installed | None:
        """Return the manifest as an earlier call, or an earlier agent, installed it, or None."""
        raw = self._state.load_manifest(manifest_id)
        if raw is None or digest(raw) != manifest_id:
            return None
        try:
            return self._installed(manifest_id, parse(raw))
        except BadManifest:  # written by an agent with other rules
            return None

    def prune(self, used: Collection[str], *, keep: float) -> None:
        """Remove the manifests that are not in `used`, and artifacts that only they name, after `keep` seconds.

        Raises `OSError`.
        """
        artifacts: set[str] = set()
        for path in list(self._state.manifests.iterdir()):
            if path.name not in used:
                path.unlink()
            elif (found := self.find(path.name)) is not None:
                artifacts |= {directory.name for directory in found.artifacts.values()}
        self._artifacts.prune(artifacts, keep=keep)

    def _installed(self, manifest_id: str, manifest: Manifest) -> Installed:
        artifacts = {
            name: self._artifacts.path(launchable.artifact.sha256)
            for name, launchable in manifest.launchables.items()
            if launchable.artifact is not None
        }
        return Installed(manifest_id, manifest, artifacts)


class Artifacts:
    """The cache of one agent. `limit`: bytes that an artifact may unpack to; `timeout`: seconds that this may take."""

    def __init__(self, root: Path, downloads: Downloads, trash: Trash, *, limit: int, timeout: float) -> None:
        self._root = root
        self._downloads = downloads
        self._trash = trash
        self._limit = limit
        self._timeout = timeout
        self._fetching: dict[str, asyncio.Lock] = {}
        self._unpacking = asyncio.Semaphore(_UNPACKING)

    def path(self, sha256: str) -> Path:
        """Return the artifact's directory, which need not exist yet: it holds the unpacked archive, or the one file."""
        return self._root / sha256

    async def fetch(self, artifact: Artifact) -> Path:
        """Fetch the artifact unless it is cached. Return its directory. Raises `BadArtifact`, `InstallFailed`."""
        path = self.path(artifact.sha256)
        lock = self._fetching.setdefault(artifact.sha256, asyncio.Lock())
        async with lock:
            if not path.exists():
                try:
                    temporary = self._root / "tmp"
                    temporary.mkdir(mode=0o700, exist_ok=True)
                    work = Path(tempfile.mkdtemp(dir=temporary, prefix=artifact.sha256[:12] + "-"))
                    try:
                        await self._install_in(work, artifact, path)
                    finally:
                        self._discard(work)
                except OSError as error:
                    raise InstallFailed(
                        f"artifact {shown(artifact.url)}: {describe_os_error(error, self._root)}"
                    ) from error
                except BadArtifact as error:
                    raise BadArtifact(f"artifact {shown(artifact.url)}: {error}") from error
                except InstallFailed as error:
                    raise InstallFailed(f"artifact {shown(artifact.url)}: {error}") from error
        os.utime(path)  # last use, for `prune`
        return path

    def clean(self) -> None:
        """Remove the unfinished downloads of an agent that was killed."""
        self._discard(self._root / "tmp")

    def prune(self, used: Collection[str], *, keep: float) -> None:
        """Remove artifacts that are not in `used` and were not used for `keep` seconds. Raises `OSError`."""
        for entry in list(self._root.iterdir()):
            busy = (lock := self._fetching.get(entry.name)) and lock.locked()
            if entry.name in used or entry.name in ("tmp", TRASH) or busy or time.time() - entry.stat().st_mtime < keep:
                continue
            self._fetching.pop(entry.name, None)
            self._trash.put(entry)

    def _discard(self, path: Path) -> None:
        try:
            self._trash.put(path)
        except OSError as error:
            report_left(path, error)

    async def _install_in(self, work: Path, artifact: Artifact, path: Path) -> None:
        download, content, report = work / "download", work / "content", work / "report"
        if await self._downloads.fetch(artifact.url, download) != artifact.sha256:
            raise BadArtifact("its sha256 is not the one that the manifest names: it is another version, or damaged")
        report.unlink(missing_ok=True)
        content.mkdir(mode=0o700)
        async with self._unpacking:
            code, _ = await _in_child(
                "unpack",
                [download, content],
                report,
                limit=self._limit,
                cpu=self._timeout,
                timeout=3 * self._timeout,
                at="agent.unpack_timeout",
            )
        if code == NOT_AN_ARCHIVE:
            name = PurePosixPath(unquote(urlsplit(artifact.url).path)).name
            program = content / (name if name not in ("", "..") else "artifact")
            os.rename(download, program)
            os.chmod(program, 0o755)
        os.chmod(content, 0o755)
        os.rename(content, path)


class Downloads:
    """Downloads of one agent. `sources`: prefixes of allowed URLs; `limit` in bytes; `timeout` in seconds."""

    def __init__(self, http: aiohttp.ClientSession, sources: Sequence[str], *, limit: int, timeout: float) -> None:
        self._http = http
        self._sources = sources
        self._limit = limit
        self._timeout = timeout
        self._disk = ThreadPoolExecutor(4, "downloads")

    def close(self) -> None:
        """Shut down the threads."""
        self._disk.shutdown(wait=False, cancel_futures=True)

    async def fetch(self, url: str, target: Path) -> str:
        """Fetch `url` into the file `target`. Return its sha256. Raises `InstallFailed`, `OSError`."""
        parts = self._allowed(url)
        if parts.scheme == "file":
            places = [unquote(urlsplit(source).path) for source in self._sources if source.startswith("file:")]
            _, digest = await _in_child(
                "copy",
                [unquote(parts.path), target, *places],
                target.with_name("report"),
                limit=self._limit,
                cpu=self._timeout,
                timeout=self._timeout,
                at="agent.artifact_timeout",
            )
            return digest
        try:
            async with asyncio.timeout(self._timeout):
                return await self._fetch_http(url, target)
        except TimeoutError:
            raise InstallFailed(f"not downloaded within {self._timeout:g} s: see agent.artifact_timeout") from None

    def _allowed(self, url: str) -> SplitResult:
        if problem := problem_of_url(url):
            raise InstallFailed(problem)
        parts = urlsplit(url)
        if not any(is_below(parts, urlsplit(source)) for source in self._sources):
            allowed = ", ".join(self._sources) or "nothing"
            raise InstallFailed(f"this node does not allow that source: agent.artifact_sources allows {allowed}")
        return parts

    async def _fetch_http(self, url: str, target: Path) -> str:
        try:
            async with self._opened(url) as response:
                if response.status != 200:
                    phrase = responses.get(response.status, "")
                    raise InstallFailed(f"the server answers {response.status} {phrase}".rstrip())
                loop, digest, size = asyncio.get_running_loop(), hashlib.sha256(), 0
                with await loop.run_in_executor(self._disk, open, target, "wb") as file:

                    def write(chunk: bytes) -> None:
                        digest.update(chunk)
                        file.write(chunk)

                    async for chunk in response.content.iter_chunked(_CHUNK):
                        size += len(chunk)
                        if size > self._limit:
                            raise BadArtifact(f"it has more than {self._limit} bytes: see agent.artifact_limit")
                        await loop.run_in_executor(self._disk, write, chunk)
                return digest.hexdigest()
        except (aiohttp.ClientError, ValueError) as error:
            raise InstallFailed(_explained(error)) from error

    @asynccontextmanager
    async def _opened(self, url: str) -> AsyncIterator[aiohttp.ClientResponse]:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_STALLED, sock_read=_STALLED)
        for _ in range(_HOPS):
            async with self._http.get(url, timeout=timeout, allow_redirects=False) as response:
                where = response.headers.get("Location")
                if response.status not in _REDIRECTS or where is None:
                    yield response
                    return
            try:
                url = urljoin(url, where)
            except ValueError as error:
                raise InstallFailed("the server redirects to an invalid URL") from error
            try:
                if self._allowed(url).scheme == "file":
                    raise InstallFailed("to a file of this machine")
            except InstallFailed as error:
                raise InstallFailed(f"the server redirects to a source that is not allowed: {error}") from error
        raise InstallFailed(f"the server redirects more than {_HOPS} times")


def is_below(url: SplitResult, source: SplitResult) -> bool:
    """Return whether a URL has the scheme, host and port of an allowed prefix, and is at or below its path."""
    if url.scheme != source.scheme or ".." in unquote(url.path).split("/"):
        return False
    usual = _PORTS.get(url.scheme)
    if source.hostname and (url.hostname, url.port or usual) != (source.hostname, source.port or usual):
        return False
    prefix, path = (unquote(parts.path).rstrip("/") for parts in (source, url))
    return path == prefix or path.startswith(prefix + "/")


def shown(url: str) -> str:
    """Return the URL without the parts that may be secret: user, password, query and fragment."""
    try:
        parts = urlsplit(url)
        return f"{parts.scheme}://{parts.hostname or ''}{parts.path}"
    except ValueError:
        return "URL"


def _explained(error: Exception) -> str:
    """Return a description of a connection error. The library's own messages quote the URL."""
    if isinstance(error, TimeoutError):
        return f"no data received for {_STALLED:g} s"
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return "the server's certificate is not accepted: add its authority to this machine's, or use the right name"
    if isinstance(error, aiohttp.ClientSSLError):
        return "TLS handshake failed: is it an http:// server?"
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"can't connect: {error.strerror or 'the name is not known'}"
    if isinstance(error, aiohttp.ClientPayloadError | aiohttp.ServerDisconnectedError | aiohttp.ClientOSError):
        return "the connection broke off"
    if isinstance(error, aiohttp.InvalidURL) or not isinstance(error, aiohttp.ClientError):
        return "the URL can't be used"
    return "the server's answer is not valid HTTP"


async def _in_child(
    verb: str, arguments: Sequence[Path | str], report: Path, *, limit: int, cpu: float, timeout: float, at: str
) -> tuple[int, str]:
    """Run a verb of `rcfarm.agent.unpack`. Return its exit code, 0 or `NOT_AN_ARCHIVE`, and its report.

    `cpu`: seconds of processor time that it may take. `timeout`: seconds that it may last, as the setting `at` says.
    Raises `InstallFailed`, `BadArtifact`, and `OSError` when the disk refuses.
    """
    words = [verb, str(limit), str(max(1, round(cpu))), *map(str, arguments)]
    argv = [sys.executable, "-I", "-m", "rcfarm.agent.unpack", *words]
    child = spawn(LaunchSpec(argv, {"PATH": os.defpath}, report.parent, report)).open()
    try:
        async with asyncio.timeout(timeout):
            await child.wait()
        status = child.reap()
    except TimeoutError:
        raise InstallFailed(f"not finished within {timeout:g} s: see {at}") from None
    finally:
        child.signal_tree(signal.SIGKILL)
        try:
            async with asyncio.timeout(_LAST_WAIT):
                await child.wait()
        except TimeoutError:
            child.release()
        else:
            child.reap()
    return _result(status, report, limit, cpu)


def _result(status: ExitStatus, file: Path, limit: int, timeout: float) -> tuple[int, str]:
    """Return the exit code and the report of a child, or raise the error for how it ended."""
    with open(file, "rb") as opened:
        text = opened.read(_REPORT).decode(errors="replace").strip()
    report = "".join(character if character.isprintable() or character == "\n" else "?" for character in text)
    if status.code in (0, NOT_AN_ARCHIVE):
        return status.code, report
    if status.code == BAD:
        raise BadArtifact(report or "it can't be unpacked; there is no room on the disk to say why")
    if status.code is not None and status.code >= REFUSED and (number := status.code - REFUSED) in errno.errorcode:
        if number == errno.EFBIG:
            raise BadArtifact(f"it unpacks to more than {limit} bytes: see agent.artifact_limit")
        raise OSError(number, os.strerror(number), report or None)
    if status.signal == "SIGXCPU":
        raise BadArtifact(f"unpacking it takes more than {timeout:g} s of processor time: see agent.unpack_timeout")
    if status.signal == "SIGKILL":
        raise InstallFailed("unpacking it was killed: this machine is short of memory")
    if report.endswith("MemoryError"):  # raised outside of what `unpack` guards
        raise BadArtifact(f"unpacking it needs more than {MEMORY} bytes of memory")
    how = status.signal or f"code {status.code}"
    raise InstallFailed(f"unpacking it failed with {how}: {report.splitlines()[-1] if report else 'no report'}")
