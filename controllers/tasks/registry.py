"""Which plugin handles a task: registration, configuration, loading, resolution; as in Flyte's plugin registry.

Entries come from the program and from entry points of the group `rcfarm.task_plugins`, each of which names a
`PluginEntry`. Loading happens once, at the start of the engine: a loader runs for each enabled plugin, and any problem
stops the engine before it handles an execution. A problem is a `BadPlugin`, whose text names the plugin and what to do.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
import structlog

from controllers.tasks.api.errors import BadPlugin, TaskError
from controllers.tasks.api.phase import Transition, do_transition, phase_info_failure
from controllers.tasks.api.plugin import (
    Plugin,
    PluginEntry,
    PluginProperties,
    SetupContext,
    TaskExecutionContext,
    load_plugin,
    plugin_entry,
)
from controllers.tasks.api.resources import ResourceNamespace

log = structlog.get_logger(__name__)

ENTRY_POINTS = "rcfarm.task_plugins"
MAX_QUOTA = 1000  # units of a resource that a plugin declares


class UnsupportedTaskType(TaskError):
    """No plugin handles the task's type."""

    retryable = False


class NoMatchingPlugin(TaskError):
    """None of the plugins that the execution asks for handles its type, and it accepts no other."""

    retryable = False


class RegistryConfig(msgspec.Struct, frozen=True):
    """`enabled`: ids of plugins, in any case; empty for all. `default_for_task_types`: the plugin's id by task type."""

    enabled: tuple[str, ...] = ()
    default_for_task_types: dict[str, str] = {}


class PluginRegistry:
    """The plugins that exist. `always-fail` is one of them."""

    def __init__(self, entries: Iterable[PluginEntry] = ()) -> None:
        self._entries: dict[str, PluginEntry] = {}
        for entry in (ALWAYS_FAIL, *entries):
            self.register(entry)

    def register(self, entry: PluginEntry) -> None:
        """Add a plugin. Raises `BadPlugin`."""
        if not entry.id.strip():
            raise BadPlugin(f"a plugin for {', '.join(entry.registered_task_types) or 'no task type'} has no id")
        if not all(entry.registered_task_types or ("",)):
            raise BadPlugin(f"plugin {entry.id!r} registers no task type; registered_task_types lists at least one")
        if not callable(entry.load_plugin):
            raise BadPlugin(f"plugin {entry.id!r} has no loader; load_plugin is an async function")
        if _normal(entry.id) in self._entries:
            raise BadPlugin(f"two plugins have the id {entry.id!r}; rename or remove one")
        self._entries[_normal(entry.id)] = entry

    def register_entry_points(self) -> None:
        """Add the plugins of installed distributions. Raises `BadPlugin`."""
        from importlib.metadata import entry_points  # 10 ms; commands that call no plugin must not pay

        for point in sorted(entry_points(group=ENTRY_POINTS), key=lambda point: point.name):
            try:
                entry = point.load()
            except Exception as error:
                raise BadPlugin(
                    f"task plugin {point.name!r} ({point.value}) can't be imported: {error}; fix or uninstall it"
                ) from error
            if not isinstance(entry, PluginEntry):
                raise BadPlugin(f"task plugin {point.name!r} ({point.value}) is no PluginEntry")
            self.register(entry)

    def entries(self) -> list[PluginEntry]:
        """Return the plugins, in the order of their registration."""
        return list(self._entries.values())

    async def load(self, config: RegistryConfig, setup: Callable[[PluginEntry], SetupContext]) -> Plugins:
        """Load the enabled plugins. `setup` makes the context of each. Raises `BadPlugin`."""
        wanted = {_normal(name) for name in config.enabled}
        if unknown := wanted - self._entries.keys():
            known = _listed(entry.id for entry in self.entries())
            raise BadPlugin(f"enabled lists {_listed(unknown)}, which no plugin has as its id; the ids are {known}")
        enabled = {key: entry for key, entry in self._entries.items() if not wanted or key in wanted}
        by_type: dict[str, str] = {}
        for task_type, name in config.default_for_task_types.items():
            if (default := enabled.get(_normal(name))) is None:
                known = _listed(entry.id for entry in enabled.values())
                raise BadPlugin(
                    f"default_for_task_types names {name!r} for {task_type!r}, which is not enabled; the enabled "
                    f"plugins are {known}"
                )
            by_type[task_type] = default.id
        handlers = defaultdict(list)
        for entry in enabled.values():
            for task_type in dict.fromkeys(entry.registered_task_types):
                handlers[task_type].append(entry.id)
        for task_type, ids in handlers.items():
            if len(ids) > 1 and task_type not in by_type:
                raise BadPlugin(
                    f"plugins {_listed(ids)} all handle tasks of type {task_type!r}; name one in default_for_task_types"
                )
            by_type.setdefault(task_type, ids[0])
        fallbacks = [entry.id for entry in enabled.values() if entry.is_default]
        if len(fallbacks) > 1:
            raise BadPlugin(f"plugins {_listed(fallbacks)} are all the default for unknown types; enable one of them")
        loaded = {entry.id: await load_plugin(setup(entry), entry) for entry in enabled.values()}
        return Plugins(list(enabled.values()), loaded, by_type, fallbacks[0] if fallbacks else None)


class Plugins:
    """The loaded plugins. Made by `PluginRegistry.load`."""

    def __init__(
        self,
        entries: Sequence[PluginEntry],
        loaded: Mapping[str, Plugin],
        by_type: Mapping[str, str],
        fallback: str | None,
    ) -> None:
        self._loaded, self._by_type, self._fallback = loaded, by_type, fallback
        self._types = {entry.id: frozenset(entry.registered_task_types) for entry in entries}

    def __getitem__(self, plugin: str) -> Plugin:
        """Return the plugin of the id. Raises `KeyError`."""
        return self._loaded[plugin]

    def ids(self) -> list[str]:
        """Return the ids, in the order of registration."""
        return list(self._loaded)

    async def close(self) -> None:
        """Call `close()` of the plugins that have it, within a second each; an error is logged."""
        for plugin_id, plugin in self._loaded.items():
            if close := getattr(plugin, "close", None):
                try:
                    async with asyncio.timeout(1.0):
                        await close()
                except Exception as error:
                    log.warning("A plugin could not be closed", plugin=plugin_id, error=repr(error))

    def resolve(self, task_type: str, overrides: Sequence[str] = (), *, fail_if_missing: bool = True) -> str:
        """Return the id of the plugin that handles an execution.

        `overrides`: ids that the execution asks for; the first that handles the type is taken. If none does, another
        plugin is taken unless `fail_if_missing`. Raises `NoMatchingPlugin` and `UnsupportedTaskType`.
        """
        for each in overrides:
            if task_type in self._types.get(each, ()) or (each in self._types and self._by_type.get(task_type) == each):
                return each
        if overrides and fail_if_missing:
            handlers = [plugin for plugin, types in self._types.items() if task_type in types]
            raise NoMatchingPlugin(
                f"none of the plugins {_listed(overrides)} handles tasks of type {task_type!r}; "
                f"those that do are {_listed(handlers) or 'not enabled'}"
            )
        chosen = self._by_type.get(task_type, self._fallback)
        if chosen is None:
            known = sorted({*self._by_type, *(each for types in self._types.values() for each in types)})
            raise UnsupportedTaskType(
                f"no enabled plugin handles tasks of type {task_type!r}; the types are {', '.join(known)}"
            )
        return chosen

    def types_of(self, plugin: str) -> list[str]:
        """Return the task types for which the plugin is the default."""
        return sorted(task_type for task_type, default in self._by_type.items() if default == plugin)


class PluginRegistrar:
    """The `ResourceRegistrar` of one plugin. `quotas`: takes what it declares. `prefix`: `MANAGER:PLUGIN`."""

    def __init__(self, quotas: dict[ResourceNamespace, int], prefix: ResourceNamespace) -> None:
        self._quotas, self._prefix = quotas, prefix

    async def register_resource_quota(self, namespace: ResourceNamespace, quota: int) -> None:
        """Declare a resource. Raises `BadPlugin`."""
        key = self._prefix.create_sub_namespace(namespace)
        if isinstance(quota, bool) or not 1 <= quota <= MAX_QUOTA:
            raise BadPlugin(f"the quota of {key} is {quota}; it must be 1 to {MAX_QUOTA}")
        if key in self._quotas:
            raise BadPlugin(f"the quota of {key} is registered twice")
        self._quotas[key] = quota


class AlwaysFailPlugin:
    """Fails each execution at once: for types that must not run, named in `default_for_task_types`."""

    def get_id(self) -> str:
        return "always-fail"

    def get_properties(self) -> PluginProperties:
        return PluginProperties(disable_node_level_caching=True)

    async def load(self, setup: SetupContext) -> None:
        pass

    async def handle(self, context: TaskExecutionContext) -> Transition:
        template = await context.task_reader.read()
        return do_transition(phase_info_failure("AlwaysFail", f"tasks of type {template.type!r} are not supported"))

    async def abort(self, context: TaskExecutionContext) -> None:
        pass

    async def finalize(self, context: TaskExecutionContext) -> None:
        pass


ALWAYS_FAIL = plugin_entry(AlwaysFailPlugin, "always-fail", ("always-fail",))


def _normal(name: str) -> str:
    return name.strip().lower()


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(each) for each in sorted(names))
