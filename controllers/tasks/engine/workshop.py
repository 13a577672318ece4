"""The workshop: what a plugin's call is made of, apart from the fenced writes: plugin, inputs, outputs, secrets, cache.

Everything here lives as long as the process; a context is made for each call.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Literal

from controllers.tasks.api.data import OutputError, SecretManager
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
from controllers.tasks.engine.cache import ResultCache
from controllers.tasks.io.catalog import owner_of
from controllers.tasks.io.data import DataStore
from controllers.tasks.io.files import InputFile, OutputFiles, TaskFile
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

    output_writer: OutputFiles


class Workshop:
    """Makes contexts. `manager`: the first part of the names of plugins' resources; `quotas`: "quota" or "noop", the
    kind of the resource manager. `cache`: None without a catalog."""

    def __init__(
        self,
        plugins: Plugins,
        data: DataStore,
        secrets: SecretManager,
        ledger: QuotaLedger,
        *,
        manager: str,
        quotas: str = QUOTA,
        cache: ResultCache | None = None,
    ) -> None:
        self.plugins, self.cache = plugins, cache
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
        return TaskContext(
            task_execution_metadata=metadata,
            task_refresh_indicator=signal,
            task_reader=TaskFile(self._data, spec.id, template_of(spec)),
            plugin_state_reader=state,
            plugin_state_writer=PluginStateWriter(),
            input_reader=InputFile(self._data, spec.id, deepcopy(spec.inputs)),
            output_writer=OutputFiles(self._data, spec.id, metadata.get_task_execution_id().get_id().retry_attempt),
            intent=intent,
            resource_manager=resource_manager(self._quotas, self._ledger, names, scope, [fence]),
            secret_manager=self._secrets,
            data_store=self._data,
            max_dataset_size_bytes=self._data.max_dataset_size_bytes,
            cached_results=self.cache.catalog if self.cache is not None else None,
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
        """Look for a cached result."""
        plugin = self.plugin_for(spec, None)
        if self.cache is None or plugin.get_properties().disable_node_level_caching:
            return CacheAnswered("DISABLED")
        return await self.cache.look_up(spec, context.output_writer, reserve=reserve, owner=_owner(spec, context))

    async def put_cache(self, spec: TaskSpec, context: TaskContext) -> None:
        """Store the result in the cache."""
        if self.cache is not None:
            await self.cache.put(spec, context.output_writer, owner=_owner(spec, context))

    async def release_reservation(self, spec: TaskSpec, context: TaskContext) -> None:
        """Release the reservation of the cached result."""
        if self.cache is not None:
            await self.cache.release(spec, owner=_owner(spec, context))


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


def _owner(spec: TaskSpec, context: TaskContext) -> str:
    return owner_of(spec.id, context.task_execution_metadata.get_task_execution_id().get_id().retry_attempt)
