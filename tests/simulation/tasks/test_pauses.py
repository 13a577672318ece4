"""A plugin whose calls fail for everything is paused as a whole: few calls, no writes, and all goes on afterwards."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter

import pytest

from controllers.tasks.api.phase import (
    Transition,
    do_transition,
    phase_info_failure,
    phase_info_running,
    phase_info_success,
)
from controllers.tasks.api.plugin import TaskExecutionContext
from controllers.tasks.circuit import FAULTS
from controllers.tasks.engine.engine import Engine
from controllers.tasks.patterns.remote import RemoteTransient
from rcfarm.operations.tasks import Tasks, reasons
from store.embedded.store import EmbeddedStore
from store.schema.keys import Keys
from store.schema.tasks import AbortRequest
from tests.support import require
from tests.support.tasks.engines import EPOCH, JobPlugin, Remote, ScriptedPlugin, World, engine_on, running
from tests.support.tasks.mortal import Fate, MortalStore
from tests.support.waiting import loop_time

pytestmark = pytest.mark.looptime(noop_cycles=0)

SUCCESS = do_transition(phase_info_success())
LONG = 1200.0


class Flaky:
    """The calls of a plugin that fail as long as `fails`, in the way of `how`. `went`: executions in order of their
    first success."""

    def __init__(self, how: str = "raise") -> None:
        self.how, self.fails = how, True
        self.calls: list[float] = []
        self.went: list[str] = []

    async def handle(self, context: TaskExecutionContext) -> Transition:
        self.calls.append(loop_time())
        if not self.fails:
            self.went.append(context.task_execution_metadata.get_task_execution_id().get_id().name)
            return SUCCESS
        match self.how:
            case "raise":
                raise RuntimeError("boom")
            case "outage":
                raise RemoteTransient("503")
            case "hang":
                await asyncio.sleep(1e6)
        return "nonsense"  # type: ignore[return-value]


async def _submit(world: World, number: int, prefix: str = "e", **fields: object) -> list[str]:
    ids = [f"{prefix}-{each:04}" for each in range(number)]
    for task_id in ids:
        await world.submit(task_id, **fields)  # type: ignore[arg-type]
    return ids


async def _explained(store: EmbeddedStore, keys: Keys, task_id: str) -> list[str]:
    tasks = Tasks(store, keys)
    return [wait.code for wait in reasons(await tasks.get(task_id), await tasks.engines())]


@pytest.mark.parametrize("how", ["raise", "outage", "hang", "nonsense"])
async def test_a_plugin_that_always_fails_costs_one_call_per_interval_and_no_writes(
    store: EmbeddedStore, keys: Keys, world: World, how: str
) -> None:
    flaky = Flaky(how)
    engine = engine_on(store, keys, ScriptedPlugin(flaky.handle), call_timeout=5.0, concurrency=16)
    async with running(engine):
        ids = await _submit(world, 100)
        await asyncio.sleep(300.0 - loop_time())
        calls, before = len(flaky.calls), await _tree(store, keys)
        await asyncio.sleep(LONG)
        assert len(flaky.calls) - calls <= LONG / 60 + 1
        assert await _tree(store, keys) == before
        for task_id in (ids[0], ids[-1]):
            tasks = Tasks(store, keys)
            first = reasons(await tasks.get(task_id), await tasks.engines())[0]
            assert first.code == "PluginPaused"
            assert "scripted" in first.message
            assert "engine-a" in first.message
            assert EPOCH <= first.since < EPOCH + 60.0
            assert EPOCH + loop_time() - 1.0 < first.until < EPOCH + loop_time() + 61.0
        flaky.fails, repaired = False, loop_time()
        state = await world.until_done(*ids)
        assert loop_time() - repaired < 70.0
        assert state.phase == "PhaseSuccess"
        assert {event.phase for each in ids for event in await world.events(each)} <= {
            "PhaseNotReady",
            "PhaseQueued",
            "PhaseSuccess",
        }
        await world.until(lambda: not engine.membership.me.pauses)
        assert require(engine.term).report.pauses() == []


async def _tree(store: EmbeddedStore, keys: Keys) -> dict[str, int]:
    """Return what the store has of executions, with the number of each entry's last write."""
    entries = (await store.list(keys.root + "/task")).entries
    return {entry.key: entry.modify_index for entry in entries}


async def test_the_line_goes_on_in_its_order(store: EmbeddedStore, keys: Keys, world: World) -> None:
    flaky = Flaky()
    async with running(engine_on(store, keys, ScriptedPlugin(flaky.handle))):
        await _submit(world, FAULTS, "first")
        await asyncio.sleep(3.0)
        for number in range(40):
            await world.submit(f"then-{number:02}")
            await asyncio.sleep(0.01)
        flaky.fails = False
        await world.until_done(*(f"then-{number:02}" for number in range(40)))
    went = [int(name.removeprefix("then-")) for name in flaky.went if name.startswith("then")]
    assert len(went) == 40
    assert all(abs(number - place) <= 10 for place, number in enumerate(went))  # workers overtake each other


async def test_tasks_that_fail_pause_nothing(store: EmbeddedStore, keys: Keys, world: World) -> None:
    async def fails(context: TaskExecutionContext) -> Transition:
        return do_transition(phase_info_failure("Bad", "the task's own code failed"))

    engine = engine_on(store, keys, ScriptedPlugin(fails))
    async with running(engine):
        ids = await _submit(world, 3 * FAULTS)
        state = await world.until_done(*ids)
        assert engine.membership.me.pauses == ()
    assert loop_time() < 5.0
    assert state.phase == "PhasePermanentFailure"


async def test_other_plugins_are_not_delayed(store: EmbeddedStore, keys: Keys, world: World) -> None:
    """Neither while one fails, nor by the units of a quota that both need."""
    flaky, remote = Flaky("hang"), Remote()
    await world.quota("gpu", 4)
    plugins = ScriptedPlugin(flaky.handle), JobPlugin(remote)
    async with running(engine_on(store, keys, *plugins, call_timeout=5.0, concurrency=8)):
        await _submit(world, 100)
        await asyncio.sleep(60.0)
        await _submit(world, 50, "late", quotas={"gpu": 1})
        began = loop_time()
        good = await _submit(world, 20, "good", type="job", config={"seconds": 1.0}, quotas={"gpu": 1})
        state = await world.until_done(*good)
        assert state.phase == "PhaseSuccess"
        assert loop_time() - began < 30.0


async def test_deadlines_and_aborts_end_executions_of_a_paused_plugin(
    store: EmbeddedStore, keys: Keys, world: World
) -> None:
    flaky = Flaky()
    async with running(engine_on(store, keys, ScriptedPlugin(flaky.handle))):
        await _submit(world, 20)
        await asyncio.sleep(60.0)
        await world.submit("queued", queue_timeout=100.0)
        await world.submit("stopped")
        await world.submit("dependent", depends_on=("stopped",))
        await asyncio.sleep(10.0)
        began = loop_time()
        await world.abort("stopped")
        assert (await world.until_done("stopped")).phase == "PhaseAborted"
        assert (await world.until_done("dependent")).error
        assert loop_time() - began < 1.0
        state = await world.until_done("queued")
        assert require(state.error).code == "QueueTimeoutExpired"
        assert loop_time() - began < 110.0


async def test_a_clean_up_that_always_fails_pauses_clean_ups_only(
    store: EmbeddedStore, keys: Keys, world: World
) -> None:
    broken, finalized = [True], Counter[str]()

    async def handle(context: TaskExecutionContext) -> Transition:
        return SUCCESS

    async def finalize(context: TaskExecutionContext) -> None:
        finalized[context.task_execution_metadata.get_task_execution_id().get_id().name] += 1
        if broken[0]:
            raise RuntimeError("boom")

    plugin = ScriptedPlugin(handle, finalize=finalize)
    async with running(engine_on(store, keys, plugin)):
        ids = await _submit(world, 50)
        await asyncio.sleep(120.0)
        calls, before = finalized.total(), await _tree(store, keys)
        assert plugin.verbs().count("handle") == 50
        await asyncio.sleep(LONG)
        assert finalized.total() - calls <= LONG / 60 + 1
        assert await _tree(store, keys) == before
        assert (await _explained(store, keys, ids[-1]))[0] == "PluginPaused"
        await world.edit(ids[-1], abort=AbortRequest(by="operator", force=True))
        await world.until_done(ids[-1])
        broken[0] = False
        assert (await world.until_done(*ids[:-1])).phase == "PhaseSuccess"


async def test_a_plugin_that_flaps_loses_no_execution(store: EmbeddedStore, keys: Keys, world: World) -> None:
    flaky = Flaky()
    async with running(engine_on(store, keys, ScriptedPlugin(flaky.handle), concurrency=8)):
        ids = await _submit(world, 300)

        async def flap() -> None:
            while True:
                await asyncio.sleep(40.0)
                flaky.fails = not flaky.fails

        flapping = asyncio.create_task(flap())
        state = await world.until_done(*ids)
        flapping.cancel()
    assert state.phase == "PhaseSuccess"


async def test_an_engine_that_takes_over_probes_on_its_own(store: EmbeddedStore, keys: Keys, world: World) -> None:
    """The pause belongs to the engine; executions that it had paused go on at another one."""
    flaky = Flaky()

    def engine(name: str) -> Engine:
        return engine_on(store, keys, ScriptedPlugin(flaky.handle), name=name)

    async with running(engine("engine-a")):
        ids = await _submit(world, 50)
        await asyncio.sleep(300.0)
    flaky.fails = False
    async with running(engine("engine-b")):
        began = loop_time()
        assert (await world.until_done(*ids)).phase == "PhaseSuccess"
        assert loop_time() - began < 60.0


async def test_a_poisonous_execution_among_others_fails_alone(store: EmbeddedStore, keys: Keys, world: World) -> None:
    ended: list[str] = []

    async def handle(context: TaskExecutionContext) -> Transition:
        template = await context.task_reader.read()
        if template.config.get("poison"):
            raise RuntimeError("boom")
        await asyncio.sleep(0.1)
        return SUCCESS if ended else do_transition(phase_info_running(0), poll_after=5.0)

    engine = engine_on(store, keys, ScriptedPlugin(handle))
    async with running(engine):
        good = await _submit(world, 50)
        for number in range(2 * FAULTS):
            await world.submit(f"bad-{number}", config={"poison": True})
        for number in range(2 * FAULTS):
            assert (await world.until_done(f"bad-{number}")).phase == "PhasePermanentFailure"
        ended.append("all")
        assert (await world.until_done(*good)).phase == "PhaseSuccess"


async def test_calls_that_ignore_their_cancellation_do_not_hold_up_the_line(
    store: EmbeddedStore, keys: Keys, world: World
) -> None:
    """An execution whose call still runs gives its turn to the next; no call overlaps with another of its execution."""
    running_now, most = Counter[str](), Counter[str]()

    async def deaf(context: TaskExecutionContext) -> Transition:
        name = context.task_execution_metadata.get_task_execution_id().get_id().name
        running_now[name] += 1
        most[name] = max(most[name], running_now[name])
        try:
            while loop_time() < 600.0:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(600.0 - loop_time())
        finally:
            running_now[name] -= 1
        return SUCCESS

    async with running(engine_on(store, keys, ScriptedPlugin(deaf), call_timeout=5.0, concurrency=8)):
        ids = await _submit(world, 40)
        await asyncio.sleep(600.0)
        assert (await world.until_done(*ids)).phase == "PhaseSuccess"
        assert loop_time() < 720.0
    assert max(most.values()) == 1


async def test_an_engine_that_dies_while_a_plugin_is_paused_leaves_all_to_the_next(
    store: EmbeddedStore, keys: Keys, world: World
) -> None:
    flaky, fate = Flaky(), Fate()
    dying = engine_on(MortalStore(store, fate), keys, ScriptedPlugin(flaky.handle), name="engine-a")
    async with running(dying):
        ids = await _submit(world, 50)
        await asyncio.sleep(100.0)
        fate.dead.set()
        async with running(engine_on(store, keys, ScriptedPlugin(flaky.handle), name="engine-b")):
            await asyncio.sleep(100.0)
            view = await Tasks(store, keys).get(ids[-1])
            [reason, *_] = reasons(view, await Tasks(store, keys).engines())
            assert reason.code == "PluginPaused"
            assert "engine-b" in reason.message
            flaky.fails = False
            assert (await world.until_done(*ids)).phase == "PhaseSuccess"
