"""What Frameworks, tasks and pods were, at the moment when that would be lost: one log line each.

Each message ends in a trigger, `: ObjectSnapshot: ` and the object as one line of JSON, as frameworkcontroller's do, so
that what collects its history collects ours. A snapshot may be logged twice, after a crash; what was deleted while no
operator ran is not logged.

Values of environment variables are left out, and so is what repeats them (the annotation of `kubectl apply`): they hold
passwords and tokens often enough, and logs are read by others than Frameworks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import structlog

from controllers.framework.actions import Snapshot
from controllers.framework.config import FrameworkConfig
from controllers.framework.constants import FRAMEWORKS
from controllers.framework.types import TaskStatus
from controllers.framework.wire import encode_status
from store.kube.objects import Object, key_of, name_of, namespace_of, resource_version_of, uid_of
from store.kube.resources import PODS

HIDDEN = "(not logged)"
_REPEATED = ("kubectl.kubernetes.io/last-applied-configuration", "managedFields")

log = structlog.get_logger(__name__)


class History:
    """Logs snapshots, those that the configuration asks for."""

    def __init__(self, config: FrameworkConfig) -> None:
        self._wanted = config.log_object_snapshot

    def retried(self, framework: Object, snapshots: Sequence[Snapshot]) -> None:
        """What a step of the Framework (its newest known state) is about to drop from its status."""
        for snapshot in snapshots:
            if isinstance(snapshot.status, TaskStatus):
                self._log(snapshot.trigger, _task(framework, snapshot.role, snapshot.status))
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


def _without_values(value: Any, name: str = "") -> Any:
    """A copy in which the values of all lists named `env` are hidden."""
    if isinstance(value, dict):
        return {key: _without_values(each, key) for key, each in value.items() if key not in _REPEATED}
    if not isinstance(value, list):
        return value
    if name == "env":
        return [each | {"value": HIDDEN} if isinstance(each, dict) and each.get("value") else each for each in value]
    return [_without_values(each) for each in value]


def _typed(framework: Object) -> Object:
    return {**framework, "apiVersion": FRAMEWORKS.api_version, "kind": FRAMEWORKS.kind}


def _task(framework: Object, role: str, status: TaskStatus) -> dict[str, Any]:
    """A task is no object of the API: it is shown as one, under the resource version of its Framework."""
    metadata = {
        "name": f"{name_of(framework)}-{role}-{status.index}",
        "namespace": namespace_of(framework),
        "uid": status.instance_uid,
        "resourceVersion": resource_version_of(framework),
        "labels": {"FC_FRAMEWORK_NAME": name_of(framework), "FC_TASKROLE_NAME": role},
        "annotations": {"FC_FRAMEWORK_UID": uid_of(framework)},
    }
    return {
        "apiVersion": FRAMEWORKS.api_version,
        "kind": "Task",
        "metadata": metadata,
        "status": msgspec.to_builtins(status),
    }
