"""Schedules for tests: what operators write, and what became of it."""

from __future__ import annotations

from typing import Any

import msgspec

from store.kv import ops
from store.schema.records import decode, encode
from store.schema.schedules import ScheduleSpec, ScheduleState
from store.schema.tasks import TaskSpec
from tests.support.tasks.engines import World, wall


async def apply_schedule(world: World, name: str, *cron: str, task: TaskSpec | None = None, **fields: Any) -> None:
    """Write a schedule whose runs count from now on, and stay when they have ended."""
    task = task or TaskSpec(id="", type="job", config={"seconds": 1.0})
    kept = {"keep_succeeded": None, "keep_failed": None}
    spec = ScheduleSpec(name=name, cron=cron, task=task, **{"since": wall(), **kept, **fields})
    await world.store.txn([ops.create(world.keys.schedule_spec(name), encode(spec))])


async def edit_schedule(world: World, name: str, **fields: Any) -> None:
    key = world.keys.schedule_spec(name)
    entry = await world.store.get(key)
    assert entry is not None
    spec = msgspec.structs.replace(decode(ScheduleSpec, key, entry.value), **fields)
    await world.store.put(key, encode(spec))


async def schedule_state(world: World, name: str) -> ScheduleState:
    key = world.keys.schedule_state(name)
    entry = await world.store.get(key)
    return decode(ScheduleState, key, entry.value) if entry else ScheduleState()


async def executions(world: World, name: str = "") -> list[str]:
    """Return the ids of the executions, of one schedule if given, in order."""
    found = [world.keys.parse_task(key) for key in await world.store.keys(world.keys.tasks)]
    return sorted(key.task for key in found if key.kind == "spec" and key.task.startswith(name))
