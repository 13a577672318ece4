"""One open watch of `MemoryKube`: which changes it sees, as which events, and when it ends.

As in the API server's cache, a watch with a selector sees an object that begins to match as ADDED, and one that ceases
to match as DELETED, in the state in which it last matched.

A field selector is comma-separated `path=value`, `path==value` or `path!=value`, all of which must hold. An absent
field has the empty value. The selectable paths depend on the kind; the server refuses others.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from store.errors import RcfarmError
from store.kube.api.errors import KubeError
from store.kube.api.objects import Object, Resource, labels_of, namespace_of
from store.kube.api.protocol import WatchEvent
from store.kube.memory.rules import place_of
from store.kube.memory.state import ObjectChange
from store.schema.selectors import Selector

_TERM = re.compile(r"\s*(?P<path>[^=!,\s]+)\s*(?P<operator>==?|!=)\s*(?P<value>[^=!,]*?)\s*")
BOOKMARK_INTERVAL = 60.0  # seconds
LAST_BOOKMARK = 2.0  # seconds before the end of a watch
_TIMER_SLACK = 0.001  # seconds: a timer may fire that early, and setting it again would spin on a virtual clock


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

    def is_everything(self) -> bool:
        """Return whether no selector narrows the scope."""
        return not self.labels.text and not self.fields.terms

    def event(self, change: ObjectChange) -> WatchEvent | None:
        """Return the event that a change causes in this scope, or None."""
        if change.place != place_of(self.resource):
            return None
        before, after = self.has(change.old), self.has(change.new)
        if after and change.new is not None:
            return WatchEvent("MODIFIED" if before else "ADDED", change.new)
        if before and change.old is not None:
            return WatchEvent("DELETED", at_version(change.old, change.version))
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
            if await self._woken_before(due):
                continue
            if due == end:
                return
            bookmark = _next_bookmark(due, end)
            resource, metadata = self.scope.resource, {"resourceVersion": str(version())}
            obj = {"apiVersion": resource.api_version, "kind": resource.kind, "metadata": metadata}
            yield WatchEvent("BOOKMARK", obj)

    async def _woken_before(self, due: float) -> bool:
        self._woken.clear()
        try:
            async with asyncio.timeout_at(due):
                await self._woken.wait()
        except TimeoutError:
            return False
        return True


def at_version(obj: Object, version: int) -> Object:
    """Return the object with another version; the rest is shared."""
    return obj | {"metadata": obj["metadata"] | {"resourceVersion": str(version)}}


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
