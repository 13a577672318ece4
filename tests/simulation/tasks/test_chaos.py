"""Fifty executions while engines die, leave and lose answers at random moments."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest

from store.embedded.store import EmbeddedStore
from store.kv.protocol import Listing, Op, TxnResult, Unavailable
from store.schema.keys import Keys
from tests.support.tasks.engines import JobPlugin, Remote, World, engine_on, running
from tests.support.tasks.mortal import Fate, MortalStore

pytestmark = pytest.mark.looptime(noop_cycles=0)

COUNT = 50
LICENCES, CLUSTERS = 6, 4


class Storm(Fate):
    """Loses one call in `every`, request or answer."""

    def __init__(self, rng: random.Random, every: int) -> None:
        super().__init__()
        self._rng, self._every = rng, every

    async def passes(self, what: str) -> None:
        await super().passes(what)
        if self._rng.randrange(self._every) == 0:
            raise Unavailable(f"no answer: {what}")


def _fields(rng: random.Random) -> dict[str, Any]:
    """Return a random execution. Its last attempt succeeds unless an operator or a deadline ends it."""
    outcomes = rng.choice([["success"], ["user", "success"], ["system", "success"], ["user", "system", "success"]])
    fields: dict[str, Any] = {"retries": 2, "config": {"outcomes": outcomes, "seconds": rng.uniform(0.0, 5.0)}}
    if rng.random() < 0.5:
        fields["quotas"] = {"licence": rng.randint(1, 2)}
        if rng.random() < 0.3:
            fields["quotas"]["cluster"] = 1
    if rng.random() < 0.2:
        fields["fair_key"] = rng.choice("abc")
    return fields


@pytest.mark.parametrize("seed", range(2))
async def test_every_execution_ends_once(store: EmbeddedStore, keys: Keys, world: World, seed: int) -> None:
    """One job per attempt, never more holders than units, no unit left, and each end is the expected one."""
    rng, remote = random.Random(seed), Remote()
    await world.quota("licence", LICENCES)
    await world.quota("cluster", CLUSTERS)
    ids = [f"job-{number}" for number in range(COUNT)]
    aborted = set(rng.sample(ids, 6))
    units: dict[str, dict[str, int]] = {}

    async def operate() -> None:
        for task_id in ids:
            spec = await world.submit(task_id, "job", **_fields(rng))
            units[task_id] = spec.quotas
            await asyncio.sleep(rng.uniform(0.0, 0.5))
        for task_id in sorted(aborted):
            await world.abort(task_id)
            await asyncio.sleep(rng.uniform(0.0, 1.0))

    async def witness() -> None:
        """Count what the running jobs hold."""
        while True:
            for resource, limit in (("licence", LICENCES), ("cluster", CLUSTERS)):
                owners = [task_id for key in remote.running for task_id in ids if key.startswith(f"{task_id}-n0-")]
                assert sum(units[task_id].get(resource, 0) for task_id in owners) <= limit
            await asyncio.sleep(0.05)

    async def disturb() -> None:
        """Start, kill and stop engines, two or three at a time."""
        live: list[tuple[Storm, asyncio.Task[None]]] = []
        dead: list[asyncio.Task[None]] = []
        try:
            for number in range(14):
                storm = Storm(rng, every=60)
                plugin = JobPlugin(_seen_from(remote, storm))
                engine = engine_on(MortalStore(store, storm), keys, plugin, name=f"engine-{number}")
                live.append((storm, asyncio.create_task(engine.start())))
                await asyncio.sleep(rng.uniform(0.5, 4.0))
                if len(live) > 2:
                    doomed, task = live.pop(rng.randrange(len(live)))
                    if rng.random() < 0.7:
                        doomed.dead.set()
                        dead.append(task)
                    else:
                        task.cancel()
                        await asyncio.wait({task})
        finally:
            for _, task in live:
                task.cancel()
            for task in dead:
                task.cancel()
            await asyncio.gather(*dead, *(task for _, task in live), return_exceptions=True)

    watching = asyncio.create_task(witness())
    async with asyncio.TaskGroup() as group:
        group.create_task(operate())
        group.create_task(disturb())
    async with running(engine_on(store, keys, JobPlugin(remote), name="engine-last")):
        await world.until_done(*ids)
    assert not watching.done()
    watching.cancel()
    for task_id in ids:
        state = await world.state(task_id)
        assert state is not None
        wanted = {"PhaseSuccess"} | ({"PhaseAborted"} if task_id in aborted else set())
        assert state.phase in wanted, (task_id, state)
        assert [event.n for event in await world.events(task_id)] == list(range(state.next_event))
    assert set(remote.made.values()) == {1}
    assert remote.running == []
    assert await world.holders() == []


def _seen_from(remote: Remote, fate: Fate) -> Remote:
    """Return the remote system as a process sees it that `fate` disturbs."""
    seen = Remote()
    seen.jobs, seen.made, seen.deletions, seen.hook = remote.jobs, remote.made, remote.deletions, fate.passes
    return seen


class Deaf(MortalStore):
    """Loses the answer to the first grant; from then on no watch of the quotas is answered."""

    lost = False

    async def txn(self, ops: Sequence[Op]) -> TxnResult:
        is_first, self.lost = not self.lost, self.lost or any("/grants/" in op.key for op in ops)
        result = await super().txn(ops)
        if is_first and self.lost:
            raise Unavailable("no answer")
        return result

    async def watch(self, prefix: str, index: int, wait: float) -> Listing:
        listing = await super().watch(prefix, index, wait)
        while self.lost and prefix.endswith("/quota/"):
            await asyncio.sleep(wait)
        return listing


async def test_a_unit_that_no_view_shows_is_given_back(store: EmbeddedStore, keys: Keys, world: World) -> None:
    """The answer to its grant was lost, and the execution ends before the view of the quotas has it."""
    await world.quota("licence", 1)
    async with running(engine_on(Deaf(store, Fate()), keys, JobPlugin(Remote()))):
        await world.submit("only", "job", quotas={"licence": 1}, config={"seconds": 0.0, "poll": 0.0})
        await world.until_done("only")
    assert await world.holders() == []
