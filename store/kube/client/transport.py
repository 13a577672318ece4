"""HTTP to the API server: one pool of kept-alive connections for calls, and a connection for each watch.

The library's REST client is not used: through it aiohttp would send writes twice (see `store.http`), and importing it
costs 40 MB, too much for a barrier in every pod.

The model: a call is sent once, and again only after an answer which shows that it was not processed: 429, which asks
for a pause, for every verb, as in client-go; and 401, once, when there are newer credentials. All of that happens
within one `call_timeout`, which starts after waiting for the client's own `qps`. Cancelling a call closes its
connection. After all waiting, `run_check` decides whether the request may still be sent.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

import aiohttp
from yarl import URL

from store.http import NEVER_SENT, ConnectionLost, cause_of, send_writes_once
from store.kube.api.errors import TooManyRequests, Unauthorized, Unreachable
from store.kube.api.protocol import run_check
from store.kube.client import wire
from store.kube.client.credentials import Access, Credentials
from store.timing import TokenBucket

KEEPALIVE = 60.0  # seconds that an idle connection is kept; API servers close theirs after 90
MAX_PAUSES = 5  # pauses after a 429, per call
_FAILURES = (aiohttp.ClientError, ConnectionLost, TimeoutError)


@dataclass(frozen=True, slots=True)
class Request:
    """A request. `verb` and `resource` are for metrics; `path` and `query` are encoded."""

    verb: str
    resource: str
    method: str
    path: str
    query: str = ""
    body: bytes | None = None
    content_type: str = wire.JSON

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


class RequestMetrics(Protocol):
    """Receives every HTTP request, once its headers came or it failed."""

    def request(self, verb: str, resource: str, status: int, seconds: float) -> None:
        """Record one request. `status`: the HTTP status, 0 when no answer came."""


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
        self._throttle = Throttle(limits.qps, limits.burst, clock)
        self._sessions: dict[bool, aiohttp.ClientSession] = {}

    async def call(self, request: Request) -> bytes:
        """Send a request. Return the body of the answer."""
        await asyncio.sleep(self._throttle.delay())
        async with self._in_time(request) as give_up_at, await self._accepted(request, give_up_at) as response:
            try:
                return await response.read()
            except _FAILURES as error:
                raise self._unreachable(request, error) from error

    @asynccontextmanager
    async def stream(self, request: Request) -> AsyncIterator[Stream]:
        """Yield the answer's body as a stream. Leaving the context closes the connection."""
        await asyncio.sleep(self._throttle.delay())
        async with self._in_time(request) as give_up_at:
            response = await self._accepted(request, give_up_at, streams=True)
        try:
            yield Stream(response, request, self._limits.stream_silence)
        finally:
            response.close()

    async def close(self) -> None:
        """Close every connection."""
        while self._sessions:
            _, session = self._sessions.popitem()
            await session.close()

    @asynccontextmanager
    async def _in_time(self, request: Request) -> AsyncIterator[float]:
        """Bound the time of the block. Yields the loop's time at which it ends."""
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
        raise wire.error_of(str(request), status, body, response.headers.get("Retry-After"))

    def _session(self, streams: bool) -> aiohttp.ClientSession:
        """Return the session; that of watches has no limit of connections, so that watches never starve calls."""
        if streams not in self._sessions:
            limits = self._limits
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
                headers={"User-Agent": self._user_agent, "Accept": wire.JSON, "Accept-Encoding": "identity"},
                cookie_jar=aiohttp.DummyCookieJar(),
                middlewares=(send_writes_once,),
                trace_configs=[_guarded()],
            )
        return self._sessions[streams]

    def _unreachable(self, request: Request, error: Exception) -> Unreachable:
        fate = "it was not applied" if isinstance(error, NEVER_SENT) else "it may have been applied"
        note = "" if request.method == "GET" else f"; {fate}"
        return Unreachable(f"no answer from {self._credentials.server}: {cause_of(error)} ({request}{note})")


class Stream:
    """The body of a watch."""

    def __init__(self, response: aiohttp.ClientResponse, request: Request, silence: float) -> None:
        self._response, self._request, self._silence = response, request, silence

    async def chunk(self) -> bytes:
        """Return the next bytes, b"" at the end. Raises `Unreachable` when the stream breaks or falls silent."""
        try:
            return await self._response.content.readany()
        except TimeoutError as error:
            raise Unreachable(f"{self._request}: nothing came for {self._silence:g} s") from error
        except aiohttp.ClientError as error:
            raise Unreachable(f"{self._request}: the stream broke: {cause_of(error)}") from error


def _guarded() -> aiohttp.TraceConfig:
    """Return a trace that runs the check of `checked_on_send` once a request has its connection and nothing left to
    wait for."""

    async def check(*_: object) -> None:
        run_check()

    traces = aiohttp.TraceConfig()
    traces.on_connection_reuseconn.append(check)
    traces.on_connection_create_end.append(check)
    return traces


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


class Throttle:
    """A token bucket that serves callers in order. `qps` 0: no limit."""

    def __init__(self, qps: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._bucket = TokenBucket(qps, max(burst, 1), clock()) if qps else None

    def delay(self) -> float:
        """Take a token. Return the seconds until it may be used."""
        return self._bucket.take(self._clock()) if self._bucket else 0.0
