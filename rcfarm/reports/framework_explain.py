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
    is_succeeded,
)
from controllers.framework.barrier.gang import BadView, Identity, decompressed, look_at, view_of
from controllers.framework.step.attempts import force_deadline
from rcfarm.operations.fleet import listed
from rcfarm.reports.framework import NO_STATE, blockage
from rcfarm.reports.jobs import JobReason, ObservedObjects, of_pod, said, why_nobody_leads
from store.kube.api.objects import Object, uid_of
from store.schema.records import rfc3339

_ENDED = (State.ATTEMPT_COMPLETED, State.COMPLETED)
_LEAVING = (State.DELETION_PENDING, State.DELETION_REQUESTED, State.DELETING)
_NEVER_FORCED = "the task has no podGracefulDeletionTimeoutSec after which it would be deleted by force"
_IN_STATUS = frozenset({"FrameworkRetry", "FrameworkCompleted"})  # Events that repeat the status


def explain(framework: Framework, raw: Object, observed: ObservedObjects) -> list[JobReason]:
    """Return the reasons, one per thing that is waited for. `raw`: the Framework as it was read."""
    status = framework.status
    if status is None:
        reasons = [f"its spec can't be used: {problem}" for problem in framework.problems]
        if why := why_nobody_leads(observed):
            reasons.append(why)
        elif not framework.problems:
            reasons.append(
                "no operator has taken it up yet: check that the one that leads watches this namespace "
                "(kube.namespaces), and what its /readyz says"
            )
        return [_about(NO_STATE, reason) for reason in reasons]
    reasons = list(_of_framework(framework, status, raw, observed))
    reasons += said(observed.warnings, framework.uid, reasons, _IN_STATUS)
    found = [_about(str(status.state), reason) for reason in reasons]
    for role in status.roles:
        for task in role.tasks:
            pod = observed.pods.get(task.attempt_status.pod_name)
            if pod is not None and uid_of(pod) != task.attempt_status.pod_uid:
                pod = None  # another attempt's, or not recorded yet
            reasons = list(_of_task(framework, role, task, pod, observed.now))
            if pod is not None and task.state == State.PREPARING:
                reasons += said(observed.warnings, uid_of(pod), reasons, _IN_STATUS)
            found += [
                JobReason(subject=f"{role.name}-{task.index}", state=str(task.state), reason=reason)
                for reason in dict.fromkeys(reasons)
            ]
    return found


def _about(state: str, reason: str) -> JobReason:
    return JobReason(subject="framework", state=state, reason=reason)


def _of_framework(
    framework: Framework, status: FrameworkStatus, raw: Object, observed: ObservedObjects
) -> Iterator[str]:
    outcome = status.attempt_status.completion_status
    if status.state != State.COMPLETED:
        if why := why_nobody_leads(observed):
            yield why
        if framework.deleting:
            yield f"it is being deleted since {raw['metadata']['deletionTimestamp']}, and waits until its pods are gone"
        for problem in framework.problems:
            yield f"its spec can't be used, nothing new is created: {problem}"
        if framework.spec.execution_type == EXECUTION_CREATE and not framework.problems:
            yield "its executionType is Create: set it to Start to run it"
        if framework.spec.execution_type == EXECUTION_STOP and status.attempt_status.completion_status is None:
            yield "it is asked to stop"
        if blocked := blockage(framework):
            since = blocked.last_transition_time
            yield f"{blocked.reason} since {rfc3339(since)}, retried: {blocked.message}"
        if not any(role.task_number for role in framework.spec.task_roles) and not framework.problems:
            yield "it has no tasks, so it never completes"
        statuses = [pod.get("status") or {} for pod in observed.pods.values()]
        init_containers = [each for found in statuses for each in found.get("initContainerStatuses") or ()]
        if any("running" in (each.get("state") or {}) for each in init_containers):  # barriers, which may hold the gang
            gang = None
            with contextlib.suppress(BadView):
                gang = look_at(view_of(decompressed(raw)), Identity())
            if gang and gang.missing:
                missing = listed(gang.missing, 5)
                yield f"the gang is not whole, {gang.ready} of {gang.total} are there; missing: {missing}"
    elif not framework.spec.task_roles:
        yield "it had no tasks"
    if outcome is not None:
        trigger = outcome.trigger if isinstance(outcome.trigger, Trigger) else None
        text = f"attempt {status.attempt_status.id} ended: {outcome.phrase} ({outcome.code})"
        if trigger is not None and trigger.task_role_name:
            text += f", by {trigger.task_role_name}-{trigger.task_index}"
        details = (trigger.message if trigger else "", outcome.diagnostics)
        yield ": ".join([text, "; ".join(filter(None, details))]).removesuffix(": ")
    if status.state in _LEAVING:
        yield f"it waits until the pods of the attempt are gone: {listed(sorted(observed.pods), 5) or 'none is left'}"
    if status.state == State.ATTEMPT_COMPLETED:
        yield from _retry(status.retry_policy_status, status.transition_time)


def _retry(policy: RetryPolicyStatus, since: datetime) -> Iterator[str]:
    if policy.retry_delay_sec is not None:
        due = since + timedelta(seconds=policy.retry_delay_sec)
        yield f"it is tried again at {rfc3339(due)}, {policy.retry_delay_sec} seconds after the attempt ended"


def _of_task(
    framework: Framework, role: TaskRoleStatus, task: TaskStatus, pod: Object | None, now: datetime
) -> Iterator[str]:
    outcome = task.attempt_status.completion_status
    if outcome is not None and not is_succeeded(outcome) and outcome.code not in NEVER_RETRIED:
        yield f"{outcome.phrase} ({outcome.code}): {outcome.diagnostics}".removesuffix(": ")
    if task.deletion_pending:
        yield "it was scaled away, and leaves when its pod is gone"
    may_create = framework.spec.execution_type == EXECUTION_START and not framework.problems
    if task.state == State.CREATION_PENDING and may_create:  # otherwise a reason of the Framework says it
        if blockage(framework):
            yield "its pod could not be created yet, see the Framework's reason"
        elif framework.status and framework.status.attempt_status.config_map_uid:
            yield "its pod is to be created"
        else:
            yield "it waits for the ConfigMap of the attempt"
    if task.state == State.CREATION_REQUESTED and pod is None:
        yield "its pod was created, but the operator has not seen it yet"
    if task.state == State.ATTEMPT_COMPLETED:
        yield from _retry(task.retry_policy_status, task.transition_time)
    if pod is not None and task.state not in _ENDED:
        yield from of_pod(pod, force_deadline(pod, role), _NEVER_FORCED, now)
