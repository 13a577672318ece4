"""Conditions of a job: one per type, mutually exclusive where they must be, and final at the end.

The rules, kubeflow's: setting a condition whose status and reason are already so changes nothing, not even the message;
the transition time changes with the status only; Running and Restarting remove each other; the end of a job makes
Running false, and nothing changes after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

import msgspec

from controllers.job_status import Condition, ConditionStatus, ConditionType, JobStatus, whole_seconds
from controllers.job_types import JobEvent

_ALARMING = ("Failed", "Restarting")


def set_condition(
    status: JobStatus, kind: ConditionType, value: ConditionStatus, reason: str, message: str, now: datetime
) -> JobStatus:
    """The status with this condition. A finished job's status is returned as it is."""
    before = status.condition(kind)
    if status.finished or (before is not None and (before.status, before.reason) == (value, reason)):
        return status
    moment = whole_seconds(now)
    same_value = before is not None and before.status == value
    condition = Condition(
        type=kind,
        status=value,
        reason=reason,
        message=message,
        last_update_time=moment,
        last_transition_time=before.last_transition_time if before is not None and same_value else moment,
    )
    others = [other for other in status.conditions if other.type != kind]
    return msgspec.structs.replace(status, conditions=[*others, condition])


def mark_active(status: JobStatus, job: str, now: datetime) -> JobStatus:
    """The job is known and not suspended (any more). Its time counts from its first activity or last resumption."""
    resumed = status.has("Suspended")
    status = set_condition(status, "Created", "True", "JobCreated", f"{job} is created", now)
    if resumed:
        status = set_condition(status, "Suspended", "False", "JobResumed", f"{job} is resumed", now)
    if resumed or status.start_time is None:
        status = msgspec.structs.replace(status, start_time=whole_seconds(now))
    return status


def mark_suspended(status: JobStatus, job: str, now: datetime) -> JobStatus:
    """The job holds nothing, and its time does not count."""
    status = set_condition(status, "Created", "True", "JobCreated", f"{job} is created", now)
    status = mark_idle(status, "JobSuspended", f"{job} is suspended", now)
    status = set_condition(status, "Suspended", "True", "JobSuspended", f"{job} is suspended", now)
    return msgspec.structs.replace(status, start_time=None)


def mark_running(status: JobStatus, message: str, now: datetime) -> JobStatus:
    return set_condition(_without(status, "Restarting"), "Running", "True", "JobRunning", message, now)


def mark_restarting(status: JobStatus, message: str, now: datetime) -> JobStatus:
    return set_condition(_without(status, "Running"), "Restarting", "True", "JobRestarting", message, now)


def mark_idle(status: JobStatus, reason: str, message: str, now: datetime) -> JobStatus:
    """Neither Running nor Restarting are true any more; a job that has done neither keeps silent about it."""
    if status.condition("Running") is None and status.condition("Restarting") is None:
        return status
    return set_condition(_without(status, "Restarting"), "Running", "False", reason, message, now)


def mark_finished(status: JobStatus, kind: ConditionType, reason: str, message: str, now: datetime) -> JobStatus:
    """The end, as `kind` (Succeeded or Failed)."""
    if status.finished:
        return status
    status = mark_idle(status, reason, message, now)
    if status.has("Blocked"):
        status = set_condition(status, "Blocked", "False", reason, message, now)
    status = set_condition(status, kind, "True", reason, message, now)
    return msgspec.structs.replace(status, completion_time=whole_seconds(now))


def transition_events(old: JobStatus, new: JobStatus) -> Iterator[JobEvent]:
    """What to announce: each condition that became true, and the end of a suspension."""
    for condition in new.conditions:
        before = next((other for other in old.conditions if other.type == condition.type), None)
        was, now_is = before is not None and before.status == "True", condition.status == "True"
        if (now_is and not was) or (condition.type == "Suspended" and was and not now_is):
            yield JobEvent("Warning" if condition.type in _ALARMING else "Normal", condition.reason, condition.message)


def _without(status: JobStatus, kind: ConditionType) -> JobStatus:
    if status.condition(kind) is None:
        return status
    return msgspec.structs.replace(status, conditions=[c for c in status.conditions if c.type != kind])
