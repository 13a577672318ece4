"""The listener of a daemon: `/livez`, `/readyz` and `/metrics`; `/healthz` is `/livez` under its older name.

`/livez` fails when the daemon makes no progress (`StallDetector`): a restart may help. `/readyz` fails while a
condition of the work does not hold, and names it: a restart does not help. Both answer any client with a status code;
the reasons, and the metrics, require the token if one is set.

A listener beyond loopback is refused without a token. `store.http_server` bounds connections and times, so that
`/livez` answers however many connections are held open.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import NamedTuple

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from rcfarm.config import token_in
from rcfarm.config.settings import BadSettings, WebSettings
from store.http_server import Bounds, is_loopback, listening
from store.tls import TlsFiles

OFF = "off"
_SHUTDOWN_SECONDS = 1.0
BOUNDS = Bounds()


class Condition(NamedTuple):
    """A condition of readiness. `reason`: why it does not hold, and what it waits for; if it holds, a note for
    operators.
    """

    name: str
    holds: bool
    reason: str = ""


class Health(NamedTuple):
    """The functions that the endpoints call. `stalled`: why the daemon makes no progress, or "". `conditions`: those of
    readiness."""

    stalled: Callable[[], str]
    conditions: Callable[[], Sequence[Condition]]


class Address(NamedTuple):
    """An address to listen on. Host "": all addresses. Port 0: a free one."""

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        return is_loopback(self.host)


def parse_address(text: str, default_port: int, setting: str = "web.listen") -> Address | None:
    """Parse a listener's setting: None for `off`, loopback and the default port for "". Raises `BadSettings`."""
    if text == OFF:
        return None
    host, _, port = text.rpartition(":") if text else ("127.0.0.1", "", str(default_port))
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not host or not port.isdigit() or int(port) > 65535 or ("/" in host):
        raise BadSettings(
            f"{setting}: {text!r} is not HOST:PORT, [IPV6]:PORT or off (all addresses: 0.0.0.0:{default_port})"
        )
    return Address(host, int(port))


def read_token(settings: WebSettings) -> str:
    """Return the token, from the settings or their file; "" for none. Raises `BadSettings`."""
    if not settings.token_file:
        return settings.token
    if settings.token:
        raise BadSettings("web.token and web.token_file are both set; keep one")
    return token_in("web.token_file", settings.token_file)


def listener(settings: WebSettings, default_port: int) -> tuple[Address | None, str]:
    """Return the address to listen on and the token. Raises `BadSettings` for one beyond loopback without a token."""
    address, token = parse_address(settings.listen, default_port), read_token(settings)
    if address and not address.is_loopback and not token:
        raise BadSettings(
            f"web.listen: {address.host} is reachable from other machines, so a token is required: set web.token_file "
            f"(or RCFARM_WEB_TOKEN), or listen on 127.0.0.1:{address.port}"
        )
    return address, token


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


class StallDetector:
    """Measures for how long a counter of finished work has not moved while there was work.

    `stall_after`: seconds without progress before work counts as stuck. `clock`: monotonic, in seconds.
    """

    def __init__(self, stall_after: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._stall_after, self._clock = stall_after, clock
        self._seen: int | None = None
        self._moved = clock()

    def stalled_for(self, completed: int, *, busy: bool) -> float:
        """Return the seconds without progress if they exceed `stall_after`, else 0.0. Call it every few seconds."""
        now = self._clock()
        if not busy or completed != self._seen:
            self._seen, self._moved = completed, now
        silent = now - self._moved
        return silent if silent > self._stall_after else 0.0
