"""How many pods of each type are active, succeeded and failed, as the job's status shows it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from controllers.job_pods import has_succeeded, is_running, phase_of
from controllers.job_replicas import Slot
from controllers.job_status import ReplicaStatus, Retry
from controllers.job_types import JobView
from store.kube.objects import Object, is_deleting

Counts = dict[str, ReplicaStatus]


def counts(job: JobView, slots: Sequence[Slot]) -> Counts:
    """By type: running pods are active; a running pod on its way out has failed; pending ones are not counted."""
    pods: dict[str, list[Object]] = {replica_type: [] for replica_type in job.replica_specs}
    for slot in slots:
        if slot.pod is not None:
            pods[slot.type].append(slot.pod)
    retries = _retries(slots)
    return {
        replica_type: ReplicaStatus(
            active=sum(map(is_running, found)),
            succeeded=sum(map(has_succeeded, found)),
            failed=sum(map(_counts_as_failed, found)),
            retries=retries.get(replica_type, {}),
        )
        for replica_type, found in pods.items()
    }


def idle_counts(job: JobView, slots: Sequence[Slot]) -> Counts:
    """Of a job without pods: nothing but what its replicas have been through."""
    retries = _retries(slots)
    return {replica_type: ReplicaStatus(retries=retries.get(replica_type, {})) for replica_type in job.replica_specs}


def final_counts(job: JobView, slots: Sequence[Slot], *, succeeded: bool, stopped: bool) -> Counts:
    """Of a job that ends. What still runs when it succeeds has done its part and counts as succeeded. When it fails,
    what is `stopped` is not active any more."""
    return {
        replica_type: _final(status, succeeded=succeeded, stopped=stopped)
        for replica_type, status in counts(job, slots).items()
    }


def _final(status: ReplicaStatus, *, succeeded: bool, stopped: bool) -> ReplicaStatus:
    if succeeded:
        return msgspec.structs.replace(status, active=0, succeeded=status.succeeded + status.active)
    return msgspec.structs.replace(status, active=0) if stopped else status


def _counts_as_failed(pod: Object) -> bool:
    return phase_of(pod) == "Failed" or (phase_of(pod) == "Running" and is_deleting(pod))


def _retries(slots: Sequence[Slot]) -> dict[str, dict[str, Retry]]:
    kept: dict[str, dict[str, Retry]] = {}
    for slot in slots:
        if slot.retry != Retry():
            kept.setdefault(slot.type, {})[str(slot.index)] = slot.retry
    return kept
