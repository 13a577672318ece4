"""What a pod says about how it is and how it ended, read from its raw status.

Kubelets leave out what they have nothing to say about, and fields may be null: every read has a fallback.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from controllers.framework.types import ContainerCompletion, PodCompletion
from store.kube.objects import Object

PHASE_PENDING = "Pending"
PHASE_RUNNING = "Running"
PHASE_SUCCEEDED = "Succeeded"
PHASE_FAILED = "Failed"
PHASE_UNKNOWN = "Unknown"


def phase_of(pod: Object) -> str:
    """Its phase; `Pending` for one without a status, as the API server says of new pods."""
    return (pod.get("status") or {}).get("phase") or PHASE_PENDING


def container_statuses(pod: Object) -> list[Object]:
    """Those of its init containers, then of its containers; their names differ."""
    status = pod.get("status") or {}
    return [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]


def terminated(container: Mapping[str, Any]) -> Object | None:
    """How the container ended, or None while it has not."""
    return (container.get("state") or {}).get("terminated")


def pod_completion(pod: Object) -> PodCompletion:
    """Its own words about its end, and those of all its containers."""
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
    """When its deletion was asked for: the deletion timestamp lies a grace period after that."""
    metadata = obj["metadata"]
    timestamp = metadata.get("deletionTimestamp")
    if not timestamp:
        return None
    return parse_time(timestamp) - timedelta(seconds=metadata.get("deletionGracePeriodSeconds") or 0)


def ended_on_its_own(pod: Object) -> bool:
    """Whether it had ended before anybody asked for its deletion. A deleted pod's containers are killed, which makes
    it fail, too; that must not count as its outcome."""
    if phase_of(pod) not in (PHASE_SUCCEEDED, PHASE_FAILED):
        return False
    requested = deletion_requested_at(pod)
    if requested is None:
        return True
    ends = [ended for status in container_statuses(pod) if (ended := terminated(status)) is not None]
    return bool(ends) and all(_finished_by(ended, requested) for ended in ends)


def _finished_by(ended: Mapping[str, Any], limit: datetime) -> bool:
    finished: str | None = ended.get("finishedAt")
    return finished is not None and parse_time(finished) <= limit


def parse_time(text: str) -> datetime:
    """RFC 3339, as Kubernetes writes it."""
    return datetime.fromisoformat(text)
