"""Explain why a Framework and its tasks do not progress. Pure: reads only its arguments.

The Framework's own reasons come first, from outside to inside: whether an operator leads, whether it may create
objects, whether the gang is whole, how the last attempt ended. A task's reasons are those of its pod, unless the
Framework's reasons contain them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import msgspec

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
from rcfarm.reports.framework import NO_STATE, blockage
from store.kube.api.objects import Object, is_deleting, key_of, uid_of

_ENDED = (State.ATTEMPT_COMPLETED, State.COMPLETED)
_LEAVING = (State.DELETION_PENDING, State.DELETION_REQUESTED, State.DELETING)
_STARTING = ("PodInitializing", "ContainerCreating")  # reasons of a container that starts normally
_IN_STATUS = frozenset({"FrameworkRetry", "FrameworkCompleted"})  # Events that repeat the status
_NAMED = 5  # names listed at most


class FrameworkReason(msgspec.Struct, frozen=True, kw_only=True):
    """The reason of a state. `subject`: `framework`, or a task as `ROLE-INDEX`."""

    subject: str
    state: str
    reason: str


@dataclass(frozen=True, slots=True)
class ObservedObjects:
    """The objects read beside the Framework. `pods`: by name. `warnings`: Events, the newest last; those about other
    objects are ignored. `leases`: the possible Leases of its operator; None: not known. `now`: aware."""

    pods: Mapping[str, Object]
    warnings: Sequence[Object]
    leases: Sequence[LeaseInfo] | None
    now: datetime


def explain(framework: Framework, raw: Object, observed: ObservedObjects) -> list[FrameworkReason]:
    """Return the reasons, one per thing that is waited for. `raw`: the Framework as it was read."""
    status = framework.status
    if status is None:
        reasons = [f"its spec can't be used: {problem}" for problem in framework.problems]
        if why := why_nobody_leads(observed.leases, observed.now):
            reasons.append(why)
        elif not framework.problems:
            reasons.append(
                "no operator has taken it up yet: check that the one that leads watches this namespace "
                "(kube.namespaces), and what its /readyz says"
            )
        return [_about(NO_STATE, reason) for reason in reasons]
    reasons = list(_of_framework(framework, status, raw, observed))
    reasons += _said(observed.warnings, framework.uid, reasons)
    found = [_about(str(status.state), reason) for reason in reasons]
    for role in status.roles:
        for task in role.tasks:
            pod = observed.pods.get(task.attempt_status.pod_name)
            if pod is not None and uid_of(pod) != task.attempt_status.pod_uid:
                pod = None  # another attempt's, or not recorded yet
            reasons = list(_of_task(framework, role, task, pod, observed.now))
            if pod is not None and task.state == State.PREPARING:
                reasons += _said(observed.warnings, uid_of(pod), reasons)
            found += [
                FrameworkReason(subject=f"{role.name}-{task.index}", state=str(task.state), reason=reason)
                for reason in dict.fromkeys(reasons)
            ]
    return found


def _about(state: str, reason: str) -> FrameworkReason:
    return FrameworkReason(subject="framework", state=state, reason=reason)


def _of_framework(
    framework: Framework, status: FrameworkStatus, raw: Object, observed: ObservedObjects
) -> Iterator[str]:
    outcome = status.attempt_status.completion_status
    if status.state != State.COMPLETED:
        if why := why_nobody_leads(observed.leases, observed.now):
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
            yield f"{blocked.reason} since {_at(since)}, retried: {blocked.message}"
        if not any(role.task_number for role in framework.spec.task_roles) and not framework.problems:
            yield "it has no tasks, so it never completes"
        statuses = [pod.get("status") or {} for pod in observed.pods.values()]
        init_containers = [each for found in statuses for each in found.get("initContainerStatuses") or ()]
        if any("running" in (each.get("state") or {}) for each in init_containers):  # barriers, which may hold the gang
            gang = None
            with contextlib.suppress(BadView):
                gang = look_at(view_of(decompressed(raw)), Identity())
            if gang and gang.missing:
                yield f"the gang is not whole, {gang.ready} of {gang.total} are there; missing: {_listed(gang.missing)}"
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
        yield f"it waits until the pods of the attempt are gone: {_listed(sorted(observed.pods)) or 'none is left'}"
    if status.state == State.ATTEMPT_COMPLETED:
        yield from _retry(status.retry_policy_status, status.transition_time)


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
    """Explain a deletion; its timestamp is the end of the grace period."""
    metadata = pod["metadata"]
    due = datetime.fromisoformat(metadata["deletionTimestamp"])
    if now < due:
        return f"its pod is being deleted, and has until {_at(due)} to end"
    node = (pod.get("spec") or {}).get("nodeName") or "no node"
    text = f"its pod should have ended at {_at(due)}; check {node}: a node that is down does not confirm the end"
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
    """Return the newest Warning of each reason about the object of that UID, unless a known reason contains its
    message."""
    newest = {event.get("reason"): event for event in warnings if (event.get("involvedObject") or {}).get("uid") == uid}
    return [
        f"{event.get('reason')}: {message}"
        for event in newest.values()
        if (message := str(event.get("message") or ""))
        and event.get("reason") not in _IN_STATUS
        and not any(message in reason for reason in known)
    ]


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMED])
    return shown if len(names) <= _NAMED else f"{shown} and {len(names) - _NAMED} more"


def _at(time: datetime) -> str:
    return f"{time:%Y-%m-%dT%H:%M:%SZ}"


SKEW = timedelta(seconds=5)


class LeaseInfo(NamedTuple):
    """A Lease. `key`: NAMESPACE/NAME. `holder`: "" without one. `ends`: when the lease of the last renewal ends."""

    key: str
    holder: str
    renewed: datetime | None
    ends: datetime | None

    def is_held(self, now: datetime) -> bool:
        return bool(self.holder) and self.ends is not None and now < self.ends + SKEW


def lease_info(lease: Object) -> LeaseInfo:
    spec: Object = lease.get("spec") or {}
    renewed = datetime.fromisoformat(spec["renewTime"]) if spec.get("renewTime") else None
    duration = timedelta(seconds=int(spec.get("leaseDurationSeconds") or 0))
    return LeaseInfo(key_of(lease), str(spec.get("holderIdentity") or ""), renewed, renewed and renewed + duration)


def why_nobody_leads(leases: Sequence[LeaseInfo] | None, now: datetime) -> str:
    """Return why no operator leads, or "" when one does or `leases` is None (unknown)."""
    if leases is None or any(lease.is_held(now) for lease in leases):
        return ""
    if not leases:
        return "no operator leads: there is no such Lease; start `rcfarm jobs`, or name its Lease with --lease"
    last = max(leases, key=lambda lease: lease.renewed.timestamp() if lease.renewed else 0.0)
    if not last.holder or last.renewed is None:
        return f"no operator leads: the Lease {last.key} has no holder; start `rcfarm jobs`"
    silent = int((now - last.renewed).total_seconds())
    return (
        f"no operator leads: {last.holder} last renewed the Lease {last.key} {silent} s ago; check that it runs, and "
        "its log"
    )
