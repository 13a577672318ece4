"""Which farms live, and which of them prefers a shard.

Farms with the same RC selector form a group. Within a group, rendezvous hashing (Thaler and Ravishankar, 1998) with
bounded loads gives each shard one preferred farm. It depends on the names of the live farms only, so no coordination is
needed; no farm has more than one shard more than another; and a join or a leave moves its own share and a few more.
Farms whose views of the members differ for a moment may both prefer a shard, or none of them may: the RCs' locks decide
who works, and what is free is claimed when the views agree. A member lives while its record carries a session; the
store drops that when the farm's lease ends.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache

import structlog

from store import ops
from store.keys import Keys
from store.kv import Store, TxnConflict
from store.records import BadRecord, FarmMember, decode, encode
from store.view import Change, TreeView

log = structlog.get_logger(__name__)


class NameTaken(Exception):
    """Another live farm has our name."""


def assignment(shards: Iterable[str], farms: Iterable[str]) -> Mapping[str, str]:
    """The preferred farm of each shard, when these farms live; nothing without a farm."""
    return _assignment(tuple(sorted(set(shards))), tuple(sorted(set(farms))))


@lru_cache(maxsize=16)
def _assignment(shards: Sequence[str], farms: Sequence[str]) -> Mapping[str, str]:
    """Pairs of farm and shard are taken by descending hash, each if the shard is free and the farm has room.

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
    """The one farm that does a task for all; None when there is no farm."""
    return max(farms, key=lambda farm: _weight(farm, task), default=None)


def _weight(farm: str, thing: str) -> bytes:
    return hashlib.sha256(f"{farm}/{thing}".encode()).digest()


class Membership:
    """The live farms, and our own record among them. `on_change()` is called whenever the live members change."""

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
        """Our member record: the lock that says that we take part."""
        return self._keys.farm(self.me.farm)

    async def run(self) -> None:
        await self.view.run()

    async def join(self, session: str) -> None:
        """Take part under `session`. Raises `NameTaken`, and what `Store.txn` raises."""
        taking_part = [ops.lock(self.key, encode(self.me), session)]
        try:
            result = await self._store.txn(taking_part)
        except TxnConflict as error:
            raise NameTaken(
                f"a farm called {self.me.farm} is alive, or was until its lease ends; names must differ"
            ) from error
        self.view.apply(result, taking_part)

    async def leave(self, session: str) -> None:
        """Stop taking part, so that the others take over at once. Raises what `Store.txn` raises."""
        await self._store.txn([ops.check_session(self.key, session), ops.delete(self.key)])

    def includes(self, session: str) -> bool:
        """Whether we take part under `session`, as far as the view shows."""
        record = self.view.records.get(self.key)
        return record is not None and record.session == session

    def group(self) -> list[str]:
        """The live farms that have our selector, in order."""
        return sorted(farm for farm, selector in self._live if selector == self.me.selector)

    def preferred(self, shards: Iterable[str]) -> set[str]:
        """Those of `shards`, which are all that there are, that we are the preferred farm for."""
        return {shard for shard, farm in assignment(shards, self.group()).items() if farm == self.me.farm}

    def leads(self, task: str) -> bool:
        """Whether a task that one farm of all, whatever their selectors, is to do is ours."""
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
