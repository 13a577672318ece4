"""Claims: the locks of free items are taken, many at a time, and given back.

The model: ownership is a lock: the item's owner key carries the session of its owner. A lock creates its key, so a
member with a stale view could own an item that was deleted, and act for it. Therefore the lock of an item that never
had an owner comes with a read of its spec, which fails if the spec is gone. For an item that had an owner, the fencing
token must rise; if it does not, the key is new, and the shard is read before anything is done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import Any, Generic, Protocol, TypeVar

from store.kv import ops
from store.kv.group_commit import packed
from store.kv.protocol import MAX_TXN_OPS, BadRecord, Op, OwnershipLost, Store, TxnConflict
from store.kv.view import Record, TreeView
from store.schema.records import Labels, encode
from store.schema.selectors import Selector


class Item(Protocol):
    """What can be owned, as the view of its shard shows it.

    `bad_spec` is set while the stored spec is undecodable. `is_husk`: no spec is left, and nothing that runs, or may
    run; only records that its owner has to remove.
    """

    id: str

    @property
    def shard(self) -> Any: ...
    @property
    def spec(self) -> Record[Any] | None: ...
    @property
    def bad_spec(self) -> BadRecord | None: ...
    @property
    def owner(self) -> Record[Any] | None: ...
    @property
    def session(self) -> str | None:
        """The session that owns the item."""

    @property
    def labels(self) -> Labels:
        """The labels that selectors match; read only while there is a spec."""

    @property
    def is_husk(self) -> bool: ...


I = TypeVar("I", bound=Item)  # noqa: E741
I_co = TypeVar("I_co", bound=Item, covariant=True)


class Shard(Protocol[I_co]):
    """One shard as its view shows it. `claiming` is held while its items are being claimed, or it is being handed over.

    `run()` keeps it current until cancelled; `close()` drops every record, once it is not watched any more.
    """

    name: str
    claiming: asyncio.Lock

    @property
    def view(self) -> TreeView[Any]: ...
    def __iter__(self) -> Iterator[I_co]: ...
    async def run(self) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of owned items: its words in messages and log fields, its shards and its keys.

    `item` ("RC") and `member` ("farm") are singular; the plural has an "s". `shards`: the names of all shards.
    `spec_key(id)` and `owner_key(id)`: the item's keys. `owner_record()`: the value of a lock that is taken now.
    """

    item: str
    member: str
    shards: Sequence[str]
    spec_key: Callable[[str], str]
    owner_key: Callable[[str], str]
    owner_record: Callable[[], Any]

    @property
    def title(self) -> str:
        """The word for a member, at the beginning of a sentence."""
        return self.member.capitalize()


class Claims(Generic[I]):
    """Claims and releases items for one member, many at a time. `claimed`, `conflicts` count since the start.

    Up to 63 items of a shard are claimed in one transaction, together with the check that this process is still a
    member. The store refuses a transaction as a whole, so the items that conflict are dropped and the others are sent
    again. A dropped item was claimed by another member, has only just been released, or is gone; the view shows which.
    """

    def __init__(self, store: Store, kind: Kind, selector: Selector) -> None:
        self.claimed = self.conflicts = 0
        self._store, self._kind, self._selector = store, kind, selector
        self._everything = selector == Selector.everything()

    def wants(self, item: I) -> bool:
        """Return whether the item is free and this member's selector matches it.

        An item with an undecodable spec has no labels that a selector could match: a member without a selector claims
        it, and reports the error. A husk (the claim of a member that then died came after the deletion) is claimed, for
        removal, by any member that finds it.
        """
        if item.session is not None:
            return False
        if item.bad_spec is not None:
            return self._everything
        return item.is_husk if item.spec is None else self._selector.matches(item.labels)

    async def claim(self, shard: Shard[I], items: Sequence[I], member_key: str, session: str) -> int:
        """Claim these items of one shard. Return how many were refused; the view shows which are ours now.

        Raises `OwnershipLost` when this process is not a member under `session` any more, and the store's errors.
        """
        kind, owner = self._kind, self._kind.owner_record()
        value = encode(owner)
        wanted = []
        for item in items:
            lock = ops.lock(kind.owner_key(item.id), value, session)
            had_owner = item.owner is not None and item.owner.lock_index > 0
            is_there = item.spec is not None or item.bad_spec is not None
            wanted.append([ops.get(kind.spec_key(item.id)), lock] if is_there and not had_owner else [lock])
        tokens = {kind.owner_key(item.id): item.owner.lock_index for item in items if item.owner}
        refused = 0
        for batch in packed(wanted, MAX_TXN_OPS - 1, len):
            fence = [ops.check_session(member_key, session)]
            refused += await self._apply(shard, batch, fence, tokens, {value: owner})
        self.claimed += len(items) - refused
        self.conflicts += refused
        return refused

    async def release(self, shard: Shard[I], items: Sequence[I], session: str) -> None:
        """Release these items, except those that are not ours any more. Raises the store's errors."""
        giving = []
        for item in items:
            owner = item.owner
            value = encode(owner.value) if owner else b"{}"
            giving.append([ops.unlock(self._kind.owner_key(item.id), value, session)])
        for batch in packed(giving, MAX_TXN_OPS, len):
            await self._apply(shard, batch, [])

    async def _apply(
        self,
        shard: Shard[I],
        wanted: list[list[Op]],
        fence: list[Op],
        tokens: Mapping[str, int] = MappingProxyType({}),
        known: Mapping[bytes, Any] = MappingProxyType({}),
    ) -> int:
        """Apply the operations, each item's together, without the items that conflict. Return how many were dropped.

        `tokens`: the fencing tokens of the locks to take, as the view shows them. `known`: see `TreeView.apply`.
        """
        refused = 0
        while wanted:
            writing = [*fence, *chain.from_iterable(wanted)]
            try:
                result = await self._store.txn(writing)
                if any(0 < entry.lock_index <= tokens.get(entry.key, 0) for entry in result.entries):
                    await shard.view.refresh()
                shard.view.apply(result, writing, known=known)
            except OwnershipLost:
                raise
            except TxnConflict as conflict:
                _, *errors = ops.refusals([fence, *wanted], conflict.failures)
                kept = [unit for unit, error in zip(wanted, errors, strict=True) if error is None]
                refused += len(wanted) - len(kept)
                wanted = kept
                continue
            break
        return refused
