"""The writer of one RC turns a plan into operations; group commit sends the writes of several RCs together.

The model: a *unit* is a write for one RC of at most 64 operations, and it is applied whole or not at all. It begins
with `check-session` on the RC's ownership lock: the fence. The store refuses the unit when another farm owns the RC,
however long this process was paused in between. A unit that removes or rewrites anything also checks that the spec has
not changed since the plan; one that removes, that no farm holds the brake.

Waiting units are packed, oldest first, into transactions, of which a few are in flight at once. The store refuses a
transaction as a whole; then only the units whose own operations failed get the error, and the others are sent again
without them, so that one RC's conflict never delays another for longer than one round trip.

What was committed is shown to the views at once, with the RC's id as its origin. After a refusal the refused keys are
read again, so that the next plan knows what was in the way. If the answer is lost (`Unavailable`), it is unknown
whether the unit was applied: its writer reads again before it decides.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from rcfarm.farm.manifests import Manifests
from rcfarm.farm.planner import Plan
from rcfarm.farm.shard import RC, Intents
from scheduler.protocol import Absence, Scheduler
from store.kv import ops
from store.kv.protocol import (
    MAX_TXN_OPS,
    Op,
    OpFailure,
    OwnershipLost,
    Store,
    StoreError,
    TooLarge,
    TxnConflict,
    TxnResult,
    Unavailable,
)
from store.kv.view import Record
from store.schema import audit
from store.schema.keys import Keys
from store.schema.records import (
    POD_ID_LABEL,
    RC_ID_LABEL,
    Intent,
    Mutation,
    RCSpec,
    RCState,
    RCStatus,
    Reason,
    encode,
    utc_now,
)

T = TypeVar("T")

NODES_IN_AUDIT = 100  # nodes named in an event at most
MAX_TXN_BYTES = 320 * 1024  # of values; base64 and the operations' own text must fit into the store's 512 KiB, too
_UNANSWERED = frozenset({"delete", "delete-cas", "delete-tree"})  # verbs without an entry in the answer


def packed(things: Iterable[T], room: int, size: Callable[[T], int]) -> list[list[T]]:
    """Return the things in order, in runs whose sizes fit into `room`."""
    runs: list[list[T]] = []
    left = 0
    for thing in things:
        if size(thing) > left:
            runs.append([])
            left = room
        runs[-1].append(thing)
        left -= size(thing)
    return runs


@dataclass(slots=True, eq=False)
class _Unit:
    ops: list[Op]
    size: int
    done: asyncio.Future[TxnResult]
    alone: bool = False


class GroupCommit:
    """Merges units into transactions. `run()` must be running for `commit` to answer.

    `concurrency`: transactions in flight at once. `conflicts`, `transactions`, `units` count since the start.
    """

    def __init__(self, store: Store, *, concurrency: int = 12) -> None:
        self.conflicts = self.transactions = self.units = 0
        self._store = store
        self._concurrency = concurrency
        self._waiting: deque[_Unit] = deque()
        self._wake = asyncio.Event()

    async def commit(self, ops: Sequence[Op]) -> TxnResult:
        """Apply one unit, of writes and checks but no reads. Raises what `Store.txn` raises; the operation indexes of a
        conflict are those of the unit."""
        if len(ops) > MAX_TXN_OPS:
            raise TooLarge(f"a unit of {len(ops)} operations; a transaction takes {MAX_TXN_OPS}")
        unit = _Unit(list(ops), sum(len(op.value) for op in ops), asyncio.get_running_loop().create_future())
        self._waiting.append(unit)
        self._wake.set()
        return await unit.done

    async def run(self) -> None:
        """Send the waiting units, until cancelled; unanswered units are then cancelled."""
        slots = asyncio.Semaphore(self._concurrency)
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    await self._wake.wait()
                    await slots.acquire()
                    # One turn of the loop lets units that become ready together share a transaction.
                    await asyncio.sleep(0)
                    batch = self._pack()
                    if not batch:
                        slots.release()
                        continue
                    group.create_task(self._send(batch)).add_done_callback(lambda _: slots.release())
        finally:
            while self._waiting:
                self._waiting.popleft().done.cancel()

    def _pack(self) -> list[_Unit]:
        batch: list[_Unit] = []
        count = size = 0
        while self._waiting:
            unit = self._waiting[0]
            full = count + len(unit.ops) > MAX_TXN_OPS or size + unit.size > MAX_TXN_BYTES
            if batch and (full or unit.alone or batch[-1].alone):
                break
            self._waiting.popleft()
            if unit.done.cancelled():
                continue
            batch.append(unit)
            count += len(unit.ops)
            size += unit.size
        if not self._waiting:
            self._wake.clear()
        return batch

    async def _send(self, batch: list[_Unit]) -> None:
        self.transactions += 1
        try:
            result = await self._store.txn([op for unit in batch for op in unit.ops])
        except TxnConflict as conflict:
            self._refused(batch, conflict)
        except StoreError as error:
            self._failed(batch, error)
        except asyncio.CancelledError:
            for unit in batch:
                unit.done.cancel()
            raise
        else:
            self.units += len(batch)
            answers = {entry.key: entry for entry in result.entries}
            for unit in batch:
                if not unit.done.done():
                    entries = [answers[op.key] for op in unit.ops if op.key in answers and op.verb not in _UNANSWERED]
                    unit.done.set_result(TxnResult(entries, result.index))

    def _refused(self, batch: list[_Unit], conflict: TxnConflict) -> None:
        """Fail the units whose operations failed; send the others again, first in line."""
        self.conflicts += 1
        innocent: list[_Unit] = []
        start = 0
        for unit in batch:
            end = start + len(unit.ops)
            failures = [OpFailure(i - start, reason) for i, reason in conflict.failures if start <= i < end]
            start = end
            if not failures:
                innocent.append(unit)
            elif not unit.done.done():
                lost = any(unit.ops[failure.op_index].verb == "check-session" for failure in failures)
                unit.done.set_exception((OwnershipLost if lost else TxnConflict)(failures))
        if len(innocent) == len(batch):
            self._failed(batch, conflict)
        else:
            self._again(innocent)

    def _failed(self, batch: list[_Unit], error: StoreError) -> None:
        """Handle an error of the whole transaction: unless the store is unavailable, try each unit alone to find the
        cause."""
        if len(batch) > 1 and not isinstance(error, Unavailable):
            for unit in batch:
                unit.alone = True
            self._again(batch)
            return
        for unit in batch:
            if not unit.done.done():
                unit.done.set_exception(error)

    def _again(self, units: list[_Unit]) -> None:
        self._waiting.extendleft(reversed(units))
        self._wake.set()


@dataclass(frozen=True, slots=True)
class Tools:
    """Shared by all RCs of a farm. `hold()` returns why nothing may be removed, or ""; `absence(node)` since when the
    node is dead, or None.
    """

    store: Store
    keys: Keys
    farm: str
    scheduler: Scheduler
    manifests: Manifests
    intents: Intents
    commits: GroupCommit
    hold: Callable[[], str] = lambda: ""
    absence: Callable[[str], Absence | None] = lambda node: None


@dataclass(slots=True)
class _Step:
    """A step of a plan: operations that must be applied together, and their effect, for the audit log."""

    ops: list[Op]
    added: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)


class Writer:
    """Writes for one owned RC. `session` holds its lock; `held()` returns whether the session is still safe to act
    under. Every method that commits raises what `GroupCommit.commit` raises."""

    __slots__ = ("_held", "_keys", "_session", "_state", "_tools")

    def __init__(self, state: RC, tools: Tools, session: str, held: Callable[[], bool]) -> None:
        self._state, self._tools, self._keys = state, tools, tools.keys
        self._session, self._held = session, held

    @property
    def token(self) -> int:
        """The fencing token: how often the RC's lock was acquired."""
        return self._state.owner.lock_index if self._state.owner else 0

    def status(
        self,
        state: RCState,
        spec: RCSpec | None,
        *,
        desired: int,
        placed: int,
        healthy: int,
        reasons: Iterable[Reason],
        completed: int = 0,
    ) -> RCStatus | None:
        """Return the status to write, or None when the stored one is equal."""
        status = RCStatus(
            state=state,
            generation=spec.generation if spec else 0,
            desired=desired,
            placed=placed,
            healthy=healthy,
            farm=self._tools.farm,
            token=self.token,
            reasons=tuple(reasons),
            completed=completed,
        )
        standing = self._state.status
        if standing and msgspec.structs.replace(standing.value, updated_at="") == status:
            return None
        return msgspec.structs.replace(status, updated_at=utc_now())

    async def write_status(self, status: RCStatus) -> None:
        """Write only the status."""
        await self._commit([self._fence(), self._status_op(status)])

    async def write_plan(
        self, spec: Record[RCSpec], pod_id: str, decision: Plan, placed: Collection[str], status: RCStatus | None
    ) -> None:
        """Commit the plan, in several transactions if needed; the status is written with a single one, else last.

        `spec`: the one that was planned for. `placed`: the nodes with a pod afterwards.
        """
        steps = self._steps(spec.value, pod_id, decision)
        head = [self._fence()]
        if any(step.removed or not step.added for step in steps):
            head.append(ops.check_index(self._keys.spec(self._state.id), spec.modify_index))
        if any(step.removed for step in steps):
            head.append(ops.check_not_exists(self._keys.brake))
        chunks = packed(steps, MAX_TXN_OPS - len(head) - 2, lambda step: len(step.ops))
        closing = [self._status_op(status)] if status else []
        together = closing if len(chunks) == 1 else []
        nodes = sorted(placed)
        writings = []
        for chunk in chunks:
            added = [node for step in chunk for node in step.added]
            removed = [node for step in chunk for node in step.removed]
            details: dict[str, Any] = {"rc": self._state.id, "token": self.token}
            if added or removed:
                event = "REPLICATION_CONTROLLER_RETARGET"
                shown, count = nodes[:NODES_IN_AUDIT], len(nodes)
                details |= {"added": added, "removed": removed, "nodes": shown, "node_count": count}
            else:
                event = "REPLICATION_CONTROLLER_REPAIR"
                details |= {"manifest": spec.value.manifest, "intents": sum(len(step.ops) for step in chunk)}
            entry = audit.event_op(self._keys, event, details, actor=self._tools.farm)
            writings.append([*head, *(op for step in chunk for op in step.ops), entry, *together])
        outcomes = await asyncio.gather(*(self._commit(writing) for writing in writings), return_exceptions=True)
        for outcome in outcomes:
            if outcome is not None:
                raise outcome
        if closing and not together:
            await self._commit([self._fence(), *closing])

    async def remove_folder(self, spec: Record[RCSpec]) -> None:
        """Remove the folder of an RC without pods, and the health records of dead agents; live agents remove their
        own."""
        rc_id = self._state.id
        verdicts = self._state.shard.health.of(rc_id).items()
        stale = [ops.delete(self._keys.health(rc_id, node)) for node, health in verdicts if not health.session]
        for start in range(0, len(stale), MAX_TXN_OPS - 1):
            await self._commit([self._fence(), *stale[start : start + MAX_TXN_OPS - 1]])
        details = {"rc": rc_id, "token": self.token}
        await self._commit(
            [
                self._fence(),
                ops.check_index(self._keys.spec(rc_id), spec.modify_index),
                ops.check_not_exists(self._keys.brake),
                ops.delete_tree(self._keys.rc(rc_id)),
                audit.event_op(self._keys, "REPLICATION_CONTROLLER_DELETED", details, actor=self._tools.farm),
            ]
        )

    async def clear(self) -> None:
        """Remove the rest of an RC without spec and pods."""
        without_spec = ops.check_not_exists(self._keys.spec(self._state.id))
        await self._commit([self._fence(), without_spec, ops.delete_tree(self._keys.rc(self._state.id))])

    def _steps(self, spec: RCSpec, pod_id: str, decision: Plan) -> list[_Step]:
        keys, rc_id = self._keys, self._state.id
        labels = {**spec.pod_labels, POD_ID_LABEL: pod_id, RC_ID_LABEL: rc_id}
        shard = self._state.shard.name
        intent = Intent(manifest=spec.manifest, rc=rc_id, shard=shard, token=self.token, labels=labels)
        placement_value, intent_value = encode(labels), encode(intent)  # equal on all nodes

        def place(node: str) -> list[Op]:
            placing = ops.create(keys.pod(rc_id, node), placement_value)
            return [placing, ops.create(keys.intent(node, pod_id), intent_value)]

        steps = [_Step(place(node), added=[node]) for node in decision.add]
        for node in decision.adopt:  # its intent stays unchanged, so that the agent has nothing to do
            placing = ops.create(keys.pod(rc_id, node), placement_value)
            index, _ = self._intent_at(node, pod_id)
            steps.append(_Step([placing, ops.check_index(keys.intent(node, pod_id), index)], added=[node]))
        steps += [_Step(self._unplace(node, pod_id), removed=[node]) for node in decision.remove]
        for node in decision.repair:
            index, is_ours = self._intent_at(node, pod_id)
            steps.append(_Step([ops.cas(keys.intent(node, pod_id), intent_value, index if is_ours else 0)]))
        if decision.transfer and decision.transfer.new_node:
            old, new = decision.transfer.old_node, decision.transfer.new_node
            holder = encode(Mutation(self._tools.farm, f"moves a pod off {old}", utc_now()))
            locking = ops.lock(keys.mutation(rc_id), holder, self._session)  # released in the same transaction
            moving = [locking, *self._unplace(old, pod_id), *place(new), ops.delete(keys.mutation(rc_id))]
            steps.append(_Step(moving, added=[new], removed=[old]))
        return steps

    def _unplace(self, node: str, pod_id: str) -> list[Op]:
        """Remove a placement with its intent; an intent that belongs to another RC now is left unchanged."""
        pod_id = self._state.pod_id_on(node) or pod_id
        removing = [ops.delete(self._keys.pod(self._state.id, node))]
        index, is_ours = self._intent_at(node, pod_id)
        if index:
            act = ops.delete_cas if is_ours else ops.check_index
            removing.append(act(self._keys.intent(node, pod_id), index))
        return removing

    def _intent_at(self, node: str, pod_id: str) -> tuple[int, bool]:
        """Return the index of an intent (0: there is none), and whether this RC may change it.

        Called only for this RC's placements, so an undecodable intent was this RC's, too.
        """
        index = self._tools.intents.view.bad_index(self._keys.intent(node, pod_id))
        intent = self._tools.intents.of(pod_id).get(node)
        if index or intent is None:
            return index, True
        return intent.modify_index, intent.value.rc == self._state.id

    def _status_op(self, status: RCStatus) -> Op:
        return ops.put(self._keys.status(self._state.id), encode(status))

    def _fence(self) -> Op:
        return ops.check_session(self._keys.owner(self._state.id), self._session)

    async def _commit(self, writing: list[Op]) -> None:
        """Commit one unit and show it to the views. After a refusal, read the refused keys before raising it."""
        if not self._held():
            raise OwnershipLost([OpFailure(0, "our lease may have ended")])
        views = self._state.shard.view, self._tools.intents.view
        try:
            result = await self._tools.commits.commit(writing)
        except OwnershipLost:
            raise
        except TxnConflict as conflict:
            for key in [writing[failure.op_index].key for failure in conflict.failures]:
                for view in views:
                    if key.startswith(view.prefix):
                        await view.refresh_key(key)
            raise
        for view in views:
            view.apply(result, writing, origin=self._state.id)
