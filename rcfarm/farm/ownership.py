"""Ownership: which RCs this farm works on.

The model: the views of the watched shards call back; that changes the state, queues an RC, or sets an event, for which
a few loops wait:

    shards    watches the shards that this farm prefers
    surplus   hands over those that it no longer prefers; one that waits for work in flight delays no other
    claims    claims free RCs of the watched shards
    sweep     searches one foreign shard at a time for RCs that their preferred farm leaves unclaimed

An RC is in `held` from the moment the view shows this farm's session on its lock until the view shows another, or until
the farm begins to release it; it is reconciled only while it is there. A release first waits for the RC's work in
flight (its `lock`), so nothing is ever written after an unlock.

    free      -> held       the view shows our session
    held      -> releasing  its work in flight has ended
    held      -> dropped    the view shows another session, or none
    releasing -> dropped    unlocked
    releasing -> held       the store refused, or is unavailable

No lock may be held in a shard that is not watched, as no farm would work on that RC. So a shard is handed over while no
claim of its RCs is in flight, a term that resumes a session begins with every shard, and the sweep releases locks left
behind by a late answer.

Ownership is a lock: the `owner` key carries the farm's session. A lock creates its key, so a farm with a stale view
could own a deleted RC, and add pods for it. Therefore the lock of an RC that never had an owner comes with a read of
its spec, which fails if the spec is gone. For an RC that had an owner, the fencing token must rise; if it does not, the
key is new, and the shard is read before anything is done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple

from controllers.loop.workqueue import WorkQueue
from rcfarm.farm.context import FarmContext
from rcfarm.farm.manifests import ManifestCollector
from rcfarm.farm.membership import NameTaken
from rcfarm.farm.replication_controller import ReplicationController
from rcfarm.farm.shard import RC, Facet, HealthGroup, Shard
from rcfarm.farm.writer import GroupCommit, Tools, packed
from store.kv import ops
from store.kv.protocol import MAX_TXN_OPS, Op, OwnershipLost, Store, StoreError, TxnConflict
from store.kv.view import RefreshBudget, TreeView
from store.schema.keys import Keys, all_shards, health_group, shard_of
from store.schema.records import Owner, encode, utc_now
from store.schema.selectors import Selector

CLAIM_RETRY = 1.0  # seconds until a refused claim is retried, unless a change wakes it before
JOIN_RETRY = 0.5  # seconds between attempts to become a member
CLAIMS_AT_ONCE = 8
HANDOVERS_AT_ONCE = 4  # shards whose RCs are released at the same time
HANDOVER_RETRY = 1.0  # seconds until a failed hand-over is retried


class Claims:
    """Claims and releases RCs for one farm, many at a time. `claimed`, `conflicts` count since the start.

    Up to 63 RCs of a shard are claimed in one transaction, together with the check that this farm is still a member.
    The store refuses a transaction as a whole, so the RCs that conflict are dropped and the others are sent again. A
    dropped RC was claimed by another farm, has only just been released, or is gone; the view shows which.
    """

    def __init__(self, store: Store, keys: Keys, farm: str, selector: Selector) -> None:
        self.claimed = self.conflicts = 0
        self._store, self._keys, self._farm, self._selector = store, keys, farm, selector
        self._everything = selector == Selector.everything()

    def wants(self, rc: RC) -> bool:
        """Return whether the RC is free and this farm's selector matches it.

        An RC with an undecodable spec has no labels that a selector could match: a farm without a selector claims it,
        and reports the error in its status. A husk (the claim of a farm that then died came after the deletion) is
        claimed, for removal, by any farm that finds it.
        """
        if rc.session is not None:
            return False
        if rc.bad_spec is not None:
            return self._everything
        return rc.is_husk if rc.spec is None else self._selector.matches(rc.spec.value.rc_labels)

    async def claim(self, shard: Shard, rcs: Sequence[RC], member_key: str, session: str) -> int:
        """Claim these RCs of one shard. Return how many were refused; the view shows which are ours now.

        Raises `OwnershipLost` when this farm is not a member under `session` any more, and the store's errors.
        """
        value = encode(Owner(self._farm, utc_now()))
        wanted = []
        for rc in rcs:
            lock = ops.lock(self._keys.owner(rc.id), value, session)
            had_owner = rc.owner is not None and rc.owner.lock_index > 0
            is_there = rc.spec is not None or rc.bad_spec is not None
            wanted.append([ops.get(self._keys.spec(rc.id)), lock] if is_there and not had_owner else [lock])
        tokens = {self._keys.owner(rc.id): rc.owner.lock_index for rc in rcs if rc.owner}
        refused = 0
        for batch in packed(wanted, MAX_TXN_OPS - 1, len):
            refused += await self._apply(shard, batch, [ops.check_session(member_key, session)], tokens)
        self.claimed += len(rcs) - refused
        self.conflicts += refused
        return refused

    async def release(self, shard: Shard, rcs: Sequence[RC], session: str) -> None:
        """Release these RCs, except those that are not ours any more. Raises the store's errors."""
        giving = []
        for rc in rcs:
            owner = rc.owner
            value = encode(owner.value) if owner else b"{}"
            giving.append([ops.unlock(self._keys.owner(rc.id), value, session)])
        for batch in packed(giving, MAX_TXN_OPS, len):
            await self._apply(shard, batch, [])

    async def _apply(
        self, shard: Shard, wanted: list[list[Op]], fence: list[Op], tokens: Mapping[str, int] = MappingProxyType({})
    ) -> int:
        """Apply the operations, each RC's together, without the RCs that conflict. Return how many were dropped.

        `tokens`: the fencing tokens of the locks to take, as the view shows them.
        """
        refused = 0
        while wanted:
            writing = [*fence, *chain.from_iterable(wanted)]
            try:
                result = await self._store.txn(writing)
                if any(0 < entry.lock_index <= tokens.get(entry.key, 0) for entry in result.entries):
                    await shard.view.refresh()
                shard.view.apply(result, writing)
            except OwnershipLost:
                raise
            except TxnConflict as conflict:
                failed, start, kept = {failure.op_index for failure in conflict.failures}, len(fence), []
                for unit in wanted:
                    if failed.isdisjoint(range(start, start + len(unit))):
                        kept.append(unit)
                    start += len(unit)
                refused += len(wanted) - len(kept)
                wanted = kept
                continue
            break
        return refused


class _Free(NamedTuple):
    """An RC that was seen free and unchanged since `since`."""

    version: int
    since: float


class Ownership:
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
        *,
        resumed: bool = False,
    ) -> None:
        self.held: dict[str, ReplicationController] = {}
        self.shards: dict[str, Shard] = {}
        self.health: dict[str, HealthGroup] = {}  # of the watched shards
        self.claims = Claims(context.store, context.keys, context.settings.name, context.selector)
        self._context, self._session, self._queue, self._collector = context, session, queue, collector
        self._resumed = resumed
        self._tools = Tools(
            store=context.store,
            keys=context.keys,
            farm=context.settings.name,
            scheduler=context.scheduler,
            manifests=context.manifests,
            intents=context.intents,
            commits=commits,
            hold=lambda: context.brake.reason or ("" if self._start_checked else "the farm is still reading the RCs"),
            absence=context.nodes.absence,
        )
        self._budget = RefreshBudget(context.settings.watch_share, clock=context.clock)
        self._releasing: dict[str, ReplicationController] = {}
        self._watching: dict[str, asyncio.Task[None]] = {}
        self._watching_health: dict[str, asyncio.Task[None]] = {}
        self._rescued: set[str] = set()
        self._unclaimed: set[str] = set()
        self._behind: set[str] = set()  # shards in which the last claim failed: another farm was first, it seems
        self._claims_wake = asyncio.Event()
        self._shards_wake = asyncio.Event()
        self._surplus_wake = asyncio.Event()
        self._leaving: set[str] = set()  # shards that are being handed over
        self._handing_over = asyncio.Semaphore(HANDOVERS_AT_ONCE)
        self._start_checked = False

    async def join(self) -> bool:
        """Become a member, retrying while the store is unavailable or the name in use. Return False when the session is
        lost."""
        last_logged = ""
        while self._is_session_held():
            try:
                await self._context.membership.join(self._session)
                return True
            except (NameTaken, StoreError) as error:
                if str(error) != last_logged:
                    self._context.log.warning("Farm could not join; retrying", reason=str(error))
                last_logged = str(error)
            await asyncio.sleep(JOIN_RETRY)
        return False

    async def run(self) -> None:
        """Watch shards, claim, hand over and rescue until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch_shards(group))
            group.create_task(self._hand_over_surplus())
            group.create_task(self._claim_free())
            group.create_task(self._sweep())

    def close(self) -> None:
        """Drop every record, once nothing of the term runs any more."""
        for shard in self.shards.values():
            shard.close()
        for health in self.health.values():
            health.close()

    def views(self) -> Iterator[TreeView[Any]]:
        """Yield the views of the watched shards and of their pods' health."""
        yield from (shard.view for shard in self.shards.values())
        yield from (health.view for health in self.health.values())

    def members_changed(self) -> None:
        """Update the watched shards after a change of the group of farms."""
        self._rescued.clear()
        self._shards_wake.set()

    def brake_changed(self) -> None:
        """Queue the RCs that a change of the brake may affect."""
        for rc_id, controller in self.held.items():
            if controller.is_pending:
                self._queue.add(rc_id)

    def drop(self, rc_id: str, why: str) -> None:
        """Cease to work on an RC whose lock is not ours any more."""
        controller = self.held.pop(rc_id, None) or self._releasing.pop(rc_id, None)
        if controller:
            self._collector.note(controller.dropped_manifests())
            self._queue.forget(rc_id)
            self._context.log.debug("RC no longer owned", rc=rc_id, reason=why)

    def _is_session_held(self) -> bool:
        return self._context.keeper.session_id == self._session

    async def _rejoin(self) -> None:
        self._context.log.warning("Member record lost; joining again")
        await self.join()

    def _rc_changed(self, rc: RC, facets: Facet, origin: str) -> None:
        if Facet.SPEC in facets:
            if rc.spec is not None:
                self._context.brake.seen(rc.spec.value)
            elif rc.bad_spec is None:
                self._context.brake.gone(rc.id)
            if rc.id in self.held:
                self._collector.note(self.held[rc.id].dropped_manifests())
        if rc.session != self._session:
            self.drop(rc.id, "owned by another farm" if rc.session else "its lock was released")
            if rc.session is None:
                self._unclaimed.add(rc.shard.name)
                self._claims_wake.set()
        elif rc.id in self.held:
            if origin != rc.id and facets & ~(Facet.STATUS | Facet.OWNER):
                self._queue.add(rc.id)
        elif rc.id not in self._releasing:
            controller = self.held[rc.id] = ReplicationController(rc, self._tools, self._session, self._is_session_held)
            controller.dropped_manifests()
            self._queue.add(rc.id)

    def _health_changed(self, rc_id: str) -> None:
        shard = self.shards.get(shard_of(rc_id, self._context.keys.shards))
        rc = shard.rcs.get(rc_id) if shard else None
        if rc is not None:
            self._rc_changed(rc, Facet.HEALTH, "")

    async def _watch_shards(self, group: asyncio.TaskGroup) -> None:
        """Watch the shards that prefer this farm."""
        await self._context.membership.view.synced()
        if self._resumed:
            for name in all_shards(self._context.keys.shards):
                self._watch(name, group)
        while True:
            self._shards_wake.clear()
            if not self._context.membership.includes(self._session):
                await self._rejoin()
            for name in sorted(self._preferred() - self._watching.keys()):
                self._watch(name, group)
            if not self._start_checked:
                for shard in list(self.shards.values()):
                    await shard.view.synced()
                rcs = [rc for shard in self.shards.values() for rc in shard]
                present = {rc.id for rc in rcs if rc.spec or rc.bad_spec}
                self._context.brake.check_start(present, pods=sum(len(rc.pods) for rc in rcs))
                self._start_checked = True
                self.brake_changed()
            self._surplus_wake.set()
            await self._shards_wake.wait()

    def _preferred(self) -> set[str]:
        return self._context.membership.preferred(all_shards(self._context.keys.shards)) | self._rescued

    def _watch(self, name: str, group: asyncio.TaskGroup) -> None:
        health = self.health.get(health_group(name))
        if health is None:
            health = self.health[health_group(name)] = self._health_of(name)
            self._watching_health[health_group(name)] = group.create_task(health.view.run())
        shard = self.shards[name] = self._shard(name, health, self._rc_changed)
        self._watching[name] = group.create_task(shard.run())

    def _shard(self, name: str, health: HealthGroup, on_change: Callable[[RC, Facet, str], None]) -> Shard:
        context = self._context

        def busy() -> bool:
            return name not in self._behind and (len(self._queue) > 0 or any(map(self.claims.wants, shard)))

        shard = Shard(name, context.store, context.keys, health, on_change, self._budget, context.clock, busy)
        return shard

    def _health_of(self, shard: str) -> HealthGroup:
        context = self._context
        return HealthGroup(
            health_group(shard), context.store, context.keys, self._health_changed, self._budget, context.clock
        )

    async def _hand_over_surplus(self) -> None:
        """Hand over watched shards that no longer prefer this farm, each as soon as possible; none while this farm is
        not a member, as no shard prefers it then."""
        async with asyncio.TaskGroup() as group:
            while True:
                await self._surplus_wake.wait()
                self._surplus_wake.clear()
                while self._context.membership.includes(self._session):
                    surplus = self._watching.keys() - self._preferred() - self._leaving
                    if not surplus:
                        break
                    self._leaving.add(min(surplus))
                    group.create_task(self._hand_over(min(surplus)))
                    await asyncio.sleep(self._context.settings.handover_interval)

    async def _hand_over(self, name: str) -> None:
        """Release every RC of the shard, each after its work in flight, and stop watching it."""
        shard, count = self.shards[name], 0
        try:
            async with shard.claiming:
                while mine := [one for one in self.held.values() if one.state.shard is shard]:
                    busy = [one for one in mine if one.lock.locked()]
                    await self._release(shard, [one for one in mine if not one.lock.locked()])
                    await self._release(shard, busy)
                    count += len(mine)
            self._watching.pop(name).cancel()
            del self.shards[name]
            if health_group(name) not in map(health_group, self.shards):
                self._watching_health.pop(health_group(name)).cancel()
                self.health.pop(health_group(name)).close()
            self._context.brake.forget(rc.id for rc in shard)
            shard.close()
        except StoreError as error:
            self._context.log.warning("Shard could not be handed over; retrying", shard=name, error=str(error))
            await asyncio.sleep(HANDOVER_RETRY)
            self._surplus_wake.set()
        else:
            if count:
                self._context.log.info("Shard handed over", shard=name, rcs=count)
        finally:
            self._leaving.discard(name)
            self._shards_wake.set()  # it may be preferred again by now

    async def _release(self, shard: Shard, controllers: list[ReplicationController]) -> None:
        """Release these RCs, each after its work in flight. Raises the store's errors; then they are held again."""
        leaving: dict[str, ReplicationController] = {}
        for controller in controllers:
            async with controller.lock:
                rc_id = controller.state.id
                if self.held.get(rc_id) is controller:
                    self._releasing[rc_id] = leaving[rc_id] = self.held.pop(rc_id)
        try:
            async with self._handing_over:
                await self.claims.release(shard, [controller.state for controller in leaving.values()], self._session)
        except StoreError:
            for rc_id in leaving.keys() & self._releasing.keys():
                self.held[rc_id] = self._releasing.pop(rc_id)
                self._queue.add(rc_id)
            raise
        for rc_id in leaving:
            self.drop(rc_id, "handed over")

    async def _claim_free(self) -> None:
        while True:
            await self._claims_wake.wait()
            self._claims_wake.clear()
            names, self._unclaimed = self._unclaimed, set()
            shards = [self.shards[name] for name in sorted(names) if name in self.shards]
            free = [(shard, [rc for rc in shard if self.claims.wants(rc)]) for shard in shards]
            self._context.manifests.expect(rc.spec.value.manifest for _, rcs in free for rc in rcs if rc.spec)
            slots = asyncio.Semaphore(CLAIMS_AT_ONCE)
            outcomes = await asyncio.gather(*(self._claim(shard, rcs, slots) for shard, rcs in free if rcs))
            self._behind = {name for name in outcomes if name}
            if self._behind:
                self._unclaimed |= self._behind
                asyncio.get_running_loop().call_later(CLAIM_RETRY, self._claims_wake.set)

    async def _claim(self, shard: Shard, rcs: list[RC], slots: asyncio.Semaphore) -> str:
        """Claim the RCs. Return the shard's name if some claims failed, else ""."""
        if shard.claiming.locked():  # it is being handed over: waiting for that would delay all other shards
            return shard.name
        async with slots, shard.claiming:
            if not self._is_session_held() or self.shards.get(shard.name) is not shard:
                return ""
            try:
                refused = await self.claims.claim(shard, rcs, self._context.membership.key, self._session)
            except OwnershipLost:
                await self._rejoin()
                return shard.name
            except StoreError as error:
                self._context.log.warning("RCs could not be claimed; retrying", shard=shard.name, error=str(error))
                return shard.name
        return shard.name if refused else ""

    async def _sweep(self) -> None:
        """Claim RCs of foreign shards that stay free for longer than the grace time: their preferred farm is stuck.

        All shards are checked in turn, and those where an RC was free more often.
        """
        seen: dict[str, dict[str, _Free]] = {}
        while True:
            for name in all_shards(self._context.keys.shards):
                await asyncio.sleep(self._context.settings.claim_grace / 4)
                for shard in seen.keys() & self._watching.keys():
                    del seen[shard]
                for shard in sorted({name, *seen} - self._watching.keys()):
                    await self._look_into(shard, seen)

    async def _look_into(self, name: str, seen: dict[str, dict[str, _Free]]) -> None:
        """Record the free RCs of one foreign shard; take it over when one was free, unchanged, for the grace time."""
        context = self._context
        shard = self._shard(name, self._health_of(name), lambda rc, facets, origin: None)
        try:
            await shard.view.refresh()
            # Our locks in a shard that is not watched: claims that were applied after they seemed to fail.
            strays = [rc for rc in shard if rc.session == self._session and name not in self._watching]
            if strays:
                context.log.warning("Releasing locked RCs that have no controller", rcs=[rc.id for rc in strays])
                await self.claims.release(shard, strays, self._session)
        except StoreError as error:
            context.log.info("A foreign shard could not be read", shard=name, error=str(error))
            return
        before, now = seen.pop(name, {}), context.clock()
        free: dict[str, _Free] = {}
        for rc in filter(self.claims.wants, shard):
            version = (rc.spec.modify_index if rc.spec else 0) + (rc.owner.modify_index if rc.owner else 0)
            known = before.get(rc.id)
            free[rc.id] = known if known and known.version == version else _Free(version, now)
        overdue = [rc_id for rc_id, noted in free.items() if now - noted.since >= context.settings.claim_grace]
        if overdue:
            context.log.warning(
                "The preferred farm leaves RCs unclaimed; taking over its shard", shard=name, rcs=overdue
            )
            self._rescued.add(name)
            self._shards_wake.set()
        elif free:
            seen[name] = free
