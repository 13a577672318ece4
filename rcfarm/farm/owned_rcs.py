"""The RCs that a farm owns: which ones are ours, what queues them, and who takes them from the queue.

The model: `Ownership` adds to `controllers.ownership`, which claims, hands over and rescues, what is special to RCs: a
watched shard comes with the health of its pods, which several shards share; the brake learns which RCs there are, and
the collector of manifests which ones a spec has dropped.

The work queue lies between the two classes. Whatever changes an input queues the RCs that it concerns: a change of an
RC that its own controller did not write, of an intent, of a node, of the brake. Several workers of `Reconciler` take
from it, each one RC at a time; the queue never gives the same id to two. Beside the workers run:

    ask again queues RCs that wait for a node when the scheduler's answer may have changed, spread evenly, too
    resync    queues every RC once per `resync_interval`, spread evenly

An error of one RC is retried with a growing pause, and affects no other; after a few failures, or when a retry cannot
help, the RC is quarantined: left as it is, with the reason in its status.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from controllers.loop.workqueue import ShutDown, WorkQueue
from controllers.ownership import ownership
from controllers.ownership.claims import Kind
from rcfarm.farm.analysis import Analyses
from rcfarm.farm.context import FarmContext
from rcfarm.farm.manifests import ManifestCollector
from rcfarm.farm.replication_controller import CannotReconcile, ReplicationController
from rcfarm.farm.shard import RC, Facet, HealthGroup, Shard
from rcfarm.farm.writer import Tools
from scheduler.label import LabelScheduler
from scheduler.nodes import NodeChange
from scheduler.protocol import NodeState
from store.kv.group_commit import GroupCommit
from store.kv.protocol import Denied, OwnershipLost, StoreError, TxnConflict, Unavailable
from store.kv.view import RefreshBudget, TreeView
from store.schema.keys import Keys, all_shards, health_group, shard_of
from store.schema.records import Owner, Reason, utc_now
from store.schema.selectors import Selector
from store.timing import give_way

VERSION_LOOK = 1.0  # seconds between checks whether the scheduler's answers may have changed
ASK_AGAIN = 30.0  # seconds over which the RCs that wait for a node are then queued
ASK_PARTS = 200  # number of lots: waking the loop for each RC would cost as much as reconciling it
SELECTIONS = 20_000  # selector matches that one change may cost; beyond, all waiting RCs are queued
MAX_RETRY = 60.0  # seconds between attempts on a failing RC


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


class _Offer:
    """Nodes that may take pods now, to find the RCs that can use them."""

    def __init__(self, nodes: Sequence[NodeState]) -> None:
        self._nodes = nodes
        self._names: dict[Selector, frozenset[str]] = {}

    def suits(self, selector: Selector, has: Mapping[str, object]) -> bool:
        """Return whether one of the nodes may match the selector and is not among those where the RC `has` a pod."""
        if not self._nodes:
            return False
        names = self._names.get(selector)
        if names is None:
            if len(self._names) * len(self._nodes) > SELECTIONS:
                return True
            names = frozenset(node.name for node in self._nodes if selector.matches(node.labels))
            self._names[selector] = names
        return not names <= has.keys()


class Reconciler:
    """Reconciles the RCs of `ownership`. Run `run()` once, and `stop()` to let the work in flight end."""

    def __init__(self, context: FarmContext, session: str, queue: WorkQueue[str], ownership: Ownership) -> None:
        self._context, self._session, self._queue, self._ownership = context, session, queue, ownership
        self._workers: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        """Reconcile until cancelled; after `stop`, begin nothing more."""
        async with asyncio.TaskGroup() as group:
            self._workers = [
                group.create_task(self._work()) for _ in range(self._context.settings.concurrent_reconciles)
            ]
            group.create_task(self._resync())
            group.create_task(self._ask_again())

    async def stop(self, grace: float) -> None:
        """Begin nothing more, and wait for the work in flight, at most `grace` seconds."""
        self._queue.shut_down()
        if self._workers:
            await asyncio.wait(self._workers, timeout=grace)

    def nodes_changed(self, changes: Sequence[NodeChange]) -> None:
        """Queue the RCs that may lose a pod because of the changes, and those that can use a node offered now."""
        concerning = {change.name for change in changes if change.concerns_pods}
        offered = _Offer([node for change in changes if (node := change.offered) is not None])
        for rc_id, controller in self._ownership.held.items():
            if (
                controller.lock.locked()  # its decision may predate the change
                or not controller.state.pods.keys().isdisjoint(concerning)  # of the few changed nodes
                or (controller.waits_for is not None and offered.suits(controller.waits_for, controller.state.pods))
            ):
                self._queue.add(rc_id)

    def intent_changed(self, rc_id: str) -> None:
        """Queue the RC after a change of one of its intents."""
        if rc_id in self._ownership.held:
            self._queue.add(rc_id)

    async def _work(self) -> None:
        held = self._ownership.held
        while True:
            try:
                rc_id = await self._queue.get()
            except ShutDown:
                return
            try:
                await give_way()  # a reconcile that writes nothing never awaits
                controller = held.get(rc_id)
                if controller and not self._queue.shutting_down:
                    async with controller.lock:
                        if held.get(rc_id) is controller:
                            await self._reconcile(rc_id, controller)
            finally:
                self._queue.done(rc_id)

    async def _reconcile(self, rc_id: str, controller: ReplicationController) -> None:
        if controller.state.spec is None and controller.state.bad_spec is None:
            return await self._release_without_spec(controller)
        try:
            with self._context.metrics.reconciling():
                outcome = await controller.meet_desires()
        except CannotReconcile as error:
            self._queue.forget(rc_id)
            await self._quarantine(rc_id, controller, Reason(error.code, str(error)))
        except OwnershipLost as error:
            await self._doubt(rc_id, controller, error)
        except Exception as error:  # a failure of one RC, whatever it is, must not affect others
            if isinstance(error, TxnConflict | Unavailable):  # another client wrote, or the store is unavailable
                self._context.log.info("Reconcile failed; retrying", rc=rc_id, error=str(error))
            else:
                expected = isinstance(error, StoreError | ValueError)
                self._context.log.error("RC could not be reconciled", rc=rc_id, error=str(error), exc_info=not expected)
            if isinstance(error, Denied):
                self._context.chronicle.doubt()
            self._queue.add_rate_limited(rc_id)
            too_often = self._queue.num_requeues(rc_id) >= self._context.settings.quarantine_after
            if too_often and not isinstance(error, Unavailable):
                reason = Reason("failing", f"{type(error).__name__}: {error}; retried within {MAX_RETRY:.0f} s")
                await self._quarantine(rc_id, controller, reason)
        else:
            self._queue.forget(rc_id)
            if outcome.requeue:
                self._queue.add(rc_id)
            elif outcome.wake is not None:
                self._queue.add_after(rc_id, outcome.wake)

    async def _doubt(self, rc_id: str, controller: ReplicationController, error: OwnershipLost) -> None:
        """Retry after a refused write if the RC is still ours."""
        if await self._ownership.confirm(controller.state, str(error)):
            self._queue.add_rate_limited(rc_id)

    async def _quarantine(self, rc_id: str, controller: ReplicationController, reason: Reason) -> None:
        """Leave the RC as it is, with the reason in its status; any change of it queues it at once."""
        try:
            await controller.report("quarantined", [reason])
        except OwnershipLost as error:
            await self._doubt(rc_id, controller, error)
        except StoreError as error:
            self._context.log.warning("RC status could not be written; retrying", rc=rc_id, error=str(error))
            self._queue.add_rate_limited(rc_id)

    async def _release_without_spec(self, controller: ReplicationController) -> None:
        """Release an RC whose spec has vanished without a deletion, and leave its pods running; remove a husk."""
        rc = controller.state
        try:
            if rc.is_husk:
                self._context.log.info("Removing the rest of a deleted RC", rc=rc.id)
                await controller.writer.clear()
            else:
                self._context.log.error("RC spec missing; leaving its pods as they are", rc=rc.id, pods=len(rc.pods))
                await self._ownership.claims.release(rc.shard, [rc], self._session)
        except StoreError as error:
            self._context.log.warning("RC could not be released; retrying", rc=rc.id, error=str(error))
            self._queue.add_rate_limited(rc.id)

    async def _ask_again(self) -> None:
        """Queue the RCs that wait for a node when the scheduler's answer may have changed, spread evenly.

        Changes that surely offer a node queue them at once; this is for capacity that was released, and for the reasons
        in their status. However often the nodes change, each RC is queued once per `ASK_AGAIN`.
        """
        scheduler, held = self._context.scheduler, self._ownership.held
        version = scheduler.version
        while True:
            await asyncio.sleep(VERSION_LOOK)
            if version == scheduler.version:
                continue
            version = scheduler.version
            waiting = [rc_id for rc_id, controller in held.items() if controller.waits_for is not None]
            lot = math.ceil(len(waiting) / ASK_PARTS)
            for number, rc_id in enumerate(waiting, start=1):
                self._queue.add(rc_id)
                if number % lot == 0:
                    await asyncio.sleep(ASK_AGAIN * lot / len(waiting))

    async def _resync(self) -> None:
        """Queue every held RC once per interval, spread evenly, in case a change was missed."""
        interval, held = self._context.settings.resync_interval, self._ownership.held
        while True:
            specs = [controller.state.spec for controller in held.values()]
            self._context.manifests.keep(spec.value.manifest for spec in specs if spec)
            rc_ids = list(held)
            for rc_id in rc_ids:
                await asyncio.sleep(interval / len(rc_ids))
                self._queue.add(rc_id)
            if not rc_ids:
                await asyncio.sleep(interval)
