"""The executions of one engine under one session: what it owns, what is due, and the workers that do it.

The model: claims, hand-overs and rescues are those of `controllers.ownership`. Each plugin has a *lane*: a work queue
of execution ids and its workers, so that a plugin that hangs delays no other. An execution costs no task while it
waits: its next moment stands in the lane's heap of delayed keys, and everything else that may concern it makes it due
at once:

    spec or state      changed by an operator, or by another process
    a granted unit     of a quota, as the view of the quotas shows it
    a signal           of the plugin (`SignalAsync`), or `EnqueueOwner` with its id
    a dependency       another execution that it waits for has ended
    the outbox         its last events have left, so that an ended execution can be given up

Each lane has circuits (`controllers.tasks.circuit`): a plugin whose calls fail for everything is paused as a
whole, and probed by one execution at a time.

An execution that another engine had before is first read again, and so are the quotas: a view may be older than what
the former owner wrote last. An ended execution is given up in its last transaction, and claimed again only if an
operator asks for another run. An error of one execution is retried with a growing pause, and affects no other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from itertools import count
from typing import Any, get_args

import msgspec

from controllers.loop.workqueue import ExponentialRateLimiter, MetricsProvider, ShutDown, WorkQueue
from controllers.ownership import ownership
from controllers.ownership.claims import Claims, Kind
from controllers.ownership.membership import Membership
from controllers.tasks.api.errors import TaskError
from controllers.tasks.circuit import Circuit
from controllers.tasks.engine.foreign import ENDED, ForeignExecutions, status_of
from controllers.tasks.engine.outbox import Outbox
from controllers.tasks.engine.round import SHORTEST_WAIT, Calls, Live, Rounds
from controllers.tasks.engine.shard import Facet, TaskItem, TaskShard
from controllers.tasks.engine.workshop import Dependency, Workshop
from controllers.tasks.recovery import recovered
from scheduler.quota.ledger import QuotaLedger
from store.errors import text_of
from store.kv import ops
from store.kv.protocol import BadRecord, OwnershipLost, Store, StoreError, TxnConflict, Unavailable
from store.kv.view import RefreshBudget
from store.schema.keys import Keys, all_shards, shard_of
from store.schema.records import decode, encode, utc_now
from store.schema.selectors import Selector
from store.schema.tasks import AbortRequest, TaskEvent, TaskOwner, TaskSpec, TaskState
from store.timing import give_way

MAX_RETRY = 30.0  # seconds between attempts on an execution whose rounds can't be committed
NO_PLUGIN = ""  # the lane of executions that no plugin handles


def executions_of(keys: Keys, engine: str) -> Kind:
    """Return executions as a kind of items that engines own, for the claims of `engine`."""
    return Kind(
        "execution",
        "engine",
        all_shards(keys.shards),
        keys.task_spec,
        keys.task_owner,
        lambda: TaskOwner(engine, utc_now()),
    )


class _Claims(Claims[TaskItem]):
    def wants(self, item: TaskItem) -> bool:
        return not item.is_settled and super().wants(item)


class _Fresh:
    """Reads something again when a caller needs a read that began after a moment; concurrent callers share reads."""

    def __init__(self, read: Callable[[], Awaitable[None]], ticks: Iterator[int]) -> None:
        self._read, self._ticks = read, ticks
        self._began = -1
        self._reading = asyncio.Lock()

    async def since(self, tick: int) -> None:
        """Return after a read that began after `tick`. Raises what the read raises."""
        async with self._reading:
            if self._began < tick:
                began = next(self._ticks)
                await self._read()
                self._began = began


class Executions(ownership.Ownership[TaskItem, TaskShard, Live]):
    """The executions that an engine owns under one session. Run `run()` and `work()` once."""

    def __init__(
        self,
        store: Store,
        keys: Keys,
        membership: Membership[Any],
        session: str,
        is_session_held: Callable[[], bool],
        workshop: Workshop,
        ledger: QuotaLedger,
        *,
        selector: Selector,
        claim_grace: float,
        handover_interval: float,
        watch_share: float,
        log: Any,
        clock: Callable[[], float],
        wall: Callable[[], float],
        metrics: MetricsProvider | None = None,
        resumed: bool = False,
        on_pause: Callable[[], None] = lambda: None,
    ) -> None:
        kind = executions_of(keys, membership.me.name)
        super().__init__(
            store,
            kind,
            membership,
            session,
            is_session_held,
            selector=selector,
            claim_grace=claim_grace,
            handover_interval=handover_interval,
            log=log,
            clock=clock,
            resumed=resumed,
        )
        self.claims = _Claims(store, kind, selector)
        self.lanes: dict[str, WorkQueue[str]] = {
            plugin: WorkQueue(
                f"tasks-{plugin or 'none'}",
                rate_limiter=ExponentialRateLimiter(0.05, MAX_RETRY),
                clock=clock,
                metrics=metrics,
            )
            for plugin in (NO_PLUGIN, *workshop.plugins.ids())
        }
        self.circuits: dict[tuple[str, Calls], Circuit] = {
            (plugin, calls): Circuit(
                f"{calls} of plugin {plugin}", self.enqueue, clock=clock, wall=wall, on_change=on_pause
            )
            for plugin in self.lanes
            for calls in get_args(Calls)
        }
        self._store, self._keys, self._workshop, self._ledger = store, keys, workshop, ledger
        self.wall = wall
        self._budget = RefreshBudget(watch_share, clock=clock)
        self._ticks = count()
        self._fresh_quotas = _Fresh(ledger.current, self._ticks)
        self._fresh_shards: dict[str, _Fresh] = {}
        self._dependents: dict[str, set[str]] = {}  # by the execution that they wait for
        self._foreign = ForeignExecutions(store, keys, self._foreign_dependencies, self._ended, log)
        self._rounds: Rounds | None = None
        self._outbox: Outbox | None = None
        self._reserving: set[str] = set()  # executions that hold the reservation of a cached result
        self._workers: list[asyncio.Task[None]] = []

    def make_shard(self, name: str, group: asyncio.TaskGroup | None) -> TaskShard:
        store, keys = self._store, self._keys
        if group is None:
            return TaskShard(name, store, keys, lambda item, facets, origin: None, self._budget, self._clock)
        shard = TaskShard(name, store, keys, self._changed, self._budget, self._clock, lambda: self.is_busy(name))
        self._fresh_shards[name] = _Fresh(shard.view.refresh, self._ticks)
        return shard

    def take(self, item: TaskItem) -> Live:
        lane = NO_PLUGIN
        if item.spec is not None:
            with suppress(TaskError):  # the round finds out again, and reports it
                lane = self._workshop.plugin_id(item.spec.value, item.state)
        live = Live(item, lane)
        if item.token > 1:
            live.taken = next(self._ticks)
        state = item.state
        if self._outbox is not None and item.spec is not None and state is not None:
            self._outbox.add(item.spec.value, state.sent, state.next_event)
        return live

    def enqueue(self, item_id: str, *, first: bool = False) -> None:
        """Make an execution due now, if it is held. `first`: before all others, as one for which units are held."""
        live = self.held.get(item_id)
        if live is not None:
            live.signalled = True
            queue = self.lanes[live.lane]
            (queue.add_first if first else queue.add)(item_id)

    def has_work(self) -> bool:
        return any(len(queue) for queue in self.lanes.values())

    def dropped(self, held: Live) -> None:
        self.lanes[held.lane].forget(held.state.id)
        for calls in get_args(Calls):
            self.circuits[held.lane, calls].forget(held.state.id)
        self._reserving.discard(held.state.id)
        if self._outbox is not None:
            self._outbox.forget(held.state.id)

    def unwatched(self, shard: TaskShard) -> None:
        self._fresh_shards.pop(shard.name, None)

    def delivered(self, execution: str, end: int) -> None:
        """Note that the events below `end` have left the outbox."""
        live = self.held.get(execution)
        if live is not None:
            live.sent = max(live.sent, end)
            if (state := live.state.state) is not None and state.step == "done":
                self.enqueue(execution)

    def dependencies(self, spec: TaskSpec) -> Mapping[str, Dependency]:
        """Return how far the executions are that this one depends on, and make it due when one of them ends."""
        found: dict[str, Dependency] = {}
        for each in spec.depends_on:
            dependents = self._dependents.setdefault(each, set())
            if spec.id not in dependents:
                dependents.add(spec.id)
                self._foreign.look()
            shard = self.shards.get(shard_of(each, self._keys.shards))
            if shard is not None:
                item = shard.items.get(each)
                status = status_of(item.state) if item else None
            else:
                status = self._foreign.status(each)
            if status is not None:
                found[each] = status
        return found

    async def work(self, rounds: Rounds, outbox: Outbox, workers: int) -> None:
        """Run the rounds that are due, `workers` at once per plugin, until cancelled; after `stop`, begin nothing
        more."""
        self._rounds, self._outbox = rounds, outbox
        try:
            async with asyncio.TaskGroup() as group:
                self._workers = [group.create_task(self._work(name)) for name in self.lanes for _ in range(workers)]
                group.create_task(self._foreign.run())
                group.create_task(self._extend_reservations())
        finally:
            for circuit in self.circuits.values():
                circuit.close()

    async def stop(self, grace: float) -> None:
        """Begin nothing more, and wait for the rounds in flight, at most `grace` seconds."""
        for queue in self.lanes.values():
            queue.shut_down()
        if self._workers:
            await asyncio.wait(self._workers, timeout=grace)

    def _changed(self, item: TaskItem, facets: Facet, origin: str) -> None:
        if item.id in self._dependents and facets & Facet.STATE and status_of(item.state) in ENDED:
            self._ended(item.id)
        if item.is_settled and item.session != self.session:
            self.drop(item.id, "it has ended")
            return
        live = self.follow(item)
        if live is not None:
            live.remember()
        if live is not None and origin != item.id and facets & (Facet.SPEC | Facet.STATE):
            self.enqueue(item.id)

    def _ended(self, execution: str) -> None:
        """Wake the executions that depend on one that has ended."""
        for dependent in self._dependents.get(execution, ()):
            self.enqueue(dependent)

    def _foreign_dependencies(self) -> set[str]:
        """Return the executions in shards of other engines that executions which are held depend on."""
        for execution, dependents in list(self._dependents.items()):
            if self.held.keys().isdisjoint(dependents):
                del self._dependents[execution]
        return {each for each in self._dependents if shard_of(each, self._keys.shards) not in self.shards}

    async def _work(self, lane: str) -> None:
        queue = self.lanes[lane]
        while True:
            try:
                execution = await queue.get()
            except ShutDown:
                return
            try:
                await give_way()  # a round that writes nothing never awaits
                live = self.held.get(execution)
                if live is not None and not queue.shutting_down:
                    async with live.lock:
                        if self.held.get(execution) is live:
                            try:
                                await self._round(live, queue)
                            finally:
                                for calls in get_args(Calls):
                                    self.circuits[live.lane, calls].left(execution)
            finally:
                queue.done(execution)

    async def _round(self, live: Live, queue: WorkQueue[str]) -> None:
        item, now, keys = live.state, self._clock(), self._keys
        if live.is_stuck:
            return  # the end of its call makes it due
        if not live.is_due(now):
            if live.wake is not None:
                queue.add_after(item.id, max(SHORTEST_WAIT, live.wake - now))
            return
        live.signalled = False
        try:
            if item.bad is not None:
                return  # its repair makes it due
            if live.taken is not None:
                await self._fresh_shards[item.shard.name].since(live.taken)
                await self._fresh_quotas.since(live.taken)
                live.taken = None
            if item.spec is None:
                await self._without_spec(live)
                return
            if live.is_robbed:
                assert live.last_state is not None
                self.log.error("State deleted by another client; writing it again", execution=item.id)
                await self._restore(item, keys.task_state(item.id), live.last_state)
            if item.state is None and item.token > 1:
                await self._recover(item, item.spec.value)
            assert self._rounds is not None
            await self._rounds.run(live)
        except OwnershipLost as error:
            if await self.confirm(item, str(error)):
                self._retry(live, queue)
        except Exception as error:  # a failure of one execution, whatever it is, must not affect others
            if isinstance(error, TxnConflict | Unavailable):
                self.log.info("Round not committed; retrying", execution=item.id, error=str(error))
            else:
                expected = isinstance(error, StoreError)
                self.log.error("Round failed; retrying", execution=item.id, error=text_of(error), exc_info=not expected)
            self._retry(live, queue)
        else:
            queue.forget(item.id)
            if item.state is not None and item.state.reserved:
                self._reserving.add(item.id)
            if live.wake is not None and not live.signalled:
                queue.add_after(item.id, live.wake - self._clock())

    def _retry(self, live: Live, queue: WorkQueue[str]) -> None:
        live.signalled = True
        queue.add_rate_limited(live.state.id)

    async def _restore(self, item: TaskItem, key: str, record: TaskSpec | TaskState) -> None:
        """Create a record again that another client deleted. Raises `StoreError`."""
        unit = [ops.check_session(self._keys.task_owner(item.id), self.session), ops.create(key, encode(record))]
        item.shard.view.apply(await self._store.txn(unit), unit)

    async def _recover(self, item: TaskItem, spec: TaskSpec) -> None:
        """Write the state of an execution that had begun, if another client deleted it. Raises `StoreError`."""
        events = []
        for entry in (await self._store.list(self._keys.events_of(item.id))).entries:
            with suppress(BadRecord):
                events.append(decode(TaskEvent, entry.key, entry.value))
        state = recovered(spec, events, self.wall())
        if state is not None:
            self.log.error("State deleted by another client; what the history says replaces it", execution=item.id)
            await self._restore(item, self._keys.task_state(item.id), state)

    async def _without_spec(self, live: Live) -> None:
        """Remove the rest of an ended execution. Abort one that may still have remote work, by its last known spec;
        leave it alone if there is none."""
        item, keys = live.state, self._keys
        if not (item.owner or item.record):
            return  # all of it was removed in the round before
        fence = ops.check_session(keys.task_owner(item.id), self.session)
        if not item.is_husk and (last := live.last_spec) is not None:
            self.log.error("Spec of a live execution deleted; writing it again with an abort", execution=item.id)
            abort = last.abort or AbortRequest(reason="its spec was deleted", by=self.membership.me.name, at=utc_now())
            spec = msgspec.structs.replace(last, generation=last.generation + 1, abort=abort)
            await self._restore(item, keys.task_spec(item.id), spec)
            return
        if not item.is_husk:
            self.log.error("Spec missing; leaving the execution's remote work as it is", execution=item.id)
            await self.claims.release(item.shard, [item], self.session)
            return
        self.log.info("Removing the rest of a deleted execution", execution=item.id)
        await self._ledger.release(item.id, fence=[fence])
        gone = ops.check_not_exists(keys.task_spec(item.id))
        trees = [ops.delete_tree(keys.events_of(item.id)), ops.delete_tree(keys.task(item.id))]
        unit = [fence, gone, *trees]
        item.shard.view.apply(await self._store.txn(unit), unit)

    async def _extend_reservations(self) -> None:
        """Extend the reservations of cached results while their executions run."""
        catalog = self._workshop.catalog
        while catalog is not None:
            await asyncio.sleep(catalog.heartbeat)
            for execution in list(self._reserving):
                live = self.held.get(execution)
                spec, state = (live.state.spec, live.state.state) if live else (None, None)
                if spec is None or state is None or not state.reserved or state.step == "done":
                    self._reserving.discard(execution)
                    continue
                try:
                    await self._workshop.extend_reservation(spec.value, state.attempt)
                except Exception as error:  # another execution may compute the same: no harm but the work
                    self.log.warning("A reservation was not extended", execution=execution, error=str(error))
