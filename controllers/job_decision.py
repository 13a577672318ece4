"""What happens to a job next: a pure decision over its spec and status, its pods, its services and the time.

A job is in one of four situations, and each has its own small plan:

- *being deleted*: nothing; the garbage collector takes what it owns;
- *finished*: clean up, and delete it when its time to live is over. Its status does not change again;
- *suspended*: everything goes, and the job starts over when it is resumed;
- *active*: count the failures that are new; end the job if it is over (`job_end`); else make its pods and services what
  the spec says (`job_replicas`), with the restarts that are allowed (`job_restart`).

Deciding again after the actions were taken decides nothing more. Source: the reconcile order of kubeflow's common
JobController; where that decides type by type, and the last one wins, this decides once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta

import msgspec

from controllers.job_cleanup import after_the_end, lost_pods, next_lost, while_suspended
from controllers.job_conditions import (
    mark_active,
    mark_finished,
    mark_idle,
    mark_restarting,
    mark_running,
    mark_suspended,
    transition_events,
)
from controllers.job_counts import counts, final_counts, idle_counts
from controllers.job_end import Ending, deadline, describe_failure, ending_of
from controllers.job_pods import has_failed, is_running
from controllers.job_replicas import Slot, deletions, service_actions, slots_of, surplus
from controllers.job_restart import counted, is_restarting, judge, new_failure, not_before
from controllers.job_status import JobStatus, whole_seconds
from controllers.job_types import Action, CreatePod, Decision, DeleteJob, JobEvent, JobView, SyncGang
from store.kube.objects import Object

_Moments = Iterable[datetime | None]


def decide(job: JobView, pods: Sequence[Object], services: Sequence[Object], now: datetime) -> Decision:
    """The next step of one job. `pods`, `services`: all that it controls, those on their way out included."""
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
    exits = _exits(job, found)
    if ending is not None:
        return _ended(job, _with_ending(job, status, ending, slots, now), pods, services, now, exits)
    status = msgspec.structs.replace(_with_state(job, status, slots, now), replica_statuses=counts(job, slots))
    actions = (*_gang_actions(job), *_pod_actions(job, slots, pods, now), *service_actions(job, services))
    moments = (deadline(job, status.start_time), next_lost(job, pods, now), *_restart_times(job, slots, now))
    return _decision(job, status, actions, moments, now, exits)


def _suspended(job: JobView, pods: Sequence[Object], services: Sequence[Object], now: datetime) -> Decision:
    status = mark_suspended(job.status, job.title, now)
    status = msgspec.structs.replace(status, replica_statuses=idle_counts(job, slots_of(job, pods)))
    actions = (*while_suspended(job, pods, services), *lost_pods(job, pods, now))
    return _decision(job, status, actions, [next_lost(job, pods, now)], now)


def _finished(job: JobView, pods: Sequence[Object], services: Sequence[Object], now: datetime) -> Decision:
    """Deletion is decided here only: the end is on record before the job, and all that tells of it, goes."""
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
    """The slot with its pod's failure on record; a failure that ends the job is not one to count."""
    pod = new_failure(slot)
    verdict = "permanent" if pod is None else judge(pod, slot.spec.restart_policy, job.default_container)
    return slot if pod is None or verdict == "permanent" else counted(slot, pod, verdict, now)


def _exits(job: JobView, slots: Iterable[Slot]) -> list[JobEvent]:
    failed = [pod for slot in slots if (pod := new_failure(slot)) is not None]
    return [JobEvent("Warning", "ExitedWithCode", describe_failure(pod, job.default_container)) for pod in failed]


def _with_state(job: JobView, status: JobStatus, slots: Sequence[Slot], now: datetime) -> JobStatus:
    """Restarting while a replica that failed is not back; else Running while any pod runs."""
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
    """A finished status with the time of its end, also when whoever wrote it left that out."""
    if status.completion_time is not None:
        return status
    ending = status.condition("Succeeded") if status.has("Succeeded") else status.condition("Failed")
    ended = ending.last_transition_time if ending is not None else None
    return msgspec.structs.replace(status, completion_time=ended or whole_seconds(now))


def _expiry(job: JobView, status: JobStatus) -> datetime | None:
    ttl = job.run_policy.ttl_seconds_after_finished
    return None if ttl is None or status.completion_time is None else status.completion_time + timedelta(seconds=ttl)


def _gang_actions(job: JobView) -> Iterator[Action]:
    if job.gang is not None and not job.gang.current:
        yield SyncGang(job.min_available)


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
    """Whether nothing but time may hold back a pod: one that is still on its way out has the name of its successor."""
    return slot.pod is None and not (job.gang is not None and job.gang.holds_creation)
