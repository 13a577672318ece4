"""Completion codes: how attempts end, whether each end is worth a retry, and what the raw status of a pod says of it.

Codes from -999 to 0 and from 200 to 219 are reserved: containers exit with one of the latter only in its predefined
sense. All other codes are exit codes, or come from the configuration's `podFailureSpec`. Kubelets leave out empty
fields, and fields may be null, so every read of a pod has a fallback.
Source: frameworkcontroller's predefined completion codes.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from msgspec import UNSET, UnsetType

from controllers.framework.api.types import (
    CONFLICT,
    FAILED,
    PERMANENT,
    SUCCEEDED,
    TRANSIENT,
    CompletionStatus,
    CompletionType,
    ContainerCompletion,
    PodCompletion,
    Trigger,
)
from store.kube.api.objects import Object, has_ended

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
"""The phrase of an exit code that neither is predefined nor matches the `podFailureSpec`."""


class CodeInfo(NamedTuple):
    """The meaning of a code."""

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
    """Return whether the configuration must not use the code."""
    return -999 <= code <= 0 or 200 <= code <= 219


def completion(
    code: int,
    diagnostics: str,
    *,
    pod: PodCompletion | UnsetType = UNSET,
    trigger: Trigger | UnsetType = UNSET,
) -> CompletionStatus:
    """Return the outcome of a predefined code."""
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
    """Return whether the API server refused an object because of a quota, which may have room later."""
    return "exceeded quota" in message


def is_not_ready(message: str) -> bool:
    """Return whether the API server refused because it, or its authorizer, is still starting, also a 403."""
    return "not yet ready to handle request" in message or "RBAC: " in message


def creation_error_code(status: int, message: str) -> int:
    """Return the code of a refused pod, from the HTTP status (0: no answer) and the server's message.

    `POD_CREATION_TRANSIENT_ERROR` does not end the attempt: the creation is retried. A request that was cut short on
    its way is not the user's fault.
    """
    if is_quota(message) or is_not_ready(message) or "object provided is unrecognized" in message:
        return POD_CREATION_TRANSIENT_ERROR
    if status in (400, 403):
        return POD_CREATION_UNKNOWN_ERROR
    if status in (413, 422):
        cut_short = "connection reset" in message or "EOF" in message
        return POD_CREATION_UNKNOWN_ERROR if cut_short else POD_CREATION_PERMANENT_ERROR
    return POD_CREATION_TRANSIENT_ERROR


def container_statuses(pod: Object) -> list[Object]:
    """Return the statuses of the init containers, then of the containers; their names differ."""
    status = pod.get("status") or {}
    return [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]


def terminated(container: Mapping[str, Any]) -> Object | None:
    """Return the container's `terminated` state, or None while it has not ended."""
    return (container.get("state") or {}).get("terminated")


def pod_completion(pod: Object) -> PodCompletion:
    """Return the reason and message of the pod's end, and those of all its containers."""
    status = pod.get("status") or {}
    return PodCompletion(
        reason=status.get("reason") or "",
        message=status.get("message") or "",
        containers=tuple(_container_completion(container) for container in container_statuses(pod)),
    )


def _container_completion(container: Mapping[str, Any]) -> ContainerCompletion:
    ended = terminated(container) or {}
    return ContainerCompletion(
        name=container.get("name") or "",
        reason=ended.get("reason") or "",
        message=ended.get("message") or "",
        signal=ended.get("signal") or 0,
        code=ended.get("exitCode") or 0,
    )


def deletion_requested_at(obj: Object) -> datetime | None:
    """Return when the deletion was requested: the deletion timestamp lies a grace period after that."""
    metadata = obj["metadata"]
    timestamp = metadata.get("deletionTimestamp")
    if not timestamp:
        return None
    return parse_time(timestamp) - timedelta(seconds=metadata.get("deletionGracePeriodSeconds") or 0)


def ended_on_its_own(pod: Object) -> bool:
    """Return whether the pod ended before its deletion was requested. A deleted pod's containers are killed, so it
    fails, too; that must not count as its outcome."""
    if not has_ended(pod):
        return False
    requested = deletion_requested_at(pod)
    if requested is None:
        return True
    ends = [ended for status in container_statuses(pod) if (ended := terminated(status)) is not None]
    finished = [ended.get("finishedAt") for ended in ends]
    return bool(finished) and all(time is not None and parse_time(time) <= requested for time in finished)


def parse_time(text: str) -> datetime:
    """Parse RFC 3339, as Kubernetes writes it."""
    return datetime.fromisoformat(text)
