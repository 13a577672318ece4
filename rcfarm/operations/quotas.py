"""Operators' verbs on quotas: set a limit, and show who holds units, who waits and why.

What is shown is read once and decided as an engine would decide it (`scheduler.quota.decide`).
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from typing import NamedTuple

from rcfarm.operations.errors import BadInput, Contended, NotFound, TaskRefused
from scheduler.quota.decide import NO_HEAD, Queue, Wait
from store.kv import ops
from store.kv.protocol import BadRecord, Entry, Store, TxnConflict
from store.schema import audit
from store.schema.keys import BadKey, Keys, is_resource_name
from store.schema.quota import QuotaGrant, QuotaHead, QuotaLimit, QuotaTicket
from store.schema.records import decode, encode


class QuotaView(NamedTuple):
    """One resource. `limit` None: it has none, so nothing is granted. `waits`: why each ticket waits, with its
    position, by token. `bad`: records that can't be decoded."""

    resource: str
    limit: QuotaLimit | None
    head: QuotaHead
    grants: list[QuotaGrant]
    tickets: list[QuotaTicket]
    waits: dict[str, Wait]
    bad: list[BadRecord]

    @property
    def used(self) -> int:
        """Return the units that are held."""
        return sum(grant.units for grant in self.grants)


class Quotas:
    """Reads and changes quotas. `actor`: named in the audit log. The store's errors pass through."""

    def __init__(
        self, store: Store, keys: Keys, *, actor: str | audit.Actor = "", rng: random.Random | None = None
    ) -> None:
        self._store, self._keys, self._actor = store, keys, actor
        self._rng = rng or random.Random()

    async def set(self, resource: str, limit: QuotaLimit) -> QuotaLimit | None:
        """Set the limit. Return the one before, None if there was none. Raises `BadInput`, `Contended`."""
        check_resource(resource)
        key = self._keys.quota_limit(resource)

        async def attempt() -> QuotaLimit | None:
            old = await self._store.get(key, consistent=True)
            try:
                before = decode(QuotaLimit, key, old.value) if old else None
            except BadRecord:
                before = None
            if before == limit:
                return before
            details = {"quota": resource, "units": [before.units if before else None, limit.units]}
            writing = [
                ops.cas(key, encode(limit), old.modify_index if old else 0),
                audit.event_op(self._keys, "QUOTA_SET", details, actor=self._actor),
            ]
            await self._store.txn(writing)
            return before

        return await ops.retry_conflicts(f"quota {resource}", attempt, rng=self._rng, error=Contended)

    async def limit(self, resource: str) -> QuotaLimit | None:
        """Return the limit; None if there is none. Raises `BadInput`, `BadRecord`."""
        check_resource(resource)
        key = self._keys.quota_limit(resource)
        entry = await self._store.get(key, consistent=True)
        return decode(QuotaLimit, key, entry.value) if entry else None

    async def delete(self, resource: str) -> None:
        """Remove a limit that no task holds units of or waits for. Raises `NotFound`, `TaskRefused`."""
        view = await self.get(resource)
        if view.grants or view.tickets:
            count = len(view.grants) + len(view.tickets)
            raise TaskRefused(f"quota {resource}: {count} tasks hold or wait for units; set it to 0 to grant no more")
        key = self._keys.quota_limit(resource)
        entry = await self._store.get(key, consistent=True)
        event = audit.event_op(self._keys, "QUOTA_DELETED", {"quota": resource}, actor=self._actor)
        try:
            await self._store.txn([ops.delete_cas(key, entry.modify_index if entry else 0), event])
        except TxnConflict as error:
            raise TaskRefused(f"quota {resource} was changed in the meantime; try again") from error

    async def get(self, resource: str) -> QuotaView:
        """Return one quota. Raises `BadInput`, `NotFound`."""
        check_resource(resource)
        views = views_of(self._keys, (await self._store.list(self._keys.quota(resource), consistent=True)).entries)
        if not views:
            raise NotFound(f"there is no quota {resource}; `rcfarm quota list` shows those that exist")
        return views[0]

    async def list(self) -> list[QuotaView]:
        """Return every quota, in order of name."""
        return views_of(self._keys, (await self._store.list(self._keys.quotas, consistent=True)).entries)


def check_resource(resource: str) -> None:
    """Raises `BadInput` for a name that no resource can have."""
    if not is_resource_name(resource):
        raise BadInput(f"{resource!r} can't name a resource: use letters, digits and '-_.:'")


def views_of(keys: Keys, entries: Iterable[Entry]) -> list[QuotaView]:
    """Return the quotas of which these are the entries, in order of name."""
    queues: dict[str, Queue] = {}
    bad: dict[str, list[BadRecord]] = {}
    for entry in sorted(entries, key=lambda entry: entry.key):  # the grants before the tickets
        try:
            resource, kind, token = keys.parse_quota(entry.key)
        except BadKey:
            continue
        queue = queues.setdefault(resource, Queue(resource))
        try:
            if kind == "limit":
                queue.limit = decode(QuotaLimit, entry.key, entry.value)
            elif kind == "head":
                queue.head = decode(QuotaHead, entry.key, entry.value)
            elif kind == "grants":
                queue.grant(decode(QuotaGrant, entry.key, entry.value))
            elif token not in queue.grants:
                queue.enqueue(decode(QuotaTicket, entry.key, entry.value))
        except BadRecord as error:
            bad.setdefault(resource, []).append(error)
    now = time.time()
    return [
        QuotaView(
            resource,
            queue.limit,
            queue.head or NO_HEAD,
            sorted(queue.grants.values(), key=lambda grant: grant.since),
            list(queue.tickets.values()),
            queue.waits(now),
            bad.get(resource, []),
        )
        for resource, queue in sorted(queues.items())
    ]
