"""The farm: claims replication controllers and reconciles those it owns (p2's `Farm`).

The model: `start` runs one *term* after the other, each under one session (`controllers.ownership.terms`). Objects that
do not depend on the session live in the farm: the views of farms, nodes, intents and of the brake, the scheduler, the
cache of manifests. A term wires, in the direction of the data:

    views      what the store says: shards and health here, the others in the farm   (`rcfarm.farm.shard`)
    Ownership  which RCs are ours: claims, hand-overs, rescues; queues what changed  (`rcfarm.farm.owned_rcs`)
    Reconciler takes RCs from the queue, one at a time                               (there, too)
    plan()     what to do for one RC, purely                                         (`rcfarm.farm.planner`)
    Writer     the plan as fenced units, committed in groups, shown to the views     (`rcfarm.farm.writer`)
    Analyses   what rollouts ask HTTP servers, Prometheus and commands; queues RCs   (`rcfarm.farm.analysis`)
    log        the plan and its input, in files of this farm, to be replayed         (`rcfarm.farm.decision_log`)
    Chronicle  what is seen to happen to farms, nodes and ownership, as events       (`rcfarm.farm.chronicle`)
    Notifier   incidents, sent to PagerDuty or another receiver, if the settings say (`rcfarm.farm.notifier`)

They run together, with the farm's housekeeping. The log and the notifier are imported by farms that have them: a farm
starts without aiohttp, which takes 0.1 s.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import structlog

from controllers.loop.workqueue import ExponentialRateLimiter, WorkQueue
from controllers.ownership import terms
from controllers.ownership.membership import Membership
from rcfarm.config.settings import FarmSettings
from rcfarm.farm.analysis import Analyses
from rcfarm.farm.brake import BrakeWatch
from rcfarm.farm.chronicle import Chronicle
from rcfarm.farm.context import FarmContext
from rcfarm.farm.housekeeping import AuditRetention, DeletedRetention, Migration
from rcfarm.farm.manifests import ManifestCollector, Manifests
from rcfarm.farm.owned_rcs import MAX_RETRY, Ownership, Reconciler
from rcfarm.farm.shard import Intents
from rcfarm.telemetry.prometheus import FarmMetrics
from scheduler.nodes import NodeChange, WatchedNodes
from scheduler.protocol import NodeDirectory, Scheduler
from store.kv.group_commit import GroupCommit
from store.kv.protocol import Store
from store.kv.session import SessionKeeper
from store.kv.view import TreeView
from store.schema.history import Belief, HistoryWatch
from store.schema.keys import LAYOUT, Keys
from store.schema.records import FarmMember, utc_now
from store.schema.selectors import Selector

if TYPE_CHECKING:
    from rcfarm.farm.decision_log import DecisionLog
    from rcfarm.farm.notifier import Notifier

log = structlog.get_logger(__name__)


class Term(terms.Term[Ownership]):
    """The work of a farm under one session. Run `run()` once; read the parts from the same event loop.

    `resumed`: an earlier term under this session ended because it believed the session lost.
    """

    def __init__(self, context: FarmContext, session: str, *, resumed: bool = False) -> None:
        store, keys, settings = context.store, context.keys, context.settings
        self.queue: WorkQueue[str] = WorkQueue(
            "rcs",
            rate_limiter=ExponentialRateLimiter(cap=MAX_RETRY),
            clock=context.clock,
            metrics=context.metrics.workqueue,
        )
        self.commits = GroupCommit(store, concurrency=settings.concurrent_commits)
        self._collector = ManifestCollector(store, keys, settings.manifest_gc_interval, clock=context.clock)
        self.analyses = Analyses(settings, self.queue.add, context.metrics, context.log)
        super().__init__(
            context.keeper,
            Ownership(context, session, self.queue, self.commits, self._collector, self.analyses, resumed=resumed),
        )
        self.reconciler = Reconciler(context, session, self.queue, self.ownership)
        self._migration = Migration(store, keys, settings.name, context.leads("layout"), context.meta_lost)
        self._audit_retention = AuditRetention(
            store,
            keys,
            settings.name,
            max_age=settings.audit_max_age,
            max_size=settings.audit_max_size,
            is_ours=context.leads("audit"),
        )
        self._deleted_retention = DeletedRetention(
            store,
            keys,
            max_count=settings.deleted_rcs_max_count,
            is_ours=context.leads("deleted"),
            forgotten=self._collector.note,
        )
        self._context = context

    def work(self) -> Iterator[terms.Work]:
        context, session, member = self._context, self.session, self._context.membership.key
        yield self.commits.run()
        yield self.analyses.run()
        yield self.ownership.run()
        yield self.reconciler.run()
        yield self._collector.run(member, session)
        yield self._collector.sweep(context.leads("manifests"))
        yield context.brake.run(member, session)
        yield self._migration.run(member, session)
        yield self._audit_retention.run(member, session)
        yield self._deleted_retention.run(member, session)
        yield context.chronicle.run(member, session)
        if context.notifier:
            yield context.notifier.run(member, session)
        yield context.history.keep(member, session, context.leads("history"))

    async def stop(self, grace: float) -> None:
        await self.reconciler.stop(grace)


class Farm(terms.Runner[Term]):
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
        super().__init__(keeper)
        self.store, self.keys, self.settings = store, keys, settings
        self.metrics, self.clock = metrics, clock
        self.selector = Selector.parse(settings.selector)
        reconcile = self.in_term(lambda term, changes: term.reconciler.nodes_changed(changes))
        intent_changed = self.in_term(lambda term, rc_id: term.reconciler.intent_changed(rc_id))
        requeue = self.in_term(lambda term: term.ownership.brake_changed())
        share_out = self.in_term(lambda term: term.ownership.members_changed())
        self.notifier: Notifier | None = None

        def look() -> None:
            if self.notifier:
                self.notifier.look()

        self.chronicle = Chronicle(store, keys, settings.name, lambda: self.membership.leads("chronicle"), look)

        def nodes_changed(changes: list[NodeChange]) -> None:
            self.chronicle.nodes_changed(changes)
            reconcile(changes)
            if any((change.old and change.old.lost) != (change.new and change.new.lost) for change in changes):
                look()

        def brake_changed() -> None:
            requeue()
            look()

        def members_changed() -> None:
            self.chronicle.members_changed(self.membership.live(), self.membership.known())
            share_out()
            look()

        self.nodes = WatchedNodes(
            store, keys, node_lost_after=settings.node_lost_after, clock=clock, on_change=nodes_changed
        )
        self.scheduler = make_scheduler(self.nodes.table)
        self.intents = Intents(
            store, keys, intent_changed, clock, busy=lambda: self.term is not None and len(self.term.queue) > 0
        )
        self.brake = BrakeWatch(store, keys, settings.name, brake_changed, share=settings.brake_share, clock=clock)
        self.decisions: DecisionLog | None = None
        if settings.decision_log:
            from rcfarm.farm.decision_log import DecisionLog

            self.decisions = DecisionLog(
                settings.decision_log,
                settings.name,
                version,
                max_size=settings.decision_log_max_size,
                max_age=settings.decision_log_max_age,
            )
        me = FarmMember(
            farm=settings.name,
            selector=str(self.selector),
            since=utc_now(),
            address=address,
            version=version,
            layout=LAYOUT,
        )
        self.membership = Membership(store, keys.farms, me, members_changed, kind="farm", clock=clock)
        if settings.notify_url:
            from rcfarm.farm.notifier import Notifier

            self.notifier = Notifier(
                store,
                keys,
                settings,
                leads=lambda: self.membership.leads("incidents"),
                live=self.membership.live,
                brake=self.brake,
                nodes=self.nodes.table,
                audit_problem=lambda: self.chronicle.problem,
                metrics=metrics,
                clock=clock,
                log=log.bind(farm=settings.name),
            )
        meta_lost = asyncio.Event()
        self.history = HistoryWatch(
            store, keys, self.views, beliefs=lambda: [Belief(keys.meta, 0, meta_lost.set)], clock=clock
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
            chronicle=self.chronicle,
            notifier=self.notifier,
            decisions=self.decisions,
            history=self.history,
            meta_lost=meta_lost,
            metrics=metrics,
            clock=clock,
            log=log.bind(farm=settings.name),
        )

    def background(self) -> Iterator[terms.Work]:
        yield self.membership.view.run()
        yield self.nodes.run()
        yield self.intents.view.run()
        yield self.brake.view.run()
        yield self.history.run()
        yield self.scheduler.run()
        if self.notifier:
            yield self.notifier.view.run()
        if self.decisions:
            yield self.decisions.run()

    async def ready(self) -> None:
        await self.nodes.synced()
        for view in (self.membership.view, self.intents.view, self.brake.view):
            await view.synced()

    def make_term(self, session: str, *, resumed: bool) -> Term:
        return Term(self.context, session, resumed=resumed)

    def views(self) -> Iterator[TreeView[Any]]:
        """Yield every view of this farm."""
        yield from (self.membership.view, self.nodes.view, self.intents.view, self.brake.view)
        yield from self.scheduler.views()
        if self.notifier:
            yield self.notifier.view
        if self.term:
            yield from self.term.ownership.views()
