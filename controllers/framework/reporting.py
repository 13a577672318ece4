"""What the Framework operator reports: a history in the log, and measurements.

The history has a snapshot of each Framework, task and pod just before it is replaced or deleted: one log line each. Its
message ends in a trigger, `: ObjectSnapshot: ` and the object as one line of JSON, as in frameworkcontroller, so that
collectors of its history also read ours. A snapshot may be logged twice, after a crash; an object that was deleted
while no operator ran is not logged. Values of environment variables are left out, and so are their copies (the
annotation of `kubectl apply`): they often hold passwords and tokens, and logs have more readers than Frameworks.

The measurements are derived from the operator's steps and the outcomes of their actions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any

import msgspec
import structlog

from controllers.framework.api.types import FRAMEWORKS, FrameworkStatus, State, TaskStatus, is_failed
from controllers.framework.api.wire import encode_status
from controllers.framework.config import FrameworkConfig
from controllers.framework.step.context import (
    Action,
    Created,
    CreateFailed,
    Delete,
    DeleteAccepted,
    Failed,
    NameTaken,
    Outcome,
    Snapshot,
    Target,
)
from controllers.loop.control_loop import JobMetrics
from store.kube.api.objects import (
    CONFIG_MAPS,
    PODS,
    Object,
    key_of,
    name_of,
    namespace_of,
    resource_version_of,
    uid_of,
)

log = structlog.get_logger(__name__)

HIDDEN = "(not logged)"
_REPEATED = ("kubectl.kubernetes.io/last-applied-configuration", "managedFields")

KIND = FRAMEWORKS.kind


class History:
    """Logs the snapshots that the configuration selects."""

    def __init__(self, config: FrameworkConfig) -> None:
        self._wanted = config.log_object_snapshot

    def retried(self, framework: Object, snapshots: Sequence[Snapshot]) -> None:
        """Log the parts that a step drops from the status. `framework`: its newest known state."""
        for snapshot in snapshots:
            if isinstance(snapshot.status, TaskStatus):
                task = {  # as if it were an object of the API
                    "apiVersion": FRAMEWORKS.api_version,
                    "kind": "Task",
                    "metadata": {
                        "name": f"{name_of(framework)}-{snapshot.role}-{snapshot.status.index}",
                        "namespace": namespace_of(framework),
                        "uid": snapshot.status.instance_uid,
                        "resourceVersion": resource_version_of(framework),
                        "labels": {"FC_FRAMEWORK_NAME": name_of(framework), "FC_TASKROLE_NAME": snapshot.role},
                        "annotations": {"FC_FRAMEWORK_UID": uid_of(framework)},
                    },
                    "status": msgspec.to_builtins(snapshot.status),
                }
                self._log(snapshot.trigger, task)
            else:
                self._log(snapshot.trigger, _typed(framework) | {"status": encode_status(snapshot.status)})

    def framework_deleted(self, framework: Object) -> None:
        self._log("OnFrameworkDeletion", _typed(framework))

    def pod_deleted(self, pod: Object) -> None:
        self._log("OnPodDeletion", {"apiVersion": PODS.api_version, "kind": PODS.kind, **pod})

    def _log(self, trigger: str, obj: Object) -> None:
        if trigger in self._wanted:
            shown = msgspec.json.encode(_without_values(obj)).decode()
            log.info(f"[{key_of(obj)}]: {trigger}: ObjectSnapshot: {shown}")


def count_outcomes(metrics: JobMetrics, namespace: str, actions: Iterable[Action], outcomes: Iterable[Outcome]) -> None:
    """Count the outcomes of a step's actions."""
    deleted = {action.uid: _kind(action.target) for action in actions if isinstance(action, Delete)}
    for outcome in outcomes:
        match outcome:
            case Created(target) | NameTaken(target) | CreateFailed(target):
                metrics.child(KIND, "create", _kind(target), namespace, ok=isinstance(outcome, Created))
            case DeleteAccepted(uid) | Failed(uid) if uid in deleted:
                metrics.child(KIND, "delete", deleted[uid], namespace, ok=isinstance(outcome, DeleteAccepted))


def count_changes(
    metrics: JobMetrics, namespace: str, before: FrameworkStatus | None, after: FrameworkStatus | None
) -> None:
    """Count the changes of the status that a step has decided."""
    if after is None or after is before:
        return
    if before is None:
        metrics.job(KIND, "created", namespace)
    elif after.attempt_status.id > before.attempt_status.id:
        metrics.job(KIND, "restarted", namespace)
    outcome = after.attempt_status.completion_status
    if after.state is State.COMPLETED and (before is None or before.state is not State.COMPLETED) and outcome:
        metrics.job(KIND, "failed" if is_failed(outcome) else "successful", namespace)
    former = {role.instance_uid: role.tasks for role in (before.roles if before else ())}
    for role in after.roles:
        tasks = former.get(role.instance_uid, ())
        if tasks is role.tasks:  # parts that the step did not change are the same objects
            continue
        for old, new in zip_longest(tasks[: len(role.tasks)], role.tasks):
            if new is not old and _has_failed_pod(new) and not (old and _has_failed_pod(old)):
                metrics.pod_failed(KIND, namespace)


def _without_values(value: Any, name: str = "") -> Any:
    """Return a copy in which the values of all lists named `env` are hidden."""
    if isinstance(value, dict):
        return {key: _without_values(each, key) for key, each in value.items() if key not in _REPEATED}
    if not isinstance(value, list):
        return value
    if name == "env":
        return [each | {"value": HIDDEN} if isinstance(each, dict) and each.get("value") else each for each in value]
    return [_without_values(each) for each in value]


def _typed(framework: Object) -> Object:
    return {**framework, "apiVersion": FRAMEWORKS.api_version, "kind": FRAMEWORKS.kind}


def _kind(target: Target) -> str:
    return CONFIG_MAPS.kind if target is None else PODS.kind


def _has_failed_pod(task: TaskStatus) -> bool:
    """Return whether the outcome is that of a failed pod: the outcome of a deleted pod lists no containers."""
    outcome = task.attempt_status.completion_status
    return outcome is not None and is_failed(outcome) and bool(outcome.pod)
