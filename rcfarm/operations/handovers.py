"""Hand-overs between two RCs (p2's rolling updates): begin one, stop one.

The model: the same record, `handover`, is in the folders of both RCs, written in one transaction that refuses an RC
which has an active one: what p2's creation lock is for. The owner of the new RC carries the hand-over on; while it
does, it holds the mutation locks of both. Stopping takes the record out of its hands in one transaction: whatever the
owner is about to write is refused, and the pods stay where they are.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import msgspec

from rcfarm.operations.errors import BadInput, ChangedSincePlanned, Contended, RCRefused
from rcfarm.operations.rc_snapshot import RCSnapshot, pod_id_of
from rcfarm.operations.rcs import ReplicationControllers, Stored
from store.kv import ops
from store.kv.protocol import BadRecord, Entry, Op, Store, TxnConflict
from store.schema import audit
from store.schema.keys import Keys
from store.schema.records import ALL_NODES, ROLLING_OUT, Handover, RCSpec, Reason, decode, encode, utc_now

CREATED, COMPLETED = "ROLLING_UPDATE_CREATION", "ROLLING_UPDATE_COMPLETION"  # p2's words
_MOVING = ROLLING_OUT | {"paused", "reverting"}


def transfer_replica_counts(keys: Keys, source: Stored, target: Stored, *, remove: int, replicas: int) -> list[Op]:
    """Return the operations that take `remove` replicas from one RC and set those of another: both or neither, and only
    if neither spec has changed since it was read (p2's `TransferReplicaCounts`). Raises `BadInput`."""
    left = source.spec.replicas_desired - remove
    if remove < 0 or left < 0 or replicas < 0:
        raise BadInput(f"rc {source.spec.id} desires {source.spec.replicas_desired} replicas; {remove} can't be taken")
    return [
        *revised(keys, source, replicas_desired=left),
        *revised(keys, target, replicas_desired=replicas),
    ]


def revised(keys: Keys, stored: Stored, **fields: Any) -> list[Op]:
    """Return the operation that changes fields of a spec, if it has not changed since it was read; none without a
    change."""
    changed = msgspec.structs.replace(stored.spec, **fields)
    if changed == stored.spec:
        return [ops.check_index(keys.spec(stored.spec.id), stored.modify_index)]
    changed = msgspec.structs.replace(changed, generation=stored.spec.generation + 1)
    return [ops.cas(keys.spec(changed.id), encode(changed), stored.modify_index)]


def events(keys: Keys, event: str, record: Handover, actor: str | audit.Actor, **details: Any) -> list[Op]:
    """Return the operations that record an event of the hand-over, for the history of each RC."""
    about = {"rolling_update_id": record.new, "old": record.old, "new": record.new, **details}
    return [audit.event_op(keys, event, {"rc": rc_id, **about}, actor=actor) for rc_id in (record.new, record.old)]


class _Side(NamedTuple):
    """One RC as `begin` finds it. `version`: of its `handover`, 0 without one."""

    snap: RCSnapshot
    spec: RCSpec
    version: int


class Handovers:
    """Begins and stops hand-overs. `actor`: named in the audit log. The store's errors pass through."""

    def __init__(
        self, store: Store, keys: Keys, *, actor: str | audit.Actor = "", rng: random.Random | None = None
    ) -> None:
        self._store, self._keys, self._actor = store, keys, actor
        self._name = actor.name if isinstance(actor, audit.Actor) else actor
        self._rcs, self._rng = ReplicationControllers(store, keys, actor=actor), rng or random.Random()

    async def begin(self, old: str, new: str, *, desired: int, minimum: int, leave_old: bool = False) -> Handover:
        """Let the pods of `old` pass to `new`, until that has `desired` healthy ones, while at least `minimum` of both
        are healthy. Raises `BadInput`, `NoSuchRC`, `RCRefused`, `ChangedSincePlanned`; nothing is written then."""
        if old == new:
            raise BadInput(f"rc {old} can't hand its pods over to itself; name another rc")
        if desired < 1:
            raise BadInput(f"desired: {desired} is below 1; `rcfarm rc scale {old} 0` removes the pods")
        if desired >= ALL_NODES:
            raise BadInput(f"desired: {desired} is more than {ALL_NODES - 1}")
        if not 0 <= minimum <= desired:
            raise BadInput(f"minimum: {minimum} is not between 0 and the desired {desired}")
        before, after = await self._side(old), await self._side(new)
        pod_ids = pod_id_of(before.snap), pod_id_of(after.snap)
        if pod_ids[0] != pod_ids[1]:
            raise BadInput(f"rc {old} runs the pod {pod_ids[0]!r}, and rc {new} {pod_ids[1]!r}; both must be the same")
        replicas = before.spec.replicas_desired, after.spec.replicas_desired
        if desired < replicas[1]:
            raise BadInput(f"desired: {desired} is less than the {replicas[1]} replicas that rc {new} has already")
        most = max(sum(replicas), desired)
        if replicas[0] and most <= minimum:
            raise BadInput(
                f"minimum: {minimum} pods are to stay healthy, and there are never more than {most}, so that none "
                "could ever pass from one rc to the other; lower --minimum, or raise --desired"
            )
        record = Handover(
            old=old, new=new, desired=desired, minimum=minimum, leave_old=leave_old, started=utc_now(), by=self._name
        )
        try:
            writing = [
                *await audit.unlocked(self._store, self._keys, old),
                *await audit.unlocked(self._store, self._keys, new),
                *(ops.check_index(self._keys.spec(side.spec.id), side.snap.spec_index) for side in (before, after)),
                *(ops.cas(self._keys.handover(side.spec.id), encode(record), side.version) for side in (before, after)),
                *events(self._keys, CREATED, record, self._actor, desired=desired, minimum=minimum),
            ]
            await self._store.txn(writing)
        except audit.ChangeRefused as error:
            raise RCRefused(str(error)) from error
        except TxnConflict as error:
            raise ChangedSincePlanned(
                f"rc {old} or rc {new} was changed in the meantime; look at them again"
            ) from error
        return record

    async def _side(self, rc_id: str) -> _Side:
        """Read one of the two RCs. Raises `NoSuchRC`, and `RCRefused` where no hand-over can begin."""
        entry = await self._store.get(self._keys.handover(rc_id), consistent=True)
        snap = await self._rcs.snapshot(rc_id)
        spec = await self._rcs.get(rc_id) if snap.spec is None else snap.spec  # raises what is wrong with it
        if snap.handover is not None and snap.handover.is_active:
            other = snap.handover
            raise RCRefused(
                f"rc {rc_id} is in a hand-over already, from rc {other.old} to rc {other.new}; wait until it has "
                f"ended, or stop it with `rcfarm rollout abort {other.new}`"
            )
        if spec.deleting:
            raise RCRefused(f"rc {rc_id} is being deleted")
        if spec.is_daemon_set:
            raise RCRefused(
                f"rc {rc_id} has `replicas: all`, and its pods are not counted; give it a number first: "
                f"`rcfarm rc scale {rc_id} N`"
            )
        if spec.disabled:
            raise RCRefused(f"rc {rc_id} is disabled; enable it with `rcfarm rc enable {rc_id}`")
        rollout = snap.present_rollout
        if rollout is not None and rollout.state in _MOVING:
            raise RCRefused(
                f"rc {rc_id}: its rollout is {rollout.state.replace('_', ' ')}; wait until it has ended, or abort it "
                f"with `rcfarm rollout abort {rc_id}`"
            )
        return _Side(snap, spec, entry.modify_index if entry else 0)

    async def abort(self, rc_id: str) -> Handover:
        """Stop the hand-over that the RC is in, as the old or the new one. The pods stay where they are, and both RCs
        go on with what they have. A record of the other RC that can't be read is replaced. Raises `RCRefused` when
        there is none, `BadRecord` when the RC's own can't be read, `Contended`."""

        async def attempt() -> Handover:
            entry = await self._entry(rc_id)
            found = decode(Handover, entry.key, entry.value) if entry else None
            if found is None or not found.is_active:
                raise RCRefused(f"rc {rc_id}: nothing to abort: it is in no hand-over")
            by = f" by {self._name}" if self._name else ""
            record = msgspec.structs.replace(
                found,
                state="aborted",
                reason=Reason("rollout_aborted", f"aborted{by}; the pods stay where they are"),
            )
            writing: list[Op] = []
            for each in (record.new, record.old):
                its = await self._entry(each)
                if its is not None and _is_of(its, record):
                    writing.append(ops.cas(its.key, encode(record), its.modify_index))
            # the mutation locks that the owner of the new RC holds for the hand-over go with it
            owner = await self._store.get(self._keys.owner(record.new), consistent=True)
            for each in (record.old, record.new):
                lock = await self._store.get(self._keys.mutation(each), consistent=True)
                if lock is not None and owner is not None and lock.session and lock.session == owner.session:
                    writing.append(ops.delete_cas(lock.key, lock.modify_index))
            old = await self._store.get(self._keys.spec(record.old), consistent=True)
            if old is not None and found.state == "running":
                spec = decode(RCSpec, old.key, old.value)
                writing += revised(self._keys, Stored(spec, old.modify_index), disabled=False)
            writing += events(self._keys, COMPLETED, record, self._actor, succeeded=False, canceled=True)
            await self._store.txn(writing)
            return record

        what = f"the hand-over of rc {rc_id}"
        return await ops.retry_conflicts(what, attempt, rng=self._rng, error=Contended)

    async def _entry(self, rc_id: str) -> Entry | None:
        return await self._store.get(self._keys.handover(rc_id), consistent=True)


def _is_of(entry: Entry, record: Handover) -> bool:
    """Return whether an RC's entry is that of this hand-over, or can't be read."""
    try:
        its = decode(Handover, entry.key, entry.value)
    except BadRecord:
        return True
    return its.is_active and (its.old, its.new) == (record.old, record.new)
