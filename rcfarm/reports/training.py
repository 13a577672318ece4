"""Training jobs as rows for people: one per job, and one per replica. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

import msgspec

from controllers.jobs.api import BadSpec, JobView
from controllers.jobs.replicas import Slot, exit_code, restarts_of, slots_of
from controllers.jobs.status import BadStatus, JobStatus, decode_status
from controllers.training.kind import TrainingJobs
from store.kube.api.objects import Object, has_ended, is_deleting, name_of, namespace_of, phase_of

NO_STATE = "Unknown"
"""The state of a job without a status."""
_TELLING = ("Failed", "Restarting", "Blocked", "Suspended")  # conditions whose message says more than their name


class TrainingInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One job. These fields are a contract.

    `state`: the newest condition that is true (Created, Running, Restarting, Suspended, Succeeded, Failed), or Blocked,
    Unknown (no operator has taken it up) or unreadable. `replicas`: the number in the spec; `active`, `succeeded` and
    `failed` count pods as the status does; `failures`: pods that failed since the job began. `managed_by`: the
    controller that the job names, if it is another than this operator. `problems`: errors of the spec or the status.
    """

    namespace: str
    kind: str
    name: str
    state: str
    replicas: int = 0
    active: int = 0
    succeeded: int = 0
    failed: int = 0
    failures: int = 0
    message: str = ""
    managed_by: str = ""
    created: datetime | None = None
    started: datetime | None = None
    completed_at: datetime | None = None
    problems: list[str] = []


class ReplicaInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One replica, and its pod. `state`: the pod's phase, Terminating, Missing or Deleted. `failures`: of its earlier
    pods, for their own reasons; `disruptions`: pods that the cluster removed. `restarts`: of the pod's containers."""

    replica: str
    state: str
    pod: str = ""
    node: str = ""
    address: str = ""
    code: int | None = None
    restarts: int = 0
    failures: int = 0
    disruptions: int = 0


class TrainingStatusInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A job with its replicas."""

    job: TrainingInfo
    replicas: list[ReplicaInfo]


def training_info(kind: TrainingJobs, job: Object) -> TrainingInfo:
    """Summarise a job; an unreadable one is listed, too."""
    problems, view, status = [], None, JobStatus()
    try:
        status = decode_status(job.get("status"))
        view = kind.view(job)
    except (BadSpec, BadStatus) as error:
        problems.append(str(error))
    counts = status.replica_statuses.values()
    where = state_of(status)
    condition = next((each for each in status.conditions if each.type == where), None)
    return TrainingInfo(
        namespace=namespace_of(job),
        kind=kind.resource.kind,
        name=name_of(job),
        state="unreadable" if problems and where == NO_STATE else where,
        replicas=sum(spec.replicas for spec in view.replica_specs.values()) if view else 0,
        active=sum(each.active for each in counts),
        succeeded=sum(each.succeeded for each in counts),
        failed=sum(each.failed for each in counts),
        failures=sum(retry.failures for each in counts for retry in each.retries.values()),
        message=condition.message if condition is not None and where in _TELLING else "",
        managed_by="" if kind.manages(job) else str(job["spec"]["runPolicy"]["managedBy"]),
        created=datetime.fromisoformat(job["metadata"]["creationTimestamp"]),
        started=status.start_time,
        completed_at=status.completion_time,
        problems=problems,
    )


def state_of(status: JobStatus) -> str:
    """Return the newest condition that is true; Blocked before all others."""
    if status.has("Blocked"):
        return "Blocked"
    return next((each.type for each in reversed(status.conditions) if each.status == "True"), NO_STATE)


def replica_name(slot: Slot) -> str:
    """Return the replica's name as in those of its pods: `worker-0`."""
    return f"{slot.type.lower()}-{slot.index}"


def replica_state(view: JobView, slot: Slot) -> str:
    """Return the phase of the replica's pod, or Terminating. Without a pod: Succeeded if it did, Deleted in a job that
    has ended or is suspended, else Missing."""
    if slot.pod is None:
        is_over = view.status.finished or view.run_policy.suspend
        return "Succeeded" if slot.completed else "Deleted" if is_over else "Missing"
    return "Terminating" if is_deleting(slot.pod) else phase_of(slot.pod)


def replica_infos(view: JobView, pods: Iterable[Object]) -> list[ReplicaInfo]:
    """Return the job's replicas, in the order of the spec. `pods`: those of the job."""
    infos = []
    for slot in slots_of(view, pods):
        pod: Object = slot.pod or {}
        info = ReplicaInfo(
            replica=replica_name(slot),
            state=replica_state(view, slot),
            pod=name_of(pod) if slot.pod else "",
            node=str((pod.get("spec") or {}).get("nodeName") or ""),
            address=str((pod.get("status") or {}).get("podIP") or ""),
            code=exit_code(pod, view.default_container) if slot.pod and has_ended(pod) else None,
            restarts=restarts_of(pod),
            failures=slot.retry.failures,
            disruptions=slot.retry.disruptions,
        )
        infos.append(info)
    return infos
