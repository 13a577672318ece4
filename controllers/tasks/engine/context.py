"""The context that a plugin gets in one call: the contracts of `controllers.tasks.api` over the engine's parts.

A context belongs to one call. Everything that it writes at once (an intent, a unit of a quota) goes through `Desk`, the
fenced writes of the execution; what is to be saved with the round (plugin state, recorded events, outputs) is gathered
here, and the round commits it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any, Protocol

from controllers.tasks.api.data import AsyncCatalog, DataStore, InputReader, OutputWriter, SecretManager
from controllers.tasks.api.errors import IntentConflict
from controllers.tasks.api.phase import PhaseInfo
from controllers.tasks.api.plugin import (
    EventsRecorder,
    Intent,
    NamespacedName,
    PluginProperties,
    PluginStateReader,
    PluginStateWriter,
    SignalAsync,
    TaskExecutionIdentifier,
    TaskReader,
)
from controllers.tasks.api.resources import ResourceManager
from controllers.tasks.io.files import OutputFiles
from controllers.tasks.names import ExecutionName
from store.kv.protocol import Op
from store.schema.tasks import TaskSpec, TaskState

MAX_RAW_EVENTS = 10  # per call: they leave in one transaction with the state and the quotas
MAX_INTENT = 1024  # characters of an idempotency key
NODE_ID = "n0"  # an execution is one task, so it has one node


class Desk(Protocol):
    """The fenced writes that one call of a plugin may cause at once. `fence` refuses those of an engine that has lost
    the execution."""

    spec: TaskSpec
    fence: Op

    @property
    def state(self) -> TaskState:
        """The state as it is stored now."""

    async def declare(self, key: str) -> None:
        """Make an intent durable. Raises `StoreError`."""


class RoundIntent:
    """The write-ahead intent of the attempt."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    @property
    def key(self) -> str | None:
        intent = self._desk.state.intent
        return intent.key if intent else None

    async def declare(self, key: str) -> None:
        if not isinstance(key, str) or not 0 < len(key) <= MAX_INTENT:
            raise ValueError(f"an idempotency key is a text of 1 to {MAX_INTENT} characters, not {key!r:.80}")
        if self.key is not None and self.key != key:
            raise IntentConflict(
                f"attempt {self._desk.state.attempt} has declared the key {self.key!r}; it can't declare {key!r}, too"
            )
        if self.key is None:
            await self._desk.declare(key)


class Recorder:
    """Keeps the raw events of a round, in order, until its commit."""

    def __init__(self) -> None:
        self.recorded: list[PhaseInfo] = []

    async def record_raw(self, info: PhaseInfo) -> None:
        if not isinstance(info, PhaseInfo):
            raise TypeError(f"an event is made of a PhaseInfo, not of {type(info).__name__}")
        if len(self.recorded) == MAX_RAW_EVENTS:
            raise ValueError(f"one call can record {MAX_RAW_EVENTS} events; record more in the next call")
        self.recorded.append(info)


class Overrides:
    """What the execution overrides of its task."""

    __slots__ = ("_spec",)

    def __init__(self, spec: TaskSpec) -> None:
        self._spec = spec

    def get_resources(self) -> Mapping[str, Any]:
        return deepcopy(self._spec.resources)

    def get_extended_resources(self) -> Mapping[str, Any]:
        return deepcopy(self._spec.resources.get("extended", {}))

    def get_config(self) -> Mapping[str, str]:
        return {name: str(value) for name, value in self._spec.config.items()}


class Metadata:
    """Facts about an attempt. `threshold`: system failures after which it is not interruptible any more."""

    def __init__(
        self, spec: TaskSpec, state: TaskState, attempt: int, properties: PluginProperties, threshold: int
    ) -> None:
        self.attempt = attempt
        self._spec, self._state, self._threshold = spec, state, threshold
        task = spec.name or spec.id
        self._id = ExecutionName(
            TaskExecutionIdentifier(spec.project, spec.domain, spec.id, NODE_ID, task, attempt), properties.name_length
        )

    def get_owner_id(self) -> NamespacedName:
        return NamespacedName(self.get_namespace(), self._spec.id)

    def get_task_execution_id(self) -> ExecutionName:
        return self._id

    def get_namespace(self) -> str:
        return self._spec.namespace or f"{self._spec.project}-{self._spec.domain}"

    def get_owner_reference(self) -> Mapping[str, Any] | None:
        return None

    def get_overrides(self) -> Overrides:
        return Overrides(self._spec)

    def get_labels(self) -> Mapping[str, str]:
        return dict(self._spec.labels)

    def get_max_attempts(self) -> int:
        return self._spec.retries + 1

    def get_annotations(self) -> Mapping[str, str]:
        return dict(self._spec.annotations)

    def get_k8s_service_account(self) -> str:
        return self._spec.service_account

    def get_security_context(self) -> Mapping[str, Any]:
        return {"service_account": self._spec.service_account} if self._spec.service_account else {}

    def is_interruptible(self) -> bool:
        return self._spec.interruptible and self._state.system_failures < self._threshold

    def get_platform_resources(self) -> Mapping[str, Any]:
        return {}

    def get_interruptible_failure_threshold(self) -> int:
        return self._threshold

    def get_environment_variables(self) -> Mapping[str, str]:
        return dict(self._spec.environment)


class TaskContext:
    """A `TaskExecutionContext`. The round reads `state_writer`, `recorder` and `outputs` after the call."""

    def __init__(
        self,
        desk: Desk,
        *,
        metadata: Metadata,
        state: PluginStateReader,
        signal: SignalAsync,
        secrets: SecretManager,
        data: DataStore,
        inputs: InputReader,
        outputs: OutputFiles,
        task: TaskReader,
        catalog: Callable[[], AsyncCatalog],
        resources: ResourceManager,
    ) -> None:
        self.outputs, self.recorder, self.state_writer = outputs, Recorder(), PluginStateWriter()
        self._desk, self._metadata, self._state, self._signal = desk, metadata, state, signal
        self._secrets, self._data, self._inputs, self._task = secrets, data, inputs, task
        self._catalog, self._resources = catalog, resources

    @property
    def resource_manager(self) -> ResourceManager:
        return self._resources

    @property
    def secret_manager(self) -> SecretManager:
        return self._secrets

    @property
    def task_refresh_indicator(self) -> SignalAsync:
        return self._signal

    @property
    def max_dataset_size_bytes(self) -> int:
        return self._data.max_dataset_size_bytes

    @property
    def data_store(self) -> DataStore:
        return self._data

    @property
    def plugin_state_reader(self) -> PluginStateReader:
        return self._state

    @property
    def plugin_state_writer(self) -> PluginStateWriter:
        return self.state_writer

    @property
    def task_reader(self) -> TaskReader:
        return self._task

    @property
    def input_reader(self) -> InputReader:
        return self._inputs

    @property
    def output_writer(self) -> OutputWriter:
        return self.outputs

    @property
    def task_execution_metadata(self) -> Metadata:
        return self._metadata

    @property
    def catalog(self) -> AsyncCatalog:
        return self._catalog()

    @property
    def events_recorder(self) -> EventsRecorder:
        return self.recorder

    @property
    def intent(self) -> Intent:
        return RoundIntent(self._desk)
