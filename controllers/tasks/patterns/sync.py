"""The synchronous pattern: a plugin whose work is one blocking call, run in a bounded pool of threads.

The model: a round starts the call in a thread and returns; when the call has ended, the execution is signalled, and the
next round takes the result. A call begins within the rate limit of the plugin. Nothing of it survives the process: an
engine that dies, or loses the execution, leaves the next one to begin again. So a call runs **at least once**, and must
bear to run twice, also at the same time, if the first engine was only cut off. (An intent would not help: there is
nothing to look for.)

A thread can't be stopped. A call that exceeds its time limit fails its attempt and keeps its thread until it returns,
so hung calls cost threads, and nothing else: when none is left, other executions wait, and their reason names the calls
that hold the threads. The threads are daemons, so that they do not delay the end of the process.
"""

from __future__ import annotations

import asyncio
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, ClassVar

import msgspec

from controllers.tasks.api.data import Literals
from controllers.tasks.api.errors import BadConfig, TaskError
from controllers.tasks.api.phase import (
    Transition,
    do_transition,
    phase_info_failure,
    phase_info_queued,
    phase_info_retryable_failure,
    phase_info_running,
    phase_info_success,
    phase_info_waiting_for_resources,
)
from controllers.tasks.api.plugin import PluginProperties, SetupContext, SignalAsync, TaskExecutionContext, TaskTemplate
from controllers.tasks.io.files import MemoryOutputReader
from controllers.tasks.patterns.remote import CallLimiter
from store.redaction import Redactor

FORGET_AFTER = 3600.0  # seconds after which a result is dropped that no round takes: another engine has the execution
LOOK_AGAIN = 30.0  # seconds between looks for a free thread, should a signal be lost with an execution
MAX_TRACEBACK = 2000  # characters that a failure shows, the last ones


class SyncConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of a synchronous plugin. `threads`: 1 to 1000. `timeout`: seconds of one call, above 0; a task may
    ask for less. `write_qps`, `write_burst`: calls that begin."""

    threads: int = 8
    timeout: float = 3600.0
    write_qps: float = 100.0
    write_burst: int = 200

    def check(self) -> None:
        """Raise `BadConfig`, which lists every setting outside of its range."""
        ranges = {"threads": (1, 1000), "write_qps": (1, 100_000), "write_burst": (1, 10_000)}
        wrong = [
            f"{name} is {getattr(self, name):g}, not {low} to {high}"
            for name, (low, high) in ranges.items()
            if not low <= getattr(self, name) <= high
        ]
        if not 0 < self.timeout < float("inf"):
            wrong.append(f"timeout is {self.timeout:g}, not above 0")
        if wrong:
            raise BadConfig("; ".join(wrong))


@dataclass(frozen=True, slots=True)
class SyncCall:
    """What a call gets, in its thread. `name`: the generated name of the attempt. `attempt` counts from 0. `abandoned`
    is set when nothing waits for the call any more: a long call may look at it and return."""

    execution: str
    name: str
    attempt: int
    task: TaskTemplate
    inputs: Literals
    abandoned: threading.Event = field(default_factory=threading.Event)


@dataclass(slots=True, eq=False)
class _Running:
    """A call in its thread. `ended`: its outputs, or what it raised; None while it runs."""

    call: SyncCall
    signal: SignalAsync
    since: float
    limit: float
    ended: Mapping[str, Any] | BaseException | None = None

    def is_late(self, now: float) -> bool:
        return self.ended is None and now >= self.since + self.limit


class SyncPlugin(ABC):
    """Base of plugins whose work is one blocking call. `redactor` removes secrets from the texts of failures."""

    id: ClassVar[str]
    properties: ClassVar[PluginProperties] = PluginProperties()
    clock: Callable[[], float] = staticmethod(time.time)

    def __init__(self, *, redactor: Redactor | None = None) -> None:
        self._redactor = redactor or Redactor()
        self._threads: set[_Running] = set()
        self._waiting: deque[tuple[str, SignalAsync]] = deque()
        self._calls: dict[str, _Running] = {}

    # What an author supplies

    def get_config(self) -> SyncConfig:
        """Return the settings; read once, when the plugin is loaded."""
        return SyncConfig()

    @abstractmethod
    def do(self, call: SyncCall) -> Mapping[str, Any] | None:
        """Do the work, and return its outputs. Called in a thread, at least once for each attempt. An exception is a
        failure of the task's, which `retries` repeats, except a `TaskError` that is not `retryable`."""

    def timeout(self, task: TaskTemplate) -> float:
        """Return the seconds that the task's call may take; the plugin's setting bounds it. Raises `BadConfig`."""
        return self._config.timeout

    # The plugin

    def get_id(self) -> str:
        """Return the plugin's id."""
        return self.id

    def get_properties(self) -> PluginProperties:
        """Return what the plugin asks of the engine."""
        return self.properties

    async def load(self, setup: SetupContext) -> None:
        """Check the settings. Raises `BadConfig`."""
        self._config = self.get_config()
        self._config.check()
        self._limiter = CallLimiter(self._config.write_qps, self._config.write_burst)
        self._metrics = setup.metrics_scope

    async def handle(self, context: TaskExecutionContext) -> Transition:
        """Start the call, or take its result. Raises `BadConfig`."""
        name = context.task_execution_metadata.get_task_execution_id().get_generated_name()
        running = self._calls.get(name)
        if running is None:
            return await self._started(context, name)
        running.signal = context.task_refresh_indicator
        ended, now = running.ended, _now()
        if isinstance(ended, TaskError) and not ended.retryable:
            text = self._redactor.text(str(ended))[:MAX_TRACEBACK]
            return do_transition(phase_info_failure(type(ended).__name__, text))
        if isinstance(ended, BaseException):
            frames = ended.__traceback__.tb_next if ended.__traceback__ else None  # those below `do`
            lines = traceback.format_exception(type(ended), ended, frames, limit=-10, chain=False)
            text = "".join(lines).strip()
            text = text if len(text) <= MAX_TRACEBACK else f"…{text[-MAX_TRACEBACK:]}"
            return do_transition(phase_info_retryable_failure("CallRaised", self._redactor.text(text)))
        if ended is not None:
            await context.output_writer.put(MemoryOutputReader(ended))
            return do_transition(phase_info_success())
        if running.is_late(now):
            running.call.abandoned.set()
            text = f"the call was not finished after {running.limit:g} s; its thread is occupied until it returns"
            return do_transition(phase_info_retryable_failure("CallTimedOut", text))
        return do_transition(phase_info_running(0), poll_after=running.since + running.limit - now)

    async def abort(self, context: TaskExecutionContext) -> None:
        """Tell the call that nothing waits for it. Its thread is occupied until it returns."""
        await self.finalize(context)

    async def finalize(self, context: TaskExecutionContext) -> None:
        """Forget the call."""
        name = context.task_execution_metadata.get_task_execution_id().get_generated_name()
        self._waiting = deque(each for each in self._waiting if each[0] != name)
        if running := self._calls.pop(name, None):
            running.call.abandoned.set()
            if not self._is_full():
                self._wake()

    async def _started(self, context: TaskExecutionContext, name: str) -> Transition:
        now, date = _now(), datetime.fromtimestamp(self.clock(), UTC)
        if self._is_full():
            if all(name != each for each, _ in self._waiting):
                self._waiting.append((name, context.task_refresh_indicator))
            reason = f"all {len(self._threads)} threads are in use"
            if late := sorted(each.call.execution for each in self._threads if each.is_late(now)):
                more = f" and {len(late) - 5} more" if len(late) > 5 else ""
                reason += f"; calls beyond their time limit: {', '.join(late[:5])}{more}"
            return do_transition(phase_info_waiting_for_resources(date, 0, reason), poll_after=LOOK_AGAIN)
        if (delay := self._limiter.delay()) > 0:
            reason = f"calls of {self.id} are limited; the next one may begin in {delay:.0f} s"
            return do_transition(phase_info_queued(date, 0, reason), poll_after=delay)
        await self._limiter.acquire()
        identity = context.task_execution_metadata.get_task_execution_id().get_id()
        task = await context.task_reader.read()
        limit = min(self.timeout(task), self._config.timeout)
        inputs = await context.input_reader.get()
        call = SyncCall(identity.name, name, identity.retry_attempt, task, inputs)
        running = _Running(call, context.task_refresh_indicator, _now(), limit)
        self._calls[name] = running
        self._threads.add(running)
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._run, args=(running, loop), name=f"{self.id} {name}", daemon=True).start()
        return do_transition(phase_info_running(0), poll_after=limit)

    def _run(self, running: _Running, loop: asyncio.AbstractEventLoop) -> None:
        """The body of a thread. The engine's loop may have ended when the call returns."""
        ended: Mapping[str, Any] | BaseException
        try:
            outputs = self.do(running.call)
            if outputs is not None and not isinstance(outputs, Mapping):
                raise TypeError(f"the call returned {type(outputs).__name__}; outputs are a mapping, or None")
            ended = outputs or {}
        except BaseException as error:  # also SystemExit: it must end the call, not the thread alone
            ended = error
        if not loop.is_closed():
            try:
                loop.call_soon_threadsafe(self._returned, running, ended)
            except RuntimeError:
                return  # closed since the question

    def _returned(self, running: _Running, ended: Mapping[str, Any] | BaseException) -> None:
        running.ended = ended
        self._threads.discard(running)
        self._metrics.observe("call_seconds", _now() - running.since)
        if self._calls.get(running.call.name) is running:
            running.signal()
            asyncio.get_running_loop().call_later(FORGET_AFTER, self._forget, running)
        self._wake()

    def _forget(self, running: _Running) -> None:
        if self._calls.get(running.call.name) is running:
            del self._calls[running.call.name]

    def _is_full(self) -> bool:
        return len(self._threads) >= self._config.threads

    def _wake(self) -> None:
        """Wake as many of those that wait as there are free threads."""
        for _ in range(min(len(self._waiting), self._config.threads - len(self._threads))):
            _, signal = self._waiting.popleft()
            signal()


def _now() -> float:
    return asyncio.get_running_loop().time()
