"""PoolScheduler: a pod may run where its capacity is reserved.

The model: a pool is the nodes that a selector matches, usually by one label (`pool=web`). Capacity belongs to nodes,
not to pools, so pools may overlap. `allocate_nodes` reserves the manifest's request on nodes with room; a pod may stay
where its reservation is, new ones are placed on free reservations, and `deallocate_nodes` frees them. No allocation
makes the sum of a node's reservations exceed its capacity, however many farms allocate at once
(`scheduler.pool.ledger`); leftovers of crashes are swept (`scheduler.pool.reclaim`).

A reservation is found by node and pod ID alone: an RC keeps its nodes when its selector is rewritten, as far as the new
one matches them. It grows with the manifest where there is room (elsewhere the pod can't be changed in place, and the
node stops being eligible), and shrinks only when the pod leaves. If a node has become too small for its reservations,
the latest of them stop being eligible.

Run `run()` as a task beside the directory's. Without it, the first call reads the reservations once.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import msgspec

from scheduler.label import LabelScheduler, kind_of_obstacle, obstacle, shortage_of
from scheduler.pool.ledger import (
    NOTHING,
    PAIRS_PER_CHANGE,
    Draft,
    Ledger,
    Pods,
    Reservation,
    chunked,
    covers,
    dominant_share,
    fits,
    largest,
    shortfalls,
    total,
    without,
)
from scheduler.pool.reclaim import SWEEP_INTERVAL, Sweeper
from scheduler.protocol import Eligibility, NodeDirectory, NodeState, SchedulerError
from store.kv import ops
from store.kv.protocol import Store
from store.kv.view import TreeView
from store.schema.keys import Keys
from store.schema.labels import PodLocation
from store.schema.manifest import Manifest
from store.schema.records import Capacity
from store.schema.selectors import Selector

Strategy = Literal["spread", "pack"]
MAX_CACHED = 256  # shortages, each of which names every node
NO_ROOM = "without room"
_Wanted = tuple[Selector, int, int, tuple[tuple[str, int], ...]]  # a selector and the requested resources


class _Kinds(NamedTuple):
    """The nodes by kind of obstacle, at these versions of directory and ledger."""

    versions: tuple[int, int]
    nodes: Mapping[str, list[str]]


class PoolScheduler:
    """A `Scheduler` that reserves capacity. `strategy`: take the emptiest nodes first, or the fullest that fit.

    `sweep_interval` in seconds.
    """

    def __init__(
        self,
        store: Store,
        keys: Keys,
        directory: NodeDirectory,
        strategy: Strategy = "spread",
        *,
        sweep_interval: float = SWEEP_INTERVAL,
        rng: random.Random | None = None,
    ) -> None:
        self.ledger = Ledger(store, keys, rng=rng)
        self.sweeper = Sweeper(store, keys, self.ledger, interval=sweep_interval, rng=rng)
        self._keys, self._directory = keys, directory
        self._sign = 1 if strategy == "spread" else -1
        self._labels = LabelScheduler(directory)
        self._kinds: dict[_Wanted, _Kinds] = {}
        self._preparing = asyncio.Lock()
        self._prepared = False

    @property
    def version(self) -> int:
        """Return a number that grows with every change of any node, and whenever capacity is freed."""
        return self._directory.version + self.ledger.freed

    async def run(self) -> None:
        """Watch the reservations and sweep them, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.ledger.view.run(), name="reservations view")
            tasks.create_task(self.sweeper.run(), name="reservations sweep")

    async def refresh(self) -> None:
        """Read the reservations once, for `explain` in a program that does not schedule."""
        await self.ledger.view.refresh()

    def views(self) -> Sequence[TreeView[Any]]:
        """Return the view of the reservations."""
        return (self.ledger.view,)

    async def eligible_nodes(self, manifest: Manifest, node_selector: Selector) -> Eligibility:
        """Return the matching nodes with a reservation for the manifest's pod ID. Raises the store's errors."""
        await self._prepare()
        nodes, need = self._directory.nodes(), manifest.requested()
        matching = self._labels.eligibility(node_selector).eligible
        reserved = self.ledger.nodes_of(manifest.id) & matching
        small = sorted(node for node in reserved if not covers(self.ledger.pods(node)[manifest.id].request, need))
        for chunk in chunked(small):
            await self.ledger.change(partial(self._enlarge, manifest.id, need, chunk))
        kept = set()  # where the reservation is large enough, and the node still has the capacity for it
        for name in reserved:
            node, pods = nodes.get(name), self.ledger.pods(name)
            is_large_enough = manifest.id in pods and covers(pods[manifest.id].request, need)
            if node is not None and is_large_enough and manifest.id not in self._overflow(node, pods):
                kept.add(name)
        placeable = (
            node
            for node in kept
            if nodes[node].schedulable and nodes[node].live and not self.ledger.pods(node)[manifest.id].releasing
        )
        # An unreadable record is not a missing reservation: it must not move the pods on the node.
        unreadable = self.ledger.unreadable().keys() & matching
        return Eligibility(frozenset(kept | unreadable), tuple(sorted(placeable)))

    async def allocate_nodes(
        self, manifest: Manifest, node_selector: Selector, allocation_count: int, force: bool = False
    ) -> Sequence[str]:
        """Reserve up to `allocation_count` further nodes, in the order of the strategy.

        Capacity is never exceeded, so `force` changes nothing. Raises `SchedulerError`, with the nodes' obstacles, if
        no node has room, and the store's errors.
        """
        await self._prepare()
        held = [self.ledger.pods(node)[manifest.id] for node in self.ledger.nodes_of(manifest.id)]
        # Without inspecting each node for each requested pod; a reservation being freed may be taken again.
        if allocation_count > 0 and not any(reservation.releasing for reservation in held):
            left_out = sum(map(len, self._obstacles(manifest.requested(), node_selector).values()))
            if left_out == len(self._directory.nodes()):
                raise self._shortage(manifest, node_selector)
        allocated: list[str] = []
        while len(allocated) < allocation_count:
            count = min(allocation_count - len(allocated), PAIRS_PER_CHANGE)
            chosen = await self.ledger.change(partial(self._reserve, manifest, node_selector, count))
            if not chosen:
                break
            allocated += chosen
        if not allocated and allocation_count > 0:
            raise self._shortage(manifest, node_selector)
        return allocated

    async def deallocate_nodes(self, node_selector: Selector, nodes: Iterable[str], *, pod_id: str = "") -> None:
        """Free the pod's reservations on `nodes`, if any. Raises the store's errors.

        While the pod's intent exists, its reservation is only marked: a second call frees it once the pod is gone, or
        else a sweep does.
        """
        await self._prepare()
        reservations = [
            PodLocation(node, reserved)
            for node in sorted(set(nodes))
            for reserved, held in self.ledger.pods(node).items()
            if (reserved == pod_id if pod_id else held.selector == str(node_selector))
        ]
        for chunk in chunked(reservations):
            await self.ledger.change(partial(self._release, chunk))

    def _shortage(self, manifest: Manifest, selector: Selector) -> SchedulerError:
        """Return the error with the obstacles of the nodes that the pod is not on already."""
        nodes, kinds = self._directory.nodes(), self._obstacles(manifest.requested(), selector)
        if has := self.ledger.nodes_of(manifest.id):
            without_has = {kind: [name for name in names if name not in has] for kind, names in kinds.items()}
            kinds = {kind: names for kind, names in without_has.items() if names}
        found = shortage_of(selector, nodes, kinds, lambda name: self._why_not(nodes[name], manifest, selector))
        return SchedulerError(f"pod {manifest.id}: {found.message}", left_out=found.left_out)

    def _obstacles(self, need: Capacity, selector: Selector) -> Mapping[str, list[str]]:
        """Return the nodes that get no pod of this size, by kind; cached until nodes or reservations change."""
        wanted = (selector, need.cpu, need.memory, tuple(sorted(need.devices.items())))
        versions = (self._directory.version, self.ledger.version)
        known = self._kinds.get(wanted)
        if known is not None and known.versions == versions:
            return known.nodes
        if known is None and len(self._kinds) >= MAX_CACHED:
            self._kinds.clear()
        kinds: dict[str, list[str]] = {}
        unreadable = self.ledger.unreadable()
        for name, node in self._directory.nodes().items():
            kind = kind_of_obstacle(node, selector)
            if not kind and name in unreadable:
                kind = "with reservations that can't be read"
            elif not kind and not fits(need, self.ledger.used(name), node.capacity):
                kind = NO_ROOM
            if kind:
                kinds.setdefault(kind, []).append(name)
        self._kinds[wanted] = _Kinds(versions, kinds)
        return kinds

    def explain(self, manifest: Manifest, node_selector: Selector) -> Mapping[str, str]:
        """Return, for every node that gets no pod now, the reason, in words for an operator."""
        nodes = self._directory.nodes()
        return {name: why for name in sorted(nodes) if (why := self._why_not(nodes[name], manifest, node_selector))}

    async def _prepare(self) -> None:
        """Before the first answer, read the reservations, and make those of pods that have none."""
        if self._prepared:
            return
        async with self._preparing:
            if not self._prepared:
                await self.sweeper.begin()
                self._prepared = True

    def _enlarge(self, pod_id: str, need: Capacity, nodes: Iterable[str], draft: Draft) -> None:
        for name in nodes:
            held, node = draft.pods(name).get(pod_id), self._directory.nodes().get(name)
            if held is None or node is None:
                continue
            request = largest(held.request, need)
            if fits(request, without(draft.used(name), held.request), node.capacity):
                draft.put(name, pod_id, msgspec.structs.replace(held, request=request))

    def _reserve(self, manifest: Manifest, selector: Selector, count: int, draft: Draft) -> list[str]:
        """Add reservations on the best `count` nodes with room to the draft. Return the nodes."""
        need, nodes, unreadable = manifest.requested(), self._directory.nodes(), self.ledger.unreadable()
        candidates: list[tuple[float, int, str]] = []  # the best one is the least
        for name in self._labels.eligibility(selector).placeable:
            capacity, pods, used = nodes[name].capacity, draft.pods(name), draft.used(name)
            held = pods.get(manifest.id)
            if held is not None:
                if not held.releasing:
                    continue
                used = without(used, held.request)
            if not fits(need, used, capacity) or name in unreadable:
                continue
            if draft.blocked and self._keys.intent(name, manifest.id) in draft.blocked:
                continue
            candidates.append((self._sign * dominant_share(used, need, capacity), self._sign * len(pods), name))
        chosen = [name for *_, name in heapq.nsmallest(count, candidates)]
        reservation = Reservation(request=need, selector=str(selector))
        for name in chosen:
            free_of_pod = ops.check_not_exists(self._keys.intent(name, manifest.id))
            draft.put(name, manifest.id, reservation, free_of_pod)
        return chosen

    def _release(self, pods: Iterable[PodLocation], draft: Draft) -> None:
        for node, pod_id in pods:
            held, key = draft.pods(node).get(pod_id), self._keys.intent(node, pod_id)
            if held is None:
                continue
            if key in draft.blocked:
                draft.put(node, pod_id, msgspec.structs.replace(held, releasing=True))
            else:
                draft.put(node, pod_id, None, ops.check_not_exists(key))

    def _overflow(self, node: NodeState, pods: Pods) -> set[str]:
        """Return the latest reservations, for which the node, grown smaller, has no capacity."""
        if fits(self.ledger.used(node.name), NOTHING, node.capacity):
            return set()
        overflow, used = set(), NOTHING
        for pod_id, held in pods.items():
            if fits(held.request, used, node.capacity):
                used = total((used, held.request))
            else:
                overflow.add(pod_id)
        return overflow

    def _why_not(self, node: NodeState, manifest: Manifest, selector: Selector) -> str:
        """Return why the node gets no pod of the manifest now, or ""."""
        if why := obstacle(node, selector):
            return why
        if (bad := self.ledger.unreadable().get(node.name)) is not None:
            return f"its reservations can't be read: {bad}; correct or delete that key"
        need, pods = manifest.requested(), self.ledger.pods(node.name)
        held, used = pods.get(manifest.id), self.ledger.used(node.name)
        if held is not None and manifest.id in self._overflow(node, pods):
            return "more is reserved on it than it has: " + "; ".join(shortfalls(used, NOTHING, node.capacity))
        if held is not None and held.releasing:
            return f"the reservation of pod {manifest.id} there is being given back"
        if held is not None and covers(held.request, need):
            return ""
        lacking = list(shortfalls(need, without(used, held.request) if held else used, node.capacity))
        return "; ".join(lacking) or "it has room; it is reserved when a pod needs it"
