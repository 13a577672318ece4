"""The mutation lock of an RC, held by a person: `rcfarm rc lock | unlock`.

The model: the lock is the key `lock` in the RC's folder. It has no session, as no process of the person stays, so it
lasts until it is removed, by anybody. Every edit of the RC's spec, and every transfer of one of its pods, checks in its
transaction that there is no such key (`store.schema.audit.unlocked`). The lock is taken in one transaction that checks
that there is an RC, and that no process holds the lock with a session.
"""

from __future__ import annotations

from rcfarm.operations.errors import ChangedSincePlanned, RCRefused
from rcfarm.operations.rcs import ReplicationControllers
from store.kv import ops
from store.kv.protocol import BadRecord, Entry, Store, TxnConflict
from store.schema import audit
from store.schema.keys import Keys
from store.schema.records import PersonsLock, decode, encode, utc_now


async def lock(
    store: Store, keys: Keys, rcs: ReplicationControllers, rc_id: str, actor: audit.Actor, reason: str
) -> None:
    """Lock the RC. Raises `NoSuchRC`, `RCRefused` while the lock is held, or the RC is being deleted, and
    `ChangedSincePlanned`."""
    spec, index = await rcs.read(rc_id)
    if spec.deleting:
        raise RCRefused(f"rc {rc_id} is being deleted and can't be locked")
    try:
        unlocked = await audit.unlocked(store, keys, rc_id)
    except audit.ChangeRefused as error:
        raise RCRefused(str(error)) from error
    record = PersonsLock(actor.name, reason, utc_now())
    details = {"rc": rc_id, "generation": spec.generation, "reason": reason}
    writing = [
        ops.check_index(keys.spec(rc_id), index),
        *unlocked,
        ops.create(keys.lock(rc_id), encode(record)),
        audit.event_op(keys, "REPLICATION_CONTROLLER_LOCKED", details, actor=actor),
    ]
    try:
        await store.txn(writing)
    except TxnConflict as error:
        raise ChangedSincePlanned(f"rc {rc_id} was changed or locked in the meantime; look at it again") from error


async def standing(store: Store, keys: Keys, rcs: ReplicationControllers, rc_id: str) -> Entry:
    """Return the entry of the lock that a person holds. Raises `NoSuchRC`, and `RCRefused` where there is none."""
    snap = await rcs.snapshot(rc_id)
    entry = await store.get(keys.lock(rc_id), consistent=True)
    if entry is not None:
        return entry
    if snap.mutation is not None:
        why = f" ({snap.mutation.reason})" if snap.mutation.reason else ""
        raise RCRefused(
            f"rc {rc_id} is locked by a process, {snap.mutation.holder}{why}: the lock is removed when its "
            "change is done, or the process has ended"
        )
    raise RCRefused(f"rc {rc_id} is not locked; `rcfarm rc lock {rc_id} --reason TEXT` locks it")


async def unlock(store: Store, keys: Keys, rc_id: str, entry: Entry, *, actor: audit.Actor) -> None:
    """Remove exactly that lock. Raises `ChangedSincePlanned` when it is not there any more."""
    details = {"rc": rc_id, "holder": audit.locked_by(entry)}
    writing = [
        ops.check_index(entry.key, entry.modify_index),  # `delete_cas` alone would accept that it is gone
        ops.delete(entry.key),
        audit.event_op(keys, "REPLICATION_CONTROLLER_UNLOCKED", details, actor=actor),
    ]
    try:
        await store.txn(writing)
    except TxnConflict as error:
        raise ChangedSincePlanned(f"the lock of rc {rc_id} was removed or replaced in the meantime") from error


def is_of(entry: Entry, actor: audit.Actor) -> bool:
    """Return whether this person took the lock, as far as names tell."""
    try:
        return decode(PersonsLock, entry.key, entry.value).holder == actor.name
    except BadRecord:
        return False
