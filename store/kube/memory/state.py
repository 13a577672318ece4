"""The state of `MemoryKube`: objects, one version counter, and the history that watches and page tokens need.

Objects here are never changed in place; a write replaces them. Callers receive copies. History holds the last changes;
older ones are compacted, and requests for them fail with `Expired`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

from store.kube.api.objects import Object, join_key, name_of, namespace_of, uid_of
from store.kube.memory.errors import expired
from store.kube.memory.rules import NAMESPACES, Deletion, Place, is_removable, place_of

Key = tuple[str, str]  # (namespace, name)


class Item(NamedTuple):
    """A stored object and its place."""

    place: Place
    key: Key
    object: Object


class ObjectChange(NamedTuple):
    """One write and its resource version. `old` is None for a creation, `new` is None for a removal."""

    version: int
    place: Place
    key: Key
    old: Object | None
    new: Object | None


class ServerState:
    """The stored objects. `version`: of the last write. `compacted`: history up to this version is gone.

    `listeners` are called with each change, synchronously and after it is in place.
    """

    def __init__(self, history_limit: int) -> None:
        self.version = self.compacted = 1
        self.listeners: list[Callable[[ObjectChange], None]] = []
        self._objects: dict[Place, dict[Key, Object]] = {}
        self._by_uid: dict[str, Item] = {}
        self._dependents: dict[str, dict[tuple[Place, Key], None]] = {}  # by the UID of an owner; ordered sets
        self._history: deque[ObjectChange] = deque()
        self._history_limit = history_limit

    def get(self, place: Place, key: Key) -> Object | None:
        return self._objects.get(place, {}).get(key)

    def by_uid(self, uid: str) -> Item | None:
        return self._by_uid.get(uid)

    @property
    def places(self) -> Collection[Place]:
        """The kinds of which an object was ever stored."""
        return self._objects.keys()

    def items(self, place: Place, namespace: str = "") -> list[Object]:
        """Return all objects of one kind in key order, of one namespace or of all."""
        found = self._objects.get(place, {}).items()
        return [obj for key, obj in sorted(found, key=_order) if namespace in ("", key[0])]

    def in_namespace(self, namespace: str) -> Iterator[Item]:
        """Yield everything in a namespace, of any kind."""
        for place, objects in self._objects.items():
            for key, obj in objects.items():
                if key[0] == namespace:
                    yield Item(place, key, obj)

    def dependents(self, uid: str) -> list[Item]:
        """Return the objects that refer to the owner `uid`, the eldest reference first."""
        found = [(place, key, self.get(place, key)) for place, key in self._dependents.get(uid, ())]
        return [Item(place, key, obj) for place, key, obj in found if obj is not None]

    def write(self, place: Place, obj: Object) -> Object:
        """Store an object, new or in place of its predecessor. Return it with its new version."""
        key = namespace_of(obj), name_of(obj)
        stored = obj | {"metadata": obj["metadata"] | {"resourceVersion": str(self.version + 1)}}
        self._apply(place, key, stored)
        return stored

    def update(self, place: Place, old: Object, new: Object) -> Object:
        """Replace `old` by `new`, unless they are equal. An object in deletion that nothing holds back is removed, and
        returned as it was."""
        if new == old:
            return old
        if place != place_of(NAMESPACES) and is_removable(new):
            self.remove(place, (namespace_of(old), name_of(old)))
            return new
        return self.write(place, new)

    def delete(self, place: Place, obj: Object, deletion: Deletion) -> None:
        """Carry out the deletion of an object."""
        if deletion.changed is not None:
            self.write(place, deletion.changed)
        if deletion.removes:
            self.remove(place, (namespace_of(obj), name_of(obj)))

    def remove(self, place: Place, key: Key) -> None:
        self._apply(place, key, None)

    def changes_since(self, version: int) -> list[ObjectChange]:
        """Return the changes after a version. Raises `Expired`."""
        if version < self.compacted:
            raise expired(version, self.compacted)
        return [change for change in self._history if change.version > version]

    def items_at(self, version: int, place: Place, namespace: str) -> list[Object]:
        """Return the result of `items` at the time of `version`. Raises `Expired`."""
        then = dict(self._objects.get(place, {}))
        for change in reversed(self.changes_since(version)):
            if change.place == place:
                then.pop(change.key, None)
                if change.old is not None:
                    then[change.key] = change.old
        return [obj for key, obj in sorted(then.items(), key=_order) if namespace in ("", key[0])]

    def compact(self) -> None:
        """Forget all history."""
        self._history.clear()
        self.compacted = self.version

    def _apply(self, place: Place, key: Key, new: Object | None) -> None:
        objects = self._objects.setdefault(place, {})
        old = objects.get(key)
        self.version += 1
        if old is not None:
            del self._by_uid[uid_of(old)]
            for owner in owner_uids(old):
                self._dependents[owner].pop((place, key), None)
                if not self._dependents[owner]:
                    del self._dependents[owner]
        if new is None:
            del objects[key]
        else:
            objects[key] = new
            self._by_uid[uid_of(new)] = Item(place, key, new)
            for owner in owner_uids(new):
                self._dependents.setdefault(owner, {})[place, key] = None
        change = ObjectChange(self.version, place, key, old, new)
        self._history.append(change)
        if len(self._history) > self._history_limit:
            self.compacted = self._history.popleft().version
        for listener in list(self.listeners):
            listener(change)


def owner_uids(obj: Object) -> set[str]:
    return {reference["uid"] for reference in obj["metadata"].get("ownerReferences") or ()}


def _order(entry: tuple[Key, Object]) -> str:
    return join_key(*entry[0])
