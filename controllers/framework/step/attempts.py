"""Attempts: their statuses, their outcomes, and whether a completed one is followed by another.

Times are set in one function, so that a state never lacks its time. An outcome is never replaced.

The tasks that have completed decide when a Framework's attempt completes, and its outcome. Only tasks in state
Completed count, and not those that were scaled away. A role's policy completes the attempt with the outcome of the task
that made its count reach the threshold, in the order in which the tasks completed; of several such tasks the earliest
decides. Without one, the attempt succeeds when all tasks have completed, however they ended.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from random import Random
from typing import NamedTuple, TypeVar

from msgspec import UNSET
from msgspec.structs import replace

from controllers.framework.api.types import (
    CONFLICT,
    FRAMEWORK_ATTEMPT_COMPLETION,
    NEVER_RETRIED,
    OK,
    PERMANENT,
    TRANSIENT,
    CompletionPolicy,
    CompletionStatus,
    FrameworkAttemptStatus,
    FrameworkSpec,
    FrameworkStatus,
    RetryPolicy,
    RetryPolicyStatus,
    State,
    TaskAttemptStatus,
    TaskRoleSpec,
    TaskRoleStatus,
    TaskStatus,
    Trigger,
    completion,
    config_map_name,
    deletion_requested_at,
    has_attribute,
    is_failed,
    is_succeeded,
    pod_name,
)
from controllers.framework.config import FrameworkConfig
from controllers.framework.step.context import Note, StepContext
from store.kube.api.objects import Object

RETRY_ALWAYS = -2
RETRY_FAILURES = -1

_Status = TypeVar("_Status", FrameworkStatus, TaskStatus)


def retry_delay(
    policy: RetryPolicy,
    retried: RetryPolicyStatus,
    outcome: CompletionStatus,
    *,
    conflict_delay: tuple[int, int] = (0, 0),
    rng: Random,
) -> int | None:
    """Return the seconds until the retry, or None when the attempt was the last.

    `conflict_delay`: the shortest and the longest delay in seconds after a transient conflict, so that gangs that
    starved each other do not collide again. It applies to Frameworks; tasks are retried at once.
    """
    if outcome.code in NEVER_RETRIED:
        return None
    if not is_accountable(policy, outcome):
        return rng.randint(*conflict_delay) if has_attribute(outcome, CONFLICT) else 0
    failed, limit = is_failed(outcome), policy.max_retry_count
    if policy.fancy_retry_policy and failed and has_attribute(outcome, PERMANENT):
        return None
    is_within = limit == RETRY_FAILURES or retried.accountable_retried_count < limit
    return 0 if limit == RETRY_ALWAYS or (failed and is_within) else None


def is_accountable(policy: RetryPolicy, outcome: CompletionStatus) -> bool:
    """Return whether a retry after this outcome counts against the policy's limit."""
    return not (policy.fancy_retry_policy and is_failed(outcome) and has_attribute(outcome, TRANSIENT))


def cache_deadline(requested: datetime, config: FrameworkConfig) -> datetime:
    """Return the time by which a created object must have appeared in the cache."""
    return requested + timedelta(seconds=config.cache_timeout)


def force_deadline(pod: Object, role: TaskRoleStatus) -> datetime | None:
    """Return when a pod that does not end is deleted by force; None: never."""
    requested, timeout = deletion_requested_at(pod), role.pod_graceful_deletion_timeout_sec
    return None if requested is None or timeout is None else requested + timedelta(seconds=timeout)


def retry_deadline(status: FrameworkStatus) -> datetime:
    """Return when the next attempt starts after a completed one."""
    return status.transition_time + timedelta(seconds=status.retry_policy_status.retry_delay_sec or 0)


def new_framework_status(context: StepContext) -> FrameworkStatus:
    """Return the first status of a Framework."""
    return FrameworkStatus(
        start_time=context.now,
        state=State.CREATION_PENDING,
        transition_time=context.now,
        retry_policy_status=RetryPolicyStatus(),
        attempt_status=_new_framework_attempt(context, 0),
    )


def next_framework_attempt(context: StepContext, status: FrameworkStatus, outcome: CompletionStatus) -> FrameworkStatus:
    """Return the status with the next attempt after a completed one; all tasks start again."""
    retried = _retried(status.retry_policy_status, context.framework.spec.retry_policy, outcome)
    return replace(
        status,
        state=State.CREATION_PENDING,
        transition_time=context.now,
        retry_policy_status=retried,
        attempt_status=_new_framework_attempt(context, retried.total_retried_count),
    )


def _new_framework_attempt(context: StepContext, attempt_id: int) -> FrameworkAttemptStatus:
    framework = context.framework
    roles = () if framework.problems else framework.spec.task_roles
    omitted = [role.name for role in roles if role.framework_attempt_completion_policy is None]
    if omitted and context.config.default_completion_policy:
        text = f"no frameworkAttemptCompletionPolicy for {', '.join(omitted)}: the first failed task fails the attempt"
        context.notes.append(Note("Warning", "CompletionPolicyDefaulted", text))
    return FrameworkAttemptStatus(
        id=attempt_id,
        start_time=context.now,
        config_map_name=config_map_name(framework.name),
        task_role_statuses=tuple(new_role(context, role) for role in roles),
    )


def _retried(before: RetryPolicyStatus, policy: RetryPolicy, outcome: CompletionStatus) -> RetryPolicyStatus:
    return RetryPolicyStatus(
        total_retried_count=before.total_retried_count + 1,
        accountable_retried_count=before.accountable_retried_count + is_accountable(policy, outcome),
    )


def new_role(context: StepContext, spec: TaskRoleSpec) -> TaskRoleStatus:
    return TaskRoleStatus(
        name=spec.name,
        instance_uid=context.new_uid(),
        pod_graceful_deletion_timeout_sec=spec.task.pod_graceful_deletion_timeout_sec,
        task_statuses=tuple(new_task(context, spec.name, index) for index in range(spec.task_number)),
    )


def new_task(context: StepContext, role: str, index: int) -> TaskStatus:
    return TaskStatus(
        index=index,
        instance_uid=context.new_uid(),
        start_time=context.now,
        state=State.CREATION_PENDING,
        transition_time=context.now,
        retry_policy_status=RetryPolicyStatus(),
        attempt_status=TaskAttemptStatus(
            id=0, start_time=context.now, pod_name=pod_name(context.framework.name, role, index)
        ),
    )


def next_task_attempt(
    context: StepContext, task: TaskStatus, policy: RetryPolicy, outcome: CompletionStatus
) -> TaskStatus:
    retried = _retried(task.retry_policy_status, policy, outcome)
    return replace(
        task,
        state=State.CREATION_PENDING,
        transition_time=context.now,
        retry_policy_status=retried,
        attempt_status=TaskAttemptStatus(
            id=retried.total_retried_count, start_time=context.now, pod_name=task.attempt_status.pod_name
        ),
    )


def enter(status: _Status, state: State, now: datetime) -> _Status:
    """Return the status of a Framework or a task in another state, with that state's times."""
    attempt = status.attempt_status
    run_time, completion_time = status.run_time, status.completion_time
    if state is State.RUNNING:
        run_time = run_time or now
        attempt = replace(attempt, run_time=attempt.run_time or now)
    elif state is State.ATTEMPT_COMPLETED:
        attempt = replace(attempt, completion_time=now)
    elif state is State.COMPLETED:
        completion_time = now
    return replace(
        status,
        state=state,
        transition_time=now,
        run_time=run_time,
        completion_time=completion_time,
        attempt_status=attempt,
    )


def with_outcome(task: TaskStatus, outcome: CompletionStatus) -> TaskStatus:
    """Return the task with this outcome of its attempt, unless it has one already."""
    if task.attempt_status.completion_status is not None:
        return task
    return replace(task, attempt_status=replace(task.attempt_status, completion_status=outcome))


def with_framework_outcome(status: FrameworkStatus, outcome: CompletionStatus) -> FrameworkStatus:
    """Return the status with this outcome of the attempt, unless it has one. It also ends tasks without an outcome."""
    attempt = status.attempt_status
    if attempt.completion_status is not None:
        return status
    ended = completion(FRAMEWORK_ATTEMPT_COMPLETION, "the attempt of the Framework has completed")
    roles = tuple(
        replace(role, task_statuses=tuple(with_outcome(task, ended) for task in role.tasks)) for role in status.roles
    )
    return replace(status, attempt_status=replace(attempt, completion_status=outcome, task_role_statuses=roles))


def with_roles(status: FrameworkStatus, roles: tuple[TaskRoleStatus, ...]) -> FrameworkStatus:
    if roles is status.roles:
        return status
    return replace(status, attempt_status=replace(status.attempt_status, task_role_statuses=roles))


@dataclass(frozen=True, slots=True, order=True)
class _Completed:
    """A task that completed. Sorts by time; within a second, in the order of the spec."""

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
    """Return the outcome of the attempt, or None while it continues. `default`: the policy of roles without one."""
    by_name = {role.name: role for role in roles}
    everyone: list[_Completed] = []
    fired: list[_Fired] = []
    for position, role_spec in enumerate(spec.task_roles):
        role = by_name.get(role_spec.name)
        done = _completed(position, role) if role is not None else []
        everyone += done
        policy = role_spec.framework_attempt_completion_policy
        policy = default if policy is None else policy
        # A policy fires at most twice: once for failures, and once for successes.
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
    if fired:
        first = min(fired)
        return replace(first.by.outcome, pod=UNSET, trigger=_trigger(first.by, first.message))
    total = sum(role_spec.task_number for role_spec in spec.task_roles)
    if total < 1 or len(everyone) < total:
        return None
    last = max(everyone)
    return completion(
        OK, f"all {total} tasks completed", trigger=_trigger(last, f"the last of {total} tasks completed")
    )


def failed_tasks(spec: FrameworkSpec, roles: tuple[TaskRoleStatus, ...]) -> int:
    """Count the tasks of the spec's roles that completed and failed."""
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


def _trigger(by: _Completed, message: str) -> Trigger:
    return Trigger(message=message, task_role_name=by.role, task_index=by.index)
