"""An engine as a process that may be killed at any moment, and the remote system that outlives it.

`FileRemote` is a directory. A creation appends a line to the job's file, so that two creations of one job are two
lines; nothing else is ever written to it. `DrillPlugin` follows one job per attempt, as a plugin should: an intent, a
look for the job after a crash, a creation.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from multiprocessing.process import BaseProcess
from pathlib import Path

import msgspec
import structlog

from controllers.tasks.api.phase import (
    Transition,
    do_transition,
    phase_info_queued,
    phase_info_retryable_failure,
    phase_info_running,
    phase_info_success,
    phase_info_system_retryable_failure,
    phase_info_waiting_for_resources,
)
from controllers.tasks.api.plugin import PluginProperties, TaskExecutionContext
from controllers.tasks.api.resources import AllocationStatus, ResourceNamespace
from controllers.tasks.engine.engine import Engine
from store.open import open_store
from store.schema.keys import Keys
from tests.support.tasks.engines import engine_on

PLUGIN = "drill"
SLOTS = "slots"  # the resource that the plugin asks for itself
SLOTS_RESOURCE = f"rcfarm:{PLUGIN}:{SLOTS}"
POLL = 0.05  # seconds


class DrillConfig(msgspec.Struct):
    """`outcomes`: of the attempts: success, user or system. `seconds`: that a job runs. `slots`: the plugin asks for a
    unit of its own resource before it creates the job. `units`: of `quotas`, for the record of the job."""

    outcomes: tuple[str, ...] = ("success",)
    seconds: float = 0.2
    slots: bool = False
    units: dict[str, int] = {}


class Creation(msgspec.Struct):
    """One creation of a job. `at`: seconds since the epoch. `units`: what its execution holds while the job runs."""

    key: str
    execution: str
    attempt: int
    at: float
    seconds: float
    outcome: str
    units: dict[str, int]


class FileRemote:
    """Jobs in a directory. Each call is one system call, or is repeated safely."""

    def __init__(self, directory: Path) -> None:
        self._jobs, self._deleted = directory / "jobs", directory / "deleted"
        for each in (self._jobs, self._deleted):
            each.mkdir(parents=True, exist_ok=True)

    def create(self, creation: Creation) -> None:
        descriptor = os.open(self._jobs / creation.key, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            os.write(descriptor, msgspec.json.encode(creation) + b"\n")
        finally:
            os.close(descriptor)

    def creations(self, key: str) -> list[Creation]:
        """Return every creation of the job; none if there is no such job."""
        try:
            lines = (self._jobs / key).read_bytes().splitlines()
        except FileNotFoundError:
            return []
        return [msgspec.json.decode(line, type=Creation) for line in lines]

    def delete(self, key: str) -> None:
        if self.ends(key) > time.time():
            temporary = self._deleted / f".{key}.{os.getpid()}"
            temporary.write_text(repr(time.time()))
            temporary.replace(self._deleted / key)

    def ends(self, key: str) -> float:
        """Return when the job ends, or ended; 0 if there is no such job."""
        created = self.creations(key)
        if not created:
            return 0.0
        end = created[0].at + created[0].seconds
        with suppress(FileNotFoundError):
            end = min(end, float((self._deleted / key).read_text()))
        return end

    def keys(self) -> Iterator[str]:
        """Yield the keys of all jobs."""
        for entry in os.scandir(self._jobs):
            yield entry.name


class DrillState(msgspec.Struct):
    """What the plugin keeps between rounds."""

    job: str = ""


class DrillPlugin:
    """Drives one job of a `FileRemote` per attempt."""

    def __init__(self, remote: FileRemote) -> None:
        self._remote = remote

    def get_id(self) -> str:
        return PLUGIN

    def get_properties(self) -> PluginProperties:
        return PluginProperties()

    async def handle(self, context: TaskExecutionContext) -> Transition:
        identity = context.task_execution_metadata.get_task_execution_id()
        config = (await context.task_reader.read()).config_as(DrillConfig)
        state, _ = context.plugin_state_reader.get(DrillState)
        key = identity.get_generated_name()
        attempt = identity.get_id().retry_attempt
        outcome = config.outcomes[min(attempt, len(config.outcomes) - 1)]
        if not state.job:
            if config.slots:
                status = await context.resource_manager.allocate_resource(ResourceNamespace(SLOTS), key)
                if status is not AllocationStatus.GRANTED:
                    return do_transition(phase_info_waiting_for_resources(_now(), 0, "no slot is free"))
            found = False
            if context.intent.key is None:
                await context.intent.declare(key)
            else:
                found = bool(self._remote.creations(context.intent.key))
            if not found:
                name, units = identity.get_id().name, {**config.units, **({SLOTS_RESOURCE: 1} if config.slots else {})}
                self._remote.create(Creation(key, name, attempt, time.time(), config.seconds, outcome, units))
            context.plugin_state_writer.put(1, DrillState(key))
            return do_transition(phase_info_queued(_now(), 0, "submitted"), poll_after=POLL)
        if (end := self._remote.ends(state.job)) > time.time():
            return do_transition(phase_info_running(0), poll_after=min(POLL, end - time.time()))
        match outcome:
            case "user":
                return do_transition(phase_info_retryable_failure("JobFailed", "the job failed"))
            case "system":
                return do_transition(phase_info_system_retryable_failure("NodeLost", "the node was lost"))
        return do_transition(phase_info_success())

    async def abort(self, context: TaskExecutionContext) -> None:
        state, _ = context.plugin_state_reader.get(DrillState)
        if key := state.job or context.intent.key:
            self._remote.delete(key)

    async def finalize(self, context: TaskExecutionContext) -> None:
        key = context.task_execution_metadata.get_task_execution_id().get_generated_name()
        await context.resource_manager.release_resource(ResourceNamespace(SLOTS), key)


def _now() -> datetime:
    return datetime.now(UTC)


def serve(url: str, keys: Keys, name: str, remote: Path, lease: float, log: Path) -> None:
    """Run an engine until the process is killed. A file beside the log appears when nothing is left to do."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))

    async def run() -> None:
        store = open_store(url)
        plugin = DrillPlugin(FileRemote(remote))
        engine = engine_on(store, keys, plugin, name=name, lease=lease, virtual=False, claim_grace=1.0)
        async with asyncio.TaskGroup() as group:
            group.create_task(engine.start())
            while not _is_idle(engine):
                await asyncio.sleep(0.02)
            idle_file(log.parent, name).touch()

    asyncio.run(run())


def idle_file(directory: Path, name: str) -> Path:
    """Return the file by which an engine says that it has seen every execution, and none is live or half removed."""
    return directory / f"{name}.idle"


def _is_idle(engine: Engine) -> bool:
    shards = engine.term.ownership.shards if engine.term else {}
    return len(shards) == engine.keys.shards and all(
        shard.view.is_synced and all(item.is_settled and item.session is None for item in shard)
        for shard in shards.values()
    )


_processes = multiprocessing.get_context(
    "forkserver"
)  # it has imported everything, so an engine starts in milliseconds
_processes.set_forkserver_preload([__name__])


def engine_process(url: str, keys: Keys, name: str, directory: Path, *, lease: float) -> BaseProcess:
    """Start an engine as a process, with its remote system and its log in the directory."""
    arguments: Sequence[object] = (url, keys, name, directory / "remote", lease, directory / f"{name}.log")
    idle_file(directory, name).unlink(missing_ok=True)
    process = _processes.Process(target=serve, args=arguments, daemon=True, name=name)
    process.start()
    return process
