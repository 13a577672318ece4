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

Running and Restarting remove each other, and the end of a job makes Running false. Two things go beyond one replica.
With `restart_whole`, a failure marks the job, in the write that counts it, as restarting all; from then on every pod is
deleted and none is created, until the last one is gone and the mark is removed. A job whose pods were given a fixed
number of replicas reports, or restarts, when the spec has another number than its pods.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Literal, NamedTuple

import msgspec

from controllers.jobs.api import (
    Action,
    CreatePod,
    Decision,
    DeleteCompanion,
    DeleteGang,
    DeleteJob,
    DeletePod,
    JobEvent,
    JobView,
    SyncCompanion,
    SyncGang,
)
from controllers.jobs.replicas import (
    Slot,
    Verdict,
    counted,
    counts,
    deletions,
    exit_code,
    final_counts,
    former_sizes,
    has_failed,
    is_restarting,
    is_running,
    judge,
    limit_reached,
    new_failure,
    not_before,
    not_in_the_future,
    noted,
    place_of,
    service_actions,
    service_deletions,
    slots_of,
    surplus,
    suspended_counts,
)
from controllers.jobs.status import JobStatus, set_condition, whole_seconds, without_condition
from store.kube.api.objects import Object, has_ended, is_deleting, name_of, uid_of

_Moments = Iterable[datetime | None]

_ALARMING = ("Failed", "Restarting")


class Ending(NamedTuple):
    """The end of a job: the condition that becomes true, with its reason and message. `over_limit`: by a limit."""

    condition: Literal["Succeeded", "Failed"]
    reason: str
    message: str
    over_limit: bool = False


def decide(job: JobView, pods: Sequence[Object], services: Sequence[Object], now: datetime) -> Decision:
    """Decide the next step of one job. `pods`, `services`: all that it controls, including those being deleted."""
    if job.deleting:
        return Decision(job.status)
    if job.status.finished:
        return _finished(job, pods, services, now)
    if job.run_policy.suspend:
        return _suspended(job, pods, services, now)
    return _active(job, pods, services, now)


def _suspended(job: JobView, pods: Sequence[Object], services: Sequence[Object], now: datetime) -> Decision:
    reason, message = job.reason("Suspended"), job.text(job.wording.suspended)
    status = _mark_idle(_mark_created(job, now), reason, message, now)
    status = set_condition(status, "Suspended", "True", reason, message, now)
    status = msgspec.structs.replace(status, replica_statuses=suspended_counts(job, pods), restarting_all=False)
    lost, next_lost = lost_pods(job, pods, now)
    everything: list[Action] = [*deletions(pods, "suspended"), *service_deletions(services, "suspended")]
    return _decision(job, status, (*_groups_away(job), *everything, *lost), [next_lost], now)


def _active(job: JobView, pods: Sequence[Object], services: Sequence[Object], now: datetime) -> Decision:
    status = _mark_active(job, now)
    slots, events, restarting_all = _count_failures(job, slots_of(job, pods), now)
    ending = ending_of(job, slots, status.start_time, now)
    if ending is not None:
        status = _mark_idle(status, ending.reason, ending.message, now)
        if status.has("Blocked"):
            status = set_condition(status, "Blocked", "False", ending.reason, ending.message, now)
        status = set_condition(status, ending.condition, "True", ending.reason, ending.message, now)
        stopped = job.run_policy.clean_pod_policy != "None" or ending.over_limit
        final = final_counts(job, slots, succeeded=ending.condition == "Succeeded", stopped=stopped)
        status = msgspec.structs.replace(
            status,
            completion_time=whole_seconds(now),
            replica_statuses=final,
            over_limit=ending.over_limit,
            restarting_all=False,
        )
        return _ended(job, status, pods, services, now, events)
    resized = former_sizes(job, pods) if job.fixed_size else []  # under which pods of it still run
    restarting_all = (restarting_all or (job.restart_whole and bool(resized))) and bool(pods)
    if restarting_all:
        slots = [replace(slot, completed=False) for slot in slots]
    present = counts(job, slots, surplus(job, pods), starts_over=restarting_all)
    status = _with_state(job, status, slots, now)
    status = msgspec.structs.replace(status, replica_statuses=present, restarting_all=restarting_all)
    lost, next_lost = lost_pods(job, pods, now)
    due: list[Action]
    moments: list[datetime]
    if restarting_all:
        due, moments = [*deletions(pods, "restart")], []
    else:
        due, moments = _pod_actions(job, slots, pods, status.start_time, now)
    if (resize := _resize_event(job, resized, due)) is not None:
        events.append(resize)
    groups: list[Action] = []
    if job.gang is not None and not job.gang.current:
        groups.append(SyncGang(job.min_available))
    if job.companion is not None and job.companion.wanted and not job.companion.current:
        groups.append(SyncCompanion())
    elif job.companion is not None and job.companion.exists and not job.companion.wanted:
        groups.append(DeleteCompanion())
    actions = (*groups, *due, *lost, *service_actions(job, services))
    return _decision(job, status, actions, (deadline(job, status.start_time), next_lost, *moments), now, events)


def _count_failures(job: JobView, slots: Iterable[Slot], now: datetime) -> tuple[list[Slot], list[JobEvent], bool]:
    """Return the replicas with their new failures counted, Events about these, and whether all replicas restart.

    A failure that ends the job is not counted. While all replicas restart, each further failure is a consequence.
    """
    counting: list[Slot] = []
    events: list[JobEvent] = []
    restarting_all = job.status.restarting_all
    for slot in slots:
        slot = not_in_the_future(slot, now)
        pod = new_failure(slot)
        if pod is not None:
            events.append(JobEvent("Warning", "ExitedWithCode", describe_failure(job, pod)))
            verdict = _verdict(job, slot, pod)
            if job.status.restarting_all or _is_left(job, slot):
                slot = noted(slot, pod)
            elif verdict != "permanent":
                slot = noted(slot, pod) if restarting_all else counted(slot, pod, verdict, now)
                restarting_all = job.restart_whole
        counting.append(slot)
    return counting, events, restarting_all


def _verdict(job: JobView, slot: Slot, pod: Object) -> Verdict:
    return judge(pod, slot.spec.restart_policy, job.default_container, job.is_retryable)


def _is_left(job: JobView, slot: Slot) -> bool:
    """Return whether the replica has failed for good, and the job goes on without it."""
    if slot.type not in job.ignored_types or slot.pod is None or not has_failed(slot.pod):
        return False
    return _verdict(job, slot, slot.pod) == "permanent"


def _resize_event(job: JobView, sizes: Sequence[Mapping[str, int]], actions: Iterable[Action]) -> JobEvent | None:
    """Return an Event if these actions bring a job of fixed size to another number of replicas."""
    former = {name: size[name] for size in sizes for name in size}
    changing = any(
        (isinstance(action, DeletePod) and action.reason == ("restart" if job.restart_whole else "surplus"))
        or (isinstance(action, CreatePod) and action.index >= former.get(action.type, action.index + 1))
        for action in actions
    )
    changes = [
        f"{name} from {count} to {spec.replicas}"
        for name, count in former.items()
        if (spec := job.replica_specs.get(name)) is not None and spec.replicas != count
    ]
    if not changing or not changes:
        return None
    outcome = "all pods are restarted" if job.restart_whole else "pods that run already keep the former numbers"
    message = f"The replicas of {job.kind} {job.name} changed in a run ({', '.join(changes)}); {outcome}"
    return JobEvent("Warning", "ReplicasChanged", message)


def _groups_away(job: JobView) -> Iterator[Action]:
    """Yield what deletes the gang and the companion of a job that has no pods to run."""
    if job.gang is not None and job.gang.exists:
        yield DeleteGang()
    if job.companion is not None and job.companion.exists:
        yield DeleteCompanion()


def _finished(job: JobView, pods: Sequence[Object], services: Sequence[Object], now: datetime) -> Decision:
    """Decide about a finished job. Only this function deletes the job, after its final status has been stored."""
    status = job.status
    if status.completion_time is None:  # another writer left it out
        ending = status.condition("Succeeded") if status.has("Succeeded") else status.condition("Failed")
        ended = ending.last_transition_time if ending is not None else None
        status = msgspec.structs.replace(status, completion_time=ended or whole_seconds(now))
    expiry = expiry_of(job, status)
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
    policy = job.run_policy.clean_pod_policy
    if policy == "None" and status.over_limit:
        policy = "Running"
    actions = [*_groups_away(job)]
    if policy != "None":
        stays: list[Object] = []
        goes: list[Object] = []
        for pod in pods:
            ended = policy == "Running" and has_ended(pod) and not is_deleting(pod)
            (stays if ended else goes).append(pod)
        places = {place_of(job, pod) for pod in stays} - {None}
        actions += deletions(goes, "clean-up")
        actions += service_deletions((entry for entry in services if place_of(job, entry) not in places), "clean-up")
    return _decision(job, status, (*actions, *lost), (expiry_of(job, status), next_lost), now, events)


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
        news = (now_is and not was) or (condition.type == "Suspended" and was and not now_is)
        if news and condition.type not in job.wording.silent:
            severity: Literal["Normal", "Warning"] = "Warning" if condition.type in _ALARMING else "Normal"
            transitions.append(JobEvent(severity, condition.reason, condition.message))
    return Decision(status, actions, next_wake, (*events, *transitions))


def _with_state(job: JobView, status: JobStatus, slots: Sequence[Slot], now: datetime) -> JobStatus:
    """Set Restarting while a failed replica is not running again; else Running while a deciding pod runs, or any; else
    neither.
    """
    running, since = status.condition("Running"), status.start_time
    if running is not None and running.status == "True" and running.last_transition_time is not None:
        since = max(since or running.last_transition_time, running.last_transition_time)
    restarting = [slot for slot in slots if is_restarting(slot, since)]
    if restarting:
        first, status = restarting[0], without_condition(status, "Running")
        alike = sum(slot.type == first.type for slot in restarting)
        message = job.text(job.wording.restarting, type=first.type, index=first.index, count=alike)
        return set_condition(status, "Restarting", "True", job.reason("Restarting"), message, now)
    deciding = _deciding(job, slots) if job.leaders_only else slots
    if any(slot.pod is not None and is_running(slot.pod) for slot in deciding):
        status = without_condition(status, "Restarting")
        if status.has("Running"):
            return status
        return set_condition(status, "Running", "True", job.reason("Running"), job.text(job.wording.running), now)
    if not job.wording.pending:
        return status
    return _mark_idle(status, job.reason("Pending"), job.text(job.wording.pending), now)


def expiry_of(job: JobView, status: JobStatus) -> datetime | None:
    """Return when the time to live of an ended job has passed, or None without one."""
    return later(status.completion_time, job.run_policy.ttl_seconds_after_finished)


def later(moment: datetime | None, seconds: float | None) -> datetime | None:
    """Return the time that many seconds later; None, which means never, without one or after the year 9999."""
    if moment is None or seconds is None:
        return None
    try:
        return moment + timedelta(seconds=seconds)
    except OverflowError:
        return None


def _pod_actions(
    job: JobView, slots: Sequence[Slot], pods: Sequence[Object], start: datetime | None, now: datetime
) -> tuple[list[Action], list[datetime]]:
    """Return what is due for pods, and when the rest is. A pod being deleted keeps the name of its successor."""
    actions: list[Action] = [*deletions(surplus(job, pods), "surplus")]
    for slot in slots:
        actions += deletions(slot.duplicates, "duplicate")
        if slot.pod is not None and has_failed(slot.pod) and not slot.completed and not _is_left(job, slot):
            actions += deletions([slot.pod], "restart")
    if _held(job):
        return actions, []
    ends = {id(slot): not_before(slot, job.backoff, start) for slot in slots}
    together = max((end for end in ends.values() if end is not None), default=None) if job.restart_whole else None
    moments: list[datetime] = []
    missing = {slot.type for slot in slots if not has_address(slot)}
    waiting = {kind for kind, first in job.create_after.items() if first in missing}
    for slot in slots:
        if slot.pod is None and not slot.completed and slot.type not in waiting:
            due = together or ends[id(slot)]
            if due is None or now >= due:
                actions.append(CreatePod(slot.type, slot.index))
            else:
                moments.append(due)
    return actions, moments


def _held(job: JobView) -> bool:
    """Return whether the gang's scheduler has not admitted it yet."""
    return job.gang is not None and job.gang.holds_creation


def has_address(slot: Slot) -> bool:
    """Return whether the replica can be found by others, or need not be found any more."""
    return slot.succeeded or (slot.pod is not None and bool((slot.pod.get("status") or {}).get("podIP")))


def ending_of(job: JobView, slots: Sequence[Slot], start: datetime | None, now: datetime) -> Ending | None:
    """Return how the job ends now, or None while it continues. `slots` have the failures of their pods counted."""
    if why := _success(job, slots):
        return Ending("Succeeded", job.reason("Succeeded"), job.text(job.wording.succeeded, why=why))
    reason = job.reason("Failed")
    for slot in slots:
        pod = new_failure(slot)
        if pod is not None and _verdict(job, slot, pod) == "permanent":
            failed = [other for other in slots if other.type == slot.type and other.pod and has_failed(other.pod)]
            why = f"{slot.type} {slot.index}: {describe_failure(job, pod)}"
            message = job.text(job.wording.failed, type=slot.type, index=slot.index, count=len(failed), why=why)
            return Ending("Failed", reason, message)
    if why := limit_reached(job, slots):
        message = job.text(job.wording.backoff, why=why)
        return Ending("Failed", job.wording.backoff_reason or reason, message, over_limit=True)
    due = deadline(job, start)
    if due is not None and now >= due:
        why = f"it was active for longer than {job.run_policy.active_deadline_seconds} s"
        message = job.text(job.wording.deadline, why=why)
        return Ending("Failed", job.wording.deadline_reason or reason, message, over_limit=True)
    return None


def deadline(job: JobView, start: datetime | None) -> datetime | None:
    """Return when the job's active deadline passes, or None without one."""
    return later(start, job.run_policy.active_deadline_seconds)


def _deciding(job: JobView, slots: Sequence[Slot]) -> Sequence[Slot]:
    """Return the replicas that decide about the job: chiefs; without them the workers; without those all, or none."""
    chiefs = [slot for slot in slots if slot.type in job.chief_types]
    workers = [slot for slot in slots if slot.type == job.worker_type]
    return chiefs or workers or (() if job.leaders_only else slots)


def _success(job: JobView, slots: Sequence[Slot]) -> str:
    """Return why the job has succeeded, or ""."""
    deciding = _deciding(job, slots)
    if deciding and deciding[0].type not in job.chief_types and deciding[0].type == job.worker_type:
        sufficing = {"FirstWorker": deciding[:1], "AnyWorker": deciding, "AllWorkers": ()}[job.success_rule]
        if (first := next((slot for slot in sufficing if slot.succeeded), None)) is not None:
            return f"{first.type} {first.index} has succeeded"
    if not deciding or not all(slot.succeeded for slot in deciding):
        return ""
    return f"all of {', '.join(dict.fromkeys(slot.type for slot in deciding))} have succeeded"


def describe_failure(job: JobView, pod: Object) -> str:
    """Return a phrase that names the failed pod, its exit code, and its status' reason and message."""
    status, code = pod.get("status", {}), exit_code(pod, job.default_container)
    ended = job.text(job.wording.exited, pod=name_of(pod), code=code) if code is not None else ""
    said = ": ".join(part for part in (status.get("reason"), status.get("message")) if part)
    return f"{ended or f'pod {name_of(pod)} failed'}{f' ({said})' if said else ''}"


def lost_pods(job: JobView, pods: Iterable[Object], now: datetime) -> tuple[list[DeletePod], datetime | None]:
    """Return forced deletions of the pods whose kubelet has not confirmed their end within the time that the job
    allows, and when the next pod is due.
    """
    lost: list[DeletePod] = []
    moments: list[datetime] = []
    for pod in pods:
        stamp = pod["metadata"].get("deletionTimestamp")  # the end of its grace period
        if job.force_delete_after is None or not stamp:
            continue
        if pod["metadata"].get("deletionGracePeriodSeconds") == 0:
            continue  # it is forced: the deletion waits only for finalizers, not for the kubelet
        due = later(datetime.fromisoformat(stamp), job.force_delete_after)
        if due is None:
            continue
        if now >= due:
            lost.append(DeletePod(name_of(pod), uid_of(pod), "node lost", force=True))
        else:
            moments.append(due)
    return lost, min(moments, default=None)


def _mark_created(job: JobView, now: datetime) -> JobStatus:
    if job.status.has("Created"):
        return job.status
    return set_condition(job.status, "Created", "True", job.reason("Created"), job.text(job.wording.created), now)


def _mark_active(job: JobView, now: datetime) -> JobStatus:
    """Mark the job as created and not suspended. Its start time is its first activity or last resumption; it does not
    begin while its gang's scheduler holds it. A start in the future, after the clock was set back, becomes the present.
    """
    status, resumed = _mark_created(job, now), job.status.has("Suspended")
    if resumed:
        message = job.text(job.wording.resumed)
        status = set_condition(status, "Suspended", "False", job.reason("Resumed"), message, now)
    if resumed or status.start_time is None or status.start_time > now:
        status = msgspec.structs.replace(status, start_time=None if _held(job) else whole_seconds(now))
    return status


def _mark_idle(status: JobStatus, reason: str, message: str, now: datetime) -> JobStatus:
    """Mark the job as neither Running nor Restarting. A status with neither condition stays as it is."""
    if status.condition("Running") is None and status.condition("Restarting") is None:
        return status
    status = without_condition(status, "Restarting")
    return set_condition(status, "Running", "False", reason, message, now)
