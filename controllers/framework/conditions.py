"""`status.conditions`: what a reader of the status would otherwise have to find out by himself.

In compatible mode there are conditions only while something is wrong, so that a healthy status is exactly
frameworkcontroller's. In native mode they are always there: `Valid`, `Ready` (every task has an address), `Completed`,
and, once completed, `Succeeded`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from msgspec import UNSET
from msgspec.structs import replace

from controllers.framework.codes import is_quota, is_succeeded
from controllers.framework.constants import State
from controllers.framework.observed import Observed
from controllers.framework.planning import Planning
from controllers.framework.turn import Turn
from controllers.framework.types import Condition, FrameworkStatus, Problem

VALID = "Valid"
CREATION_BLOCKED = "CreationBlocked"
READY = "Ready"
COMPLETED = "Completed"
SUCCEEDED = "Succeeded"


class Blockage(NamedTuple):
    """Why objects can't be created, although the request was right."""

    reason: str
    message: str


class _Finding(NamedTuple):
    """A condition without its history."""

    type: str
    is_true: bool
    reason: str
    message: str


def with_conditions(turn: Turn, status: FrameworkStatus, blockage: Blockage | None) -> FrameworkStatus:
    """The status with its conditions as they are now; each keeps the time of its last transition."""
    findings = tuple(_findings(turn, status, blockage))
    before = _before(status)
    conditions = tuple(_condition(turn, finding, before.get(finding.type)) for finding in findings)
    if conditions == tuple(before.values()):
        return status
    turn.urgent = True
    return replace(status, conditions=conditions or UNSET)


def is_blocked(status: FrameworkStatus) -> bool:
    """Whether creations were refused when they were last tried."""
    return CREATION_BLOCKED in _before(status)


def find_blockage(observed: Observed, planning: Planning) -> Blockage | None:
    """What this step saw of refused creations; None when nothing."""
    for name, holder in sorted(planning.strangers.items()):
        kind = holder.get("kind") or "object"
        text = f"{name} exists already and belongs to somebody else ({kind}); rename the Framework or remove it"
        return Blockage("NameTaken", text)
    for refusal in sorted(observed.refusals.values(), key=lambda refusal: str(refusal.target or "")):
        if 400 <= refusal.status < 500 and refusal.status != 429:
            reason = "QuotaExceeded" if is_quota(refusal.message) else "CreationRefused"
            return Blockage(reason, f"{refusal.target or 'the ConfigMap'}: {refusal.message}")
    return None


def lasting_blockage(status: FrameworkStatus, observed: Observed) -> Blockage | None:
    """The blockage that the status tells of, if nothing has been created since and something still waits."""
    known = _before(status).get(CREATION_BLOCKED)
    if known is None or observed.creation_succeeded or not _waits_for_creation(status):
        return None
    return Blockage(known.reason, known.message)


def tell_problems(turn: Turn, status: FrameworkStatus) -> None:
    """An Event for problems of the spec that the conditions do not tell of yet."""
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
    """A blockage keeps its first message, which would otherwise change with each number in the server's answers.

    Without a status subresource our own writes raise the generation: a condition that else stays as it is keeps it."""
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
