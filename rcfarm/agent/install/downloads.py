"""Fetch an artifact's bytes: from sources that this node allows, within bounds, and without secrets in messages.

`agent.artifact_sources` names the allowed sources; each redirection is checked against it as well. Remote data (error
texts, digests of downloads, URLs with signatures in their queries) is never shown: this machine may reach more than the
authors of manifests are allowed to see.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from http.client import responses
from pathlib import Path
from typing import BinaryIO
from urllib.parse import SplitResult, unquote, urljoin, urlsplit

import aiohttp

from rcfarm.agent.errors import BadArtifact, InstallFailed
from rcfarm.agent.install import children
from store.schema.manifest import problem_of_url

_CHUNK = 256 * 1024
_STALLED = 30.0  # seconds without a byte
_HOPS = 10
_REDIRECTS = {301, 302, 303, 307, 308}
_PORTS = {"http": 80, "https": 443}


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
            source = Path(unquote(parts.path))
            report = target.with_name("report")
            return await children.copy(source, target, report, places, limit=self._limit, timeout=self._timeout)
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
                loop = asyncio.get_running_loop()
                with await loop.run_in_executor(self._disk, open, target, "wb") as file:
                    sink = _Sink(file, self._limit)
                    async for chunk in response.content.iter_chunked(_CHUNK):
                        await loop.run_in_executor(self._disk, sink.write, chunk)
                return sink.digest.hexdigest()
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


class _Sink:
    """A download being written, hashed and counted. `write` runs in threads, one at a time."""

    def __init__(self, file: BinaryIO, limit: int) -> None:
        self.digest = hashlib.sha256()
        self._file = file
        self._room = limit
        self._limit = limit

    def write(self, chunk: bytes) -> None:
        self._room -= len(chunk)
        if self._room < 0:
            raise BadArtifact(f"it has more than {self._limit} bytes: see agent.artifact_limit")
        self.digest.update(chunk)
        self._file.write(chunk)


def is_below(url: SplitResult, source: SplitResult) -> bool:
    """Return whether a URL has the scheme, host and port of an allowed prefix, and is at or below its path."""
    if url.scheme != source.scheme or ".." in unquote(url.path).split("/"):
        return False
    if source.hostname and (url.hostname, _port(url)) != (source.hostname, _port(source)):
        return False
    prefix, path = (unquote(parts.path).rstrip("/") for parts in (source, url))
    return path == prefix or path.startswith(prefix + "/")


def _port(parts: SplitResult) -> int | None:
    return parts.port or _PORTS.get(parts.scheme)


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
