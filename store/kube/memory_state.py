"""What `MemoryKube` stores: objects, one version counter, and the history that watches and page tokens look back on.

Objects here are never changed in place; a write puts another one in their stead. Whatever leaves towards a caller is
copied there. History holds the last changes; what is older is compacted, and asking for it is `Expired`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

from store.kube.memory_errors import expired
from store.kube.memory_kinds import NAMESPACES, Place, place_of
from store.kube.memory_rules import Deletion, is_removable
from store.kube.objects import Object, join_key, name_of, namespace_of, uid_of

Key = tuple[str, str]  # (namespace, name)


class Item(NamedTuple):
    """Where an object is stored, and what is stored there."""

    place: Place
    key: Key
    object: Object


class Change(NamedTuple):
    """One write. `old` is None for a creation, `new` is None for a removal; `version` is the one it got."""

    version: int
    place: Place
    key: Key
    old: Object | None
    new: Object | None


class State:
    """The stored objects. `version`: of the last write. `compacted`: history up to this version is gone.

    `listeners` are called with each change, synchronously and after it is in place.
    """

    def __init__(self, history_limit: int) -> None:
        self.version = self.compacted = 1
        self.listeners: list[Callable[[Change], None]] = []
        self._objects: dict[Place, dict[Key, Object]] = {}
        self._by_uid: dict[str, Item] = {}
        self._dependents: dict[str, dict[tuple[Place, Key], None]] = {}  # by the UID of an owner; ordered sets
        self._history: deque[Change] = deque()
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
        """All of one kind in key order, of one namespace or of all."""
        found = self._objects.get(place, {}).items()
        return [obj for key, obj in sorted(found, key=_order) if namespace in ("", key[0])]

    def in_namespace(self, namespace: str) -> Iterator[Item]:
        """Everything in a namespace, of whatever kind."""
        for place, objects in self._objects.items():
            for key, obj in objects.items():
                if key[0] == namespace:
                    yield Item(place, key, obj)

    def dependents(self, uid: str) -> list[Item]:
        """The objects that refer to the owner `uid`, the eldest reference first."""
        found = [(place, key, self.get(place, key)) for place, key in self._dependents.get(uid, ())]
        return [Item(place, key, obj) for place, key, obj in found if obj is not None]

    def write(self, place: Place, obj: Object) -> Object:
        """Store an object, new or in the stead of its predecessor; answers it with its new version."""
        key = namespace_of(obj), name_of(obj)
        stored = obj | {"metadata": obj["metadata"] | {"resourceVersion": str(self.version + 1)}}
        self._apply(place, key, stored)
        return stored

    def update(self, place: Place, old: Object, new: Object) -> Object:
        """Put `new` in the stead of `old`; nothing when they are equal. An object whose deletion has nothing left to
        wait for is removed, and answered as it was."""
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

    def changes_since(self, version: int) -> list[Change]:
        """The changes after a version. Raises `Expired`."""
        if version < self.compacted:
            raise expired(version, self.compacted)
        return [change for change in self._history if change.version > version]

    def items_at(self, version: int, place: Place, namespace: str) -> list[Object]:
        """What `items` answered when `version` was the last one. Raises `Expired`."""
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
        change = Change(self.version, place, key, old, new)
        if old is not None:
            self._unindex(place, key, old)
        if new is None:
            del objects[key]
        else:
            objects[key] = new
            self._index(place, key, new)
        self._remember(change)
        for listener in list(self.listeners):
            listener(change)

    def _remember(self, change: Change) -> None:
        self._history.append(change)
        if len(self._history) > self._history_limit:
            self.compacted = self._history.popleft().version

    def _index(self, place: Place, key: Key, obj: Object) -> None:
        self._by_uid[uid_of(obj)] = Item(place, key, obj)
        for owner in owner_uids(obj):
            self._dependents.setdefault(owner, {})[place, key] = None

    def _unindex(self, place: Place, key: Key, obj: Object) -> None:
        del self._by_uid[uid_of(obj)]
        for owner in owner_uids(obj):
            self._dependents[owner].pop((place, key), None)
            if not self._dependents[owner]:
                del self._dependents[owner]


def owner_uids(obj: Object) -> set[str]:
    return {reference["uid"] for reference in obj["metadata"].get("ownerReferences") or ()}


def _order(entry: tuple[Key, Object]) -> str:
    return join_key(*entry[0])
