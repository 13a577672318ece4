"""The executions of schedules in the store: what a run submits, if that has ended, and how it is aborted.

The engine that leads begins the runs that are due, and operators trigger others. Both write the execution and the
schedule's state in one transaction, so that each sees what the other began.
"""

from __future__ import annotations

import msgspec

from store.kv import ops
from store.kv.protocol import BadRecord, Listing, Op, Store
from store.schema.keys import Keys
from store.schema.records import decode, encode
from store.schema.schedules import ScheduleSpec
from store.schema.tasks import AbortRequest, TaskSpec, TaskState


def run_of(spec: ScheduleSpec, execution: str, *, by: str, at: str) -> TaskSpec:
    """Return the execution that a run submits. `by`: who submits it; `at`: when, RFC 3339."""
    return msgspec.structs.replace(
        spec.task,
        id=execution,
        name=spec.task.name or spec.name,
        schedule=spec.name,
        created_at=at,
        submitted_by=by,
        generation=1,
        rerun=0,
        abort=None,
    )


async def abortion(store: Store, keys: Keys, execution: str, *, reason: str, by: str, at: str) -> list[Op]:
    """Return the operations that request the abort of an execution, unless that is requested or it is gone. Raises
    `StoreError`, and `BadRecord` for a spec that can't be decoded."""
    key = keys.task_spec(execution)
    entry = await store.get(key, consistent=True)
    spec = decode(TaskSpec, key, entry.value) if entry is not None else None
    if entry is None or spec is None or spec.abort is not None:
        return []
    abort = AbortRequest(reason=reason, by=by, at=at)
    aborted = msgspec.structs.replace(spec, abort=abort, generation=spec.generation + 1)
    return [ops.cas(key, encode(aborted), entry.modify_index)]


async def unended(store: Store, keys: Keys, executions: tuple[str, ...]) -> tuple[str, ...]:
    """Return those of the executions that have not ended, in order. Raises `StoreError`."""
    folders = [(each, await store.list(keys.task(each), consistent=True)) for each in executions]
    return tuple(each for each, folder in folders if not has_ended(folder, keys, each))


def has_ended(folder: Listing, keys: Keys, execution: str) -> bool:
    """Return whether the execution of this folder has ended, or was deleted. One that no engine has begun, or that
    can't be read, has not."""
    values = {entry.key: entry.value for entry in folder.entries}
    raw, text = values.get(keys.task_spec(execution)), values.get(keys.task_state(execution))
    if raw is None:
        return True
    try:
        spec = decode(TaskSpec, keys.task_spec(execution), raw)
        state = decode(TaskState, keys.task_state(execution), text) if text is not None else None
    except BadRecord:
        return False
    return state is not None and state.step == "done" and state.rerun >= spec.rerun
