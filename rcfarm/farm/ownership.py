"""Ownership of RCs: claims, hand-overs and rescues are those of `controllers.ownership`; this is what RCs add.

A watched shard comes with the health of its pods, which several shards share. The brake learns which RCs there are, and
the collector of manifests which ones a spec has dropped. An RC is queued for every change that its own controller did
not write.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from controllers.loop.workqueue import WorkQueue
from controllers.ownership import ownership
from controllers.ownership.claims import Kind
from rcfarm.farm.analysis import Analyses
from rcfarm.farm.context import FarmContext
from rcfarm.farm.manifests import ManifestCollector
from rcfarm.farm.replication_controller import ReplicationController
from rcfarm.farm.shard import RC, Facet, HealthGroup, Shard
from rcfarm.farm.writer import Tools
from scheduler.label import LabelScheduler
from store.kv.group_commit import GroupCommit
from store.kv.view import RefreshBudget, TreeView
from store.schema.keys import Keys, all_shards, health_group, shard_of
from store.schema.records import Owner, utc_now


def rcs_of(keys: Keys, farm: str) -> Kind:
    """Return RCs as a kind of items that farms own, for the claims of `farm`."""
    return Kind("RC", "farm", all_shards(keys.shards), keys.spec, keys.owner, lambda: Owner(farm, utc_now()))


class Ownership(ownership.Ownership[RC, Shard, ReplicationController]):
    """The RCs that a farm owns under one session. Run `run()` once; read `held`, `shards` and `health` from the same
    event loop. An RC that needs work is added to `queue`.

    `resumed`: an earlier term under this session ended because it believed the session lost.
    """

    def __init__(
        self,
        context: FarmContext,
        session: str,
        queue: WorkQueue[str],
        commits: GroupCommit,
        collector: ManifestCollector,
        analyses: Analyses,
        *,
        resumed: bool = False,
    ) -> None:
        super().__init__(
            context.store,
            rcs_of(context.keys, context.settings.name),
            context.membership,
            session,
            lambda: context.keeper.session_id == session,
            selector=context.selector,
            claim_grace=context.settings.claim_grace,
            handover_interval=context.settings.handover_interval,
            log=context.log,
            clock=context.clock,
            resumed=resumed,
        )
        self.health: dict[str, HealthGroup] = {}  # of the watched shards
        self._context, self._queue, self._collector = context, queue, collector
        self._tools = Tools(
            store=context.store,
            keys=context.keys,
            farm=context.settings.name,
            scheduler=context.scheduler,
            by_label=LabelScheduler(context.nodes),
            manifests=context.manifests,
            intents=context.intents,
            commits=commits,
            hold=lambda: context.brake.reason or ("" if self._start_checked else "the farm is still reading the RCs"),
            absence=context.nodes.absence,
            analyses=analyses,
            decisions=context.decisions,
            keep_deleted_for=context.settings.deleted_rcs_max_age,
        )
        self._analyses = analyses
        self._budget = RefreshBudget(context.settings.watch_share, clock=context.clock)
        self._watching_health: dict[str, asyncio.Task[None]] = {}
        self._start_checked = False

    def close(self) -> None:
        """Drop every record, once nothing of the term runs any more."""
        super().close()
        for health in self.health.values():
            health.close()

    def views(self) -> Iterator[TreeView[Any]]:
        """Yield the views of the watched shards and of their pods' health."""
        yield from super().views()
        yield from (health.view for health in self.health.values())

    def brake_changed(self) -> None:
        """Queue the RCs that a change of the brake may affect."""
        for rc_id, controller in self.held.items():
            if controller.is_pending:
                self._queue.add(rc_id)

    def make_shard(self, name: str, group: asyncio.TaskGroup | None) -> Shard:
        context = self._context
        if group is None:
            return Shard(
                name,
                context.store,
                context.keys,
                self._health_of(name),
                lambda rc, facets, origin: None,
                self._budget,
                context.clock,
            )
        health = self.health.get(health_group(name))
        if health is None:
            health = self.health[health_group(name)] = self._health_of(name)
            self._watching_health[health_group(name)] = group.create_task(health.view.run())
        return Shard(
            name,
            context.store,
            context.keys,
            health,
            self._rc_changed,
            self._budget,
            context.clock,
            lambda: self.is_busy(name),
        )

    def take(self, item: RC) -> ReplicationController:
        controller = ReplicationController(item, self._tools, self.session, self.is_session_held)
        controller.dropped_manifests()
        self._context.chronicle.claimed(item.id)
        if self._context.notifier:
            self._context.notifier.owned(item)
        return controller

    def enqueue(self, item_id: str) -> None:
        self._queue.add(item_id)

    def has_work(self) -> bool:
        return len(self._queue) > 0

    def dropped(self, held: ReplicationController) -> None:
        self._analyses.drop(held.state.id)
        self._collector.note(held.dropped_manifests())
        self._queue.forget(held.state.id)
        if held.state.spec is not None:  # else it was deleted, which has its own event
            self._context.chronicle.released(held.state.id)
        if self._context.notifier:
            self._context.notifier.released(held.state.id, is_gone=held.state.spec is None)

    def about_to_claim(self, items: Iterable[RC]) -> None:
        self._context.manifests.expect(rc.spec.value.manifest for rc in items if rc.spec)

    def first_read(self) -> None:
        rcs = list(chain.from_iterable(self.shards.values()))
        present = {rc.id for rc in rcs if rc.spec or rc.bad_spec}
        self._context.brake.check_start(present, pods=sum(len(rc.pods) for rc in rcs))
        self._start_checked = True
        self.brake_changed()

    def unwatched(self, shard: Shard) -> None:
        group = health_group(shard.name)
        if group not in map(health_group, self.shards):
            self._watching_health.pop(group).cancel()
            self.health.pop(group).close()
        self._context.brake.forget(rc.id for rc in shard)

    def _rc_changed(self, rc: RC, facets: Facet, origin: str) -> None:
        if Facet.SPEC in facets:
            if rc.spec is not None:
                self._context.brake.seen(rc.spec.value)
            elif rc.bad_spec is None:
                self._context.brake.gone(rc.id)
            if rc.id in self.held:
                self._collector.note(self.held[rc.id].dropped_manifests())
        if self._context.notifier and rc.id in self.held and facets & (Facet.SPEC | Facet.STATUS):
            self._context.notifier.owned(rc)
        if self.follow(rc) is not None and origin != rc.id and facets & ~(Facet.STATUS | Facet.OWNER):
            self._queue.add(rc.id)

    def _health_changed(self, rc_id: str) -> None:
        shard = self.shards.get(shard_of(rc_id, self._context.keys.shards))
        rc = shard.rcs.get(rc_id) if shard else None
        if rc is not None:
            self._rc_changed(rc, Facet.HEALTH, "")

    def _health_of(self, shard: str) -> HealthGroup:
        context = self._context
        return HealthGroup(
            health_group(shard), context.store, context.keys, self._health_changed, self._budget, context.clock
        )
