"""The interface of a step: the state that it observes, the notes that it collects, its actions and their outcomes.

A step never acts. It returns the status to persist and, in terms of that status, the actions. The loop around it

1. writes `Step.history` to the log (at least once: before the status that drops it),
2. persists `Step.status` if it differs from the stored one; if that fails, it stops here,
3. performs `Step.actions` with bounded concurrency, in any order, and passes an `Outcome` for each of them to the next
   step at once, until a step returns no actions. The steps after the next one still get those that are `lasting`.

So every fact is stored before the action that relies on it, and a crash in between loses only the answer: an object
that was created, but whose UID was not stored, is found later as an orphan, deleted and created again. Bodies are built
when an action is performed (`controllers.framework.executor`), from the status that the step returned, so a step of
thousands of new tasks stays short.

The observed state is the caches, and the outcomes of the last actions that the caches may not show yet. An object
counts only if it has the UID that the status recorded; another one of the same name is a stranger. An object that a
quorum read or a deletion found to be gone is gone, even if an older cache still shows it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from random import Random
from typing import Literal, NamedTuple, TypeAlias
from uuid import UUID

from controllers.framework.api.types import Framework, FrameworkStatus, TaskId, TaskStatus
from controllers.framework.config import FrameworkConfig
from store.kube.api.objects import Object, uid_of

Target: TypeAlias = TaskId | None
"""A task's pod, or None for the ConfigMap of the Framework's attempt."""

HistoryTrigger = Literal["OnFrameworkRetry", "OnTaskRetry", "OnTaskDeletion"]


@dataclass(frozen=True, slots=True)
class Create:
    """Create the target's object. Outcome: `Created`, `NameTaken` when its name is taken, else `CreateFailed`."""

    target: Target


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete the object `name` if it still has the `uid` (a precondition); a ConfigMap in the foreground.

    `grace_period` 0 deletes a pod by force; None: the pod's own. `confirm`: base the outcome on a quorum read after the
    deletion. `check`: the object may not be the Framework's, as a status may name anything, so read it first and leave
    another's alone. Outcome: `Gone` when no object of ours has that UID, `DeleteAccepted` when the deletion was
    accepted and the object may still exist, `Failed` when the API server was unreachable or refused.
    """

    target: Target
    name: str
    uid: str
    grace_period: int | None = None
    confirm: bool = False
    reason: str = ""
    check: bool = False


@dataclass(frozen=True, slots=True)
class Confirm:
    """Read the object with a quorum: the cache no longer shows it, and no deletion is known. Outcome: `Present`, `Gone`
    when none has that UID, else `Failed`."""

    target: Target
    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class DeleteFramework:
    """Delete the Framework in the foreground, if it still has the `uid`, after its retention time. Outcome:
    `DeleteAccepted`, `Gone` or `Failed`, so that the deletion is not repeated at once."""

    uid: str


Action: TypeAlias = Create | Delete | Confirm | DeleteFramework


class Created(NamedTuple):
    target: Target
    uid: str


class NameTaken(NamedTuple):
    """`holder`: the object that has the name, by a quorum read; None when it has vanished since."""

    target: Target
    holder: Object | None


class CreateFailed(NamedTuple):
    """`status`: the HTTP status, 0 when no answer came (the object may or may not exist)."""

    target: Target
    status: int
    message: str


class DeleteAccepted(NamedTuple):
    uid: str


class Gone(NamedTuple):
    """No object of this UID exists. `final`: its last known state, when an informer delivered it with the deletion."""

    uid: str
    final: Object | None = None


class Present(NamedTuple):
    """The object exists, as read with a quorum."""

    found: Object


class Failed(NamedTuple):
    """A `Delete` or `Confirm` that failed; it is retried after a back-off."""

    uid: str
    message: str


Outcome: TypeAlias = Created | NameTaken | CreateFailed | DeleteAccepted | Gone | Present | Failed


def lasting(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Return the outcomes that hold for every further step of a sync: those about an object's UID.

    Without them, two objects that the cache lacks would be read in turn for as long as it lacks them: each step would
    know of one and ask for the other. The outcome of a creation counts once, because the next attempt has the same
    target.
    """
    return [outcome for outcome in outcomes if not isinstance(outcome, Created | NameTaken | CreateFailed)]


class Note(NamedTuple):
    """An Event for the Framework."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


class Snapshot(NamedTuple):
    """A part about to be dropped from the status: the Framework's whole status, or one task's and its role's name."""

    trigger: HistoryTrigger
    status: FrameworkStatus | TaskStatus
    role: str = ""


class Step(NamedTuple):
    """The result of one step.

    `status`: None while there is nothing to store. `next_wake`: when to step again though nothing changed.
    `back_off`: an action failed in a way that may pass; step again after the queue's rate-limited delay.
    `deferrable`: the status differs from the stored one only in facts that can be read from the objects again, so its
    write may wait for the next one, for a second or two.
    """

    status: FrameworkStatus | None
    actions: tuple[Action, ...] = ()
    next_wake: datetime | None = None
    events: tuple[Note, ...] = ()
    history: tuple[Snapshot, ...] = ()
    back_off: bool = False
    deferrable: bool = False


class Observed:
    """The observed state for one step. `config_map` and `pods` (by name) are the cached objects.

    `created`: UIDs of objects that were just created, by target; each belongs to one attempt, which removes it. `gone`:
    the UIDs of which it is certain that no object exists, with its last state if an informer delivered it.
    """

    def __init__(self, config_map: Object | None, pods: Mapping[str, Object], outcomes: Iterable[Outcome] = ()) -> None:
        self._config_map, self._pods = config_map, pods
        self.refusals: dict[Target, CreateFailed] = {}
        self.name_taken: dict[Target, Object | None] = {}
        self.accepted: set[str] = set()
        self.failed: set[str] = set()
        self.present: dict[str, Object] = {}
        self.created: dict[Target, str] = {}
        self.gone: dict[str, Object | None] = {}
        for outcome in outcomes:
            match outcome:
                case Created(target, uid):
                    self.created[target] = uid
                case CreateFailed(target):
                    self.refusals[target] = outcome
                case NameTaken(target, holder):
                    self.name_taken[target] = holder
                case DeleteAccepted(uid):
                    self.accepted.add(uid)
                case Failed(uid):
                    self.failed.add(uid)
                case Present(found):
                    self.present[uid_of(found)] = found
                case Gone(uid, final):
                    self.gone[uid] = final or self.gone.get(uid)
        self.creation_failed = bool(self.refusals or self.name_taken)
        """Whether a creation has just failed; if so, no object is created before the back-off ends."""
        self.creation_succeeded = bool(self.created)

    def config_map(self, uid: str | None) -> Object | None:
        """Return the ConfigMap of that UID, if it exists."""
        return self._if_it_is(self._config_map, uid)

    def pod(self, name: str, uid: str | None) -> Object | None:
        """Return the pod of that name and UID, if it exists."""
        return self._if_it_is(self._pods.get(name), uid)

    def _if_it_is(self, found: Object | None, uid: str | None) -> Object | None:
        if uid is None or uid in self.gone:
            return None
        if found is not None and found["metadata"].get("uid") == uid:
            return found
        return self.present.get(uid)

    def holder(self, target: Target, name: str) -> Object | None:
        """Return the object that has the name of one to be created."""
        held = self.name_taken.get(target)
        if held is None:
            held = self._config_map if target is None else self._pods.get(name)
        return None if held is None or uid_of(held) in self.gone else held

    def pods(self) -> Iterable[Object]:
        """Return all cached pods, without those known to be gone."""
        return (pod for pod in self._pods.values() if pod["metadata"].get("uid") not in self.gone)


@dataclass(slots=True)
class StepContext:
    """`now` in whole seconds. `urgent`: a change must be stored at once, because it must not be lost or a barrier waits
    for it. `addressed`: a pod got its address."""

    framework: Framework
    observed: Observed
    now: datetime
    rng: Random
    config: FrameworkConfig
    history: list[Snapshot] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    urgent: bool = False
    addressed: bool = False

    def new_uid(self) -> str:
        return str(UUID(int=self.rng.getrandbits(128), version=4))
