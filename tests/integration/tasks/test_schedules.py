"""Schedules on both stores: two engines, whose wall clock the test sets."""

from __future__ import annotations

import asyncio

from controllers.tasks.engine.scheduler import TASK
from controllers.tasks.schedule import execution_id
from store.kv.protocol import Store
from store.schema import audit
from store.schema.keys import Keys
from store.schema.tasks import TaskSpec
from tests.support.tasks.engines import JobPlugin, Remote, World, engine_on
from tests.support.tasks.schedules import apply_schedule, executions

MINUTE = 29_666_667 * 60.0


async def test_the_other_engine_goes_on_when_the_leader_stops(any_store: Store, root: str) -> None:
    """Each run begins once, at its moment, and by the leader of that time."""
    keys, loop = Keys(root, shards=2), asyncio.get_running_loop()
    world, start, skew = World(any_store, keys), loop.time(), [0.0]

    def wall() -> float:
        return MINUTE - 3.0 + loop.time() - start + skew[0]

    engines = [engine_on(any_store, keys, JobPlugin(Remote()), name=f"engine-{n}", virtual=False) for n in "ab"]
    for engine in engines:
        engine.wall = wall
    tasks = [asyncio.create_task(engine.start()) for engine in engines]
    first, second = execution_id("every", MINUTE), execution_id("every", MINUTE + 60)
    try:
        job = TaskSpec(id="", type="job", config={"seconds": 0.1, "poll": 0.1})
        await apply_schedule(world, "every", "* * * * *", task=job, since=MINUTE - 60)

        async def begun(count: int) -> bool:
            return len(await executions(world)) >= count

        await world.until(lambda: begun(1), within=30)
        assert wall() >= MINUTE
        assert (await world.until_done(first)).phase == "PhaseSuccess"
        leader = [engine.membership.leads(TASK) for engine in engines].index(True)
        skew[0] = MINUTE + 59.0 - wall()
        tasks[leader].cancel()
        await world.until(lambda: begun(2), within=30)
        assert await executions(world) == [first, second]
        fired = [event for event in await audit.events(any_store, keys) if event.event_type == "SCHEDULE_FIRED"]
        assert [event.event_details["task"] for event in fired] == [first, second]
        assert [event.actor for event in fired] == [engines[leader].settings.name, engines[1 - leader].settings.name]
        assert (await world.until_done(second)).phase == "PhaseSuccess"
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
