"""A job's replicas: reads the state of their pods, assigns pods and services to the places that their labels name,
finds the missing, surplus and duplicate ones, and decides whether and when a failed replica gets another pod. Pure.

A failure is of one of three kinds. *Disrupted*: the cluster removed the pod (evicted, preempted, node lost); the pod is
replaced under every restart policy, and the failure does not count against the back-off limit. *Retryable* or
*permanent*: by the restart policy and the exit code.

A pod that never reported an exit code is retried, and counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
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
    RestartPolicy,
    is_retryable,
)
from controllers.jobs.status import (
    ReplicaStatus,
    Retry,
    whole_seconds,
)
from store.kube.api.objects import (
    Object,
    PodPhase,
    annotations_of,
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

SIZE_ANNOTATION = "rcfarm.dev/replicas"  # of pods: the numbers of replicas that they were given

_MAX_DIGITS = 18  # Python refuses to convert very long digits; no index comes near


@dataclass(frozen=True, slots=True)
class Slot:
    """One replica of the spec. `pod`: the one to keep. `duplicates`: other pods with the same labels. `retry`: its
    counted failures. `completed`: it succeeded, and its pod may be gone."""

    type: str
    index: int
    spec: ReplicaSpec
    retry: Retry
    pod: Object | None
    duplicates: tuple[Object, ...] = ()
    completed: bool = False

    @property
    def succeeded(self) -> bool:
        return self.completed or (self.pod is not None and has_succeeded(self.pod))


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
        completed = frozenset(status.completed)
        for index in range(spec.replicas):
            found = places.get((replica_type.lower(), index), [])
            pod = best_of(found) if found else None
            retry = status.retries.get(str(index), Retry())
            if spec.restart_policy != "Never":
                retry = _with_restarts(retry, pod)
            slots.append(Slot(replica_type, index, spec, retry, pod, _duplicates(found), index in completed))
    return slots


def _with_restarts(retry: Retry, pod: Object | None) -> Retry:
    """Return the record with the restarts in the present pod; those of a pod that is gone stay counted."""
    uid = uid_of(pod) if pod is not None else ""
    restarts = restarts_of(pod) if pod is not None and uid not in retry.counted else 0
    seen = max(restarts, retry.seen.get(uid, 0))
    gone = sum(count for other, count in retry.seen.items() if other != uid)
    if not gone and retry.seen.get(uid, 0) == seen:
        return retry
    return msgspec.structs.replace(retry, restarts=retry.restarts + gone, seen={uid: seen} if seen else {})


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


def counts(job: JobView, slots: Sequence[Slot], extra: Sequence[Object] = (), *, starts_over: bool = False) -> Counts:
    """Count pods by type. Running pods are active, running pods being deleted have failed, pending ones don't count.

    `extra`: surplus pods, which are active as long as they run. Records of replicas that the spec no longer has stay.
    `starts_over`: the replicas that have succeeded run again.
    """
    found = {}
    for replica_type, spec in job.replica_specs.items():
        own = [slot for slot in slots if slot.type == replica_type]
        pods = [slot.pod for slot in own if slot.pod is not None]
        others = [pod for pod in extra if (place_of(job, pod) or ("", 0))[0] == replica_type.lower()]
        retries = {str(slot.index): slot.retry for slot in own if slot.retry != Retry()}
        found[replica_type] = ReplicaStatus(
            active=sum(map(is_running, (*pods, *others))),
            succeeded=sum(slot.succeeded for slot in own),
            failed=sum(
                phase_of(pod) == PodPhase.FAILED or (phase_of(pod) == PodPhase.RUNNING and is_deleting(pod))
                for pod in pods
            ),
            selector=_selector(job, replica_type),
            retries=retries | _retries_beyond(job, replica_type, spec.replicas),
            completed=[slot.index for slot in own if slot.succeeded and not starts_over],
        )
    return found


def _retries_beyond(job: JobView, replica_type: str, replicas: int) -> dict[str, Retry]:
    """Return the records of replicas that the spec no longer has."""
    known = job.status.replica_statuses.get(replica_type, ReplicaStatus()).retries
    return {index: retry for index, retry in known.items() if not index.isdigit() or int(index) >= replicas}


def suspended_counts(job: JobView, pods: Sequence[Object]) -> Counts:
    """Return the counts of a job whose pods are being deleted. A pod is active until it has ended, because it holds its
    resources until then. The record of retries stays; the replicas that succeeded start over, too.
    """
    running = Counter((place_of(job, pod) or ("",))[0] for pod in pods if phase_of(pod) == PodPhase.RUNNING)
    return {
        replica_type: msgspec.structs.replace(
            job.status.replica_statuses.get(replica_type, ReplicaStatus()),
            active=running[replica_type.lower()],
            selector=_selector(job, replica_type),
            completed=[],
        )
        for replica_type in job.replica_specs
    }


def _selector(job: JobView, replica_type: str) -> str:
    labels = {**job.selector, job.type_label: replica_type.lower()} if job.selector is not None else {}
    return ",".join(f"{key}={value}" for key, value in sorted(labels.items()))


def final_counts(job: JobView, slots: Sequence[Slot], *, succeeded: bool, stopped: bool) -> Counts:
    """Return the counts of a job that ends. Pods that still run when the job succeeds count as succeeded. When it fails
    and its pods are `stopped`, none is active. Which replicas succeeded no longer matters."""
    found = counts(job, slots)
    for replica_type, status in found.items():
        found[replica_type] = msgspec.structs.replace(
            status,
            active=0 if succeeded or stopped else status.active,
            succeeded=status.succeeded + (status.active if succeeded else 0),
            completed=[],
        )
    return found


def judge(
    pod: Object,
    policy: RestartPolicy,
    container: str = "",
    is_retryable: Callable[[int | None], bool] = is_retryable,
) -> Verdict:
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
    if policy == "ExitCode" and not is_retryable(exit_code(pod, container)):
        return "permanent"
    return "retryable"


def new_failure(slot: Slot) -> Object | None:
    """Return the replica's pod if it failed and the failure is not counted yet."""
    if slot.pod is None or slot.completed or uid_of(slot.pod) in slot.retry.counted:
        return None
    return slot.pod if has_failed(slot.pod) else None


def counted(slot: Slot, pod: Object, verdict: Verdict, now: datetime) -> Slot:
    """Return the replica with the failure of its pod counted."""
    before, disrupted = noted(slot, pod).retry, verdict == "disrupted"
    record = msgspec.structs.replace(
        before,
        failures=before.failures + (not disrupted),
        disruptions=before.disruptions + disrupted,
        last_failure_time=whole_seconds(now),
    )
    return replace(slot, retry=record)


def noted(slot: Slot, pod: Object) -> Slot:
    """Return the replica with the failure of its pod recorded, so that it is not judged again, but not counted."""
    before = slot.retry
    seen = {uid_of(duplicate) for duplicate in slot.duplicates}
    kept = [uid for uid in before.counted[:-1] if uid in seen] + before.counted[-1:]  # the cache may lack the newest
    record = msgspec.structs.replace(before, restarts=before.all_restarts, seen={}, counted=[*kept, uid_of(pod)])
    return replace(slot, retry=record)


def not_in_the_future(slot: Slot, now: datetime) -> Slot:
    """Return the replica with its last failure at the present, at the latest: after the clock was set back, its
    successor waits no longer than usual."""
    last = slot.retry.last_failure_time
    if last is None or last <= now:
        return slot
    return replace(slot, retry=msgspec.structs.replace(slot.retry, last_failure_time=whole_seconds(now)))


def not_before(slot: Slot, backoff: Backoff, since: datetime | None) -> datetime | None:
    """Return when the back-off ends and the replica's next pod may be created; None: at once.

    `since`: the start of the job, or its last resumption, before which no failure delays anything.
    """
    last = slot.retry.last_failure_time
    if last is None or (since is not None and last < since):
        return None
    return last + timedelta(seconds=backoff.delay(slot.retry.failures + slot.retry.disruptions))


def is_restarting(slot: Slot, since: datetime | None) -> bool:
    """Return whether the replica has failed and is not running again yet. `since`: when the job started, or was last
    found running: an earlier failure is past, and a pod that is missing now was deleted by another client."""
    last = slot.retry.last_failure_time
    if last is None or slot.succeeded or (since is not None and last < since):
        return False
    return slot.pod is None or not is_running(slot.pod)


def limit_reached(job: JobView, slots: Iterable[Slot]) -> str:
    """Return how the job reached its back-off limit, or "". It may have `limit` failed pods, fewer than `limit`
    restarts in place (as Kubernetes' Job counts them), and not more than `limit` of both together. Replicas that the
    spec no longer has count, too."""
    limit = job.run_policy.backoff_limit
    if limit is None:
        return ""
    records = [slot.retry for slot in slots]
    for replica_type, spec in job.replica_specs.items():
        records += _retries_beyond(job, replica_type, spec.replicas).values()
    failures, restarts = sum(retry.failures for retry in records), sum(retry.all_restarts for retry in records)
    if failures + restarts <= limit and (restarts < limit or not restarts):
        return ""
    return f"{failures} failed pods and {restarts} restarts of containers reach the back-off limit of {limit}"


def size_of(job: JobView) -> str:
    """Return the number of replicas of each type, as pods of a job of fixed size carry it: `Master=1,Worker=3`."""
    return ",".join(f"{replica_type}={spec.replicas}" for replica_type, spec in job.replica_specs.items())


def former_sizes(job: JobView, pods: Iterable[Object]) -> list[dict[str, int]]:
    """Return the sizes, other than the present one, under which pods that are not being deleted were created."""
    stamps = {annotations_of(pod).get(SIZE_ANNOTATION, "") for pod in pods if not is_deleting(pod)}
    sizes = []
    for stamp in sorted(stamps - {"", size_of(job)}):
        entries = (entry.partition("=") for entry in stamp.split(","))
        sizes.append({name: int(count) for name, _, count in entries if count.isdigit()})
    return sizes
