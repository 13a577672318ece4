"""python-consul2's endpoints over our own transport.

Only the endpoint classes are used. The library's `Consul` object would let CONSUL_HTTP_ADDR and CONSUL_HTTP_TOKEN
override its arguments, and its asyncio client opens a connection per call. Importing the library costs about 50 ms
(it pulls in `requests`), so this module is imported when the first session or service call is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlencode

from consul import base

from store.consul.transport import ConsulTransport

_EXPECTED = frozenset({200, 404})


class PooledHTTP(base.HTTPClient):  # type: ignore[misc]  # the library has no types
    """The library's HTTP interface. Failures raise errors of `store.kv.protocol`; only 200 and 404 reach its
    callbacks."""

    def __init__(self, transport: ConsulTransport) -> None:
        super().__init__()
        self._transport = transport

    async def get(self, callback: Any, path: str, params: Any = None, headers: Any = None) -> Any:
        return await self._send(callback, "GET", path, params)

    async def put(self, callback: Any, path: str, params: Any = None, data: Any = "", headers: Any = None) -> Any:
        return await self._send(callback, "PUT", path, params, data)

    async def delete(self, callback: Any, path: str, params: Any = None, data: Any = "", headers: Any = None) -> Any:
        return await self._send(callback, "DELETE", path, params, data)

    async def post(self, callback: Any, path: str, params: Any = None, data: Any = "", headers: Any = None) -> Any:
        return await self._send(callback, "POST", path, params, data)

    async def _send(
        self,
        callback: Callable[[base.Response], Any],
        method: str,
        path: str,
        params: Sequence[tuple[str, str]] | dict[str, str] | None,
        data: str | bytes | None = None,
    ) -> Any:
        body = data.encode() if isinstance(data, str) else data
        answer = await self._transport.call(method, path, urlencode(params or ()), body, expected=_EXPECTED)
        headers = {} if answer.raft_index is None else {"X-Consul-Index": str(answer.raft_index)}
        return callback(base.Response(answer.status, headers, answer.body.decode(), answer.body))


class ConsulApi:
    """`agent`, `session`, `health` and `catalog` as in python-consul2; every method is a coroutine function.

    The token travels with the transport, so the library never sees it.
    """

    def __init__(self, transport: ConsulTransport) -> None:
        self.http = PooledHTTP(transport)
        self.token = self.dc = None
        self.consistency = "default"
        self.agent = base.Consul.Agent(self)
        self.session = base.Consul.Session(self)
        self.health = base.Consul.Health(self)
        self.catalog = base.Consul.Catalog(self)
