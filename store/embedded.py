"""EmbeddedStore: Consul's key/value semantics inside this process, in memory or in one SQLite file.

The model: every request is applied in one step of the event loop (plan, make durable, apply, wake), so requests are
serial and each one sees all that were acknowledged before. The answer is handed over one loop iteration later, as a
real server's would be: other tasks run between a read and what its reader does with it, also here.

Sessions end exactly when their lease is over, on the injected clock (by default the event loop's). A watch sleeps until
a key under its prefix changes; nothing is polled. One instance belongs to one event loop.

Where this differs from Consul on purpose: a lease ends when it says, not up to twice as late; and a watch whose index
is above the store's own (the store was replaced) is answered at once, not after its wait.
"""

from __future__ import annotations

import asyncio
import builtins
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import structlog

from store import ops
from store.embedded_state import Commit, SessionRecord, State
from store.embedded_txn import Refused, plan_session_end, plan_transaction
from store.kv import (
    MAX_VALUE_BYTES,
    Entry,
    Invalid,
    Listing,
    Op,
    Session,
    SessionExpired,
    SessionInfo,
    SessionSpec,
    TooLarge,
    TxnResult,
    Unavailable,
)
from store.leases import Leases, LockDelays
from store.sorted_keys import cut_keys
from store.sqlite import SqliteFile
from store.watchers import Watchers

log = structlog.get_logger(__name__)


class EmbeddedStore:
    """A `Store` of its own. `path`: the SQLite file (`store.sqlite` says what survives what), or None for memory only.

    `clock`: seconds, monotonic; the event loop's by default. `new_id` makes session ids. Sessions found in the file get
    a full lease, from the first request on. Raises `AlreadyOpen`, `Invalid` or `Unavailable` for a file it can't use.
    """

    def __init__(
        self,
        path: Path | None = None,
        *,
        clock: Callable[[], float] | None = None,
        new_id: Callable[[], str] = lambda: str(uuid.uuid4()),
    ) -> None:
        self.path = path
        self._file = None if path is None else SqliteFile(path)
        self.state = State() if self._file is None else self._file.load()
        self.clock = clock
        self._new_id = new_id
        self._leases = Leases(self._expire, clock)
        self._lock_delays = LockDelays(self._leases.now)
        self._watchers = Watchers()
        self._session_watchers = Watchers()
        self._closed = False
        for record in self.state.sessions.values():
            if record.lease:
                self._leases.restore(record.id, record.lease)

    async def get(self, key: str, *, consistent: bool = False) -> Entry | None:
        """See `Store.get`."""
        self._settle()
        entry = self.state.get(key)
        await _hand_over()
        return entry

    async def list(self, prefix: str, *, consistent: bool = False) -> Listing:
        """See `Store.list`."""
        self._settle()
        listing = self.state.listing(prefix)
        await _hand_over()
        return listing

    async def keys(self, prefix: str, *, separator: str = "", consistent: bool = False) -> builtins.list[str]:
        """See `Store.keys`."""
        self._settle()
        keys = self.state.keys(prefix)
        if separator:
            keys = cut_keys(keys, prefix, separator)
        await _hand_over()
        return keys

    async def put(self, key: str, value: bytes, *, flags: int = 0) -> None:
        """See `Store.put`."""
        if len(value) > MAX_VALUE_BYTES:
            raise TooLarge(f"{key}: a value of {len(value)} bytes; at most {MAX_VALUE_BYTES} are taken")
        await self._apply([ops.put(key, value, flags=flags)])

    async def delete(self, key: str) -> None:
        """See `Store.delete`."""
        await self._apply([ops.delete(key)])

    async def txn(self, ops_: Sequence[Op]) -> TxnResult:
        """See `Store.txn`."""
        ops.check_limits(ops_)
        return await self._apply(ops_)

    async def attempt(self, ops_: Sequence[Op]) -> TxnResult:
        """Like `txn`, of any size, but a refusal is `Refused` as it came from the operations."""
        self._settle()
        commit, result = plan_transaction(self.state, ops_, self._lock_delays.delays)
        if commit:
            self._commit(commit)
        await _hand_over()
        return result

    async def watch(self, prefix: str, index: int, wait: float) -> Listing:
        """See `Store.watch`."""
        self._settle()
        if 0 < index <= self.state.index and self.state.index_of(prefix) <= index:
            await self._watchers.changed(prefix, wait)
        return await self.list(prefix)

    async def watch_key(self, key: str, index: int, wait: float) -> tuple[Entry | None, int]:
        """The entry of one key and its index, once that is above `index`, or after `wait` seconds as it is."""
        self._settle()
        deadline = self._leases.now() + wait
        while 0 < index <= self.state.index and self.state.index_of_key(key) <= index:
            if not await self._watchers.changed(key, deadline - self._leases.now()):
                break
        self._settle()
        answer = self.state.get(key), self.state.index_of_key(key)
        await _hand_over()
        return answer

    async def watch_sessions(self, index: int, wait: float) -> int:
        """The index of the sessions, once it is above `index`, or after `wait` seconds as it is."""
        self._settle()
        if 0 < index <= self.state.index and self.state.sessions_changed <= index:
            await self._session_watchers.changed("", wait)
        return self.state.sessions_changed

    @property
    def watcher_count(self) -> int:
        """How many watches are waiting."""
        return len(self._watchers)

    def answer_watches(self) -> None:
        """Answer every watch in flight as things stand, as if its wait were over."""
        self._watchers.dismiss()
        self._session_watchers.dismiss()

    async def create_session(self, spec: SessionSpec) -> Session:
        """See `Store.create_session`."""
        if spec.ttl <= 0 or (spec.check_ttl is not None and spec.check_ttl <= 0):
            raise Invalid(f"session {spec.name!r}: ttl and check_ttl must be above 0 seconds")
        lease = spec.ttl if spec.check_ttl is None else min(spec.ttl, spec.check_ttl)
        record = SessionRecord(self._new_id(), spec.name, lease, spec.lock_delay, spec.behavior, ttl=spec.ttl)
        await self.open_session(record)
        return Session(record.id, lease)

    async def open_session(self, record: SessionRecord) -> SessionRecord:
        """Open a session exactly as described; returns it with its index."""
        self._settle()
        opened = msgspec.structs.replace(record, index=self.state.index + 1)
        self._commit(Commit(opened.index, opened=opened))
        if opened.lease:
            self._leases.start(opened.id, opened.lease)
        await _hand_over()
        return opened

    async def renew_session(self, session_id: str) -> None:
        """See `Store.renew_session`."""
        self._settle()
        if session_id not in self.state.sessions or self._leases.is_due(session_id):
            raise SessionExpired(f"session {session_id} does not exist any more")
        self._leases.renew(session_id)
        await _hand_over()

    async def destroy_session(self, session_id: str) -> None:
        """See `Store.destroy_session`."""
        self.end_session(session_id)
        await _hand_over()

    def end_session(self, session_id: str) -> None:
        """End the session at once, from a callback; nothing happens when it is gone. Raises `Unavailable`."""
        self._settle()
        self._end_session(session_id)

    async def session_info(self, session_id: str) -> SessionInfo | None:
        """See `Store.session_info`."""
        self._settle()
        record = self.state.sessions.get(session_id)
        await _hand_over()
        return None if record is None else SessionInfo(record.id, record.name, record.ttl, record.behavior)

    async def close(self) -> None:
        """See `Store.close`. Watches in flight end with `Unavailable`."""
        if self._closed:
            return
        self._closed = True
        self._leases.close()
        self._watchers.close()
        self._session_watchers.close()
        if self._file is not None:
            self._file.close()

    async def _apply(self, ops_: Sequence[Op]) -> TxnResult:
        try:
            return await self.attempt(ops_)
        except Refused as refused:
            raise ops.refusal(ops_, refused.failures) from None

    def _settle(self) -> None:
        if self._closed:
            raise Unavailable("the embedded store is closed")
        self._leases.settle()

    def _commit(self, commit: Commit) -> None:
        if self._file is not None:
            self._file.write(commit)
        self.state.apply(commit)
        self._watchers.wake(commit.writes)
        if commit.opened or commit.closed:
            self._session_watchers.wake([""])

    def _expire(self, session_id: str) -> bool:
        try:
            self._end_session(session_id)
        except Unavailable as error:
            log.error("session is over but can't be ended", session=session_id, error=str(error))
            return False
        return True

    def _end_session(self, session_id: str) -> None:
        record = self.state.sessions.get(session_id)
        if record is None:
            return
        freed = sorted(self.state.held.get(session_id, ()))
        self._commit(plan_session_end(self.state, record))
        self._leases.drop(session_id)
        if record.lock_delay > 0:
            for key in freed:
                self._lock_delays.add(key, record.lock_delay)


async def _hand_over() -> None:
    await asyncio.sleep(0)
