"""Informers under test: one that runs, with a handler that checks its events."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

from store.kube.api.errors import Unreachable
from store.kube.api.objects import PODS, Object, key_of, name_of, resource_version_of, uid_of
from store.kube.informer.informer import DeletedFinalStateUnknown, Informer, last_state
from tests.support.kube.informers.collection import Collection
from tests.support.waiting import background, loop_time, until


class RecordingHandler:
    """A handler that keeps a `log`, builds its own `view` from its events, and records illegal ones.

    `regressions`: updates to an older state, which only an unmatched object that was read ahead of the watch may show.
    """

    def __init__(self) -> None:
        self.log: list[tuple[str, str]] = []
        self.view: dict[str, Object] = {}
        self.tombstones: list[DeletedFinalStateUnknown] = []
        self.violations: list[str] = []
        self.regressions: list[str] = []

    def added(self, obj: Object) -> None:
        self._note("added", obj, legal=key_of(obj) not in self.view)
        self.view[key_of(obj)] = obj

    def updated(self, old: Object, new: Object) -> None:
        self._note("updated", new, legal=self.view.get(key_of(new)) == old and uid_of(old) == uid_of(new))
        if _version(new) < _version(old):
            self.regressions.append(f"{old} became {new}")
        self.view[key_of(new)] = new

    def deleted(self, obj: Object | DeletedFinalStateUnknown) -> None:
        last = last_state(obj)
        known = self.view.pop(key_of(last), None)
        if isinstance(obj, DeletedFinalStateUnknown):
            self.tombstones.append(obj)
            legal = obj.key == key_of(last) and last == known
        else:
            legal = known is not None and uid_of(known) == uid_of(obj) and _version(known) < _version(obj)
        self._note("deleted", last, legal=legal)

    @property
    def counts(self) -> Counter[str]:
        return Counter(what for what, _ in self.log)

    def forget(self) -> None:
        """Empty the log."""
        self.log.clear()

    def _note(self, what: str, obj: Object, *, legal: bool) -> None:
        name = f"{name_of(obj)}@{resource_version_of(obj)}"
        self.log.append((what, name))
        if not legal:
            self.violations.append(f"{what} {name} after {self.log[-6:-1]}")


def _version(obj: Object) -> int:
    return int(resource_version_of(obj))


class Watched:
    """A running informer with one handler."""

    def __init__(self, server: Collection, **options: Any) -> None:
        self.server = server
        self.recorded = RecordingHandler()
        self.informer = Informer(server, PODS, clock=loop_time, rng=random.Random(7), **options)
        self.informer.add_handler(self.recorded)

    async def current(self) -> None:
        """Wait until the informer has seen all that happened, and check its views."""
        await until(lambda: self.informer.resource_version == str(self.server.version), within=600)
        assert self.recorded.view == self.server.now
        assert self.recorded.violations == []
        assert self.informer.items() == list(self.recorded.view.values())

    async def cut_off(self) -> None:
        """Lose the watch and keep the next ones from starting, so that further changes happen during an outage."""
        await until(lambda: self.server.watch_count)
        self.server.fail("watch", *[Unreachable("refused")] * 2)
        self.server.cut(Unreachable("the stream broke"))
        await until(lambda: not self.server.watch_count)


@contextlib.asynccontextmanager
async def running(informer: Informer) -> AsyncIterator[None]:
    """Run the informer for the duration of the block."""
    async with background(informer.run()):
        yield


@contextlib.asynccontextmanager
async def watching(server: Collection, **options: Any) -> AsyncIterator[Watched]:
    """Yield an informer that has listed and watches."""
    watched = Watched(server, **options)
    async with running(watched.informer):
        await watched.informer.synced()
        await until(lambda: server.watch_count)
        await asyncio.sleep(2.0)  # a watch that ends at once is another case
        yield watched
