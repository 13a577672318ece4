"""Consul's HTTP API over an embedded store: the subset that we use, so that there is one client path, not two.

The CLI, agents in other processes, python-consul2 and Consul's own `consul kv` and `consul lock` work against it
unchanged. Answers (status, body, headers, wording of refusals) follow Consul 1.8.7, so that `ConsulStore` needs to know
nothing about it.

Every request is answered in the event loop that the store belongs to. A client that goes away ends its blocking query;
stopping the server answers the queries in flight as things stand.

A client that may write into a store can start processes as the agent's user, so a store that other processes can reach
has a token, and the token is checked before a body is read. `store.http_server` bounds connections and times.
"""

from __future__ import annotations

import hmac
import platform
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from store.embedded.consul_api.agent import AgentApi, LocalAgent
from store.embedded.consul_api.kv import LONGEST_WAIT, KvApi
from store.embedded.consul_api.session import SessionApi
from store.embedded.store import EmbeddedStore
from store.http_server import Bounds, listening, read_body
from store.kv.protocol import Denied, Invalid, SessionExpired, StoreError, TooLarge

MAX_BODY = 8 * 1024 * 1024  # bytes; Consul's own limits are far below and answered in its words
BODY_SECONDS = 10.0
BOUNDS = Bounds(request_seconds=LONGEST_WAIT + 60.0, connections=512, drop_after=None)
_SHUTDOWN_SECONDS = 2.0
_OPEN_PATHS = ("/v1/status/",)
_STATUS_OF_ERROR: dict[type[StoreError], int] = {Denied: 403, Invalid: 400, TooLarge: 413}


def consul_app(store: EmbeddedStore, *, token: str | None, node: str | None = None) -> web.Application:
    """Return the application. `token`: required of every request when given; `node`: by default the host's name."""
    agent = LocalAgent(store)
    name = node or platform.node()
    app = web.Application(middlewares=[_checked(token), _answer_errors], client_max_size=MAX_BODY)
    for api in (KvApi(store), SessionApi(store, agent, name), AgentApi(agent, name)):
        app.add_routes(api.routes())

    async def start(_: web.Application) -> None:
        agent.restore()

    async def stop(_: web.Application) -> None:
        agent.close()
        store.answer_watches()

    app.on_startup.append(start)
    app.on_shutdown.append(stop)
    return app


@asynccontextmanager
async def serve_consul_api(
    store: EmbeddedStore, *, host: str = "127.0.0.1", port: int = 0, token: str | None = None, node: str | None = None
) -> AsyncIterator[str]:
    """Listen while the context lasts; yields the address as `HOST:PORT`. Port 0: a free one."""
    app = consul_app(store, token=token, node=node)
    async with listening(app, host, port, BOUNDS, shutdown_timeout=_SHUTDOWN_SECONDS) as address:
        yield address


def _checked(token: str | None) -> Middleware:
    @web.middleware
    async def check_token(request: web.Request, handler: Handler) -> web.StreamResponse:
        if token is not None and not request.path.startswith(_OPEN_PATHS):
            bearer = request.headers.get("Authorization", "")
            if bearer.startswith("Bearer "):
                given = bearer.removeprefix("Bearer ").strip()
            else:
                given = request.headers.get("X-Consul-Token") or request.query.get("token", "")
            if not hmac.compare_digest(given.encode(errors="surrogatepass"), token.encode()):
                return web.Response(status=403, text="ACL not found" if given else "Permission denied")
        await read_body(request, BODY_SECONDS)  # handlers find it read
        return await handler(request)

    return check_token


@web.middleware
async def _answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except SessionExpired as error:
        return web.Response(status=500, text=f"invalid session: {error}")
    except StoreError as error:
        return web.Response(status=_STATUS_OF_ERROR.get(type(error), 500), text=str(error))
