"""Settings for reaching Consul: the caller's arguments first, then the variables that Consul's own programs read.

An address that the caller gives explicitly always wins over CONSUL_HTTP_ADDR. The token is never shown: not by `repr`,
not in an error; errors only name its source. `token_file` and the TLS files may be replaced at run time:
`store.consul.transport` reads them again.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from store.kv.protocol import Invalid
from store.tls import TlsContexts

if TYPE_CHECKING:
    import ssl

DEFAULT_ADDRESS = "127.0.0.1:8500"
_TRUE, _FALSE = ("1", "t", "true"), ("0", "f", "false")


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
        token, token_source, token_file = _token(environ)
        return cls(
            url=url,
            socket=socket,
            token=token,
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


def _token(environ: Mapping[str, str]) -> tuple[str | None, str, Path | None]:
    """Return the token, its source, and its file if it came from one."""
    if token := environ.get("CONSUL_HTTP_TOKEN", "").strip():
        return token, "CONSUL_HTTP_TOKEN", None
    if path := environ.get("CONSUL_HTTP_TOKEN_FILE"):
        return read_token(Path(path)), f"CONSUL_HTTP_TOKEN_FILE ({path})", Path(path)
    return None, "", None


def _flag(environ: Mapping[str, str], name: str, *, default: bool) -> bool:
    value = environ.get(name, "").strip().lower()
    if not value:
        return default
    if value not in _TRUE + _FALSE:
        raise Invalid(f"{name}={value}: expected true or false")
    return value in _TRUE
