"""Whether a gang is whole, from one state of its Framework. Pure.

A task is there when its place is within the spec, its pod has an address, and nothing says that it is ending. A task
that succeeded counts: it has passed the barrier already, or has none. A task that failed may come back as another pod,
until its state is final.

Who we are is looked at too. A pod of an earlier Framework of that name, of an earlier attempt, or one that was replaced
must never join the gang; a pod whose UID is not in the status yet must wait: the operator acts on the outcome of pods
that it has recorded, and what others do is lost.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from controllers.barrier_config import AttemptInstance, Identity
from controllers.barrier_view import Attempt, BadView, FrameworkView, Task, TaskAttempt
from controllers.framework.constants import State

_ENDING = frozenset(
    {State.DELETION_PENDING, State.DELETION_REQUESTED, State.DELETING, State.ATTEMPT_COMPLETED, State.COMPLETED}
)
_ROLE_NAME = re.compile(r"[a-z0-9]{1,63}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Member:
    """A task that is there."""

    index: int
    ip: str
    pod_uid: str


@dataclass(frozen=True, slots=True)
class Role:
    """A role that is in spec and status; its members by index."""

    name: str
    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Look:
    """What one state of a Framework says.

    `total`: tasks of the spec; `ready`: those that are there. `missing`: who is not, and why; that may be this pod,
    while the status does not know it. `roles`: in the status' order. `foreign`: why this pod is none of the gang's and
    never will be, or "". `lost`: why the gang can't become whole in this attempt any more, or "".
    """

    total: int
    ready: int
    missing: tuple[str, ...]
    roles: tuple[Role, ...]
    foreign: str = ""
    lost: str = ""

    @property
    def is_whole(self) -> bool:
        return not (self.missing or self.foreign or self.lost)


@dataclass(frozen=True, slots=True)
class _Place:
    """A task that the spec wants. `member` None: it is not there, for a `reason`."""

    role: str
    index: int
    member: Member | None = None
    reason: str = ""
    is_lost: bool = False

    def __str__(self) -> str:
        return f"{self.role}-{self.index}"


def look_at(framework: FrameworkView, identity: Identity) -> Look:
    """What `framework` says to a pod with this identity. Raises `BadView`."""
    places = list(_places(framework))
    missing = [f"{place} ({place.reason})" for place in places if place.member is None]
    ready = len(places) - len(missing)
    if own := _why_unrecorded(framework, identity):
        missing.append(f"this pod ({own})")
    return Look(
        total=len(places),
        ready=ready,
        missing=tuple(missing),
        roles=tuple(_roles(framework, places)),
        foreign=_why_foreign(framework, identity),
        lost=_why_lost(framework, places),
    )


def _places(framework: FrameworkView) -> Iterator[_Place]:
    for role in framework.wanted:
        if not _ROLE_NAME.fullmatch(role.name):
            raise BadView(f"the role {role.name!r} has a name that the API would not accept")
        for index in range(role.size):
            yield _place(role.name, index, framework.task(role.name, index))


def _place(role: str, index: int, task: Task | None) -> _Place:
    if task is None:
        return _Place(role, index, reason="not created yet")
    if task.deletion_pending:
        return _Place(role, index, reason="being scaled away")
    attempt = task.attempt
    outcome = attempt.completion_status
    if outcome is not None and not outcome.is_success:
        is_final = task.state == State.COMPLETED
        return _Place(role, index, reason="failed" if is_final else "failed, may be tried again", is_lost=is_final)
    if outcome is None and task.state in _ENDING:
        return _Place(role, index, reason="ending")
    if not attempt.pod_ip:
        return _Place(role, index, reason="no address yet")
    return _Place(role, index, member=Member(index, _address(role, index, attempt.pod_ip), attempt.pod_uid or ""))


def _address(role: str, index: int, text: str) -> str:
    """The address in its usual form, which holds nothing that a shell would take for more than text."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError as error:
        raise BadView(f"the address of {role}-{index}: {error}") from error
    if isinstance(address, ipaddress.IPv6Address) and address.scope_id:
        raise BadView(f"the address of {role}-{index}, {text!r}, counts only on its own node")
    return str(address)


def _roles(framework: FrameworkView, places: Iterable[_Place]) -> Iterator[Role]:
    wanted = {role.name for role in framework.wanted}
    members: dict[str, list[Member]] = {}
    for place in places:
        if place.member is not None:
            members.setdefault(place.role, []).append(place.member)
    for role in framework.roles:
        if role.name in wanted:
            yield Role(role.name, tuple(members.get(role.name, ())))


def _why_foreign(framework: FrameworkView, identity: Identity) -> str:
    uid = framework.metadata.uid or ""
    if identity.framework_uid and uid != identity.framework_uid:
        return f"another Framework has the name now: its UID is {uid}, this pod's is {identity.framework_uid}"
    if _replaces(framework.attempt, identity.framework_attempt):
        return f"the Framework's attempt is {_name(framework.attempt)}, this pod belongs to an earlier one"
    own = _own_task(framework, identity)
    if own is not None and _replaces(own.attempt, identity.task_attempt):
        return f"the task's attempt is {_name(own.attempt)}, this pod was replaced"
    return ""


def _why_unrecorded(framework: FrameworkView, identity: Identity) -> str:
    if not _shows(framework.attempt, identity.framework_attempt):
        return "its Framework attempt is not recorded yet"
    if not identity.task_role or identity.task_index is None:
        return ""
    own = _own_task(framework, identity)
    if own is not None and own.deletion_pending:
        return "it is being scaled away"
    return "" if _shows(own.attempt if own else TaskAttempt(), identity.task_attempt) else "its UID is not recorded yet"


def _why_lost(framework: FrameworkView, places: Iterable[_Place]) -> str:
    if framework.metadata.deletion_timestamp:
        return "the Framework is being deleted"
    if framework.attempt.completion_status is not None or framework.state in _ENDING:
        return "the Framework's attempt is ending"
    return ", ".join(f"{place} failed and is not tried again" for place in places if place.is_lost)


def _own_task(framework: FrameworkView, identity: Identity) -> Task | None:
    if not identity.task_role or identity.task_index is None:
        return None
    return framework.task(identity.task_role, identity.task_index)


def _replaces(shown: Attempt | TaskAttempt, own: AttemptInstance | None) -> bool:
    """Whether the status shows an attempt that took the place of our own."""
    if own is None:
        return False
    if shown.id is not None and shown.id > own.id:
        return True
    instance = AttemptInstance.parse(shown.instance_uid)
    return instance is not None and (instance.id > own.id or (instance.id == own.id and instance.uid != own.uid))


def _shows(shown: Attempt | TaskAttempt, own: AttemptInstance | None) -> bool:
    """Whether the status shows our own attempt."""
    return own is None or AttemptInstance.parse(shown.instance_uid) == own


def _name(attempt: Attempt | TaskAttempt) -> str:
    return attempt.instance_uid or str(attempt.id)
