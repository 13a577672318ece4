"""The key layout and its migration: the schema of the store, and how the farms raise it.

Layout 2 keeps the pods' health in `health/`, outside of `rcs/`, so that agents need no right to write RCs. Programs of
layout 2 read both places and write the new one, so farms and agents may be upgraded one by one, the farms first. When
no live farm or agent of layout 1 is left, the leading farm removes the former records and raises the schema in `meta`;
a program of layout 1 that is started afterwards refuses to use the store.

The leading farm also restores `meta` when it was deleted with the tree: a program that finds none would use its own
number of shards.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import structlog

from rcfarm.operations.errors import BadInput
from rcfarm.operations.fleet import listed
from store.kv import ops
from store.kv.protocol import MAX_TXN_OPS, BadRecord, Entry, Op, Store, StoreError, TxnConflict
from store.schema import audit
from store.schema.keys import LAYOUT, BadKey, Keys
from store.schema.records import Meta, decode, encode
from store.turns import in_turns

log = structlog.get_logger(__name__)

INTERVAL = 10.0  # seconds between checks while the store has a former layout


class _Participant(msgspec.Struct, frozen=True):
    """The common field of a farm's member record and a node's `alive` key; programs of layout 1 omit it."""

    layout: int = 1


async def read_meta(store: Store, keys: Keys) -> Meta | None:
    """Return `<root>/meta`, or None in a store not used by rcfarm yet. Raises `BadInput` when its schema is newer."""
    entry = await store.get(keys.meta)
    if entry is None:
        return None
    meta = decode(Meta, entry.key, entry.value)
    if meta.schema > LAYOUT:
        raise BadInput(
            f"{entry.key}: the store is of schema {meta.schema}, this rcfarm knows up to {LAYOUT}; use a newer rcfarm"
        )
    return meta


async def ensure_meta(store: Store, keys: Keys) -> Keys:
    """Return the keys for the store's `meta`, which is created if absent. Raises `BadInput`."""
    meta = await read_meta(store, keys)
    if meta is None:
        fresh = Meta(schema=LAYOUT, shards=keys.shards)
        try:
            await store.txn([ops.create(keys.meta, encode(fresh))])
        except TxnConflict:  # another program was first: its record counts
            return await ensure_meta(store, keys)
        meta = fresh
    return Keys(keys.root, meta.shards)


async def of_a_former_layout(store: Store, keys: Keys) -> list[str]:
    """Return the live programs of a former layout, as `farm farm-a` or `the agent of node-1`, in order."""
    farms = (await store.list(keys.farms, consistent=True)).entries
    nodes = (await store.list(keys.nodes, consistent=True)).entries
    former = [f"farm {keys.name_of(entry.key)}" for entry in farms if _is_former(entry)]
    former += [
        f"the agent of {keys.parse_node(entry.key).node}"
        async for entry in in_turns(nodes)
        if keys.parse_node(entry.key).leaf == "alive" and _is_former(entry)
    ]
    return former


def _is_former(entry: Entry) -> bool:
    try:
        return entry.session is not None and decode(_Participant, entry.key, entry.value).layout < LAYOUT
    except BadRecord:
        return True  # the layout of its author is unknown


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
            await asyncio.sleep(INTERVAL)

    async def _advance(self, fence: Op) -> bool:
        """Do the next step. Return False when another may be needed."""
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
        return await self._migrate(fence)

    async def _migrate(self, fence: Op) -> bool:
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
        rcs = await self._store.list(self._keys.rcs, consistent=True)
        stale = [entry async for entry in in_turns(rcs.entries) if self._is_health(entry)]
        for start in range(0, len(stale), MAX_TXN_OPS - 1):
            batch = stale[start : start + MAX_TXN_OPS - 1]
            await self._store.txn([fence, *(ops.delete_cas(entry.key, entry.modify_index) for entry in batch)])
        entry = await self._store.get(self._keys.meta, consistent=True)
        if entry is None:
            return False
        meta = msgspec.structs.replace(decode(Meta, entry.key, entry.value), schema=LAYOUT)
        details = {"schema": LAYOUT, "removed": len(stale)}
        event = audit.event_op(self._keys, "KEY_LAYOUT_MIGRATED", details, actor=self._farm)
        await self._store.txn([fence, ops.cas(entry.key, encode(meta), entry.modify_index), event])
        log.info("Key layout migrated", schema=LAYOUT, removed=len(stale))
        return True

    def _is_health(self, entry: Entry) -> bool:
        try:
            return self._keys.parse_rc(entry.key).kind == "health"
        except BadKey:
            return False
