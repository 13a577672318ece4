"""The few fields of a Framework that a barrier looks at. Pure.

Each may be missing or null, and all others are ignored: the status of any version of any controller will do.
"""

from __future__ import annotations

import base64
from typing import Any

import msgspec

from controllers.framework.compression import inflate
from controllers.framework.constants import SUCCEEDED
from store.decoding import Undecodable, converted, from_json
from store.kube.objects import MalformedObject, Object

_COMPRESSED = "taskRoleStatusesCompressed"
_decoder = msgspec.json.Decoder()


class BadView(ValueError):
    """The Framework can't be read; the message says where."""


class _View(msgspec.Struct, frozen=True, rename="camel"):
    """Base of what is read."""


class CompletionType(_View, frozen=True):
    name: str | None = None


class Completion(_View, frozen=True):
    type: CompletionType | None = None

    @property
    def is_success(self) -> bool:
        return self.type is not None and self.type.name == SUCCEEDED


class TaskAttempt(_View, frozen=True):
    id: int | None = None
    instance_uid: str | None = msgspec.field(default=None, name="instanceUID")
    pod_uid: str | None = msgspec.field(default=None, name="podUID")
    pod_ip: str | None = msgspec.field(default=None, name="podIP")
    completion_status: Completion | None = None


class Task(_View, frozen=True):
    state: str | None = None
    deletion_pending: bool | None = None
    attempt_status: TaskAttempt | None = None

    @property
    def attempt(self) -> TaskAttempt:
        return self.attempt_status or TaskAttempt()


class RoleStatus(_View, frozen=True):
    name: str = ""
    task_statuses: tuple[Task, ...] | None = None

    def task(self, index: int) -> Task | None:
        tasks = self.task_statuses or ()
        return tasks[index] if index < len(tasks) else None


class Attempt(_View, frozen=True):
    id: int | None = None
    instance_uid: str | None = msgspec.field(default=None, name="instanceUID")
    completion_status: Completion | None = None
    task_role_statuses: tuple[RoleStatus, ...] | None = None


class Status(_View, frozen=True):
    state: str | None = None
    attempt_status: Attempt | None = None


class RoleSpec(_View, frozen=True):
    name: str = ""
    task_number: int | None = None

    @property
    def size(self) -> int:
        return self.task_number or 0


class Spec(_View, frozen=True):
    task_roles: tuple[RoleSpec, ...] | None = None


class Metadata(_View, frozen=True):
    uid: str | None = None
    deletion_timestamp: str | None = None


class FrameworkView(_View, frozen=True):
    metadata: Metadata = Metadata()
    spec: Spec | None = None
    status: Status | None = None

    @property
    def wanted(self) -> tuple[RoleSpec, ...]:
        """The roles of the spec."""
        return (self.spec.task_roles if self.spec else None) or ()

    @property
    def state(self) -> str | None:
        return self.status.state if self.status else None

    @property
    def attempt(self) -> Attempt:
        return (self.status.attempt_status if self.status else None) or Attempt()

    @property
    def roles(self) -> tuple[RoleStatus, ...]:
        """The roles of the status, in its order."""
        return self.attempt.task_role_statuses or ()

    def task(self, role: str, index: int) -> Task | None:
        """The task that the status shows in that place."""
        return next((each.task(index) for each in self.roles if each.name == role), None)


def decompressed(framework: Object) -> Object:
    """The Framework with the statuses of its task roles as plain JSON. Raises `BadView`."""
    if isinstance(framework, MalformedObject):
        raise BadView(framework.reason)
    status = framework.get("status") or {}
    attempt = status.get("attemptStatus") if isinstance(status, dict) else None
    if not isinstance(attempt, dict) or _COMPRESSED not in attempt:
        return framework
    plain = {name: value for name, value in attempt.items() if name != _COMPRESSED}
    if plain.get("taskRoleStatuses") is None and attempt[_COMPRESSED]:
        plain["taskRoleStatuses"] = _inflated(attempt[_COMPRESSED])
    return {**framework, "status": {**status, "attemptStatus": plain}}


def view_of(framework: Object) -> FrameworkView:
    """Of a decompressed Framework. Raises `BadView`."""
    try:
        return converted(framework, FrameworkView)
    except Undecodable as error:
        raise BadView(str(error)) from error


def _inflated(encoded: Any) -> Any:
    try:
        return from_json(_decoder, inflate(base64.b64decode(encoded, validate=True)))
    except (TypeError, ValueError) as error:
        raise BadView(f"status.attemptStatus.{_COMPRESSED}: {error}") from error
