"""Explain why a training job and its replicas do not progress. Pure: reads only its arguments.

The job's own reasons come first, from outside to inside: whether an operator leads and minds the job, whether its spec
can be used, how it ended and what happens then. A replica's reasons are those of its pod, or why it has none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime

from controllers.jobs.api import BadSpec, JobView
from controllers.jobs.decision import deadline, describe_failure, expiry_of, has_address, later
from controllers.jobs.replicas import Slot, has_failed, not_before, slots_of
from controllers.jobs.status import BadStatus
from controllers.training.kind import TrainingJobs
from rcfarm.operations.fleet import listed
from rcfarm.reports.jobs import JobReason, ObservedObjects, job_reason, of_pod, said, why_nobody_leads
from rcfarm.reports.training import NO_STATE, replica_name, replica_state, state_of, training_info
from store.kube.api.objects import Object, PodPhase, name_of, phase_of, uid_of
from store.schema.records import Reason, rfc3339

_IN_STATUS = frozenset({"ExitedWithCode"})  # Events that repeat what the status and the pods say
_NEVER_FORCED = "it is deleted by force only if the operator's jobs.force_delete_after is set"


def explain(kind: TrainingJobs, job: Object, groups: Sequence[Object], observed: ObservedObjects) -> list[JobReason]:
    """Return the reasons, one per thing that is waited for. `groups`: the job's gang objects, at most one of each
    kind."""
    info, subject = training_info(kind, job), kind.resource.kind.lower()
    if info.managed_by:
        other = f"spec.runPolicy.managedBy is {info.managed_by}: this operator leaves the job to that controller"
        return [job_reason(subject, info.state, Reason("managed_elsewhere", other))]
    try:
        view = kind.view(job)
    except (BadSpec, BadStatus) as error:
        reasons = [Reason("job_unusable", f"it can't be used, and its pods are left as they are: {error}")]
        if why := why_nobody_leads(observed):
            reasons.insert(0, why)
        return [job_reason(subject, info.state, reason) for reason in reasons]
    pods = list(observed.pods.values())
    slots = slots_of(view, pods)
    reasons = list(_of_job(view, job, groups, observed))
    reasons += said(observed.warnings, uid_of(job), reasons, _IN_STATUS | {f"{kind.resource.kind}Restarting"})
    found = [job_reason(subject, state_of(view.status), reason) for reason in reasons]
    if view.status.finished or view.run_policy.suspend or view.deleting:
        return found
    missing = [slot for slot in slots if slot.pod is None and not slot.completed]
    is_held = any(_is_pending(group) for group in groups) and len(missing) == len(slots)
    for slot in slots:
        reasons = list(_of_replica(view, slot, slots, is_held=is_held, now=observed.now))
        if slot.pod is not None and phase_of(slot.pod) == PodPhase.PENDING:
            reasons += said(observed.warnings, uid_of(slot.pod), reasons)
        found += [
            job_reason(replica_name(slot), replica_state(view, slot), reason) for reason in dict.fromkeys(reasons)
        ]
    return found


def _of_job(view: JobView, job: Object, groups: Sequence[Object], observed: ObservedObjects) -> Iterator[Reason]:
    status, policy = view.status, view.run_policy
    if (why := why_nobody_leads(observed)) and not status.finished:
        yield why
    elif state_of(status) == NO_STATE and not view.deleting:
        text = (
            "no operator has taken it up yet: check that the one that leads runs this kind (--kinds) and watches this "
            "namespace (kube.namespaces), and what its /readyz says"
        )
        yield Reason("not_taken_up", text, since=job["metadata"].get("creationTimestamp") or "")
    if view.deleting:
        stopping = listed(sorted(observed.pods), 5) or "none is left"
        deleted = job["metadata"]["deletionTimestamp"]
        text = f"it is being deleted since {deleted}; its pods go with it: {stopping}"
        yield Reason("job_deleting", text, since=deleted)
        return
    if status.finished:
        ending = status.condition("Failed") if status.has("Failed") else status.condition("Succeeded")
        assert ending is not None
        at = rfc3339(ending.last_transition_time) if ending.last_transition_time else ""
        yield Reason("job_failed" if status.has("Failed") else "job_ended", f"it has ended: {ending.message}", since=at)
        if (due := expiry_of(view, status)) is not None:
            text = f"it is deleted at {rfc3339(due)} (spec.runPolicy.ttlSecondsAfterFinished)"
            yield Reason("job_expires", text, until=rfc3339(due))
        return
    blocked = status.condition("Blocked")
    if blocked is not None and blocked.status == "True":
        since = rfc3339(blocked.last_transition_time) if blocked.last_transition_time else ""
        text = f"{blocked.reason}{f' since {since}' if since else ''}: {blocked.message}"
        yield Reason("creation_blocked", text, since=since)
    if policy.suspend:
        left = f"; its pods have not all ended: {listed(sorted(observed.pods), 5)}" if observed.pods else ""
        yield Reason("job_suspended", f"it is suspended (spec.runPolicy.suspend){left}")
        return
    for group in groups:
        if _is_pending(group):
            phase = (group.get("status") or {}).get("phase") or "not set yet"
            text = f"its {group['kind']} {name_of(group)} is not admitted by the scheduler: its phase is {phase}"
            yield Reason("gang_not_admitted", text)
    limit = deadline(view, status.start_time)
    if limit is not None and not status.has("Running"):
        text = f"it fails at {rfc3339(limit)} unless it has ended (spec.runPolicy.activeDeadlineSeconds)"
        yield Reason("deadline_near", text, until=rfc3339(limit))


def _is_pending(group: Object) -> bool:
    """Return whether a Volcano PodGroup waits for its admission; no pod is created before."""
    phase = (group.get("status") or {}).get("phase")
    return str(group.get("apiVersion", "")).startswith("scheduling.volcano.sh/") and phase in (None, "", "Pending")


def _of_replica(view: JobView, slot: Slot, slots: Sequence[Slot], *, is_held: bool, now: datetime) -> Iterator[Reason]:
    pod = slot.pod
    if pod is not None:
        if has_failed(pod):
            text = f"{describe_failure(view, pod)}; the policy is {slot.spec.restart_policy}"
            yield Reason("task_attempt_failed", text)
        if phase_of(pod) not in (PodPhase.SUCCEEDED, PodPhase.FAILED):
            after = view.force_delete_after
            ends = pod["metadata"].get("deletionTimestamp")
            forced = later(datetime.fromisoformat(ends), after) if ends else None
            yield from of_pod(pod, forced, _NEVER_FORCED, now)
        return
    if slot.completed:
        return
    failed = slot.retry.failures + slot.retry.disruptions
    due, leader = not_before(slot, view.backoff, view.status.start_time), view.create_after.get(slot.type)
    waits = [other for other in slots if other.type == leader and not has_address(other)]
    if is_held:
        yield Reason("pod_awaited", "its pod is created once the gang is admitted")
    elif due is not None and now < due:
        text = f"its pod is created again at {rfc3339(due)}, the back-off after {failed} failed pods"
        yield Reason("retry_delayed", text, until=rfc3339(due))
    elif waits:
        yield Reason("pod_awaited", f"its pod is created once {', '.join(map(replica_name, waits))} has an address")
    elif state_of(view.status) not in (NO_STATE, "Blocked"):  # whose reasons say why it can't be
        yield Reason("pod_awaited", "its pod is to be created")
