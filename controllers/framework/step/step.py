"""One step of one Framework: a pure function of the spec, the status and the observed objects.

`step` returns the last status that can be reached without an action, and the actions that follow from it. Several
states may be passed at once (a pod that is gone, its task's retry and the next attempt): each transition only needs the
status before it, and the status is written whole, so no reader sees half of it and no crash loses half of it. Only
actions need a persisted status; they are derived from the status that is persisted before them. See
`controllers.framework.step.context` for the loop's side of this.

The order: the spec is followed (new and surplus roles and tasks), tasks change state, drained tasks are dropped, and
then the Framework changes state, judged by the tasks' new states.

At last the status gets its conditions, which summarise it for readers. In compatible mode there are conditions only
while something is wrong, so that a healthy status is exactly frameworkcontroller's. In native mode they are always
there: `Valid`, `Ready` (every task has an address), `Completed`, and, once completed, `Succeeded`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from random import Random
from typing import NamedTuple

from msgspec import UNSET
from msgspec.structs import replace

from controllers.framework.api.codes import is_quota, is_succeeded
from controllers.framework.api.types import Condition, Framework, FrameworkStatus, Problem, State
from controllers.framework.config.config import FrameworkConfig
from controllers.framework.step.attempts import new_framework_status, with_roles
from controllers.framework.step.context import Observed, Outcome, Step, Turn
from controllers.framework.step.framework import FrameworkStep
from controllers.framework.step.plan_actions import Planning
from controllers.framework.step.tasks import RoleStep, drop_drained, follow_spec
from store.kube.api.objects import Object

_OPEN = (State.CREATION_PENDING, State.CREATION_REQUESTED, State.PREPARING, State.RUNNING)
_OVER = (State.ATTEMPT_COMPLETED, State.COMPLETED)

VALID = "Valid"
CREATION_BLOCKED = "CreationBlocked"
READY = "Ready"
COMPLETED = "Completed"
SUCCEEDED = "Succeeded"


class Blockage(NamedTuple):
    """The cause for which objects can't be created, although the requests were valid."""

    reason: str
    message: str


class _Finding(NamedTuple):
    """A condition without its history."""

    type: str
    is_true: bool
    reason: str
    message: str


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
    """Compute the Framework's next status and the actions.

    `config_map` and `pods` (by name) are the cached objects of the names that the Framework uses. `outcomes`: those of
    the last step's actions, the `lasting` ones of earlier steps of the same sync, and deletions that were seen since.
    `Step.status` is the same object as `framework.status` when nothing changes.
    """
    before = framework.status
    if framework.deleting:  # the garbage collector works on it; a write would only delay that
        return Step(before)
    observed = Observed(config_map, pods, outcomes)
    turn = Turn(framework, observed, now.astimezone(UTC).replace(microsecond=0), rng, config)
    turn.urgent = before is None
    status = _settled(turn, new_framework_status(turn) if before is None else before)
    planning = Planning(turn, status, is_blocked=is_blocked(status))
    status = _summarised(turn, status, planning)
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
        turn.urgent = True  # the gang is complete, and its barriers wait for this write
    return with_roles(status, roles)


def _summarised(turn: Turn, status: FrameworkStatus, planning: Planning) -> FrameworkStatus:
    tell_problems(turn, status)
    blockage = find_blockage(turn.observed, planning)
    if blockage is not None:
        turn.note("Warning", blockage.reason, blockage.message)
    else:
        blockage = lasting_blockage(status, turn.observed)
    return with_conditions(turn, status, blockage)


def with_conditions(turn: Turn, status: FrameworkStatus, blockage: Blockage | None) -> FrameworkStatus:
    """Return the status with its current conditions; each keeps the time of its last transition."""
    findings = tuple(_findings(turn, status, blockage))
    before = _before(status)
    conditions = tuple(_condition(turn, finding, before.get(finding.type)) for finding in findings)
    if conditions == tuple(before.values()):
        return status
    turn.urgent = True
    return replace(status, conditions=conditions or UNSET)


def is_blocked(status: FrameworkStatus) -> bool:
    """Return whether creations were refused when they were last tried."""
    return CREATION_BLOCKED in _before(status)


def find_blockage(observed: Observed, planning: Planning) -> Blockage | None:
    """Return the blockage that this step has seen, or None."""
    for name, holder in sorted(planning.strangers.items()):
        kind = holder.get("kind") or "object"
        text = f"{name} exists already and is not this Framework's ({kind}); rename the Framework or remove the object"
        return Blockage("NameTaken", text)
    for refusal in sorted(observed.refusals.values(), key=lambda refusal: str(refusal.target or "")):
        if 400 <= refusal.status < 500 and refusal.status != 429:
            reason = "QuotaExceeded" if is_quota(refusal.message) else "CreationRefused"
            return Blockage(reason, f"{refusal.target or 'the ConfigMap'}: {refusal.message}")
    return None


def lasting_blockage(status: FrameworkStatus, observed: Observed) -> Blockage | None:
    """Return the blockage in the status, if nothing has been created since and an object is still missing."""
    known = _before(status).get(CREATION_BLOCKED)
    if known is None or observed.creation_succeeded or not _waits_for_creation(status):
        return None
    return Blockage(known.reason, known.message)


def tell_problems(turn: Turn, status: FrameworkStatus) -> None:
    """Note an Event for problems of the spec that the conditions do not show yet."""
    if turn.framework.problems:
        message = _listed(turn.framework.problems)
        known = _before(status).get(VALID)
        if known is None or known.message != message:
            turn.note("Warning", "InvalidFramework", message)


def _before(status: FrameworkStatus) -> dict[str, Condition]:
    return {condition.type: condition for condition in status.conditions or ()}


def _waits_for_creation(status: FrameworkStatus) -> bool:
    if status.attempt_status.completion_status is not None:
        return False
    return status.state is State.CREATION_PENDING or any(
        task.state is State.CREATION_PENDING for role in status.roles for task in role.tasks
    )


def _findings(turn: Turn, status: FrameworkStatus, blockage: Blockage | None) -> Iterator[_Finding]:
    problems = turn.framework.problems
    if problems:
        yield _Finding(VALID, False, "InvalidSpec", _listed(problems))
    elif turn.config.native_mode:
        yield _Finding(VALID, True, "SpecAccepted", "")
    if blockage is not None:
        yield _Finding(CREATION_BLOCKED, True, *blockage)
    if turn.config.native_mode:
        yield _ready(status)
        yield from _completed(status)


def _ready(status: FrameworkStatus) -> _Finding:
    tasks = [task for role in status.roles for task in role.tasks if not task.deletion_pending]
    ready = sum(bool(task.attempt_status.pod_ip) for task in tasks)
    if status.attempt_status.completion_status is not None:
        return _Finding(READY, False, "AttemptCompleted", "the attempt has ended")
    is_true = ready == len(tasks)
    reason = "AllTasksHaveAddresses" if is_true else "TasksAreMissing"
    return _Finding(READY, is_true, reason, f"{ready} of {len(tasks)} tasks have an address")


def _completed(status: FrameworkStatus) -> Iterator[_Finding]:
    outcome = status.attempt_status.completion_status
    if status.state is not State.COMPLETED or outcome is None:
        yield _Finding(COMPLETED, False, status.state.value, "")
        return
    yield _Finding(COMPLETED, True, outcome.phrase or "Completed", outcome.diagnostics)
    yield _Finding(SUCCEEDED, is_succeeded(outcome), outcome.phrase or "Completed", outcome.diagnostics)


def _listed(problems: tuple[Problem, ...]) -> str:
    shown = "; ".join(str(problem) for problem in problems[:3])
    return shown if len(problems) <= 3 else f"{shown}; and {len(problems) - 3} more"


def _condition(turn: Turn, finding: _Finding, before: Condition | None) -> Condition:
    """Return the condition. A blockage keeps its first message, which would otherwise change with each number in the
    server's answers. Without a status subresource our own writes raise the generation, so an otherwise unchanged
    condition keeps its generation."""
    status = "True" if finding.is_true else "False"
    message, generation = finding.message, turn.framework.generation
    if before is not None and before.status == status:
        since = before.last_transition_time
        if before.type == CREATION_BLOCKED and before.reason == finding.reason:
            message = before.message
        if not turn.config.native_mode and (before.reason, before.message) == (finding.reason, message):
            generation = before.observed_generation
    else:
        since = turn.now
    return Condition(
        type=finding.type,
        status=status,
        observed_generation=generation,
        last_transition_time=since,
        reason=finding.reason,
        message=message,
    )
