"""Builds a job's pods and services from its spec; creates and deletes its objects, and records each call as an Event.

Building is pure: the same job always gives the same objects. A template is copied whole, so unknown fields reach the
pod. The fields that make the pod ours (name, labels, owner) are set over it. A conflict with the template (restart
policy, scheduler) is returned as a warning for the job's Events.

There is one `ChildControl` per resource, like kubeflow's PodControl and ServiceControl. It makes the call and records
it; a caller that makes many calls announces them in one Event. The expectations are kept by its caller.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from controllers.jobs.api import (
    BadSpec,
    GroupVersionKind,
    JobEvent,
    ReplicaSpec,
    RestartPolicy,
    gen_general_name,
)
from controllers.loop.control_loop import ChildVerb, JobMetrics
from store.kube.api.errors import AlreadyExists, Conflict, KubeError, NotFound
from store.kube.api.objects import Object, Resource, name_of, namespace_of
from store.kube.api.protocol import KubeApi
from store.kube.events import Recorder, Severity

_POD_RESTART_POLICY: Mapping[RestartPolicy, str] = {"ExitCode": "Never"}  # the kubelet knows no such policy

Amend = Callable[[Object], JobEvent | None]
"""Changes a pod before its creation. Returns a warning about what it overruled or had to leave, or None."""

_NOUNS = {"PodDisruptionBudget": "Pdb"}  # in the reasons of Events, as in kubeflow
_NAMED = 10  # objects that one Event names; a large job gets its other Events, too

_NAMESPACE_TERMINATING = "NamespaceTerminating"  # the cause in Status.details of a 403


@dataclass(frozen=True, slots=True)
class Identity:
    """The metadata that marks the objects of one job. `labels`: those of the job; `type_label`, `index_label`: keys."""

    job: Object
    owner_reference: Object
    labels: Mapping[str, str]
    type_label: str
    index_label: str

    def metadata(self, replica_type: str, index: int) -> Object:
        """Return the metadata of this replica's pod or service."""
        return {
            "name": gen_general_name(name_of(self.job), replica_type, index),
            "namespace": namespace_of(self.job),
            "labels": {**self.labels, self.type_label: replica_type.lower(), self.index_label: str(index)},
            "ownerReferences": [dict(self.owner_reference)],
        }


class ChildControl:
    """Creates and deletes objects of `resource` for jobs of `job_kind`."""

    def __init__(
        self, api: KubeApi, resource: Resource, job_kind: GroupVersionKind, recorder: Recorder, metrics: JobMetrics
    ) -> None:
        self.api, self.resource, self.job_kind = api, resource, job_kind
        self._recorder, self._metrics = recorder, metrics

    async def create(self, job: Object, body: Object, *, announced: bool = True) -> Object:
        """Create the object and return it as stored. Raises `KubeError`. A failure becomes an Event on the job, except
        `AlreadyExists`: only the caller can find out whether that is an error. `announced`: so does a success.
        """
        kind, name = self.resource.kind, name_of(body)
        try:
            created = await self.api.create(self.resource, body, namespace_of(job))
        except KubeError as error:
            causes = error.details.get("causes") or ()
            terminating = any(cause.get("reason") == _NAMESPACE_TERMINATING for cause in causes)
            silent = terminating or isinstance(error, AlreadyExists)  # no Event can be created in such a namespace
            self._count(job, "create", ok=False)
            if not silent:
                self._tell(job, "create", f"{kind} {name} could not be created: {error}", ok=False)
            raise
        self._count(job, "create", ok=True)
        if announced:
            self.announce(job, "create", [name])
        return created

    async def delete(self, job: Object, name: str, uid: str, *, force: bool = False, announced: bool = True) -> bool:
        """Delete the object with this UID. Return False if it is gone already; no Event is recorded then.

        `force`: do not wait for the pod's kubelet. `announced`: as in `create`. Raises `KubeError`.
        """
        kind, grace = self.resource.kind, 0 if force else None
        try:
            await self.api.delete(self.resource, name, namespace_of(job), uid=uid, grace_period=grace)
        except (NotFound, Conflict):  # gone, or the name belongs to a successor
            return False
        except KubeError as error:
            self._count(job, "delete", ok=False)
            self._tell(job, "delete", f"{kind} {name} could not be deleted: {error}", ok=False)
            raise
        self._count(job, "delete", ok=True)
        if announced:
            self.announce(job, "delete", [name])
        return True

    def announce(self, job: Object, verb: ChildVerb, names: Sequence[str], *, why: str = "") -> None:
        """Record one Event about objects that were created or deleted. `why`: the reason of a deletion."""
        noun = f"{self.resource.kind.lower()}{'s' if len(names) > 1 else ''}"
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        reason = f" ({why})" if why else ""
        self._tell(job, verb, f"{verb.capitalize()}d {noun}: {', '.join(names[:_NAMED])}{more}{reason}", ok=True)

    def _count(self, job: Object, verb: ChildVerb, *, ok: bool) -> None:
        self._metrics.child(self.job_kind.kind, verb, self.resource.kind, namespace_of(job), ok=ok)

    def _tell(self, job: Object, verb: ChildVerb, message: str, *, ok: bool) -> None:
        """Record an Event such as SuccessfulCreatePod or FailedDeleteService."""
        noun = _NOUNS.get(self.resource.kind, self.resource.kind)
        reason = f"{'Successful' if ok else 'Failed'}{verb.capitalize()}{noun}"
        severity: Severity = "Normal" if ok else "Warning"
        version, kind = str(self.job_kind.group_version), self.job_kind.kind
        self._recorder.event(job, severity, reason, message, api_version=version, kind=kind)


def build_pod(
    identity: Identity, replica_type: str, index: int, spec: ReplicaSpec, *, amendments: Iterable[Amend] = ()
) -> tuple[Object, list[JobEvent]]:
    """Return the pod of one replica, and warnings. `amendments` are applied to the finished pod, in their order.

    Raises `BadSpec` for a template of the wrong structure; the API server validates the rest.
    """
    pod, path = copy.deepcopy(spec.template), f"{replica_type}: template"
    metadata, pod_spec = _part(pod, "metadata", path), _part(pod, "spec", path)
    annotations, labels = (_part(metadata, field, f"{path}.metadata") for field in ("annotations", "labels"))
    marks = identity.metadata(replica_type, index)
    metadata |= marks | {"annotations": annotations, "labels": labels | marks["labels"]}
    metadata.pop("generateName", None)
    pod |= {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod_spec}
    warnings: list[JobEvent | None] = []
    written, ours = pod_spec.get("restartPolicy"), _POD_RESTART_POLICY.get(spec.restart_policy, spec.restart_policy)
    pod_spec["restartPolicy"] = ours
    if written not in (None, "", ours):
        overruled = f"The pod template's restartPolicy {written} is overruled by the replica's restartPolicy "
        event = JobEvent("Warning", "SetPodTemplateRestartPolicy", f"{overruled}{spec.restart_policy}")
        warnings.append(event)
    warnings += [amend(pod) for amend in amendments]
    return pod, [warning for warning in warnings if warning is not None]


def _part(obj: Object, field: str, path: str) -> Object:
    """Return an object's field that is an object itself; {} if it is absent. Raises `BadSpec`."""
    value = obj.get(field)
    if value is not None and not isinstance(value, dict):
        raise BadSpec(f"{path}.{field}: expected an object, got {value!r}")
    return value or {}


def set_scheduler(pod: Object, scheduler: str) -> JobEvent | None:
    """Set the scheduler if the template names none; return a warning if it names another, which may know gangs, too."""
    written = pod["spec"].setdefault("schedulerName", scheduler) or scheduler
    pod["spec"]["schedulerName"] = written
    if written == scheduler:
        return None
    return JobEvent(
        "Warning",
        "SetPodTemplateSchedulerName",
        f"The pod template requests the scheduler {written}; the gang is scheduled by {scheduler}",
    )


def build_service(
    identity: Identity, replica_type: str, index: int, spec: ReplicaSpec, *, default_container: str = ""
) -> Object:
    """Return the headless service that gives one replica's pod a DNS name, even if not ready. Raises `BadSpec`."""
    path = f"{replica_type}: template"
    containers = _list(_part(spec.template, "spec", path), "containers", f"{path}.spec") or [{}]
    named = (container for container in containers if container.get("name") == default_container)
    ports: dict[tuple[str, int], str] = {}  # in their order, each once
    for port in _list(next(named, containers[0]), "ports", f"{path}.spec.containers"):
        if not isinstance(port.get("containerPort"), int):
            raise BadSpec(f"{path}.spec.containers.ports: {port!r} has no containerPort")
        ports.setdefault((port.get("protocol") or "TCP", port["containerPort"]), port.get("name") or "")
    served = []
    for (protocol, number), name in ports.items():
        name = name or ("" if len(ports) == 1 else f"{protocol.lower()}-{number}")  # several ports must have names
        served.append({"port": number, "targetPort": number, "protocol": protocol, **({"name": name} if name else {})})
    metadata = identity.metadata(replica_type, index)
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": dict(metadata["labels"]),
            "ports": served,
        },
    }


def _list(obj: Object, field: str, path: str) -> list[Object]:
    value = obj.get(field) or []
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise BadSpec(f"{path}.{field}: expected a list of objects")
    return value
