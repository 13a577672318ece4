"""How a Framework moves: from its ConfigMap's creation through the end of its attempt to the decision on a retry.

As for tasks, each function answers the status in its next state, or the same object when there is no reason to move;
`settle` follows them to the end. An attempt ends in three strokes, each of them persisted before the next: its outcome
is fixed, its ConfigMap is deleted, and when that is gone with all its pods, the attempt is complete.
"""

from __future__ import annotations

from msgspec.structs import replace

from controllers.framework.attempts import (
    enter,
    enter_framework,
    next_framework_attempt,
    with_framework_outcome,
    with_roles,
)
from controllers.framework.codes import (
    CONFIG_MAP_EXTERNAL_DELETED,
    CONFIG_MAP_LOCAL_CACHE_CREATION_TIMEOUT,
    NEVER_RETRIED,
    OK,
    STOP_FRAMEWORK_REQUESTED,
    completion,
    is_succeeded,
)
from controllers.framework.completion_policy import FAIL_ON_FIRST, attempt_outcome, failed_tasks
from controllers.framework.constants import EXECUTION_STOP, State
from controllers.framework.deadlines import cache_deadline, retry_deadline
from controllers.framework.retry import retry_delay
from controllers.framework.turn import Turn
from controllers.framework.types import CompletionPolicy, CompletionStatus, FrameworkStatus, TaskRoleStatus
from store.kube.objects import is_deleting

_BY_ITSELF = CompletionPolicy()
_REPEATABLE = (State.PREPARING, State.RUNNING, State.DELETION_REQUESTED, State.DELETING)


class FrameworkStep:
    """Moves one Framework, whose tasks have been moved before."""

    def __init__(self, turn: Turn) -> None:
        self._turn, self._observed, self._now = turn, turn.observed, turn.now
        self._framework, self._config = turn.framework, turn.config

    def settle(self, status: FrameworkStatus) -> FrameworkStatus:
        """The status as far as it gets now."""
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
        late = "the ConfigMap was created, but did not show up in the cache in time"
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
        """While the deletion of the ConfigMap is pending, requested or under way."""
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
            return status  # the policy may be what can't be read
        if retried.retry_delay_sec is None:
            policy, delays = self._framework.spec.retry_policy, self._config.conflict_delay
            delay = retry_delay(policy, retried, outcome, conflict_delay=delays, rng=self._turn.rng)
            if delay is None:
                return self._completed(status, outcome)
            self._turn.urgent = True
            self._note_retry(status, outcome, delay)
            status = replace(status, retry_policy_status=replace(retried, retry_delay_sec=delay))
        is_due = self._is_stopped or self._now >= retry_deadline(status)
        return self._retried(status, outcome) if is_due else status

    def _retried(self, status: FrameworkStatus, outcome: CompletionStatus) -> FrameworkStatus:
        self._turn.urgent = True
        self._turn.remember("OnFrameworkRetry", status)
        return next_framework_attempt(self._turn, status, outcome)

    def _completed(self, status: FrameworkStatus, outcome: CompletionStatus) -> FrameworkStatus:
        text = f"completed after {status.attempt_status.id} retries: {_told(outcome)}"
        self._turn.note("Normal" if is_succeeded(outcome) else "Warning", "FrameworkCompleted", text)
        return self._enter(status, State.COMPLETED)

    def _note_retry(self, status: FrameworkStatus, outcome: CompletionStatus, delay: int) -> None:
        when = f"in {delay} s" if delay else "now"
        text = f"attempt {status.attempt_status.id} ended: {_told(outcome)}; the next begins {when}"
        self._turn.note("Warning", "FrameworkRetry", text)

    def _outcome_by_tasks(self, status: FrameworkStatus) -> CompletionStatus | None:
        if self._framework.problems:
            return None
        default = FAIL_ON_FIRST if self._config.default_completion_policy else _BY_ITSELF
        outcome = attempt_outcome(self._framework.spec, status.roles, default=default)
        if outcome is not None and outcome.code == OK:
            self._warn_of_failures(status)
        return outcome

    def _warn_of_failures(self, status: FrameworkStatus) -> None:
        failed = failed_tasks(self._framework.spec, status.roles)
        is_judged = all(role.framework_attempt_completion_policy for role in self._framework.spec.task_roles)
        if failed and not is_judged:
            text = f"counts as succeeded, although {failed} tasks failed: set minFailedTaskCount for their roles"
            self._turn.note("Warning", "CompletionPolicyOmitted", text)

    def _ended(self, status: FrameworkStatus, outcome: CompletionStatus) -> FrameworkStatus:
        """The attempt is complete: nothing of it exists any more. `outcome` counts unless there is one."""
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
    return completion(STOP_FRAMEWORK_REQUESTED, "the Framework was asked to stop")


def _deleted_by_others() -> CompletionStatus:
    return completion(CONFIG_MAP_EXTERNAL_DELETED, "the ConfigMap of the attempt was deleted by somebody else")


def _has_run(roles: tuple[TaskRoleStatus, ...]) -> bool:
    return any(task.run_time is not None and not task.deletion_pending for role in roles for task in role.tasks)


def _told(outcome: CompletionStatus) -> str:
    return f"{outcome.phrase} ({outcome.code}), {outcome.diagnostics}"
