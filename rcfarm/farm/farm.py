"""The farm: claims replication controllers and reconciles those it owns (p2's `Farm`).

The model: `start` runs one *term* after the other, each under one session (`rcfarm.farm.term`). Objects that do not
depend on the session live here: the views of farms, nodes, intents and of the brake, the scheduler, the cache of
manifests. When the session is lost the whole term ends before the next one begins, so no task of the old one can act
under the new one.

Cancelling `start` stops the intake, lets the work in flight end, gives up the membership, and ends the session, which
releases every RC at once. After losing the session the farm writes nothing; the store would reject it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import structlog

from rcfarm.config.settings import FarmSettings
from rcfarm.farm.brake import BrakeWatch
from rcfarm.farm.context import FarmContext
from rcfarm.farm.manifest_cache import Manifests
from rcfarm.farm.membership import Membership
from rcfarm.farm.shard import Intents
from rcfarm.farm.term import Term
from rcfarm.telemetry.prometheus import FarmMetrics
from scheduler.nodes import NodeChange, WatchedNodes
from scheduler.protocol import NodeDirectory, Scheduler
from store.kv.protocol import Store
from store.kv.session import SessionKeeper
from store.kv.view import TreeView
from store.schema.history import Belief, HistoryWatch
from store.schema.keys import LAYOUT, Keys
from store.schema.records import FarmMember, utc_now
from store.schema.selectors import Selector

log = structlog.get_logger(__name__)


class Farm:
    """One farm. `make_scheduler` builds the scheduler over the nodes that the farm watches.

    `clock` is monotonic, in seconds. Read `term` (None while no session is held) from the same event loop.
    """

    def __init__(
        self,
        store: Store,
        keys: Keys,
        settings: FarmSettings,
        keeper: SessionKeeper,
        make_scheduler: Callable[[NodeDirectory], Scheduler],
        *,
        metrics: FarmMetrics,
        address: str = "",
        version: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store, self.keys, self.settings, self.keeper = store, keys, settings, keeper
        self.metrics, self.clock = metrics, clock
        self.selector = Selector.parse(settings.selector)
        self.term: Term | None = None
        self.nodes = WatchedNodes(
            store, keys, node_lost_after=settings.node_lost_after, clock=clock, on_change=self._nodes_changed
        )
        self.scheduler = make_scheduler(self.nodes.table)
        self.intents = Intents(store, keys, self._intent_changed, clock, busy=self._is_busy)
        self.brake = BrakeWatch(
            store, keys, settings.name, self._brake_changed, share=settings.brake_share, clock=clock
        )
        me = FarmMember(
            farm=settings.name,
            selector=str(self.selector),
            since=utc_now(),
            address=address,
            version=version,
            layout=LAYOUT,
        )
        self.membership = Membership(store, keys, me, self._members_changed, clock=clock)
        meta_lost = asyncio.Event()
        self.history = HistoryWatch(
            store, keys, self._views, beliefs=lambda: [Belief(keys.meta, 0, meta_lost.set)], clock=clock
        )
        self.context = FarmContext(
            store=store,
            keys=keys,
            settings=settings,
            keeper=keeper,
            selector=self.selector,
            membership=self.membership,
            nodes=self.nodes.table,
            scheduler=self.scheduler,
            manifests=Manifests(store, keys),
            intents=self.intents,
            brake=self.brake,
            history=self.history,
            meta_lost=meta_lost,
            metrics=metrics,
            clock=clock,
            log=log.bind(farm=settings.name),
        )

    async def start(self) -> None:
        """Run terms until cancelled, then stop in order, within about a second."""
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(work)
                for work in (
                    self.keeper.run(),
                    self.membership.run(),
                    self.nodes.run(),
                    self.intents.run(),
                    self.brake.view.run(),
                    self.history.run(),
                    self.scheduler.run(),
                )
            ]
            try:
                await self._synced()
                former = ""
                while True:
                    session = await self.keeper.held()
                    self.term, former = Term(self.context, session, resumed=session == former), session
                    try:
                        await self.term.run()
                    finally:
                        self.term = None
            finally:
                for task in tasks:
                    task.cancel()

    async def _synced(self) -> None:
        """Wait until every view has been read once; no decision is made before."""
        await self.nodes.synced()
        for view in (self.membership.view, self.intents.view, self.brake.view):
            await view.synced()

    def _views(self) -> Iterator[TreeView[Any]]:
        """Yield every view of this farm."""
        yield from (self.membership.view, self.nodes.view, self.intents.view, self.brake.view)
        yield from self.scheduler.views()
        if self.term:
            yield from self.term.ownership.views()

    def _is_busy(self) -> bool:
        """Return whether RCs wait to be reconciled."""
        return self.term is not None and len(self.term.queue) > 0

    def _members_changed(self) -> None:
        if self.term:
            self.term.ownership.members_changed()

    def _nodes_changed(self, changes: list[NodeChange]) -> None:
        if self.term:
            self.term.reconciler.nodes_changed(changes)

    def _intent_changed(self, rc_id: str) -> None:
        if self.term:
            self.term.reconciler.intent_changed(rc_id)

    def _brake_changed(self) -> None:
        if self.term:
            self.term.ownership.brake_changed()
