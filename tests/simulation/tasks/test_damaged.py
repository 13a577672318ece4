"""Executions whose records are damaged: what they hold can be given back by the operators' commands."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from rcfarm.operations.errors import TaskRefused
from rcfarm.operations.tasks import Tasks
from store.embedded.store import EmbeddedStore
from store.kv import ops
from store.schema.keys import Keys
from tests.support.tasks.engines import JobPlugin, Remote, World, engine_on, running

pytestmark = pytest.mark.looptime(noop_cycles=0)


async def _begun(store: EmbeddedStore, keys: Keys, world: World, remote: Remote) -> None:
    """Begin an execution that holds the only unit; its engine stops."""
    await world.quota("gpu", 1)
    async with running(engine_on(store, keys, JobPlugin(remote), name="engine-a")):
        await world.begin("first", "job", quotas={"gpu": 1}, config={"seconds": 1e6}, labels={"team": "a"})


def _with(**wrong: Any) -> Any:
    def damage(raw: bytes) -> bytes:
        return json.dumps(json.loads(raw) | wrong).encode()

    return damage


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: raw[:-20],
        lambda raw: b"\xff",
        lambda raw: b"[" * 100_000,
        lambda raw: b"",
        _with(retries="many"),
        _with(id=7, quotas={"gpu": "one"}, abort={"by": 3}, generation=-1),
        _with(type=None, plugin=5),
        lambda raw: None,
    ],
    ids=["cut", "binary", "deep", "empty", "field", "fields", "type", "deleted"],
)
async def test_an_execution_whose_spec_is_damaged_can_be_aborted(
    store: EmbeddedStore, keys: Keys, world: World, damage: Any
) -> None:
    """Its remote work is stopped, and its units go to the next; also if the engine has never seen the spec."""
    remote, key = Remote(), keys.task_spec("first")
    await _begun(store, keys, world, remote)
    entry = await store.get(key)
    assert entry is not None
    damaged = damage(entry.value)
    await store.txn([ops.delete(key) if damaged is None else ops.put(key, damaged)])
    async with running(engine_on(store, keys, JobPlugin(remote), name="engine-b")):
        await world.submit("second", "job", quotas={"gpu": 1}, config={"seconds": 1.0})
        await world.until_state("second", lambda state: state.reasons)
        spec = await Tasks(store, keys, actor="operator").abort("first", reason="damaged")
        assert spec.abort is not None
        assert (await world.until_done("first")).phase == "PhaseAborted"
        assert (await world.until_done("second")).phase == "PhaseSuccess"
    assert list(remote.deletions.values()) == [1]
    assert await world.holders() == []


async def test_an_execution_whose_state_is_damaged_is_dropped_by_force(
    store: EmbeddedStore, keys: Keys, world: World
) -> None:
    """An abort can't know what to stop, and names the command; that gives the units back and leaves the work alone."""
    remote = Remote()
    await _begun(store, keys, world, remote)
    await store.put(keys.task_state("first"), b"{")
    tasks = Tasks(store, keys, actor="operator")
    async with running(engine_on(store, keys, JobPlugin(remote), name="engine-b")):
        await world.submit("second", "job", quotas={"gpu": 1}, config={"seconds": 1.0})
        await world.until_state("second", lambda state: state.reasons)
        for refused in (tasks.abort("first"), tasks.delete("first")):
            with pytest.raises(TaskRefused, match="rcfarm task delete --force first"):
                await refused
        await tasks.delete("first", force=True)
        assert (await world.until_done("second")).phase == "PhaseSuccess"
        await world.until(lambda: world_is_empty(store, keys))
    assert await world.holders() == []
    assert remote.running


async def world_is_empty(store: EmbeddedStore, keys: Keys) -> bool:
    return not await store.keys(keys.task("first")) and not await store.keys(keys.events_of("first"))


async def test_a_live_execution_is_dropped_by_force_while_its_engine_runs(
    store: EmbeddedStore, keys: Keys, world: World
) -> None:
    remote = Remote()
    await world.quota("gpu", 1)
    async with running(engine_on(store, keys, JobPlugin(remote))):
        await world.begin("first", "job", quotas={"gpu": 1}, config={"seconds": 1e6})
        await Tasks(store, keys).delete("first", force=True)
        await world.submit("second", "job", quotas={"gpu": 1}, config={"seconds": 1.0})
        assert (await world.until_done("second")).phase == "PhaseSuccess"
        await world.until(lambda: world_is_empty(store, keys))
    assert await world.holders() == []


async def test_an_ended_execution_whose_spec_is_damaged_is_deleted_as_any_other(
    store: EmbeddedStore, keys: Keys, world: World
) -> None:
    tasks = Tasks(store, keys)
    async with running(engine_on(store, keys, JobPlugin(Remote()))):
        await world.submit("first", "job", config={"seconds": 1.0})
        await world.until_done("first")
        await store.put(keys.task_spec("first"), b"{")
        assert (await tasks.get("first")).remedy == "`rcfarm task delete first`"
        await tasks.delete("first")
        await world.until(lambda: world_is_empty(store, keys))


@pytest.mark.parametrize("moment", ["running", "waiting", "succeeded", "failed"])
async def test_a_state_that_was_deleted_while_no_engine_ran_starts_nothing_twice(
    store: EmbeddedStore, keys: Keys, world: World, moment: str
) -> None:
    """What may have begun waits for an operator; what has not begins, and what has succeeded stays so."""
    remote = Remote()
    await world.quota("gpu", 1)
    outcome = "user" if moment == "failed" else "success"
    config = {"seconds": 1e6 if moment == "running" else 5.0, "outcomes": [outcome]}
    async with running(engine_on(store, keys, JobPlugin(remote), name="engine-a")):
        if moment == "waiting":
            await world.submit("before", "job", quotas={"gpu": 1}, config={"seconds": 1e6})
            await world.until_state("before", lambda state: state.step == "running")
        await world.submit("first", "job", quotas={"gpu": 1}, config=config)
        match moment:
            case "running":
                await world.until_state("first", lambda state: state.phase == "PhaseRunning")
            case "waiting":
                await world.until_state("first", lambda state: state.phase == "PhaseWaitingForResources")
            case _:
                await world.until_done("first")
    events = await world.events("first")
    await store.txn([ops.delete(keys.task_state("first"))])
    made = remote.made.total()

    plugin = JobPlugin(remote)
    async with running(engine_on(store, keys, plugin, name="engine-b")):
        if moment in ("running", "failed"):
            state = await world.until_state("first", lambda state: state.reasons)
            assert [reason.code for reason in state.reasons] == ["RemoteUnknown"]
            assert "rcfarm task abort first" in state.reasons[0].message
            await asyncio.sleep(600.0)
            assert ("first", "handle") not in plugin.calls
            if moment == "running":
                assert await world.holders()  # the unit is not free: the job still runs
            await world.abort("first")
            assert (await world.until_done("first")).phase == "PhaseAborted"
            assert remote.made.total() == made
            await world.edit("first", abort=None, rerun=1)
            await world.until_state("first", lambda state: state.phase == "PhaseRunning")
            assert max(remote.made.values()) == 1  # of another attempt, under a name of its own
        elif moment == "waiting":
            await world.abort("before")
            assert (await world.until_done("first")).phase == "PhaseSuccess"
        else:
            assert (await world.until_done("first")).phase == "PhaseSuccess"
            assert remote.made.total() == made
            assert plugin.calls == [("first", "finalize")]
    assert (await world.events("first"))[: len(events)] == events


async def test_the_history_of_a_deleted_state_is_read_only_after_a_takeover(
    store: EmbeddedStore, keys: Keys, world: World
) -> None:
    """No execution that begins costs another operation."""
    reads = []

    class Watched(EmbeddedStore):
        async def list(self, prefix: str, *, consistent: bool = False) -> Any:
            reads.append(prefix)
            return await super().list(prefix, consistent=consistent)

    watched = Watched(None)
    world = World(watched, keys)
    async with running(engine_on(watched, keys, JobPlugin(Remote()))):
        for number in range(10):
            await world.submit(f"e{number}", "job")
        await world.until_done(*(f"e{number}" for number in range(10)))
    await watched.close()
    assert not [prefix for prefix in reads if "/task-events/" in prefix]
