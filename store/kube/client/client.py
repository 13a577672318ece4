"""KubeClient: the verbs of `KubeApi` against an API server.

The model: any number of tasks share one client; calls share its connections, each watch holds one of its own. Nothing
runs in the background: work is done only in tasks that await it. Close the client after the last of its tasks.
"""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Protocol, Self

from store.kube.api.errors import NotFound, Unreachable
from store.kube.api.objects import Object, Resource, name_of, namespace_of
from store.kube.api.protocol import Page, PatchType, Propagation, WatchEvent
from store.kube.client import wire
from store.kube.client.credentials import Credentials, find_access
from store.kube.client.transport import Limits, Request, RequestMetrics, Transport

SERVED_FOR = 600.0  # seconds that a positive discovery counts


class KubeClient:
    """A client of one API server; see `KubeApi` for its verbs. Use `connect`, then `close` or `async with`."""

    def __init__(
        self,
        credentials: Credentials,
        *,
        limits: Limits | None = None,
        user_agent: str = "rcfarm",
        metrics: RequestMetrics | None = None,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self._limits = limits or Limits()
        self._transport = Transport(
            credentials, self._limits, user_agent=user_agent, metrics=metrics, clock=clock, rng=rng
        )
        self._clock = clock
        self._served: dict[Resource, float] = {}

    @classmethod
    async def connect(
        cls,
        kubeconfig: str | None = None,
        *,
        context: str | None = None,
        server: str | None = None,
        limits: Limits | None = None,
        user_agent: str = "rcfarm",
        metrics: RequestMetrics | None = None,
    ) -> Self:
        """Return a client of the configured server (see `store.kube.client.credentials`); nothing is sent yet.

        `kubeconfig`: a path, or several as in `KUBECONFIG`. `server`: a URL that replaces the kubeconfig's, or stands
        alone without credentials. Raises `NoConfig`.
        """
        credentials = await Credentials.open(find_access(kubeconfig, context=context, server=server))
        return cls(credentials, limits=limits, user_agent=user_agent, metrics=metrics)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close every connection."""
        await self._transport.close()

    async def get(self, resource: Resource, name: str, namespace: str = "") -> Object:
        """See `KubeApi.get`."""
        return wire.decode_object(await self._call("get", "GET", resource, resource.path(namespace, name)))

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
        """See `KubeApi.list`."""
        options: dict[str, str | int] = {
            "labelSelector": label_selector,
            "fieldSelector": field_selector,
            "resourceVersion": resource_version,
            "limit": limit,
            "continue": continue_token,
        }
        return wire.decode_page(await self._call("list", "GET", resource, resource.path(namespace), options))

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
        """See `KubeApi.watch`."""
        options = wire.query(
            watch=True,
            allowWatchBookmarks=True,
            resourceVersion=resource_version,
            labelSelector=label_selector,
            fieldSelector=field_selector,
            timeoutSeconds=max(1, round(timeout)),
        )
        request = Request("watch", resource.plural, "GET", resource.path(namespace), options)
        async with self._transport.stream(request) as stream:
            yield Watch(stream)

    async def create(
        self, resource: Resource, body: Object, namespace: str = "", *, name: str = "", subresource: str = ""
    ) -> Object:
        """See `KubeApi.create`."""
        path = resource.path(namespace, name, subresource)
        return wire.decode_object(await self._call("create", "POST", resource, path, body=wire.encode(body)))

    async def replace(self, resource: Resource, body: Object, *, subresource: str = "") -> Object:
        """See `KubeApi.replace`."""
        path = resource.path(namespace_of(body), name_of(body), subresource)
        return wire.decode_object(await self._call("replace", "PUT", resource, path, body=wire.encode(body)))

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
        path = resource.path(namespace, name, subresource)
        content_type = wire.PATCHES[patch_type]
        return wire.decode_object(
            await self._call("patch", "PATCH", resource, path, body=wire.encode(patch), content_type=content_type)
        )

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
        body = wire.delete_options(uid, grace_period, propagation)
        await self._call("delete", "DELETE", resource, resource.path(namespace, name), body=body)

    async def served(self, resource: Resource, *, fresh: bool = False) -> bool:
        """See `KubeApi.served`."""
        if not fresh and self._clock() < self._served.get(resource, 0.0):
            return True
        try:
            answer = wire.decode_object(await self._call("discover", "GET", resource, resource.root))
        except NotFound:
            return False
        served = any(each.get("name") == resource.plural for each in answer.get("resources") or ())
        if served:
            self._served[resource] = self._clock() + SERVED_FOR
        return served

    async def _call(
        self,
        verb: str,
        method: str,
        resource: Resource,
        path: str,
        options: Mapping[str, str | int] | None = None,
        *,
        body: bytes | None = None,
        content_type: str = wire.JSON,
    ) -> bytes:
        # the server gives up when we do: later results would be lost
        query = wire.query(**(options or {}), timeout=f"{max(1, round(self._limits.call_timeout))}s")
        return await self._transport.call(Request(verb, resource.plural, method, path, query, body, content_type))


class Chunks(Protocol):
    """A stream of bytes, cut anywhere."""

    async def chunk(self) -> bytes:
        """Return the next bytes, b"" at the end."""


class Watch:
    """Iterates over the events in a stream, each decoded on demand. An event whose object can't be decoded carries a
    `MalformedObject`."""

    def __init__(self, chunks: Chunks) -> None:
        self._chunks = chunks
        self._splitter = wire.LineSplitter()
        self._lines: Iterator[bytes] = iter(())

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> WatchEvent:
        while not (line := next(self._lines, b"")):
            chunk = await self._chunks.chunk()
            if chunk:
                self._lines = filter(None, self._splitter.feed(chunk))
            elif self._splitter.is_inside_line:
                raise Unreachable("the watch ended inside an event")
            else:
                raise StopAsyncIteration
        return wire.decode_event(line)
