"""The context that a plugin gets in one call: the contracts of `controllers.tasks.api` over the engine's parts.

A context belongs to one call. Everything that it writes at once (an intent, a unit of a quota) goes through `Desk`, the
fenced writes of the execution; what is to be saved with the round (plugin state, recorded events, outputs) is gathered
here, and the round commits it.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Protocol

from controllers.tasks.api.data import AsyncCatalog, DataStore, InputReader, SecretManager
from controllers.tasks.api.errors import IntentConflict, TaskError
from controllers.tasks.api.phase import PhaseInfo
from controllers.tasks.api.plugin import (
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


class NoPluginCatalog(TaskError):
    """The engine has no catalog for plugins."""

    retryable = False


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


@dataclass(frozen=True, kw_only=True)
class TaskContext:
    """A `TaskExecutionContext`. After the call the round reads what was put into the writers and the recorder.
    `cached_results`: None without a catalog."""

    task_execution_metadata: Metadata
    task_refresh_indicator: SignalAsync
    task_reader: TaskReader
    plugin_state_reader: PluginStateReader
    input_reader: InputReader
    output_writer: OutputFiles
    intent: Intent
    resource_manager: ResourceManager
    secret_manager: SecretManager
    data_store: DataStore
    cached_results: AsyncCatalog | None
    plugin_state_writer: PluginStateWriter = field(default_factory=PluginStateWriter)
    events_recorder: Recorder = field(default_factory=Recorder)

    @property
    def max_dataset_size_bytes(self) -> int:
        return self.data_store.max_dataset_size_bytes

    @property
    def catalog(self) -> AsyncCatalog:
        if self.cached_results is None:
            raise NoPluginCatalog("this engine has no catalog of results; turn it on in its settings")
        return self.cached_results
