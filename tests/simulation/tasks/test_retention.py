"""One engine removes ended executions: the oldest beyond each limit, none that is alive or awaited, of all shards."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from controllers.tasks.api.phase import Transition, do_transition, phase_info_running
from controllers.tasks.api.plugin import TaskExecutionContext
from controllers.tasks.engine.archive import Archive
from controllers.tasks.engine.engine import Engine
from controllers.tasks.io.data import open_data
from store.embedded.store import EmbeddedStore
from store.schema.keys import Keys, shard_of
from tests.support import require
from tests.support.tasks.engines import JobPlugin, Remote, ScriptedPlugin, World, engine_on, running, wall
from tests.support.tasks.mortal import Fate, Kind, MortalStore, at_every_moment
from tests.support.tasks.schedules import apply_schedule, edit_schedule, executions

pytestmark = pytest.mark.looptime(noop_cycles=0)

PASS = 61.0  # seconds in which every engine has looked once


async def endless(context: TaskExecutionContext) -> Transition:
    return do_transition(phase_info_running(0))


def leaders(*engines: Engine) -> list[Engine]:
    return [each for each in engines if each.term is not None and each.term.retention.archive is not None]


async def test_a_schedule_keeps_its_newest_runs(store: EmbeddedStore, keys: Keys, world: World) -> None:
    """Exactly as many as its limits say, also after they were changed; a live run, and another's, are not counted."""
    await apply_schedule(world, "nightly", "0 0 1 1 *", keep_succeeded=2, keep_failed=1)
    await apply_schedule(world, "all", "0 0 1 1 *", keep_succeeded=None, keep_failed=None)
    for number in range(5):
        for schedule in ("nightly", "all"):
            await world.finished(f"{schedule}-good-{number}", schedule=schedule, ended_at=wall() - number)
            await world.finished(
                f"{schedule}-bad-{number}", schedule=schedule, outcome="aborted", ended_at=wall() - number
            )
    await world.submit("nightly-live", schedule="nightly")
    async with running(engine_on(store, keys, ScriptedPlugin(endless))):
        await asyncio.sleep(PASS)
        assert await executions(world, "nightly") == [
            "nightly-bad-0",
            "nightly-good-0",
            "nightly-good-1",
            "nightly-live",
        ]
        assert len(await executions(world, "all")) == 10
        await edit_schedule(world, "nightly", keep_succeeded=0, keep_failed=None)
        await asyncio.sleep(PASS)
        assert await executions(world, "nightly") == ["nightly-bad-0", "nightly-live"]


async def test_runs_of_a_schedule_in_action(store: EmbeddedStore, keys: Keys, world: World) -> None:
    async with running(engine_on(store, keys, JobPlugin(Remote()))):
        await apply_schedule(world, "every", "* * * * *", keep_succeeded=3)
        await asyncio.sleep(10 * 60.0)
        left = await executions(world, "every")
        assert 3 <= len(left) <= 4  # the newest may have begun after the last look
        assert left[-1] == f"every-{int(wall()) // 60}"


async def test_types_and_projects_have_their_own_limit(store: EmbeddedStore, keys: Keys, world: World) -> None:
    for number in range(4):
        for project in ("red", "blue"):
            await world.finished(f"{project}-{number}", project=project, ended_at=wall() - number)
        await world.finished(f"other-{number}", type="other", ended_at=wall() - number - 10)
    async with running(engine_on(store, keys, JobPlugin(Remote()), retention_per_type=2, retention_count=5)):
        await asyncio.sleep(PASS)
        assert await executions(world) == ["blue-0", "blue-1", "other-0", "red-0", "red-1"]


async def test_one_engine_retains_and_another_one_when_it_dies(store: EmbeddedStore, keys: Keys, world: World) -> None:
    """The number of all is exact, though most shards are another engine's."""
    fates = [Fate() for _ in range(3)]
    engines = [
        engine_on(MortalStore(store, fate), keys, JobPlugin(Remote()), name=f"engine-{number}", retention_count=7)
        for number, fate in enumerate(fates)
    ]
    for number in range(20):
        await world.finished(f"task-{number:02}", ended_at=wall() - number)
    async with running(*engines):
        await asyncio.sleep(PASS)
        assert await executions(world) == [f"task-{number:02}" for number in range(7)]
        [leader] = leaders(*engines)
        assert require(leader.term).retention.removed == 13
        fates[engines.index(leader)].dead.set()
        for number in range(20, 30):
            await world.finished(f"task-{number}", ended_at=wall() + number)
        await asyncio.sleep(3 * PASS)
        assert await executions(world) == [f"task-{number}" for number in range(23, 30)]
        [follower] = leaders(*(each for each in engines if each is not leader))
        assert require(follower.term).retention.removed == 10


class RetentionFate(Fate):
    """Numbers only the calls by which an engine leads and removes."""

    async def passes(self, what: str) -> None:
        if self.dead.is_set() or "retention" in what or "delete-tree" in what:
            await super().passes(what)


async def _looks(fate: Fate) -> None:
    """Let an engine remove under the fate, then another one; check what is left."""
    store, keys, data = EmbeddedStore(None), Keys(shards=2), open_data("memory:")
    world = World(store, keys)
    files = [data.construct_reference(data.base, "executions", f"task-{number}", "inputs.json") for number in range(20)]
    for number in range(20):
        await world.finished(f"task-{number}", ended_at=wall() - number)
        await data.write(files[number], b"{}")
    engine = engine_on(MortalStore(store, fate), keys, JobPlugin(Remote()), data=data, retention_count=3)
    first = asyncio.create_task(engine.start())
    await asyncio.sleep(2 * PASS)
    if not fate.dead.is_set():
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
    successor = engine_on(store, keys, JobPlugin(Remote()), name="engine-b", data=data, retention_count=2)
    async with running(successor):
        await asyncio.sleep(2 * PASS)
        assert await executions(world) == ["task-0", "task-1"], fate.at
        assert [(await data.head(file)).exists for file in files] == [True] * 2 + [False] * 18, fate.at
        [leader] = leaders(successor)
        assert leader is successor
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await store.close()


@pytest.mark.parametrize("kind", ["death", "lost"])
async def test_every_moment(kind: Kind) -> None:
    """An engine that dies, or loses an answer, before or after any call leaves all to the next one."""
    await at_every_moment(_looks, kind, least=8, fate=RetentionFate)


async def test_an_engine_that_no_longer_leads_removes_nothing(store: EmbeddedStore, keys: Keys, world: World) -> None:
    engines = [engine_on(store, keys, JobPlugin(Remote()), name=name, retention_count=1) for name in ("one", "two")]
    async with running(*engines):
        await asyncio.sleep(PASS)
        [leader] = leaders(*engines)
        [other] = [each for each in engines if each is not leader]
        assert other.term is not None

        async def believed() -> bool:
            return True

        require(leader.term).retention._interval = 1e6
        other.term.retention._leadership.obtain = believed  # type: ignore[method-assign]
        await asyncio.sleep(PASS)  # the last look of the leader
        for number in range(5):
            await world.finished(f"task-{number}")
        await asyncio.sleep(5 * PASS)
        assert len(await executions(world)) == 5
        assert other.term.retention.removed == 0


async def test_one_that_runs_again_keeps_what_it_waits_for(store: EmbeddedStore, keys: Keys, world: World) -> None:
    """Though the leader knows it as ended: it is another engine's."""
    engines = [
        engine_on(store, keys, ScriptedPlugin(endless), name=name, retention_age=200.0, handover_interval=0.01)
        for name in ("one", "two")
    ]
    async with running(*engines):
        await asyncio.sleep(PASS)
        [leader] = leaders(*engines)
        [other] = [each for each in engines if each is not leader]
        assert leader.term is not None
        assert other.term is not None
        here, there = (set(each.term.ownership.shards) for each in (leader, other) if each.term)
        assert here.isdisjoint(there)
        names = [f"task-{number}" for number in range(100)]
        old = next(name for name in names if shard_of(name, keys.shards) in here)
        dependent = next(name for name in names if shard_of(name, keys.shards) in there)
        await world.finished(old, ended_at=wall() - 20.0)
        await world.finished(dependent, depends_on=(old, "missing"), ended_at=wall() + 1000.0)
        await asyncio.sleep(PASS)
        assert dependent in require(leader.term.retention.archive).ended
        await world.edit(dependent, rerun=1)
        await asyncio.sleep(6 * PASS)
        assert await executions(world) == sorted((old, dependent))


async def test_a_look_reads_only_what_may_have_changed(store: EmbeddedStore, keys: Keys, world: World) -> None:
    """Of another engine's shards it lists names, and reads the records of live and of new executions."""
    read = 0

    class Counting(MortalStore):
        async def list(self, prefix: str, *, consistent: bool = False) -> Any:
            nonlocal read
            found = await super().list(prefix, consistent=consistent)
            read += len(found.entries)
            return found

    for number in range(400):
        await world.finished(f"task-{number}")
    await world.submit("live", depends_on=("task-1",))
    archive = Archive(Counting(store, Fate()), keys)
    await archive.read({})
    assert (len(archive.ended), archive.awaited, read) == (400, {"task-1"}, 801)
    await archive.read({})
    assert (len(archive.ended), archive.awaited, read) == (400, {"task-1"}, 802)
    await world.finished("another")
    await store.delete(keys.task_spec("task-7"))
    await store.delete(keys.task_state("task-7"))
    await store.delete(keys.task_spec("live"))
    await archive.read({})
    assert ("another" in archive.ended, "task-7" in archive.ended, archive.awaited, read) == (True, False, set(), 804)
