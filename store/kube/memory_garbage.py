"""The controllers that clean up, for `MemoryKube`: the garbage collector by owner references, and the namespaces'.

The decision about one object is a pure function of the state: `next_step`. Which objects have to be looked at follows
from each change: `concerned`. As in Kubernetes, an owner is an object with the UID of the reference; while one that is
not being deleted exists, references to lost owners are dropped; once none is left, the object is deleted. An owner that
is deleted in the foreground waits for the dependents that block it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from store.kube.api import Propagation
from store.kube.memory_kinds import NAMESPACES, Place, place_of
from store.kube.memory_rules import FOREGROUND, ORPHAN, plan_deletion
from store.kube.memory_state import Change, Item, Key, State, owner_uids
from store.kube.objects import Object, is_deleting, name_of, namespace_of, uid_of


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
    """Nothing is left in it."""


Step = Collect | DropOwners | DropFinalizer | RemoveNamespace
IsKnown = Callable[[Object], bool]  # whether the server knows the kind of an owner reference


def concerned(state: State, change: Change) -> Iterator[tuple[Place, Key]]:
    """The objects whose next step a change may have altered."""
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


def next_step(state: State, item: Item, is_known: IsKnown) -> Step | None:
    """What has to be done about one object now, or None."""
    obj = item.object
    if item.place == place_of(NAMESPACES) and is_deleting(obj):
        return RemoveNamespace() if not any(state.in_namespace(name_of(obj))) else None
    if is_deleting(obj):
        return _finish_deletion(state, obj)
    namespace = state.get(place_of(NAMESPACES), ("", namespace_of(obj)))
    if namespace is not None and is_deleting(namespace):
        return Collect(None)
    return _judge_by_owners(state, obj, is_known)


def _finish_deletion(state: State, obj: Object) -> Step | None:
    finalizers = obj["metadata"].get("finalizers") or ()
    if ORPHAN in finalizers and not state.dependents(uid_of(obj)):
        return DropFinalizer(ORPHAN)
    if FOREGROUND in finalizers and not any(_blocks(item.object, obj) for item in state.dependents(uid_of(obj))):
        return DropFinalizer(FOREGROUND)
    return None


def _blocks(dependent: Object, owner: Object) -> bool:
    references = dependent["metadata"]["ownerReferences"]
    return any(reference["uid"] == uid_of(owner) and reference.get("blockOwnerDeletion") for reference in references)


def _judge_by_owners(state: State, obj: Object, is_known: IsKnown) -> Step | None:
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

    It has no task: a timer of the event loop is set while there is something to look at.
    """

    def __init__(self, state: State, is_known: IsKnown, delay: float, clock: Callable[[], float]) -> None:
        self._state, self._is_known, self._delay, self._clock = state, is_known, delay, clock
        self._dirty: dict[tuple[Place, Key], None] = {}
        self._is_set = False
        state.listeners.append(self._notice)

    def _notice(self, change: Change) -> None:
        self._dirty.update(dict.fromkeys(concerned(self._state, change)))
        if not self._is_set:
            self._is_set = True
            asyncio.get_running_loop().call_later(self._delay, self._collect)

    def _collect(self) -> None:
        self._is_set = False
        dirty, self._dirty = self._dirty, {}
        for place, key in dirty:
            obj = self._state.get(place, key)
            if obj is not None:
                self._look_at(Item(place, key, obj))

    def _look_at(self, item: Item) -> None:
        place, key, obj = item
        match next_step(self._state, item, self._is_known):
            case Collect(propagation):
                self._state.delete(place, obj, plan_deletion(place, obj, now=self._clock(), propagation=propagation))
            case DropOwners(uids):
                self._state.update(place, obj, _without(obj, "ownerReferences", lambda each: each["uid"] in uids))
            case DropFinalizer(name):
                self._state.update(place, obj, _without(obj, "finalizers", lambda each: each == name))
            case RemoveNamespace():
                self._state.remove(place, key)


def _without(obj: Object, field: str, is_dropped: Callable[[Any], bool]) -> Object:
    """The object without some elements of a list in its metadata, and without the list when that is empty then."""
    metadata = dict(obj["metadata"])
    kept = [each for each in metadata.pop(field) if not is_dropped(each)]
    return obj | {"metadata": metadata | ({field: kept} if kept else {})}
