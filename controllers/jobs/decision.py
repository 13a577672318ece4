"""Decides a job's next step: a pure function of its spec and status, its pods, its services and the time.

A job is in one of four situations:

- *being deleted*: do nothing; the garbage collector deletes what the job owns;
- *finished*: clean up, and delete the job when its time to live has passed. Its status does not change again;
- *suspended*: delete everything, whatever the clean-up policy says; the job starts over when it is resumed;
- *active*: count new failures; end the job if it has succeeded or failed; else bring its pods and services in line with
  the spec, with the restarts that are allowed (`controllers.jobs.replicas`).

Once the actions are taken, another decision yields none. Source: the reconcile order of kubeflow's common
JobController; that decides type by type, so that the last one wins, and this decides once over all replicas. How a job
ends is decided in this order: success, a permanent failure, an exceeded limit. So a job never ends both ways.

The status has one condition per type. The rules are kubeflow's: setting a condition to its present status and reason
changes nothing, not even the message; the transition time changes with the status only; Running and Restarting remove
each other; the end of a job makes Running false, and nothing changes after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import Literal, NamedTuple

import msgspec

from controllers.jobs.api import (
    Action,
    Condition,
    ConditionStatus,
    ConditionType,
    CreatePod,
    Decision,
    DeleteGang,
    DeleteJob,
    DeletePod,
    JobEvent,
    JobStatus,
    JobView,
    SyncGang,
    whole_seconds,
)
from controllers.jobs.replicas import (
    Slot,
    counted,
    counts,
    deletions,
    exit_code,
    final_counts,
    has_failed,
    is_restarting,
    is_running,
    judge,
    limit_reached,
    new_failure,
    not_before,
    place_of,
    service_actions,
    service_deletions,
    slots_of,
    surplus,
)
from store.kube.api.objects import Object, has_ended, has_succeeded, is_deleting, name_of, uid_of

_Moments = Iterable[datetime | None]

BACKOFF_LIMIT = "BackoffLimitExceeded"
DEADLINE = "DeadlineExceeded"
_LIMITS = (BACKOFF_LIMIT, DEADLINE)

_ALARMING = ("Failed", "Restarting")


class Ending(NamedTuple):
    """The end of a job: the condition that becomes true, with its reason and message."""

    condition: Literal["Succeeded", "Failed"]
    reason: str
    message: str


def decide(job: JobView, pods: Sequence[Object], services: Sequence[Object], now: datetime) -> Decision:
    """Decide the next step of one job. `pods`, `services`: all that it controls, including those being deleted."""
    if job.deleting:
        return Decision(job.status)
    if job.status.finished:
        return _finished(job, pods, services, now)
    if job.run_policy.suspend:
        status = set_condition(job.status, "Created", "True", "JobCreated", f"{job.title} is created", now)
        status = mark_idle(status, "JobSuspended", f"{job.title} is suspended", now)
        status = set_condition(status, "Suspended", "True", "JobSuspended", f"{job.title} is suspended", now)
        idle = counts(job, slots_of(job, ()))
        status = msgspec.structs.replace(status, start_time=None, replica_statuses=idle)
        lost, next_lost = lost_pods(job, pods, now)
        gang = (DeleteGang(),) if job.gang is not None and job.gang.exists else ()
        everything: list[Action] = [*deletions(pods, "suspended"), *service_deletions(services, "suspended")]
        return _decision(job, status, (*gang, *everything, *lost), [next_lost], now)
    return _active(job, pods, services, now)


def _active(job: JobView, pods: Sequence[Object], services: Sequence[Object], now: datetime) -> Decision:
    status = mark_active(job.status, job.title, now)
    slots, exits = [], []
    for slot in slots_of(job, pods):
        pod = new_failure(slot)
        if pod is not None:
            exits.append(JobEvent("Warning", "ExitedWithCode", describe_failure(pod, job.default_container)))
            verdict = judge(pod, slot.spec.restart_policy, job.default_container)
            if verdict != "permanent":  # a failure that ends the job is not counted
                slot = counted(slot, pod, verdict, now)
        slots.append(slot)
    ending = ending_of(job, slots, status.start_time, now)
    if ending is not None:
        status = mark_finished(status, ending.condition, ending.reason, ending.message, now)
        stopped = job.run_policy.clean_pod_policy != "None" or ending.reason in _LIMITS
        final = final_counts(job, slots, succeeded=ending.condition == "Succeeded", stopped=stopped)
        return _ended(job, msgspec.structs.replace(status, replica_statuses=final), pods, services, now, exits)
    status = msgspec.structs.replace(_with_state(job, status, slots, now), replica_statuses=counts(job, slots))
    gang = (SyncGang(job.min_available),) if job.gang is not None and not job.gang.current else ()
    pod_actions, moments = _pod_actions(job, slots, pods, now)
    actions = (*gang, *pod_actions, *service_actions(job, services))
    return _decision(job, status, actions, (deadline(job, status.start_time), *moments), now, exits)


def _finished(job: JobView, pods: Sequence[Object], services: Sequence[Object], now: datetime) -> Decision:
    """Decide about a finished job. Only this function deletes the job, after its final status has been stored."""
    status = job.status
    if status.completion_time is None:  # another writer left it out
        ending = status.condition("Succeeded") if status.has("Succeeded") else status.condition("Failed")
        ended = ending.last_transition_time if ending is not None else None
        status = msgspec.structs.replace(status, completion_time=ended or whole_seconds(now))
    expiry = _expiry(job, status)
    if expiry is not None and now >= expiry:
        return _decision(job, status, (DeleteJob(),), (), now)
    return _ended(job, status, pods, services, now)


def _ended(
    job: JobView,
    status: JobStatus,
    pods: Sequence[Object],
    services: Sequence[Object],
    now: datetime,
    events: Sequence[JobEvent] = (),
) -> Decision:
    """Clean up as the policy requires. Services without a pod go, too. A job that exceeded a limit leaves no pod that
    runs, under any policy.
    """
    lost, next_lost = lost_pods(job, pods, now)
    policy, failed = job.run_policy.clean_pod_policy, status.condition("Failed")
    if policy == "None" and failed is not None and failed.status == "True" and failed.reason in _LIMITS:
        policy = "Running"
    actions: list[Action] = [DeleteGang()] if job.gang is not None and job.gang.exists else []
    if policy != "None":
        stays: list[Object] = []
        goes: list[Object] = []
        for pod in pods:
            ended = policy == "Running" and has_ended(pod) and not is_deleting(pod)
            (stays if ended else goes).append(pod)
        places = {place_of(job, pod) for pod in stays} - {None}
        actions += deletions(goes, "clean-up")
        actions += service_deletions((entry for entry in services if place_of(job, entry) not in places), "clean-up")
    return _decision(job, status, (*actions, *lost), (_expiry(job, status), next_lost), now, events)


def _decision(
    job: JobView,
    status: JobStatus,
    actions: tuple[Action, ...],
    moments: _Moments,
    now: datetime,
    events: Sequence[JobEvent] = (),
) -> Decision:
    if status != job.status:
        status = msgspec.structs.replace(status, last_reconcile_time=whole_seconds(now))
    wake = min((moment for moment in moments if moment is not None), default=None)
    next_wake = None if wake is None else max(0.0, (wake - now).total_seconds())
    transitions = []  # an Event for each condition that became true, and for the end of a suspension
    for condition in status.conditions:
        before = next((other for other in job.status.conditions if other.type == condition.type), None)
        was, now_is = before is not None and before.status == "True", condition.status == "True"
        if (now_is and not was) or (condition.type == "Suspended" and was and not now_is):
            severity: Literal["Normal", "Warning"] = "Warning" if condition.type in _ALARMING else "Normal"
            transitions.append(JobEvent(severity, condition.reason, condition.message))
    return Decision(status, actions, next_wake, (*events, *transitions))


def _with_state(job: JobView, status: JobStatus, slots: Sequence[Slot], now: datetime) -> JobStatus:
    """Set Restarting while a failed replica is not running again; else Running while any pod runs; else neither."""
    restarting = next((slot for slot in slots if is_restarting(slot, status.start_time)), None)
    if restarting is not None:
        message = f"{job.title} is restarting {restarting.type} {restarting.index}"
        return set_condition(_without(status, "Running"), "Restarting", "True", "JobRestarting", message, now)
    if any(slot.pod is not None and is_running(slot.pod) for slot in slots):
        status = _without(status, "Restarting")
        return set_condition(status, "Running", "True", "JobRunning", f"{job.title} is running", now)
    return mark_idle(status, "JobPending", f"{job.title} has no running pod", now)


def _expiry(job: JobView, status: JobStatus) -> datetime | None:
    ttl = job.run_policy.ttl_seconds_after_finished
    return None if ttl is None or status.completion_time is None else status.completion_time + timedelta(seconds=ttl)


def _pod_actions(
    job: JobView, slots: Iterable[Slot], pods: Sequence[Object], now: datetime
) -> tuple[list[Action], list[datetime | None]]:
    """Return what is due for pods, and when the rest is. A pod being deleted keeps the name of its successor."""
    actions: list[Action] = [*deletions(surplus(job, pods), "surplus")]
    for slot in slots:
        actions += deletions(slot.duplicates, "duplicate")
        if slot.pod is not None and has_failed(slot.pod):
            actions += deletions([slot.pod], "restart")
    lost, next_lost = lost_pods(job, pods, now)
    actions += lost
    moments = [next_lost]
    for slot in slots:
        if slot.pod is None and not (job.gang is not None and job.gang.holds_creation):
            due = not_before(slot, job.backoff)
            if due is None or now >= due:
                actions.append(CreatePod(slot.type, slot.index))
            else:
                moments.append(due)
    return actions, moments


def ending_of(job: JobView, slots: Sequence[Slot], start: datetime | None, now: datetime) -> Ending | None:
    """Return how the job ends now, or None while it continues. `slots` have the failures of their pods counted."""
    if why := _success(job, slots):
        return Ending("Succeeded", "JobSucceeded", f"{job.title} has succeeded: {why}")
    for slot in slots:
        pod = new_failure(slot)
        if pod is not None and judge(pod, slot.spec.restart_policy, job.default_container) == "permanent":
            why = f"{slot.type} {slot.index}: {describe_failure(pod, job.default_container)}"
            return Ending("Failed", "JobFailed", f"{job.title} has failed: {why}")
    if why := limit_reached(slots, job.run_policy.backoff_limit):
        return Ending("Failed", BACKOFF_LIMIT, f"{job.title} has failed: {why}")
    due = deadline(job, start)
    if due is not None and now >= due:
        why = f"it was active for longer than {job.run_policy.active_deadline_seconds} s"
        return Ending("Failed", DEADLINE, f"{job.title} has failed: {why}")
    return None


def deadline(job: JobView, start: datetime | None) -> datetime | None:
    """Return when the job's active deadline passes, or None without one."""
    limit = job.run_policy.active_deadline_seconds
    return None if limit is None or start is None else start + timedelta(seconds=limit)


def _success(job: JobView, slots: Sequence[Slot]) -> str:
    """Return why the job has succeeded, or "". Chiefs decide; without them the workers; without those all replicas."""
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


def describe_failure(pod: Object, container: str = "") -> str:
    """Return a phrase that names the failed pod, its exit code, and its status' reason and message."""
    status, code = pod.get("status", {}), exit_code(pod, container)
    ended = f"pod {name_of(pod)} exited with code {code}" if code is not None else f"pod {name_of(pod)} failed"
    said = ": ".join(part for part in (status.get("reason"), status.get("message")) if part)
    return f"{ended} ({said})" if said else ended


def lost_pods(job: JobView, pods: Iterable[Object], now: datetime) -> tuple[list[DeletePod], datetime | None]:
    """Return forced deletions of the pods whose kubelet has not confirmed their end within the time that the job
    allows, and when the next pod is due.
    """
    lost: list[DeletePod] = []
    later: list[datetime] = []
    for pod in pods:
        stamp = pod["metadata"].get("deletionTimestamp")  # the end of its grace period
        if job.force_delete_after is None or not stamp:
            continue
        if pod["metadata"].get("deletionGracePeriodSeconds") == 0:
            continue  # it is forced: the deletion waits only for finalizers, not for the kubelet
        due = datetime.fromisoformat(stamp) + timedelta(seconds=job.force_delete_after)
        if now >= due:
            lost.append(DeletePod(name_of(pod), uid_of(pod), "node lost", force=True))
        else:
            later.append(due)
    return lost, min(later, default=None)


def set_condition(
    status: JobStatus, kind: ConditionType, value: ConditionStatus, reason: str, message: str, now: datetime
) -> JobStatus:
    """Return the status with this condition. A finished job's status is returned unchanged."""
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
    """Mark the job as created and not suspended. Its start time is its first activity or last resumption."""
    resumed = status.has("Suspended")
    status = set_condition(status, "Created", "True", "JobCreated", f"{job} is created", now)
    if resumed:
        status = set_condition(status, "Suspended", "False", "JobResumed", f"{job} is resumed", now)
    if resumed or status.start_time is None:
        status = msgspec.structs.replace(status, start_time=whole_seconds(now))
    return status


def mark_idle(status: JobStatus, reason: str, message: str, now: datetime) -> JobStatus:
    """Mark the job as neither Running nor Restarting. A status with neither condition stays as it is."""
    if status.condition("Running") is None and status.condition("Restarting") is None:
        return status
    return set_condition(_without(status, "Restarting"), "Running", "False", reason, message, now)


def mark_finished(status: JobStatus, kind: ConditionType, reason: str, message: str, now: datetime) -> JobStatus:
    """Mark the job as ended, with the condition `kind` (Succeeded or Failed)."""
    if status.finished:
        return status
    status = mark_idle(status, reason, message, now)
    if status.has("Blocked"):
        status = set_condition(status, "Blocked", "False", reason, message, now)
    status = set_condition(status, kind, "True", reason, message, now)
    return msgspec.structs.replace(status, completion_time=whole_seconds(now))


def _without(status: JobStatus, kind: ConditionType) -> JobStatus:
    if status.condition(kind) is None:
        return status
    return msgspec.structs.replace(status, conditions=[c for c in status.conditions if c.type != kind])
