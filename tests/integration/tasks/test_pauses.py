"""A paused plugin and a deleted state on the stores that an engine runs on."""

from __future__ import annotations

import asyncio

from controllers.tasks.api.phase import Transition, do_transition, phase_info_success
from controllers.tasks.api.plugin import TaskExecutionContext
from controllers.tasks.circuit import FAULTS
from rcfarm.operations.tasks import Tasks, reasons
from store.kv import ops
from store.kv.protocol import Store
from store.schema.keys import Keys
from tests.support.tasks.engines import JobPlugin, Remote, ScriptedPlugin, World, engine_on, running


async def test_a_pause_is_published_in_the_record_by_which_the_engine_is_a_member(any_store: Store, root: str) -> None:
    """The record stays the member's lock; once the plugin works, all executions end."""
    keys, works = Keys(root, shards=4), asyncio.Event()
    world, tasks = World(any_store, keys), Tasks(any_store, keys)

    async def handle(context: TaskExecutionContext) -> Transition:
        if not works.is_set():
            raise RuntimeError("boom")
        return do_transition(phase_info_success())

    ids = [f"e{number}" for number in range(3 * FAULTS)]
    engine = engine_on(any_store, keys, ScriptedPlugin(handle), virtual=False)
    async with running(engine):
        for task_id in ids:
            await world.submit(task_id)

        async def is_shown() -> bool:
            view = await tasks.get(ids[-1])
            return "PluginPaused" in {wait.code for wait in reasons(view, await tasks.engines())}

        await world.until(is_shown, within=10.0)
        record = await any_store.get(keys.engine("engine-a"))
        assert record is not None
        assert record.session == engine.keeper.session_id
        assert engine.membership.leads("anything")
        works.set()
        assert (await world.until_done(*ids)).phase == "PhaseSuccess"

        async def is_over() -> bool:
            return not (await tasks.engines())[0].member.pauses

        await world.until(is_over, within=10.0)
    assert await any_store.get(keys.engine("engine-a")) is None


async def test_a_state_that_was_deleted_between_two_engines_starts_nothing_twice(any_store: Store, root: str) -> None:
    keys, remote = Keys(root, shards=4), Remote()
    world = World(any_store, keys)
    async with running(engine_on(any_store, keys, JobPlugin(remote), virtual=False)):
        await world.begin("first", "job", config={"seconds": 1e6})
    await any_store.txn([ops.delete(keys.task_state("first"))])
    async with running(engine_on(any_store, keys, JobPlugin(remote), name="engine-b", virtual=False)):
        state = await world.until_state("first", lambda state: state.reasons)
        assert [reason.code for reason in state.reasons] == ["RemoteUnknown"]
        await world.abort("first")
        await world.until_done("first")
    assert list(remote.made.values()) == [1]
