"""What a step asks of the loop around it, and what the loop tells the next step.

A step never acts. It answers the status to persist and, in terms of that status, the actions. The loop

1. writes `Step.history` to the log (at least once: before the status that makes it history),
2. persists `Step.status` if it differs from what is stored; nothing below happens when that fails,
3. performs `Step.actions` with bounded concurrency, in any order, and hands an `Outcome` for each of them to the next
   step at once, until a step asks for nothing more.

So every fact is stored before the act that relies on it, and a crash in between loses no more than the answer: an
object that was created, but whose UID was not stored, is found later as an orphan, deleted and created again.

Bodies are built when an action is performed (`controllers.framework.pod`, `controllers.framework.config_map`), from
the status that the step answered: a step of thousands of new tasks stays short.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal, TypeAlias

from controllers.framework.types import FrameworkStatus, TaskId, TaskStatus
from store.kube.errors import KubeError
from store.kube.objects import Object

Target: TypeAlias = TaskId | None
"""A task's pod, or None for the ConfigMap of the Framework's attempt."""


@dataclass(frozen=True, slots=True)
class Create:
    """Create the target's object. Answer `Created`, `NameTaken` when its name is taken, else `CreateFailed`."""

    target: Target


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete the object `name` if it still is `uid` (a precondition), a ConfigMap in the foreground.

    `grace_period` 0 removes a pod by force; None: its own. `confirm`: answer only from a quorum read after the
    deletion. `check`: nothing has shown yet that the object is the Framework's, so read it first and leave it alone if
    it is not: a status may name anything. Answer `Gone` when no object of ours has that UID (any more),
    `DeleteAccepted` when the deletion was accepted and the object may still exist, `Failed` when the API server could
    not be asked or refused.
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
    """Read the object with a quorum: the cache does not show it any more, and nobody is known to have deleted it.
    Answer `Present`, `Gone` when there is none of that UID, else `Failed`."""

    target: Target
    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class DeleteFramework:
    """Delete the Framework in the foreground, if it still is `uid`: it has been kept long enough. Answer
    `DeleteAccepted`, `Gone` or `Failed`, so that it is not asked for again at once."""

    uid: str


Action: TypeAlias = Create | Delete | Confirm | DeleteFramework


@dataclass(frozen=True, slots=True)
class Created:
    target: Target
    uid: str


@dataclass(frozen=True, slots=True)
class NameTaken:
    """`holder`: who has the name, by a quorum read; None when it has vanished meanwhile."""

    target: Target
    holder: Object | None


@dataclass(frozen=True, slots=True)
class CreateFailed:
    """`status`: the HTTP status, 0 when no answer came (the object may or may not exist)."""

    target: Target
    status: int
    message: str

    @classmethod
    def of(cls, target: Target, error: KubeError) -> CreateFailed:
        return cls(target, error.status, str(error))


@dataclass(frozen=True, slots=True)
class DeleteAccepted:
    uid: str


@dataclass(frozen=True, slots=True)
class Gone:
    """No object of this UID exists. `final`: its last known state, when an informer delivered it with the deletion."""

    uid: str
    final: Object | None = None


@dataclass(frozen=True, slots=True)
class Present:
    """The object exists, as read with a quorum."""

    found: Object


@dataclass(frozen=True, slots=True)
class Failed:
    """A `Delete` or `Confirm` that was not answered; it is asked for again after a back-off."""

    uid: str
    message: str


Outcome: TypeAlias = Created | NameTaken | CreateFailed | DeleteAccepted | Gone | Present | Failed


@dataclass(frozen=True, slots=True)
class Note:
    """An Event for the Framework."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


HistoryTrigger = Literal["OnFrameworkRetry", "OnTaskRetry", "OnTaskDeletion"]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What is about to leave the status: the Framework's whole status, or one task's with the role it belongs to."""

    trigger: HistoryTrigger
    status: FrameworkStatus | TaskStatus
    role: str = ""


@dataclass(frozen=True, slots=True)
class Step:
    """The answer of one step.

    `status`: None as long as nothing is to be stored. `next_wake`: when to ask again though nothing changed.
    `back_off`: an action failed in a way that may pass; ask again after the queue's rate-limited delay.
    `deferrable`: the status differs from the stored one only in what can be told again from the objects, so its write
    may wait for the next one, for a second or two.
    """

    status: FrameworkStatus | None
    actions: tuple[Action, ...] = ()
    next_wake: datetime | None = None
    events: tuple[Note, ...] = ()
    history: tuple[Snapshot, ...] = ()
    back_off: bool = False
    deferrable: bool = False
