"""ConsulStore: a Consul agent as a `Store`.

The model: all calls share one pool of connections (`store.consul_transport`). Blocking queries may hold `max_watches`
of them; a watch beyond that number polls until one of those connections is free for it, so that no view goes deaf and
calls never starve. Watches accept stale answers (any server may give them) but not those of a server that knows no
leader.

Keys and transactions are sent and read by `store.consul_wire`; sessions, checks and services go through
python-consul2 (`api`). Nothing is retried here: an `Unavailable` write may have been applied, and only its author
knows what to do about that.
"""

from __future__ import annotations

import asyncio
import builtins
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

import msgspec

from store import consul_errors as errors
from store import consul_wire as wire
from store import ops
from store.consul_info import ServerInfo, server_info
from store.consul_leases import ConsulLeases
from store.consul_settings import ConsulSettings
from store.consul_transport import Answer, Transport
from store.kv import (
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
    from store.consul_library import ConsulApi

__all__ = ["ConsulSettings", "ConsulStore"]

POLL_INTERVAL = 1.0  # seconds between the looks of a watch that has no connection of its own
WATCH_MARGIN = 10.0  # seconds that an answer may be late, beyond Consul's own jitter of wait/16
_FOUND_OR_NOT, _DECIDED = frozenset({200, 404}), frozenset({200, 409})

T = TypeVar("T")


class ConsulStore:
    """See `store.kv.Store`. Belongs to one event loop; `close` it there. `clock`: seconds, monotonic."""

    def __init__(self, settings: ConsulSettings, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.settings = settings
        self._clock = clock
        self._transport = Transport(settings)
        self._leases = ConsulLeases(self._transport, lambda: self.api, clock)
        self._watch_slots = asyncio.Semaphore(settings.max_watches)

    @cached_property
    def api(self) -> ConsulApi:
        """python-consul2's endpoints (agent, session, health, catalog) over the same connections."""
        from store.consul_library import ConsulApi

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
            raise errors.txn_error(self.settings, ops_, self._decode(wire.decode_refusal, answer, call))
        entries = self._decode(wire.decode_txn, answer, call)
        return TxnResult(entries, ops.written_index(ops_, entries))

    async def watch(self, prefix: str, index: int, wait: float) -> Listing:
        """See `Store.watch`."""
        if index < 1:
            return await self._list(prefix, "recurse&stale")
        deadline = self._clock() + wait
        patience = 0.0
        while not await self._takes_watch_slot(patience):
            listing = await self._list(prefix, "recurse&stale")
            patience = min(POLL_INTERVAL, deadline - self._clock())
            if listing.index != index or patience <= 0:
                return listing
        try:
            return await self._block(prefix, index, max(0.0, deadline - self._clock()))
        finally:
            self._watch_slots.release()

    async def create_session(self, spec: SessionSpec) -> Session:
        """See `Store.create_session`. Bound to a TTL check where that is permitted, see `store.consul_leases`."""
        return await self._leases.create(spec)

    async def renew_session(self, session_id: str) -> None:
        """See `Store.renew_session`."""
        await self._leases.renew(session_id)

    async def destroy_session(self, session_id: str) -> None:
        """See `Store.destroy_session`."""
        await self._leases.destroy(session_id)

    async def session_info(self, session_id: str) -> SessionInfo | None:
        """See `Store.session_info`."""
        return await self._leases.info(session_id)

    async def server_info(self) -> ServerInfo:
        """What the agent says of itself. Raises `Unavailable`, `Denied`."""
        return await server_info(self._transport)

    async def token_accessor(self) -> str:
        """The accessor id of our token; "" without a token, and where no ACLs are."""
        if not self.settings.token:
            return ""
        try:
            answer = await self._transport.call("GET", "/v1/acl/token/self")
            return str(msgspec.json.decode(answer.body, type=dict[str, Any]).get("AccessorID", ""))
        except (StoreError, msgspec.MsgspecError):  # the command's own calls report what is wrong
            return ""

    async def close(self) -> None:
        """See `Store.close`."""
        await self._transport.close()

    async def _takes_watch_slot(self, patience: float) -> bool:
        """Whether a connection for a blocking query became free within `patience` seconds; it is the caller's then."""
        try:
            async with asyncio.timeout(patience):
                return await self._watch_slots.acquire()
        except TimeoutError:
            return False

    async def _block(self, prefix: str, index: int, wait: float) -> Listing:
        query = f"recurse&stale&index={index}&wait={max(1, round(wait * 1000))}ms"
        return await self._list(prefix, query, timeout=wait + wait / 16 + WATCH_MARGIN)

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
            raise errors.unavailable(self.settings, errors.describe("GET", path), "what answers there is not Consul")
        if not answer.has_leader:
            raise errors.unavailable(self.settings, errors.describe("GET", path), "No cluster leader")
        return answer

    def _decode(self, decode: Callable[[bytes], T], answer: Answer, call: str) -> T:
        try:
            return decode(answer.body)
        except (ValueError, RecursionError) as error:  # msgspec's are ValueErrors, of UTF-8 and numbers, too
            raise errors.unavailable(self.settings, call, f"an answer that Consul would not give: {error}") from error


def _mode(consistent: bool) -> str:
    return "consistent" if consistent else ""
