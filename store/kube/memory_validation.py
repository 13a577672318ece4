"""What the API server refuses to store, for `MemoryKube`: the checks that control loops run into."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from store.kube.errors import ServerError, TooLarge
from store.kube.memory_errors import bad_request, invalid
from store.kube.memory_kinds import Kind, place_of
from store.kube.objects import Object
from store.kube.resources import CONFIG_MAPS, EVENTS, LEASES, PODS, Resource
from store.selectors import BadLabel, check_labels

MAX_REQUEST = 3 * 1024 * 1024  # bytes that the server reads
MAX_STORED = 1536 * 1024  # bytes that etcd takes
MAX_CONFIG_MAP = 1024 * 1024
_OWNER_FIELDS = ("apiVersion", "kind", "name", "uid")
_MUTABLE_POD_SPEC = ("activeDeadlineSeconds", "tolerations")


def copy_of(body: Any) -> Any:
    """A copy as it would have come over the wire. Raises `BadRequest` for what is no JSON, or `TooLarge`."""
    try:
        raw = msgspec.json.encode(body)
    except (TypeError, ValueError) as error:
        raise bad_request(f"the body is no JSON: {error}") from None
    if len(raw) > MAX_REQUEST:
        message = f"Request entity too large: limit is {MAX_REQUEST}"
        raise TooLarge(message, status=413, reason="RequestEntityTooLarge")
    return msgspec.json.decode(raw)


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
    _check_owners(resource, name, metadata.get("ownerReferences") or [])
    _check_kind(resource, name, obj)


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


def check_size(resource: Resource, obj: Object) -> None:
    """Raise for an object that is too large to be stored."""
    if place_of(resource) == place_of(CONFIG_MAPS):
        size = sum(len(value) for field in ("data", "binaryData") for value in (obj.get(field) or {}).values())
        if size > MAX_CONFIG_MAP:
            problem = f"Too long: must have at most {MAX_CONFIG_MAP} bytes"
            raise invalid(resource, obj["metadata"]["name"], "data", problem)
    if len(msgspec.json.encode(obj)) > MAX_STORED:
        raise ServerError("etcdserver: request is too large", status=500)


def _check_owners(resource: Resource, name: str, references: Sequence[Object]) -> None:
    for reference in references:
        if missing := [field for field in _OWNER_FIELDS if not reference.get(field)]:
            raise invalid(resource, name, f"metadata.ownerReferences.{missing[0]}", "must not be empty")
    if sum(bool(reference.get("controller")) for reference in references) > 1:
        problem = "Only one reference can have Controller set to true"
        raise invalid(resource, name, "metadata.ownerReferences", problem)


def _check_kind(resource: Resource, name: str, obj: Object) -> None:
    place, spec = place_of(resource), obj.get("spec") or {}
    if place == place_of(PODS):
        _check_containers(resource, name, spec)
    elif place == place_of(EVENTS):
        namespace = (obj.get("involvedObject") or {}).get("namespace") or "default"
        if namespace != obj["metadata"]["namespace"]:
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


def _fixed_spec(pod: Object) -> Object:
    """The part of a pod's spec that nobody may change."""
    spec = {name: value for name, value in (pod.get("spec") or {}).items() if name not in _MUTABLE_POD_SPEC}
    for field in ("initContainers", "containers"):
        if field in spec:
            spec[field] = [{**container, "image": None} for container in spec[field]]
    return spec
