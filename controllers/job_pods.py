"""What a pod's object says to a job's controller: whether it lives, how it ended, and which of two is worth keeping."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime

from store.kube.objects import Object, is_deleting, name_of

_DISRUPTIONS = frozenset(
    {
        "Evicted",  # node pressure, or the taint manager
        "NodeAffinity",  # the node's labels changed between scheduling and admission
        "NodeLost",
        "NodeShutdown",
        "Preempted",
        "Preempting",  # the kubelet makes room for a critical pod
        "Shutdown",
        "Terminated",  # graceful shutdown of the node
        "UnexpectedAdmissionError",  # a device went away between scheduling and admission
    }
)
_OUT_OF = "OutOf"  # OutOfcpu, OutOfmemory, OutOfpods…: the kubelet refused what the scheduler placed


def phase_of(pod: Object) -> str:
    return str(pod.get("status", {}).get("phase") or "Pending")


def has_ended(pod: Object) -> bool:
    """Whether it succeeded or failed; it will never run again."""
    return phase_of(pod) in ("Succeeded", "Failed")


def has_succeeded(pod: Object) -> bool:
    return phase_of(pod) == "Succeeded"


def has_failed(pod: Object) -> bool:
    """Whether it failed by what happened in it or to it, and not because somebody deleted it."""
    return phase_of(pod) == "Failed" and not is_deleting(pod)


def is_active(pod: Object) -> bool:
    """Whether it holds, or may get, a place on a node: neither ended nor on its way out."""
    return not has_ended(pod) and not is_deleting(pod)


def is_running(pod: Object) -> bool:
    return phase_of(pod) == "Running" and not is_deleting(pod)


def was_disrupted(pod: Object) -> bool:
    """Whether the cluster took the pod away: evicted, preempted, refused by its node, or lost with it."""
    status = pod.get("status", {})
    reason = str(status.get("reason") or "")
    if reason in _DISRUPTIONS or reason.startswith(_OUT_OF):
        return True
    conditions = status.get("conditions") or ()
    return any(entry.get("type") == "DisruptionTarget" and entry.get("status") == "True" for entry in conditions)


def exit_code(pod: Object, container: str = "") -> int | None:
    """How the pod's program ended: the code of its default container (`container`, or the first one). When that did not
    fail, the code of the init container or sidecar that did. None when no container has ended."""
    codes = list(_exit_codes(pod, container))
    return next((code for code in codes if code != 0), codes[0] if codes else None)


def _exit_codes(pod: Object, container: str) -> Iterator[int]:
    status = pod.get("status", {})
    default = container or _first_container(pod)
    own = sorted(status.get("containerStatuses") or (), key=lambda entry: entry.get("name") != default)
    for entry in (*own[:1], *(status.get("initContainerStatuses") or ()), *own[1:]):
        terminated = (entry.get("state") or {}).get("terminated")
        if terminated is not None:
            yield int(terminated.get("exitCode") or 0)


def _first_container(pod: Object) -> str:
    containers = pod.get("spec", {}).get("containers") or [{}]
    return str(containers[0].get("name", ""))


def restarts_of(pod: Object) -> int:
    """How often the kubelet restarted containers of the pod in place, init containers included."""
    status = pod.get("status", {})
    entries = (*(status.get("containerStatuses") or ()), *(status.get("initContainerStatuses") or ()))
    return sum(int(entry.get("restartCount") or 0) for entry in entries)


def deletion_time(pod: Object) -> datetime | None:
    """When a pod on its way out should be gone: the end of its grace period. None when nobody deletes it."""
    stamp = pod["metadata"].get("deletionTimestamp")
    return datetime.fromisoformat(stamp) if stamp else None


def is_forced(pod: Object) -> bool:
    """Whether its deletion waits for no kubelet any more, only for finalizers."""
    return is_deleting(pod) and pod["metadata"].get("deletionGracePeriodSeconds") == 0


def best_of(objects: Sequence[Object]) -> Object:
    """Which of several pods (or services) of one replica to keep: one that succeeded, also when it is on its way out;
    then the furthest on its way there; then the oldest."""
    return objects[0] if len(objects) == 1 else min(objects, key=_worth)


_PREFERENCE = {"Succeeded": 0, "Running": 1, "Pending": 2, "Unknown": 3, "Failed": 4}


def _worth(obj: Object) -> tuple[bool, bool, int, bool, str, str]:
    scheduled = bool(obj.get("spec", {}).get("nodeName"))
    created = str(obj["metadata"].get("creationTimestamp") or "")
    preference = _PREFERENCE.get(phase_of(obj), 3)
    return not has_succeeded(obj), is_deleting(obj), preference, not scheduled, created, name_of(obj)
