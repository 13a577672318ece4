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
from urllib.parse import unquote

from aiohttp import web
from aiohttp.typedefs import Handler

from store.embedded.consul_api.agent import AgentApi, LocalAgent, SessionApi
from store.embedded.consul_api.wire import (
    LONGEST_WAIT,
    READ_HEADERS,
    VERBS,
    blocking_of,
    decode_txn,
    index_headers,
    json_response,
    number_of,
    pair_of,
    to_op,
    txn_json,
)
from store.embedded.state import TransactionRefused
from store.embedded.store import EmbeddedStore
from store.http_server import Bounds, listening, read_body
from store.kv import ops
from store.kv.protocol import (
    MAX_TXN_OPS,
    MAX_VALUE_BYTES,
    Denied,
    Entry,
    Invalid,
    Op,
    OpFailure,
    SessionExpired,
    StoreError,
    TooLarge,
)

MAX_BODY = 8 * 1024 * 1024  # bytes; Consul's own limits are far below and answered in its words
BODY_SECONDS = 10.0
BOUNDS = Bounds(request_seconds=LONGEST_WAIT + 60.0, connections=512, drop_after=None)
_SHUTDOWN_SECONDS = 2.0
_OPEN_PATHS = ("/v1/status/",)
_WRITES = frozenset({"set", "cas", "lock", "unlock", "delete", "delete-tree", "delete-cas"})
_HELP = "See https://www.consul.io/docs/agent/options.html"
_STATUS_OF_ERROR: dict[type[StoreError], int] = {Denied: 403, Invalid: 400, TooLarge: 413}


@asynccontextmanager
async def serve_consul_api(
    store: EmbeddedStore, *, host: str = "127.0.0.1", port: int = 0, token: str | None = None, node: str | None = None
) -> AsyncIterator[str]:
    """Listen while the context lasts; yields the address as `HOST:PORT`. Port 0: a free one.

    `token`: required of every request when given; `node`: by default the host's name.
    """
    agent = LocalAgent(store)
    name = node or platform.node()

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if token is not None and not request.path.startswith(_OPEN_PATHS):
            bearer = request.headers.get("Authorization", "")
            if bearer.startswith("Bearer "):
                given = bearer.removeprefix("Bearer ").strip()
            else:
                given = request.headers.get("X-Consul-Token") or request.query.get("token", "")
            if not hmac.compare_digest(given.encode(errors="surrogatepass"), token.encode()):
                return web.Response(status=403, text="ACL not found" if given else "Permission denied")
        await read_body(request, BODY_SECONDS)  # handlers find it read
        try:
            return await handler(request)
        except SessionExpired as error:
            return web.Response(status=500, text=f"invalid session: {error}")
        except StoreError as error:
            return web.Response(status=_STATUS_OF_ERROR.get(type(error), 500), text=str(error))

    app = web.Application(middlewares=[check], client_max_size=MAX_BODY)
    for api in (KvApi(store), SessionApi(store, agent, name), AgentApi(agent, name)):
        app.add_routes(api.routes())

    async def stop(_: web.Application) -> None:
        agent.close()
        store.answer_watches()

    app.on_shutdown.append(stop)
    agent.restore()
    async with listening(app, host, port, BOUNDS, shutdown_timeout=_SHUTDOWN_SECONDS) as address:
        yield address


class KvApi:
    """Handlers of `/v1/kv` and `/v1/txn`, answering as a Consul 1.8 server does."""

    def __init__(self, store: EmbeddedStore) -> None:
        self._store = store

    def routes(self) -> list[web.RouteDef]:
        """Return the routes to mount."""
        return [
            web.get("/v1/kv/{key:.*}", self.read),
            web.put("/v1/kv/{key:.*}", self.write),
            web.delete("/v1/kv/{key:.*}", self.delete),
            web.put("/v1/txn", self.txn),
        ]

    async def read(self, request: web.Request) -> web.Response:
        """GET: one key, everything under a prefix (`recurse`), or only the keys under it (`keys`)."""
        key = _key(request)
        if "stale" in request.query and "consistent" in request.query:
            raise Invalid("Cannot specify ?stale with ?consistent, conflicting semantics.")
        blocking = blocking_of(request)
        if "keys" in request.query:
            keys, index = await self._store.watch_keys(key, *blocking, separator=request.query.get("separator", ""))
            headers = index_headers(index)
            return json_response(keys, headers=headers) if keys else web.Response(status=404, headers=headers)
        if "recurse" in request.query:
            listing = await self._store.watch(key, *blocking)
            return _entries(listing.entries, listing.index)
        _require(key)
        entry, index = await self._store.watch_key(key, *blocking)
        if entry is not None and "raw" in request.query:
            return web.Response(body=entry.value, headers=index_headers(index), content_type="text/plain")
        return _entries([] if entry is None else [entry], index)

    async def write(self, request: web.Request) -> web.Response:
        """PUT: unconditional, or with one of `cas`, `acquire`, `release`."""
        query = request.query
        if len({"cas", "acquire", "release"} & query.keys()) > 1:
            raise Invalid(f"Conflicting flags: {request.query_string}")
        key = _key(request)
        _require(key)
        flags, index = number_of(request, "flags"), number_of(request, "cas")
        if (request.content_length or 0) > MAX_VALUE_BYTES:
            raise TooLarge(_too_large(request.content_length or 0, "kv_max_value_size"))
        value = await request.read()
        if "acquire" in query:
            return await self._try(Op("lock", key, value, session=query["acquire"], flags=flags))
        if "release" in query:
            return await self._try(Op("unlock", key, value, session=query["release"], flags=flags))
        if "cas" in query:
            return await self._try(ops.cas(key, value, index, flags=flags))
        return await self._try(ops.put(key, value, flags=flags))

    async def delete(self, request: web.Request) -> web.Response:
        """DELETE: one key, with or without `cas`, or everything under a prefix (`recurse`)."""
        key = _key(request)
        if "recurse" in request.query:
            if "cas" in request.query:
                raise Invalid(f"Conflicting flags: {request.query_string}")
            return await self._try(ops.delete_tree(key))
        _require(key)
        index = number_of(request, "cas")
        return await self._try(ops.delete_cas(key, index) if "cas" in request.query else ops.delete(key))

    async def txn(self, request: web.Request) -> web.Response:
        """PUT /v1/txn: all operations or none; an answer with status 409 names the reasons."""
        body = await request.read()
        if len(body) > MAX_VALUE_BYTES:
            raise TooLarge(_too_large(len(body), "txn_max_req_len"))
        operations = decode_txn(body)
        if len(operations) > MAX_TXN_OPS:
            raise TooLarge(f"Transaction contains too many operations ({len(operations)} > {MAX_TXN_OPS})")
        read_only = not any(operation.verb in _WRITES for operation in operations)
        unknown = [
            OpFailure(op_index, f'unknown KV verb "{operation.verb}"')
            for op_index, operation in enumerate(operations)
            if operation.verb not in VERBS
        ]
        headers = READ_HEADERS if read_only else None
        try:
            if unknown:
                raise TransactionRefused(unknown)
            result = await self._store.attempt([to_op(operation) for operation in operations])
        except TransactionRefused as refused:
            return json_response(txn_json(None, refused.failures, read_only=read_only), status=409, headers=headers)
        return json_response(txn_json(result.entries, read_only=read_only), headers=headers)

    async def _try(self, op: Op) -> web.Response:
        try:
            await self._store.attempt([op])
        except TransactionRefused as refused:
            reason = refused.failures[0].reason
            if reason.startswith(("invalid session", "missing session", "Must provide key")):  # the request is at fault
                return web.Response(status=500, text=reason)
            return json_response(False)
        return json_response(True)


def _entries(entries: list[Entry], index: int) -> web.Response:
    if not entries:
        return web.Response(status=404, headers=index_headers(index))
    return json_response([pair_of(entry) for entry in entries], headers=index_headers(index))


def _key(request: web.Request) -> str:
    try:
        return unquote(request.raw_path.partition("?")[0].removeprefix("/v1/kv/"), errors="strict")
    except UnicodeDecodeError as error:
        raise Invalid(f"the key is not UTF-8: {error}") from error


def _require(key: str) -> None:
    if not key:
        raise Invalid("Missing key name")


def _too_large(size: int, setting: str) -> str:
    return f"Request body({size} bytes) too large, max size: {MAX_VALUE_BYTES} bytes. {_HELP}#{setting}."
