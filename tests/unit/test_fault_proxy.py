"""The fault proxy loses, refuses, delays and cuts what it is told to, and passes on everything else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web

from tests.support.consul import free_ports
from tests.support.fault_proxy import (
    Fault,
    FaultProxy,
    answers,
    cuts_after,
    delays,
    error_event,
    fault_proxy,
    hangs,
    loses_answer,
    refuses_connection,
    sends,
)


class Server:
    """Answers what it is sent; `/stream` sends a line of 100 bytes each 10 ms. `bodies`: what came."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.read())
        if request.path == "/stream":
            return await self._stream(request)
        return web.json_response({"path": request.raw_path, "header": request.headers.get("X-Test")}, status=201)

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"x" * 99 + b"\n")
            await asyncio.sleep(0.01)


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
async def proxy(server: Server) -> AsyncIterator[FaultProxy]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    port = free_ports(1)[0]
    await web.TCPSite(runner, "127.0.0.1", port).start()
    async with fault_proxy(f"http://127.0.0.1:{port}") as proxy:
        yield proxy
    await runner.cleanup()


@pytest.fixture
async def client(proxy: FaultProxy) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(proxy.url, timeout=aiohttp.ClientTimeout(total=20)) as session:
        yield session


async def test_it_passes_everything_on(server: Server, proxy: FaultProxy, client: aiohttp.ClientSession) -> None:
    """Method, path as it was written, query, headers and body arrive; status and body come back."""
    async with client.post("/a%2Fb?x=1%262", data=b"body", headers={"X-Test": "h"}) as answer:
        assert answer.status == 201
        assert await answer.json() == {"path": "/a%2Fb?x=1%262", "header": "h"}
    assert server.bodies == [b"body"]
    assert proxy.count("POST", "x=1&2") == 1


async def test_it_refuses(server: Server, proxy: FaultProxy, client: aiohttp.ClientSession) -> None:
    """A status with its reason and Retry-After, for matching requests, so many times; the server sees nothing."""
    proxy.add(answers(429, "TooManyRequests", retry_after=3), method="PUT", path="/a", times=2)
    statuses = []
    for method, path in (("GET", "/a"), ("PUT", "/b"), ("PUT", "/a"), ("PUT", "/a"), ("PUT", "/a")):
        async with client.request(method, path) as answer:
            statuses.append(answer.status)
            if answer.status == 429:
                assert answer.headers["Retry-After"] == "3"
                assert (await answer.json())["reason"] == "TooManyRequests"
    assert statuses == [201, 201, 429, 429, 201]
    assert len(server.bodies) == 3


@pytest.mark.parametrize(("fault", "arrived"), [(loses_answer, 1), (refuses_connection, 0)])
async def test_a_connection_breaks(
    server: Server, proxy: FaultProxy, client: aiohttp.ClientSession, fault: Fault, arrived: int
) -> None:
    """After the server did it, or before: the client can't tell."""
    proxy.add(fault, method="POST")
    with pytest.raises(aiohttp.ClientError):
        await client.post("/a")
    assert len(server.bodies) == arrived


async def test_no_answer(server: Server, proxy: FaultProxy, client: aiohttp.ClientSession) -> None:
    """A hanging request leaves the others alone; a delayed one arrives."""
    proxy.add(hangs, path="/hang")
    proxy.add(delays(0.05), path="/slow")
    hanging = asyncio.create_task(client.get("/hang").__aenter__())
    async with client.get("/slow") as answer:
        assert answer.status == 201
    assert not hanging.done()
    hanging.cancel()
    await asyncio.wait([hanging])


async def test_a_stream_is_cut(proxy: FaultProxy, client: aiohttp.ClientSession) -> None:
    """In the middle of a line, after so many bytes."""
    proxy.add(cuts_after(250), times=1)
    async with client.get("/stream") as answer:
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.content.readexactly(251)
    proxy.add(cuts_after(250), times=1)
    async with client.get("/stream") as answer:
        assert len(await answer.content.readexactly(250)) == 250


async def test_a_stream_falls_silent(proxy: FaultProxy, client: aiohttp.ClientSession) -> None:
    """Nothing comes while the flow is stopped, though the connection stands; then it goes on."""
    async with client.get("/stream") as answer:
        await answer.content.readline()
        proxy.flowing.clear()
        silence = asyncio.create_task(drained(answer))
        await asyncio.sleep(0.2)
        assert not silence.done()
        silence.cancel()
        await asyncio.wait([silence])
        proxy.flowing.set()
        assert await answer.content.readany()


async def drained(answer: aiohttp.ClientResponse) -> None:
    """Read until it ends."""
    async for _ in answer.content.iter_any():
        pass


async def test_a_stream_of_its_own(server: Server, proxy: FaultProxy, client: aiohttp.ClientSession) -> None:
    """The test's lines instead of the server's."""
    proxy.add(sends(error_event(410, "Expired")), path="/stream")
    async with client.get("/stream") as answer:
        assert b'"code": 410' in await answer.content.readline()
    assert server.bodies == []


async def test_it_goes_down(proxy: FaultProxy, client: aiohttp.ClientSession) -> None:
    """Open connections break and new ones are refused, until it is up again at the same address."""
    async with client.get("/stream") as answer:
        await answer.content.readline()
        await proxy.go_down()
        with pytest.raises(aiohttp.ClientError):
            await drained(answer)
    with pytest.raises(aiohttp.ClientConnectorError):
        await client.get("/a")
    await proxy.come_up()
    async with client.get("/a") as answer:
        assert answer.status == 201
