"""One step of one Framework: a pure function of the spec, the status and the observed objects.

`step` returns the last status that can be reached without an action, and the actions that follow from it. Several
states may be passed at once (a pod that is gone, its task's retry and the next attempt): each transition only needs the
status before it, and the status is written whole, so no reader sees half of it and no crash loses half of it. Only
actions need a persisted status; they are derived from the status that is persisted before them. See
`controllers.framework.step.context` for the loop's side of this.

The order: the spec is followed (new and surplus roles and tasks), tasks change state, drained tasks are dropped, and
then the Framework changes state, judged by the tasks' new states.

Then the actions are planned. No action is repeated at once: a failed one waits for the back-off, an accepted one until
the cache shows its effect. While an attempt closes, its pods are left to the garbage collector, which deletes them with
their ConfigMap; only pods that do not end in time are deleted by force.

At last the status gets its conditions, which summarise it for readers. In compatible mode there are conditions only
while something is wrong, so that a healthy status is exactly frameworkcontroller's. In native mode they are always
there: `Valid`, `Ready` (every task has an address), `Completed`, and, once completed, `Succeeded`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from random import Random
from typing import NamedTuple

from msgspec import UNSET
from msgspec.structs import replace

from controllers.framework.api.types import (
    EXECUTION_START,
    FRAMEWORK_UID,
    TASK_INDEX,
    TASK_ROLE_NAME,
    Condition,
    Framework,
    FrameworkStatus,
    Problem,
    State,
    TaskId,
    is_quota,
    is_succeeded,
)
from controllers.framework.config import FrameworkConfig
from controllers.framework.step.attempts import (
    cache_deadline,
    force_deadline,
    new_framework_status,
    retry_deadline,
    with_roles,
)
from controllers.framework.step.context import (
    Action,
    Confirm,
    Create,
    Delete,
    DeleteFramework,
    Note,
    Observed,
    Outcome,
    Step,
    StepContext,
    Target,
)
from controllers.framework.step.transitions import FrameworkStep, RoleStep, drop_drained, follow_spec
from store.kube.api.objects import Object, annotations_of, controller_of, is_deleting, labels_of, name_of, uid_of

CREATE_BATCH = 200
"""Objects created per step: their UIDs are persisted before more are created, and a stop does not wait for long."""

PROBE = 4
"""Objects created per step while creations are being refused."""

RECHECK = timedelta(seconds=30)
"""When to step again for changes that the cache should show by then, or that cause no event, such as a raised quota."""

_EXISTING = (State.PREPARING, State.RUNNING)
_LIVE = (State.CREATION_REQUESTED, *_EXISTING)
_OPEN = (State.CREATION_PENDING, *_LIVE)
_OVER = (State.ATTEMPT_COMPLETED, State.COMPLETED)

VALID = "Valid"
CREATION_BLOCKED = "CreationBlocked"
READY = "Ready"
COMPLETED = "Completed"
SUCCEEDED = "Succeeded"

_UNRECORDED = "it was created, but never recorded"


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
    context = StepContext(framework, observed, now.astimezone(UTC).replace(microsecond=0), rng, config)
    context.urgent = before is None
    status = _settled(context, new_framework_status(context) if before is None else before)
    plan = Plan(context, status)
    status = _summarised(context, status, plan.strangers)
    return Step(
        before if status == before else status,
        tuple(plan.actions),
        plan.next_wake,
        tuple(context.notes),
        tuple(context.history),
        plan.back_off,
        deferrable=not context.urgent,
    )


def _settled(context: StepContext, status: FrameworkStatus) -> FrameworkStatus:
    """Return the status after all transitions that are possible now, in the order of the module's docstring."""
    is_closing = status.attempt_status.completion_status is not None
    follows = status.state in _OPEN and not context.framework.problems and not is_closing
    if follows:
        status = follow_spec(context, status)
    if status.state not in _OVER:
        specs = {role.name: role for role in context.framework.spec.task_roles}
        roles = tuple(
            RoleStep(context, role, specs.get(role.name), closing=is_closing).advance() for role in status.roles
        )
        if any(new is not old for new, old in zip(roles, status.roles, strict=True)):
            status = with_roles(status, roles)
            if context.addressed and all(task.attempt_status.pod_ip for role in roles for task in role.tasks):
                context.urgent = True  # the gang is complete, and its barriers wait for this write
    if follows:
        status = drop_drained(context, status)
    return FrameworkStep(context).settle(status)


class Plan:
    """The actions that follow from a settled status, which is about to be persisted: no action relies on a fact that is
    not stored. `strangers`: objects of other owners that hold a needed name, by name."""

    def __init__(self, context: StepContext, status: FrameworkStatus) -> None:
        self._context, self._observed, self._now, self._status = context, context.observed, context.now, status
        self._attempt = status.attempt_status
        framework = context.framework
        self._may_create = framework.spec.execution_type == EXECUTION_START and not framework.problems
        self._create_limit = PROBE if CREATION_BLOCKED in _conditions(status) else CREATE_BATCH
        self._asked: set[str] = set()
        self.actions: list[Action] = []
        self.next_wake: datetime | None = None
        self.back_off = self._observed.creation_failed or bool(self._observed.failed)
        self.strangers: dict[str, Object] = {}
        self._plan_framework()
        if status.state not in _OVER:
            self._plan_tasks()

    def _plan_framework(self) -> None:
        status, name, uid = self._status, self._attempt.config_map_name, self._attempt.config_map_uid or ""
        match status.state:
            case State.CREATION_PENDING if self._may_create:
                self._create(None, name, self._context.framework.uid)
            case State.CREATION_REQUESTED:
                self._await_cache(None, name, uid, status.transition_time)
            case State.PREPARING | State.RUNNING:
                self._confirm(None, name, uid)
            case State.DELETION_PENDING:
                self._end(None, name, uid, reason="the attempt has completed")
            case State.ATTEMPT_COMPLETED:
                self._wake(retry_deadline(status))
            case State.COMPLETED:
                completed, uid = status.completion_time or status.transition_time, self._context.framework.uid
                due = completed + timedelta(seconds=self._context.config.retain_completed)
                if self._now < due:
                    self._wake(due)
                elif uid in self._observed.accepted or uid in self._observed.gone:
                    self._wake(self._now + RECHECK)
                elif uid not in self._observed.failed:
                    self.actions.append(DeleteFramework(uid))

    def _plan_tasks(self) -> None:
        """Plan what the states of the tasks require, and delete the pods of this attempt that no task records."""
        is_closing = self._attempt.completion_status is not None
        may_create = self._may_create and self._status.state in _LIVE
        idle = (State.COMPLETED,) if may_create else (State.COMPLETED, State.CREATION_PENDING)
        for role in self._status.roles:
            for task in role.tasks:
                if task.state in idle:
                    continue
                name, uid = task.attempt_status.pod_name, task.attempt_status.pod_uid or ""
                if task.state in _EXISTING and not self._observed.present and self._observed.pod(name, uid) is not None:
                    continue  # as most tasks are
                target = TaskId(role.name, task.index)
                match task.state:
                    case State.RUNNING | State.PREPARING if not is_closing:
                        self._confirm(target, name, uid)
                    case State.CREATION_PENDING:
                        self._create(target, name, self._attempt.config_map_uid or "")
                    case State.CREATION_REQUESTED if not is_closing:
                        self._await_cache(target, name, uid, task.transition_time)
                    case State.DELETION_PENDING if not is_closing:
                        is_surplus = task.deletion_pending
                        reason = "the task was scaled away" if is_surplus else "the task's attempt has completed"
                        self._end(target, name, uid, reason=reason)
                    case State.DELETING:
                        pod = self._observed.pod(name, uid)
                        due = None if pod is None else force_deadline(pod, role)
                        if due is not None and self._now < due:
                            self._wake(due)
                        elif due is not None:
                            reason = "it did not end within its graceful deletion timeout"
                            self._delete(target, name, uid, pod, grace=0, confirm=True, reason=reason)
        owner = self._attempt.config_map_uid
        if is_closing or owner is None:
            return
        recorded = {task.attempt_status.pod_uid for role in self._status.roles for task in role.tasks}
        for pod in self._observed.pods():
            if uid_of(pod) not in recorded and _owner_of(pod) == owner and not is_deleting(pod):  # an orphan
                index = labels_of(pod).get(TASK_INDEX, "")
                target = TaskId(labels_of(pod).get(TASK_ROLE_NAME, ""), int(index) if index.isdecimal() else -1)
                self._delete(target, name_of(pod), uid_of(pod), pod, reason=_UNRECORDED)

    def _create(self, target: Target, name: str, owner: str) -> None:
        """Plan a creation. If the name is taken, delete an orphan of ours; wait for other objects to go."""
        holder = self._observed.holder(target, name)
        if holder is None:
            if self._observed.creation_failed:
                self._wake(self._now + RECHECK)
            elif self._create_limit > 0:
                self._create_limit -= 1
                self.actions.append(Create(target))
        elif is_deleting(holder):
            self._wake(self._now + RECHECK)
        elif _owner_of(holder) == owner:
            self._delete(target, name, uid_of(holder), holder, reason=_UNRECORDED)
        elif annotations_of(holder).get(FRAMEWORK_UID) == self._context.framework.uid:
            self._wake(self._now + RECHECK)  # of an earlier attempt; the garbage collector removes it
        else:
            self.strangers[name] = holder
            self._wake(self._now + RECHECK)

    def _await_cache(self, target: Target, name: str, uid: str, since: datetime) -> None:
        if self._found(target, name, uid) is not None:
            return
        due = cache_deadline(since, self._context.config)
        if self._now < due:
            self._wake(due)
        else:
            self._delete(target, name, uid, None, confirm=True, reason="it did not appear in the cache in time")

    def _confirm(self, target: Target, name: str, uid: str) -> None:
        if uid in self._observed.present:
            self._wake(self._now + RECHECK)
        elif uid not in self._observed.failed and self._found(target, name, uid) is None:
            self.actions.append(Confirm(target, name, uid))

    def _found(self, target: Target, name: str, uid: str) -> Object | None:
        return self._observed.config_map(uid) if target is None else self._observed.pod(name, uid)

    def _end(self, target: Target, name: str, uid: str, *, reason: str) -> None:
        """Delete an object whose outcome is fixed. If the cache does not show it, repeat until it is certainly gone."""
        found = self._found(target, name, uid)
        self._delete(target, name, uid, found, confirm=found is None, reason=reason)

    def _delete(
        self,
        target: Target,
        name: str,
        uid: str,
        found: Object | None,
        *,
        grace: int | None = None,
        confirm: bool = False,
        reason: str,
    ) -> None:
        """Plan the deletion of an object. `found`: the object as observed, if it was."""
        if uid in self._asked or uid in self._observed.failed:
            return
        self._asked.add(uid)
        if uid not in self._observed.accepted:
            check = found is None or not belongs(found, self._context.framework, self._status, target)
            self.actions.append(Delete(target, name, uid, grace, confirm, reason, check))
        elif confirm:
            self.back_off = True
        else:
            self._wake(self._now + RECHECK)

    def _wake(self, due: datetime) -> None:
        if due > self._now and (self.next_wake is None or due < self.next_wake):
            self.next_wake = due


def belongs(obj: Object, framework: Framework, status: FrameworkStatus, target: Target) -> bool:
    """Return whether the object is the Framework's by its own metadata: its controller and, of a pod, the annotation of
    the Framework's UID. The status is not enough, because every user who may edit the Framework can write it."""
    if target is None:
        return _owner_of(obj) == framework.uid
    is_for_it = annotations_of(obj).get(FRAMEWORK_UID) == framework.uid
    return is_for_it and _owner_of(obj) == (status.attempt_status.config_map_uid or "")


def _owner_of(obj: Object) -> str:
    owner = controller_of(obj)
    return str(owner["uid"]) if owner else ""


def _summarised(context: StepContext, status: FrameworkStatus, strangers: Mapping[str, Object]) -> FrameworkStatus:
    """Return the status with its current conditions, and note Events for what stops the Framework."""
    problems, before = context.framework.problems, _conditions(status)
    if problems and (VALID not in before or before[VALID].message != _listed(problems)):
        context.notes.append(Note("Warning", "InvalidFramework", _listed(problems)))
    blockage = _new_blockage(context.observed, strangers)
    if blockage is not None:
        context.notes.append(Note("Warning", blockage.reason, blockage.message))
    elif CREATION_BLOCKED in before and status.attempt_status.completion_status is None:
        states = {status.state, *(task.state for role in status.roles for task in role.tasks)}
        if State.CREATION_PENDING in states and not context.observed.creation_succeeded:
            blockage = Blockage(before[CREATION_BLOCKED].reason, before[CREATION_BLOCKED].message)
    findings = _findings(context, status, blockage)
    conditions = tuple(_condition(context, finding, before.get(finding.type)) for finding in findings)
    if conditions == tuple(before.values()):
        return status
    context.urgent = True
    return replace(status, conditions=conditions or UNSET)


def _conditions(status: FrameworkStatus) -> dict[str, Condition]:
    return {condition.type: condition for condition in status.conditions or ()}


def _new_blockage(observed: Observed, strangers: Mapping[str, Object]) -> Blockage | None:
    """Return the blockage that this step has seen, or None."""
    for name, holder in sorted(strangers.items()):
        kind = holder.get("kind") or "object"
        text = f"{name} exists already and is not this Framework's ({kind}); rename the Framework or remove the object"
        return Blockage("NameTaken", text)
    for refusal in sorted(observed.refusals.values(), key=lambda refusal: str(refusal.target or "")):
        if 400 <= refusal.status < 500 and refusal.status != 429:
            reason = "QuotaExceeded" if is_quota(refusal.message) else "CreationRefused"
            return Blockage(reason, f"{refusal.target or 'the ConfigMap'}: {refusal.message}")
    return None


def _findings(context: StepContext, status: FrameworkStatus, blockage: Blockage | None) -> Iterator[_Finding]:
    problems, outcome = context.framework.problems, status.attempt_status.completion_status
    if problems:
        yield _Finding(VALID, False, "InvalidSpec", _listed(problems))
    elif context.config.native_mode:
        yield _Finding(VALID, True, "SpecAccepted", "")
    if blockage is not None:
        yield _Finding(CREATION_BLOCKED, True, *blockage)
    if not context.config.native_mode:
        return
    if outcome is not None:
        yield _Finding(READY, False, "AttemptCompleted", "the attempt has ended")
    else:
        tasks = [task for role in status.roles for task in role.tasks if not task.deletion_pending]
        ready = sum(bool(task.attempt_status.pod_ip) for task in tasks)
        is_true = ready == len(tasks)
        reason = "AllTasksHaveAddresses" if is_true else "TasksAreMissing"
        yield _Finding(READY, is_true, reason, f"{ready} of {len(tasks)} tasks have an address")
    if status.state is not State.COMPLETED or outcome is None:
        yield _Finding(COMPLETED, False, status.state.value, "")
    else:
        yield _Finding(COMPLETED, True, outcome.phrase or "Completed", outcome.diagnostics)
        yield _Finding(SUCCEEDED, is_succeeded(outcome), outcome.phrase or "Completed", outcome.diagnostics)


def _listed(problems: tuple[Problem, ...]) -> str:
    shown = "; ".join(str(problem) for problem in problems[:3])
    return shown if len(problems) <= 3 else f"{shown}; and {len(problems) - 3} more"


def _condition(context: StepContext, finding: _Finding, before: Condition | None) -> Condition:
    """Return the condition. A blockage keeps its first message, which would otherwise change with each number in the
    server's answers. Without a status subresource our own writes raise the generation, so an otherwise unchanged
    condition keeps its generation."""
    status = "True" if finding.is_true else "False"
    message, generation = finding.message, context.framework.generation
    if before is not None and before.status == status:
        since = before.last_transition_time
        if before.type == CREATION_BLOCKED and before.reason == finding.reason:
            message = before.message
        if not context.config.native_mode and (before.reason, before.message) == (finding.reason, message):
            generation = before.observed_generation
    else:
        since = context.now
    return Condition(
        type=finding.type,
        status=status,
        observed_generation=generation,
        last_transition_time=since,
        reason=finding.reason,
        message=message,
    )
