"""Names that other programs read: the kind, labels, annotations and environment variables of Frameworks.

Source: the API of frameworkcontroller, whose objects, pods and barrier these are compatible with.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from store.kube.resources import Resource

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
"""Bytes of JSON from which on the statuses of the task roles are compressed, where compression is enabled."""

MAX_TASK_NUMBER = 10_000
"""Most tasks of one role."""


class State(StrEnum):
    """Of a Framework and of a task alike: the one's attempt is a ConfigMap, the other's a Pod; "the object" below."""

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


ExecutionType = Literal["Create", "Start", "Stop"]
EXECUTION_CREATE: ExecutionType = "Create"
EXECUTION_START: ExecutionType = "Start"
EXECUTION_STOP: ExecutionType = "Stop"

SUCCEEDED = "Succeeded"
FAILED = "Failed"
TRANSIENT = "Transient"
CONFLICT = "Conflict"
PERMANENT = "Permanent"


def config_map_name(framework: str) -> str:
    """The ConfigMap that stands for an attempt of the Framework; the same for all its attempts."""
    return f"{framework}-attempt"


def pod_name(framework: str, role: str, index: int) -> str:
    """The pod of a task; the same for all its attempts. It splits unambiguously, because no part holds a dash."""
    return f"{framework}-{role}-{index}"
