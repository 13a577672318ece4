"""ConsulStore against servers that misbehave in ways a real Consul can't be made to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from store.consul.client import CHECK_EVERY, ConsulTransport
from store.consul.store import ConsulSettings, ConsulStore
from store.kv import ops
from store.kv.protocol import Denied, SessionSpec, Unavailable

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def served_by(handler: Handler) -> AsyncIterator[ConsulStore]:
    """A store on a server that answers every request with `handler`."""
    runner = web.ServerRunner(web.Server(handler))  # type: ignore[arg-type]  # its own handler type is not exported
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    store = ConsulStore(ConsulSettings.from_env(f"{host}:{port}", environ={}))
    try:
        yield store
    finally:
        await store.close()
        await runner.cleanup()


def hang_up(request: web.BaseRequest) -> web.Response:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def test_a_write_is_sent_once() -> None:
    """The kept-alive connection ends under a transaction: it may have been applied, so it is not sent again."""
    seen: list[str] = []

    async def handler(request: web.Request) -> web.Response:
        seen.append(request.method)
        await request.read()
        return hang_up(request) if len(seen) > 1 else web.json_response(True)

    async with served_by(handler) as store:
        await store.put("a", b"1")  # the connection is in the pool now
        with pytest.raises(Unavailable, match="it may have been applied"):
            await store.txn([ops.create("b", b"1")])
        with pytest.raises(Unavailable, match="it may have been applied"):
            await store.delete("b")
    assert seen == ["PUT", "PUT", "DELETE"]


async def test_of_a_read_nothing_is_said_to_be_applied() -> None:
    """A read without an answer has changed nothing."""

    async def handler(request: web.Request) -> web.StreamResponse:
        return hang_up(request)

    async with served_by(handler) as store:
        with pytest.raises(Unavailable) as caught:
            await store.get("a")
    assert "applied" not in str(caught.value)


async def test_a_server_without_a_leader_is_not_believed() -> None:
    """A stale answer of a server that knows no leader may be arbitrarily old: no answer is better."""

    async def handler(request: web.Request) -> web.Response:
        return web.json_response([], headers={"X-Consul-Index": "7", "X-Consul-KnownLeader": "false"})

    async with served_by(handler) as store:
        with pytest.raises(Unavailable, match="No cluster leader"):
            await store.watch("a/", 7, 1.0)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (web.Response(status=404, text="nginx"), "the server there is not Consul"),
        (web.Response(text="<html>", headers={"X-Consul-Index": "7"}), "an answer that Consul would not give"),
    ],
)
async def test_something_else_answers(answer: web.Response, message: str) -> None:
    """Not Consul at that address: said so, and above all not taken for an empty tree."""

    async def handler(request: web.Request) -> web.Response:
        return web.Response(status=answer.status, body=answer.body, headers=answer.headers)

    async with served_by(handler) as store:
        with pytest.raises(Unavailable, match=message):
            await store.list("rcfarm/")


async def test_the_token_travels_with_every_call() -> None:
    """Also with the calls that go through python-consul2; and answers are asked for uncompressed."""
    tokens: set[str | None] = set()

    async def handler(request: web.Request) -> web.Response:
        tokens.add(request.headers.get("X-Consul-Token"))
        assert request.headers["Accept-Encoding"] == "identity"
        return web.json_response({"ID": "s"}, headers={"X-Consul-Index": "7"})

    async with served_by(handler) as store:
        with_token = ConsulStore(ConsulSettings(url=store.settings.url, token="secret"))
        await with_token.create_session(SessionSpec("x"))
        await with_token.put("a", b"")
        await with_token.close()
    assert tokens == {"secret"}


async def test_watches_beyond_their_share_poll() -> None:
    """With every watch connection taken, a further watch still sees a change soon, and calls go through."""
    index = 7
    waiting = asyncio.Event()

    async def handler(request: web.Request) -> web.Response:
        if "index" in request.query:
            await waiting.wait()
        return web.json_response([], headers={"X-Consul-Index": str(index)})

    async with served_by(handler) as served:
        store = ConsulStore(ConsulSettings(url=served.settings.url, max_connections=4, max_watches=2))
        watches = [asyncio.create_task(store.watch(f"{n}/", index, 60)) for n in range(5)]
        await asyncio.sleep(0.1)
        index = 8
        async with asyncio.timeout(5):
            assert [listing.index for listing in await asyncio.gather(*watches[2:])] == [8, 8, 8]
            assert (await store.list("")).index == 8
        assert not any(watch.done() for watch in watches[:2])
        waiting.set()
        await asyncio.gather(*watches)
        await store.close()


async def test_a_replaced_token_is_used_by_the_next_call(tmp_path: Path) -> None:
    """A replaced file counts after `CHECK_EVERY`, or at once when Consul does not know the token; a write that was
    refused for it is sent again, once. A file that is gone leaves the token in use."""
    seen: list[str] = []
    known = {"one", "two", "three"}

    async def handler(request: web.Request) -> web.Response:
        seen.append(request.headers["X-Consul-Token"])
        if seen[-1] not in known:
            return web.Response(status=403, text="ACL not found")
        return web.json_response(True)

    now = 0.0
    file = tmp_path / "token"
    file.write_text("one")
    runner = web.ServerRunner(web.Server(handler))  # type: ignore[arg-type]  # its own handler type is not exported
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    settings = ConsulSettings.from_env(f"{host}:{port}", environ={"CONSUL_HTTP_TOKEN_FILE": str(file)})
    transport = ConsulTransport(settings, lambda: now)
    try:
        await transport.call("PUT", "/v1/kv/a", body=b"")
        file.write_text("two")
        await transport.call("PUT", "/v1/kv/a", body=b"")
        now = CHECK_EVERY
        await transport.call("PUT", "/v1/kv/a", body=b"")
        file.write_text("three")
        known.remove("two")
        await transport.call("PUT", "/v1/kv/a", body=b"")
        file.unlink()
        now = 2 * CHECK_EVERY
        await transport.call("PUT", "/v1/kv/a", body=b"")
        known.clear()
        with pytest.raises(Denied, match="does not know the token"):
            await transport.call("PUT", "/v1/kv/a", body=b"")
    finally:
        await transport.close()
        await runner.cleanup()
    assert seen == ["one", "one", "two", "two", "three", "three", "three"]
