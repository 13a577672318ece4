"""Executions from submission to their end, with one engine, on virtual time."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from controllers.tasks.api.data import OutputError
from controllers.tasks.api.phase import (
    UNKNOWN_TRANSITION,
    ErrorKind,
    ExecutionError,
    Transition,
    do_transition,
    phase_info_failure,
    phase_info_failure_with_cleanup,
    phase_info_queued,
    phase_info_retryable_failure,
    phase_info_running,
    phase_info_success,
    phase_info_system_retryable_failure,
    phase_info_waiting_for_resources,
)
from controllers.tasks.api.plugin import TaskExecutionContext
from controllers.tasks.api.resources import AllocationStatus, ResourceNamespace
from controllers.tasks.io.data import open_data
from controllers.tasks.io.files import MemoryOutputReader, OutputFiles
from controllers.tasks.outcomes import Policy
from store.embedded.store import EmbeddedStore
from store.schema.keys import Keys, shard_of
from tests.support import require
from tests.support.tasks.engines import (
    EPOCH,
    JobPlugin,
    Remote,
    ScriptedPlugin,
    World,
    engine_on,
    now,
    running,
)
from tests.support.waiting import loop_time, until

pytestmark = pytest.mark.looptime(noop_cycles=0)

SUCCESS = do_transition(phase_info_success())


def scripted(*answers: Transition | Exception, **options: Any) -> ScriptedPlugin:
    """Return a plugin that gives these answers, the last one forever."""
    left = list(answers)

    async def handle(context: TaskExecutionContext) -> Transition:
        answer = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    return ScriptedPlugin(handle, **options)


def polled(transition: Transition, seconds: float = 1.0) -> Transition:
    return msgspec.structs.replace(transition, poll_after=seconds)


async def test_a_job_runs_to_success(store: EmbeddedStore, keys: Keys, world: World) -> None:
    """One remote job; each phase is one event; the ownership is given up."""
    remote = Remote()
    async with running(engine_on(store, keys, JobPlugin(remote))):
        await world.submit("backup", "job", config={"seconds": 5.0})
        state = await world.until_done("backup")
    assert state.phase == "PhaseSuccess"
    assert list(remote.made.values()) == [1]
    assert await world.phases("backup") == ["Queued", "Queued", "Running", "Success"]


async def test_a_success_with_outputs_is_one_event(store: EmbeddedStore, keys: Keys, world: World) -> None:
    async def handle(context: TaskExecutionContext) -> Transition:
        await context.output_writer.put(MemoryOutputReader({"rows": 3}))
        return SUCCESS

    async with running(engine_on(store, keys, ScriptedPlugin(handle))):
        await world.submit("count", outputs={"rows": "integer"})
        await world.until_done("count")
    assert (await world.phases("count")).count("Success") == 1


@pytest.mark.parametrize(
    ("put", "code"), [(None, "OutputsNotGenerated"), (MemoryOutputReader({"others": 1}), "OutputsNotFound")]
)
async def test_a_success_without_a_declared_output_is_a_retryable_failure(
    store: EmbeddedStore, keys: Keys, world: World, put: MemoryOutputReader | None, code: str
) -> None:
    async def handle(context: TaskExecutionContext) -> Transition:
        if put is not None:
            await context.output_writer.put(put)
        return SUCCESS

    async with running(engine_on(store, keys, ScriptedPlugin(handle))):
        await world.submit("count", outputs={"rows": "integer"}, retries=1)
        state = await world.until_done("count")
    assert state.phase == "PhasePermanentFailure"
    assert code in require(state.error).code
    assert state.attempt == 1


async def test_a_raised_exception_costs_no_event_and_no_state(store: EmbeddedStore, keys: Keys, world: World) -> None:
    plugin = scripted(RuntimeError("boom"), SUCCESS)
    async with running(engine_on(store, keys, plugin)):
        await world.submit("fragile")
        failed = await world.until_state("fragile", lambda state: state.round_errors)
        assert "boom" in failed.round_error
        assert await world.phases("fragile") == ["Queued"]
        assert (await world.until_done("fragile")).phase == "PhaseSuccess"
    assert plugin.verbs().count("handle") == 2


async def test_an_undefined_transition_is_rejected(store: EmbeddedStore, keys: Keys, world: World) -> None:
    async with running(engine_on(store, keys, scripted(UNKNOWN_TRANSITION, SUCCESS))):
        await world.submit("vague")
        failed = await world.until_state("vague", lambda state: state.round_errors)
        assert failed.phase == "PhaseQueued"
        assert (await world.until_done("vague")).phase == "PhaseSuccess"


async def test_two_failures_of_the_user_exhaust_one_retry(store: EmbeddedStore, keys: Keys, world: World) -> None:
    remote, plugin = Remote(), None
    plugin = JobPlugin(remote)
    async with running(engine_on(store, keys, plugin)):
        await world.submit("flaky", "job", retries=1, config={"outcomes": ["user"]})
        state = await world.until_done("flaky")
    assert require(state.error).code == "RetriesExhausted|JobFailed"
    assert len(remote.made) == 2


async def test_system_failures_leave_the_users_budget_alone(store: EmbeddedStore, keys: Keys, world: World) -> None:
    remote = Remote()
    async with running(engine_on(store, keys, JobPlugin(remote))):
        await world.submit("unlucky", "job", config={"outcomes": ["system", "system", "system", "success"]})
        state = await world.until_done("unlucky")
    assert state.phase == "PhaseSuccess"
    assert (state.user_failures, state.system_failures) == (0, 3)


async def test_the_old_attempt_is_cleaned_up_before_the_next_one(
    store: EmbeddedStore, keys: Keys, world: World
) -> None:
    plugin = scripted(do_transition(phase_info_retryable_failure("Bad", "bad")), SUCCESS)
    async with running(engine_on(store, keys, plugin)):
        await world.submit("twice", retries=1)
        await world.until_done("twice")
    verbs, names = zip(*plugin.calls, strict=True)
    assert verbs == ("handle", "abort", "finalize", "handle", "finalize")
    assert names[0] == names[1] == names[2] != names[3] == names[4]


@pytest.mark.parametrize(
    ("failure", "verbs"),
    [
        (phase_info_failure("Bad", "bad"), ["handle", "finalize"]),
        (phase_info_failure_with_cleanup("Bad", "bad"), ["handle", "abort", "finalize"]),
    ],
)
async def test_a_permanent_failure_is_aborted_only_on_request(
    store: EmbeddedStore, keys: Keys, world: World, failure: Any, verbs: list[str]
) -> None:
    plugin = scripted(do_transition(failure))
    async with running(engine_on(store, keys, plugin)):
        await world.submit("doomed")
        assert (await world.until_done("doomed")).phase == "PhasePermanentFailure"
    assert plugin.verbs() == verbs


async def test_finalize_runs_although_abort_raises_and_both_are_repeated(
    store: EmbeddedStore, keys: Keys, world: World
) -> None:
    errors = ["abort failed"]

    async def abort(context: TaskExecutionContext) -> None:
        if errors:
            raise RuntimeError(errors.pop())

    plugin = scripted(polled(do_transition(phase_info_running(0)), 60.0), abort=abort)
    async with running(engine_on(store, keys, plugin)):
        await world.begin("stubborn")
        await world.abort("stubborn")
        failed = await world.until_state("stubborn", lambda state: "abort failed" in str(state))
        assert failed.step == "cleaning"
        assert (await world.until_done("stubborn")).phase == "PhaseAborted"
    assert plugin.verbs() == ["handle", "abort", "finalize", "abort", "finalize"]


async def test_the_execution_deadline_is_a_retryable_failure(store: EmbeddedStore, keys: Keys, world: World) -> None:
    plugin = scripted(polled(do_transition(phase_info_running(0)), 1000.0))
    async with running(engine_on(store, keys, plugin)):
        await world.submit("slow", execution_timeout=30.0, retries=1)
        began = loop_time()
        state = await world.until_done("slow")
    assert "TimeoutExpired" in require(state.error).code
    assert state.attempt == 1
    assert 60.0 <= loop_time() - began < 70.0


async def test_the_active_deadline_is_final(store: EmbeddedStore, keys: Keys, world: World) -> None:
    plugin = scripted(polled(do_transition(phase_info_running(0)), 1000.0))
    async with running(engine_on(store, keys, plugin)):
        await world.submit("slow", active_deadline=30.0, retries=5)
        state = await world.until_done("slow")
    assert state.outcome == "timeout"
    assert state.attempt == 0
    assert plugin.verbs()[-2:] == ["abort", "finalize"]


async def test_success_at_the_deadline_is_success(store: EmbeddedStore, keys: Keys, world: World) -> None:
    async def handle(context: TaskExecutionContext) -> Transition:
        return SUCCESS if loop_time() >= 30.0 else polled(do_transition(phase_info_running(0)), 1000.0)

    async with running(engine_on(store, keys, ScriptedPlugin(handle))):
        await world.submit("punctual", execution_timeout=30.0)
        assert (await world.until_done("punctual")).phase == "PhaseSuccess"


async def test_a_signal_to_an_execution_that_still_waits_writes_nothing(
    store: EmbeddedStore, keys: Keys, world: World
) -> None:
    await world.quota("gpu", 1)
    engine = engine_on(store, keys, scripted(do_transition(phase_info_running(0))))
    async with running(engine):
        await world.begin("holder", quotas={"gpu": 1})
        await world.submit("waiter", quotas={"gpu": 1})
        await world.until_state("waiter", lambda state: state.reasons)
        before = engine.ledger.transactions
        engine.enqueue("waiter")
        await asyncio.sleep(1)
        assert engine.ledger.transactions == before


async def test_waiting_for_a_quota_starts_no_execution_clock(store: EmbeddedStore, keys: Keys, world: World) -> None:
    remote = Remote()
    await world.quota("licence", 1)
    async with running(engine_on(store, keys, JobPlugin(remote))):
        await world.begin("first", "job", config={"seconds": 100.0}, quotas={"licence": 1})
        await world.submit("second", "job", quotas={"licence": 1}, execution_timeout=20.0)
        waiting = await world.until_state("second", lambda state: state.phase == "PhaseWaitingForResources")

        assert [reason.code for reason in waiting.reasons] == ["LimitReached"]
        await world.until_done("first")
        freed = loop_time()
        await world.until_state("second", lambda state: state.step == "running")
        assert loop_time() - freed < 1.0
        assert (await world.until_done("second")).phase == "PhaseSuccess"
    assert await world.holders() == []


async def test_signals_before_a_round_are_one_round(store: EmbeddedStore, keys: Keys, world: World) -> None:
    signals = []

    async def handle(context: TaskExecutionContext) -> Transition:
        signals.append(context.task_refresh_indicator)
        return do_transition(phase_info_running(0))

    plugin = ScriptedPlugin(handle)
    async with running(engine_on(store, keys, plugin)):
        await world.begin("watched")
        signals[0]()
        signals[0]()
        await asyncio.sleep(100.0)
        assert len(plugin.calls) == 2


async def test_a_signal_within_a_round_is_one_more_round(store: EmbeddedStore, keys: Keys, world: World) -> None:
    rounds = []

    async def handle(context: TaskExecutionContext) -> Transition:
        rounds.append(loop_time())
        if len(rounds) == 1:
            context.task_refresh_indicator()
            context.task_refresh_indicator()
            await asyncio.sleep(1.0)
        return do_transition(phase_info_running(0))

    async with running(engine_on(store, keys, ScriptedPlugin(handle))):
        await world.submit("watched")
        await asyncio.sleep(100.0)
        assert len(rounds) == 2


async def test_raw_events_precede_the_transitions(store: EmbeddedStore, keys: Keys, world: World) -> None:
    async def handle(context: TaskExecutionContext) -> Transition:
        await context.events_recorder.record_raw(phase_info_running(7))
        await context.events_recorder.record_raw(phase_info_running(8))
        return SUCCESS

    async with running(engine_on(store, keys, ScriptedPlugin(handle))):
        await world.submit("chatty")
        await world.until_done("chatty")
    events = await world.events("chatty")
    assert [(event.kind, event.phase) for event in events][-3:] == [
        ("raw", "PhaseRunning"),
        ("raw", "PhaseRunning"),
        ("transition", "PhaseSuccess"),
    ]
    assert [event.n for event in events] == list(range(len(events)))


async def test_state_is_saved_although_nothing_is_announced(store: EmbeddedStore, keys: Keys, world: World) -> None:
    async def handle(context: TaskExecutionContext) -> Transition:
        count, _ = context.plugin_state_reader.get(int)
        context.plugin_state_writer.put(1, count + 1)
        return SUCCESS if count == 5 else polled(do_transition(phase_info_running(0)))

    async with running(engine_on(store, keys, ScriptedPlugin(handle))):
        await world.submit("counting")
        await world.until_done("counting")
    assert await world.phases("counting") == ["Queued", "Running", "Success"]


async def test_a_stopped_engine_suspends_and_an_abort_deletes_once(
    store: EmbeddedStore, keys: Keys, world: World
) -> None:
    remote = Remote()
    plugin = JobPlugin(remote)
    async with running(engine_on(store, keys, plugin)):
        await world.begin("long", "job", config={"seconds": 1e6})
    assert len(remote.running) == 1
    assert ("long", "abort") not in plugin.calls
    async with running(engine_on(store, keys, plugin)):
        await world.abort("long")
        state = await world.until_done("long")
    assert state.phase == "PhaseAborted"
    assert list(remote.deletions.values()) == [1]
    assert list(remote.made.values()) == [1]


async def test_a_plugins_own_quota_wakes_it_when_a_unit_is_free(store: EmbeddedStore, keys: Keys, world: World) -> None:
    """The refused execution stays in the queue, and is handled when the other one releases its unit."""
    resource, ended = ResourceNamespace("clusters"), asyncio.Event()

    async def handle(context: TaskExecutionContext) -> Transition:
        name = context.task_execution_metadata.get_task_execution_id().get_generated_name()
        status = await context.resource_manager.allocate_resource(resource, name)
        if status is not AllocationStatus.GRANTED:
            return do_transition(phase_info_waiting_for_resources(now(), 0, "no cluster"))
        if not ended.is_set() and name.startswith("one"):
            return do_transition(phase_info_running(0))
        return SUCCESS

    async def finalize(context: TaskExecutionContext) -> None:
        name = context.task_execution_metadata.get_task_execution_id().get_generated_name()
        await context.resource_manager.release_resource(resource, name)

    await world.quota("rcfarm:scripted:clusters", 1)
    async with running(engine_on(store, keys, ScriptedPlugin(handle, finalize=finalize))):
        await world.begin("one")
        await world.submit("two")
        waiting = await world.until_state("two", lambda state: state.phase == "PhaseWaitingForResources")
        assert [reason.code for reason in waiting.reasons] == ["LimitReached"]
        ended.set()
        await world.edit("one")
        await world.until_done("one", "two")
    assert await world.holders() == []


async def test_a_dependency_that_ends_wakes_its_dependents(store: EmbeddedStore, keys: Keys, world: World) -> None:
    remote = Remote()
    async with running(engine_on(store, keys, JobPlugin(remote))):
        await world.submit("load", "job", depends_on=("extract",))
        waiting = await world.until_state("load", lambda state: state.reasons)
        assert [reason.code for reason in waiting.reasons] == ["Dependency"]
        await world.submit("extract", "job", config={"seconds": 10.0})
        await world.until_done("extract")
        ended = loop_time()
        await world.until_state("load", lambda state: state.step == "running")
        assert loop_time() - ended < 1.0
        assert (await world.until_done("load")).phase == "PhaseSuccess"


async def test_an_ended_execution_runs_again_on_request(store: EmbeddedStore, keys: Keys, world: World) -> None:
    remote = Remote()
    async with running(engine_on(store, keys, JobPlugin(remote))):
        await world.submit("again", "job", config={"outcomes": ["user", "success"]})
        assert (await world.until_done("again")).phase == "PhasePermanentFailure"
        await world.edit("again", rerun=1)
        state = await world.until_state("again", lambda state: state.rerun == 1 and state.step == "done")
    assert state.phase == "PhaseSuccess"
    assert len(remote.made) == 2


async def test_a_removed_spec_of_an_ended_execution_removes_the_rest(
    store: EmbeddedStore, keys: Keys, world: World
) -> None:
    """Quietly: an operator has deleted the task."""
    names = [f"e{number}" for number in range(40)]
    with capture_logs() as logs:
        async with running(engine_on(store, keys, scripted(SUCCESS))):
            for name in names:
                await world.submit(name)
            await world.until_done(*names)
            await asyncio.sleep(5)  # until their locks are released
            for name in names:
                await store.delete(keys.task_spec(name))

            async def gone() -> bool:
                return not await store.keys(keys.tasks) and not await store.keys(keys.task_events)

            await world.until(gone)
            await asyncio.sleep(5)
    assert [each for each in logs if each["log_level"] in ("warning", "error")] == []


async def test_a_queued_execution_waits_at_most_its_queue_timeout(
    store: EmbeddedStore, keys: Keys, world: World
) -> None:
    plugin = scripted(do_transition(phase_info_queued(_at(0), 0, "queued")))
    async with running(engine_on(store, keys, plugin)):
        await world.submit("patient", queue_timeout=50.0)
        state = await world.until_done("patient")
    assert state.error is not None
    assert 50.0 <= state.ended_at - state.queued_at < 60.0


def _at(seconds: float) -> Any:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(EPOCH + seconds, UTC)


async def test_ended_executions_go_by_age_and_by_number(store: EmbeddedStore, keys: Keys, world: World) -> None:
    """One that runs, and one that another waits for, stay."""
    data = open_data("memory:")

    async def handle(context: TaskExecutionContext) -> Transition:
        await context.output_writer.put(MemoryOutputReader({"rows": 3}))
        name = context.task_execution_metadata.get_task_execution_id().get_id().name
        return do_transition(phase_info_running(0)) if name == "running" else SUCCESS

    plugin = ScriptedPlugin(handle)
    async with running(engine_on(store, keys, plugin, data=data, retention_age=600.0, retention_count=8)):
        await world.submit("old", outputs={"rows": "integer"})
        await world.submit("running")
        await world.until_done("old")
        path = OutputFiles(data, "old", 0).get_output_path()
        assert (await data.head(path)).exists
        await asyncio.sleep(300.0)
        for number in range(20):
            await world.submit(f"new-{number}")
            await world.until_done(f"new-{number}")
        await asyncio.sleep(120.0)
        assert not (await data.head(path)).exists
        kept = {key.split("/")[3] for key in await store.keys(keys.tasks)}
        assert "running" in kept
        assert len(kept) == 9
        await asyncio.sleep(700.0)
        assert {key.split("/")[3] for key in await store.keys(keys.tasks)} == {"running"}
        assert {key.split("/")[3] for key in await store.keys(keys.task_events)} == {"running"}


async def test_an_execution_is_kept_for_a_dependent_of_another_engine(
    store: EmbeddedStore, keys: Keys, world: World
) -> None:
    """Until the dependent ends: otherwise it would wait for ever for one that does not exist."""

    async def handle(context: TaskExecutionContext) -> Transition:
        name = context.task_execution_metadata.get_task_execution_id().get_id().name
        return do_transition(phase_info_running(0)) if name == "running" else SUCCESS

    engines = [
        engine_on(store, keys, ScriptedPlugin(handle), name=name, retention_age=600.0, handover_interval=0.01)
        for name in ("engine-a", "engine-b")
    ]
    async with running(*engines):
        first, second = engines
        await until(lambda: first.term and second.term and first.term.ownership.shards and second.term.ownership.shards)
        await asyncio.sleep(60.0)
        here = require(first.term).ownership.shards.keys()
        names = [f"task-{number}" for number in range(100)]
        old = next(name for name in names if shard_of(name, keys.shards) in here)
        dependent = next(name for name in names if shard_of(name, keys.shards) not in here)
        await world.submit("running")
        await world.submit(old)
        await world.submit(dependent, depends_on=(old, "running"))
        await world.until_done(old)
        await asyncio.sleep(900.0)
        assert await world.state(old) is not None
        await world.abort(dependent)
        await world.until_done(dependent)
        await asyncio.sleep(120.0)
        assert await world.state(old) is None


async def test_a_phase_has_a_bounded_number_of_versions(store: EmbeddedStore, keys: Keys, world: World) -> None:
    async def handle(context: TaskExecutionContext) -> Transition:
        return polled(do_transition(phase_info_running(int(loop_time()))))

    policy = Policy(max_phase_versions=5)
    async with running(engine_on(store, keys, ScriptedPlugin(handle), policy=policy)):
        await world.submit("restless")
        state = await world.until_done("restless")
    assert state.phase == "PhasePermanentFailure"
    assert require(state.error).code == "TooManyPluginPhaseVersions"


@pytest.mark.parametrize(("recoverable", "attempts"), [(True, 2), (False, 1)])
async def test_an_error_among_the_outputs_is_the_attempts_end(
    store: EmbeddedStore, keys: Keys, world: World, recoverable: bool, attempts: int
) -> None:
    async def handle(context: TaskExecutionContext) -> Transition:
        error = OutputError(ExecutionError("BadRows", "no rows", ErrorKind.USER), is_recoverable=recoverable)
        await context.output_writer.put(MemoryOutputReader(error=error))
        return SUCCESS

    plugin = ScriptedPlugin(handle)
    async with running(engine_on(store, keys, plugin)):
        await world.submit("count", retries=1)
        state = await world.until_done("count")
    assert "BadRows" in require(state.error).code
    assert plugin.verbs().count("handle") == attempts


async def test_system_failures_beyond_their_budget_end_the_execution(
    store: EmbeddedStore, keys: Keys, world: World
) -> None:
    plugin = scripted(do_transition(phase_info_system_retryable_failure("Lost", "lost")))
    async with running(engine_on(store, keys, plugin)):
        await world.submit("cursed", retries=10)
        state = await world.until_done("cursed")
    assert require(state.error).code.endswith("Lost")
    assert plugin.verbs().count("handle") == 4


async def test_a_limit_that_was_set_a_moment_ago_is_known(store: EmbeddedStore, keys: Keys, world: World) -> None:
    """An execution that comes right after it does not fail as infeasible, nor when the limit has just been raised."""
    plugin = scripted(SUCCESS)
    engine = engine_on(store, keys, plugin)
    async with running(engine):
        await until(lambda: engine.term is not None)
        await asyncio.sleep(0.2)
        for units in (1, 4):
            await world.quota("licence", units)
            await world.submit(f"one-{units}", quotas={"licence": units})
            assert (await world.until_done(f"one-{units}")).phase == "PhaseSuccess"
        await world.submit("never", quotas={"licence": 5})
        assert (await world.until_done("never")).phase == "PhasePermanentFailure"
