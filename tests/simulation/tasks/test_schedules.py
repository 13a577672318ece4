"""Engines begin the runs of schedules: once each, whatever happens, and one schedule harms no other."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable
from functools import partial

import pytest
import structlog

from controllers.tasks.engine.scheduler import TASK, Scheduler
from controllers.tasks.schedule import execution_id
from rcfarm.operations.errors import TaskExists, TaskRefused
from rcfarm.operations.schedules import Schedules, Triggered
from rcfarm.telemetry.tasks import schedule_metrics
from store.embedded.store import EmbeddedStore
from store.kv.protocol import SessionSpec
from store.schema import audit
from store.schema.keys import Keys
from store.schema.tasks import TaskSpec
from tests.support.tasks.engines import EPOCH, JobPlugin, Remote, World, engine_on, running, wall
from tests.support.tasks.mortal import Fate, Kind, MortalStore, at_every_moment, succession
from tests.support.tasks.schedules import apply_schedule, edit_schedule, executions, schedule_state
from tests.support.waiting import background

pytestmark = pytest.mark.looptime(noop_cycles=0)

KEYS = Keys(shards=2)
EVERY_MINUTE = "* * * * *"
LONG = TaskSpec(id="", type="job", config={"seconds": 1e6, "poll": 30.0})


def moment(number: int) -> float:
    """Return the n-th whole minute after the beginning of a test, from 1."""
    return (EPOCH // 60 + number) * 60


def ids(name: str, *numbers: int) -> list[str]:
    return [execution_id(name, moment(number)) for number in numbers]


def begun(world: World, name: str, count: int) -> Callable[[], Awaitable[bool]]:
    async def enough() -> bool:
        return len(await executions(world, name)) >= count

    return enough


async def test_runs_begin_at_their_moments_and_end(store: EmbeddedStore, keys: Keys, world: World) -> None:
    async with running(engine_on(store, keys, JobPlugin(Remote()))):
        await apply_schedule(world, "every", EVERY_MINUTE)
        await world.until(begun(world, "every", 3))
        assert await executions(world) == ids("every", 1, 2, 3)
        for number, execution in enumerate(ids("every", 1, 2, 3), 1):
            state = await world.until_done(execution)
            assert state.phase == "PhaseSuccess"
            assert 0 <= state.created - moment(number) < 0.5
        events = [event for event in await audit.events(store, keys) if event.event_type == "SCHEDULE_FIRED"]
        assert [event.event_details["task"] for event in events] == ids("every", 1, 2, 3)
        assert (await schedule_state(world, "every")).last == ids("every", 3)[0]


async def test_forbid_skips_and_goes_on_after_the_end(store: EmbeddedStore, keys: Keys, world: World) -> None:
    async with running(engine_on(store, keys, JobPlugin(Remote()))):
        await apply_schedule(world, "slow", EVERY_MINUTE, task=LONG)
        await world.until(begun(world, "slow", 1))
        await asyncio.sleep(150)
        state = await schedule_state(world, "slow")
        assert [skip.code for skip in state.skips] == ["Overlap", "Overlap"]
        assert ids("slow", 1)[0] in state.skips[0].message
        await world.abort(ids("slow", 1)[0])
        await world.until(begun(world, "slow", 2))
        assert await executions(world) == ids("slow", 1, 4)


async def test_replace_aborts_and_begins_after_the_end(store: EmbeddedStore, keys: Keys, world: World) -> None:
    remote = Remote()
    async with running(engine_on(store, keys, JobPlugin(remote))):
        await apply_schedule(world, "newest", EVERY_MINUTE, task=LONG, overlap="replace")
        await world.until(begun(world, "newest", 2))
        first, second = ids("newest", 1, 2)
        ended = await world.until_done(first)
        assert ended.phase == "PhaseAborted"
        running_now = await world.until_state(second, lambda state: state.phase == "PhaseRunning")
        assert ended.ended_at <= running_now.created < ended.ended_at + 1.0
        assert len(remote.running) == 1


async def test_a_triggered_run_and_those_that_are_due_see_each_other(
    store: EmbeddedStore, keys: Keys, world: World
) -> None:
    """Also at the same moment: each of two operators, and the engine, writes the schedule's state by CAS."""
    schedules = Schedules(store, keys, actor="eve", clock=wall)
    async with running(engine_on(store, keys, JobPlugin(Remote()))):
        await apply_schedule(world, "slow", EVERY_MINUTE, task=LONG)
        both = await asyncio.gather(*(schedules.trigger("slow") for _ in range(2)), return_exceptions=True)
        [task] = [each.task for each in both if isinstance(each, Triggered)]
        assert [type(each) for each in both if not isinstance(each, Triggered)] in ([TaskRefused], [TaskExists])
        await asyncio.sleep(61)
        assert await executions(world) == [task]
        assert task in (await schedule_state(world, "slow")).skips[0].message

        await edit_schedule(world, "slow", overlap="replace", paused=True)
        replacing = await schedules.trigger("slow")
        assert replacing.aborted == (task,)
        ended = await world.until_done(task)
        begun = await world.until_state(replacing.task, lambda state: state.phase == "PhaseRunning")
        assert ended.phase == "PhaseAborted"
        assert begun.created >= ended.ended_at
        await asyncio.sleep(2)
        beside = await schedules.trigger("slow", force=True)
        await world.until_state(beside.task, lambda state: state.phase == "PhaseRunning")
        assert (await schedule_state(world, "slow")).active == (replacing.task, beside.task)


async def test_a_pause_and_a_removal_end_the_runs(store: EmbeddedStore, keys: Keys, world: World) -> None:
    async with running(engine_on(store, keys, JobPlugin(Remote()))):
        await apply_schedule(world, "every", EVERY_MINUTE)
        await world.until(begun(world, "every", 1))
        await edit_schedule(world, "every", paused=True)
        await asyncio.sleep(200)
        assert await executions(world) == ids("every", 1)
        await edit_schedule(world, "every", paused=False, since=moment(4))
        await world.until(begun(world, "every", 2))
        assert await executions(world) == ids("every", 1, 5)
        await store.delete(keys.schedule_spec("every"))

        async def forgotten() -> bool:
            return not await store.keys(keys.schedules)

        await world.until(forgotten)
        await asyncio.sleep(200)
        assert len(await executions(world)) == 2


async def test_bad_schedules_harm_no_other(store: EmbeddedStore, keys: Keys, world: World) -> None:
    await store.put(keys.schedule_spec("broken"), b"{]")
    await apply_schedule(world, "never", "0 0 30 2 *")
    await apply_schedule(world, "lost", EVERY_MINUTE, time_zone="Europe/Atlantis")
    await apply_schedule(world, "huge", EVERY_MINUTE, task=TaskSpec(id="", type="job", inputs={"x": "y" * 380_000}))
    await apply_schedule(world, "unread", EVERY_MINUTE)
    await store.put(keys.schedule_state("unread"), b"[]")
    await store.put(keys.schedules + "what/is/this", b"{}")
    await world.submit(ids("taken", 1)[0], "job", config={"seconds": 1.0})
    await apply_schedule(world, "taken", EVERY_MINUTE)
    async with running(engine_on(store, keys, JobPlugin(Remote()))):
        await apply_schedule(world, "good", EVERY_MINUTE)
        await world.until(begun(world, "good", 3))
        assert not {re.sub(r"-\d+$", "", each) for each in await executions(world)} & {"never", "lost", "unread"}
        await world.until(begun(world, "taken", 3))
        state = await schedule_state(world, "taken")
        assert [skip.code for skip in state.skips] == ["IdTaken"]
        assert state.last == ids("taken", 3)[0]


async def test_metrics_say_what_became_of_the_runs(store: EmbeddedStore, keys: Keys, world: World) -> None:
    """Counts come from the engine that began or skipped the runs; moments from the one that leads, once."""
    engines = [engine_on(store, keys, JobPlugin(Remote()), name=name) for name in ("engine-a", "engine-b")]
    began = wall()

    def scraped() -> dict[str, float]:
        found: dict[str, float] = {}
        for engine in engines:
            for metric in schedule_metrics(engine.term):
                for sample in metric.samples:
                    name = " ".join((sample.name.removeprefix("rcfarm_schedule_"), *sample.labels.values()))
                    assert name not in found
                    found[name] = sample.value
        return found

    await apply_schedule(world, "quick", "*/2 * * * *")
    await apply_schedule(world, "slow", EVERY_MINUTE, task=LONG)
    await apply_schedule(world, "paused", EVERY_MINUTE, paused=True)
    async with running(*engines):
        await asyncio.sleep(moment(5) + 1.0 - began)
        unused = {"runs_total paused"} | {
            f"skipped_runs_total {name}"
            for name in ("quick Missed", "quick Overlap", "slow Missed", "paused Missed", "paused Overlap")
        }
        assert scraped() == dict.fromkeys(unused, 0.0) | {
            "runs_total quick": 2.0,
            "runs_total slow": 1.0,
            "skipped_runs_total slow Overlap": 4.0,
            "next_run_timestamp_seconds quick": moment(6),
            "next_run_timestamp_seconds slow": moment(6),
            "last_run_timestamp_seconds quick": moment(4),
            "last_run_timestamp_seconds slow": moment(1),
            "last_success_timestamp_seconds quick": pytest.approx(moment(4) + 1.0, abs=1.0),
        }
        for name in ("quick", "slow"):
            await store.delete(keys.schedule_spec(name))
        await asyncio.sleep(1.0)
        assert set(scraped()) == {each for each in unused if "paused" in each}
    assert scraped() == {}


async def test_missed_runs_are_made_up_for(store: EmbeddedStore, keys: Keys, world: World) -> None:
    await apply_schedule(world, "last", EVERY_MINUTE, overlap="allow")
    await apply_schedule(world, "all", EVERY_MINUTE, overlap="allow", missed="all", max_missed=3)
    await apply_schedule(world, "none", EVERY_MINUTE, overlap="allow", missed="none")
    await asyncio.sleep(601)
    async with running(engine_on(store, keys, JobPlugin(Remote()))):
        await world.until(begun(world, "all", 4))
        await world.until(begun(world, "last", 1))
        await world.until(begun(world, "none", 1))
        assert await executions(world, "last") == ids("last", 10)
        assert await executions(world, "all") == ids("all", 7, 8, 9, 10)
        assert await executions(world, "none") == ids("none", 10)


async def test_another_engine_goes_on_when_the_leader_dies(store: EmbeddedStore, keys: Keys, world: World) -> None:
    fates = {name: Fate() for name in ("engine-a", "engine-b")}
    engines = {
        name: engine_on(MortalStore(store, fate), keys, JobPlugin(Remote()), name=name) for name, fate in fates.items()
    }
    await apply_schedule(world, "every", EVERY_MINUTE, overlap="allow")
    async with running(*engines.values()):
        await world.until(begun(world, "every", 2))
        leader = next(name for name, engine in engines.items() if engine.membership.leads(TASK))
        fates[leader].dead.set()
        await world.until(begun(world, "every", 5))
        assert await executions(world) == ids("every", 1, 2, 3, 4, 5)
        follower = next(engine for name, engine in engines.items() if name != leader)
        assert follower.term is not None
        assert follower.term.scheduler.begun.total() == 3


class ScheduleFate(Fate):
    """Numbers only what an engine does for schedules; `test_crashes` has the rest."""

    async def passes(self, what: str) -> None:
        if self.dead.is_set() or "schedules/" in what or ("get " in what and "/spec" in what):
            await super().passes(what)


async def _minutes(overlap: str, fate: Fate, *, both_lead: bool = False) -> None:
    """Let a schedule run for two minutes under the fate, and check its runs."""
    await asyncio.sleep(61 - wall() % 60)  # tests of one loop share its time
    expected = [execution_id("s", wall() + 60 * number) for number in (1, 2)]
    store = EmbeddedStore(None)
    world = World(store, KEYS)
    task = LONG if overlap == "replace" else TaskSpec(id="", type="job", config={"seconds": 1.0})

    async def engine(name: str, fate: Fate) -> None:
        made = engine_on(MortalStore(store, fate), KEYS, JobPlugin(Remote()), name=name, lease=20.0)
        if both_lead:
            made.membership.leads = lambda task: True  # type: ignore[method-assign]
        await made.start()

    beside = background(engine("engine-c", Fate())) if both_lead else contextlib.nullcontext()
    async with succession(engine, fate), beside:
        await apply_schedule(world, "s", EVERY_MINUTE, task=task, overlap=overlap)
        await world.until(begun(world, "s", 2))
        found = await executions(world)
        assert found == expected, fate.at
        fired = [event for event in await audit.events(store, KEYS) if event.event_type == "SCHEDULE_FIRED"]
        submitted = [event.event_details["task"] for event in fired if "task" in event.event_details]
        assert sorted(submitted) == found, fate.at
        live = [each for each in found[:-1] if overlap == "replace" and (await world.until_done(each)).step != "done"]
        assert live == []
    await store.close()


@pytest.mark.parametrize(("overlap", "kind"), [("allow", "death"), ("replace", "death"), ("allow", "lost")])
async def test_every_moment(overlap: str, kind: Kind) -> None:
    """An engine that dies, or loses an answer, before or after any call, neither loses nor doubles a run."""
    await at_every_moment(partial(_minutes, overlap), kind, least=8, fate=ScheduleFate)


async def _replaced_by_hand(fate: Fate) -> None:
    """Trigger a run that replaces another under the fate."""
    store = EmbeddedStore(None)
    world, schedules = World(store, KEYS), Schedules(store, KEYS, actor="eve", clock=wall)
    await apply_schedule(world, "s", "0 0 1 1 *", task=LONG, overlap="replace", paused=True)
    first = (await schedules.trigger("s")).task
    async with running(engine_on(store, KEYS, JobPlugin(Remote()), name="engine-c")):
        await world.until_state(first, lambda state: state.phase == "PhaseRunning")
        await asyncio.sleep(1.0)  # runs of one second have one id
    second = await schedules.trigger("s")
    assert second.aborted == (first,)
    engine = asyncio.create_task(engine_on(MortalStore(store, fate), KEYS, JobPlugin(Remote())).start())
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(10.0):
            await fate.dead.wait()
    async with running(engine_on(store, KEYS, JobPlugin(Remote()), name="engine-b")):
        begun = await world.until_state(second.task, lambda state: state.phase == "PhaseRunning")
        ended = await world.until_done(first)
        assert (ended.phase, ended.ended_at <= begun.created) == ("PhaseAborted", True), fate.at
        state = await schedule_state(world, "s")
        assert (state.requested, state.active, await executions(world)) == ("", (second.task,), [first, second.task])
        fired = [event for event in await audit.events(store, KEYS) if event.event_type == "SCHEDULE_FIRED"]
        assert [event.event_details["task"] for event in fired] == [second.task], fate.at
    engine.cancel()
    await asyncio.gather(engine, return_exceptions=True)
    await store.close()


@pytest.mark.parametrize("kind", ["death", "lost"])
async def test_every_moment_of_a_run_that_replaces(kind: Kind) -> None:
    await at_every_moment(_replaced_by_hand, kind, least=2, fate=ScheduleFate)


async def test_two_that_believe_to_lead_begin_each_run_once() -> None:
    await _minutes("allow", Fate(), both_lead=True)


async def test_an_engine_that_is_no_member_begins_nothing(store: EmbeddedStore, keys: Keys, world: World) -> None:
    membership = engine_on(store, keys, JobPlugin(Remote())).membership
    membership.leads = lambda task: True  # type: ignore[method-assign]
    session = await store.create_session(SessionSpec("former", ttl=10_000.0, check_ttl=None))
    await apply_schedule(world, "every", EVERY_MINUTE)
    scheduler = Scheduler(
        store,
        keys,
        membership,
        session.id,
        clock=asyncio.get_running_loop().time,
        wall=wall,
        log=structlog.get_logger(),
    )
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(200):
            await scheduler.run()
    assert await executions(world) == []
    assert await store.keys(keys.schedules) == [keys.schedule_spec("every")]
