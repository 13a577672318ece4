"""What a native Framework's pods may be surrounded with: a headless Service per task role, and a disruption budget.

The Services give pods names in DNS that last over their retries, `POD.SERVICE`, from before they are ready. The
PodDisruptionBudget keeps drains from taking a gang apart: every task counts. Both belong to the attempt's ConfigMap,
so they go with it, and are made before the first pod that needs them.

What the API server refuses (a right that is missing, a name that is taken) is told in an Event and holds up no pod;
while it is away, or overloaded, the pods wait too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from controllers.framework.actions import Note
from controllers.framework.config import FrameworkConfig
from controllers.framework.config_map import attempt_reference
from controllers.framework.constants import FRAMEWORK_NAME, TASK_ROLE_NAME, config_map_name
from controllers.framework.types import Framework
from controllers.gang_kinds import DisruptionBudget, GangSize
from controllers.job_types import SchedulingPolicy
from store.kube.api import KubeApi
from store.kube.errors import AlreadyExists, KubeError, ServerError, TooManyRequests, Unreachable
from store.kube.objects import Object, controller_of, name_of
from store.kube.resources import SERVICES, Resource

_SERVICE_NAME = re.compile("[a-z]([-a-z0-9]{0,61}[a-z0-9])?")  # RFC 1035, which is stricter than for other objects
_HOST_NAME = re.compile("[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_LATER = (Unreachable, ServerError, TooManyRequests)


class Surrounding(NamedTuple):
    """An object to have. `resources`: what it is, in the versions that may be served, the best first."""

    resources: tuple[Resource, ...]
    body: Object


def surroundings(framework: Framework, config: FrameworkConfig) -> tuple[Surrounding, ...]:
    """What the settings ask for, of the Framework's current attempt."""
    services = tuple(_services(framework)) if config.headless_services else ()
    return (*services, _budget(framework)) if config.disruption_budgets else services


def service_name(framework: str, role: str) -> str:
    """The headless Service of a task role; "" when the names make none that Kubernetes accepts."""
    name = f"{framework}-{role}"
    return name if _SERVICE_NAME.fullmatch(name) else ""


def name_in_dns(pod: Object, service: str) -> None:
    """Give the pod its name under the Service, where the template does not say otherwise."""
    if service and _HOST_NAME.fullmatch(name_of(pod)):
        pod["spec"]["hostname"] = pod["spec"].get("hostname") or name_of(pod)
        pod["spec"]["subdomain"] = pod["spec"].get("subdomain") or service


async def surround(api: KubeApi, namespace: str, wanted: tuple[Surrounding, ...]) -> list[Note]:
    """Make what is missing; what was refused. Raises `KubeError` when it is to be tried again."""
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
        text = f"{kind} {name} exists already and belongs to somebody else; rename the Framework or remove it"
        return Note("Warning", f"{kind}Refused", text)
    return None


async def _create(api: KubeApi, namespace: str, wanted: Surrounding) -> Object:
    """The object of that name, with our spec if it is ours."""
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
    """The first that the API server serves, else the best, which it will then refuse."""
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
