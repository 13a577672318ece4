"""Reflector: lists a collection, then watches it, until cancelled, and passes the results to a sink.

The model: one task. A list is passed on once all its pages are in, so that a list that fails halfway shows nothing;
other tasks get their turns on the loop. A watch's events are passed on one by one. Each event moves the cursor,
bookmarks do nothing else.

What follows is decided by `Cursor` and `after_watch`, purely, after client-go's reflector, with our amendments. A list
starts from any cached state ("0"), later from the last version seen, and reads with quorum once that version is no
longer, or not yet, known to the server. A watch that ends is continued from the last version seen, unless the server
reports, or behaves as if, it could not: only then everything is listed again.

Errors of the server do not end the reflector: they are logged when they change, shown as `problem`, and retried. After
an unexpected error, which is logged with its traceback and counted, the collection is listed again after a pause. An
undecodable object in a list does not count as deleted if its key can be read; while a list has one without a readable
key, no object that is missing from the list counts as deleted, because it may be that one.

`Admission` checks and trims the objects from the API server before any other part sees them. An object that is not
valid is logged, counted and left out; other objects are unaffected. As long as it exists it is listed in `unreadable`
with the reason, if its key can be read.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import structlog

from store.kube.api.errors import (
    Expired,
    KubeError,
    ServerError,
    TooManyRequests,
    Unreachable,
    is_too_large_resource_version,
)
from store.kube.api.objects import MalformedObject, Object, Resource, join_key, key_of
from store.kube.api.protocol import KubeReader, Page, WatchEvent
from store.timing import Backoff

log = structlog.get_logger(__name__)

WATCH_TIMEOUT = (300.0, 600.0)  # seconds until the server closes a watch: random, so that watches don't end together
_STRIDE = 100  # objects of a list that are passed on before other tasks get a turn on the loop
_CHANGES = frozenset({"ADDED", "MODIFIED", "DELETED"})
_SHOWN = 100  # characters of a wrong value that are shown
SHORT_WATCH = 1.0  # seconds: a watch that ends sooner, without any event, is suspicious
EndOfWatch: TypeAlias = Literal["closed", "broken", "refused", "short-watch", "expired", "failed"]
Transform: TypeAlias = Callable[[Object], Object]


class Sink(Protocol):
    """The receiver of a reflector's results."""

    def present(self, obj: Object) -> None:
        """Take the state of an object that exists."""

    def absent(self, obj: Object) -> None:
        """Take the last state of an object that left the collection."""

    def retain(self, keys: Set[str]) -> None:
        """Objects under other keys are not in the collection any more; their departure was not observed."""

    def lost(self, key: str, uid: str) -> None:
        """The object left the collection in an undecodable state. `uid`: "" if it can't be read."""


@dataclass(slots=True)
class Collection:
    """The mirrored objects: a resource, in one namespace or ("") in all, narrowed by selectors."""

    resource: Resource
    namespace: str = ""
    label_selector: str = ""
    field_selector: str = ""


@dataclass(slots=True)
class ReflectorStats:
    """Counters since the start. `lists` and `watches` by reason; the first list has the reason `start`.

    `crashes`: unexpected errors.
    """

    lists: Counter[str] = field(default_factory=Counter)
    watches: Counter[str] = field(default_factory=Counter)
    events: int = 0
    crashes: int = 0


class Reflector:
    """Mirrors `collection` into `sink` for as long as `run` runs.

    `listed` is set once a first list was passed on. `last_seen`: the time of the server's last answer, on `clock`.
    `problem`: why the collection can't be listed or watched at present, in words; "" when it can.
    """

    def __init__(
        self,
        api: KubeReader,
        collection: Collection,
        admission: Admission,
        sink: Sink,
        *,
        page_size: int = 500,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self.stats = ReflectorStats()
        self.listed = asyncio.Event()
        self.last_seen: float | None = None
        self.problem = ""
        self._api, self._collection, self._admission, self._sink = api, collection, admission, sink
        self._selectors = {
            "label_selector": collection.label_selector,
            "field_selector": collection.field_selector,
        }
        self.cursor = Cursor(page_size)
        self._clock, self._rng = clock, rng or random.Random()
        self._before_list = new_backoff(clock, self._rng)
        self._before_watch = new_backoff(clock, self._rng)
        self._complaint: tuple[str, type[Exception], str] | None = None
        self._reading: asyncio.Timeout | None = None
        self._log = log.bind(
            resource=collection.resource.plural,
            namespace=collection.namespace,
            label_selector=collection.label_selector,
        )

    async def run(self) -> None:
        """Mirror until cancelled."""
        reason = "start"
        while True:
            try:
                await self._list(reason)
                reason = await self._watch_until_stale()
            except KubeError as error:
                self._failed("list", error)
                await asyncio.sleep(self._before_list.pause(error.retry_after))
                reason = "retry"
            except Exception as error:
                self.stats.crashes += 1
                self.problem = f"can't follow {self._collection.resource.plural}: {error!r}"
                self._complaint = ("follow", type(error), "")
                self._log.error("Could not follow the collection; listing it again", error=repr(error), exc_info=error)
                await asyncio.sleep(self._before_list.pause())
                reason = "crash"

    async def _list(self, reason: str) -> None:
        version = self.cursor.list_version
        self.stats.lists[reason] += 1
        try:
            await self._list_at(version)
        except KubeError as error:
            if version == "" or not forgets(error):
                raise
            self.cursor.distrust()
            self.stats.lists["expired"] += 1
            await self._list_at("")

    async def _list_at(self, version: str) -> None:
        limit = self.cursor.limit(version)
        pages = [await self._page(resource_version=version, limit=limit)]
        while token := pages[-1].continue_token:
            try:
                pages.append(await self._page(continue_token=token, limit=limit))
            except Expired:
                # The token expired before the last page: read all at once, at the version of the first request.
                pages = [await self._page(resource_version=version)]
        listed: set[str] = set()
        is_complete = True
        for number, item in enumerate(chain.from_iterable(page.items for page in pages), start=1):
            admitted = self._admission.admit(item)
            if admitted is not None:
                listed.add(key_of(admitted))
                self._present(admitted)
            elif key := key_in(item):
                listed.add(key)
            else:
                is_complete = False
            if number % _STRIDE == 0:
                await asyncio.sleep(0)
        if is_complete:
            self._sink.retain(listed)
        self._admission.retain(listed)
        self.cursor.listed(version, pages[0].resource_version, paginated=len(pages) > 1)
        self.listed.set()

    async def _page(self, *, resource_version: str = "", limit: int = 0, continue_token: str = "") -> Page:
        page = await self._api.list(
            self._collection.resource,
            self._collection.namespace,
            **self._selectors,
            resource_version=resource_version,
            limit=limit,
            continue_token=continue_token,
        )
        self.last_seen = self._clock()
        return page

    def _present(self, obj: Object) -> None:
        """Pass on one object; an object that the sink can't keep is left out, like an undecodable one."""
        try:
            self._sink.present(obj)
        except Exception as error:
            self._admission.refuse(obj, f"it can't be kept: {error!r}")

    def renew(self) -> None:
        """End the present watch, if any. The next one begins where it stopped."""
        if self._reading is not None:
            self._reading.reschedule(asyncio.get_running_loop().time())
            self._reading = None

    async def _watch_until_stale(self) -> str:
        """Watch, and watch again, until the collection must be listed. Return the reason."""
        reason = "listed"
        while True:
            self.stats.watches[reason] += 1
            error, then = await self._watch()
            reason = then.reason
            if error is not None and is_too_large_resource_version(error):
                self.cursor.distrust()  # the server lags behind: it would refuse a list at our version, too
            if then.backs_off:
                if error is not None and reason != "expired":
                    self._failed("watch", error)
                backoff = self._before_list if then.lists else self._before_watch
                await asyncio.sleep(backoff.pause(error.retry_after if error else None))
            if then.lists:
                return reason

    async def _watch(self) -> tuple[KubeError | None, AfterWatch]:
        opened, began, since = False, self._clock(), self.cursor.version
        failure: KubeError | None = None
        try:
            async with self._api.watch(
                self._collection.resource,
                self._collection.namespace,
                **self._selectors,
                resource_version=since,
                timeout=self._rng.uniform(*WATCH_TIMEOUT),
            ) as events:
                opened = True
                self.last_seen = self._clock()
                if self._complaint is not None:
                    self._log.info("Watching the collection again")
                self.problem, self._complaint = "", None
                try:
                    async with asyncio.timeout(None) as self._reading:
                        async for event in events:
                            self._take(event)
                except TimeoutError:
                    self._log.warning("Watching again: the API server seems to have forgotten this watch", since=since)
                finally:
                    self._reading = None
        except KubeError as error:
            failure = error
        lived, progressed = self._clock() - began, self.cursor.version != since
        return failure, after_watch(failure, opened=opened, lived=lived, progressed=progressed)

    def _take(self, event: WatchEvent) -> None:
        kind, obj = event
        self.last_seen = self._clock()
        self.stats.events += 1
        if kind in _CHANGES:
            admitted = self._admission.admit(obj)
            if kind == "DELETED":
                self._admission.unreadable.pop(key_in(obj), None)
            if admitted is None:
                if kind == "DELETED" and (key := key_in(obj)):
                    self._sink.lost(key, metadata_text(obj, "uid"))
            elif kind == "DELETED":
                self._sink.absent(admitted)
            else:
                self._present(admitted)
        elif kind != "BOOKMARK":
            self._admission.refuse(obj, f"its event is {kind!r}")
        version = metadata_text(obj, "resourceVersion")
        if version:
            self.cursor.version = version

    def _failed(self, verb: str, error: KubeError) -> None:
        self.problem = f"can't {verb} {self._collection.resource.plural}: {error}"
        complaint = (verb, type(error), error.reason)
        if complaint != self._complaint:
            self._complaint = complaint
            self._log.warning("Could not read the collection; cached data may be stale", verb=verb, error=str(error))


def without_managed_fields(obj: Object) -> Object:
    """Return the object without the bookkeeping of server-side apply, which no controller reads; a transform."""
    metadata = obj["metadata"]
    if "managedFields" not in metadata:
        return obj
    return {**obj, "metadata": {name: value for name, value in metadata.items() if name != "managedFields"}}


class Admission:
    """Admits objects of one resource. `malformed`: the number left out so far. `unreadable`: the existing objects that
    can't be decoded, by key, with the reason.

    `transform` may leave out parts of an object; it gets the object as the server sent it and does not change it.
    """

    def __init__(self, resource: Resource, transform: Transform | None = None) -> None:
        self.malformed = 0
        self.unreadable: dict[str, str] = {}
        self._resource, self._transform = resource, transform
        self._api_version = resource.api_version
        self._texts = ("name", "resourceVersion", "namespace") if resource.namespaced else ("name", "resourceVersion")

    def admit(self, obj: Any) -> Object | None:
        """Return the object as it is to be kept; None when it is not a valid object of the resource."""
        defect = self._defect(obj)
        if defect:
            self.refuse(obj, defect)
            return None
        admitted: Object = obj
        if self._transform is not None:
            try:
                admitted = self._transform(admitted)
            except Exception as error:
                self.refuse(obj, f"its transform failed: {error!r}")
                return None
        if self.unreadable:
            self.unreadable.pop(key_of(admitted), None)
        return admitted

    def refuse(self, obj: Any, defect: str) -> None:
        """Log and count an object that is left out."""
        self.malformed += 1
        if key := key_in(obj):
            self.unreadable[key] = defect
        log.error(
            "Left out an object that can't be decoded",
            resource=self._resource.plural,
            namespace=metadata_text(obj, "namespace"),
            name=metadata_text(obj, "name"),
            reason=defect,
        )

    def retain(self, keys: Set[str]) -> None:
        """Drop all other keys from `unreadable`."""
        self.unreadable = {key: reason for key, reason in self.unreadable.items() if key in keys}

    def _defect(self, obj: Any) -> str:
        """Return why it is not an object of the resource, or "". Items of a list need not carry kind and version."""
        if isinstance(obj, MalformedObject):
            return obj.reason
        if not isinstance(obj, dict):
            return "it is not an object"
        kind, api_version = obj.get("kind"), obj.get("apiVersion")
        if kind is not None and kind != self._resource.kind:
            return f"its kind is {repr(kind)[:_SHOWN]} instead of {self._resource.kind!r}"
        if api_version is not None and api_version != self._api_version:
            return f"its apiVersion is {repr(api_version)[:_SHOWN]} instead of {self._api_version!r}"
        metadata = obj.get("metadata")
        if not isinstance(metadata, dict):
            return "it has no metadata"
        for name in self._texts:
            value = metadata.get(name)
            if not value or not isinstance(value, str):
                return f"its metadata.{name} is missing or not a text"
        return ""


class Cursor:
    """The last resource version seen, and the version to list from.

    `page_size`: objects per page; 0 for everything at once.
    """

    def __init__(self, page_size: int) -> None:
        self.version = ""
        self._page_size = page_size
        self._quorum = False
        self._paginated = False

    def distrust(self) -> None:
        """Make lists read with quorum until one succeeds: the server does not know our version."""
        self._quorum = True

    @property
    def list_version(self) -> str:
        """The resource version to list at."""
        return "" if self._quorum else self.version or "0"

    def limit(self, version: str) -> int:
        """Return the page size for a list at `version`. A limit keeps a server from using its watch cache, so a
        list at a known version goes unpaginated, unless this server was seen to have no such cache."""
        return self._page_size if version in ("", "0") or self._paginated else 0

    def listed(self, asked: str, version: str, *, paginated: bool) -> None:
        """Record that a list requested at `asked` succeeded at `version`."""
        self.version = version
        self._quorum = False
        self._paginated = self._paginated or (paginated and asked == "0")


class AfterWatch(NamedTuple):
    """The next step. `reason` labels the next list or watch; `backs_off`: pause first."""

    lists: bool
    reason: EndOfWatch
    backs_off: bool


def after_watch(error: KubeError | None, *, opened: bool, lived: float, progressed: bool) -> AfterWatch:
    """Return the step after a watch that lasted `lived` seconds and ended by `error`, or None for a clean close.

    `opened`: the server answered with a stream. `progressed`: the stream brought a newer resource version.
    An unavailable or overloaded server is asked for the same watch again, never for a list, which costs it more.
    """
    in_vain = lived < SHORT_WATCH and not progressed
    if error is None:
        return AfterWatch(lists=in_vain, reason="short-watch" if in_vain else "closed", backs_off=in_vain)
    if isinstance(error, Unreachable):
        return AfterWatch(lists=False, reason="broken", backs_off=in_vain)
    if forgets(error):
        return AfterWatch(lists=True, reason="expired", backs_off=True)
    if not opened and isinstance(error, TooManyRequests | ServerError):
        return AfterWatch(lists=False, reason="refused", backs_off=True)
    return AfterWatch(lists=True, reason="failed", backs_off=True)


def forgets(error: KubeError) -> bool:
    """Return whether the server does not know our resource version, either no longer or not yet."""
    return isinstance(error, Expired) or is_too_large_resource_version(error)


def metadata_text(obj: Any, name: str) -> str:
    """Return a text from the metadata of a possibly invalid object; "" when it is absent."""
    metadata = obj.get("metadata") if isinstance(obj, dict) else None
    value = metadata.get(name) if isinstance(metadata, dict) else None
    return value if isinstance(value, str) else ""


def key_in(obj: Any) -> str:
    """Return the key of a possibly invalid object; "" when it has none."""
    name = metadata_text(obj, "name")
    return join_key(metadata_text(obj, "namespace"), name) if name else ""


def new_backoff(
    clock: Callable[[], float],
    rng: random.Random,
    *,
    first: float = 0.8,
    longest: float = 30.0,
    reset_after: float | None = 120.0,
) -> Backoff:
    """Return pauses as those of client-go's exponential back-off manager, with its reflector's figures as defaults:
    each is drawn from [d, 2d), and `reset_after` quiet seconds the first one follows again."""
    return Backoff(first, longest, rng=rng, spread=(1.0, 2.0), reset_after=reset_after, clock=clock)
