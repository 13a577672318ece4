"""Creates and completes statuses: new Frameworks, roles, tasks and attempts, state changes, and outcomes. Decides
whether a completed attempt is followed by another, and when a step is due with no event.

Times are set in one function for each kind, so that a state never lacks its time. An outcome is never replaced.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from random import Random

from msgspec.structs import replace

from controllers.framework.api.codes import (
    FRAMEWORK_ATTEMPT_COMPLETION,
    NEVER_RETRIED,
    completion,
    deletion_requested_at,
    has_attribute,
    is_failed,
)
from controllers.framework.api.types import (
    CONFLICT,
    PERMANENT,
    TRANSIENT,
    CompletionStatus,
    FrameworkAttemptStatus,
    FrameworkStatus,
    RetryPolicy,
    RetryPolicyStatus,
    State,
    TaskAttemptStatus,
    TaskRoleSpec,
    TaskRoleStatus,
    TaskStatus,
    config_map_name,
    pod_name,
)
from controllers.framework.config.config import FrameworkConfig
from controllers.framework.step.context import Turn
from store.kube.api.objects import Object

RETRY_ALWAYS = -2
RETRY_FAILURES = -1


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
    return requested + timedelta(seconds=config.object_local_cache_creation_timeout_sec)


def force_deadline(pod: Object, role: TaskRoleStatus) -> datetime | None:
    """Return when a pod that does not end is deleted by force; None: never."""
    requested, timeout = deletion_requested_at(pod), role.pod_graceful_deletion_timeout_sec
    return None if requested is None or timeout is None else requested + timedelta(seconds=timeout)


def retry_deadline(status: FrameworkStatus) -> datetime:
    """Return when the next attempt starts after a completed one."""
    return status.transition_time + timedelta(seconds=status.retry_policy_status.retry_delay_sec or 0)


def retention_deadline(status: FrameworkStatus, config: FrameworkConfig) -> datetime:
    """Return when a completed Framework is deleted."""
    completed = status.completion_time or status.transition_time
    return completed + timedelta(seconds=config.framework_completed_retain_sec)


def new_framework_status(turn: Turn) -> FrameworkStatus:
    """Return the first status of a Framework."""
    return FrameworkStatus(
        start_time=turn.now,
        state=State.CREATION_PENDING,
        transition_time=turn.now,
        retry_policy_status=RetryPolicyStatus(),
        attempt_status=_new_framework_attempt(turn, 0),
    )


def next_framework_attempt(turn: Turn, status: FrameworkStatus, outcome: CompletionStatus) -> FrameworkStatus:
    """Return the status with the next attempt after a completed one; all tasks start again."""
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
    omitted = [role.name for role in roles if role.framework_attempt_completion_policy is None]
    if omitted and turn.config.default_completion_policy:
        text = f"no frameworkAttemptCompletionPolicy for {', '.join(omitted)}: the first failed task fails the attempt"
        turn.note("Warning", "CompletionPolicyDefaulted", text)
    return FrameworkAttemptStatus(
        id=attempt_id,
        start_time=turn.now,
        config_map_name=config_map_name(framework.name),
        task_role_statuses=tuple(new_role(turn, role) for role in roles),
    )


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
    """Return the task in another state, with that state's times."""
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
    """Return the Framework's status in another state, with that state's times."""
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
