"""Arithmetic on capacities: sums, whether a request fits, and shortfalls in words.

A pod that requests none of a resource fits wherever the rest does, even on a node with less of it than is reserved.

The ledger of reserved capacity: one record per node, changed by compare-and-swap only.

A record lists the reservations on its node by pod ID, oldest first: a node runs at most one pod of an ID, so (node, pod
ID) identifies a reservation. Every writer of a record has read all of it, so two farms can't both take the last
capacity of a node: the slower one is refused, reads, and decides again.

The model: a `Ledger` caches every record in a TreeView and sends this process's changes as a group. A change is a
function that edits a `Draft`; it may be called several times, on fresher records each time. Waiting changes are tried
one after the other on one draft and leave in one transaction, so ten thousand small changes don't cost as many round
trips, and never conflict with each other.

An edit may carry a guard, such as "no pod of that ID is on that node". A guard that fails ends up in `Draft.blocked`
when the change is tried again.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Generic, TypeVar

import msgspec

from store.kv import ops
from store.kv.protocol import MAX_TXN_OPS, BadRecord, Op, Store, TxnConflict
from store.kv.view import Change, TreeView
from store.schema.keys import Keys, is_node_name
from store.schema.records import Capacity, decode, encode
from store.timing import Backoff, give_way

NOTHING = Capacity()
_BINARY_UNITS = ("", " KiB", " MiB", " GiB", " TiB")


def total(capacities: Iterable[Capacity]) -> Capacity:
    """Return the sum of the capacities."""
    cpu = memory = 0
    devices: dict[str, int] = {}
    for capacity in capacities:
        cpu += capacity.cpu
        memory += capacity.memory
        for kind, count in capacity.devices.items():
            devices[kind] = devices.get(kind, 0) + count
    return Capacity(cpu, memory, devices)


def largest(one: Capacity, other: Capacity) -> Capacity:
    """Return the larger of the two, for each resource."""
    kinds = {**one.devices, **other.devices}
    return Capacity(
        max(one.cpu, other.cpu),
        max(one.memory, other.memory),
        {kind: max(one.devices.get(kind, 0), other.devices.get(kind, 0)) for kind in kinds},
    )


def covers(reserved: Capacity, need: Capacity) -> bool:
    """Return whether `reserved` is at least `need` in every resource."""
    return (
        reserved.cpu >= need.cpu
        and reserved.memory >= need.memory
        and all(reserved.devices.get(kind, 0) >= count for kind, count in need.devices.items())
    )


def without(used: Capacity, part: Capacity) -> Capacity:
    """Return `used` minus one of its summands."""
    devices = {kind: count - part.devices.get(kind, 0) for kind, count in used.devices.items()}
    return Capacity(used.cpu - part.cpu, used.memory - part.memory, devices)


def fits(need: Capacity, used: Capacity, capacity: Capacity) -> bool:
    """Return whether `need` can be added to `used` without exceeding `capacity`."""
    if need.cpu and used.cpu + need.cpu > capacity.cpu:
        return False
    if need.memory and used.memory + need.memory > capacity.memory:
        return False
    return not need.devices or all(
        not count or used.devices.get(kind, 0) + count <= capacity.devices.get(kind, 0)
        for kind, count in need.devices.items()
    )


def dominant_share(used: Capacity, need: Capacity, capacity: Capacity) -> float:
    """Return the largest share of any one resource that `used` and `need` take: 0 of an empty node, 1 of a full one."""
    share = max(_share(used.cpu + need.cpu, capacity.cpu), _share(used.memory + need.memory, capacity.memory))
    if used.devices or need.devices:
        devices = total((used, need)).devices
        share = max(share, *(_share(count, capacity.devices.get(kind, 0)) for kind, count in devices.items()))
    return share


def _share(amount: int, limit: int) -> float:
    return amount / limit if limit else float(amount > 0)


def shortfalls(need: Capacity, used: Capacity, capacity: Capacity) -> Iterator[str]:
    """Yield what is missing for `need` to fit, as in "needs 2000m cpu, 500m free of 4000m"."""
    if need.cpu and used.cpu + need.cpu > capacity.cpu:
        yield f"needs {need.cpu}m cpu, {max(0, capacity.cpu - used.cpu)}m free of {capacity.cpu}m"
    if need.memory and used.memory + need.memory > capacity.memory:
        free = max(0, capacity.memory - used.memory)
        yield f"needs {_bytes(need.memory)} memory, {_bytes(free)} free of {_bytes(capacity.memory)}"
    for kind, count in sorted(need.devices.items()):
        there, taken = capacity.devices.get(kind, 0), used.devices.get(kind, 0)
        if count and taken + count > there:
            yield f"needs {count} {kind}, {max(0, there - taken)} free of {there}"


def _bytes(amount: int) -> str:
    value, unit = float(amount), 0
    while value >= 1024 and unit < len(_BINARY_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.4g}{_BINARY_UNITS[unit]}"


ATTEMPTS = 64
FIRST_PAUSE, MAX_PAUSE = 0.002, 0.25  # seconds between refused attempts
MAX_ENTRIES = 2000  # reservations written at once, of about 110 bytes each, by the changes of one transaction
PAIRS_PER_CHANGE = 16  # (node, pod ID) pairs that one change may edit: with guards, half a transaction

T = TypeVar("T")


class Reservation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Capacity reserved for one pod. `selector`: the one that it was allocated under, "" if the pod came first.

    `releasing`: it still counts, but nothing new is placed on it; see `scheduler.pool.reclaim`.
    """

    request: Capacity = NOTHING
    selector: str = ""
    releasing: bool = False


class NodeReservations(msgspec.Struct, frozen=True):
    """`pools/<node>`: the reservations by pod ID, oldest first. A node without any has no record."""

    pods: dict[str, Reservation]


Pods = Mapping[str, Reservation]
_NO_PODS: Pods = {}


class Draft:
    """Records as a change sees them, and its edits. `blocked`: keys whose guard failed before."""

    def __init__(self, ledger: Ledger, blocked: frozenset[str] = frozenset()) -> None:
        self.blocked = blocked
        self._ledger = ledger
        self._edits: dict[str, dict[str, Reservation]] = {}
        self._bases: dict[str, tuple[Pods, int]] = {}  # the record before the edits, and its index
        self._guards: dict[str, Op] = {}

    def pods(self, node: str) -> Pods:
        """Return the node's reservations."""
        return self._edits[node] if node in self._edits else self._ledger.pods(node)

    def used(self, node: str) -> Capacity:
        """Return the sum of the node's reservations."""
        if node in self._edits:
            return total(held.request for held in self._edits[node].values())
        return self._ledger.used(node)

    def put(self, node: str, pod_id: str, reservation: Reservation | None, guard: Op | None = None) -> None:
        """Set a reservation, or remove it (None), if `guard` holds. An existing one keeps its position."""
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
        """Return a draft that continues from this one."""
        copy = Draft(self._ledger, blocked)
        copy._edits = {node: dict(pods) for node, pods in self._edits.items()}
        copy._bases = dict(self._bases)
        copy._guards = dict(self._guards)
        return copy

    @property
    def is_full(self) -> bool:
        """Return whether it takes more than one transaction."""
        entries = sum(map(len, self._edits.values()))
        return len(self._edits) + len(self._guards) > MAX_TXN_OPS or entries > MAX_ENTRIES

    def ops(self) -> list[Op]:
        """Return the operations that write the edits, if the records have not changed since."""
        edited = {node: pods for node, pods in self._edits.items() if pods != self._bases[node][0]}
        writes = (self._ledger.write(node, pods, self._bases[node][1]) for node, pods in edited.items())
        return [*self._guards.values(), *writes]


@dataclass(slots=True, eq=False)
class _Waiting(Generic[T]):
    """A change that is not committed yet. `result` holds its return value afterwards."""

    change: Callable[[Draft], T]
    blocked: frozenset[str] = frozenset()
    result: list[T] = field(default_factory=list)


class Ledger:
    """All reservations. `view` must be run, or refreshed, to show changes by other processes.

    `version` counts the changes, `freed` those after which there may be more room.
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
        """Return the node's reservations, by pod ID, oldest first."""
        return self._pods.get(node, _NO_PODS)

    def used(self, node: str) -> Capacity:
        """Return the sum of the node's reservations."""
        return self._used.get(node, NOTHING)

    def nodes_of(self, pod_id: str) -> frozenset[str]:
        """Return the nodes with a reservation for the pod ID."""
        return frozenset(self._nodes_by_pod.get(pod_id, ()))

    def nodes(self) -> Iterable[str]:
        """Return every node with a reservation."""
        return self._used.keys()

    def unreadable(self) -> dict[str, BadRecord]:
        """Return the nodes whose record can't be read, so that their reservations are unknown."""
        return {self._keys.name_of(key): error for key, error in self.view.bad.items()}

    def index(self, node: str) -> int:
        """Return the modify index of the node's record; 0 without one."""
        record = self.view.records.get(self._keys.reservations(node))
        return record.modify_index if record else 0

    def write(self, node: str, pods: Mapping[str, Reservation], index: int) -> Op:
        """Return the operation that replaces the node's record with `pods`, if its index is still `index`."""
        key = self._keys.reservations(node)
        return ops.cas(key, encode(NodeReservations(dict(pods))), index) if pods else ops.delete_cas(key, index)

    async def change(self, change: Callable[[Draft], T]) -> T:
        """Commit the edits of `change` and return its result. It must not edit more than `PAIRS_PER_CHANGE` pairs.

        Raises the last `TxnConflict` after `ATTEMPTS` conflicts, and the store's errors. If cancelled, or without an
        answer from the store, it may have been committed.
        """
        waiting = _Waiting(change)
        self._waiting[waiting] = None
        try:
            async with self._turn:
                backoff = Backoff(FIRST_PAUSE, MAX_PAUSE, rng=self._rng, spread=(0.0, 1.0))
                while not waiting.result:
                    try:
                        await self._commit_group()
                    except TxnConflict:
                        pause = backoff.pause()
                        if backoff.failures == ATTEMPTS:
                            raise
                        await asyncio.sleep(pause)
        finally:
            self._waiting.pop(waiting, None)
        return waiting.result[0]

    async def _commit_group(self) -> None:
        """Try the waiting changes, oldest first, on one draft, as many as fit a transaction, and commit it."""
        draft, group = Draft(self), list[tuple[_Waiting[Any], Any]]()
        for waiting in list(self._waiting):
            await give_way()
            if waiting not in self._waiting:  # cancelled since
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
            # Note the guards that failed, and read the records that other processes changed.
            failed = [writing[failure.op_index] for failure in conflict.failures]
            blocked = frozenset(op.key for op in failed if op.verb not in ("cas", "delete-cas"))
            for waiting, _ in group:
                waiting.blocked |= blocked
            for op in failed:
                if op.verb in ("cas", "delete-cas"):
                    await self.view.refresh_key(op.key)
            raise
        self.view.apply(outcome, writing)
        for waiting, result in group:
            waiting.result.append(result)
            self._waiting.pop(waiting, None)

    def _decode(self, key: str, value: bytes) -> NodeReservations:
        if not is_node_name(self._keys.name_of(key)):
            raise BadRecord(key, "not named after a node")
        return decode(NodeReservations, key, value)

    def _index(self, changes: list[Change[NodeReservations]]) -> None:
        self.version += 1
        for key, old, new, _ in changes:
            if new is None or (old is not None and not old.value.pods.items() <= new.value.pods.items()):
                self.freed += 1
            node = self._keys.name_of(key)
            for pod_id in old.value.pods if old else ():
                nodes = self._nodes_by_pod[pod_id]
                nodes.discard(node)
                if not nodes:
                    del self._nodes_by_pod[pod_id]
            for pod_id in new.value.pods if new else ():
                self._nodes_by_pod.setdefault(pod_id, set()).add(node)
            if new:
                self._pods[node] = new.value.pods
                self._used[node] = total(held.request for held in new.value.pods.values())
            else:
                self._pods.pop(node, None)
                self._used.pop(node, None)


def chunked(items: Iterable[T]) -> Iterator[list[T]]:
    """Yield the items in lists of at most `PAIRS_PER_CHANGE`."""
    remaining = iter(items)
    while chunk := list(islice(remaining, PAIRS_PER_CHANGE)):
        yield chunk
