"""Detects that the store's history was rewritten, which the blocking queries of views may miss for minutes.

Consul 1.8.7 behaves as follows (measured): a listing's index is the highest modify index of the keys under the prefix,
or of a tombstone under it. When a *parent* of the prefix is deleted, the tombstone is the parent's, so the prefix falls
back to an older tombstone: a blocking query that waits for a higher index sleeps on, although the tree is empty. When a
snapshot is restored, every blocking query ends at once with its old answer and its old index; the next one, with that
index, sleeps although the tree has changed. After a restore new writes continue above all earlier indexes; a server
that comes back with an older data directory gives the same indexes to other writes.

The model: every `interval` a process sends one read-only transaction, so it costs no write. The transaction holds one
check for each thing that the process believes of the store:

    a view      one key that it shows still exists. Deleting a parent deletes all keys of the view, so one is enough;
                everything else that happens under the prefix raises its index and wakes the watch.
    a writer    the record that it is responsible for has the modify index of its write.
    the chain   the last link that was seen is still among the links of `<root>/history`. The leading farm adds a link
                every `BEAT` seconds. Restored or lost data lacks the links that were added later.

A check that fails twice, `GRACE` seconds apart, while it is still believed, is contradicted: its view reads again, its
writer writes again. When the chain lacks the last link, or a watch was cut short, the history was rewritten: every view
reads again from scratch, and again after `ECHOES`, because servers that lag behind the leader may show the lost history
a little longer. A restore that undoes only the last beat leaves the chain intact; the watches that it cuts short
reveal it.

A process that was away for longer than the chain is long (`LINKS` beats) assumes that the history was rewritten, which
costs one reading of everything.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import structlog

from store.kv import ops
from store.kv.protocol import MAX_TXN_OPS, BadRecord, Denied, Op, Store, StoreError, TxnConflict
from store.kv.view import TreeView
from store.schema.keys import Keys
from store.schema.records import History as Links
from store.schema.records import decode, encode

log = structlog.get_logger(__name__)

INTERVAL = 2.0  # seconds between two checks
GRACE = 0.5  # seconds after which a failed check is repeated: the watch's answer, or our own write, may be on its way
ECHOES = (5.0, 20.0)  # seconds after a rewritten history at which everything is read once more
BEAT = 10.0  # seconds between two links
LINKS = 30


class Belief(NamedTuple):
    """An assumption of this process: `key` exists, with modify index `index` unless that is 0.

    `contradicted` is called when the store contradicts it.
    """

    key: str
    index: int  # type: ignore[assignment]  # hides tuple.index, which is never called on a belief
    contradicted: Callable[[], None]


class HistoryWatch:
    """Checks whether the store still has the history that this process knows.

    `views()`: the views that read again after a rewrite. `beliefs()`: further assumptions of the process.
    `on_rewritten()` is called when the history was rewritten, after the views were doubted.
    """

    def __init__(
        self,
        store: Store,
        keys: Keys,
        views: Callable[[], Iterable[TreeView[Any]]],
        *,
        beliefs: Callable[[], Iterable[Belief]] = lambda: (),
        on_rewritten: Callable[[], None] = lambda: None,
        interval: float = INTERVAL,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self.rewrites = 0
        self._store, self._keys = store, keys
        self._views, self._beliefs, self._on_rewritten = views, beliefs, on_rewritten
        self._interval, self._clock = interval, clock
        self._rng = rng or random.Random()
        self._last = ""  # the newest link that was seen
        self._cut_short: dict[int, int] = {}
        self._echoes: list[float] = []
        self._denied = False

    async def run(self) -> None:
        """Check until cancelled. The views themselves notice a store that is unavailable."""
        while True:
            await asyncio.sleep(self._interval * self._rng.uniform(0.8, 1.0))
            try:
                await self.check()
            except StoreError as error:
                log.debug("Could not check the store's history", error=str(error))

    async def check(self) -> None:
        """Compare once. Raises the store's errors."""
        failed = await self._contradictions(self._believed())
        if failed:
            await asyncio.sleep(GRACE)
            still = {(belief.key, belief.index) for belief in self._believed()}
            failed = await self._contradictions([belief for belief in failed if belief[:2] in still])
        for belief in failed:
            log.warning("The store lost data that was read or written earlier; reading again", key=belief.key)
            belief.contradicted()
        before, self._cut_short = self._cut_short, {id(view): view.cut_short for view in self._views()}
        if any(count > before.get(view, 0) for view, count in self._cut_short.items()):
            self._rewritten("a snapshot was restored", from_scratch=False)
        elif self._echoes and self._echoes[0] <= self._clock():
            self._echoes.pop(0)
            self._doubt(from_scratch=False)

    async def keep(self, member_key: str, session: str, leads: Callable[[], bool]) -> None:
        """Add a link every `BEAT` seconds, until cancelled, while `leads()`, fenced by the farm's member record."""
        while True:
            if leads():
                try:
                    await self._add_link(ops.check_session(member_key, session))
                except TxnConflict as conflict:
                    log.debug("Another farm added the next link of the history first", reason=str(conflict))
                except Denied as error:
                    if not self._denied:
                        reason = str(error)
                        log.warning("Could not write the history; a restored store will be noticed later", error=reason)
                    self._denied = True
                except StoreError as error:
                    log.debug("Could not add a link to the history", error=str(error))
            await asyncio.sleep(BEAT)

    def _believed(self) -> list[Belief]:
        # A view that can't read will read everything again anyway; until then it knows that it is behind.
        current = [view for view in self._views() if view.error is None]
        of_views = [Belief(key, 0, view.doubt) for view in current if (key := view.any_key)]
        return [*of_views, *self._beliefs()]

    async def _contradictions(self, beliefs: list[Belief]) -> list[Belief]:
        """Return the beliefs that the store contradicts; check the chain with the same reads."""
        failed: list[Belief] = []
        size = MAX_TXN_OPS - 1
        parts = [beliefs[start : start + size] for start in range(0, max(1, len(beliefs)), size)]
        while parts:
            part = parts[0]
            checks = (
                ops.check_index(belief.key, belief.index) if belief.index else ops.get(belief.key) for belief in part
            )
            try:
                answer = await self._store.txn([ops.get_tree(self._keys.history), *checks])
            except TxnConflict as conflict:
                false = {failure.op_index - 1 for failure in conflict.failures}
                failed += [part[number] for number in sorted(false)]
                parts[0] = [belief for number, belief in enumerate(part) if number not in false]
                continue
            self._check_chain(next((e.value for e in answer.entries if e.key == self._keys.history), None))
            del parts[0]
        return failed

    def _check_chain(self, value: bytes | None) -> None:
        links: list[str] = []
        if value is not None:
            try:
                links = decode(Links, self._keys.history, value).links
            except BadRecord:
                return  # the leading farm replaces it
        last, self._last = self._last, links[-1] if links else ""
        if last and last not in links:
            self._rewritten("the store was restored, emptied or replaced", from_scratch=True)

    def _rewritten(self, why: str, *, from_scratch: bool) -> None:
        log.warning("The store's history was rewritten; reading everything again", reason=why)
        self.rewrites += 1
        self._echoes = [self._clock() + delay for delay in ECHOES]
        self._doubt(from_scratch=from_scratch)
        self._on_rewritten()

    def _doubt(self, *, from_scratch: bool) -> None:
        for view in self._views():
            view.doubt(from_scratch=from_scratch)

    async def _add_link(self, fence: Op) -> None:
        entry = await self._store.get(self._keys.history, consistent=True)
        links: list[str] = []
        if entry is not None:
            try:
                links = decode(Links, entry.key, entry.value).links
            except BadRecord as error:
                log.error("The history can't be decoded; starting a new one", key=error.key, reason=error.reason)
        value = encode(Links([*links[1 - LINKS :], secrets.token_hex(4)]))
        await self._store.txn([fence, ops.cas(self._keys.history, value, entry.modify_index if entry else 0)])
