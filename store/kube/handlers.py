"""Handlers: who is told what happens to the objects of an informer, and in which terms.

The model: handlers are called synchronously, on the event loop, right after the cache shows the change. So there is no
buffer that could grow, each handler sees one legal sequence per object (`added`, any number of `updated`, `deleted`),
and once the first list is delivered every handler has seen all of it. A handler looks at keys and adds to a queue;
one that blocks holds up the loop.

A handler that raises is logged and counted, and hears of the next change as if nothing had happened.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import structlog

from store.kube.objects import Object
from store.kube.resources import Resource

log = structlog.get_logger(__name__)


class DeletedFinalStateUnknown(NamedTuple):
    """A tombstone: the object is gone, but its end was not seen. `obj` is the last known state, maybe an old one.

    Source: client-go's `cache.DeletedFinalStateUnknown`.
    """

    key: str
    obj: Object


class Handler(Protocol):
    """What is told of the objects. Objects are shared between handlers: never change one in place."""

    def added(self, obj: Object) -> None:
        """An object that was not there before, or a handler that is new."""

    def updated(self, old: Object, new: Object) -> None:
        """The same object, by its UID, in another state. On a resync, `old` is `new`."""

    def deleted(self, obj: Object | DeletedFinalStateUnknown) -> None:
        """It is gone: its final state, or a tombstone."""


def last_state(deleted: Object | DeletedFinalStateUnknown) -> Object:
    """The last known state of a deleted object, whether its end was seen or not."""
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
            self.tell(handler.added, obj)

    def updated(self, old: Object, new: Object) -> None:
        for handler in self._all:
            self.tell(handler.updated, old, new)

    def deleted(self, obj: Object | DeletedFinalStateUnknown) -> None:
        for handler in self._all:
            self.tell(handler.deleted, obj)

    def resynced(self, obj: Object) -> None:
        """A list showed the object unchanged: only handlers that asked for resyncs hear of it."""
        for handler in self._resyncing:
            self.tell(handler.updated, obj, obj)

    def tell(self, call: Callable[..., None], *args: object) -> None:
        """Call one handler's method and survive what it raises."""
        try:
            call(*args)
        except Exception:
            self.failures += 1
            log.exception("A handler failed; the next change is delivered", resource=self._resource.plural)
