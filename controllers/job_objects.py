"""The pods and services of a job, built from its spec. Pure: the same job always gives the same objects.

A template is copied whole, so fields that we know nothing of reach the pod. What makes the pod ours (name, labels,
owner) is set over it; where that overrules what the template says, the answer carries a warning for the job's Events.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from controllers.job_types import BadSpec, JobEvent, ReplicaSpec, RestartPolicy
from controllers.naming import gen_general_name
from store.kube.objects import Object, name_of, namespace_of

_POD_RESTART_POLICY: Mapping[RestartPolicy, str] = {"ExitCode": "Never"}  # the kubelet knows no such policy

Amend = Callable[[Object], JobEvent | None]
"""Changes a pod before its creation; an event to warn of what it overruled or had to leave, or None."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What marks the objects of one job. `labels`: those of the job; `type_label`, `index_label`: keys."""

    job: Object
    owner_reference: Object
    labels: Mapping[str, str]
    type_label: str
    index_label: str

    def metadata(self, replica_type: str, index: int) -> Object:
        """Of a pod or service of this replica."""
        return {
            "name": gen_general_name(name_of(self.job), replica_type, index),
            "namespace": namespace_of(self.job),
            "labels": self.replica_labels(replica_type, index),
            "ownerReferences": [dict(self.owner_reference)],
        }

    def replica_labels(self, replica_type: str, index: int) -> dict[str, str]:
        return {**self.labels, self.type_label: replica_type.lower(), self.index_label: str(index)}


def build_pod(
    identity: Identity, replica_type: str, index: int, spec: ReplicaSpec, *, amendments: Iterable[Amend] = ()
) -> tuple[Object, list[JobEvent]]:
    """The pod of one replica, and what to warn of. `amendments` see the finished pod, in their order.

    Raises `BadSpec` for a template that is not made like one; what is in its parts is for the API server to judge.
    """
    pod, path = copy.deepcopy(spec.template), f"{replica_type}: template"
    metadata, pod_spec = _part(pod, "metadata", path), _part(pod, "spec", path)
    annotations, labels = (_part(metadata, field, f"{path}.metadata") for field in ("annotations", "labels"))
    ours = identity.metadata(replica_type, index)
    metadata |= ours | {"annotations": annotations, "labels": labels | ours["labels"]}
    metadata.pop("generateName", None)
    pod |= {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod_spec}
    warnings = [_set_restart_policy(pod, spec.restart_policy), *(amend(pod) for amend in amendments)]
    return pod, [warning for warning in warnings if warning is not None]


def _part(obj: Object, field: str, path: str) -> Object:
    """An object's field that is an object itself; an absent one is empty."""
    value = obj.get(field)
    if value is not None and not isinstance(value, dict):
        raise BadSpec(f"{path}.{field}: expected an object, got {value!r}")
    return value or {}


def _set_restart_policy(pod: Object, policy: RestartPolicy) -> JobEvent | None:
    written, ours = pod["spec"].get("restartPolicy"), _POD_RESTART_POLICY.get(policy, policy)
    pod["spec"]["restartPolicy"] = ours
    if written in (None, "", ours):
        return None
    return JobEvent(
        "Warning",
        "SettedPodTemplateRestartPolicy",
        f"The pod template's restartPolicy {written} is overruled by the replica's restartPolicy {policy}",
    )


def build_service(
    identity: Identity, replica_type: str, index: int, spec: ReplicaSpec, *, default_container: str = ""
) -> Object:
    """The headless service that gives one replica's pod a name in DNS, before it is ready too. Raises `BadSpec`."""
    path = f"{replica_type}: template"
    ports = _service_ports(_default_container(spec.template, default_container, path), path)
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": identity.metadata(replica_type, index),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": identity.replica_labels(replica_type, index),
            "ports": list(ports),
        },
    }


def _default_container(template: Object, name: str, path: str) -> Object:
    """The container with this name; the first one when there is none."""
    containers = _list(_part(template, "spec", path), "containers", f"{path}.spec") or [{}]
    return next((container for container in containers if container.get("name") == name), containers[0])


def _service_ports(container: Object, path: str) -> Iterator[Object]:
    """The container's ports in their order, each once, all with names where there are several."""
    ports: dict[tuple[str, int], str] = {}
    for port in _list(container, "ports", f"{path}.spec.containers"):
        if not isinstance(port.get("containerPort"), int):
            raise BadSpec(f"{path}.spec.containers.ports: {port!r} has no containerPort")
        ports.setdefault((port.get("protocol") or "TCP", port["containerPort"]), port.get("name") or "")
    for (protocol, number), name in ports.items():
        unnamed = {} if len(ports) == 1 else {"name": f"{protocol.lower()}-{number}"}
        yield {"port": number, "targetPort": number, "protocol": protocol, **({"name": name} if name else unnamed)}


def _list(obj: Object, field: str, path: str) -> list[Object]:
    value = obj.get(field) or []
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise BadSpec(f"{path}.{field}: expected a list of objects")
    return value
