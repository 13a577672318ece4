"""Objects, resources, errors, patches and the KubeApi protocol: no I/O."""

from store.kube.api.errors import AlreadyExists, Conflict, Forbidden, KubeError, NotFound, Unreachable
from store.kube.api.objects import (
    CONFIG_MAPS,
    NODES,
    PODS,
    SERVICES,
    Object,
    Resource,
    annotations_of,
    key_of,
    labels_of,
    name_of,
    namespace_of,
    owner_reference,
    uid_of,
)
from store.kube.api.protocol import KubeApi

__all__ = [
    "CONFIG_MAPS",
    "NODES",
    "PODS",
    "SERVICES",
    "AlreadyExists",
    "Conflict",
    "Forbidden",
    "KubeApi",
    "KubeError",
    "NotFound",
    "Object",
    "Resource",
    "Unreachable",
    "annotations_of",
    "key_of",
    "labels_of",
    "name_of",
    "namespace_of",
    "owner_reference",
    "uid_of",
]
