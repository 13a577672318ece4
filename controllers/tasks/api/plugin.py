"""What a plugin is, and what the engine gives it: setup context, execution context, plugin state.

Names are those of Flyte's core plugins. What Go calls `GetX()` is a method `get_x()`; an accessor without "Get" is an
attribute; an error is raised instead of returned; every call that may wait is a coroutine.

The model: an execution is handled in *rounds*, one at a time. A round is one call of `handle`, which looks at the state
that the round before wrote, does one small step, writes the new state and returns where the execution is. The engine
then commits state, phase and events in one transaction. A crash before the commit repeats the round from the old state,
so each step must be idempotent. Three rules follow:

- Before it creates anything external, a plugin calls `await context.intent.declare(key)`. The intent is durable when
  the call returns. In a later round `context.intent.key` says that external work may exist already under that key.
- `handle` does not wait for the work: it returns a phase and, if nothing will signal, `poll_after`.
- `abort` stops the external work, `finalize` frees what the attempt holds. Both may be called more than once, and also
  if nothing was created. A shutdown of the engine calls neither: it cancels the coroutine, and another engine goes on.
"""

from __future__ import annotations

from builtins import type as Class  # a field below is named `type`
from collections.abc import Awaitable, Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, runtime_checkable

import msgspec

from controllers.tasks.api.data import AsyncCatalog, DataStore, InputReader, OutputWriter, SecretManager
from controllers.tasks.api.errors import BadConfig, BadPlugin, BadState, NoPluginCatalog, StateTooLarge, TaskError
from controllers.tasks.api.names import DEFAULT_NAME_LENGTH, MIN_NAME_LENGTH, TaskExecutionID
from controllers.tasks.api.phase import MAX_LEVELS, PhaseInfo, Transition
from controllers.tasks.api.resources import ResourceManager, ResourceRegistrar
from store.decoding import Undecodable, converted, is_deep
from store.kube.api.protocol import KubeApi
from store.schema.tasks import TaskSpec, TaskState

MAX_STATE_BYTES = 16 * 1024  # of a plugin's state as JSON
MAX_RAW_EVENTS = 10  # per call: they leave in one transaction with the state and the quotas
_MAX_STATE_VERSION = 255

TaskType = str
T = TypeVar("T")


class NamespacedName(msgspec.Struct, frozen=True):
    """The execution that owns what a plugin creates. `name` is the execution's id."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


SignalAsync = Callable[[], None]
"""Wakes the execution: `handle` is called once more. Returns at once; several signals are one. Callable from the event
loop's thread; other threads use `loop.call_soon_threadsafe`."""

EnqueueOwner = Callable[[NamespacedName], None]
"""Wakes the execution of that name. Returns at once; an unknown name is ignored. Thread rules as for `SignalAsync`."""


class KubeClient(Protocol):
    """Access to the bound Kubernetes cluster."""

    def get_client(self) -> KubeApi:
        """Return the API. Its calls raise `KubeError`."""

    def get_cache(self) -> KubeApi:
        """Return an API whose reads may be answered from a cache, and so may be old."""


class MetricsScope(Protocol):
    """Metrics below the plugin's own prefix. Names are those of Prometheus; a name keeps its kind and its labels. What
    an engine does not override is not measured."""

    def sub_scope(self, name: str) -> MetricsScope:
        """Return the scope with a longer prefix."""
        return self

    def count(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Add to a counter."""
        return

    def gauge(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""
        return

    def observe(self, name: str, seconds: float, **labels: str) -> None:
        """Add an observation to a histogram of durations."""
        return


@dataclass(frozen=True)
class PluginProperties:
    """What a plugin asks of the engine. `generated_name_max_length`: characters, at least 8; None is 50."""

    disable_node_level_caching: bool = False
    generated_name_max_length: int | None = None

    @property
    def name_length(self) -> int:
        """The longest generated name, in characters."""
        return DEFAULT_NAME_LENGTH if self.generated_name_max_length is None else self.generated_name_max_length


class PluginStateReader:
    """The state that an earlier round wrote: immutable for the whole round. `value` None: no state."""

    def __init__(self, value: Any = None, version: int = 0) -> None:
        self._value, self._version = value, version

    def get_state_version(self) -> int:
        """Return the version that the state was written with, 0 without state."""
        return self._version if self._value is not None else 0

    def get(self, kind: type[T]) -> tuple[T, int]:
        """Return the state as `kind` (a msgspec Struct, a dataclass, a plain JSON type), and its version.

        Without state these are `kind()` and 0, so each field of `kind` needs a default. Raises `BadState`.
        """
        if self._value is None:
            return kind(), 0
        try:
            return converted(msgspec.json.decode(msgspec.json.encode(self._value)), kind), self._version
        except Undecodable as error:
            name = getattr(kind, "__name__", kind)
            raise BadState(f"the stored plugin state (version {self._version}) is no {name}: {error}") from None


class PluginStateWriter:
    """Takes the new state of the round: `put`, `reset`, or neither, which keeps the state. The last call counts. The
    engine saves it with the round's transition, and the next round reads it."""

    def __init__(self) -> None:
        self._written: tuple[Any, int] | None = None

    def put(self, state_version: int, value: object) -> None:
        """Write a state. `state_version`: 0 to 255, for the plugin's own migrations. `value`: what msgspec encodes as
        JSON, at most 16 KiB of it; it is copied. Raises `StateTooLarge` and `BadState`, and then keeps what was
        written before."""
        if isinstance(state_version, bool) or not 0 <= state_version <= _MAX_STATE_VERSION:
            raise BadState(f"the version of a plugin state is 0 to {_MAX_STATE_VERSION}, not {state_version}")
        if value is None:
            raise BadState("a plugin state can't be None; reset() removes it")
        try:
            encoded = msgspec.json.encode(value)
            copied = msgspec.json.decode(encoded)
        except (TypeError, ValueError, RecursionError) as error:
            raise BadState(f"the plugin state can't be written as JSON: {error}") from None
        if len(encoded) > MAX_STATE_BYTES:
            raise StateTooLarge(len(encoded), MAX_STATE_BYTES)
        if is_deep(copied, MAX_LEVELS):
            raise BadState(f"the plugin state is nested more than {MAX_LEVELS} levels deep")
        self._written = copied, state_version

    def reset(self) -> None:
        """Remove the state."""
        self._written = None, 0

    @property
    def written(self) -> tuple[Any, int] | None:
        """For the engine: the new state as plain JSON data (None if it was reset) and its version, or None if the round
        wrote nothing."""
        return self._written


class Intent(Protocol):
    """The write-ahead intent of an attempt: the idempotency key of the external work that it is about to create."""

    @property
    def key(self) -> str | None:
        """The key that this attempt declared, in this round or an earlier one; None if it declared none. With a key the
        external work may exist: look it up before creating it."""

    async def declare(self, key: str) -> None:
        """Make the key durable. The call returns after the commit, so a crash at any later moment leaves the key for
        the next round. Declaring the same key again does nothing. Raises `IntentConflict` for another key, and
        `StoreError` (`OwnershipLost` if another engine owns the execution; nothing may be created then)."""


class TaskOverrides:
    """What an execution overrides of its task."""

    def __init__(self, spec: TaskSpec) -> None:
        self._spec = spec

    def get_resources(self) -> Mapping[str, Any]:
        """Return Kubernetes resource requirements: `requests` and `limits`."""
        return deepcopy(self._spec.resources)

    def get_extended_resources(self) -> Mapping[str, Any]:
        """Return extended resources, such as accelerators."""
        return deepcopy(self._spec.resources.get("extended", {}))

    def get_config(self) -> Mapping[str, str]:
        """Return further settings by name."""
        return {name: str(value) for name, value in self._spec.config.items()}


class TaskExecutionMetadata:
    """Facts about the execution that are no inputs. The engine makes it of the stored records; `threshold`: see
    `get_interruptible_failure_threshold`."""

    def __init__(self, spec: TaskSpec, state: TaskState, identity: TaskExecutionID, threshold: int) -> None:
        self._spec, self._state, self._identity, self._threshold = spec, state, identity, threshold

    def get_owner_id(self) -> NamespacedName:
        """Return the name that wakes this execution (`EnqueueOwner`)."""
        return NamespacedName(self.get_namespace(), self._spec.id)

    def get_task_execution_id(self) -> TaskExecutionID:
        """Return the identity of the attempt."""
        return self._identity

    def get_namespace(self) -> str:
        """Return the namespace in which objects are created."""
        return self._spec.namespace or f"{self._spec.project}-{self._spec.domain}"

    def get_owner_reference(self) -> Mapping[str, Any] | None:
        """Return the Kubernetes owner reference of created objects; None outside of Kubernetes."""
        return None

    def get_overrides(self) -> TaskOverrides:
        """Return the overrides."""
        return TaskOverrides(self._spec)

    def get_labels(self) -> Mapping[str, str]:
        """Return labels of created objects."""
        return dict(self._spec.labels)

    def get_max_attempts(self) -> int:
        """Return the number of attempts that the task's author allows, at least 1."""
        return self._spec.retries + 1

    def get_annotations(self) -> Mapping[str, str]:
        """Return annotations of created objects."""
        return dict(self._spec.annotations)

    def get_k8s_service_account(self) -> str:
        """Return the service account, "" for the default."""
        return self._spec.service_account

    def get_security_context(self) -> Mapping[str, Any]:
        """Return the identity and the secrets that the work runs with."""
        return {"service_account": self._spec.service_account} if self._spec.service_account else {}

    def is_interruptible(self) -> bool:
        """Return true if this attempt may run on capacity that can be taken away."""
        return self._spec.interruptible and self._state.system_failures < self._threshold

    def get_platform_resources(self) -> Mapping[str, Any]:
        """Return the resource requirements of a task that names none."""
        return {}

    def get_interruptible_failure_threshold(self) -> int:
        """Return the number of system failures after which the execution is no longer interruptible."""
        return self._threshold

    def get_environment_variables(self) -> Mapping[str, str]:
        """Return the environment of the work."""
        return dict(self._spec.environment)


class TaskTemplate(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the operator declared. `config`: the plugin's own part. `outputs`: the type of each declared output by name.
    `resources`: Kubernetes resource requirements."""

    id: str
    type: TaskType
    config: dict[str, Any] = {}
    outputs: dict[str, str] = {}
    retries: int = 0
    cache_version: str = ""
    interruptible: bool = False
    resources: dict[str, Any] = {}

    def config_as(self, kind: Class[T]) -> T:
        """Return the plugin's own part as a msgspec Struct or dataclass. Raises `BadConfig`, which names the field."""
        try:
            return converted(self.config, kind)
        except Undecodable as error:
            raise BadConfig(f"config of the {self.type} task {self.id}: {error}") from None


class TaskTemplatePath(Protocol):
    """A location that the remote work can read the template from."""

    async def path(self) -> str:
        """Return the reference; the template is uploaded on the first call. Raises the data store's errors."""


class TaskReader(TaskTemplatePath, Protocol):
    """Access to the task."""

    async def read(self) -> TaskTemplate:
        """Return the template."""


class EventsRecorder:
    """Events beside those that transitions cause; plugins rarely need them. `recorded`, for the engine: in order."""

    def __init__(self) -> None:
        self.recorded: list[PhaseInfo] = []

    async def record_raw(self, info: PhaseInfo) -> None:
        """Publish an event before that of the round's transition. It is committed with the round, and never lost."""
        if not isinstance(info, PhaseInfo):
            raise TypeError(f"an event is made of a PhaseInfo, not of {type(info).__name__}")
        if len(self.recorded) == MAX_RAW_EVENTS:
            raise ValueError(f"one call can record {MAX_RAW_EVENTS} events; record more in the next call")
        self.recorded.append(info)


@dataclass(frozen=True, kw_only=True)
class SetupContext:
    """What a plugin gets once, when it is loaded. `cluster`: None without one; plugins use `kube_client`."""

    enqueue_owner: EnqueueOwner
    metrics_scope: MetricsScope
    secret_manager: SecretManager
    resource_registrar: ResourceRegistrar
    cluster: KubeClient | None
    owner_kind: str = "task"

    @property
    def kube_client(self) -> KubeClient:
        """The Kubernetes cluster. Raises `TaskError` if the engine has none."""
        if self.cluster is None:
            raise TaskError("this engine has no Kubernetes cluster; name one in its settings")
        return self.cluster


@dataclass(frozen=True, kw_only=True)
class TaskExecutionContext:
    """What a plugin gets in each call. Valid until the call returns.

    `task_refresh_indicator` remains valid after the call: watches and callbacks keep it. What `abort` and `finalize`
    put into `plugin_state_writer` is not saved. `cached_results`: None without a catalog; plugins use `catalog`.
    """

    resource_manager: ResourceManager
    secret_manager: SecretManager
    task_refresh_indicator: SignalAsync
    max_dataset_size_bytes: int
    data_store: DataStore
    plugin_state_reader: PluginStateReader
    plugin_state_writer: PluginStateWriter
    task_reader: TaskReader
    input_reader: InputReader
    output_writer: OutputWriter
    task_execution_metadata: TaskExecutionMetadata
    cached_results: AsyncCatalog | None
    events_recorder: EventsRecorder
    intent: Intent

    @property
    def catalog(self) -> AsyncCatalog:
        """The catalog of results. Raises `NoPluginCatalog` if the engine has none."""
        if self.cached_results is None:
            raise NoPluginCatalog("this engine has no catalog of results; turn it on in its settings")
        return self.cached_results


@runtime_checkable
class Plugin(Protocol):
    """Drives the executions of some task types. All calls are idempotent; none blocks the event loop.

    A plugin that also has a coroutine method `close()` has it called when the engine has stopped: it ends what the
    plugin runs in the process, never remote work.
    """

    def get_id(self) -> str:
        """Return the plugin's id, as in its entry."""

    def get_properties(self) -> PluginProperties:
        """Return what the plugin asks of the engine; constant."""

    async def handle(self, context: TaskExecutionContext) -> Transition:
        """Take one step. An exception fails the round: nothing is saved, and the round is repeated after a back-off."""

    async def abort(self, context: TaskExecutionContext) -> None:
        """Stop the external work of the attempt, if there is any. An exception repeats the call later."""

    async def finalize(self, context: TaskExecutionContext) -> None:
        """Free what the attempt holds; called after `handle` or `abort`. An exception repeats the call later."""


PluginLoader = Callable[[SetupContext], Awaitable[Plugin]]
"""Creates the plugin. Called once, before any other call, and only if the plugin is enabled."""


@dataclass(frozen=True)
class PluginEntry:
    """How the engine finds a plugin. `is_default`: it handles types that no plugin registered; at most one does."""

    id: str
    registered_task_types: tuple[TaskType, ...]
    load_plugin: PluginLoader = field(repr=False)
    is_default: bool = False


class LoadablePlugin(Plugin, Protocol):
    """A plugin with what its own base asks of `SetupContext`."""

    async def load(self, setup: SetupContext) -> None:
        """Check the settings, and keep what the plugin needs. Raises `BadConfig` and `BadPlugin`."""


def plugin_entry(
    make: Callable[[], LoadablePlugin], plugin_id: str, task_types: tuple[TaskType, ...], *, is_default: bool = False
) -> PluginEntry:
    """Return the entry of a plugin. `make`: its class, or a function that makes it."""

    async def load(setup: SetupContext) -> Plugin:
        plugin = make()
        await plugin.load(setup)
        return plugin

    return PluginEntry(plugin_id, task_types, load, is_default)


async def load_plugin(context: SetupContext, entry: PluginEntry) -> Plugin:
    """Load a plugin and check it. Raises `BadPlugin`."""
    try:
        plugin = await entry.load_plugin(context)
        properties = plugin.get_properties()
    except Exception as error:
        raise BadPlugin(f"plugin {entry.id!r} can't be loaded: {type(error).__name__}: {error}") from error
    if not isinstance(plugin, Plugin) or not isinstance(properties, PluginProperties):
        raise BadPlugin(f"the loader of plugin {entry.id!r} returned a {type(plugin).__name__}, which is no Plugin")
    if properties.name_length < MIN_NAME_LENGTH:
        raise BadPlugin(
            f"plugin {entry.id!r} sets generated_name_max_length to {properties.generated_name_max_length}; "
            f"names need at least {MIN_NAME_LENGTH} characters"
        )
    return plugin
