"""The writer of one RC turns a plan into operations, which group commit sends together with those of other RCs.

The model: a *unit* (`store.kv.group_commit`) begins with `check-session` on the RC's ownership lock: the fence. The
store refuses the unit when another farm owns the RC, however long this process was paused in between. A unit that
removes or rewrites anything also checks that the spec has not changed since the plan; one that removes, that no farm
holds the brake.

What was committed is shown to the views at once, with the RC's id as its origin. After a refusal the refused keys are
read again, so that the next plan knows what was in the way. If the answer is lost (`Unavailable`), it is unknown
whether the unit was applied: its writer reads again before it decides.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec

from rcfarm.farm.analysis import Analyses
from rcfarm.farm.manifests import Manifests
from rcfarm.farm.planner import Plan
from rcfarm.farm.shard import RC, Intents
from scheduler.label import LabelScheduler
from scheduler.protocol import Absence, Scheduler
from store.kv import ops
from store.kv.group_commit import GroupCommit, packed
from store.kv.protocol import MAX_TXN_OPS, Op, OpFailure, OwnershipLost, Store, TxnConflict
from store.kv.view import Record
from store.schema import audit
from store.schema.keys import Keys
from store.schema.records import (
    POD_ID_LABEL,
    RC_ID_LABEL,
    DeletedRC,
    Intent,
    Mutation,
    NodeTransfer,
    RCSpec,
    RCState,
    RCStatus,
    Reason,
    Rollout,
    encode,
    proven_manifest,
    rfc3339,
    utc_now,
)

if TYPE_CHECKING:
    from rcfarm.farm.decision_log import DecisionLog

NODES_IN_AUDIT = 100  # nodes named in an event at most


@dataclass(frozen=True, slots=True)
class Tools:
    """Shared by all RCs of a farm. `by_label` knows the nodes, for daemon sets. `hold()` returns why nothing may be
    removed, or ""; `absence(node)` since when the node is dead, or None; `now()` the wall clock's time, in Unix
    seconds. `analyses` runs those of rollouts; None: they are not run, and rollouts that have some wait for them.
    `decisions`: None: they are not logged. `keep_deleted_for`: seconds for which a deleted RC is kept; 0: for ever.
    """

    store: Store
    keys: Keys
    farm: str
    scheduler: Scheduler
    by_label: LabelScheduler
    manifests: Manifests
    intents: Intents
    commits: GroupCommit
    hold: Callable[[], str] = lambda: ""
    now: Callable[[], float] = time.time
    absence: Callable[[str], Absence | None] = lambda node: None
    analyses: Analyses | None = None
    decisions: DecisionLog | None = None
    keep_deleted_for: float = 0.0


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
        node_transfer: NodeTransfer | None = None,
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
            node_transfer=node_transfer,
            completed=completed,
        )
        standing = self._state.status
        if standing and msgspec.structs.replace(standing.value, updated_at="") == status:
            return None
        return msgspec.structs.replace(status, updated_at=utc_now())

    async def write_status(self, status: RCStatus) -> None:
        """Write only the status."""
        op = self._status_op(status)
        await self._commit([self._fence(), op], {op.value: status})

    async def write_plan(
        self,
        spec: Record[RCSpec],
        pod_id: str,
        decision: Plan,
        placed: Collection[str],
        status: RCStatus | None,
        logged: str = "",
    ) -> int:
        """Commit the plan, in several transactions if needed; the status is written with a single one, else last. The
        record of the rollout is written before any step that relies on it. Return the index of the last transaction, 0
        if there was none.

        `spec`: the one that was planned for. `placed`: the nodes with a pod afterwards. `logged`: the decision's id in
        the decision log, which the events name; "": it is not logged.
        """
        index = 0
        steps, known = self._steps(spec.value, pod_id, decision)
        head = [self._fence()]
        removes = decision.remove or (decision.transfer and decision.transfer.new_node)
        if removes or decision.repair or decision.update or decision.rolled.record:
            head.append(ops.check_index(self._keys.spec(self._state.id), spec.modify_index))
        if removes:
            head.append(ops.check_not_exists(self._keys.brake))
        chunks = packed(steps, MAX_TXN_OPS - len(head) - 4, lambda step: len(step.ops))
        closing = [self._status_op(status)] if status else []
        known |= {op.value: status for op in closing}
        together = closing if len(chunks) == 1 else []
        recording = self._rollout_ops(decision.rolled.record, known, logged)
        if len(chunks) == 1:
            together = [*recording, *together]
        elif recording:
            rest = closing if not chunks else []
            index = await self._commit([*head, *recording, *rest], known)
            closing = closing if chunks else []
        shown = sorted(placed)[:NODES_IN_AUDIT]
        writings = []
        for chunk in chunks:
            added = [node for step in chunk for node in step.added]
            removed = [node for step in chunk for node in step.removed]
            details: dict[str, Any] = {"rc": self._state.id, "token": self.token}
            if added or removed:
                event = "REPLICATION_CONTROLLER_RETARGET"
                details |= {"added": added, "removed": removed, "nodes": shown, "node_count": len(placed)}
            else:
                event = "REPLICATION_CONTROLLER_REPAIR"
                details |= {"manifest": spec.value.manifest, "intents": sum(len(step.ops) for step in chunk)}
                if decision.update:
                    details |= {"manifest": decision.rolled.target, "nodes": list(decision.update[:NODES_IN_AUDIT])}
            details |= {"decision": logged} if logged else {}
            entry = audit.event_op(self._keys, event, details, actor=self._tools.farm)
            writings.append([*head, *(op for step in chunk for op in step.ops), entry, *together])
        if len(writings) == 1:  # nearly always: no task of its own
            index = await self._commit(writings[0], known)
        else:
            commits = (self._commit(writing, known) for writing in writings)
            for outcome in await asyncio.gather(*commits, return_exceptions=True):
                if isinstance(outcome, BaseException):
                    raise outcome
                index = max(index, outcome)
        if closing and len(chunks) != 1:
            index = await self._commit([self._fence(), *closing], known)
        return index

    async def apply(self, writing: list[Op]) -> None:
        """Commit one unit of another module, behind the fence, and show it to the views."""
        await self._commit([self._fence(), *writing])

    async def remove_folder(self, spec: Record[RCSpec], logged: str = "") -> None:
        """Remove the folder of an RC without pods, and the health records of dead agents; live agents remove their
        own. What the RC was is kept, in the same transaction. `logged`: see `write_plan`."""
        rc_id = self._state.id
        verdicts = self._state.shard.health.of(rc_id).items()
        stale = [ops.delete(self._keys.health(rc_id, node)) for node, health in verdicts if not health.session]
        for start in range(0, len(stale), MAX_TXN_OPS - 1):
            await self._commit([self._fence(), *stale[start : start + MAX_TXN_OPS - 1]])
        details: dict[str, Any] = {"rc": rc_id, "token": self.token} | ({"decision": logged} if logged else {})
        await self._commit(
            [
                self._fence(),
                ops.check_index(self._keys.spec(rc_id), spec.modify_index),
                ops.check_not_exists(self._keys.brake),
                ops.put(self._keys.deleted_rc(rc_id), encode(self._deleted(spec.value))),
                ops.delete_tree(self._keys.rc(rc_id)),
                audit.event_op(self._keys, "REPLICATION_CONTROLLER_DELETED", details, actor=self._tools.farm),
            ]
        )

    def _deleted(self, spec: RCSpec) -> DeletedRC:
        now, rollout = datetime.fromtimestamp(self._tools.now(), UTC), self._state.rollout
        lasts = self._tools.keep_deleted_for
        return DeletedRC(
            spec=spec,
            manifest=proven_manifest(spec, rollout.value if rollout else None),
            farm=self._tools.farm,
            deleted_at=rfc3339(now),
            until=rfc3339(now + timedelta(seconds=lasts)) if lasts else "",
        )

    async def clear(self) -> None:
        """Remove the rest of an RC without spec and pods."""
        without_spec = ops.check_not_exists(self._keys.spec(self._state.id))
        await self._commit([self._fence(), without_spec, ops.delete_tree(self._keys.rc(self._state.id))])

    def _steps(self, spec: RCSpec, pod_id: str, decision: Plan) -> tuple[list[_Step], dict[bytes, Any]]:
        """Return the steps, and the records that they write to several nodes, by their encoded values."""
        keys, rc_id = self._keys, self._state.id
        labels = {**spec.pod_labels, POD_ID_LABEL: pod_id, RC_ID_LABEL: rc_id}
        shard, rolled = self._state.shard.name, decision.rolled
        base = Intent(manifest=rolled.base, rc=rc_id, shard=shard, token=self.token, labels=labels)
        target = msgspec.structs.replace(base, manifest=rolled.target)
        placement_value, base_value, target_value = encode(labels), encode(base), encode(target)  # equal on all nodes

        def place(node: str, intent_value: bytes = base_value) -> list[Op]:
            placing = ops.create(keys.pod(rc_id, node), placement_value)
            return [placing, ops.create(keys.intent(node, pod_id), intent_value)]

        def rewrite(node: str, intent_value: bytes) -> _Step:
            index, is_ours = self._intent_at(node, pod_id)
            return _Step([ops.cas(keys.intent(node, pod_id), intent_value, index if is_ours else 0)])

        steps = [_Step(place(node), added=[node]) for node in decision.add]
        steps += [_Step(place(node, target_value), added=[node]) for node in decision.surge]
        for node in decision.adopt:  # its intent stays unchanged, so that the agent has nothing to do
            placing = ops.create(keys.pod(rc_id, node), placement_value)
            index, _ = self._intent_at(node, pod_id)
            steps.append(_Step([placing, ops.check_index(keys.intent(node, pod_id), index)], added=[node]))
        steps += [_Step(self._unplace(node, pod_id), removed=[node]) for node in decision.remove]
        steps += [rewrite(node, base_value) for node in decision.repair]
        steps += [rewrite(node, target_value) for node in decision.update]
        if decision.transfer and decision.transfer.new_node:
            old, new = decision.transfer.old_node, decision.transfer.new_node
            holder = encode(Mutation(self._tools.farm, f"moves a pod off {old}", utc_now()))
            locking = ops.lock(keys.mutation(rc_id), holder, self._session)  # released in the same transaction
            stage = decision.transfer.stage
            added = [new] if stage in ("move", "start") else []
            removed = {"move": [old], "complete": [old], "rollback": [new], "start": []}[stage]
            moving = [ops.check_not_exists(keys.lock(rc_id)), locking]
            moving += [op for node in removed for op in self._unplace(node, pod_id)]
            moving += [op for node in added for op in place(node)]
            moving += [ops.delete(keys.mutation(rc_id)), self._transfer_event(decision)]
            steps.append(_Step(moving, added=added, removed=removed))
        return steps, {placement_value: labels, base_value: base, target_value: target}

    def _transfer_event(self, decision: Plan) -> Op:
        """Return the operation that records a step of a node transfer, in p2's words."""
        transfer, known = decision.transfer, decision.moving
        assert transfer is not None
        standing = self._state.status.value.node_transfer if self._state.status else None
        words = {"start": "START", "move": "COMPLETION", "complete": "COMPLETION", "rollback": "ROLLBACK"}
        details: dict[str, Any] = {"rc": self._state.id, "token": self.token}
        details |= {"old_node": transfer.old_node, "new_node": transfer.new_node}
        if one := known or (standing if transfer.stage in ("complete", "rollback") else None):
            details["id"] = one.id
        event = f"NODE_TRANSFER_{words[transfer.stage]}"
        return audit.event_op(self._keys, event, details, actor=self._tools.farm)

    def _rollout_ops(self, record: Rollout | None, known: dict[bytes, Any], logged: str) -> list[Op]:
        """Return the operations that write a rollout's record, and an event if its state is another one."""
        if record is None:
            return []
        writing = ops.put(self._keys.rollout(self._state.id), encode(record))
        known[writing.value] = record
        last = self._state.rollout.value if self._state.rollout else None
        if last is not None and (last.revision, last.manifest, last.state) == (
            record.revision,
            record.manifest,
            record.state,
        ):
            return [writing]
        details: dict[str, Any] = {
            "rc": self._state.id,
            "token": self.token,
            "revision": record.revision,
            "manifest": record.manifest,
            "state": record.state,
        }
        if record.reason:
            details["reason"] = record.reason.message
        details |= {"decision": logged} if logged else {}
        event = audit.event_op(self._keys, "REPLICATION_CONTROLLER_ROLLOUT", details, actor=self._tools.farm)
        return [writing, event]

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

    async def _commit(self, writing: list[Op], known: Mapping[bytes, Any] = MappingProxyType({})) -> int:
        """Commit one unit and show it to the views, which need not decode the values in `known`. Return the index of
        its transaction. After a refusal, read the refused keys before raising it."""
        if not self._held():
            raise OwnershipLost([OpFailure(0, "our lease may have ended")])
        views = self._state.shard.view, self._tools.intents.view
        try:
            result = await self._tools.commits.commit(writing)
        except OwnershipLost:
            raise
        except TxnConflict as conflict:
            refused = [writing[failure.op_index].key for failure in conflict.failures]
            for key in refused:
                for view in views:
                    if key.startswith(view.prefix):
                        await view.refresh_key(key)
            if self._keys.spec(self._state.id) in refused:  # pods may have passed to another RC together with it
                shown = {self._keys.pod(self._state.id, node) for node in self._state.pods}
                there = {*await self._tools.store.keys(self._keys.rc(self._state.id) + "pods/")}
                for key in sorted(shown ^ there):
                    await self._state.shard.view.refresh_key(key)
            raise
        for view in views:
            view.apply(result, writing, self._state.id, known)
        return result.index
