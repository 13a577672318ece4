"""Performs the actions of a step, and returns their outcomes.

Every action has an outcome: a refusal or an unreachable API server is an outcome, too, and the next step decides what
it means. The actions of one step run concurrently and independently of each other's failures.
"""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from controllers.framework.api.types import FRAMEWORKS, Framework
from controllers.framework.objects import build_config_map, build_pod, name_in_dns, service_name
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
    Outcome,
    Present,
    Target,
)
from controllers.framework.step.plan_actions import belongs
from controllers.loop.writes import attempt_all
from store.kube.api.errors import AlreadyExists, Conflict, KubeError, NotFound
from store.kube.api.objects import CONFIG_MAPS, PODS, Object, Resource, name_of, uid_of
from store.kube.api.protocol import KubeApi

log = structlog.get_logger(__name__)

AT_ONCE = 32  # requests of one Framework in flight


async def perform(
    api: KubeApi, framework: Framework, actions: Sequence[Action], *, names_in_dns: bool = False
) -> list[Outcome]:
    """Perform the actions of the step that returned `framework.status`. Return their outcomes, in the same order.

    `names_in_dns`: pods get names under the Services of their roles, see `controllers.framework.objects`.
    """

    async def one(action: Action) -> Outcome:
        match action:
            case Create(target):
                body = build_config_map(framework) if target is None else build_pod(framework, target)
                if names_in_dns and target is not None:
                    name_in_dns(body, service_name(framework.name, target.role))
                return await _create(api, framework.namespace, target, body)
            case Delete():
                return await _delete(api, framework, action)
            case Confirm():
                return await _confirm(api, framework.namespace, action)
            case DeleteFramework(uid):
                return await _delete_framework(api, framework, uid)

    return await attempt_all(actions, one, errors=(), limit=AT_ONCE)


def _resource(target: Target) -> Resource:
    return CONFIG_MAPS if target is None else PODS


async def _create(api: KubeApi, namespace: str, target: Target, body: Object) -> Outcome:
    try:
        created = await api.create(_resource(target), body, namespace)
    except AlreadyExists:
        return await _holder(api, namespace, target, name_of(body))
    except KubeError as error:
        return CreateFailed.of(target, error)
    return Created(target, uid_of(created))


async def _holder(api: KubeApi, namespace: str, target: Target, name: str) -> Outcome:
    try:
        return NameTaken(target, await _read(api, namespace, target, name))
    except KubeError as error:
        return CreateFailed.of(target, error)


async def _delete(api: KubeApi, framework: Framework, action: Delete) -> Outcome:
    namespace = framework.namespace
    try:
        if action.check and not await _is_ours(api, framework, action):
            return Gone(action.uid)
        await api.delete(
            _resource(action.target),
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
    except KubeError as error:
        return Failed(action.uid, str(error))


async def _is_ours(api: KubeApi, framework: Framework, action: Delete) -> bool:
    """Return whether the object of that UID exists and is the Framework's. Another's is logged and left alone."""
    found = await _read(api, framework.namespace, action.target, action.name)
    if found is None or uid_of(found) != action.uid:
        return False
    assert framework.status is not None, "an action is in terms of a status"
    if belongs(found, framework, framework.status, action.target):
        return True
    log.warning(
        "Status names an object of another owner; object left alone",
        framework=f"{framework.namespace}/{framework.name}",
        kind=_resource(action.target).kind,
        name=action.name,
        uid=action.uid,
    )
    return False


async def _confirm(api: KubeApi, namespace: str, action: Confirm) -> Outcome:
    try:
        found = await _read(api, namespace, action.target, action.name)
    except KubeError as error:
        return Failed(action.uid, str(error))
    return Present(found) if found is not None and uid_of(found) == action.uid else Gone(action.uid)


async def _delete_framework(api: KubeApi, framework: Framework, uid: str) -> Outcome:
    try:
        await api.delete(FRAMEWORKS, framework.name, framework.namespace, uid=uid, propagation="Foreground")
    except (NotFound, Conflict):
        return Gone(uid)
    except KubeError as error:
        return Failed(uid, str(error))
    return DeleteAccepted(uid)


async def _read(api: KubeApi, namespace: str, target: Target, name: str) -> Object | None:
    """Read the object with a quorum; return None when there is none of that name."""
    try:
        return await api.get(_resource(target), name, namespace)
    except NotFound:
        return None
