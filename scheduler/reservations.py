"""The ledger of reserved capacity: one record per node, changed by compare-and-swap only.

A record lists what is reserved on its node, by pod id, in the order of reservation: a node runs at most one pod of an
id, so (node, pod id) is a reservation's identity. Whoever changes a record has read all of it, so two farms can't both
take the last of a node: the slower one is refused, reads, and decides again.

The model: a `Ledger` caches every record in a TreeView and sends this process's changes as a group. A change is a
function that edits a `Draft`; it may be called several times, on fresher records each time. The changes that wait are
tried one after the other on one draft and leave in one transaction, so ten thousand small changes don't cost as many
round trips, and never conflict with each other.

An edit may carry a guard, such as "no pod of that id is on that node". A guard that fails ends up in `Draft.blocked`
when the change is tried again.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Generic, TypeVar

import msgspec

from scheduler.capacity import NOTHING, total
from store import ops
from store.keys import Keys, is_node_name
from store.kv import MAX_TXN_OPS, Op, Store, TxnConflict
from store.records import BadRecord, Capacity, decode, encode
from store.turns import give_way
from store.view import Change, TreeView

ATTEMPTS = 64
MAX_PAUSE = 0.25  # seconds between attempts that were refused
MAX_ENTRIES = 2000  # reservations written at once, of about 110 bytes each, by changes that travel together
PAIRS_PER_CHANGE = 16  # a change edits at most so many (node, pod id): with guards, half a transaction

T = TypeVar("T")


class Reservation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Capacity set aside for one pod. `selector`: the one that it was allocated under, "" if the pod was there before.

    `releasing`: it still counts, but nothing new is placed on it; see `scheduler.sweep`.
    """

    request: Capacity = NOTHING
    selector: str = ""
    releasing: bool = False


class NodeReservations(msgspec.Struct, frozen=True):
    """`pools/<node>`: the reservations by pod id, oldest first. A node without any has no record."""

    pods: dict[str, Reservation]


Pods = Mapping[str, Reservation]
_NO_PODS: Pods = {}


class Draft:
    """Records as a change sees them, and its edits. `blocked`: keys whose guard failed before."""

    def __init__(self, ledger: Ledger, blocked: frozenset[str] = frozenset()) -> None:
        self.blocked = blocked
        self._ledger = ledger
        self._edits: dict[str, dict[str, Reservation]] = {}
        self._bases: dict[str, tuple[Pods, int]] = {}  # what was edited, and its index
        self._guards: dict[str, Op] = {}

    def pods(self, node: str) -> Pods:
        """The node's reservations."""
        return self._edits[node] if node in self._edits else self._ledger.pods(node)

    def used(self, node: str) -> Capacity:
        """What is reserved on the node in all."""
        if node in self._edits:
            return total(held.request for held in self._edits[node].values())
        return self._ledger.used(node)

    def put(self, node: str, pod_id: str, reservation: Reservation | None, guard: Op | None = None) -> None:
        """Set a reservation, or remove it (None), provided that `guard` holds. One that exists keeps its place."""
        if node not in self._edits:
            self._bases[node] = self._ledger.pods(node), self._ledger.index(node)
            self._edits[node] = dict(self._bases[node][0])
        pods = self._edits[node]
        if reservation is None:
            pods.pop(pod_id, None)
        else:
            pods[pod_id] = reservation
        if guard is not None:
            self._guards[guard.key] = guard

    def copy(self, blocked: frozenset[str]) -> Draft:
        """A draft that goes on from this one."""
        copy = Draft(self._ledger, blocked)
        copy._edits = {node: dict(pods) for node, pods in self._edits.items()}
        copy._bases = dict(self._bases)
        copy._guards = dict(self._guards)
        return copy

    @property
    def is_full(self) -> bool:
        """Whether it takes more than one transaction."""
        entries = sum(map(len, self._edits.values()))
        return len(self._edits) + len(self._guards) > MAX_TXN_OPS or entries > MAX_ENTRIES

    def ops(self) -> list[Op]:
        """The operations that make the edits true, provided that the records are still those that were edited."""
        edited = {node: pods for node, pods in self._edits.items() if pods != self._bases[node][0]}
        writes = (self._ledger.write(node, pods, self._bases[node][1]) for node, pods in edited.items())
        return [*self._guards.values(), *writes]


class _Waiting(Generic[T]):
    """A change that was not committed yet. `result` holds its answer once it was."""

    def __init__(self, change: Callable[[Draft], T]) -> None:
        self.change = change
        self.blocked: frozenset[str] = frozenset()
        self.result: list[T] = []


class Ledger:
    """All reservations. `view` must be run, or refreshed, to show what others do.

    `version` counts the changes of what is shown, `freed` those after which there may be more room.
    """

    def __init__(self, store: Store, keys: Keys, *, rng: random.Random | None = None) -> None:
        self.view: TreeView[NodeReservations] = TreeView(
            store, keys.pools, self._decode, on_change=self._index, whole=False, name="reservations"
        )
        self._store, self._keys = store, keys
        self._rng = rng or random.Random()
        self._pods: dict[str, Pods] = {}
        self._used: dict[str, Capacity] = {}
        self._nodes_by_pod: dict[str, set[str]] = {}
        self._waiting: dict[_Waiting[Any], None] = {}
        self.version = self.freed = 0
        self._turn = asyncio.Lock()

    def pods(self, node: str) -> Pods:
        """The node's reservations, by pod id, oldest first."""
        return self._pods.get(node, _NO_PODS)

    def used(self, node: str) -> Capacity:
        """What is reserved on the node in all."""
        return self._used.get(node, NOTHING)

    def nodes_of(self, pod_id: str) -> frozenset[str]:
        """The nodes with a reservation for the pod id."""
        return frozenset(self._nodes_by_pod.get(pod_id, ()))

    def nodes(self) -> Iterable[str]:
        """Every node with a reservation."""
        return self._used.keys()

    def unreadable(self) -> dict[str, BadRecord]:
        """Nodes whose record can't be read: nobody knows what is reserved there."""
        return {key.removeprefix(self._keys.pools): error for key, error in self.view.bad.items()}

    def index(self, node: str) -> int:
        """The modify index of the node's record; 0 without one."""
        record = self.view.records.get(self._keys.reservations(node))
        return record.modify_index if record else 0

    def write(self, node: str, pods: Mapping[str, Reservation], index: int) -> Op:
        """The operation that replaces the node's record by `pods`, if it is still the one of `index`."""
        key = self._keys.reservations(node)
        return ops.cas(key, encode(NodeReservations(dict(pods))), index) if pods else ops.delete_cas(key, index)

    async def change(self, change: Callable[[Draft], T]) -> T:
        """Commit what `change` edits and answer what it returned. It must not edit more than `PAIRS_PER_CHANGE` pairs.

        Raises the last `TxnConflict` when others were faster `ATTEMPTS` times, and the store's errors. Cancelled, or
        without an answer from the store, it may have been committed.
        """
        waiting = _Waiting(change)
        self._waiting[waiting] = None
        try:
            async with self._turn:
                await self._until_committed(waiting)
        finally:
            self._waiting.pop(waiting, None)
        return waiting.result[0]

    async def _until_committed(self, waiting: _Waiting[T]) -> None:
        refusals = 0
        while not waiting.result:
            try:
                await self._commit_group()
            except TxnConflict:
                refusals += 1
                if refusals == ATTEMPTS:
                    raise
                await asyncio.sleep(self._rng.uniform(0, min(MAX_PAUSE, 0.001 * 2**refusals)))

    async def _commit_group(self) -> None:
        """Try the changes that wait, oldest first, on one draft, as many as fit a transaction, and commit it."""
        draft, group = Draft(self), list[tuple[_Waiting[Any], Any]]()
        for waiting in list(self._waiting):
            await give_way()
            if waiting not in self._waiting:  # given up meanwhile
                continue
            trial = draft.copy(waiting.blocked)
            result = waiting.change(trial)
            if group and trial.is_full:
                break
            draft = trial
            group.append((waiting, result))
        writing = draft.ops()
        try:
            outcome = await self._store.txn(writing)
        except TxnConflict as conflict:
            await self._learn(conflict, writing, [waiting for waiting, _ in group])
            raise
        self.view.apply(outcome, writing)
        for waiting, result in group:
            waiting.result.append(result)
            self._waiting.pop(waiting, None)

    async def _learn(self, conflict: TxnConflict, writing: list[Op], group: list[_Waiting[Any]]) -> None:
        """Read the records that were changed by others, and note the guards that failed."""
        failed = [writing[failure.op_index] for failure in conflict.failures]
        blocked = frozenset(op.key for op in failed if op.verb not in ("cas", "delete-cas"))
        for waiting in group:
            waiting.blocked |= blocked
        for op in failed:
            if op.verb in ("cas", "delete-cas"):
                await self.view.refresh_key(op.key)

    def _decode(self, key: str, value: bytes) -> NodeReservations:
        if not is_node_name(key.removeprefix(self._keys.pools)):
            raise BadRecord(key, "not named after a node")
        return decode(NodeReservations, key, value)

    def _index(self, changes: list[Change[NodeReservations]]) -> None:
        self.version += 1
        for key, old, new in changes:
            if new is None or (old is not None and not old.value.pods.items() <= new.value.pods.items()):
                self.freed += 1
            node = key.removeprefix(self._keys.pools)
            for pod_id in old.value.pods if old else ():
                self._forget(pod_id, node)
            for pod_id in new.value.pods if new else ():
                self._nodes_by_pod.setdefault(pod_id, set()).add(node)
            if new:
                self._pods[node] = new.value.pods
                self._used[node] = total(held.request for held in new.value.pods.values())
            else:
                self._pods.pop(node, None)
                self._used.pop(node, None)

    def _forget(self, pod_id: str, node: str) -> None:
        nodes = self._nodes_by_pod[pod_id]
        nodes.discard(node)
        if not nodes:
            del self._nodes_by_pod[pod_id]


def chunked(items: Iterable[T]) -> Iterator[list[T]]:
    """The items in lists of what one change may edit."""
    remaining = iter(items)
    while chunk := list(islice(remaining, PAIRS_PER_CHANGE)):
        yield chunk
