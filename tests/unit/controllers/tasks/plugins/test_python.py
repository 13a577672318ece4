"""`python` tasks in a real engine: outputs, failures with bounded tracebacks, hung functions and full pools."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from controllers.tasks.api.plugin import Plugin, PluginEntry, SetupContext
from controllers.tasks.io.data import open_data
from controllers.tasks.io.literals import decode_literals
from controllers.tasks.patterns.sync import SyncConfig
from controllers.tasks.plugins.python import PythonPlugin
from store.embedded.store import EmbeddedStore
from store.redaction import Redactor
from store.schema.keys import Keys
from tests.support import require
from tests.support.tasks.engines import World, engine_on, running
from tests.support.waiting import until


class Stage:
    """A store, and engines with the plugin."""

    def __init__(self) -> None:
        self.store, self.keys = EmbeddedStore(None), Keys(shards=2)
        self.world, self.data = World(self.store, self.keys), open_data("memory:")
        self.redactor = Redactor()

    def engine(self, config: SyncConfig | None = None, **functions: Callable[..., Any]) -> Any:
        self.plugin = PythonPlugin(config, functions=functions, redactor=self.redactor)

        async def load(setup: SetupContext) -> Plugin:
            await self.plugin.load(setup)
            return self.plugin

        entry = PluginEntry("python", ("python",), load)
        return running(engine_on(self.store, self.keys, entry, virtual=False, data=self.data))

    async def outputs(self, task_id: str) -> Any:
        return decode_literals(await self.data.read(f"{self.data.base}/executions/{task_id}/0/outputs.json"))


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    stage = Stage()
    yield stage
    await stage.store.close()


@pytest.mark.parametrize(
    ("returned", "outputs"), [({"rows": 3, "name": "a"}, {"rows": 3, "name": "a"}), (7, {"result": 7}), (None, {})]
)
async def test_a_function_gets_the_inputs_and_gives_the_outputs(stage: Stage, returned: Any, outputs: Any) -> None:
    got: list[Any] = []

    def function(day: str, limit: int = 5) -> Any:
        got.append((day, limit))
        return returned

    async with stage.engine(count=function):
        await stage.world.submit("one", "python", config={"function": "count"}, inputs={"day": "monday"})
        state = await stage.world.until_done("one")
    assert state.phase == "PhaseSuccess"
    assert got == [("monday", 5)]
    assert await stage.outputs("one") == outputs


async def test_an_exception_is_the_users_failure_without_secrets_and_bounded(stage: Stage) -> None:
    """The end of the traceback is kept, since the error stands there."""
    stage.redactor.remember("hunter2-hunter2")

    def function() -> None:
        raise ValueError("x" * 5000 + " the password hunter2-hunter2 is wrong")

    async with stage.engine(fails=function):
        await stage.world.submit("one", "python", config={"function": "fails"}, retries=1)
        state = await stage.world.until_done("one")
    assert state.error is not None
    assert (state.error.code, state.error.kind) == ("RetriesExhausted|CallRaised", "USER")
    assert state.error.message.endswith("the password [redacted] is wrong")
    assert len(state.error.message) < 2100
    assert state.attempt == 1


@pytest.mark.parametrize(
    ("config", "inputs", "words"),
    [
        ({"function": "other"}, {}, "'other' is not one of count"),
        ({"function": "count"}, {"days": 1}, "(inputs: days)"),
        ({"function": "count", "timeout": -1}, {"day": 1}, "timeout"),
        ({}, {}, "function"),
    ],
)
async def test_a_wrong_task_fails_without_another_attempt(
    stage: Stage, config: dict[str, Any], inputs: dict[str, Any], words: str
) -> None:
    async with stage.engine(count=lambda day: day):
        await stage.world.submit("one", "python", config=config, inputs=inputs, retries=3)
        state = await stage.world.until_done("one")
    assert words in require(state.error).message
    assert state.attempt == 0


async def test_a_hung_function_costs_its_thread_and_nothing_else(stage: Stage) -> None:
    """It fails at its time limit. While its thread hangs in a pool of one, the next execution says so and waits."""
    release = threading.Event()
    async with stage.engine(SyncConfig(threads=1), hangs=lambda: release.wait(30) and None, fine=lambda: None):
        await stage.world.submit("hung", "python", config={"function": "hangs", "timeout": 0.05})
        state = await stage.world.until_done("hung")
        assert require(state.error).code.endswith("CallTimedOut")
        await stage.world.submit("next", "python", config={"function": "fine"})
        waiting = await stage.world.until_state("next", lambda state: state.phase == "PhaseWaitingForResources")
        assert waiting.reason == "all 1 threads are in use; calls beyond their time limit: hung"
        release.set()
        assert (await stage.world.until_done("next")).phase == "PhaseSuccess"


async def test_an_abort_reaches_the_function_that_looks(stage: Stage) -> None:
    """Nothing waits for the call any more; it is called once."""
    calls: list[threading.Event] = []
    plugin_call = PythonPlugin.do

    class Looking(PythonPlugin):
        def do(self, call: Any) -> Any:
            calls.append(call.abandoned)
            call.abandoned.wait(30)
            return plugin_call(self, call)

    async with stage.engine(fine=lambda: None):
        stage.plugin.__class__ = Looking
        await stage.world.submit("one", "python", config={"function": "fine"})
        await until(lambda: calls)
        await stage.world.abort("one")
        assert (await stage.world.until_done("one")).phase == "PhaseAborted"
        await until(lambda: not stage.plugin._threads)
    assert len(calls) == 1
