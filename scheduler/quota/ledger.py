"""The ledger of quotas: decisions made durable, exact among any number of engines.

The model: `QuotaLedger` caches everything under `quota/` in a TreeView, and mirrors it in a `Book`, which decides. A
caller hands in a *change*: a function that asks a `Draft` for units, or returns units to it, and returns the caller's
own operations (its fence, its state, its events). Changes that wait at the same time are tried one after the other on
one draft, and leave in one transaction with the grants and tickets that follow from them. So a change is called again,
on fresher records, whenever another process was faster; it must have no effects but its result. Changes of holders are
urgent: they go before requests, of which a burst would otherwise delay every hand-over of units by many transactions.

Why the limit holds. A transaction that adds a grant replaces the resource's head by compare-and-swap and checks the
index of its limit. So the view that it was decided on shows every grant that exists: an unseen one would have changed
the head. The view may still show a grant that is gone, which only delays others. A ticket is granted together with
`check-index` on it, because Consul lets `delete-cas` of an absent key pass: a ticket that was withdrawn is never
granted. After a conflict the whole tree is read again; reading the head alone would show it without its grants.

Several engines that grant units of one resource at a high rate are in each other's way. An engine that was refused
`MODEST_AFTER` times in a row decides nothing in its next transaction: it writes tickets and deletes grants, which need
no head, and the engine that was faster grants the tickets by their age with its next release.

Units that become free are granted by the transaction that frees them. What such a transaction did not see (a ticket
written at the same time, a raised limit, a rate that has become due), `run` grants as soon as the view shows that a
ticket of this engine's executions fits.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import structlog

from scheduler.quota.decide import NO_HEAD, Book, Wait
from scheduler.quota.draft import TOKENS_PER_RELEASE, Admission, Draft, Place, Request
from store.kv import ops
from store.kv.protocol import (
    MAX_TXN_OPS,
    MAX_VALUE_BYTES,
    BadRecord,
    Op,
    Store,
    StoreError,
    TxnConflict,
    TxnResult,
    Unavailable,
)
from store.kv.view import Change, TreeView
from store.schema.keys import BadKey, Keys
from store.schema.quota import QuotaGrant, QuotaHead, QuotaLimit, QuotaTicket
from store.schema.records import StoredRecord, decode
from store.timing import Backoff, give_way

log = structlog.get_logger(__name__)

ATTEMPTS = 64
MODEST_AFTER = 2  # conflicts in a row
URGENT_LEAVES = 16  # operations of a transaction that urgent changes leave to the others
OP_SIZE = 1200  # bytes that an operation of a draft is taken for
FIRST_PAUSE, MAX_PAUSE = 0.002, 0.25  # seconds between refused attempts
REASONS_PAUSE = 0.5  # seconds between two looks for changed reasons, at least
REASONS_SHARE = 0.02  # of one core, for these looks

_KINDS: dict[str, type[StoredRecord]] = {
    "limit": QuotaLimit,
    "head": QuotaHead,
    "grants": QuotaGrant,
    "tickets": QuotaTicket,
}


@dataclass(slots=True, eq=False)
class _Waiting:
    """A change that is not committed yet. `own`: the caller's operations, as of the last attempt."""

    change: Callable[[Draft], Sequence[Op]]
    done: asyncio.Future[TxnResult]
    urgent: bool
    own: Sequence[Op] = ()
    attempts: int = 0
    alone: bool = False


@dataclass(slots=True)
class _Group:
    """Changes that leave in one transaction: the operations of each caller, in order, then those of the draft."""

    changes: list[_Waiting] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    size: int = 0  # bytes of the callers' operations
    answered: set[Place] = field(default_factory=set)


class QuotaLedger:
    """All quotas. `run()` must be running for anything to be decided or shown.

    `clock`: seconds since the epoch. `send` commits a transaction, by default `store.txn`. `mine(execution)`: whether
    this engine owns the execution; its tickets are granted when the view shows that they fit. `on_granted(execution)`:
    a ticket of it was granted, by this process or another. `on_reason_changed(execution)`: the code of the reason why
    it waits is another one now. `conflicts`, `transactions`, `changes` count since the start.
    """

    def __init__(
        self,
        store: Store,
        keys: Keys,
        *,
        clock: Callable[[], float] = time.time,
        send: Callable[[Sequence[Op]], Awaitable[TxnResult]] | None = None,
        mine: Callable[[str], bool] = lambda execution: True,
        on_granted: Callable[[str], object] = lambda execution: None,
        on_reason_changed: Callable[[str], object] = lambda execution: None,
        rng: random.Random | None = None,
    ) -> None:
        self.view: TreeView[StoredRecord] = TreeView(
            store, keys.quotas, self._decode, on_change=self._changed, on_bad=lambda _: self._mark_bad(), name="quotas"
        )
        self.book = Book()
        self.mine, self.on_granted, self.on_reason_changed = mine, on_granted, on_reason_changed
        self.conflicts = self.transactions = self.changes = 0
        self._store, self._keys, self._clock, self._send = store, keys, clock, send or store.txn
        self._rng = rng or random.Random()
        self._executions: dict[str, dict[Place, None]] = {}
        self._owners: dict[Place, str] = {}
        self._stale: set[Place] = set()  # tickets whose token holds units already
        self._unreadable: set[str] = set()
        self._urgent: deque[_Waiting] = deque()
        self._waiting: deque[_Waiting] = deque()
        self._arrived, self._healable, self._restless = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._dirty: dict[str, None] = {}
        self._touched: dict[str, None] = {}
        self._codes: dict[Place, str] = {}
        self._quiet: set[Place] = set()
        self._applying = False  # a transaction of this ledger, whose callers know what it withdraws
        self._refusals = 0  # conflicts over quotas since the last transaction that was applied
        self._doubtful = False  # an unanswered transaction may have been applied
        self._reading: asyncio.Task[None] | None = None

    async def transact(self, change: Callable[[Draft], Sequence[Op]], *, urgent: bool = False) -> TxnResult:
        """Apply a change with the operations that it returns, of which it may use about 16; see the module's text.

        `urgent`: a holder of units waits for it, or will return units by it, so it goes before requests that will wait
        for units anyway.

        The result answers for the operations of other changes, too. Raises what `Store.txn` raises. A `TxnConflict` is
        one of the caller's own operations, with their indexes; conflicts over quotas are resolved by trying again, up
        to `ATTEMPTS` times. After `Unavailable` the transaction may have been applied.
        """
        waiting = _Waiting(change, asyncio.get_running_loop().create_future(), urgent)
        self._line(waiting).append(waiting)
        self._arrived.set()
        return await waiting.done

    async def admit(self, requests: Sequence[Request], fence: Sequence[Op] = ()) -> Admission:
        """Ask for units in a transaction of its own; see `Draft.admit` and `transact`."""
        found: list[Admission] = []

        def change(draft: Draft) -> Sequence[Op]:
            found[:] = [draft.admit(requests)]
            return fence

        await self.transact(change)
        return found[0]

    async def release(self, execution: str = "", places: Iterable[Place] = (), fence: Sequence[Op] = ()) -> None:
        """Return units in transactions of their own; see `Draft.release` and `transact`."""
        left, pairs = [1], tuple(places)

        def change(draft: Draft) -> Sequence[Op]:
            left[0] = draft.release(execution, pairs)
            return fence

        while left[0]:
            await self.transact(change, urgent=True)
            pairs = pairs[TOKENS_PER_RELEASE:] if not execution else pairs

    async def current(self) -> None:
        """Read the tree, consistently, after this call. A process that takes executions over calls it before it acts on
        them, so that it sees every grant and ticket that their former owner wrote. Concurrent calls share reads."""
        if self._reading is not None:
            await asyncio.wait({self._reading})  # it may have begun before this call
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self.view.refresh())
        await asyncio.shield(self._reading)

    def has(self, execution: str) -> bool:
        """Return whether the execution holds units, or waits for some."""
        return bool(self._executions.get(execution))

    def holds(self, execution: str) -> bool:
        """Return whether the execution holds units."""
        return any(token in self.book.queue(name).grants for name, token in self._executions.get(execution, ()))

    def executions(self) -> list[str]:
        """Return all executions that hold units, or wait for some."""
        return list(self._executions)

    def held(self, execution: str) -> list[tuple[str, QuotaGrant]]:
        """Return the execution's units, with their resources."""
        places = self._executions.get(execution, ())
        return [(name, grant) for name, token in places if (grant := self.book.queue(name).grants.get(token))]

    def waiting(self, execution: str) -> dict[str, Wait]:
        """Return why the execution waits, by resource, with its position in the queue. Costs time in proportion to the
        waiters of the resource."""
        places = self._executions.get(execution, ())
        now = self._clock()
        return {
            name: self.book.queue(name).waits(now)[token]
            for name, token in places
            if token in self.book.queue(name).tickets
        }

    async def run(self) -> None:
        """Keep the view current, commit changes, and grant what fits, until cancelled. Unanswered changes are then
        cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.view.run())
                await self.view.synced()
                group.create_task(self._commit_changes())
                group.create_task(self._heal())
                group.create_task(self._report_reasons())
        finally:
            for line in (self._urgent, self._waiting):
                while line:
                    line.popleft().done.cancel()
            if self._reading is not None:
                self._reading.cancel()

    async def _commit_changes(self) -> None:
        """Try the waiting changes on one draft, as many as fit a transaction, send it, and answer them."""
        backoff = Backoff(FIRST_PAUSE, MAX_PAUSE, rng=self._rng, spread=(0.0, 1.0))
        while True:
            if not (self._urgent or self._waiting):
                self._arrived.clear()
                await self._arrived.wait()
                await asyncio.sleep(0)  # changes that become ready together share a transaction
            if self._doubtful:
                try:
                    await self.view.refresh()
                except StoreError as error:
                    _fail([*self._urgent, *self._waiting], error)
                    self._urgent.clear()
                    self._waiting.clear()
                    continue
                self._doubtful = False
            group, decides = _Group(), self._refusals < MODEST_AFTER
            draft = Draft(self.book, self._executions, self._stale, self._clock(), decides=decides)
            self._take(self._urgent, group, draft, MAX_TXN_OPS - (URGENT_LEAVES if self._waiting else 0))
            self._take(self._waiting, group, draft, MAX_TXN_OPS)
            group.ops += draft.ops(self._keys, self.view.records)
            draft.undo()
            group.answered = draft.answered
            if not group.ops:
                self._refusals = 0
                _answer(group.changes, TxnResult([], 0))
                continue
            if await self._commit(group):
                backoff.reset()
            else:
                await asyncio.sleep(backoff.pause())

    def _take(self, line: deque[_Waiting], group: _Group, draft: Draft, room: int) -> None:
        """Move changes from the line to the group, while the transaction has at most `room` operations."""
        while line:
            waiting = line[0]
            if group.changes and (waiting.alone or group.changes[-1].alone):
                return
            mark = draft.mark()
            try:
                waiting.own = () if waiting.done.done() else waiting.change(draft)
            except Exception as error:  # the caller's defect is the caller's alone
                draft.undo(mark)
                waiting.done.set_exception(error)
            count, decided = len(group.ops) + len(waiting.own), draft.size()
            size = group.size + sum(map(ops.encoded_size, waiting.own))
            if group.changes and (count + decided > room or size + decided * OP_SIZE > MAX_VALUE_BYTES):
                draft.undo(mark)
                return
            line.popleft()
            if not waiting.done.done():
                group.changes.append(waiting)
                group.ops += waiting.own
                group.size = size

    def _line(self, waiting: _Waiting) -> deque[_Waiting]:
        return self._urgent if waiting.urgent else self._waiting

    async def _commit(self, group: _Group) -> bool:
        """Send the group and answer its changes. Return False after a conflict over quotas, which is tried again."""
        self.transactions += 1
        try:
            result = await self._send(group.ops)
        except TxnConflict as conflict:
            self.conflicts += 1
            return await self._refused(group, conflict)
        except StoreError as error:
            self._doubtful = True
            if len(group.changes) == 1 or isinstance(error, Unavailable):
                _fail(group.changes, error)
            else:  # find the culprit
                for waiting in group.changes:
                    waiting.alone = True
                self._again(group.changes)
        except asyncio.CancelledError:
            for waiting in group.changes:
                waiting.done.cancel()
            raise
        else:
            self.changes += len(group.changes)
            self._refusals = 0
            self._quiet, self._applying = group.answered, True
            self.view.apply(result, group.ops)
            self._quiet, self._applying = set(), False
            _answer(group.changes, result)
        return True

    async def _refused(self, group: _Group, conflict: TxnConflict) -> bool:
        """Fail the changes whose own operations were refused, and try the others again."""
        innocent: list[_Waiting] = []
        errors = ops.refusals((waiting.own for waiting in group.changes), conflict.failures)
        for waiting, error in zip(group.changes, errors, strict=True):
            if error is None:
                innocent.append(waiting)
            elif not waiting.done.done():
                waiting.done.set_exception(error)
        callers = sum(len(waiting.own) for waiting in group.changes)
        if all(failure.op_index < callers for failure in conflict.failures):
            self._again(innocent)
            return True
        for waiting in innocent:
            waiting.attempts += 1
        _fail([waiting for waiting in innocent if waiting.attempts == ATTEMPTS], conflict)
        self._again([waiting for waiting in innocent if waiting.attempts < ATTEMPTS])
        self._doubtful = True
        self._refusals += 1
        return False

    def _again(self, changes: Iterable[_Waiting]) -> None:
        for waiting in reversed(list(changes)):
            self._line(waiting).appendleft(waiting)

    async def _heal(self) -> None:
        """Grant what fits although no release has granted it: whenever the tree changes, and when a rate is due."""
        while True:
            self._healable.clear()
            resources, self._dirty = self._dirty, {}
            if any(queue.tickets and queue.free > 0 for queue in map(self.book.queue, self.book.related(resources))):
                await self._heal_once(tuple(resources))
            wakes = [
                queue.wake(self._clock()) for queue in self.book.queues.values() if queue.tickets and queue.free > 0
            ]
            due = min((at for at in wakes if at is not None), default=None)
            with suppress(TimeoutError):
                async with asyncio.timeout(None if due is None else max(0.001, due - self._clock())):
                    await self._healable.wait()
            if not self._healable.is_set():
                self._dirty |= dict.fromkeys(self.book.queues)

    async def _heal_once(self, resources: Sequence[str]) -> None:
        decided: list[bool] = []

        def change(draft: Draft) -> Sequence[Op]:
            decided[:] = [draft.decides]
            draft.heal(resources, self.mine)
            return ()

        try:
            await self.transact(change, urgent=True)
            if not decided[0]:
                self._dirty |= dict.fromkeys(resources)
                self._healable.set()
        except StoreError as error:
            log.warning("Could not grant tickets that fit; trying again", error=str(error))
            self._dirty |= dict.fromkeys(resources)
            await asyncio.sleep(MAX_PAUSE)
            self._healable.set()

    async def _report_reasons(self) -> None:
        """Report executions of this engine whose reason has another code than before."""
        spent = 0.0
        while True:
            await self._restless.wait()
            await asyncio.sleep(max(REASONS_PAUSE, spent / REASONS_SHARE))
            self._restless.clear()
            touched, self._touched = self._touched, {}
            spent = 0.0
            for resource in touched:
                await give_way()
                began, queue = time.perf_counter(), self.book.queue(resource)
                for token, wait in queue.waits(self._clock(), ranked=False).items():
                    place, execution = (resource, token), queue.tickets[token].execution
                    if not self.mine(execution):
                        continue
                    former, self._codes[place] = self._codes.get(place), wait.code
                    if former not in (None, wait.code):
                        self.on_reason_changed(execution)
                spent += time.perf_counter() - began

    def _decode(self, key: str, value: bytes) -> StoredRecord:
        try:
            parsed = self._keys.parse_quota(key)
        except BadKey as error:
            raise BadRecord(key, str(error)) from error
        found = decode(_KINDS[parsed.kind], key, value)
        if isinstance(found, QuotaTicket) and found.token != parsed.token:
            raise BadRecord(key, f"the record is of another token: {found.token!r}")
        return found

    def _changed(self, changes: list[Change[StoredRecord]]) -> None:
        """Mirror a batch of changes: first what is gone, so that a token never has a ticket beside its grant."""
        granted: list[str] = []
        withdrawn: dict[Place, str] = {}
        for key, _, new, _ in sorted(changes, key=lambda change: change.new is not None):
            with suppress(BadKey):
                resource, kind, token = self._keys.parse_quota(key)
                tickets = self.book.queue(resource).tickets
                if new is None and kind == "limit":
                    withdrawn |= {(resource, each): ticket.execution for each, ticket in tickets.items()}
                elif new is None and token in tickets:
                    withdrawn[resource, token] = tickets[token].execution
                self._mirror(resource, kind, token, new.value if new else None, granted)
                self._dirty[resource] = self._touched[resource] = None
        self._mark_bad()
        self._healable.set()
        self._restless.set()
        for execution in granted:
            self.on_granted(execution)
        if not self._applying:
            for (resource, token), execution in withdrawn.items():
                if token not in self.book.queue(resource).grants and self.mine(execution):
                    self.on_reason_changed(execution)

    def _mirror(self, resource: str, kind: str, token: str, value: StoredRecord | None, granted: list[str]) -> None:
        queue, place = self.book.queue(resource), (resource, token)
        if kind == "limit":
            queue.limit = value if isinstance(value, QuotaLimit) else None
        elif kind == "head":
            queue.head = value if isinstance(value, QuotaHead) else NO_HEAD
        elif kind == "grants":
            known = queue.revoke(token)
            if isinstance(value, QuotaGrant):
                queue.grant(value)
                if self.book.dequeue(resource, token):
                    self._stale.add(place)
                if known is None and place not in self._quiet:
                    granted.append(value.execution)
            elif place in self._stale:
                record = self.view.records.get(self._keys.quota_ticket(*place))
                self._mirror(resource, "tickets", token, record.value if record else None, granted)
        else:
            self._stale.discard(place)
            self.book.dequeue(resource, token)
            if isinstance(value, QuotaTicket) and token in queue.grants:
                self._stale.add(place)
            elif isinstance(value, QuotaTicket):
                self.book.enqueue(resource, value)
        self._index(place, value)

    def _index(self, place: Place, value: StoredRecord | None) -> None:
        """Note which execution a token belongs to."""
        if isinstance(value, QuotaTicket):
            self._executions.setdefault(value.execution, {})[place] = None
            self._owners[place] = value.execution
            return
        queue = self.book.queue(place[0])
        if place[1] in queue.grants or place[1] in queue.tickets or place in self._stale:
            return
        self._codes.pop(place, None)
        if (owner := self._owners.pop(place, None)) is not None:
            places = self._executions[owner]
            del places[place]
            if not places:
                del self._executions[owner]

    def _mark_bad(self) -> None:
        """Let nothing be granted of a resource whose limit, head or holder can't be read. A ticket, or a key that no
        quota has, harms nothing."""
        if not self.view.bad and not self._unreadable:
            return
        for resource in self._unreadable:
            self.book.queue(resource).unreadable = ""
        self._unreadable.clear()
        for key in self.view.bad:
            resource, _, rest = key[len(self._keys.quotas) :].partition("/")
            if rest in ("limit", "head") or rest.startswith("grants/"):
                self.book.queue(resource).unreadable = key
                self._unreadable.add(resource)


def _answer(changes: Iterable[_Waiting], result: TxnResult) -> None:
    for waiting in changes:
        if not waiting.done.done():
            waiting.done.set_result(result)


def _fail(changes: Iterable[_Waiting], error: StoreError) -> None:
    for waiting in changes:
        if not waiting.done.done():
            waiting.done.set_exception(error)
