"""One member of all does a task: the one that holds the task's lock.

A lock, unlike `Membership.leads`, is held by one member at a time whatever each of them sees, and it fences what the
leader writes. It stays with its holder while that is alive; when its session ends, the next member that asks gets it.
"""

from __future__ import annotations

from store.kv import ops
from store.kv.protocol import Op, Store, TxnConflict
from store.schema.records import StoredRecord, encode


class Leadership:
    """The lock `key` of a task, as a member under `session` sees it. `record`: what the key says while it is held."""

    def __init__(self, store: Store, key: str, session: str, record: StoredRecord) -> None:
        self.key, self.session = key, session
        self.is_held = False  # by the last answer of the store
        self._store, self._record = store, record

    @property
    def fence(self) -> Op:
        """The operation that makes a transaction fail with `OwnershipLost` unless this member leads."""
        return ops.check_session(self.key, self.session)

    async def obtain(self) -> bool:
        """Take the lock if it is free. Return whether this member leads. Raises `StoreError`."""
        self.is_held = False
        entry = await self._store.get(self.key, consistent=True)
        if entry is not None and entry.session:
            self.is_held = entry.session == self.session
            return self.is_held
        try:
            await self._store.txn([ops.lock(self.key, encode(self._record), self.session)])
        except TxnConflict:
            return False
        self.is_held = True
        return True
