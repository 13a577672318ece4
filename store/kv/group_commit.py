"""Group commit: the writes of several items of work share transactions, and no write fails because of another.

The model: a *unit* is a write for one item (an RC, an execution) of at most 64 operations, and it is applied whole or
not at all. Its writer begins it with its fence, such as `check-session` on the item's ownership lock.

Waiting units are packed, oldest first, into transactions. One leaves at once while fewer than `EAGER` are in flight;
beside these only full ones do, because the store and this process spend more on a transaction than on the operations
in it. So units that come one by one travel together under load, and none waits for long. The store refuses a
transaction as a whole; then only the units whose own operations failed get the error, and the others are sent again
without them, so that one item's conflict never delays another for longer than one round trip. If the answer is lost
(`Unavailable`), it is unknown whether the unit was applied: its writer reads again before it decides.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from store.kv.ops import refusals
from store.kv.protocol import (
    MAX_TXN_OPS,
    Op,
    Store,
    StoreError,
    TooLarge,
    TxnConflict,
    TxnResult,
    Unavailable,
)

T = TypeVar("T")

EAGER = 2  # transactions in flight beside which one leaves that is not full
MAX_TXN_BYTES = 320 * 1024  # of values; base64 and the operations' own text must fit into the store's 512 KiB, too
_UNANSWERED = frozenset({"delete", "delete-cas", "delete-tree"})  # verbs without an entry in the answer


def packed(things: Iterable[T], room: int, size: Callable[[T], int]) -> list[list[T]]:
    """Return the things in order, in runs whose sizes fit into `room`."""
    runs: list[list[T]] = []
    left = 0
    for thing in things:
        if size(thing) > left:
            runs.append([])
            left = room
        runs[-1].append(thing)
        left -= size(thing)
    return runs


@dataclass(slots=True, eq=False)
class _Unit:
    ops: list[Op]
    size: int
    done: asyncio.Future[TxnResult]
    alone: bool = False


class GroupCommit:
    """Merges units into transactions. `run()` must be running for `commit` to answer.

    `concurrency`: transactions in flight at once. `conflicts`, `transactions`, `units` count since the start.
    """

    def __init__(self, store: Store, *, concurrency: int = 12) -> None:
        self.conflicts = self.transactions = self.units = 0
        self._store = store
        self._concurrency = concurrency
        self._waiting: deque[_Unit] = deque()
        self._in_flight = 0
        self._wake = asyncio.Event()

    async def commit(self, ops: Sequence[Op]) -> TxnResult:
        """Apply one unit, of writes and checks but no reads. Raises what `Store.txn` raises; the operation indexes of a
        conflict are those of the unit."""
        if len(ops) > MAX_TXN_OPS:
            raise TooLarge(f"a unit of {len(ops)} operations; a transaction takes {MAX_TXN_OPS}")
        unit = _Unit(list(ops), sum(len(op.value) for op in ops), asyncio.get_running_loop().create_future())
        self._waiting.append(unit)
        self._wake.set()
        return await unit.done

    async def run(self) -> None:
        """Send the waiting units, until cancelled; unanswered units are then cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    await self._wake.wait()
                    # One turn of the loop lets units that become ready together share a transaction.
                    await asyncio.sleep(0)
                    if self._in_flight >= (self._concurrency if self._is_full() else min(EAGER, self._concurrency)):
                        self._wake.clear()
                    elif batch := self._pack():
                        self._in_flight += 1
                        group.create_task(self._send(batch)).add_done_callback(self._ended)
        finally:
            while self._waiting:
                self._waiting.popleft().done.cancel()

    def _is_full(self) -> bool:
        """Return whether the waiting units fill a transaction."""
        count = size = 0
        for unit in self._waiting:
            count += len(unit.ops)
            size += unit.size
            if count >= MAX_TXN_OPS or size >= MAX_TXN_BYTES:
                return True
        return False

    def _ended(self, sent: asyncio.Task[None]) -> None:
        self._in_flight -= 1
        self._wake.set()

    def _pack(self) -> list[_Unit]:
        batch: list[_Unit] = []
        count = size = 0
        while self._waiting:
            unit = self._waiting[0]
            full = count + len(unit.ops) > MAX_TXN_OPS or size + unit.size > MAX_TXN_BYTES
            if batch and (full or unit.alone or batch[-1].alone):
                break
            self._waiting.popleft()
            if unit.done.cancelled():
                continue
            batch.append(unit)
            count += len(unit.ops)
            size += unit.size
        if not self._waiting:
            self._wake.clear()
        return batch

    async def _send(self, batch: list[_Unit]) -> None:
        self.transactions += 1
        try:
            result = await self._store.txn([op for unit in batch for op in unit.ops])
        except TxnConflict as conflict:
            # Fail the units whose own operations were refused; send the others again, first in line.
            self.conflicts += 1
            innocent: list[_Unit] = []
            errors = refusals((unit.ops for unit in batch), conflict.failures)
            for unit, error in zip(batch, errors, strict=True):
                if error is None:
                    innocent.append(unit)
                elif not unit.done.done():
                    unit.done.set_exception(error)
            if len(innocent) == len(batch):
                self._failed(batch, conflict)
            else:
                self._again(innocent)
        except StoreError as failure:
            self._failed(batch, failure)
        except asyncio.CancelledError:
            for unit in batch:
                unit.done.cancel()
            raise
        else:
            self.units += len(batch)
            answers = {entry.key: entry for entry in result.entries}
            for unit in batch:
                if not unit.done.done():
                    entries = [answers[op.key] for op in unit.ops if op.key in answers and op.verb not in _UNANSWERED]
                    unit.done.set_result(TxnResult(entries, result.index))

    def _failed(self, batch: list[_Unit], error: StoreError) -> None:
        """Handle an error of the whole transaction: unless the store is unavailable, try each unit alone to find the
        cause."""
        if len(batch) > 1 and not isinstance(error, Unavailable):
            for unit in batch:
                unit.alone = True
            self._again(batch)
            return
        for unit in batch:
            if not unit.done.done():
                unit.done.set_exception(error)

    def _again(self, units: list[_Unit]) -> None:
        self._waiting.extendleft(reversed(units))
        self._wake.set()
