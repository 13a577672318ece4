"""Applying the operations of a transaction to a state: pure, and exactly as Consul 1.8 does it.

Operations run in order on a staged state and see each other's writes. Every operation is tried, and every one that
fails is named in the refusal. Surprising behaviour of Consul that programs rely on, and that is therefore kept:

- a write that changes nothing leaves the modify index as it is and wakes no watch;
- a plain `set` or `cas` keeps the lock's holder but resets the lock index to 0 (only `lock` and `unlock` carry it on);
- `delete-cas` of an absent key succeeds whatever the index;
- a key under lock-delay refuses the whole transaction before any operation is tried.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import assert_never

import msgspec

from store.embedded.state import Commit, SessionRecord, StoreState
from store.kv.ops import written_index
from store.kv.protocol import Entry, Op, OpFailure, TxnResult


class TransactionRefused(Exception):
    """Nothing was applied; `failures` names every operation whose condition did not hold, in order."""

    def __init__(self, failures: Sequence[OpFailure]) -> None:
        self.failures = failures
        super().__init__(failures)

    @property
    def is_faulty(self) -> bool:
        """Return whether the first failure is an error of the request, not a condition that did not hold."""
        return self.failures[0].reason.startswith(("invalid session", "missing session", "Must provide key"))


class _OpRefused(Exception):
    """One operation's condition does not hold."""


class StagedState:
    """A state with pending changes on top."""

    def __init__(self, state: StoreState) -> None:
        self._state = state
        self.index = state.index + 1
        self.writes: dict[str, Entry | None] = {}
        self.tombstones: list[str] = []

    def get(self, key: str) -> Entry | None:
        """Return the entry as this transaction sees it."""
        return self.writes[key] if key in self.writes else self._state.get(key)

    def under(self, prefix: str) -> list[Entry]:
        """Return the entries under `prefix` as this transaction sees them, in order."""
        keys = set(self._state.keys(prefix)).union(key for key in self.writes if key.startswith(prefix))
        return [entry for key in sorted(keys) if (entry := self.get(key)) is not None]

    def session_exists(self, session_id: str) -> bool:
        """Return whether the session is alive."""
        return session_id in self._state.sessions

    def write(self, key: str, value: bytes, *, flags: int, session: str | None, lock_index: int) -> Entry:
        """Write the key, unless that changes nothing. Return the resulting entry."""
        old = self.get(key)
        created = self.index if old is None else old.create_index
        new = Entry(key, value, created, self.index, lock_index, flags, session)
        if old is not None and msgspec.structs.replace(new, modify_index=old.modify_index) == old:
            return old
        self.writes[key] = new
        return new

    def delete(self, key: str) -> None:
        """Remove the key if it exists."""
        if self.get(key) is not None:
            self._forget(key)
            self.tombstones.append(key)

    def delete_tree(self, prefix: str) -> None:
        """Remove everything under `prefix`."""
        doomed = self.under(prefix)
        for entry in doomed:
            self._forget(entry.key)
        if doomed:
            self.tombstones.append(prefix)

    def commit(self) -> Commit:
        """Return the commit to make durable and apply."""
        return Commit(self.index, self.writes, self.tombstones)

    def _forget(self, key: str) -> None:
        if self._state.get(key) is None:
            del self.writes[key]
        else:
            self.writes[key] = None


def plan_transaction(
    state: StoreState, ops: Sequence[Op], lock_delayed: Callable[[str], bool] = lambda key: False
) -> tuple[Commit, TxnResult]:
    """Return the commit that results from the operations, and the answer.

    `lock_delayed` returns whether a key was freed so recently that it must not be locked yet.
    Raises `TransactionRefused`.
    """
    _check_before(ops, lock_delayed)
    staged = StagedState(state)
    answers: list[tuple[Op, list[Entry]]] = []
    failures: list[OpFailure] = []
    for op_index, op in enumerate(ops):
        try:
            answers.append((op, _apply(staged, op)))
        except _OpRefused as refused:
            failures.append(OpFailure(op_index, str(refused)))
    if failures:
        raise TransactionRefused(failures)
    entries = [
        entry if op.verb in ("get", "get-tree") else msgspec.structs.replace(entry, value=b"")
        for op, found in answers
        for entry in found
    ]
    return staged.commit(), TxnResult(entries, written_index(ops, entries))


def plan_session_end(state: StoreState, record: SessionRecord) -> Commit:
    """Return the commit that ends the session: its keys are released or deleted, by its behaviour."""
    staged = StagedState(state)
    for key in sorted(state.held.get(record.id, ())):
        entry = state.entries[key]
        if record.behavior == "delete":
            staged.delete(key)
        else:
            staged.write(key, entry.value, flags=entry.flags, session=None, lock_index=entry.lock_index)
    return Commit(staged.index, staged.writes, staged.tombstones, closed=record.id)


def _check_before(ops: Sequence[Op], lock_delayed: Callable[[str], bool]) -> None:
    failures = []
    for op_index, op in enumerate(ops):
        if not op.key and op.verb != "delete-tree":
            failures.append(OpFailure(op_index, "Must provide key"))
        elif op.verb == "lock" and lock_delayed(op.key):
            failures.append(OpFailure(op_index, f'failed to lock key "{op.key}" due to lock delay'))
    if failures:
        raise TransactionRefused(failures)


def _apply(staged: StagedState, op: Op) -> list[Entry]:
    """Apply one operation. Return the entries that it answers with. Raises `_OpRefused`."""
    entry = staged.get(op.key)
    index = 0 if entry is None else entry.modify_index
    match op.verb:
        case "set":
            return _set(staged, op)
        case "cas":
            if index != op.index:
                raise _OpRefused(f'failed to set key "{op.key}", index is stale')
            return _set(staged, op)
        case "lock":
            return _lock(staged, op)
        case "unlock":
            return _unlock(staged, op)
        case "get":
            if entry is None:
                raise _OpRefused(f'key "{op.key}" doesn\'t exist')
            return [entry]
        case "get-tree":
            return staged.under(op.key)
        case "check-index":
            return _check_index(staged, op)
        case "check-session":
            return _check_session(staged, op)
        case "check-not-exists":
            if entry is not None:
                raise _OpRefused(f'key "{op.key}" exists')
        case "delete":
            staged.delete(op.key)
        case "delete-tree":
            staged.delete_tree(op.key)
        case "delete-cas":
            if entry is not None and index != op.index:
                raise _OpRefused(f'failed to delete key "{op.key}", index is stale')
            staged.delete(op.key)
        case unknown:
            assert_never(unknown)
    return []


def _set(staged: StagedState, op: Op) -> list[Entry]:
    old = staged.get(op.key)
    session = None if old is None else old.session
    return [staged.write(op.key, op.value, flags=op.flags, session=session, lock_index=0)]


def _lock(staged: StagedState, op: Op) -> list[Entry]:
    if not op.session:
        raise _OpRefused("missing session")
    if not staged.session_exists(op.session):
        raise _OpRefused(f'invalid session "{op.session}"')
    old = staged.get(op.key)
    if old is None or old.session is None:
        lock_index = 1 if old is None else old.lock_index + 1
    elif old.session == op.session:
        lock_index = old.lock_index
    else:
        raise _OpRefused(f'failed to lock key "{op.key}", lock is already held')
    return [staged.write(op.key, op.value, flags=op.flags, session=op.session, lock_index=lock_index)]


def _unlock(staged: StagedState, op: Op) -> list[Entry]:
    if not op.session:
        raise _OpRefused("missing session")
    old = staged.get(op.key)
    if old is None or old.session != op.session:
        raise _OpRefused(f'failed to unlock key "{op.key}", lock isn\'t held, or is held by another session')
    return [staged.write(op.key, op.value, flags=op.flags, session=None, lock_index=old.lock_index)]


def _check_index(staged: StagedState, op: Op) -> list[Entry]:
    entry = staged.get(op.key)
    if entry is None:
        raise _OpRefused(f'failed to check index, key "{op.key}" doesn\'t exist')
    if entry.modify_index != op.index:
        raise _OpRefused(
            f'failed index check for key "{op.key}", current modify index {entry.modify_index} != {op.index}'
        )
    return [entry]


def _check_session(staged: StagedState, op: Op) -> list[Entry]:
    entry = staged.get(op.key)
    if entry is None:
        raise _OpRefused(f'failed to check session, key "{op.key}" doesn\'t exist')
    holder = entry.session or ""
    if holder != op.session:
        raise _OpRefused(f'failed session check for key "{op.key}", current session "{holder}" != "{op.session}"')
    return [entry]
