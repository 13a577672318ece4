"""The start of a farm: what it reads does not grow with what it writes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from store.embedded.store import EmbeddedStore
from store.kv.protocol import Listing, Op, TxnResult
from store.schema.keys import Keys
from tests.support.consul.scripted_store import ScriptedStore
from tests.support.farm.fleet import Fleet, running_farm

RCS, REPLICAS = 300, 3
ROUND_TRIP = 0.03  # seconds, as of a busy server
SETTLED = 5.0  # seconds until the farm has looked for what others wrote at the same time


class Remote(ScriptedStore):
    """A store at a distance, which counts the entries of shards that were read."""

    def __init__(self, inner: EmbeddedStore, keys: Keys) -> None:
        super().__init__(inner)
        self.entries = 0
        self._rcs = keys.rcs

    def _count(self, prefix: str, listing: Listing) -> Listing:
        self.entries += len(listing.entries) if prefix.startswith(self._rcs) else 0
        return listing

    async def list(self, prefix: str, *, consistent: bool = False) -> Listing:
        await asyncio.sleep(ROUND_TRIP)
        return self._count(prefix, await super().list(prefix, consistent=consistent))

    async def watch(self, prefix: str, index: int, wait: float) -> Listing:
        await asyncio.sleep(ROUND_TRIP)
        return self._count(prefix, await super().watch(prefix, index, wait))

    async def txn(self, ops: Sequence[Op]) -> TxnResult:
        await asyncio.sleep(ROUND_TRIP)
        return await super().txn(ops)


@pytest.mark.looptime
async def test_a_start_reads_each_shard_only_a_few_times(store: EmbeddedStore, keys: Keys, fleet: Fleet) -> None:
    """A farm that claims and places a fleet reads each shard before, and about once more with what was written: own
    writes do not make it read the shards again and again."""
    await fleet.add_nodes([f"n{number}" for number in range(50)])
    for number in range(RCS):
        await fleet.create(f"rc-{number}", REPLICAS)
    remote, before = Remote(store, keys), len(await store.keys(keys.rcs))
    async with running_farm(remote, keys):
        await fleet.until(lambda: placed(store, keys))
        await asyncio.sleep(SETTLED)
    after = len(await store.keys(keys.rcs))
    assert after == before + RCS * (REPLICAS + 2)  # an owner, a status and the placements of each RC
    assert remote.entries <= before + 1.2 * after


async def placed(store: EmbeddedStore, keys: Keys) -> bool:
    return len(await store.keys(keys.intents)) == RCS * REPLICAS
