"""The API server's treatment of written objects, for `MemoryKube`: rules by kind, and the validation and defaults that
matter to control loops, as pure functions from objects to objects; and its errors, with their status, reason and
details.

Only the server sets system metadata (UID, times, versions, deletion); a writer's values are ignored or are
preconditions. Objects passed in are not changed, and parts of them are shared with the results.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec

from store.decoding import without_nulls
from store.kube.api.errors import (
    AlreadyExists,
    BadRequest,
    Conflict,
    Expired,
    Forbidden,
    Invalid,
    NotFound,
    ServerError,
    ServerTimeout,
    TooLarge,
    TooManyRequests,
)
from store.kube.api.objects import (
    CONFIG_MAPS,
    EVENTS,
    LEASES,
    NODES,
    PODS,
    SERVICES,
    Object,
    Resource,
    annotations_of,
    format_time,
    has_ended,
    namespace_of,
)
from store.kube.api.protocol import Propagation
from store.schema.keys import BadLabel, check_labels

SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
DNS_1123 = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
NAMESPACES = Resource("", "v1", "namespaces", "Namespace", namespaced=False)
Place = tuple[str, str]  # (group, plural): versions of a kind share their objects
_POD_SPEC = ("nodeName", "restartPolicy", "schedulerName", "serviceAccountName")
_POD_STATUS = ("phase", "podIP", "nominatedNodeName")
_PODS = frozenset([*(f"spec.{name}" for name in _POD_SPEC), *(f"status.{name}" for name in _POD_STATUS)])
_INVOLVED = ("kind", "namespace", "name", "uid", "apiVersion", "resourceVersion", "fieldPath")
_EVENTS = frozenset([*(f"involvedObject.{name}" for name in _INVOLVED), "reason", "type"])
FOREGROUND, ORPHAN = "foregroundDeletion", "orphan"
DEFAULT_GRACE = 30
_GENERATED_BASE = 58  # characters that are kept of a generateName; the name has five more
_SYSTEM = ("uid", "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds", "generation", "selfLink")
MAX_REQUEST = 3 * 1024 * 1024  # bytes that the server reads
MAX_STORED = 1536 * 1024  # bytes that etcd takes
MAX_CONFIG_MAP = 1024 * 1024
_OWNER_FIELDS = ("apiVersion", "kind", "name", "uid")
_MUTABLE_POD_SPEC = ("activeDeadlineSeconds", "tolerations")


@dataclass(frozen=True, slots=True)
class Kind:
    """Rules of one kind.

    `has_status`: the status is a subresource, and only writes to it change the status. `has_generation`: the
    server counts changes of anything but metadata and such a status. `needs_version`: a replacement without a resource
    version is refused. `replace_creates`: a replacement of a missing object creates it. `is_custom`: defined by a
    CustomResourceDefinition; it has no strategic merge patch. `fields`: the fields for selectors besides name and
    namespace. `name`, `name_length`: the rule for names.
    """

    has_status: bool = False
    has_generation: bool = False
    needs_version: bool = False
    replace_creates: bool = False
    is_custom: bool = False
    fields: frozenset[str] = frozenset()
    name: re.Pattern[str] = SUBDOMAIN
    name_length: int = 253


KINDS: dict[Place, Kind] = {
    ("", "pods"): Kind(has_status=True, fields=_PODS),
    ("", "nodes"): Kind(has_status=True, fields=frozenset({"spec.unschedulable"})),
    ("", "namespaces"): Kind(has_status=True, fields=frozenset({"status.phase"}), name=DNS_1123, name_length=63),
    ("", "services"): Kind(has_status=True, needs_version=True, name=DNS_1035, name_length=63),
    ("", "events"): Kind(replace_creates=True, fields=_EVENTS),
    ("coordination.k8s.io", "leases"): Kind(needs_version=True, replace_creates=True),
    ("policy", "poddisruptionbudgets"): Kind(has_status=True, has_generation=True, needs_version=True),
    ("apiextensions.k8s.io", "customresourcedefinitions"): Kind(
        has_status=True, has_generation=True, needs_version=True
    ),
}
OTHER_BUILT_IN = Kind()
CUSTOM = Kind(has_generation=True, needs_version=True, is_custom=True)
CUSTOM_WITH_STATUS = Kind(has_status=True, has_generation=True, needs_version=True, is_custom=True)


def place_of(resource: Resource) -> Place:
    return resource.group, resource.plural


def is_built_in(group: str) -> bool:
    """Return whether the group is Kubernetes' own; other projects use their own domains, such as `x-k8s.io`."""
    return "." not in group or group.endswith(".k8s.io")


def copy_of(body: Any) -> Any:
    """Return a copy, as if sent over the network. Raises `BadRequest` for a body that is not JSON, or `TooLarge`."""
    try:
        raw = msgspec.json.encode(body)
    except (TypeError, ValueError) as error:
        raise bad_request(f"the body is no JSON: {error}") from None
    if len(raw) > MAX_REQUEST:
        message = f"Request entity too large: limit is {MAX_REQUEST}"
        raise TooLarge(message, status=413, reason="RequestEntityTooLarge")
    return msgspec.json.decode(raw)


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
    """Return the object that a create stores, still without a resource version."""
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
    # Defaults that control loops depend on; the API server has more.
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
    check_object(kind, resource, obj)
    return obj


def prepare_update(
    kind: Kind, resource: Resource, old: Object, body: Object, *, subresource: str = "", is_patch: bool = False
) -> Object:
    """Return the object that a replacement or a patch's result stores; its resource version is the old one."""
    metadata, former = _clean_metadata(body), old["metadata"]
    name, uid, version = former["name"], metadata.get("uid"), metadata.get("resourceVersion")
    if metadata.get("name") != name:
        raise bad_request(
            f"the name of the object ({metadata.get('name')}) does not match the name on the URL ({name})"
        )
    if metadata.get("namespace", "") not in ("", namespace_of(old)):
        raise bad_request("the namespace of the object does not match the namespace on the URL")
    if uid and uid != former["uid"]:
        if is_patch:
            raise invalid(resource, name, "metadata.uid", f"Invalid value: {uid!r}: field is immutable")
        raise conflict(resource, name, f"Precondition failed: UID in precondition: {uid}")
    if version and version != former["resourceVersion"]:
        raise conflict(resource, name, "the object has been modified; please apply your changes to the latest version")
    if not version and kind.needs_version:
        raise invalid(resource, name, "metadata.resourceVersion", "must be specified for an update")
    for field in ("name", "namespace", "resourceVersion", *_SYSTEM):
        metadata.pop(field, None)
        if field in former:
            metadata[field] = former[field]
    new = _with_kind(resource, _cleaned(kind, body)) | {"apiVersion": old["apiVersion"], "metadata": metadata}
    if kind.has_status:
        if subresource != "status":
            new = _replaced(new, old, "status")
        elif kind.is_custom:
            new = _replaced(old, new, "status")
        else:  # also changes labels and annotations
            owners = former.get("ownerReferences")
            kept = {name: value for name, value in metadata.items() if name != "ownerReferences"}
            kept |= {"ownerReferences": owners} if owners else {}
            new = old | {"metadata": kept, "status": new.get("status") or {}}
    check_object(kind, resource, new)
    check_update(resource, old, new)
    if kind.has_generation and _counted(kind, new) != _counted(kind, old):
        new["metadata"] = metadata | {"generation": int(former.get("generation") or 0) + 1}
    return new


def binding(resource: Resource, pod: Object, body: Object, now: float) -> Object:
    """Return the pod, bound to the node in the body of a `binding`, with the annotations in it. The body's UID is
    ignored, as by old API servers."""
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


@dataclass(frozen=True, slots=True)
class Deletion:
    """The effect of a delete. `changed`: the marked object, or None when nothing is written. `removes`: the object is
    removed at once."""

    changed: Object | None
    removes: bool


def is_removable(obj: Object) -> bool:
    """Return whether nothing prevents the removal of an object in deletion."""
    metadata = obj["metadata"]
    is_waiting = metadata.get("finalizers") or metadata.get("deletionGracePeriodSeconds")
    return bool(metadata.get("deletionTimestamp")) and not is_waiting


def plan_deletion(
    place: Place, obj: Object, *, now: float, grace_period: int | None = None, propagation: Propagation | None = None
) -> Deletion:
    """Return the effect of a delete: remove `obj`, or mark it for a kubelet, finalizers or the garbage collector."""
    metadata = dict(obj["metadata"])
    if propagation is not None:  # a requested policy overrules those on the object
        finalizers = [name for name in metadata.pop("finalizers", None) or () if name not in (FOREGROUND, ORPHAN)]
        finalizers += {"Foreground": [FOREGROUND], "Orphan": [ORPHAN], "Background": []}[propagation]
        if finalizers:
            metadata["finalizers"] = finalizers
    if place == place_of(NAMESPACES):
        metadata.setdefault("deletionTimestamp", format_time(now))
        marked = obj | {"metadata": metadata, "status": {"phase": "Terminating"}}
        return Deletion(marked if marked != obj else None, removes=False)
    if place == place_of(PODS):
        _mark_pod(metadata, obj, now, grace_period)
    elif metadata.get("finalizers") and not metadata.get("deletionTimestamp"):
        metadata |= {"deletionTimestamp": format_time(now), "deletionGracePeriodSeconds": 0}
        if "generation" in metadata:
            metadata["generation"] += 1
    marked = obj | {"metadata": metadata}
    removes = is_removable(marked) if place == place_of(PODS) else not metadata.get("finalizers")
    return Deletion(marked if marked != obj else None, removes)


def check_size(resource: Resource, obj: Object) -> None:
    """Raise for an object that is too large to be stored."""
    if place_of(resource) == place_of(CONFIG_MAPS):
        size = sum(len(value) for field in ("data", "binaryData") for value in (obj.get(field) or {}).values())
        if size > MAX_CONFIG_MAP:
            problem = f"Too long: must have at most {MAX_CONFIG_MAP} bytes"
            raise invalid(resource, obj["metadata"]["name"], "data", problem)
    if len(msgspec.json.encode(obj)) > MAX_STORED:
        raise ServerError("etcdserver: request is too large", status=500)


def _mark_pod(metadata: dict[str, Any], pod: Object, now: float, asked: int | None) -> None:
    """Mark the pod with its deletion time, which a later request can only bring forward."""
    current = metadata.get("deletionGracePeriodSeconds")
    if metadata.get("deletionTimestamp"):
        if current is None or asked is None or asked >= current:
            return
        due = datetime.strptime(metadata["deletionTimestamp"], "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
        requested_at = due.timestamp() - current
    else:
        requested_at, spec = now, pod.get("spec") or {}
        if not spec.get("nodeName") or has_ended(pod):
            asked = 0  # there is no kubelet that would have to stop anything
        elif asked is None:
            asked = int(spec.get("terminationGracePeriodSeconds", DEFAULT_GRACE))
    metadata |= {"deletionTimestamp": format_time(requested_at + asked), "deletionGracePeriodSeconds": asked}


def _replaced(obj: Object, source: Object, field: str) -> Object:
    """Return `obj` with the field of `source`, or without the field when `source` has none."""
    rest = {name: value for name, value in obj.items() if name != field}
    return rest | ({field: source[field]} if field in source else {})


def _counted(kind: Kind, obj: Object) -> Object:
    """Return the part of the object whose changes raise the generation."""
    ignored = {"metadata", "status"} if kind.has_status else {"metadata"}
    return {name: value for name, value in obj.items() if name not in ignored}


def _clean_metadata(obj: Object) -> Object:
    """Return the metadata without empty members."""
    return {name: value for name, value in (obj.get("metadata") or {}).items() if value not in (None, "", [], {})}


def _cleaned(kind: Kind, obj: Object) -> Object:
    """Return the object without nulls and empty data, which only custom resources keep."""
    if kind.is_custom:
        return obj
    cleaned = without_nulls(obj)
    return {name: value for name, value in cleaned.items() if value or name not in ("data", "binaryData")}


def _with_kind(resource: Resource, obj: Object) -> Object:
    if obj.get("kind") not in (None, resource.kind):
        raise bad_request(f"{obj['kind']} cannot be handled as a {resource.kind}")
    if obj.get("apiVersion") not in (None, resource.api_version):
        raise bad_request(f"the API version in the data ({obj['apiVersion']}) is not {resource.api_version}")
    return obj | {"apiVersion": resource.api_version, "kind": resource.kind}


def check_object(kind: Kind, resource: Resource, obj: Object) -> None:
    """Raise `Invalid` for an object that no kind of write may store."""
    metadata = obj["metadata"]
    name = metadata.get("name") or ""
    if not name:
        raise invalid(resource, "", "metadata.name", "Required value: name or generateName is required")
    if len(name) > kind.name_length or not kind.name.fullmatch(name):
        raise invalid(resource, name, "metadata.name", f"Invalid value: {name!r}: not a name of {resource.plural}")
    try:
        check_labels(metadata.get("labels") or {})
    except (BadLabel, TypeError) as error:
        raise invalid(resource, name, "metadata.labels", str(error)) from None
    references = metadata.get("ownerReferences") or []
    for reference in references:
        if missing := [field for field in _OWNER_FIELDS if not reference.get(field)]:
            raise invalid(resource, name, f"metadata.ownerReferences.{missing[0]}", "must not be empty")
    if sum(bool(reference.get("controller")) for reference in references) > 1:
        problem = "Only one reference can have Controller set to true"
        raise invalid(resource, name, "metadata.ownerReferences", problem)
    place, spec = place_of(resource), obj.get("spec") or {}
    if place == place_of(PODS):
        _check_containers(resource, name, spec)
    elif place == place_of(EVENTS):
        namespace = (obj.get("involvedObject") or {}).get("namespace") or "default"
        if namespace != metadata["namespace"]:
            raise invalid(resource, name, "involvedObject.namespace", "does not match event.namespace")
    elif place == place_of(LEASES) and spec.get("leaseDurationSeconds", 1) <= 0:
        raise invalid(resource, name, "spec.leaseDurationSeconds", "must be greater than 0")


def _check_containers(resource: Resource, name: str, spec: Object) -> None:
    if not spec.get("containers"):
        raise invalid(resource, name, "spec.containers", "Required value")
    seen: set[str] = set()
    for field in ("initContainers", "containers"):
        for at, container in enumerate(spec.get(field) or ()):
            for required in ("name", "image"):
                if not container.get(required):
                    raise invalid(resource, name, f"spec.{field}[{at}].{required}", "Required value")
            if container["name"] in seen:
                raise invalid(resource, name, f"spec.{field}[{at}].name", f"Duplicate value: {container['name']!r}")
            seen.add(container["name"])


def check_update(resource: Resource, old: Object, new: Object) -> None:
    """Raise `Invalid` for a change that is not allowed. Both carry the metadata that only the server sets."""
    name, metadata = new["metadata"]["name"], new["metadata"]
    added = set(metadata.get("finalizers") or ()) - set(old["metadata"].get("finalizers") or ())
    if added and metadata.get("deletionTimestamp"):
        problem = f"Forbidden: no new finalizers can be added if the object is being deleted, found {sorted(added)}"
        raise invalid(resource, name, "metadata.finalizers", problem)
    if place_of(resource) == place_of(PODS) and _fixed_spec(old) != _fixed_spec(new):
        problem = "Forbidden: pod updates may not change fields other than images, activeDeadlineSeconds, tolerations"
        raise invalid(resource, name, "spec", problem)


def _fixed_spec(pod: Object) -> Object:
    """Return the immutable part of a pod's spec."""
    spec = {name: value for name, value in (pod.get("spec") or {}).items() if name not in _MUTABLE_POD_SPEC}
    for field in ("initContainers", "containers"):
        if field in spec:
            spec[field] = [{**container, "image": None} for container in spec[field]]
    return spec


def bad_request(message: str) -> BadRequest:
    return BadRequest(message, status=400, reason="BadRequest")


def not_served(resource: Resource, subresource: str = "") -> NotFound:
    what = f"{subresource} of {qualified(resource)}" if subresource else f"{qualified(resource)} {resource.version}"
    return NotFound(f"the server could not find the requested resource ({what})", status=404, reason="NotFound")


def not_found(resource: Resource, name: str) -> NotFound:
    details = {"name": name, "group": resource.group, "kind": resource.plural}
    return NotFound(f'{qualified(resource)} "{name}" not found', status=404, reason="NotFound", details=details)


def already_exists(resource: Resource, name: str) -> AlreadyExists:
    details = {"name": name, "group": resource.group, "kind": resource.plural}
    message = f'{qualified(resource)} "{name}" already exists'
    return AlreadyExists(message, status=409, reason="AlreadyExists", details=details)


def conflict(resource: Resource, name: str, why: str) -> Conflict:
    details = {"name": name, "group": resource.group, "kind": resource.plural}
    message = f'Operation cannot be fulfilled on {qualified(resource)} "{name}": {why}'
    return Conflict(message, status=409, reason="Conflict", details=details)


def invalid(resource: Resource, name: str, field: str, problem: str) -> Invalid:
    causes = [{"reason": "FieldValueInvalid", "message": problem, "field": field}]
    details = {"name": name, "group": resource.group, "kind": resource.kind, "causes": causes}
    message = f'{resource.kind} "{name}" is invalid: {field}: {problem}'
    return Invalid(message, status=422, reason="Invalid", details=details)


def namespace_is_ending(resource: Resource, name: str, namespace: str) -> Forbidden:
    causes = [{"reason": "NamespaceTerminating", "field": "metadata.namespace"}]
    message = (
        f'{qualified(resource)} "{name}" is forbidden: unable to create new content in namespace {namespace} '
        "because it is being terminated"
    )
    return Forbidden(message, status=403, reason="Forbidden", details={"name": name, "causes": causes})


def expired(version: int, oldest: int) -> Expired:
    message = f"too old resource version: {version} ({oldest})"
    return Expired(message, status=410, reason="Expired")


def too_large_version(version: int, current: int) -> ServerTimeout:
    causes = [{"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}]
    message = f"Timeout: Too large resource version: {version}, current: {current}"
    return ServerTimeout(
        message, status=504, reason="Timeout", retry_after=1.0, details={"causes": causes, "retryAfterSeconds": 1}
    )


def budget_holds(name: str, message: str) -> TooManyRequests:
    """Return the error for an eviction that the disruption budget `name` does not allow now."""
    causes = [{"reason": "DisruptionBudget", "message": message}]
    return TooManyRequests(
        "Cannot evict pod as it would violate the pod's disruption budget.",
        status=429,
        reason="TooManyRequests",
        details={"name": name, "causes": causes},
    )


def qualified(resource: Resource) -> str:
    """Return the qualified name, as in `leases.coordination.k8s.io` or `pods`."""
    return f"{resource.plural}.{resource.group}" if resource.group else resource.plural
