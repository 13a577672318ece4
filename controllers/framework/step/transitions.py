"""The transitions of a Framework and of its tasks: two state machines of one form, and how tasks follow the spec.

Each function takes a status in one state and returns it in the next, or the same object when the state does not change.
If no task of a role changes, the role is the same object, too.

Tasks go from their pod's creation through its end to the decision on a retry. They are added and removed at the end of
a role. A task beyond the spec is marked, which fixes its outcome; it ends gracefully, and is dropped once it and all
tasks after it have completed. A marked task never runs again: if the spec includes its index again, a new task takes
its place. So there are never two pods of one name.

The Framework goes from its ConfigMap's creation through the end of its attempt to the retry decision. An attempt ends
in three steps, each persisted before the next: its outcome is fixed, its ConfigMap is deleted, and when that is gone
with all its pods, the attempt is complete.

An object that the cache does not show counts as gone only if its deletion was seen or accepted; otherwise a quorum read
comes first (see `controllers.framework.step.step`), because the cache may be older than our status.
"""

from __future__ import annotations

from datetime import datetime

from msgspec.structs import replace

from controllers.framework.api.types import (
    CONFIG_MAP_EXTERNAL_DELETED,
    CONFIG_MAP_LOCAL_CACHE_CREATION_TIMEOUT,
    DELETE_TASK_REQUESTED,
    EXECUTION_STOP,
    NEVER_RETRIED,
    OK,
    POD_CREATION_TRANSIENT_ERROR,
    POD_EXTERNAL_DELETED,
    POD_LOCAL_CACHE_CREATION_TIMEOUT,
    STOP_FRAMEWORK_REQUESTED,
    CompletionPolicy,
    CompletionStatus,
    FrameworkStatus,
    State,
    TaskId,
    TaskRoleSpec,
    TaskRoleStatus,
    TaskStatus,
    completion,
    creation_error_code,
    ended_on_its_own,
    is_succeeded,
    pod_completion,
)
from controllers.framework.step.attempts import (
    attempt_outcome,
    cache_deadline,
    enter,
    failed_tasks,
    new_role,
    new_task,
    next_framework_attempt,
    next_task_attempt,
    retry_deadline,
    retry_delay,
    with_framework_outcome,
    with_outcome,
    with_roles,
)
from controllers.framework.step.context import Note, Snapshot, StepContext
from store.kube.api.objects import Object, PodPhase, is_deleting, phase_of

_BY_ITSELF = CompletionPolicy()
_STOPPED = completion(STOP_FRAMEWORK_REQUESTED, "a stop of the Framework was requested")
_DELETED_BY_OTHERS = completion(CONFIG_MAP_EXTERNAL_DELETED, "the attempt's ConfigMap was deleted by another client")
_REPEATABLE = (State.PREPARING, State.RUNNING, State.DELETION_REQUESTED, State.DELETING)

FAIL_ON_FIRST = CompletionPolicy(min_failed_task_count=1, min_succeeded_task_count=-1)
"""The default of an omitted policy, where defaulting is enabled: a failed task fails the attempt."""


def follow_spec(context: StepContext, status: FrameworkStatus) -> FrameworkStatus:
    """Return the status with new roles and tasks added, surplus ones marked, and each role's settings copied."""
    known = {role.name for role in status.roles}
    specs = {spec.name: spec for spec in context.framework.spec.task_roles}
    roles = tuple(_followed(context, role, specs.get(role.name)) for role in status.roles)
    roles += tuple(new_role(context, spec) for spec in context.framework.spec.task_roles if spec.name not in known)
    return _changed(context, status, roles)


def drop_drained(context: StepContext, status: FrameworkStatus) -> FrameworkStatus:
    """Return the status without the marked tasks that have completed, and without the removed roles that are empty."""
    specs = {spec.name: spec for spec in context.framework.spec.task_roles}
    roles = [_drained(context, role, specs.get(role.name)) for role in status.roles]
    position = 0
    while position < len(roles):
        if roles[position].tasks or roles[position].name in specs:
            position += 1
            continue
        last = roles.pop()  # the last role takes the place, as in frameworkcontroller
        if position < len(roles):
            roles[position] = last
    return _changed(context, status, tuple(roles))


def _changed(context: StepContext, status: FrameworkStatus, roles: tuple[TaskRoleStatus, ...]) -> FrameworkStatus:
    before = status.roles
    if len(roles) == len(before) and all(new is old for new, old in zip(roles, before, strict=True)):
        return status
    context.urgent = True
    return with_roles(status, roles)


def _followed(context: StepContext, role: TaskRoleStatus, spec: TaskRoleSpec | None) -> TaskRoleStatus:
    wanted = 0 if spec is None else spec.task_number
    if spec is not None and role.pod_graceful_deletion_timeout_sec != spec.task.pod_graceful_deletion_timeout_sec:
        role = replace(role, pod_graceful_deletion_timeout_sec=spec.task.pod_graceful_deletion_timeout_sec)
    tasks, number = role.tasks, len(role.tasks)
    if number < wanted:
        return replace(
            role, task_statuses=(*tasks, *(new_task(context, role.name, index) for index in range(number, wanted)))
        )
    if all(task.deletion_pending for task in tasks[wanted:]):
        return role
    outcome = completion(DELETE_TASK_REQUESTED, "the task was scaled away")
    marked = (
        task if task.deletion_pending else with_outcome(replace(task, deletion_pending=True), outcome)
        for task in tasks[wanted:]
    )
    return replace(role, task_statuses=(*tasks[:wanted], *marked))


def _drained(context: StepContext, role: TaskRoleStatus, spec: TaskRoleSpec | None) -> TaskRoleStatus:
    wanted = 0 if spec is None else spec.task_number
    kept = len(role.tasks)
    while kept > wanted and _is_drained(role.tasks[kept - 1]):
        kept -= 1
    leaving = [task for position, task in enumerate(role.tasks) if _is_drained(task) and not wanted <= position < kept]
    if not leaving:
        return role
    for task in leaving:
        context.history.append(Snapshot("OnTaskDeletion", task, role.name))
    tasks = (new_task(context, role.name, task.index) if _is_drained(task) else task for task in role.tasks[:wanted])
    return replace(role, task_statuses=(*tasks, *role.tasks[wanted:kept]))


def _is_drained(task: TaskStatus) -> bool:
    return task.deletion_pending and task.state is State.COMPLETED


class RoleStep:
    """Changes the states of one role's tasks. `spec` None: the role left the spec. `closing`: the attempt has ended."""

    def __init__(self, context: StepContext, role: TaskRoleStatus, spec: TaskRoleSpec | None, *, closing: bool) -> None:
        self._context, self._observed, self._now = context, context.observed, context.now
        self._role, self._spec, self._closing = role, spec, closing

    def advance(self) -> TaskRoleStatus:
        """Return the role with each task in the last state that it can reach now."""
        moved: dict[int, TaskStatus] = {}
        for position, task in enumerate(self._role.tasks):
            latest = task
            while (after := self._moved(latest)) is not latest:
                latest = after
            if latest is not task:
                moved[position] = latest
        if not moved:
            return self._role
        tasks = list(self._role.tasks)
        for position, task in moved.items():
            tasks[position] = task
        return replace(self._role, task_statuses=tuple(tasks))

    def _moved(self, task: TaskStatus) -> TaskStatus:
        match task.state:
            case State.RUNNING | State.PREPARING:
                return self._existing(task)
            case State.COMPLETED:
                return task
            case State.CREATION_PENDING:
                return self._creation_pending(task)
            case State.CREATION_REQUESTED:
                return self._creation_requested(task)
            case State.ATTEMPT_COMPLETED:
                return self._attempt_completed(task)
            case _:
                return self._ending(task)

    def _creation_pending(self, task: TaskStatus) -> TaskStatus:
        target = TaskId(self._role.name, task.index)
        if uid := self._observed.created.pop(target, None):
            attempt = replace(task.attempt_status, pod_uid=uid, instance_uid=f"{task.attempt_status.id}_{uid}")
            self._context.urgent = True
            return enter(replace(task, attempt_status=attempt), State.CREATION_REQUESTED, self._now)
        if task.deletion_pending:
            return enter(task, State.ATTEMPT_COMPLETED, self._now)
        refusal = self._observed.refusals.get(target)
        if refusal is None or self._closing:
            return task
        code = creation_error_code(refusal.status, refusal.message)
        if code == POD_CREATION_TRANSIENT_ERROR:
            return task
        del self._observed.refusals[target]
        return self._ended(task, completion(code, f"the pod could not be created: {refusal.message}"))

    def _creation_requested(self, task: TaskStatus) -> TaskStatus:
        pod = self._pod(task)
        if pod is not None:
            task = self._with_addresses(task, pod)
            if is_deleting(pod):
                return self._deleted_by_others(task, pod)
            is_known = phase_of(pod) != PodPhase.UNKNOWN
            return enter(task, State.PREPARING, self._now) if is_known else task
        if task.attempt_status.pod_uid not in self._observed.gone:
            return task
        if self._now < cache_deadline(task.transition_time, self._context.config):
            return self._vanished(task)
        late = "the pod was created, but did not appear in the cache in time"
        return self._ended(task, completion(POD_LOCAL_CACHE_CREATION_TIMEOUT, late))

    def _existing(self, task: TaskStatus) -> TaskStatus:
        pod = self._pod(task)
        if pod is None:
            if self._closing:  # its ConfigMap is only gone after it
                return self._ended(task, None)
            return self._vanished(task) if task.attempt_status.pod_uid in self._observed.gone else task
        task = self._with_addresses(task, pod)
        if is_deleting(pod):
            return self._deleted_by_others(task, pod)
        phase = phase_of(pod)
        if phase in (PodPhase.SUCCEEDED, PodPhase.FAILED):
            return enter(self._with_outcome(task, self._outcome_of(pod)), State.DELETION_PENDING, self._now)
        if phase == PodPhase.UNKNOWN:
            return task
        if phase == PodPhase.RUNNING and task.state is State.PREPARING:
            return enter(task, State.RUNNING, self._now)
        return enter(task, State.DELETION_PENDING, self._now) if task.deletion_pending else task

    def _ending(self, task: TaskStatus) -> TaskStatus:
        """Handle a pending, requested or running deletion of the pod."""
        uid, pod = task.attempt_status.pod_uid, self._pod(task)
        if pod is None:
            is_certain = task.state is not State.DELETION_PENDING or self._closing or uid in self._observed.gone
            return self._vanished(task) if is_certain else task
        if task.state is State.DELETING:
            return task
        if is_deleting(pod):
            return enter(task, State.DELETING, self._now)
        if task.state is State.DELETION_PENDING and uid in self._observed.accepted:
            return enter(task, State.DELETION_REQUESTED, self._now)
        return task

    def _attempt_completed(self, task: TaskStatus) -> TaskStatus:
        outcome = task.attempt_status.completion_status
        if self._closing or task.deletion_pending or outcome is None:
            return _completed(task, self._now)
        if self._spec is None:  # an invalid spec lacks the role; it was not scaled away
            return task
        policy = self._spec.task.retry_policy
        if retry_delay(policy, task.retry_policy_status, outcome, rng=self._context.rng) is None:
            return _completed(task, self._now)
        self._context.history.append(Snapshot("OnTaskRetry", task, self._role.name))
        self._context.urgent = True
        return next_task_attempt(self._context, task, policy, outcome)

    def _pod(self, task: TaskStatus) -> Object | None:
        return self._observed.pod(task.attempt_status.pod_name, task.attempt_status.pod_uid)

    def _with_addresses(self, task: TaskStatus, pod: Object) -> TaskStatus:
        """Return the task with the pod's node and addresses; those not set yet become "", no longer null."""
        attempt = task.attempt_status
        status = pod.get("status") or {}
        node = (pod.get("spec") or {}).get("nodeName") or ""
        pod_ip, host_ip = status.get("podIP") or "", status.get("hostIP") or ""
        if attempt.pod_ip == pod_ip and attempt.pod_node_name == node and attempt.pod_host_ip == host_ip:
            return task
        self._context.addressed |= bool(pod_ip)
        return replace(task, attempt_status=replace(attempt, pod_node_name=node, pod_ip=pod_ip, pod_host_ip=host_ip))

    def _outcome_of(self, pod: Object) -> CompletionStatus:
        if phase_of(pod) == PodPhase.SUCCEEDED:
            return completion(OK, "the pod succeeded", pod=pod_completion(pod))
        return self._context.config.failures.outcome(pod)

    def _with_outcome(self, task: TaskStatus, outcome: CompletionStatus) -> TaskStatus:
        after = with_outcome(task, outcome)
        self._context.urgent |= after is not task
        return after

    def _deleted_by_others(self, task: TaskStatus, pod: Object) -> TaskStatus:
        """Handle a deletion by another client: we delete no pod in this state. An ended pod keeps its outcome."""
        return enter(self._with_outcome(task, self._outcome_at_deletion(pod)), State.DELETING, self._now)

    def _vanished(self, task: TaskStatus) -> TaskStatus:
        final = self._observed.gone.get(task.attempt_status.pod_uid or "")
        return self._ended(task, self._outcome_at_deletion(final))

    def _outcome_at_deletion(self, pod: Object | None) -> CompletionStatus:
        if pod is not None and ended_on_its_own(pod):
            return self._outcome_of(pod)
        return completion(POD_EXTERNAL_DELETED, "the pod was deleted by another client")

    def _ended(self, task: TaskStatus, outcome: CompletionStatus | None) -> TaskStatus:
        if outcome is not None:
            task = self._with_outcome(task, outcome)
        return enter(task, State.ATTEMPT_COMPLETED, self._now)


class FrameworkStep:
    """Changes the state of one Framework, after the states of its tasks."""

    def __init__(self, context: StepContext) -> None:
        self._context, self._observed, self._now = context, context.observed, context.now
        self._framework, self._config = context.framework, context.config
        self._is_stopped = context.framework.spec.execution_type == EXECUTION_STOP

    def settle(self, status: FrameworkStatus) -> FrameworkStatus:
        """Return the status in the last state that it can reach now."""
        while (after := self._moved(status)) is not status:
            status = after
        return status

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
        self._context.urgent |= state not in _REPEATABLE
        return enter(status, state, self._now)

    def _creation_pending(self, status: FrameworkStatus) -> FrameworkStatus:
        if uid := self._observed.created.pop(None, None):
            attempt = replace(
                status.attempt_status, config_map_uid=uid, instance_uid=f"{status.attempt_status.id}_{uid}"
            )
            return self._enter(replace(status, attempt_status=attempt), State.CREATION_REQUESTED)
        return self._ended(status, _STOPPED) if self._is_stopped else status

    def _creation_requested(self, status: FrameworkStatus) -> FrameworkStatus:
        uid = status.attempt_status.config_map_uid
        if self._observed.config_map(uid) is not None:
            return self._enter(status, State.PREPARING)
        if uid not in self._observed.gone:
            return status
        if self._now < cache_deadline(status.transition_time, self._config):
            return self._ended(status, _DELETED_BY_OTHERS)
        late = "the ConfigMap was created, but did not appear in the cache in time"
        return self._ended(status, completion(CONFIG_MAP_LOCAL_CACHE_CREATION_TIMEOUT, late))

    def _existing(self, status: FrameworkStatus) -> FrameworkStatus:
        uid = status.attempt_status.config_map_uid
        config_map = self._observed.config_map(uid)
        if config_map is None:
            return self._ended(status, _DELETED_BY_OTHERS) if uid in self._observed.gone else status
        if is_deleting(config_map):
            self._context.urgent = True
            return self._enter(with_framework_outcome(status, _DELETED_BY_OTHERS), State.DELETING)
        tasks = (task for role in status.roles for task in role.tasks)
        if status.state is State.PREPARING and any(task.run_time and not task.deletion_pending for task in tasks):
            return self._enter(status, State.RUNNING)
        outcome = _STOPPED if self._is_stopped else self._outcome_by_tasks(status)
        return (
            status if outcome is None else self._enter(with_framework_outcome(status, outcome), State.DELETION_PENDING)
        )

    def _ending(self, status: FrameworkStatus) -> FrameworkStatus:
        """Handle a pending, requested or running deletion of the ConfigMap."""
        uid = status.attempt_status.config_map_uid
        config_map = self._observed.config_map(uid)
        if config_map is None:
            is_certain = status.state is not State.DELETION_PENDING or uid in self._observed.gone
            return self._ended(status, _DELETED_BY_OTHERS) if is_certain else status
        if status.state is State.DELETING:
            return status
        if is_deleting(config_map):
            return self._enter(status, State.DELETING)
        if status.state is State.DELETION_PENDING and uid in self._observed.accepted:
            return self._enter(status, State.DELETION_REQUESTED)
        return status

    def _attempt_completed(self, status: FrameworkStatus) -> FrameworkStatus:
        outcome = status.attempt_status.completion_status or _DELETED_BY_OTHERS
        retried = status.retry_policy_status
        if self._framework.problems and not self._is_stopped and outcome.code not in NEVER_RETRIED:
            return status  # the retry policy may be the unreadable field
        if retried.retry_delay_sec is None:
            policy, delays = self._framework.spec.retry_policy, self._config.conflict_delay
            delay = retry_delay(policy, retried, outcome, conflict_delay=delays, rng=self._context.rng)
            if delay is None:
                text = f"completed after {status.attempt_status.id} retries: {_describe(outcome)}"
                self._context.notes.append(
                    Note("Normal" if is_succeeded(outcome) else "Warning", "FrameworkCompleted", text)
                )
                return self._enter(status, State.COMPLETED)
            self._context.urgent = True
            when = f"in {delay} s" if delay else "now"
            text = f"attempt {status.attempt_status.id} ended: {_describe(outcome)}; the next begins {when}"
            self._context.notes.append(Note("Warning", "FrameworkRetry", text))
            status = replace(status, retry_policy_status=replace(retried, retry_delay_sec=delay))
        if not self._is_stopped and self._now < retry_deadline(status):
            return status
        self._context.urgent = True
        self._context.history.append(Snapshot("OnFrameworkRetry", status))
        return next_framework_attempt(self._context, status, outcome)

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
                self._context.notes.append(Note("Warning", "CompletionPolicyOmitted", text))
        return outcome

    def _ended(self, status: FrameworkStatus, outcome: CompletionStatus) -> FrameworkStatus:
        """Complete the attempt, of which no object exists any more. `outcome` applies unless there is one already."""
        status = with_framework_outcome(status, outcome)
        roles = []
        for role in status.roles:
            tasks = list(role.tasks)
            for position, task in enumerate(tasks):
                if task.state is not State.COMPLETED:
                    is_closed = task.state is State.ATTEMPT_COMPLETED
                    closed = task if is_closed else enter(task, State.ATTEMPT_COMPLETED, self._now)
                    tasks[position] = _completed(closed, self._now)
            roles.append(replace(role, task_statuses=tuple(tasks)))
        return self._enter(with_roles(status, tuple(roles)), State.ATTEMPT_COMPLETED)


def _completed(task: TaskStatus, now: datetime) -> TaskStatus:
    if task.retry_policy_status.retry_delay_sec is not None:
        task = replace(task, retry_policy_status=replace(task.retry_policy_status, retry_delay_sec=None))
    return enter(task, State.COMPLETED, now)


def _describe(outcome: CompletionStatus) -> str:
    return f"{outcome.phrase} ({outcome.code}), {outcome.diagnostics}"
