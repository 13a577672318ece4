"""Retention: ended executions, their events and their data go by age and by number; units of none go at once.

The model: one engine retains all executions, the one that holds the lock `retention`, and every transaction that
removes something checks that it still does. `controllers.tasks.retention` decides, from what `Archive` knows. An
execution is removed when it has settled: it has ended, its events have left, and no rerun is asked for. It is read
again before that, and the transaction checks that it has not changed; the data goes first, so that nothing is left
without a record that names it. One that others wait for is kept.

Units whose execution has no record any more (an operator deleted its keys, or wrote a grant by hand) would be held for
ever, because nothing is left that could end. Each engine releases those of the shards that it watches, with a warning,
in a transaction that checks again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

import structlog

from controllers.ownership.membership import Leadership
from controllers.tasks.engine.archive import Archive, Stored, stored_in
from controllers.tasks.engine.executions import Executions
from controllers.tasks.io.data import DataError, DataStore
from controllers.tasks.io.files import OutputFiles
from controllers.tasks.retention import Kept, Limits, Surplus, surplus
from scheduler.quota.ledger import QuotaLedger
from store.kv import ops
from store.kv.group_commit import packed
from store.kv.protocol import MAX_TXN_OPS, Op, OwnershipLost, Store, StoreError, TxnConflict
from store.kv.view import Record
from store.schema.keys import Keys, shard_of
from store.schema.schedules import ScheduleSpec
from store.timing import give_way

log = structlog.get_logger(__name__)

INTERVAL = 60.0  # seconds between two looks
READING = 50  # times as long as reading other engines' shards took is the pause before the next time
OPS = 5  # per removed execution, at most

Schedules = Callable[[], Mapping[str, Record[ScheduleSpec]]]


class Retention:
    """Removes what exceeds the limits, while this engine leads. `schedules()`: by name. `removed` counts since the
    start. Run `run()` once."""

    def __init__(
        self,
        store: Store,
        keys: Keys,
        data: DataStore,
        executions: Executions,
        ledger: QuotaLedger,
        leadership: Leadership,
        schedules: Schedules,
        *,
        limits: Limits,
        interval: float = INTERVAL,
    ) -> None:
        self.removed = 0
        self.archive: Archive | None = None  # while this engine leads
        self._store, self._keys, self._data, self._executions = store, keys, data, executions
        self._ledger, self._leadership, self._schedules = ledger, leadership, schedules
        self._limits, self._interval = limits, interval

    async def run(self) -> None:
        """Look at all shards while this engine leads, until cancelled."""
        pause = self._interval
        while True:
            await asyncio.sleep(pause)
            pause = self._interval
            try:
                await self._release_strays()
                if await self._leadership.obtain():
                    pause = max(pause, READING * await self._retain())
                else:
                    self.archive = None
            except OwnershipLost as error:
                log.info("Retention is another engine's now", error=str(error))
                self.archive = None
            except StoreError as error:
                log.warning("Ended executions could not be removed; retrying", error=str(error))

    async def _release_strays(self) -> None:
        """Release the units and tickets of executions of watched shards that have no record. Raises `StoreError`."""
        keys, shards = self._keys, self._executions.shards
        for execution in self._ledger.executions():
            await give_way()
            shard = shards.get(shard_of(execution, keys.shards))
            if shard is None or execution in shard.items:
                continue
            fence = [
                ops.check_session(self._executions.membership.key, self._executions.session),
                *(ops.check_not_exists(keys.task(execution) + leaf) for leaf in ("spec", "state", "owner")),
            ]
            try:
                await self._ledger.release(execution, fence=fence)
            except TxnConflict:
                continue  # it was submitted a moment ago
            log.warning("Released the units of an execution that does not exist", execution=execution)

    async def _retain(self) -> float:
        """Remove what is due. Return the seconds that reading took. Raises `StoreError`."""
        clock, watched, schedules = asyncio.get_running_loop().time, self._executions.shards, self._schedules()
        archive = self.archive = self.archive or Archive(self._store, self._keys)
        began = clock()
        await archive.read(watched)
        due = self._due(archive, schedules)
        if archive.doubt({each.id for each in due}):
            await archive.read(watched)
            again = set(self._due(archive, schedules))
            due = [each for each in due if each in again]
        taken = clock() - began
        for batch in packed(due, MAX_TXN_OPS - 1, lambda _: OPS):
            await give_way()
            await self._remove_all(archive, batch, schedules)
        return taken

    def _due(self, archive: Archive, schedules: Mapping[str, Record[ScheduleSpec]]) -> list[Surplus]:
        ended = archive.ended
        if not ended.keys().isdisjoint(archive.awaited):
            ended = {task: each for task, each in ended.items() if task not in archive.awaited}
        kept = {name: Kept(record.value.keep_succeeded, record.value.keep_failed) for name, record in schedules.items()}
        return surplus(ended, self._limits, kept, self._executions.wall())

    async def _remove_all(
        self, archive: Archive, due: Sequence[Surplus], schedules: Mapping[str, Record[ScheduleSpec]]
    ) -> None:
        """Remove executions with all that belongs to them, each unless it has changed. Raises `StoreError`."""
        for each in due:
            archive.forget(each.id)  # read again if it stays
        emptied = await asyncio.gather(*(self._emptied(each.id) for each in due))
        keys, units = self._keys, dict[str, list[Op]]()
        for each, stored in zip(due, emptied, strict=True):
            if stored is None:
                continue
            unit = units[each.id] = [
                ops.check_index(keys.task_spec(each.id), stored.spec_index),
                ops.check_index(keys.task_state(each.id), stored.state_index),
                ops.delete_tree(keys.events_of(each.id)),
                ops.delete_tree(keys.task(each.id)),
            ]
            if (schedule := schedules.get(each.schedule)) is not None:  # whose limits ask for it
                unit.insert(0, ops.check_index(keys.schedule_spec(schedule.value.name), schedule.modify_index))
        try:
            await self._commit(units)
        except OwnershipLost:
            raise
        except TxnConflict:  # one of them runs again, or is removed already
            for task, unit in units.items():
                try:
                    await self._commit({task: unit})
                except OwnershipLost:
                    raise
                except TxnConflict as conflict:
                    log.info("An ended execution was changed; keeping it", execution=task, error=str(conflict))

    async def _emptied(self, task: str) -> Stored | None:
        """Read an execution, and remove inputs, outputs and raw data of all its attempts. Return None if it is to stay.
        Raises `StoreError`."""
        listing = await self._store.list(self._keys.task(task), consistent=True)
        stored = next(stored_in(self._keys, listing.entries, (task,)), None)
        if stored is None or stored.state is None or not stored.is_settled:
            return None
        try:
            for attempt in range(stored.state.attempt + 1):
                await self._data.delete(OutputFiles(self._data, task, attempt).get_raw_output_prefix())
            await self._data.delete(self._data.construct_reference(self._data.base, "executions", task))
        except DataError as error:
            log.error("Data of an ended execution could not be removed", execution=task, error=str(error))
            return None
        return stored

    async def _commit(self, units: Mapping[str, Sequence[Op]]) -> None:
        """Remove executions. Raises what `Store.txn` raises."""
        if not units:
            return
        result = await self._store.txn([self._leadership.fence, *(op for each in units.values() for op in each)])
        keys = self._keys
        gone = [ops.delete(keys.task(task) + leaf) for task in units for leaf in ("spec", "state", "owner")]
        for name in {shard_of(task, keys.shards) for task in units}:
            if (shard := self._executions.shards.get(name)) is not None:
                shard.view.apply(result, gone)
        self.removed += len(units)
