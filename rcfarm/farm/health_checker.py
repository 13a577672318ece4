"""The health of an RC's pods, for programs beside the farm (p2's `HealthChecker`): read once, or watched.

A verdict counts while its agent holds it, so a pod of a dead node has none, nor has one that its agent has not checked
yet. Records of agents of key layout 1 are ignored.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from rcfarm.farm.shard import HealthGroup
from store.kv.protocol import Store
from store.kv.view import RefreshBudget
from store.schema.keys import Keys, health_group, shard_of
from store.schema.records import Health


class HealthChecker:
    """Reads and watches verdicts on pods. Reads raise the store's errors; watches continue after them."""

    def __init__(self, store: Store, keys: Keys) -> None:
        self._store, self._keys = store, keys

    async def service(self, rc_id: str) -> dict[str, Health]:
        """Return the verdicts on the RC's pods, by node."""
        group = self._group(rc_id, lambda changed: None)
        await group.view.refresh()
        return _live(group, rc_id)

    async def pod(self, rc_id: str, node: str) -> Health | None:
        """Return the verdict on the RC's pod on a node."""
        return (await self.service(rc_id)).get(node)

    async def watch_service(self, rc_id: str) -> AsyncGenerator[dict[str, Health]]:
        """Yield the verdicts on the RC's pods, by node: as they are now, then after every change.

        A slow caller misses states in between, never the last one. Close it (`contextlib.aclosing`).
        """
        changed = asyncio.Event()
        group = self._group(rc_id, lambda touched: changed.set() if touched == rc_id else None)
        watching = asyncio.create_task(group.run())
        try:
            await group.view.synced()
            last: dict[str, Health] | None = None
            while True:
                changed.clear()
                verdicts = _live(group, rc_id)
                if verdicts != last:
                    last = verdicts
                    yield dict(verdicts)
                await changed.wait()
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def watch_pod(self, rc_id: str, node: str) -> AsyncGenerator[Health | None]:
        """Yield the verdict on the RC's pod on a node: as it is now, then after every change. See `watch_service`."""
        async with aclosing(self.watch_service(rc_id)) as services:
            is_first, last = True, None
            async for verdicts in services:
                verdict = verdicts.get(node)
                if is_first or verdict != last:
                    is_first, last = False, verdict
                    yield verdict

    def _group(self, rc_id: str, on_change: Callable[[str], None]) -> HealthGroup:
        name = health_group(shard_of(rc_id, self._keys.shards))
        return HealthGroup(name, self._store, self._keys, on_change, RefreshBudget())


def _live(group: HealthGroup, rc_id: str) -> dict[str, Health]:
    return {node: record.value for node, record in sorted(group.of(rc_id).items()) if record.session}
