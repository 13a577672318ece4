"""EmbeddedStore: Consul's key/value semantics inside this process, in memory or in one SQLite file.

The model: every request is applied in one step of the event loop (plan, make durable, apply, wake), so requests are
serial and each one sees all that were acknowledged before. The answer is handed over one loop iteration later, as a
real server's would be, so that other tasks run between a read and the reader's next step.

Sessions end exactly when their lease ends, on the injected clock (by default the event loop's, so that everything works
on virtual time). One timer is armed for the earliest deadline; nothing is polled. A renewal only moves a deadline: when
the timer finds that a lease was renewed, it is armed again for the new deadline. Everything due is also ended before
each request is answered (`expire_due`), so that a late timer never makes an ended lease look alive.

A watch sleeps until a key under its prefix changes. A changed key wakes exactly the prefixes that it is under, found by
looking up the beginnings of the key: the cost of a write does not depend on the number of watchers of other prefixes.
One instance belongs to one event loop.

Deliberate differences from Consul: a lease ends exactly on time, not up to twice as late; and a watch whose index
is above the store's own (the store was replaced) is answered at once, not after its wait.
"""

from __future__ import annotations

import asyncio
import builtins
import heapq
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec
import structlog

from store.embedded.sqlite import SqliteFile
from store.embedded.state import (
    Commit,
    SessionRecord,
    StoreState,
    TransactionRefused,
    cut_keys,
    plan_session_end,
    plan_transaction,
)
from store.kv import ops
from store.kv.protocol import (
    MAX_VALUE_BYTES,
    Entry,
    Invalid,
    KeyListing,
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

log = structlog.get_logger(__name__)

RETRY_SECONDS = 1.0  # until the end of a session that could not be written is tried again
_TICK = 0.001  # seconds; timers coarser than the clock may fire early, which must not cause a busy loop


class EmbeddedStore:
    """A `Store` in this process. `path`: the SQLite file (`store.embedded.sqlite` explains its durability), or None.

    `clock`: seconds, monotonic; the event loop's by default. Sessions found in the file get a full lease, from the
    first request on. Raises `AlreadyOpen`, `Invalid` or `Unavailable` for a file it can't use.
    """

    def __init__(self, path: Path | None = None, *, clock: Callable[[], float] | None = None) -> None:
        self.path = path
        self._file = None if path is None else SqliteFile(path)
        self.state = StoreState() if self._file is None else self._file.load()
        self.clock = clock
        self._leases = Leases(self._expire, clock)
        self._delayed_until: dict[str, float] = {}  # by key: it was freed by the end of a session with a lock-delay
        self._watchers = Watchers()
        self._session_watchers = Watchers()
        self._closed = False
        for record in self.state.sessions.values():
            if record.lease:
                self._leases.restore(record.id, record.lease)

    async def get(self, key: str, *, consistent: bool = False) -> Entry | None:
        """See `Store.get`."""
        self._expire_due()
        entry = self.state.entries.get(key)
        await _next_iteration()
        return entry

    async def list(self, prefix: str, *, consistent: bool = False) -> Listing:
        """See `Store.list`."""
        self._expire_due()
        listing = self.state.listing(prefix)
        await _next_iteration()
        return listing

    async def keys(self, prefix: str, *, separator: str = "", consistent: bool = False) -> builtins.list[str]:
        """See `Store.keys`."""
        self._expire_due()
        keys = self.state.keys(prefix)
        if separator:
            keys = cut_keys(keys, prefix, separator)
        await _next_iteration()
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
        """Apply like `txn`, at any size, but raise a refusal as the operations' `TransactionRefused`."""
        self._expire_due()
        commit, result = plan_transaction(self.state, ops_, self._is_delayed)
        if commit:
            self._commit(commit)
        await _next_iteration()
        return result

    async def watch(self, prefix: str, index: int, wait: float) -> Listing:
        """See `Store.watch`."""
        self._expire_due()
        if 0 < index <= self.state.index and self.state.index_of(prefix) <= index:
            await self._watchers.changed(prefix, wait)
        return await self.list(prefix)

    async def watch_keys(self, prefix: str, index: int, wait: float, *, separator: str = "") -> KeyListing:
        """See `Store.watch_keys`."""
        listing = await self.watch(prefix, index, wait)
        keys = [entry.key for entry in listing.entries]
        return KeyListing(cut_keys(keys, prefix, separator) if separator else keys, listing.index)

    async def watch_key(self, key: str, index: int, wait: float) -> tuple[Entry | None, int]:
        """Return the entry of one key and its index, once that is above `index`, or after `wait` seconds as it is."""
        self._expire_due()
        deadline = self._leases.now() + wait
        while 0 < index <= self.state.index and self.state.index_of_key(key) <= index:
            if not await self._watchers.changed(key, deadline - self._leases.now()):
                break
        self._expire_due()
        answer = self.state.entries.get(key), self.state.index_of_key(key)
        await _next_iteration()
        return answer

    async def watch_sessions(self, index: int, wait: float) -> int:
        """Return the index of the sessions, once it is above `index`, or after `wait` seconds as it is."""
        self._expire_due()
        if 0 < index <= self.state.index and self.state.sessions_changed <= index:
            await self._session_watchers.changed("", wait)
        return self.state.sessions_changed

    @property
    def watcher_count(self) -> int:
        """The number of waiting watches."""
        return len(self._watchers)

    def answer_watches(self) -> None:
        """Answer every watch in flight with the present state, as if its wait had ended."""
        self._watchers.dismiss()
        self._session_watchers.dismiss()

    async def create_session(self, spec: SessionSpec) -> Session:
        """See `Store.create_session`."""
        if spec.ttl <= 0 or (spec.check_ttl is not None and spec.check_ttl <= 0):
            raise Invalid(f"session {spec.name!r}: ttl and check_ttl must be above 0 seconds")
        lease = spec.ttl if spec.check_ttl is None else min(spec.ttl, spec.check_ttl)
        record = SessionRecord(str(uuid.uuid4()), spec.name, lease, spec.lock_delay, spec.behavior, ttl=spec.ttl)
        await self.open_session(record)
        return Session(record.id, lease)

    async def open_session(self, record: SessionRecord) -> None:
        """Open a session as described, at the index that it gets here."""
        self._expire_due()
        opened = msgspec.structs.replace(record, index=self.state.index + 1)
        self._commit(Commit(opened.index, opened=opened))
        if opened.lease:
            self._leases.start(opened.id, opened.lease)
        await _next_iteration()

    async def renew_session(self, session_id: str) -> None:
        """See `Store.renew_session`."""
        self._expire_due()
        if session_id not in self.state.sessions or self._leases.is_due(session_id):
            raise SessionExpired(f"session {session_id} does not exist any more")
        self._leases.renew(session_id)
        await _next_iteration()

    async def destroy_session(self, session_id: str) -> None:
        """See `Store.destroy_session`."""
        self.end_session(session_id)
        await _next_iteration()

    def end_session(self, session_id: str) -> None:
        """End the session at once, from a callback; no error when it is gone. Raises `Unavailable`."""
        self._expire_due()
        self._end_session(session_id)

    async def session_info(self, session_id: str) -> SessionInfo | None:
        """See `Store.session_info`."""
        self._expire_due()
        record = self.state.sessions.get(session_id)
        await _next_iteration()
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
        except TransactionRefused as refused:
            raise ops.refusal(ops_, refused.failures) from None

    def _expire_due(self) -> None:
        if self._closed:
            raise Unavailable("the embedded store is closed")
        self._leases.expire_due()

    def _is_delayed(self, key: str) -> bool:
        until = self._delayed_until.get(key)
        if until is not None and until <= self._leases.now():
            del self._delayed_until[key]
            return False
        return until is not None

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
            log.error("Could not end a session whose lease has expired", session=session_id, error=str(error))
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
                self._delayed_until[key] = self._leases.now() + record.lock_delay


async def _next_iteration() -> None:
    await asyncio.sleep(0)


class Watchers:
    """The tasks that wait, by prefix."""

    def __init__(self) -> None:
        self._waiting: dict[str, set[asyncio.Future[bool]]] = {}
        self._lengths: Counter[int] = Counter()
        self._closed = False

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    async def changed(self, prefix: str, wait: float) -> bool:
        """Return True as soon as a key under `prefix` changes; False after `wait` seconds, or on `dismiss`.

        Raises `Unavailable` on `close`.
        """
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        waiting = self._waiting.get(prefix)
        if waiting is None:
            waiting = self._waiting[prefix] = set()
            self._lengths[len(prefix)] += 1
        waiting.add(future)
        try:
            done, _ = await asyncio.wait([future], timeout=wait)
        finally:
            waiting.discard(future)
            if not waiting and self._waiting.get(prefix) is waiting:
                self._forget(prefix)
        if self._closed:
            raise Unavailable("the embedded store is closed")
        return bool(done) and future.result()

    def wake(self, keys: Iterable[str]) -> None:
        """Wake the watchers of the changed `keys`."""
        if self._waiting:
            for prefix in {key[:length] for key in keys for length in self._lengths if length <= len(key)}:
                self._answer(prefix, changed=True)

    def close(self) -> None:
        """Dismiss all watchers; later ones raise `Unavailable`."""
        self._closed = True
        self.dismiss()

    def dismiss(self) -> None:
        """End all waits."""
        for prefix in list(self._waiting):
            self._answer(prefix, changed=False)

    def _answer(self, prefix: str, *, changed: bool) -> None:
        waiting = self._waiting.get(prefix)
        if waiting is not None:
            self._forget(prefix)
            for future in waiting:
                if not future.done():
                    future.set_result(changed)

    def _forget(self, prefix: str) -> None:
        del self._waiting[prefix]
        self._lengths[len(prefix)] -= 1
        if not self._lengths[len(prefix)]:
            del self._lengths[len(prefix)]


class Leases:
    """Deadlines of sessions.

    `expire(session_id)` is called when a lease is due; it returns False when the session can't be ended now, and is
    called again after `RETRY_SECONDS`.
    """

    def __init__(self, expire: Callable[[str], bool], clock: Callable[[], float] | None = None) -> None:
        self._expire = expire
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._deadlines: dict[str, float] = {}
        self._queue: list[tuple[float, str]] = []
        self._queued_for: dict[str, float] = {}
        self._unstarted: list[str] = []
        self._timer: asyncio.TimerHandle | None = None
        self._armed_for = 0.0

    def now(self) -> float:
        """Return the seconds on the clock of the leases."""
        return self._clock() if self._clock is not None else asyncio.get_running_loop().time()

    def restore(self, session_id: str, seconds: float) -> None:
        """Restore a lease from before a restart; its full time starts with the first request."""
        self._seconds[session_id] = seconds
        self._unstarted.append(session_id)

    def start(self, session_id: str, seconds: float) -> None:
        """Start a lease that ends `seconds` from now unless it is renewed."""
        self._seconds[session_id] = seconds
        self._deadlines[session_id] = self.now() + seconds
        self._enqueue(session_id, self._deadlines[session_id])
        self._arm()

    def renew(self, session_id: str) -> None:
        """Start the lease's time again; nothing happens for a session without one."""
        if session_id in self._deadlines:
            self._deadlines[session_id] = self.now() + self._seconds[session_id]

    def drop(self, session_id: str) -> None:
        """Forget the lease of a session that ended for another reason."""
        self._seconds.pop(session_id, None)
        self._deadlines.pop(session_id, None)
        self._queued_for.pop(session_id, None)

    def expire_due(self) -> None:
        """End every lease that is due."""
        while self._unstarted:
            session_id = self._unstarted.pop()
            self.start(session_id, self._seconds[session_id])
        if not self._queue:
            return
        now = self.now()
        while self._queue and self._queue[0][0] <= now:
            queued_for, session_id = heapq.heappop(self._queue)
            if self._queued_for.get(session_id) != queued_for:
                continue
            if (deadline := self._deadlines[session_id]) > now:
                self._enqueue(session_id, deadline)
            elif self._expire(session_id):
                self.drop(session_id)
            else:
                self._enqueue(session_id, now + RETRY_SECONDS)

    def is_due(self, session_id: str) -> bool:
        """Return whether the lease has expired, although its session could not be ended yet."""
        deadline = self._deadlines.get(session_id)
        return deadline is not None and deadline <= self.now()

    def close(self) -> None:
        """Stop the timer; no lease ends any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _enqueue(self, session_id: str, at: float) -> None:
        self._queued_for[session_id] = at
        heapq.heappush(self._queue, (at, session_id))

    def _arm(self) -> None:
        if not self._queue:
            return
        earliest = self._queue[0][0]
        if self._timer is not None:
            if self._armed_for <= earliest:
                return
            self._timer.cancel()
        self._armed_for = earliest
        self._timer = asyncio.get_running_loop().call_later(max(_TICK, earliest - self.now()), self._ring)

    def _ring(self) -> None:
        self._timer = None
        self.expire_due()
        self._arm()
