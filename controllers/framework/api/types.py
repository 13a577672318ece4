"""A Framework on the wire: the users' spec, the operator's status, and the names that other programs read: the kind,
labels, annotations and environment variables.

All types are immutable: a new status shares its unchanged parts with the former one, so that one changed pod of a
thousand costs one new task, and a comparison for changes is mostly one of identities.

On the wire field names are camelCase, times RFC 3339 in whole seconds, and a value that is not known yet is an explicit
`null`, except for the fields of type `UnsetType`, which are left out. Unknown fields are ignored: the spec is never
written back, and only the operator writes the status. Source: the API of frameworkcontroller,
frameworkcontroller.microsoft.com/v1, whose objects, pods and barrier these are compatible with.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from store.kube.api.objects import Resource

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
