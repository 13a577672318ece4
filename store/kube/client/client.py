"""KubeClient: the verbs of `KubeApi` against an API server, and its JSON: queries, bodies, objects, pages and events.

The model: any number of tasks share one client; calls share its connections, each watch holds one of its own. Nothing
runs in the background: work is done only in tasks that await it. Close the client after the last of its tasks.

An API server takes objects of any shape from its clients, nested to ten thousand levels. An undecodable object becomes
a `MalformedObject` with its identity, and does not affect its neighbours on a page or in a watch.
`metadata.managedFields` that is nested too deep is left out, because no controller reads it; otherwise a tenant could
hide a running pod by it.
"""

from __future__ import annotations

import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Self, cast, overload
from urllib.parse import urlencode

import msgspec

from store.decoding import CUT, MAX_DEPTH, Undecodable, cut_below, from_json
from store.kube.api.errors import BadRequest, NotFound, Unreachable, Unreadable, error_from_status
from store.kube.api.objects import PODS, MalformedObject, Object, Resource, name_of, namespace_of
from store.kube.api.protocol import Page, PatchType, Propagation, WatchEvent
from store.kube.client.credentials import find_access
from store.kube.client.transport import EXCERPT, JSON, Chunks, Credentials, Limits, Request, RequestMetrics, Transport

SERVED_FOR = 600.0  # seconds that a positive discovery counts
_PATCHES: Mapping[PatchType, str] = {
    "merge": "application/merge-patch+json",
    "strategic": "application/strategic-merge-patch+json",
    "json": "application/json-patch+json",
}


class _ListMeta(msgspec.Struct, rename="camel"):
    resource_version: str = ""
    continue_token: str = msgspec.field(default="", name="continue")
    remaining_item_count: int | None = None


class _List(msgspec.Struct):
    metadata: _ListMeta
    items: list[msgspec.Raw] | None = None


class _Event(msgspec.Struct, gc=False):
    type: str
    object: dict[str, Any]


class _RawEvent(msgspec.Struct, gc=False):
    type: str
    object: msgspec.Raw


_ANYTHING = msgspec.json.Decoder()
_OBJECT = msgspec.json.Decoder(dict[str, Any])
_LIST = msgspec.json.Decoder(_List)
_EVENT = msgspec.json.Decoder(_Event)
_RAW_EVENT = msgspec.json.Decoder(_RawEvent)


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
        return decode_object(await self._call("get", "GET", resource, resource.path(namespace, name)))

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
        return decode_page(await self._call("list", "GET", resource, resource.path(namespace), options))

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
        query = _query(
            watch=True,
            allowWatchBookmarks=True,
            resourceVersion=resource_version,
            labelSelector=label_selector,
            fieldSelector=field_selector,
            timeoutSeconds=max(1, round(timeout)),
        )
        request = Request("watch", resource.plural, "GET", resource.path(namespace), query)
        async with self._transport.stream(request) as chunks, aclosing(events_in(chunks)) as events:
            yield events

    @asynccontextmanager
    async def log(
        self,
        pod: str,
        namespace: str,
        *,
        container: str = "",
        follow: bool = False,
        previous: bool = False,
        tail: int | None = None,
        since: datetime | None = None,
    ) -> AsyncIterator[Chunks]:
        """Read the log of a container, each line after its time (RFC 3339, in nanoseconds) and a space.

        `container`: "" for the only one. `follow`: the stream goes on until the container ends; it raises `Unreachable`
        after a silence. `previous`: of the run before its last restart. `tail`: the number of lines from the end.
        Raises `KubeError`.
        """
        query = _query(
            timestamps=True,
            container=container,
            follow=follow,
            previous=previous,
            tailLines=None if tail is None else str(tail),
            sinceTime=since.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ") if since else None,
        )
        request = Request("log", PODS.plural, "GET", PODS.path(namespace, pod, "log"), query)
        async with self._transport.stream(request) as chunks:
            yield chunks

    async def create(
        self, resource: Resource, body: Object, namespace: str = "", *, name: str = "", subresource: str = ""
    ) -> Object:
        """See `KubeApi.create`."""
        path = resource.path(namespace, name, subresource)
        return decode_object(await self._call("create", "POST", resource, path, body=encode(body)))

    async def replace(self, resource: Resource, body: Object, *, subresource: str = "") -> Object:
        """See `KubeApi.replace`."""
        path = resource.path(namespace_of(body), name_of(body), subresource)
        return decode_object(await self._call("replace", "PUT", resource, path, body=encode(body)))

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
        content_type = _PATCHES[patch_type]
        return decode_object(
            await self._call("patch", "PATCH", resource, path, body=encode(patch), content_type=content_type)
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
        options: Object = {}
        if uid:
            options["preconditions"] = {"uid": uid}
        if grace_period is not None:
            options["gracePeriodSeconds"] = grace_period
        if propagation is not None:
            options["propagationPolicy"] = propagation
        body = encode(options) if options else None
        await self._call("delete", "DELETE", resource, resource.path(namespace, name), body=body)

    async def served(self, resource: Resource, *, fresh: bool = False) -> bool:
        """See `KubeApi.served`."""
        if not fresh and self._clock() < self._served.get(resource, 0.0):
            return True
        try:
            answer = decode_object(await self._call("discover", "GET", resource, resource.root))
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
        content_type: str = JSON,
    ) -> bytes:
        # the server gives up when we do: later results would be lost
        query = _query(**(options or {}), timeout=f"{max(1, round(self._limits.call_timeout))}s")
        return await self._transport.call(Request(verb, resource.plural, method, path, query, body, content_type))


async def events_in(chunks: Chunks) -> AsyncGenerator[WatchEvent]:
    """Yield the events of a watch, one in each line, which may be cut anywhere and have any length. Raises
    `Unreachable` for a stream that ends inside a line."""
    pieces: list[bytes] = []
    while chunk := await chunks():
        *lines, rest = chunk.split(b"\n")
        if lines:
            lines[0] = b"".join((*pieces, lines[0]))
            pieces.clear()
        if rest:
            pieces.append(rest)
        for line in filter(None, lines):
            yield decode_event(line)
    if pieces:
        raise Unreachable("the watch ended inside an event")


class LazyObjects(Sequence[Object]):
    """The items of a page, each decoded on demand: a decoded page takes five times the memory of its text.

    An item that can't be decoded is a `MalformedObject`. `cut`: the page was too deep, and was cut (`cut_below`).
    """

    __hash__ = None  # type: ignore[assignment]  # it compares as a list does

    def __init__(self, texts: Sequence[msgspec.Raw], *, cut: bool = False) -> None:
        self._texts, self._cut = texts, cut

    def __len__(self) -> int:
        return len(self._texts)

    @overload
    def __getitem__(self, index: int) -> Object: ...
    @overload
    def __getitem__(self, index: slice) -> LazyObjects: ...
    def __getitem__(self, index: int | slice) -> Object | LazyObjects:
        if isinstance(index, slice):
            return LazyObjects(self._texts[index], cut=self._cut)
        return _item(self._texts[index], cut=self._cut)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)


def _query(**parameters: str | int | float | bool | None) -> str:
    """Return a query string of the parameters that are not empty."""
    return urlencode({name: "true" if value is True else f"{value}" for name, value in parameters.items() if value})


def encode(body: Object | Any) -> bytes:
    """Return the body of a request. Raises `BadRequest` for what can't be written as JSON."""
    try:
        return msgspec.json.encode(body)
    except Exception as error:
        raise BadRequest(f"the object can't be written as JSON: {error}") from error


def decode_object(body: bytes) -> Object:
    """Return the object of an answer. Raises `Unreadable` for one that is nested too deep."""
    try:
        return from_json(_OBJECT, body)
    except Undecodable as error:
        found = _salvaged(body, error)
    if isinstance(found, MalformedObject):
        if found["metadata"]:
            raise Unreadable(f"the object can't be understood: {found.reason}")
        raise _stranger(body, found.reason)
    return found


def decode_page(body: bytes) -> Page:
    """Return a page, whatever its items are. Raises `Unreachable` for an answer that is not a list."""
    cut = False
    try:
        answer = from_json(_LIST, body)
    except Undecodable:
        cut = True
        try:
            answer = from_json(_LIST, cut_below(body, MAX_DEPTH + 2))  # the list and its items are two levels more
        except Undecodable as error:
            raise _stranger(body, str(error)) from error
    meta, items = answer.metadata, LazyObjects(answer.items or (), cut=cut)
    return Page(items, meta.resource_version, meta.continue_token, meta.remaining_item_count)


def decode_event(line: bytes) -> WatchEvent:
    """Return the event in one line of a watch. Raises the typed error of an ERROR event, and `Unreadable` for a line
    that is not an event."""
    try:
        event = from_json(_EVENT, line)
    except Undecodable as error:
        try:
            raw = from_json(_RAW_EVENT, cut_below(line, MAX_DEPTH + 1))  # the event is one level more
        except Undecodable:
            raise Unreadable(f"what came is no event of a watch: {error} in: {_excerpt(line)}") from error
        kind, obj = raw.type, _item(raw.object, cut=True)
    else:
        kind, obj = event.type, event.object
    if kind == "ERROR":
        raise error_from_status(obj)
    return WatchEvent(kind, obj)


def _item(text: msgspec.Raw, *, cut: bool) -> Object:
    """Return the object in a text; the reader refuses a value that is not an object."""
    if cut and CUT in bytes(text):
        return _salvaged(bytes(text), Undecodable(f"nested more than {MAX_DEPTH} levels deep"))
    try:
        return cast(Object, from_json(_ANYTHING, text))
    except Undecodable as error:
        return _salvaged(bytes(text), error)


def _salvaged(text: bytes, error: Undecodable) -> Object:
    """Return the decodable part of an object: all but its managed fields, if only they are too deep, else a
    `MalformedObject`."""
    legible = text.decode(errors="replace").encode()
    try:
        shallow = from_json(_ANYTHING, cut_below(legible))
    except Undecodable:
        return MalformedObject(None, str(error))
    metadata = shallow.get("metadata") if isinstance(shallow, dict) else None
    has_fields = isinstance(metadata, dict) and metadata.pop("managedFields", None) is not None
    if has_fields and legible == text and CUT not in encode(shallow):
        return cast(Object, shallow)
    return MalformedObject(shallow, str(error))


def _stranger(body: bytes, reason: str) -> Unreachable:
    return Unreachable(f"what answers is not the Kubernetes API: {reason} in: {_excerpt(body)}")


def _excerpt(body: bytes) -> str:
    return body[:EXCERPT].decode(errors="replace").strip()
