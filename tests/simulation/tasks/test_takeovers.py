"""Several engines on one store: shares, deaths, orderly ends, and what one bad record costs its neighbours."""

from __future__ import annotations

import asyncio

import pytest

from store.embedded.store import EmbeddedStore
from store.schema.keys import Keys, shard_of
from tests.support.tasks.engines import JobPlugin, Remote, World, engine_on, running
from tests.support.tasks.mortal import Fate, MortalStore
from tests.support.waiting import loop_time

pytestmark = pytest.mark.looptime(noop_cycles=0)

IDS = [f"job-{number}" for number in range(20)]


async def _all_running(world: World) -> None:
    for task_id in IDS:
        await world.until_state(task_id, lambda state: state.phase == "PhaseRunning")


async def test_another_engine_takes_over_within_the_lease(store: EmbeddedStore, keys: Keys, world: World) -> None:
    """Nothing is created twice, and the jobs go on while no engine follows them."""
    remote, plugin, fate = Remote(), None, Fate()
    plugin = JobPlugin(remote)
    mortal = asyncio.create_task(engine_on(MortalStore(store, fate), keys, plugin, name="engine-a").start())
    async with running(engine_on(store, keys, plugin, name="engine-b")):
        for task_id in IDS:
            await world.submit(task_id, "job", config={"seconds": 60.0})
        await _all_running(world)
        sessions = {await world.owner(task_id) for task_id in IDS}
        assert len(sessions) == 2
        fate.dead.set()
        died = loop_time()

        async def taken_over() -> bool:
            return len({await world.owner(task_id) for task_id in IDS}) == 1

        await world.until(taken_over)
        assert loop_time() - died <= 4.0
        state = await world.until_done(*IDS)
        assert state.phase == "PhaseSuccess"
    mortal.cancel()
    await asyncio.gather(mortal, return_exceptions=True)
    assert set(remote.made.values()) == {1}
    assert len(remote.made) == len(IDS)
    assert not remote.deletions


async def test_an_orderly_end_hands_over_at_once_and_aborts_nothing(
    store: EmbeddedStore, keys: Keys, world: World
) -> None:
    remote = Remote()
    leaving, staying = JobPlugin(remote), JobPlugin(remote)
    async with running(engine_on(store, keys, staying, name="engine-b")):
        async with running(engine_on(store, keys, leaving, name="engine-a")):
            for task_id in IDS:
                await world.submit(task_id, "job", config={"seconds": 60.0})
            await _all_running(world)
        left = loop_time()

        async def taken_over() -> bool:
            owners = {await world.owner(task_id) for task_id in IDS}
            return len(owners) == 1 and None not in owners

        await world.until(taken_over)
        assert loop_time() - left < 1.0
        await world.until_done(*IDS)
    assert "abort" not in {verb for _, verb in leaving.calls + staying.calls}
    assert set(remote.made.values()) == {1}


async def test_units_stay_with_their_executions_over_a_takeover(store: EmbeddedStore, keys: Keys, world: World) -> None:
    """No unit is free while a job that holds one runs, and none is left at the end."""
    remote, fate = Remote(), Fate()
    plugin = JobPlugin(remote)
    await world.quota("licence", 3)
    mortal = asyncio.create_task(engine_on(MortalStore(store, fate), keys, plugin, name="engine-a").start())
    async with running(engine_on(store, keys, plugin, name="engine-b")):
        for task_id in IDS:
            await world.submit(task_id, "job", config={"seconds": 10.0}, quotas={"licence": 1})
        most = 0

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, len(remote.running))
                await asyncio.sleep(0.05)

        watching = asyncio.create_task(watch())
        await asyncio.sleep(15.0)
        fate.dead.set()
        await world.until_done(*IDS)
        watching.cancel()
    mortal.cancel()
    await asyncio.gather(mortal, watching, return_exceptions=True)
    assert most == 3
    assert await world.holders() == []
    assert set(remote.made.values()) == {1}


async def test_a_record_that_cannot_be_read_harms_no_neighbour(store: EmbeddedStore, keys: Keys, world: World) -> None:
    remote = Remote()
    await store.put(keys.task_spec("broken"), b"{")
    await world.submit("stale", "job")
    await store.put(keys.task_state("stale"), b'{"phase": 7}')
    await store.put(keys.task("broken") + "unknown", b"?")
    async with running(engine_on(store, keys, JobPlugin(remote))):
        await world.submit("sound", "job")
        assert (await world.until_done("sound")).phase == "PhaseSuccess"
        assert list(remote.made) == ["t-sound-n0-0"] or len(remote.made) == 1
        await store.delete(keys.task_state("stale"))
        assert (await world.until_done("stale")).phase == "PhaseSuccess"


async def test_a_dependency_in_another_engines_shard_wakes_its_dependent(
    store: EmbeddedStore, keys: Keys, world: World
) -> None:
    """At once, as one of the engine's own shards does."""
    remote = Remote()
    ids = {shard_of(task_id, keys.shards): task_id for task_id in IDS}
    first, *others = ids.values()
    async with running(*(engine_on(store, keys, JobPlugin(remote), name=f"engine-{name}") for name in "ab")):
        await world.submit(first, "job", config={"seconds": 20.0})
        for other in others:
            await world.submit(other, "job", depends_on=(first,))
        await world.until_state(first, lambda state: state.step == "done")
        ended = loop_time()
        await world.until(lambda: len(remote.made) == len(ids))
        assert loop_time() - ended < 0.1
        await world.until_done(*others)


async def test_an_engine_claims_only_what_its_selector_matches(store: EmbeddedStore, keys: Keys, world: World) -> None:
    remote = Remote()
    async with running(engine_on(store, keys, JobPlugin(remote), selector="pool=gpu")):
        await world.submit("other", "job")
        await world.submit("ours", "job", labels={"pool": "gpu"})
        await world.until_done("ours")
        assert await world.state("other") is None


async def test_an_execution_is_handled_by_one_engine_at_a_time_while_engines_come_and_go(
    store: EmbeddedStore, keys: Keys, world: World
) -> None:
    """Engines die and leave in turn, with twenty executions under a quota: each job is made once, no unit leaks."""
    remote = Remote()
    await world.quota("licence", 5)
    for task_id in IDS:
        await world.submit(task_id, "job", config={"seconds": 7.0}, quotas={"licence": 1})
    stayers: list[asyncio.Task[None]] = []
    for number in range(8):
        fate = Fate()
        engine = engine_on(MortalStore(store, fate), keys, JobPlugin(remote), name=f"engine-{number}")
        task = asyncio.create_task(engine.start())
        await asyncio.sleep(2.3)
        if number % 2:
            fate.dead.set()
            stayers.append(task)
        else:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    async with running(engine_on(store, keys, JobPlugin(remote), name="engine-z")):
        await world.until_done(*IDS)
    for task in stayers:
        task.cancel()
    await asyncio.gather(*stayers, return_exceptions=True)
    assert set(remote.made.values()) == {1}
    assert len(remote.made) == len(IDS)
    assert await world.holders() == []
