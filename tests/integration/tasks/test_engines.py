"""Engines on a real Consul, each with its own connections: one dies, one loses its session, nothing is done twice."""

from __future__ import annotations

import asyncio
import time

from store.consul.client import ConsulSettings
from store.schema.keys import Keys
from tests.support.consul.server import ConsulServer, opened
from tests.support.tasks.engines import JobPlugin, Remote, World, engine_on, running
from tests.support.tasks.mortal import Fate, MortalStore

IDS = [f"job-{number}" for number in range(30)]
LIMIT = 6


async def test_executions_survive_the_death_of_an_engine_and_the_loss_of_a_session(
    consul: ConsulServer, root: str
) -> None:
    """All executions end, each with one remote job; never more than the quota run; no unit is left."""
    keys, remote, fate = Keys(root, shards=4), Remote(), Fate()
    settings = ConsulSettings.from_env(consul.url)
    most = 0

    async def count_running() -> None:
        nonlocal most
        while True:
            most = max(most, len(remote.running))
            await asyncio.sleep(0.01)

    async with opened(settings) as first, opened(settings) as second, opened(settings) as witness:
        world = World(witness, keys)
        await world.quota("licence", LIMIT)
        survivor = engine_on(first, keys, JobPlugin(remote), name="engine-a", virtual=False)
        mortal = engine_on(MortalStore(second, fate), keys, JobPlugin(remote), name="engine-b", virtual=False)
        counting = asyncio.create_task(count_running())
        dying = asyncio.create_task(mortal.start())
        try:
            async with running(survivor):
                for task_id in IDS:
                    config = {"seconds": 0.5, "poll": 0.2}
                    await world.submit(task_id, "job", config=config, quotas={"licence": 1})
                await world.until_done(IDS[0])
                fate.dead.set()
                died = time.monotonic()
                session = survivor.keeper.session_id
                assert session is not None
                await witness.destroy_session(session)
                await world.until(lambda: survivor.keeper.session_id not in (None, session), within=10.0)

                async def taken_over() -> bool:
                    owners = {await world.owner(task_id) for task_id in IDS}
                    return owners <= {None, survivor.keeper.session_id}

                await world.until(taken_over, within=20.0)
                assert time.monotonic() - died < 15.0
                state = await world.until_done(*IDS)
                assert state.phase == "PhaseSuccess"
        finally:
            for task in (counting, dying):
                task.cancel()
            await asyncio.gather(counting, dying, return_exceptions=True)
        assert sorted(remote.made.values()) == [1] * len(IDS)
        assert most <= LIMIT
        assert await world.holders() == []
