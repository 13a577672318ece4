"""One execution handled by a plugin without an engine: a test calls the rounds, and sees what each one answered.

What the engine would commit is kept in the store's record of the execution's state, so that a plugin may fence by it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec

from controllers.tasks.api.names import TaskExecutionIdentifier, generated_name
from controllers.tasks.api.phase import Transition
from controllers.tasks.api.plugin import (
    NamespacedName,
    Plugin,
    PluginStateReader,
    PluginStateWriter,
    TaskTemplate,
)
from controllers.tasks.io.data import open_data
from controllers.tasks.io.files import InputFile, OutputFiles
from store.kv.protocol import Store
from store.schema.keys import Keys
from store.schema.records import decode, encode
from store.schema.tasks import RemoteIntent, TaskError, TaskEvent, TaskState
from tests.support import require


class Execution:
    """An execution of the plugin. `round()` calls `handle` and keeps what it wrote; `crash=True` forgets it, as an
    engine that dies before its commit."""

    def __init__(
        self, plugin: Plugin, store: Store, keys: Keys, name: str, config: dict[str, Any], **fields: Any
    ) -> None:
        self.plugin, self.store, self.keys, self.name = plugin, store, keys, name
        self.data = open_data("memory:")
        self.inputs = InputFile(self.data, name, fields.pop("inputs", {}))
        self.interruptible = fields.pop("interruptible", False)
        self.environment = fields.pop("environment", {})
        self.template = TaskTemplate(id=name, type=plugin.get_id(), config=config, **fields)
        self.state = TaskState(step="running")
        self.declared = self.signals = 0

    @property
    def outputs(self) -> OutputFiles:
        return OutputFiles(self.data, self.name, self.state.attempt)

    @property
    def pod_id(self) -> str:
        return generated_name(self.name, "n0", self.state.attempt, max_length=63)

    async def round(self, *, crash: bool = False) -> Transition:
        context = await self._context()
        transition = await self.plugin.handle(context)
        written = context.plugin_state_writer.written
        if written is not None and not crash:
            await self.save(plugin_state=written[0], plugin_state_version=written[1])
        return transition

    async def abort(self) -> None:
        await self.save(step="cleaning")
        await self.plugin.abort(await self._context())

    async def finalize(self) -> None:
        await self.save(step="cleaning")
        await self.plugin.finalize(await self._context())

    async def retry(self, failed: Transition) -> None:
        """Record the failure in the history, clean up, and begin the next attempt."""
        assert failed.info.err is not None
        event = TaskEvent(
            n=self.state.next_event,
            at=0.0,
            attempt=self.state.attempt,
            phase="PhaseRetryableFailure",
            error=TaskError(failed.info.err.code, failed.info.err.message),
            info=require(failed.info.info).to_json(),
        )
        await self.store.put(self.keys.task_event(self.name, event.n), encode(event))
        await self.abort()
        await self.finalize()
        await self.save(
            step="running",
            attempt=self.state.attempt + 1,
            intent=None,
            plugin_state=None,
            next_event=self.state.next_event + 1,
        )

    async def save(self, **changes: Any) -> None:
        self.state = msgspec.structs.replace(self.state, **changes)
        await self.store.put(self.keys.task_state(self.name), encode(self.state))

    def _signal(self) -> None:
        self.signals += 1

    async def _context(self) -> Any:
        if await self.store.get(self.keys.task_state(self.name)) is None:
            await self.save()
        else:  # an intent may have been declared in a round that was lost
            entry = require(await self.store.get(self.keys.task_state(self.name)))
            self.state = decode(TaskState, entry.key, entry.value)
        identity = TaskExecutionIdentifier("default", "default", self.name, "n0", self.name, self.state.attempt)
        names = SimpleNamespace(get_generated_name=lambda: self.pod_id, get_id=lambda: identity)
        metadata = SimpleNamespace(
            get_owner_id=lambda: NamespacedName("default", self.name),
            get_task_execution_id=lambda: names,
            get_namespace=lambda: "default",
            get_labels=lambda: {"team": "a"},
            get_environment_variables=lambda: self.environment,
            is_interruptible=lambda: self.interruptible,
        )

        async def read() -> TaskTemplate:
            return self.template

        return SimpleNamespace(
            task_reader=SimpleNamespace(read=read),
            plugin_state_reader=PluginStateReader(self.state.plugin_state, self.state.plugin_state_version),
            plugin_state_writer=PluginStateWriter(),
            task_execution_metadata=metadata,
            input_reader=self.inputs,
            output_writer=self.outputs,
            data_store=self.data,
            task_refresh_indicator=self._signal,
            intent=_Intent(self),
        )


class _Intent:
    def __init__(self, execution: Execution) -> None:
        self._execution = execution

    @property
    def key(self) -> str | None:
        intent = self._execution.state.intent
        return intent.key if intent else None

    async def declare(self, key: str) -> None:
        self._execution.declared += 1
        await self._execution.save(intent=RemoteIntent(key, 0.0))
