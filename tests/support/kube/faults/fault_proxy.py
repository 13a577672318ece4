"""A reverse proxy before an API server whose answers can be refused, lost, held back and cut: a bad network.

    async with fault_proxy(control_plane.url, ca=control_plane.ca) as proxy:
        control_plane.write_kubeconfig(path, url=proxy.url)
        proxy.add(answers(409, "Conflict"), method="PUT", path="/status", times=1)

A fault applies to requests whose method is `method` and whose path and query match the pattern `path`, at most
`times` times, or until `clear`. Of several that match, the one that was added first is used. Everything else passes.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import aiohttp
from aiohttp import web
from yarl import URL

from tests.support.consul.server import free_ports

_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "upgrade", "host", "content-length", "te", "trailer"}


class Seen(NamedTuple):
    """A request that reached the proxy; `path` with the query, decoded."""

    method: str
    path: str


class Way:
    """One request on its way; faults steer it."""

    def __init__(self, proxy: FaultProxy, request: web.Request) -> None:
        self.proxy = proxy
        self.request = request

    async def pass_on(self, *, limit: int | None = None) -> web.StreamResponse:
        """Forward the request and stream the answer back. After `limit` bytes of it, cut the connection."""
        async with self.proxy.ask(self.request) as answer:
            headers = {name: value for name, value in answer.headers.items() if name.lower() not in _HOP_BY_HOP}
            response = web.StreamResponse(status=answer.status, headers=headers)
            await response.prepare(self.request)
            async for chunk in answer.content.iter_any():
                await self.proxy.flowing.wait()
                await response.write(chunk if limit is None else chunk[:limit])
                if limit is not None and (limit := limit - len(chunk)) <= 0:
                    return await self.cut(response)
            return response

    async def cut(self, response: web.StreamResponse | None = None) -> web.StreamResponse:
        """Break the client's connection, after the bytes already written have left."""
        if self.request.transport is not None:
            await asyncio.sleep(0)
            self.request.transport.abort() if response is None else self.request.transport.close()
        return response or web.Response()


Fault = Callable[[Way], Awaitable[web.StreamResponse]]


def answers(code: int, reason: str, message: str = "", *, retry_after: int | None = None) -> Fault:
    """Return a fault: the proxy itself refuses with a `Status`; the server sees nothing."""
    status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason}
    headers = {} if retry_after is None else {"Retry-After": str(retry_after)}

    async def refuse(way: Way) -> web.StreamResponse:
        text = json.dumps(status | {"message": message or reason})
        return web.Response(status=code, text=text, content_type="application/json", headers=headers)

    return refuse


async def refuses_connection(way: Way) -> web.StreamResponse:
    """Break the connection; the server sees nothing."""
    return await way.cut()


async def loses_answer(way: Way) -> web.StreamResponse:
    """Let the server do the request, and break the connection before its answer."""
    async with way.proxy.ask(way.request) as answer:
        await answer.read()
    return await way.cut()


def cuts_after(size: int) -> Fault:
    """Return a fault: the connection breaks after this many bytes of the answer's body: in the middle of a line."""

    async def cut(way: Way) -> web.StreamResponse:
        return await way.pass_on(limit=size)

    return cut


def sends(lines: bytes) -> Fault:
    """Return a fault: a stream made by the test, which then stays open: for instance a watch's ERROR event."""

    async def send(way: Way) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(way.request)
        await response.write(lines)
        await asyncio.Event().wait()
        return response

    return send


def error_event(code: int, reason: str) -> bytes:
    """Return a line of a watch that ends it with an error."""
    status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason}
    return json.dumps({"type": "ERROR", "object": status | {"message": reason}}).encode() + b"\n"


def cuts_within_a_chunk_header(size: int) -> Fault:
    """Return a fault: after this number of bytes of a chunked answer the connection breaks in the middle of the next
    chunk's length."""

    async def cut(way: Way) -> web.StreamResponse:
        left = size
        async with way.proxy.ask(way.request) as answer:
            response = web.StreamResponse(status=answer.status, headers={"Content-Type": "application/json"})
            response.enable_chunked_encoding()
            await response.prepare(way.request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk[:left])
                if (left := left - len(chunk)) <= 0:
                    break
            if way.request.transport is not None:
                way.request.transport.write(b"1f")
            return await way.cut(response)

    return cut


def in_pages_of(limit: int) -> Fault:
    """Return a fault: a list comes in more pages than requested."""

    async def page(way: Way) -> web.StreamResponse:
        path = re.sub(r"limit=\d+", f"limit={limit}", way.request.raw_path)
        return await Way(way.proxy, way.request.clone(rel_url=path)).pass_on()

    return page


def at_random(rng: random.Random, faults: Sequence[Fault], share: float) -> Fault:
    """Return a fault: this share of requests meets one of the faults."""

    async def draw(way: Way) -> web.StreamResponse:
        return await (rng.choice(faults)(way) if rng.random() < share else way.pass_on())

    return draw


def hangs_for(seconds: float) -> Fault:
    """Return a fault: no answer comes; the connection breaks after this time."""

    async def hang(way: Way) -> web.StreamResponse:
        await asyncio.sleep(seconds)
        return await way.cut()

    return hang


def noting(bodies: list[Any]) -> Fault:
    """Return a fault that changes nothing but adds what was sent to `bodies`."""

    async def note(way: Way) -> web.StreamResponse:
        bodies.append(json.loads(await way.request.read()))
        return await way.pass_on()

    return note


@dataclass(slots=True)
class _Rule:
    fault: Fault
    method: str
    path: re.Pattern[str]
    left: float

    def matches(self, seen: Seen) -> bool:
        return self.left > 0 and self.method in ("", seen.method) and self.path.search(seen.path) is not None


class FaultProxy:
    """`url`: where clients connect to. `seen`: all requests so far. `flowing`: while it is not set, no answer's body
    advances, and connections stay open: clear it to make watches fall silent."""

    def __init__(self, upstream: str, trust: ssl.SSLContext | None) -> None:
        self.port = free_ports(1)[0]
        self.url = f"http://127.0.0.1:{self.port}"
        self.seen: list[Seen] = []
        self.flowing = asyncio.Event()
        self.flowing.set()
        self._upstream = upstream
        connector = aiohttp.TCPConnector(limit=0, ssl=trust if trust is not None else True)
        timeout = aiohttp.ClientTimeout(total=None)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False)
        self._rules: list[_Rule] = []
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        self._site: web.TCPSite | None = None

    def add(self, fault: Fault, *, method: str = "", path: str = "", times: float = float("inf")) -> None:
        self._rules.append(_Rule(fault, method, re.compile(path), times))

    def clear(self) -> None:
        """Remove all faults."""
        self._rules.clear()

    def count(self, method: str, path: str = "") -> int:
        """Return how many requests of that method and path came so far."""
        return sum(seen.method == method and re.search(path, seen.path) is not None for seen in self.seen)

    def cut_all(self) -> None:
        """Break all open client connections."""
        server = self._runner.server
        assert server is not None
        for connection in list(server.connections):
            if connection.transport is not None:
                connection.transport.abort()

    async def go_down(self) -> None:
        """Refuse connections, and break the open ones."""
        if self._site is not None:
            await self._site.stop()
            self._site = None
        self.cut_all()

    async def come_up(self) -> None:
        """Accept connections again, at the same address."""
        if self._site is None:
            self._site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
            await self._site.start()

    async def start(self) -> None:
        await self._runner.setup()
        await self.come_up()

    async def close(self) -> None:
        await self._runner.cleanup()
        await self._session.close()

    @asynccontextmanager
    async def ask(self, request: web.Request) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request on to the server."""
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP_BY_HOP}
        url = URL(f"{self._upstream}{request.raw_path}", encoded=True)
        body: Any = await request.read()
        async with self._session.request(request.method, url, headers=headers, data=body or None) as answer:
            yield answer

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        seen = Seen(request.method, unquote(request.raw_path))
        self.seen.append(seen)
        way = Way(self, request)
        rule = next((rule for rule in self._rules if rule.matches(seen)), None)
        if rule is not None:
            rule.left -= 1
            return await rule.fault(way)
        try:
            return await way.pass_on()
        except aiohttp.ClientError:  # the server itself broke off
            return await way.cut()


@asynccontextmanager
async def fault_proxy(upstream: str, *, ca: Path | None = None) -> AsyncIterator[FaultProxy]:
    """Yield a proxy on a free port of the loopback interface. `ca`: of an upstream that uses TLS."""
    proxy = FaultProxy(upstream, ssl.create_default_context(cafile=str(ca)) if ca else None)
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.close()
