"""TreeView: a cached, decoded copy of everything under one prefix, kept current by one blocking query.

The model: `run` holds a single watch and replaces the cache with each answer, so a reader always sees one snapshot
(latest wins, nothing is queued). What changed is found by modify index; only changed records are decoded again. A
record that can't be decoded is kept apart in `bad`: it never hides its neighbours, and it is not a deletion, so its
last good value stays in `records`. The holder of its key's lock is still known, and is shown with that value.

A writer that passes its own committed transactions to `apply` sees them at once; an answer that is older than such a
write does not undo it, and a late answer, after the view has shown newer data, changes nothing. An index that goes
backwards (a restored store, a lagging server) is never trusted: the view reads again, consistently, and treats every
record as changed. A consistent read that was sent after an own write also decides about that write: an entry that it
does not show does not exist, because the store's history may have been rewritten.

A blocking query alone misses rewritten histories (`store.schema.history` explains when, and detects them). That module
calls `doubt`, which ends the current query and makes the view read the tree again. A query that Consul ends early with
nothing new is a sign of a restored snapshot: the view reads again, and counts it in `cut_short`.

A large answer is compared and decoded in steps between which other tasks run (`give_way`); then it is shown at once, so
that readers never see half of a change. A view whose records are independent (`whole` false) shows a large change in
steps, too.

A process reacts to what it reads with writes of its own, which end a watch, too: the whole tree would be read again
for what is known. Such a view watches the tree's `INDEX` only, and reads the tree if that is not the index of an own
write. A view that watches `KEYS` reads a few new keys alone, and the tree if its index or its keys show another change.
Either kind of explained change conceals what another process wrote in the same moment. Therefore the tree is read once
more afterwards, sooner the smaller it is, and within five seconds unless it is very large.

`RefreshBudget` bounds the work that the views of a process cause in the store and in the process: a refresh of a large
tree is paid for before the next one may start, while small trees, and the first changes after a quiet time, are seen at
once.
"""

from __future__ import annotations

import asyncio
import enum
import math
import random
import time
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import msgspec
import structlog

from store.kv.protocol import BadRecord, Entry, Listing, Op, Store, StoreError, TxnResult, Unavailable
from store.timing import Backoff, TokenBucket, give_way

log = structlog.get_logger(__name__)

T = TypeVar("T")
Item = TypeVar("Item")

REFRESH_COST = 0.0007  # seconds of work per answer, both ends together
ENTRY_COST = 0.000008  # and per entry in it
KEY_COST = 0.0000005  # per entry of a tree of which only keys or the index are asked
CATCH_UP_SHARE = 0.001  # of a core, per view, for reading what own writes may conceal
CATCH_UP_LIMIT = 5.0  # seconds, at most, until that is read, if it takes no more than
CATCH_UP_MOST = 0.02  # of a core
FEW = 16  # keys that are read one by one
OWN_ANSWER = 0.01  # seconds, at most, that an own write's answer is awaited: a tenth of what reading the tree costs
BUSY_LOOK = 0.1  # seconds between checks whether further own writes are expected
BUSY_LIMIT = 5.0  # seconds for which a view that expects own writes begins no watch
EMPTY_PAUSE = 0.2  # seconds between watches of an empty tree: Consul ends them with every write, to whatever key
FIRST_BACKOFF = 0.2  # seconds
MAX_BACKOFF = 5.0  # seconds between attempts while the store is unavailable
ROUNDING = 0.001  # seconds: stores count a wait in milliseconds
STEP = 500  # entries that are processed before other tasks may run
_WRITES = frozenset({"set", "cas", "lock", "unlock"})
_DELETES = frozenset({"delete", "delete-cas"})


class Record(msgspec.Struct, Generic[T], frozen=True, gc=False):
    """A decoded entry. `session` is the holder of the key's lock, or None."""

    value: T
    modify_index: int
    lock_index: int
    session: str | None


class Change(NamedTuple, Generic[T]):
    """A change of one key. `old` None: created; `new` None: deleted; both None: an undecodable record is gone.

    `origin`: the writer's name, as passed to `apply`; "" for what was read. All changes of a batch have the same one.
    """

    key: str
    old: Record[T] | None
    new: Record[T] | None
    origin: str = ""


_ChangedEntry = tuple[str, Entry | None, T | BadRecord | None]


class Watched(enum.Enum):
    """What a view asks the store for while it waits for a change."""

    TREE = enum.auto()
    KEYS = enum.auto()
    INDEX = enum.auto()


class RefreshBudget:
    """A budget of work for refreshes, as a token bucket of seconds.

    `share`: the part of one core that refreshes may use in the long run. `burst`: seconds of work that may be spent at
    once after a quiet time. One budget may be shared by several views.
    """

    def __init__(self, share: float = 0.2, burst: float = 0.5, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._budget = TokenBucket(share, burst, clock())

    def spend(self, entries: int, entry_cost: float = ENTRY_COST) -> None:
        """Account for one refresh that returned `entries` entries."""
        self._budget.take(self._clock(), _cost(entries, entry_cost))

    def delay(self) -> float:
        """Return the seconds until the next refresh is paid for."""
        return self._budget.delay(self._clock())


_views_cut_off: WeakKeyDictionary[Store, set[int]] = WeakKeyDictionary()


def _cut_off(store: Store) -> set[int]:
    """Return the ids of the store's views that find it unavailable: a farm has some forty, all affected at once."""
    return _views_cut_off.setdefault(store, set())


class TreeView(Generic[T]):
    """The records under `prefix`. Run `run()` as a task; read `records` from the same event loop.

    `decode(key, value)` raises `BadRecord` for a value that does not fit. `on_change` is called in the loop with every
    batch of changes, after `records` shows them; the first batch is the whole tree. `on_bad` is called for every record
    that turns out to be undecodable.

    `watched`: what is asked of the store until something changes; all but the whole tree costs little, however large
    that is. With `INDEX` the tree is not read for own writes; what another process writes in the same moment is seen
    later: as soon as reading the tree costs `CATCH_UP_SHARE` of a core, but within `CATCH_UP_LIMIT` seconds, unless
    that would take `CATCH_UP_MOST` of one (a tree of more than 12,000 entries: 40 s for 100,000). `busy()`: the reader
    has work in hand that will end in own writes, and new changes would wait behind it. No watch begins then after the
    first listing, nor after own writes, as the next own write would end it; for `BUSY_LIMIT` seconds at most.
    """

    def __init__(
        self,
        store: Store,
        prefix: str,
        decode: Callable[[str, bytes], T],
        *,
        on_change: Callable[[list[Change[T]]], None] | None = None,
        on_bad: Callable[[BadRecord], None] | None = None,
        budget: RefreshBudget | None = None,
        wait: float = 300.0,
        watched: Watched = Watched.TREE,
        busy: Callable[[], bool] | None = None,
        whole: bool = True,
        name: str = "",
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self.prefix = prefix
        self.name = name or prefix
        self.records: dict[str, Record[T]] = {}
        self.bad: dict[str, BadRecord] = {}
        self.index = 0
        self.last_contact: float | None = None
        self.error: StoreError | None = None
        self.cut_short = 0
        self._store, self._decode, self._on_change = store, decode, on_change
        self._on_bad = on_bad
        self._listeners: list[Callable[[Collection[str], str], None]] = []
        self._budget = budget or RefreshBudget(clock=clock)
        self._wait, self._clock = wait, clock
        self._watched, self._busy = watched, busy
        self._own_indexes: set[int] = set()  # of own writes, above the index of the last answer
        self._own_since = 0.0  # when the first of them was made
        self._is_first_watch = True
        self._rng = rng or random.Random()
        self._whole = whole
        self._showing = asyncio.Lock()
        self._bad_at: dict[str, int] = {}
        self._own: dict[str, int] = {}  # key -> index of our write to it, until an answer includes that
        self._synced = asyncio.Event()
        self._doubted = asyncio.Event()
        self._from_scratch = False  # the next consistent answer belongs to a rewritten history: all records may differ
        self._recheck = False  # the store was away, and may have come back with older data, and the same indexes again

    @property
    def is_synced(self) -> bool:
        """Return whether the first listing was received."""
        return self._synced.is_set()

    async def synced(self) -> None:
        """Wait for the first listing."""
        await self._synced.wait()

    def bad_index(self, key: str) -> int:
        """Return the modify index of a record in `bad`, for a caller that will replace it; 0 for any other key."""
        return self._bad_at.get(key, 0)

    @property
    def any_key(self) -> str | None:
        """A key that the view shows, or None: while the store has this key, no parent of the tree was deleted."""
        return next(iter(self.records), None) or next(iter(self.bad), None)

    @contextmanager
    def listening(self, listener: Callable[[Collection[str], str], None]) -> Iterator[None]:
        """While the context is open, call `listener(keys, origin)` for every batch of changes, after `on_change`."""
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)

    def doubt(self, *, from_scratch: bool = False) -> None:
        """Make the view read the tree again at once, consistently. `from_scratch`: the store's history was rewritten,
        so a known index may belong to other data now; every record is announced as changed."""
        self._from_scratch |= from_scratch
        self._doubted.set()

    async def run(self) -> None:
        """Keep the view current until cancelled. After an error of the store the view retries, with a bounded
        back-off."""
        backoff = Backoff(FIRST_BACKOFF, MAX_BACKOFF, rng=self._rng)
        try:
            while True:
                await asyncio.sleep(self._budget.delay())
                try:
                    await self._refresh()
                except StoreError as error:
                    self._report(error)
                    await asyncio.sleep(backoff.pause())
                else:
                    backoff.reset()
                    self._report(None)
        finally:
            _cut_off(self._store).discard(id(self))

    async def refresh(self) -> None:
        """Read the tree once, consistently, and show it. For callers that need current data before they act."""
        before, from_scratch, recheck, own = self.index, self._from_scratch, self._recheck, dict(self._own)
        listing = await self._store.list(self.prefix, consistent=True)
        if self.index != before and listing.index < self.index:
            return  # the watch has already shown newer data
        await self._show(listing, own=own, from_scratch=from_scratch, recheck=recheck)

    def apply(
        self,
        result: TxnResult,
        ops: Sequence[Op],
        origin: str = "",
        known: Mapping[bytes, Any] = MappingProxyType({}),
    ) -> None:
        """Show a transaction that this process has committed, without waiting for the watch. `origin` names the writer
        in the changes, so that it is not woken by its own write. `known`: for written values, what `decode` makes of
        them, where the writer has it.

        The index of a transaction that only deletes is unknown. What it shows may be older than what an answer has
        shown meanwhile, so the tree is read again, unless each deletion names the index of what it deletes.
        """
        if 0 < result.index <= self.index:
            return  # an answer that includes it arrived first, and may include later writes
        answers = {entry.key: entry for entry in result.entries}
        # under our prefix: per key the new entry, or None for a deletion, and the value if it is known
        effects: list[tuple[str, Entry | None, T | None]] = []
        for op in ops:
            if not op.key.startswith(self.prefix):
                continue
            if op.verb in _WRITES:
                entry, value = answers[op.key], known.get(op.value)
                if value is None:
                    entry = msgspec.structs.replace(entry, value=op.value)
                effects.append((op.key, entry, value))
                continue
            if op.verb in _DELETES:
                gone = [op.key]
            elif op.verb == "delete-tree":
                gone = [key for key in (*self.records, *self.bad) if key.startswith(op.key)]
            else:
                continue
            if not result.index and op.verb == "delete-cas":
                record = self.records.get(op.key)
                gone = gone if (record.modify_index if record else self.bad_index(op.key)) == op.index else []
            elif not result.index and any(key in self.records or key in self.bad for key in gone):
                self.doubt()
            effects += [(key, None, None) for key in gone]
        if effects and result.index:
            if not self._own_indexes:
                self._own_since = self._clock()
            self._own_indexes.add(result.index)
        changes: list[Change[T]] = []
        for key, written, value in effects:
            if self._own.get(key, 0) > result.index > 0:
                continue
            if result.index:
                self._own[key] = result.index
            self._put(key, written, changes, value, origin)
        self._announce(changes)

    async def refresh_key(self, key: str) -> None:
        """Read one key, consistently, and show it: after a refusal which shows that the cache is behind."""
        while True:
            before = self.index, self._own.get(key)
            listing = await self._store.list(key, consistent=True)
            if before == (self.index, self._own.get(key)):
                break  # else another change was shown during the read, and either of the two may be the newer one
        entry = next((entry for entry in listing.entries if entry.key == key), None)
        if listing.index > self.index:
            self._own[key] = listing.index
        changes: list[Change[T]] = []
        self._put(key, entry, changes)
        self._announce(changes)

    async def _refresh(self) -> None:
        before = self.index
        if before == 0 and not self._doubted.is_set():
            await self._show(await self._store.list(self.prefix))
            return
        if self._doubted.is_set() or self.error is not None:
            # A store that was unavailable may be back with an older index; a watch would wait until that passes ours.
            self._doubted.clear()
            await self.refresh()
            return
        if self._is_first_watch or any(own > before for own in self._own_indexes):
            self._is_first_watch = False
            await self._until_idle()
        if self.index != before or self._doubted.is_set():
            return
        if self._watched is Watched.TREE:
            asked = self._clock()
            listing = await self._unless_doubted(self._store.watch(self.prefix, before, self._wait))
            if listing is not None and listing.index == before:
                self._note_end(asked, self._wait)
        else:
            await self._unless_doubted(self._until_changed(before))
            listing = None if self._doubted.is_set() else await self._store.list(self.prefix)
        if listing is None or self._doubted.is_set():
            return
        if listing.index >= self.index:
            await self._show(listing)
        elif self.index == before:  # else `refresh` has already shown newer data
            log.warning("The store's index went backwards; reading again", view=self.name, was=before)
            await self.refresh()
        if not (self.records or self.bad):
            await self._pause(EMPTY_PAUSE)

    async def _pause(self, seconds: float) -> None:
        """Wait, but not longer than until the tree must be read again."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._doubted.wait()

    async def _until_idle(self, due: float = math.inf) -> None:
        """Wait while further own writes are expected, but not beyond `due`."""
        limit = min(self._clock() + BUSY_LIMIT, due)
        while self._busy is not None and self._busy() and self._clock() < limit and not self._doubted.is_set():
            await self._pause(BUSY_LOOK)

    async def _unless_doubted(self, waiting: Coroutine[Any, Any, Item]) -> Item | None:
        """Return the result; None when the tree must be read again instead."""
        watch = asyncio.create_task(waiting)
        doubted = asyncio.create_task(self._doubted.wait())
        try:
            await asyncio.wait({watch, doubted}, return_when=asyncio.FIRST_COMPLETED)
            return None if self._doubted.is_set() else watch.result()
        finally:
            watch.cancel()
            doubted.cancel()
            await asyncio.wait({watch, doubted})
            if not watch.cancelled():
                watch.exception()  # irrelevant once the tree is read again

    async def _until_changed(self, index: int) -> None:
        """Wait until the tree has to be read: a change is not explained, or what explained ones may conceal is due."""
        due, separator = math.inf, "" if self._watched is Watched.KEYS else "/"
        while (wait := min(self._wait, due - self._clock())) > ROUNDING:
            asked, before = self._clock(), index
            keys, index = await self._store.watch_keys(self.prefix, before, wait, separator=separator)
            self.last_contact = self._clock()
            size = len(self.records) + len(self.bad)
            if index == before:
                self._note_end(asked, wait)
            elif not keys and not size:
                await asyncio.sleep(EMPTY_PAUSE)
            elif index < before or not await self._is_explained(keys, index):
                return
            else:
                cost = _cost(size)
                soon = min(cost / CATCH_UP_SHARE, max(CATCH_UP_LIMIT, cost / CATCH_UP_MOST))
                since = self._own_since if self._own_indexes else self._clock()
                due = min(due, since + soon * self._rng.uniform(0.8, 1.0))
                self._budget.spend(size, KEY_COST)
                await asyncio.sleep(self._budget.delay())
                await self._until_idle(due)

    async def _is_explained(self, keys: Sequence[str], index: int) -> bool:
        """Return whether the tree has this index by an own write; or by new keys, few enough to be read one by one."""
        if self._watched is Watched.INDEX:
            if index not in self._own_indexes:  # the write's own answer may be on its way
                await asyncio.sleep(min(OWN_ANSWER, _cost(len(self.records)) / 10))
            return index in self._own_indexes
        known = {*self.records, *self.bad}
        new = [key for key in keys if key not in known]
        if not 0 < len(new) <= FEW:
            return False
        await asyncio.gather(*map(self.refresh_key, new))
        return known.issubset(keys) and any(
            record.modify_index == index for key in new if (record := self.records.get(key))
        )

    def _note_end(self, asked: float, wait: float) -> None:
        """Doubt what the view shows if a watch that brought nothing new has ended before its time."""
        if self._clock() - asked < wait - ROUNDING:
            log.info("The store ended a watch early; reading again", view=self.name)
            self.cut_short += 1
            self._doubted.set()

    def _report(self, error: StoreError | None) -> None:
        """Record the outcome of a refresh. An unavailable store is logged as one warning, however many views it has."""
        former, self.error = self.error, error
        self._recheck |= error is not None
        if type(error) is type(former):
            return
        others = _cut_off(self._store)
        if isinstance(error, Unavailable):
            warn = log.debug if others else log.warning
            others.add(id(self))
            warn("Could not read the store; cached data may be stale", view=self.name, error=str(error))
            return
        others.discard(id(self))
        if error is not None:
            log.warning("Could not refresh the view; its data may be stale", view=self.name, error=str(error))
        elif not isinstance(former, Unavailable):
            log.info("The view is current again", view=self.name)
        elif not others:
            log.info("The store is available again; all views are current")

    async def _show(
        self,
        listing: Listing,
        *,
        own: Mapping[str, int] | None = None,
        from_scratch: bool = False,
        recheck: bool = False,
    ) -> None:
        """Show an answer; it changes nothing when newer data was shown while it was being decoded.

        `own`: own writes that the answer decides about, with their indexes. `from_scratch`: the history was
        rewritten. `recheck`: it may have been, so every record is compared by its value, too.
        """
        before = self.index
        async with self._showing:
            doubted = from_scratch or recheck or listing.index < before
            changed, seen = await self._changed_entries(listing, doubted=doubted)
            if listing.index < self.index != before:
                return
            for key in [key for key, index in (own or {}).items() if self._own.get(key) == index]:
                del self._own[key]  # the answer includes the write, or the store has lost it
            if from_scratch:
                self._from_scratch = False
                self._forget_indexes()
            if recheck:
                self._recheck = False
            self.last_contact = self._clock()
            self._budget.spend(len(listing.entries))
            if listing.index < self.index:
                self._forget_indexes()
            self.index = max(1, listing.index)
            if self._own:
                self._own = {key: index for key, index in self._own.items() if index > listing.index}
            self._own_indexes = {index for index in self._own_indexes if index > listing.index}
            self._own_since = self._clock()
            gone = [key for key in (*self.records, *self.bad) if key not in seen]
            step = len(changed) + len(gone) if self._whole else STEP
            for part in _parts([*changed, *((key, None, None) for key in gone)], step):
                changes: list[Change[T]] = []
                for key, entry, decoded in part:
                    if key not in self._own:
                        self._put(key, entry, changes, decoded)
                self._announce(changes)
                if not self._whole:
                    await give_way()
            self._synced.set()

    async def _changed_entries(self, listing: Listing, *, doubted: bool) -> tuple[list[_ChangedEntry[T]], set[str]]:
        """Return the entries that differ from the records shown, decoded, and every existing key. Nothing is shown yet.

        `doubted`: a known index may belong to other data now.
        """
        changed: list[_ChangedEntry[T]] = []
        seen: set[str] = set()
        for part in _parts(listing.entries, STEP):
            await give_way()
            for entry in part:
                key = entry.key
                seen.add(key)
                old = self.records.get(key)
                if doubted or old is None or old.modify_index != entry.modify_index:
                    changed.append((key, entry, self._decoded(entry, again=doubted)))
        return changed, seen

    def _decoded(self, entry: Entry, *, again: bool = False) -> T | BadRecord | None:
        """Return the entry's value, or the error that it causes; unless `again`, None for an entry that is known to be
        bad."""
        if not again and self._bad_at.get(entry.key) == entry.modify_index:
            return None
        try:
            return self._decode(entry.key, entry.value)
        except BadRecord as error:
            return error
        except Exception as error:  # no error of a decoder may end the view
            return BadRecord(entry.key, f"its decoder failed: {error!r}")

    def _forget_indexes(self) -> None:
        """Forget all known indexes: the store was restored, so they may belong to other data; all is decoded again."""
        self._own.clear()
        self._own_indexes.clear()
        self._bad_at.clear()
        for key, record in self.records.items():
            self.records[key] = msgspec.structs.replace(record, modify_index=0)

    def _announce(self, changes: list[Change[T]]) -> None:
        if changes and self._on_change is not None:
            self._on_change(changes)
        if changes and self._listeners:
            self._notify({change.key for change in changes}, changes[0].origin)

    def _notify(self, keys: Collection[str], origin: str) -> None:
        for listener in tuple(self._listeners):
            listener(keys, origin)

    def _put(
        self,
        key: str,
        entry: Entry | None,
        changes: list[Change[T]],
        decoded: T | BadRecord | None = None,
        origin: str = "",
    ) -> None:
        """Show one entry, or its absence. `decoded`: its value, where that is known already."""
        old = self.records.get(key)
        if entry is None:
            was_bad = self.bad.pop(key, None)
            self._bad_at.pop(key, None)
            self.records.pop(key, None)
            if old is not None or was_bad is not None:
                changes.append(Change(key, old, None, origin))
            return
        if old is not None and old.modify_index == entry.modify_index and (decoded is None or decoded == old.value):
            return
        value = self._decoded(entry) if decoded is None else decoded
        if value is None:
            return
        if isinstance(value, BadRecord):
            # The last good value stays, but not its lock: the holder of the key is known even if the value is bad.
            known = self.bad.get(key)
            if known is not None and known.reason == value.reason and self._bad_at.get(key) == entry.modify_index:
                return
            self.bad[key], self._bad_at[key] = value, entry.modify_index
            log.error("Left out a record that can't be decoded", view=self.name, key=key, reason=value.reason)
            if old is not None and (old.session, old.lock_index) != (entry.session, entry.lock_index):
                self.records[key] = msgspec.structs.replace(old, session=entry.session, lock_index=entry.lock_index)
                changes.append(Change(key, old, self.records[key], origin))
            if self._on_bad is not None:
                self._on_bad(value)
            self._notify((key,), origin)
            return
        if self.bad.pop(key, None):
            self._bad_at.pop(key, None)
        new = Record(value, entry.modify_index, entry.lock_index, entry.session)
        self.records[key] = new
        changes.append(Change(key, old, new, origin))


def _cost(entries: int, entry_cost: float = ENTRY_COST) -> float:
    """Return the seconds of work that an answer with these entries takes."""
    return REFRESH_COST + entries * entry_cost


def _parts(items: Sequence[Item], size: int) -> Iterator[Sequence[Item]]:
    for start in range(0, len(items), max(1, size)):
        yield items[start : start + size]
