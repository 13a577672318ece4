"""What a plugin reports: phases, phase information, transitions. Names and meanings are those of Flyte's core plugins.

A transition has the phase of the execution, a version within the phase, a reason for people, and a `TaskInfo` with what
people need to follow the remote work (logs, external resources). The engine publishes an event when the phase, the
version or the content changes, so a plugin need not count versions.

All values are immutable. A constructor copies the `TaskInfo` of its caller; where its time is missing, `t` or, without
one, the current time is filled in. Times are aware; JSON has them as RFC 3339.
"""

from __future__ import annotations

from datetime import UTC, datetime
from enum import Enum, StrEnum
from typing import Any, TypeVar

import msgspec

from store.decoding import converted, is_deep

DEFAULT_PHASE_VERSION = 0
SYSTEM_ERROR_CODE = "SystemError"
MAX_LEVELS = 100  # of JSON within each other, in what plugins hand over; records take twice as many
_MAX_VERSION = 2**32 - 1

E = TypeVar("E", bound="NamedEnum")


class NamedEnum(int, Enum):
    """Numbers with the names of Flyte's constants. A number without a name is accepted: `Phase(77)` prints as such."""

    @classmethod
    def _missing_(cls, value: object) -> NamedEnum | None:
        if not isinstance(value, int) or isinstance(value, bool):
            return None
        unnamed = int.__new__(cls, value)
        unnamed._name_, unnamed._value_ = f"{cls.__name__}({value})", value
        return unnamed

    @classmethod
    def parse(cls: type[E], text: str) -> E:
        """Return the value of a constant's full name, such as "PhaseRunning". Raises `ValueError`."""
        for each in cls:
            if str(each) == text:
                return each
        raise ValueError(f"{text!r} is no {cls.__name__}; the values are {', '.join(str(each) for each in cls)}")

    @classmethod
    def values(cls: type[E]) -> tuple[E, ...]:
        """Return all values that have a name, in their order."""
        return tuple(cls)

    def is_member(self) -> bool:
        """Return true if the number has a name."""
        return self._value_ in type(self)._value2member_map_

    def __str__(self) -> str:
        return type(self).__name__ + self.name.title().replace("_", "") if self.is_member() else self.name

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)


class Phase(NamedEnum):
    """Where an execution is."""

    UNDEFINED = 0  # unknown in this round; accompanies an error
    NOT_READY = 1
    WAITING_FOR_RESOURCES = 2  # nothing is submitted: a quota or a capacity is exhausted
    QUEUED = 3  # submitted, not started
    INITIALIZING = 4  # images are pulled, a cluster starts, …
    RUNNING = 5
    SUCCESS = 6
    RETRYABLE_FAILURE = 7
    PERMANENT_FAILURE = 8
    WAITING_FOR_CACHE = 9  # another execution computes the same result
    ABORTED = 10

    def is_failure(self) -> bool:
        """Return true for the retryable and the permanent failure."""
        return self in (Phase.RETRYABLE_FAILURE, Phase.PERMANENT_FAILURE)

    def is_success(self) -> bool:
        """Return true for success."""
        return self is Phase.SUCCESS

    def is_terminal(self) -> bool:
        """Return true if the attempt ends with this phase: success, the failures, aborted."""
        return self.is_success() or self.is_failure() or self is Phase.ABORTED

    def is_waiting_for_resources(self) -> bool:
        """Return true if nothing is submitted because a resource is exhausted."""
        return self is Phase.WAITING_FOR_RESOURCES


PHASES = Phase.values()


class ErrorKind(StrEnum):
    """Who has to act. Failures of SYSTEM have a retry budget apart from the task's own."""

    UNKNOWN = "UNKNOWN"
    USER = "USER"
    SYSTEM = "SYSTEM"


class CacheStatus(StrEnum):
    """What the catalog did for an execution, or for an external resource."""

    DISABLED = "DISABLED"
    MISS = "MISS"
    HIT = "HIT"
    POPULATED = "POPULATED"
    LOOKUP_FAILURE = "LOOKUP_FAILURE"
    PUT_FAILURE = "PUT_FAILURE"
    SKIPPED = "SKIPPED"


class _Value(msgspec.Struct, frozen=True, omit_defaults=True):
    def __post_init__(self) -> None:
        """Check the fields' types, which Python does not, and raise `ValueError` with the field's name."""
        for name, kind in _FIELDS.get(type(self), {}).items():
            if not isinstance(value := getattr(self, name), kind):
                raise ValueError(f"{type(self).__name__}.{name} is {value!r:.80}, which has another type")
            if isinstance(value, datetime) and value.utcoffset() is None:
                raise ValueError(f"{type(self).__name__}.{name} has no time zone: use datetime.now(UTC)")
            if isinstance(value, tuple) and any(not isinstance(each, _ELEMENTS[name]) for each in value):
                raise ValueError(f"{type(self).__name__}.{name} has a value that is no {_ELEMENTS[name].__name__}")


class ExecutionError(_Value, frozen=True):
    """Why an attempt failed. `code` is stable, for programs; `message` is for people."""

    code: str
    message: str
    kind: ErrorKind = ErrorKind.UNKNOWN

    def __str__(self) -> str:
        return f"{self.code}: {self.message} ({self.kind})"

    def to_json(self) -> dict[str, Any]:
        """Return the value as plain JSON data."""
        return {"code": self.code, "message": self.message, "kind": str(self.kind)}

    @classmethod
    def from_json(cls, value: object) -> ExecutionError:
        """Return the error of `to_json`'s data. Raises `store.decoding.Undecodable`."""
        return converted(value, cls)


class TaskLog(_Value, frozen=True):
    """A link to a log. `ttl`: seconds until the log is gone, None if it stays."""

    uri: str
    name: str = ""
    message_format: str = "UNKNOWN"
    ttl: float | None = None


class ReasonInfo(_Value, frozen=True):
    """A reason for people, and when it arose."""

    reason: str
    occurred_at: datetime | None = None


class ExternalResource(_Value, frozen=True):
    """Something that the task started elsewhere. `index` stays over retries, although `external_id` may change."""

    external_id: str
    cache_status: CacheStatus = CacheStatus.DISABLED
    index: int = 0
    logs: tuple[TaskLog, ...] = ()
    retry_attempt: int = 0
    phase: Phase = Phase.UNDEFINED


class TaskInfo(_Value, frozen=True):
    """What an event shows beside the phase. `custom_info`: a JSON object, which is copied.

    `additional_reasons` are published with the phase and are no part of its identity: they alone cause no event.
    """

    logs: tuple[TaskLog, ...] = ()
    occurred_at: datetime | None = None
    reported_at: datetime | None = None
    custom_info: dict[str, Any] | None = None
    external_resources: tuple[ExternalResource, ...] = ()
    additional_reasons: tuple[ReasonInfo, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.custom_info is None:
            return
        try:
            copied = msgspec.json.decode(msgspec.json.encode(self.custom_info), type=dict[str, Any])
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"TaskInfo.custom_info is no JSON object: {error}") from None
        if is_deep(copied, MAX_LEVELS):
            raise ValueError(f"TaskInfo.custom_info is nested more than {MAX_LEVELS} levels deep")
        msgspec.structs.force_setattr(self, "custom_info", copied)

    def __str__(self) -> str:
        return f"Info<@{self.occurred_at.isoformat() if self.occurred_at else ''}>"

    def to_json(self) -> dict[str, Any]:
        """Return the value as plain JSON data, without fields that have their default."""
        data: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self))
        for resource in data.get("external_resources", ()):
            if "phase" in resource:
                resource["phase"] = str(Phase(resource["phase"]))
        return data

    @classmethod
    def from_json(cls, value: object) -> TaskInfo:
        """Return the info of `to_json`'s data. Raises `store.decoding.Undecodable`."""
        if isinstance(value, dict) and isinstance(resources := value.get("external_resources"), (list, tuple)):
            numbered = []
            for each in resources:
                if isinstance(each, dict) and isinstance(name := each.get("phase"), str):
                    each = each | {"phase": _NUMBERS.get(name, name)}
                numbered.append(each)
            value = value | {"external_resources": numbered}
        return converted(value, cls)


_NUMBERS = {str(each): int(each) for each in PHASES}


class PhaseInfo(_Value, frozen=True):
    """A phase and what is known about it. `version`: 0 to 2^32 - 1. Either `info` or `err` is set, except in
    `PHASE_INFO_UNDEFINED`. `cleanup_on_failure`: the plugin's `abort` is called after a permanent failure, too."""

    phase: Phase = Phase.UNDEFINED
    version: int = DEFAULT_PHASE_VERSION
    info: TaskInfo | None = None
    err: ExecutionError | None = None
    reason: str = ""
    cleanup_on_failure: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.phase.is_member():
            raise ValueError(f"{self.phase} is no phase")
        if isinstance(self.version, bool) or not 0 <= self.version <= _MAX_VERSION:
            raise ValueError(f"the version of a phase is 0 to {_MAX_VERSION}, not {self.version}")

    def with_version(self, version: int) -> PhaseInfo:
        """Return a copy with another version. Raises `ValueError`."""
        return msgspec.structs.replace(self, version=version)

    def __str__(self) -> str:
        if self.err is not None:
            return f"Phase<{self.phase}:{self.version} Error:{self.err}>"
        return f"Phase<{self.phase}:{self.version} {self.info or '<nil>'} Reason:{self.reason}>"


_OPTIONAL_TIME = (datetime, type(None))
_FIELDS: dict[type, dict[str, type | tuple[type, ...]]] = {
    ExecutionError: {"code": str, "message": str, "kind": ErrorKind},
    TaskLog: {"uri": str, "name": str, "message_format": str, "ttl": (int, float, type(None))},
    ReasonInfo: {"reason": str, "occurred_at": _OPTIONAL_TIME},
    ExternalResource: {
        "external_id": str,
        "cache_status": CacheStatus,
        "index": int,
        "logs": tuple,
        "retry_attempt": int,
        "phase": Phase,
    },
    TaskInfo: {
        "logs": tuple,
        "occurred_at": _OPTIONAL_TIME,
        "reported_at": _OPTIONAL_TIME,
        "custom_info": (dict, type(None)),
        "external_resources": tuple,
        "additional_reasons": tuple,
    },
    PhaseInfo: {
        "phase": Phase,
        "version": int,
        "info": (TaskInfo, type(None)),
        "err": (ExecutionError, type(None)),
        "reason": str,
        "cleanup_on_failure": bool,
    },
}
_ELEMENTS: dict[str, type] = {"logs": TaskLog, "external_resources": ExternalResource, "additional_reasons": ReasonInfo}

PHASE_INFO_UNDEFINED = PhaseInfo()


def _dated(info: TaskInfo | None, t: datetime | None = None) -> TaskInfo:
    info = TaskInfo() if info is None else info
    if not isinstance(info, TaskInfo):
        raise ValueError(f"the info of a phase is {info!r:.80}, which is no TaskInfo")
    return info if info.occurred_at else msgspec.structs.replace(info, occurred_at=t or datetime.now(UTC))


def _failure(
    phase: Phase, kind: ErrorKind, code: str, reason: str, info: TaskInfo | None, *, cleanup: bool = False
) -> PhaseInfo:
    error = ExecutionError(code, reason, kind)
    return PhaseInfo(phase, DEFAULT_PHASE_VERSION, _dated(info), error, cleanup_on_failure=cleanup)


def phase_info_not_ready(t: datetime, version: int, reason: str) -> PhaseInfo:
    """Return that the plugin can't start yet."""
    return PhaseInfo(Phase.NOT_READY, version, _dated(None, t), reason=reason)


def phase_info_waiting_for_resources(t: datetime, version: int, reason: str) -> PhaseInfo:
    """Return that nothing was submitted because a resource is exhausted."""
    return phase_info_waiting_for_resources_info(t, version, reason)


def phase_info_waiting_for_resources_info(
    t: datetime, version: int, reason: str, info: TaskInfo | None = None
) -> PhaseInfo:
    """Return that nothing was submitted because a resource is exhausted, with details."""
    return PhaseInfo(Phase.WAITING_FOR_RESOURCES, version, _dated(info, t), reason=reason)


def phase_info_queued(t: datetime, version: int, reason: str) -> PhaseInfo:
    """Return that the work is submitted and has not started."""
    return PhaseInfo(Phase.QUEUED, version, _dated(None, t), reason=reason)


def phase_info_queued_with_task_info(version: int, reason: str, info: TaskInfo | None = None) -> PhaseInfo:
    """Return that the work is submitted and has not started, with details."""
    return PhaseInfo(Phase.QUEUED, version, _dated(info), reason=reason)


def phase_info_initializing(t: datetime, version: int, reason: str, info: TaskInfo | None = None) -> PhaseInfo:
    """Return that the remote system prepares the work."""
    return PhaseInfo(Phase.INITIALIZING, version, _dated(info, t), reason=reason)


def phase_info_running(version: int, info: TaskInfo | None = None) -> PhaseInfo:
    """Return that the work runs."""
    return PhaseInfo(Phase.RUNNING, version, _dated(info))


def phase_info_waiting_for_cache(version: int, info: TaskInfo | None = None) -> PhaseInfo:
    """Return that another execution computes the same result."""
    return PhaseInfo(Phase.WAITING_FOR_CACHE, version, _dated(info))


def phase_info_success(info: TaskInfo | None = None) -> PhaseInfo:
    """Return that the work succeeded."""
    return PhaseInfo(Phase.SUCCESS, DEFAULT_PHASE_VERSION, _dated(info))


def phase_info_failure(code: str, reason: str, info: TaskInfo | None = None) -> PhaseInfo:
    """Return a permanent failure that the task's author has to fix."""
    return _failure(Phase.PERMANENT_FAILURE, ErrorKind.USER, code, reason, info)


def phase_info_failure_with_cleanup(code: str, reason: str, info: TaskInfo | None = None) -> PhaseInfo:
    """Return a permanent failure of the task, after which `abort` is called."""
    return _failure(Phase.PERMANENT_FAILURE, ErrorKind.USER, code, reason, info, cleanup=True)


def phase_info_retryable_failure(code: str, reason: str, info: TaskInfo | None = None) -> PhaseInfo:
    """Return a failure of the task that another attempt may avoid."""
    return _failure(Phase.RETRYABLE_FAILURE, ErrorKind.USER, code, reason, info)


def phase_info_retryable_failure_with_cleanup(code: str, reason: str, info: TaskInfo | None = None) -> PhaseInfo:
    """Return a failure of the task that another attempt may avoid; `abort` is called, whatever the budget is."""
    return _failure(Phase.RETRYABLE_FAILURE, ErrorKind.USER, code, reason, info, cleanup=True)


def phase_info_system_failure(code: str, reason: str, info: TaskInfo | None = None) -> PhaseInfo:
    """Return a permanent failure that an administrator has to fix."""
    return _failure(Phase.PERMANENT_FAILURE, ErrorKind.SYSTEM, code, reason, info)


def phase_info_system_failure_with_cleanup(code: str, reason: str, info: TaskInfo | None = None) -> PhaseInfo:
    """Return a permanent failure of the system, after which `abort` is called."""
    return _failure(Phase.PERMANENT_FAILURE, ErrorKind.SYSTEM, code, reason, info, cleanup=True)


def phase_info_system_retryable_failure(code: str, reason: str, info: TaskInfo | None = None) -> PhaseInfo:
    """Return a failure of the system that another attempt may avoid; the task's own retries are not used."""
    return _failure(Phase.RETRYABLE_FAILURE, ErrorKind.SYSTEM, code, reason, info)


def phase_info_system_retryable_failure_with_cleanup(code: str, reason: str, info: TaskInfo | None = None) -> PhaseInfo:
    """Return a failure of the system that another attempt may avoid; `abort` is called, whatever the budget is."""
    return _failure(Phase.RETRYABLE_FAILURE, ErrorKind.SYSTEM, code, reason, info, cleanup=True)


def phase_info_failed(p: Phase, err: ExecutionError | None, info: TaskInfo | None = None) -> PhaseInfo:
    """Return a failure with an error of the caller's; without one the code is "Unknown". Raises `ValueError` for a
    phase that is no failure."""
    if not p.is_failure():
        raise ValueError(f"{p} is no failure; use PhaseRetryableFailure or PhasePermanentFailure")
    return PhaseInfo(p, DEFAULT_PHASE_VERSION, _dated(info), err or ExecutionError("Unknown", "Unknown error"))


class TransitionType(NamedEnum):
    """The consistency of state between rounds. Both mean the same here: state that was written in a round is what the
    next round reads, because the engine writes it with compare-and-set."""

    EPHEMERAL = 0
    BARRIER = 1  # deprecated


class Transition(_Value, frozen=True):
    """What `handle` returns. `poll_after`: seconds after which the engine calls `handle` again if nothing else wakes
    the execution; None waits for a signal, a deadline or an operator."""

    type: TransitionType
    info: PhaseInfo
    poll_after: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.poll_after is not None and not 0 <= self.poll_after < float("inf"):
            raise ValueError(f"poll_after is {self.poll_after}, not a number of seconds from 0 on")

    def __str__(self) -> str:
        return f"{self.type},{self.info}"


_FIELDS[Transition] = {"type": TransitionType, "info": PhaseInfo, "poll_after": (int, float, type(None))}

UNKNOWN_TRANSITION = Transition(TransitionType.EPHEMERAL, PHASE_INFO_UNDEFINED)


def do_transition(info: PhaseInfo, *, poll_after: float | None = None) -> Transition:
    """Return an ephemeral transition. `poll_after`: seconds. Raises `ValueError` for values of another type."""
    return Transition(TransitionType.EPHEMERAL, info, poll_after)


def do_transition_type(ttype: TransitionType, info: PhaseInfo) -> Transition:
    """Return a transition of the type. Raises `ValueError` for values of another type."""
    return Transition(ttype, info)
