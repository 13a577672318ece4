"""Reading Kubernetes objects as what they are on the wire: dicts. Unknown fields survive because nobody looks at them.

Objects from an informer are shared: never change one in place, copy first.
"""

from __future__ import annotations

from typing import Any, TypeAlias

Object: TypeAlias = dict[str, Any]
_IDENTITY = ("name", "namespace", "uid", "resourceVersion")


class MalformedObject(dict[str, Any]):
    """What can be said of an object that can't be understood: whose it is, as far as that can be read, and no more, so
    that nothing is decided from its rest. `reason`: why it can't be."""

    def __init__(self, what: object, reason: str) -> None:
        metadata = what.get("metadata") if isinstance(what, dict) else None
        known = metadata if isinstance(metadata, dict) else {}
        super().__init__(metadata={name: known[name] for name in _IDENTITY if isinstance(known.get(name), str)})
        self.reason = reason


def name_of(obj: Object) -> str:
    return str(obj["metadata"]["name"])


def namespace_of(obj: Object) -> str:
    """Its namespace; "" for an object of the whole cluster."""
    return str(obj["metadata"].get("namespace") or "")


def key_of(obj: Object) -> str:
    """`NAMESPACE/NAME`, or `NAME` for an object of the whole cluster: what work queues and caches hold."""
    return join_key(namespace_of(obj), name_of(obj))


def join_key(namespace: str, name: str) -> str:
    return f"{namespace}/{name}" if namespace else name


def split_key(key: str) -> tuple[str, str]:
    """(namespace, name) of a key. Raises ValueError for a key of more than two parts, as client-go does."""
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
    """Whether its deletion was accepted; it may still exist for long."""
    return bool(obj["metadata"].get("deletionTimestamp"))


def controller_of(obj: Object) -> Object | None:
    """The owner reference that controls it, or None for an orphan."""
    for reference in obj["metadata"].get("ownerReferences") or ():
        if reference.get("controller"):
            found: Object = reference
            return found
    return None


def owner_reference(owner: Object, *, api_version: str, kind: str) -> Object:
    """A controller's reference to `owner`. Version and kind are passed in: items of a list do not carry them."""
    return {
        "apiVersion": api_version,
        "kind": kind,
        "name": name_of(owner),
        "uid": uid_of(owner),
        "controller": True,
        "blockOwnerDeletion": True,
    }
