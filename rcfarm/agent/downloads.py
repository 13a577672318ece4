"""Fetching an artifact's bytes: from where this node allows it, within bounds, and without a secret in any message.

An operator of the node decides with `agent.artifact_sources` where artifacts may come from; each redirection is held
against it as well. What came from elsewhere (texts of errors, digests of what was found, URLs with signatures in their
queries) is never shown: the authors of manifests may know less than this machine can reach.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import BinaryIO
from urllib.parse import SplitResult, unquote, urljoin, urlsplit

import aiohttp

from rcfarm.agent import children
from rcfarm.agent.errors import BadArtifact, InstallFailed
from store.manifest import problem_of_url

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
        """Give the threads back."""
        self._disk.shutdown(wait=False, cancel_futures=True)

    async def fetch(self, url: str, target: Path) -> str:
        """Fetch `url` into the file `target`; returns the sha256 of what came. Raises `InstallFailed`, `OSError`."""
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
            raise InstallFailed(f"not there within {self._timeout:g} s: see agent.artifact_timeout") from None

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
                    raise InstallFailed(f"the server answers {_status(response.status)}")
                return await self._save(response, target)
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
                raise InstallFailed("the server redirects to what is no URL") from error
            try:
                if self._allowed(url).scheme == "file":
                    raise InstallFailed("to a file of this machine")
            except InstallFailed as error:
                raise InstallFailed(f"the server redirects to where this node fetches nothing: {error}") from error
        raise InstallFailed(f"the server redirects more than {_HOPS} times")

    async def _save(self, response: aiohttp.ClientResponse, target: Path) -> str:
        loop = asyncio.get_running_loop()
        with await loop.run_in_executor(self._disk, open, target, "wb") as file:
            sink = _Sink(file, self._limit)
            async for chunk in response.content.iter_chunked(_CHUNK):
                await loop.run_in_executor(self._disk, sink.write, chunk)
        return sink.digest.hexdigest()


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
    """Whether a URL has the scheme, host and port of an allowed prefix, and is at or below its path."""
    if url.scheme != source.scheme or ".." in unquote(url.path).split("/"):
        return False
    if source.hostname and (url.hostname, _port(url)) != (source.hostname, _port(source)):
        return False
    prefix, path = (unquote(parts.path).rstrip("/") for parts in (source, url))
    return path == prefix or path.startswith(prefix + "/")


def _port(parts: SplitResult) -> int | None:
    return parts.port or _PORTS.get(parts.scheme)


def shown(url: str) -> str:
    """The URL without what may be secret in it: user, password, query and fragment."""
    try:
        parts = urlsplit(url)
        return f"{parts.scheme}://{parts.hostname or ''}{parts.path}"
    except ValueError:
        return "URL"


def _status(status: int) -> str:
    try:
        return f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        return str(status)


def _explained(error: Exception) -> str:
    """What went wrong with a connection, in our own words: those of the library quote the URL."""
    if isinstance(error, TimeoutError):
        return f"no byte came for {_STALLED:g} s"
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return "the server's certificate is not accepted: add its authority to this machine's, or use the right name"
    if isinstance(error, aiohttp.ClientSSLError):
        return "no TLS connection comes about: is it an http:// server?"
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"can't connect: {error.strerror or 'the name is not known'}"
    if isinstance(error, aiohttp.ClientPayloadError | aiohttp.ServerDisconnectedError | aiohttp.ClientOSError):
        return "the connection broke off"
    if isinstance(error, aiohttp.InvalidURL) or not isinstance(error, aiohttp.ClientError):
        return "the URL can't be used"
    return "what answers there does not speak HTTP properly"
