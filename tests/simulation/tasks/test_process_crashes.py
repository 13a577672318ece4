"""`process` tasks whose engine dies, or loses an answer, before and after each of its calls to the store.

See `test_crashes`: here the remote system is the store itself, and the work is a pod.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import NamedTuple

import pytest

from controllers.tasks.plugins.process import ProcessPlugin
from controllers.tasks.plugins.task_pods import TaskPods
from scheduler.label import LabelScheduler
from store.embedded.store import EmbeddedStore
from store.schema.keys import Keys
from tests.support.tasks.engines import World, engine_on
from tests.support.tasks.mortal import Fate, Kind, MortalStore, at_every_moment, succession
from tests.support.tasks.task_agents import task_agents
from tests.support.waiting import background, loop_time

pytestmark = pytest.mark.looptime(noop_cycles=0)

KEYS = Keys(shards=2)
CONFIG = {"command": ["run"]}


class Shape(NamedTuple):
    """What operators do, the exit codes of the attempts, the phase at the end, and the number of pods."""

    act: Callable[[World], Awaitable[None]]
    exits: tuple[int, ...]
    seconds: float
    phase: str
    pods: int


async def _submitted(world: World) -> None:
    await world.submit("one", "process", config=CONFIG, retries=1)


async def _aborted(world: World) -> None:
    await _submitted(world)
    await world.until_state("one", lambda state: state.phase == "PhaseRunning")
    await world.abort("one")


SHAPES = {
    "success": Shape(_submitted, (0,), 0.5, "PhaseSuccess", 1),
    "retry": Shape(_submitted, (1, 0), 0.5, "PhaseSuccess", 2),
    "abort": Shape(_aborted, (0,), 1e6, "PhaseAborted", 1),
}


async def _live(shape: Shape, fate: Fate) -> None:
    """Let an execution of the shape live under the fate, and check how it ends."""
    store = EmbeddedStore(None)
    world = World(store, KEYS)

    async def engine(name: str, fate: Fate) -> None:
        mortal = MortalStore(store, fate)
        pods = TaskPods(mortal, KEYS, LabelScheduler, clock=loop_time)
        async with background(pods.run()):
            await pods.synced()
            engine = engine_on(mortal, KEYS, ProcessPlugin(pods), name=name)
            pods.wake = engine.enqueue
            await engine.start()

    running = task_agents(store, KEYS, "node-1", "node-2", exits=shape.exits, seconds=shape.seconds)
    async with running as agents, succession(engine, fate):
        await shape.act(world)
        state = await world.until_done("one")
        assert state.phase == shape.phase, fate.at
        assert list(agents.started.values()) == [1] * shape.pods, fate.at

        async def is_clean() -> bool:
            left = [await store.keys(prefix) for prefix in (KEYS.intents, KEYS.manifests, KEYS.task_pods)]
            return not any(left)

        await world.until(is_clean)
        assert agents.running == [], fate.at
    await store.close()


@pytest.mark.parametrize("kind", ["death", "lost"])
@pytest.mark.parametrize("name", SHAPES)
async def test_every_moment(name: str, kind: Kind) -> None:
    """The same outcome, each attempt's pod is started once, and nothing is left, whatever the moment."""
    await at_every_moment(partial(_live, SHAPES[name]), kind)
