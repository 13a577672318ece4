"""The live farms, and the shards that each prefers.

Farms with the same RC selector form a group. Within a group, rendezvous hashing (Thaler and Ravishankar, 1998) with
bounded loads gives each shard one preferred farm. It depends on the names of the live farms only, so no coordination is
needed; no farm has more than one shard more than another; and a join or a leave moves its own share and a few more.
While the farms' views of the members differ, several farms or none may prefer a shard: the RCs' locks decide which farm
owns them, and free RCs are claimed when the views agree. A member is live while its record carries a session; the store
removes that when the farm's lease ends.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache

import structlog

from store.errors import RcfarmError
from store.kv import ops
from store.kv.protocol import BadRecord, Store, TxnConflict
from store.kv.view import Change, TreeView
from store.schema.keys import Keys
from store.schema.records import FarmMember, decode, encode

log = structlog.get_logger(__name__)


class NameTaken(RcfarmError):
    """Another live farm has this farm's name."""


def assignment(shards: Iterable[str], farms: Iterable[str]) -> Mapping[str, str]:
    """Return the preferred farm of each shard, if these farms are live; empty without a farm."""
    return _assignment(tuple(sorted(set(shards))), tuple(sorted(set(farms))))


@lru_cache(maxsize=16)
def _assignment(shards: Sequence[str], farms: Sequence[str]) -> Mapping[str, str]:
    """Assign shards to farms, in descending order of the pair's hash, if the shard is free and the farm has room.

    Every farm has room for its whole share, and as many farms as there are shards left over have room for one more.
    """
    if not farms:
        return {}
    share, left_over = divmod(len(shards), len(farms))
    counts = dict.fromkeys(farms, 0)
    preferred: dict[str, str] = {}
    for _, farm, shard in sorted(
        ((_weight(farm, shard), farm, shard) for farm in farms for shard in shards), reverse=True
    ):
        if shard in preferred or counts[farm] > share or (counts[farm] == share and not left_over):
            continue
        left_over -= counts[farm] == share
        counts[farm] += 1
        preferred[shard] = farm
    return preferred


def leader_of(task: str, farms: Iterable[str]) -> str | None:
    """Return the single farm that does a task for all farms, or None without a farm."""
    return max(farms, key=lambda farm: _weight(farm, task), default=None)


def _weight(farm: str, thing: str) -> bytes:
    return hashlib.sha256(f"{farm}/{thing}".encode()).digest()


class Membership:
    """The live farms, and this farm's own record. `on_change()` is called whenever the live members change."""

    def __init__(
        self,
        store: Store,
        keys: Keys,
        me: FarmMember,
        on_change: Callable[[], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.me = me
        self._store, self._keys, self._on_change = store, keys, on_change
        self._live: frozenset[tuple[str, str]] = frozenset()
        self.view: TreeView[FarmMember] = TreeView(
            store,
            keys.farms,
            self._decode,
            on_change=self._fold,
            name="farms",
            clock=clock,
        )

    @property
    def key(self) -> str:
        """The key of this farm's member record, a lock."""
        return self._keys.farm(self.me.farm)

    async def join(self, session: str) -> None:
        """Become a member under `session`. Raises `NameTaken`, and what `Store.txn` raises."""
        taking_part = [ops.lock(self.key, encode(self.me), session)]
        try:
            result = await self._store.txn(taking_part)
        except TxnConflict as error:
            raise NameTaken(
                f"a farm named {self.me.farm} is live, or its lease has not ended yet; names must differ"
            ) from error
        self.view.apply(result, taking_part)

    async def leave(self, session: str) -> None:
        """Give up the membership, so that other farms take over at once. Raises what `Store.txn` raises."""
        await self._store.txn([ops.check_session(self.key, session), ops.delete(self.key)])

    def includes(self, session: str) -> bool:
        """Return whether this farm is a member under `session`, by the view."""
        record = self.view.records.get(self.key)
        return record is not None and record.session == session

    def group(self) -> list[str]:
        """Return the live farms with this farm's selector, in order."""
        return sorted(farm for farm, selector in self._live if selector == self.me.selector)

    def preferred(self, shards: Iterable[str]) -> set[str]:
        """Return the shards that prefer this farm. `shards`: all shards of the store."""
        return {shard for shard, farm in assignment(shards, self.group()).items() if farm == self.me.farm}

    def leads(self, task: str) -> bool:
        """Return whether this farm is the one that does a task for all farms, whatever their selectors."""
        return leader_of(task, (farm for farm, _ in self._live)) == self.me.farm

    def _decode(self, key: str, value: bytes) -> FarmMember:
        member = decode(FarmMember, key, value)
        if key != self._keys.farm(member.farm):
            raise BadRecord(key, f"farm: {member.farm!r} is another farm's name")
        return member

    def _fold(self, changes: list[Change[FarmMember]]) -> None:
        live = frozenset((m.value.farm, m.value.selector) for m in self.view.records.values() if m.session)
        if live != self._live:
            log.info("The live farms changed", farms=sorted(farm for farm, _ in live))
            self._live = live
            self._on_change()
