"""`process` tasks while engines and nodes die and come back at random moments."""

from __future__ import annotations

import asyncio
import contextlib
import random

import pytest

from controllers.tasks.outcomes import Backoff, Policy
from controllers.tasks.plugins.process import ProcessPlugin
from controllers.tasks.plugins.task_pods import TaskPods
from scheduler.label import LabelScheduler
from store.embedded.store import EmbeddedStore
from store.kv.protocol import Store
from store.schema.keys import Keys
from tests.support.tasks.engines import World, engine_on
from tests.support.tasks.mortal import Fate, MortalStore
from tests.support.tasks.task_agents import TaskAgents, task_agents
from tests.support.waiting import background, loop_time

pytestmark = pytest.mark.looptime(noop_cycles=0)

KEYS = Keys(shards=4)
TASKS, FAULTS, LOST_AFTER = 12, 25, 10.0  # seconds
NODES = ("node-1", "node-2", "node-3")
BACKOFF = Backoff(1.0, 5.0)
POLICY = Policy(
    max_system_failures=1000, round_backoff=BACKOFF, retry_backoff=BACKOFF, cleanup_backoff=BACKOFF
)  # nodes die more often than users would bear


class Engines:
    """Two engines, each of which dies and is started again."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._fates: dict[str, Fate] = {}
        self.tasks: list[asyncio.Task[None]] = []

    def start(self, name: str) -> None:
        fate = self._fates[name] = Fate()
        self.tasks.append(asyncio.create_task(self._live(name, fate)))

    async def restart(self, name: str) -> None:
        """Kill the engine, and start it again after a while."""
        self._fates[name].dead.set()
        await asyncio.sleep(5)
        self.start(name)

    async def _live(self, name: str, fate: Fate) -> None:
        mortal = MortalStore(self._store, fate)
        pods = TaskPods(mortal, KEYS, LabelScheduler, node_lost_after=LOST_AFTER, clock=loop_time)
        async with background(pods.run()):
            await pods.synced()
            engine = engine_on(mortal, KEYS, ProcessPlugin(pods), name=name, policy=POLICY)
            pods.wake = engine.enqueue
            await engine.start()


async def _fault(rng: random.Random, engines: Engines, agents: TaskAgents, dead: set[str]) -> None:
    """Do something at random; at least one node stays alive."""
    await asyncio.sleep(rng.uniform(0, 8))
    kind = rng.random()
    if kind < 0.3:
        await engines.restart(rng.choice(("engine-a", "engine-b")))
    elif dead and (kind < 0.6 or len(dead) == 2):
        node = rng.choice(sorted(dead))
        dead.discard(node)
        await agents.revive(node)
    else:
        node = rng.choice(sorted(set(NODES) - dead))
        dead.add(node)
        await agents.kill(node)


@pytest.mark.parametrize("seed", range(5))
async def test_every_execution_ends_and_no_pod_runs_twice(seed: int) -> None:
    """Each pod is started once, beside no other of its execution but on dead nodes; at the end nothing is left."""
    rng, store = random.Random(seed), EmbeddedStore(None)
    world, engines, dead = World(store, KEYS), Engines(store), set[str]()
    async with task_agents(store, KEYS, *NODES, seconds=40.0) as agents:
        for name in ("engine-a", "engine-b"):
            engines.start(name)
        try:
            names = [f"job-{number}" for number in range(TASKS)]
            for name in names:
                await world.submit(name, "process", config={"command": ["run"]})
            for _ in range(FAULTS):
                await _fault(rng, engines, agents, dead)
            for node in dead:
                await agents.revive(node)
            await world.until_done(*names)
            for name in names:
                state = await world.state(name)
                assert state is not None
                assert (state.phase, state.user_failures) == ("PhaseSuccess", 0)
            assert set(agents.started.values()) == {1}

            async def is_clean() -> bool:
                left = [await store.keys(prefix) for prefix in (KEYS.intents, KEYS.manifests, KEYS.task_pods)]
                return not any(left)

            await world.until(is_clean)
            assert agents.running == []
        finally:
            for task in engines.tasks:
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*engines.tasks, return_exceptions=True)
    await store.close()
