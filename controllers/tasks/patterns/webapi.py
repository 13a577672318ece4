"""The web-API pattern: a plugin that creates a job by one call, reads it until it has ended, and can delete it.

An author supplies the calls; what is here makes each execution have exactly one job, within quotas and rate limits:

    NotStarted        the units that the plugin needs are requested; refused: WaitingForResources, until one is granted
    TokenAcquired     all units are held; the intent is declared and the job created
    ResourcesCreated  the job is followed by the `Refresher`; each round shows what was read last
    Succeeded, UserFailure, SystemFailure   the job has ended, and the units are released in the same round

The model of a creation: before the first call the idempotency key is made durable (`Intent`). A later round that finds
the key and no job does not know if the call was applied. What it does depends on what the API can do (`Recovery`): look
for the job by its key, create it again with the same key, or neither; then it raises `RemoteUnknown`, and an operator
decides. After an answer that says that nothing was created, the next call is a new one: the count of calls (`tries`)
is saved before the call is allowed, and allowed in the process that saw the answer only.

Errors of a creation: transient ones are repeated with back-off, throttling waits for as long as the remote system asks,
and a refused request fails the execution. A remote system that fails for one execution after the other is paused: one
at a time tries, and no failures are counted (`controllers.tasks.circuit`).

No round waits for the rate limit longer than a moment.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

import msgspec
import structlog

from controllers.tasks.api.data import InputReader, OutputReader, OutputWriter, SecretManager
from controllers.tasks.api.errors import BadPlugin, RemoteUnknown, TaskError
from controllers.tasks.api.phase import (
    ErrorKind,
    Phase,
    PhaseInfo,
    Transition,
    do_transition,
    phase_info_failure,
    phase_info_failure_with_cleanup,
    phase_info_queued,
    phase_info_system_retryable_failure,
    phase_info_system_retryable_failure_with_cleanup,
    phase_info_waiting_for_resources,
)
from controllers.tasks.api.plugin import (
    PluginProperties,
    SetupContext,
    TaskExecutionContext,
    TaskReader,
    TaskTemplate,
    plugin_entry,
)
from controllers.tasks.api.resources import (
    UNCONSTRAINED,
    AllocationStatus,
    ResourceConstraintsSpec,
    ResourceNamespace,
)
from controllers.tasks.circuit import Circuit
from controllers.tasks.patterns.refresh import Item, Refresher
from controllers.tasks.patterns.remote import (
    TRANSIENT,
    CallLimiter,
    Limits,
    RemoteGone,
    RemoteRefused,
    RemoteThrottled,
    RemoteTransient,
    WebApiConfig,
)
from store.timing import doubled

log = structlog.get_logger(__name__)

R = TypeVar("R")
T = TypeVar("T")

STATE_VERSION = 1
LONGEST_WAIT = 1.0  # seconds that a round waits for the rate limit before it returns
CREATED = "created, and not read yet"
LONGEST_RETRY = 60.0  # seconds between two calls of a creation that fails
LOOK_AGAIN = 600.0  # seconds between rounds of an execution whose remote system is paused, if no signal comes

CorePhase = Literal["NotStarted", "TokenAcquired", "ResourcesCreated", "Succeeded", "UserFailure", "SystemFailure"]


class Recovery(Enum):
    """What the API can do about a creation whose answer is lost."""

    FIND = "find"  # `find` looks for the job by its key
    CREATE_AGAIN = "create again"  # a second creation with the same key answers with the first one's job
    UNKNOWN = "unknown"  # neither


class Created(NamedTuple, Generic[R]):
    """A job. `meta`: what identifies it, a JSON value without secrets. `resource`: as `get` returns it, or None."""

    meta: Any
    resource: R | None = None


class Requirement(NamedTuple):
    """One unit of the resource, within constraints."""

    namespace: ResourceNamespace
    constraints: ResourceConstraintsSpec = UNCONSTRAINED


@dataclass(frozen=True, slots=True)
class ReadContext:
    """What `get` may use: as in the execution's context, and valid for as long as the job is followed. `name`: the
    generated name, which is the idempotency key."""

    name: str
    task: TaskTemplate
    task_reader: TaskReader
    secret_manager: SecretManager
    input_reader: InputReader
    output_writer: OutputWriter


class Grant(msgspec.Struct, frozen=True):
    """The unit that an attempt holds, as it was granted: a later change of the settings does not lose it."""

    namespace: str
    token: str


class WebApiState(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is kept between rounds. `requested_at`: when a unit was first requested, in seconds since the epoch.
    `failures`: of the creation, in a row. `tries`: creations that the remote system has certainly not applied."""

    phase: CorePhase = "NotStarted"
    meta: Any = None
    granted: Grant | None = None
    requested_at: float = 0.0
    failures: int = 0
    tries: int = 0
    last_error: str = ""


class WebApiPlugin(ABC, Generic[R]):
    """Base of plugins for an asynchronous job API. R: what a read returns.

    `is_idempotent`: the API creates nothing on a second creation with the same key, and answers with the first job.
    """

    id: ClassVar[str]
    properties: ClassVar[PluginProperties] = PluginProperties()
    is_idempotent: ClassVar[bool] = False
    clock: Callable[[], float] = staticmethod(time.time)

    # What an author supplies

    @abstractmethod
    def get_config(self) -> WebApiConfig:
        """Return the settings; read once, when the plugin is loaded."""

    @abstractmethod
    async def create(self, context: TaskExecutionContext, key: str) -> Created[R]:
        """Create the job, with the idempotency key. Raises `RemoteError`; and other `TaskError`s, such as `BadConfig`,
        only before the remote system is called."""

    async def get(self, context: ReadContext, meta: Any) -> R:
        """Read the job. Raises `RemoteError`; `RemoteGone` if there is no such job."""
        raise NotImplementedError(f"{type(self).__name__} has neither get nor get_many")

    @abstractmethod
    async def delete(self, context: TaskExecutionContext, meta: Any, reason: str) -> None:
        """Stop the job. A job that has ended or does not exist is no error; `RemoteGone` is taken as that."""

    @abstractmethod
    def status(self, meta: Any, resource: R) -> PhaseInfo:
        """Return the phase of what was read, without I/O. The engine raises its version when it shows anything new."""

    async def find(self, context: TaskExecutionContext, key: str) -> Created[R] | None:
        """Return the job that was created with the key, None if there is none. Override it if the API can look."""
        raise NotImplementedError

    async def get_many(self, jobs: Sequence[tuple[ReadContext, Any]]) -> Sequence[R | Exception]:
        """Read up to `batch_size` jobs of one remote system. Returns for each its resource, or its error."""
        [(context, meta)] = jobs
        return [await self.get(context, meta)]

    async def resource_requirements(self, context: TaskExecutionContext) -> Requirement | None:
        """Return what the job needs a unit of; None: nothing."""
        return None

    async def outputs(self, context: TaskExecutionContext, meta: Any, resource: R) -> OutputReader | None:
        """Return the outputs of a job that has succeeded; None: it has none."""
        return None

    async def recovery(self, context: TaskExecutionContext) -> Recovery:
        """Return what the API can do about a lost answer; by default, that follows from `find` and `is_idempotent`."""
        if type(self).find is not WebApiPlugin.find:
            return Recovery.FIND
        return Recovery.CREATE_AGAIN if self.is_idempotent else Recovery.UNKNOWN

    async def remote(self, context: TaskExecutionContext) -> str:
        """Return the remote system of the execution: rate limits and batches are per remote system."""
        return ""

    # The plugin

    def get_id(self) -> str:
        """Return the plugin's id."""
        return self.id

    def get_properties(self) -> PluginProperties:
        """Return what the plugin asks of the engine."""
        return self.properties

    async def load(self, setup: SetupContext) -> None:
        """Check the settings and declare the quotas. Raises `BadConfig`, which lists all that is wrong, `BadPlugin`."""
        self._config = self.get_config()
        self._config.check()
        if self._config.batch_size > 1 and type(self).get_many is WebApiPlugin.get_many:
            raise BadPlugin(f"plugin {self.id}: batch_size is {self._config.batch_size}, and it has no get_many")
        for resource, units in self._config.resource_quotas.items():
            await setup.resource_registrar.register_resource_quota(ResourceNamespace(resource), units)
        self._metrics = setup.metrics_scope
        self._limits = Limits(self._config, self.id, self.clock)
        self._armed: dict[str, int] = {}  # name -> the try that this process may make
        self._refresher = Refresher(
            self._config,
            self._limits,
            self._read,
            self.status,
            on_failure=lambda error: self._metrics.count("sync_failures", kind=type(error).__name__),
        )

    async def close(self) -> None:
        """Stop following jobs; they go on."""
        for gate in self._limits.gates.values():
            gate.circuit.close()
        await self._refresher.close()

    def push(self, name: str) -> bool:
        """Read the job with this generated name at once. Returns whether this engine follows it."""
        return self._refresher.push(name)

    async def handle(self, context: TaskExecutionContext) -> Transition:
        """Take the next step: request a unit, create the job, or show what is known of it."""
        state, _ = context.plugin_state_reader.get(WebApiState)
        name = _name(context)
        if state.phase == "NotStarted" and (requirement := await self.resource_requirements(context)):
            namespace, constraints = requirement
            status = await context.resource_manager.allocate_resource(namespace, name, constraints)
            self._metrics.count("requests", answer=str(status))
            state = msgspec.structs.replace(state, requested_at=state.requested_at or self.clock())
            if status is AllocationStatus.GRANTED:
                granted = Grant(str(namespace), name)
                self._save(context, msgspec.structs.replace(state, phase="TokenAcquired", granted=granted))
                return do_transition(phase_info_queued(self._now(), 0, f"holds a unit of {namespace}"), poll_after=0)
            self._save(context, state)
            whose = "" if status is AllocationStatus.EXHAUSTED else " of the project or the namespace"
            reason = f"all units of {namespace}{whose} are in use"
            return do_transition(phase_info_waiting_for_resources(self._now(), 0, reason))
        if state.phase in ("NotStarted", "TokenAcquired"):
            return await self._launched(context, state)
        item = await self._item(context, name, state)
        if item is None:
            reason = f"this engine follows {len(self._refresher)} jobs, as many as its settings allow"
            return do_transition(phase_info_queued(self._now(), 2, reason), poll_after=self._config.resync_seconds)
        if item.gone:
            failure = phase_info_system_retryable_failure("RemoteJobGone", f"the job does not exist: {item.gone}")
            return await self._finished(context, state, failure)
        if item.failures > self._config.max_system_failures:
            text = f"the job could not be read {item.failures} times in a row: {item.error}"
            return do_transition(phase_info_system_retryable_failure_with_cleanup("AutoRefreshCacheFailed", text))
        if not item.is_synced:
            return do_transition(phase_info_queued(self._now(), 2, CREATED))
        info = self.status(state.meta, item.resource)
        if info.phase.is_terminal():
            return await self._finished(context, state, info, item.resource)
        return do_transition(info)

    async def abort(self, context: TaskExecutionContext) -> None:
        """Delete the job. Without an intent nothing was created, and nothing is called."""
        state, _ = context.plugin_state_reader.get(WebApiState)
        key = context.intent.key
        if key is None:
            return
        limiter = self._limits.write(await self.remote(context))
        meta = state.meta
        if meta is None:
            created = await self._called(limiter, self._recovered_to_delete, context, state, key)
            if created is None:
                return
            meta = created.meta
        try:
            await self._called(limiter, self.delete, context, meta, "aborted")
        except RemoteGone:
            log.debug("The job to delete does not exist", plugin=self.id, job=key)
        self._refresher.forget(key)

    async def finalize(self, context: TaskExecutionContext) -> None:
        """Release the unit, if it is still held, and follow the job no longer."""
        state, _ = context.plugin_state_reader.get(WebApiState)
        name = _name(context)
        self._refresher.forget(name)
        self._armed.pop(name, None)
        for gate in self._limits.gates.values():
            gate.forget(name)
        granted = state.granted
        if state.phase == "Succeeded":
            return
        if granted is None and (requirement := await self.resource_requirements(context)):
            granted = Grant(str(requirement.namespace), name)  # requested in a round whose state was lost
        if granted is not None:
            await context.resource_manager.release_resource(ResourceNamespace(granted.namespace), granted.token)

    # Rounds

    async def _launched(self, context: TaskExecutionContext, state: WebApiState) -> Transition:
        """Create the job, or find the one that an earlier round may have created."""
        remote = await self.remote(context)
        limiter, gate, name = self._limits.write(remote), self._limits.gate(remote), _name(context)
        if (delay := limiter.delay()) > LONGEST_WAIT:
            reason = f"calls of {self.id} are limited; the next one may begin in {delay:.0f} s"
            return do_transition(phase_info_waiting_for_resources(self._now(), 0, reason), poll_after=delay)
        if not gate.passes(name, context.task_refresh_indicator):
            who = f"the remote system {remote}" if remote else f"the remote system of {self.id}"
            reason = f"{who} is paused: it fails for one task after the other, and one at a time tries"
            return do_transition(phase_info_waiting_for_resources(self._now(), 0, reason), poll_after=LOOK_AGAIN)
        try:
            return await self._called_to_create(context, state, limiter, gate.circuit)
        finally:
            gate.left(name)

    async def _called_to_create(
        self, context: TaskExecutionContext, state: WebApiState, limiter: CallLimiter, circuit: Circuit
    ) -> Transition:
        name = _name(context)
        key, is_first = context.intent.key, False
        if key is None:
            key, is_first = name, True
            await context.intent.declare(key)
        elif self._armed.get(key) == state.tries:
            is_first = True
        self._armed.pop(key, None)
        try:
            created = None if is_first else await self._called(limiter, self._recovered, context, key)
            if created is None:
                created = await self._called(limiter, self.create, context, key)
        except RemoteThrottled as error:
            limiter.pause(error.retry_after)
            self._metrics.count("throttled")
            return self._not_created(
                context, state, key, error, error.retry_after, is_certain=is_first and not error.sent
            )
        except RemoteUnknown:
            raise
        except (*TRANSIENT, TaskError) as error:
            if isinstance(error, RemoteRefused):
                circuit.succeeded(name)
            if isinstance(error, TaskError) and not error.retryable:
                failure = phase_info_failure if is_first else phase_info_failure_with_cleanup
                code = error.code if isinstance(error, RemoteRefused) else type(error).__name__
                return await self._finished(context, state, failure(code, str(error)))
            is_certain = is_first and not getattr(error, "sent", not isinstance(error, TaskError))
            if isinstance(error, TRANSIENT) and not circuit.failed(name, _text(error)):
                return self._not_created(context, state, key, error, LOOK_AGAIN, is_certain=is_certain)
            failures = state.failures + 1
            if failures > self._config.max_system_failures:
                if is_certain:
                    self._armed[key] = state.tries  # for `abort`, which sees the state of the round before
                text = f"creating the job failed {failures} times in a row: {_text(error)}"
                return do_transition(phase_info_system_retryable_failure_with_cleanup("CreateFailed", text))
            state = msgspec.structs.replace(state, failures=failures)
            pause = doubled(1.0, LONGEST_RETRY, failures - 1)
            return self._not_created(context, state, key, error, pause, is_certain=is_certain)
        circuit.succeeded(name)
        self._metrics.count("created")
        state = msgspec.structs.replace(state, phase="ResourcesCreated", meta=created.meta, failures=0, last_error="")
        if created.resource is not None:
            try:
                info = self.status(created.meta, created.resource)
                if info.phase.is_terminal():
                    return await self._finished(context, state, info, created.resource)
            except Exception:  # the next round shows the job again, and its error is that round's: first save the job
                log.warning("A new job can't be shown yet", plugin=self.id, job=key, exc_info=True)
        self._save(context, state)
        item = await self._item(context, key, state)
        if item is not None and created.resource is not None:
            self._refresher.seed(item, created.resource)
        poll_after = self._config.resync_seconds if item is None else None  # a job that is followed signals
        return do_transition(phase_info_queued(self._now(), 2, CREATED), poll_after=poll_after)

    def _not_created(
        self,
        context: TaskExecutionContext,
        state: WebApiState,
        key: str,
        error: Exception,
        pause: float,
        *,
        is_certain: bool,
    ) -> Transition:
        """Wait before the next creation. `is_certain`: the failed one, and all before it, have created nothing."""
        tries = state.tries
        if is_certain:
            tries += 1
            self._armed[key] = tries
        self._save(context, msgspec.structs.replace(state, tries=tries, last_error=_text(error)))
        if isinstance(error, RemoteThrottled):
            reason = f"the remote system takes no more calls for {pause:.0f} s: {_text(error)}"
            return do_transition(phase_info_waiting_for_resources(self._now(), 0, reason), poll_after=pause)
        reason = f"the job could not be created, and is tried again: {_text(error)}"
        return do_transition(phase_info_queued(self._now(), 1, reason), poll_after=pause)

    async def _recovered(self, context: TaskExecutionContext, key: str) -> Created[R] | None:
        """Return the job that an earlier call may have created; None if the creation is to be called (again)."""
        recovery = await self.recovery(context)
        if recovery is Recovery.FIND:
            return await self.find(context, key)
        if recovery is Recovery.UNKNOWN:
            raise RemoteUnknown(
                f"a job may have been created with the key {key}, and the API can't look for it: look there, delete "
                "the job if it exists, then abort or retry the task"
            )
        return None

    async def _recovered_to_delete(
        self, context: TaskExecutionContext, state: WebApiState, key: str
    ) -> Created[R] | None:
        """Return the job that may have to be deleted, or None. An API that can't look for a job by its key, but answers
        a repeated creation with the existing job, is asked by creating it again."""
        if self._armed.get(key) == state.tries:
            return None
        try:
            created = await self._recovered(context, key)
            if created is None and await self.recovery(context) is Recovery.CREATE_AGAIN:
                created = await self.create(context, key)
        except RemoteGone:
            return None
        except RemoteUnknown as error:
            log.warning("An aborted task may have left a job behind", plugin=self.id, job=key, error=str(error))
            return None
        except TaskError as error:
            if error.retryable:
                raise
            return None  # a request that is refused, or can't be made, has created nothing
        return created

    async def _finished(
        self, context: TaskExecutionContext, state: WebApiState, info: PhaseInfo, resource: R | None = None
    ) -> Transition:
        """End the attempt: release the unit at once, since the job has ended, or was never created."""
        if info.phase.is_success() and resource is not None:
            reader = await self.outputs(context, state.meta, resource)
            if reader is not None:
                await context.output_writer.put(reader)
        if state.granted is not None and not info.cleanup_on_failure:
            namespace = ResourceNamespace(state.granted.namespace)
            await context.resource_manager.release_resource(namespace, state.granted.token)
        ended: CorePhase = "Succeeded"
        if info.phase is not Phase.SUCCESS:
            ended = "SystemFailure" if info.err and info.err.kind is ErrorKind.SYSTEM else "UserFailure"
        text = str(info.err) if info.err else ""
        self._save(context, msgspec.structs.replace(state, phase=ended, last_error=text[:500]))
        return do_transition(info)

    # Helpers

    async def _item(self, context: TaskExecutionContext, key: str, state: WebApiState) -> Item | None:
        reading = ReadContext(
            key,
            await context.task_reader.read(),
            context.task_reader,
            context.secret_manager,
            context.input_reader,
            context.output_writer,
        )
        remote = await self.remote(context)
        return self._refresher.follow(key, remote, reading, state.meta, context.task_refresh_indicator)

    async def _read(self, items: Sequence[Item]) -> Sequence[Any]:
        self._metrics.gauge("followed", len(self._refresher))
        return await self.get_many([(item.reading, item.meta) for item in items])

    async def _called(self, limiter: CallLimiter, call: Callable[..., Awaitable[T]], *arguments: Any) -> T:
        """Return what a call to the remote system returns, within its rate and time limits."""
        await limiter.acquire()
        try:
            async with asyncio.timeout(self._config.call_timeout or None):
                return await call(*arguments)
        except TimeoutError:
            raise RemoteTransient(f"not answered within {self._config.call_timeout:g} s") from None

    def _save(self, context: TaskExecutionContext, state: WebApiState) -> None:
        context.plugin_state_writer.put(STATE_VERSION, state)

    def _now(self) -> datetime:
        return datetime.fromtimestamp(self.clock(), UTC)


webapi_entry = plugin_entry


def _name(context: TaskExecutionContext) -> str:
    return context.task_execution_metadata.get_task_execution_id().get_generated_name()


def _text(error: Exception) -> str:
    return (str(error) or type(error).__name__)[:500]
