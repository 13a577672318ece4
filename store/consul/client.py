"""HTTP to Consul: settings, one pool of kept-alive connections per process, and refusals as errors.

The model: at most `max_connections` connections exist, whatever callers do. Blocking queries hold a
connection each while they wait, so their callers must not start more than `max_watches` at once (`ConsulStore` sees
to that); ordinary calls share the rest and queue for it in order.

A call is sent once. Cancelling it closes its connection and leaves nothing behind, though a write that Consul has
already read may still be applied. The exception is a call that Consul refuses because it does not know the token:
nothing was applied, and it is sent again if the token's file holds another one by now.

Settings are the caller's arguments first, then the variables that Consul's own programs read; an address that the
caller gives explicitly always wins over CONSUL_HTTP_ADDR. The token is never shown: not by `repr`, not in an error;
errors only name its source. Every `CHECK_EVERY` seconds the first call checks whether the files of the token and of TLS
were replaced. A connection is reused only under the TLS context that it was made with, so a new certificate means new
connections.

Consul answers many permanent errors with status 500, so some are recognised by their text (as of 1.8.7). Any other
answer counts as `Unavailable`, which is safe: the caller reads again before it acts again.
"""

from __future__ import annotations

import os
import re
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, urlsplit

import structlog

from store.http_client import ConnectionLost, HttpClient, NeverSent, Response
from store.kv.protocol import Denied, Invalid, StoreError, TooLarge, Unavailable
from store.tls import TlsContexts, file_state

log = structlog.get_logger(__name__)

DEFAULT_ADDRESS = "127.0.0.1:8500"
_TRUE, _FALSE = ("1", "t", "true"), ("0", "f", "false")
KEEPALIVE = 60.0  # seconds that an idle connection is kept
CHECK_EVERY = 5.0  # seconds between two checks of the files
REREAD_AFTER_REFUSAL = 1.0  # seconds, at least, between two readings caused by an unknown token
OK = frozenset({200})
_UNKNOWN_TOKEN = "ACL not found"
_MAYBE_APPLIED = "it may have been applied"
_NOT_APPLIED = "it was not applied"
_NOTHING_CHANGED = "nothing was changed"  # an embedded store's own words
_NOT_READY = ("Missing check '", "is in critical state")
_PERMANENT = ("Invalid Session TTL", "UUID must be")
NO_LEADER = "No cluster leader"


class CheckNotReady(Unavailable):
    """The session's check has not reached the catalog, or is not passing there yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsulSettings:
    """The address, the credentials and the limits of a Consul client. Durations in seconds.

    `url`: `http://HOST:PORT` or `https://HOST:PORT`; with `socket`, the path of a unix socket, only its scheme counts.
    `token_source`: where the token came from, for error messages; `token_file`: the file, if it was one.
    `max_connections`: of this process to Consul, which by default serves 200 per client address and drops further
    ones. `max_watches`: the number of them that blocking queries may hold; the rest is always free for calls.
    `connect_timeout`: for one connection. `call_timeout`: for one call in all, above the 7 s for which Consul itself
    waits for a new leader.
    """

    url: str = f"http://{DEFAULT_ADDRESS}"
    socket: str | None = None
    token: str | None = field(default=None, repr=False)
    token_source: str = ""
    token_file: Path | None = None
    ca_file: str | None = None
    client_cert: str | None = None
    client_key: str | None = None
    verify: bool = True
    server_name: str | None = None
    max_connections: int = 64
    max_watches: int = 48
    connect_timeout: float = 5.0
    call_timeout: float = 15.0

    def __post_init__(self) -> None:
        if not 0 < self.max_watches < self.max_connections:
            raise Invalid(
                f"Consul settings: max_watches ({self.max_watches}) must be above 0 and below max_connections "
                f"({self.max_connections}), so that calls always find a connection"
            )

    @classmethod
    def from_env(cls, address: str | None = None, *, environ: Mapping[str, str] = os.environ) -> ConsulSettings:
        """Return the settings from `address` (else CONSUL_HTTP_ADDR, else the local agent) and the CONSUL_* variables.

        `address`: `HOST`, `HOST:PORT`, `consul://…`, `consuls://…` (TLS), `http://…`, `https://…` or `unix:///PATH`.
        Raises `Invalid`, naming the variable, for an invalid value.
        """
        source = "the store address" if address else "CONSUL_HTTP_ADDR"
        url, socket = _parse_address(address or environ.get("CONSUL_HTTP_ADDR") or DEFAULT_ADDRESS, source, environ)
        token: str | None = environ.get("CONSUL_HTTP_TOKEN", "").strip()
        token_source, token_file = "CONSUL_HTTP_TOKEN" if token else "", None
        if not token and (path := environ.get("CONSUL_HTTP_TOKEN_FILE")):
            token, token_source, token_file = read_token(Path(path)), f"CONSUL_HTTP_TOKEN_FILE ({path})", Path(path)
        return cls(
            url=url,
            socket=socket,
            token=token or None,
            token_source=token_source,
            token_file=token_file,
            ca_file=environ.get("CONSUL_CACERT") or None,
            client_cert=environ.get("CONSUL_CLIENT_CERT") or None,
            client_key=environ.get("CONSUL_CLIENT_KEY") or None,
            verify=_flag(environ, "CONSUL_HTTP_SSL_VERIFY", default=True),
            server_name=environ.get("CONSUL_TLS_SERVER_NAME") or None,
        )

    @property
    def place(self) -> str:
        """For messages: host and port, or the socket's path."""
        return self.socket or urlsplit(self.url).netloc

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that the settings depend on and that may change."""
        named = (self.token_file, self.ca_file, self.client_cert, self.client_key)
        return tuple(Path(name) for name in named if name)

    def ssl_context(self, contexts: TlsContexts) -> ssl.SSLContext | None:
        """Return the settings' TLS context, or None for plain HTTP. Raises `Invalid` for a file that can't be used."""
        if not self.url.startswith("https:"):
            return None
        try:
            return contexts.context(self.ca_file, self.client_cert, self.client_key, verify=self.verify)
        except OSError as error:
            files = [self.ca_file, self.client_cert, self.client_key]
            named = ", ".join(name for name in files if name)
            raise Invalid(f"TLS files for Consul ({named}): {error}; see CONSUL_CACERT, CONSUL_CLIENT_CERT") from error


class Answer(NamedTuple):
    """`raft_index`: X-Consul-Index, or None without one. `has_leader`: the server knows one. `date`: HTTP's header."""

    status: int
    body: bytes
    raft_index: int | None
    has_leader: bool
    date: str = ""


class ConsulTransport:
    """Sends calls and turns every failure into an error of `store.kv.protocol`."""

    def __init__(self, settings: ConsulSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self.settings = settings
        self._clock = clock
        self._tls = TlsContexts()
        self._token, self._ssl = settings.token, settings.ssl_context(self._tls)
        self._seen = [file_state(path) for path in settings.files]
        self._check_at, self._reread_at = clock() + CHECK_EVERY, float("-inf")
        parts = urlsplit(settings.url)
        self._client = HttpClient(
            host=parts.hostname or "",
            port=parts.port or (443 if parts.scheme == "https" else 80),
            socket=settings.socket,
            server_name=settings.server_name,
            # Consul is near: compressing would cost both ends more than sending the bytes does.
            headers={"User-Agent": "rcfarm", "Accept-Encoding": "identity"},
            limit=settings.max_connections,
            keepalive=KEEPALIVE,
            connect_timeout=settings.connect_timeout,
        )

    async def call(
        self,
        method: str,
        path: str,
        query: str = "",
        body: bytes | None = None,
        *,
        timeout: float | None = None,
        expected: frozenset[int] = OK,
    ) -> Answer:
        """Send one call. `path` is not encoded yet, `query` is. `timeout`: seconds in all, else `call_timeout`.

        Raises an error of `store.kv.protocol` for a status that is not `expected`, and `Unavailable` when there is no
        answer.
        """
        target = f"{quote(path)}?{query}"
        total = self.settings.call_timeout if timeout is None else timeout
        if self.settings.files and self._clock() >= self._check_at:
            self._check_at = self._clock() + CHECK_EVERY
            seen = [file_state(file) for file in self.settings.files]
            if seen != self._seen:
                self._seen = seen
                self._reread()
        token = self._token
        response = await self._send(method, target, path, body, total)
        if response.status in (401, 403) and _UNKNOWN_TOKEN.encode() in response.body:
            if self._token == token and self._clock() >= self._reread_at + REREAD_AFTER_REFUSAL:
                self._reread_at = self._clock()
                self._reread()
            if self._token != token:
                response = await self._send(method, target, path, body, total)
        if response.status not in expected:
            raise error_of(self.settings, method, path, response.status, response.body.decode(errors="replace"))
        index = response.headers.get("x-consul-index")
        has_leader = response.headers.get("x-consul-knownleader") != "false"
        date = response.headers.get("date", "")
        return Answer(response.status, response.body, None if index is None else int(index), has_leader, date)

    async def close(self) -> None:
        """Close every connection."""
        await self._client.close()

    async def _send(self, method: str, target: str, path: str, body: bytes | None, timeout: float) -> Response:
        """Send one call with the current credentials. `target`: encoded path and query."""
        headers = {"X-Consul-Token": self._token} if self._token else None
        try:
            return await self._client.call(method, target, body, headers, tls=self._ssl, timeout=timeout)
        except ValueError as error:
            raise Invalid(f"the token from {self.settings.token_source} can't be sent: {error}") from error
        except (ConnectionLost, NeverSent, TimeoutError) as error:
            fate = "" if method == "GET" else _NOT_APPLIED if isinstance(error, NeverSent) else _MAYBE_APPLIED
            cause = f"no answer within {timeout:g} s" if isinstance(error, TimeoutError) else str(error)
            raise unavailable(self.settings, describe(method, path), cause, applied=fate) from error

    def _reread(self) -> None:
        """Read the files. The former credentials stay in use if that fails; Consul decides whether they are valid."""
        settings = self.settings
        try:
            if settings.token_file is not None and (token := read_token(settings.token_file)):
                self._token = token
            self._ssl = settings.ssl_context(self._tls)
        except Invalid as error:
            log.warning("Could not read the credentials for Consul; keeping the former ones", error=str(error))


def _parse_address(address: str, source: str, environ: Mapping[str, str]) -> tuple[str, str | None]:
    scheme, separator, rest = address.partition("://")
    if not separator:
        scheme, rest = "consul", address
    if scheme == "unix":
        return "http://consul", rest
    schemes = {"consul": "http", "consuls": "https", "http": "http", "https": "https"}
    if scheme not in schemes:
        raise Invalid(f"{source} {address!r}: unknown scheme {scheme!r}; write HOST:PORT, http(s)://… or unix:///PATH")
    tls = scheme == "consul" and _flag(environ, "CONSUL_HTTP_SSL", default=False)
    parts = urlsplit(f"{'https' if tls else schemes[scheme]}://{rest}")
    try:
        port = parts.port or 8500
    except ValueError as error:
        raise Invalid(f"{source} {address!r}: {error}") from error
    if not parts.hostname or parts.path.strip("/") or parts.username is not None:
        raise Invalid(f"{source} {address!r}: expected HOST:PORT")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}:{port}", None


def read_token(path: Path) -> str | None:
    """Return the token in a file. Raises `Invalid`."""
    try:
        return path.read_text(encoding="utf-8").strip() or None
    except (OSError, UnicodeDecodeError) as error:
        raise Invalid(f"CONSUL_HTTP_TOKEN_FILE: {error}") from error


def _flag(environ: Mapping[str, str], name: str, *, default: bool) -> bool:
    value = environ.get(name, "").strip().lower()
    if not value:
        return default
    if value not in _TRUE + _FALSE:
        raise Invalid(f"{name}={value}: expected true or false")
    return value in _TRUE


def seconds(duration: str) -> float:
    """Return a Go duration, such as `1m30s` or `250ms`, in seconds."""
    sizes = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
    return sum(float(number) * sizes[unit] for number, unit in re.findall(r"([0-9.]+)([a-zµ]+)", duration))


def describe(method: str, path: str) -> str:
    """Return the call's name for messages, without the API's version. `path` is not encoded."""
    return f"{method} {path.removeprefix('/v1/')}"


def unavailable(settings: ConsulSettings, call: str, cause: str, *, applied: str = "") -> Unavailable:
    """Return the error for a missing or unusable answer. `applied`: the known fate of a write; "" for a read."""
    fate = f"; {applied}" if applied else ""
    return Unavailable(f"Consul at {settings.place} is unavailable: {cause} ({call}{fate})")


def denied(settings: ConsulSettings, call: str, text: str, permission: str = "") -> Denied:
    """Return the error for a missing permission. It names the token's source, never the token."""
    if not settings.token_source:
        advice = (
            "no token is set; set CONSUL_HTTP_TOKEN or CONSUL_HTTP_TOKEN_FILE (that of an embedded store is the file "
            "endpoint.token in its directory)"
        )
    elif "ACL not found" in text:
        advice = f"Consul does not know the token from {settings.token_source}"
    else:
        advice = f"check the policies of the token from {settings.token_source}"
    needed = f" (needs {permission})" if permission and "Missing " not in text else ""
    return Denied(f"Consul at {settings.place} denied {call}: {text}{needed}; {advice}")


def error_of(settings: ConsulSettings, method: str, path: str, status: int, text: str) -> StoreError:
    """Return the error for an HTTP answer that is neither a success nor an expected 404 or 409."""
    call, text = describe(method, path), text.strip()
    if status in (401, 403):
        area, _, name = path.removeprefix("/v1/").partition("/")
        access = "read" if method == "GET" else "write"
        permission = {"kv": f"key:{access} on {name}", "session": f"session:{access}"}.get(area, "")
        return denied(settings, call, text, permission)
    if status == 413:
        return TooLarge(f"Consul at {settings.place} did not take {call}: {text}")
    if 300 <= status < 400:
        return Invalid(f"{call}: Consul's HTTP API can't address a key with an empty segment, '.' or '..' in it")
    if status < 500 and status != 429:
        return Invalid(f"Consul at {settings.place} did not understand {call}: status {status}, {text or 'no reason'}")
    if any(known in text for known in _PERMANENT):
        return Invalid(f"Consul at {settings.place} refused {call}: {text}")
    cause = f"status {status}, {text or 'no reason'}"
    if any(known in text for known in _NOT_READY):
        return CheckNotReady(f"Consul at {settings.place}: {text} ({call})")
    if method == "GET" or _NOTHING_CHANGED in text:
        return unavailable(settings, call, cause)
    is_refused = status == 429 or NO_LEADER in text
    return unavailable(settings, call, cause, applied=_NOT_APPLIED if is_refused else _MAYBE_APPLIED)
