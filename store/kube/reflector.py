"""Reflector: lists a collection, then watches it, for ever, and shows what it learns to a sink.

The model: one task. A list is shown once all its pages are in, so that a list that fails halfway shows nothing; others
get their turn on the loop meanwhile. A watch's events are shown one by one. Each event moves the cursor, bookmarks do
nothing else. How a watch is followed by another one, or by a list, is decided in `store.kube.reflector_policy`.

Errors of the server end nothing: they are logged when they change, shown as `problem`, and tried again. Nor does an
error that nobody foresaw: it is logged with its traceback, counted, and the collection is listed again after a pause.
Of an object in a list that can't be read its key, when it has one, keeps the object from counting as deleted; while
one has none, nothing that the list does not show counts as deleted, for it may be that one.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol

import structlog

from store.kube.api import KubeReader, Page, WatchEvent
from store.kube.errors import Expired, KubeError, is_too_large_resource_version
from store.kube.intake import Intake, key_in, metadata_text
from store.kube.objects import Object, key_of
from store.kube.reflector_policy import AfterWatch, Backoff, Cursor, after_watch, forgets
from store.kube.resources import Resource

log = structlog.get_logger(__name__)

WATCH_TIMEOUT = (300.0, 600.0)  # seconds until the server closes a watch: spread, so that watches don't end together
_STRIDE = 100  # objects of a list that are shown before others get a turn on the loop
_SHOWN = frozenset({"ADDED", "MODIFIED", "DELETED"})


class Sink(Protocol):
    """What a reflector shows things to."""

    def present(self, obj: Object) -> None:
        """The object exists, in this state."""

    def absent(self, obj: Object) -> None:
        """The object is not in the collection any more; this was its last state."""

    def retain(self, keys: Set[str]) -> None:
        """Objects under other keys are not in the collection any more; nobody saw them leave."""

    def lost(self, key: str, uid: str) -> None:
        """The object left the collection in a state that can't be understood. `uid`: "" if that can't be read."""


@dataclass(slots=True)
class Collection:
    """What is mirrored: a resource, in one namespace or ("") in all, narrowed by selectors."""

    resource: Resource
    namespace: str = ""
    label_selector: str = ""
    field_selector: str = ""

    @property
    def selectors(self) -> dict[str, str]:
        return {"label_selector": self.label_selector, "field_selector": self.field_selector}


@dataclass(slots=True)
class ReflectorStats:
    """Counters since the start. `lists` and `watches` by why they were made; the first list is the one for `start`.

    `crashes`: errors that nobody foresaw.
    """

    lists: Counter[str] = field(default_factory=Counter)
    watches: Counter[str] = field(default_factory=Counter)
    events: int = 0
    crashes: int = 0


class Reflector:
    """Mirrors `collection` into `sink` for as long as `run` runs.

    `listed` is set once a first list was shown. `last_seen`: when the server was last heard of, on `clock`.
    `problem`: why the collection can't be listed or watched at present, in words; "" when it can.
    """

    def __init__(
        self,
        api: KubeReader,
        collection: Collection,
        intake: Intake,
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
        self._api, self._collection, self._intake, self._sink = api, collection, intake, sink
        self._cursor = Cursor(page_size)
        self._clock, self._rng = clock, rng or random.Random()
        self._before_list = Backoff(clock=clock, rng=self._rng)
        self._before_watch = Backoff(clock=clock, rng=self._rng)
        self._complaint: tuple[str, type[Exception], str] | None = None
        self._log = log.bind(
            resource=collection.resource.plural,
            namespace=collection.namespace,
            label_selector=collection.label_selector,
        )

    @property
    def resource_version(self) -> str:
        """How far the server's history has been seen."""
        return self._cursor.version

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
                self._crashed(error)
                await asyncio.sleep(self._before_list.pause())
                reason = "crash"

    async def _list(self, reason: str) -> None:
        version = self._cursor.list_version
        self.stats.lists[reason] += 1
        try:
            await self._list_at(version)
        except KubeError as error:
            if version == "" or not forgets(error):
                raise
            self._cursor.distrust()
            self.stats.lists["expired"] += 1
            await self._list_at("")

    async def _list_at(self, version: str) -> None:
        limit = self._cursor.limit(version)
        pages = [await self._page(resource_version=version, limit=limit)]
        while token := pages[-1].continue_token:
            try:
                pages.append(await self._page(continue_token=token, limit=limit))
            except Expired:
                # We were slower than the server's memory: all at once, at the version that was asked for at first.
                pages = [await self._page(resource_version=version)]
        await self._show(pages)
        self._cursor.listed(version, pages[0].resource_version, paginated=len(pages) > 1)
        self.listed.set()

    async def _page(self, *, resource_version: str = "", limit: int = 0, continue_token: str = "") -> Page:
        page = await self._api.list(
            self._collection.resource,
            self._collection.namespace,
            **self._collection.selectors,
            resource_version=resource_version,
            limit=limit,
            continue_token=continue_token,
        )
        self.last_seen = self._clock()
        return page

    async def _show(self, pages: list[Page]) -> None:
        listed: set[str] = set()
        is_complete = True
        for number, item in enumerate(chain.from_iterable(page.items for page in pages), start=1):
            admitted = self._intake.admit(item)
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
        self._intake.retain(listed)

    def _present(self, obj: Object) -> None:
        """Show one object; one that can't be kept is left out, as one that can't be read is."""
        try:
            self._sink.present(obj)
        except Exception as error:
            self._intake.refuse(obj, f"it can't be kept: {error!r}")

    async def _watch_until_stale(self) -> str:
        """Watch, and watch again, until the collection must be listed; returns why."""
        reason = "listed"
        while True:
            self.stats.watches[reason] += 1
            error, then = await self._watch()
            reason = then.reason
            if error is not None and is_too_large_resource_version(error):
                self._cursor.distrust()  # the server is behind us: it would refuse a list at our version, too
            if then.backs_off:
                if error is not None and reason != "expired":
                    self._failed("watch", error)
                backoff = self._before_list if then.lists else self._before_watch
                await asyncio.sleep(backoff.pause(error.retry_after if error else None))
            if then.lists:
                return reason

    async def _watch(self) -> tuple[KubeError | None, AfterWatch]:
        opened, began, since = False, self._clock(), self._cursor.version
        failure: KubeError | None = None
        try:
            async with self._api.watch(
                self._collection.resource,
                self._collection.namespace,
                **self._collection.selectors,
                resource_version=since,
                timeout=self._rng.uniform(*WATCH_TIMEOUT),
            ) as events:
                opened = True
                self._works()
                async for event in events:
                    self._take(event)
        except KubeError as error:
            failure = error
        lived, progressed = self._clock() - began, self._cursor.version != since
        return failure, after_watch(failure, opened=opened, lived=lived, progressed=progressed)

    def _take(self, event: WatchEvent) -> None:
        kind, obj = event
        self.last_seen = self._clock()
        self.stats.events += 1
        if kind in _SHOWN:
            admitted = self._intake.admit(obj)
            if kind == "DELETED":
                self._intake.forget(obj)
            if admitted is None:
                if kind == "DELETED" and (key := key_in(obj)):
                    self._sink.lost(key, metadata_text(obj, "uid"))
            elif kind == "DELETED":
                self._sink.absent(admitted)
            else:
                self._present(admitted)
        elif kind != "BOOKMARK":
            self._intake.refuse(obj, f"its event is {kind!r}")
        version = metadata_text(obj, "resourceVersion")
        if version:
            self._cursor.version = version

    def _works(self) -> None:
        self.last_seen = self._clock()
        if self._complaint is not None:
            self._log.info("The collection is watched again")
        self.problem, self._complaint = "", None

    def _crashed(self, error: Exception) -> None:
        self.stats.crashes += 1
        self.problem = f"can't follow {self._collection.resource.plural}: {error!r}"
        self._complaint = ("follow", type(error), "")
        self._log.error("The collection can't be followed; it is listed again", error=repr(error), exc_info=error)

    def _failed(self, verb: str, error: KubeError) -> None:
        self.problem = f"can't {verb} {self._collection.resource.plural}: {error}"
        complaint = (verb, type(error), error.reason)
        if complaint != self._complaint:
            self._complaint = complaint
            self._log.warning("The collection can't be read; what is cached may be old", verb=verb, error=str(error))
