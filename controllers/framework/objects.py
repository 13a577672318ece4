"""The bodies of the objects that are created for one attempt of a Framework.

The ConfigMap represents the attempt. It holds no data; it owns the attempt's pods. It is created with the finalizer of
foreground deletion, so that any client's deletion removes it only after its pods.

A pod is its role's template, with the task's identity in its metadata and environment. The identity comes before the
user's own variables, so that these can refer to it as `$(FC_TASK_INDEX)`. All other fields of the template are passed
to the API server unchanged.

Optional, around a native Framework's pods: a headless Service per task role, and a disruption budget. The Services give
pods DNS names that stay the same over retries, `POD.SERVICE`, also before the pods are ready. The PodDisruptionBudget
keeps drains from breaking a gang: every task counts. Both are owned by the ConfigMap, so they are deleted with it, and
are created before the first pod that needs them. A refusal by the API server (a missing permission, a taken name) is
recorded as an Event and does not delay pods; while the API server is unreachable or overloaded, the pods wait, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from controllers.framework.api.types import (
    CONFIG_MAP_NAME,
    CONFIG_MAP_UID,
    FOREGROUND_DELETION,
    FRAMEWORK_ATTEMPT_ID,
    FRAMEWORK_ATTEMPT_INSTANCE_UID,
    FRAMEWORK_NAME,
    FRAMEWORK_NAMESPACE,
    FRAMEWORK_UID,
    FRAMEWORKS,
    POD_NAME,
    POD_UID,
    TASK_ATTEMPT_ID,
    TASK_ATTEMPT_INSTANCE_UID,
    TASK_INDEX,
    TASK_ROLE_NAME,
    TASK_ROLE_UID,
    TASK_UID,
    Framework,
    TaskId,
    config_map_name,
)
from controllers.framework.config.config import FrameworkConfig
from controllers.framework.step.context import Note
from controllers.jobs.api import SchedulingPolicy
from controllers.jobs.gang import DisruptionBudget, GangSize
from store.kube.api.errors import AlreadyExists, KubeError, ServerError, TooManyRequests, Unreachable
from store.kube.api.objects import CONFIG_MAPS, SERVICES, Object, Resource, controller_of, name_of
from store.kube.api.protocol import KubeApi

PLACEHOLDERS = (
    FRAMEWORK_NAMESPACE,
    FRAMEWORK_NAME,
    TASK_ROLE_NAME,
    TASK_INDEX,
    CONFIG_MAP_NAME,
    POD_NAME,
)
"""Names that a template may refer to as `{{NAME}}`, anywhere, in keys as well."""

_PLACEHOLDER = re.compile(f"{{{{({'|'.join(PLACEHOLDERS)})}}}}".encode())
_LABELS = (FRAMEWORK_NAME, TASK_ROLE_NAME, TASK_INDEX)

_SERVICE_NAME = re.compile("[a-z]([-a-z0-9]{0,61}[a-z0-9])?")  # RFC 1035, which is stricter than for other objects
_HOST_NAME = re.compile("[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_LATER = (Unreachable, ServerError, TooManyRequests)


class Surrounding(NamedTuple):
    """An object to create. `resources`: its resource in each version that may be served, the preferred one first."""

    resources: tuple[Resource, ...]
    body: Object


def build_config_map(framework: Framework) -> Object:
    """Return the ConfigMap to create for the Framework's current attempt."""
    assert framework.status is not None, "an action is in terms of a status"
    attempt = framework.status.attempt_status
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": attempt.config_map_name,
            "namespace": framework.namespace,
            "labels": {FRAMEWORK_NAME: framework.name},
            "annotations": {
                FRAMEWORK_NAMESPACE: framework.namespace,
                FRAMEWORK_NAME: framework.name,
                CONFIG_MAP_NAME: attempt.config_map_name,
                FRAMEWORK_UID: framework.uid,
                FRAMEWORK_ATTEMPT_ID: str(attempt.id),
            },
            "ownerReferences": [_controlled_by(FRAMEWORKS.api_version, FRAMEWORKS.kind, framework.name, framework.uid)],
            "finalizers": [FOREGROUND_DELETION],
        },
    }


def attempt_reference(framework: Framework) -> Object:
    """Return the owner reference of the current attempt's pods."""
    assert framework.status is not None, "an action is in terms of a status"
    attempt = framework.status.attempt_status
    return _controlled_by(
        CONFIG_MAPS.api_version, CONFIG_MAPS.kind, attempt.config_map_name, attempt.config_map_uid or ""
    )


def _controlled_by(api_version: str, kind: str, name: str, uid: str) -> Object:
    return {
        "apiVersion": api_version,
        "kind": kind,
        "name": name,
        "uid": uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def build_pod(framework: Framework, target: TaskId) -> Object:
    """Return the pod to create for the task's current attempt. The task must be in the Framework's status and its role
    in the spec, without `Framework.problems`."""
    identity = _identity(framework, target)
    role = framework.spec.role(target.role)
    assert role is not None, "pods are only created for roles of the spec"
    template = _filled_in(role.task.pod or {}, identity)
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
            "name": identity[POD_NAME],
            "namespace": framework.namespace,
            "labels": {**(metadata.get("labels") or {}), **{name: identity[name] for name in _LABELS}},
            "annotations": {**(metadata.get("annotations") or {}), **identity},
            "ownerReferences": [*(metadata.get("ownerReferences") or ()), attempt_reference(framework)],
        },
        "spec": spec,
    }


def _identity(framework: Framework, target: TaskId) -> dict[str, str]:
    """Return the pod's identity, in the order of its environment variables."""
    assert framework.status is not None, "an action is in terms of a status"
    attempt, role = framework.status.attempt_status, framework.status.role(target.role)
    assert role is not None, "actions name roles of the status"
    task = role.task(target.index)
    assert task is not None, "actions name tasks of the status"
    return {
        FRAMEWORK_NAMESPACE: framework.namespace,
        FRAMEWORK_NAME: framework.name,
        TASK_ROLE_NAME: target.role,
        TASK_INDEX: str(target.index),
        CONFIG_MAP_NAME: attempt.config_map_name,
        POD_NAME: task.attempt_status.pod_name,
        FRAMEWORK_UID: framework.uid,
        FRAMEWORK_ATTEMPT_ID: str(attempt.id),
        FRAMEWORK_ATTEMPT_INSTANCE_UID: attempt.instance_uid or "",
        CONFIG_MAP_UID: attempt.config_map_uid or "",
        TASK_ROLE_UID: role.instance_uid,
        TASK_UID: task.instance_uid,
        TASK_ATTEMPT_ID: str(task.attempt_status.id),
    }


def _filled_in(template: Any, identity: dict[str, str]) -> Object:
    """Return a copy with the placeholders replaced; the values are names, which need no escaping in JSON."""
    raw = _PLACEHOLDER.sub(lambda found: identity[found[1].decode()].encode(), msgspec.json.encode(template))
    filled: Object = msgspec.json.decode(raw)
    return filled


def _environment(identity: dict[str, str]) -> list[Object]:
    instance = f"{identity[TASK_ATTEMPT_ID]}_$({POD_UID})"
    return [
        *({"name": name, "value": value} for name, value in identity.items()),
        {"name": POD_UID, "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}},
        {"name": TASK_ATTEMPT_INSTANCE_UID, "value": instance},
    ]


def surroundings(framework: Framework, config: FrameworkConfig) -> tuple[Surrounding, ...]:
    """Return the objects that the settings require for the Framework's current attempt."""
    services = tuple(_services(framework)) if config.headless_services else ()
    return (*services, _budget(framework)) if config.disruption_budgets else services


def service_name(framework: str, role: str) -> str:
    """Return the name of a task role's headless Service; "" when Kubernetes would not accept it."""
    name = f"{framework}-{role}"
    return name if _SERVICE_NAME.fullmatch(name) else ""


def name_in_dns(pod: Object, service: str) -> None:
    """Give the pod its name under the Service, unless the template sets another."""
    if service and _HOST_NAME.fullmatch(name_of(pod)):
        pod["spec"]["hostname"] = pod["spec"].get("hostname") or name_of(pod)
        pod["spec"]["subdomain"] = pod["spec"].get("subdomain") or service


async def surround(api: KubeApi, namespace: str, wanted: tuple[Surrounding, ...]) -> list[Note]:
    """Create the missing objects. Return a note for each refused one. Raises `KubeError` for errors worth a retry."""
    return [note for each in wanted if (note := await _attempt(api, namespace, each))]


async def _attempt(api: KubeApi, namespace: str, wanted: Surrounding) -> Note | None:
    kind, name = wanted.resources[0].kind, name_of(wanted.body)
    try:
        current = await _create(api, namespace, wanted)
    except _LATER:
        raise
    except KubeError as error:
        return Note("Warning", f"{kind}Refused", f"{kind} {name}: {error}")
    if not _is_ours(current, wanted.body):
        text = f"{kind} {name} exists already and is not this Framework's; rename the Framework or remove the object"
        return Note("Warning", f"{kind}Refused", text)
    return None


async def _create(api: KubeApi, namespace: str, wanted: Surrounding) -> Object:
    """Create the object, or bring an existing one of ours up to date. Return the object of that name."""
    resource = await _served(api, wanted.resources)
    body = {"apiVersion": resource.api_version, "kind": resource.kind, **wanted.body}
    try:
        return await api.create(resource, body, namespace)
    except AlreadyExists:
        current = await api.get(resource, name_of(body), namespace)
    if _is_ours(current, body) and not body["spec"].items() <= current["spec"].items():
        patch = {"metadata": {"uid": current["metadata"]["uid"]}, "spec": body["spec"]}
        return await api.patch(resource, name_of(body), namespace, patch)
    return current


def _is_ours(current: Object, body: Object) -> bool:
    return (controller_of(current) or {}).get("uid") == (controller_of(body) or {}).get("uid")


async def _served(api: KubeApi, resources: tuple[Resource, ...]) -> Resource:
    """Return the first that the API server serves; if it serves none, the preferred one, which it will refuse."""
    for resource in resources:
        if await api.served(resource):
            return resource
    return resources[0]


def _services(framework: Framework) -> Iterator[Surrounding]:
    for role in framework.spec.task_roles:
        if name := service_name(framework.name, role.name):
            labels = {FRAMEWORK_NAME: framework.name, TASK_ROLE_NAME: role.name}
            spec: Object = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": labels}
            yield Surrounding((SERVICES,), {"metadata": _metadata(framework, name, labels), "spec": spec})


def _budget(framework: Framework) -> Surrounding:
    kind, labels = DisruptionBudget(), {FRAMEWORK_NAME: framework.name}
    total = sum(role.task_number for role in framework.spec.task_roles)
    spec = kind.spec(SchedulingPolicy(), GangSize(total), labels)
    metadata = _metadata(framework, config_map_name(framework.name), labels)
    return Surrounding(kind.resources, {"metadata": metadata, "spec": spec})


def _metadata(framework: Framework, name: str, labels: dict[str, str]) -> Object:
    return {
        "name": name,
        "namespace": framework.namespace,
        "labels": labels,
        "ownerReferences": [attempt_reference(framework)],
    }
