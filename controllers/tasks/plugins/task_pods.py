"""The pods of tasks: placed on a node, created once, observed and removed.

The model: an attempt has at most one pod. Its place, a node and a pod id, is the idempotency key that the attempt
declares before it creates the pod; whether the pod exists is a read of that place. The pod is created where no pod of
the id is, together with its manifest, in a transaction that fails once the execution's state no longer declares the
place: so an engine that has lost the execution, however late its write arrives, can't start the work again.

Agents report these pods under `task-pods/`, so one view serves every execution, and its size is that of the running
tasks, not that of the fleet. A changed record names the execution that it wakes. Executions that wait for a node are
woken by a node that is offered, or by capacity that a scheduler frees; executions on a node by what befalls it.

All of it lives in one event loop, the engine's.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import structlog

from controllers.tasks.api.errors import TaskError
from controllers.tasks.plugins.fence import Attempt, fence_of
from scheduler.nodes import NODE_LOST_AFTER, NodeChange, WatchedNodes
from scheduler.protocol import NodeDirectory, NodeState, Scheduler, SchedulerError
from store.kv import ops
from store.kv.protocol import BadRecord, Store, TxnConflict
from store.kv.view import Change, TreeView
from store.schema.keys import Keys, PodKey, shard_of
from store.schema.manifest import Manifest, digest
from store.schema.records import POD_ID_LABEL, TASK_LABEL, Intent, Labels, Reality, decode, encode
from store.schema.selectors import Selector
from store.schema.tasks import TaskEvent

log = structlog.get_logger(__name__)

NODE_OF = "node"  # the field of an event's custom info that names the node of the attempt


class PodRefused(TaskError):
    """A pod can't be created at its place; the message says why."""


class TaskPods:
    """The pods of the tasks that one engine runs. Run `run()` as a task; await `synced()` before the first call.

    `make_scheduler` builds the scheduler over the nodes that are watched here. `node_lost_after` in seconds on `clock`,
    which is monotonic. Reads and writes raise the store's errors.
    """

    def __init__(
        self,
        store: Store,
        keys: Keys,
        make_scheduler: Callable[[NodeDirectory], Scheduler],
        *,
        node_lost_after: float = NODE_LOST_AFTER,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self.wake: Callable[[str], None] = lambda execution: None
        self._store, self._keys, self._rng = store, keys, rng or random.Random()
        self._nodes = WatchedNodes(
            store, keys, node_lost_after=node_lost_after, clock=clock, on_change=self._nodes_changed
        )
        self._scheduler = make_scheduler(self._nodes.table)
        self._view: TreeView[Reality] = TreeView(
            store,
            keys.task_pods,
            lambda key, value: decode(Reality, key, value),
            on_change=self._pods_changed,
            name="pods of tasks",
            clock=clock,
        )
        self._pods: Counter[str] = Counter()  # reported pods per node
        self._placing: dict[str, str] = {}  # execution -> node of a pod that no agent has reported yet
        self._waiting: set[str] = set()  # executions that found no node
        self._answered = 0  # the scheduler's version when they were woken last

    def views(self) -> Iterator[TreeView[Any]]:
        """Yield the views of the store that `run` keeps current."""
        yield from (self._nodes.view, self._view)
        yield from self._scheduler.views()

    async def run(self) -> None:
        """Keep nodes, reservations and pods current until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            with ExitStack() as stack:
                for view in self._scheduler.views():
                    stack.enter_context(view.listening(lambda keys, origin: self._offer()))
                tasks.create_task(self._nodes.run())
                tasks.create_task(self._view.run())
                await tasks.create_task(self._scheduler.run())
                await asyncio.Future()  # a scheduler that maintains nothing returns at once

    async def synced(self) -> None:
        """Wait until nodes and pods are known."""
        await self._nodes.synced()
        await self._view.synced()

    def node(self, name: str) -> NodeState | None:
        """Return the node's state, None for a node that is not registered."""
        return self._nodes.table.nodes().get(name)

    def lost(self, name: str) -> bool:
        """Return whether the node is gone, or dead for so long that its pods are replaced."""
        node = self.node(name)
        return node is None or node.lost

    def reality(self, place: PodKey, execution: str) -> Reality | None:
        """Return what the agent reports of the execution's pod, None while it has reported nothing."""
        record = self._view.records.get(self._keys.task_pod(*place))
        return record.value if record and record.value.task == execution else None

    async def choose(self, manifest: Manifest, selector: Selector, execution: str, avoid: Collection[str]) -> str:
        """Return the node for the execution's next pod: of those that the scheduler allows, one that is not in `avoid`
        if there is one, with the fewest tasks. What the scheduler has reserved stays reserved for the manifest's id.

        Raises `SchedulerError` if there is no node; the execution is then woken when there may be one.
        """
        self._waiting.discard(execution)
        answered = self._scheduler.version
        placeable = set((await self._scheduler.eligible_nodes(manifest, selector)).placeable)
        allocated: set[str] = set()
        if placeable <= set(avoid):
            try:
                allocated = set(await self._scheduler.allocate_nodes(manifest, selector, 1 + len(avoid)))
            except SchedulerError:
                if not placeable:
                    self._waiting.add(execution)
                    if self._scheduler.version != answered:
                        self.wake(execution)
                    raise
        candidates = placeable | allocated
        placing = Counter(self._placing.values())

        def rank(name: str) -> tuple[int, bytes]:
            """Return the node's tasks, then a number by chance that differs for each execution."""
            return self._pods[name] + placing[name], hashlib.sha256(f"{name}/{execution}".encode()).digest()

        node = min(candidates - set(avoid) or candidates, key=rank)
        await self._scheduler.deallocate_nodes(selector, candidates - {node}, pod_id=manifest.id)
        self._placing[execution] = node
        return node

    async def failed_nodes(self, attempt: Attempt) -> set[str]:
        """Return the nodes where earlier attempts of the execution failed, from its history."""
        if attempt.number == 0:
            return set()
        failed = set()
        for entry in (await self._store.list(self._keys.events_of(attempt.execution))).entries:
            with suppress(BadRecord):  # without it the pod may go to the same node again
                event = decode(TaskEvent, entry.key, entry.value)
                info = (event.info or {}).get("custom_info") or {}
                if event.error is not None and isinstance(node := info.get(NODE_OF), str):
                    failed.add(node)
        return failed

    async def create(self, place: PodKey, raw: bytes, attempt: Attempt, labels: Labels) -> None:
        """Create the pod with this manifest, unless it exists. Raises `PodRefused` if another pod has the place, and
        `ExecutionLost` if the execution's state does not declare it."""
        key, sha256 = self._keys.intent(*place), digest(raw)

        async def create() -> None:
            fence = await fence_of(self._store, self._keys, attempt, key_of(place))
            intent = Intent(
                manifest=sha256,
                rc="",
                shard=shard_of(attempt.execution, self._keys.shards),
                token=fence.token,
                labels={**labels, POD_ID_LABEL: place.pod_id, TASK_LABEL: attempt.execution},
            )
            manifest = ops.put(self._keys.manifest(sha256), raw, flags=self._rng.getrandbits(32))
            try:
                await self._store.txn([fence.op, ops.create(key, encode(intent)), manifest])
            except TxnConflict:
                if not await self.exists(place, attempt.execution):
                    raise

        await ops.retry_conflicts(f"task {attempt.execution}", create, rng=self._rng, error=PodRefused)

    async def exists(self, place: PodKey, execution: str) -> bool:
        """Return whether the execution's pod has an intent. Raises `PodRefused` if the intent is another's."""
        return await self._intent(place, execution) is not None

    async def _intent(self, place: PodKey, execution: str) -> tuple[Intent, int] | None:
        """Return the intent of the execution's pod, with its modify index."""
        entry = await self._store.get(self._keys.intent(*place), consistent=True)
        if entry is None:
            return None
        intent = decode(Intent, entry.key, entry.value)
        if intent.task != execution:
            raise PodRefused(f"pod {place.pod_id} on {place.node} belongs to {intent.belongs_to}")
        return intent, entry.modify_index

    async def remove(self, place: PodKey, execution: str) -> None:
        """Remove the pod's intent and its manifest, which no other pod has; its agent then stops it."""

        async def remove() -> None:
            try:
                found = await self._intent(place, execution)
            except PodRefused:
                return  # another pod: ours was not created
            if found is not None:
                intent, index = found
                key = self._keys.intent(*place)
                await self._store.txn([ops.delete_cas(key, index), ops.delete(self._keys.manifest(intent.manifest))])

        self._forget(execution)
        await ops.retry_conflicts(f"pod {place.pod_id}", remove, rng=self._rng, error=PodRefused)

    async def stopped(self, place: PodKey, execution: str, *, within: float) -> bool:
        """Wait up to `within` seconds until the agent has stopped a pod without an intent. Return whether it has; a
        lost node counts as stopped."""
        changed = asyncio.Event()
        with self._view.listening(lambda keys, origin: changed.set()):
            await self._view.refresh_key(self._keys.task_pod(*place))
            try:
                async with asyncio.timeout(within):
                    while self.reality(place, execution) is not None and not self.lost(place.node):
                        changed.clear()
                        await changed.wait()
            except TimeoutError:
                return False
        return True

    async def release(self, place: PodKey, selector: Selector, execution: str) -> None:
        """Free what the scheduler has reserved for a removed pod."""
        self._forget(execution)
        await self._scheduler.deallocate_nodes(selector, [place.node], pod_id=place.pod_id)

    def _forget(self, execution: str) -> None:
        self._waiting.discard(execution)
        self._placing.pop(execution, None)

    def _pods_changed(self, changes: list[Change[Reality]]) -> None:
        for key, old, new, _ in changes:
            node = self._keys.parse_pod(key).node
            self._pods[node] += (new is not None) - (old is not None)
            if not self._pods[node]:
                del self._pods[node]
            for record in (new, old):
                if record is not None and record.value.task:
                    self._placing.pop(record.value.task, None)
                    self.wake(record.value.task)
                    break

    def _nodes_changed(self, changes: list[NodeChange]) -> None:
        concerned = {change.name for change in changes if change.concerns_pods}
        if concerned:
            for execution, node in list(self._placing.items()):
                if node in concerned:
                    self.wake(execution)
            for key, record in self._view.records.items():
                if self._keys.parse_pod(key).node in concerned:
                    self.wake(record.value.task)
        if any(change.offered for change in changes):
            self._offer()

    def _offer(self) -> None:
        """Wake the executions that wait for a node, if the scheduler may have another answer for them."""
        if self._scheduler.version != self._answered:
            self._answered = self._scheduler.version
            waiting, self._waiting = self._waiting, set()
            for execution in waiting:
                self.wake(execution)


def key_of(place: PodKey) -> str:
    """Return the place as an idempotency key."""
    return f"{place.node}/{place.pod_id}"


def place_of(key: str) -> PodKey:
    """Return the place that `key_of` made the key of."""
    return PodKey(*key.split("/", 1))
