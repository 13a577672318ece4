"""Applying the operations of a transaction to a state: pure, and exactly as Consul 1.8 does it.

Operations run in order on a draft and see each other's writes. Every operation is tried, and every one that fails is
named in the refusal. Points where Consul may surprise, kept here because programs written for it count on them:

- a write that changes nothing leaves the modify index as it is and wakes nobody;
- a plain `set` or `cas` keeps the lock's holder but resets the lock index to 0 (only `lock` and `unlock` carry it on);
- `delete-cas` of an absent key succeeds whatever the index;
- a key under lock-delay refuses the whole transaction before anything else is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from store.embedded_state import Commit, SessionRecord, State
from store.kv import Entry, Op, OpFailure, TxnResult, Verb
from store.ops import written_index


class Refused(Exception):
    """Nothing was applied; `failures` tells of every operation that did not hold, in order."""

    def __init__(self, failures: Sequence[OpFailure]) -> None:
        self.failures = failures
        super().__init__(failures)

    @property
    def is_faulty(self) -> bool:
        """Whether the first failure is a fault of the request, and not a condition that did not hold."""
        return self.failures[0].reason.startswith(("invalid session", "missing session", "Must provide key"))


class _OpRefused(Exception):
    """One operation's condition does not hold."""


class Draft:
    """A state with changes on top that are not made yet."""

    def __init__(self, state: State) -> None:
        self._state = state
        self.index = state.index + 1
        self.writes: dict[str, Entry | None] = {}
        self.tombstones: list[str] = []

    def get(self, key: str) -> Entry | None:
        """The entry as this transaction sees it."""
        return self.writes[key] if key in self.writes else self._state.get(key)

    def under(self, prefix: str) -> list[Entry]:
        """The entries under `prefix` as this transaction sees them, in order."""
        keys = set(self._state.keys(prefix)).union(key for key in self.writes if key.startswith(prefix))
        return [entry for key in sorted(keys) if (entry := self.get(key)) is not None]

    def session_exists(self, session_id: str) -> bool:
        """Whether the session is alive."""
        return session_id in self._state.sessions

    def write(self, key: str, value: bytes, *, flags: int, session: str | None, lock_index: int) -> Entry:
        """Write the key, unless that changes nothing. Returns the entry as it then is."""
        old = self.get(key)
        created = self.index if old is None else old.create_index
        new = Entry(key, value, created, self.index, lock_index, flags, session)
        if old is not None and msgspec.structs.replace(new, modify_index=old.modify_index) == old:
            return old
        self.writes[key] = new
        return new

    def delete(self, key: str) -> None:
        """Remove the key if it is there."""
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
        """What is to be made durable and applied."""
        return Commit(self.index, self.writes, self.tombstones)

    def _forget(self, key: str) -> None:
        if self._state.get(key) is None:
            del self.writes[key]
        else:
            self.writes[key] = None


def plan_transaction(
    state: State, ops: Sequence[Op], lock_delayed: Callable[[str], bool] = lambda key: False
) -> tuple[Commit, TxnResult]:
    """The commit that the operations amount to, and what to answer.

    `lock_delayed` tells whether a key was freed so recently that it must not be locked yet.
    Raises `Refused`.
    """
    _check_before(ops, lock_delayed)
    draft = Draft(state)
    answers: list[tuple[Op, list[Entry]]] = []
    failures: list[OpFailure] = []
    for op_index, op in enumerate(ops):
        try:
            answers.append((op, _VERBS[op.verb](draft, op)))
        except _OpRefused as refused:
            failures.append(OpFailure(op_index, str(refused)))
    if failures:
        raise Refused(failures)
    entries = [entry for op, entries in answers for entry in _echo(op, entries)]
    return draft.commit(), TxnResult(entries, written_index(ops, entries))


def plan_session_end(state: State, record: SessionRecord) -> Commit:
    """What ends the session: its keys are released or deleted, as its behaviour says."""
    draft = Draft(state)
    for key in sorted(state.held.get(record.id, ())):
        entry = state.entries[key]
        if record.behavior == "delete":
            draft.delete(key)
        else:
            draft.write(key, entry.value, flags=entry.flags, session=None, lock_index=entry.lock_index)
    return Commit(draft.index, draft.writes, draft.tombstones, closed=record.id)


def _check_before(ops: Sequence[Op], lock_delayed: Callable[[str], bool]) -> None:
    failures = []
    for op_index, op in enumerate(ops):
        if not op.key and op.verb != "delete-tree":
            failures.append(OpFailure(op_index, "Must provide key"))
        elif op.verb == "lock" and lock_delayed(op.key):
            failures.append(OpFailure(op_index, f'failed to lock key "{op.key}" due to lock delay'))
    if failures:
        raise Refused(failures)


def _echo(op: Op, entries: list[Entry]) -> list[Entry]:
    if op.verb in ("get", "get-tree"):
        return entries
    return [msgspec.structs.replace(entry, value=b"") for entry in entries]


def _set(draft: Draft, op: Op) -> list[Entry]:
    old = draft.get(op.key)
    session = None if old is None else old.session
    return [draft.write(op.key, op.value, flags=op.flags, session=session, lock_index=0)]


def _cas(draft: Draft, op: Op) -> list[Entry]:
    old = draft.get(op.key)
    if (0 if old is None else old.modify_index) != op.index:
        raise _OpRefused(f'failed to set key "{op.key}", index is stale')
    return _set(draft, op)


def _lock(draft: Draft, op: Op) -> list[Entry]:
    if not op.session:
        raise _OpRefused("missing session")
    if not draft.session_exists(op.session):
        raise _OpRefused(f'invalid session "{op.session}"')
    old = draft.get(op.key)
    if old is None or old.session is None:
        lock_index = 1 if old is None else old.lock_index + 1
    elif old.session == op.session:
        lock_index = old.lock_index
    else:
        raise _OpRefused(f'failed to lock key "{op.key}", lock is already held')
    return [draft.write(op.key, op.value, flags=op.flags, session=op.session, lock_index=lock_index)]


def _unlock(draft: Draft, op: Op) -> list[Entry]:
    if not op.session:
        raise _OpRefused("missing session")
    old = draft.get(op.key)
    if old is None or old.session != op.session:
        raise _OpRefused(f'failed to unlock key "{op.key}", lock isn\'t held, or is held by another session')
    return [draft.write(op.key, op.value, flags=op.flags, session=None, lock_index=old.lock_index)]


def _get(draft: Draft, op: Op) -> list[Entry]:
    entry = draft.get(op.key)
    if entry is None:
        raise _OpRefused(f'key "{op.key}" doesn\'t exist')
    return [entry]


def _get_tree(draft: Draft, op: Op) -> list[Entry]:
    return draft.under(op.key)


def _check_index(draft: Draft, op: Op) -> list[Entry]:
    entry = draft.get(op.key)
    if entry is None:
        raise _OpRefused(f'failed to check index, key "{op.key}" doesn\'t exist')
    if entry.modify_index != op.index:
        raise _OpRefused(
            f'failed index check for key "{op.key}", current modify index {entry.modify_index} != {op.index}'
        )
    return [entry]


def _check_session(draft: Draft, op: Op) -> list[Entry]:
    entry = draft.get(op.key)
    if entry is None:
        raise _OpRefused(f'failed to check session, key "{op.key}" doesn\'t exist')
    holder = entry.session or ""
    if holder != op.session:
        raise _OpRefused(f'failed session check for key "{op.key}", current session "{holder}" != "{op.session}"')
    return [entry]


def _check_not_exists(draft: Draft, op: Op) -> list[Entry]:
    if draft.get(op.key) is not None:
        raise _OpRefused(f'key "{op.key}" exists')
    return []


def _delete(draft: Draft, op: Op) -> list[Entry]:
    draft.delete(op.key)
    return []


def _delete_tree(draft: Draft, op: Op) -> list[Entry]:
    draft.delete_tree(op.key)
    return []


def _delete_cas(draft: Draft, op: Op) -> list[Entry]:
    entry = draft.get(op.key)
    if entry is not None and entry.modify_index != op.index:
        raise _OpRefused(f'failed to delete key "{op.key}", index is stale')
    draft.delete(op.key)
    return []


_VERBS: Mapping[Verb, Callable[[Draft, Op], list[Entry]]] = {
    "set": _set,
    "cas": _cas,
    "lock": _lock,
    "unlock": _unlock,
    "get": _get,
    "get-tree": _get_tree,
    "check-index": _check_index,
    "check-session": _check_session,
    "check-not-exists": _check_not_exists,
    "delete": _delete,
    "delete-tree": _delete_tree,
    "delete-cas": _delete_cas,
}
