"""A tenure: what a farm does under one session.

The model: the views' callbacks change the state and leave a wake-up; a handful of loops wait for those and act:

    shards    watches the shards that this farm prefers
    surplus   hands over those that it does not prefer any more; one that waits for work in flight delays no other
    claims    locks free RCs of the watched shards
    workers   take RC ids from the work queue and run `meet_desires`
    sweep     looks at one foreign shard at a time for RCs that their preferred farm leaves unclaimed
    ask again has those that wait for a node looked at when the scheduler may answer otherwise, spread evenly, too
    resync    has every RC looked at again once per `resync_interval`, spread evenly

An RC is *owned* from the moment the view shows our session on its lock until the view shows another, or until we
release it. A release first waits for the RC's work in flight (its `lock`), so nothing is ever written after an
unlock.

No lock may be held in a shard that is not watched, for nobody would work on that RC. So a shard is handed over while
no claim of its RCs is under way, a session that turns out to have survived begins with every shard, and the sweep gives
back what a late answer has left behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import structlog

from controllers.ratelimit import ExponentialRateLimiter
from controllers.workqueue import ShutDown, WorkQueue
from rcfarm.audit_retention import AuditRetention
from rcfarm.claims import Claims
from rcfarm.commit import GroupCommit
from rcfarm.fleet import RC, Facet, HealthGroup, Shard
from rcfarm.garbage import ManifestCollector
from rcfarm.layout import Migration
from rcfarm.membership import NameTaken
from rcfarm.replication_controller import CannotReconcile, ReplicationController, Tools
from scheduler.base import NodeState
from scheduler.nodes import NodeChange
from store.keys import all_shards, health_group, shard_of
from store.kv import OwnershipLost, StoreError, TxnConflict, Unavailable
from store.records import Reason
from store.selectors import Selector
from store.turns import give_way
from store.view import Pace

if TYPE_CHECKING:
    from rcfarm.farm import Farm

log = structlog.get_logger(__name__)

CLAIM_RETRY = 1.0  # seconds until a refused claim is tried again, if no change wakes it before
JOIN_RETRY = 0.5  # seconds between attempts to become a member
CLAIMS_AT_ONCE = 8
HANDOVERS_AT_ONCE = 4  # shards whose RCs are given back at the same time
HANDOVER_RETRY = 1.0  # seconds until a hand-over that failed is tried again
STOP_GRACE = 0.6  # seconds that work in flight gets when the farm stops
VERSION_LOOK = 1.0  # seconds between looks whether the scheduler may answer otherwise than before
ASK_AGAIN = 30.0  # seconds over which the RCs that wait for a node ask it again then
SELECTIONS = 20_000  # matches of selectors and nodes that one change may cost; beyond, all who wait are looked at
MAX_RETRY = 60.0  # seconds between attempts on a failing RC


class _Free(NamedTuple):
    """An RC that was seen free: since when, without having been touched."""

    version: int
    since: float

    @classmethod
    def of(cls, rc: RC, now: float, before: Mapping[str, _Free]) -> _Free:
        """What is known of the RC now, with what was known `before`."""
        version = (rc.spec.modify_index if rc.spec else 0) + (rc.owner.modify_index if rc.owner else 0)
        known = before.get(rc.id)
        return known if known and known.version == version else cls(version, now)


class _Offer:
    """Nodes that may take pods now, and who may want them."""

    def __init__(self, nodes: Sequence[NodeState]) -> None:
        self._nodes = nodes
        self._names: dict[Selector, frozenset[str]] = {}

    def suits(self, selector: Selector, has: Mapping[str, object]) -> bool:
        """Whether one of the nodes may match the selector and is not among those that the RC `has` a pod on."""
        if not self._nodes:
            return False
        names = self._names.get(selector)
        if names is None:
            if len(self._names) * len(self._nodes) > SELECTIONS:
                return True
            names = frozenset(node.name for node in self._nodes if selector.matches(node.labels))
            self._names[selector] = names
        return not names <= has.keys()


class Tenure:
    """One session's worth of farming. Run `run()` once; read `owned` and `shards` from the same event loop."""

    def __init__(self, farm: Farm, session: str, *, resumed: bool = False) -> None:
        """`resumed`: there was a tenure under this session before, which believed it lost."""
        self.session = session
        self._resumed = resumed
        self.shards: dict[str, Shard] = {}
        self.owned: dict[str, ReplicationController] = {}
        self.queue: WorkQueue[str] = WorkQueue(
            "rcs",
            rate_limiter=ExponentialRateLimiter(cap=MAX_RETRY),
            clock=farm.clock,
            metrics=farm.metrics.workqueue,
        )
        self._farm = farm
        self.claims = Claims(farm.store, farm.keys, farm.settings.name, farm.selector)
        self.commits = GroupCommit(farm.store, concurrency=farm.settings.concurrent_commits)
        self._collector = ManifestCollector(farm.store, farm.keys, farm.settings.manifest_gc_interval, clock=farm.clock)
        self._migration = Migration(
            farm.store, farm.keys, farm.settings.name, lambda: farm.membership.leads("layout"), farm.meta_lost
        )
        self._audit_retention = AuditRetention(
            farm.store,
            farm.keys,
            farm.settings.name,
            max_age=farm.settings.audit_max_age,
            max_size=farm.settings.audit_max_size,
            is_ours=lambda: farm.membership.leads("audit"),
        )
        self._tools = Tools(
            store=farm.store,
            keys=farm.keys,
            farm=farm.settings.name,
            scheduler=farm.scheduler,
            manifests=farm.manifests,
            intents=farm.intents,
            commits=self.commits,
            hold=self._hold,
            absence=farm.nodes.table.absence,
        )
        self._pace = Pace(farm.settings.watch_share, clock=farm.clock)
        self.health: dict[str, HealthGroup] = {}  # of the watched shards
        self._watching: dict[str, asyncio.Task[None]] = {}
        self._watching_health: dict[str, asyncio.Task[None]] = {}
        self._rescued: set[str] = set()
        self._unclaimed: set[str] = set()
        self._claims_wake = asyncio.Event()
        self._shards_wake = asyncio.Event()
        self._surplus_wake = asyncio.Event()
        self._leaving: set[str] = set()  # shards that are being handed over
        self._handing_over = asyncio.Semaphore(HANDOVERS_AT_ONCE)
        self._start_checked = False
        self._stopping = False

    async def run(self) -> None:
        """Farm until the session is lost, or until cancelled: then stop in order."""
        if not await self._join():
            return
        self._farm.log.info("The farm is a member and begins to claim", session=self.session)
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self.commits.run()),
                group.create_task(self._watch_shards(group)),
                group.create_task(self._hand_over_surplus()),
                group.create_task(self._claim_free()),
                group.create_task(self._sweep()),
                group.create_task(self._resync()),
                group.create_task(self._ask_again()),
                group.create_task(self._collector.run(self._farm.membership.key, self.session)),
                group.create_task(self._collector.sweep(lambda: self._farm.membership.leads("manifests"))),
                group.create_task(self._farm.brake.run(self._farm.membership.key, self.session)),
                group.create_task(self._migration.run(self._farm.membership.key, self.session)),
                group.create_task(self._audit_retention.run(self._farm.membership.key, self.session)),
                group.create_task(
                    self._farm.history.keep(
                        self._farm.membership.key, self.session, lambda: self._farm.membership.leads("history")
                    )
                ),
            ]
            workers = [group.create_task(self._work()) for _ in range(self._farm.settings.concurrent_reconciles)]
            try:
                await self._farm.keeper.lost(self.session)
                self._farm.log.warning("The session is lost: every RC is let go", session=self.session)
            except asyncio.CancelledError:
                await self._stop(workers)
                raise
            finally:
                for task in (*tasks, *workers, *self._watching.values(), *self._watching_health.values()):
                    task.cancel()
        for shard in self.shards.values():
            shard.close()
        for health in self.health.values():
            health.close()

    def members_changed(self) -> None:
        """The group of farms is another: shards may come or go."""
        self._rescued.clear()
        self._shards_wake.set()

    def nodes_changed(self, changes: Sequence[NodeChange]) -> None:
        """Queue the RCs that may lose a pod because of the changes, and those that wait for a node as offered now."""
        concerning = {change.name for change in changes if change.concerns_pods}
        offered = _Offer([node for change in changes if (node := change.offered) is not None])
        for rc_id, controller in self.owned.items():
            if (
                controller.lock.locked()  # it may have decided on what was before
                or not concerning.isdisjoint(controller.state.pods)
                or (controller.waits_for is not None and offered.suits(controller.waits_for, controller.state.pods))
            ):
                self.queue.add(rc_id)

    def intent_changed(self, rc_id: str) -> None:
        """Somebody has touched an intent of this RC."""
        controller = self.owned.get(rc_id)
        if controller and not controller.applying:
            self.queue.add(rc_id)

    def brake_changed(self) -> None:
        """The brake was pulled or released: what it held back may go on."""
        for rc_id, controller in self.owned.items():
            if controller.concerned:
                self.queue.add(rc_id)

    def _hold(self) -> str:
        return self._farm.brake.reason or ("" if self._start_checked else "the farm is still reading the RCs")

    async def _join(self) -> bool:
        """Become a member, however long the store is away or our name in use; False when the session is lost before."""
        told = ""
        while self._is_held():
            try:
                await self._farm.membership.join(self.session)
                return True
            except (NameTaken, StoreError) as error:
                if str(error) != told:
                    self._farm.log.warning("The farm can't become a member yet", reason=str(error))
                told = str(error)
            await asyncio.sleep(JOIN_RETRY)
        return False

    async def _rejoin(self) -> None:
        self._farm.log.warning("The farm's member record was taken away; joining again")
        await self._join()

    async def _stop(self, workers: list[asyncio.Task[None]]) -> None:
        """End in order: no new work, the work in flight ends, then the membership. The session's end frees the RCs."""
        self._stopping = True
        self.queue.shut_down()
        await asyncio.wait(workers, timeout=STOP_GRACE)
        try:
            async with asyncio.timeout(STOP_GRACE):
                await self._farm.membership.leave(self.session)
        except (StoreError, TimeoutError) as error:
            self._farm.log.warning("The farm could not sign off; its lease will end by itself", error=str(error))

    def _rc_changed(self, rc: RC, facets: Facet) -> None:
        if Facet.SPEC in facets:
            self._spec_changed(rc)
        controller = self.owned.get(rc.id)
        if rc.session == self.session:
            if controller is None:
                self._own(rc)
            elif not controller.applying and facets & ~(Facet.STATUS | Facet.OWNER):
                self.queue.add(rc.id)
            return
        if controller is not None:
            self._drop(rc.id, "another farm has it" if rc.session else "its lock was released")
        if rc.session is None:
            self._unclaimed.add(rc.shard.name)
            self._claims_wake.set()

    def _health_changed(self, rc_id: str) -> None:
        shard = self.shards.get(shard_of(rc_id, self._farm.keys.shards))
        rc = shard.get(rc_id) if shard else None
        if rc is not None:
            self._rc_changed(rc, Facet.HEALTH)

    def _spec_changed(self, rc: RC) -> None:
        if rc.spec is not None:
            self._farm.brake.seen(rc.spec.value)
        elif rc.bad_spec is None:
            self._farm.brake.gone(rc.id)
        controller = self.owned.get(rc.id)
        if controller:
            self._collector.note(controller.dropped_manifests())

    def _own(self, rc: RC) -> None:
        self.owned[rc.id] = ReplicationController(rc, self._tools, self.session, self._is_held)
        self.owned[rc.id].dropped_manifests()
        self.queue.add(rc.id)

    def _is_held(self) -> bool:
        return self._farm.keeper.session_id == self.session

    def _drop(self, rc_id: str, why: str) -> None:
        controller = self.owned.pop(rc_id, None)
        if controller:
            controller.released = True
            self._collector.note(controller.dropped_manifests())
            self.queue.forget(rc_id)
            self._farm.log.debug("The RC is not ours any more", rc=rc_id, reason=why)

    async def _watch_shards(self, group: asyncio.TaskGroup) -> None:
        """Watch what we prefer, as soon as we do."""
        await self._farm.membership.view.synced()
        if self._resumed:
            for name in all_shards(self._farm.keys.shards):
                self._watch(name, group)
        while True:
            self._shards_wake.clear()
            if not self._farm.membership.includes(self.session):
                await self._rejoin()
            for name in sorted(self._preferred() - self._watching.keys()):
                self._watch(name, group)
            if not self._start_checked:
                await self._check_start()
            self._surplus_wake.set()
            await self._shards_wake.wait()

    async def _hand_over_surplus(self) -> None:
        """Hand over what we watch and do not prefer any more, each shard as soon as it can be."""
        async with asyncio.TaskGroup() as group:
            while True:
                await self._surplus_wake.wait()
                self._surplus_wake.clear()
                while surplus := self._surplus():
                    self._leaving.add(surplus[0])
                    group.create_task(self._hand_over(surplus[0]))
                    await asyncio.sleep(self._farm.settings.handover_interval)

    def _surplus(self) -> list[str]:
        """The shards that are to be handed over; none while this farm is not a member, and so prefers none."""
        if not self._farm.membership.includes(self.session):
            return []
        return sorted(self._watching.keys() - self._preferred() - self._leaving)

    def _preferred(self) -> set[str]:
        return self._farm.membership.preferred(all_shards(self._farm.keys.shards)) | self._rescued

    def _watch(self, name: str, group: asyncio.TaskGroup) -> None:
        health = self.health.get(health_group(name))
        if health is None:
            health = self.health[health_group(name)] = self._health_of(name)
            self._watching_health[health_group(name)] = group.create_task(health.run())
        shard = self.shards[name] = self._shard(name, health, self._rc_changed)
        self._watching[name] = group.create_task(shard.run())

    def _unwatch(self, name: str) -> None:
        self._watching.pop(name).cancel()
        del self.shards[name]
        if health_group(name) not in map(health_group, self.shards):
            self._watching_health.pop(health_group(name)).cancel()
            self.health.pop(health_group(name)).close()

    def _shard(self, name: str, health: HealthGroup, on_change: Callable[[RC, Facet], None]) -> Shard:
        return Shard(name, self._farm.store, self._farm.keys, health, on_change, self._pace, self._farm.clock)

    def _health_of(self, shard: str) -> HealthGroup:
        farm = self._farm
        return HealthGroup(health_group(shard), farm.store, farm.keys, self._health_changed, self._pace, farm.clock)

    async def _check_start(self) -> None:
        for shard in list(self.shards.values()):
            await shard.view.synced()
        rcs = [rc for shard in self.shards.values() for rc in shard]
        present = {rc.id for rc in rcs if rc.spec or rc.bad_spec}
        self._farm.brake.check_start(present, pods=sum(len(rc.pods) for rc in rcs))
        self._start_checked = True
        self.brake_changed()

    async def _hand_over(self, name: str) -> None:
        """Release every RC of the shard, each after its work in flight, and stop watching it."""
        shard, count = self.shards[name], 0
        try:
            async with shard.claiming:
                while mine := [one for one in self.owned.values() if one.state.shard is shard]:
                    busy = [one for one in mine if one.lock.locked()]
                    await self._release(shard, [one for one in mine if not one.lock.locked()])
                    for controller in busy:
                        async with controller.lock:
                            controller.released = True
                    await self._release(shard, busy)
                    count += len(mine)
            self._unwatch(name)
            self._farm.brake.forget(rc.id for rc in shard)
            shard.close()
        except StoreError as error:
            self._farm.log.warning("The shard can't be handed over yet", shard=name, error=str(error))
            await asyncio.sleep(HANDOVER_RETRY)
            self._surplus_wake.set()
        else:
            if count:
                self._farm.log.info("The shard is handed over", shard=name, rcs=count)
        finally:
            self._leaving.discard(name)
            self._shards_wake.set()  # it may be preferred again by now

    async def _release(self, shard: Shard, controllers: list[ReplicationController]) -> None:
        """Give these RCs back, which have no work in flight. Raises the store's errors; then they stay ours."""
        for controller in controllers:
            controller.released = True
        try:
            async with self._handing_over:
                await self.claims.release(shard, [controller.state for controller in controllers], self.session)
        except StoreError:
            for controller in controllers:
                controller.released = False
                self.queue.add(controller.state.id)
            raise
        for controller in controllers:
            self._drop(controller.state.id, "handed over")

    async def _claim_free(self) -> None:
        while True:
            await self._claims_wake.wait()
            self._claims_wake.clear()
            shards, self._unclaimed = self._unclaimed, set()
            free = [(self.shards[name], self._free(name)) for name in sorted(shards) if name in self.shards]
            slots = asyncio.Semaphore(CLAIMS_AT_ONCE)
            outcomes = await asyncio.gather(*(self._claim(shard, rcs, slots) for shard, rcs in free if rcs))
            again = {name for name in outcomes if name}
            if again:
                self._unclaimed |= again
                asyncio.get_running_loop().call_later(CLAIM_RETRY, self._claims_wake.set)

    def _free(self, name: str) -> list[RC]:
        return [rc for rc in self.shards[name] if self.claims.wants(rc)]

    async def _claim(self, shard: Shard, rcs: list[RC], slots: asyncio.Semaphore) -> str:
        """Claim; answers the shard's name when some could not be, or ""."""
        if shard.claiming.locked():  # it is being handed over: waiting for that would hold up every other shard
            return shard.name
        async with slots, shard.claiming:
            if not self._is_held() or self.shards.get(shard.name) is not shard:
                return ""
            try:
                refused = await self.claims.claim(shard, rcs, self._farm.membership.key, self.session)
            except OwnershipLost:
                await self._rejoin()
                return shard.name
            except StoreError as error:
                self._farm.log.warning("RCs can't be claimed yet", shard=shard.name, error=str(error))
                return shard.name
        return shard.name if refused else ""

    async def _sweep(self) -> None:
        """Claim in foreign shards what stays free for longer than the grace time: its preferred farm is not well.

        All shards are looked at in turn, and in between again and again those where something was free.
        """
        seen: dict[str, dict[str, _Free]] = {}
        while True:
            for name in all_shards(self._farm.keys.shards):
                await asyncio.sleep(self._farm.settings.claim_grace / 4)
                for shard in seen.keys() & self._watching.keys():
                    del seen[shard]
                for shard in sorted({name, *seen} - self._watching.keys()):
                    await self._look_into(shard, seen)

    async def _look_into(self, name: str, seen: dict[str, dict[str, _Free]]) -> None:
        """Note the free RCs of one foreign shard; take it over when one was free, unchanged, for the grace time."""
        farm = self._farm
        shard = self._shard(name, self._health_of(name), lambda rc, facets: None)
        try:
            await shard.view.refresh()
            if name not in self._watching:
                await self._release_strays(shard)
        except StoreError as error:
            farm.log.info("A foreign shard can't be looked into", shard=name, error=str(error))
            return
        before, now = seen.pop(name, {}), farm.clock()
        free = {rc.id: _Free.of(rc, now, before) for rc in shard if self.claims.wants(rc)}
        overdue = [rc_id for rc_id, noted in free.items() if now - noted.since >= farm.settings.claim_grace]
        if overdue:
            farm.log.warning("The preferred farm leaves RCs unclaimed; taking over its shard", shard=name, rcs=overdue)
            self._rescued.add(name)
            self._shards_wake.set()
        elif free:
            seen[name] = free

    async def _release_strays(self, shard: Shard) -> None:
        """Give back what we hold in a shard that we do not watch: a claim that was applied after it seemed to fail."""
        strays = [rc for rc in shard if rc.session == self.session]
        if strays:
            self._farm.log.warning("RCs are held that nobody works on; they are let go", rcs=[rc.id for rc in strays])
            await self.claims.release(shard, strays, self.session)

    async def _work(self) -> None:
        while True:
            try:
                rc_id = await self.queue.get()
            except ShutDown:
                return
            try:
                await give_way()  # a reconcile that writes nothing waits for nothing
                controller = self.owned.get(rc_id)
                if controller and not self._stopping:
                    async with controller.lock:
                        await self._reconcile(rc_id, controller)
            finally:
                self.queue.done(rc_id)

    async def _reconcile(self, rc_id: str, controller: ReplicationController) -> None:
        if controller.released:
            return None
        if controller.state.spec is None and controller.state.bad_spec is None:
            return await self._let_go(controller)
        try:
            with self._farm.metrics.reconciling():
                await controller.meet_desires()
        except CannotReconcile as error:
            self.queue.forget(rc_id)
            await self._quarantine(rc_id, controller, Reason(error.code, str(error)))
        except OwnershipLost as error:
            await self._doubt(rc_id, controller, error)
        except Exception as error:  # one RC's failure, whatever it is, must touch no other
            await self._failed(rc_id, controller, error)
        else:
            self.queue.forget(rc_id)
            if controller.unfinished:
                self.queue.add(rc_id)

    async def _failed(self, rc_id: str, controller: ReplicationController, error: Exception) -> None:
        if isinstance(error, TxnConflict | Unavailable):  # somebody else wrote, or the store is away
            self._farm.log.info("The RC is tried again", rc=rc_id, error=str(error))
        else:
            expected = isinstance(error, StoreError | ValueError)
            self._farm.log.error("The RC can't be reconciled", rc=rc_id, error=str(error), exc_info=not expected)
        self.queue.add_rate_limited(rc_id)
        too_often = self.queue.num_requeues(rc_id) >= self._farm.settings.quarantine_after
        if too_often and not isinstance(error, Unavailable):
            reason = Reason("failing", f"{type(error).__name__}: {error}; tried again within {MAX_RETRY:.0f} s")
            await self._quarantine(rc_id, controller, reason)

    async def _doubt(self, rc_id: str, controller: ReplicationController, error: OwnershipLost) -> None:
        """Nothing was written, for want of the lock or of the lease. Only the store knows who has the lock now."""
        try:
            await controller.state.shard.view.refresh_key(self._farm.keys.owner(rc_id))
        except StoreError as unknown:
            self._farm.log.info("Who has the RC can't be told yet", rc=rc_id, error=str(unknown))
        if controller.state.session == self.session:
            self.queue.add_rate_limited(rc_id)
        else:
            self._drop(rc_id, str(error))

    async def _quarantine(self, rc_id: str, controller: ReplicationController, reason: Reason) -> None:
        """Leave the RC as it is and say why in its status; any change of it is looked at again at once."""
        controller.reasons = (reason,)
        try:
            await controller.report("quarantined", [reason])
        except OwnershipLost as error:
            await self._doubt(rc_id, controller, error)
        except StoreError as error:
            self._farm.log.warning("The RC's status can't be written", rc=rc_id, error=str(error))
            self.queue.add_rate_limited(rc_id)

    async def _let_go(self, controller: ReplicationController) -> None:
        """The spec is gone without a deletion: we own nothing that could be acted on. What runs is left running."""
        rc = controller.state
        controller.released = True
        try:
            if rc.is_husk:
                self._farm.log.info("What is left of a deleted RC is removed", rc=rc.id)
                await controller.clear()
            else:
                self._farm.log.error(
                    "The RC's spec is gone; its pods are left as they are", rc=rc.id, pods=len(rc.pods)
                )
                await self.claims.release(rc.shard, [rc], self.session)
        except StoreError as error:
            self._farm.log.warning("The RC can't be released yet", rc=rc.id, error=str(error))
            controller.released = False
            self.queue.add_rate_limited(rc.id)

    async def _ask_again(self) -> None:
        """Have the RCs that wait for a node ask again when the scheduler may answer otherwise, evenly over a while.

        What certainly offers a node wakes them at once; this is for capacity that was freed, and for the words in
        their status. However often the nodes change, each RC is looked at once per `ASK_AGAIN`.
        """
        version = self._farm.scheduler.version
        while True:
            await asyncio.sleep(VERSION_LOOK)
            if version == self._farm.scheduler.version:
                continue
            version = self._farm.scheduler.version
            waiting = [rc_id for rc_id, controller in self.owned.items() if controller.waits_for is not None]
            for rc_id in waiting:
                self.queue.add(rc_id)
                await asyncio.sleep(ASK_AGAIN / len(waiting))

    async def _resync(self) -> None:
        """Have every owned RC looked at once per interval, evenly: the net under every missed wake-up."""
        interval = self._farm.settings.resync_interval
        while True:
            specs = [controller.state.spec for controller in self.owned.values()]
            self._farm.manifests.keep(spec.value.manifest for spec in specs if spec)
            rc_ids = list(self.owned)
            for rc_id in rc_ids:
                await asyncio.sleep(interval / len(rc_ids))
                self.queue.add(rc_id)
            if not rc_ids:
                await asyncio.sleep(interval)
