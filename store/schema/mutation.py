"""The mutation lock of an RC (p2's `LockForMutation`): its holder makes a change that no other may interleave with.

A process that edits an RC's spec adds the operation of `unlocked` to its transaction: the store then refuses the edit
when the lock is taken before it commits. A process that needs more than one transaction holds the lock, under a session
of its own. A holder whose session ends has lost the lock, and its next edit is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from store.errors import RcfarmError
from store.kv import ops
from store.kv.protocol import BadRecord, Op, Store, TxnConflict
from store.schema.keys import Keys
from store.schema.records import Mutation, decode, encode, utc_now


class ChangeRefused(RcfarmError):
    """The RC can't be changed now; the message says why, and what to do."""


async def unlocked(store: Store, keys: Keys, rc_id: str, session: str = "") -> Op:
    """Return the operation that refuses a transaction when, as it commits, another process holds the lock, or when
    `session`, where it is given, does not hold it. Raises `ChangeRefused` when that is already the case."""
    key = keys.mutation(rc_id)
    entry = await store.get(key, consistent=True)
    if session:
        if entry is None or entry.session != session:
            raise ChangeRefused(f"rc {rc_id}: the mutation lock was lost; take it again, and look at the rc again")
        return ops.check_session(key, session)
    if entry is None:
        return ops.check_not_exists(key)
    if entry.session:
        raise ChangeRefused(f"rc {rc_id} is being changed by {_holder(key, entry.value)}; try again when that is done")
    return ops.check_index(key, entry.modify_index)


@contextlib.asynccontextmanager
async def mutation_lock(
    store: Store, keys: Keys, rc_id: str, session: str, *, holder: str, reason: str
) -> AsyncIterator[None]:
    """Hold the lock under `session`, which the caller keeps alive; the end of the session also releases the lock.

    Raises `ChangeRefused` while another process holds the lock, and when there is no such RC.
    """
    key = keys.mutation(rc_id)
    taking = [
        ops.get(keys.spec(rc_id)),  # a lock creates its key: refused where there is no RC
        await unlocked(store, keys, rc_id),
        ops.lock(key, encode(Mutation(holder, reason, utc_now())), session),
    ]
    try:
        await store.txn(taking)
    except TxnConflict as error:
        raise ChangeRefused(f"rc {rc_id} is gone, or another process has just locked it; look again") from error
    try:
        yield
    finally:
        with contextlib.suppress(TxnConflict):  # lost already
            await store.txn([ops.check_session(key, session), ops.delete(key)])


def _holder(key: str, value: bytes) -> str:
    try:
        mutation = decode(Mutation, key, value)
    except BadRecord:
        return f"a process whose record can't be read ({key})"
    return f"{mutation.holder} ({mutation.reason})" if mutation.reason else mutation.holder
