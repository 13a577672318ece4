"""A term: the work of a farm under one session.

The model, in the direction of the data:

    views      what the store says: shards and health here, the others in the farm   (`rcfarm.farm.shard`)
    Ownership  which RCs are ours: claims, hand-overs, rescues; queues what changed  (`rcfarm.farm.ownership`)
    Reconciler takes RCs from the queue, one at a time                               (`rcfarm.farm.reconciler`)
    plan()     what to do for one RC, purely                                         (`rcfarm.farm.planner`)
    Writer     the plan as fenced units, committed in groups, shown to the views     (`rcfarm.farm.writer`)

The term wires them, with the farm's housekeeping, in one TaskGroup; nothing of it runs after `run` has returned. When
the session is lost everything is cancelled. When the farm stops, the work in flight may end first.
"""

from __future__ import annotations

import asyncio

from controllers.loop.ratelimit import ExponentialRateLimiter
from controllers.loop.workqueue import WorkQueue
from rcfarm.farm.audit_retention import AuditRetention
from rcfarm.farm.context import FarmContext
from rcfarm.farm.group_commit import GroupCommit
from rcfarm.farm.manifest_gc import ManifestCollector
from rcfarm.farm.ownership import Ownership
from rcfarm.farm.reconciler import MAX_RETRY, Reconciler
from rcfarm.operations.layout import Migration
from store.kv.protocol import StoreError

STOP_GRACE = 0.6  # seconds that work in flight gets when the farm stops


class Term:
    """The work of a farm under one session. Run `run()` once; read the parts from the same event loop.

    `resumed`: an earlier term under this session ended because it believed the session lost.
    """

    def __init__(self, context: FarmContext, session: str, *, resumed: bool = False) -> None:
        store, keys, settings = context.store, context.keys, context.settings
        self.session = session
        self.queue: WorkQueue[str] = WorkQueue(
            "rcs",
            rate_limiter=ExponentialRateLimiter(cap=MAX_RETRY),
            clock=context.clock,
            metrics=context.metrics.workqueue,
        )
        self.commits = GroupCommit(store, concurrency=settings.concurrent_commits)
        self._collector = ManifestCollector(store, keys, settings.manifest_gc_interval, clock=context.clock)
        self.ownership = Ownership(context, session, self.queue, self.commits, self._collector, resumed=resumed)
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
        self._context = context

    async def run(self) -> None:
        """Claim and reconcile until the session is lost, or until cancelled: then stop in order."""
        if not await self.ownership.join():
            return
        context, session, member = self._context, self.session, self._context.membership.key
        context.log.info("Farm joined; claiming RCs", session=session)
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(work)
                for work in (
                    self.commits.run(),
                    self.ownership.run(),
                    self.reconciler.run(),
                    self._collector.run(member, session),
                    self._collector.sweep(context.leads("manifests")),
                    context.brake.run(member, session),
                    self._migration.run(member, session),
                    self._audit_retention.run(member, session),
                    context.history.keep(member, session, context.leads("history")),
                )
            ]
            try:
                await context.keeper.lost(session)
                context.log.warning("Session lost; releasing all RCs", session=session)
            except asyncio.CancelledError:
                await self._stop()
                raise
            finally:
                for task in tasks:
                    task.cancel()
        self.ownership.close()

    async def _stop(self) -> None:
        """Stop in order: take no new work, let the work in flight end, give up the membership. The session's end
        releases the RCs."""
        await self.reconciler.stop(STOP_GRACE)
        try:
            async with asyncio.timeout(STOP_GRACE):
                await self._context.membership.leave(self.session)
        except (StoreError, TimeoutError) as error:
            self._context.log.warning("Could not deregister; the lease will expire", error=str(error))
