"""Informer: a cached, indexed copy of a collection, kept current by one list and one watch, and handlers told of it.

The model: `run` owns one reflector, which shows what the server has to one replica; that keeps the cache and calls
the handlers, synchronously, on the event loop. So reader and handlers always see the same state, and `synced` means
that handlers have heard of everything that the first list showed. Beside it run the resyncs of handlers that want
them, and the questions about objects that a label selector stopped showing.

An object that leaves the label selector without being deleted is told of as `updated` and stays in the cache as a
stray, until `discard`, or until it is seen to be gone. What leaves a field selector counts as deleted.

Source: client-go's shared informer.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Mapping

from store.kube.absences import Absences
from store.kube.api import KubeReader
from store.kube.handlers import Handler, Handlers
from store.kube.indexes import Indexer
from store.kube.intake import Intake, Transform, without_managed_fields
from store.kube.objects import Object
from store.kube.reflector import Collection, Reflector, ReflectorStats
from store.kube.replica import Replica
from store.kube.resources import Resource

_RESYNC_STRIDE = 100  # objects that are told of again before others get a turn on the loop


class Informer:
    """A view of `resource` in one namespace or, with "", in all. Objects that it returns are the caller's own.

    `indexers`: names and functions as in `store.kube.indexes`. `transform`: see `store.kube.intake`. `page_size`:
    objects per page of a list; 0 for one page. `clock` is monotonic, in seconds.
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
        self._intake = Intake(resource, transform)
        asks = bool(label_selector) and not field_selector
        self._absences = Absences(api, resource, self._intake, clock=clock, rng=rng) if asks else None
        self._replica = Replica(indexers or {}, self._handlers, self._absences)
        self._cache = self._replica.cache
        collection = Collection(resource, namespace, label_selector, field_selector)
        self._reflector = Reflector(
            api, collection, self._intake, self._replica, page_size=page_size, clock=clock, rng=rng
        )
        self._resyncs: list[tuple[Handler, float]] = []
        self._group: asyncio.TaskGroup | None = None

    async def run(self) -> None:
        """Keep the view current until cancelled. Errors of the server are retried, see `problem`."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            if self._absences is not None:
                self._absences.start(group)
            for handler, period in self._resyncs:
                group.create_task(self._resync(handler, period))
            try:
                await self._reflector.run()
            finally:
                self._group = None

    def add_handler(self, handler: Handler, *, resync: float = 0.0) -> None:
        """Tell `handler` of everything cached, and of every change from now on.

        `resync`: every so many seconds, rounded up to whole ones, tell it of each object again, as `updated`; 0: never.
        """
        self._handlers.add(handler, resyncs=resync > 0)
        for obj in self._cache.items():
            self._handlers.tell(handler.added, obj)
        if resync > 0:
            self._resyncs.append((handler, float(math.ceil(resync))))
            if self._group is not None:
                self._group.create_task(self._resync(*self._resyncs[-1]))

    @property
    def has_synced(self) -> bool:
        """Whether handlers have heard of the whole first list."""
        return self._reflector.listed.is_set()

    async def synced(self) -> None:
        """Wait for `has_synced`."""
        await self._reflector.listed.wait()

    def __len__(self) -> int:
        return len(self._cache)

    def get(self, key: str) -> Object | None:
        """The object under `NAMESPACE/NAME`, as last seen."""
        return self._cache.get(key)

    def items(self) -> list[Object]:
        """All objects. Each is decoded for the caller: where an index can answer, ask that."""
        return self._cache.items()

    def by_index(self, index: str, value: str) -> list[Object]:
        """The objects that the indexer puts under `value`. Raises KeyError when there is no such index."""
        return self._cache.by_index(index, value)

    def discard(self, key: str, uid: str) -> None:
        """Forget a stray that was released. Does nothing for any other object."""
        self._replica.discard(key, uid)

    @property
    def resource_version(self) -> str:
        """How far the server's history has been seen; "" before the first list."""
        return self._reflector.resource_version

    @property
    def last_seen(self) -> float | None:
        """When the server was last heard of, on the clock; None before it was. An idle watch hears every minute."""
        return self._reflector.last_seen

    @property
    def age(self) -> float:
        """Seconds since then; infinite before the first answer."""
        return math.inf if self.last_seen is None else self._clock() - self.last_seen

    @property
    def problem(self) -> str:
        """Why the view can't be kept current at present, in words; "" when it can."""
        return self._reflector.problem

    @property
    def stats(self) -> ReflectorStats:
        """Counters of lists and watches by reason, and of events."""
        return self._reflector.stats

    @property
    def malformed(self) -> int:
        """Objects that could not be understood and were left out."""
        return self._intake.malformed

    @property
    def unreadable(self) -> Mapping[str, str]:
        """The objects that are there and can't be understood, by key, with the reason."""
        return self._intake.unreadable

    @property
    def handler_failures(self) -> int:
        """How often a handler raised."""
        return self._handlers.failures

    async def _resync(self, handler: Handler, period: float) -> None:
        while True:
            await asyncio.sleep(period)
            for number, key in enumerate(tuple(self._cache), start=1):
                obj = self._cache.get(key)
                if obj is not None:
                    self._handlers.tell(handler.updated, obj, obj)
                if number % _RESYNC_STRIDE == 0:
                    await asyncio.sleep(0)
