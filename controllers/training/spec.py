"""Reads what the specs of `kubeflow.org/v1` have in common: defaults, checks, and the default container with its port.

Defaults are applied to a copy at each sync and never written back, as in the training-operator. So a job that began
under it, with fewer fields, is read the same, and a default may depend on the operator's settings.

A check raises `BadSpec`, naming the field, for what would keep the job from running. What the training-operator accepts
although it can hardly be meant is a warning: a text that the operator records as an Event.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from controllers.jobs.api import MAX_LABEL, BadSpec, CleanPodPolicy, ReplicaSpec, RunPolicy, gen_general_name
from store.kube.api.objects import Object, name_of
from store.schema.keys import is_dns_label

MAX_REPLICAS = 10_000
"""Replicas of one job. Kubernetes runs at most 150,000 pods; a number mistyped must not fill the operator's memory."""

CONTROLLER = "kubeflow.org/training-operator"
"""The value of `managedBy` that means this operator: that of the one whose place it takes."""

RUN_POLICY_FIELDS = frozenset(field.encode_name for field in msgspec.structs.fields(RunPolicy)) - {"suspend"}
"""Fields that pytorch-operator had in `spec`, where they have no effect now."""


class Port(NamedTuple):
    """The port under which a replica is found: its name in the default container, and its number by default."""

    name: str
    number: int


def number_field(description: str, width: str = "int32") -> Object:
    """Return the schema of a number in a definition."""
    return {"type": "integer", "format": width, "description": description}


def text_field(description: str) -> Object:
    """Return the schema of a text in a definition."""
    return {"type": "string", "description": description}


def with_defaults(
    job: Object,
    field: str,
    *,
    types: Iterable[str],
    container: str,
    port: Port,
    clean_pod_policy: CleanPodPolicy,
) -> Object:
    """Return the job with its defaults: types as they are spelled in `types`, one replica, the clean-up policy,
    and the port in every default container.

    `field`: where the spec has its replicas by type. Raises `BadSpec` for a type without a usable template.
    """
    spec, path = job.get("spec") or {}, f"spec.{field}"
    raw = spec.get(field)
    if not isinstance(raw, dict) or not raw:
        raise BadSpec(f"{path}: expected an object with at least one replica type")
    replicas: dict[str, Object] = {}
    for written, replica in raw.items():
        known = next((name for name in types if name.lower() == written.lower()), written)
        if known in replicas:
            raise BadSpec(f"{path}: {written} and {known} are the same type; keep one of them")
        if not isinstance(replica, dict):
            raise BadSpec(f"{path}.{written}: expected an object with a pod template")
        template = checked_template(replica.get("template"), container, f"{path}.{written}.template")
        replicas[known] = {"replicas": 1} | given(replica) | {"template": _with_port(template, container, port)}
    policy = spec.get("runPolicy")
    if isinstance(policy, dict) or policy is None:
        policy = {"cleanPodPolicy": clean_pod_policy} | given(policy or {})
        if isinstance(policy.get("schedulingPolicy"), dict):
            policy["schedulingPolicy"] = given(policy["schedulingPolicy"])
    return job | {"spec": spec | {field: replicas, "runPolicy": policy}}


def given(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that have a value: a null or an empty text counts as absent."""
    return {field: value for field, value in raw.items() if value not in (None, "")}


def check_name(job: Object) -> None:
    """Refuse a name that no service may begin with. Raises `BadSpec`."""
    name = name_of(job)
    if not (is_dns_label(name) and name[0].isalpha()):
        rule = f"at most {MAX_LABEL} of a-z, 0-9 and '-', a letter first and no '-' last"
        raise BadSpec(f"metadata.name: services can't be named after {name!r}: {rule}")


def checked_template(template: Any, container: str, path: str) -> Object:
    """Return the pod template if each of its containers has an image, and one is the default `container`.

    Raises `BadSpec`.
    """
    if not isinstance(template, dict) or not isinstance(template.get("spec"), dict):
        raise BadSpec(f"{path}: expected a pod template, an object with spec.containers")
    for field in ("initContainers", "containers"):
        containers = template["spec"].get(field) or []
        if not isinstance(containers, list) or not all(isinstance(entry, dict) for entry in containers):
            raise BadSpec(f"{path}.spec.{field}: expected a list of objects")
    path = f"{path}.spec.containers"
    if not containers:
        raise BadSpec(f"{path}: expected at least one container")
    for number, entry in enumerate(containers):
        if not entry.get("image"):
            raise BadSpec(f"{path}[{number}].image: the container {entry.get('name', '')!r} has no image")
        ports = entry.get("ports") or []
        if not isinstance(ports, list) or not all(isinstance(each, dict) for each in ports):
            raise BadSpec(f"{path}[{number}].ports: expected a list of objects")
        if not isinstance(entry.get("env") or [], list):
            raise BadSpec(f"{path}[{number}].env: expected a list")
    if not any(entry.get("name") == container for entry in containers):
        raise BadSpec(f"{path}: no container has the name {container!r}; the one that trains must have it")
    return template


def _with_port(template: Object, container: str, port: Port) -> Object:
    """Return the template with the port in its default container, under its default number if it is not there."""
    containers = list(template["spec"]["containers"])
    position = next(number for number, entry in enumerate(containers) if entry.get("name") == container)
    ports = containers[position].get("ports") or []
    if any(entry.get("name") == port.name for entry in ports):
        return template
    added = {"name": port.name, "containerPort": port.number}
    containers[position] = containers[position] | {"ports": [*ports, added]}
    return template | {"spec": template["spec"] | {"containers": containers}}


def port_of(template: Object, container: str, port: Port) -> int:
    """Return the number of the port in the default container of a template with defaults."""
    for entry in template["spec"]["containers"]:
        if entry.get("name") == container:
            for found in entry.get("ports") or ():
                if found.get("name") == port.name and isinstance(found.get("containerPort"), int):
                    return int(found["containerPort"])
    return port.number


def append_variables(container: Object, variables: Mapping[str, str]) -> None:
    """Append environment variables. Those of the template come first, so that ours take precedence."""
    ours = [{"name": name, "value": value} for name, value in variables.items()]
    container["env"] = [*(container.get("env") or ()), *ours]


def append_init_containers(pod: Object, containers: Sequence[Object]) -> None:
    """Append init containers to those of the template."""
    if containers:
        pod["spec"]["initContainers"] = [*(pod["spec"].get("initContainers") or ()), *containers]


def shortened_names(job_name: str, replicas: Mapping[str, ReplicaSpec]) -> list[str]:
    """Return a warning if the names of pods and services have a hash in them, because a longer one can't be used."""
    for replica_type, spec in replicas.items():
        index = spec.replicas - 1
        name = gen_general_name(job_name, replica_type, index)
        if index >= 0 and name != f"{job_name}-{replica_type.lower()}-{index}":
            longest = f"metadata.name: with {replica_type} and {index} it is longer than a service's name may be"
            return [f"{longest}; the pod is {name}, and others are named in this way"]
    return []


def misplaced_fields(spec: Mapping[str, Any]) -> list[str]:
    """Return a warning for each field that early operators had in `spec` and later ones in `spec.runPolicy`."""
    return [
        f"spec.{field} has no effect: move it to spec.runPolicy.{field}"
        for field in sorted(RUN_POLICY_FIELDS & given(spec).keys())
    ]
