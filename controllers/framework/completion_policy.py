"""When an attempt of a Framework is over, and how it ended: by the tasks that completed so far.

Only tasks in state Completed count, and not those that were scaled away. A role's policy completes the attempt with the
outcome of the task that made its count reach the threshold, in the order in which the tasks completed; of several such
tasks the earliest decides. Without one, the attempt succeeds when all tasks have completed, however they ended.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple

import msgspec

from controllers.framework.codes import OK, completion, is_failed, is_succeeded
from controllers.framework.constants import State
from controllers.framework.types import (
    CompletionPolicy,
    CompletionStatus,
    FrameworkSpec,
    TaskRoleStatus,
    Trigger,
)

FAIL_ON_FIRST = CompletionPolicy(min_failed_task_count=1, min_succeeded_task_count=-1)
"""What an omitted policy means where defaulting is enabled: a failed task fails the attempt."""


@dataclass(frozen=True, slots=True, order=True)
class _Completed:
    """A task that completed. Sorts by time; those of the same second in the order of the spec."""

    at: datetime
    role_position: int
    index: int
    role: str = field(compare=False)
    outcome: CompletionStatus = field(compare=False)


class _Fired(NamedTuple):
    by: _Completed
    message: str


def attempt_outcome(
    spec: FrameworkSpec, roles: tuple[TaskRoleStatus, ...], *, default: CompletionPolicy
) -> CompletionStatus | None:
    """The outcome of the attempt, or None while it goes on. `default`: the policy of roles without one."""
    by_name = {role.name: role for role in roles}
    everyone: list[_Completed] = []
    fired: list[_Fired] = []
    for position, role_spec in enumerate(spec.task_roles):
        role = by_name.get(role_spec.name)
        done = _completed(position, role) if role is not None else []
        everyone += done
        policy = role_spec.framework_attempt_completion_policy
        fired += _triggers(default if policy is None else policy, done)
    if fired:
        return _inherited(min(fired))
    total = sum(role_spec.task_number for role_spec in spec.task_roles)
    if total < 1 or len(everyone) < total:
        return None
    last = max(everyone)
    return completion(
        OK, f"all {total} tasks completed", trigger=_trigger(last, f"the last of {total} tasks completed")
    )


def failed_tasks(spec: FrameworkSpec, roles: tuple[TaskRoleStatus, ...]) -> int:
    """How many of the tasks that the spec asks for completed and failed."""
    names = {role.name for role in spec.task_roles}
    return sum(is_failed(done.outcome) for role in roles if role.name in names for done in _completed(0, role))


def _completed(position: int, role: TaskRoleStatus) -> list[_Completed]:
    found = []
    for task in role.tasks:
        if task.state is not State.COMPLETED or task.deletion_pending:
            continue
        outcome = task.attempt_status.completion_status
        if outcome is not None and task.completion_time is not None:
            found.append(_Completed(task.completion_time, position, task.index, role.name, outcome))
    return found


def _triggers(policy: CompletionPolicy, done: list[_Completed]) -> list[_Fired]:
    """At most one for failures and one for successes."""
    fired = []
    for word, least, counts in (
        ("failed", policy.min_failed_task_count, is_failed),
        ("succeeded", policy.min_succeeded_task_count, is_succeeded),
    ):
        if least < 1:
            continue
        of_interest = sorted(completed for completed in done if counts(completed.outcome))
        if len(of_interest) >= least:
            message = f"{least} of the role's tasks {word}, as its completion policy asks for"
            fired.append(_Fired(of_interest[least - 1], message))
    return fired


def _inherited(fired: _Fired) -> CompletionStatus:
    outcome = fired.by.outcome
    return msgspec.structs.replace(outcome, pod=msgspec.UNSET, trigger=_trigger(fired.by, fired.message))


def _trigger(by: _Completed, message: str) -> Trigger:
    return Trigger(message=message, task_role_name=by.role, task_index=by.index)
