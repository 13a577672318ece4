"""The checks of `tests.chaos.tasks` find what they are for."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from store.embedded.store import EmbeddedStore
from store.kv import ops
from store.schema.keys import Keys
from store.schema.quota import QuotaGrant
from store.schema.records import encode
from store.schema.tasks import TaskEvent, TaskState
from tests.chaos.tasks import LIMITS, Operators
from tests.support.tasks.drill import Creation, FileRemote

KEYS = Keys(shards=8)
ONE = "drill-000001"


class World:
    """One execution, submitted by operators, whose engine is the test."""

    def __init__(self, directory: Path) -> None:
        self.store, self.remote = EmbeddedStore(None), FileRemote(directory)
        self.operators = Operators(KEYS, self.remote, seed=1)

    async def begin(self) -> None:
        await self.operators.prepare(self.store)
        await self.operators.tend(self.store, 1)

    async def write(self, *, events: tuple[int, ...] = (), grants: int = 0, **state: Any) -> None:
        writes = [ops.put(KEYS.task_state(ONE), encode(TaskState(**state)))]
        for n in events:
            event = TaskEvent(n=n, at=1.0, attempt=0, phase=state["phase"] if n == max(events) else "PhaseRunning")
            writes.append(ops.put(KEYS.task_event(ONE, n), encode(event)))
        for n in range(grants):
            grant = QuotaGrant(token=f"{ONE}-{n}", execution=ONE, order="0")
            writes.append(ops.put(KEYS.quota_grant("gpu", grant.token), encode(grant)))
        await self.store.txn(writes)

    def job(self, key: str, *, attempt: int = 0, units: int = 1, seconds: float = 1.0) -> None:
        self.remote.create(Creation(key, ONE, attempt, time.time() - 5, seconds, "success", {"gpu": units}))

    async def look(self) -> list[str]:
        await self.operators.look(self.store, still=True)
        return self.operators.violations


@pytest.fixture
async def world(tmp_path: Path) -> World:
    world = World(tmp_path)
    await world.begin()
    return world


async def test_states_and_quotas(world: World) -> None:
    await world.write(step="running", phase="PhaseRunning", grants=LIMITS["gpu"])
    assert await world.look() == []
    await world.write(step="running", phase="PhaseQueued", grants=LIMITS["gpu"] + 1)
    first, second = await world.look()
    assert "7 units of gpu are held" in first
    assert "without a reason" in second


async def test_a_leaked_grant_and_a_gap(world: World) -> None:
    await world.write(step="done", phase="PhaseAborted", next_event=3, events=(0, 2), grants=1)
    leak, gap, end = await world.look()
    assert "held by an execution that has ended" in leak
    assert "has events [0, 2] of 3" in gap
    assert "ended as" in end
    await world.operators.check_end(world.store)
    assert any("has leaked" in each for each in world.operators.violations)


async def test_jobs(world: World) -> None:
    await world.write(step="done", phase="PhaseSuccess", next_event=1, events=(0,))
    await world.look()
    world.operators.violations.clear()
    await world.store.txn([ops.delete_tree(KEYS.tasks), ops.delete_tree(KEYS.task_events)])
    world.job("a", units=LIMITS["gpu"])
    await world.operators.check_end(world.store)
    assert [each for each in world.operators.violations if "had no job" not in each] == []
    world.job("a", units=LIMITS["gpu"])
    world.job("b")
    world.job("c", attempt=9, seconds=1e6)
    await world.operators.check_end(world.store)
    found = "\n".join(world.operators.violations)
    for expected in ("job a was created 2 times", "has jobs ['a', 'b']", "attempt 9 of", "still runs", "were in use"):
        assert expected in found.replace("['b', 'a']", "['a', 'b']"), found
