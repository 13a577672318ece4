"""Completion codes: how attempts end, and what each way says about a retry.

Codes from -999 to 0 and from 200 to 219 are reserved: containers promise not to exit with the latter unless they mean
them. Everything else is an exit code, or comes from the `podFailureSpec` of the configuration.
Source: frameworkcontroller's predefined completion codes.
"""

from __future__ import annotations

from typing import NamedTuple

from msgspec import UNSET, UnsetType

from controllers.framework.constants import CONFLICT, FAILED, PERMANENT, SUCCEEDED, TRANSIENT
from controllers.framework.types import CompletionStatus, CompletionType, PodCompletion, Trigger

OK = 0
CONTAINER_TRANSIENT_FAILED = 200
CONTAINER_TRANSIENT_CONFLICT_FAILED = 201
CONTAINER_PERMANENT_FAILED = 210
CONFIG_MAP_EXTERNAL_DELETED = -100
POD_EXTERNAL_DELETED = -101
CONFIG_MAP_LOCAL_CACHE_CREATION_TIMEOUT = -110
POD_LOCAL_CACHE_CREATION_TIMEOUT = -111
POD_CREATION_TRANSIENT_ERROR = -120
POD_CREATION_PERMANENT_ERROR = -200
STOP_FRAMEWORK_REQUESTED = -210
FRAMEWORK_ATTEMPT_COMPLETION = -220
DELETE_TASK_REQUESTED = -230
POD_FAILED_WITHOUT_FAILED_CONTAINER = -300
POD_CREATION_UNKNOWN_ERROR = -310

NEVER_RETRIED = frozenset({STOP_FRAMEWORK_REQUESTED, FRAMEWORK_ATTEMPT_COMPLETION, DELETE_TASK_REQUESTED})

UNRECOGNIZED_PHRASE = "ContainerUnrecognizedFailed"
"""Of an exit code that neither is predefined nor matches the `podFailureSpec`."""


class CodeInfo(NamedTuple):
    """What a code stands for."""

    phrase: str
    type: CompletionType


def _failed(phrase: str, *attributes: str) -> CodeInfo:
    return CodeInfo(phrase, CompletionType(name=FAILED, attributes=attributes))


PREDEFINED = {
    OK: CodeInfo("Succeeded", CompletionType(name=SUCCEEDED)),
    CONTAINER_TRANSIENT_FAILED: _failed("ContainerTransientFailed", TRANSIENT),
    CONTAINER_TRANSIENT_CONFLICT_FAILED: _failed("ContainerTransientConflictFailed", TRANSIENT, CONFLICT),
    CONTAINER_PERMANENT_FAILED: _failed("ContainerPermanentFailed", PERMANENT),
    CONFIG_MAP_EXTERNAL_DELETED: _failed("ConfigMapExternalDeleted", TRANSIENT),
    POD_EXTERNAL_DELETED: _failed("PodExternalDeleted", TRANSIENT),
    CONFIG_MAP_LOCAL_CACHE_CREATION_TIMEOUT: _failed("ConfigMapLocalCacheCreationTimeout", TRANSIENT),
    POD_LOCAL_CACHE_CREATION_TIMEOUT: _failed("PodLocalCacheCreationTimeout", TRANSIENT),
    POD_CREATION_TRANSIENT_ERROR: _failed("PodCreationTransientError", TRANSIENT),
    POD_CREATION_PERMANENT_ERROR: _failed("PodCreationPermanentError", PERMANENT),
    STOP_FRAMEWORK_REQUESTED: _failed("StopFrameworkRequested", PERMANENT),
    FRAMEWORK_ATTEMPT_COMPLETION: _failed("FrameworkAttemptCompletion", PERMANENT),
    DELETE_TASK_REQUESTED: _failed("DeleteTaskRequested", PERMANENT),
    POD_FAILED_WITHOUT_FAILED_CONTAINER: _failed("PodFailedWithoutFailedContainer"),
    POD_CREATION_UNKNOWN_ERROR: _failed("PodCreationUnknownError"),
}


def is_reserved(code: int) -> bool:
    """Whether the configuration may not give the code a meaning."""
    return -999 <= code <= 0 or 200 <= code <= 219


def completion(
    code: int,
    diagnostics: str,
    *,
    pod: PodCompletion | UnsetType = UNSET,
    trigger: Trigger | UnsetType = UNSET,
) -> CompletionStatus:
    """The outcome of a predefined code."""
    info = PREDEFINED[code]
    return CompletionStatus(
        code=code, phrase=info.phrase, type=info.type, diagnostics=diagnostics, pod=pod, trigger=trigger
    )


def is_succeeded(outcome: CompletionStatus) -> bool:
    return outcome.type.name == SUCCEEDED


def is_failed(outcome: CompletionStatus) -> bool:
    return outcome.type.name == FAILED


def has_attribute(outcome: CompletionStatus, attribute: str) -> bool:
    return attribute in (outcome.type.attributes or ())


def is_quota(message: str) -> bool:
    """Whether the API server refused an object because of a quota; there may be room later."""
    return "exceeded quota" in message


def is_not_ready(message: str) -> bool:
    """Whether the API server refuses because it, or its authorizer, is still starting: it says 403 then, too."""
    return "not yet ready to handle request" in message or "RBAC: " in message


def creation_error_code(status: int, message: str) -> int:
    """What a refused pod means, by the HTTP status (0: no answer) and the server's message.

    `POD_CREATION_TRANSIENT_ERROR` completes nothing: it is tried again. A request that says it was cut short is not
    believed to be the user's fault.
    """
    if is_quota(message) or is_not_ready(message) or "object provided is unrecognized" in message:
        return POD_CREATION_TRANSIENT_ERROR
    if status in (400, 403):
        return POD_CREATION_UNKNOWN_ERROR
    if status in (413, 422):
        cut_short = "connection reset" in message or "EOF" in message
        return POD_CREATION_UNKNOWN_ERROR if cut_short else POD_CREATION_PERMANENT_ERROR
    return POD_CREATION_TRANSIENT_ERROR
