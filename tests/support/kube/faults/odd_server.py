"""A local HTTP server with answers that no real API server can be made to give, and a client of it."""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from store.kube.client.client import KubeClient
from store.kube.client.credentials import Access, FixedAccess
from store.kube.client.transport import Credentials, Limits

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def serving(handler: Handler, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """Yield the URL of a server that answers every request with `handler`."""
    server = web.Server(handler, handler_cancellation=True)  # type: ignore[arg-type]  # its type is not exported
    runner = web.ServerRunner(server, shutdown_timeout=0.01)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
    await site.start()
    host, port = runner.addresses[0][:2]
    try:
        yield f"{'https' if tls else 'http'}://{host}:{port}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def client_of(handler: Handler, **limits: Any) -> AsyncIterator[KubeClient]:
    """Yield a client without credentials of a server that answers with `handler`; `limits` as of `Limits`."""
    async with serving(handler) as url:
        credentials = await Credentials.open(FixedAccess(Access(url)))
        async with KubeClient(credentials, limits=Limits(**limits)) as client:
            yield client


def status_answer(code: int, reason: str, message: str = "", **headers: str) -> web.Response:
    """Return a refusal as the API server words it. `headers`: with underscores for dashes."""
    body = {"kind": "Status", "apiVersion": "v1", "code": code, "reason": reason, "message": message or reason}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return web.json_response(body, status=code, headers=named)


def event(kind: str, obj: dict[str, Any]) -> bytes:
    """Return one line of a watch."""
    return json.dumps({"type": kind, "object": obj}).encode() + b"\n"


async def stream(request: web.Request, *chunks: bytes) -> web.StreamResponse:
    """Answer a watch with `chunks` and keep it open."""
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    response.enable_chunked_encoding()
    await response.prepare(request)
    for chunk in chunks:
        await response.write(chunk)
    return response


def hang_up(request: web.BaseRequest) -> web.Response:
    """End the connection without an answer."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()
