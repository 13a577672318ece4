"""What the API server makes of an object that is written, for `MemoryKube`: pure functions from objects to objects.

The system's metadata (UID, times, versions, deletion) are the server's alone; a writer's are ignored or are
preconditions. Objects passed in are not changed, and parts of them are shared with the results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from store.kube.api import Propagation
from store.kube.memory_errors import bad_request, conflict, invalid
from store.kube.memory_kinds import NAMESPACES, Kind, Place, place_of
from store.kube.memory_validation import check_object, check_update
from store.kube.objects import Object, annotations_of, namespace_of
from store.kube.resources import NODES, PODS, SERVICES, Resource
from store.kube.times import format_time

FOREGROUND, ORPHAN = "foregroundDeletion", "orphan"
DEFAULT_GRACE = 30
_GENERATED_BASE = 58  # characters that are kept of a generateName; the name has five more
_SYSTEM = ("uid", "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds", "generation", "selfLink")
_FINISHED = ("Succeeded", "Failed")


def binding(resource: Resource, pod: Object, body: Object, now: float) -> Object:
    """The pod, bound to the node that the body of a `binding` names, with its annotations. Its UID is not looked at, as
    by API servers of old."""
    name, node = pod["metadata"]["name"], (body.get("target") or {}).get("name")
    if not node:
        raise invalid(resource, name, "target.name", "Required value")
    if pod["metadata"].get("deletionTimestamp"):
        raise conflict(resource, name, f"pod {name} is being deleted, cannot be assigned to a host")
    if bound := pod["spec"].get("nodeName"):
        raise conflict(resource, name, f'pod {name} is already assigned to node "{bound}"')
    scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": format_time(now)}
    others = [each for each in pod["status"].get("conditions") or () if each["type"] != "PodScheduled"]
    annotations = annotations_of(pod) | annotations_of({"metadata": body.get("metadata") or {}})
    return pod | {
        "metadata": pod["metadata"] | ({"annotations": annotations} if annotations else {}),
        "spec": pod["spec"] | {"nodeName": node},
        "status": pod["status"] | {"conditions": [*others, scheduled]},
    }


def prepare_create(
    kind: Kind,
    resource: Resource,
    body: Object,
    namespace: str,
    *,
    now: float,
    uid: str,
    suffix: Callable[[], str],
) -> Object:
    """The object that a create stores, yet without a resource version."""
    metadata = _clean_metadata(body)
    if metadata.get("namespace") not in (None, "", namespace):
        raise bad_request("the namespace of the provided object does not match the namespace sent on the request")
    for name in (*_SYSTEM, "namespace"):
        metadata.pop(name, None)
    if not metadata.get("name") and metadata.get("generateName"):
        metadata["name"] = str(metadata["generateName"])[:_GENERATED_BASE] + suffix()
    metadata |= {"uid": uid, "creationTimestamp": format_time(now)}
    if namespace:
        metadata["namespace"] = namespace
    if kind.has_generation:
        metadata["generation"] = 1
    obj = _with_kind(resource, _cleaned(kind, body)) | {"metadata": metadata}
    if kind.has_status and resource != NODES:
        obj.pop("status", None)
    _set_defaults(resource, obj)
    check_object(kind, resource, obj)
    return obj


def prepare_update(
    kind: Kind, resource: Resource, old: Object, body: Object, *, subresource: str = "", is_patch: bool = False
) -> Object:
    """The object that a replacement or a patch's result stores; its resource version is the old one."""
    metadata = _clean_metadata(body)
    _check_preconditions(kind, resource, old, metadata, is_patch)
    for name in ("name", "namespace", "resourceVersion", *_SYSTEM):
        metadata.pop(name, None)
        if name in old["metadata"]:
            metadata[name] = old["metadata"][name]
    new = _with_kind(resource, _cleaned(kind, body)) | {"apiVersion": old["apiVersion"], "metadata": metadata}
    if kind.has_status:
        new = _status_write(kind, old, new) if subresource == "status" else _replaced(new, old, "status")
    check_object(kind, resource, new)
    check_update(resource, old, new)
    if kind.has_generation and _counted(kind, new) != _counted(kind, old):
        new["metadata"] = metadata | {"generation": int(old["metadata"].get("generation") or 0) + 1}
    return new


def is_removable(obj: Object) -> bool:
    """Whether an object in deletion has nothing left to wait for."""
    metadata = obj["metadata"]
    is_waiting = metadata.get("finalizers") or metadata.get("deletionGracePeriodSeconds")
    return bool(metadata.get("deletionTimestamp")) and not is_waiting


@dataclass(frozen=True, slots=True)
class Deletion:
    """What a delete does. `changed`: the object as it is marked, or None when nothing is written. `removes`: it goes
    away at once."""

    changed: Object | None
    removes: bool


def plan_deletion(
    place: Place, obj: Object, *, now: float, grace_period: int | None = None, propagation: Propagation | None = None
) -> Deletion:
    """What a delete does to `obj`: remove it, or mark it for a kubelet, finalizers or the garbage collector."""
    metadata = dict(obj["metadata"])
    _set_finalizers(metadata, propagation)
    if place == place_of(NAMESPACES):
        metadata.setdefault("deletionTimestamp", format_time(now))
        marked = obj | {"metadata": metadata, "status": {"phase": "Terminating"}}
        return Deletion(marked if marked != obj else None, removes=False)
    if place == place_of(PODS):
        _mark_pod(metadata, obj, now, grace_period)
    elif metadata.get("finalizers"):
        _mark(metadata, now)
    marked = obj | {"metadata": metadata}
    removes = is_removable(marked) if place == place_of(PODS) else not metadata.get("finalizers")
    return Deletion(marked if marked != obj else None, removes)


def _set_finalizers(metadata: dict[str, Any], propagation: Propagation | None) -> None:
    """Deletions that wait for dependents are finalizers; a policy that is asked for overrules those on the object."""
    finalizers = list(metadata.get("finalizers") or ())
    if propagation is None:
        return
    finalizers = [name for name in finalizers if name not in (FOREGROUND, ORPHAN)]
    finalizers += {"Foreground": [FOREGROUND], "Orphan": [ORPHAN], "Background": []}[propagation]
    metadata.pop("finalizers", None)
    if finalizers:
        metadata["finalizers"] = finalizers


def _mark(metadata: dict[str, Any], now: float) -> None:
    if metadata.get("deletionTimestamp"):
        return
    metadata |= {"deletionTimestamp": format_time(now), "deletionGracePeriodSeconds": 0}
    if "generation" in metadata:
        metadata["generation"] += 1


def _mark_pod(metadata: dict[str, Any], pod: Object, now: float, asked: int | None) -> None:
    """Pods have until their deletion time to end; a later request can only bring it forward."""
    current = metadata.get("deletionGracePeriodSeconds")
    if metadata.get("deletionTimestamp"):
        if current is None or asked is None or asked >= current:
            return
        requested_at = _seconds(metadata["deletionTimestamp"]) - current
    else:
        requested_at, asked = now, _grace_of(pod, asked)
    metadata |= {"deletionTimestamp": format_time(requested_at + asked), "deletionGracePeriodSeconds": asked}


def _grace_of(pod: Object, asked: int | None) -> int:
    spec = pod.get("spec") or {}
    if not spec.get("nodeName") or (pod.get("status") or {}).get("phase") in _FINISHED:
        return 0  # there is no kubelet that would have to stop anything
    return int(spec.get("terminationGracePeriodSeconds", DEFAULT_GRACE)) if asked is None else asked


def _check_preconditions(kind: Kind, resource: Resource, old: Object, metadata: Object, is_patch: bool) -> None:
    name, uid, version = old["metadata"]["name"], metadata.get("uid"), metadata.get("resourceVersion")
    if metadata.get("name") != name:
        raise bad_request(
            f"the name of the object ({metadata.get('name')}) does not match the name on the URL ({name})"
        )
    if metadata.get("namespace", "") not in ("", namespace_of(old)):
        raise bad_request("the namespace of the object does not match the namespace on the URL")
    if uid and uid != old["metadata"]["uid"]:
        if is_patch:
            raise invalid(resource, name, "metadata.uid", f"Invalid value: {uid!r}: field is immutable")
        raise conflict(resource, name, f"Precondition failed: UID in precondition: {uid}")
    if version and version != old["metadata"]["resourceVersion"]:
        raise conflict(resource, name, "the object has been modified; please apply your changes to the latest version")
    if not version and kind.needs_version:
        raise invalid(resource, name, "metadata.resourceVersion", "must be specified for an update")


def _status_write(kind: Kind, old: Object, new: Object) -> Object:
    """A write to the status: of custom resources nothing else changes, of the others labels and annotations may."""
    if kind.is_custom:
        return _replaced(old, new, "status")
    owners = old["metadata"].get("ownerReferences")
    metadata = {name: value for name, value in new["metadata"].items() if name != "ownerReferences"}
    return old | {
        "metadata": metadata | ({"ownerReferences": owners} if owners else {}),
        "status": new.get("status") or {},
    }


def _replaced(obj: Object, source: Object, field: str) -> Object:
    """`obj` with the field of `source`, or without it when that has none."""
    rest = {name: value for name, value in obj.items() if name != field}
    return rest | ({field: source[field]} if field in source else {})


def _counted(kind: Kind, obj: Object) -> Object:
    """What a generation is about."""
    ignored = {"metadata", "status"} if kind.has_status else {"metadata"}
    return {name: value for name, value in obj.items() if name not in ignored}


def _clean_metadata(obj: Object) -> Object:
    """Without members that stand for nothing."""
    return {name: value for name, value in (obj.get("metadata") or {}).items() if value not in (None, "", [], {})}


def _cleaned(kind: Kind, obj: Object) -> Object:
    """Without nulls and empty data, which only custom resources keep."""
    if kind.is_custom:
        return obj
    cleaned = {name: _without_nulls(value) for name, value in obj.items() if value is not None}
    return {name: value for name, value in cleaned.items() if value or name not in ("data", "binaryData")}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _with_kind(resource: Resource, obj: Object) -> Object:
    if obj.get("kind") not in (None, resource.kind):
        raise bad_request(f"{obj['kind']} cannot be handled as a {resource.kind}")
    if obj.get("apiVersion") not in (None, resource.api_version):
        raise bad_request(f"the API version in the data ({obj['apiVersion']}) is not {resource.api_version}")
    return obj | {"apiVersion": resource.api_version, "kind": resource.kind}


def _set_defaults(resource: Resource, obj: Object) -> None:
    """The defaults that control loops see the effect of; not all that the server has."""
    if place_of(resource) == place_of(PODS):
        defaults = {
            "restartPolicy": "Always",
            "terminationGracePeriodSeconds": DEFAULT_GRACE,
            "schedulerName": "default-scheduler",
        }
        obj["spec"] = defaults | (obj.get("spec") or {})
        obj["status"] = {"phase": "Pending", "qosClass": "BestEffort"}
    elif place_of(resource) == place_of(SERVICES):
        obj["spec"] = {"type": "ClusterIP", "sessionAffinity": "None"} | (obj.get("spec") or {})
    elif place_of(resource) == place_of(NAMESPACES):
        obj["spec"], obj["status"] = {"finalizers": ["kubernetes"]}, {"phase": "Active"}


def _seconds(text: str) -> float:
    return datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC).timestamp()
