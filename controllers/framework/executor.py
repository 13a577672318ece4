"""Performs the actions of a step and returns their outcomes, and builds the objects that are created for one attempt.

Every action has an outcome: a refusal or an unreachable API server is an outcome, too, and the next step decides what
it means. The actions of one step run concurrently and independently of each other's failures.

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
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import structlog

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
from controllers.framework.config import FrameworkConfig
from controllers.framework.step.context import (
    Action,
    Confirm,
    Create,
    Created,
    CreateFailed,
    Delete,
    DeleteAccepted,
    DeleteFramework,
    Failed,
    Gone,
    NameTaken,
    Note,
    Outcome,
    Present,
    Target,
)
from controllers.framework.step.step import belongs
from controllers.jobs.api import SchedulingPolicy
from controllers.jobs.gang import DisruptionBudget, GangSize
from controllers.loop.control_loop import attempt_all
from store.kube.api.errors import (
    AlreadyExists,
    Conflict,
    KubeError,
    NotFound,
    ServerError,
    TooManyRequests,
    Unreachable,
)
from store.kube.api.objects import CONFIG_MAPS, PODS, SERVICES, Object, Resource, controller_of, name_of, uid_of
from store.kube.api.protocol import KubeApi

log = structlog.get_logger(__name__)

AT_ONCE = 32  # requests of one Framework in flight

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


async def perform(
    api: KubeApi, framework: Framework, actions: Sequence[Action], *, names_in_dns: bool = False
) -> list[Outcome]:
    """Perform the actions of the step that returned `framework.status`. Return their outcomes, in the same order.

    `names_in_dns`: pods get names under the Services of their roles.
    """
    namespace = framework.namespace

    async def one(action: Action) -> Outcome:
        try:
            match action:
                case Create(target):
                    body = build_config_map(framework) if target is None else build_pod(framework, target)
                    if names_in_dns and target is not None:
                        name_in_dns(body, service_name(framework.name, target.role))
                    try:
                        return Created(target, uid_of(await api.create(_resource(target), body, namespace)))
                    except AlreadyExists:
                        return NameTaken(target, await _read(api, namespace, target, name_of(body)))
                case Delete():
                    return await _delete(api, framework, action)
                case Confirm(target, name, uid):
                    found = await _read(api, namespace, target, name)
                    return Present(found) if found is not None and uid_of(found) == uid else Gone(uid)
                case DeleteFramework(uid):
                    try:
                        await api.delete(FRAMEWORKS, framework.name, namespace, uid=uid, propagation="Foreground")
                    except (NotFound, Conflict):
                        return Gone(uid)
                    return DeleteAccepted(uid)
        except KubeError as error:
            if isinstance(action, Create):
                return CreateFailed(action.target, error.status, str(error))
            return Failed(action.uid, str(error))

    return await attempt_all(actions, one, errors=(), limit=AT_ONCE)


def _resource(target: Target) -> Resource:
    return CONFIG_MAPS if target is None else PODS


async def _delete(api: KubeApi, framework: Framework, action: Delete) -> Outcome:
    """Delete the object of that UID, if it is the Framework's; another's is logged and left alone."""
    namespace, resource = framework.namespace, _resource(action.target)
    try:
        if action.check:
            found = await _read(api, namespace, action.target, action.name)
            if found is None or uid_of(found) != action.uid:
                return Gone(action.uid)
            assert framework.status is not None, "an action is in terms of a status"
            if not belongs(found, framework, framework.status, action.target):
                log.warning(
                    "Status names an object of another owner; object left alone",
                    framework=f"{namespace}/{framework.name}",
                    kind=resource.kind,
                    name=action.name,
                    uid=action.uid,
                )
                return Gone(action.uid)
        await api.delete(
            resource,
            action.name,
            namespace,
            uid=action.uid,
            grace_period=action.grace_period,
            propagation="Foreground" if action.target is None else None,
        )
        if not action.confirm:
            return DeleteAccepted(action.uid)
        found = await _read(api, namespace, action.target, action.name)
        is_there = found is not None and uid_of(found) == action.uid
        return DeleteAccepted(action.uid) if is_there else Gone(action.uid)
    except (NotFound, Conflict):  # no object has the name, or another one
        return Gone(action.uid)


async def _read(api: KubeApi, namespace: str, target: Target, name: str) -> Object | None:
    """Read the object with a quorum; return None when there is none of that name."""
    try:
        return await api.get(_resource(target), name, namespace)
    except NotFound:
        return None


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
    raw = msgspec.json.encode(role.task.pod or {})  # the values are names, which need no escaping in JSON
    template: Object = msgspec.json.decode(_PLACEHOLDER.sub(lambda found: identity[found[1].decode()].encode(), raw))
    metadata = template.get("metadata") or {}
    spec: Object = template.get("spec") or {}
    environment: list[Object] = [
        *({"name": name, "value": value} for name, value in identity.items()),
        {"name": POD_UID, "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}},
        {"name": TASK_ATTEMPT_INSTANCE_UID, "value": f"{identity[TASK_ATTEMPT_ID]}_$({POD_UID})"},
    ]
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


class Surrounding(NamedTuple):
    """An object to create. `resources`: its resource in each version that may be served, the preferred one first."""

    resources: tuple[Resource, ...]
    body: Object


def surroundings(framework: Framework, config: FrameworkConfig) -> tuple[Surrounding, ...]:
    """Return the objects that the settings require for the Framework's current attempt."""
    wanted = []
    for role in framework.spec.task_roles if config.headless_services else ():
        if name := service_name(framework.name, role.name):
            labels = {FRAMEWORK_NAME: framework.name, TASK_ROLE_NAME: role.name}
            spec: Object = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": labels}
            wanted.append(Surrounding((SERVICES,), {"metadata": _metadata(framework, name, labels), "spec": spec}))
    if config.disruption_budgets:
        kind, labels = DisruptionBudget(), {FRAMEWORK_NAME: framework.name}
        total = sum(role.task_number for role in framework.spec.task_roles)
        spec = kind.spec(SchedulingPolicy(), GangSize(total), labels)
        metadata = _metadata(framework, config_map_name(framework.name), labels)
        wanted.append(Surrounding(kind.resources, {"metadata": metadata, "spec": spec}))
    return tuple(wanted)


def _metadata(framework: Framework, name: str, labels: dict[str, str]) -> Object:
    return {
        "name": name,
        "namespace": framework.namespace,
        "labels": labels,
        "ownerReferences": [attempt_reference(framework)],
    }


def service_name(framework: str, role: str) -> str:
    """Return the name of a task role's headless Service; "" when Kubernetes would not accept it."""
    name = f"{framework}-{role}"
    return name if _SERVICE_NAME.fullmatch(name) else ""


def name_in_dns(pod: Object, service: str) -> None:
    """Give the pod its name under the Service, unless the template sets another."""
    if service and _HOST_NAME.fullmatch(name_of(pod)):
        pod["spec"]["hostname"] = pod["spec"].get("hostname") or name_of(pod)
        pod["spec"]["subdomain"] = pod["spec"].get("subdomain") or service


async def surround(api: KubeApi, namespace: str, wanted: Sequence[Surrounding]) -> list[Note]:
    """Create the missing objects. Return a note for each refused one. Raises `KubeError` for errors worth a retry."""
    notes = []
    for each in wanted:
        kind, name = each.resources[0].kind, name_of(each.body)
        try:
            current = await _create_or_update(api, namespace, each)
        except _LATER:
            raise
        except KubeError as error:
            notes.append(Note("Warning", f"{kind}Refused", f"{kind} {name}: {error}"))
            continue
        if not _has_owner_of(current, each.body):
            text = (
                f"{kind} {name} exists already and is not this Framework's; rename the Framework or remove the object"
            )
            notes.append(Note("Warning", f"{kind}Refused", text))
    return notes


async def _create_or_update(api: KubeApi, namespace: str, wanted: Surrounding) -> Object:
    """Create the object, or bring an existing one of ours up to date. Return the object of that name."""
    resource = wanted.resources[0]  # which the API server refuses if it serves none of them
    for each in wanted.resources:
        if await api.served(each):
            resource = each
            break
    body = {"apiVersion": resource.api_version, "kind": resource.kind, **wanted.body}
    try:
        return await api.create(resource, body, namespace)
    except AlreadyExists:
        current = await api.get(resource, name_of(body), namespace)
    if _has_owner_of(current, body) and not body["spec"].items() <= current["spec"].items():
        patch = {"metadata": {"uid": current["metadata"]["uid"]}, "spec": body["spec"]}
        return await api.patch(resource, name_of(body), namespace, patch)
    return current


def _has_owner_of(current: Object, body: Object) -> bool:
    return (controller_of(current) or {}).get("uid") == (controller_of(body) or {}).get("uid")
