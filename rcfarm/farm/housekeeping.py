"""What a single farm does for all of them: keep the audit log and the deleted RCs within bounds, and the key layout
up to date.

Each task runs in every farm; the one that leads it works. Its writes are fenced by its member record.

The audit log: events beyond the age are removed, and then the oldest ones beyond the size, a page of some thousand
events at a time. A removal is itself an event. Past days are counted once; the size of a day is its number of events
times the mean size of those in one page.

Deleted RCs: what each was is kept for a time, so that it can be restored; then its record is removed.

The key layout: layout 2 keeps the pods' health in `health/`, outside of `rcs/`, so that agents need no right to write
RCs. Programs of layout 2 read both places and write the new one, so farms and agents may be upgraded one by one, the
farms first. When no live farm or agent of layout 1 is left, the leading farm removes the former records and raises the
schema in `meta`; a program of layout 1 that is started afterwards refuses to use the store. The leading farm also
restores `meta` when it was deleted with the tree: a program that finds none would use its own number of shards.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable
from datetime import UTC, date, datetime, timedelta

import msgspec
import structlog

from rcfarm.operations.errors import BadInput
from rcfarm.operations.fleet import listed, of_a_former_layout, read_meta
from store.kv import ops
from store.kv.protocol import MAX_TXN_OPS, BadRecord, Entry, Op, Store, StoreError
from store.schema import audit
from store.schema.keys import LAYOUT, BadKey, Keys
from store.schema.records import DeletedRC, Meta, decode, encode, rfc3339
from store.timing import in_turns

log = structlog.get_logger(__name__)

AUDIT_INTERVAL = 600.0  # seconds between looks at the audit log, and at the deleted RCs
AUDIT_PAUSE = 0.05  # seconds between removals, so that the store can serve other clients
LAYOUT_INTERVAL = 10.0  # seconds between checks while the store has a former layout


async def _trim_always(trim: Callable[[], Awaitable[int]], is_ours: Callable[[], bool], failure: str) -> None:
    """Trim every `AUDIT_INTERVAL` seconds, while this farm is the one that does, until cancelled. `failure`: what is
    logged of the store's errors."""
    while True:
        await asyncio.sleep(AUDIT_INTERVAL)
        if is_ours():
            try:
                await trim()
            except StoreError as error:
                log.info(failure, error=str(error))


class AuditRetention:
    """Removes old events. `max_age` in seconds and `max_size` in bytes of keys and values; 0 means no bound.

    `today()`: the date in UTC. `is_ours()`: whether this farm is the one that removes.
    """

    def __init__(
        self,
        store: Store,
        keys: Keys,
        farm: str,
        *,
        max_age: float,
        max_size: int,
        is_ours: Callable[[], bool],
        today: Callable[[], date] = lambda: datetime.now(UTC).date(),
    ) -> None:
        self._store, self._keys, self._farm = store, keys, farm
        self._max_age, self._max_size = max_age, max_size
        self._is_ours, self._today = is_ours, today
        self._sizes: dict[str, int] = {}  # in bytes, of past days

    async def run(self, member_key: str, session: str) -> None:
        """Enforce the bounds until cancelled."""
        failure = "The audit log could not be trimmed; retrying"
        await _trim_always(lambda: self.trim(member_key, session), self._is_ours, failure)

    async def trim(self, member_key: str, session: str) -> int:
        """Remove the events beyond the bounds. Return their number. Raises the store's errors."""
        days = await audit.days(self._store, self._keys)
        oldest = (self._today() - timedelta(seconds=self._max_age)).isoformat() if self._max_age else ""
        kept = [day for day in days if day >= oldest]
        surplus = [page for day in days if day < oldest for page in await self._pages(day)]
        excess = sum([await self._size(day) for day in kept]) - self._max_size if self._max_size else 0
        for day in kept:
            if excess <= 0:
                break
            pages = await self._pages(day)
            mean = await self._size(day) / max(1, sum(count for _, count in pages))
            for prefix, count in pages:
                if excess > 0:
                    surplus.append((prefix, count))
                    excess -= int(mean * count)
        removed, last = 0, ""
        for prefix, count in surplus:
            await self._store.txn([ops.check_session(member_key, session), ops.delete_tree(prefix)])
            removed, last = removed + count, prefix
            self._sizes.pop(self._keys.parse_audit(prefix).day, None)
            await asyncio.sleep(AUDIT_PAUSE)
        if removed:
            until = self._keys.parse_audit(last).day
            details = {"removed": removed, "until": until}
            event = audit.event_op(self._keys, "AUDIT_TRIMMED", details, actor=self._farm)
            await self._store.txn([ops.check_session(member_key, session), event])
            log.info("Old events removed from the audit log", removed=removed, until=until)
        return removed

    async def _pages(self, day: str) -> list[tuple[str, int]]:
        """Return the prefixes of a day's pages, oldest first, each with its number of events."""
        folder = f"{self._keys.audit}{day}/"
        return list(audit.page_prefixes(folder, await self._store.keys(folder)))

    async def _size(self, day: str) -> int:
        """Return the size of a day's events in bytes, by the mean of one page; cached for past days."""
        if day in self._sizes:
            return self._sizes[day]
        pages = await self._pages(day)
        if not pages:
            return 0
        sample = (await self._store.list(pages[0][0])).entries
        mean = sum(len(entry.key) + len(entry.value) for entry in sample) / max(1, len(sample))
        size = int(mean * sum(count for _, count in pages))
        if day < (self._today() - timedelta(days=1)).isoformat():
            self._sizes[day] = size
        return size


class DeletedRetention:
    """Removes the records of deleted RCs that have passed their time, and then the oldest ones beyond `max_count` (0:
    no limit). `is_ours()`: whether this farm is the one that removes. `forgotten` is called with the manifests of the
    RCs whose records it has removed."""

    def __init__(
        self,
        store: Store,
        keys: Keys,
        *,
        max_count: int,
        is_ours: Callable[[], bool],
        forgotten: Callable[[Iterable[str]], None] = lambda manifests: None,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._store, self._keys, self._max_count = store, keys, max_count
        self._is_ours, self._forgotten, self._now = is_ours, forgotten, now

    async def run(self, member_key: str, session: str) -> None:
        """Enforce the bounds until cancelled."""
        failure = "Deleted RCs could not be trimmed; retrying"
        await _trim_always(lambda: self.trim(member_key, session), self._is_ours, failure)

    async def trim(self, member_key: str, session: str) -> int:
        """Remove what is beyond the bounds. A record that can't be read stays. Return how many were removed. Raises the
        store's errors."""
        kept: list[tuple[str, Entry, str]] = []
        surplus: list[tuple[str, Entry, str]] = []  # the time, the entry, and the manifest
        now = rfc3339(self._now())
        async for entry in in_turns((await self._store.list(self._keys.deleted, consistent=True)).entries):
            with contextlib.suppress(BadRecord):
                record = decode(DeletedRC, entry.key, entry.value)
                is_past = bool(record.until) and record.until <= now
                (surplus if is_past else kept).append((record.deleted_at, entry, record.manifest))
        excess = len(kept) - self._max_count if self._max_count else 0
        surplus += sorted(kept, key=lambda each: each[0])[: max(0, excess)]
        for start in range(0, len(surplus), MAX_TXN_OPS - 1):
            batch = surplus[start : start + MAX_TXN_OPS - 1]
            removing = [ops.delete_cas(entry.key, entry.modify_index) for _, entry, _ in batch]
            await self._store.txn([ops.check_session(member_key, session), *removing])
            self._forgotten(manifest for _, _, manifest in batch)
            await asyncio.sleep(AUDIT_PAUSE)
        if surplus:
            log.info("Records of deleted RCs removed; these can't be restored any more", removed=len(surplus))
        return len(surplus)


class Migration:
    """Raises the store's schema once every live program has the newest layout, and restores a lost `meta`.

    `is_ours()`: whether this farm leads. The caller sets `meta_lost` when `meta` has vanished.
    """

    def __init__(
        self, store: Store, keys: Keys, farm: str, is_ours: Callable[[], bool], meta_lost: asyncio.Event
    ) -> None:
        self._store, self._keys, self._farm, self._is_ours = store, keys, farm, is_ours
        self._meta_lost = meta_lost
        self._waits_for: list[str] = []

    async def run(self, member_key: str, session: str) -> None:
        """Keep `meta` at the newest layout, until cancelled. Every write is fenced by the farm's member record."""
        fence = ops.check_session(member_key, session)
        while True:
            self._meta_lost.clear()
            try:
                if await self._advance(fence):
                    await self._meta_lost.wait()
                    continue
            except (StoreError, BadRecord, BadInput) as error:
                log.info("The key layout could not be migrated; retrying", error=str(error))
            await asyncio.sleep(LAYOUT_INTERVAL)

    async def _advance(self, fence: Op) -> bool:
        """Do the next step of the migration. Return whether the store has the present layout."""
        meta = await read_meta(self._store, self._keys)
        if meta is not None and meta.schema >= LAYOUT:
            return True
        if not self._is_ours():
            return False
        if meta is None:
            fresh = Meta(schema=LAYOUT, shards=self._keys.shards)
            await self._store.txn([fence, ops.create(self._keys.meta, encode(fresh))])
            log.warning("The key layout's record was missing; restored", key=self._keys.meta)
            return True
        former = await of_a_former_layout(self._store, self._keys)
        if former:
            if former != self._waits_for:
                log.warning(
                    "The key layout is not migrated before these programs are upgraded",
                    waits_for=listed(former),
                    count=len(former),
                )
            self._waits_for = former
            return False
        stale: list[Entry] = []
        async for entry in in_turns((await self._store.list(self._keys.rcs, consistent=True)).entries):
            with contextlib.suppress(BadKey):
                if self._keys.parse_rc(entry.key).kind == "health":
                    stale.append(entry)
        for start in range(0, len(stale), MAX_TXN_OPS - 1):
            batch = stale[start : start + MAX_TXN_OPS - 1]
            await self._store.txn([fence, *(ops.delete_cas(entry.key, entry.modify_index) for entry in batch)])
        current = await self._store.get(self._keys.meta, consistent=True)
        if current is None:
            return False
        meta = msgspec.structs.replace(decode(Meta, current.key, current.value), schema=LAYOUT)
        details = {"schema": LAYOUT, "removed": len(stale)}
        event = audit.event_op(self._keys, "KEY_LAYOUT_MIGRATED", details, actor=self._farm)
        await self._store.txn([fence, ops.cas(current.key, encode(meta), current.modify_index), event])
        log.info("Key layout migrated", schema=LAYOUT, removed=len(stale))
        return True
