"""The writer of one RC: turns a plan into operations, and commits them in fenced units.

Each unit begins with `check-session` on the RC's ownership lock: the fence. The store refuses the whole unit when
another farm owns the RC, however long this process was paused in between. A unit that removes or rewrites anything also
checks that the spec has not changed since the plan; one that removes, that no farm holds the brake.

What was committed is shown to the views at once, with the RC's id as its origin. After a refusal the refused keys are
read again, so that the next plan knows what was in the way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rcfarm.farm.context import Tools
from rcfarm.farm.planner import Plan, Transfer
from rcfarm.farm.shard import RC
from store.kv import ops
from store.kv.protocol import MAX_TXN_OPS, Op, OpFailure, OwnershipLost, TxnConflict
from store.kv.view import Record
from store.schema import audit
from store.schema.records import (
    POD_ID_LABEL,
    RC_ID_LABEL,
    Intent,
    Labels,
    Mutation,
    RCSpec,
    RCState,
    RCStatus,
    Reason,
    encode,
    utc_now,
)

NODES_IN_AUDIT = 100  # nodes named in an event at most


@dataclass(slots=True)
class _Unit:
    """Operations on a few nodes that must be applied together, and their effect, for the audit log."""

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
        units = self._units(spec.value, pod_id, decision)
        head = [self._fence()]
        if any(unit.removed or not unit.added for unit in units):
            head.append(ops.check_index(self._keys.spec(self._state.id), spec.modify_index))
        if any(unit.removed for unit in units):
            head.append(ops.check_not_exists(self._keys.brake))
        chunks = _chunks(units, MAX_TXN_OPS - len(head) - 2)
        closing = [self._status_op(status)] if status else []
        together = closing if len(chunks) == 1 else []
        nodes = sorted(placed)
        writings = [
            [*head, *(op for unit in chunk for op in unit.ops), self._event(spec.value, chunk, nodes), *together]
            for chunk in chunks
        ]
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

    def _units(self, spec: RCSpec, pod_id: str, decision: Plan) -> list[_Unit]:
        units = [_Unit(self._place(spec, pod_id, node), added=[node]) for node in decision.add]
        units += [_Unit(self._take_up(spec, pod_id, node), added=[node]) for node in decision.adopt]
        units += [_Unit(self._unplace(node, pod_id), removed=[node]) for node in decision.remove]
        units += [_Unit([self._rewrite(spec, pod_id, node)]) for node in decision.repair]
        if decision.transfer and decision.transfer.new_node:
            units.append(self._swap(spec, pod_id, decision.transfer, decision.transfer.new_node))
        return units

    def _swap(self, spec: RCSpec, pod_id: str, transfer: Transfer, new_node: str) -> _Unit:
        """Move one pod, under the mutation lock, which is taken and released in the same transaction."""
        key = self._keys.mutation(spec.id)
        holder = Mutation(self._tools.farm, f"moves a pod off {transfer.old_node}", utc_now())
        return _Unit(
            [
                ops.lock(key, encode(holder), self._session),
                *self._unplace(transfer.old_node, pod_id),
                *self._place(spec, pod_id, new_node),
                ops.delete(key),
            ],
            added=[new_node],
            removed=[transfer.old_node],
        )

    def _place(self, spec: RCSpec, pod_id: str, node: str) -> list[Op]:
        labels = _pod_labels(spec, pod_id)
        return [
            ops.create(self._keys.pod(spec.id, node), encode(labels)),
            ops.create(self._keys.intent(node, pod_id), encode(self._intent(spec, labels))),
        ]

    def _take_up(self, spec: RCSpec, pod_id: str, node: str) -> list[Op]:
        """Write the placement of a running pod; its intent stays unchanged, so that the agent has nothing to do."""
        index, _ = self._intent_at(node, pod_id)
        return [
            ops.create(self._keys.pod(spec.id, node), encode(_pod_labels(spec, pod_id))),
            ops.check_index(self._keys.intent(node, pod_id), index),
        ]

    def _unplace(self, node: str, pod_id: str) -> list[Op]:
        """Remove a placement with its intent; an intent that belongs to another RC now is left unchanged."""
        pod_id = self._state.pod_id_on(node) or pod_id
        removing = [ops.delete(self._keys.pod(self._state.id, node))]
        index, is_ours = self._intent_at(node, pod_id)
        if index:
            act = ops.delete_cas if is_ours else ops.check_index
            removing.append(act(self._keys.intent(node, pod_id), index))
        return removing

    def _rewrite(self, spec: RCSpec, pod_id: str, node: str) -> Op:
        index, is_ours = self._intent_at(node, pod_id)
        value = encode(self._intent(spec, _pod_labels(spec, pod_id)))
        return ops.cas(self._keys.intent(node, pod_id), value, index if is_ours else 0)

    def _intent_at(self, node: str, pod_id: str) -> tuple[int, bool]:
        """Return the index of an intent (0: there is none), and whether this RC may change it.

        Called only for this RC's placements, so an undecodable intent was this RC's, too.
        """
        index = self._tools.intents.view.bad_index(self._keys.intent(node, pod_id))
        intent = self._tools.intents.of(pod_id).get(node)
        if index or intent is None:
            return index, True
        return intent.modify_index, intent.value.rc == self._state.id

    def _intent(self, spec: RCSpec, labels: Labels) -> Intent:
        return Intent(manifest=spec.manifest, rc=spec.id, shard=self._state.shard.name, token=self.token, labels=labels)

    def _event(self, spec: RCSpec, units: list[_Unit], placed: list[str]) -> Op:
        added = [node for unit in units for node in unit.added]
        removed = [node for unit in units for node in unit.removed]
        details: dict[str, Any] = {"rc": spec.id, "token": self.token}
        if added or removed:
            details |= {"added": added, "removed": removed, "nodes": placed[:NODES_IN_AUDIT], "node_count": len(placed)}
            event = "REPLICATION_CONTROLLER_RETARGET"
        else:
            details |= {"manifest": spec.manifest, "intents": sum(len(unit.ops) for unit in units)}
            event = "REPLICATION_CONTROLLER_REPAIR"
        return audit.event_op(self._keys, event, details, actor=self._tools.farm)

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


def _pod_labels(spec: RCSpec, pod_id: str) -> Labels:
    return {**spec.pod_labels, POD_ID_LABEL: pod_id, RC_ID_LABEL: spec.id}


def _chunks(units: list[_Unit], room: int) -> list[list[_Unit]]:
    """Split into runs of units whose operations fit into `room`."""
    chunks: list[list[_Unit]] = []
    left = 0
    for unit in units:
        if len(unit.ops) > left:
            chunks.append([])
            left = room
        chunks[-1].append(unit)
        left -= len(unit.ops)
    return chunks
