"""One collection of an API server, with the semantics that an informer meets, and a network that a test controls.

Behind it is a whole history: every state that there ever was can be listed, so that a test may let the watch cache lag
(`lag`), forget what was (`compact`), or answer a list from before the crash. Objects carry resource versions and UIDs
as from etcd. A watch filters by label selector as the server does: what leaves the selector is a DELETED event with the
last state that matched.
"""

from __future__ import annotations

import asyncio
import builtins
import copy
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from store.kube.api import Page, WatchEvent
from store.kube.errors import Expired, KubeError, NotFound, ServerTimeout
from store.kube.objects import Object, is_deleting, labels_of, namespace_of, uid_of
from store.kube.resources import PODS, Resource
from store.selectors import Selector

NAMESPACE = "team"


class Call(NamedTuple):
    """A list, watch or get as it was asked for; `at` in seconds of the loop's time."""

    verb: str
    version: str
    limit: int
    continues: bool
    at: float


class Collection:
    """`fail(verb, …)` lets the verb's next calls fail, one error each. `calls`: all that were made.

    `latency`: seconds until the server takes up a call. `lag`: how many versions its watch cache is behind.
    `serves_cached_pages`: whether a list at "0" honours its limit, as a server without a watch cache does.
    """

    def __init__(self, resource: Resource = PODS) -> None:
        self.resource = resource
        self.calls: list[Call] = []
        self.latency = 0.0
        self.lag = 0
        self.serves_cached_pages = False
        self._first = 100
        self._states: list[dict[str, Object]] = [{}]  # by resource version, from `_first` on
        self._compacted = 0
        self._uids = 0
        self._faults: dict[str, builtins.list[KubeError]] = {}
        self._watchers: set[asyncio.Queue[WatchEvent | KubeError | None]] = set()
        self._changed: dict[asyncio.Queue[WatchEvent | KubeError | None], str] = {}

    @property
    def version(self) -> int:
        """The newest resource version."""
        return self._first + len(self._states) - 1

    @property
    def now(self) -> dict[str, Object]:
        """What exists, by key."""
        return self._states[-1]

    def selected(self, selector: str = "") -> dict[str, Object]:
        """What a list shows now."""
        return _matching(self.now, selector)

    @property
    def watches(self) -> int:
        """How many watches are open."""
        return len(self._watchers)

    def put(self, name: str, /, *, uid: str = "", labels: dict[str, str] | None = None, **fields: Any) -> Object:
        """Create the object, or write it anew under its UID; labels stay as they are when they are not given, and a
        deletion timestamp for good."""
        key = f"{NAMESPACE}/{name}"
        old = self.now.get(key)
        self._uids += old is None
        metadata: Object = {
            "name": name,
            "namespace": NAMESPACE,
            "uid": uid_of(old) if old else uid or f"uid-{self._uids}",
            "resourceVersion": str(self.version + 1),
            "labels": labels if labels is not None else labels_of(old) if old else {},
        }
        if old and is_deleting(old):
            metadata["deletionTimestamp"] = old["metadata"]["deletionTimestamp"]
        metadata |= fields.pop("metadata", {})
        obj = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, **fields}
        self._append({**self.now, key: obj})
        return obj

    def delete(self, name: str) -> None:
        key = f"{NAMESPACE}/{name}"
        self._append({other: obj for other, obj in self.now.items() if other != key})

    def replace(self, name: str, **fields: Any) -> Object:
        """Delete it, and create another one under its name."""
        self.delete(name)
        return self.put(name, **fields)

    def compact(self) -> None:
        """Forget history: watches and continue tokens from before now are expired."""
        self._compacted = self.version

    def bookmark(self) -> None:
        """Tell every watch how far the history is."""
        self.send(WatchEvent("BOOKMARK", {"kind": "Pod", "metadata": {"resourceVersion": str(self.version)}}))

    def send(self, event: WatchEvent) -> None:
        """Send an event of the test's own making to every watch."""
        self._tell(event)

    def cut(self, error: KubeError | None = None) -> None:
        """End every watch: in good order, or by an error."""
        self._tell(error)
        self._watchers.clear()

    def fail(self, verb: str, *errors: KubeError) -> None:
        self._faults.setdefault(verb, []).extend(errors)

    def versions(self, verb: str) -> builtins.list[str]:
        """The resource versions that calls of the verb asked for."""
        return [call.version for call in self.calls if call.verb == verb]

    def times(self, verb: str) -> builtins.list[float]:
        return [call.at for call in self.calls if call.verb == verb]

    async def get(self, resource: Resource, name: str, namespace: str = "") -> Object:
        await self._arrive("get")
        obj = self.now.get(f"{namespace}/{name}")
        if obj is None:
            raise NotFound(f"{name} does not exist", status=404)
        return copy.deepcopy(obj)

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
        version, start = self.version, 0
        if continue_token:
            version, start = map(int, continue_token.split("."))
            if version < self._compacted:
                raise Expired("the continue token is too old", status=410)
        elif resource_version == "0":
            version = max(self._first, self.version - self.lag)
        elif resource_version and int(resource_version) > self.version:
            raise too_large()
        items = list(_matching(self._states[version - self._first], label_selector).values())
        pages = limit and (resource_version != "0" or self.serves_cached_pages)
        end = start + limit if pages else len(items)
        token = f"{version}.{end}" if end < len(items) else ""
        return Page(copy.deepcopy(items[start:end]), str(version), token)

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
        events: asyncio.Queue[WatchEvent | KubeError | None] = asyncio.Queue()
        since = int(resource_version)
        if since < self._compacted:
            events.put_nowait(Expired("too old resource version", status=410))
        for version in range(since, self.version):
            for event in self._events(version + 1, label_selector):
                events.put_nowait(event)
        self._watchers.add(events)
        self._changed[events] = label_selector
        closing = asyncio.get_running_loop().call_later(timeout, events.put_nowait, None)
        try:
            yield _read(events)
        finally:
            closing.cancel()
            self._watchers.discard(events)
            del self._changed[events]

    async def _arrive(self, verb: str, version: str = "", limit: int = 0, *, continues: bool = False) -> None:
        self.calls.append(Call(verb, version, limit, continues, asyncio.get_running_loop().time()))
        await asyncio.sleep(self.latency)
        if faults := self._faults.get(verb):
            raise faults.pop(0)

    def _append(self, state: dict[str, Object]) -> None:
        self._states.append(state)
        for events in self._watchers:
            for event in self._events(self.version, self._changed[events]):
                events.put_nowait(event)

    def _events(self, version: int, selector: str) -> builtins.list[WatchEvent]:
        """What a watch hears of the change that made this version."""
        before, after = (_matching(self._states[at - self._first], selector) for at in (version - 1, version))
        events = []
        for key in before.keys() - after.keys():
            metadata = {**before[key]["metadata"], "resourceVersion": str(version)}
            events.append(WatchEvent("DELETED", {**before[key], "metadata": metadata}))
        for key, obj in after.items():
            if obj is not before.get(key):
                events.append(WatchEvent("MODIFIED" if key in before else "ADDED", obj))
        return copy.deepcopy(events)

    def _tell(self, event: WatchEvent | KubeError | None) -> None:
        for events in self._watchers:
            events.put_nowait(event)


def too_large() -> ServerTimeout:
    """What a server answers that has not seen the resource version yet."""
    details = {"causes": [{"reason": "ResourceVersionTooLarge"}]}
    return ServerTimeout("Too large resource version", status=504, reason="Timeout", details=details)


async def _read(events: asyncio.Queue[WatchEvent | KubeError | None]) -> AsyncIterator[WatchEvent]:
    while (event := await events.get()) is not None:
        if isinstance(event, KubeError):
            raise event
        yield event


def _matching(state: dict[str, Object], selector: str) -> dict[str, Object]:
    terms = Selector.parse(selector)
    return {key: obj for key, obj in state.items() if namespace_of(obj) and terms.matches(labels_of(obj))}
