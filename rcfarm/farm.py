"""The farm: claims replication controllers and keeps working on those it owns (the seed's `Farm`).

The model: `start` runs one *tenure* after the other, each under one session (`rcfarm.tenure`). What does not depend
on the session lives here: the views of farms, nodes, intents and of the brake, the scheduler, the cache of manifests.
When the session is lost the whole tenure ends before the next one begins, so nothing of the old one can act under the
new one.

What dies when: cancelling `start` stops the intake, lets the work in flight end, gives up the membership, and ends the
session, which frees every RC at once. After a lost session nothing is told to the store: it would refuse.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import structlog

from rcfarm.brake import BrakeWatch
from rcfarm.config import FarmSettings
from rcfarm.fleet import Intents
from rcfarm.manifests import Manifests
from rcfarm.membership import Membership
from rcfarm.metrics import FarmMetrics
from rcfarm.tenure import Tenure
from scheduler.base import NodeDirectory, Scheduler
from scheduler.nodes import NodeChange, WatchedNodes
from store.history import Belief, HistoryWatch
from store.keys import LAYOUT, Keys
from store.kv import Store
from store.records import FarmMember, utc_now
from store.selectors import Selector
from store.session import SessionKeeper
from store.view import TreeView

log = structlog.get_logger(__name__)


class Farm:
    """One farm process's work. `make_scheduler` builds the scheduler over the nodes that the farm watches.

    `clock` is monotonic, in seconds. Read `tenure` (None while no session is held) from the same event loop.
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
        self.log = log.bind(farm=settings.name)
        self.tenure: Tenure | None = None
        self.nodes = WatchedNodes(
            store, keys, node_lost_after=settings.node_lost_after, clock=clock, on_change=self._nodes_changed
        )
        self.scheduler = make_scheduler(self.nodes.table)
        self.manifests = Manifests(store, keys)
        self.intents = Intents(store, keys, self._intent_changed, clock)
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
        self.meta_lost = asyncio.Event()
        self.history = HistoryWatch(
            store, keys, self._views, beliefs=lambda: [Belief(keys.meta, 0, self.meta_lost.set)], clock=clock
        )

    async def start(self) -> None:
        """Farm until cancelled, then stop in order, within about a second (the seed's `Start`)."""
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
                    self.tenure, former = Tenure(self, session, resumed=session == former), session
                    try:
                        await self.tenure.run()
                    finally:
                        self.tenure = None
            finally:
                for task in tasks:
                    task.cancel()

    async def _synced(self) -> None:
        """Nothing is decided before every view has been read once."""
        await self.nodes.synced()
        for view in (self.membership.view, self.intents.view, self.brake.view):
            await view.synced()

    def _views(self) -> Iterator[TreeView[Any]]:
        """Everything that this farm watches."""
        yield from (self.membership.view, self.nodes.view, self.intents.view, self.brake.view)
        yield from self.scheduler.views()
        if self.tenure:
            yield from (shard.view for shard in self.tenure.shards.values())
            yield from (health.view for health in self.tenure.health.values())

    def _members_changed(self) -> None:
        if self.tenure:
            self.tenure.members_changed()

    def _nodes_changed(self, changes: list[NodeChange]) -> None:
        if self.tenure:
            self.tenure.nodes_changed(changes)

    def _intent_changed(self, rc_id: str) -> None:
        if self.tenure:
            self.tenure.intent_changed(rc_id)

    def _brake_changed(self) -> None:
        if self.tenure:
            self.tenure.brake_changed()
