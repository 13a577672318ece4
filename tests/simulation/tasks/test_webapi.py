"""The web-API pattern in real engines: one job per attempt, quotas, rate limits, what is read and when, on virtual
time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from controllers.tasks.api.plugin import TaskExecutionContext
from controllers.tasks.outcomes import Policy
from controllers.tasks.patterns.remote import RemoteRefused, RemoteThrottled, RemoteTransient, WebApiConfig
from controllers.tasks.patterns.webapi import Created, Recovery
from store.embedded.store import EmbeddedStore
from store.schema.keys import Keys
from store.schema.tasks import TaskState
from tests.support import require
from tests.support.tasks.engines import World, engine_on, running
from tests.support.tasks.job_api import ApiPlugin, BatchPlugin, JobApi, capped, entry
from tests.support.waiting import loop_time, until

pytestmark = pytest.mark.looptime(noop_cycles=0)


async def test_a_job_is_created_read_and_ended_without_a_poll(store: EmbeddedStore, keys: Keys, world: World) -> None:
    """One job, its outputs, one event for each change, and the reads of a young job: none of them costs a round."""
    api = JobApi(seconds=20.0)
    async with running(engine_on(store, keys, entry(plugin := ApiPlugin(api)))):
        await world.submit("train", "api", outputs={"job": "string"})
        state = await world.until_done("train")
    assert state.phase == "PhaseSuccess"
    assert list(api.made.values()) == [1]
    assert await world.phases("train") == ["Queued", "Queued", "Running", "Success"]
    assert state.plugin_state["phase"] == "Succeeded"
    assert api.count("get") < 12
    assert len(plugin._refresher) == 0


async def test_a_finished_answer_ends_the_execution_in_the_round_of_its_creation(
    store: EmbeddedStore, keys: Keys, world: World
) -> None:
    api = JobApi(seconds=0.0, answers_with_job=True)
    async with running(engine_on(store, keys, entry(ApiPlugin(api)))):
        await world.submit("quick", "api")
        await world.until_done("quick")
    assert api.count("get") == 0
    assert await world.phases("quick") == ["Queued", "Success"]


async def test_progress_is_an_event_and_the_same_answer_is_none(store: EmbeddedStore, keys: Keys, world: World) -> None:
    """The round that shows progress keeps the phase: the engine raises its version."""
    api = JobApi(seconds=1000.0)
    async with running(engine_on(store, keys, entry(ApiPlugin(api)))):
        await world.begin("long", "api")
        [job] = api.jobs.values()
        await asyncio.sleep(300.0)
        quiet = len(await world.events("long"))
        job.progress = 50
        await world.until_state("long", lambda state: state.version == 1)
        assert len(await world.events("long")) == quiet + 1


@pytest.mark.parametrize("scope", ["resource", "project", "namespace"])
async def test_a_refused_unit_waits_and_a_released_one_wakes(
    store: EmbeddedStore, keys: Keys, world: World, scope: str
) -> None:
    """A refusal, of whichever scope, is a wait with a reason; the unit passes on when the first job has ended."""
    limits = {"resource": capped(), "project": capped(project=1), "namespace": capped(namespace=1)}
    api = JobApi(seconds=30.0)
    config = WebApiConfig(resource_quotas={"licence": 1 if scope == "resource" else 9})
    async with running(engine_on(store, keys, entry(ApiPlugin(api, config, licence=limits[scope])))):
        await world.begin("one", "api")
        await world.submit("two", "api")
        waiting = await world.until_state("two", lambda state: state.phase == "PhaseWaitingForResources")
        assert [wait.code for wait in waiting.reasons] == ["LimitReached"]
        assert waiting.plugin_state["requested_at"] > 0
        assert len(api.jobs) == 1
        began = loop_time()
        await world.until_done("one", "two")
        assert loop_time() - began < 100.0
    assert sorted(api.made.values()) == [1, 1]
    assert await world.holders() == []


async def test_the_unit_is_released_with_the_first_sight_of_the_end(
    store: EmbeddedStore, keys: Keys, world: World
) -> None:
    """Before `finalize`, which here fails for a minute."""
    api = JobApi(seconds=3.0)

    class Slow(ApiPlugin):
        async def finalize(self, context: object) -> None:
            if loop_time() < 60.0:
                raise RuntimeError("not yet")
            await super().finalize(context)  # type: ignore[arg-type]

    config = WebApiConfig(resource_quotas={"licence": 1})
    async with running(engine_on(store, keys, entry(Slow(api, config, licence=capped())))):
        await world.submit("one", "api")
        await world.until_state("one", lambda state: state.outcome == "success")
        assert loop_time() < 60.0
        assert await world.holders() == []
        await world.until_done("one")


@pytest.mark.parametrize("can", [Recovery.FIND, Recovery.CREATE_AGAIN])
async def test_a_lost_answer_of_the_creation_makes_no_second_job(
    store: EmbeddedStore, keys: Keys, world: World, can: Recovery
) -> None:
    api = JobApi(failures={"after-create": [RemoteTransient("connection reset")]})
    async with running(engine_on(store, keys, entry(ApiPlugin(api, can=can)))):
        await world.submit("one", "api")
        assert (await world.until_done("one")).phase == "PhaseSuccess"
    assert list(api.made.values()) == [1]


async def test_an_api_that_can_neither_look_nor_repeat_waits_for_an_operator(
    store: EmbeddedStore, keys: Keys, world: World
) -> None:
    """The typed reason stands until an operator aborts; nothing is created a second time, nothing deleted blindly."""
    api = JobApi(failures={"after-create": [RemoteTransient("connection reset")]})
    async with running(engine_on(store, keys, entry(ApiPlugin(api, can=Recovery.UNKNOWN)))):
        await world.submit("one", "api")
        held = await world.until_state("one", lambda state: [w.code for w in state.reasons] == ["RemoteUnknown"])
        assert "look there" in held.reasons[0].message
        await asyncio.sleep(600.0)
        assert list(api.made.values()) == [1]
        await world.abort("one")
        assert (await world.until_done("one")).phase == "PhaseAborted"
    assert api.deleted == []


async def test_a_certain_refusal_is_repeated_even_without_a_way_to_look(
    store: EmbeddedStore, keys: Keys, world: World
) -> None:
    """A connection that was never made and an answer 429 have created nothing."""
    errors = [RemoteTransient("refused", sent=False), RemoteThrottled("slow down", retry_after=7.0)]
    api = JobApi(failures={"create": list(errors)})
    async with running(engine_on(store, keys, entry(ApiPlugin(api, can=Recovery.UNKNOWN)))):
        await world.submit("one", "api")
        assert (await world.until_done("one")).phase == "PhaseSuccess"
    first, second, third = api.calls["create"]
    assert second - first >= 1.0
    assert third - second >= 7.0
    assert list(api.made.values()) == [1]


async def test_throttling_holds_the_creations_of_all_executions(store: EmbeddedStore, keys: Keys, world: World) -> None:
    api = JobApi(failures={"create": [RemoteThrottled("slow down", retry_after=40.0)]})
    async with running(engine_on(store, keys, entry(ApiPlugin(api)))):
        await world.submit("one", "api")
        waiting = await world.until_state("one", lambda state: state.phase == "PhaseWaitingForResources")
        assert "slow down" in waiting.reason
        began = loop_time()
        await world.submit("two", "api")
        await world.until_done("one", "two")
    assert all(at >= began + 39.0 for at in api.calls["create"][1:])


async def test_a_refused_request_fails_the_execution_and_deletes_nothing(
    store: EmbeddedStore, keys: Keys, world: World
) -> None:
    api = JobApi(failures={"create": [RemoteRefused("no such machine type", code="BadMachine")]})
    async with running(engine_on(store, keys, entry(ApiPlugin(api)))):
        await world.submit("one", "api", retries=3)
        state = await world.until_done("one")
    assert state.phase == "PhasePermanentFailure"
    assert state.error is not None
    assert (state.error.code, state.error.message, state.error.kind) == ("BadMachine", "no such machine type", "USER")
    assert api.count("create") == 1
    assert api.count("delete") == 0


async def test_a_creation_that_keeps_failing_is_the_systems_failure(
    store: EmbeddedStore, keys: Keys, world: World
) -> None:
    api = JobApi(failures={"create": [RemoteTransient("down")] * 100})
    policy = Policy(max_system_failures=0)
    config = WebApiConfig(max_system_failures=2)
    async with running(engine_on(store, keys, entry(ApiPlugin(api, config)), policy=policy)):
        await world.submit("one", "api")
        state = await world.until_done("one")
    assert state.error is not None
    assert (state.error.code, state.error.kind) == ("RetriesExhausted|CreateFailed", "SYSTEM")
    assert api.count("create") == 3


async def test_only_consecutive_failures_of_reads_count(store: EmbeddedStore, keys: Keys, world: World) -> None:
    """A success in between starts the count again; one too many fails the attempt, deletes the job and tries again."""
    api = JobApi(seconds=1e9)
    config = WebApiConfig(max_system_failures=3, resync_seconds=5.0)
    async with running(engine_on(store, keys, entry(plugin := ApiPlugin(api, config)))):
        await world.begin("one", "api")
        [item] = plugin._refresher._items.values()
        for _ in range(3):
            api.failures["get"] = [RemoteTransient("reset")] * 3
            await until(lambda: item.failures == 3)
            await until(lambda: item.failures == 0)
        assert (await world.state("one") or TaskState()).attempt == 0
        api.failures["get"] = [RemoteTransient("reset")] * 4
        state = await world.until_state("one", lambda state: state.attempt == 1)
        assert state.system_failures == 1
        assert len(api.deleted) == 1
        await world.until_state("one", lambda state: state.attempt == 1 and state.phase == "PhaseRunning")
        errors = [event.error.code for event in await world.events("one") if event.error]
    assert errors == ["AutoRefreshCacheFailed"]


async def test_a_job_that_vanishes_is_another_attempt(store: EmbeddedStore, keys: Keys, world: World) -> None:
    api = JobApi(seconds=100.0)
    async with running(engine_on(store, keys, entry(ApiPlugin(api)))):
        await world.begin("one", "api")
        api.jobs.clear()
        assert (await world.until_done("one")).phase == "PhaseSuccess"
        errors = [event.error.code for event in await world.events("one") if event.error]
    assert errors == ["RemoteJobGone"]
    assert len(api.made) == 2


async def test_an_abort_deletes_the_job_once_and_without_an_intent_nothing(
    store: EmbeddedStore, keys: Keys, world: World
) -> None:
    api = JobApi(seconds=1e9)
    config = WebApiConfig(resource_quotas={"licence": 1})
    async with running(engine_on(store, keys, entry(ApiPlugin(api, config, licence=capped())))):
        await world.begin("one", "api")
        await world.submit("two", "api")
        await world.until_state("two", lambda state: state.phase == "PhaseWaitingForResources")
        await world.abort("two")
        await world.until_done("two")
        assert api.count("delete") == 0
        await world.abort("one")
        await world.until_done("one")
    assert len(api.deleted) == 1
    assert await world.holders() == []


async def test_a_successor_follows_the_job_from_what_was_saved(store: EmbeddedStore, keys: Keys, world: World) -> None:
    """An engine that stops leaves the job alone; the next one reads it, and creates nothing."""
    api = JobApi(seconds=100.0)
    async with running(engine_on(store, keys, entry(ApiPlugin(api)))):
        await world.begin("one", "api")
    async with running(engine_on(store, keys, entry(ApiPlugin(api)), name="engine-b")):
        assert (await world.until_done("one")).phase == "PhaseSuccess"
    assert list(api.made.values()) == [1]
    assert api.deleted == []


async def test_a_push_is_read_at_once(store: EmbeddedStore, keys: Keys, world: World) -> None:
    api = JobApi(seconds=1e9)
    async with running(engine_on(store, keys, entry(plugin := ApiPlugin(api, WebApiConfig(resync_seconds=3600.0))))):
        await world.submit("one", "api")
        await asyncio.sleep(10_000.0)
        [job] = api.jobs.values()
        job.status = "succeeded"
        began = loop_time()
        assert plugin.push(job.key)
        await world.until_done("one")
        assert loop_time() - began < 6.0
        assert not plugin.push("unknown")


async def test_reads_stay_within_their_rate_and_go_in_batches(store: EmbeddedStore, keys: Keys, world: World) -> None:
    """One call for up to `batch_size` jobs; after the burst as many calls a second as configured."""
    api = JobApi(seconds=1e9)
    config = WebApiConfig(read_qps=1.0, read_burst=5, batch_size=20, resync_seconds=5.0)
    async with running(engine_on(store, keys, entry(plugin := BatchPlugin(api, config)))):
        for number in range(60):
            await world.submit(f"job-{number}", "api")
        await asyncio.sleep(100.0)
    assert max(plugin.batches) == 20
    assert len(plugin.batches) <= 5 + 100 + 2


async def test_creations_stay_within_their_rate(store: EmbeddedStore, keys: Keys, world: World) -> None:
    api = JobApi(seconds=1e9)
    config = WebApiConfig(write_qps=1.0, write_burst=5)
    async with running(engine_on(store, keys, entry(ApiPlugin(api, config)))):
        for number in range(20):
            await world.submit(f"job-{number}", "api")
        await until(lambda: len(api.jobs) == 20)
    made = sorted(api.calls["create"])
    assert made[-1] - made[0] >= 14.0
    assert made[-1] - made[0] < 30.0


async def test_a_read_that_hangs_holds_up_no_other(store: EmbeddedStore, keys: Keys, world: World) -> None:
    """It ends at its time limit, and counts as a failure."""
    api = JobApi(seconds=10.0)

    class Hanging(ApiPlugin):
        async def get(self, context, meta):  # type: ignore[no-untyped-def]
            if meta.startswith("stuck"):
                await asyncio.Event().wait()
            return await super().get(context, meta)

    config = WebApiConfig(workers=2, call_timeout=30.0, max_system_failures=1)
    policy = Policy(max_system_failures=0)
    async with running(engine_on(store, keys, entry(Hanging(api, config)), policy=policy)):
        await world.submit("stuck", "api")
        await world.submit("fine", "api")
        await world.until_done("fine")
        assert loop_time() < 20.0
        state = await world.until_done("stuck")
    assert "not answered within 30 s" in require(state.error).message


async def test_a_remote_system_that_is_down_fails_no_execution_and_is_hardly_called(
    store: EmbeddedStore, keys: Keys, world: World
) -> None:
    """While it is down one execution at a time tries to create its job; then each gets one job."""
    api = JobApi(seconds=1.0)
    down = api.failures["create"] = [RemoteTransient("503", sent=False) for _ in range(10_000)]
    ids = [f"e{number:02}" for number in range(60)]
    async with running(engine_on(store, keys, entry(ApiPlugin(api, can=Recovery.UNKNOWN)))):
        for task_id in ids:
            await world.submit(task_id, "api")
        await asyncio.sleep(300.0)
        calls, events = api.count("create"), await _events(world, ids)
        await asyncio.sleep(3600.0)
        assert api.count("create") - calls <= 3600 / 60 + 1
        assert await _events(world, ids) - events <= 2 * (api.count("create") - calls) + 10  # of those that tried
        state = require(await world.state(ids[-1]))
        assert "the remote system of api is paused" in state.reasons[0].message
        down.clear()
        state = await world.until_done(*ids)
    assert state.phase == "PhaseSuccess"
    assert sorted(api.made.values()) == [1] * len(ids)


async def _events(world: World, ids: list[str]) -> int:
    return sum([len(await world.events(each)) for each in ids])


async def test_a_remote_system_that_is_down_delays_no_other(store: EmbeddedStore, keys: Keys, world: World) -> None:
    class TwoRemotes(ApiPlugin):
        async def remote(self, context: TaskExecutionContext) -> str:
            return str((await context.task_reader.read()).config["remote"])

        async def create(self, context: TaskExecutionContext, key: str) -> Created[dict[str, Any]]:
            if await self.remote(context) == "down":
                self.api.calls.setdefault("down", []).append(loop_time())
                raise RemoteTransient("503", sent=False)
            return await super().create(context, key)

    api = JobApi(seconds=1.0)
    async with running(engine_on(store, keys, entry(TwoRemotes(api)))):
        for number in range(60):
            await world.submit(f"down-{number}", "api", config={"remote": "down"})
        await asyncio.sleep(100.0)
        calls = api.count("down")
        began = loop_time()
        for number in range(60):
            await world.submit(f"up-{number}", "api", config={"remote": "up"})
        state = await world.until_done(*(f"up-{number}" for number in range(60)))
        assert loop_time() - began < 20.0
        assert api.count("down") - calls <= 2
    assert state.phase == "PhaseSuccess"


async def test_executions_that_left_an_engine_do_not_hold_up_its_pause(
    store: EmbeddedStore, keys: Keys, world: World
) -> None:
    """Those that went to another engine are forgotten by the plugin of the first one, though nothing tells it."""
    api = JobApi(seconds=1.0)
    down = api.failures["create"] = [RemoteTransient("503", sent=False) for _ in range(10_000)]
    plugins = ApiPlugin(api), ApiPlugin(api)
    first, second = (
        engine_on(store, keys, entry(plugin), name=name) for plugin, name in zip(plugins, ("one", "two"), strict=True)
    )
    ids = [f"e{number:02}" for number in range(60)]
    async with running(first):
        for task_id in ids:
            await world.submit(task_id, "api")
        await asyncio.sleep(300.0)
        async with running(second):
            await asyncio.sleep(300.0)
            down.clear()
            began = loop_time()
            assert (await world.until_done(*ids)).phase == "PhaseSuccess"
            assert loop_time() - began < 200.0
    assert sorted(api.made.values()) == [1] * len(ids)
