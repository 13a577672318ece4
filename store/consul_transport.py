"""HTTP to Consul: one pool of kept-alive connections per process.

The model: at most `max_connections` connections exist, whatever is asked of this module. Blocking queries hold a
connection each while they wait, so their callers must not start more than `max_watches` at once (`ConsulStore` sees
to that); ordinary calls share the rest and queue for it in order.

A call is sent once. Cancelling it closes its connection, so nothing of it is left behind, though a write that Consul
has read already may still be applied.
"""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import quote

import aiohttp
from yarl import URL

from store import consul_errors as errors
from store.consul_settings import ConsulSettings
from store.http import NEVER_SENT, ConnectionLost, cause_of, send_writes_once
from store.kv import Unavailable

KEEPALIVE = 60.0  # seconds that an idle connection is kept
OK = frozenset({200})


class Answer(NamedTuple):
    """`raft_index`: X-Consul-Index, or None without one. `has_leader`: the server knows one. `date`: HTTP's header."""

    status: int
    body: bytes
    raft_index: int | None
    has_leader: bool
    date: str = ""


class Transport:
    """Sends calls and turns every failure into an error of `store.kv`."""

    def __init__(self, settings: ConsulSettings) -> None:
        self.settings = settings
        self._ssl = settings.ssl_context()
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

        Raises an error of `store.kv` for a status that is not `expected`, and `Unavailable` when there is no answer.
        """
        url = URL(f"{self.settings.url}{quote(path)}?{query}", encoded=True)
        limits = self._call_timeout if timeout is None else self._timeout(timeout)
        try:
            async with self._open().request(
                method,
                url,
                data=body,
                timeout=limits,
                allow_redirects=False,
                server_hostname=self.settings.server_name,
            ) as response:
                content = await response.read()
        except (aiohttp.ClientError, ConnectionLost, TimeoutError) as error:
            raise self._no_answer(method, path, error, limits) from error
        if response.status not in expected:
            raise errors.error_of(self.settings, method, path, response.status, content.decode(errors="replace"))
        index = response.headers.get("X-Consul-Index")
        has_leader = response.headers.get("X-Consul-Knownleader") != "false"
        date = response.headers.get("Date", "")
        return Answer(response.status, content, None if index is None else int(index), has_leader, date)

    async def close(self) -> None:
        """Close every connection."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=self._connector(),
                headers=self._headers(),
                skip_auto_headers=("Content-Type",),
                cookie_jar=aiohttp.DummyCookieJar(),
                middlewares=(send_writes_once,),
            )
        return self._session

    def _connector(self) -> aiohttp.BaseConnector:
        limit = self.settings.max_connections
        if self.settings.socket is not None:
            return aiohttp.UnixConnector(self.settings.socket, limit=limit, keepalive_timeout=KEEPALIVE)
        tls = True if self._ssl is None else self._ssl
        return aiohttp.TCPConnector(limit=limit, keepalive_timeout=KEEPALIVE, ssl=tls)

    def _headers(self) -> dict[str, str]:
        # Consul is near: compressing costs both ends more than the bytes would.
        headers = {"User-Agent": "rcfarm", "Accept-Encoding": "identity"}
        if self.settings.token:
            headers["X-Consul-Token"] = self.settings.token
        return headers

    def _timeout(self, total: float) -> aiohttp.ClientTimeout:
        return aiohttp.ClientTimeout(total=total, sock_connect=self.settings.connect_timeout)

    def _no_answer(self, method: str, path: str, error: Exception, limits: aiohttp.ClientTimeout) -> Unavailable:
        never_sent = isinstance(error, NEVER_SENT)
        fate = "" if method == "GET" else errors.NOT_APPLIED if never_sent else errors.MAYBE_APPLIED
        cause = f"no answer within {limits.total:g} s" if type(error) is TimeoutError else cause_of(error)
        return errors.unavailable(self.settings, errors.describe(method, path), cause, applied=fate)
