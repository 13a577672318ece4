"""What an embedded store knows, as plain data: entries, sessions, tombstones and the indexes of prefixes.

Nothing here waits, reads a clock or writes a file. A change is first planned as a `Commit` (`store.embedded_txn`), then
made durable, and only then applied here, whole: a commit that can't be written leaves no trace.

The index of a prefix follows Consul: the highest modify index under it, deletions included, by their tombstones. A
prefix under which there is nothing and was nothing has the index of the last change anywhere. Tombstones are bounded;
dropping the oldest ones raises a floor below every answer, so that an index never goes backward and no watcher goes
deaf: it is woken once for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Literal

import msgspec

from store.kv import Entry, Listing
from store.sorted_keys import SortedKeys

MAX_TOMBSTONES = 65_536
_modify_index = attrgetter("modify_index")


CheckKind = Literal["NodeChecks", "ServiceChecks", "Checks"]


class SessionCheck(msgspec.Struct, frozen=True):
    """A check that a session is bound to. `kind`: the member of the request that named it; `ttl` in seconds, or 0."""

    id: str
    kind: CheckKind
    ttl: float = 0.0


class SessionRecord(msgspec.Struct, frozen=True):
    """A session as it is stored. Durations in seconds; `lease` 0: it never expires by itself."""

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


class State:
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
        self._graves: dict[str, int] = {}
        self._grave_keys = SortedKeys()
        self._floor = index
        for entry in self.entries.values():
            self._hold(entry)

    def get(self, key: str) -> Entry | None:
        """The entry of `key`."""
        return self.entries.get(key)

    def keys(self, prefix: str) -> list[str]:
        """Every key under `prefix`, in order."""
        return self._keys.under(prefix)

    def listing(self, prefix: str) -> Listing:
        """Every entry under `prefix`, with the prefix's index."""
        entries = self._under(prefix)
        return Listing(entries, self._index_of(prefix, entries))

    def index_of(self, prefix: str) -> int:
        """The index of the last change under `prefix`."""
        return self._index_of(prefix, self._under(prefix))

    def index_of_key(self, key: str) -> int:
        """The index of one key, as a blocking query counts: an absent key has that of the last change anywhere."""
        entry = self.entries.get(key)
        return self.changed if entry is None else max(entry.modify_index, self._floor)

    def apply(self, commit: Commit) -> None:
        """Make the commit true."""
        self.index = commit.index
        for key, entry in commit.writes.items():
            self._remove(key) if entry is None else self._put(entry)
        if commit.writes or commit.tombstones:
            self.changed = commit.index
        for key in commit.tombstones:
            self._bury(key, commit.index)
        if commit.opened is not None:
            self.sessions[commit.opened.id] = commit.opened
            self.sessions_changed = commit.index
        if commit.closed is not None:
            del self.sessions[commit.closed]
            self.sessions_changed = commit.index

    def _under(self, prefix: str) -> list[Entry]:
        return list(map(self.entries.__getitem__, self._keys.under(prefix)))

    def _index_of(self, prefix: str, entries: Sequence[Entry]) -> int:
        if not prefix:
            return self.changed
        newest = max(map(_modify_index, entries), default=0)
        buried = max(map(self._graves.__getitem__, self._grave_keys.under(prefix)), default=0)
        return max(newest, buried, self._floor) if newest or buried else self.changed

    def _put(self, entry: Entry) -> None:
        old = self.entries.get(entry.key)
        self._let_go(old) if old is not None else self._keys.add(entry.key)
        self.entries[entry.key] = entry
        self._hold(entry)

    def _remove(self, key: str) -> None:
        self._let_go(self.entries.pop(key))
        self._keys.discard(key)

    def _hold(self, entry: Entry) -> None:
        if entry.session is not None:
            self.held.setdefault(entry.session, set()).add(entry.key)

    def _let_go(self, entry: Entry) -> None:
        if entry.session is not None:
            held = self.held[entry.session]
            held.discard(entry.key)
            if not held:
                del self.held[entry.session]

    def _bury(self, key: str, index: int) -> None:
        if self._graves.pop(key, None) is None:
            self._grave_keys.add(key)
        self._graves[key] = index
        if len(self._graves) > MAX_TOMBSTONES:
            self._drop_oldest_graves()

    def _drop_oldest_graves(self) -> None:
        for key in list(self._graves)[: MAX_TOMBSTONES // 2]:
            self._floor = max(self._floor, self._graves.pop(key))
        self._grave_keys = SortedKeys(self._graves)
