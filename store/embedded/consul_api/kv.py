"""The façade's `/v1/kv` and `/v1/txn`, answering as a Consul 1.8 server does."""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import unquote

from aiohttp import web

from store.embedded.consul_api.wire import (
    MAX_UINT64,
    VERBS,
    decode_txn,
    encode,
    encode_entries,
    encode_refusal,
    encode_result,
    parse_duration,
    to_op,
)
from store.embedded.state import cut_keys
from store.embedded.store import EmbeddedStore
from store.embedded.transaction import TransactionRefused
from store.kv import ops
from store.kv.protocol import MAX_TXN_OPS, MAX_VALUE_BYTES, Entry, Invalid, Op, OpFailure, TooLarge

DEFAULT_WAIT = 300.0  # seconds, as Consul's
LONGEST_WAIT = 600.0
_WRITES = frozenset({"set", "cas", "lock", "unlock", "delete", "delete-tree", "delete-cas"})
_READ_HEADERS = {"X-Consul-KnownLeader": "true", "X-Consul-LastContact": "0"}
_DIGITS = 20  # of the largest number of 64 bits
_HELP = "See https://www.consul.io/docs/agent/options.html"


class Blocking(NamedTuple):
    """The parameters of a blocking query: an answer once the index is above `above`, within `wait` seconds."""

    above: int
    wait: float


class KvApi:
    """Handlers over one store."""

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
            listing = await self._store.watch(key, *blocking)
            keys = [entry.key for entry in listing.entries]
            if separator := request.query.get("separator"):
                keys = cut_keys(keys, key, separator)
            headers = index_headers(listing.index)
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
        flags, index = _number(request, "flags"), _number(request, "cas")
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
        index = _number(request, "cas")
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
        headers = _READ_HEADERS if read_only else None
        try:
            if unknown:
                raise TransactionRefused(unknown)
            result = await self._store.attempt([to_op(operation) for operation in operations])
        except TransactionRefused as refused:
            return _json(encode_refusal(refused.failures, read_only=read_only), status=409, headers=headers)
        return _json(encode_result(result.entries, read_only=read_only), headers=headers)

    async def _try(self, op: Op) -> web.Response:
        try:
            await self._store.attempt([op])
        except TransactionRefused as refused:
            if refused.is_faulty:
                return web.Response(status=500, text=refused.failures[0].reason)
            return json_response(False)
        return json_response(True)


def blocking_of(request: web.Request) -> Blocking:
    """Return the request's `index` and `wait`; index 0 does not block."""
    wait = parse_duration(request.query["wait"]) if "wait" in request.query else DEFAULT_WAIT
    return Blocking(_number(request, "index"), min(wait, LONGEST_WAIT) or DEFAULT_WAIT)


def index_headers(index: int) -> dict[str, str]:
    """Return the headers of every answer to a query."""
    return {"X-Consul-Index": str(index), **_READ_HEADERS}


def json_response(answer: object, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """Return an answer in JSON."""
    return _json(encode(answer), status=status, headers=headers)


def _json(body: bytes, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=body, status=status, headers=headers, content_type="application/json")


def _entries(entries: list[Entry], index: int) -> web.Response:
    if not entries:
        return web.Response(status=404, headers=index_headers(index))
    return _json(encode_entries(entries), headers=index_headers(index))


def _key(request: web.Request) -> str:
    try:
        return unquote(request.raw_path.partition("?")[0].removeprefix("/v1/kv/"), errors="strict")
    except UnicodeDecodeError as error:
        raise Invalid(f"the key is not UTF-8: {error}") from error


def _require(key: str) -> None:
    if not key:
        raise Invalid("Missing key name")


def _number(request: web.Request, name: str) -> int:
    text = request.query.get(name, "0")
    if not (text.isascii() and text.isdecimal()):
        raise Invalid(f'{name}: parsing "{text[:40]}": invalid syntax')
    if len(text) > _DIGITS or int(text) > MAX_UINT64:
        raise Invalid(f'{name}: parsing "{text[:40]}": value out of range')
    return int(text)


def _too_large(size: int, setting: str) -> str:
    return f"Request body({size} bytes) too large, max size: {MAX_VALUE_BYTES} bytes. {_HELP}#{setting}."
