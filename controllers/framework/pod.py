"""The pod of a task's attempt: the role's template, with the identity of the task in its metadata and environment.

The identity comes before the user's own variables, so that these can refer to it as `$(FC_TASK_INDEX)`. What the
template holds beyond what is set here goes to the API server as it was written.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from controllers.framework import constants as names
from controllers.framework.config_map import attempt_reference
from controllers.framework.types import Framework, FrameworkAttemptStatus, TaskId, TaskRoleStatus, TaskStatus
from store.kube.objects import Object

PLACEHOLDERS = (
    names.FRAMEWORK_NAMESPACE,
    names.FRAMEWORK_NAME,
    names.TASK_ROLE_NAME,
    names.TASK_INDEX,
    names.CONFIG_MAP_NAME,
    names.POD_NAME,
)
"""What a template may refer to as `{{NAME}}`, anywhere, in keys as well."""

_PLACEHOLDER = re.compile(f"{{{{({'|'.join(PLACEHOLDERS)})}}}}".encode())
_LABELS = (names.FRAMEWORK_NAME, names.TASK_ROLE_NAME, names.TASK_INDEX)


def build_pod(framework: Framework, target: TaskId) -> Object:
    """The pod to create for the task's current attempt. The task must be in the Framework's status and its role in the
    spec, without `Framework.problems`."""
    identity = _identity(framework, target)
    template = _filled_in(_template_of(framework, target.role) or {}, identity)
    metadata = template.get("metadata") or {}
    spec: Object = template.get("spec") or {}
    environment = _environment(identity)
    for container in (*(spec.get("initContainers") or ()), *(spec.get("containers") or ())):
        container["env"] = [*environment, *(container.get("env") or ())]
        container["terminationMessagePolicy"] = container.get("terminationMessagePolicy") or "FallbackToLogsOnError"
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            **metadata,
            "name": identity[names.POD_NAME],
            "namespace": framework.namespace,
            "labels": {**(metadata.get("labels") or {}), **{name: identity[name] for name in _LABELS}},
            "annotations": {**(metadata.get("annotations") or {}), **identity},
            "ownerReferences": [*(metadata.get("ownerReferences") or ()), attempt_reference(framework)],
        },
        "spec": spec,
    }


def _identity(framework: Framework, target: TaskId) -> dict[str, str]:
    """Who the pod is, in the order in which its environment tells it."""
    attempt, role, task = _status_of(framework, target)
    return {
        names.FRAMEWORK_NAMESPACE: framework.namespace,
        names.FRAMEWORK_NAME: framework.name,
        names.TASK_ROLE_NAME: target.role,
        names.TASK_INDEX: str(target.index),
        names.CONFIG_MAP_NAME: attempt.config_map_name,
        names.POD_NAME: task.attempt_status.pod_name,
        names.FRAMEWORK_UID: framework.uid,
        names.FRAMEWORK_ATTEMPT_ID: str(attempt.id),
        names.FRAMEWORK_ATTEMPT_INSTANCE_UID: attempt.instance_uid or "",
        names.CONFIG_MAP_UID: attempt.config_map_uid or "",
        names.TASK_ROLE_UID: role.instance_uid,
        names.TASK_UID: task.instance_uid,
        names.TASK_ATTEMPT_ID: str(task.attempt_status.id),
    }


def _status_of(framework: Framework, target: TaskId) -> tuple[FrameworkAttemptStatus, TaskRoleStatus, TaskStatus]:
    assert framework.status is not None, "an action is in terms of a status"
    role = framework.status.role(target.role)
    assert role is not None, "actions name roles of the status"
    task = role.task(target.index)
    assert task is not None, "actions name tasks of the status"
    return framework.status.attempt_status, role, task


def _template_of(framework: Framework, role: str) -> Any:
    spec = framework.spec.role(role)
    assert spec is not None, "pods are only created for roles of the spec"
    return spec.task.pod


def _filled_in(template: Any, identity: dict[str, str]) -> Object:
    """A copy with the placeholders replaced; the values are names, which need no escaping in JSON."""
    raw = _PLACEHOLDER.sub(lambda found: identity[found[1].decode()].encode(), msgspec.json.encode(template))
    filled: Object = msgspec.json.decode(raw)
    return filled


def _environment(identity: dict[str, str]) -> list[Object]:
    instance = f"{identity[names.TASK_ATTEMPT_ID]}_$({names.POD_UID})"
    return [
        *({"name": name, "value": value} for name, value in identity.items()),
        {"name": names.POD_UID, "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}},
        {"name": names.TASK_ATTEMPT_INSTANCE_UID, "value": instance},
    ]
