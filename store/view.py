"""TreeView: a cached, decoded copy of everything under one prefix, kept current by one blocking query.

The model: `run` holds a single watch and replaces the cache with each answer, so a reader always sees one snapshot
(latest wins, nothing is queued). What changed is found by modify index; only changed records are decoded again. A
record that can't be decoded is kept apart in `bad`: it never hides its neighbours, and it is not a deletion, so its
last good value stays in `records`. Who holds the lock of its key is still known, and is shown with that value.

A writer that shows its own committed transactions to `apply` sees them at once; an answer that is older than such a
write does not undo it, and one that comes late, after the view has shown what came after it, changes nothing. An index
that goes backwards (a restored store, a lagging server) is never believed as it is: the view reads again, consistently,
and starts from there, taking nothing for unchanged. A consistent read that was sent after an own write decides about
that write, too: what it does not show is not there, because the store's history may have been rewritten.

A blocking query alone misses rewritten histories (`store.history` says when, and watches for them). It calls `doubt`,
which ends the query that is under way and has the tree read again. A query that Consul ends before its time with
nothing new is a sign of a restored snapshot: the view reads again, and counts it in `cut_short`.

A large answer is compared and decoded in steps between which other tasks run (`store.turns`); then it is shown at once,
so that what belongs together never shows by halves. A view whose records stand each for itself (`whole` false) shows a
large change in steps, too.

`Pace` bounds what the views of a process cost the store and themselves: a refresh of a large tree is paid for before
the next one may start, while small trees, and the first changes after a quiet time, are seen at once.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Generic, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import msgspec
import structlog

from store.kv import Entry, Listing, Op, Store, StoreError, TxnResult, Unavailable
from store.records import BadRecord
from store.turns import give_way

log = structlog.get_logger(__name__)

T = TypeVar("T")
Item = TypeVar("Item")

REFRESH_COST = 0.0007  # seconds of work per answer, both ends together
ENTRY_COST = 0.000008  # and per entry in it
CATCH_UP = 10.0  # seconds until a view that its own writes do not wake looks at what others wrote meanwhile
MAX_BACKOFF = 5.0  # seconds between attempts while the store is away
STEP = 500  # entries that are worked on before other tasks may run
_WRITES = frozenset({"set", "cas", "lock", "unlock"})
_DELETES = frozenset({"delete", "delete-cas"})


class Record(NamedTuple, Generic[T]):
    """A decoded entry. `session` is the holder of the key's lock, or None."""

    value: T
    modify_index: int
    lock_index: int
    session: str | None


class Change(NamedTuple, Generic[T]):
    """`old` None: created; `new` None: deleted; both None: a record that could not be decoded is gone."""

    key: str
    old: Record[T] | None
    new: Record[T] | None


_Digest = tuple[str, Entry | None, T | BadRecord | None]


class Pace:
    """A budget of work for refreshes, as a token bucket of seconds.

    `share`: the part of one core that refreshes may use in the long run. `burst`: seconds of work that may be spent at
    once after a quiet time. One Pace may be shared by several views.
    """

    def __init__(self, share: float = 0.2, burst: float = 0.5, clock: Callable[[], float] = time.monotonic) -> None:
        self._share, self._burst, self._clock = share, burst, clock
        self._balance, self._at = burst, clock()

    def spend(self, entries: int) -> None:
        """Account for one refresh that answered `entries` entries."""
        self._accrue()
        self._balance -= REFRESH_COST + entries * ENTRY_COST

    def delay(self) -> float:
        """Seconds until the next refresh is paid for."""
        self._accrue()
        return max(0.0, -self._balance / self._share)

    def _accrue(self) -> None:
        now = self._clock()
        self._balance = min(self._burst, self._balance + (now - self._at) * self._share)
        self._at = now


_views_cut_off: WeakKeyDictionary[Store, set[int]] = WeakKeyDictionary()


def _cut_off(store: Store) -> set[int]:
    """The views of the store, by identity, that find it away: a farm has some forty, and they find it at once."""
    return _views_cut_off.setdefault(store, set())


class TreeView(Generic[T]):
    """The records under `prefix`. Run `run()` as a task; read `records` from the same event loop.

    `decode(key, value)` raises `BadRecord` for a value that does not fit. `on_change` is called in the loop with every
    batch of changes, after `records` shows them; the first batch is the whole tree. `on_bad` is called for every record
    that turns out to be undecodable.

    `own_writes_wake` false: a watch that begins after own writes does not answer for those, which saves reading a large
    tree again for what is known already; what others wrote between them is then seen up to `CATCH_UP` seconds later.
    """

    def __init__(
        self,
        store: Store,
        prefix: str,
        decode: Callable[[str, bytes], T],
        *,
        on_change: Callable[[list[Change[T]]], None] | None = None,
        on_bad: Callable[[BadRecord], None] | None = None,
        pace: Pace | None = None,
        wait: float = 300.0,
        own_writes_wake: bool = True,
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
        self._listeners: list[Callable[[Collection[str]], None]] = []
        self._pace = pace or Pace(clock=clock)
        self._wait, self._clock = wait, clock
        self._own_writes_wake, self._own_index = own_writes_wake, 0
        self._rng = rng or random.Random()
        self._whole = whole
        self._showing = asyncio.Lock()
        self._bad_at: dict[str, int] = {}
        self._own: dict[str, int] = {}  # key -> index of our write to it, until an answer includes that
        self._synced = asyncio.Event()
        self._doubted = asyncio.Event()
        self._anew = False  # the next consistent answer is of another history: nothing that was seen is like it

    @property
    def is_synced(self) -> bool:
        """Whether a first listing is in."""
        return self._synced.is_set()

    async def synced(self) -> None:
        """Wait for the first listing."""
        await self._synced.wait()

    def bad_index(self, key: str) -> int:
        """The modify index of a record in `bad`, for whoever means to replace it; 0 for any other key."""
        return self._bad_at.get(key, 0)

    @property
    def witness(self) -> str | None:
        """A key that the view shows, or None: while the store has it, the tree was not deleted with a parent."""
        return next(iter(self.records), None) or next(iter(self.bad), None)

    @contextmanager
    def listening(self, listener: Callable[[Collection[str]], None]) -> Iterator[None]:
        """While the context is open, call `listener` with the keys of every batch of changes, after `on_change`."""
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)

    def doubt(self, *, anew: bool = False) -> None:
        """Have the tree read again at once, consistently. `anew`: the store's history is another, so that an index that
        was seen may stand for something else now; every record is announced as changed."""
        self._anew |= anew
        self._doubted.set()

    async def run(self) -> None:
        """Keep the view current until cancelled; whatever error the store answers, it is asked again, with a bounded
        back-off."""
        failures = 0
        try:
            while True:
                await asyncio.sleep(self._pace.delay())
                try:
                    await self._refresh()
                except StoreError as error:
                    failures += 1
                    self._failed(error)
                    await asyncio.sleep(self._rng.uniform(0.5, 1.0) * min(MAX_BACKOFF, 0.1 * 2 ** min(failures, 10)))
                else:
                    failures = 0
                    self._succeeded()
        finally:
            _cut_off(self._store).discard(id(self))

    async def refresh(self) -> None:
        """Read the tree once, consistently, and show it. For callers that must be sure before they act."""
        before, anew, own = self.index, self._anew, dict(self._own)
        listing = await self._store.list(self.prefix, consistent=True)
        if self.index != before and listing.index < self.index:
            return  # the watch has shown newer things meanwhile
        await self._show(listing, own=own, anew=anew)

    def apply(self, result: TxnResult, ops: Sequence[Op]) -> None:
        """Show a transaction that this process has committed, without waiting for the watch.

        One that only deletes tells no index: an answer that was on its way may undo it until the next one.
        """
        if 0 < result.index <= self.index:
            return  # an answer that includes it was faster, and may include what came after it
        effects = self._effects(result, ops)
        if effects and not self._own_writes_wake:
            self._own_index = max(self._own_index, result.index)
        changes: list[Change[T]] = []
        for key, entry in effects:
            if self._own.get(key, 0) > result.index > 0:
                continue
            if result.index:
                self._own[key] = result.index
            self._put(key, entry, changes)
        self._announce(changes)

    async def refresh_key(self, key: str) -> None:
        """Read one key, consistently, and show it: after a refusal that says that the cache is behind."""
        while True:
            before = self.index, self._own.get(key)
            listing = await self._store.list(key, consistent=True)
            if before == (self.index, self._own.get(key)):
                break  # else something was shown meanwhile, and which of the two is newer can't be told
        entry = next((entry for entry in listing.entries if entry.key == key), None)
        if listing.index > self.index:
            self._own[key] = listing.index
        changes: list[Change[T]] = []
        self._put(key, entry, changes)
        self._announce(changes)

    def _effects(self, result: TxnResult, ops: Sequence[Op]) -> list[tuple[str, Entry | None]]:
        """What a committed transaction did under our prefix: the entry written, or None for a deletion."""
        answers = {entry.key: entry for entry in result.entries}
        effects: list[tuple[str, Entry | None]] = []
        for op in ops:
            if not op.key.startswith(self.prefix):
                continue
            if op.verb in _WRITES:
                effects.append((op.key, msgspec.structs.replace(answers[op.key], value=op.value)))
            elif op.verb in _DELETES:
                effects.append((op.key, None))
            elif op.verb == "delete-tree":
                effects += [(key, None) for key in (*self.records, *self.bad) if key.startswith(op.key)]
        return effects

    async def _refresh(self) -> None:
        before = self.index
        if before == 0 and not self._doubted.is_set():
            await self._show(await self._store.list(self.prefix))
            return
        if self._doubted.is_set() or self.error is not None:
            # A store that was away may be back with an older index, and a watch would wait for it to pass ours.
            self._doubted.clear()
            self._own_index = 0
            await self.refresh()
            return
        listing = await self._next_answer(before)
        if listing is None:
            return
        if listing.index >= self.index:
            await self._show(listing)
        elif self.index == before:  # else `refresh` has shown newer things meanwhile
            log.warning("The store's index went backwards; reading again", view=self.name, was=before)
            await self.refresh()

    async def _next_answer(self, before: int) -> Listing | None:
        """What the store answers once there is something new; None when the tree is to be read again instead."""
        ahead = self._own_index > before
        index, wait = (self._own_index, min(self._wait, CATCH_UP)) if ahead else (before, self._wait)
        asked = self._clock()
        watch = asyncio.create_task(self._store.watch(self.prefix, index, wait))
        doubted = asyncio.create_task(self._doubted.wait())
        try:
            await asyncio.wait({watch, doubted}, return_when=asyncio.FIRST_COMPLETED)
            if self._doubted.is_set():
                return None
            listing = watch.result()
        finally:
            watch.cancel()
            doubted.cancel()
            await asyncio.wait({watch, doubted})
            if not watch.cancelled():
                watch.exception()  # of no interest once the tree is to be read again
        if listing.index == index == before and self._clock() - asked < wait:
            log.info("The store ended a watch before its time; reading again", view=self.name)
            self.cut_short += 1
            self._doubted.set()
            return None
        return listing

    def _failed(self, error: StoreError) -> None:
        """Note the error. A store that is away is one warning, however many views it has."""
        former, self.error = self.error, error
        if type(error) is type(former):
            return
        others = _cut_off(self._store)
        if isinstance(error, Unavailable):
            warn = log.debug if others else log.warning
            others.add(id(self))
            warn("The store can't be read; what is known of it may be old", view=self.name, error=str(error))
        else:
            others.discard(id(self))
            log.warning("The view can't be refreshed; what it shows may be old", view=self.name, error=str(error))

    def _succeeded(self) -> None:
        former, self.error = self.error, None
        if former is None:
            return
        others = _cut_off(self._store)
        others.discard(id(self))
        if not isinstance(former, Unavailable):
            log.info("The view is current again", view=self.name)
        elif not others:
            log.info("The store is read again, and every view of it is current")

    async def _show(self, listing: Listing, *, own: Mapping[str, int] | None = None, anew: bool = False) -> None:
        """Show an answer; one that is older than what was shown while it was being read changes nothing.

        `own`: own writes that the answer decides about, with their indexes. `anew`: it is of another history.
        """
        before = self.index
        async with self._showing:
            changed, seen = await self._digest(listing, doubted=anew or listing.index < before)
            if listing.index < self.index != before:
                return
            for key in [key for key, index in (own or {}).items() if self._own.get(key) == index]:
                del self._own[key]  # the answer includes the write, or the store has lost it
            if anew:
                self._anew = False
                self._distrust()
            self.last_contact = self._clock()
            self._pace.spend(len(listing.entries))
            if listing.index < self.index:
                self._distrust()
            self.index = max(1, listing.index)
            if self._own:
                self._own = {key: index for key, index in self._own.items() if index > listing.index}
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

    async def _digest(self, listing: Listing, *, doubted: bool) -> tuple[list[_Digest[T]], set[str]]:
        """The entries that differ from what is shown, decoded, and every key that there is. Nothing is shown yet.

        `doubted`: an index that was seen may stand for something else now.
        """
        changed: list[_Digest[T]] = []
        seen: set[str] = set()
        for part in _parts(listing.entries, STEP):
            await give_way()
            for entry in part:
                key = entry.key
                seen.add(key)
                old = self.records.get(key)
                if doubted or old is None or old.modify_index != entry.modify_index:
                    changed.append((key, entry, self._decoded(entry)))
        return changed, seen

    def _decoded(self, entry: Entry) -> T | BadRecord | None:
        """The entry's value, or why there is none; None for one that is known to be bad."""
        if self._bad_at.get(entry.key) == entry.modify_index:
            return None
        try:
            return self._decode(entry.key, entry.value)
        except BadRecord as error:
            return error
        except Exception as error:  # whatever a decoder raises, one record must not end the view
            return BadRecord(entry.key, f"its decoder failed: {error!r}")

    def _distrust(self) -> None:
        """The store was restored: an index that we know may stand for something else now, so all is decoded anew."""
        self._own.clear()
        self._own_index = 0
        self._bad_at.clear()
        for key, record in self.records.items():
            self.records[key] = record._replace(modify_index=0)

    def _announce(self, changes: list[Change[T]]) -> None:
        if changes and self._on_change is not None:
            self._on_change(changes)
        if changes and self._listeners:
            self._notify({change.key for change in changes})

    def _notify(self, keys: Collection[str]) -> None:
        for listener in tuple(self._listeners):
            listener(keys)

    def _put(
        self, key: str, entry: Entry | None, changes: list[Change[T]], decoded: T | BadRecord | None = None
    ) -> None:
        """Show one entry, or its absence; `decoded`: its value, where that is known already."""
        old = self.records.get(key)
        if entry is None:
            was_bad = self.bad.pop(key, None)
            self._bad_at.pop(key, None)
            self.records.pop(key, None)
            if old is not None or was_bad is not None:
                changes.append(Change(key, old, None))
            return
        if old is not None and old.modify_index == entry.modify_index:
            return
        value = self._decoded(entry) if decoded is None else decoded
        if value is None:
            return
        if isinstance(value, BadRecord):
            self._put_bad(value, entry, old, changes)
            return
        if self.bad.pop(key, None):
            self._bad_at.pop(key, None)
        new = Record(value, entry.modify_index, entry.lock_index, entry.session)
        self.records[key] = new
        changes.append(Change(key, old, new))

    def _put_bad(self, error: BadRecord, entry: Entry, old: Record[T] | None, changes: list[Change[T]]) -> None:
        """Keep the last good value, but not its lock: who holds the key is known, whatever the value is."""
        key = entry.key
        self.bad[key], self._bad_at[key] = error, entry.modify_index
        log.error("A record can't be understood and is left out", view=self.name, key=key, reason=error.reason)
        if old is not None and (old.session, old.lock_index) != (entry.session, entry.lock_index):
            self.records[key] = old._replace(session=entry.session, lock_index=entry.lock_index)
            changes.append(Change(key, old, self.records[key]))
        if self._on_bad is not None:
            self._on_bad(error)
        self._notify((key,))


def _parts(items: Sequence[Item], size: int) -> Iterator[Sequence[Item]]:
    for start in range(0, len(items), max(1, size)):
        yield items[start : start + size]
