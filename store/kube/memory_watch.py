"""One open watch of `MemoryKube`: which changes it sees, as which events, and when it ends.

A watch with a selector sees an object that begins to match as ADDED, and one that ceases to as DELETED, in the state in
which it last matched: so does the API server's cache.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass

from store.kube.api import WatchEvent
from store.kube.errors import KubeError
from store.kube.field_selectors import FieldSelector
from store.kube.memory_kinds import place_of
from store.kube.memory_state import Change
from store.kube.objects import Object, labels_of, namespace_of
from store.kube.resources import Resource
from store.selectors import Selector

BOOKMARK_INTERVAL = 60.0  # seconds
LAST_BOOKMARK = 2.0  # seconds before the end of a watch
_TIMER_SLACK = 0.001  # seconds: a timer may fire that early, and setting it again would spin on a virtual clock


@dataclass(frozen=True, slots=True)
class Scope:
    """What a list or a watch is about. `namespace` "" is all of them."""

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

    def is_everything(self) -> bool:
        """Whether no selector narrows it."""
        return not self.labels.text and not self.fields.terms

    def event(self, change: Change) -> WatchEvent | None:
        """How a change looks in this scope; None when it does not."""
        if change.place != place_of(self.resource):
            return None
        before, after = self.has(change.old), self.has(change.new)
        if after and change.new is not None:
            return WatchEvent("MODIFIED" if before else "ADDED", change.new)
        if before and change.old is not None:
            return WatchEvent("DELETED", at_version(change.old, change.version))
        return None


def at_version(obj: Object, version: int) -> Object:
    """The object as if it had got that version; shares all else."""
    return obj | {"metadata": obj["metadata"] | {"resourceVersion": str(version)}}


class Watcher:
    """The events that one watch has yet to deliver. `finish` puts each object into the form that callers get."""

    def __init__(
        self, scope: Scope, pending: Iterable[WatchEvent], finish: Callable[[Resource, Object], Object]
    ) -> None:
        self.scope = scope
        self._pending = deque(pending)
        self._finish = finish
        self._woken = asyncio.Event()
        self._failure: KubeError | None = None

    def notice(self, change: Change) -> None:
        event = self.scope.event(change)
        if event is not None:
            self._pending.append(event)
            self._woken.set()

    def fail(self, error: KubeError) -> None:
        """End the watch with an error, after what is pending."""
        self._failure = error
        self._woken.set()

    async def events(self, timeout: float, version: Callable[[], int]) -> AsyncIterator[WatchEvent]:
        """Until `timeout` seconds are over. `version`: of the server's last write, for bookmarks."""
        began = asyncio.get_running_loop().time()
        end = began + timeout
        bookmark = _next_bookmark(began, end)
        while True:
            while self._pending:
                event = self._pending.popleft()
                yield WatchEvent(event.type, self._finish(self.scope.resource, event.object))
            if self._failure is not None:
                raise self._failure
            due = min(bookmark, end)
            if await self._woken_before(due):
                continue
            if due == end:
                return
            bookmark = _next_bookmark(due, end)
            yield self._bookmark(version())

    def _bookmark(self, version: int) -> WatchEvent:
        resource = self.scope.resource
        obj = {"apiVersion": resource.api_version, "kind": resource.kind, "metadata": {"resourceVersion": str(version)}}
        return WatchEvent("BOOKMARK", obj)

    async def _woken_before(self, due: float) -> bool:
        self._woken.clear()
        try:
            async with asyncio.timeout_at(due):
                await self._woken.wait()
        except TimeoutError:
            return False
        return True


def _next_bookmark(now: float, end: float) -> float:
    last = end - LAST_BOOKMARK
    return min(now + BOOKMARK_INTERVAL, last) if now < last else math.inf
