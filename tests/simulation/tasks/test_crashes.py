"""An engine dies, or loses an answer, before and after each of its calls: the outcome is the same, once.

Each shape of an execution is run once undisturbed, to count the moments before and after calls of the store and of the
remote system. Then it is run again for each moment: the engine dies there, and another one, on the same store, ends
what the first one began; or only that one answer is lost.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, NamedTuple

import pytest

from store.embedded.store import EmbeddedStore
from store.schema.keys import Keys
from tests.support.tasks.engines import JobPlugin, Remote, World, engine_on
from tests.support.tasks.mortal import Fate, Kind, MortalStore, at_every_moment, succession

pytestmark = pytest.mark.looptime(noop_cycles=0)

KEYS = Keys(shards=2)


class Shape(NamedTuple):
    """What operators do, the ids of the executions, and how they must end: the phase and the jobs of each."""

    act: Callable[[World], Awaitable[None]]
    ends: dict[str, tuple[str, int]]


async def _submit(world: World, task_id: str = "one", **fields: Any) -> None:
    config = {"seconds": 0.5, **fields.pop("config", {})}
    await world.submit(task_id, "job", config=config, **fields)


async def _success(world: World) -> None:
    await _submit(world)


async def _retries(world: World) -> None:
    await _submit(world, retries=1, config={"outcomes": ["user", "success"]})


async def _aborted(world: World) -> None:
    await _submit(world, config={"seconds": 1e6})
    await world.until_state("one", lambda state: state.phase == "PhaseRunning")
    await world.abort("one")


async def _quota(world: World) -> None:
    await world.quota("licence", 1)
    await _submit(world, "one", quotas={"licence": 1})
    await _submit(world, "two", quotas={"licence": 1})


async def _deadline(world: World) -> None:
    await _submit(world, config={"seconds": 1e6}, active_deadline=20.0, quotas={})


SHAPES = {
    "success": Shape(_success, {"one": ("PhaseSuccess", 1)}),
    "retries": Shape(_retries, {"one": ("PhaseSuccess", 2)}),
    "abort": Shape(_aborted, {"one": ("PhaseAborted", 1)}),
    "quota": Shape(_quota, {"one": ("PhaseSuccess", 1), "two": ("PhaseSuccess", 1)}),
    "deadline": Shape(_deadline, {"one": ("PhasePermanentFailure", 1)}),
}


async def _live(shape: Shape, fate: Fate) -> None:
    """Let executions of the shape live under the fate, and check how they end."""
    store = EmbeddedStore(None)
    world, remote = World(store, KEYS), Remote()

    async def engine(name: str, fate: Fate) -> None:
        remote_of_process = Remote()
        remote_of_process.jobs, remote_of_process.made = remote.jobs, remote.made
        remote_of_process.deletions, remote_of_process.hook = remote.deletions, fate.passes
        await engine_on(MortalStore(store, fate), KEYS, JobPlugin(remote_of_process), name=name).start()

    async with succession(engine, fate):
        await shape.act(world)
        for task_id, (phase, jobs) in shape.ends.items():
            state = await world.until_done(task_id)
            assert state.phase == phase, fate.at
            made = {key: count for key, count in remote.made.items() if key.startswith(task_id)}
            assert list(made.values()) == [1] * jobs, fate.at
            events = await world.events(task_id)
            assert [event.n for event in events] == list(range(state.next_event)), fate.at
            assert [event.phase for event in events].count("PhaseSuccess") == (phase == "PhaseSuccess"), fate.at
        assert remote.running == [], fate.at
        assert await world.holders() == [], fate.at
    await store.close()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, "death") for name in SHAPES),
        ("success", "lost"),
        ("abort", "lost"),
        ("quota", "lost"),
    ],
)
async def test_every_moment(name: str, kind: Kind) -> None:
    """The same outcome, one remote job per attempt, no unit leaked, one event per number, whatever the moment."""
    await at_every_moment(partial(_live, SHAPES[name]), kind)
