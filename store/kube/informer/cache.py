"""The cache of an informer: objects are checked as they come in, stored as JSON, and found by key and by named indexes.

`Admission` checks and trims the objects from the API server before any other part sees them. An object that is not
valid is logged, counted and left out; other objects are unaffected. As long as it exists it is listed in `unreadable`
with the reason, if its key can be read.

`ObjectCache` keeps an object as its own JSON text and decodes it for each reader. A decoded pod is a hundred containers
and 25 KB; its text is 4 KB, costs 10 µs to decode, is invisible to the garbage collector, and can't be changed by a
reader.

An indexer returns the values under which an object is found, none or several. When it raises for an object, that is
logged, and the object is not found under that index. Keys come in the order in which they were first put.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from typing import Any, NamedTuple, TypeAlias

import msgspec
import structlog

from store.kube.api.objects import (
    MalformedObject,
    Object,
    Resource,
    controller_of,
    join_key,
    key_of,
    labels_of,
    namespace_of,
    resource_version_of,
    uid_of,
)

log = structlog.get_logger(__name__)

_SHOWN = 100  # characters of a wrong value that are shown
Transform: TypeAlias = Callable[[Object], Object]
Indexer: TypeAlias = Callable[[Object], Iterable[str]]
_decode: Callable[[bytes], Object] = msgspec.json.Decoder(dict).decode


def by_namespace(obj: Object) -> Iterable[str]:
    """Indexer: the namespace; objects of the whole cluster are found under ""."""
    return (namespace_of(obj),)


def by_controller(obj: Object) -> Iterable[str]:
    """Indexer: the UID of the controller that owns the object; orphans are not found."""
    reference = controller_of(obj)
    return () if reference is None else (str(reference["uid"]),)


def by_label(label: str) -> Indexer:
    """Indexer: `NAMESPACE/VALUE` of a label; objects without it are not found."""

    def values(obj: Object) -> Iterable[str]:
        value = labels_of(obj).get(label)
        return () if value is None else (f"{namespace_of(obj)}/{value}",)

    return values


def without_managed_fields(obj: Object) -> Object:
    """Return the object without the bookkeeping of server-side apply, which no controller reads; a transform."""
    metadata = obj["metadata"]
    if "managedFields" not in metadata:
        return obj
    return {**obj, "metadata": {name: value for name, value in metadata.items() if name != "managedFields"}}


class Admission:
    """Admits objects of one resource. `malformed`: the number left out so far. `unreadable`: the existing objects that
    can't be decoded, by key, with the reason.

    `transform` may leave out parts of an object; it gets the object as the server sent it and does not change it.
    """

    def __init__(self, resource: Resource, transform: Transform | None = None) -> None:
        self.malformed = 0
        self.unreadable: dict[str, str] = {}
        self._resource, self._transform = resource, transform
        self._api_version = resource.api_version
        self._texts = ("name", "resourceVersion", "namespace") if resource.namespaced else ("name", "resourceVersion")

    def admit(self, obj: Any) -> Object | None:
        """Return the object as it is to be kept; None when it is not a valid object of the resource."""
        defect = self._defect(obj)
        if defect:
            self.refuse(obj, defect)
            return None
        admitted: Object = obj
        if self._transform is not None:
            try:
                admitted = self._transform(admitted)
            except Exception as error:
                self.refuse(obj, f"its transform failed: {error!r}")
                return None
        if self.unreadable:
            self.unreadable.pop(key_of(admitted), None)
        return admitted

    def refuse(self, obj: Any, defect: str) -> None:
        """Log and count an object that is left out."""
        self.malformed += 1
        if key := key_in(obj):
            self.unreadable[key] = defect
        log.error(
            "Left out an object that can't be decoded",
            resource=self._resource.plural,
            namespace=metadata_text(obj, "namespace"),
            name=metadata_text(obj, "name"),
            reason=defect,
        )

    def forget(self, obj: Any) -> None:
        """Drop an object that is gone from `unreadable`."""
        self.unreadable.pop(key_in(obj), None)

    def retain(self, keys: Set[str]) -> None:
        """Drop all other keys from `unreadable`."""
        self.unreadable = {key: reason for key, reason in self.unreadable.items() if key in keys}

    def _defect(self, obj: Any) -> str:
        """Return why it is not an object of the resource, or "". Items of a list need not carry kind and version."""
        if isinstance(obj, MalformedObject):
            return obj.reason
        if not isinstance(obj, dict):
            return "it is not an object"
        kind, api_version = obj.get("kind"), obj.get("apiVersion")
        if kind is not None and kind != self._resource.kind:
            return f"its kind is {_shown(kind)} instead of {self._resource.kind!r}"
        if api_version is not None and api_version != self._api_version:
            return f"its apiVersion is {_shown(api_version)} instead of {self._api_version!r}"
        metadata = obj.get("metadata")
        if not isinstance(metadata, dict):
            return "it has no metadata"
        for name in self._texts:
            value = metadata.get(name)
            if not value or not isinstance(value, str):
                return f"its metadata.{name} is missing or not a text"
        return ""


class Cached(NamedTuple):
    """One stored object. `values`: its values in each index, in the order of the indexers."""

    uid: str
    resource_version: str
    text: bytes
    values: tuple[tuple[str, ...], ...]

    def decoded(self) -> Object:
        return _decode(self.text)


class ObjectCache:
    """Objects by key and by indexes. Returned objects belong to the caller."""

    def __init__(self, indexers: Mapping[str, Indexer]) -> None:
        self._indexers = dict(indexers)
        self._encoder, self._buffer = msgspec.json.Encoder(), bytearray()
        self._objects: dict[str, Cached] = {}
        self._indexes: dict[str, dict[str, dict[str, None]]] = {name: {} for name in indexers}

    def __len__(self) -> int:
        return len(self._objects)

    def __iter__(self) -> Iterator[str]:
        """Iterate over all keys."""
        return iter(self._objects)

    def peek(self, key: str) -> Cached | None:
        """Return the object as it is stored: its identity and version, without decoding it."""
        return self._objects.get(key)

    def get(self, key: str) -> Object | None:
        cached = self._objects.get(key)
        return None if cached is None else cached.decoded()

    def items(self) -> list[Object]:
        """Return all objects. Each is decoded: prefer an index when only a few are needed."""
        return [cached.decoded() for cached in self._objects.values()]

    def by_index(self, index: str, value: str) -> list[Object]:
        """Return the objects with `value` in the index. Raises KeyError for an index that does not exist."""
        return [self._objects[key].decoded() for key in self._indexes[index].get(value, ())]

    def put(self, key: str, obj: Object) -> None:
        """Store this state of the object."""
        self._encoder.encode_into(obj, self._buffer)
        text = bytes(self._buffer)  # of the exact size: the result of `encode` takes a quarter more
        old = self._objects.get(key)
        found: list[tuple[str, ...]] = []
        for name, indexer in self._indexers.items():
            try:
                found.append(tuple(dict.fromkeys(indexer(obj))))
            except Exception:
                found.append(())
                log.exception("Could not index an object; it is missing from this index", index=name, object=key)
        before, values = None if old is None else old.values, tuple(found)
        if values != before:
            self._move(key, before, values)
        self._objects[key] = Cached(uid_of(obj), resource_version_of(obj), text, values)

    def remove(self, key: str) -> Object:
        """Remove the object. Return its last state. Raises KeyError when there is none."""
        cached = self._objects.pop(key)
        self._move(key, cached.values, None)
        return cached.decoded()

    def _move(self, key: str, old: tuple[tuple[str, ...], ...] | None, new: tuple[tuple[str, ...], ...] | None) -> None:
        nowhere = ((),) * len(self._indexes)
        for index, gone, come in zip(self._indexes.values(), old or nowhere, new or nowhere, strict=True):
            for value in gone:
                if value not in come:
                    index[value].pop(key, None)
                    if not index[value]:
                        del index[value]
            for value in come:
                index.setdefault(value, {})[key] = None


def metadata_text(obj: Any, name: str) -> str:
    """Return a text from the metadata of a possibly invalid object; "" when it is absent."""
    metadata = obj.get("metadata") if isinstance(obj, dict) else None
    value = metadata.get(name) if isinstance(metadata, dict) else None
    return value if isinstance(value, str) else ""


def key_in(obj: Any) -> str:
    """Return the key of a possibly invalid object; "" when it has none."""
    name = metadata_text(obj, "name")
    return join_key(metadata_text(obj, "namespace"), name) if name else ""


def _shown(value: object) -> str:
    return repr(value)[:_SHOWN]
