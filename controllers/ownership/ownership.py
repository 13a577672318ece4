"""Ownership: which items this member works on.

The model: the views of the watched shards call back; that changes the state, queues an item, or sets an event, for
which a few loops wait:

    shards    watches the shards that this member prefers
    surplus   hands over those that it no longer prefers; one that waits for work in flight delays no other
    claims    claims free items of the watched shards
    sweep     searches one foreign shard at a time for items that their preferred member leaves unclaimed

An item is in `held` from the moment the view shows this member's session on its lock until the view shows another, or
until the member begins to release it; it is worked on only while it is there. A release first waits for the item's
work in flight (its `lock`), so nothing is ever written after an unlock.

    free      -> held       the view shows our session
    held      -> releasing  its work in flight has ended
    held      -> dropped    the view shows another session, or none
    releasing -> dropped    unlocked
    releasing -> held       the store refused, or is unavailable

No lock may be held in a shard that is not watched, as no member would work on that item. So a shard is handed over
while no claim of its items is in flight, a term that resumes a session begins with every shard, and the sweep releases
locks left behind by a late answer.

A kind of items derives from `Ownership`: it makes the views of shards, which call `follow` for each item that changed,
and the objects that work on held items.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from controllers.ownership.claims import Claims, I, I_co, Kind, Shard
from controllers.ownership.membership import Membership, NameTaken
from store.kv.protocol import OwnershipLost, Store, StoreError
from store.kv.view import TreeView
from store.schema.selectors import Selector

CLAIM_RETRY = 1.0  # seconds until a refused claim is retried, unless a change wakes it before
JOIN_RETRY = 0.5  # seconds between attempts to become a member
CLAIMS_AT_ONCE = 8
HANDOVERS_AT_ONCE = 4  # shards whose items are released at the same time
HANDOVER_RETRY = 1.0  # seconds until a failed hand-over is retried


class Held(Protocol[I_co]):
    """What works on one held item, `state`. Its `lock` is held while work is in flight."""

    lock: asyncio.Lock

    @property
    def state(self) -> I_co: ...


S = TypeVar("S", bound=Shard[Any])
H = TypeVar("H", bound=Held[Any])


class _Free(NamedTuple):
    """An item that was seen free and unchanged since `since`."""

    version: int
    since: float


class Ownership(ABC, Generic[I, S, H]):
    """The items that a member owns under one session. Run `run()` once; read `held` and `shards` from the same event
    loop.

    `is_session_held()` returns whether it is still safe to act under `session`. `claim_grace`: seconds for which the
    preferred member may leave an item unclaimed; `handover_interval`: seconds between the hand-overs of two shards.
    `clock` is monotonic, in seconds; `log` names the member. `resumed`: an earlier term under this session ended
    because it believed the session lost.
    """

    def __init__(
        self,
        store: Store,
        kind: Kind,
        membership: Membership[Any],
        session: str,
        is_session_held: Callable[[], bool],
        *,
        selector: Selector,
        claim_grace: float,
        handover_interval: float,
        log: Any,
        clock: Callable[[], float] = time.monotonic,
        resumed: bool = False,
    ) -> None:
        self.held: dict[str, H] = {}
        self.shards: dict[str, S] = {}
        self.claims: Claims[I] = Claims(store, kind, selector)
        self.kind, self.membership, self.session, self.log = kind, membership, session, log
        self.is_session_held = is_session_held
        self._claim_grace, self._handover_interval = claim_grace, handover_interval
        self._clock, self._resumed = clock, resumed
        self._field, self._fields = kind.item.lower(), f"{kind.item.lower()}s"
        self._taken = f"owned by another {kind.member}"
        self._releasing: dict[str, H] = {}
        self._watching: dict[str, asyncio.Task[None]] = {}
        self._rescued: set[str] = set()
        self._unclaimed: set[str] = set()
        self._behind: set[str] = set()  # shards in which the last claim failed: another member was first, it seems
        self._claims_wake = asyncio.Event()
        self._shards_wake = asyncio.Event()
        self._surplus_wake = asyncio.Event()
        self._leaving: set[str] = set()  # shards that are being handed over
        self._handing_over = asyncio.Semaphore(HANDOVERS_AT_ONCE)

    @abstractmethod
    def make_shard(self, name: str, group: asyncio.TaskGroup | None) -> S:
        """Make the view of a shard. Its items' changes go to `follow`, and `is_busy(name)` is the view's `busy`.

        `group`: may run what the shard needs beside it. None: the shard is foreign, read once, and follows nothing.
        """

    @abstractmethod
    def take(self, item: I) -> H:
        """Make what works on an item that is now owned. It is queued next."""

    @abstractmethod
    def enqueue(self, item_id: str) -> None:
        """Queue a held item: it was taken, or its release failed."""

    @abstractmethod
    def has_work(self) -> bool:
        """Return whether held items are queued: changes of others wait behind them."""

    def dropped(self, held: H) -> None:
        """Clean up after an item that is not owned any more."""

    def about_to_claim(self, items: Iterable[I]) -> None:
        """Prepare for the work on items that are claimed next."""

    def first_read(self) -> None:
        """Act once the shards that preferred this member at first have been read."""

    def unwatched(self, shard: S) -> None:
        """Clean up after a shard that was handed over, before its records are dropped."""

    async def join(self) -> bool:
        """Become a member, retrying while the store is unavailable or the name in use. Return False when the session is
        lost."""
        last_logged = ""
        while self.is_session_held():
            try:
                await self.membership.join(self.session)
                return True
            except (NameTaken, StoreError) as error:
                if str(error) != last_logged:
                    self.log.warning(f"{self.kind.title} could not join; retrying", reason=str(error))
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

    def views(self) -> Iterator[TreeView[Any]]:
        """Yield the views of the watched shards."""
        yield from (shard.view for shard in self.shards.values())

    def members_changed(self) -> None:
        """Update the watched shards after a change of the group of members."""
        self._rescued.clear()
        self._shards_wake.set()

    def follow(self, item: I) -> H | None:
        """Take, drop or claim the item after a change of it. Return what works on it if it was held before and still
        is: the caller decides if the change concerns it."""
        session = item.session
        if session != self.session:
            self.drop(item.id, self._taken if session else "its lock was released")
            if session is None:
                self._unclaimed.add(item.shard.name)
                self._claims_wake.set()
        elif (held := self.held.get(item.id)) is not None:
            return held
        elif item.id not in self._releasing:
            self.held[item.id] = self.take(item)
            self.enqueue(item.id)
        return None

    def is_busy(self, name: str) -> bool:
        """Return whether items wait to be claimed in this shard or worked on in any: own writes would end any watch."""
        return name not in self._behind and (
            self.has_work() or any(map(self.claims.wants, self.shards.get(name) or ()))
        )

    def drop(self, item_id: str, why: str) -> None:
        """Cease to work on an item whose lock is not ours any more."""
        held = self.held.pop(item_id, None) or self._releasing.pop(item_id, None)
        if held:
            self.dropped(held)
            self.log.debug(f"{self.kind.item} no longer owned", **{self._field: item_id}, reason=why)

    async def confirm(self, item: I, why: str) -> bool:
        """Read the item's lock after a refused write: only the store knows its holder now. Return whether the item is
        still ours; otherwise it is dropped."""
        try:
            await item.shard.view.refresh_key(self.kind.owner_key(item.id))
        except StoreError as unknown:
            self.log.info(f"{self.kind.item} owner not known yet", **{self._field: item.id}, error=str(unknown))
        if item.session == self.session:
            return True
        self.drop(item.id, why)
        return False

    async def _rejoin(self) -> None:
        self.log.warning("Member record lost; joining again")
        await self.join()

    async def _watch_shards(self, group: asyncio.TaskGroup) -> None:
        """Watch the shards that prefer this member."""
        await self.membership.view.synced()
        if self._resumed:
            for name in self.kind.shards:
                self._watch(name, group)
        is_first = True
        while True:
            self._shards_wake.clear()
            if not self.membership.includes(self.session):
                await self._rejoin()
            for name in sorted(self._preferred() - self._watching.keys()):
                self._watch(name, group)
            if is_first:
                for shard in list(self.shards.values()):
                    await shard.view.synced()
                self.first_read()
                is_first = False
            self._surplus_wake.set()
            await self._shards_wake.wait()

    def _preferred(self) -> set[str]:
        return self.membership.preferred(self.kind.shards) | self._rescued

    def _watch(self, name: str, group: asyncio.TaskGroup) -> None:
        shard = self.shards[name] = self.make_shard(name, group)
        self._watching[name] = group.create_task(shard.run())

    async def _hand_over_surplus(self) -> None:
        """Hand over watched shards that no longer prefer this member, each as soon as possible; none while this process
        is not a member, as no shard prefers it then."""
        async with asyncio.TaskGroup() as group:
            while True:
                await self._surplus_wake.wait()
                self._surplus_wake.clear()
                while self.membership.includes(self.session):
                    surplus = self._watching.keys() - self._preferred() - self._leaving
                    if not surplus:
                        break
                    self._leaving.add(min(surplus))
                    group.create_task(self._hand_over(min(surplus)))
                    await asyncio.sleep(self._handover_interval)

    async def _hand_over(self, name: str) -> None:
        """Release every item of the shard, each after its work in flight, and stop watching it."""
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
            self.unwatched(shard)
            shard.close()
        except StoreError as error:
            self.log.warning("Shard could not be handed over; retrying", shard=name, error=str(error))
            await asyncio.sleep(HANDOVER_RETRY)
            self._surplus_wake.set()
        else:
            if count:
                self.log.info("Shard handed over", shard=name, **{self._fields: count})
        finally:
            self._leaving.discard(name)
            self._shards_wake.set()  # it may be preferred again by now

    async def _release(self, shard: S, controllers: list[H]) -> None:
        """Release these items, each after its work in flight. Raises the store's errors; then they are held again."""
        leaving: dict[str, H] = {}
        for controller in controllers:
            async with controller.lock:
                item_id = controller.state.id
                if self.held.get(item_id) is controller:
                    self._releasing[item_id] = leaving[item_id] = self.held.pop(item_id)
        try:
            async with self._handing_over:
                await self.claims.release(shard, [controller.state for controller in leaving.values()], self.session)
        except StoreError:
            for item_id in leaving.keys() & self._releasing.keys():
                self.held[item_id] = self._releasing.pop(item_id)
                self.enqueue(item_id)
            raise
        for item_id in leaving:
            self.drop(item_id, "handed over")

    async def _claim_free(self) -> None:
        while True:
            await self._claims_wake.wait()
            self._claims_wake.clear()
            names, self._unclaimed = self._unclaimed, set()
            shards = [self.shards[name] for name in sorted(names) if name in self.shards]
            free = [(shard, [item for item in shard if self.claims.wants(item)]) for shard in shards]
            self.about_to_claim(chain.from_iterable(items for _, items in free))
            slots = asyncio.Semaphore(CLAIMS_AT_ONCE)
            outcomes = await asyncio.gather(*(self._claim(shard, items, slots) for shard, items in free if items))
            self._behind = {name for name in outcomes if name}
            if self._behind:
                self._unclaimed |= self._behind
                asyncio.get_running_loop().call_later(CLAIM_RETRY, self._claims_wake.set)

    async def _claim(self, shard: S, items: list[I], slots: asyncio.Semaphore) -> str:
        """Claim the items. Return the shard's name if some claims failed, else ""."""
        if shard.claiming.locked():  # it is being handed over: waiting for that would delay all other shards
            return shard.name
        async with slots, shard.claiming:
            if not self.is_session_held() or self.shards.get(shard.name) is not shard:
                return ""
            try:
                refused = await self.claims.claim(shard, items, self.membership.key, self.session)
            except OwnershipLost:
                await self._rejoin()
                return shard.name
            except StoreError as error:
                title = f"{self.kind.item[0].upper()}{self.kind.item[1:]}s"
                self.log.warning(f"{title} could not be claimed; retrying", shard=shard.name, error=str(error))
                return shard.name
        return shard.name if refused else ""

    async def _sweep(self) -> None:
        """Claim items of foreign shards that stay free for longer than the grace time: their preferred member is stuck.

        All shards are checked in turn, and those where an item was free more often.
        """
        seen: dict[str, dict[str, _Free]] = {}
        while True:
            for name in self.kind.shards:
                await asyncio.sleep(self._claim_grace / 4)
                for shard in seen.keys() & self._watching.keys():
                    del seen[shard]
                for shard in sorted({name, *seen} - self._watching.keys()):
                    await self._look_into(shard, seen)

    async def _look_into(self, name: str, seen: dict[str, dict[str, _Free]]) -> None:
        """Record the free items of one foreign shard; take it over when one was free, unchanged, for the grace time."""
        shard = self.make_shard(name, None)
        try:
            await shard.view.refresh()
            # Our locks in a shard that is not watched: claims that were applied after they seemed to fail.
            strays = [item for item in shard if item.session == self.session and name not in self._watching]
            if strays:
                message = f"Releasing locked {self.kind.item}s that have no controller"
                self.log.warning(message, **{self._fields: [item.id for item in strays]})
                await self.claims.release(shard, strays, self.session)
        except StoreError as error:
            self.log.info("A foreign shard could not be read", shard=name, error=str(error))
            return
        before, now = seen.pop(name, {}), self._clock()
        free: dict[str, _Free] = {}
        for item in filter(self.claims.wants, shard):
            version = (item.spec.modify_index if item.spec else 0) + (item.owner.modify_index if item.owner else 0)
            known = before.get(item.id)
            free[item.id] = known if known and known.version == version else _Free(version, now)
        overdue = [item_id for item_id, noted in free.items() if now - noted.since >= self._claim_grace]
        if overdue:
            member, items = self.kind.member, f"{self.kind.item}s"
            message = f"The preferred {member} leaves {items} unclaimed; taking over its shard"
            self.log.warning(message, shard=name, **{self._fields: overdue})
            self._rescued.add(name)
            self._shards_wake.set()
        elif free:
            seen[name] = free
