"""A job's replicas: reads the state of their pods, assigns pods and services to the places that their labels name,
finds the missing, surplus and duplicate ones, and decides whether and when a failed replica gets another pod. Pure.

A failure is of one of three kinds. *Disrupted*: the cluster removed the pod (evicted, preempted, node lost); the pod is
replaced under every restart policy, and the failure does not count against the back-off limit. *Retryable* or
*permanent*: by the restart policy and the exit code.

Exit codes, under the policy `ExitCode`: tf-operator's list where it names a code, else kubeflow's rule that a death by
a signal (128 and above) is retryable and an error of the program (1 to 127) is permanent. With 138 (SIGUSR1) a program
asks for a retry. A pod that never reported a code is retried, and counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Literal, TypeAlias

import msgspec

from controllers.jobs.api import (
    Action,
    Backoff,
    CreateService,
    DeletePod,
    DeleteReason,
    DeleteService,
    JobView,
    ReplicaSpec,
    ReplicaStatus,
    RestartPolicy,
    Retry,
    whole_seconds,
)
from store.kube.api.objects import (
    Object,
    PodPhase,
    has_succeeded,
    is_deleting,
    labels_of,
    name_of,
    phase_of,
    uid_of,
)

_DISRUPTIONS = frozenset(
    {
        "Evicted",  # node pressure, or the taint manager
        "NodeAffinity",  # the node's labels changed between scheduling and admission
        "NodeLost",
        "NodeShutdown",
        "Preempted",
        "Preempting",  # the kubelet makes room for a critical pod
        "Shutdown",
        "Terminated",  # graceful shutdown of the node
        "UnexpectedAdmissionError",  # a device went away between scheduling and admission
    }
)
_OUT_OF = "OutOf"  # OutOfcpu, OutOfmemory, OutOfpods…: the kubelet refused what the scheduler placed

_PREFERENCE: dict[str, int] = {
    PodPhase.SUCCEEDED: 0,
    PodPhase.RUNNING: 1,
    PodPhase.PENDING: 2,
    PodPhase.UNKNOWN: 3,
    PodPhase.FAILED: 4,
}

_Places = dict[tuple[str, int], list[Object]]  # (type in lower case, index) -> its objects

Counts = dict[str, ReplicaStatus]

Verdict: TypeAlias = Literal["permanent", "retryable", "disrupted"]

_PERMANENT = frozenset({1, 2, 126, 127, 128, 139})  # errors, misuse, can't execute, not found, bad exit, SIGSEGV
_FIRST_SIGNAL = 128

_MAX_DIGITS = 18  # Python refuses to convert very long digits; no index comes near


@dataclass(frozen=True, slots=True)
class Slot:
    """One replica of the spec. `pod`: the one to keep. `duplicates`: other pods with the same labels. `retry`: its
    counted failures."""

    type: str
    index: int
    spec: ReplicaSpec
    retry: Retry
    pod: Object | None
    duplicates: tuple[Object, ...] = ()


def has_failed(pod: Object) -> bool:
    """Return whether the pod failed and is not being deleted: a deletion makes a running pod fail, too."""
    return phase_of(pod) == PodPhase.FAILED and not is_deleting(pod)


def is_running(pod: Object) -> bool:
    return phase_of(pod) == PodPhase.RUNNING and not is_deleting(pod)


def exit_code(pod: Object, container: str = "") -> int | None:
    """Return the exit code of the pod's default container (`container`, or the first one). If that did not fail, return
    the code of the init container or sidecar that did; None when no container has ended."""
    status = pod.get("status", {})
    containers = pod.get("spec", {}).get("containers") or [{}]
    default = container or str(containers[0].get("name", ""))
    own = sorted(status.get("containerStatuses") or (), key=lambda entry: entry.get("name") != default)
    states = [entry.get("state") or {} for entry in (*own[:1], *(status.get("initContainerStatuses") or ()), *own[1:])]
    ends = [state["terminated"] for state in states if state.get("terminated") is not None]
    codes = [int(terminated.get("exitCode") or 0) for terminated in ends]
    return next((code for code in codes if code != 0), codes[0] if codes else None)


def restarts_of(pod: Object) -> int:
    """Return how often the kubelet restarted containers of the pod in place, init containers included."""
    status = pod.get("status", {})
    entries = (*(status.get("containerStatuses") or ()), *(status.get("initContainerStatuses") or ()))
    return sum(int(entry.get("restartCount") or 0) for entry in entries)


def best_of(objects: Sequence[Object]) -> Object:
    """Return which of several pods (or services) of one replica to keep: one that succeeded, even if it is being
    deleted; then the most advanced; then the oldest."""
    return min(
        objects,
        key=lambda obj: (
            not has_succeeded(obj),
            is_deleting(obj),
            _PREFERENCE.get(phase_of(obj), 3),
            not obj.get("spec", {}).get("nodeName"),
            str(obj["metadata"].get("creationTimestamp") or ""),
            name_of(obj),
        ),
    )


def slots_of(job: JobView, pods: Iterable[Object]) -> list[Slot]:
    """Return the job's replicas, by type in the order of the spec, then by index."""
    places = _by_place(job, pods)
    slots = []
    for replica_type, spec in job.replica_specs.items():
        status = job.status.replica_statuses.get(replica_type, ReplicaStatus())
        for index in range(spec.replicas):
            found = places.get((replica_type.lower(), index), [])
            pod, retry = best_of(found) if found else None, status.retries.get(str(index), Retry())
            slots.append(Slot(replica_type, index, spec, retry, pod, _duplicates(found)))
    return slots


def surplus(job: JobView, objects: Iterable[Object]) -> list[Object]:
    """Return the objects at or above the number of replicas. Objects of types that the spec lacks are left alone."""
    wanted = {replica_type.lower(): spec.replicas for replica_type, spec in job.replica_specs.items()}
    return [
        obj
        for (replica_type, index), found in _by_place(job, objects).items()
        if index >= wanted.get(replica_type, index + 1)
        for obj in found
    ]


def deletions(pods: Iterable[Object], reason: DeleteReason) -> Iterator[DeletePod]:
    """Return a deletion for each pod that is not being deleted already."""
    return (DeletePod(name_of(pod), uid_of(pod), reason) for pod in pods if not is_deleting(pod))


def service_deletions(services: Iterable[Object], reason: DeleteReason) -> Iterator[DeleteService]:
    """Return a deletion for each service that is not being deleted already."""
    return (DeleteService(name_of(entry), uid_of(entry), reason) for entry in services if not is_deleting(entry))


def service_actions(job: JobView, services: Sequence[Object]) -> Iterator[Action]:
    """Yield what is needed for one service per replica of the types that have services, whatever the pods' state."""
    yield from service_deletions(surplus(job, services), "surplus")
    places = _by_place(job, services)
    for replica_type, spec in job.replica_specs.items():
        if job.service_types is not None and replica_type not in job.service_types:
            continue
        for index in range(spec.replicas):
            found = places.get((replica_type.lower(), index), [])
            if found:
                yield from service_deletions(_duplicates(found), "duplicate")
            else:
                yield CreateService(replica_type, index)


def replica_index(obj: Object, label: str) -> int | None:
    """Return the index in the object's label, or None unless it is a decimal number ≥ 0."""
    text = labels_of(obj).get(label, "")
    valid = text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS
    return int(text) if valid else None


def place_of(job: JobView, obj: Object) -> tuple[str, int] | None:
    """Return (type in lower case, index) from the labels, or None if they lack one."""
    replica_type, index = labels_of(obj).get(job.type_label), replica_index(obj, job.index_label)
    return None if not replica_type or index is None else (replica_type, index)


def _duplicates(found: Sequence[Object]) -> tuple[Object, ...]:
    if len(found) < 2:
        return ()
    keep = best_of(found)
    return tuple(obj for obj in found if obj is not keep)


def _by_place(job: JobView, objects: Iterable[Object]) -> _Places:
    places: _Places = {}
    for obj in objects:
        place = place_of(job, obj)
        if place is not None:
            places.setdefault(place, []).append(obj)
    return places


def counts(job: JobView, slots: Sequence[Slot]) -> Counts:
    """Count pods by type. Running pods are active, running pods being deleted have failed, pending ones don't count."""
    pods: dict[str, list[Object]] = {replica_type: [] for replica_type in job.replica_specs}
    retries: dict[str, dict[str, Retry]] = {replica_type: {} for replica_type in job.replica_specs}
    for slot in slots:
        if slot.pod is not None:
            pods[slot.type].append(slot.pod)
        if slot.retry != Retry():
            retries[slot.type][str(slot.index)] = slot.retry
    return {
        replica_type: ReplicaStatus(
            active=sum(map(is_running, found)),
            succeeded=sum(map(has_succeeded, found)),
            failed=sum(
                phase_of(pod) == PodPhase.FAILED or (phase_of(pod) == PodPhase.RUNNING and is_deleting(pod))
                for pod in found
            ),
            retries=retries[replica_type],
        )
        for replica_type, found in pods.items()
    }


def final_counts(job: JobView, slots: Sequence[Slot], *, succeeded: bool, stopped: bool) -> Counts:
    """Return the counts of a job that ends. Pods that still run when the job succeeds count as succeeded. When it fails
    and its pods are `stopped`, none is active."""
    found = counts(job, slots)
    for replica_type, status in found.items():
        if succeeded:
            found[replica_type] = msgspec.structs.replace(status, active=0, succeeded=status.succeeded + status.active)
        elif stopped:
            found[replica_type] = msgspec.structs.replace(status, active=0)
    return found


def judge(pod: Object, policy: RestartPolicy, container: str = "") -> Verdict:
    """Classify the failure of a pod. It is a disruption if the pod was evicted, preempted, refused by its node, or lost
    with it.
    """
    status = pod.get("status", {})
    reason, conditions = str(status.get("reason") or ""), status.get("conditions") or ()
    targeted = any(entry.get("type") == "DisruptionTarget" and entry.get("status") == "True" for entry in conditions)
    if targeted or reason in _DISRUPTIONS or reason.startswith(_OUT_OF):
        return "disrupted"
    if policy == "Never":
        return "permanent"
    if policy == "ExitCode":
        code = exit_code(pod, container)
        if code is not None and (code in _PERMANENT or code < _FIRST_SIGNAL):
            return "permanent"
    return "retryable"


def new_failure(slot: Slot) -> Object | None:
    """Return the replica's pod if it failed and the failure is not counted yet."""
    failed = slot.pod is not None and has_failed(slot.pod) and uid_of(slot.pod) not in slot.retry.counted
    return slot.pod if failed else None


def counted(slot: Slot, pod: Object, verdict: Verdict, now: datetime) -> Slot:
    """Return the replica with the failure of its pod counted."""
    before, disrupted = slot.retry, verdict == "disrupted"
    seen = {uid_of(duplicate) for duplicate in slot.duplicates}
    kept = [uid for uid in before.counted[:-1] if uid in seen] + before.counted[-1:]  # the cache may lack the newest
    record = Retry(
        failures=before.failures + (not disrupted),
        disruptions=before.disruptions + disrupted,
        restarts=before.restarts + restarts_of(pod),
        last_failure_time=whole_seconds(now),
        counted=[*kept, uid_of(pod)],
    )
    return replace(slot, retry=record)


def not_before(slot: Slot, backoff: Backoff) -> datetime | None:
    """Return when the back-off ends and the replica's next pod may be created; None: at once."""
    last = slot.retry.last_failure_time
    if last is None:
        return None
    return last + timedelta(seconds=backoff.delay(slot.retry.failures + slot.retry.disruptions))


def is_restarting(slot: Slot, since: datetime | None) -> bool:
    """Return whether the replica has failed since the job's start (`since`) and is not running again yet."""
    last = slot.retry.last_failure_time
    if last is None or (since is not None and last < since):
        return False
    return slot.pod is None or not (is_running(slot.pod) or has_succeeded(slot.pod))


def limit_reached(slots: Iterable[Slot], limit: int | None) -> str:
    """Return how the job reached its back-off limit, or "". It may have `limit` failed pods, fewer than `limit`
    restarts in place (as Kubernetes' Job counts them), and not more than `limit` of both together."""
    if limit is None:
        return ""
    failures = restarts = 0
    for slot in slots:
        failures += slot.retry.failures
        restarts += slot.retry.restarts
        pod = slot.pod
        if pod is not None and slot.spec.restart_policy != "Never" and uid_of(pod) not in slot.retry.counted:
            restarts += restarts_of(pod)
    if failures + restarts <= limit and (restarts < limit or not restarts):
        return ""
    return f"{failures} failed pods and {restarts} restarts of containers reach the back-off limit of {limit}"
