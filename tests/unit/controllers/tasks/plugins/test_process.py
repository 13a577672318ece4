"""`process` tasks against a store in memory, with nodes and agents that the test plays."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest

from controllers.tasks.api.errors import BadConfig
from controllers.tasks.api.phase import ErrorKind, Phase, Transition
from controllers.tasks.plugins.fence import ExecutionLost
from controllers.tasks.plugins.process import ProcessPlugin, StillRunning
from controllers.tasks.plugins.task_pods import TaskPods
from controllers.tasks.template import BadTemplate
from scheduler.label import LabelScheduler
from scheduler.pool.scheduler import PoolScheduler
from scheduler.protocol import NodeDirectory, Scheduler
from store.embedded.store import EmbeddedStore
from store.kv.protocol import Op, OpFailure, TxnConflict, TxnResult
from store.schema.keys import Keys
from store.schema.manifest import parse
from store.schema.records import Capacity, Exit, NodeSpec, Process, Reality, encode
from tests.support import require
from tests.support.farm.fleet import Fleet
from tests.support.tasks.attempts import Execution
from tests.support.waiting import loop_time, until

pytestmark = pytest.mark.looptime

KEYS = Keys()
CONFIG = {"command": ["run"]}


class Stage:
    """Two nodes, the plugin, and the agents' records."""

    def __init__(self, make_scheduler: Callable[[NodeDirectory], Scheduler] = LabelScheduler) -> None:
        self.store = EmbeddedStore()
        self.fleet = Fleet(self.store, KEYS)
        self.pods = TaskPods(self.store, KEYS, make_scheduler, node_lost_after=60.0, clock=loop_time)
        self.plugin = ProcessPlugin(self.pods, clock=loop_time)
        self.woken: list[str] = []
        self.pods.wake = self.woken.append

    def execution(self, name: str = "job", config: dict[str, Any] | None = None, **fields: Any) -> Execution:
        return Execution(self.plugin, self.store, KEYS, name, CONFIG if config is None else config, **fields)

    async def node_of(self, execution: Execution) -> str:
        [node] = await self.fleet.intents_of(execution.pod_id)
        return node

    async def report(self, execution: Execution, **fields: Any) -> None:
        """Write what the agent reports of the execution's process, and wait until the plugin can see it."""
        process = Process(**{"state": "running", "started_at": "2026-01-01T00:00:00Z"} | fields)
        reality = Reality(manifest="m", rc="", task=execution.name, state="running", launchables={"main": process})
        await self.put(execution, reality)

    async def put(self, execution: Execution, reality: Reality) -> None:
        self.woken.clear()
        key = KEYS.task_pod(await self.node_of(execution), execution.pod_id)
        await self.store.put(key, encode(reality))
        await until(lambda: execution.name in self.woken)

    async def exits(self, execution: Execution, code: int | None, signal: str = "", output: str = "") -> Transition:
        state = "completed" if code == 0 else "failed"
        await self.report(execution, state=state, last_exit=Exit("", code, signal), output=output)
        return await execution.round()


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    stage = Stage()
    async for each in _running(stage):
        yield each


async def _running(stage: Stage) -> AsyncIterator[Stage]:
    await stage.fleet.add_nodes(["node-1", "node-2"], {"pool": "a"})
    task = asyncio.create_task(stage.pods.run())
    await stage.pods.synced()
    yield stage
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    await stage.store.close()


async def test_the_phases_of_a_program_that_succeeds(stage: Stage) -> None:
    """Queued until its agent reports it, initializing, running, success; each report wakes the execution."""
    job = stage.execution()

    assert (await job.round()).info.phase is Phase.QUEUED
    assert (await job.round()).info.phase is Phase.QUEUED
    await stage.report(job, state="starting", started_at="")
    assert (await job.round()).info.phase is Phase.INITIALIZING
    await stage.report(job, pid=7)
    running = await job.round()
    assert running.info.phase is Phase.RUNNING
    assert running.poll_after is None
    ended = await stage.exits(job, 0, output="done")

    assert ended.info.phase is Phase.SUCCESS
    assert require(ended.info.info).custom_info == {
        "node": await stage.node_of(job),
        "pod": job.pod_id,
        "exit_code": 0,
        "signal": "",
        "output": "done",
    }
    assert job.declared == 1


async def test_the_manifest_is_made_of_the_config_with_templates_rendered(stage: Stage) -> None:
    """Command and environment are templates; the pod names its execution; its process is never restarted."""
    config = {
        "command": ["copy", "{{ .Inputs.table }}", "{{ .PerRetryUniqueKey }}"],
        "env": {"LIMIT": "{{ .Inputs.limit }}"},
        "user": "nobody",
        "resources": {"cpu": 500},
        "stop_timeout": 3,
    }
    job = stage.execution(config=config, inputs={"table": "a b", "limit": 5}, environment={"STAGE": "test"})
    await job.round()

    [(node, intent)] = (await stage.fleet.intents_of(job.pod_id)).items()
    raw = require(await stage.store.get(KEYS.manifest(intent.manifest)))
    main = parse(raw.value).launchables["main"]
    assert main.command == ["copy", "a b", "job_n0_0"]
    assert main.env == {"RCFARM_ATTEMPT": "0", "STAGE": "test", "LIMIT": "5"}
    assert (main.user, main.resources.cpu, main.stop_timeout, main.restart) == ("nobody", 500, 3.0, "never")
    assert intent.rc == ""
    assert intent.task == "job"
    assert intent.labels == {"team": "a", "pod_id": job.pod_id, "task_execution_id": "job"}
    assert node in ("node-1", "node-2")


@pytest.mark.parametrize(
    ("code", "signal", "phase", "kind", "error", "words"),
    [
        (3, "", Phase.RETRYABLE_FAILURE, ErrorKind.USER, "NonZeroExit", "exited with code 3"),
        (64, "", Phase.PERMANENT_FAILURE, ErrorKind.USER, "NonZeroExit", "exited with code 64"),
        (None, "SIGKILL", Phase.RETRYABLE_FAILURE, ErrorKind.USER, "Killed", "ended by SIGKILL"),
        (None, "", Phase.RETRYABLE_FAILURE, ErrorKind.SYSTEM, "ExitUnknown", "ended while no agent was watching"),
    ],
)
async def test_how_a_program_ends_decides_the_failure(
    stage: Stage, code: int | None, signal: str, phase: Phase, kind: ErrorKind, error: str, words: str
) -> None:
    """The error has the exit and the last lines; only an exit that no agent saw is the system's."""
    job = stage.execution(config=CONFIG | {"permanent_exit_codes": [64]})
    await job.round()
    ended = (await stage.exits(job, code, signal, output="no such table")).info

    assert ended.phase is phase
    assert ended.err is not None
    assert (ended.err.kind, ended.err.code) == (kind, error)
    assert ended.err.message == f"{words} on {await stage.node_of(job)}:\nno such table"
    assert (require(ended.info).custom_info or {})["exit_code"] == code


@pytest.mark.parametrize("recoverable", [True, False])
async def test_an_error_that_the_program_wrote_is_the_failure(stage: Stage, recoverable: bool) -> None:
    """Its code and message replace the exit's, and it says if another attempt can help."""
    job = stage.execution()
    await job.round()
    error = {"code": "NoData", "message": "the table is empty", "kind": "USER", "recoverable": recoverable}
    await job.data.write(job.outputs.get_error_path(), json.dumps({"error": error}).encode())

    failed = (await stage.exits(job, 1)).info

    assert failed.phase is (Phase.RETRYABLE_FAILURE if recoverable else Phase.PERMANENT_FAILURE)
    assert failed.err is not None
    assert (failed.err.code, failed.err.message) == ("NoData", "the table is empty")


async def test_the_next_attempt_runs_on_another_node(stage: Stage) -> None:
    """Every node that failed is avoided while there is another one; then they are used again."""
    job = stage.execution()
    nodes = []
    for _ in range(3):
        await job.round()
        nodes.append(await stage.node_of(job))
        failed = await stage.exits(job, 1)
        await stage.store.delete(KEYS.task_pod(nodes[-1], job.pod_id))
        await job.retry(failed)

    assert set(nodes[:2]) == {"node-1", "node-2"}
    assert nodes[2] in nodes[:2]
    assert await stage.store.keys(KEYS.intents) == []
    assert await stage.store.keys(KEYS.manifests) == []


async def test_without_a_node_it_waits_and_a_node_that_comes_wakes_it(stage: Stage) -> None:
    job = stage.execution(config=CONFIG | {"selector": "pool=b"})
    waiting = (await job.round()).info
    assert waiting.phase is Phase.WAITING_FOR_RESOURCES
    assert "selector 'pool=b'" in waiting.reason
    assert job.declared == 0

    await stage.fleet.add_nodes(["node-3"], {"pool": "b"})
    await until(lambda: stage.woken == ["job"])

    assert (await job.round()).info.phase is Phase.QUEUED
    assert await stage.node_of(job) == "node-3"


async def test_capacity_that_is_freed_wakes_the_execution_that_waits_for_it() -> None:
    """With the pool scheduler a task reserves its resources, and gives them back at its end."""
    stage = Stage()
    stage.pods = TaskPods(stage.store, KEYS, lambda nodes: PoolScheduler(stage.store, KEYS, nodes), clock=loop_time)
    stage.plugin = ProcessPlugin(stage.pods, clock=loop_time)
    stage.pods.wake = stage.woken.append
    async for _ in _running(stage):
        for name in ("node-1", "node-2"):
            spec = NodeSpec(name=name, capacity=Capacity(cpu=1000))
            await stage.store.put(KEYS.node_spec(name), encode(spec))
        config = CONFIG | {"resources": {"cpu": 600}}
        jobs = [stage.execution(f"job-{number}", config) for number in range(3)]
        await until(lambda: all(stage.pods.node(name).capacity.cpu for name in ("node-1", "node-2")))  # type: ignore[union-attr]

        phases = [(await job.round()).info.phase for job in jobs]
        assert phases == [Phase.QUEUED, Phase.QUEUED, Phase.WAITING_FOR_RESOURCES]
        assert {await stage.node_of(job) for job in jobs[:2]} == {"node-1", "node-2"}
        await stage.exits(jobs[0], 0)
        freed = await stage.node_of(jobs[0])
        stage.woken.clear()
        await jobs[0].finalize()
        await until(lambda: "job-2" in stage.woken)

        assert (await jobs[2].round()).info.phase is Phase.QUEUED
        assert await stage.node_of(jobs[2]) == freed


async def test_a_retry_reserves_elsewhere() -> None:
    """With the pool scheduler only the reservation on the chosen node is kept."""
    stage = Stage()
    scheduler: list[PoolScheduler] = []

    def pool(nodes: NodeDirectory) -> PoolScheduler:
        scheduler.append(PoolScheduler(stage.store, KEYS, nodes))
        return scheduler[0]

    stage.pods = TaskPods(stage.store, KEYS, pool, clock=loop_time)
    stage.plugin = ProcessPlugin(stage.pods, clock=loop_time)
    stage.pods.wake = stage.woken.append
    async for _ in _running(stage):
        job = stage.execution()
        await job.round()
        first = await stage.node_of(job)
        failed = await stage.exits(job, 1)
        await stage.store.delete(KEYS.task_pod(first, job.pod_id))
        await job.retry(failed)
        await job.round()

        second = await stage.node_of(job)
        assert {first, second} == {"node-1", "node-2"}
        assert dict(scheduler[0].ledger.pods(second)).keys() == {job.pod_id}
        assert not scheduler[0].ledger.pods(first)


@pytest.mark.parametrize("reported", [True, False])
async def test_a_lost_node_is_a_failure_of_the_system(stage: Stage, reported: bool) -> None:
    """After `node_lost_after` seconds, and no earlier; the execution is woken then."""
    job = stage.execution()
    await job.round()
    node = await stage.node_of(job)
    if reported:
        await stage.report(job)
    died = loop_time()
    await stage.fleet.kill_node(node)
    await asyncio.sleep(50)
    assert (await job.round()).info.phase is (Phase.RUNNING if reported else Phase.QUEUED)
    stage.woken.clear()
    await until(lambda: "job" in stage.woken)
    assert loop_time() - died == pytest.approx(60, abs=1)

    lost = await job.round()

    assert lost.info.phase is Phase.RETRYABLE_FAILURE
    assert lost.info.err is not None
    assert (lost.info.err.kind, lost.info.err.code) == (ErrorKind.SYSTEM, "NodeLost")
    await job.retry(lost)  # needs no answer of the lost node
    await job.round()
    assert await stage.node_of(job) != node


async def test_an_end_that_was_reported_counts_although_the_node_is_lost(stage: Stage) -> None:
    job = stage.execution()
    await job.round()
    node = await stage.node_of(job)
    await stage.report(job, state="completed", last_exit=Exit("", 0))
    await stage.fleet.kill_node(node)
    await asyncio.sleep(100)
    assert stage.pods.lost(node)

    assert (await job.round()).info.phase is Phase.SUCCESS


@pytest.mark.parametrize("interruptible", [True, False])
async def test_only_an_interruptible_task_leaves_a_node_that_is_emptied(stage: Stage, interruptible: bool) -> None:
    job = stage.execution(interruptible=interruptible)
    await job.round()
    await stage.report(job)
    stage.woken.clear()
    await stage.fleet.relabel(await stage.node_of(job), {"pool": "a"}, schedulable=False, evict=True)
    await until(lambda: "job" in stage.woken)

    found = (await job.round()).info

    assert found.phase is (Phase.RETRYABLE_FAILURE if interruptible else Phase.RUNNING)
    assert not interruptible or (found.err is not None and found.err.code == "NodeEvicted")


@pytest.mark.parametrize(
    "blocked",
    [
        Reality(manifest="", rc="", task="job", state="failed", reason="no such program"),
        Reality(
            manifest="",
            rc="",
            task="job",
            state="starting",
            reason="no such program",
            launchables={"main": Process(state="backoff")},
        ),
    ],
    ids=["its files", "its first instruction"],
)
@pytest.mark.parametrize(("start_timeout", "limit"), [(20, 20), (300, 30)])
async def test_a_program_that_the_agent_cannot_start_fails_when_its_time_is_up(
    stage: Stage, start_timeout: float, limit: float, blocked: Reality
) -> None:
    """The agent retries until then; the error says what keeps it from starting."""
    job = stage.execution(config=CONFIG | {"start_timeout": start_timeout})
    await job.round()
    await stage.put(job, blocked)
    waiting = await job.round()
    assert waiting.info.phase is Phase.INITIALIZING
    await asyncio.sleep(require(waiting.poll_after))

    failed = (await job.round()).info

    assert failed.phase is Phase.RETRYABLE_FAILURE
    assert failed.err is not None
    assert failed.err.code == "NotStarted"
    assert failed.err.message == f"not started within {limit} s: no such program"
    assert failed.cleanup_on_failure


async def test_a_pod_that_another_client_deletes_is_a_failure_of_the_system(stage: Stage) -> None:
    job = stage.execution()
    await job.round()
    await stage.store.delete(KEYS.intent(await stage.node_of(job), job.pod_id))

    failed = (await job.round()).info

    assert failed.err is not None
    assert (failed.err.kind, failed.err.code) == (ErrorKind.SYSTEM, "PodDeleted")


async def test_a_round_that_is_lost_creates_no_second_pod(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine dies after the pod was created, or after the intent was declared: the next one finds the place."""
    job = stage.execution()
    await job.round(crash=True)
    node = await stage.node_of(job)
    assert (await job.round()).info.phase is Phase.QUEUED
    assert await stage.node_of(job) == node

    third = stage.execution("third")
    await third.round(crash=True)
    await stage.report(third, state="completed", last_exit=Exit("", 0))
    assert (await third.round()).poll_after == 0  # nothing will wake it any more
    assert (await third.round()).info.phase is Phase.SUCCESS

    other = stage.execution("other")
    with monkeypatch.context() as patched:
        patched.setattr(stage.pods, "create", _dies)
        with pytest.raises(RuntimeError):
            await other.round()
    await other.round()
    assert other.declared == 1
    assert len(await stage.fleet.intents_of(other.pod_id)) == 1


async def _dies(*_: object) -> None:
    raise RuntimeError("the engine dies here")


@pytest.mark.parametrize("change", [{"step": "cleaning"}, {"attempt": 1}, {"intent": None}])
async def test_an_engine_that_lost_the_execution_cannot_create_its_pod(
    stage: Stage, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its write is late: another engine has gone on, and has removed the pod."""
    job, create = stage.execution(), stage.pods.create

    async def late(*args: Any) -> None:
        await job.save(**change)
        await create(*args)

    monkeypatch.setattr(stage.pods, "create", late)
    with pytest.raises(ExecutionLost):
        await job.round()

    assert await stage.store.keys(KEYS.intents) == []


async def test_abort_removes_the_pod_and_waits_for_its_agent(stage: Stage) -> None:
    """While the agent still reports the pod the call fails, and is repeated."""
    job = stage.execution()
    await job.round()
    await stage.report(job)
    node = await stage.node_of(job)
    with pytest.raises(StillRunning):
        await job.abort()
    assert await stage.fleet.intent(node, job.pod_id) is None

    aborting = asyncio.create_task(job.abort())
    await asyncio.sleep(1)
    assert not aborting.done()
    await stage.store.delete(KEYS.task_pod(node, job.pod_id))
    await aborting
    await job.finalize()
    await job.finalize()


async def test_abort_and_finalize_before_anything_exists_do_nothing(stage: Stage) -> None:
    job = stage.execution()
    await job.abort()
    await job.finalize()


async def test_tasks_are_spread_over_the_nodes(stage: Stage) -> None:
    jobs = [stage.execution(f"job-{number}") for number in range(6)]
    for job in jobs:
        await job.round()
    nodes = [await stage.node_of(job) for job in jobs]
    assert nodes.count("node-1") == nodes.count("node-2") == 3


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ({}, "command"),
        ({"command": []}, "must name a program"),
        ({"command": ["x"], "selector": "a in"}, "config.selector"),
        ({"command": ["x"], "restart": "always"}, "restart"),
        ({"command": ["x"], "comand": 1}, "comand"),
        ({"command": ["{{ .Inputs.gone }}"]}, "gone"),
    ],
)
async def test_a_config_that_does_not_fit_names_the_field(stage: Stage, config: dict[str, Any], error: str) -> None:
    job = stage.execution(config=config)
    with pytest.raises((BadConfig, BadTemplate), match=error):
        await job.round()
    assert job.declared == 0


async def test_a_conflict_with_the_owners_own_write_is_retried(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The outbox may note what it has sent at the same moment."""
    job, txn, conflicts = stage.execution(), stage.store.txn, [TxnConflict([OpFailure(0, "index is stale")])]

    async def once(ops: Sequence[Op]) -> TxnResult:
        if conflicts and any(op.key.startswith(KEYS.intents) for op in ops):
            raise conflicts.pop()
        return await txn(ops)

    monkeypatch.setattr(stage.store, "txn", once)
    await job.round()
    assert not conflicts
    assert await stage.node_of(job)
