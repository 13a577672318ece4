"""Notices that the store's history was rewritten, which the blocking queries of views may miss for minutes.

What Consul 1.8.7 does (measured): a listing's index is the highest modify index of what is under the prefix, or of a
tombstone under it. When a *parent* of the prefix is deleted, the tombstone is the parent's, so the prefix falls back to
an older tombstone: a blocking query that waits for a higher index sleeps on, although the tree is empty. When a
snapshot is restored, every blocking query is ended at once with its old answer and its old index; the next one, with
that index, sleeps although the tree is another. After a restore new writes go on above all indexes of before; a server
that comes back with an older data directory gives the same indexes again to other writes.

The model: every `interval` a process sends one transaction that only reads, so it costs no write. It holds one check
for each thing that the process believes of the store:

    a view      one key that it shows still exists. Deleting a parent deletes all keys of the view, so one is enough;
                everything else that happens under the prefix raises its index and wakes the watch.
    a writer    the record that it answers for has the modify index that its write got.
    the chain   the last link that was seen is still among the links of `<root>/history`. The leading farm adds a link
                every `BEAT` seconds. Restored or lost data has not got the links that came after it.

A check that fails twice, `GRACE` seconds apart, while it is still believed, is contradicted: its view reads again, its
writer writes again. When the chain does not hold the last link, or a watch was cut short, the history is another:
every view reads again from scratch, and again after `ECHOES`, because servers that lag behind the leader may show the
lost history a little longer. What was undone within the last beat leaves the chain whole; then the watches that a
restore cuts short tell.

A process that was away for longer than the chain is long (`LINKS` beats) takes the history for another one: that costs
one reading of everything.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import structlog

from store import ops
from store.keys import Keys
from store.kv import MAX_TXN_OPS, Denied, Op, Store, StoreError, TxnConflict
from store.records import BadRecord, decode, encode
from store.records import History as Links
from store.view import TreeView

log = structlog.get_logger(__name__)

INTERVAL = 2.0  # seconds between two looks
GRACE = 0.5  # seconds after which a check that failed is repeated: the watch, or our own write, may be on its way
ECHOES = (5.0, 20.0)  # seconds after a rewritten history at which everything is read once more
BEAT = 10.0  # seconds between two links
LINKS = 30


class Belief(NamedTuple):
    """Something that this process takes for true: `key` exists, with modify index `index` unless that is 0.

    `contradicted` is called when the store says otherwise.
    """

    key: str
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody calls on a belief
    contradicted: Callable[[], None]


class HistoryWatch:
    """Looks whether the store still tells the history that this process knows.

    `views()`: the views to have read again. `beliefs()`: what else the process believes. `on_rewritten()` is called
    when the history is another one, after the views were doubted.
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
        """Look until cancelled. A store that is away is left to the views, which notice that by themselves."""
        while True:
            await asyncio.sleep(self._interval * self._rng.uniform(0.8, 1.0))
            try:
                await self.look()
            except StoreError as error:
                log.debug("The store's history can't be looked at", error=str(error))

    async def look(self) -> None:
        """Compare once. Raises the store's errors."""
        failed = await self._contradictions(self._believed())
        if failed:
            await asyncio.sleep(GRACE)
            still = {(belief.key, belief.index) for belief in self._believed()}
            failed = await self._contradictions([belief for belief in failed if belief[:2] in still])
        for belief in failed:
            log.warning("The store has not got what it had; looking again", key=belief.key)
            belief.contradicted()
        if self._a_watch_was_cut_short():
            self._rewritten("a snapshot was restored", anew=False)
        elif self._echoes and self._echoes[0] <= self._clock():
            self._echoes.pop(0)
            self._doubt(anew=False)

    async def keep(self, member_key: str, session: str, leads: Callable[[], bool]) -> None:
        """Add a link every `BEAT` seconds, until cancelled, while `leads()`; fenced by the farm's member record."""
        while True:
            if leads():
                try:
                    await self._add_link(ops.check_session(member_key, session))
                except TxnConflict as conflict:
                    log.debug("Another farm was faster with the history's next link", reason=str(conflict))
                except Denied as error:
                    self._report_denied(error)
                except StoreError as error:
                    log.debug("The history gets no link now", error=str(error))
            await asyncio.sleep(BEAT)

    def _believed(self) -> list[Belief]:
        witnesses = [Belief(key, 0, view.doubt) for view in self._views() if (key := view.witness)]
        return [*witnesses, *self._beliefs()]

    async def _contradictions(self, beliefs: list[Belief]) -> list[Belief]:
        """Those of `beliefs` that the store contradicts; looks at the chain on the way."""
        failed: list[Belief] = []
        size = MAX_TXN_OPS - 1
        for start in range(0, max(1, len(beliefs)), size):
            failed += await self._check(beliefs[start : start + size])
        return failed

    async def _check(self, beliefs: list[Belief]) -> list[Belief]:
        failed: list[Belief] = []
        while True:
            reading = [ops.get_tree(self._keys.history), *(_check(belief) for belief in beliefs)]
            try:
                answer = await self._store.txn(reading)
            except TxnConflict as conflict:
                false = {failure.op_index - 1 for failure in conflict.failures}
                failed += [beliefs[number] for number in sorted(false)]
                beliefs = [belief for number, belief in enumerate(beliefs) if number not in false]
                continue
            self._look_at_chain(next((e.value for e in answer.entries if e.key == self._keys.history), None))
            return failed

    def _look_at_chain(self, value: bytes | None) -> None:
        links: list[str] = []
        if value is not None:
            try:
                links = decode(Links, self._keys.history, value).links
            except BadRecord:
                return  # the leading farm replaces it
        last, self._last = self._last, links[-1] if links else ""
        if last and last not in links:
            self._rewritten("the store was restored, emptied or replaced", anew=True)

    def _a_watch_was_cut_short(self) -> bool:
        before, self._cut_short = self._cut_short, {id(view): view.cut_short for view in self._views()}
        return any(count > before.get(view, 0) for view, count in self._cut_short.items())

    def _rewritten(self, why: str, *, anew: bool) -> None:
        log.warning("The store's history is another one; everything is read again", reason=why)
        self.rewrites += 1
        self._echoes = [self._clock() + delay for delay in ECHOES]
        self._doubt(anew=anew)
        self._on_rewritten()

    def _doubt(self, *, anew: bool) -> None:
        for view in self._views():
            view.doubt(anew=anew)

    async def _add_link(self, fence: Op) -> None:
        entry = await self._store.get(self._keys.history, consistent=True)
        links: list[str] = []
        if entry is not None:
            try:
                links = decode(Links, entry.key, entry.value).links
            except BadRecord as error:
                log.error("The history can't be read; it begins again", key=error.key, reason=error.reason)
        value = encode(Links([*links[1 - LINKS :], secrets.token_hex(4)]))
        await self._store.txn([fence, ops.cas(self._keys.history, value, entry.modify_index if entry else 0)])

    def _report_denied(self, error: Denied) -> None:
        if not self._denied:
            log.warning("A restored store is noticed later: the history can't be written", error=str(error))
        self._denied = True


def _check(belief: Belief) -> Op:
    return ops.check_index(belief.key, belief.index) if belief.index else ops.get(belief.key)
