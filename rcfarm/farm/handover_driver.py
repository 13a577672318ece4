"""Carries on the hand-over of an owned RC: reads the other RC, decides (`rcfarm.farm.handover`), and writes.

The model: the owner of the *new* RC acts, as part of that RC's reconcile; the owner of the old one only reports. First
it takes the mutation locks of both RCs under its session, and disables the old one, in one transaction. Then each
transaction moves some placements from one folder to the other, rewrites their intents, and changes both replica counts.
It is refused unless

- this farm's session holds the new RC's owner key, and both mutation locks;
- the old RC's owner key is what it was when the old RC was read;
- both specs, both records and each placement and intent are what they were, and no farm holds the brake.

So a farm that was paused, or that has lost the RC, writes nothing; and one that takes over finds everything in the
store: the record, and each pod with exactly one of the two RCs. A lock that is left by the former owner of the new RC
is replaced, as only the owner of that RC can use it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec

from rcfarm.farm.handover import HandoverInput, HandoverStep, step
from rcfarm.farm.planner import Plan, PlanInput
from rcfarm.farm.rollout import PodClock
from rcfarm.farm.shard import RC
from rcfarm.farm.writer import NODES_IN_AUDIT, Tools, Writer
from rcfarm.operations import rc_snapshot
from rcfarm.operations.handovers import COMPLETED, events, revised, transfer_replica_counts
from rcfarm.operations.rc_snapshot import RCSnapshot
from rcfarm.operations.rcs import Stored
from store.kv import ops
from store.kv.protocol import BadRecord, Entry, Op
from store.kv.view import Record
from store.schema import audit
from store.schema.records import (
    POD_ID_LABEL,
    RC_ID_LABEL,
    Handover,
    HandoverState,
    Intent,
    Mutation,
    RCSpec,
    RCState,
    Reason,
    decode,
    encode,
    utc_now,
)

_HANDS_OVER = "hands the pods of rc "  # begins the reason of the mutation locks of a hand-over
LOOK_EVERY = 1.0  # seconds between two looks at the old RC, which this farm may not watch


class _Other(NamedTuple):
    """The old RC, read consistently: its records, and every entry of its folder by key."""

    snap: RCSnapshot
    entries: Mapping[str, Entry]

    def version(self, key: str) -> int:
        """Return the modify index of a key, 0 where there is none."""
        return self.entries[key].modify_index if key in self.entries else 0


class HandoverDriver:
    """Of one owned RC. `session` holds its lock."""

    def __init__(self, state: RC, tools: Tools, writer: Writer, session: str) -> None:
        self._state, self._tools, self._keys = state, tools, tools.keys
        self._writer, self._session = writer, session
        self._clock = PodClock()

    @property
    def active(self) -> Record[Handover] | None:
        """The hand-over that the RC is in."""
        record = self._state.handover
        return record if record and record.value.is_active else None

    def shown(self, decision: Plan) -> Plan:
        """Return the plan with what the hand-over waits for, in the status of either RC."""
        if self.active is None:
            return decision
        record = self.active.value
        waits = Reason("handing_over", f"the pods of rc {record.old} are about to pass to rc {record.new}")
        mine = record.reason or waits
        if self._state.id == record.old:
            mine = msgspec.structs.replace(mine, message=f"hands its pods over: rc {record.new} {mine.message}")
        reasons = tuple(reason for reason in decision.reasons if reason.code not in ("disabled", mine.code))
        mine = msgspec.structs.replace(mine, since=mine.since or record.started)
        state: RCState = "progressing" if decision.state in ("converged", "disabled") else decision.state
        return replace(decision, state=state, reasons=(*reasons, mine))

    async def advance(self, spec: Record[RCSpec], pod_id: str, given: PlanInput) -> bool:
        """Take the next step as the new RC's owner. Return whether the RC's pods or its spec have changed. Raises as
        `Writer.apply`, and the store's errors."""
        record = self.active
        if record is None or record.value.new != self._state.id:
            return False
        other = await self._read(record.value.old)
        old = other.snap.spec
        if old is None and self._keys.spec(record.value.old) not in other.snap.bad:
            return await self._end(record, other, "aborted", f"rc {record.value.old} is gone")
        if old is not None and old.deleting:
            return await self._end(record, other, "aborted", f"rc {record.value.old} is being deleted")
        for side in (old, spec.value):
            if side is not None and side.is_daemon_set:  # since it was asked for
                return await self._end(record, other, "aborted", f"rc {side.id} has `replicas: all` now")
        locks = {rc_id: await self._lock(rc_id) for rc_id in (record.value.old, record.value.new)}
        obstacle = self._obstacle(record.value, other, given, locks)
        if obstacle is not None or old is None:
            return await self._note(record, other, obstacle)
        is_ours = all(lock is not None and lock.session == self._session for lock in locks.values())
        if not is_ours or not old.disabled or record.value.state != "running":
            return await self._begin(record, other, old, locks)
        decision = self._decide(record.value, other, pod_id, given)
        if decision.is_done:
            return await self._end(record, other, "done", "")
        if not decision.nodes and decision.replicas == spec.value.replicas_desired:
            return await self._note(record, other, decision.reason)
        return await self._pass_on(record, other, Stored(old, other.snap.spec_index), spec, pod_id, decision)

    async def cancel(self, why: str) -> None:
        """End the hand-over as the new RC's owner, if there is one."""
        if self.active is not None and self.active.value.new == self._state.id:
            await self._end(self.active, await self._read(self.active.value.old), "aborted", why)

    async def release_orphan(self, spec: Record[RCSpec]) -> bool:
        """End the hand-over as the old RC's owner where the new RC does not know of it: it was removed by hand. Return
        whether anything was released."""
        record = self.active
        if record is None:
            return await self._release_lock()
        if record.value.old != self._state.id:
            return False
        entry = await self._tools.store.get(self._keys.handover(record.value.new), consistent=True)
        known = rc_snapshot.snapshot(self._keys, record.value.new, [entry] if entry else []).handover
        if entry is not None and (known is None or (known.is_active and known.old == self._state.id)):
            return False
        ended = self._ended(record.value, "aborted", f"rc {record.value.new} has no record of it any more")
        writing = [ops.cas(self._keys.handover(self._state.id), encode(ended), record.modify_index)]
        writing += revised(self._keys, Stored(spec.value, spec.modify_index), disabled=False)
        lock = await self._lock(self._state.id)
        if lock is not None and self._is_of(record.value, lock):
            writing.append(ops.delete_cas(lock.key, lock.modify_index))
        await self._writer.apply([*writing, *self._completed(ended)])
        return True

    async def _release_lock(self) -> bool:
        """Release the RC's mutation lock if it was taken for a hand-over of which the RC has no record any more. The
        session that holds it is a farm's, and lives on."""
        lock, record, key = self._state.mutation, self._state.handover, self._keys.handover(self._state.id)
        if lock is None or lock.session is None or not lock.value.reason.startswith(_HANDS_OVER):
            return False
        if key in self._state.shard.view.bad:  # it may be the one
            return False
        unchanged = ops.check_index(key, record.modify_index) if record else ops.check_not_exists(key)
        await self._writer.apply([unchanged, ops.delete_cas(self._keys.mutation(self._state.id), lock.modify_index)])
        return True

    async def _read(self, rc_id: str) -> _Other:
        listing = await self._tools.store.list(self._keys.rc(rc_id), consistent=True)
        health = await self._tools.store.list(self._keys.health_of(rc_id), consistent=True)
        snap = rc_snapshot.snapshot(self._keys, rc_id, listing.entries, health.entries)
        return _Other(snap, {entry.key: entry for entry in listing.entries})

    async def _lock(self, rc_id: str) -> Entry | None:
        return await self._tools.store.get(self._keys.mutation(rc_id), consistent=True)

    def _is_of(self, record: Handover, lock: Entry) -> bool:
        """Return whether the mutation lock was taken for this hand-over, by any owner of the new RC."""
        try:
            return decode(Mutation, lock.key, lock.value).reason == _purpose(record)
        except BadRecord:
            return False

    def _obstacle(
        self, record: Handover, other: _Other, given: PlanInput, locks: Mapping[str, Entry | None]
    ) -> Reason | None:
        """Return why nothing can be done now, or None."""
        if given.hold:
            return Reason("held", f"no pod passes from rc {record.old}: {given.hold}")
        if given.spec.disabled:
            return Reason(
                "disabled",
                f"no pod passes from rc {record.old}: rc {record.new} is disabled; `rcfarm rc enable {record.new}`",
            )
        if error := other.snap.bad.get(self._keys.spec(record.old)):
            return Reason("bad_spec", f"the spec of rc {record.old} can't be read: {error.reason}")
        mine = self._state.lock.value if self._state.lock else None
        for rc_id, by_person in ((record.old, other.snap.lock), (record.new, mine)):
            if by_person is not None:
                unlock = f"`rcfarm rc unlock {rc_id}` removes the lock"
                return Reason("transfer_waits_for_lock", f"rc {rc_id} is locked by {by_person.holder}; {unlock}")
        for rc_id, lock in locks.items():
            if lock is not None and lock.session not in (None, self._session) and not self._is_of(record, lock):
                return Reason("transfer_waits_for_lock", f"the mutation lock of rc {rc_id} is held by another program")
        return None

    def _decide(self, record: Handover, other: _Other, pod_id: str, given: PlanInput) -> HandoverStep:
        intents = self._tools.intents.of(pod_id)
        running = {
            node: intent.value.manifest
            for node in other.snap.pods
            if (intent := intents.get(node)) is not None and intent.value.rc == record.old
        }
        old: dict[str, bool | None] = {}
        for node in other.snap.pods:
            health = other.snap.health.get(node)
            old[node] = None if health is None else (health.status, health.manifest) == ("passing", running.get(node))
        ages = self._clock.read(given.current, asyncio.get_running_loop().time(), given.spec.policy.min_healthy_time)
        new = {}
        for node, pod in given.current.items():
            passing = ages.of(node).passing
            is_new = pod.manifest == given.spec.manifest and passing is not None
            new[node] = is_new and (passing or 0.0) >= given.spec.policy.min_healthy_time
        return step(
            HandoverInput(
                record=record,
                old=old,
                new=new,
                usable=given.eligibility.eligible & running.keys() - given.current.keys(),
                replicas=given.spec.replicas_desired,
            )
        )

    async def _begin(
        self, record: Record[Handover], other: _Other, old: RCSpec, locks: Mapping[str, Entry | None]
    ) -> bool:
        """Take both mutation locks, and disable the old RC, so that its owner places and removes nothing."""
        running = msgspec.structs.replace(record.value, state="running")
        holder = encode(Mutation(self._tools.farm, _purpose(record.value), utc_now()))
        writing = [self._old_owner(other), *self._record(record, other, running)]
        for rc_id, lock in locks.items():
            if lock is not None and lock.session not in (None, self._session):
                writing.append(ops.delete_cas(lock.key, lock.modify_index))  # of a former owner
            writing.append(ops.check_not_exists(self._keys.lock(rc_id)))
            writing.append(ops.lock(self._keys.mutation(rc_id), holder, self._session))
        writing += revised(self._keys, Stored(old, other.snap.spec_index), disabled=True)
        await self._writer.apply(writing)
        return True

    async def _pass_on(
        self,
        record: Record[Handover],
        other: _Other,
        old: Stored,
        spec: Record[RCSpec],
        pod_id: str,
        decision: HandoverStep,
    ) -> bool:
        """Move the placements, intents and replica counts in one transaction."""
        keys, mine, theirs, nodes = self._keys, self._state.id, record.value.old, decision.nodes
        labels = {**spec.value.pod_labels, POD_ID_LABEL: pod_id, RC_ID_LABEL: mine}
        shard, manifest = self._state.shard.name, spec.value.manifest
        intent = Intent(manifest=manifest, rc=mine, shard=shard, token=self._writer.token, labels=labels)
        intents = self._tools.intents.of(pod_id)
        writing = [
            *self._fences(record.value, other),
            *self._record(record, other, msgspec.structs.replace(record.value, reason=decision.reason)),
            *transfer_replica_counts(
                keys,
                old,
                Stored(spec.value, spec.modify_index),
                remove=min(len(nodes), old.spec.replicas_desired),
                replicas=decision.replicas,
            ),
        ]
        for node in nodes:
            writing += [
                ops.delete_cas(keys.pod(theirs, node), other.version(keys.pod(theirs, node))),
                ops.create(keys.pod(mine, node), encode(labels)),
                ops.cas(keys.intent(node, pod_id), encode(intent), intents[node].modify_index),
            ]
        after = {mine: {*self._state.pods, *nodes}, theirs: {*other.snap.pods} - {*nodes}}
        for rc_id, change in ((mine, "added"), (theirs, "removed")):
            if nodes:
                placed = sorted(after[rc_id])
                details: dict[str, Any] = {"rc": rc_id, "added": [], "removed": [], change: list(nodes)}
                details |= {"token": self._writer.token} if rc_id == mine else {}  # the old RC's is its owner's
                details |= {"nodes": placed[:NODES_IN_AUDIT], "node_count": len(placed), "rolling_update_id": mine}
                event = "REPLICATION_CONTROLLER_RETARGET"
                writing.append(audit.event_op(keys, event, details, actor=self._tools.farm))
        await self._writer.apply(writing)
        return True

    async def _note(self, record: Record[Handover], other: _Other, reason: Reason | None) -> bool:
        """Record what the hand-over waits for, where that has changed. The pods have not."""
        if reason != record.value.reason:
            await self._writer.apply(self._record(record, other, msgspec.structs.replace(record.value, reason=reason)))
        return False

    async def _end(self, record: Record[Handover], other: _Other, state: HandoverState, why: str) -> bool:
        """End the hand-over, and release both locks. After success the old RC is deleted, unless it is to stay; after
        a failure it is enabled again."""
        ended, old = self._ended(record.value, state, why), other.snap.spec
        writing = self._record(record, other, ended)
        if state == "done":
            writing += self._fences(record.value, other)
        if old is not None and not old.deleting and record.value.state == "running":
            stored = Stored(old, other.snap.spec_index)
            if state == "done" and not record.value.leave_old:
                writing += revised(self._keys, stored, disabled=False, deleting=True, replicas_desired=0)
            else:
                writing += revised(self._keys, stored, disabled=False)
        for rc_id in (record.value.old, record.value.new):
            lock = await self._lock(rc_id)
            if lock is not None and self._is_of(record.value, lock):
                writing.append(ops.delete_cas(lock.key, lock.modify_index))
        await self._writer.apply([*writing, *self._completed(ended)])
        return True

    def _ended(self, record: Handover, state: HandoverState, why: str) -> Handover:
        reason = Reason("rollout_aborted", f"ended: {why}; the pods stay where they are") if why else None
        return msgspec.structs.replace(record, state=state, reason=reason)

    def _completed(self, record: Handover) -> list[Op]:
        is_done = record.state == "done"
        return events(self._keys, COMPLETED, record, self._tools.farm, succeeded=is_done, canceled=not is_done)

    def _record(self, record: Record[Handover], other: _Other, changed: Handover) -> list[Op]:
        """Return the operations that replace the record in both folders, if neither has changed."""
        writing = [ops.cas(self._keys.handover(changed.new), encode(changed), record.modify_index)]
        theirs = self._keys.handover(changed.old)
        if theirs in other.entries:
            writing.append(ops.cas(theirs, encode(changed), other.version(theirs)))
        return writing

    def _fences(self, record: Handover, other: _Other) -> list[Op]:
        locks = [ops.check_session(self._keys.mutation(rc_id), self._session) for rc_id in (record.old, record.new)]
        return [self._old_owner(other), *locks, ops.check_not_exists(self._keys.brake)]

    def _old_owner(self, other: _Other) -> Op:
        """Return the operation that refuses the write when the old RC has got another owner, or lost its own."""
        key = self._keys.owner(other.snap.rc_id)
        index = other.version(key)
        return ops.check_index(key, index) if index else ops.check_not_exists(key)


def _purpose(record: Handover) -> str:
    return f"{_HANDS_OVER}{record.old} over to rc {record.new}; `rcfarm rollout abort {record.new}` stops it"
