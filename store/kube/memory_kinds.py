"""What the API server does differently for one kind of object than for another, as far as `MemoryKube` does it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from store.kube.resources import CUSTOM_RESOURCE_DEFINITIONS, Resource

SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
DNS_1123 = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")

NAMESPACES = Resource("", "v1", "namespaces", "Namespace", namespaced=False)

Place = tuple[str, str]  # (group, plural): versions of a kind share their objects


@dataclass(frozen=True, slots=True)
class Kind:
    """Rules of one kind.

    `has_status`: the status is a part of its own, which only writes to the subresource change. `has_generation`: the
    server counts changes of anything but metadata and such a status. `needs_version`: a replacement without a resource
    version is refused. `replace_creates`: a replacement of what is not there creates it. `is_custom`: defined by a
    CustomResourceDefinition; it has no strategic merge patch. `fields`: what field selectors may ask for besides name
    and namespace. `name`, `name_length`: what names look like.
    """

    has_status: bool = False
    has_generation: bool = False
    needs_version: bool = False
    replace_creates: bool = False
    is_custom: bool = False
    fields: frozenset[str] = field(default=frozenset())
    name: re.Pattern[str] = SUBDOMAIN
    name_length: int = 253

    @property
    def selectable(self) -> frozenset[str]:
        return self.fields | {"metadata.name", "metadata.namespace"}


_POD_SPEC = ("nodeName", "restartPolicy", "schedulerName", "serviceAccountName")
_POD_STATUS = ("phase", "podIP", "nominatedNodeName")
_PODS = frozenset([*(f"spec.{name}" for name in _POD_SPEC), *(f"status.{name}" for name in _POD_STATUS)])
_INVOLVED = ("kind", "namespace", "name", "uid", "apiVersion", "resourceVersion", "fieldPath")
_EVENTS = frozenset([*(f"involvedObject.{name}" for name in _INVOLVED), "reason", "type"])
_KINDS: dict[Place, Kind] = {
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
_OTHER_BUILT_IN = Kind()
CUSTOM = Kind(has_generation=True, needs_version=True, is_custom=True)
CUSTOM_WITH_STATUS = Kind(has_status=True, has_generation=True, needs_version=True, is_custom=True)


def place_of(resource: Resource) -> Place:
    return resource.group, resource.plural


def is_built_in(group: str) -> bool:
    """Groups of other projects have a domain of theirs; `x-k8s.io` is one."""
    return "." not in group or group.endswith(".k8s.io")


def built_in_kind(resource: Resource) -> Kind:
    """The rules of a kind that is no custom one."""
    return _KINDS.get(place_of(resource), _OTHER_BUILT_IN)


def is_definition(resource: Resource) -> bool:
    return place_of(resource) == place_of(CUSTOM_RESOURCE_DEFINITIONS)
