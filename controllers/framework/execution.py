"""Performing what a step asks for, and saying what came of it.

Every action ends in an outcome: an API server that refuses, or that is away, is an answer like any other, and the next
step decides what it means. Actions of one step run side by side, and none waits for the failure of another.
"""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from controllers.concurrency import attempt_all
from controllers.framework.actions import (
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
from controllers.framework.config_map import build_config_map
from controllers.framework.constants import FRAMEWORKS
from controllers.framework.native import name_in_dns, service_name
from controllers.framework.planning import belongs
from controllers.framework.pod import build_pod
from controllers.framework.types import Framework
from store.kube.api import KubeApi
from store.kube.errors import AlreadyExists, Conflict, KubeError, NotFound
from store.kube.objects import Object, name_of, uid_of
from store.kube.resources import CONFIG_MAPS, PODS, Resource

log = structlog.get_logger(__name__)

AT_ONCE = 32  # requests of one Framework in flight


async def perform(
    api: KubeApi, framework: Framework, actions: Sequence[Action], *, names_in_dns: bool = False
) -> list[Outcome]:
    """Perform the actions of a step that answered `framework.status`; their outcomes, in the same order.

    `names_in_dns`: pods get names under the Services of their roles, see `controllers.framework.native`.
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
        return await _after_deletion(api, namespace, action)
    except (NotFound, Conflict):  # nobody has the name, or somebody else
        return Gone(action.uid)
    except KubeError as error:
        return Failed(action.uid, str(error))


async def _is_ours(api: KubeApi, framework: Framework, action: Delete) -> bool:
    """Whether the Framework's object of that UID exists. One that is not the Framework's is left alone, and logged."""
    found = await _read(api, framework.namespace, action.target, action.name)
    if found is None or uid_of(found) != action.uid:
        return False
    assert framework.status is not None, "an action is in terms of a status"
    if belongs(found, framework, framework.status, action.target):
        return True
    log.warning(
        "The status names an object that does not belong to its Framework; the object is left alone",
        framework=f"{framework.namespace}/{framework.name}",
        kind=_resource(action.target).kind,
        name=action.name,
        uid=action.uid,
    )
    return False


async def _after_deletion(api: KubeApi, namespace: str, action: Delete) -> Outcome:
    found = await _read(api, namespace, action.target, action.name)
    is_there = found is not None and uid_of(found) == action.uid
    return DeleteAccepted(action.uid) if is_there else Gone(action.uid)


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
    """With a quorum; None when there is none of that name."""
    try:
        return await api.get(_resource(target), name, namespace)
    except NotFound:
        return None
