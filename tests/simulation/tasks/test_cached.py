"""Cached results of executions, and reservations of those that are being computed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from controllers.tasks.api.phase import Transition, do_transition, phase_info_running, phase_info_success
from controllers.tasks.api.plugin import TaskExecutionContext
from controllers.tasks.engine.engine import Engine
from controllers.tasks.io.catalog import Catalog, owner_of
from controllers.tasks.io.data import DataStore, open_data
from controllers.tasks.io.files import FileOutputReader, MemoryOutputReader, OutputFiles
from store.embedded.store import EmbeddedStore
from store.kv import ops
from store.schema.keys import Keys
from store.schema.records import decode
from store.schema.tasks import CatalogEntry
from tests.support import require
from tests.support.tasks.engines import ScriptedPlugin, World, engine_on, running, wall
from tests.support.tasks.mortal import Fate, MortalStore
from tests.support.waiting import loop_time

pytestmark = pytest.mark.looptime(noop_cycles=0)

DECLARED: dict[str, Any] = {
    "outputs": {"rows": "integer"},
    "cache_version": "1",
    "name": "count",
    "inputs": {"day": "monday"},
}


async def test_a_cached_result_calls_no_plugin(store: EmbeddedStore, keys: Keys, world: World) -> None:
    """The second execution has the first one's outputs; one with other inputs is computed."""

    async def handle(context: TaskExecutionContext) -> Transition:
        await context.output_writer.put(MemoryOutputReader({"rows": 3}))
        return do_transition(phase_info_success())

    data, plugin = open_data("memory:"), ScriptedPlugin(handle)
    catalog = Catalog(store, keys, data, clock=wall)
    async with running(engine_on(store, keys, plugin, data=data, catalog=catalog)):
        await world.submit("first", **DECLARED)
        assert (await world.until_done("first")).cache == "POPULATED"
        await world.submit("second", **DECLARED)
        state = await world.until_done("second")
        assert state.phase == "PhaseSuccess"
        assert state.cache == "HIT"
        assert plugin.verbs() == ["handle", "finalize"]
        outputs = await FileOutputReader(data, OutputFiles(data, "second", 0)).read()
        assert outputs == {"rows": 3}
        await world.submit("third", **{**DECLARED, "inputs": {"day": "tuesday"}})
        assert (await world.until_done("third")).cache == "POPULATED"
    await catalog.close()


async def test_of_equal_executions_one_computes_and_the_others_wait(
    store: EmbeddedStore, keys: Keys, world: World
) -> None:
    """The reservation is extended for as long as the computation runs."""
    began: list[float] = []

    async def handle(context: TaskExecutionContext) -> Transition:
        began.append(loop_time())
        if loop_time() < 300.0:
            return do_transition(phase_info_running(0), poll_after=300.0)
        await context.output_writer.put(MemoryOutputReader({"rows": 3}))
        return do_transition(phase_info_success())

    data, plugin = open_data("memory:"), ScriptedPlugin(handle)
    catalog = Catalog(store, keys, data, clock=wall)
    async with running(engine_on(store, keys, plugin, data=data, catalog=catalog)):
        await world.begin("first", cache_serialize=True, **DECLARED)
        await world.submit("second", cache_serialize=True, **DECLARED)
        waiting = await world.until_state("second", lambda state: state.phase == "PhaseWaitingForCache")
        assert [reason.code for reason in waiting.reasons] == ["Dependency"]
        await asyncio.sleep(200.0)
        assert len({name for _, name in plugin.calls}) == 1
        assert (await world.until_done("first", "second")).cache == "HIT"
    assert len({name for _, name in plugin.calls}) == 1
    await catalog.close()


class Computing:
    """A plugin that computes for each execution until the test says what the result is."""

    def __init__(self) -> None:
        self.rows: dict[str, int] = {}

    async def handle(self, context: TaskExecutionContext) -> Transition:
        name = context.task_execution_metadata.get_task_execution_id().get_id().name
        if name not in self.rows:
            return do_transition(phase_info_running(0), poll_after=1.0)
        await context.output_writer.put(MemoryOutputReader({"rows": self.rows[name]}))
        return do_transition(phase_info_success())


async def _entry(store: EmbeddedStore, keys: Keys) -> CatalogEntry:
    [entry] = (await store.list(keys.catalog)).entries
    return decode(CatalogEntry, entry.key, entry.value)


async def _rows(data: DataStore, execution: str) -> object:
    return await FileOutputReader(data, OutputFiles(data, execution, 0)).read()


async def test_a_reservation_that_is_lost_while_its_execution_runs_goes_to_another(
    store: EmbeddedStore, keys: Keys, world: World
) -> None:
    """Both then compute. Neither ends the other's reservation nor damages its result; the cache has the last one's."""
    computing, data = Computing(), open_data("memory:")
    catalog = Catalog(store, keys, data, clock=wall)
    plugin = ScriptedPlugin(computing.handle)
    async with running(engine_on(store, keys, plugin, data=data, catalog=catalog)):
        await world.begin("first", cache_serialize=True, **DECLARED)
        await world.submit("second", cache_serialize=True, **DECLARED)
        await world.until_state("second", lambda state: state.phase == "PhaseWaitingForCache")
        while (state := await world.state("second")) is None or state.phase != "PhaseRunning":
            await store.txn([ops.delete_tree(keys.catalog)])
            await asyncio.sleep(0.5)
        await asyncio.sleep(3 * catalog.heartbeat)  # the first one goes on, and can't extend what it has lost

        computing.rows["first"] = 3
        assert (await world.until_done("first")).cache == "POPULATED"
        entry = await _entry(store, keys)
        assert entry.result is not None
        assert require(entry.reservation).owner == owner_of("second", 0)
        await world.submit("third", cache_serialize=True, **DECLARED)
        assert (await world.until_done("third")).cache == "HIT"

        computing.rows["second"] = 4
        assert (await world.until_done("second")).cache == "POPULATED"
        await world.submit("fourth", cache_serialize=True, **DECLARED)
        assert (await world.until_done("fourth")).cache == "HIT"
    assert (await _entry(store, keys)).reservation is None
    found = [await _rows(data, each) for each in ("first", "second", "third", "fourth")]
    assert found == [{"rows": 3}, {"rows": 4}, {"rows": 3}, {"rows": 4}]
    await catalog.close()


@pytest.mark.parametrize("ends", ["success", "failure"])
async def test_the_reservation_of_an_engine_that_died_is_taken_over_by_another_execution(
    store: EmbeddedStore, keys: Keys, world: World, ends: str
) -> None:
    """The dead engine's execution goes on later, and ends: its result, or its failure, harms nothing."""
    computing, data, fate = Computing(), open_data("memory:"), Fate()
    mortal = MortalStore(store, fate)

    def engine(backing: Any, name: str, team: str) -> tuple[Engine, Catalog]:
        catalog = Catalog(backing, keys, data, clock=wall)
        plugin = ScriptedPlugin(computing.handle)
        options: dict[str, Any] = {"name": name, "selector": f"team={team}", "data": data, "catalog": catalog}
        return engine_on(backing, keys, plugin, **options), catalog

    (dying, dead), (other, living), (late, heir) = (
        engine(mortal, "engine-a", "a"),
        engine(store, "engine-b", "b"),
        engine(store, "engine-c", "a"),
    )
    async with running(dying, other):
        await world.begin("first", cache_serialize=True, labels={"team": "a"}, **DECLARED)
        await world.submit("second", cache_serialize=True, labels={"team": "b"}, **DECLARED)
        await world.until_state("second", lambda state: state.phase == "PhaseWaitingForCache")
        fate.dead.set()
        await world.until_state("second", lambda state: state.phase == "PhaseRunning")
        async with running(late):
            await world.until(lambda: world.owner("first"))
            if ends == "success":
                computing.rows["first"] = 3
            else:
                await world.abort("first")
            state = await world.until_done("first")
            assert state.phase == ("PhaseSuccess" if ends == "success" else "PhaseAborted")
            reservation = require((await _entry(store, keys)).reservation)
            assert reservation.owner == owner_of("second", 0)
            computing.rows["second"] = 4
            assert (await world.until_done("second")).cache == "POPULATED"
            await world.submit("third", cache_serialize=True, labels={"team": "a"}, **DECLARED)
            assert (await world.until_done("third")).cache == "HIT"
    assert await _rows(data, "third") == {"rows": 4}
    if ends == "success":
        assert await _rows(data, "first") == {"rows": 3}
    for catalog in (dead, living, heir):
        await catalog.close()
