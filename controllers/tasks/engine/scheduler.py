"""Begins the runs of schedules: the engine that leads does it for all of them.

The model: every engine has a view of `schedules/`, so that another one goes on at once when the leader dies. A work
queue holds the names of schedules that are due for a look: after a change, when a moment comes, when the execution that
a run replaces has ended. A look takes steps (`controllers.tasks.schedule.decide`), each of them one transaction:

    check-session   this engine is a member still
    check-index     the schedule is as it was read: a run never begins after a pause was confirmed
    create          the execution, whose id names the run's moment
    cas             the schedule's state, which says up to which moment runs are decided
    the audit event

So two engines that both believe to lead begin a run once, and a run whose transaction got no answer is decided again
from what the store holds. An error of one schedule is retried with a growing pause, and affects no other.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from controllers.loop.workqueue import ExponentialRateLimiter, WorkQueue
from controllers.ownership.membership import Membership
from controllers.tasks.schedule import BadSchedule, Decision, decide, is_due, without_run
from controllers.tasks.schedule_runs import abortion, has_ended, run_of, unended
from store.kv import ops
from store.kv.protocol import BadRecord, OwnershipLost, Store, StoreError, TxnConflict
from store.kv.view import Record, TreeView
from store.schema.audit import event_op
from store.schema.keys import BadKey, Keys
from store.schema.records import decode, encode, rfc3339
from store.schema.schedules import ScheduleSpec, ScheduleState
from store.schema.tasks import TaskSpec
from store.timing import give_way

TASK = "schedules"  # the name under which the engines agree on a leader
WORKERS = 4
LONGEST_WAIT = 600.0  # seconds after which the wall clock is read again: it may have been set, or the machine slept
MAX_RETRY = 30.0  # seconds between attempts on a schedule that can't be written
WATCH = 300.0  # seconds of one blocking query

ScheduleRecord = ScheduleSpec | ScheduleState


class Scheduler:
    """Runs under one session of an engine. `wall()`: seconds since the epoch."""

    def __init__(
        self,
        store: Store,
        keys: Keys,
        membership: Membership[Any],
        session: str,
        *,
        clock: Callable[[], float],
        wall: Callable[[], float],
        log: Any,
    ) -> None:
        self.begun: Counter[str] = Counter()  # runs, by schedule
        self.skipped: Counter[tuple[str, str]] = Counter()  # runs, by schedule and reason
        self.next_runs: dict[str, float] = {}  # the moment of each schedule's next run, while this engine leads
        self.view: TreeView[ScheduleRecord] = TreeView(
            store,
            keys.schedules,
            self._decode,
            on_change=lambda changes: self._enqueue(change.key for change in changes),
            name="schedules",
            clock=clock,
        )
        self._store, self._keys, self._membership = store, keys, membership
        self._fence = ops.check_session(membership.key, session)
        self._wall, self._log = wall, log
        self._queue: WorkQueue[str] = WorkQueue(
            "schedules", rate_limiter=ExponentialRateLimiter(0.2, MAX_RETRY), clock=clock
        )
        self._waits: dict[str, asyncio.Task[None]] = {}  # for the end of executions that are replaced, by schedule
        self._reported: dict[str, str] = {}  # the error of a schedule that can't be followed

    async def run(self) -> None:
        """Begin runs while this engine leads, until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                with self._membership.view.listening(lambda keys, origin: self._enqueue(self.view.records)):
                    group.create_task(self.view.run())
                    for _ in range(WORKERS):
                        group.create_task(self._work(group))
                    await asyncio.Event().wait()
        finally:
            self._queue.shut_down()

    @property
    def leads(self) -> bool:
        """Return whether this engine begins the runs."""
        return self._membership.leads(TASK)

    def states(self) -> dict[str, ScheduleState]:
        """Return how far each schedule has come, by name."""
        keys, records = self._keys, self.view.records.items()
        return {
            keys.parse_schedule(key).schedule: record.value
            for key, record in records
            if isinstance(record.value, ScheduleState)
        }

    def specs(self) -> dict[str, Record[ScheduleSpec]]:
        """Return the schedules, by name; not those that can't be read."""
        found: dict[str, Record[Any]] = {}
        for record in self.view.records.values():
            if isinstance(record.value, ScheduleSpec):
                found[record.value.name] = record
        return found

    def _decode(self, key: str, value: bytes) -> ScheduleRecord:
        try:
            name, kind = self._keys.parse_schedule(key)
        except BadKey as error:
            raise BadRecord(key, str(error).removeprefix(f"{key}: ")) from error
        if kind == "state":
            return decode(ScheduleState, key, value)
        spec = decode(ScheduleSpec, key, value)
        if spec.name != name:
            raise BadRecord(key, f"name: {spec.name!r} is another schedule's; write it as {name!r}")
        return spec

    def _enqueue(self, keys: Iterable[str]) -> None:
        """Make the schedules due of which these are keys."""
        for key in keys:
            self._queue.add(self._keys.parse_schedule(key).schedule)

    async def _work(self, group: asyncio.TaskGroup) -> None:
        while True:
            name = await self._queue.get()
            self.next_runs.pop(name, None)
            try:
                await give_way()
                if self.leads:
                    await self._look(name, group)
                self._queue.forget(name)
            except OwnershipLost as error:
                self._log.info("Schedule not written: no member any more", schedule=name, error=str(error))
                self._queue.add_rate_limited(name)
            except BadSchedule as error:
                if self._reported.get(name) != str(error):
                    self._log.error("Schedule can't be followed", schedule=name, error=str(error))
                self._reported[name] = str(error)  # its repair makes it due
            except Exception as error:  # a failure of one schedule, whatever it is, must not affect others
                expected = isinstance(error, StoreError)
                self._log.error("Schedule failed; retrying", schedule=name, error=str(error), exc_info=not expected)
                self._queue.add_rate_limited(name)
            finally:
                self._queue.done(name)

    async def _look(self, name: str, group: asyncio.TaskGroup) -> None:
        """Take steps for one schedule until nothing is left to do now."""
        keys = self._keys
        while True:
            found: Record[Any] | None = self.view.records.get(keys.schedule_spec(name))
            if keys.schedule_spec(name) in self.view.bad or keys.schedule_state(name) in self.view.bad:
                return  # the view has logged it; a run could begin twice
            if found is None:
                del self.begun[name]
                for counted in [each for each in self.skipped if each[0] == name]:
                    del self.skipped[counted]
                if keys.schedule_state(name) in self.view.records:
                    gone = ops.check_not_exists(keys.schedule_spec(name))
                    unit = [self._fence, gone, ops.delete(keys.schedule_state(name))]
                    self.view.apply(await self._store.txn(unit), unit)
                return
            spec: ScheduleSpec = found.value
            record: Record[Any] | None = self.view.records.get(keys.schedule_state(name))
            state: ScheduleState | None = record.value if record else None
            now = self._wall()
            asked = state.active if state is not None and is_due(spec, state, now) else ()
            active = await unended(self._store, keys, asked)
            decision = decide(spec, state, active, now)
            self._reported.pop(name, None)
            if decision.state == (state or ScheduleState()):
                if next_run := decision.state.pending or decision.wake:
                    self.next_runs[name] = next_run
                if decision.wake is not None:
                    self._queue.add_after(name, min(max(0.0, decision.wake - now), LONGEST_WAIT))
                if decision.state.pending and active and name not in self._waits:
                    self._waits[name] = group.create_task(self._await_end(name, active))
                return
            try:
                await self._commit(found, record, decision)
            except OwnershipLost:
                raise
            except TxnConflict as conflict:
                self._log.info("Schedule not written; looking again", schedule=name, error=str(conflict))
                for key in (keys.schedule_spec(name), keys.schedule_state(name)):
                    await self.view.refresh_key(key)

    async def _commit(
        self, found: Record[ScheduleSpec], record: Record[ScheduleState] | None, decision: Decision
    ) -> None:
        """Write one step. Raises what `Store.txn` raises."""
        keys, spec, by = self._keys, found.value, f"schedule {found.value.name}"
        now = datetime.fromtimestamp(self._wall(), UTC)
        state, index = decision.state, record.modify_index if record else 0
        unit = [self._fence, ops.check_index(keys.schedule_spec(spec.name), found.modify_index)]
        details: dict[str, Any] = {"schedule": spec.name}
        if decision.run is not None:
            execution = decision.execution
            taken = await self._store.get(keys.task_spec(execution), consistent=True)
            if taken is None:
                run = run_of(spec, execution, by=by, at=rfc3339(now))
                unit.append(ops.create(keys.task_spec(execution), encode(run)))
            else:
                of_schedule = None
                with suppress(BadRecord):
                    of_schedule = decode(TaskSpec, taken.key, taken.value).schedule
                if of_schedule != spec.name:
                    why = f"task {execution} exists, and is not of this schedule"
                    state = without_run(record.value if record else None, decision, why)
            details |= {"task": execution, "moment": rfc3339(datetime.fromtimestamp(decision.run, UTC))}
        for each in decision.abort:
            reason = "replaced by the next run"
            unit += await abortion(self._store, keys, each, reason=reason, by=by, at=rfc3339(now))
        if decision.abort:
            details["aborted"] = list(decision.abort)
        unit.append(ops.cas(keys.schedule_state(spec.name), encode(state), index))
        if decision.run is not None or decision.abort:
            unit.append(event_op(keys, "SCHEDULE_FIRED", details, actor=self._membership.me.name, now=now))
        result = await self._store.txn(unit)
        self.view.apply(result, unit)
        if decision.run is not None:
            self.begun[spec.name] += 1
            self._log.info("Scheduled run began", **details)
        before = record.value.skips if record else ()
        for skip in state.skips:
            if skip not in before:
                self.skipped[spec.name, skip.code] += skip.count
                self._log.info("Scheduled run skipped", schedule=spec.name, reason=skip.code, message=skip.message)

    async def _await_end(self, schedule: str, executions: tuple[str, ...]) -> None:
        """Make the schedule due when the executions have ended."""
        try:
            for execution in executions:
                index = 0
                while True:
                    try:
                        listing = await self._store.watch(self._keys.task(execution), index, WATCH)
                    except StoreError as error:
                        self._log.info("An execution could not be watched", execution=execution, error=str(error))
                        await asyncio.sleep(1.0)
                        continue
                    index = listing.index
                    if has_ended(listing, self._keys, execution):
                        break
        finally:
            self._waits.pop(schedule, None)
            self._queue.add(schedule)
