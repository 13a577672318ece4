"""Keeping the audit log within bounds of age and size.

One farm of all removes what is too old, and then the oldest of what is too much, a page of some thousand events at a
time, in transactions that its member record fences. What was removed is itself an event. Days that are over are counted
once; the size of a day is its number of events times the mean of one page of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta

import structlog

from store import audit, ops
from store.keys import Keys
from store.kv import Store, StoreError

log = structlog.get_logger(__name__)

INTERVAL = 600.0  # seconds between looks
SLICE = 0.05  # seconds between removals, so that the store serves others meanwhile


class AuditRetention:
    """Removes old events. `max_age` in seconds and `max_size` in bytes of keys and values; 0 means no bound.

    `today()`: the date in UTC. `is_ours()`: whether this farm is the one to do it.
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
        self._sizes: dict[str, int] = {}  # in bytes, of days that are over

    async def run(self, member_key: str, session: str) -> None:
        """Keep the bounds until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL)
            if self._is_ours():
                try:
                    await self.trim(member_key, session)
                except StoreError as error:
                    log.info("The audit log can't be trimmed yet", error=str(error))

    async def trim(self, member_key: str, session: str) -> int:
        """Remove what is beyond the bounds; returns the number of events removed. Raises the store's errors."""
        removed, last = 0, ""
        for prefix, count in await self._surplus():
            await self._store.txn([ops.check_session(member_key, session), ops.delete_tree(prefix)])
            removed, last = removed + count, prefix
            self._sizes.pop(prefix.removeprefix(self._keys.audit).partition("/")[0], None)
            await asyncio.sleep(SLICE)
        if removed:
            until = last.removeprefix(self._keys.audit).partition("/")[0]
            details = {"removed": removed, "until": until}
            event = audit.event_op(self._keys, "AUDIT_TRIMMED", details, actor=self._farm)
            await self._store.txn([ops.check_session(member_key, session), event])
            log.info("Old events were removed from the audit log", removed=removed, until=until)
        return removed

    async def _surplus(self) -> list[tuple[str, int]]:
        """The pages to remove, oldest first, each with its number of events."""
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
        """The bytes of a day's events, by the mean of one page; remembered once the day is over."""
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
