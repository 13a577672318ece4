"""The state of an embedded store, as plain data, and what the operations of a transaction do to it, as in Consul 1.8.

Nothing here waits, reads a clock or writes a file. A change is first planned as a `Commit` (`plan_transaction`), then
made durable, and only then applied to the state, whole: a commit that can't be written leaves no trace.

The index of a prefix follows Consul: the highest modify index under it, deletions included, by their tombstones. A
prefix under which there is nothing and was nothing has the index of the last change anywhere. Tombstones are bounded;
dropping the oldest ones raises a floor below every answer, so that an index never goes backward and no watcher misses
a change; at worst it is woken once without need.

Keys lie in short sorted runs, so that an insertion moves at most one run and a prefix range is a few slices: both
stay at a few microseconds (plus the size of the answer) among a million keys. Order is by code point, which for UTF-8
is the byte order that Consul lists in.

The operations of a transaction run in order on a staged state and see each other's writes. Every operation is tried,
and every one that fails is named in the refusal. Surprising behaviour of Consul that programs rely on, and that is
therefore kept:

- a write that changes nothing leaves the modify index as it is and wakes no watch;
- a plain `set` or `cas` keeps the lock's holder but resets the lock index to 0 (only `lock` and `unlock` carry it on);
- `delete-cas` of an absent key succeeds whatever the index;
- a key under lock-delay refuses the whole transaction before any operation is tried.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Literal, assert_never

import msgspec

from store.kv.ops import written_index
from store.kv.protocol import Entry, Listing, Op, OpFailure, TxnResult

MAX_TOMBSTONES = 65_536
RUN = 1024  # keys; a run is split when it is twice as long
_modify_index = attrgetter("modify_index")
CheckKind = Literal["NodeChecks", "ServiceChecks", "Checks"]


class SessionCheck(msgspec.Struct, frozen=True):
    """A check that a session is bound to. `kind`: the member of the request that named it; `ttl` in seconds, or 0."""

    id: str
    kind: CheckKind
    ttl: float = 0.0


class SessionRecord(msgspec.Struct, frozen=True):
    """A session as it is stored. Durations in seconds; `lease` 0: it never expires."""

    id: str
    name: str
    lease: float
    lock_delay: float = 0.0
    behavior: Literal["release", "delete"] = "release"
    index: int = 0
    ttl: float = 0.0
    node: str = ""
    checks: tuple[SessionCheck, ...] = ()


@dataclass(frozen=True, slots=True)
class Commit:
    """One atomic change. `writes`: the new entry per key, None where it is deleted."""

    index: int
    writes: Mapping[str, Entry | None] = field(default_factory=dict)
    tombstones: Sequence[str] = ()
    opened: SessionRecord | None = None
    closed: str | None = None

    def __bool__(self) -> bool:
        return bool(self.writes or self.tombstones or self.opened or self.closed)


class StoreState:
    """Everything in the store at one index."""

    def __init__(
        self, *, index: int = 1, entries: Iterable[Entry] = (), sessions: Iterable[SessionRecord] = ()
    ) -> None:
        self.index = index
        """The global index: that of the last commit."""
        self.changed = index
        """The index of the last change of any key."""
        self.entries = {entry.key: entry for entry in entries}
        self.sessions = {record.id: record for record in sessions}
        self.sessions_changed = index
        """The index at which a session was last opened or closed."""
        self.held: dict[str, set[str]] = {}
        self._keys = SortedKeys(self.entries)
        self._tombstones: dict[str, int] = {}
        self._tombstone_keys = SortedKeys()
        self._floor = index
        for entry in self.entries.values():
            self._hold(entry)

    def keys(self, prefix: str) -> list[str]:
        """Return every key under `prefix`, in order."""
        return self._keys.under(prefix)

    def listing(self, prefix: str) -> Listing:
        """Return every entry under `prefix`, with the prefix's index."""
        entries = list(map(self.entries.__getitem__, self._keys.under(prefix)))
        if not prefix:
            return Listing(entries, self.changed)
        newest = max(map(_modify_index, entries), default=0)
        buried = max(map(self._tombstones.__getitem__, self._tombstone_keys.under(prefix)), default=0)
        return Listing(entries, max(newest, buried, self._floor) if newest or buried else self.changed)

    def index_of(self, prefix: str) -> int:
        """Return the index of the last change under `prefix`."""
        return self.listing(prefix).index

    def index_of_key(self, key: str) -> int:
        """Return one key's index, as blocking queries count: an absent key has that of the last change anywhere."""
        entry = self.entries.get(key)
        return self.changed if entry is None else max(entry.modify_index, self._floor)

    def apply(self, commit: Commit) -> None:
        """Apply the commit to the state."""
        self.index = commit.index
        for key, entry in commit.writes.items():
            if entry is None:
                self._release(self.entries.pop(key))
                self._keys.discard(key)
                continue
            old = self.entries.get(key)
            self._release(old) if old is not None else self._keys.add(key)
            self.entries[key] = entry
            self._hold(entry)
        if commit.writes or commit.tombstones:
            self.changed = commit.index
        for key in commit.tombstones:
            if self._tombstones.pop(key, None) is None:
                self._tombstone_keys.add(key)
            self._tombstones[key] = commit.index
            if len(self._tombstones) > MAX_TOMBSTONES:
                for oldest in list(self._tombstones)[: MAX_TOMBSTONES // 2]:
                    self._floor = max(self._floor, self._tombstones.pop(oldest))
                self._tombstone_keys = SortedKeys(self._tombstones)
        if commit.opened is not None:
            self.sessions[commit.opened.id] = commit.opened
            self.sessions_changed = commit.index
        if commit.closed is not None:
            del self.sessions[commit.closed]
            self.sessions_changed = commit.index

    def _hold(self, entry: Entry) -> None:
        if entry.session is not None:
            self.held.setdefault(entry.session, set()).add(entry.key)

    def _release(self, entry: Entry) -> None:
        if entry.session is not None:
            held = self.held[entry.session]
            held.discard(entry.key)
            if not held:
                del self.held[entry.session]


class SortedKeys:
    """Keys in order, each once."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        ordered = sorted(set(keys))
        self._runs = [ordered[start : start + RUN] for start in range(0, len(ordered), RUN)]
        self._firsts = [run[0] for run in self._runs]

    def add(self, key: str) -> None:
        """Insert `key`, unless it is present."""
        if not self._runs:
            self._runs, self._firsts = [[key]], [key]
            return
        number, at = self._find(key)
        run = self._runs[number]
        if at < len(run) and run[at] == key:
            return
        run.insert(at, key)
        self._firsts[number] = run[0]
        if len(run) > 2 * RUN:
            self._runs[number : number + 1] = [run[:RUN], run[RUN:]]
            self._firsts.insert(number + 1, run[RUN])

    def discard(self, key: str) -> None:
        """Remove `key`, if it is present."""
        if not self._runs:
            return
        number, at = self._find(key)
        run = self._runs[number]
        if at == len(run) or run[at] != key:
            return
        del run[at]
        if run:
            self._firsts[number] = run[0]
        else:
            del self._runs[number], self._firsts[number]

    def under(self, prefix: str) -> list[str]:
        """Return every key that starts with `prefix`, in order."""
        length = len(prefix)
        found: list[str] = []
        for run in self._runs[max(bisect_left(self._firsts, prefix) - 1, 0) :]:
            first = bisect_left(run, prefix)
            last = bisect_right(run, prefix, lo=first, key=lambda key: key[:length])
            found += run[first:last]
            if last < len(run):
                break
        return found

    def _find(self, key: str) -> tuple[int, int]:
        number = max(bisect_right(self._firsts, key) - 1, 0)
        return number, bisect_left(self._runs[number], key)


def cut_keys(keys: Iterable[str], prefix: str, separator: str) -> list[str]:
    """Cut each key after the first `separator` beyond `prefix`. Return each result once, in order."""

    def cut(key: str) -> str:
        at = key.find(separator, len(prefix))
        return key if at < 0 else key[: at + len(separator)]

    return list(dict.fromkeys(map(cut, keys)))


class TransactionRefused(Exception):
    """Nothing was applied; `failures` names every operation whose condition did not hold, in order."""

    def __init__(self, failures: Sequence[OpFailure]) -> None:
        self.failures = failures
        super().__init__(failures)


class _OpRefused(Exception):
    """One operation's condition does not hold."""


class StagedState:
    """A state with pending changes on top."""

    def __init__(self, state: StoreState) -> None:
        self._state = state
        self.sessions = state.sessions
        self.index = state.index + 1
        self.writes: dict[str, Entry | None] = {}
        self.tombstones: list[str] = []

    def get(self, key: str) -> Entry | None:
        """Return the entry as this transaction sees it."""
        return self.writes[key] if key in self.writes else self._state.entries.get(key)

    def under(self, prefix: str) -> list[Entry]:
        """Return the entries under `prefix` as this transaction sees them, in order."""
        keys = set(self._state.keys(prefix)).union(key for key in self.writes if key.startswith(prefix))
        return [entry for key in sorted(keys) if (entry := self.get(key)) is not None]

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

    def _forget(self, key: str) -> None:
        if self._state.entries.get(key) is None:
            del self.writes[key]
        else:
            self.writes[key] = None


def plan_transaction(
    state: StoreState, ops: Sequence[Op], lock_delayed: Callable[[str], bool]
) -> tuple[Commit, TxnResult]:
    """Return the commit that results from the operations, and the answer.

    `lock_delayed` returns whether a key was freed so recently that it must not be locked yet.
    Raises `TransactionRefused`.
    """
    failures: list[OpFailure] = []
    for op_index, op in enumerate(ops):
        if not op.key and op.verb != "delete-tree":
            failures.append(OpFailure(op_index, "Must provide key"))
        elif op.verb == "lock" and lock_delayed(op.key):
            failures.append(OpFailure(op_index, f'failed to lock key "{op.key}" due to lock delay'))
    if failures:
        raise TransactionRefused(failures)
    staged = StagedState(state)
    answers: list[tuple[Op, list[Entry]]] = []
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
    return Commit(staged.index, staged.writes, staged.tombstones), TxnResult(entries, written_index(ops, entries))


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


def _apply(staged: StagedState, op: Op) -> list[Entry]:
    """Apply one operation. Return the entries that it answers with. Raises `_OpRefused`."""
    old = staged.get(op.key)
    index = 0 if old is None else old.modify_index
    holder = "" if old is None else old.session or ""
    match op.verb:
        case "set" | "cas":
            if op.verb == "cas" and index != op.index:
                raise _OpRefused(f'failed to set key "{op.key}", index is stale')
            return [staged.write(op.key, op.value, flags=op.flags, session=holder or None, lock_index=0)]
        case "lock":
            if not op.session:
                raise _OpRefused("missing session")
            if op.session not in staged.sessions:
                raise _OpRefused(f'invalid session "{op.session}"')
            if holder not in ("", op.session):
                raise _OpRefused(f'failed to lock key "{op.key}", lock is already held')
            lock_index = (0 if old is None else old.lock_index) + (not holder)
            return [staged.write(op.key, op.value, flags=op.flags, session=op.session, lock_index=lock_index)]
        case "unlock":
            if not op.session:
                raise _OpRefused("missing session")
            if old is None or holder != op.session:
                raise _OpRefused(f'failed to unlock key "{op.key}", lock isn\'t held, or is held by another session')
            return [staged.write(op.key, op.value, flags=op.flags, session=None, lock_index=old.lock_index)]
        case "get":
            if old is None:
                raise _OpRefused(f'key "{op.key}" doesn\'t exist')
            return [old]
        case "get-tree":
            return staged.under(op.key)
        case "check-index":
            if old is None:
                raise _OpRefused(f'failed to check index, key "{op.key}" doesn\'t exist')
            if index != op.index:
                raise _OpRefused(f'failed index check for key "{op.key}", current modify index {index} != {op.index}')
            return [old]
        case "check-session":
            if old is None:
                raise _OpRefused(f'failed to check session, key "{op.key}" doesn\'t exist')
            if holder != op.session:
                raise _OpRefused(
                    f'failed session check for key "{op.key}", current session "{holder}" != "{op.session}"'
                )
            return [old]
        case "check-not-exists":
            if old is not None:
                raise _OpRefused(f'key "{op.key}" exists')
        case "delete":
            staged.delete(op.key)
        case "delete-tree":
            staged.delete_tree(op.key)
        case "delete-cas":
            if old is not None and index != op.index:
                raise _OpRefused(f'failed to delete key "{op.key}", index is stale')
            staged.delete(op.key)
        case unknown:
            assert_never(unknown)
    return []
