"""Plans the actions of a settled status. They follow from the status that is about to be persisted, so that no action
relies on a fact that is not stored.

No action is repeated at once: a failed one waits for the back-off, an accepted one until the cache shows its effect.
While an attempt closes, its pods are left to the garbage collector, which deletes them with their ConfigMap; only pods
that do not end in time are deleted by force.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from controllers.framework.api.types import (
    EXECUTION_START,
    FRAMEWORK_UID,
    TASK_INDEX,
    TASK_ROLE_NAME,
    Framework,
    FrameworkStatus,
    State,
    TaskId,
    TaskRoleStatus,
    TaskStatus,
)
from controllers.framework.step.attempts import cache_deadline, force_deadline, retention_deadline, retry_deadline
from controllers.framework.step.context import Action, Confirm, Create, Delete, DeleteFramework, Target, Turn
from store.kube.api.objects import Object, annotations_of, controller_of, is_deleting, labels_of, name_of, uid_of

CREATE_BATCH = 200
"""Objects created per step: their UIDs are persisted before more are created, and a stop does not wait for long."""

PROBE = 4
"""Objects created per step while creations are being refused."""

RECHECK = timedelta(seconds=30)
"""When to step again for changes that the cache should show by then, or that cause no event, such as a raised quota."""

_LIVE = (State.CREATION_REQUESTED, State.PREPARING, State.RUNNING)


class Planning:
    """The actions for one settled status. `strangers`: objects of other owners that hold a needed name, by name."""

    def __init__(self, turn: Turn, status: FrameworkStatus, *, is_blocked: bool) -> None:
        self._turn, self._observed, self._now, self._status = turn, turn.observed, turn.now, status
        self._attempt = status.attempt_status
        self._create_limit = PROBE if is_blocked else CREATE_BATCH
        self._asked: set[str] = set()
        self.actions: list[Action] = []
        self.next_wake: datetime | None = None
        self.back_off = self._observed.creation_failed or bool(self._observed.failed)
        self.strangers: dict[str, Object] = {}
        self._plan_framework()
        if status.state not in (State.ATTEMPT_COMPLETED, State.COMPLETED):
            self._plan_tasks()

    @property
    def _may_create(self) -> bool:
        framework = self._turn.framework
        return framework.spec.execution_type == EXECUTION_START and not framework.problems

    def _plan_framework(self) -> None:
        status, name, uid = self._status, self._attempt.config_map_name, self._attempt.config_map_uid or ""
        match status.state:
            case State.CREATION_PENDING if self._may_create:
                self._create(None, name, self._turn.framework.uid)
            case State.CREATION_REQUESTED:
                self._await_cache(None, name, uid, status.transition_time)
            case State.PREPARING | State.RUNNING:
                self._confirm(None, name, uid)
            case State.DELETION_PENDING:
                self._end(None, name, uid, reason="the attempt has completed")
            case State.ATTEMPT_COMPLETED:
                self._wake(retry_deadline(status))
            case State.COMPLETED:
                self._retain()

    def _retain(self) -> None:
        due, uid = retention_deadline(self._status, self._turn.config), self._turn.framework.uid
        if self._now < due:
            self._wake(due)
        elif uid in self._observed.accepted or self._observed.is_gone(uid):
            self._wake(self._now + RECHECK)
        elif uid not in self._observed.failed:
            self.actions.append(DeleteFramework(uid))

    def _plan_tasks(self) -> None:
        is_closing = self._attempt.completion_status is not None
        may_create = self._may_create and self._status.state in _LIVE
        for role in self._status.roles:
            for task in role.tasks:
                match task.state:
                    case State.RUNNING | State.PREPARING if not is_closing:
                        attempt = task.attempt_status
                        if self._observed.present or self._observed.pod(attempt.pod_name, attempt.pod_uid) is None:
                            self._confirm(TaskId(role.name, task.index), attempt.pod_name, attempt.pod_uid or "")
                    case State.CREATION_PENDING if may_create:
                        owner = self._attempt.config_map_uid or ""
                        self._create(TaskId(role.name, task.index), task.attempt_status.pod_name, owner)
                    case State.DELETING:
                        self._force(role, task)
                    case State.DELETION_PENDING | State.CREATION_REQUESTED if not is_closing:
                        self._plan_task(role, task)
        if not is_closing:
            self._delete_orphans()

    def _plan_task(self, role: TaskRoleStatus, task: TaskStatus) -> None:
        target, attempt = TaskId(role.name, task.index), task.attempt_status
        uid = attempt.pod_uid or ""
        if task.state is State.DELETION_PENDING:
            reason = "the task was scaled away" if task.deletion_pending else "the task's attempt has completed"
            self._end(target, attempt.pod_name, uid, reason=reason)
        else:
            self._await_cache(target, attempt.pod_name, uid, task.transition_time)

    def _create(self, target: Target, name: str, owner: str) -> None:
        """Plan a creation. If the name is taken, delete an orphan of ours; wait for other objects to go."""
        holder = self._observed.holder(target, name)
        if holder is None:
            if self._observed.creation_failed:
                self._wake(self._now + RECHECK)
            elif self._create_limit > 0:
                self._create_limit -= 1
                self.actions.append(Create(target))
        elif is_deleting(holder):
            self._wake(self._now + RECHECK)
        elif _owner_of(holder) == owner:
            self._delete(target, name, uid_of(holder), holder, reason="it was created, but never recorded")
        elif annotations_of(holder).get(FRAMEWORK_UID) == self._turn.framework.uid:
            self._wake(self._now + RECHECK)  # of an earlier attempt; the garbage collector removes it
        else:
            self.strangers[name] = holder
            self._wake(self._now + RECHECK)

    def _delete_orphans(self) -> None:
        """Delete the pods of this attempt that no task records."""
        owner = self._attempt.config_map_uid
        if owner is None:
            return
        recorded = {task.attempt_status.pod_uid for role in self._status.roles for task in role.tasks}
        for pod in self._observed.pods():
            if uid_of(pod) not in recorded and _owner_of(pod) == owner and not is_deleting(pod):
                reason = "it was created, but never recorded"
                self._delete(_target_of(pod), name_of(pod), uid_of(pod), pod, reason=reason)

    def _await_cache(self, target: Target, name: str, uid: str, since: datetime) -> None:
        if self._is_found(target, name, uid):
            return
        due = cache_deadline(since, self._turn.config)
        if self._now < due:
            self._wake(due)
        else:
            self._delete(target, name, uid, None, confirm=True, reason="it did not appear in the cache in time")

    def _confirm(self, target: Target, name: str, uid: str) -> None:
        if uid in self._observed.present:
            self._wake(self._now + RECHECK)
        elif uid not in self._observed.failed and not self._is_found(target, name, uid):
            self.actions.append(Confirm(target, name, uid))

    def _is_found(self, target: Target, name: str, uid: str) -> bool:
        return self._found(target, name, uid) is not None

    def _found(self, target: Target, name: str, uid: str) -> Object | None:
        return self._observed.config_map(uid) if target is None else self._observed.pod(name, uid)

    def _end(self, target: Target, name: str, uid: str, *, reason: str) -> None:
        """Delete an object whose outcome is fixed. If the cache does not show it, repeat until it is certainly gone."""
        found = self._found(target, name, uid)
        self._delete(target, name, uid, found, confirm=found is None, reason=reason)

    def _force(self, role: TaskRoleStatus, task: TaskStatus) -> None:
        attempt = task.attempt_status
        pod = self._observed.pod(attempt.pod_name, attempt.pod_uid)
        due = None if pod is None else force_deadline(pod, role)
        if due is None:
            return
        if self._now < due:
            self._wake(due)
        else:
            target, reason = TaskId(role.name, task.index), "it did not end within its graceful deletion timeout"
            self._delete(target, attempt.pod_name, attempt.pod_uid or "", pod, grace=0, confirm=True, reason=reason)

    def _delete(
        self,
        target: Target,
        name: str,
        uid: str,
        found: Object | None,
        *,
        grace: int | None = None,
        confirm: bool = False,
        reason: str,
    ) -> None:
        """Plan the deletion of an object. `found`: the object as observed, if it was."""
        if uid in self._asked or uid in self._observed.failed:
            return
        self._asked.add(uid)
        if uid not in self._observed.accepted:
            check = found is None or not belongs(found, self._turn.framework, self._status, target)
            self.actions.append(Delete(target, name, uid, grace, confirm, reason, check))
        elif confirm:
            self.back_off = True
        else:
            self._wake(self._now + RECHECK)

    def _wake(self, due: datetime) -> None:
        if due > self._now and (self.next_wake is None or due < self.next_wake):
            self.next_wake = due


def belongs(obj: Object, framework: Framework, status: FrameworkStatus, target: Target) -> bool:
    """Return whether the object is the Framework's by its own metadata: its controller and, of a pod, the annotation of
    the Framework's UID. The status is not enough, because every user who may edit the Framework can write it."""
    if target is None:
        return _owner_of(obj) == framework.uid
    is_for_it = annotations_of(obj).get(FRAMEWORK_UID) == framework.uid
    return is_for_it and _owner_of(obj) == (status.attempt_status.config_map_uid or "")


def _owner_of(obj: Object) -> str:
    owner = controller_of(obj)
    return str(owner["uid"]) if owner else ""


def _target_of(pod: Object) -> TaskId:
    labels = labels_of(pod)
    index = labels.get(TASK_INDEX, "")
    return TaskId(labels.get(TASK_ROLE_NAME, ""), int(index) if index.isdecimal() else -1)
