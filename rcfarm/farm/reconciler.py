"""The reconciler: takes RC ids from the work queue and reconciles those that this farm holds.

The model: several workers, each with one RC at a time; the queue never gives the same id to two. What an input's change
concerns is queued at once (`nodes_changed`, `intent_changed`; `rcfarm.farm.ownership` queues for changes of the RCs
themselves). Beside the workers run:

    ask again queues RCs that wait for a node when the scheduler's answer may have changed, spread evenly, too
    resync    queues every RC once per `resync_interval`, spread evenly

An error of one RC is retried with a growing pause, and affects no other; after a few failures, or when a retry cannot
help, the RC is quarantined: left as it is, with the reason in its status.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence

from controllers.loop.workqueue import ShutDown, WorkQueue
from rcfarm.farm.context import FarmContext
from rcfarm.farm.ownership import Ownership
from rcfarm.farm.replication_controller import CannotReconcile, ReplicationController
from scheduler.nodes import NodeChange
from scheduler.protocol import NodeState
from store.kv.protocol import Denied, OwnershipLost, StoreError, TxnConflict, Unavailable
from store.schema.records import Reason
from store.schema.selectors import Selector
from store.timing import give_way

VERSION_LOOK = 1.0  # seconds between checks whether the scheduler's answers may have changed
ASK_AGAIN = 30.0  # seconds over which the RCs that wait for a node are then queued
ASK_PARTS = 200  # number of lots: waking the loop for each RC would cost as much as reconciling it
SELECTIONS = 20_000  # selector matches that one change may cost; beyond, all waiting RCs are queued
MAX_RETRY = 60.0  # seconds between attempts on a failing RC


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
