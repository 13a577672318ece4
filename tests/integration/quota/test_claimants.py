"""Many claimants of few units on a real Consul, from ledgers that share nothing but it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from scheduler.quota.draft import Admission, Draft, Request
from scheduler.quota.ledger import QuotaLedger
from store.consul.client import ConsulSettings
from store.kv import ops
from store.kv.protocol import Op, Store
from store.schema.keys import Keys
from store.schema.quota import QuotaLimit
from store.schema.records import encode
from tests.support.consul.server import ConsulServer, opened
from tests.support.waiting import background

HOLDERS = 7
CLAIMANTS = 200
LEDGERS = 4


class Claimants:
    """The claimants of one ledger, each of which holds a unit once."""

    def __init__(self, store: Store, keys: Keys, names: Sequence[str]) -> None:
        self.done: set[str] = set()
        self._woken = {name: asyncio.Event() for name in names}
        self._keys = keys
        self._ledger = QuotaLedger(store, keys, mine=self._woken.__contains__, on_granted=self._wake)

    async def run(self) -> None:
        """Return when all have had their unit."""
        async with background(self._ledger.run()):
            await self._ledger.view.synced()
            async with asyncio.TaskGroup() as group:
                for name in self._woken:
                    group.create_task(self._claim(name))

    def _wake(self, name: str) -> None:
        if name in self._woken:
            self._woken[name].set()

    async def _claim(self, name: str) -> None:
        found: list[Admission] = []

        def ask(draft: Draft) -> Sequence[Op]:
            found[:] = [draft.admit([Request(resource="gpu", token=name, execution=name)])]
            return [ops.put(f"{self._keys.root}/state/{name}", b"held" if found[0].granted else b"waiting")]

        await self._ledger.transact(ask)
        while not found[0].granted:
            await self._woken[name].wait()
            self._woken[name].clear()
            await self._ledger.transact(ask)
        await asyncio.sleep(0.01)
        await self._ledger.release(name)
        self.done.add(name)


async def watched(store: Store, prefix: str, seen: list[int]) -> None:
    """Note the number of holders whenever it changes, as any other program could."""
    index = 1
    while True:
        listing = await store.watch(prefix, index, 10.0)
        index = listing.index
        seen.append(len(listing.entries))


async def test_never_more_holders_than_units_and_all_are_granted_at_last(consul: ConsulServer, root: str) -> None:
    """An independent watcher sees the limit reached and never exceeded; nothing is left when all have ended."""
    keys = Keys(root)
    settings = ConsulSettings.from_env(consul.url)
    seen: list[int] = []
    async with opened(settings) as witness:
        await witness.put(keys.quota_limit("gpu"), encode(QuotaLimit(units=HOLDERS)))
        watching = background(watched(witness, keys.quota("gpu") + "grants/", seen))
        async with watching, asyncio.timeout(60), asyncio.TaskGroup() as group:
            for number in range(LEDGERS):
                group.create_task(claim(settings, keys, number))
        assert max(seen) == HOLDERS
        left = await witness.keys(keys.quota("gpu"), consistent=True)
        assert left == [keys.quota_head("gpu"), keys.quota_limit("gpu")]


async def claim(settings: ConsulSettings, keys: Keys, number: int) -> None:
    """Run one ledger's part of the claimants, over a store of its own."""
    names = [f"c{each}" for each in range(number, CLAIMANTS, LEDGERS)]
    async with opened(settings) as store:
        claimants = Claimants(store, keys, names)
        await claimants.run()
        assert claimants.done == set(names)
