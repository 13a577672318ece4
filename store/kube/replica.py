"""Replica: the rules by which what a list, a watch or a single read shows becomes the cache and what handlers hear.

The model: everything happens at once, on the event loop. The cache shows a change before handlers hear of it. A name
that stands for another UID is another object: `deleted`, then `added`, never an update. What an outage hid ends in a
tombstone (`DeletedFinalStateUnknown`).

With a label selector an absent object need not be gone (see `store.kube.absences`): it stays in the cache until that
is known. An object that was terminating when it was last seen is taken for gone without asking: nobody would take it
back any more, and this spares a request for every pod that ends in good order.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

from store.kube.absences import Absences
from store.kube.handlers import DeletedFinalStateUnknown, Handlers
from store.kube.indexes import Cached, Indexer, ObjectCache
from store.kube.objects import Object, is_deleting, key_of, resource_version_of, uid_of


class Replica:
    """A sink of reflectors. `absences`: whom to ask about absent objects; None when absent means gone."""

    def __init__(self, indexers: Mapping[str, Indexer], handlers: Handlers, absences: Absences | None = None) -> None:
        self.cache = ObjectCache(indexers)
        self._handlers, self._absences = handlers, absences
        self._final: dict[str, Object] = {}  # last states of absent objects, as the watch told them

    def present(self, obj: Object) -> None:
        """The object exists, in this state."""
        key = key_of(obj)
        known = self.cache.peek(key)
        if known is not None and known.uid != uid_of(obj):
            self._remove(key)
            known = None
        self._settle(key)
        if known is None:
            self.cache.put(key, obj)
            self._handlers.added(obj)
        elif known.resource_version == resource_version_of(obj):
            self._handlers.resynced(obj)
        else:
            self._update(key, known, obj)

    def absent(self, obj: Object) -> None:
        """The object left the collection; this was its last state."""
        key = key_of(obj)
        known = self.cache.peek(key)
        if known is None:
            return
        if known.uid != uid_of(obj):
            self._remove(key)
            return
        self._final[key] = obj
        if self._absences is None or is_deleting(obj):
            self._remove(key)
        else:
            self._absences.ask(key, known.uid, self)

    def lost(self, key: str, uid: str) -> None:
        """The object left the collection; its last state can't be understood."""
        known = self.cache.peek(key)
        if known is not None and uid in ("", known.uid):
            self._missing(key)

    def retain(self, keys: Set[str]) -> None:
        """Objects under other keys left the collection; nobody saw how."""
        for key in [key for key in self.cache if key not in keys]:
            self._missing(key)

    def found(self, key: str, obj: Object) -> None:
        """An absent object still exists, in this state: it strays."""
        self._final.pop(key, None)
        known = self.cache.peek(key)
        assert known is not None, "questions are settled when their object leaves the cache"
        if known.resource_version != resource_version_of(obj):
            self._update(key, known, obj)

    def gone(self, key: str) -> None:
        """An absent object does not exist any more."""
        self._remove(key)

    def discard(self, key: str, uid: str) -> None:
        """Forget an absent object that still exists but is nobody's business any more. Any other stays."""
        known = self.cache.peek(key)
        if known is not None and known.uid == uid and self._absences is not None and key in self._absences:
            self._final.pop(key, None)
            self._remove(key)

    def _missing(self, key: str) -> None:
        """No list shows the object."""
        if self._absences is None:
            self._remove(key)
        elif key not in self._absences:
            known = self.cache.peek(key)
            assert known is not None
            if is_deleting(known.decoded()):
                self._remove(key)
            else:
                self._absences.ask(key, known.uid, self)

    def _update(self, key: str, known: Cached, obj: Object) -> None:
        old = known.decoded()
        self.cache.put(key, obj)
        self._handlers.updated(old, obj)

    def _remove(self, key: str) -> None:
        last = self.cache.remove(key)
        final = self._final.get(key)
        self._settle(key)
        self._handlers.deleted(DeletedFinalStateUnknown(key, last) if final is None else final)

    def _settle(self, key: str) -> None:
        self._final.pop(key, None)
        if self._absences is not None:
            self._absences.settle(key)
