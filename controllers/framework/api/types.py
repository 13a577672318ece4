"""A Framework on the wire: the users' spec, the operator's status, and the names that other programs read: the kind,
labels, annotations and environment variables.

All types are immutable: a new status shares its unchanged parts with the former one, so that one changed pod of a
thousand costs one new task, and a comparison for changes is mostly one of identities.

On the wire field names are camelCase, times RFC 3339 in whole seconds, and a value that is not known yet is an explicit
`null`, except for the fields of type `UnsetType`, which are left out. Unknown fields are ignored: the spec is never
written back, and only the operator writes the status. Source: the API of frameworkcontroller,
frameworkcontroller.microsoft.com/v1, whose objects, pods and barrier these are compatible with.

Completion codes say how an attempt ended, and whether that is worth a retry. Those from -999 to 0 and from 200 to 219
are reserved: containers exit with one of the latter only in its predefined sense. All others are exit codes, or come
from the configuration's `podFailureSpec`. Kubelets leave out empty fields of a pod, and fields may be null, so every
read of a pod has a fallback.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from store.kube.api.objects import Object, Resource, has_ended

FRAMEWORKS = Resource("frameworkcontroller.microsoft.com", "v1", "frameworks", "Framework")

FRAMEWORK_NAMESPACE = "FC_FRAMEWORK_NAMESPACE"
FRAMEWORK_NAME = "FC_FRAMEWORK_NAME"
TASK_ROLE_NAME = "FC_TASKROLE_NAME"
TASK_INDEX = "FC_TASK_INDEX"
CONFIG_MAP_NAME = "FC_CONFIGMAP_NAME"
POD_NAME = "FC_POD_NAME"
FRAMEWORK_UID = "FC_FRAMEWORK_UID"
FRAMEWORK_ATTEMPT_ID = "FC_FRAMEWORK_ATTEMPT_ID"
FRAMEWORK_ATTEMPT_INSTANCE_UID = "FC_FRAMEWORK_ATTEMPT_INSTANCE_UID"
CONFIG_MAP_UID = "FC_CONFIGMAP_UID"
TASK_ROLE_UID = "FC_TASKROLE_UID"
TASK_UID = "FC_TASK_UID"
TASK_ATTEMPT_ID = "FC_TASK_ATTEMPT_ID"
POD_UID = "FC_POD_UID"
TASK_ATTEMPT_INSTANCE_UID = "FC_TASK_ATTEMPT_INSTANCE_UID"

FOREGROUND_DELETION = "foregroundDeletion"

LARGE_STATUS = 716_800
"""Bytes of JSON from which the statuses of the task roles are compressed, where compression is enabled."""

MAX_TASK_NUMBER = 10_000
"""Most tasks of one role."""

ExecutionType = Literal["Create", "Start", "Stop"]
EXECUTION_CREATE: ExecutionType = "Create"
EXECUTION_START: ExecutionType = "Start"
EXECUTION_STOP: ExecutionType = "Stop"

SUCCEEDED = "Succeeded"
FAILED = "Failed"
TRANSIENT = "Transient"
CONFLICT = "Conflict"
PERMANENT = "Permanent"


class State(StrEnum):
    """The state of a Framework or a task. "The object" is the attempt's ConfigMap or Pod, respectively."""

    CREATION_PENDING = "AttemptCreationPending"
    """The object may not have been requested. Each attempt starts here."""

    CREATION_REQUESTED = "AttemptCreationRequested"
    """The object was created and its UID is recorded, but the cache has not shown it."""

    PREPARING = "AttemptPreparing"
    """The object exists. Framework: no task has run in this attempt. Task: the pod is pending."""

    RUNNING = "AttemptRunning"
    """Framework: a task has run in this attempt. Task: the pod is running."""

    DELETION_PENDING = "AttemptDeletionPending"
    """The outcome is fixed; the deletion may not have been requested."""

    DELETION_REQUESTED = "AttemptDeletionRequested"
    """The API server accepted the deletion."""

    DELETING = "AttemptDeleting"
    """The object carries a deletion timestamp."""

    ATTEMPT_COMPLETED = "AttemptCompleted"
    """The object is gone. A retry may be waiting for its delay."""

    COMPLETED = "Completed"
    """Final."""


@dataclass(frozen=True, slots=True, order=True)
class TaskId:
    """A task within its Framework."""

    role: str
    index: int

    def __str__(self) -> str:
        return f"{self.role}-{self.index}"


class _Wire(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Base of the wire types."""


class RetryPolicy(_Wire, frozen=True, kw_only=True):
    """`max_retry_count`: -2 retries whatever the outcome, -1 every failure, n ≥ 0 the first n accountable failures.
    `fancy_retry_policy`: transient failures are retried beyond the count, permanent ones never."""

    fancy_retry_policy: bool = False
    max_retry_count: int = 0


class CompletionPolicy(_Wire, frozen=True, kw_only=True):
    """The number of failed, or succeeded, tasks of the role that completes the Framework's attempt; below 1: never."""

    min_failed_task_count: int = 0
    min_succeeded_task_count: int = 0


class TaskSpec(_Wire, frozen=True, kw_only=True):
    """`pod`: the template, undecoded. `pod_graceful_deletion_timeout_sec`: seconds from the request to delete a pod
    until it is deleted by force, so it should exceed the grace period; None: never."""

    retry_policy: RetryPolicy = RetryPolicy()
    pod_graceful_deletion_timeout_sec: int | None = None
    pod: Any = None


class TaskRoleSpec(_Wire, frozen=True, kw_only=True):
    """A group of equal tasks. `framework_attempt_completion_policy` is None if it is left out."""

    name: str = ""
    task_number: int = 0
    framework_attempt_completion_policy: CompletionPolicy | None = None
    task: TaskSpec = TaskSpec()


class FrameworkSpec(_Wire, frozen=True, kw_only=True):
    description: str = ""
    execution_type: ExecutionType = "Start"
    retry_policy: RetryPolicy = RetryPolicy()
    task_roles: tuple[TaskRoleSpec, ...] = ()

    def role(self, name: str) -> TaskRoleSpec | None:
        return next((role for role in self.task_roles if role.name == name), None)


class RetryPolicyStatus(_Wire, frozen=True, kw_only=True):
    """`total_retried_count` is the id of the attempt. `retry_delay_sec` is set while a retry is scheduled."""

    total_retried_count: int = 0
    accountable_retried_count: int = 0
    retry_delay_sec: int | None = None


class CompletionType(_Wire, frozen=True, kw_only=True):
    """`name`: Succeeded or Failed. `attributes`: any of Transient, Conflict, Permanent."""

    name: str
    attributes: tuple[str, ...] | None = ()


class ContainerCompletion(_Wire, frozen=True, kw_only=True, omit_defaults=True):
    """The end of a container; `code` is 0 also while it has not ended."""

    name: str
    reason: str = ""
    message: str = ""
    signal: int = 0
    code: int


class PodCompletion(_Wire, frozen=True, kw_only=True, omit_defaults=True):
    reason: str = ""
    message: str = ""
    containers: tuple[ContainerCompletion, ...] = ()


class Trigger(_Wire, frozen=True, kw_only=True, omit_defaults=True):
    """The task that completed the attempt."""

    message: str = ""
    task_role_name: str = ""
    task_index: int | None = None


class CompletionStatus(_Wire, frozen=True, kw_only=True):
    """The outcome of an attempt. `pod` only for tasks, `trigger` only for Frameworks."""

    code: int
    phrase: str
    type: CompletionType
    diagnostics: str = ""
    pod: PodCompletion | UnsetType | None = UNSET
    trigger: Trigger | UnsetType | None = UNSET


class TaskAttemptStatus(_Wire, frozen=True, kw_only=True):
    """One attempt of a task. `instance_uid`: `{id}_{pod_uid}`."""

    id: int
    start_time: datetime
    run_time: datetime | None = None
    completion_time: datetime | None = None
    instance_uid: str | None = msgspec.field(default=None, name="instanceUID")
    pod_name: str
    pod_uid: str | None = msgspec.field(default=None, name="podUID")
    pod_node_name: str | None = None
    pod_ip: str | None = msgspec.field(default=None, name="podIP")
    pod_host_ip: str | None = msgspec.field(default=None, name="podHostIP")
    completion_status: CompletionStatus | None = None


class TaskStatus(_Wire, frozen=True, kw_only=True):
    """`deletion_pending`: scaled away; the task ends, even if the spec includes its index again."""

    index: int
    instance_uid: str = msgspec.field(name="instanceUID")
    start_time: datetime
    run_time: datetime | None = None
    completion_time: datetime | None = None
    state: State
    transition_time: datetime
    deletion_pending: bool = False
    retry_policy_status: RetryPolicyStatus
    attempt_status: TaskAttemptStatus


class TaskRoleStatus(_Wire, frozen=True, kw_only=True):
    """`pod_graceful_deletion_timeout_sec` is copied from the spec, because it also applies to roles that left the spec.
    Tasks are in the order of their indices, without gaps."""

    name: str
    instance_uid: str = msgspec.field(name="instanceUID")
    pod_graceful_deletion_timeout_sec: int | None = None
    task_statuses: tuple[TaskStatus, ...] | None = ()

    @property
    def tasks(self) -> tuple[TaskStatus, ...]:
        return self.task_statuses or ()

    def task(self, index: int) -> TaskStatus | None:
        """Return the task of that index, or None once it was scaled away."""
        return self.tasks[index] if 0 <= index < len(self.tasks) else None


class FrameworkAttemptStatus(_Wire, frozen=True, kw_only=True):
    """One attempt of the Framework. `instance_uid`: `{id}_{config_map_uid}`. The order of roles may differ from the
    spec's. In memory the roles are never compressed."""

    id: int
    start_time: datetime
    run_time: datetime | None = None
    completion_time: datetime | None = None
    instance_uid: str | None = msgspec.field(default=None, name="instanceUID")
    config_map_name: str
    config_map_uid: str | None = msgspec.field(default=None, name="configMapUID")
    completion_status: CompletionStatus | None = None
    task_role_statuses: tuple[TaskRoleStatus, ...] | None = None
    task_role_statuses_compressed: bytes | UnsetType | None = UNSET


class Condition(_Wire, frozen=True, kw_only=True):
    """`metav1.Condition`. `status`: True, False or Unknown."""

    type: str
    status: str
    observed_generation: int = 0
    last_transition_time: datetime
    reason: str
    message: str = ""


class FrameworkStatus(_Wire, frozen=True, kw_only=True):
    """`conditions` is our addition to frameworkcontroller's status; it is left out while there are none."""

    start_time: datetime
    run_time: datetime | None = None
    completion_time: datetime | None = None
    state: State
    transition_time: datetime
    retry_policy_status: RetryPolicyStatus
    attempt_status: FrameworkAttemptStatus
    conditions: tuple[Condition, ...] | UnsetType = UNSET

    @property
    def roles(self) -> tuple[TaskRoleStatus, ...]:
        return self.attempt_status.task_role_statuses or ()

    def role(self, name: str) -> TaskRoleStatus | None:
        """Return the role of that name, or None."""
        return next((role for role in self.roles if role.name == name), None)


class Problem(NamedTuple):
    """An error in a spec. `field`: its path, such as `spec.taskRoles[0].name`."""

    field: str
    message: str

    def __str__(self) -> str:
        return f"{self.field}: {self.message}"


@dataclass(frozen=True, slots=True)
class Framework:
    """One Framework, decoded. `problems`: those of its spec; while there are any, nothing is created."""

    name: str
    namespace: str
    uid: str
    spec: FrameworkSpec
    status: FrameworkStatus | None = None
    resource_version: str = ""
    generation: int = 0
    deleting: bool = False
    problems: tuple[Problem, ...] = ()


def config_map_name(framework: str) -> str:
    """Return the name of the attempt's ConfigMap; the same for all attempts of the Framework."""
    return f"{framework}-attempt"


def pod_name(framework: str, role: str, index: int) -> str:
    """Return the pod name of a task; the same for all its attempts. It splits unambiguously: no part holds a dash."""
    return f"{framework}-{role}-{index}"


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
        containers=tuple(
            ContainerCompletion(
                name=container.get("name") or "",
                reason=ended.get("reason") or "",
                message=ended.get("message") or "",
                signal=ended.get("signal") or 0,
                code=ended.get("exitCode") or 0,
            )
            for container in container_statuses(pod)
            for ended in (terminated(container) or {},)
        ),
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
