"""The cache of an informer: objects at rest as JSON, found by key and by named indexes.

The model: an object is kept as its own JSON text and decoded for whoever reads it. A decoded pod is a hundred
containers and 25 KB; its text is 4 KB, costs 10 µs to decode, and is nothing that the garbage collector walks through
or that a careless reader could change for the others.

An indexer names the values under which an object is found; it may name none, or several. One that raises for an object
is logged, and the object is not found under that index. Keys come in the order in which they were first put.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple, TypeAlias

import msgspec
import structlog

from store.kube.objects import Object, controller_of, labels_of, namespace_of, resource_version_of, uid_of

log = structlog.get_logger(__name__)

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


class Cached(NamedTuple):
    """One object at rest. `values`: where each index has it, in the order of the indexers."""

    uid: str
    resource_version: str
    text: bytes
    values: tuple[tuple[str, ...], ...]

    def decoded(self) -> Object:
        return _decode(self.text)


class ObjectCache:
    """Objects by key and by indexes. What it returns is the reader's own."""

    def __init__(self, indexers: Mapping[str, Indexer]) -> None:
        self._indexers = dict(indexers)
        self._encoder, self._buffer = msgspec.json.Encoder(), bytearray()
        self._objects: dict[str, Cached] = {}
        self._indexes: dict[str, dict[str, dict[str, None]]] = {name: {} for name in indexers}

    def __len__(self) -> int:
        return len(self._objects)

    def __iter__(self) -> Iterator[str]:
        """All keys."""
        return iter(self._objects)

    def peek(self, key: str) -> Cached | None:
        """The object as it is kept: its identity and version, without decoding it."""
        return self._objects.get(key)

    def get(self, key: str) -> Object | None:
        cached = self._objects.get(key)
        return None if cached is None else cached.decoded()

    def items(self) -> list[Object]:
        """All of them: each is decoded, so ask an index for the few that are needed."""
        return [cached.decoded() for cached in self._objects.values()]

    def by_index(self, index: str, value: str) -> list[Object]:
        """The objects of which the indexer named `value`. Raises KeyError for an index that does not exist."""
        return [self._objects[key].decoded() for key in self._indexes[index].get(value, ())]

    def put(self, key: str, obj: Object) -> None:
        """Keep this state of the object."""
        self._encoder.encode_into(obj, self._buffer)
        text = bytes(self._buffer)  # exactly as long as it is: what `encode` returns takes a quarter more
        old = self._objects.get(key)
        values = tuple([self._values(name, key, obj) for name in self._indexers])
        before = None if old is None else old.values
        if values != before:
            self._move(key, before, values)
        self._objects[key] = Cached(uid_of(obj), resource_version_of(obj), text, values)

    def remove(self, key: str) -> Object:
        """Forget the object; its last state. Raises KeyError when there is none."""
        cached = self._objects.pop(key)
        self._move(key, cached.values, None)
        return cached.decoded()

    def _values(self, name: str, key: str, obj: Object) -> tuple[str, ...]:
        try:
            return tuple(dict.fromkeys(self._indexers[name](obj)))
        except Exception:
            log.exception("An object can't be indexed and is not found under this index", index=name, object=key)
            return ()

    def _move(self, key: str, old: tuple[tuple[str, ...], ...] | None, new: tuple[tuple[str, ...], ...] | None) -> None:
        nowhere = ((),) * len(self._indexes)
        for index, gone, come in zip(self._indexes.values(), old or nowhere, new or nowhere, strict=True):
            for value in gone:
                if value not in come:
                    self._take_out(index, value, key)
            for value in come:
                index.setdefault(value, {})[key] = None

    @staticmethod
    def _take_out(index: dict[str, dict[str, None]], value: str, key: str) -> None:
        keys = index[value]
        keys.pop(key, None)
        if not keys:
            del index[value]
