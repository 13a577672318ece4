"""Following the spec's roles and task numbers while an attempt is under way.

Tasks are added at the end of a role. They leave from the end, too: a task beyond the spec is marked, which fixes its
outcome, ends gracefully, and is dropped once it and all tasks after it have completed. A marked task never comes back:
if the spec includes its index again, a new task takes its place. So at no time are there two pods of one name.
"""

from __future__ import annotations

from msgspec.structs import replace

from controllers.framework.attempts import new_role, new_task, with_outcome, with_roles
from controllers.framework.codes import DELETE_TASK_REQUESTED, completion
from controllers.framework.constants import State
from controllers.framework.turn import Turn
from controllers.framework.types import FrameworkStatus, TaskRoleSpec, TaskRoleStatus, TaskStatus


def follow_spec(turn: Turn, status: FrameworkStatus) -> FrameworkStatus:
    """The status with new roles and tasks added, surplus ones marked, and each role's settings copied."""
    known = {role.name for role in status.roles}
    specs = {spec.name: spec for spec in turn.framework.spec.task_roles}
    roles = tuple(_followed(turn, role, specs.get(role.name)) for role in status.roles)
    roles += tuple(new_role(turn, spec) for spec in turn.framework.spec.task_roles if spec.name not in known)
    return _changed(turn, status, roles)


def drop_drained(turn: Turn, status: FrameworkStatus) -> FrameworkStatus:
    """The status without the marked tasks that have completed, and without the removed roles that are empty."""
    specs = {spec.name: spec for spec in turn.framework.spec.task_roles}
    roles = [_drained(turn, role, specs.get(role.name)) for role in status.roles]
    position = 0
    while position < len(roles):
        if roles[position].tasks or roles[position].name in specs:
            position += 1
            continue
        last = roles.pop()  # the last role takes the place, as frameworkcontroller does it
        if position < len(roles):
            roles[position] = last
    return _changed(turn, status, tuple(roles))


def _changed(turn: Turn, status: FrameworkStatus, roles: tuple[TaskRoleStatus, ...]) -> FrameworkStatus:
    before = status.roles
    if len(roles) == len(before) and all(new is old for new, old in zip(roles, before, strict=True)):
        return status
    turn.urgent = True
    return with_roles(status, roles)


def _followed(turn: Turn, role: TaskRoleStatus, spec: TaskRoleSpec | None) -> TaskRoleStatus:
    wanted = 0 if spec is None else spec.task_number
    if spec is not None and role.pod_graceful_deletion_timeout_sec != spec.task.pod_graceful_deletion_timeout_sec:
        role = replace(role, pod_graceful_deletion_timeout_sec=spec.task.pod_graceful_deletion_timeout_sec)
    tasks, number = role.tasks, len(role.tasks)
    if number < wanted:
        return replace(
            role, task_statuses=(*tasks, *(new_task(turn, role.name, index) for index in range(number, wanted)))
        )
    if all(task.deletion_pending for task in tasks[wanted:]):
        return role
    return replace(role, task_statuses=tasks[:wanted] + tuple(_marked(task) for task in tasks[wanted:]))


def _marked(task: TaskStatus) -> TaskStatus:
    if task.deletion_pending:
        return task
    marked = replace(task, deletion_pending=True)
    return with_outcome(marked, completion(DELETE_TASK_REQUESTED, "the task was scaled away"))


def _drained(turn: Turn, role: TaskRoleStatus, spec: TaskRoleSpec | None) -> TaskRoleStatus:
    wanted = 0 if spec is None else spec.task_number
    kept = len(role.tasks)
    while kept > wanted and _is_drained(role.tasks[kept - 1]):
        kept -= 1
    leaving = [task for position, task in enumerate(role.tasks) if _is_drained(task) and not wanted <= position < kept]
    if not leaving:
        return role
    for task in leaving:
        turn.remember("OnTaskDeletion", task, role.name)
    tasks = (new_task(turn, role.name, task.index) if _is_drained(task) else task for task in role.tasks[:wanted])
    return replace(role, task_statuses=(*tasks, *role.tasks[wanted:kept]))


def _is_drained(task: TaskStatus) -> bool:
    return task.deletion_pending and task.state is State.COMPLETED
