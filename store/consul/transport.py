"""HTTP to Consul: one pool of kept-alive connections per process.

The model: at most `max_connections` connections exist, whatever callers do. Blocking queries hold a
connection each while they wait, so their callers must not start more than `max_watches` at once (`ConsulStore` sees
to that); ordinary calls share the rest and queue for it in order.

A call is sent once. Cancelling it closes its connection and leaves nothing behind, though a write that Consul has
already read may still be applied. The exception is a call that Consul refuses because it does not know the token:
nothing was applied, and it is sent again if the token's file holds another one by now.

Every `CHECK_EVERY` seconds the first call checks whether the files of the token and of TLS were replaced. A connection
is reused only under the TLS context that it was made with, so a new certificate means new connections.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple
from urllib.parse import quote

import aiohttp
import structlog
from yarl import URL

from store.consul import wire
from store.consul.settings import ConsulSettings, read_token
from store.http import NEVER_SENT, ConnectionLost, cause_of, send_writes_once
from store.kv.protocol import Invalid
from store.tls import TlsContexts, file_state

log = structlog.get_logger(__name__)

KEEPALIVE = 60.0  # seconds that an idle connection is kept
CHECK_EVERY = 5.0  # seconds between two checks of the files
REREAD_AFTER_REFUSAL = 1.0  # seconds, at least, between two readings caused by an unknown token
UNKNOWN_TOKEN = "ACL not found"
OK = frozenset({200})


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
        self._call_timeout = self._timeout(settings.call_timeout)
        self._session: aiohttp.ClientSession | None = None

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
        url = URL(f"{self.settings.url}{quote(path)}?{query}", encoded=True)
        limits = self._call_timeout if timeout is None else self._timeout(timeout)
        self._reread_changed_files()
        token = self._token
        response, content = await self._send(method, url, path, body, limits)
        if response.status in (401, 403) and UNKNOWN_TOKEN.encode() in content and self._has_other_token(token):
            response, content = await self._send(method, url, path, body, limits)
        if response.status not in expected:
            raise wire.error_of(self.settings, method, path, response.status, content.decode(errors="replace"))
        index = response.headers.get("X-Consul-Index")
        has_leader = response.headers.get("X-Consul-Knownleader") != "false"
        date = response.headers.get("Date", "")
        return Answer(response.status, content, None if index is None else int(index), has_leader, date)

    async def close(self) -> None:
        """Close every connection."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _send(
        self, method: str, url: URL, path: str, body: bytes | None, limits: aiohttp.ClientTimeout
    ) -> tuple[aiohttp.ClientResponse, bytes]:
        try:
            async with self._open().request(
                method,
                url,
                data=body,
                headers={"X-Consul-Token": self._token} if self._token else None,
                timeout=limits,
                allow_redirects=False,
                ssl=True if self._ssl is None else self._ssl,
                server_hostname=self.settings.server_name,
            ) as response:
                return response, await response.read()
        except (aiohttp.ClientError, ConnectionLost, TimeoutError) as error:
            never_sent = isinstance(error, NEVER_SENT)
            fate = "" if method == "GET" else wire.NOT_APPLIED if never_sent else wire.MAYBE_APPLIED
            cause = f"no answer within {limits.total:g} s" if type(error) is TimeoutError else cause_of(error)
            call = wire.describe(method, path)
            raise wire.unavailable(self.settings, call, cause, applied=fate) from error

    def _reread_changed_files(self) -> None:
        """Read the files again if a check is due and they were replaced."""
        if self.settings.files and self._clock() >= self._check_at:
            self._check_at = self._clock() + CHECK_EVERY
            seen = [file_state(path) for path in self.settings.files]
            if seen != self._seen:
                self._seen = seen
                self._reread()

    def _has_other_token(self, refused: str | None) -> bool:
        """Return whether there is a token other than the one that Consul does not know."""
        if self._token == refused and self._clock() >= self._reread_at + REREAD_AFTER_REFUSAL:
            self._reread_at = self._clock()
            self._reread()
        return self._token != refused

    def _reread(self) -> None:
        """Read the files. The former credentials stay in use if that fails; Consul decides whether they are valid."""
        settings = self.settings
        try:
            if settings.token_file is not None and (token := read_token(settings.token_file)):
                self._token = token
            self._ssl = settings.ssl_context(self._tls)
        except Invalid as error:
            log.warning("Could not read the credentials for Consul; keeping the former ones", error=str(error))

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            limit, socket = self.settings.max_connections, self.settings.socket
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=limit, keepalive_timeout=KEEPALIVE)
                if socket is None
                else aiohttp.UnixConnector(socket, limit=limit, keepalive_timeout=KEEPALIVE),
                # Consul is near: compressing would cost both ends more than sending the bytes does.
                headers={"User-Agent": "rcfarm", "Accept-Encoding": "identity"},
                skip_auto_headers=("Content-Type",),
                cookie_jar=aiohttp.DummyCookieJar(),
                middlewares=(send_writes_once,),
            )
        return self._session

    def _timeout(self, total: float) -> aiohttp.ClientTimeout:
        return aiohttp.ClientTimeout(total=total, sock_connect=self.settings.connect_timeout)
