"""`process`: a program that runs once, on a node of the fleet.

An attempt is a pod with one launchable, `main`, which the node's agent starts and never restarts. Exit code 0 is
success. Another one is a failure of the user's kind, with the last lines of the program's output, and the next attempt
goes to another node if there is one. What happens to the node or to the pod from outside is a failure of the system's
kind: the task's own retries are not used.

A pod on a lost node counts as ended, so the program may still run there when it is started elsewhere, until that node's
agent is back: it then stops the pod, as its intent is gone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from controllers.tasks.api.errors import BadConfig, TaskError
from controllers.tasks.api.phase import (
    ExternalResource,
    Phase,
    PhaseInfo,
    TaskInfo,
    Transition,
    do_transition,
    phase_info_failed,
    phase_info_failure,
    phase_info_initializing,
    phase_info_queued_with_task_info,
    phase_info_retryable_failure,
    phase_info_retryable_failure_with_cleanup,
    phase_info_running,
    phase_info_success,
    phase_info_system_retryable_failure,
    phase_info_system_retryable_failure_with_cleanup,
    phase_info_waiting_for_resources,
)
from controllers.tasks.api.plugin import (
    NamespacedName,
    PluginEntry,
    PluginProperties,
    SetupContext,
    TaskExecutionContext,
)
from controllers.tasks.io.files import FileOutputReader
from controllers.tasks.plugins.fence import Attempt, attempt_of
from controllers.tasks.plugins.task_pods import NODE_OF, TaskPods, key_of, place_of
from controllers.tasks.template import Parameters, render
from scheduler.protocol import SchedulerError
from store.schema.keys import PodKey
from store.schema.manifest import BadManifest, Launchable, Manifest, checked, parse, problem_of_variable
from store.schema.records import Exit, Process
from store.schema.selectors import BadSelector, Selector

PLUGIN_ID = "process"
MAIN = "main"  # the pod's only launchable
LOOK_AGAIN = 30.0  # seconds between looks at a pod that nothing is reported of, or that finds no node
FAILED_START = 30.0  # seconds for which the agent may repeat a start that fails, of `start_timeout`
STOP_WAIT = 5.0  # seconds for which one call of `abort` waits for the agent, which takes a place in its queue


class ProcessConfig(Launchable, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The task's own part: the fields of a launchable, of which `command` and the values of `env` are templates.

    `selector`: the nodes that it may run on. `start_timeout`: seconds until the agent must have started it.
    `permanent_exit_codes`: exit codes that no other attempt can help.
    """

    restart: Literal["never"] = "never"
    selector: str = ""
    start_timeout: float = 300.0
    permanent_exit_codes: tuple[int, ...] = ()


class ProcessState(msgspec.Struct, frozen=True):
    """What the plugin keeps between rounds: when the pod was created, in seconds since the epoch (None: not yet), and
    the nodes that it could run on."""

    created_at: float | None = None
    selector: str = ""


class StillRunning(TaskError):
    """The agent has not stopped the pod yet; the call is repeated."""


class ProcessPlugin:
    """Runs `process` tasks. `clock`: seconds since the epoch."""

    def __init__(self, pods: TaskPods, *, clock: Callable[[], float] = time.time) -> None:
        self._pods, self._clock = pods, clock

    def get_id(self) -> str:
        """Return the plugin's id."""
        return PLUGIN_ID

    def get_properties(self) -> PluginProperties:
        """Return the length of pod ids."""
        return PluginProperties(generated_name_max_length=63)

    async def handle(self, context: TaskExecutionContext) -> Transition:
        """Create the attempt's pod, or report what has become of it. Raises `BadConfig`, `BadTemplate`."""
        await self._pods.synced()  # a running pod that the view does not show yet would count as queued
        config = (await context.task_reader.read()).config_as(ProcessConfig)
        state, _ = context.plugin_state_reader.get(ProcessState)
        if context.intent.key and state.created_at is not None:
            return await self._followed(context, config, place_of(context.intent.key), state.created_at)
        attempt, metadata = attempt_of(context), context.task_execution_metadata
        env = {**metadata.get_environment_variables(), **config.env}
        texts = await render([*config.command, *env.values()], Parameters.of(context))
        command, values = texts[: len(config.command)], texts[len(config.command) :]
        env = {"RCFARM_ATTEMPT": str(attempt.number), **dict(zip(env, values, strict=True))}
        name = metadata.get_task_execution_id().get_generated_name()
        raw = msgspec.json.encode(_manifest_of(name, config, command=command, env=env))
        try:
            manifest = parse(raw)
        except BadManifest as error:
            raise BadConfig(_in_config(error)) from error
        if context.intent.key is None:
            try:
                avoid = await self._pods.failed_nodes(attempt)
                node = await self._pods.choose(manifest, _selector(config), attempt.execution, avoid)
            except SchedulerError as error:
                return do_transition(
                    phase_info_waiting_for_resources(self._now(), 0, str(error)), poll_after=LOOK_AGAIN
                )
            await context.intent.declare(key_of(PodKey(node, manifest.id)))
        assert context.intent.key is not None
        place = place_of(context.intent.key)
        await self._pods.create(place, raw, attempt, dict(metadata.get_labels()))
        context.plugin_state_writer.put(1, ProcessState(self._clock(), config.selector))
        is_reported = self._pods.reality(place, attempt.execution) is not None  # created in a round that was lost
        return self._queued(place, attempt, poll_after=0.0 if is_reported else LOOK_AGAIN)

    async def abort(self, context: TaskExecutionContext) -> None:
        """Remove the pod, and wait until its agent has stopped it. Raises `StillRunning`."""
        if context.intent.key is not None:
            place, execution = place_of(context.intent.key), attempt_of(context).execution
            await self._pods.remove(place, execution)
            if not await self._pods.stopped(place, execution, within=STOP_WAIT):
                raise StillRunning(f"the agent of {place.node} has not stopped pod {place.pod_id} yet")

    async def finalize(self, context: TaskExecutionContext) -> None:
        """Remove the pod, its manifest and its reservation."""
        if context.intent.key is not None:
            place, execution = place_of(context.intent.key), attempt_of(context).execution
            await self._pods.remove(place, execution)
            state, _ = context.plugin_state_reader.get(ProcessState)
            await self._pods.release(place, Selector.parse(state.selector), execution)

    async def _followed(
        self, context: TaskExecutionContext, config: ProcessConfig, place: PodKey, created_at: float
    ) -> Transition:
        attempt = attempt_of(context)
        reality = self._pods.reality(place, attempt.execution)
        process = reality.launchables.get(MAIN) if reality else None
        if process is not None and process.state in ("completed", "failed"):
            return do_transition(await _ended(context, config, place, process))
        node, code, text = self._pods.node(place.node), "", ""
        if node is None or node.lost:
            code, text = "NodeLost", f"node {place.node} is lost; the process may still run there"
        elif node.evict and context.task_execution_metadata.is_interruptible():
            code, text = "NodeEvicted", f"node {place.node} is being emptied, and the task is interruptible"
        elif process is not None and process.state == "stopped":
            code, text = "Stopped", f"the agent of {place.node} has stopped it"
        elif process is None and not await self._pods.exists(place, attempt.execution):
            code, text = "PodDeleted", f"the intent of pod {place.pod_id} on {place.node} was deleted by another client"
        if code:  # it has not ended, and will not
            info = _info(place, attempt, Phase.UNDEFINED)
            return do_transition(phase_info_system_retryable_failure_with_cleanup(code, text, info))
        if process is not None and process.started_at:
            return do_transition(phase_info_running(0, _info(place, attempt, Phase.RUNNING, pid=process.pid)))
        reason = (reality.reason if reality else "") or f"node {place.node} has not started it"
        is_failing = (reality is not None and reality.state == "failed") or (
            process is not None and process.state == "backoff"  # it is never restarted, so its start has failed
        )
        limit = min(config.start_timeout, FAILED_START) if is_failing else config.start_timeout
        left = created_at + limit - self._clock()
        if left <= 0:
            text = f"not started within {limit:g} s: {reason}"
            return do_transition(
                phase_info_retryable_failure_with_cleanup("NotStarted", text, _info(place, attempt, Phase.UNDEFINED))
            )
        if reality is None:
            return self._queued(place, attempt, poll_after=min(left, LOOK_AGAIN))
        info = _info(place, attempt, Phase.INITIALIZING)
        return do_transition(phase_info_initializing(self._now(), 0, reason, info), poll_after=left)

    def _queued(self, place: PodKey, attempt: Attempt, *, poll_after: float = LOOK_AGAIN) -> Transition:
        info = _info(place, attempt, Phase.QUEUED)
        reason = f"the agent of {place.node} has not reported it yet"
        return do_transition(phase_info_queued_with_task_info(0, reason, info), poll_after=poll_after)

    def _now(self) -> datetime:
        return datetime.fromtimestamp(self._clock(), UTC)


def process_entry(pods: TaskPods) -> PluginEntry:
    """Return the entry of the plugin. The caller runs `pods`, which wake the executions."""

    async def load(setup: SetupContext) -> ProcessPlugin:
        enqueue = setup.enqueue_owner
        pods.wake = lambda execution: enqueue(NamespacedName("", execution))
        return ProcessPlugin(pods)

    return PluginEntry(PLUGIN_ID, (PLUGIN_ID,), load)


def check_process(config: ProcessConfig) -> None:
    """Check what no attempt can change. Raises `BadConfig`."""
    _selector(config)
    if any("\0" in text for text in (*config.command, *config.env.values(), config.cwd)):
        raise BadConfig("config: a command, a variable or a path of a process can't hold a NUL character")
    for name in config.env:
        if problem := problem_of_variable(name):
            raise BadConfig(f"config.env.{name}: {problem}" if name else f"config.env: {problem}")
    try:
        checked(_manifest_of("each-attempt", config), as_written=True)
    except BadManifest as error:
        raise BadConfig(_in_config(error)) from error
    if not 0 < config.start_timeout < math.inf:
        raise BadConfig("config.start_timeout: must be a number of seconds above zero")


def _manifest_of(pod_id: str, config: ProcessConfig, **changed: Any) -> Manifest:
    kept = {field: getattr(config, field) for field in Launchable.__struct_fields__}
    return Manifest(id=pod_id, launchables={MAIN: Launchable(**{**kept, **changed})})


def _in_config(error: BadManifest) -> str:
    """Return the error's text, with the field as the task's part has it."""
    text = str(error)
    at = f"launchables.{MAIN}."
    return f"config.{text.removeprefix(at)}" if text.startswith(at) else f"config: {text}"


async def _ended(context: TaskExecutionContext, config: ProcessConfig, place: PodKey, process: Process) -> PhaseInfo:
    """Return the end of an attempt whose process has ended. An error that it wrote itself is more than its exit code.
    Raises `DataError`."""
    attempt, end = attempt_of(context), process.last_exit or Exit("")
    details = {"exit_code": end.code, "signal": end.signal, "output": process.output}
    reader = FileOutputReader(context.data_store, context.output_writer)
    if process.state == "completed":
        await context.output_writer.put(reader)
        return phase_info_success(_info(place, attempt, Phase.SUCCESS, **details))
    if await reader.is_error():
        written = await reader.read_error()
        phase = Phase.RETRYABLE_FAILURE if written.is_recoverable else Phase.PERMANENT_FAILURE
        return phase_info_failed(phase, written.error, _info(place, attempt, phase, **details))
    text = f"{end.words} on {place.node}" + (f":\n{process.output}" if process.output else "")
    info = _info(place, attempt, Phase.RETRYABLE_FAILURE, **details)
    if end.code is None and not end.signal:
        return phase_info_system_retryable_failure("ExitUnknown", text, info)
    is_permanent = end.code in config.permanent_exit_codes
    failure = phase_info_failure if is_permanent else phase_info_retryable_failure
    return failure("Killed" if end.signal else "NonZeroExit", text, info)


def _info(place: PodKey, attempt: Attempt, phase: Phase, **details: Any) -> TaskInfo:
    pod = ExternalResource(key_of(place), retry_attempt=attempt.number, phase=phase)
    return TaskInfo(custom_info={NODE_OF: place.node, "pod": place.pod_id, **details}, external_resources=(pod,))


def _selector(config: ProcessConfig) -> Selector:
    """Return the nodes that the task may run on. Raises `BadConfig`."""
    try:
        return Selector.parse(config.selector)
    except BadSelector as error:
        raise BadConfig(f"config.selector: {error}") from error
