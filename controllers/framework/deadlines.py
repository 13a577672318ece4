"""When a step has to be taken although nothing happens."""

from __future__ import annotations

from datetime import datetime, timedelta

from controllers.framework.config import FrameworkConfig
from controllers.framework.pod_report import deletion_requested_at
from controllers.framework.types import FrameworkStatus, TaskRoleStatus
from store.kube.objects import Object


def cache_deadline(requested: datetime, config: FrameworkConfig) -> datetime:
    """Until when an object that was created must have shown up in the cache."""
    return requested + timedelta(seconds=config.object_local_cache_creation_timeout_sec)


def force_deadline(pod: Object, role: TaskRoleStatus) -> datetime | None:
    """When a pod that does not end is deleted by force; None: never."""
    requested, timeout = deletion_requested_at(pod), role.pod_graceful_deletion_timeout_sec
    return None if requested is None or timeout is None else requested + timedelta(seconds=timeout)


def retry_deadline(status: FrameworkStatus) -> datetime:
    """When the attempt that completed is followed by the next."""
    return status.transition_time + timedelta(seconds=status.retry_policy_status.retry_delay_sec or 0)


def retention_deadline(status: FrameworkStatus, config: FrameworkConfig) -> datetime:
    """When a completed Framework is deleted."""
    completed = status.completion_time or status.transition_time
    return completed + timedelta(seconds=config.framework_completed_retain_sec)
