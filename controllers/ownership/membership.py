"""The live members of one kind, such as the farms, and the shards that each prefers.

Members with the same selector form a group. Within a group, rendezvous hashing (Thaler and Ravishankar, 1998) with
bounded loads gives each shard one preferred member. It depends on the names of the live members only, so no
coordination is needed; no member has more than one shard more than another; and a join or a leave moves its own share
and a few more.
While the views of the members differ, several members or none may prefer a shard: the items' locks decide which member
owns them, and free items are claimed when the views agree. A member is live while its record carries a session; the
store removes that when the member's lease ends.

Some tasks are done by one member for all. `Membership.leads` is by this member's view. A lock (`Leadership`), in
contrast, is held by one member at a time whatever each of them sees, and it fences what the leader writes. It stays
with its holder while that is alive; when its session ends, the next member that asks gets it.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Generic, Protocol, TypeVar

import structlog

from store.errors import RcfarmError
from store.kv import ops
from store.kv.protocol import BadRecord, Op, Store, TxnConflict
from store.kv.view import Change, TreeView
from store.schema.records import StoredRecord, decode, encode

log = structlog.get_logger(__name__)

M = TypeVar("M", bound="Member")


class NameTaken(RcfarmError):
    """Another live member has this member's name."""


def assignment(shards: Iterable[str], members: Iterable[str]) -> Mapping[str, str]:
    """Return the preferred member of each shard, if these members are live; empty without a member."""
    return _assignment(tuple(sorted(set(shards))), tuple(sorted(set(members))))


@lru_cache(maxsize=16)
def _assignment(shards: Sequence[str], members: Sequence[str]) -> Mapping[str, str]:
    """Assign shards to members, in descending order of the pair's hash, if the shard is free and the member has room.

    Every member has room for its whole share, and as many members as there are shards left over have room for one more.
    """
    if not members:
        return {}
    share, left_over = divmod(len(shards), len(members))
    counts = dict.fromkeys(members, 0)
    preferred: dict[str, str] = {}
    for _, member, shard in sorted(
        ((_weight(member, shard), member, shard) for member in members for shard in shards), reverse=True
    ):
        if shard in preferred or counts[member] > share or (counts[member] == share and not left_over):
            continue
        left_over -= counts[member] == share
        counts[member] += 1
        preferred[shard] = member
    return preferred


def leader_of(task: str, members: Iterable[str]) -> str | None:
    """Return the single member that does a task for all members, or None without a member."""
    return max(members, key=lambda member: _weight(member, task), default=None)


def _weight(member: str, thing: str) -> bytes:
    return hashlib.sha256(f"{member}/{thing}".encode()).digest()


class Member(Protocol):
    """A member's record. `name` is the last part of its key; members of equal `selector` form a group."""

    @property
    def name(self) -> str: ...
    @property
    def selector(self) -> str: ...


class Membership(Generic[M]):
    """The live members, and this member's own record. `on_change()` is called whenever the live members change.

    `prefix`: the folder of the records, one key per name. `kind`: the word for a member, for messages.
    """

    def __init__(
        self,
        store: Store,
        prefix: str,
        me: M,
        on_change: Callable[[], None],
        *,
        kind: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.me = me
        self._store, self._prefix, self._kind, self._on_change = store, prefix, kind, on_change
        self._live: frozenset[tuple[str, str]] = frozenset()
        self.view: TreeView[M] = TreeView(
            store,
            prefix,
            self._decode,
            on_change=self._fold,
            name=f"{kind}s",
            clock=clock,
        )

    @property
    def key(self) -> str:
        """The key of this member's record, a lock."""
        return self._prefix + self.me.name

    async def join(self, session: str) -> None:
        """Become a member under `session`. Raises `NameTaken`, and what `Store.txn` raises."""
        taking_part = [ops.lock(self.key, encode(self.me), session)]  # type: ignore[arg-type]  # members are records
        try:
            result = await self._store.txn(taking_part)
        except TxnConflict as error:
            raise NameTaken(
                f"a {self._kind} named {self.me.name} is live, or its lease has not ended yet; names must differ"
            ) from error
        self.view.apply(result, taking_part)

    async def publish(self, me: M, session: str) -> None:
        """Replace this member's own record. Raises what `Store.txn` raises, such as `OwnershipLost` after `leave`."""
        writing = [ops.check_session(self.key, session), ops.lock(self.key, encode(me), session)]  # type: ignore[arg-type]  # members are records
        self.view.apply(await self._store.txn(writing), writing)
        self.me = me

    async def leave(self, session: str) -> None:
        """Give up the membership, so that other members take over at once. Raises what `Store.txn` raises."""
        await self._store.txn([ops.check_session(self.key, session), ops.delete(self.key)])

    def includes(self, session: str) -> bool:
        """Return whether this process is a member under `session`, by the view."""
        record = self.view.records.get(self.key)
        return record is not None and record.session == session

    def group(self) -> list[str]:
        """Return the names of the live members with this member's selector, in order."""
        return sorted(name for name, selector in self._live if selector == self.me.selector)

    def live(self) -> frozenset[str]:
        """Return the names of the live members, whatever their selectors."""
        return frozenset(name for name, _ in self._live)

    def known(self) -> frozenset[str]:
        """Return the names of all members with a record, live or not."""
        return frozenset(key.removeprefix(self._prefix) for key in self.view.records)

    def preferred(self, shards: Iterable[str]) -> set[str]:
        """Return the shards that prefer this member. `shards`: all shards of the store."""
        return {shard for shard, name in assignment(shards, self.group()).items() if name == self.me.name}

    def leads(self, task: str) -> bool:
        """Return whether this member is the one that does a task for all members, whatever their selectors."""
        return leader_of(task, (name for name, _ in self._live)) == self.me.name

    def _decode(self, key: str, value: bytes) -> M:
        member = decode(type(self.me), key, value)  # type: ignore[type-var]  # members are records
        if key != self._prefix + member.name:
            raise BadRecord(key, f"{self._kind}: {member.name!r} is another {self._kind}'s name")
        return member

    def _fold(self, changes: list[Change[M]]) -> None:
        live = frozenset((m.value.name, m.value.selector) for m in self.view.records.values() if m.session)
        if live != self._live:
            log.info(f"The live {self._kind}s changed", **{f"{self._kind}s": sorted(name for name, _ in live)})
            self._live = live
            self._on_change()


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
