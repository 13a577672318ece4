"""Statuses at their beginning and their ends: new Frameworks, roles, tasks and attempts, and outcomes put on them.

Times are entered in one place for each kind, so that a state never lacks the time that belongs to it. An outcome, once
there, is never replaced.
"""

from __future__ import annotations

from datetime import datetime

from msgspec.structs import replace

from controllers.framework.codes import FRAMEWORK_ATTEMPT_COMPLETION, completion
from controllers.framework.constants import State, config_map_name, pod_name
from controllers.framework.retry import is_accountable
from controllers.framework.turn import Turn
from controllers.framework.types import (
    CompletionStatus,
    FrameworkAttemptStatus,
    FrameworkStatus,
    RetryPolicy,
    RetryPolicyStatus,
    TaskAttemptStatus,
    TaskRoleSpec,
    TaskRoleStatus,
    TaskStatus,
)


def new_framework_status(turn: Turn) -> FrameworkStatus:
    """Of a Framework that nothing was done for."""
    return FrameworkStatus(
        start_time=turn.now,
        state=State.CREATION_PENDING,
        transition_time=turn.now,
        retry_policy_status=RetryPolicyStatus(),
        attempt_status=_new_framework_attempt(turn, 0),
    )


def next_framework_attempt(turn: Turn, status: FrameworkStatus, outcome: CompletionStatus) -> FrameworkStatus:
    """The attempt after one that completed; all tasks begin anew."""
    retried = _retried(status.retry_policy_status, turn.framework.spec.retry_policy, outcome)
    return replace(
        status,
        state=State.CREATION_PENDING,
        transition_time=turn.now,
        retry_policy_status=retried,
        attempt_status=_new_framework_attempt(turn, retried.total_retried_count),
    )


def _new_framework_attempt(turn: Turn, attempt_id: int) -> FrameworkAttemptStatus:
    framework = turn.framework
    roles = () if framework.problems else framework.spec.task_roles
    _tell_defaults(turn, roles)
    return FrameworkAttemptStatus(
        id=attempt_id,
        start_time=turn.now,
        config_map_name=config_map_name(framework.name),
        task_role_statuses=tuple(new_role(turn, role) for role in roles),
    )


def _tell_defaults(turn: Turn, roles: tuple[TaskRoleSpec, ...]) -> None:
    omitted = [role.name for role in roles if role.framework_attempt_completion_policy is None]
    if omitted and turn.config.default_completion_policy:
        text = f"no frameworkAttemptCompletionPolicy for {', '.join(omitted)}: the first failed task fails the attempt"
        turn.note("Warning", "CompletionPolicyDefaulted", text)


def _retried(before: RetryPolicyStatus, policy: RetryPolicy, outcome: CompletionStatus) -> RetryPolicyStatus:
    return RetryPolicyStatus(
        total_retried_count=before.total_retried_count + 1,
        accountable_retried_count=before.accountable_retried_count + is_accountable(policy, outcome),
    )


def new_role(turn: Turn, spec: TaskRoleSpec) -> TaskRoleStatus:
    return TaskRoleStatus(
        name=spec.name,
        instance_uid=turn.new_uid(),
        pod_graceful_deletion_timeout_sec=spec.task.pod_graceful_deletion_timeout_sec,
        task_statuses=tuple(new_task(turn, spec.name, index) for index in range(spec.task_number)),
    )


def new_task(turn: Turn, role: str, index: int) -> TaskStatus:
    return TaskStatus(
        index=index,
        instance_uid=turn.new_uid(),
        start_time=turn.now,
        state=State.CREATION_PENDING,
        transition_time=turn.now,
        retry_policy_status=RetryPolicyStatus(),
        attempt_status=TaskAttemptStatus(
            id=0, start_time=turn.now, pod_name=pod_name(turn.framework.name, role, index)
        ),
    )


def next_task_attempt(turn: Turn, task: TaskStatus, policy: RetryPolicy, outcome: CompletionStatus) -> TaskStatus:
    retried = _retried(task.retry_policy_status, policy, outcome)
    return replace(
        task,
        state=State.CREATION_PENDING,
        transition_time=turn.now,
        retry_policy_status=retried,
        attempt_status=TaskAttemptStatus(
            id=retried.total_retried_count, start_time=turn.now, pod_name=task.attempt_status.pod_name
        ),
    )


def enter(task: TaskStatus, state: State, now: datetime) -> TaskStatus:
    """The task in another state, with the times that belong to it."""
    attempt = task.attempt_status
    run_time, completion_time = task.run_time, task.completion_time
    if state is State.RUNNING:
        run_time = run_time or now
        attempt = replace(attempt, run_time=attempt.run_time or now)
    elif state is State.ATTEMPT_COMPLETED:
        attempt = replace(attempt, completion_time=now)
    elif state is State.COMPLETED:
        completion_time = now
    return replace(
        task,
        state=state,
        transition_time=now,
        run_time=run_time,
        completion_time=completion_time,
        attempt_status=attempt,
    )


def enter_framework(status: FrameworkStatus, state: State, now: datetime) -> FrameworkStatus:
    """The Framework in another state, with the times that belong to it."""
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
    """The task with the outcome of its attempt, unless it has one."""
    if task.attempt_status.completion_status is not None:
        return task
    return replace(task, attempt_status=replace(task.attempt_status, completion_status=outcome))


def with_framework_outcome(status: FrameworkStatus, outcome: CompletionStatus) -> FrameworkStatus:
    """The Framework with the outcome of its attempt, unless it has one; tasks without one end because of it."""
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
