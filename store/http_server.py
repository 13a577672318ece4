"""Shared by all HTTP listeners here: bounds, so that no client can block or exhaust the process.

The model: a connection is *reading* until a whole request header has come, *serving* while its request is handled, and
idle in between. Reading and answering have time limits. The number of connections is bounded; when the bound is
reached, a new connection replaces the one that has been reading for longest, else the one that has been idle for
longest, else one whose request has been served for longer than `drop_after`, else it is refused. So a flood of
connections without requests does not keep a probe out.

A malformed request is answered with 400 and logged at level debug, without a traceback: any client can send one. An
unexpected error of a handler is logged with its traceback and answered with 500.

A web page must not reach a listener through a browser on the same machine: requests with a foreign `Origin` are
refused, and a listener on loopback accepts only loopback names as `Host`, which defeats DNS rebinding.
"""

from __future__ import annotations

import asyncio
import resource
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import structlog
from aiohttp import web
from aiohttp.http import HttpProcessingError
from aiohttp.web_protocol import RequestHandler

from store.loopback import is_loopback
from store.tls import REREAD_EVERY, TlsFiles

log = structlog.get_logger(__name__)

MAX_HEADERS = 64  # of one request; aiohttp bounds each of them, and the request line, to 8190 bytes
KEEPALIVE = 75.0  # seconds that an idle connection is kept: longer than our clients keep theirs
SHARE_OF_FILES = 4  # a listener may use one in four of the process's file descriptors
_BACKLOG = 128
_LINGER = 1.0  # seconds in which the unread rest of a refused body is discarded
_SWEEP = 1.0  # seconds between two searches for overdue connections


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The limits of a listener. Durations in seconds.

    `header_seconds`: until a request's header is complete. `request_seconds`: until the handler has answered; it is
    cancelled then, and when the client goes away; None: a handler always runs to its end. `answer_seconds`: for
    sending the answer. `connections`: at most, and at most a quarter of the process's limit of open files.
    `drop_after`: how long a request is served before its connection may be dropped in favour of a new one; None: never.
    """

    header_seconds: float = 10.0
    request_seconds: float | None = 30.0
    answer_seconds: float = 30.0
    connections: int = 256
    drop_after: float | None = 5.0


class RequestRefused(Exception):
    """The request is not served: `status` and the text say why."""

    def __init__(self, status: int, text: str) -> None:
        self.status = status
        super().__init__(text)


async def read_body(request: web.Request, seconds: float) -> bytes:
    """Return the request's whole body, of at most the application's `client_max_size`. Raises `RequestRefused`."""
    try:
        async with asyncio.timeout(seconds):
            return await request.read()
    except TimeoutError:
        raise RequestRefused(408, f"the body was not complete after {seconds:g} s") from None
    except web.HTTPRequestEntityTooLarge as error:
        raise RequestRefused(413, error.text or "the body is too large") from None
    except (web.RequestPayloadError, ConnectionError, ValueError) as error:
        raise RequestRefused(400, f"the body can't be read: {error}") from None


def is_text(given: str) -> bool:
    """Return whether the text was UTF-8; aiohttp decodes other bytes to surrogates."""
    try:
        given.encode()
    except UnicodeEncodeError:
        return False
    return True


@asynccontextmanager
async def listening(
    app: web.Application,
    host: str | None,
    port: int,
    bounds: Bounds,
    *,
    tls: TlsFiles | None = None,
    shutdown_timeout: float = 1.0,
) -> AsyncIterator[str]:
    """Serve while the context lasts; yields `HOST:PORT`. `host` None: all addresses; port 0: a free one.

    `shutdown_timeout`: seconds that requests in flight have at the end. Raises `OSError` when it can't listen there, or
    for TLS files that can't be used.
    """
    runner = web.AppRunner(
        app,
        access_log=None,
        handler_cancellation=bounds.request_seconds is not None,
        shutdown_timeout=shutdown_timeout,
    )
    await runner.setup()
    try:
        assert runner.server is not None
        runner.server.request_handler = _guarded(runner.server.request_handler, bounds, host)
        limiter = _ConnectionLimiter(runner.server, bounds)
        context = tls.context() if tls else None
        server = await asyncio.get_running_loop().create_server(
            limiter.connection,
            host,
            port,
            backlog=_BACKLOG,
            ssl=context,
            ssl_handshake_timeout=bounds.header_seconds if tls else None,
        )
        rereading = asyncio.create_task(_reread(tls, context)) if tls is not None and context is not None else None
        try:
            name, number = server.sockets[0].getsockname()[:2]
            yield f"[{name}]:{number}" if ":" in name else f"{name}:{number}"
        finally:
            if rereading is not None:
                rereading.cancel()
                await asyncio.wait([rereading])
            server.close()
            limiter.close()
    finally:
        await runner.cleanup()


async def _reread(tls: TlsFiles, context: ssl.SSLContext) -> None:
    """Follow the files until cancelled. They are tried on another context first: a half-written pair must not count."""
    seen = tls.state()
    while True:
        await asyncio.sleep(REREAD_EVERY)
        if (now := tls.state()) == seen:
            continue
        seen = now
        try:
            tls.context()
            tls.load_into(context)
        except OSError as error:
            log.error(
                "Could not load the listener's certificate; keeping the former one",
                file=str(tls.certificate),
                error=str(error),
            )
        else:
            log.info("Loaded the listener's new certificate", file=str(tls.certificate))


class _Connection(RequestHandler):
    """One connection, as aiohttp handles it, within the bounds.

    `reading_since`: when it began to wait for the rest of a header, or None. `serving_since`: when the request that
    is handled began, or None. `requests`: how many it has brought.
    """

    __slots__ = ("_limiter", "idle_since", "reading_since", "requests", "serving_since")

    def __init__(self, limiter: _ConnectionLimiter, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._limiter = limiter
        self.requests = 0
        self.idle_since = self._loop.time()
        self.reading_since: float | None = None
        self.serving_since: float | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if not self._limiter.admits():
            assert isinstance(transport, asyncio.Transport)
            transport.write(b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
            transport.close()
            return
        self.reading_since = self._loop.time()
        self._limiter.enter(self)
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._limiter.leave(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport is None:  # refused, or dropped
            return
        if self.reading_since is None and self.serving_since is None and data:
            self.reading_since = self._loop.time()
        super().data_received(data)

    def begin(self) -> None:
        """Record that a request's header is complete and its handling begins."""
        self.reading_since, self.serving_since = None, self._loop.time()
        self.requests += 1

    async def finish_response(self, request: Any, resp: Any, start_time: float | None) -> tuple[Any, bool]:
        try:
            async with asyncio.timeout(self._limiter.bounds.answer_seconds):
                return await super().finish_response(request, resp, start_time)
        except TimeoutError:
            self.drop()
            return resp, True
        finally:
            self.reading_since, self.serving_since = None, None
            self.idle_since = self._loop.time()

    def drop(self) -> None:
        """End the connection now, even with unsent data."""
        transport = self.transport
        self.force_close()
        if transport is not None:
            transport.abort()

    def log_exception(self, *args: Any, **kw: Any) -> None:
        error = kw.get("exc_info")
        if isinstance(error, HttpProcessingError):
            log.debug("Refused a malformed request", reason=error.message)
        elif isinstance(error, ConnectionError):
            log.debug("A client disconnected", reason=str(error))
        else:
            log.error("A request failed", what=str(args[0]) if args else "", exc_info=error)


class _ConnectionLimiter:
    """Makes the connections of one listener and bounds their number and times."""

    def __init__(self, server: web.Server, bounds: Bounds) -> None:
        self.bounds = bounds
        self._server = server
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most = bounds.connections
        if files != resource.RLIM_INFINITY:
            self._most = max(4, min(bounds.connections, files // SHARE_OF_FILES))
        self._inside: dict[_Connection, None] = {}  # in the order of their arrival
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def connection(self) -> _Connection:
        """Return the protocol of a connection that is about to be made."""
        return _Connection(
            self,
            self._server,
            loop=self._loop,
            access_log=None,
            keepalive_timeout=KEEPALIVE,
            max_headers=MAX_HEADERS,
            lingering_time=_LINGER,
            auto_decompress=False,
        )

    def admits(self) -> bool:
        """Return whether one more connection fits, dropping another one if necessary."""
        if len(self._inside) < self._most:
            return True
        leaving = self._connection_to_drop()
        if leaving is None:
            log.warning("Refused a connection: all others are serving requests", connections=len(self._inside))
            return False
        self.leave(leaving)
        leaving.drop()
        return True

    def enter(self, connection: _Connection) -> None:
        self._inside[connection] = None
        if self._timer is None:
            self._timer = self._loop.call_later(_SWEEP, self._sweep)

    def leave(self, connection: _Connection) -> None:
        self._inside.pop(connection, None)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _connection_to_drop(self) -> _Connection | None:
        """Return the connection to drop in favour of a new one, or None."""
        idle: _Connection | None = None
        for connection in self._inside:
            if connection.serving_since is None:
                if connection.requests == 0:
                    return connection
                if idle is None or connection.idle_since < idle.idle_since:
                    idle = connection
        if idle is not None or self.bounds.drop_after is None:
            return idle
        oldest = min(self._inside, key=lambda each: each.serving_since or 0.0)
        is_overdue = self._loop.time() - (oldest.serving_since or 0.0) >= self.bounds.drop_after
        return oldest if is_overdue else None

    def _sweep(self) -> None:
        """Drop the connections whose header is not complete in time."""
        overdue = self._loop.time() - self.bounds.header_seconds
        for connection in list(self._inside):
            since = connection.reading_since
            if since is not None and since <= overdue and connection.serving_since is None:
                self.leave(connection)
                connection.drop()
        self._timer = self._loop.call_later(_SWEEP, self._sweep) if self._inside else None


def _guarded(handler: Any, bounds: Bounds, host: str | None) -> Any:
    """Check the origin of a request, bound its time, and turn every error into an answer.

    This wraps all that aiohttp does with a request, its own answers included, not only the handlers.
    """
    loopback_only = host is not None and is_loopback(host)

    async def guard(request: web.Request) -> web.StreamResponse:
        if isinstance(request.protocol, _Connection):
            request.protocol.begin()
        try:
            _check_origin(request, loopback_only=loopback_only)
            async with asyncio.timeout(bounds.request_seconds):
                response: web.StreamResponse = await handler(request)
                return response
        except web.HTTPException:
            raise
        except RequestRefused as refused:
            return _closing(refused.status, str(refused))
        except TimeoutError:
            log.warning("A request took too long", method=request.method, path=request.path)
            return _closing(503, f"no answer within {bounds.request_seconds:g} s")
        except ConnectionError:
            raise
        except Exception as error:
            log.error("A request failed", method=request.method, path=request.path, exc_info=error)
            return _closing(500, "a defect of rcfarm; its log has the traceback")

    return guard


def _closing(status: int, text: str) -> web.Response:
    """Return an answer after which the connection ends; the rest of the request is not read."""
    response = web.Response(status=status, text=f"{text}\n")
    response.force_close()
    return response


def _check_origin(request: web.Request, *, loopback_only: bool) -> None:
    """Raise `RequestRefused` for a request that a web page of another origin has sent, or may have, and for a target
    that is not text. `loopback_only`: accept only loopback names in `Host`; False is for a listener that other machines
    can reach.
    """
    if not all(map(is_text, (request.path_qs, request.raw_path, request.headers.get("Expect", "")))):
        raise RequestRefused(400, "the request is not UTF-8")
    hosts = request.headers.getall("Host", [])
    for host in hosts:
        name: str | None = None
        with suppress(ValueError):
            parts = urlsplit(f"//{host}")
            if parts.netloc == host and parts.port != -1:
                name = parts.hostname or ""
        if name is None:
            raise RequestRefused(400, "the Host header is malformed")
        if loopback_only and not is_loopback(name):
            raise RequestRefused(403, f"{name!r} is not a name of this listener; call it 127.0.0.1 or localhost")
    origin = request.headers.get("Origin")
    if origin is not None and origin.partition("://")[2] not in hosts:
        raise RequestRefused(403, f"requests of web pages from {origin!r} are refused")
