"""Operators' verbs on schedules: apply, show, pause, resume, trigger, delete.

A trigger writes `state` beside the execution; else only `spec` is written. The engine that leads writes `state`, and
removes it after a deletion.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec

from controllers.tasks.schedule import BadSchedule, check, triggered
from controllers.tasks.schedule_runs import abortion, run_of, unended
from rcfarm.operations.errors import BadInput, Contended, NotFound, TaskExists, TaskRefused
from rcfarm.operations.tasks import checked
from store.kv import ops
from store.kv.protocol import BadRecord, Entry, Store
from store.schema import audit
from store.schema.keys import BadKey, Keys, is_dns_label
from store.schema.records import decode, encode, utc_now
from store.schema.schedules import MAX_SCHEDULE_NAME, ScheduleSpec, ScheduleState
from store.schema.tasks import TaskSpec


class ScheduleView(NamedTuple):
    """One schedule. `spec` None: its record can't be decoded; `bad` says why."""

    name: str
    spec: ScheduleSpec | None
    state: ScheduleState
    bad: list[BadRecord]


class Triggered(NamedTuple):
    """An execution that was triggered. `aborted`: those that it replaces; it is submitted when they have ended."""

    task: str
    aborted: tuple[str, ...]


class Schedules:
    """Reads and changes schedules. `actor`: named in the audit log. The store's errors pass through."""

    def __init__(
        self,
        store: Store,
        keys: Keys,
        *,
        actor: str | audit.Actor = "",
        clock: Callable[[], float] = time.time,
        rng: random.Random | None = None,
    ) -> None:
        self._store, self._keys, self._actor, self._clock = store, keys, actor, clock
        self._rng = rng or random.Random()
        self._name = actor.name if isinstance(actor, audit.Actor) else actor

    async def apply(self, asked: ScheduleSpec, *, paused: bool | None = None) -> str:
        """Create or change a schedule. Return "created", "changed" or "unchanged". Raises `BadInput`, `Contended`.

        A change of the expressions or of the time zone counts from now on. `paused` None: as it is, at first not.
        """
        validated(asked, self._clock())

        def change(before: ScheduleSpec | None) -> ScheduleSpec | None:
            wanted = with_pause(asked, before, paused)
            if before is not None and same_schedule(before, wanted):
                return None
            moments = wanted.cron, wanted.time_zone
            keeps = before is not None and (before.cron, before.time_zone) == moments and not before.paused
            return msgspec.structs.replace(
                wanted,
                since=before.since if before is not None and keeps else self._clock(),
                created_at=before.created_at if before else utc_now(),
                submitted_by=self._name,
            )

        before, after = await self._edit(asked.name, change, "SCHEDULE_APPLIED", may_create=True)
        return "unchanged" if after is None else "changed" if before else "created"

    async def pause(self, name: str) -> bool:
        """Begin no more runs. Return whether that is a change. Raises `NotFound`, `Contended`."""
        changed = await self._edit(
            name,
            lambda spec: None if spec is None or spec.paused else msgspec.structs.replace(spec, paused=True),
            "SCHEDULE_PAUSED",
        )
        return changed[1] is not None

    async def resume(self, name: str) -> bool:
        """Begin runs again, those after now. Return whether that is a change. Raises `NotFound`, `Contended`."""
        changed = await self._edit(
            name,
            lambda spec: (
                None
                if spec is None or not spec.paused
                else msgspec.structs.replace(spec, paused=False, since=self._clock())
            ),
            "SCHEDULE_RESUMED",
        )
        return changed[1] is not None

    async def trigger(self, name: str, *, force: bool = False) -> Triggered:
        """Submit an execution now, under the overlap rule: `forbid` refuses while another has not ended, `replace`
        aborts that, and the engine submits when it has ended. `force`: submit now, whatever the rule says. Raises
        `NotFound`, `TaskExists`, `TaskRefused`, `Contended`, and `BadRecord` for a record that can't be read."""

        async def attempt() -> Triggered:
            keys, now = self._keys, self._clock()
            found = await self._store.get(keys.schedule_spec(name), consistent=True)
            if found is None:
                raise _missing(name)
            spec = decode(ScheduleSpec, found.key, found.value)
            entry = await self._store.get(keys.schedule_state(name), consistent=True)
            state = decode(ScheduleState, entry.key, entry.value) if entry else ScheduleState()
            alive = await unended(self._store, keys, state.active)
            decision = triggered(spec, state, alive, now, beside=force)
            if decision is None:
                raise TaskRefused(
                    f"schedule {name}: task {alive[-1]} has not ended, and overlap is forbid; wait for it, "
                    f"`rcfarm task abort {alive[-1]}`, or begin another beside it with `rcfarm schedule trigger "
                    f"{name} --force`"
                )
            task = decision.execution or decision.state.requested
            if task == state.requested or await self._store.get(keys.task_spec(task), consistent=True):
                raise TaskExists(f"schedule {name} was triggered in this second already, as task {task}; try again")
            unit = [ops.check_index(found.key, found.modify_index)]
            if decision.run is not None:
                run = run_of(spec, task, by=self._name, at=utc_now())
                unit.append(ops.create(keys.task_spec(task), encode(run)))
            for each in decision.abort:
                reason = f"replaced by {task}, which an operator triggered"
                unit += await abortion(self._store, keys, each, reason=reason, by=self._name, at=utc_now())
            unit.append(ops.cas(keys.schedule_state(name), encode(decision.state), entry.modify_index if entry else 0))
            details = {"schedule": name, "task": task, "aborted": list(decision.abort)}
            unit.append(audit.event_op(keys, "SCHEDULE_TRIGGERED", details, actor=self._actor))
            await self._store.txn(unit)
            return Triggered(task, decision.abort)

        return await ops.retry_conflicts(f"schedule {name}", attempt, rng=self._rng, error=Contended)

    async def delete(self, name: str) -> None:
        """Remove a schedule; its executions stay. Raises `NotFound`."""
        key = self._keys.schedule_spec(name)
        if await self._store.get(key, consistent=True) is None:
            raise _missing(name)
        event = audit.event_op(self._keys, "SCHEDULE_DELETED", {"schedule": name}, actor=self._actor)
        await self._store.txn([ops.delete(key), event])

    async def get(self, name: str) -> ScheduleView:
        """Return one schedule. Raises `NotFound`."""
        prefix = self._keys.schedule_spec(name).removesuffix("spec")
        for view in views_of(self._keys, (await self._store.list(prefix, consistent=True)).entries):
            return view
        raise _missing(name)

    async def list(self) -> list[ScheduleView]:
        """Return every schedule, in order of name."""
        return views_of(self._keys, (await self._store.list(self._keys.schedules, consistent=True)).entries)

    async def _edit(
        self,
        name: str,
        change: Callable[[ScheduleSpec | None], ScheduleSpec | None],
        event_type: str,
        *,
        may_create: bool = False,
    ) -> tuple[ScheduleSpec | None, ScheduleSpec | None]:
        """Write what `change` makes of the spec. Return the spec before, and after; None: not written."""
        key = self._keys.schedule_spec(name)

        async def attempt() -> tuple[ScheduleSpec | None, ScheduleSpec | None]:
            entry = await self._store.get(key, consistent=True)
            if entry is None and not may_create:
                raise _missing(name)
            try:
                before = decode(ScheduleSpec, key, entry.value) if entry else None
            except BadRecord:
                if not may_create:
                    raise
                before = None  # replaced by the file's
            after = change(before)
            if after is None:
                return before, None
            after = msgspec.structs.replace(after, generation=before.generation + 1 if before else 1)
            event = audit.event_op(self._keys, event_type, {"schedule": name}, actor=self._actor)
            await self._store.txn([ops.cas(key, encode(after), entry.modify_index if entry else 0), event])
            return before, after

        return await ops.retry_conflicts(f"schedule {name}", attempt, rng=self._rng, error=Contended)


def validated(spec: ScheduleSpec, now: float) -> ScheduleSpec:
    """Return the spec. Raises `BadInput`, whose message begins with the field, for one that can't be followed."""
    if not is_dns_label(spec.name) or len(spec.name) > MAX_SCHEDULE_NAME:
        raise BadInput(
            f"schedule: {spec.name!r} is not a DNS label of at most {MAX_SCHEDULE_NAME} characters "
            "(lower-case letters, digits and '-')"
        )
    try:
        check(spec, now)
    except BadSchedule as error:
        raise BadInput(str(error)) from error
    checked(msgspec.structs.replace(spec.task, id=spec.name))
    return spec


def with_pause(wanted: ScheduleSpec, before: ScheduleSpec | None, paused: bool | None) -> ScheduleSpec:
    """Return the spec with the pause that it gets. `paused` None: that of the present spec."""
    if paused is None:
        paused = before is not None and before.paused
    return msgspec.structs.replace(wanted, paused=paused)


def same_schedule(one: ScheduleSpec, other: ScheduleSpec) -> bool:
    """Return whether two specs ask for the same, apart from who applied them and when."""
    blank = {"since": 0.0, "generation": 1, "created_at": "", "submitted_by": ""}
    return msgspec.structs.replace(one, **blank) == msgspec.structs.replace(other, **blank)


def views_of(keys: Keys, entries: Iterable[Entry]) -> list[ScheduleView]:
    """Return the schedules of which these are the entries, in order of name."""
    specs: dict[str, ScheduleSpec | None] = {}
    states: dict[str, ScheduleState] = {}
    bad: dict[str, list[BadRecord]] = {}
    for entry in entries:
        try:
            name, kind = keys.parse_schedule(entry.key)
        except BadKey:
            continue
        try:
            if kind == "spec":
                specs[name] = None
                specs[name] = decode(ScheduleSpec, entry.key, entry.value)
            else:
                states[name] = decode(ScheduleState, entry.key, entry.value)
        except BadRecord as error:
            bad.setdefault(name, []).append(error)
    return [
        ScheduleView(name, spec, states.get(name, ScheduleState()), bad.get(name, []))
        for name, spec in sorted(specs.items())
    ]


def task_of(spec: ScheduleSpec) -> TaskSpec:
    """Return the task that each run submits, under the schedule's name."""
    return msgspec.structs.replace(spec.task, id=spec.name)


def _missing(name: str) -> NotFound:
    return NotFound(f"there is no schedule {name}; `rcfarm schedule list` shows those that exist")
