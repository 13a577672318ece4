"""The state of `MemoryKube`, and what follows from its changes: history, watches, and the collection of garbage.

Objects here are never changed in place; a write replaces them. Callers receive copies. History holds the last changes;
older ones are compacted, and requests for them fail with `Expired`.

As in the API server's cache, a watch with a selector sees an object that begins to match as ADDED, and one that ceases
to match as DELETED, in the state in which it last matched. A field selector is comma-separated `path=value`,
`path==value` or `path!=value`, all of which must hold. An absent field has the empty value. The selectable paths depend
on the kind; the server refuses others.

Garbage is collected by owner references, and in namespaces that end. The decision about one object is a pure function
of the state: `next_step`. The objects to examine follow from each change: `affected`. As in Kubernetes, an owner is an
object with the UID of the reference; while one that is not being deleted exists, references to lost owners are dropped;
once none is left, the object is deleted. An owner that is deleted in the foreground waits for the dependents that block
it.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from store.errors import RcfarmError
from store.kube.api.errors import KubeError
from store.kube.api.objects import Object, Resource, is_deleting, join_key, labels_of, name_of, namespace_of, uid_of
from store.kube.api.protocol import Propagation, WatchEvent
from store.kube.memory.rules import (
    FOREGROUND,
    NAMESPACES,
    ORPHAN,
    Deletion,
    Place,
    expired,
    is_removable,
    place_of,
    plan_deletion,
)
from store.schema.selectors import Selector

Key = tuple[str, str]  # (namespace, name)
_TERM = re.compile(r"\s*(?P<path>[^=!,\s]+)\s*(?P<operator>==?|!=)\s*(?P<value>[^=!,]*?)\s*")
BOOKMARK_INTERVAL = 60.0  # seconds
LAST_BOOKMARK = 2.0  # seconds before the end of a watch
_TIMER_SLACK = 0.001  # seconds: a timer may fire that early, and setting it again would spin on a virtual clock


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
        self.by_uid: dict[str, Item] = {}
        self._dependents: dict[str, dict[tuple[Place, Key], None]] = {}  # by the UID of an owner; ordered sets
        self._history: deque[ObjectChange] = deque()
        self._history_limit = history_limit

    def get(self, place: Place, key: Key) -> Object | None:
        return self._objects.get(place, {}).get(key)

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
            del self.by_uid[uid_of(old)]
            for owner in owner_uids(old):
                self._dependents[owner].pop((place, key), None)
                if not self._dependents[owner]:
                    del self._dependents[owner]
        if new is None:
            del objects[key]
        else:
            objects[key] = new
            self.by_uid[uid_of(new)] = Item(place, key, new)
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


class BadFieldSelector(RcfarmError, ValueError):
    """Text that is not a field selector, or that names a path that can't be selected."""


class FieldTerm(NamedTuple):
    """The field at `path` must have the value, or with `wanted` False must not have it."""

    path: str
    value: str
    wanted: bool


@dataclass(frozen=True, slots=True)
class FieldSelector:
    """Build one with `parse`."""

    terms: tuple[FieldTerm, ...]

    @classmethod
    def parse(cls, text: str, *, allowed: Collection[str]) -> FieldSelector:
        """Read a selector; the empty text selects everything. Raises `BadFieldSelector`."""
        terms = []
        for part in text.split(",") if text.strip() else ():
            found = _TERM.fullmatch(part)
            if found is None:
                raise BadFieldSelector(
                    f"field selector {text!r}: {part!r} is not a term; use path=value or path!=value"
                )
            path = found["path"]
            if path not in allowed:
                choice = ", ".join(sorted(allowed))
                raise BadFieldSelector(f"field selector {text!r}: no selection by {path!r}; use one of {choice}")
            terms.append(FieldTerm(path, found["value"], found["operator"] != "!="))
        return cls(tuple(terms))

    def matches(self, obj: Object) -> bool:
        return all((field_at(obj, term.path) == term.value) is term.wanted for term in self.terms)


@dataclass(frozen=True, slots=True)
class Scope:
    """The objects of a list or a watch. `namespace` "" means all of them."""

    resource: Resource
    namespace: str
    labels: Selector
    fields: FieldSelector

    def has(self, obj: Object | None) -> bool:
        return (
            obj is not None
            and self.namespace in ("", namespace_of(obj))
            and self.labels.matches(labels_of(obj))
            and self.fields.matches(obj)
        )

    def event(self, change: ObjectChange) -> WatchEvent | None:
        """Return the event that a change causes in this scope, or None."""
        if change.place != place_of(self.resource):
            return None
        before, after = self.has(change.old), self.has(change.new)
        if after and change.new is not None:
            return WatchEvent("MODIFIED" if before else "ADDED", change.new)
        if before and change.old is not None:
            metadata = change.old["metadata"] | {"resourceVersion": str(change.version)}
            return WatchEvent("DELETED", change.old | {"metadata": metadata})
        return None


class Watcher:
    """The events that one watch has yet to deliver. `finish` makes the form that callers receive."""

    def __init__(
        self, scope: Scope, pending: Iterable[WatchEvent], finish: Callable[[Resource, Object], Object]
    ) -> None:
        self.scope = scope
        self._pending = deque(pending)
        self._finish = finish
        self._woken = asyncio.Event()
        self._has_ended = False
        self._failure: KubeError | None = None

    def notice(self, change: ObjectChange) -> None:
        event = self.scope.event(change)
        if event is not None:
            self.send(event)

    def send(self, event: WatchEvent) -> None:
        """Deliver an event, after the pending ones."""
        self._pending.append(event)
        self._woken.set()

    def end(self, error: KubeError | None) -> None:
        """End the watch after the pending events, with the error if there is one."""
        self._has_ended, self._failure = True, error
        self._woken.set()

    async def events(self, timeout: float, version: Callable[[], int]) -> AsyncIterator[WatchEvent]:
        """Yield events for `timeout` seconds. `version`: of the server's last write, for bookmarks."""
        began = asyncio.get_running_loop().time()
        end = began + timeout
        bookmark = _next_bookmark(began, end)
        while True:
            while self._pending:
                event = self._pending.popleft()
                yield WatchEvent(event.type, self._finish(self.scope.resource, event.object))
            if self._failure is not None:
                raise self._failure
            if self._has_ended:
                return
            due = min(bookmark, end)
            self._woken.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout_at(due):
                    await self._woken.wait()
            if self._woken.is_set():
                continue  # even if the time is up as well: a bookmark must not overtake an event or the end
            if due == end:
                return
            bookmark = _next_bookmark(due, end)
            resource, metadata = self.scope.resource, {"resourceVersion": str(version())}
            obj = {"apiVersion": resource.api_version, "kind": resource.kind, "metadata": metadata}
            yield WatchEvent("BOOKMARK", obj)


def field_at(obj: Object, path: str) -> str:
    """Return the value at a dotted path as text, "" when it is absent."""
    value: object = obj
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    if isinstance(value, bool):
        return "true" if value else "false"
    return "" if value is None else str(value)


def _next_bookmark(now: float, end: float) -> float:
    last = end - LAST_BOOKMARK
    return min(now + BOOKMARK_INTERVAL, last) if now < last else math.inf


@dataclass(frozen=True, slots=True)
class Collect:
    """Delete the object; None for `propagation` leaves that to its finalizers."""

    propagation: Propagation | None


@dataclass(frozen=True, slots=True)
class DropOwners:
    """Remove the references to these UIDs."""

    uids: frozenset[str]


@dataclass(frozen=True, slots=True)
class DropFinalizer:
    name: str


@dataclass(frozen=True, slots=True)
class RemoveNamespace:
    """Remove the namespace, which is empty."""


Step = Collect | DropOwners | DropFinalizer | RemoveNamespace
IsKnown = Callable[[Object], bool]  # whether the server knows the kind of an owner reference


def affected(state: ServerState, change: ObjectChange) -> Iterator[tuple[Place, Key]]:
    """Yield the objects whose next step a change may have altered."""
    yield change.place, change.key
    old, new = change.old, change.new
    deletion_began = new is not None and is_deleting(new) and not (old is not None and is_deleting(old))
    if (new is None or deletion_began) and old is not None:
        for item in state.dependents(uid_of(old)):
            yield item.place, item.key
    former = owner_uids(old) if old is not None else set()
    for uid in former | (owner_uids(new) if new is not None else set()):
        if (owner := state.by_uid.get(uid)) is not None:
            yield owner.place, owner.key
    if change.key[0]:
        yield place_of(NAMESPACES), ("", change.key[0])
    if change.place == place_of(NAMESPACES) and deletion_began:
        for item in state.in_namespace(change.key[1]):
            yield item.place, item.key


def next_step(state: ServerState, item: Item, is_known: IsKnown) -> Step | None:
    """Return the next step for one object, or None."""
    obj = item.object
    if item.place == place_of(NAMESPACES) and is_deleting(obj):
        return RemoveNamespace() if not any(state.in_namespace(name_of(obj))) else None
    if is_deleting(obj):
        finalizers = obj["metadata"].get("finalizers") or ()
        if ORPHAN in finalizers and not state.dependents(uid_of(obj)):
            return DropFinalizer(ORPHAN)
        blocking = (
            reference
            for dependent in state.dependents(uid_of(obj))
            for reference in dependent.object["metadata"]["ownerReferences"]
            if reference["uid"] == uid_of(obj) and reference.get("blockOwnerDeletion")
        )
        return DropFinalizer(FOREGROUND) if FOREGROUND in finalizers and not any(blocking) else None
    namespace = state.get(place_of(NAMESPACES), ("", namespace_of(obj)))
    if namespace is not None and is_deleting(namespace):
        return Collect(None)
    solid = waiting = False
    gone: set[str] = set()
    for reference in obj["metadata"].get("ownerReferences") or ():
        owner = state.by_uid.get(reference["uid"])
        if owner is None or owner.key[0] not in ("", namespace_of(obj)):
            if not is_known(reference):
                return None
            gone.add(reference["uid"])
            continue
        holds = (owner.object["metadata"].get("finalizers") or ()) if is_deleting(owner.object) else ()
        if ORPHAN in holds:
            return DropOwners(frozenset({reference["uid"]}))
        if FOREGROUND in holds:
            waiting = True
            gone.add(reference["uid"])
        else:
            solid = True
    if not gone:
        return None
    if solid:
        return DropOwners(frozenset(gone))
    return Collect("Foreground" if waiting and state.dependents(uid_of(obj)) else None)


class Collector:
    """Takes the next steps of the objects that changed, `delay` seconds after the change. `clock`: Unix seconds.

    It has no task: a timer of the event loop is set while there are changed objects.
    """

    def __init__(self, state: ServerState, is_known: IsKnown, delay: float, clock: Callable[[], float]) -> None:
        self._state, self._is_known, self._delay, self._clock = state, is_known, delay, clock
        self._dirty: dict[tuple[Place, Key], None] = {}
        self._is_set = False
        state.listeners.append(self._notice)

    def _notice(self, change: ObjectChange) -> None:
        self._dirty.update(dict.fromkeys(affected(self._state, change)))
        if not self._is_set:
            self._is_set = True
            asyncio.get_running_loop().call_later(self._delay, self._collect)

    def _collect(self) -> None:
        self._is_set = False
        dirty, self._dirty = self._dirty, {}
        for place, key in dirty:
            obj = self._state.get(place, key)
            if obj is None:
                continue
            match next_step(self._state, Item(place, key, obj), self._is_known):
                case Collect(propagation):
                    plan = plan_deletion(place, obj, now=self._clock(), propagation=propagation)
                    self._state.delete(place, obj, plan)
                case DropOwners(uids):
                    kept = [each for each in obj["metadata"]["ownerReferences"] if each["uid"] not in uids]
                    self._state.update(place, obj, _with_list(obj, "ownerReferences", kept))
                case DropFinalizer(name):
                    kept = [each for each in obj["metadata"]["finalizers"] if each != name]
                    self._state.update(place, obj, _with_list(obj, "finalizers", kept))
                case RemoveNamespace():
                    self._state.remove(place, key)


def _with_list(obj: Object, field: str, kept: list[Any]) -> Object:
    """Return the object with another list in its metadata, or without the list if that is empty."""
    metadata = {name: value for name, value in obj["metadata"].items() if name != field}
    return obj | {"metadata": metadata | ({field: kept} if kept else {})}
