"""Frameworks as people look at them: rows, and the reason of everything that does not happen.

Everything here is decided from what was read: the Framework, its pods, the Events about them, and the time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

import msgspec

from controllers.framework.constants import EXECUTION_CREATE, State
from controllers.framework.types import Framework, FrameworkStatus, RetryPolicyStatus, TaskRoleStatus, TaskStatus
from store.kube.objects import Object, is_deleting

_ENDED = (State.ATTEMPT_COMPLETED, State.COMPLETED)
_LEAVING = (State.DELETION_PENDING, State.DELETION_REQUESTED, State.DELETING)
_NO_STATE = "Unknown"  # nobody has written a status yet


class FrameworkInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One Framework. These fields are a contract. `code` and `phrase`: the outcome of the attempt, once there is one.

    `tasks` is what the spec asks for; `running` and `completed` count tasks by state; `retries` past retries.
    """

    namespace: str
    name: str
    execution_type: str
    state: str
    attempt: int
    retries: int
    tasks: int
    running: int
    completed: int
    code: int | None = None
    phrase: str = ""
    diagnostics: str = ""
    started: datetime | None = None
    completed_at: datetime | None = None
    problems: list[str] = []


class TaskInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One task, and its present attempt."""

    role: str
    index: int
    state: str
    attempt: int
    retries: int
    pod: str
    node: str = ""
    address: str = ""
    code: int | None = None
    phrase: str = ""
    diagnostics: str = ""
    leaving: bool = False


class Explained(msgspec.Struct, frozen=True, kw_only=True):
    """Why something is as it is. `subject`: `framework`, or a task as `ROLE-INDEX`."""

    subject: str
    state: str
    reason: str


def framework_info(framework: Framework) -> FrameworkInfo:
    status = framework.status
    tasks = [task for role in (status.roles if status else ()) for task in role.tasks]
    outcome = status.attempt_status.completion_status if status else None
    return FrameworkInfo(
        namespace=framework.namespace,
        name=framework.name,
        execution_type=framework.spec.execution_type,
        state=str(status.state) if status else _NO_STATE,
        attempt=status.attempt_status.id if status else 0,
        retries=status.retry_policy_status.total_retried_count if status else 0,
        tasks=sum(role.task_number for role in framework.spec.task_roles),
        running=sum(task.state == State.RUNNING for task in tasks),
        completed=sum(task.state == State.COMPLETED for task in tasks),
        code=outcome.code if outcome else None,
        phrase=outcome.phrase if outcome else "",
        diagnostics=outcome.diagnostics if outcome else "",
        started=status.start_time if status else None,
        completed_at=status.completion_time if status else None,
        problems=[str(problem) for problem in framework.problems],
    )


def task_infos(framework: Framework) -> list[TaskInfo]:
    roles = framework.status.roles if framework.status else ()
    return [_task_info(role, task) for role in roles for task in role.tasks]


def _task_info(role: TaskRoleStatus, task: TaskStatus) -> TaskInfo:
    attempt = task.attempt_status
    outcome = attempt.completion_status
    return TaskInfo(
        role=role.name,
        index=task.index,
        state=str(task.state),
        attempt=attempt.id,
        retries=task.retry_policy_status.total_retried_count,
        pod=attempt.pod_name,
        node=attempt.pod_node_name or "",
        address=attempt.pod_ip or "",
        code=outcome.code if outcome else None,
        phrase=outcome.phrase if outcome else "",
        diagnostics=outcome.diagnostics if outcome else "",
        leaving=task.deletion_pending,
    )


def explain(framework: Framework, pods: Mapping[str, Object], warnings: Sequence[Object]) -> list[Explained]:
    """The reason of every non-action, the Framework's own first. `pods` by name; `warnings`: Events about any of them,
    the newest last."""
    status = framework.status
    if status is None:
        return [_about(_NO_STATE, _why_unseen(framework))]
    found = [_about(str(status.state), reason) for reason in _of_framework(framework, status)]
    found += [_about(str(status.state), _said(event)) for event in _latest(warnings, framework.name)]
    if status.state == State.COMPLETED:
        return found
    for role in status.roles:
        for task in role.tasks:
            name = task.attempt_status.pod_name
            reasons = list(_of_task(framework, task, pods.get(name)))
            if task.state in (State.CREATION_PENDING, State.PREPARING):
                reasons += [_said(event) for event in _latest(warnings, name)]
            found += [
                Explained(subject=f"{role.name}-{task.index}", state=str(task.state), reason=reason)
                for reason in dict.fromkeys(reasons)
            ]
    return found


def _about(state: str, reason: str) -> Explained:
    return Explained(subject="framework", state=state, reason=reason)


def _why_unseen(framework: Framework) -> str:
    if framework.problems:
        return f"its spec can't be used: {'; '.join(map(str, framework.problems))}"
    return "no operator has taken it up: check that `rcfarm jobs` runs, is ready, and watches this namespace"


def _of_framework(framework: Framework, status: FrameworkStatus) -> Iterator[str]:
    for problem in framework.problems:
        yield f"its spec can't be used, nothing new is created: {problem}"
    outcome = status.attempt_status.completion_status
    if status.state == State.CREATION_PENDING and framework.spec.execution_type == EXECUTION_CREATE:
        yield "its executionType is Create: set it to Start to run it"
    if outcome is not None:
        trigger = outcome.trigger if isinstance(outcome.trigger, msgspec.Struct) else None
        cause = f"; {trigger.message}" if trigger and trigger.message else ""
        yield f"the attempt ended as {outcome.type.name} with {outcome.code} {outcome.phrase}{cause}"
    if status.state in _LEAVING:
        yield "it waits until all pods of the attempt are gone"
    if status.state == State.ATTEMPT_COMPLETED:
        yield from _retry(status.retry_policy_status, status.transition_time)
    if not framework.spec.task_roles or not any(role.task_number for role in framework.spec.task_roles):
        yield "it has no tasks, so it never completes by itself"


def _retry(policy: RetryPolicyStatus, since: datetime) -> Iterator[str]:
    if policy.retry_delay_sec is not None:
        at = since + timedelta(seconds=policy.retry_delay_sec)
        yield f"it is tried again at {at:%Y-%m-%dT%H:%M:%SZ}, after {policy.retry_delay_sec} seconds"


def _of_task(framework: Framework, task: TaskStatus, pod: Object | None) -> Iterator[str]:
    outcome = task.attempt_status.completion_status
    if task.deletion_pending:
        yield "it was scaled away, and leaves when its pod is gone"
    if task.state == State.CREATION_PENDING and not framework.problems:
        config_map = framework.status.attempt_status.config_map_uid if framework.status else None
        yield "its pod is being created" if config_map else "it waits for the attempt's ConfigMap"
    if outcome is not None and outcome.type.name != "Succeeded":
        yield f"{outcome.phrase} ({outcome.code}): {outcome.diagnostics}".rstrip(": ")
    if task.state == State.ATTEMPT_COMPLETED:
        yield from _retry(task.retry_policy_status, task.transition_time)
    if pod is not None and task.state not in _ENDED:
        yield from _of_pod(pod)


def _of_pod(pod: Object) -> Iterator[str]:
    """What a pod that does not run waits for."""
    status: Object = pod.get("status") or {}
    if is_deleting(pod):
        metadata = pod["metadata"]
        grace = metadata.get("deletionGracePeriodSeconds")
        yield f"its pod is being deleted since {metadata['deletionTimestamp']}, with {grace} seconds of grace"
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            yield f"not scheduled: {condition.get('message') or condition.get('reason')}"
    if status.get("phase") == "Pending":
        yield from _of_containers(status.get("initContainerStatuses") or (), "init container")
        yield from _of_containers(status.get("containerStatuses") or (), "container")


def _of_containers(statuses: Iterable[Any], kind: str) -> Iterator[str]:
    for each in statuses:
        state = each.get("state") or {}
        if waiting := state.get("waiting"):
            if waiting.get("reason") not in ("PodInitializing", "ContainerCreating"):
                yield f"{kind} {each['name']}: {waiting.get('reason')}: {waiting.get('message', '')}".rstrip(": ")
        elif kind == "init container" and "running" in state:
            yield f"init container {each['name']} runs: `kubectl logs` of it says whom it waits for"


def _latest(events: Sequence[Object], name: str) -> list[Object]:
    """The newest Event of each reason about the object of that name."""
    newest = {event.get("reason"): event for event in events if event.get("involvedObject", {}).get("name") == name}
    return list(newest.values())


def _said(event: Object) -> str:
    return f"{event.get('reason')}: {event.get('message')}"
