"""Plugins and specs that misbehave: a clear error each, and a neighbour of another plugin goes on."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from controllers.tasks.api.errors import RemoteUnknown
from controllers.tasks.api.phase import (
    ExecutionError,
    Phase,
    PhaseInfo,
    TaskInfo,
    Transition,
    do_transition,
    phase_info_queued,
    phase_info_running,
    phase_info_success,
)
from controllers.tasks.api.plugin import TaskExecutionContext
from controllers.tasks.api.resources import ResourceNamespace
from controllers.tasks.engine.engine import Engine
from controllers.tasks.io.secrets import SecretManager
from controllers.tasks.outcomes import Policy
from store.embedded.store import EmbeddedStore
from store.kv import ops
from store.kv.protocol import BadRecord
from store.schema.keys import Keys
from store.schema.quota import QuotaTicket
from store.schema.records import decode, encode
from store.schema.tasks import TaskSpec
from tests.support import require
from tests.support.tasks.engines import Handle, JobPlugin, Remote, ScriptedPlugin, World, engine_on, now, running
from tests.support.waiting import loop_time

pytestmark = pytest.mark.looptime(noop_cycles=0)

SUCCESS = do_transition(phase_info_success())


async def _raises(context: TaskExecutionContext) -> Transition:
    raise RuntimeError("boom")


async def _hangs(context: TaskExecutionContext) -> Transition:
    await asyncio.sleep(1e6)
    return SUCCESS


async def _nonsense(context: TaskExecutionContext) -> Any:
    return "success"


async def _large_state(context: TaskExecutionContext) -> Transition:
    context.plugin_state_writer.put(1, "x" * 10_000_000)
    return SUCCESS


async def _no_secret(context: TaskExecutionContext) -> Transition:
    await context.secret_manager.get("absent")
    return SUCCESS


async def _unknown_resource(context: TaskExecutionContext) -> Transition:
    await context.resource_manager.allocate_resource(ResourceNamespace("absent"), "token")
    return SUCCESS


async def _two_intents(context: TaskExecutionContext) -> Transition:
    await context.intent.declare("one")
    await context.intent.declare("two")
    return SUCCESS


class _Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


class _Exits(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)


class _BadReader:
    """What a plugin puts as its outputs, and which fails when it is read."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __getattr__(self, name: str) -> Any:
        async def fails(*args: object) -> Any:
            raise self._error

        return fails


def _raising(error: BaseException) -> Handle:
    async def handle(context: TaskExecutionContext) -> Transition:
        raise error

    return handle


def _putting(error: BaseException) -> Handle:
    async def handle(context: TaskExecutionContext) -> Transition:
        await context.output_writer.put(_BadReader(error))
        return SUCCESS

    return handle


async def _too_many_events(context: TaskExecutionContext) -> Transition:
    for version in range(100_000):
        await context.events_recorder.record_raw(phase_info_running(version))
    return SUCCESS


async def _too_large_events(context: TaskExecutionContext) -> Transition:
    error = ExecutionError("\0" * 10_000_000, "\0" * 10_000_000)
    for _ in range(10):
        await context.events_recorder.record_raw(PhaseInfo(Phase.RUNNING, 0, TaskInfo(), error))
    return SUCCESS


async def _no_unicode(context: TaskExecutionContext) -> Transition:
    return do_transition(phase_info_queued(now(), 0, "bad \ud800"))


async def _huge_poll(context: TaskExecutionContext) -> Transition:
    return do_transition(phase_info_running(0), poll_after=10**400)


async def _huge_intent(context: TaskExecutionContext) -> Transition:
    await context.intent.declare("x" * 1_000_000)
    return SUCCESS


def _engine(store: EmbeddedStore, keys: Keys, handle: Any, remote: Remote, **settings: Any) -> Engine:
    return engine_on(store, keys, ScriptedPlugin(handle), JobPlugin(remote), call_timeout=5.0, **settings)


@pytest.mark.parametrize(
    ("handle", "text"),
    [
        (_raises, "RuntimeError: boom"),
        (_hangs, "not finished after 5 s"),
        (_nonsense, "returned str instead of Transition"),
        (_large_state, "16384"),
        (_no_secret, "absent"),
        (_unknown_resource, "no quota"),
        (_two_intents, "'two'"),
        (_raising(KeyboardInterrupt()), "a plugin can't stop the engine"),
        (_raising(SystemExit(3)), "a plugin can't stop the engine"),
        (_raising(GeneratorExit()), "GeneratorExit"),
        (_raising(_Unprintable()), "_Unprintable: (it has no readable message)"),
        (_raising(_Exits()), "_Exits: (it has no readable message)"),
        (_putting(_Exits()), "_Exits: (it has no readable message)"),
        (_raising(RuntimeError("\udcff")), "RuntimeError: ?"),
        (_putting(SystemExit(3)), "a plugin can't stop the engine"),
        (_putting(RuntimeError("outputs")), "RuntimeError: outputs"),
        (_too_many_events, "one call can record 10 events"),
        (_too_large_events, "bytes of state and events"),
        (_no_unicode, "returned what can't be stored"),
        (_huge_poll, "returned what can't be stored"),
        (_huge_intent, "1 to 1024 characters"),
    ],
)
async def test_a_plugin_that_misbehaves_fails_its_execution_alone(
    store: EmbeddedStore, keys: Keys, world: World, handle: Any, text: str
) -> None:
    async with running(_engine(store, keys, handle, Remote(), concurrency=2)):
        for number in range(4):
            await world.submit(f"bad-{number}")
        await world.submit("good", "job", config={"seconds": 1.0})
        assert (await world.until_done("good")).phase == "PhaseSuccess"
        assert loop_time() < 5.0
        state = await world.until_done(*(f"bad-{number}" for number in range(4)))
    assert state.phase == "PhasePermanentFailure"
    assert text in require(state.error).message
    assert await world.holders() == []


async def test_a_call_that_ignores_its_cancellation_is_never_overlapped(
    store: EmbeddedStore, keys: Keys, world: World
) -> None:
    calls = []

    async def ignores(context: TaskExecutionContext) -> Transition:
        calls.append(loop_time())
        if len(calls) > 1:
            return SUCCESS
        while loop_time() < 100.0:
            try:
                await asyncio.sleep(100.0 - loop_time())
            except asyncio.CancelledError:
                continue
        return SUCCESS

    async with running(_engine(store, keys, ignores, Remote())):
        await world.submit("deaf")
        assert (await world.until_done("deaf")).phase == "PhaseSuccess"
    assert len(calls) == 2
    assert calls[1] >= 100.0


async def test_an_abort_waits_for_a_call_that_ignores_its_cancellation(
    store: EmbeddedStore, keys: Keys, world: World
) -> None:
    async def ignores(context: TaskExecutionContext) -> Transition:
        while loop_time() < 100.0:
            try:
                await asyncio.sleep(100.0 - loop_time())
            except asyncio.CancelledError:
                continue
        return SUCCESS

    aborted = []

    async def abort(context: TaskExecutionContext) -> None:
        aborted.append(loop_time())

    plugin = ScriptedPlugin(ignores, abort=abort)
    async with running(engine_on(store, keys, plugin, call_timeout=5.0, policy=Policy(max_round_errors=0))):
        await world.submit("deaf")
        await asyncio.sleep(20.0)
        await world.abort("deaf")
        await world.until_done("deaf")
    assert min(aborted) >= 100.0


async def test_a_task_without_a_plugin_fails_with_the_types_that_exist(
    store: EmbeddedStore, keys: Keys, world: World
) -> None:
    async with running(_engine(store, keys, _raises, Remote())):
        await world.submit("odd", "unheard")
        state = await world.until_done("odd")
    assert "'unheard'" in require(state.error).message


async def test_a_quota_that_does_not_exist_fails_at_once(store: EmbeddedStore, keys: Keys, world: World) -> None:
    await world.quota("small", 2)
    async with running(_engine(store, keys, _raises, Remote())):
        await world.submit("absent", "job", quotas={"missing": 1})
        await world.submit("large", "job", quotas={"small": 3})
        for task_id in ("absent", "large"):
            state = await world.until_done(task_id)
            assert state.error is not None
            assert state.error.code == "Infeasible"
    assert await world.holders() == []


async def test_remote_work_that_nothing_can_find_waits_for_an_operator(
    store: EmbeddedStore, keys: Keys, world: World
) -> None:
    """No budget is used up, no second creation is made, and an abort ends it."""

    async def unknown(context: TaskExecutionContext) -> Transition:
        if context.intent.key is None:
            await context.intent.declare("once")
            return do_transition(phase_info_running(0), poll_after=1.0)
        raise RemoteUnknown("the job API has no way to look up a token")

    async with running(_engine(store, keys, unknown, Remote())):
        await world.submit("lost")
        state = await world.until_state("lost", lambda state: state.reasons)
        await asyncio.sleep(600.0)
        state = await world.until_state("lost", lambda state: state.reasons)
        assert [reason.code for reason in state.reasons] == ["RemoteUnknown"]
        assert state.round_errors == 0
        await world.abort("lost")
        assert (await world.until_done("lost")).phase == "PhaseAborted"


async def test_a_secret_that_a_plugin_shows_is_not_stored(store: EmbeddedStore, keys: Keys, world: World) -> None:
    """Neither in events nor in the state nor in the plugin's own state, wherever the plugin puts it."""

    async def leaks(context: TaskExecutionContext) -> Transition:
        secret = str(await context.secret_manager.get("token"))
        context.plugin_state_writer.put(1, {"header": f"Bearer {secret}"})
        if context.plugin_state_reader.get_state_version() == 0:
            return do_transition(phase_info_queued(now(), 0, f"sent {secret}"), poll_after=1.0)
        raise RuntimeError(f"401 for {secret}")

    secrets = SecretManager(environ={"RCFARM_SECRET_token": "hunter-two-22"})
    async with running(engine_on(store, keys, ScriptedPlugin(leaks), secrets=secrets)):
        await world.submit("leaky")
        assert (await world.until_done("leaky")).phase == "PhasePermanentFailure"
    entries = (await store.list(keys.root + "/")).entries
    assert not [entry.key for entry in entries if b"hunter-two-22" in entry.value]
    assert any(b"[redacted]" in entry.value for entry in entries)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"project": "x" * 300_000}, "project"),
        ({"fair_key": "x" * 300_000}, "fair_key"),
        ({"quotas": {f"q{number}": 1 for number in range(9)}}, "quotas"),
        ({"quotas": {"x" * 1000: 1}}, "quotas"),
    ],
)
async def test_a_spec_that_no_ticket_could_carry_is_refused_by_its_field(
    store: EmbeddedStore, keys: Keys, world: World, fields: dict[str, Any], field: str
) -> None:
    await world.quota("gpu", 1)
    async with running(_engine(store, keys, _raises, Remote())):
        await world.submit("bad", "job", **({"quotas": {"gpu": 1}} | fields))
        await world.submit("good", "job", quotas={"gpu": 1}, config={"seconds": 1.0})
        assert (await world.until_done("good")).phase == "PhaseSuccess"
    entry = require(await store.get(keys.task_spec("bad")))
    with pytest.raises(BadRecord, match=field):
        decode(TaskSpec, entry.key, entry.value)


async def test_an_execution_that_depends_on_itself_fails_at_once(
    store: EmbeddedStore, keys: Keys, world: World
) -> None:
    async with running(_engine(store, keys, _raises, Remote())):
        await world.submit("ouroboros", "job", depends_on=("ouroboros",))
        state = await world.until_done("ouroboros")
    assert "itself" in require(state.error).message


async def test_names_of_many_outputs_do_not_make_the_failure_too_large_to_store(
    store: EmbeddedStore, keys: Keys, world: World
) -> None:
    async with running(_engine(store, keys, _raises, Remote())):
        await world.submit("wide", "job", outputs={f"{'o' * 100}{number}": "int" for number in range(3000)})
        state = await world.until_done("wide")
    assert require(state.error).code == "RetriesExhausted|OutputsNotGenerated"


@pytest.mark.parametrize("kind", ["grants", "tickets"])
async def test_units_of_an_execution_that_does_not_exist_are_released(
    store: EmbeddedStore, keys: Keys, world: World, kind: str
) -> None:
    await world.quota("gpu", 5)
    stray = QuotaTicket(token="stray", execution="stray", order="0", units=5, priority=2**30)
    async with running(_engine(store, keys, _raises, Remote())):
        await store.put(keys.quota("gpu") + f"{kind}/stray", encode(stray))
        await asyncio.sleep(1.0)
        await world.submit("good", "job", quotas={"gpu": 1}, config={"seconds": 1.0})
        assert (await world.until_done("good")).phase == "PhaseSuccess"
    assert await world.holders() == []


async def test_a_key_that_no_quota_has_does_not_stop_its_resource(
    store: EmbeddedStore, keys: Keys, world: World
) -> None:
    await world.quota("gpu", 1)
    await store.put(keys.quota("gpu") + "notes", b"[" * 3000)
    async with running(_engine(store, keys, _raises, Remote())):
        await world.submit("good", "job", quotas={"gpu": 1}, config={"seconds": 1.0})
        assert (await world.until_done("good")).phase == "PhaseSuccess"


@pytest.mark.parametrize("lost", ["limit", "tree", "ticket"])
async def test_a_waiting_execution_asks_again_when_its_quota_or_ticket_is_deleted(
    store: EmbeddedStore, keys: Keys, world: World, lost: str
) -> None:
    await world.quota("gpu", 1)
    async with running(_engine(store, keys, _raises, Remote())):
        await world.submit("first", "job", quotas={"gpu": 1}, config={"seconds": 50.0})
        await world.until_state("first", lambda state: state.step == "running")
        await world.submit("second", "job", quotas={"gpu": 1}, config={"seconds": 1.0})
        await world.until_state("second", lambda state: state.reasons)
        match lost:
            case "limit":
                await store.txn([ops.delete(keys.quota_limit("gpu"))])
            case "tree":
                await store.txn([ops.delete_tree(keys.quotas)])
            case _:
                await store.txn([ops.delete(keys.quota_ticket("gpu", "second"))])
        state = await world.until_done("second")
        await world.until_done("first")
    assert await world.holders() == []
    if lost == "ticket":
        assert state.phase == "PhaseSuccess"
        return
    assert loop_time() < 60.0
    assert state.error is not None
    assert state.error.code == "Infeasible"
    assert "gpu" in state.error.message


async def test_the_remote_work_of_a_deleted_spec_is_aborted_before_its_units_are_free(
    store: EmbeddedStore, keys: Keys, world: World
) -> None:
    remote = Remote()
    await world.quota("gpu", 1)
    async with running(_engine(store, keys, _raises, remote)):
        await world.submit("first", "job", quotas={"gpu": 1}, config={"seconds": 1e6})
        await world.until(lambda: remote.running)
        await world.submit("second", "job", quotas={"gpu": 1}, config={"seconds": 1.0})
        await world.until_state("second", lambda state: state.reasons)
        await store.txn([ops.delete(keys.task_spec("first"))])
        state = await world.until_done("first")
        assert (await world.until_done("second")).phase == "PhaseSuccess"
    assert state.phase == "PhaseAborted"
    assert list(remote.deletions.values()) == [1]
    assert await world.holders() == []


async def test_a_deleted_state_is_written_again_by_the_owner(store: EmbeddedStore, keys: Keys, world: World) -> None:
    remote = Remote()
    async with running(_engine(store, keys, _raises, remote)):
        await world.submit("only", "job", config={"seconds": 30.0})
        await world.until(lambda: remote.running)
        for _ in range(3):
            await asyncio.sleep(2.7)
            await store.txn([ops.delete(keys.task_state("only"))])
        await world.until_state("only", lambda state: state.step == "running")
        assert (await world.until_done("only")).phase == "PhaseSuccess"
    assert list(remote.made.values()) == [1]
