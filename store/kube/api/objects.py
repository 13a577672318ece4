"""Kubernetes objects in their wire form, dicts, and the resources they belong to.

Unknown fields of an object survive because they are never touched. Objects from an informer are shared: never change
one in place, copy first. Phases of pods, times and quantities are read here, too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, TypeAlias
from urllib.parse import quote

Object: TypeAlias = dict[str, Any]
_IDENTITY = ("name", "namespace", "uid", "resourceVersion")


@dataclass(frozen=True, slots=True)
class Resource:
    """One kind of object in one version of its group; `group` is "" for the core group."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        """The value of `apiVersion` in the objects, such as `v1` or `apps/v1`."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def root(self) -> str:
        """The path of the group's version, where discovery lists its resources."""
        return f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """Return the path of a collection (without a namespace, of all), of one object, or of a subresource of it."""
        parts = [self.root]
        if namespace and self.namespaced:
            parts += ["namespaces", quote(namespace, safe="")]
        parts.append(self.plural)
        parts += [quote(part, safe="") for part in (name, subresource) if part]
        return "/".join(parts)

    def in_version(self, version: str) -> Resource:
        return replace(self, version=version)


PODS = Resource("", "v1", "pods", "Pod")
SERVICES = Resource("", "v1", "services", "Service")
CONFIG_MAPS = Resource("", "v1", "configmaps", "ConfigMap")
NODES = Resource("", "v1", "nodes", "Node", namespaced=False)
EVENTS = Resource("", "v1", "events", "Event")
LEASES = Resource("coordination.k8s.io", "v1", "leases", "Lease")
CUSTOM_RESOURCE_DEFINITIONS = Resource(
    "apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition", namespaced=False
)
POD_DISRUPTION_BUDGETS = Resource("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget")


class MalformedObject(dict[str, Any]):
    """The identity of an object that can't be decoded, as far as it can be read, and nothing more, so that nothing is
    decided from the rest. `reason`: why it can't be decoded."""

    def __init__(self, what: object, reason: str) -> None:
        metadata = what.get("metadata") if isinstance(what, dict) else None
        known = metadata if isinstance(metadata, dict) else {}
        super().__init__(metadata={name: known[name] for name in _IDENTITY if isinstance(known.get(name), str)})
        self.reason = reason


def name_of(obj: Object) -> str:
    return str(obj["metadata"]["name"])


def namespace_of(obj: Object) -> str:
    """Return the object's namespace; "" for a cluster-scoped object."""
    return str(obj["metadata"].get("namespace") or "")


def key_of(obj: Object) -> str:
    """Return `NAMESPACE/NAME`, or `NAME` for a cluster-scoped object: the key in work queues and caches."""
    return join_key(namespace_of(obj), name_of(obj))


def join_key(namespace: str, name: str) -> str:
    return f"{namespace}/{name}" if namespace else name


def split_key(key: str) -> tuple[str, str]:
    """Return (namespace, name) of a key. Raises ValueError for a key of more than two parts, as client-go does."""
    namespace, _, name = key.rpartition("/")
    if "/" in namespace:
        raise ValueError(f"{key!r} is not a key: write NAMESPACE/NAME, or NAME for an object of the whole cluster")
    return namespace, name


def uid_of(obj: Object) -> str:
    return str(obj["metadata"].get("uid") or "")


def resource_version_of(obj: Object) -> str:
    return str(obj["metadata"].get("resourceVersion") or "")


def labels_of(obj: Object) -> dict[str, str]:
    return obj["metadata"].get("labels") or {}


def annotations_of(obj: Object) -> dict[str, str]:
    return obj["metadata"].get("annotations") or {}


def is_deleting(obj: Object) -> bool:
    """Return whether the object's deletion was accepted; it may still exist for long."""
    return bool(obj["metadata"].get("deletionTimestamp"))


def controller_of(obj: Object) -> Object | None:
    """Return the object's controlling owner reference, or None for an orphan."""
    for reference in obj["metadata"].get("ownerReferences") or ():
        if reference.get("controller"):
            found: Object = reference
            return found
    return None


def is_controlled_by(obj: Object, owner: Object) -> bool:
    """Return whether the object's controller is `owner` itself, not another object of its name."""
    return (controller_of(obj) or {}).get("uid") == uid_of(owner)


def owner_reference(owner: Object, *, api_version: str, kind: str) -> Object:
    """Return a controller's reference to `owner`. Version and kind are passed in: items of a list do not carry them."""
    return {
        "apiVersion": api_version,
        "kind": kind,
        "name": name_of(owner),
        "uid": uid_of(owner),
        "controller": True,
        "blockOwnerDeletion": True,
    }


def merge_patch_between(old: Object, new: Object) -> Object:
    """Return the smallest merge patch (RFC 7386) that turns `old` into `new`; {} when they are equal. Removed members
    are null."""
    patch: Object = {name: None for name in old if name not in new}
    for name, value in new.items():
        before = old.get(name)
        if isinstance(value, dict) and isinstance(before, dict):
            if inner := merge_patch_between(before, value):
                patch[name] = inner
        elif name not in old or value != before:
            patch[name] = value
    return patch


class PodPhase(StrEnum):
    """The phases of a pod that the API defines."""

    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    UNKNOWN = "Unknown"


def phase_of(pod: Object) -> str:
    """Return the pod's phase; `Pending` without a status, which is the API server's default."""
    return str((pod.get("status") or {}).get("phase") or PodPhase.PENDING)


def has_ended(pod: Object) -> bool:
    """Return whether the pod succeeded or failed, so that it will never run again."""
    return phase_of(pod) in (PodPhase.SUCCEEDED, PodPhase.FAILED)


def has_succeeded(pod: Object) -> bool:
    return phase_of(pod) == PodPhase.SUCCEEDED


def format_time(unix_seconds: float) -> str:
    """Return a `metav1.Time`: `2006-01-02T15:04:05Z`."""
    return datetime.fromtimestamp(int(unix_seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def format_micro_time(unix_seconds: float) -> str:
    """Return a `metav1.MicroTime`: `2006-01-02T15:04:05.000000Z`."""
    return datetime.fromtimestamp(unix_seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
