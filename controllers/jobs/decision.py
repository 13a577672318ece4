"""Decides a job's next step: a pure function of its spec and status, its pods, its services and the time.

A job is in one of four situations:

- *being deleted*: do nothing; the garbage collector deletes what the job owns;
- *finished*: clean up, and delete the job when its time to live has passed. Its status does not change again;
- *suspended*: delete everything; the job starts over when it is resumed;
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

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import Literal, NamedTuple

import msgspec

from controllers.jobs.api.types import (
    Action,
    CleanPodPolicy,
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
    deletion_time,
    deletions,
    exit_code,
    final_counts,
    has_failed,
    idle_counts,
    is_forced,
    is_restarting,
    is_running,
    judge,
    limit_reached,
    new_failure,
    not_before,
    place_of,
    places_of,
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

    @property
    def by_limit(self) -> bool:
        return self.reason in _LIMITS


def decide(job: JobView, pods: Sequence[Object], services: Sequence[Object], now: datetime) -> Decision:
    """Decide the next step of one job. `pods`, `services`: all that it controls, including those being deleted."""
    if job.deleting:
        return Decision(job.status)
    if job.status.finished:
        return _finished(job, pods, services, now)
    if job.run_policy.suspend:
        return _suspended(job, pods, services, now)
    return _active(job, pods, services, now)


def _active(job: JobView, pods: Sequence[Object], services: Sequence[Object], now: datetime) -> Decision:
    status = mark_active(job.status, job.title, now)
    found = slots_of(job, pods)
    slots = [_counted(job, slot, now) for slot in found]
    ending = ending_of(job, slots, status.start_time, now)
    failed = [pod for slot in found if (pod := new_failure(slot)) is not None]
    exits = [JobEvent("Warning", "ExitedWithCode", describe_failure(pod, job.default_container)) for pod in failed]
    if ending is not None:
        return _ended(job, _with_ending(job, status, ending, slots, now), pods, services, now, exits)
    status = msgspec.structs.replace(_with_state(job, status, slots, now), replica_statuses=counts(job, slots))
    gang = (SyncGang(job.min_available),) if job.gang is not None and not job.gang.current else ()
    actions = (*gang, *_pod_actions(job, slots, pods, now), *service_actions(job, services))
    moments = (deadline(job, status.start_time), next_lost(job, pods, now), *_restart_times(job, slots, now))
    return _decision(job, status, actions, moments, now, exits)


def _suspended(job: JobView, pods: Sequence[Object], services: Sequence[Object], now: datetime) -> Decision:
    status = mark_suspended(job.status, job.title, now)
    status = msgspec.structs.replace(status, replica_statuses=idle_counts(job, slots_of(job, pods)))
    actions = (*while_suspended(job, pods, services), *lost_pods(job, pods, now))
    return _decision(job, status, actions, [next_lost(job, pods, now)], now)


def _finished(job: JobView, pods: Sequence[Object], services: Sequence[Object], now: datetime) -> Decision:
    """Decide about a finished job. Only this function deletes the job, after its final status has been stored."""
    status = _with_completion_time(job.status, now)
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
    actions = (*after_the_end(job, status, pods, services), *lost_pods(job, pods, now))
    return _decision(job, status, actions, (_expiry(job, status), next_lost(job, pods, now)), now, events)


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
    return Decision(status, actions, next_wake, (*events, *transition_events(job.status, status)))


def _counted(job: JobView, slot: Slot, now: datetime) -> Slot:
    """Return the slot with its pod's new failure counted. A failure that ends the job is not counted."""
    pod = new_failure(slot)
    verdict = "permanent" if pod is None else judge(pod, slot.spec.restart_policy, job.default_container)
    return slot if pod is None or verdict == "permanent" else counted(slot, pod, verdict, now)


def _with_state(job: JobView, status: JobStatus, slots: Sequence[Slot], now: datetime) -> JobStatus:
    """Set Restarting while a failed replica is not running again; else Running while any pod runs; else neither."""
    restarting = next((slot for slot in slots if is_restarting(slot, status.start_time)), None)
    if restarting is not None:
        message = f"{job.title} is restarting {restarting.type} {restarting.index}"
        return mark_restarting(status, message, now)
    if any(slot.pod is not None and is_running(slot.pod) for slot in slots):
        return mark_running(status, f"{job.title} is running", now)
    return mark_idle(status, "JobPending", f"{job.title} has no running pod", now)


def _with_ending(job: JobView, status: JobStatus, ending: Ending, slots: Sequence[Slot], now: datetime) -> JobStatus:
    status = mark_finished(status, ending.condition, ending.reason, ending.message, now)
    stopped = job.run_policy.clean_pod_policy != "None" or ending.by_limit
    final = final_counts(job, slots, succeeded=ending.condition == "Succeeded", stopped=stopped)
    return msgspec.structs.replace(status, replica_statuses=final)


def _with_completion_time(status: JobStatus, now: datetime) -> JobStatus:
    """Return a finished status with its completion time, also if another writer left that out."""
    if status.completion_time is not None:
        return status
    ending = status.condition("Succeeded") if status.has("Succeeded") else status.condition("Failed")
    ended = ending.last_transition_time if ending is not None else None
    return msgspec.structs.replace(status, completion_time=ended or whole_seconds(now))


def _expiry(job: JobView, status: JobStatus) -> datetime | None:
    ttl = job.run_policy.ttl_seconds_after_finished
    return None if ttl is None or status.completion_time is None else status.completion_time + timedelta(seconds=ttl)


def _pod_actions(job: JobView, slots: Iterable[Slot], pods: Sequence[Object], now: datetime) -> Iterator[Action]:
    yield from deletions(surplus(job, pods), "surplus")
    for slot in slots:
        yield from deletions(slot.duplicates, "duplicate")
        if slot.pod is not None and has_failed(slot.pod):
            yield from deletions([slot.pod], "restart")
    yield from lost_pods(job, pods, now)
    for slot in slots:
        due = not_before(slot, job.backoff)
        if _is_free(job, slot) and (due is None or now >= due):
            yield CreatePod(slot.type, slot.index)


def _restart_times(job: JobView, slots: Iterable[Slot], now: datetime) -> Iterator[datetime]:
    for slot in slots:
        due = not_before(slot, job.backoff)
        if _is_free(job, slot) and due is not None and due > now:
            yield due


def _is_free(job: JobView, slot: Slot) -> bool:
    """Return whether only the back-off may delay the pod. A pod still being deleted keeps the name of its successor."""
    return slot.pod is None and not (job.gang is not None and job.gang.holds_creation)


def ending_of(job: JobView, slots: Sequence[Slot], start: datetime | None, now: datetime) -> Ending | None:
    """Return how the job ends now, or None while it continues. `slots` have the failures of their pods counted."""
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
    """Return when the job's active deadline passes, or None without one."""
    limit = job.run_policy.active_deadline_seconds
    return None if limit is None or start is None else start + timedelta(seconds=limit)


def broke_a_limit(status: JobStatus) -> bool:
    """Return whether the job failed by exceeding a limit: its pods are then stopped under every clean-up policy."""
    failed = status.condition("Failed")
    return failed is not None and failed.status == "True" and failed.reason in _LIMITS


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


def _permanent_failure(job: JobView, slots: Sequence[Slot]) -> str:
    for slot in slots:
        pod = new_failure(slot)
        if pod is not None and judge(pod, slot.spec.restart_policy, job.default_container) == "permanent":
            return f"{slot.type} {slot.index}: {describe_failure(pod, job.default_container)}"
    return ""


def describe_failure(pod: Object, container: str = "") -> str:
    """Return a phrase that names the failed pod, its exit code, and its status' reason and message."""
    status, code = pod.get("status", {}), exit_code(pod, container)
    ended = f"pod {name_of(pod)} exited with code {code}" if code is not None else f"pod {name_of(pod)} failed"
    said = ": ".join(part for part in (status.get("reason"), status.get("message")) if part)
    return f"{ended} ({said})" if said else ended


def after_the_end(
    job: JobView, status: JobStatus, pods: Sequence[Object], services: Sequence[Object]
) -> Iterator[Action]:
    """Yield the deletions that the clean-up policy of a finished job requires. Services without a pod go, too."""
    yield from _delete_gang(job)
    policy = job.run_policy.clean_pod_policy
    if policy == "None" and broke_a_limit(status):
        policy = "Running"
    if policy == "None":
        return
    yield from deletions((pod for pod in pods if not _stays(pod, policy)), "clean-up")
    places = places_of(job, (pod for pod in pods if _stays(pod, policy)))
    yield from service_deletions((entry for entry in services if place_of(job, entry) not in places), "clean-up")


def while_suspended(job: JobView, pods: Iterable[Object], services: Iterable[Object]) -> Iterator[Action]:
    """Delete everything, whatever the clean-up policy says: the job starts over when it is resumed."""
    yield from _delete_gang(job)
    yield from deletions(pods, "suspended")
    yield from service_deletions(services, "suspended")


def lost_pods(job: JobView, pods: Iterable[Object], now: datetime) -> Iterator[DeletePod]:
    """Yield forced deletions of pods whose kubelet has not confirmed their end within the time that the job allows."""
    for pod, due in _forced(job, pods):
        if now >= due:
            yield DeletePod(name_of(pod), uid_of(pod), "node lost", force=True)


def next_lost(job: JobView, pods: Iterable[Object], now: datetime) -> datetime | None:
    """Return when the next pod must be deleted by force."""
    return min((due for _, due in _forced(job, pods) if due > now), default=None)


def _forced(job: JobView, pods: Iterable[Object]) -> Iterator[tuple[Object, datetime]]:
    if job.force_delete_after is None:
        return
    for pod in pods:
        gone_by = deletion_time(pod)
        if gone_by is not None and not is_forced(pod):
            yield pod, gone_by + timedelta(seconds=job.force_delete_after)


def _stays(pod: Object, policy: CleanPodPolicy) -> bool:
    return policy == "Running" and has_ended(pod) and not is_deleting(pod)


def _delete_gang(job: JobView) -> Iterator[DeleteGang]:
    if job.gang is not None and job.gang.exists:
        yield DeleteGang()


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


def mark_suspended(status: JobStatus, job: str, now: datetime) -> JobStatus:
    """Mark the job as suspended, which ends Running and Restarting and clears the start time."""
    status = set_condition(status, "Created", "True", "JobCreated", f"{job} is created", now)
    status = mark_idle(status, "JobSuspended", f"{job} is suspended", now)
    status = set_condition(status, "Suspended", "True", "JobSuspended", f"{job} is suspended", now)
    return msgspec.structs.replace(status, start_time=None)


def mark_running(status: JobStatus, message: str, now: datetime) -> JobStatus:
    return set_condition(_without(status, "Restarting"), "Running", "True", "JobRunning", message, now)


def mark_restarting(status: JobStatus, message: str, now: datetime) -> JobStatus:
    return set_condition(_without(status, "Running"), "Restarting", "True", "JobRestarting", message, now)


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


def transition_events(old: JobStatus, new: JobStatus) -> Iterator[JobEvent]:
    """Yield an Event for each condition that became true, and for the end of a suspension."""
    for condition in new.conditions:
        before = next((other for other in old.conditions if other.type == condition.type), None)
        was, now_is = before is not None and before.status == "True", condition.status == "True"
        if (now_is and not was) or (condition.type == "Suspended" and was and not now_is):
            yield JobEvent("Warning" if condition.type in _ALARMING else "Normal", condition.reason, condition.message)


def _without(status: JobStatus, kind: ConditionType) -> JobStatus:
    if status.condition(kind) is None:
        return status
    return msgspec.structs.replace(status, conditions=[c for c in status.conditions if c.type != kind])
