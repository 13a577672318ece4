"""Keep the audit log within bounds of age and size.

A single farm removes events beyond the age, and then the oldest ones beyond the size, a page of some thousand events at
a time, in transactions fenced by its member record. A removal is itself an event. Past days are counted once; the size
of a day is its number of events times the mean size of those in one page.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta

import structlog

from store.kv import ops
from store.kv.protocol import Store, StoreError
from store.schema import audit
from store.schema.keys import Keys

log = structlog.get_logger(__name__)

INTERVAL = 600.0  # seconds between looks
SLICE = 0.05  # seconds between removals, so that the store can serve other clients


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
        while True:
            await asyncio.sleep(INTERVAL)
            if self._is_ours():
                try:
                    await self.trim(member_key, session)
                except StoreError as error:
                    log.info("The audit log could not be trimmed; retrying", error=str(error))

    async def trim(self, member_key: str, session: str) -> int:
        """Remove the events beyond the bounds. Return their number. Raises the store's errors."""
        removed, last = 0, ""
        for prefix, count in await self._surplus():
            await self._store.txn([ops.check_session(member_key, session), ops.delete_tree(prefix)])
            removed, last = removed + count, prefix
            self._sizes.pop(self._keys.parse_audit(prefix).day, None)
            await asyncio.sleep(SLICE)
        if removed:
            until = self._keys.parse_audit(last).day
            details = {"removed": removed, "until": until}
            event = audit.event_op(self._keys, "AUDIT_TRIMMED", details, actor=self._farm)
            await self._store.txn([ops.check_session(member_key, session), event])
            log.info("Old events removed from the audit log", removed=removed, until=until)
        return removed

    async def _surplus(self) -> list[tuple[str, int]]:
        """Return the pages to remove, oldest first, each with its number of events."""
        days = await audit.days(self._store, self._keys)
        oldest = (self._today() - timedelta(seconds=self._max_age)).isoformat() if self._max_age else ""
        kept = [day for day in days if day >= oldest]
        surplus = [page for day in days if day < oldest for page in await self._pages(day)]
        if not self._max_size:
            return surplus
        excess = sum([await self._size(day) for day in kept]) - self._max_size
        for day in kept:
            if excess <= 0:
                break
            pages = await self._pages(day)
            mean = await self._size(day) / max(1, sum(count for _, count in pages))
            for prefix, count in pages:
                if excess > 0:
                    surplus.append((prefix, count))
                    excess -= int(mean * count)
        return surplus

    async def _pages(self, day: str) -> list[tuple[str, int]]:
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
