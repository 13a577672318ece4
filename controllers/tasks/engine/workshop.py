"""The workshop: what a plugin's call is made of, apart from the fenced writes: plugin, inputs, outputs, secrets, cache.

Everything here lives as long as the process; a context is made for each call. What a context writes at once (an intent,
a unit of a quota) is fenced; what is to be saved with the round (plugin state, recorded events, outputs) is gathered in
it, and the round commits it.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Literal

from controllers.tasks.api.data import CatalogKey, OutputError, SecretManager
from controllers.tasks.api.errors import TaskError
from controllers.tasks.api.phase import CacheStatus
from controllers.tasks.api.plugin import (
    EventsRecorder,
    Intent,
    MetricsScope,
    Plugin,
    PluginStateReader,
    PluginStateWriter,
    SignalAsync,
    TaskExecutionContext,
    TaskExecutionMetadata,
    TaskTemplate,
)
from controllers.tasks.api.resources import ResourceNamespace
from controllers.tasks.io.catalog import Catalog, key_of, owner_of
from controllers.tasks.io.data import DataStore
from controllers.tasks.io.files import FileOutputReader, InputFile, MemoryOutputReader, OutputFiles, TaskFile
from controllers.tasks.outcomes import CacheAnswered, Outputs
from controllers.tasks.registry import Plugins
from controllers.tasks.resources import QUOTA, Scope, resource_manager
from scheduler.quota.ledger import QuotaLedger
from store.kv.protocol import Op
from store.schema.tasks import TaskSpec, TaskState

Dependency = Literal["succeeded", "failed", "pending"]


class NoMetrics(MetricsScope):
    """Measures nothing."""


@dataclass(frozen=True, kw_only=True)
class TaskContext(TaskExecutionContext):
    """The context of one call. After it, the round reads what was put into the writers and the recorder."""

    attempt: int
    output_writer: OutputFiles


class Workshop:
    """Makes contexts. `manager`: the first part of the names of plugins' resources; `quotas`: "quota" or "noop", the
    kind of the resource manager. `catalog`: of cached results; what concerns them raises what the catalog raises."""

    def __init__(
        self,
        plugins: Plugins,
        data: DataStore,
        secrets: SecretManager,
        ledger: QuotaLedger,
        *,
        manager: str,
        quotas: str = QUOTA,
        catalog: Catalog | None = None,
    ) -> None:
        self.plugins, self.catalog = plugins, catalog
        self._data, self._secrets, self._ledger = data, secrets, ledger
        self._manager, self._quotas = ResourceNamespace(manager), quotas

    def plugin_id(self, spec: TaskSpec, state: TaskState | None) -> str:
        """Return the plugin of an execution: the one that has handled it so far, if any. Raises `TaskError`."""
        if state is not None and state.plugin and state.step != "done" and state.plugin in self.plugins.ids():
            return state.plugin
        return self.plugins.resolve(spec.type, (spec.plugin,) if spec.plugin else ())

    def plugin_for(self, spec: TaskSpec, state: TaskState | None) -> Plugin:
        """Return the execution's plugin. Raises `TaskError`."""
        return self.plugins[self.plugin_id(spec, state)]

    def context(
        self,
        spec: TaskSpec,
        metadata: TaskExecutionMetadata,
        state: PluginStateReader,
        *,
        plugin: str,
        signal: SignalAsync,
        intent: Intent,
        fence: Op,
    ) -> TaskContext:
        """Return the context of one call. `fence` refuses the writes of an engine that has lost the execution."""
        scope = Scope(
            execution=spec.id,
            project=spec.project,
            domain=spec.domain,
            key=spec.fair_key or spec.project,
            weight=spec.weight,
            priority=spec.priority,
        )
        names = self._manager.create_sub_namespace(plugin)
        attempt = metadata.get_task_execution_id().get_id().retry_attempt
        return TaskContext(
            attempt=attempt,
            task_execution_metadata=metadata,
            task_refresh_indicator=signal,
            task_reader=TaskFile(self._data, spec.id, template_of(spec)),
            plugin_state_reader=state,
            plugin_state_writer=PluginStateWriter(),
            input_reader=InputFile(self._data, spec.id, deepcopy(spec.inputs)),
            output_writer=OutputFiles(self._data, spec.id, attempt),
            intent=intent,
            resource_manager=resource_manager(self._quotas, self._ledger, names, scope, [fence]),
            secret_manager=self._secrets,
            data_store=self._data,
            max_dataset_size_bytes=self._data.max_dataset_size_bytes,
            cached_results=self.catalog,
            events_recorder=EventsRecorder(),
        )

    async def outputs(self, context: TaskContext) -> Outputs | None:
        """Return what the plugin put, in the file of the outputs then; None if it put nothing. Raises `DataError`."""
        found = await context.output_writer.collect()
        if found is None:
            return None
        if isinstance(found, OutputError):
            return Outputs(error=found.error, recoverable=found.is_recoverable)
        return Outputs(frozenset(found))

    async def look_up(self, spec: TaskSpec, context: TaskContext, *, reserve: bool) -> CacheAnswered:
        """Copy a cached result to the attempt's outputs. `reserve`: on a miss, get or extend the reservation."""
        plugin = self.plugin_for(spec, None)
        if self.catalog is None or plugin.get_properties().disable_node_level_caching:
            return CacheAnswered("DISABLED")
        key = await self._key(spec)
        answer = await self.catalog.look_up(key)
        if answer.status is CacheStatus.HIT and answer.outputs is not None:
            await context.output_writer.put(MemoryOutputReader(answer.outputs))
            copied = await context.output_writer.collect()
            return CacheAnswered("LOOKUP_FAILURE" if isinstance(copied, OutputError) else "HIT")
        if answer.status is CacheStatus.LOOKUP_FAILURE:
            return CacheAnswered("LOOKUP_FAILURE")
        if reserve:
            reservation = await self.catalog.reserve(key, owner_of(spec.id, context.attempt))
            if not reservation.held:
                return CacheAnswered("MISS", held_by=reservation.owner)
        return CacheAnswered("MISS")

    async def put_cache(self, spec: TaskSpec, context: TaskContext) -> None:
        """Store the attempt's result, and end its reservation. Raises `TaskError` if that failed."""
        if self.catalog is None:
            return
        reader, owner = FileOutputReader(self._data, context.output_writer), owner_of(spec.id, context.attempt)
        found = await reader.read() if await reader.exists() else {}
        if isinstance(found, OutputError):
            raise TaskError(f"the outputs can't be read for the cache: {found.error}")
        metadata = {"execution": spec.id, "attempt": owner}
        answer = await self.catalog.put(await self._key(spec), found, owner=owner, metadata=metadata)
        if answer.status is not CacheStatus.POPULATED:
            raise TaskError(f"the result was not cached: {answer.reason}")

    async def extend_reservation(self, spec: TaskSpec, attempt: int) -> None:
        """Extend the attempt's reservation of the cached result."""
        if self.catalog is not None:
            await self.catalog.reserve(await self._key(spec), owner_of(spec.id, attempt))

    async def release_reservation(self, spec: TaskSpec, context: TaskContext) -> None:
        """Release the reservation of the cached result."""
        if self.catalog is not None:
            await self.catalog.release(await self._key(spec), owner_of(spec.id, context.attempt))

    async def _key(self, spec: TaskSpec) -> CatalogKey:
        return key_of(spec, await InputFile(self._data, spec.id, spec.inputs).get())


def template_of(spec: TaskSpec) -> TaskTemplate:
    """Return the task as the operator declared it; plugins may change what they get, so it is a copy."""
    return TaskTemplate(
        id=spec.id,
        type=spec.type,
        config=deepcopy(spec.config),
        outputs=dict(spec.outputs),
        retries=spec.retries,
        cache_version=spec.cache_version,
        interruptible=spec.interruptible,
        resources=deepcopy(spec.resources),
    )
