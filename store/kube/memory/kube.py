"""MemoryKube: a Kubernetes API server in memory, for tests of control loops, also in virtual time.

The model: each call is applied in one step of the event loop, so calls are serial, and each sees all that were answered
before; the answer is handed over one loop iteration later, as a real server's would be, so other tasks run between a
read and the reader's next step. Objects are copied on the way in and out, as by a network.

As in the API server: UIDs, resource versions and generations; generated names; preconditions; finalizers and deletion;
pods that end gracefully; owner references with foreground, background and orphan deletion; the status as a subresource;
three kinds of patches; selectors; pages that show one version; watches over a history that can be compacted; namespaces
that end; bindings, and evictions within disruption budgets. Garbage is collected by timers of the event loop.

Not implemented: authentication, schemas (fields are not checked or pruned), most defaults and validations, quotas,
server-side apply, cluster IPs. Nothing runs pods, and no scheduler binds them.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from store.kube.api.errors import KubeError, Unreachable
from store.kube.api.objects import Object, Resource, name_of, namespace_of
from store.kube.api.protocol import Page, PatchType, Propagation, WatchEvent
from store.kube.memory.garbage import Collector
from store.kube.memory.rules import NAMESPACES, copy_of, is_built_in, place_of
from store.kube.memory.server import AdmissionHook, MemoryServer
from store.kube.memory.state import ObjectChange
from store.kube.memory.watch import Watcher


class Call(NamedTuple):
    """A call as the hooks see it. `body`: the object that a write sends; for a patch, the patch."""

    verb: str
    resource: Resource
    namespace: str
    name: str = ""
    subresource: str = ""
    body: Any = None


Hook = Callable[[Call], Awaitable[None] | None]


class MemoryKube:
    """A `KubeApi` without a server; one instance belongs to one event loop.

    `clock`: Unix seconds, for timestamps. `rng`: makes UIDs and generated names. `namespaces`: exist from the start.
    `history_limit`: number of past changes that watches can see. `gc_delay`: seconds until garbage is collected
    (None: never).
    `unserved`: resources that the server does not have. Custom resources need no definition, see `register`.

    Hooks, which may be set at any time: `before_call` may wait or raise a `KubeError`, then nothing was applied.
    `after_call` may do so when the call was applied: its answer is late, or lost. Either may be a plain function.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.time,
        rng: random.Random | None = None,
        namespaces: Sequence[str] = ("default",),
        history_limit: int = 10_000,
        gc_delay: float | None = 0.0,
        unserved: Collection[Resource] = (),
    ) -> None:
        self.before_call: Hook | None = None
        self.after_call: Hook | None = None
        self._server = MemoryServer(clock, rng or random.Random(), history_limit, unserved)
        self._watchers: dict[Watcher, None] = {}
        for name in namespaces:
            self._server.create(NAMESPACES, {"metadata": {"name": name}}, "")
        self._server.state.listeners.append(self._notify)
        if gc_delay is not None:
            Collector(self._server.state, self._server.knows, gc_delay, clock)

    @property
    def version(self) -> int:
        """The resource version of the last write."""
        return self._server.state.version

    @property
    def watch_count(self) -> int:
        """The number of open watches."""
        return len(self._watchers)

    @property
    def admission(self) -> AdmissionHook | None:
        """A function (resource, new, old) that may refuse a write by raising; `old` is None for a creation."""
        return self._server.admission

    @admission.setter
    def admission(self, admission: AdmissionHook | None) -> None:
        self._server.admission = admission

    def register(self, resource: Resource, *, has_status: bool) -> None:
        """Declare whether a custom resource has a status subresource. Without this or a definition, it has none."""
        self._server.register(place_of(resource), has_status=has_status)

    def compact(self) -> None:
        """Forget all history: earlier versions for watches, and page tokens that a write made stale, are `Expired`."""
        self._server.state.compact()

    def break_watches(self, error: KubeError | None = None) -> None:
        """End all open watches with an error, by default that of a lost connection."""
        for watcher in self._watchers:
            watcher.end(error or Unreachable("the connection was lost"))

    async def get(self, resource: Resource, name: str, namespace: str = "") -> Object:
        """See `KubeApi.get`."""
        call = Call("get", resource, namespace, name)
        await _run(self.before_call, call)
        return await self._answer(call, self._server.get(resource, name, namespace))

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
        """See `KubeApi.list`. As from the server's cache, version "0" answers everything in one page."""
        call = Call("list", resource, namespace)
        await _run(self.before_call, call)
        scope = self._server.scope(resource, namespace, label_selector, field_selector)
        found = self._server.list(scope, resource_version, limit, continue_token)
        await self._finish_call(call)
        items = [_outgoing(resource, obj) for obj in found.items]
        if is_built_in(resource.group):  # items of these kinds carry no kind and version
            for item in items:
                del item["apiVersion"], item["kind"]
        return Page(items, str(found.version), found.next_token, found.remaining)

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
        """See `KubeApi.watch`. Versions "" and "0" begin with the existing objects, as ADDED."""
        call = Call("watch", resource, namespace)
        await _run(self.before_call, call)
        scope = self._server.scope(resource, namespace, label_selector, field_selector)
        watcher = Watcher(scope, self._server.past_events(scope, resource_version), _outgoing)
        self._watchers[watcher] = None
        try:
            await self._finish_call(call)
            yield watcher.events(timeout, lambda: self.version)
        finally:
            del self._watchers[watcher]

    async def create(
        self, resource: Resource, body: Object, namespace: str = "", *, name: str = "", subresource: str = ""
    ) -> Object:
        """See `KubeApi.create`. Subresources to post to: `binding` and `eviction` of pods."""
        body = copy_of(body)
        metadata = body.get("metadata") or {}
        name_in_body = str(metadata.get("name") or metadata.get("generateName") or "")
        call = Call("create", resource, namespace, name or name_in_body, subresource, body)
        await _run(self.before_call, call)
        if not subresource:
            return await self._answer(call, self._server.create(resource, body, namespace))
        self._server.post(resource, body, namespace, name, subresource)
        await self._finish_call(call)
        return {"apiVersion": "v1", "kind": "Status", "status": "Success", "code": 201}

    async def replace(self, resource: Resource, body: Object, *, subresource: str = "") -> Object:
        """See `KubeApi.replace`."""
        body = copy_of(body)
        call = Call("replace", resource, namespace_of(body), name_of(body), subresource, body)
        await _run(self.before_call, call)
        return await self._answer(call, self._server.replace(resource, body, subresource))

    async def patch(
        self,
        resource: Resource,
        name: str,
        namespace: str,
        patch: Object | Sequence[Any],
        *,
        patch_type: PatchType = "merge",
        subresource: str = "",
    ) -> Object:
        """See `KubeApi.patch`."""
        patch = copy_of(patch)
        call = Call("patch", resource, namespace, name, subresource, patch)
        await _run(self.before_call, call)
        stored = self._server.patch(resource, name, namespace, patch, patch_type, subresource)
        return await self._answer(call, stored)

    async def delete(
        self,
        resource: Resource,
        name: str,
        namespace: str = "",
        *,
        uid: str = "",
        grace_period: int | None = None,
        propagation: Propagation | None = None,
    ) -> None:
        """See `KubeApi.delete`."""
        call = Call("delete", resource, namespace, name)
        await _run(self.before_call, call)
        self._server.delete(resource, name, namespace, uid, grace_period, propagation)
        await self._finish_call(call)

    async def served(self, resource: Resource, *, fresh: bool = False) -> bool:
        """See `KubeApi.served`."""
        await _run(self.before_call, Call("served", resource, ""))
        return self._server.serves(resource)

    async def _answer(self, call: Call, obj: Object) -> Object:
        await self._finish_call(call)
        return _outgoing(call.resource, obj)

    async def _finish_call(self, call: Call) -> None:
        await asyncio.sleep(0)
        await _run(self.after_call, call)

    def _notify(self, change: ObjectChange) -> None:
        for watcher in self._watchers:
            watcher.notice(change)


async def _run(hook: Hook | None, call: Call) -> None:
    if hook is not None:
        waiting = hook(call)
        if waiting is not None:
            await waiting


def _outgoing(resource: Resource, obj: Object) -> Object:
    """Return a copy for a caller, in the API version of the request."""
    copied: Object = copy_of(obj)
    copied["apiVersion"] = resource.api_version
    return copied
