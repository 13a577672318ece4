"""The gang as a barrier sees it: whether it is complete, and the files that pass its addresses to the containers.

Readiness is judged from one state of the Framework, purely. Only the few fields that the decision needs are decoded.
Each may be missing or null, and all others are ignored, so the status of any version of any controller is accepted.

A task is ready when its index is within the spec, its pod has an address, and the status does not show it ending. A
task that succeeded counts: it has passed the barrier already, or has none. A task that failed may come back as another
pod until its state is final.

The pod's own identity is checked, too. A pod of an earlier Framework of that name, of an earlier attempt, or one that
was replaced must never join the gang. A pod whose UID is not in the status yet must wait: the operator acts only on the
outcome of pods that it has recorded.

A passed barrier writes the gang's addresses in several forms, each file whole or not at all:

- `framework.json`: the Framework, one line, without apiVersion and kind, its statuses decompressed.
- `membership.json`: the members, and the digest of them.
- `hostfile.ROLE`: the addresses of a role, one per line, for gangs whose list is too long for the environment.
- `injector.sh`: to be sourced; exports the addresses and the digest. It is put in place last.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import ipaddress
import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from controllers.framework.api.types import SUCCEEDED, CompletionPolicy, State
from controllers.framework.api.wire import decode_spec, inflate
from store.decoding import Undecodable, converted, from_json
from store.errors import RcfarmError
from store.kube.api.objects import MalformedObject, Object

FRAMEWORK_OBJECT_FILE_PATH = "./framework.json"
INJECTOR_FILE_PATH = "./injector.sh"
MEMBERSHIP_FILE_PATH = "./membership.json"
HOSTFILE_PREFIX = "./hostfile."

MAX_EXPORT = 128 * 1024
"""Bytes of the longest variable that Linux passes to a program; with a longer one, exec fails."""

_PORT = "65535"  # no port is longer

_COMPRESSED = "taskRoleStatusesCompressed"
_decoder = msgspec.json.Decoder()

_ENDING = frozenset(
    {State.DELETION_PENDING, State.DELETION_REQUESTED, State.DELETING, State.ATTEMPT_COMPLETED, State.COMPLETED}
)
_ROLE_NAME = re.compile(r"[a-z0-9]{1,63}", re.ASCII)
_ATTEMPT = re.compile(r"(?P<id>[0-9]{1,18})_(?P<uid>.+)", re.ASCII)


class BadView(RcfarmError, ValueError):
    """The Framework can't be decoded; the message names the field."""


class _View(msgspec.Struct, frozen=True, rename="camel"):
    """Base of the decoded types."""


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
        """Return the task that the status shows at that index of the role."""
        return next((each.task(index) for each in self.roles if each.name == role), None)


@dataclass(frozen=True, slots=True)
class AttemptInstance:
    """One attempt of a Framework or a task: its number, and the UID of its ConfigMap or pod."""

    id: int
    uid: str

    @classmethod
    def parse(cls, text: str | None) -> AttemptInstance | None:
        """Parse `{id}_{uid}`, the status' form; return None for anything else."""
        found = _ATTEMPT.fullmatch(text or "")
        return cls(int(found["id"]), found["uid"]) if found else None


@dataclass(frozen=True, slots=True)
class Identity:
    """The pod's identity from its environment. An unset variable is not checked."""

    framework_uid: str = ""
    framework_attempt: AttemptInstance | None = None
    task_role: str = ""
    task_index: int | None = None
    task_attempt: AttemptInstance | None = None


@dataclass(frozen=True, slots=True)
class Member:
    """A task that is ready."""

    index: int
    ip: str
    pod_uid: str


@dataclass(frozen=True, slots=True)
class Role:
    """A role that is in both spec and status, with its members in the order of their indexes."""

    name: str
    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Look:
    """The verdict on one state of a Framework.

    `total`: number of tasks in the spec; `ready`: number of ready ones. `missing`: the tasks that are not ready, with
    reasons; this pod is among them until the status shows it. `roles`: in the status' order. `foreign`: why this pod
    does not belong to the gang and never will, or "". `lost`: why this attempt's gang can't become complete, or "".
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
    """A task of the spec. `member` is None while it is not ready; `reason` says why."""

    role: str
    index: int
    member: Member | None = None
    reason: str = ""
    is_lost: bool = False

    def __str__(self) -> str:
        return f"{self.role}-{self.index}"


def look_at(framework: FrameworkView, identity: Identity) -> Look:
    """Judge `framework` for a pod with this identity. Raises `BadView`."""
    places = []
    for role in framework.wanted:
        if not _ROLE_NAME.fullmatch(role.name):
            raise BadView(f"the role name {role.name!r} is not valid")
        places += [_place(role.name, index, framework.task(role.name, index)) for index in range(role.task_number or 0)]
    missing = [f"{place} ({place.reason})" for place in places if place.member is None]
    ready = len(places) - len(missing)
    if own := _why_unrecorded(framework, identity):
        missing.append(f"this pod ({own})")
    lost = ", ".join(f"{place} failed and is not tried again" for place in places if place.is_lost)
    if framework.attempt.completion_status is not None or framework.state in _ENDING:
        lost = "the Framework's attempt is ending"
    if framework.metadata.deletion_timestamp:
        lost = "the Framework is being deleted"
    members: dict[str, list[Member]] = {role.name: [] for role in framework.wanted}
    for place in places:
        if place.member is not None:
            members[place.role].append(place.member)
    return Look(
        total=len(places),
        ready=ready,
        missing=tuple(missing),
        roles=tuple(Role(role.name, tuple(members[role.name])) for role in framework.roles if role.name in members),
        foreign=_why_foreign(framework, identity),
        lost=lost,
    )


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
    try:
        address = ipaddress.ip_address(attempt.pod_ip)
    except ValueError as error:
        raise BadView(f"the address of {role}-{index}: {error}") from error
    if isinstance(address, ipaddress.IPv6Address) and address.scope_id:
        raise BadView(f"the address of {role}-{index}, {attempt.pod_ip!r}, is valid only on its own node")
    # The canonical form of the address holds no character that is special to a shell.
    return _Place(role, index, member=Member(index, str(address), attempt.pod_uid or ""))


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


def _own_task(framework: FrameworkView, identity: Identity) -> Task | None:
    if not identity.task_role or identity.task_index is None:
        return None
    return framework.task(identity.task_role, identity.task_index)


def _replaces(shown: Attempt | TaskAttempt, own: AttemptInstance | None) -> bool:
    """Return whether the status shows an attempt that took the place of our own."""
    if own is None:
        return False
    if shown.id is not None and shown.id > own.id:
        return True
    instance = AttemptInstance.parse(shown.instance_uid)
    return instance is not None and (instance.id > own.id or (instance.id == own.id and instance.uid != own.uid))


def _shows(shown: Attempt | TaskAttempt, own: AttemptInstance | None) -> bool:
    """Return whether the status shows our own attempt."""
    return own is None or AttemptInstance.parse(shown.instance_uid) == own


def _name(attempt: Attempt | TaskAttempt) -> str:
    return attempt.instance_uid or str(attempt.id)


def view_of(framework: Object) -> FrameworkView:
    """Decode a decompressed Framework. Raises `BadView`."""
    try:
        return converted(framework, FrameworkView)
    except Undecodable as error:
        raise BadView(str(error)) from error


def decompressed(framework: Object) -> Object:
    """Return the Framework with the statuses of its task roles as plain JSON. Raises `BadView`."""
    if isinstance(framework, MalformedObject):
        raise BadView(framework.reason)
    status = framework.get("status") or {}
    attempt = status.get("attemptStatus") if isinstance(status, dict) else None
    if not isinstance(attempt, dict) or _COMPRESSED not in attempt:
        return framework
    plain = {name: value for name, value in attempt.items() if name != _COMPRESSED}
    if plain.get("taskRoleStatuses") is None and attempt[_COMPRESSED]:
        try:
            raw = inflate(base64.b64decode(attempt[_COMPRESSED], validate=True))
            plain["taskRoleStatuses"] = from_json(_decoder, raw)
        except (TypeError, ValueError) as error:
            raise BadView(f"status.attemptStatus.{_COMPRESSED}: {error}") from error
    return {**framework, "status": {**status, "attemptStatus": plain}}


class File(NamedTuple):
    path: str
    content: bytes
    mode: int = 0o644


def render(framework: Object, look: Look, *, redact: bool = False) -> list[File]:
    """Return the files for a complete gang. `framework` is decompressed. `redact`: leave out pod templates, annotations
    and managedFields, which the containers of one role need not know of another. Raises `BadFramework`."""
    # The Framework is written as frameworkcontroller's barrier does: readers expect every field of the spec.
    spec = decode_spec(framework.get("spec"))
    roles = []
    for role_spec in spec.task_roles:
        policy = role_spec.framework_attempt_completion_policy or CompletionPolicy()
        task = msgspec.structs.replace(role_spec.task, pod={} if redact else role_spec.task.pod)
        roles.append(msgspec.structs.replace(role_spec, framework_attempt_completion_policy=policy, task=task))
    metadata = framework["metadata"]
    if redact:
        metadata = {name: value for name, value in metadata.items() if name not in ("annotations", "managedFields")}
    shown = {
        "metadata": metadata,
        "spec": msgspec.to_builtins(msgspec.structs.replace(spec, task_roles=tuple(roles))),
        "status": framework.get("status"),
    }
    digest = membership_digest(look.roles)
    attempt = (framework.get("status") or {}).get("attemptStatus") or {}
    membership = {
        "framework": {name: framework["metadata"].get(name) for name in ("namespace", "name", "uid")},
        "attemptInstanceUID": attempt.get("instanceUID"),
        "digest": digest,
        "roles": [
            {
                "name": role.name,
                "members": [{"index": each.index, "ip": each.ip, "podUID": each.pod_uid} for each in role.members],
            }
            for role in look.roles
        ],
    }
    return [
        File(FRAMEWORK_OBJECT_FILE_PATH, msgspec.json.encode(shown)),
        File(MEMBERSHIP_FILE_PATH, msgspec.json.encode(membership)),
        *(
            File(f"{HOSTFILE_PREFIX}{role.name}", "".join(f"{member.ip}\n" for member in role.members).encode())
            for role in look.roles
        ),
        File(INJECTOR_FILE_PATH, _injector(look.roles, digest, is_empty=framework.get("status") is None), 0o755),
    ]


def membership_digest(roles: Sequence[Role]) -> str:
    """Return the SHA-256 of every member's (role, index, pod UID), in hex: equal for pods that saw the same gang."""
    lines = sorted((role.name, member.index, member.pod_uid) for role in roles for member in role.members)
    text = "".join(f"{role} {index} {uid}\n" for role, index, uid in lines)
    return hashlib.sha256(text.encode()).hexdigest()


def write_files(directory: Path, files: Sequence[File]) -> None:
    """Put the files in place, in this order, each atomically. Raises `OSError`; later files are then missing."""
    prepared: list[tuple[str, Path]] = []
    try:
        for file in files:
            descriptor, temporary = tempfile.mkstemp(prefix=".barrier-", dir=directory)
            prepared.append((temporary, directory / file.path))
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(file.content)
                os.fchmod(stream.fileno(), file.mode)
        for temporary, path in prepared:
            os.replace(temporary, path)
    finally:
        for temporary, _ in prepared:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)


def _injector(roles: Sequence[Role], digest: str, *, is_empty: bool) -> bytes:
    lines = ["#!/bin/bash"]
    if not is_empty:
        lines.append('echo "frameworkbarrier: setting the addresses of the gang"')
        for role in roles:
            lines += _assignment(f"FB_{role.name.upper()}_IPS", [member.ip for member in role.members])
        for role in roles:
            port = f"${{FB_{role.name.upper()}_PORT}}"
            hosts = (f"[{member.ip}]" if ":" in member.ip else member.ip for member in role.members)
            addresses = [f"{host}:{port}" for host in hosts]
            lines += _assignment(f"FB_{role.name.upper()}_ADDRESSES", addresses, port)
        lines += _assignment("FB_MEMBERSHIP_DIGEST", [digest])
        lines.append('echo "frameworkbarrier: done"')
    return "".join(f"{line}\n" for line in lines).encode()


def _assignment(name: str, items: Sequence[str], port: str = "") -> list[str]:
    """Return the lines that set and print a variable. Only `port` is special to a shell within double quotes."""
    value = ",".join(items)
    length = len(name) + len(value.replace(port, _PORT) if port else value) + len("=\0")
    keyword = "export " if length <= MAX_EXPORT else ""  # too long to export: a shell variable only
    return [f'{keyword}{name}="{value}"', f'echo "{name}=${{{name}}}"']
