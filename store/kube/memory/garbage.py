"""The cleaning controllers of `MemoryKube`: the garbage collector by owner references, and the namespace controller.

The decision about one object is a pure function of the state: `next_step`. The objects to examine follow from each
change: `affected`. As in Kubernetes, an owner is an object with the UID of the reference; while one that is
not being deleted exists, references to lost owners are dropped; once none is left, the object is deleted. An owner that
is deleted in the foreground waits for the dependents that block it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from store.kube.api.objects import Object, is_deleting, name_of, namespace_of, uid_of
from store.kube.api.protocol import Propagation
from store.kube.memory.rules import FOREGROUND, NAMESPACES, ORPHAN, Place, place_of, plan_deletion
from store.kube.memory.state import Item, Key, ObjectChange, ServerState, owner_uids


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
        if (owner := state.by_uid(uid)) is not None:
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
        return _finish_deletion(state, obj)
    namespace = state.get(place_of(NAMESPACES), ("", namespace_of(obj)))
    if namespace is not None and is_deleting(namespace):
        return Collect(None)
    return _judge_by_owners(state, obj, is_known)


def _finish_deletion(state: ServerState, obj: Object) -> Step | None:
    finalizers = obj["metadata"].get("finalizers") or ()
    if ORPHAN in finalizers and not state.dependents(uid_of(obj)):
        return DropFinalizer(ORPHAN)
    if FOREGROUND in finalizers and not any(
        reference["uid"] == uid_of(obj) and reference.get("blockOwnerDeletion")
        for dependent in state.dependents(uid_of(obj))
        for reference in dependent.object["metadata"]["ownerReferences"]
    ):
        return DropFinalizer(FOREGROUND)
    return None


def _judge_by_owners(state: ServerState, obj: Object, is_known: IsKnown) -> Step | None:
    solid = waiting = False
    gone: set[str] = set()
    for reference in obj["metadata"].get("ownerReferences") or ():
        owner = state.by_uid(reference["uid"])
        if owner is None or owner.key[0] not in ("", namespace_of(obj)):
            if not is_known(reference):
                return None
            gone.add(reference["uid"])
        elif ORPHAN in _finalizers_in_deletion(owner.object):
            return DropOwners(frozenset({reference["uid"]}))
        elif FOREGROUND in _finalizers_in_deletion(owner.object):
            waiting = True
            gone.add(reference["uid"])
        else:
            solid = True
    if not gone:
        return None
    if solid:
        return DropOwners(frozenset(gone))
    return Collect("Foreground" if waiting and state.dependents(uid_of(obj)) else None)


def _finalizers_in_deletion(owner: Object) -> list[str]:
    return (owner["metadata"].get("finalizers") or []) if is_deleting(owner) else []


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
