"""ConsulStore: a Consul agent as a `Store`.

The model: all calls share one pool of connections (`store.consul.client`). Blocking queries may hold `max_watches`
of them; a watch beyond that number polls until one of those connections is free for it, so that no view misses changes
and calls never starve. Watches accept stale answers (any server may give them) but not those of a server that knows no
leader.

Nothing is retried here: an `Unavailable` write may have been applied, and only the caller knows how to handle that.

Sessions, checks and services go through python-consul2 (`api`). msgspec reads and writes keys and transactions, and the
base64 of values, itself, so that a listing of 3,000 entries is decoded in about 2 ms (json and base64 of the standard
library: 6 ms). Consul writes an empty value as null; an `Entry` has b"" there.
"""

from __future__ import annotations

import asyncio
import builtins
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from store.consul.client import (
    NO_LEADER,
    Answer,
    ConsulSettings,
    ConsulTransport,
    denied,
    describe,
    seconds,
    unavailable,
)
from store.consul.sessions import ConsulApi, ConsulSessions
from store.decoding import Undecodable, from_json, json_decoder
from store.kv import ops
from store.kv.protocol import (
    MAX_VALUE_BYTES,
    Entry,
    Invalid,
    KeyListing,
    Listing,
    Op,
    OpFailure,
    Session,
    SessionInfo,
    SessionSpec,
    StoreError,
    TooLarge,
    TxnResult,
)
from store.timing import give_way

__all__ = ["ConsulSettings", "ConsulStore"]

POLL_INTERVAL = 1.0  # seconds between the polls of a watch that has no connection of its own
WATCH_MARGIN = 10.0  # seconds that an answer may be late, beyond Consul's own jitter of wait/16
PART_BYTES = 100_000  # decoded in one step, in about a millisecond
_MODE = {True: "consistent", False: ""}
_FOUND_OR_NOT, _DECIDED = frozenset({200, 404}), frozenset({200, 409})
_DENIED = ("Permission denied", "ACL not found", "rpc error making call: Permission denied")
_BETWEEN = re.compile(rb'},\{"[A-Za-z]')  # two objects
_READS = frozenset({"get", "get-tree", "check-index", "check-session"})  # for check-not-exists Consul requires write

T = TypeVar("T")


class _Pair(msgspec.Struct, frozen=True, rename="pascal", gc=False):
    key: str
    value: bytes | None
    create_index: int
    modify_index: int
    lock_index: int = 0
    flags: int = 0
    session: str | None = None


class _Result(msgspec.Struct, frozen=True, gc=False):
    kv: _Pair = msgspec.field(name="KV")


class _Error(msgspec.Struct, frozen=True, rename="pascal"):
    op_index: int
    what: str


class _Response(msgspec.Struct, frozen=True, rename="pascal"):
    results: list[_Result] | None = None
    errors: list[_Error] | None = None


_encoder = msgspec.json.Encoder()
_pairs = msgspec.json.Decoder(list[_Pair])
_keys = msgspec.json.Decoder(list[str] | None)
_response = msgspec.json.Decoder(_Response)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """An agent's own data, for an operator's checks, not for decisions. Data that the API of an embedded store lacks is
    None.

    `time`: the agent's clock, to the second, or None. `max_connections`: the limit per client address.
    `session_ttl_min` in seconds.
    """

    version: str
    datacenter: str
    node: str
    leader: str | None
    time: datetime | None
    max_connections: int | None
    session_ttl_min: float | None
    acls: bool | None


class ConsulStore:
    """See `store.kv.protocol.Store`. Belongs to one event loop; `close` it there. `clock`: seconds, monotonic."""

    def __init__(self, settings: ConsulSettings, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.settings = settings
        self._clock = clock
        self._transport = ConsulTransport(settings)
        self._sessions = ConsulSessions(self._transport, lambda: self.api, clock)
        self._watch_slots = asyncio.Semaphore(settings.max_watches)

    @cached_property
    def api(self) -> ConsulApi:
        """python-consul2's endpoints (agent, session, health, catalog) over the same connections."""
        return ConsulApi(self._transport)

    async def get(self, key: str, *, consistent: bool = False) -> Entry | None:
        """See `Store.get`."""
        answer = await self._read(key, _MODE[consistent])
        return None if answer.status == 404 else _entry(self._decode(_pairs.decode, answer, key)[0])

    async def list(self, prefix: str, *, consistent: bool = False) -> Listing:
        """See `Store.list`."""
        return await self._listing(await self._read(prefix, f"recurse&{_MODE[consistent]}"), prefix)

    async def keys(self, prefix: str, *, separator: str = "", consistent: bool = False) -> builtins.list[str]:
        """See `Store.keys`."""
        return self._keys(await self._read(prefix, f"{_keys_query(separator)}&{_MODE[consistent]}"), prefix)

    async def put(self, key: str, value: bytes, *, flags: int = 0) -> None:
        """See `Store.put`."""
        if len(value) > MAX_VALUE_BYTES:
            raise TooLarge(f"{key}: a value of {len(value)} bytes; at most {MAX_VALUE_BYTES} are taken")
        await self._transport.call("PUT", f"/v1/kv/{key}", f"flags={flags}", value)

    async def delete(self, key: str) -> None:
        """See `Store.delete`."""
        await self._transport.call("DELETE", f"/v1/kv/{key}")

    async def txn(self, ops_: Sequence[Op]) -> TxnResult:
        """See `Store.txn`."""
        ops.check_limits(ops_)
        if not ops_:
            return TxnResult([], 0)
        body = _encoder.encode([{"KV": op} for op in ops_])
        answer = await self._transport.call("PUT", "/v1/txn", body=body, expected=_DECIDED)
        call = f"a transaction of {len(ops_)} operations, from {ops_[0].verb} {ops_[0].key} on"
        response = self._decode(_response.decode, answer, call)
        if answer.status == 409:
            failures = [OpFailure(error.op_index, error.what) for error in response.errors or ()]
            raise txn_error(self.settings, ops_, failures)
        entries = [_entry(result.kv) for result in response.results or ()]
        return TxnResult(entries, ops.written_index(ops_, entries))

    async def watch(self, prefix: str, index: int, wait: float) -> Listing:
        """See `Store.watch`."""
        return await self._listing(await self._blocking(prefix, "recurse", index, wait), prefix)

    async def watch_keys(self, prefix: str, index: int, wait: float, *, separator: str = "") -> KeyListing:
        """See `Store.watch_keys`."""
        answer = await self._blocking(prefix, _keys_query(separator), index, wait)
        return KeyListing(self._keys(answer, prefix), _index(answer))

    async def create_session(self, spec: SessionSpec) -> Session:
        """See `Store.create_session`. Bound to a TTL check where that is permitted, see `store.consul.sessions`."""
        return await self._sessions.create(spec)

    async def renew_session(self, session_id: str) -> None:
        """See `Store.renew_session`."""
        await self._sessions.renew(session_id)

    async def destroy_session(self, session_id: str) -> None:
        """See `Store.destroy_session`."""
        await self._sessions.destroy(session_id)

    async def session_info(self, session_id: str) -> SessionInfo | None:
        """See `Store.session_info`."""
        return await self._sessions.info(session_id)

    async def server_info(self) -> ServerInfo:
        """Return the agent's own data. Raises `Unavailable`, and `Denied` without `agent:read`."""
        from email.utils import parsedate_to_datetime  # 4 ms, which only checks of the store need

        answer = await self._transport.call("GET", "/v1/agent/self")
        agent: dict[str, Any] = msgspec.json.decode(answer.body)
        config, debug = agent["Config"], agent.get("DebugConfig", {})
        shortest = debug.get("SessionTTLMin")
        return ServerInfo(
            version=config["Version"],
            datacenter=config["Datacenter"],
            node=config["NodeName"],
            leader=agent.get("Stats", {}).get("consul", {}).get("leader_addr"),
            time=parsedate_to_datetime(answer.date) if answer.date else None,
            max_connections=debug.get("HTTPMaxConnsPerClient"),
            session_ttl_min=None if shortest is None else seconds(shortest),
            acls=debug.get("ACLsEnabled"),
        )

    async def token_accessor(self) -> str:
        """Return the accessor id of our token; "" without a token, and where ACLs are disabled."""
        if not self.settings.token:
            return ""
        try:
            answer = await self._transport.call("GET", "/v1/acl/token/self")
            return str(from_json(json_decoder(dict[str, Any]), answer.body).get("AccessorID", ""))
        except (StoreError, Undecodable):  # the command's own calls report what is wrong
            return ""

    async def close(self) -> None:
        """See `Store.close`."""
        await self._transport.close()

    async def _blocking(self, prefix: str, query: str, index: int, wait: float) -> Answer:
        """Send a blocking query; or several that do not block, while there is no connection for it."""
        if index < 1:
            return await self._read(prefix, f"{query}&stale")
        deadline = self._clock() + wait
        timeout = 0.0
        while not await self._takes_watch_slot(timeout):
            answer = await self._read(prefix, f"{query}&stale")
            timeout = min(POLL_INTERVAL, deadline - self._clock())
            if _index(answer) != index or timeout <= 0:
                return answer
        try:
            left = max(0.0, deadline - self._clock())
            query = f"{query}&stale&index={index}&wait={max(1, round(left * 1000))}ms"
            return await self._read(prefix, query, timeout=left + left / 16 + WATCH_MARGIN)
        finally:
            self._watch_slots.release()

    async def _takes_watch_slot(self, timeout: float) -> bool:
        """Take a blocking query's connection. Return whether one became free within `timeout` seconds."""
        try:
            async with asyncio.timeout(timeout):
                return await self._watch_slots.acquire()
        except TimeoutError:
            return False

    def _keys(self, answer: Answer, prefix: str) -> builtins.list[str]:
        return [] if answer.status == 404 else self._decode(_keys.decode, answer, prefix) or []

    async def _listing(self, answer: Answer, prefix: str) -> Listing:
        entries: builtins.list[Entry] = []
        parts = iter(()) if answer.status == 404 else _parts(answer.body)
        while part := self._decode(lambda _: next(parts, None), answer, prefix):
            entries += part
            await give_way()
        return Listing(entries, _index(answer))

    async def _read(self, key: str, query: str, *, timeout: float | None = None) -> Answer:
        path = f"/v1/kv/{key}"
        answer = await self._transport.call("GET", path, query, timeout=timeout, expected=_FOUND_OR_NOT)
        if answer.raft_index is None:
            raise unavailable(self.settings, describe("GET", path), "the server there is not Consul")
        if not answer.has_leader:
            raise unavailable(self.settings, describe("GET", path), NO_LEADER)
        return answer

    def _decode(self, decode: Callable[[bytes], T], answer: Answer, call: str) -> T:
        try:
            return decode(answer.body)
        except (ValueError, RecursionError) as error:  # all of msgspec's errors are ValueErrors
            raise unavailable(self.settings, call, f"an answer that Consul would not give: {error}") from error


def _keys_query(separator: str) -> str:
    return f"keys&separator={quote(separator, safe='')}" if separator else "keys"


def _index(answer: Answer) -> int:
    return max(1, answer.raft_index or 1)


def _parts(body: bytes) -> Iterator[list[Entry]]:
    """Yield the entries of a listing in parts: decoding ten megabytes at once would block the loop.

    The text is cut between two objects, without being read. No text of a string looks like that place: a quote in a
    string is escaped, and after its last one comes no letter.
    """
    start = 0
    while cut := _BETWEEN.search(body, start + PART_BYTES):
        yield _entries(b"%b%b]" % (b"[" if start else b"", body[start : cut.start() + 1]))
        start = cut.start() + 2
    yield _entries(b"[" + body[start:] if start else body)


def _entries(body: bytes) -> list[Entry]:
    return [_entry(pair) for pair in _pairs.decode(body)]


def _entry(pair: _Pair) -> Entry:
    value = pair.value or b""
    return Entry(pair.key, value, pair.create_index, pair.modify_index, pair.lock_index, pair.flags, pair.session)


def txn_error(settings: ConsulSettings, operations: Sequence[Op], failures: Sequence[OpFailure]) -> StoreError:
    """Return the error for a refused transaction."""
    for failure in failures:
        if failure.reason.startswith(_DENIED):
            op = operations[failure.op_index]
            access = "read" if op.verb in _READS else "write"
            call = f"operation {failure.op_index} of a transaction ({op.verb} {op.key})"
            return denied(settings, call, failure.reason, f"key:{access} on {op.key}")
        if failure.reason.startswith("unknown KV verb"):
            return Invalid(f"operation {failure.op_index}: {failure.reason}")
    return ops.refusal(operations, failures)
