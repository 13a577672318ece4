"""Why a Framework, and each task of it, is not further than it is. Pure: everything is decided from what was read.

The Framework's own reasons come first, from outside to inside: is there an operator, may it create anything, is the
gang whole, what did the last attempt end with. A task's reasons are those of its pod, unless the Framework's tell
them already.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import msgspec

from controllers.barrier_config import Identity
from controllers.barrier_readiness import look_at
from controllers.barrier_view import BadView, decompressed, view_of
from controllers.framework.codes import NEVER_RETRIED, is_succeeded
from controllers.framework.constants import EXECUTION_CREATE, EXECUTION_STOP, State
from controllers.framework.deadlines import force_deadline
from controllers.framework.types import (
    CompletionStatus,
    Framework,
    FrameworkStatus,
    RetryPolicyStatus,
    TaskRoleStatus,
    TaskStatus,
    Trigger,
)
from rcfarm.framework_view import NO_STATE, blockage
from rcfarm.operator_lease import LeaseInfo, why_nobody_leads
from store.kube.objects import Object, is_deleting, uid_of

_ENDED = (State.ATTEMPT_COMPLETED, State.COMPLETED)
_LEAVING = (State.DELETION_PENDING, State.DELETION_REQUESTED, State.DELETING)
_STARTING = ("PodInitializing", "ContainerCreating")  # reasons of a container that waits for nothing in particular
_TOLD = frozenset({"FrameworkRetry", "FrameworkCompleted"})  # Events of what the status itself tells
_NAMED = 5  # of many, so many are named


class Explained(msgspec.Struct, frozen=True, kw_only=True):
    """Why something is as it is. `subject`: `framework`, or a task as `ROLE-INDEX`."""

    subject: str
    state: str
    reason: str


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What was read beside the Framework. `pods`: by name. `warnings`: Events, the newest last; those about others
    count for nothing. `leases`: those that its operator may lead by; None: not known. `now`: aware."""

    pods: Mapping[str, Object]
    warnings: Sequence[Object]
    leases: Sequence[LeaseInfo] | None
    now: datetime


def explain(framework: Framework, raw: Object, around: Surroundings) -> list[Explained]:
    """The reason of every non-action; none when there is nothing to wait for. `raw`: the Framework as it was read."""
    status = framework.status
    if status is None:
        return [_about(NO_STATE, reason) for reason in _of_unseen(framework, around)]
    reasons = list(_of_framework(framework, status, raw, around))
    reasons += _said(around.warnings, framework.uid, reasons)
    found = [_about(str(status.state), reason) for reason in reasons]
    for role in status.roles:
        for task in role.tasks:
            found += _explained_task(framework, role, task, around)
    return found


def _about(state: str, reason: str) -> Explained:
    return Explained(subject="framework", state=state, reason=reason)


def _explained_task(
    framework: Framework, role: TaskRoleStatus, task: TaskStatus, around: Surroundings
) -> Iterator[Explained]:
    pod = around.pods.get(task.attempt_status.pod_name)
    if pod is not None and uid_of(pod) != task.attempt_status.pod_uid:
        pod = None  # somebody else's, or one that is not recorded yet
    reasons = list(_of_task(framework, role, task, pod, around.now))
    if pod is not None and task.state == State.PREPARING:
        reasons += _said(around.warnings, uid_of(pod), reasons)
    for reason in dict.fromkeys(reasons):
        yield Explained(subject=f"{role.name}-{task.index}", state=str(task.state), reason=reason)


def _of_unseen(framework: Framework, around: Surroundings) -> Iterator[str]:
    for problem in framework.problems:
        yield f"its spec can't be used: {problem}"
    if why := why_nobody_leads(around.leases, around.now):
        yield why
    elif not framework.problems:
        yield (
            "no operator has taken it up yet: check that the one that leads watches this namespace (kube.namespaces), "
            "and what its /readyz says"
        )


def _of_framework(framework: Framework, status: FrameworkStatus, raw: Object, around: Surroundings) -> Iterator[str]:
    outcome = status.attempt_status.completion_status
    if status.state != State.COMPLETED:
        yield from _of_operation(framework, status, raw, around)
    elif not framework.spec.task_roles:
        yield "it had no tasks"
    if outcome is not None:
        yield _told(status.attempt_status.id, outcome)
    if status.state in _LEAVING:
        yield f"it waits until the pods of the attempt are gone: {_listed(sorted(around.pods)) or 'none is left'}"
    if status.state == State.ATTEMPT_COMPLETED:
        yield from _retry(status.retry_policy_status, status.transition_time)


def _of_operation(framework: Framework, status: FrameworkStatus, raw: Object, around: Surroundings) -> Iterator[str]:
    """Of one that is not completed: what keeps it from going on."""
    if why := why_nobody_leads(around.leases, around.now):
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
        yield f"{blocked.reason} since {_at(since)}, tried again and again: {blocked.message}"
    if not any(role.task_number for role in framework.spec.task_roles) and not framework.problems:
        yield "it has no tasks, so it never completes by itself"
    if any(map(_is_held, around.pods.values())):
        yield from _missing(raw)


def _missing(raw: Object) -> Iterator[str]:
    """What the barriers in its pods wait for."""
    try:
        look = look_at(view_of(decompressed(raw)), Identity())
    except BadView:
        return
    if look.missing:
        yield f"the gang is not whole, {look.ready} of {look.total} are there; missing: {_listed(look.missing)}"


def _is_held(pod: Object) -> bool:
    statuses = (pod.get("status") or {}).get("initContainerStatuses") or ()
    return any("running" in (each.get("state") or {}) for each in statuses)


def _told(attempt: int, outcome: CompletionStatus) -> str:
    trigger = outcome.trigger if isinstance(outcome.trigger, Trigger) else None
    text = f"attempt {attempt} ended: {outcome.phrase} ({outcome.code})"
    if trigger is not None and trigger.task_role_name:
        text += f", by {trigger.task_role_name}-{trigger.task_index}"
    details = (trigger.message if trigger else "", outcome.diagnostics)
    return ": ".join([text, "; ".join(filter(None, details))]).removesuffix(": ")


def _retry(policy: RetryPolicyStatus, since: datetime) -> Iterator[str]:
    if policy.retry_delay_sec is not None:
        at = since + timedelta(seconds=policy.retry_delay_sec)
        yield f"it is tried again at {_at(at)}, {policy.retry_delay_sec} seconds after the attempt ended"


def _of_task(
    framework: Framework, role: TaskRoleStatus, task: TaskStatus, pod: Object | None, now: datetime
) -> Iterator[str]:
    outcome = task.attempt_status.completion_status
    if outcome is not None and not is_succeeded(outcome) and outcome.code not in NEVER_RETRIED:
        yield f"{outcome.phrase} ({outcome.code}): {outcome.diagnostics}".removesuffix(": ")
    if task.deletion_pending:
        yield "it was scaled away, and leaves when its pod is gone"
    if task.state == State.CREATION_PENDING:
        yield from _why_not_created(framework)
    if task.state == State.CREATION_REQUESTED and pod is None:
        yield "its pod was created, but the operator has not seen it yet"
    if task.state == State.ATTEMPT_COMPLETED:
        yield from _retry(task.retry_policy_status, task.transition_time)
    if pod is not None and task.state not in _ENDED:
        yield from _of_pod(role, pod, now)


def _why_not_created(framework: Framework) -> Iterator[str]:
    """Nothing where a reason of the Framework says it."""
    if framework.problems or framework.spec.execution_type != "Start":
        return
    if blockage(framework):
        yield "its pod could not be created yet, see the Framework's reason"
    elif framework.status and framework.status.attempt_status.config_map_uid:
        yield "its pod is to be created"
    else:
        yield "it waits for the ConfigMap of the attempt"


def _of_pod(role: TaskRoleStatus, pod: Object, now: datetime) -> Iterator[str]:
    """What a pod that does not run, or does not end, waits for."""
    status: Object = pod.get("status") or {}
    if is_deleting(pod):
        yield _of_deletion(role, pod, now)
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            yield f"not scheduled: {condition.get('message') or condition.get('reason')}"
    if status.get("phase") == "Pending":
        yield from _of_containers(status.get("initContainerStatuses") or (), "init container")
        yield from _of_containers(status.get("containerStatuses") or (), "container")


def _of_deletion(role: TaskRoleStatus, pod: Object, now: datetime) -> str:
    """The deletion's time is the end of the grace period."""
    metadata = pod["metadata"]
    due = datetime.fromisoformat(metadata["deletionTimestamp"])
    if now < due:
        return f"its pod is being deleted, and has until {_at(due)} to end"
    node = (pod.get("spec") or {}).get("nodeName") or "no node"
    text = f"its pod should have ended at {_at(due)}; look at {node}: a node that is down does not confirm the end"
    if metadata.get("finalizers"):
        text = f"its pod should have ended at {_at(due)}; its finalizers hold it: {', '.join(metadata['finalizers'])}"
    forced = force_deadline(pod, role)
    if forced is None:
        return f"{text}, and the task has no podGracefulDeletionTimeoutSec after which it would be deleted by force"
    return f"{text}; it is deleted by force at {_at(forced)}"


def _of_containers(statuses: Iterable[Any], kind: str) -> Iterator[str]:
    for each in statuses:
        state = each.get("state") or {}
        if waiting := state.get("waiting"):
            if waiting.get("reason") not in _STARTING:
                yield f"{kind} {each['name']}: {waiting.get('reason')}: {waiting.get('message', '')}".removesuffix(": ")
        elif kind == "init container" and "running" in state:
            yield f"its init container {each['name']} has not ended; its log says what it waits for"


def _said(warnings: Sequence[Object], uid: str, known: Sequence[str]) -> list[str]:
    """The newest Warning of each reason about the object of that UID, unless its message is known already."""
    newest = {event.get("reason"): event for event in warnings if (event.get("involvedObject") or {}).get("uid") == uid}
    return [
        f"{event.get('reason')}: {message}"
        for event in newest.values()
        if (message := str(event.get("message") or ""))
        and event.get("reason") not in _TOLD
        and not any(message in reason for reason in known)
    ]


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMED])
    return shown if len(names) <= _NAMED else f"{shown} and {len(names) - _NAMED} more"


def _at(time: datetime) -> str:
    return f"{time:%Y-%m-%dT%H:%M:%SZ}"
