"""When a job is over, and how. Decided once over all its replicas, in this order: success, a failure that no retry can
mend, a limit that is used up. So a job never ends both ways."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Literal, NamedTuple

from controllers.job_pods import exit_code, has_succeeded
from controllers.job_replicas import Slot
from controllers.job_restart import judge, limit_reached, new_failure
from controllers.job_status import JobStatus
from controllers.job_types import JobView
from store.kube.objects import Object, name_of

BACKOFF_LIMIT = "BackoffLimitExceeded"
DEADLINE = "DeadlineExceeded"
_LIMITS = (BACKOFF_LIMIT, DEADLINE)


class Ending(NamedTuple):
    """How a job ends: the condition that becomes true, with its reason and message."""

    condition: Literal["Succeeded", "Failed"]
    reason: str
    message: str

    @property
    def by_limit(self) -> bool:
        return self.reason in _LIMITS


def ending_of(job: JobView, slots: Sequence[Slot], start: datetime | None, now: datetime) -> Ending | None:
    """How the job ends now; None while it goes on. `slots` have the failures of their pods counted."""
    if why := _success(job, slots):
        return Ending("Succeeded", "JobSucceeded", f"{job.title} has succeeded: {why}")
    if why := _permanent_failure(job, slots):
        return Ending("Failed", "JobFailed", f"{job.title} has failed: {why}")
    if why := limit_reached(slots, job.run_policy.backoff_limit):
        return Ending("Failed", BACKOFF_LIMIT, f"{job.title} has failed: {why}")
    due = deadline(job, start)
    if due is not None and now >= due:
        why = f"it was active for longer than {job.run_policy.active_deadline_seconds} s"
        return Ending("Failed", DEADLINE, f"{job.title} has failed: {why}")
    return None


def deadline(job: JobView, start: datetime | None) -> datetime | None:
    """When the job has been active for too long; None without such a limit."""
    limit = job.run_policy.active_deadline_seconds
    return None if limit is None or start is None else start + timedelta(seconds=limit)


def broke_a_limit(status: JobStatus) -> bool:
    """Whether the job failed because a limit was used up: then its pods are stopped under every clean-up policy."""
    failed = status.condition("Failed")
    return failed is not None and failed.status == "True" and failed.reason in _LIMITS


def _success(job: JobView, slots: Sequence[Slot]) -> str:
    """Why the job has succeeded, or "". Chiefs decide; without them the workers; without those, everything."""
    chiefs = [slot for slot in slots if slot.type in job.chief_types]
    workers = [slot for slot in slots if slot.type == job.worker_type]
    if not chiefs and workers and job.success_policy != "AllWorkers" and _succeeded(workers[0]):
        return f"{workers[0].type} 0 has succeeded"
    deciding = chiefs or workers or slots
    if not deciding or not all(_succeeded(slot) for slot in deciding):
        return ""
    return f"all of {', '.join(dict.fromkeys(slot.type for slot in deciding))} have succeeded"


def _succeeded(slot: Slot) -> bool:
    return slot.pod is not None and has_succeeded(slot.pod)


def _permanent_failure(job: JobView, slots: Sequence[Slot]) -> str:
    for slot in slots:
        pod = new_failure(slot)
        if pod is not None and judge(pod, slot.spec.restart_policy, job.default_container) == "permanent":
            return f"{slot.type} {slot.index}: {describe_failure(pod, job.default_container)}"
    return ""


def describe_failure(pod: Object, container: str = "") -> str:
    """One phrase for people: which pod failed, with which code, and what its status says about it."""
    status, code = pod.get("status", {}), exit_code(pod, container)
    ended = f"pod {name_of(pod)} exited with code {code}" if code is not None else f"pod {name_of(pod)} failed"
    said = ": ".join(part for part in (status.get("reason"), status.get("message")) if part)
    return f"{ended} ({said})" if said else ended
