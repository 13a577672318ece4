"""Frameworks as rows for people: one per Framework, and one per task. Pure."""

from __future__ import annotations

from datetime import datetime

import msgspec

from controllers.framework.api.types import Condition, Framework, State
from controllers.framework.step.step import CREATION_BLOCKED

NO_STATE = "Unknown"
"""The state of a Framework without a status."""


class FrameworkInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One Framework. These fields are a contract. `code` and `phrase`: the outcome of the attempt, once there is one.

    `tasks` is the number in the spec; `running` and `completed` count tasks by state; `retries` past retries;
    `problems`: errors of the spec, and refusals of its objects. An unreadable Framework has nothing but these.
    """

    namespace: str
    name: str
    execution_type: str = ""
    state: str
    attempt: int = 0
    retries: int = 0
    tasks: int = 0
    running: int = 0
    completed: int = 0
    code: int | None = None
    phrase: str = ""
    diagnostics: str = ""
    started: datetime | None = None
    completed_at: datetime | None = None
    problems: list[str] = []


class TaskInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One task, and its present attempt. `leaving`: it was scaled away."""

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


class FrameworkStatusInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A Framework with its tasks."""

    framework: FrameworkInfo
    tasks: list[TaskInfo]


def framework_info(framework: Framework) -> FrameworkInfo:
    status = framework.status
    tasks = [task for role in (status.roles if status else ()) for task in role.tasks]
    outcome = status.attempt_status.completion_status if status else None
    problems = list(map(str, framework.problems))
    if blocked := blockage(framework):
        problems.append(f"{blocked.reason}: {blocked.message}")
    return FrameworkInfo(
        namespace=framework.namespace,
        name=framework.name,
        execution_type=framework.spec.execution_type,
        state=str(status.state) if status else NO_STATE,
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
        problems=problems,
    )


def blockage(framework: Framework) -> Condition | None:
    """Return the condition with the reason why the Framework's objects can't be created, or None."""
    conditions = framework.status.conditions if framework.status else ()
    return next((each for each in conditions or () if each.type == CREATION_BLOCKED and each.status == "True"), None)


def framework_status_info(framework: Framework) -> FrameworkStatusInfo:
    roles = framework.status.roles if framework.status else ()
    tasks = []
    for role, task in ((each, task) for each in roles for task in each.tasks):
        attempt = task.attempt_status
        outcome = attempt.completion_status
        info = TaskInfo(
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
        tasks.append(info)
    return FrameworkStatusInfo(framework=framework_info(framework), tasks=tasks)
