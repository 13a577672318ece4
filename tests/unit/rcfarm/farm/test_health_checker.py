"""Reading and watching the health of pods from outside of a farm."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from rcfarm.farm.shard import HealthChecker
from store.embedded.store import EmbeddedStore
from store.kv import ops
from store.kv.protocol import SessionSpec
from store.schema.keys import Keys
from store.schema.records import Health, HealthState, encode

KEYS = Keys(shards=4)


class Agent:
    """Writes verdicts under its session."""

    def __init__(self, store: EmbeddedStore, session: str) -> None:
        self._store, self.session = store, session

    async def says(self, rc_id: str, node: str, status: HealthState) -> None:
        value = encode(Health(status=status, manifest="m"))
        await self._store.txn([ops.lock(KEYS.health(rc_id, node), value, self.session)])


async def test_health_is_read_and_watched() -> None:
    """Each change of a pod's verdict is seen, and no other RC's; a verdict ends with its agent's session."""
    store = EmbeddedStore()
    checker = HealthChecker(store, KEYS)
    one, two = [Agent(store, (await store.create_session(SessionSpec(name))).id) for name in ("one", "two")]
    await one.says("web", "n1", "passing")
    await one.says("other", "n1", "critical")
    assert await checker.pod("web", "n1") == Health(status="passing", manifest="m")
    assert await checker.pod("web", "n2") is None

    async with (
        aclosing(checker.watch_service("web")) as services,
        aclosing(checker.watch_pod("web", "n2")) as pods,
        asyncio.timeout(10),
    ):
        assert {node: health.status for node, health in (await anext(services)).items()} == {"n1": "passing"}
        assert await anext(pods) is None

        await one.says("other", "n1", "passing")
        await two.says("web", "n2", "critical")
        assert {node: health.status for node, health in (await anext(services)).items()} == {
            "n1": "passing",
            "n2": "critical",
        }
        verdict = await anext(pods)
        assert verdict is not None
        assert verdict.status == "critical"

        await store.destroy_session(two.session)
        assert list(await anext(services)) == ["n1"]
        assert await anext(pods) is None

    assert await checker.service("ghost") == {}
    assert store.watcher_count == 0
