"""One step of one Framework: a pure function of what is wanted, what is remembered and what is there.

`step` answers the next status, already followed to where it gets without doing anything, and the actions that follow
from it. Several states may be passed at once (a pod that is gone, its task's retry and the next attempt): each passage
only needs the status before it, and the status is written whole, so nobody can see or lose a half of it. What does
need something persisted first is doing something, and actions are taken from the status that is persisted before them.
See `controllers.framework.actions` for the loop's side of this.

The order: the spec is followed (roles and tasks that are new or surplus), tasks move, tasks that drained are dropped,
and then the Framework moves, judging the tasks as they are now.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from random import Random

from controllers.framework.actions import Outcome, Step
from controllers.framework.attempts import new_framework_status, with_roles
from controllers.framework.conditions import (
    find_blockage,
    is_blocked,
    lasting_blockage,
    tell_problems,
    with_conditions,
)
from controllers.framework.config import FrameworkConfig
from controllers.framework.constants import State
from controllers.framework.framework_step import FrameworkStep
from controllers.framework.observed import Observed
from controllers.framework.planning import Planning
from controllers.framework.rescale import drop_drained, follow_spec
from controllers.framework.task_step import RoleStep
from controllers.framework.turn import Turn
from controllers.framework.types import Framework, FrameworkStatus
from store.kube.objects import Object

_OPEN = (State.CREATION_PENDING, State.CREATION_REQUESTED, State.PREPARING, State.RUNNING)
_OVER = (State.ATTEMPT_COMPLETED, State.COMPLETED)


def step(
    framework: Framework,
    config_map: Object | None,
    pods: Mapping[str, Object],
    *,
    now: datetime,
    rng: Random,
    config: FrameworkConfig,
    outcomes: Sequence[Outcome] = (),
) -> Step:
    """What the Framework's status is to be, and what to do about it.

    `config_map` and `pods` (by name) are the caches' objects of the names that the Framework uses. `outcomes`: what
    came of the last step's actions, and deletions that were seen since. `Step.status` is the very object
    `framework.status` when nothing changes.
    """
    before = framework.status
    if framework.deleting:  # the garbage collector takes it apart; what is written now would only delay it
        return Step(before)
    observed = Observed(config_map, pods, outcomes)
    turn = Turn(framework, observed, now.astimezone(UTC).replace(microsecond=0), rng, config)
    turn.urgent = before is None
    status = _settled(turn, new_framework_status(turn) if before is None else before)
    planning = Planning(turn, status, is_blocked=is_blocked(status))
    status = _with_conditions(turn, status, planning)
    if status == before:
        status = before
    return Step(
        status,
        tuple(planning.actions),
        planning.next_wake,
        tuple(turn.notes),
        tuple(turn.history),
        planning.back_off,
        deferrable=not turn.urgent,
    )


def _settled(turn: Turn, status: FrameworkStatus) -> FrameworkStatus:
    follows = status.state in _OPEN and not turn.framework.problems
    is_closing = status.attempt_status.completion_status is not None
    if follows and not is_closing:
        status = follow_spec(turn, status)
    if status.state not in _OVER:
        status = _with_tasks_moved(turn, status, is_closing=is_closing)
    if follows and not is_closing:
        status = drop_drained(turn, status)
    return FrameworkStep(turn).settle(status)


def _with_tasks_moved(turn: Turn, status: FrameworkStatus, *, is_closing: bool) -> FrameworkStatus:
    specs = {role.name: role for role in turn.framework.spec.task_roles}
    roles = tuple(RoleStep(turn, role, specs.get(role.name), closing=is_closing).advance() for role in status.roles)
    if all(new is old for new, old in zip(roles, status.roles, strict=True)):
        return status
    if turn.addressed and all(task.attempt_status.pod_ip for role in roles for task in role.tasks):
        turn.urgent = True  # the gang is whole: its barriers wait for nothing but this
    return with_roles(status, roles)


def _with_conditions(turn: Turn, status: FrameworkStatus, planning: Planning) -> FrameworkStatus:
    tell_problems(turn, status)
    blockage = find_blockage(turn.observed, planning)
    if blockage is not None:
        turn.note("Warning", blockage.reason, blockage.message)
    else:
        blockage = lasting_blockage(status, turn.observed)
    return with_conditions(turn, status, blockage)
