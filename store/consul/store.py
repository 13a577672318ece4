"""ConsulStore: a Consul agent as a `Store`.

The model: all calls share one pool of connections (`store.consul.transport`). Blocking queries may hold `max_watches`
of them; a watch beyond that number polls until one of those connections is free for it, so that no view misses changes
and calls never starve. Watches accept stale answers (any server may give them) but not those of a server that knows no
leader.

Keys and transactions are sent and read by `store.consul.wire`; sessions, checks and services go through
python-consul2 (`api`). Nothing is retried here: an `Unavailable` write may have been applied, and only the caller
knows how to handle that.
"""

from __future__ import annotations

import asyncio
import builtins
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

import msgspec

from store.consul import wire
from store.consul.sessions import ConsulSessions
from store.consul.settings import ConsulSettings
from store.consul.transport import Answer, ConsulTransport
from store.decoding import Undecodable, from_json, json_decoder
from store.kv import ops
from store.kv.protocol import (
    MAX_VALUE_BYTES,
    Entry,
    Listing,
    Op,
    Session,
    SessionInfo,
    SessionSpec,
    StoreError,
    TooLarge,
    TxnResult,
)
from store.turns import give_way

if TYPE_CHECKING:
    from store.consul.library import ConsulApi

__all__ = ["ConsulSettings", "ConsulStore"]

POLL_INTERVAL = 1.0  # seconds between the polls of a watch that has no connection of its own
WATCH_MARGIN = 10.0  # seconds that an answer may be late, beyond Consul's own jitter of wait/16
_FOUND_OR_NOT, _DECIDED = frozenset({200, 404}), frozenset({200, 409})

T = TypeVar("T")


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
        from store.consul.library import ConsulApi

        return ConsulApi(self._transport)

    async def get(self, key: str, *, consistent: bool = False) -> Entry | None:
        """See `Store.get`."""
        answer = await self._read(key, _mode(consistent))
        return None if answer.status == 404 else self._decode(wire.decode_entries, answer, key)[0]

    async def list(self, prefix: str, *, consistent: bool = False) -> Listing:
        """See `Store.list`."""
        return await self._list(prefix, f"recurse&{_mode(consistent)}")

    async def keys(self, prefix: str, *, separator: str = "", consistent: bool = False) -> builtins.list[str]:
        """See `Store.keys`."""
        cut = f"&separator={quote(separator, safe='')}" if separator else ""
        answer = await self._read(prefix, f"keys{cut}&{_mode(consistent)}")
        return [] if answer.status == 404 else self._decode(wire.decode_keys, answer, prefix)

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
        call = f"a transaction of {len(ops_)} operations, from {ops_[0].verb} {ops_[0].key} on"
        answer = await self._transport.call("PUT", "/v1/txn", body=wire.encode_txn(ops_), expected=_DECIDED)
        if answer.status == 409:
            raise wire.txn_error(self.settings, ops_, self._decode(wire.decode_refusal, answer, call))
        entries = self._decode(wire.decode_txn, answer, call)
        return TxnResult(entries, ops.written_index(ops_, entries))

    async def watch(self, prefix: str, index: int, wait: float) -> Listing:
        """See `Store.watch`."""
        if index < 1:
            return await self._list(prefix, "recurse&stale")
        deadline = self._clock() + wait
        timeout = 0.0
        while not await self._takes_watch_slot(timeout):
            listing = await self._list(prefix, "recurse&stale")
            timeout = min(POLL_INTERVAL, deadline - self._clock())
            if listing.index != index or timeout <= 0:
                return listing
        try:
            left = max(0.0, deadline - self._clock())
            query = f"recurse&stale&index={index}&wait={max(1, round(left * 1000))}ms"
            return await self._list(prefix, query, timeout=left + left / 16 + WATCH_MARGIN)
        finally:
            self._watch_slots.release()

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
            session_ttl_min=None if shortest is None else wire.seconds(shortest),
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

    async def _takes_watch_slot(self, timeout: float) -> bool:
        """Take a blocking query's connection. Return whether one became free within `timeout` seconds."""
        try:
            async with asyncio.timeout(timeout):
                return await self._watch_slots.acquire()
        except TimeoutError:
            return False

    async def _list(self, prefix: str, query: str, *, timeout: float | None = None) -> Listing:
        answer = await self._read(prefix, query, timeout=timeout)
        entries: builtins.list[Entry] = []
        parts = iter(()) if answer.status == 404 else wire.decode_in_parts(answer.body)
        while part := self._decode(lambda _: next(parts, None), answer, prefix):
            entries += part
            await give_way()
        return Listing(entries, max(1, answer.raft_index or 1))

    async def _read(self, key: str, query: str, *, timeout: float | None = None) -> Answer:
        path = f"/v1/kv/{key}"
        answer = await self._transport.call("GET", path, query, timeout=timeout, expected=_FOUND_OR_NOT)
        if answer.raft_index is None:
            raise wire.unavailable(self.settings, wire.describe("GET", path), "the server there is not Consul")
        if not answer.has_leader:
            raise wire.unavailable(self.settings, wire.describe("GET", path), "No cluster leader")
        return answer

    def _decode(self, decode: Callable[[bytes], T], answer: Answer, call: str) -> T:
        try:
            return decode(answer.body)
        except (ValueError, RecursionError) as error:  # all of msgspec's errors are ValueErrors
            raise wire.unavailable(self.settings, call, f"an answer that Consul would not give: {error}") from error


def _mode(consistent: bool) -> str:
    return "consistent" if consistent else ""
