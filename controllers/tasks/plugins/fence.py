"""A fence for plugins whose external work is in the engine's own store.

An engine that was stopped for a while may send a write when another engine has already gone on. A transaction with this
operation then changes nothing.
"""

from __future__ import annotations

from typing import NamedTuple

from controllers.tasks.api.errors import TaskError
from controllers.tasks.api.plugin import TaskExecutionContext
from store.kv import ops
from store.kv.protocol import Op, Store
from store.schema.keys import Keys
from store.schema.records import decode
from store.schema.tasks import TaskState


class ExecutionLost(TaskError):
    """The execution's state is not the one that this attempt declared its intent in."""


class Attempt(NamedTuple):
    """An attempt of an execution. `number` counts from 0."""

    execution: str
    number: int


class Fence(NamedTuple):
    """`op` fails once the execution's state has changed. `token`: the fencing token of its owner."""

    op: Op
    token: int


def attempt_of(context: TaskExecutionContext) -> Attempt:
    """Return the attempt that the call is about."""
    identity = context.task_execution_metadata.get_task_execution_id().get_id()
    return Attempt(identity.name, identity.retry_attempt)


async def fence_of(store: Store, keys: Keys, attempt: Attempt, intent: str) -> Fence:
    """Return the fence of an attempt that has declared `intent` and is not cleaned up yet. Raises `ExecutionLost` if
    the stored state says otherwise, and the store's errors."""
    entry = await store.get(keys.task_state(attempt.execution), consistent=True)
    state = decode(TaskState, entry.key, entry.value) if entry else None
    declared = state.intent.key if state and state.intent else ""
    if entry is None or state is None or (state.attempt, declared) != (attempt.number, intent):
        raise ExecutionLost(f"task {attempt.execution} has gone on under another owner, without {intent}")
    if state.step != "running":
        raise ExecutionLost(f"task {attempt.execution} is {state.step}; nothing is created for it any more")
    return Fence(ops.check_index(entry.key, entry.modify_index), state.token)
