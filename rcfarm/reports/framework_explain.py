"""Explain why a Framework and its tasks do not progress. Pure: reads only its arguments.

The Framework's own reasons come first, from outside to inside: whether an operator leads, whether it may create
objects, whether the gang is whole, how the last attempt ended. A task's reasons are those of its pod, unless the
Framework's reasons contain them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import datetime, timedelta

from controllers.framework.api.types import (
    EXECUTION_CREATE,
    EXECUTION_START,
    EXECUTION_STOP,
    NEVER_RETRIED,
    Framework,
    FrameworkStatus,
    RetryPolicyStatus,
    State,
    TaskRoleStatus,
    TaskStatus,
    Trigger,
    is_failed,
    is_succeeded,
)
from controllers.framework.barrier.gang import BadView, Identity, decompressed, look_at, view_of
from controllers.framework.step.attempts import force_deadline
from controllers.framework.step.step import CREATION_BLOCKED
from rcfarm.operations.fleet import listed
from rcfarm.reports.framework import NO_STATE, blockage
from rcfarm.reports.jobs import JobReason, ObservedObjects, job_reason, of_pod, said, why_nobody_leads
from store.kube.api.objects import Object, uid_of
from store.schema.records import Reason, rfc3339

_ENDED = (State.ATTEMPT_COMPLETED, State.COMPLETED)
_LEAVING = (State.DELETION_PENDING, State.DELETION_REQUESTED, State.DELETING)
_NEVER_FORCED = "the task has no podGracefulDeletionTimeoutSec after which it would be deleted by force"
_IN_STATUS = frozenset({"FrameworkRetry", "FrameworkCompleted"})  # Events that repeat the status


def explain(framework: Framework, raw: Object, observed: ObservedObjects) -> list[JobReason]:
    """Return the reasons, one per thing that is waited for. `raw`: the Framework as it was read."""
    status = framework.status
    if status is None:
        reasons = [Reason("job_unusable", f"its spec can't be used: {problem}") for problem in framework.problems]
        if why := why_nobody_leads(observed):
            reasons.append(why)
        elif not framework.problems:
            text = (
                "no operator has taken it up yet: check that the one that leads watches this namespace "
                "(kube.namespaces), and what its /readyz says"
            )
            reasons.append(Reason("not_taken_up", text, since=raw["metadata"].get("creationTimestamp") or ""))
        return [job_reason("framework", NO_STATE, reason) for reason in reasons]
    reasons = list(_of_framework(framework, status, raw, observed))
    reasons += said(observed.warnings, framework.uid, reasons, _IN_STATUS)
    found = [job_reason("framework", str(status.state), reason) for reason in reasons]
    for role in status.roles:
        for task in role.tasks:
            pod = observed.pods.get(task.attempt_status.pod_name)
            if pod is not None and uid_of(pod) != task.attempt_status.pod_uid:
                pod = None  # another attempt's, or not recorded yet
            reasons = list(_of_task(framework, role, task, pod, observed.now))
            if pod is not None and task.state == State.PREPARING:
                reasons += said(observed.warnings, uid_of(pod), reasons, _IN_STATUS)
            found += [
                job_reason(f"{role.name}-{task.index}", str(task.state), reason) for reason in dict.fromkeys(reasons)
            ]
    return found


def _of_framework(
    framework: Framework, status: FrameworkStatus, raw: Object, observed: ObservedObjects
) -> Iterator[Reason]:
    outcome = status.attempt_status.completion_status
    if status.state != State.COMPLETED:
        if why := why_nobody_leads(observed):
            yield why
        if framework.deleting:
            since = raw["metadata"]["deletionTimestamp"]
            text = f"it is being deleted since {since}, and waits until its pods are gone"
            yield Reason("job_deleting", text, since=since)
        for problem in framework.problems:
            yield Reason("job_unusable", f"its spec can't be used, nothing new is created: {problem}")
        if framework.spec.execution_type == EXECUTION_CREATE and not framework.problems:
            yield Reason("start_awaited", "its executionType is Create: set it to Start to run it")
        if framework.spec.execution_type == EXECUTION_STOP and status.attempt_status.completion_status is None:
            yield Reason("job_stopping", "it is asked to stop")
        if blocked := blockage(framework):
            since = rfc3339(blocked.last_transition_time)
            text = f"{blocked.reason} since {since}, retried: {blocked.message}"
            yield Reason("creation_blocked", text, since=since)
        if not any(role.task_number for role in framework.spec.task_roles) and not framework.problems:
            yield Reason("no_tasks", "it has no tasks, so it never completes")
        statuses = [pod.get("status") or {} for pod in observed.pods.values()]
        init_containers = [each for found in statuses for each in found.get("initContainerStatuses") or ()]
        if any("running" in (each.get("state") or {}) for each in init_containers):  # barriers, which may hold the gang
            gang = None
            with contextlib.suppress(BadView):
                gang = look_at(view_of(decompressed(raw)), Identity())
            if gang and gang.missing:
                missing = listed(gang.missing, 5)
                text = f"the gang is not whole, {gang.ready} of {gang.total} are there; missing: {missing}"
                yield Reason("gang_incomplete", text)
    elif not framework.spec.task_roles:
        yield Reason("job_ended", "it had no tasks")
    if outcome is not None:
        trigger = outcome.trigger if isinstance(outcome.trigger, Trigger) else None
        text = f"attempt {status.attempt_status.id} ended: {outcome.phrase} ({outcome.code})"
        if trigger is not None and trigger.task_role_name:
            text += f", by {trigger.task_role_name}-{trigger.task_index}"
        details = (trigger.message if trigger else "", outcome.diagnostics)
        code = end_code(status)
        since = rfc3339(status.completion_time or status.transition_time) if status.state in _ENDED else ""
        yield Reason(code, ": ".join([text, "; ".join(filter(None, details))]).removesuffix(": "), since=since)
    if status.state in _LEAVING:
        text = f"it waits until the pods of the attempt are gone: {listed(sorted(observed.pods), 5) or 'none is left'}"
        yield Reason("pods_leaving", text)
    if status.state == State.ATTEMPT_COMPLETED:
        yield from _retry(status.retry_policy_status, status.transition_time)


def end_code(status: FrameworkStatus) -> str:
    """Return the code of the reason for the end of the last attempt; "" if it has not ended."""
    outcome = status.attempt_status.completion_status
    if outcome is None:
        return ""
    if not is_failed(outcome):
        return "job_ended"
    return "job_failed" if status.state == State.COMPLETED else "attempt_failed"


CODES = ("creation_blocked", "attempt_failed", "job_failed", "retry_delayed", "pods_leaving")


def codes_of(status: FrameworkStatus) -> Iterator[str]:
    """Yield the codes of the reasons that a Framework's status alone shows: some of `CODES`."""
    conditions = status.conditions or ()
    if any(each.type == CREATION_BLOCKED and each.status == "True" for each in conditions):
        yield "creation_blocked"
    if (code := end_code(status)) in CODES:
        yield code
    if status.state == State.ATTEMPT_COMPLETED and status.retry_policy_status.retry_delay_sec is not None:
        yield "retry_delayed"
    if status.state in _LEAVING:
        yield "pods_leaving"


def _retry(policy: RetryPolicyStatus, since: datetime) -> Iterator[Reason]:
    if policy.retry_delay_sec is not None:
        due = rfc3339(since + timedelta(seconds=policy.retry_delay_sec))
        text = f"it is tried again at {due}, {policy.retry_delay_sec} seconds after the attempt ended"
        yield Reason("retry_delayed", text, since=rfc3339(since), until=due)


def _of_task(
    framework: Framework, role: TaskRoleStatus, task: TaskStatus, pod: Object | None, now: datetime
) -> Iterator[Reason]:
    outcome = task.attempt_status.completion_status
    if outcome is not None and not is_succeeded(outcome) and outcome.code not in NEVER_RETRIED:
        text = f"{outcome.phrase} ({outcome.code}): {outcome.diagnostics}".removesuffix(": ")
        yield Reason("task_attempt_failed", text)
    if task.deletion_pending:
        yield Reason("scaled_away", "it was scaled away, and leaves when its pod is gone")
    may_create = framework.spec.execution_type == EXECUTION_START and not framework.problems
    if task.state == State.CREATION_PENDING and may_create:  # otherwise a reason of the Framework says it
        if blockage(framework):
            yield Reason("pod_awaited", "its pod could not be created yet, see the Framework's reason")
        elif framework.status and framework.status.attempt_status.config_map_uid:
            yield Reason("pod_awaited", "its pod is to be created")
        else:
            yield Reason("pod_awaited", "it waits for the ConfigMap of the attempt")
    if task.state == State.CREATION_REQUESTED and pod is None:
        yield Reason("pod_awaited", "its pod was created, but the operator has not seen it yet")
    if task.state == State.ATTEMPT_COMPLETED:
        yield from _retry(task.retry_policy_status, task.transition_time)
    if pod is not None and task.state not in _ENDED:
        yield from of_pod(pod, force_deadline(pod, role), _NEVER_FORCED, now)
