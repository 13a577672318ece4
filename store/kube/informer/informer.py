"""Informer: a cached, indexed copy of a collection, kept current by one list and one watch, with change handlers.

The model: `run` owns one reflector, which passes the server's state to one `CacheWriter`, which keeps the cache and
calls the handlers, synchronously, on the event loop. So readers and handlers always see the same state, and `synced`
means that handlers have received everything in the first list. Beside it run the resyncs of handlers that asked for
them, and the reads of objects that a label selector no longer shows.

An object that stops matching the label selector is reported as `updated` and kept, *unmatched*, until `discard` or
until its deletion is observed. An object that stops matching a field selector counts as deleted.

Source: client-go's shared informer.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Mapping

from store.kube.api.objects import Object, Resource
from store.kube.api.protocol import KubeReader
from store.kube.informer.cache import Admission, Indexer, Transform, without_managed_fields
from store.kube.informer.handlers import CacheWriter, Handler, Handlers, UnmatchedObjects
from store.kube.informer.reflector import Collection, Reflector, ReflectorStats

_RESYNC_STRIDE = 100  # objects that are reported again before other tasks get a turn on the loop


class Informer:
    """A view of `resource` in one namespace or, with "", in all. Returned objects belong to the caller.

    `indexers`: names and functions as in `store.kube.informer.cache`. `transform`: see `store.kube.informer.cache`.
    `page_size`: objects per page of a list; 0 for one page. `clock` is monotonic, in seconds.
    """

    def __init__(
        self,
        api: KubeReader,
        resource: Resource,
        *,
        namespace: str = "",
        label_selector: str = "",
        field_selector: str = "",
        indexers: Mapping[str, Indexer] | None = None,
        transform: Transform | None = without_managed_fields,
        page_size: int = 500,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self.resource = resource
        self._clock = clock
        self._handlers = Handlers(resource)
        self._admission = Admission(resource, transform)
        asks = bool(label_selector) and not field_selector
        self._unmatched = UnmatchedObjects(api, resource, self._admission, clock=clock, rng=rng) if asks else None
        self._writer = CacheWriter(indexers or {}, self._handlers, self._unmatched)
        self._cache = self._writer.cache
        collection = Collection(resource, namespace, label_selector, field_selector)
        self._reflector = Reflector(
            api, collection, self._admission, self._writer, page_size=page_size, clock=clock, rng=rng
        )
        self._resyncs: list[tuple[Handler, float]] = []
        self._group: asyncio.TaskGroup | None = None

    async def run(self) -> None:
        """Keep the view current until cancelled. After errors of the server the view retries, see `problem`."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            if self._unmatched is not None:
                self._unmatched.start(group)
            for handler, period in self._resyncs:
                group.create_task(self._resync(handler, period))
            try:
                await self._reflector.run()
            finally:
                self._group = None

    def add_handler(self, handler: Handler, *, resync: float = 0.0) -> None:
        """Report everything cached to `handler`, and every change from now on.

        `resync`: the interval in seconds, rounded up, at which each object is reported again as `updated`; 0: never.
        """
        self._handlers.add(handler, resyncs=resync > 0)
        for obj in self._cache.items():
            self._handlers.notify(handler.added, obj)
        if resync > 0:
            self._resyncs.append((handler, float(math.ceil(resync))))
            if self._group is not None:
                self._group.create_task(self._resync(*self._resyncs[-1]))

    @property
    def has_synced(self) -> bool:
        """Return whether handlers have received the whole first list."""
        return self._reflector.listed.is_set()

    async def synced(self) -> None:
        """Wait for `has_synced`."""
        await self._reflector.listed.wait()

    def __len__(self) -> int:
        return len(self._cache)

    def get(self, key: str) -> Object | None:
        """Return the object under `NAMESPACE/NAME`, as last seen."""
        return self._cache.get(key)

    def items(self) -> list[Object]:
        """Return all objects. Each is decoded for the caller: prefer an index where one fits."""
        return self._cache.items()

    def by_index(self, index: str, value: str) -> list[Object]:
        """Return the objects with `value` in the index. Raises KeyError for an index that does not exist."""
        return self._cache.by_index(index, value)

    def discard(self, key: str, uid: str) -> None:
        """Forget an unmatched object that was released. Does nothing for any other object."""
        self._writer.discard(key, uid)

    @property
    def resource_version(self) -> str:
        """The last resource version seen; "" before the first list."""
        return self._reflector.resource_version

    @property
    def last_seen(self) -> float | None:
        """The time of the server's last answer, on the clock, or None. An idle watch receives one every minute."""
        return self._reflector.last_seen

    @property
    def age(self) -> float:
        """Seconds since `last_seen`; infinite before the first answer."""
        return math.inf if self.last_seen is None else self._clock() - self.last_seen

    @property
    def problem(self) -> str:
        """The reason, in words, why the view can't be kept current at present; "" when it can."""
        return self._reflector.problem

    @property
    def stats(self) -> ReflectorStats:
        """Counters of lists and watches by reason, and of events."""
        return self._reflector.stats

    @property
    def malformed(self) -> int:
        """The number of objects that could not be decoded and were left out."""
        return self._admission.malformed

    @property
    def unreadable(self) -> Mapping[str, str]:
        """The existing objects that can't be decoded, by key, with the reason."""
        return self._admission.unreadable

    @property
    def handler_failures(self) -> int:
        """The number of exceptions of handlers."""
        return self._handlers.failures

    async def _resync(self, handler: Handler, period: float) -> None:
        while True:
            await asyncio.sleep(period)
            for number, key in enumerate(tuple(self._cache), start=1):
                obj = self._cache.get(key)
                if obj is not None:
                    self._handlers.notify(handler.updated, obj, obj)
                if number % _RESYNC_STRIDE == 0:
                    await asyncio.sleep(0)
