"""HTTP to the API server: one pool of kept-alive connections for calls, and a connection for each watch.

The library's REST client is not used: through it aiohttp would send writes twice (see `store.http`), and importing it
costs 40 MB, too much for a barrier in every pod.

The model: a call is sent once, and again only after an answer which shows that it was not processed: 429, which asks
for a pause, for every verb, as in client-go; and 401, once, when there are newer credentials. All of that happens
within one `call_timeout`, which starts after waiting for the client's own `qps`. Cancelling a call closes its
connection. After all waiting, the check that a fence has left decides whether the request may still be sent.

Credentials rotate. Every call asks `Credentials.current()`. Every `CHECK_EVERY` seconds the first call checks whether
the files behind the access changed, and if so reads them again; concurrent calls continue with the present access.
After a 401 the files are read at once. If reading fails, the old access stays in use; the server decides whether it is
still valid.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import aiohttp
import msgspec
from yarl import URL

from store.decoding import Undecodable, from_json
from store.http import NEVER_SENT, ConnectionLost, cause_of, send_writes_once
from store.kube.api.errors import (
    MAX_RETRY_AFTER,
    KubeError,
    NoConfig,
    TooManyRequests,
    Unauthorized,
    Unreachable,
    error_from_status,
)
from store.kube.api.protocol import before_sending
from store.kube.client.credentials import Access, AccessSource
from store.timing import TokenBucket
from store.tls import file_state

KEEPALIVE = 60.0  # seconds that an idle connection is kept; API servers close theirs after 90
CHECK_EVERY = 30.0  # seconds; tokens of service accounts are replaced many minutes before they end
REREAD_AFTER_REFUSAL = 10.0  # seconds, at least, between two readings caused by 401s
MAX_PAUSES = 5  # pauses after a 429, per call
JSON = "application/json"
EXCERPT = 200  # characters of an answer that makes no sense
Chunks: TypeAlias = Callable[[], Awaitable[bytes]]  # returns the next bytes of a stream, b"" at its end
_FAILURES = (aiohttp.ClientError, ConnectionLost, TimeoutError)
_STATUS = msgspec.json.Decoder(dict[str, Any])


@dataclass(frozen=True, slots=True)
class Request:
    """A request. `verb` and `resource` are for metrics; `path` and `query` are encoded."""

    verb: str
    resource: str
    method: str
    path: str
    query: str = ""
    body: bytes | None = None
    content_type: str = JSON

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


class RequestMetrics(Protocol):
    """Receives every HTTP request, once its headers came or it failed."""

    def request(self, verb: str, resource: str, status: int, seconds: float) -> None:
        """Record one request. `status`: the HTTP status, 0 when no answer came."""


class Credentials:
    """The present access, as it was last read. Made by `open`; used from one event loop."""

    def __init__(self, source: AccessSource, clock: Callable[[], float] = time.monotonic) -> None:
        self._source, self._clock = source, clock
        self.access = Access("")
        self._seen: dict[Path, object] = {}
        self._check_at = 0.0
        self._reread_at = float("-inf")
        self._reading = asyncio.Lock()

    @classmethod
    async def open(cls, source: AccessSource, clock: Callable[[], float] = time.monotonic) -> Credentials:
        """Read for the first time. Raises `NoConfig`."""
        credentials = cls(source, clock)
        await credentials._read(fresh=True)
        return credentials

    async def current(self) -> Access:
        """Return the access for the next call."""
        if self._clock() >= self._check_at and not self._reading.locked():
            async with self._reading:
                changed = _states(self._source.files) != self._seen
                if changed or self._source.short_lived:
                    await self._try_to_read(fresh=changed)
                self._check_at = self._clock() + CHECK_EVERY
        return self.access

    async def renewed(self, refused: Access) -> bool:
        """Return whether there is another access to try, after the server did not accept `refused`."""
        async with self._reading:
            if self.access == refused and self._clock() >= self._reread_at + REREAD_AFTER_REFUSAL:
                self._reread_at = self._clock()
                await self._try_to_read(fresh=True)
        return self.access != refused

    async def _try_to_read(self, *, fresh: bool) -> None:
        try:
            await self._read(fresh=fresh)
        except NoConfig as error:
            import structlog  # the barrier, in every pod of a gang, does without it

            structlog.get_logger(__name__).warning("Could not read credentials; keeping the old ones", error=str(error))

    async def _read(self, *, fresh: bool) -> None:
        before = _states(self._source.files)  # taken before, so that a change during the reading is found later
        self.access = await self._source.read(fresh=fresh)
        self._seen = _states(self._source.files) | before
        self._check_at = self._clock() + CHECK_EVERY


class Transport:
    """Sends requests; raises `KubeError` for everything that is not a success."""

    def __init__(
        self,
        credentials: Credentials,
        limits: Limits,
        *,
        user_agent: str,
        metrics: RequestMetrics | None,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self._credentials, self._limits = credentials, limits
        self._user_agent, self._metrics = user_agent, metrics
        self._clock, self._rng = clock, rng or random.Random()
        self._rate = TokenBucket(limits.qps, max(limits.burst, 1), clock()) if limits.qps else None
        self._sessions: dict[bool, aiohttp.ClientSession] = {}

    async def call(self, request: Request) -> bytes:
        """Send a request. Return the body of the answer."""
        async with self._in_time(request) as give_up_at, await self._accepted(request, give_up_at) as response:
            try:
                return await response.read()
            except _FAILURES as error:
                raise self._unreachable(request, error) from error

    @asynccontextmanager
    async def stream(self, request: Request) -> AsyncIterator[Chunks]:
        """Yield a reader of the answer's body, which raises `Unreachable` when the stream breaks or falls silent.
        Leaving the context closes the connection."""
        async with self._in_time(request) as give_up_at:
            response = await self._accepted(request, give_up_at, streams=True)

        async def chunks() -> bytes:
            try:
                return await response.content.readany()
            except TimeoutError as error:
                raise Unreachable(f"{request}: nothing came for {self._limits.stream_silence:g} s") from error
            except aiohttp.ClientError as error:
                raise Unreachable(f"{request}: the stream broke: {cause_of(error)}") from error

        try:
            yield chunks
        finally:
            response.close()

    async def close(self) -> None:
        """Close every connection."""
        while self._sessions:
            _, session = self._sessions.popitem()
            await session.close()

    @asynccontextmanager
    async def _in_time(self, request: Request) -> AsyncIterator[float]:
        """Wait for the client's own rate, then bound the time of the block. Yields the loop's time at which it ends."""
        await asyncio.sleep(self._rate.take(self._clock()) if self._rate else 0.0)
        give_up_at = asyncio.get_running_loop().time() + self._limits.call_timeout
        try:
            async with asyncio.timeout_at(give_up_at):
                yield give_up_at
        except TimeoutError as error:
            cause = TimeoutError(f"waited {self._limits.call_timeout:g} s")
            raise self._unreachable(request, cause) from error

    async def _accepted(self, request: Request, give_up_at: float, *, streams: bool = False) -> aiohttp.ClientResponse:
        """Return the successful response, its body unread."""
        now = asyncio.get_running_loop().time
        pauses, renewed = 0, False
        while True:
            access = await self._credentials.current()
            try:
                return await self._send(request, access, streams)
            except Unauthorized:
                if renewed or not await self._credentials.renewed(access):
                    raise
                renewed = True
            except TooManyRequests as error:
                pause = (error.retry_after or 0.0) * self._rng.uniform(1.0, 1.5)
                if error.retry_after is None or pauses == MAX_PAUSES or now() + pause >= give_up_at:
                    raise
                pauses += 1
                await asyncio.sleep(pause)

    async def _send(self, request: Request, access: Access, streams: bool) -> aiohttp.ClientResponse:
        status, began = 0, self._clock()
        headers = {}
        if access.authorization:
            headers["Authorization"] = access.authorization
        if request.body is not None:
            headers["Content-Type"] = request.content_type
        try:
            response = await self._session(streams).request(
                request.method,
                URL(f"{access.server}{request.path}?{request.query}", encoded=True),
                data=request.body,
                headers=headers,
                ssl=access.tls or True,
                server_hostname=access.server_name,
                proxy=access.proxy,
                allow_redirects=False,
            )
            status = response.status
            if 200 <= status < 300:
                return response
            async with response:
                body = await response.read()
        except _FAILURES as error:
            raise self._unreachable(request, error) from error
        finally:
            if self._metrics is not None:
                self._metrics.request(request.verb, request.resource, status, self._clock() - began)
        raise error_of(str(request), status, body, response.headers.get("Retry-After"))

    def _session(self, streams: bool) -> aiohttp.ClientSession:
        """Return the session; that of watches has no limit of connections, so that watches never starve calls."""
        if streams not in self._sessions:
            limits = self._limits

            async def check(*_: object) -> None:  # once a request has its connection, and nothing left to wait for
                fence_check = before_sending.get()
                if fence_check is not None:
                    fence_check()

            traces = aiohttp.TraceConfig()
            traces.on_connection_reuseconn.append(check)
            traces.on_connection_create_end.append(check)
            self._sessions[streams] = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=0 if streams else limits.max_connections, keepalive_timeout=KEEPALIVE
                ),
                timeout=aiohttp.ClientTimeout(
                    total=None,
                    sock_connect=limits.connect_timeout,
                    sock_read=limits.stream_silence if streams else None,
                ),
                # Compressing would cost the server more than sending the bytes does.
                headers={"User-Agent": self._user_agent, "Accept": JSON, "Accept-Encoding": "identity"},
                cookie_jar=aiohttp.DummyCookieJar(),
                middlewares=(send_writes_once,),
                trace_configs=[traces],
            )
        return self._sessions[streams]

    def _unreachable(self, request: Request, error: Exception) -> Unreachable:
        fate = "it was not applied" if isinstance(error, NEVER_SENT) else "it may have been applied"
        note = "" if request.method == "GET" else f"; {fate}"
        return Unreachable(f"no answer from {self._credentials.access.server}: {cause_of(error)} ({request}{note})")


@dataclass(frozen=True, slots=True)
class Limits:
    """`call_timeout` and `connect_timeout` in seconds. `stream_silence`: seconds without a byte until a watch counts as
    dead; servers send bookmarks about every minute. `max_connections`: of calls; each watch has one more.
    `qps` and `burst`: requests per second, and the number allowed at once after a pause; `qps` 0: no limit here, the
    server sheds load by 429.
    """

    call_timeout: float = 30.0
    connect_timeout: float = 10.0
    stream_silence: float = 150.0
    max_connections: int = 64
    qps: float = 0.0
    burst: int = 100


def error_of(call: str, status: int, body: bytes, retry_after: str | None = None) -> KubeError:
    """Return the error for an unsuccessful answer. `call`: its name in messages, for an answer that is not a Status,
    such as a proxy's. `retry_after`: the header; only seconds are supported."""
    wait = float(retry_after) if retry_after and retry_after.isascii() and retry_after.isdigit() else None
    try:
        answer = from_json(_STATUS, body)
    except Undecodable:
        answer = {}
    if answer.get("kind") != "Status":
        text = body[:EXCERPT].decode(errors="replace").strip() or "no reason"
        answer = {"message": f"{call}: HTTP {status}: {text}"}
    return error_from_status(
        {**answer, "code": status}, retry_after=None if wait is None else min(wait, MAX_RETRY_AFTER)
    )


def _states(files: Iterable[Path]) -> dict[Path, object]:
    return {path: file_state(path) for path in files}
