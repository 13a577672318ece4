"""What the operator of Frameworks reports while it works, read off what its steps decide and what came of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import zip_longest

from controllers.framework.actions import (
    Action,
    Created,
    CreateFailed,
    Delete,
    DeleteAccepted,
    Failed,
    NameTaken,
    Outcome,
    Target,
)
from controllers.framework.codes import is_failed
from controllers.framework.constants import FRAMEWORKS, State
from controllers.framework.types import FrameworkStatus, TaskRoleStatus, TaskStatus
from controllers.job_metrics import JobMetrics, JobOutcome
from controllers.workqueue import WorkQueue
from store.kube.objects import split_key
from store.kube.resources import CONFIG_MAPS, PODS

KIND = FRAMEWORKS.kind


class Meter:
    """Tells `metrics`. Handlers add keys here instead of to the `queue`, so that it is known when each was woken.

    `timer`: monotonic seconds."""

    def __init__(self, metrics: JobMetrics, queue: WorkQueue[str], timer: Callable[[], float] = time.monotonic) -> None:
        self._metrics, self._queue, self._timer = metrics, queue, timer
        self._woken: dict[str, float] = {}  # by the first event that no sync has begun to deal with
        self._dealt_with: dict[str, float] = {}  # those of the syncs in flight that have asked for nothing yet

    def add(self, key: str) -> None:
        """An event has woken this Framework."""
        self._woken.setdefault(key, self._timer())
        self._queue.add(key)

    def add_after(self, key: str, delay: float) -> None:
        """An event has woken this Framework that may wait for others, for so many seconds."""
        self._woken.setdefault(key, self._timer())
        self._queue.add_after(key, delay)

    def began(self, key: str) -> None:
        """A sync begins."""
        self._dealt_with.pop(key, None)
        if (woken := self._woken.pop(key, None)) is not None:
            self._dealt_with[key] = woken

    def ended(self, key: str) -> None:
        self._dealt_with.pop(key, None)

    def acts(self, key: str) -> None:
        """The sync is about to ask for what its step decided."""
        if (woken := self._dealt_with.pop(key, None)) is not None:
            self._metrics.acted(KIND, self._timer() - woken)

    def performed(self, namespace: str, actions: Iterable[Action], outcomes: Iterable[Outcome]) -> None:
        """What came of the actions of a step."""
        deleted = {action.uid: _kind(action.target) for action in actions if isinstance(action, Delete)}
        for outcome in outcomes:
            match outcome:
                case Created(target) | NameTaken(target) | CreateFailed(target):
                    self._metrics.child(KIND, "create", _kind(target), namespace, ok=isinstance(outcome, Created))
                case DeleteAccepted(uid) | Failed(uid) if uid in deleted:
                    self._metrics.child(KIND, "delete", deleted[uid], namespace, ok=isinstance(outcome, DeleteAccepted))

    def stepped(self, namespace: str, before: FrameworkStatus | None, after: FrameworkStatus | None) -> None:
        """What a step has decided to be so from now on."""
        if after is None or after is before:
            return
        for outcome in _outcomes(before, after):
            self._metrics.job(KIND, outcome, namespace)
        for _ in range(_newly_failed(before.roles if before else (), after.roles)):
            self._metrics.pod_failed(KIND, namespace)

    def deleted(self, key: str) -> None:
        """A Framework that we knew is gone."""
        self._metrics.job(KIND, "deleted", split_key(key)[0])


def _kind(target: Target) -> str:
    return CONFIG_MAPS.kind if target is None else PODS.kind


def _outcomes(before: FrameworkStatus | None, after: FrameworkStatus) -> Iterator[JobOutcome]:
    if before is None:
        yield "created"
    elif after.attempt_status.id > before.attempt_status.id:
        yield "restarted"
    outcome = after.attempt_status.completion_status
    if after.state is State.COMPLETED and (before is None or before.state is not State.COMPLETED) and outcome:
        yield "failed" if is_failed(outcome) else "successful"


def _newly_failed(before: Sequence[TaskRoleStatus], after: Sequence[TaskRoleStatus]) -> int:
    """Pods whose failure the status tells of now, and did not before. What a step left alone is the same object."""
    former = {role.instance_uid: role.tasks for role in before}
    return sum(
        new is not old and _tells_of_failed_pod(new) and not (old and _tells_of_failed_pod(old))
        for role in after
        if former.get(role.instance_uid) is not role.tasks
        for old, new in zip_longest(former.get(role.instance_uid, ())[: len(role.tasks)], role.tasks)
    )


def _tells_of_failed_pod(task: TaskStatus) -> bool:
    """Only the outcome of a pod that ended by itself has its containers."""
    outcome = task.attempt_status.completion_status
    return outcome is not None and is_failed(outcome) and bool(outcome.pod)
