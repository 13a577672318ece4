"""The listener of a daemon: `/livez`, `/readyz` and `/metrics`; `/healthz` is `/livez` under its older name.

`/livez` fails when the daemon makes no progress (`StallDetector`): a restart may help. `/readyz` fails while a
condition of the work does not hold, and names it: a restart does not help. Both answer any client with a status code;
the reasons, and the metrics, require the token if one is set.

A listener beyond loopback is refused without a token. `store.http_server` bounds connections and times, so that
`/livez` answers however many connections are held open.
"""

from __future__ import annotations

import hmac
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from rcfarm.config.settings import BadSettings
from rcfarm.daemon.health import Health
from rcfarm.daemon.listener import Address
from store.http_server import Bounds, listening
from store.tls import TlsFiles

_SHUTDOWN_SECONDS = 1.0
BOUNDS = Bounds()


def web_app(health: Health, registry: CollectorRegistry, *, token: str = "") -> web.Application:
    """Return the application. `token`: required for reasons and metrics when it is not empty."""
    app = web.Application()
    app.add_routes(health_routes(health, registry, token=token))
    return app


def health_routes(health: Health, registry: CollectorRegistry, *, token: str = "") -> list[web.RouteDef]:
    """Return the listener's routes, for other applications."""

    def may_read(request: web.Request) -> bool:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        return not token or hmac.compare_digest(given.encode(errors="surrogatepass"), token.encode())

    async def livez(request: web.Request) -> web.Response:
        reason = health.stalled()
        text = f"stalled: {reason}" if may_read(request) else "stalled"
        return web.Response(status=503 if reason else 200, text=f"{text if reason else 'ok'}\n")

    async def readyz(request: web.Request) -> web.Response:
        conditions = health.conditions()
        ready = all(condition.holds for condition in conditions)
        verdict = "ready" if ready else "not ready"
        lines = []
        for name, holds, reason in conditions if may_read(request) else ():
            lines.append(f"[{'+' if holds else '-'}] {name}{': ' if reason else ''}{reason}")
        return web.Response(status=200 if ready else 503, text="\n".join([*lines, verdict, ""]))

    return [
        web.get("/livez", livez),
        web.get("/healthz", livez),
        web.get("/readyz", readyz),
        _metrics_route(registry, may_read),
    ]


def metrics_app(registry: CollectorRegistry) -> web.Application:
    """Return an application that has `/metrics` alone, for everyone."""
    app = web.Application()
    app.add_routes([_metrics_route(registry, lambda request: True)])
    return app


def _metrics_route(registry: CollectorRegistry, may_read: Callable[[web.Request], bool]) -> web.RouteDef:
    async def metrics(request: web.Request) -> web.Response:
        if not may_read(request):
            return web.Response(
                status=401, headers={"WWW-Authenticate": "Bearer"}, text="send the token: Authorization: Bearer TOKEN\n"
            )
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(registry), headers={"Content-Type": content_type})

    return web.get("/metrics", metrics)


@asynccontextmanager
async def serving(
    app: web.Application,
    address: Address,
    *,
    setting: str = "web.listen",
    bounds: Bounds = BOUNDS,
    tls: TlsFiles | None = None,
    shutdown_timeout: float = _SHUTDOWN_SECONDS,
) -> AsyncIterator[str]:
    """Listen while the context lasts. Yield `HOST:PORT`. Raises `BadSettings`, naming `setting`, when the address is in
    use or not this machine's. `shutdown_timeout`: seconds that requests in flight have at the end.
    """
    async with AsyncExitStack() as stack:
        try:
            where = await stack.enter_async_context(
                listening(app, address.host or None, address.port, bounds, tls=tls, shutdown_timeout=shutdown_timeout)
            )
        except OSError as error:
            raise BadSettings(f"{setting}: can't listen on {address.host}:{address.port}: {error.strerror}") from error
        yield where
