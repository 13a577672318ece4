"""The pods of a `MemoryKube`, with what only an informer's tests need: objects of any content, and a server that lags.

Objects are written past the rules of kinds. A test may let the watch cache lag (`lag`), send any event, and look up
which version, limit and page each call asked for.
"""

from __future__ import annotations

import asyncio
import builtins
import copy
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from store.kube.api.errors import Expired, KubeError
from store.kube.api.objects import PODS, Object, Resource, is_deleting, key_of, labels_of, uid_of
from store.kube.api.protocol import Page, WatchEvent
from store.kube.memory.kube import MemoryKube, Token
from store.kube.memory.rules import copy_of, place_of
from store.kube.memory.state import Watcher
from store.schema.selectors import Selector

NAMESPACE = "team"
_FIRST = 100  # the resource version of the empty collection
_PODS = place_of(PODS)


class Call(NamedTuple):
    """A list, watch or get as it was asked for; `at` in seconds of the loop's time."""

    verb: str
    version: str
    limit: int
    continues: bool
    at: float


class Collection(MemoryKube):
    """`fail(verb, …)` lets the verb's next calls fail, one error each. `calls`: all that were made.

    `latency`: seconds until the server takes up a call. `lag`: how many versions its watch cache is behind.
    `serves_cached_pages`: whether a list at "0" honours its limit, as a server without a watch cache does.
    """

    def __init__(self) -> None:
        super().__init__(namespaces=(), gc_delay=None)
        self.calls: list[Call] = []
        self.latency = 0.0
        self.lag = 0
        self.serves_cached_pages = False
        self._state.version = self._state.compacted = _FIRST
        self._uids = 0
        self._faults: dict[str, builtins.list[KubeError]] = {}

    @property
    def now(self) -> dict[str, Object]:
        """The existing objects, by key."""
        return self.selected()

    def selected(self, selector: str = "") -> dict[str, Object]:
        """Return what a list shows now."""
        terms = Selector.parse(selector)
        return {key_of(obj): obj for obj in self._state.items(_PODS) if terms.matches(labels_of(obj))}

    def put(self, name: str, /, *, uid: str = "", labels: dict[str, str] | None = None, **fields: Any) -> Object:
        """Create the object, or write it again under its UID. Labels stay as they are when they are not given, a
        deletion timestamp always."""
        old = self._state.get(_PODS, (NAMESPACE, name))
        self._uids += old is None
        metadata: Object = {
            "name": name,
            "namespace": NAMESPACE,
            "uid": uid_of(old) if old else uid or f"uid-{self._uids}",
            "labels": labels if labels is not None else labels_of(old) if old else {},
        }
        if old and is_deleting(old):
            metadata["deletionTimestamp"] = old["metadata"]["deletionTimestamp"]
        metadata |= fields.pop("metadata", {})
        return self._state.write(_PODS, {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, **fields})

    def remove(self, name: str) -> None:
        """Remove the object, if there is one."""
        if self._state.get(_PODS, (NAMESPACE, name)) is not None:
            self._state.remove(_PODS, (NAMESPACE, name))

    def reuse(self, name: str, **fields: Any) -> Object:
        """Remove the object, and create another one under its name."""
        self.remove(name)
        return self.put(name, **fields)

    def compact(self) -> None:
        """Watches and continue tokens from before now are expired; a watch cache that lags still has older states."""
        self._state.compacted = self.version

    def bookmark(self) -> None:
        """Send every watch a bookmark at the present version."""
        self.send(WatchEvent("BOOKMARK", {"kind": "Pod", "metadata": {"resourceVersion": str(self.version)}}))

    def send(self, event: WatchEvent) -> None:
        """Send an event made by the test to every watch."""
        for watcher in self._watchers:
            watcher.send(event)

    def cut(self, error: KubeError | None = None) -> None:
        """End every watch, normally or by an error, before any later change."""
        for watcher in self._watchers:
            watcher.end(error)
        self._watchers.clear()

    def fail(self, verb: str, *errors: KubeError) -> None:
        self._faults.setdefault(verb, []).extend(errors)

    def versions(self, verb: str) -> builtins.list[str]:
        """Return the resource versions that calls of the verb asked for."""
        return [call.version for call in self.calls if call.verb == verb]

    def times(self, verb: str) -> builtins.list[float]:
        return [call.at for call in self.calls if call.verb == verb]

    async def get(self, resource: Resource, name: str, namespace: str = "") -> Object:
        await self._arrive("get")
        return await super().get(resource, name, namespace)

    async def list(
        self,
        resource: Resource,
        namespace: str = "",
        *,
        label_selector: str = "",
        field_selector: str = "",
        resource_version: str = "",
        limit: int = 0,
        continue_token: str = "",
    ) -> Page:
        await self._arrive("list", resource_version, limit, continues=bool(continue_token))
        scope = self._scope(resource, namespace, label_selector, field_selector)
        if resource_version != "0":
            found = self._page(scope, resource_version, limit, continue_token)
        else:
            cached = Token(max(_FIRST, self.version - self.lag), "").encode()
            compacted, self._state.compacted = self._state.compacted, 0
            found = self._page(scope, "", limit if self.serves_cached_pages else 0, cached)
            self._state.compacted = compacted
        return Page(copy_of(found.items), str(found.version), found.next_token)

    @asynccontextmanager
    async def watch(
        self,
        resource: Resource,
        namespace: str = "",
        *,
        resource_version: str,
        label_selector: str = "",
        field_selector: str = "",
        timeout: float,
    ) -> AsyncIterator[AsyncIterator[WatchEvent]]:
        await self._arrive("watch", resource_version)
        scope = self._scope(resource, namespace, label_selector, field_selector)
        watcher = Watcher(scope, (), lambda _, obj: copy.deepcopy(obj))
        try:
            for event in self._past_events(scope, resource_version):
                watcher.send(event)
        except Expired as error:
            watcher.end(error)
        self._watchers[watcher] = None
        try:
            yield watcher.events(timeout, lambda: self.version)
        finally:
            self._watchers.pop(watcher, None)

    async def _arrive(self, verb: str, version: str = "", limit: int = 0, *, continues: bool = False) -> None:
        self.calls.append(Call(verb, version, limit, continues, asyncio.get_running_loop().time()))
        await asyncio.sleep(self.latency)
        if faults := self._faults.get(verb):
            raise faults.pop(0)
