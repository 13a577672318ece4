"""How a task moves: from its pod's creation through its end to the decision on a retry.

Each function takes a task in one state and answers it in the next, or the same object when there is no reason to move.
A role whose tasks all stayed is answered as it was.

A pod that the cache does not show is believed to be gone only if its deletion was seen or accepted; otherwise the step
asks for a quorum read first (see `controllers.framework.planning`), because a cache may be older than what we know.
"""

from __future__ import annotations

from msgspec.structs import replace

from controllers.framework.attempts import enter, next_task_attempt, with_outcome
from controllers.framework.codes import (
    OK,
    POD_CREATION_TRANSIENT_ERROR,
    POD_EXTERNAL_DELETED,
    POD_LOCAL_CACHE_CREATION_TIMEOUT,
    completion,
    creation_error_code,
)
from controllers.framework.constants import State
from controllers.framework.deadlines import cache_deadline
from controllers.framework.pod_report import (
    PHASE_FAILED,
    PHASE_RUNNING,
    PHASE_SUCCEEDED,
    PHASE_UNKNOWN,
    ended_on_its_own,
    phase_of,
    pod_completion,
)
from controllers.framework.retry import retry_delay
from controllers.framework.turn import Turn
from controllers.framework.types import CompletionStatus, TaskId, TaskRoleSpec, TaskRoleStatus, TaskStatus
from store.kube.objects import Object, is_deleting


class RoleStep:
    """Moves the tasks of one role. `spec` None: the role has left the spec. `closing`: the attempt has its outcome."""

    def __init__(self, turn: Turn, role: TaskRoleStatus, spec: TaskRoleSpec | None, *, closing: bool) -> None:
        self._turn, self._observed, self._now = turn, turn.observed, turn.now
        self._role, self._spec, self._closing = role, spec, closing

    def advance(self) -> TaskRoleStatus:
        """The role with all its tasks as far as they get now."""
        moved: dict[int, TaskStatus] = {}
        for position, task in enumerate(self._role.tasks):
            after = self._advance(task)
            if after is not task:
                moved[position] = after
        if not moved:
            return self._role
        tasks = list(self._role.tasks)
        for position, task in moved.items():
            tasks[position] = task
        return replace(self._role, task_statuses=tuple(tasks))

    def _advance(self, task: TaskStatus) -> TaskStatus:
        while (after := self._moved(task)) is not task:
            task = after
        return task

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
            is_known = phase_of(pod) != PHASE_UNKNOWN
            return enter(task, State.PREPARING, self._now) if is_known else task
        if not self._observed.is_gone(task.attempt_status.pod_uid):
            return task
        if self._now < cache_deadline(task.transition_time, self._turn.config):
            return self._vanished(task)
        late = "the pod was created, but did not show up in the cache in time"
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
        if phase in (PHASE_SUCCEEDED, PHASE_FAILED):
            return enter(self._with_outcome(task, self._outcome_of(pod)), State.DELETION_PENDING, self._now)
        if phase == PHASE_UNKNOWN:
            return task
        if phase == PHASE_RUNNING and task.state is State.PREPARING:
            return enter(task, State.RUNNING, self._now)
        return enter(task, State.DELETION_PENDING, self._now) if task.deletion_pending else task

    def _ending(self, task: TaskStatus) -> TaskStatus:
        """While its deletion is pending, requested or under way."""
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
        if self._spec is None:  # it has left a spec that can't be used, and so was not scaled away
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
        """Node and addresses: empty texts, no longer unknown, from when the pod was seen."""
        attempt = task.attempt_status
        status = pod.get("status") or {}
        node = (pod.get("spec") or {}).get("nodeName") or ""
        pod_ip, host_ip = status.get("podIP") or "", status.get("hostIP") or ""
        if attempt.pod_ip == pod_ip and attempt.pod_node_name == node and attempt.pod_host_ip == host_ip:
            return task
        self._turn.addressed |= bool(pod_ip)
        return replace(task, attempt_status=replace(attempt, pod_node_name=node, pod_ip=pod_ip, pod_host_ip=host_ip))

    def _outcome_of(self, pod: Object) -> CompletionStatus:
        if phase_of(pod) == PHASE_SUCCEEDED:
            return completion(OK, "the pod succeeded", pod=pod_completion(pod))
        return self._turn.config.failures.outcome(pod)

    def _with_outcome(self, task: TaskStatus, outcome: CompletionStatus) -> TaskStatus:
        after = with_outcome(task, outcome)
        self._turn.urgent |= after is not task
        return after

    def _deleted_by_others(self, task: TaskStatus, pod: Object) -> TaskStatus:
        """Nobody deletes a pod through us in this state. One that had already ended keeps its own outcome."""
        return enter(self._with_outcome(task, self._outcome_at_deletion(pod)), State.DELETING, self._now)

    def _vanished(self, task: TaskStatus) -> TaskStatus:
        final = self._observed.final_state(task.attempt_status.pod_uid)
        return self._ended(task, self._outcome_at_deletion(final))

    def _outcome_at_deletion(self, pod: Object | None) -> CompletionStatus:
        if pod is not None and ended_on_its_own(pod):
            return self._outcome_of(pod)
        return completion(POD_EXTERNAL_DELETED, "the pod was deleted by somebody else")

    def _ended(self, task: TaskStatus, outcome: CompletionStatus | None) -> TaskStatus:
        if outcome is not None:
            task = self._with_outcome(task, outcome)
        return enter(task, State.ATTEMPT_COMPLETED, self._now)
