"""Engines for tests: a remote system in memory, a plugin that drives jobs in it, and engines over any store.

`Remote` is the world outside: it outlives engines, and every call to it can be counted, delayed and failed. `JobPlugin`
follows one remote job per attempt as plugins should: an intent, a look for the job after a crash, a creation with the
intent's key, then polls or signals.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import msgspec

from controllers.tasks.api.phase import (
    Transition,
    do_transition,
    phase_info_failure,
    phase_info_queued,
    phase_info_retryable_failure,
    phase_info_running,
    phase_info_success,
    phase_info_system_retryable_failure,
)
from controllers.tasks.api.plugin import (
    Plugin,
    PluginEntry,
    PluginProperties,
    SetupContext,
    TaskExecutionContext,
)
from controllers.tasks.engine.engine import Engine, EngineSettings
from controllers.tasks.engine.outbox import EventSink
from controllers.tasks.io.catalog import Catalog
from controllers.tasks.io.data import DataStore, open_data
from controllers.tasks.io.secrets import SecretManager
from controllers.tasks.registry import PluginRegistry
from store.kube.api.protocol import KubeApi
from store.kv import ops
from store.kv.protocol import SessionSpec, Store
from store.kv.session import SessionKeeper
from store.schema.keys import Keys
from store.schema.quota import QuotaLimit
from store.schema.records import decode, encode
from store.schema.tasks import AbortRequest, TaskEvent, TaskSpec, TaskState
from tests.support.waiting import loop_time

WORKERS = 8  # per plugin in virtual time; hundreds would be most of the cost of a short life
EPOCH = 1_780_000_000.0  # seconds since 1970 when the virtual clock stands at 0
PATIENCE = 600.0  # seconds (virtual, in simulations) that a condition may take before the test fails


def wall() -> float:
    return EPOCH + loop_time()


class Job(msgspec.Struct):
    """A remote job. `ends`: when it ends on its own, in loop time."""

    key: str
    ends: float
    outcome: str
    deleted: bool = False

    @property
    def status(self) -> str:
        if self.deleted:
            return "deleted"
        return self.outcome if loop_time() >= self.ends else "running"


class Remote:
    """A job API. `made`: creations by key; a key that was created twice is a duplicate job. `hook(call)` runs before
    and after each call, and may never return."""

    def __init__(self) -> None:
        self.jobs: dict[str, Job] = {}
        self.made: Counter[str] = Counter()
        self.deletions: Counter[str] = Counter()
        self.hook: Callable[[str], Awaitable[None]] | None = None

    async def create(self, key: str, seconds: float, outcome: str) -> str:
        await self._pass(f"before create {key}")
        self.made[key] += 1
        self.jobs[key] = Job(key, loop_time() + seconds, outcome)
        await self._pass(f"after create {key}")
        return key

    async def find(self, key: str) -> str | None:
        await self._pass(f"before find {key}")
        found = key if key in self.jobs else None
        await self._pass(f"after find {key}")
        return found

    async def get(self, key: str) -> str:
        await self._pass(f"before get {key}")
        job = self.jobs.get(key)
        status = job.status if job else "missing"
        await self._pass(f"after get {key}")
        return status

    async def delete(self, key: str) -> None:
        await self._pass(f"before delete {key}")
        if key in self.jobs and not self.jobs[key].deleted:
            self.deletions[key] += 1
            self.jobs[key].deleted = True
        await self._pass(f"after delete {key}")

    async def _pass(self, call: str) -> None:
        if self.hook is not None:
            await self.hook(call)

    @property
    def running(self) -> list[str]:
        return sorted(key for key, job in self.jobs.items() if job.status == "running")


class JobConfig(msgspec.Struct):
    """`outcomes`: of the attempts, the last one also of further attempts. `seconds`, `poll`: of each job."""

    outcomes: tuple[str, ...] = ("success",)
    seconds: float = 5.0
    poll: float = 1.0


class JobState(msgspec.Struct):
    """What the plugin keeps between rounds."""

    job: str = ""


class JobPlugin:
    """Drives one job per attempt."""

    def __init__(self, remote: Remote) -> None:
        self.remote = remote
        self.calls: list[tuple[str, str]] = []
        self.names: list[tuple[str, str]] = []

    def get_id(self) -> str:
        return "job"

    def get_properties(self) -> PluginProperties:
        return PluginProperties()

    async def handle(self, context: TaskExecutionContext) -> Transition:
        identity = context.task_execution_metadata.get_task_execution_id()
        self._note("handle", context)
        config = (await context.task_reader.read()).config_as(JobConfig)
        state, _ = context.plugin_state_reader.get(JobState)
        if not state.job:
            key, found = context.intent.key, None
            if key is None:
                key = identity.get_generated_name()
                await context.intent.declare(key)
            else:
                found = await self.remote.find(key)
            attempt = identity.get_id().retry_attempt
            outcome = config.outcomes[min(attempt, len(config.outcomes) - 1)]
            job = found or await self.remote.create(key, config.seconds, outcome)
            context.plugin_state_writer.put(1, JobState(job))
            return do_transition(phase_info_queued(now(), 0, "submitted"), poll_after=0.0)
        status = await self.remote.get(state.job)
        match status:
            case "running":
                return do_transition(phase_info_running(0), poll_after=config.poll)
            case "success":
                return do_transition(phase_info_success())
            case "user":
                return do_transition(phase_info_retryable_failure("JobFailed", "the job failed"))
            case "system":
                return do_transition(phase_info_system_retryable_failure("NodeLost", "the node was lost"))
        return do_transition(phase_info_failure("Broken", f"the job is {status}"))

    async def abort(self, context: TaskExecutionContext) -> None:
        self._note("abort", context)
        state, _ = context.plugin_state_reader.get(JobState)
        key = state.job or context.intent.key
        if key:
            await self.remote.delete(key)

    async def finalize(self, context: TaskExecutionContext) -> None:
        self._note("finalize", context)

    def _note(self, verb: str, context: TaskExecutionContext) -> None:
        identity = context.task_execution_metadata.get_task_execution_id()
        self.calls.append((identity.get_id().name, verb))
        self.names.append((verb, identity.get_generated_name()))


def now() -> Any:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(wall(), UTC)


Handle = Callable[[TaskExecutionContext], Awaitable[Transition]]


class ScriptedPlugin:
    """Calls functions of the test. `calls`: the verbs, with the generated name of their attempt."""

    def __init__(
        self, handle: Handle, *, name: str = "scripted", abort: Any = None, finalize: Any = None, **properties: Any
    ) -> None:
        self.calls: list[tuple[str, str]] = []
        self._name, self._handle, self._abort, self._finalize = name, handle, abort, finalize
        self._properties = PluginProperties(**properties)

    def get_id(self) -> str:
        return self._name

    def get_properties(self) -> PluginProperties:
        return self._properties

    async def handle(self, context: TaskExecutionContext) -> Transition:
        self._note("handle", context)
        return await self._handle(context)

    async def abort(self, context: TaskExecutionContext) -> None:
        self._note("abort", context)
        if self._abort is not None:
            await self._abort(context)

    async def finalize(self, context: TaskExecutionContext) -> None:
        self._note("finalize", context)
        if self._finalize is not None:
            await self._finalize(context)

    def verbs(self) -> list[str]:
        return [verb for verb, _ in self.calls]

    def _note(self, verb: str, context: TaskExecutionContext) -> None:
        identity = context.task_execution_metadata.get_task_execution_id()
        self.calls.append((verb, identity.get_generated_name()))


def entry_of(plugin: Plugin, *types: str) -> PluginEntry:
    """Return the entry of a plugin that exists already; its type is its id by default."""

    async def load(context: SetupContext) -> Plugin:
        return plugin

    return PluginEntry(plugin.get_id(), types or (plugin.get_id(),), load)


class World:
    """What operators write, and what engines wrote."""

    def __init__(self, store: Store, keys: Keys) -> None:
        self.store, self.keys = store, keys

    async def submit(self, task_id: str, type: str = "scripted", **fields: Any) -> TaskSpec:  # noqa: A002
        spec = TaskSpec(id=task_id, type=type, **fields)
        await self.store.txn([ops.create(self.keys.task_spec(task_id), encode(spec))])
        return spec

    async def finished(self, task_id: str, *, outcome: str = "success", ended_at: float = 0.0, **fields: Any) -> None:
        """Write an execution that has ended, now by default."""
        spec = TaskSpec(**{"id": task_id, "type": "scripted", **fields})
        state = TaskState(step="done", outcome=outcome, phase="PhaseSuccess", ended_at=ended_at or wall())  # type: ignore[arg-type]
        await self.store.txn(
            [
                ops.create(self.keys.task_spec(task_id), encode(spec)),
                ops.create(self.keys.task_state(task_id), encode(state)),
            ]
        )

    async def edit(self, task_id: str, **fields: Any) -> TaskSpec:
        """Change a spec as the operators' commands do."""
        key = self.keys.task_spec(task_id)
        entry = await self.store.get(key)
        assert entry is not None
        spec = decode(TaskSpec, key, entry.value)
        spec = msgspec.structs.replace(spec, generation=spec.generation + 1, **fields)
        await self.store.txn([ops.cas(key, encode(spec), entry.modify_index)])
        return spec

    async def abort(self, task_id: str, reason: str = "not needed") -> None:
        await self.edit(task_id, abort=AbortRequest(reason=reason, by="operator"))

    async def quota(self, resource: str, units: int, **fields: Any) -> None:
        await self.store.put(self.keys.quota_limit(resource), encode(QuotaLimit(units=units, **fields)))

    async def state(self, task_id: str) -> TaskState | None:
        key = self.keys.task_state(task_id)
        entry = await self.store.get(key)
        return decode(TaskState, key, entry.value) if entry else None

    async def owner(self, task_id: str) -> str | None:
        entry = await self.store.get(self.keys.task_owner(task_id))
        return entry.session if entry else None

    async def events(self, task_id: str) -> list[TaskEvent]:
        entries = (await self.store.list(self.keys.events_of(task_id))).entries
        return [decode(TaskEvent, entry.key, entry.value) for entry in entries]

    async def phases(self, task_id: str) -> list[str]:
        return [event.phase.removeprefix("Phase") for event in await self.events(task_id)]

    async def holders(self) -> list[str]:
        """Return the keys of all grants and tickets."""
        found = await self.store.keys(self.keys.quotas)
        return [key for key in found if "/grants/" in key or "/tickets/" in key]

    async def until(self, condition: Callable[[], object], *, within: float = PATIENCE) -> None:
        """Wait until the condition, which may be a coroutine function, holds."""
        index = 0
        async with asyncio.timeout(within):
            while True:
                outcome = condition()
                if asyncio.iscoroutine(outcome):
                    outcome = await outcome
                if outcome:
                    return
                index = (await self.store.watch(self.keys.root + "/", index, 5.0)).index

    async def until_state(self, task_id: str, accept: Callable[[TaskState], object]) -> TaskState:
        """Wait for a state that is accepted, and return it."""
        found: list[TaskState] = []

        async def accepted() -> bool:
            state = await self.state(task_id)
            if state is None or not accept(state):
                return False
            found.append(state)
            return True

        await self.until(accepted)
        return found[0]

    async def begin(self, task_id: str, type: str = "scripted", **fields: Any) -> TaskState:  # noqa: A002
        """Submit an execution, and wait until it runs."""
        await self.submit(task_id, type, **fields)
        return await self.until_state(task_id, lambda state: state.phase == "PhaseRunning")

    async def until_done(self, *task_ids: str) -> TaskState:
        """Wait until the executions have ended and were given up. Return the last one's state."""
        for task_id in task_ids:
            state = await self.until_state(task_id, lambda state: state.step == "done")

            async def given_up(task_id: str = task_id) -> bool:
                return await self.owner(task_id) is None

            await self.until(given_up)
        return state


class Cluster:
    """A `KubeClient` of one API."""

    def __init__(self, api: KubeApi) -> None:
        self._api = api

    def get_client(self) -> KubeApi:
        return self._api

    def get_cache(self) -> KubeApi:
        return self._api


def engine_on(
    store: Store,
    keys: Keys,
    *plugins: Plugin | PluginEntry,
    name: str = "engine-a",
    sinks: Sequence[EventSink] = (),
    lease: float = 3.0,
    virtual: bool = True,
    catalog: Catalog | None = None,
    data: DataStore | None = None,
    secrets: SecretManager | None = None,
    kube: KubeApi | None = None,
    **settings: Any,
) -> Engine:
    """Return an engine that drives its own session."""
    clocks: dict[str, Any] = {"clock": asyncio.get_running_loop().time}
    if virtual:
        clocks["wall"] = wall
        settings.setdefault("concurrency", WORKERS)
    keeper = SessionKeeper(store, SessionSpec(f"engine {name}", check_ttl=lease), clock=asyncio.get_running_loop().time)
    return Engine(
        store,
        keys,
        EngineSettings(name=name, **settings),
        keeper,
        PluginRegistry([each if isinstance(each, PluginEntry) else entry_of(each) for each in plugins]),
        data=data or open_data("memory:"),
        secrets=secrets or SecretManager(environ={}),
        sinks=sinks,
        catalog=catalog,
        kube=Cluster(kube) if kube is not None else None,
        **clocks,
    )


@contextlib.asynccontextmanager
async def running(*engines: Engine) -> AsyncIterator[None]:
    """Run engines, and stop them cleanly at the end."""
    tasks = [asyncio.create_task(engine.start()) for engine in engines]
    try:
        yield
        for task in tasks:
            if task.done():
                await task
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
