"""A small HTTP/1.1 client: one origin, a bounded pool of kept-alive connections, and whole answers.

Commands and daemons call Consul through it. aiohttp's client does more than that, takes 0.1 s of a command's start to
import and several times the processor time for each call.

The model: a call takes one of `limit` places, in order of arrival, and a connection: the one that was released last,
or a new one. A write is sent once. A read is sent again, on a new connection, when a kept-alive one turns out to be
closed before an answer began. Only a connection whose answer was read to its end is kept; cancelling a call closes its
connection.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

_BUFFER = 1 << 18  # bytes of an answer that are buffered, and the longest head
_NO_BODY = frozenset({204, 304})
_CUT_SHORT = "the connection was closed in the middle of the answer"


class NeverSent(Exception):
    """There was no connection, so the server has not seen the call; the message is the cause."""


class ConnectionLost(Exception):
    """The connection ended, or the answer was not HTTP; a write may have been applied. The message is the cause."""


class _NoAnswer(ConnectionLost):
    """The connection ended before an answer began."""


class Response(NamedTuple):
    """An answer. `headers`: by lower-case name; of a repeated one, the last value."""

    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass(slots=True)
class _Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    tls: ssl.SSLContext | None
    idle_since: float = 0.0

    @property
    def is_open(self) -> bool:
        return not (self.reader.at_eof() or self.writer.is_closing())


@dataclass(slots=True, kw_only=True)
class HttpClient:
    """Calls `host:port`, or `socket`, the path of a unix socket. Belongs to one event loop; `close` it there.

    `server_name`: the name in the server's certificate, if that is not the host. `limit`: of connections.
    `keepalive` and `connect_timeout` in seconds: for how long an idle connection is kept, and to open one.
    """

    host: str
    port: int
    socket: str | None = None
    server_name: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    limit: int = 64
    keepalive: float = 60.0
    connect_timeout: float = 5.0
    _idle: deque[_Connection] = field(default_factory=deque)  # the one released last at the end
    _places: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        self._places = asyncio.Semaphore(self.limit)

    async def call(
        self,
        method: str,
        target: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        tls: ssl.SSLContext | None,
        timeout: float,
    ) -> Response:
        """Send a call and return its answer. `target`: encoded path and query. A connection is used only under the
        TLS context that it was made with; None: no TLS.

        Raises `NeverSent` and `ConnectionLost`, and `TimeoutError` when there is no whole answer after `timeout`
        seconds; `NeverSent` if that time passed before there was a connection. Raises `ValueError` for the value of a
        header that can't be sent.
        """
        request = self._request(method, target, body, headers or {})
        is_sent = False
        try:
            async with asyncio.timeout(timeout), self._places:
                while True:
                    kept = self._kept(tls)
                    connection = kept or await self._connected(tls)
                    is_sent = True
                    try:
                        return await self._exchanged(connection, request)
                    except _NoAnswer as error:
                        if kept is None or method != "GET":
                            raise ConnectionLost(str(error)) from error
        except TimeoutError as error:
            if is_sent:
                raise
            raise NeverSent(f"no connection within {timeout:g} s") from error

    async def close(self) -> None:
        """Close the idle connections; those of calls close with their calls."""
        while self._idle:
            self._idle.pop().writer.transport.abort()
        await asyncio.sleep(0)  # the transports close in the loop's next round

    def _request(self, method: str, target: str, body: bytes | None, headers: Mapping[str, str]) -> bytes:
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [f"{method} {target} HTTP/1.1", f"Host: {host}:{self.port}"]
        lines += (f"{name}: {value}" for name, value in {**self.headers, **headers}.items())
        if body is not None or method != "GET":
            lines.append(f"Content-Length: {len(body or b'')}")
        if any("\r" in line or "\n" in line or "\0" in line for line in lines):
            raise ValueError("it contains the end of a line")
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + (body or b"")

    def _kept(self, tls: ssl.SSLContext | None) -> _Connection | None:
        """Return an idle connection, and close those that may not be used any more."""
        oldest = asyncio.get_running_loop().time() - self.keepalive
        while self._idle and self._idle[0].idle_since < oldest:
            self._idle.popleft().writer.transport.abort()
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and connection.tls is tls:
                return connection
            connection.writer.transport.abort()
        return None

    async def _connected(self, tls: ssl.SSLContext | None) -> _Connection:
        name = (self.server_name or self.host) if tls else None
        try:
            async with asyncio.timeout(self.connect_timeout):
                if self.socket is not None:
                    streams = await asyncio.open_unix_connection(
                        self.socket, ssl=tls, server_hostname=name, limit=_BUFFER
                    )
                else:
                    streams = await asyncio.open_connection(
                        self.host, self.port, ssl=tls, server_hostname=name, limit=_BUFFER
                    )
        except TimeoutError as error:
            raise NeverSent(f"no connection within {self.connect_timeout:g} s") from error
        except OSError as error:
            raise NeverSent(_cause(error)) from error
        return _Connection(*streams, tls)

    async def _exchanged(self, connection: _Connection, request: bytes) -> Response:
        """Send a request, and return its answer. The connection is kept if it can be used again, and closed if not."""
        may_be_kept = False
        try:
            connection.writer.write(request)
            response, may_be_kept = await _answer(connection.reader)
        finally:
            if may_be_kept:
                connection.idle_since = asyncio.get_running_loop().time()
                self._idle.append(connection)
            else:
                connection.writer.transport.abort()
        return response


async def _answer(reader: asyncio.StreamReader) -> tuple[Response, bool]:
    """Return an answer, and whether its connection can be used again. Raises `ConnectionLost`."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        raise (ConnectionLost(_CUT_SHORT) if error.partial else _NoAnswer("the connection was closed")) from error
    except OSError as error:
        raise _NoAnswer(_cause(error)) from error
    except asyncio.LimitOverrunError as error:
        raise ConnectionLost("the answer is not HTTP") from error
    try:
        status_line, *lines = head[:-4].decode("latin-1").split("\r\n")
        version, status = status_line.split(" ", 2)[:2]
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if int(status) < 200:
            return await _answer(reader)
        body, is_whole = await _body(reader, int(status), headers)
    except asyncio.IncompleteReadError as error:
        raise ConnectionLost(_CUT_SHORT) from error
    except OSError as error:
        raise ConnectionLost(_cause(error)) from error
    except (ValueError, asyncio.LimitOverrunError) as error:
        raise ConnectionLost("the answer is not HTTP") from error
    stays_open = version == "HTTP/1.1" and headers.get("connection", "").lower() != "close"
    return Response(int(status), headers, body), is_whole and stays_open


async def _body(reader: asyncio.StreamReader, status: int, headers: Mapping[str, str]) -> tuple[bytes, bool]:
    """Return an answer's body, and whether its end showed without the connection's end."""
    if status in _NO_BODY:
        return b"", True
    if headers.get("transfer-encoding", "").lower() == "chunked":
        chunks = []
        while size := int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16):
            chunks.append(await reader.readexactly(size))
            await reader.readexactly(2)
        while await reader.readuntil(b"\r\n") != b"\r\n":  # trailers
            pass
        return b"".join(chunks), True
    if (length := headers.get("content-length")) is not None:
        return await reader.readexactly(int(length)), True
    return await reader.read(), False


def _cause(error: OSError) -> str:
    """Return the reason in words, without the address."""
    if isinstance(error, ConnectionError) and error.errno:
        return os.strerror(error.errno)
    return error.strerror or str(error) or "the connection was closed"
