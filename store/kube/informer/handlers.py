"""From the results of lists, watches and single reads to the cache and to calls of handlers.

The model: handlers are called synchronously, on the event loop, right after the cache shows the change. So there is no
buffer that could grow, each handler sees one legal sequence per object (`added`, any number of `updated`, `deleted`),
and once the first list is delivered every handler has seen all of it. A handler should only add keys to a queue; one
that blocks holds up the loop. An exception of a handler is logged and counted; the handler still receives the next
change.

`CacheWriter` has the rules. A name with another UID is another object: `deleted`, then `added`, never an update. A
deletion that an outage hid is reported as a tombstone (`DeletedFinalStateUnknown`).

With a label selector an absent object need not be gone: a watch reports an object that was deleted, and one that has
only lost the label, as the same event. So `UnmatchedObjects` reads each absent object by name, in a task of its own, a
few at a time; until the answer is known, the object stays in the cache. An object that is gone, or whose name belongs
to another one, is reported once, and the task ends. An object that still exists is *unmatched*: it is reported as
found, and read again at growing intervals, because no watch will report its end. A list or watch that shows the object
again closes the question, which ends the task. When the server forbids these reads, the watch is taken at its word: the
object counts as gone. An object that was terminating when it was last seen is assumed gone without a request: no
controller would adopt it any more, and this saves a request for every pod that ends normally.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Set
from typing import NamedTuple, Protocol

import structlog

from store.kube.api.errors import Forbidden, NotFound
from store.kube.api.objects import Object, Resource, is_deleting, key_of, resource_version_of, split_key, uid_of
from store.kube.api.protocol import KubeReader
from store.kube.informer.cache import Admission, Cached, Indexer, ObjectCache
from store.kube.informer.reflector import new_backoff

log = structlog.get_logger(__name__)

CONCURRENCY = 8  # concurrent reads
REREAD_AFTER = 10.0  # seconds, at least, until an unmatched object is read again; doubles
REREAD_AFTER_CAP = 150.0


class DeletedFinalStateUnknown(NamedTuple):
    """A tombstone: the object is gone, but its deletion was not observed. `obj` is the last known state, maybe stale.

    Source: client-go's `cache.DeletedFinalStateUnknown`.
    """

    key: str
    obj: Object


class Handler(Protocol):
    """Callbacks for changes. Objects are shared between handlers: never change one in place."""

    def added(self, obj: Object) -> None:
        """The object is new, or the handler is."""

    def updated(self, old: Object, new: Object) -> None:
        """The object, identified by its UID, has another state. On a resync, `old` is `new`."""

    def deleted(self, obj: Object | DeletedFinalStateUnknown) -> None:
        """The object is gone; `obj` is its final state, or a tombstone."""


def last_state(deleted: Object | DeletedFinalStateUnknown) -> Object:
    """Return the last known state of a deleted object, whether its deletion was observed or not."""
    return deleted.obj if isinstance(deleted, DeletedFinalStateUnknown) else deleted


class Handlers:
    """All handlers of one informer, as one handler. `failures`: how often one of them raised."""

    def __init__(self, resource: Resource) -> None:
        self.failures = 0
        self._resource = resource
        self._all: tuple[Handler, ...] = ()
        self._resyncing: tuple[Handler, ...] = ()

    def add(self, handler: Handler, *, resyncs: bool) -> None:
        self._all += (handler,)
        if resyncs:
            self._resyncing += (handler,)

    def added(self, obj: Object) -> None:
        for handler in self._all:
            self.notify(handler.added, obj)

    def updated(self, old: Object, new: Object) -> None:
        for handler in self._all:
            self.notify(handler.updated, old, new)

    def deleted(self, obj: Object | DeletedFinalStateUnknown) -> None:
        for handler in self._all:
            self.notify(handler.deleted, obj)

    def resynced(self, obj: Object) -> None:
        """Notify the handlers that asked for resyncs of an object that a list showed unchanged."""
        for handler in self._resyncing:
            self.notify(handler.updated, obj, obj)

    def notify(self, call: Callable[..., None], *args: object) -> None:
        """Call one handler's method; log and count its exception."""
        try:
            call(*args)
        except Exception:
            self.failures += 1
            log.exception("A handler failed; it still receives the next change", resource=self._resource.plural)


class CacheWriter:
    """A sink of reflectors. `unmatched`: finds out about absent objects; None when absent means gone."""

    def __init__(
        self, indexers: Mapping[str, Indexer], handlers: Handlers, unmatched: UnmatchedObjects | None = None
    ) -> None:
        self.cache = ObjectCache(indexers)
        self._handlers, self._unmatched = handlers, unmatched
        self._final: dict[str, Object] = {}  # last states of absent objects, as the watch reported them

    def present(self, obj: Object) -> None:
        """The object exists, in this state."""
        key = key_of(obj)
        known = self.cache.peek(key)
        if known is not None and known.uid != uid_of(obj):
            self._remove(key)
            known = None
        self._forget_question(key)
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
        if self._unmatched is None or is_deleting(obj):
            self._remove(key)
        else:
            self._unmatched.ask(key, known.uid, self)

    def lost(self, key: str, uid: str) -> None:
        """The object left the collection; its last state can't be decoded."""
        known = self.cache.peek(key)
        if known is not None and uid in ("", known.uid):
            self._missing(key)

    def retain(self, keys: Set[str]) -> None:
        """Objects under other keys left the collection; their departure was not observed."""
        for key in [key for key in self.cache if key not in keys]:
            self._missing(key)

    def found(self, key: str, obj: Object) -> None:
        """An absent object still exists, in this state, but the label selector no longer matches it."""
        self._final.pop(key, None)
        known = self.cache.peek(key)
        assert known is not None, "questions are closed when their object leaves the cache"
        if known.resource_version != resource_version_of(obj):
            self._update(key, known, obj)

    def gone(self, key: str) -> None:
        """An absent object does not exist any more."""
        self._remove(key)

    def discard(self, key: str, uid: str) -> None:
        """Forget an absent object that still exists but that no controller needs any more. Any other stays."""
        known = self.cache.peek(key)
        if known is not None and known.uid == uid and self._unmatched is not None and key in self._unmatched:
            self._final.pop(key, None)
            self._remove(key)

    def _missing(self, key: str) -> None:
        """Handle an object that no list shows."""
        if self._unmatched is None:
            self._remove(key)
        elif key not in self._unmatched:
            known = self.cache.peek(key)
            assert known is not None
            if is_deleting(known.decoded()):
                self._remove(key)
            else:
                self._unmatched.ask(key, known.uid, self)

    def _update(self, key: str, known: Cached, obj: Object) -> None:
        old = known.decoded()
        self.cache.put(key, obj)
        self._handlers.updated(old, obj)

    def _remove(self, key: str) -> None:
        last = self.cache.remove(key)
        final = self._final.get(key)
        self._forget_question(key)
        self._handlers.deleted(DeletedFinalStateUnknown(key, last) if final is None else final)

    def _forget_question(self, key: str) -> None:
        self._final.pop(key, None)
        if self._unmatched is not None:
            self._unmatched.close(key)


class UnmatchedHandler(Protocol):
    """The receiver of the answers."""

    def found(self, key: str, obj: Object) -> None:
        """The object still exists, in this state."""

    def gone(self, key: str) -> None:
        """The object does not exist any more."""


class UnmatchedObjects:
    """Open questions about objects of one resource, by key."""

    def __init__(
        self,
        api: KubeReader,
        resource: Resource,
        admission: Admission,
        *,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self._api, self._resource, self._admission = api, resource, admission
        self._clock, self._rng = clock, rng or random.Random()
        self._slots = asyncio.Semaphore(CONCURRENCY)
        self._open: dict[str, asyncio.Task[None]] = {}
        self._group: asyncio.TaskGroup | None = None
        self._may_ask, self._fails = True, False

    def start(self, group: asyncio.TaskGroup) -> None:
        """Ask in tasks of this group from now on; ending the group closes all questions."""
        self._group, self._open = group, {}

    def __contains__(self, key: str) -> bool:
        return key in self._open

    def ask(self, key: str, uid: str, handler: UnmatchedHandler) -> None:
        """Find out whether the object `uid` still exists. An open question about the key continues unchanged."""
        assert self._group is not None, "unmatched objects can only be read while the informer runs"
        if key not in self._open:
            self._open[key] = self._group.create_task(self._follow(key, uid, handler))

    def close(self, key: str) -> None:
        """Close the question about the key; the answer is known."""
        task = self._open.pop(key, None)
        if task is not None:
            task.cancel()

    async def _follow(self, key: str, uid: str, handler: UnmatchedHandler) -> None:
        after_error = new_backoff(self._clock, self._rng)
        of_unmatched = new_backoff(
            self._clock, self._rng, first=REREAD_AFTER, longest=REREAD_AFTER_CAP, reset_after=None
        )
        while True:
            try:
                obj = await self._read(key)
            except Exception as error:  # also an unexpected one: it must not end the informer
                if not self._fails:  # one warning for all reads that fail in a row
                    self._fails = True
                    log.warning(
                        "Could not read absent objects; they count as existing until that succeeds",
                        resource=self._resource.plural,
                        object=key,
                        error=str(error) or repr(error),
                    )
                await asyncio.sleep(after_error.pause(getattr(error, "retry_after", None)))
                continue
            self._fails = False
            if obj is None or uid_of(obj) != uid:
                del self._open[key]
                handler.gone(key)
                return
            if admitted := self._admission.admit(obj):
                try:
                    handler.found(key, admitted)
                except Exception as error:
                    self._admission.refuse(obj, f"it can't be kept: {error!r}")
            await asyncio.sleep(of_unmatched.pause())

    async def _read(self, key: str) -> Object | None:
        namespace, name = split_key(key)
        try:
            async with self._slots:
                return await self._api.get(self._resource, name, namespace)
        except NotFound:
            return None
        except Forbidden as error:
            if self._may_ask:
                self._may_ask = False
                log.warning(
                    "Objects that leave the selector count as deleted; grant the verb `get` to distinguish them",
                    resource=self._resource.plural,
                    error=str(error),
                )
            return None
