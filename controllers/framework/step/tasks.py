"""The roles and tasks of an attempt: they follow the spec's, and each task has a state machine, from its pod's creation
through its end to the decision on a retry.

Tasks are added and removed at the end of a role. A task beyond the spec is marked, which fixes its outcome; it ends
gracefully, and is dropped once it and all tasks after it have completed. A marked task never runs again: if the spec
includes its index again, a new task takes its place. So there are never two pods of one name.

Each function takes a task in one state and returns it in the next, or the same object when the state does not change.
If no task of a role changes, the role is the same object, too.

A pod that the cache does not show counts as gone only if its deletion was seen or accepted; otherwise a quorum read
comes first (see `controllers.framework.step.plan_actions`), because the cache may be older than our status.
"""

from __future__ import annotations

from msgspec.structs import replace

from controllers.framework.api.codes import (
    DELETE_TASK_REQUESTED,
    OK,
    POD_CREATION_TRANSIENT_ERROR,
    POD_EXTERNAL_DELETED,
    POD_LOCAL_CACHE_CREATION_TIMEOUT,
    completion,
    creation_error_code,
    ended_on_its_own,
    pod_completion,
)
from controllers.framework.api.types import (
    CompletionStatus,
    FrameworkStatus,
    State,
    TaskId,
    TaskRoleSpec,
    TaskRoleStatus,
    TaskStatus,
)
from controllers.framework.step.attempts import (
    cache_deadline,
    enter,
    new_role,
    new_task,
    next_task_attempt,
    retry_delay,
    with_outcome,
    with_roles,
)
from controllers.framework.step.context import Turn
from store.kube.api.objects import Object, PodPhase, is_deleting, phase_of


def follow_spec(turn: Turn, status: FrameworkStatus) -> FrameworkStatus:
    """Return the status with new roles and tasks added, surplus ones marked, and each role's settings copied."""
    known = {role.name for role in status.roles}
    specs = {spec.name: spec for spec in turn.framework.spec.task_roles}
    roles = tuple(_followed(turn, role, specs.get(role.name)) for role in status.roles)
    roles += tuple(new_role(turn, spec) for spec in turn.framework.spec.task_roles if spec.name not in known)
    return _changed(turn, status, roles)


def drop_drained(turn: Turn, status: FrameworkStatus) -> FrameworkStatus:
    """Return the status without the marked tasks that have completed, and without the removed roles that are empty."""
    specs = {spec.name: spec for spec in turn.framework.spec.task_roles}
    roles = [_drained(turn, role, specs.get(role.name)) for role in status.roles]
    position = 0
    while position < len(roles):
        if roles[position].tasks or roles[position].name in specs:
            position += 1
            continue
        last = roles.pop()  # the last role takes the place, as in frameworkcontroller
        if position < len(roles):
            roles[position] = last
    return _changed(turn, status, tuple(roles))


def _changed(turn: Turn, status: FrameworkStatus, roles: tuple[TaskRoleStatus, ...]) -> FrameworkStatus:
    before = status.roles
    if len(roles) == len(before) and all(new is old for new, old in zip(roles, before, strict=True)):
        return status
    turn.urgent = True
    return with_roles(status, roles)


def _followed(turn: Turn, role: TaskRoleStatus, spec: TaskRoleSpec | None) -> TaskRoleStatus:
    wanted = 0 if spec is None else spec.task_number
    if spec is not None and role.pod_graceful_deletion_timeout_sec != spec.task.pod_graceful_deletion_timeout_sec:
        role = replace(role, pod_graceful_deletion_timeout_sec=spec.task.pod_graceful_deletion_timeout_sec)
    tasks, number = role.tasks, len(role.tasks)
    if number < wanted:
        return replace(
            role, task_statuses=(*tasks, *(new_task(turn, role.name, index) for index in range(number, wanted)))
        )
    if all(task.deletion_pending for task in tasks[wanted:]):
        return role
    return replace(role, task_statuses=tasks[:wanted] + tuple(_marked(task) for task in tasks[wanted:]))


def _marked(task: TaskStatus) -> TaskStatus:
    if task.deletion_pending:
        return task
    marked = replace(task, deletion_pending=True)
    return with_outcome(marked, completion(DELETE_TASK_REQUESTED, "the task was scaled away"))


def _drained(turn: Turn, role: TaskRoleStatus, spec: TaskRoleSpec | None) -> TaskRoleStatus:
    wanted = 0 if spec is None else spec.task_number
    kept = len(role.tasks)
    while kept > wanted and _is_drained(role.tasks[kept - 1]):
        kept -= 1
    leaving = [task for position, task in enumerate(role.tasks) if _is_drained(task) and not wanted <= position < kept]
    if not leaving:
        return role
    for task in leaving:
        turn.remember("OnTaskDeletion", task, role.name)
    tasks = (new_task(turn, role.name, task.index) if _is_drained(task) else task for task in role.tasks[:wanted])
    return replace(role, task_statuses=(*tasks, *role.tasks[wanted:kept]))


def _is_drained(task: TaskStatus) -> bool:
    return task.deletion_pending and task.state is State.COMPLETED


class RoleStep:
    """Changes the states of one role's tasks. `spec` None: the role left the spec. `closing`: the attempt has ended."""

    def __init__(self, turn: Turn, role: TaskRoleStatus, spec: TaskRoleSpec | None, *, closing: bool) -> None:
        self._turn, self._observed, self._now = turn, turn.observed, turn.now
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
        if uid := self._observed.take_created(target):
            attempt = replace(task.attempt_status, pod_uid=uid, instance_uid=f"{task.attempt_status.id}_{uid}")
            self._turn.urgent = True
            return enter(replace(task, attempt_status=attempt), State.CREATION_REQUESTED, self._now)
        if task.deletion_pending:
            return enter(task, State.ATTEMPT_COMPLETED, self._now)
        refusal = self._observed.refusals.get(target)
        if refusal is None or self._closing:
            return task
        code = creation_error_code(refusal.status, refusal.message)
        if code == POD_CREATION_TRANSIENT_ERROR:
            return task
        self._observed.take_refusal(target)
        return self._ended(task, completion(code, f"the pod could not be created: {refusal.message}"))

    def _creation_requested(self, task: TaskStatus) -> TaskStatus:
        pod = self._pod(task)
        if pod is not None:
            task = self._with_addresses(task, pod)
            if is_deleting(pod):
                return self._deleted_by_others(task, pod)
            is_known = phase_of(pod) != PodPhase.UNKNOWN
            return enter(task, State.PREPARING, self._now) if is_known else task
        if not self._observed.is_gone(task.attempt_status.pod_uid):
            return task
        if self._now < cache_deadline(task.transition_time, self._turn.config):
            return self._vanished(task)
        late = "the pod was created, but did not appear in the cache in time"
        return self._ended(task, completion(POD_LOCAL_CACHE_CREATION_TIMEOUT, late))

    def _existing(self, task: TaskStatus) -> TaskStatus:
        pod = self._pod(task)
        if pod is None:
            if self._closing:  # its ConfigMap is only gone after it
                return self._ended(task, None)
            return self._vanished(task) if self._observed.is_gone(task.attempt_status.pod_uid) else task
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
            is_certain = task.state is not State.DELETION_PENDING or self._closing or self._observed.is_gone(uid)
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
            return self._completed(task)
        if self._spec is None:  # an invalid spec lacks the role; it was not scaled away
            return task
        policy = self._spec.task.retry_policy
        if retry_delay(policy, task.retry_policy_status, outcome, rng=self._turn.rng) is None:
            return self._completed(task)
        self._turn.remember("OnTaskRetry", task, self._role.name)
        self._turn.urgent = True
        return next_task_attempt(self._turn, task, policy, outcome)

    def _completed(self, task: TaskStatus) -> TaskStatus:
        if task.retry_policy_status.retry_delay_sec is not None:
            task = replace(task, retry_policy_status=replace(task.retry_policy_status, retry_delay_sec=None))
        return enter(task, State.COMPLETED, self._now)

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
        self._turn.addressed |= bool(pod_ip)
        return replace(task, attempt_status=replace(attempt, pod_node_name=node, pod_ip=pod_ip, pod_host_ip=host_ip))

    def _outcome_of(self, pod: Object) -> CompletionStatus:
        if phase_of(pod) == PodPhase.SUCCEEDED:
            return completion(OK, "the pod succeeded", pod=pod_completion(pod))
        return self._turn.config.failures.outcome(pod)

    def _with_outcome(self, task: TaskStatus, outcome: CompletionStatus) -> TaskStatus:
        after = with_outcome(task, outcome)
        self._turn.urgent |= after is not task
        return after

    def _deleted_by_others(self, task: TaskStatus, pod: Object) -> TaskStatus:
        """Handle a deletion by another client: we delete no pod in this state. An ended pod keeps its outcome."""
        return enter(self._with_outcome(task, self._outcome_at_deletion(pod)), State.DELETING, self._now)

    def _vanished(self, task: TaskStatus) -> TaskStatus:
        final = self._observed.final_state(task.attempt_status.pod_uid)
        return self._ended(task, self._outcome_at_deletion(final))

    def _outcome_at_deletion(self, pod: Object | None) -> CompletionStatus:
        if pod is not None and ended_on_its_own(pod):
            return self._outcome_of(pod)
        return completion(POD_EXTERNAL_DELETED, "the pod was deleted by another client")

    def _ended(self, task: TaskStatus, outcome: CompletionStatus | None) -> TaskStatus:
        if outcome is not None:
            task = self._with_outcome(task, outcome)
        return enter(task, State.ATTEMPT_COMPLETED, self._now)
