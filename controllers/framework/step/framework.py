"""The state machine of a Framework: from its ConfigMap's creation through the end of its attempt to the retry decision.

As for tasks, each function returns the status in its next state, or the same object when the state does not change;
`settle` repeats them until it does not. An attempt ends in three steps, each persisted before the next: its outcome is
fixed, its ConfigMap is deleted, and when that is gone with all its pods, the attempt is complete.

The tasks that have completed decide when an attempt completes, and its outcome. Only tasks in state Completed count,
and not those that were scaled away. A role's policy completes the attempt with the outcome of the task that made its
count reach the threshold, in the order in which the tasks completed; of several such tasks the earliest decides.
Without one, the attempt succeeds when all tasks have completed, however they ended.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple

from msgspec import UNSET
from msgspec.structs import replace

from controllers.framework.api.codes import (
    CONFIG_MAP_EXTERNAL_DELETED,
    CONFIG_MAP_LOCAL_CACHE_CREATION_TIMEOUT,
    NEVER_RETRIED,
    OK,
    STOP_FRAMEWORK_REQUESTED,
    completion,
    is_failed,
    is_succeeded,
)
from controllers.framework.api.types import (
    EXECUTION_STOP,
    CompletionPolicy,
    CompletionStatus,
    FrameworkSpec,
    FrameworkStatus,
    State,
    TaskRoleStatus,
    Trigger,
)
from controllers.framework.step.attempts import (
    cache_deadline,
    enter,
    enter_framework,
    next_framework_attempt,
    retry_deadline,
    retry_delay,
    with_framework_outcome,
    with_roles,
)
from controllers.framework.step.context import Turn
from store.kube.api.objects import is_deleting

_BY_ITSELF = CompletionPolicy()
_REPEATABLE = (State.PREPARING, State.RUNNING, State.DELETION_REQUESTED, State.DELETING)

FAIL_ON_FIRST = CompletionPolicy(min_failed_task_count=1, min_succeeded_task_count=-1)
"""The default of an omitted policy, where defaulting is enabled: a failed task fails the attempt."""


class FrameworkStep:
    """Changes the state of one Framework, after the states of its tasks."""

    def __init__(self, turn: Turn) -> None:
        self._turn, self._observed, self._now = turn, turn.observed, turn.now
        self._framework, self._config = turn.framework, turn.config

    def settle(self, status: FrameworkStatus) -> FrameworkStatus:
        """Return the status in the last state that it can reach now."""
        while (after := self._moved(status)) is not status:
            status = after
        return status

    @property
    def _is_stopped(self) -> bool:
        return self._framework.spec.execution_type == EXECUTION_STOP

    def _moved(self, status: FrameworkStatus) -> FrameworkStatus:
        match status.state:
            case State.CREATION_PENDING:
                return self._creation_pending(status)
            case State.CREATION_REQUESTED:
                return self._creation_requested(status)
            case State.PREPARING | State.RUNNING:
                return self._existing(status)
            case State.ATTEMPT_COMPLETED:
                return self._attempt_completed(status)
            case State.COMPLETED:
                return status
            case _:
                return self._ending(status)

    def _enter(self, status: FrameworkStatus, state: State) -> FrameworkStatus:
        self._turn.urgent |= state not in _REPEATABLE
        return enter_framework(status, state, self._now)

    def _creation_pending(self, status: FrameworkStatus) -> FrameworkStatus:
        if uid := self._observed.take_created(None):
            attempt = replace(
                status.attempt_status, config_map_uid=uid, instance_uid=f"{status.attempt_status.id}_{uid}"
            )
            return self._enter(replace(status, attempt_status=attempt), State.CREATION_REQUESTED)
        return self._ended(status, _stopped()) if self._is_stopped else status

    def _creation_requested(self, status: FrameworkStatus) -> FrameworkStatus:
        uid = status.attempt_status.config_map_uid
        if self._observed.config_map(uid) is not None:
            return self._enter(status, State.PREPARING)
        if not self._observed.is_gone(uid):
            return status
        if self._now < cache_deadline(status.transition_time, self._config):
            return self._ended(status, _deleted_by_others())
        late = "the ConfigMap was created, but did not appear in the cache in time"
        return self._ended(status, completion(CONFIG_MAP_LOCAL_CACHE_CREATION_TIMEOUT, late))

    def _existing(self, status: FrameworkStatus) -> FrameworkStatus:
        uid = status.attempt_status.config_map_uid
        config_map = self._observed.config_map(uid)
        if config_map is None:
            return self._ended(status, _deleted_by_others()) if self._observed.is_gone(uid) else status
        if is_deleting(config_map):
            self._turn.urgent = True
            return self._enter(with_framework_outcome(status, _deleted_by_others()), State.DELETING)
        if status.state is State.PREPARING and _has_run(status.roles):
            return self._enter(status, State.RUNNING)
        outcome = _stopped() if self._is_stopped else self._outcome_by_tasks(status)
        return (
            status if outcome is None else self._enter(with_framework_outcome(status, outcome), State.DELETION_PENDING)
        )

    def _ending(self, status: FrameworkStatus) -> FrameworkStatus:
        """Handle a pending, requested or running deletion of the ConfigMap."""
        uid = status.attempt_status.config_map_uid
        config_map = self._observed.config_map(uid)
        if config_map is None:
            is_certain = status.state is not State.DELETION_PENDING or self._observed.is_gone(uid)
            return self._ended(status, _deleted_by_others()) if is_certain else status
        if status.state is State.DELETING:
            return status
        if is_deleting(config_map):
            return self._enter(status, State.DELETING)
        if status.state is State.DELETION_PENDING and uid in self._observed.accepted:
            return self._enter(status, State.DELETION_REQUESTED)
        return status

    def _attempt_completed(self, status: FrameworkStatus) -> FrameworkStatus:
        outcome = status.attempt_status.completion_status or _deleted_by_others()
        retried = status.retry_policy_status
        if self._framework.problems and not self._is_stopped and outcome.code not in NEVER_RETRIED:
            return status  # the retry policy may be the unreadable field
        if retried.retry_delay_sec is None:
            policy, delays = self._framework.spec.retry_policy, self._config.conflict_delay
            delay = retry_delay(policy, retried, outcome, conflict_delay=delays, rng=self._turn.rng)
            if delay is None:
                return self._completed(status, outcome)
            self._turn.urgent = True
            when = f"in {delay} s" if delay else "now"
            text = f"attempt {status.attempt_status.id} ended: {_describe(outcome)}; the next begins {when}"
            self._turn.note("Warning", "FrameworkRetry", text)
            status = replace(status, retry_policy_status=replace(retried, retry_delay_sec=delay))
        if not self._is_stopped and self._now < retry_deadline(status):
            return status
        self._turn.urgent = True
        self._turn.remember("OnFrameworkRetry", status)
        return next_framework_attempt(self._turn, status, outcome)

    def _completed(self, status: FrameworkStatus, outcome: CompletionStatus) -> FrameworkStatus:
        text = f"completed after {status.attempt_status.id} retries: {_describe(outcome)}"
        self._turn.note("Normal" if is_succeeded(outcome) else "Warning", "FrameworkCompleted", text)
        return self._enter(status, State.COMPLETED)

    def _outcome_by_tasks(self, status: FrameworkStatus) -> CompletionStatus | None:
        if self._framework.problems:
            return None
        default = FAIL_ON_FIRST if self._config.default_completion_policy else _BY_ITSELF
        outcome = attempt_outcome(self._framework.spec, status.roles, default=default)
        if outcome is not None and outcome.code == OK:
            failed = failed_tasks(self._framework.spec, status.roles)
            is_judged = all(role.framework_attempt_completion_policy for role in self._framework.spec.task_roles)
            if failed and not is_judged:
                text = f"counts as succeeded, although {failed} tasks failed: set minFailedTaskCount for their roles"
                self._turn.note("Warning", "CompletionPolicyOmitted", text)
        return outcome

    def _ended(self, status: FrameworkStatus, outcome: CompletionStatus) -> FrameworkStatus:
        """Complete the attempt, of which no object exists any more. `outcome` applies unless there is one already."""
        status = with_framework_outcome(status, outcome)
        roles = tuple(self._ended_role(role) for role in status.roles)
        return self._enter(with_roles(status, roles), State.ATTEMPT_COMPLETED)

    def _ended_role(self, role: TaskRoleStatus) -> TaskRoleStatus:
        now, tasks = self._now, list(role.tasks)
        for position, task in enumerate(tasks):
            if task.state is State.COMPLETED:
                continue
            if task.state is not State.ATTEMPT_COMPLETED:
                task = enter(task, State.ATTEMPT_COMPLETED, now)
            settled = replace(task.retry_policy_status, retry_delay_sec=None)
            tasks[position] = enter(replace(task, retry_policy_status=settled), State.COMPLETED, now)
        return replace(role, task_statuses=tuple(tasks))


def _stopped() -> CompletionStatus:
    return completion(STOP_FRAMEWORK_REQUESTED, "a stop of the Framework was requested")


def _deleted_by_others() -> CompletionStatus:
    return completion(CONFIG_MAP_EXTERNAL_DELETED, "the attempt's ConfigMap was deleted by another client")


def _has_run(roles: tuple[TaskRoleStatus, ...]) -> bool:
    return any(task.run_time is not None and not task.deletion_pending for role in roles for task in role.tasks)


def _describe(outcome: CompletionStatus) -> str:
    return f"{outcome.phrase} ({outcome.code}), {outcome.diagnostics}"


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
        fired += _triggers(default if policy is None else policy, done)
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


def _triggers(policy: CompletionPolicy, done: list[_Completed]) -> list[_Fired]:
    """Return the thresholds that were reached: at most one for failures and one for successes."""
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


def _trigger(by: _Completed, message: str) -> Trigger:
    return Trigger(message=message, task_role_name=by.role, task_index=by.index)
