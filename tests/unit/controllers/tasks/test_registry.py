"""Which plugin handles a task, and what stops the engine at its start."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Any, cast

import pytest

from controllers.tasks import registry
from controllers.tasks.api.errors import BadPlugin
from controllers.tasks.api.phase import Phase
from controllers.tasks.api.plugin import Plugin, PluginEntry, SetupContext, TaskExecutionContext, TaskTemplate
from controllers.tasks.api.resources import ResourceNamespace
from controllers.tasks.registry import (
    AlwaysFailPlugin,
    NoMatchingPlugin,
    PluginRegistrar,
    PluginRegistry,
    Plugins,
    RegistryConfig,
    UnsupportedTaskType,
)


def plugin(name: str, *types: str, is_default: bool = False, loads: list[str] | None = None) -> PluginEntry:
    """Return the entry of a plugin that notes its loading in `loads`."""

    async def load(context: SetupContext) -> Plugin:
        if loads is not None:
            loads.append(name)
        return AlwaysFailPlugin()

    return PluginEntry(name, types, load, is_default)


async def loaded(*entries: PluginEntry, enabled: tuple[str, ...] = (), **defaults: str) -> Plugins:
    """Return the plugins after loading. `defaults`: plugin by task type."""
    config = RegistryConfig(enabled, defaults)
    return await PluginRegistry(entries).load(config, lambda entry: cast(SetupContext, None))


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        (plugin(" ", "spark"), "a plugin for spark has no id"),
        (plugin("p"), "'p' registers no task type"),
        (plugin("p", ""), "'p' registers no task type"),
        (PluginEntry("p", ("t",), cast(Any, None)), "'p' has no loader"),
        (plugin("Always-Fail", "t"), "two plugins have the id 'Always-Fail'"),
    ],
)
def test_an_incomplete_or_double_plugin_is_refused(entry: PluginEntry, problem: str) -> None:
    plugins = PluginRegistry()
    with pytest.raises(BadPlugin, match=problem):
        plugins.register(entry)
    assert [each.id for each in plugins.entries()] == ["always-fail"]


def test_the_list_of_plugins_is_a_copy() -> None:
    plugins = PluginRegistry()
    plugins.entries().clear()
    assert plugins.entries()


async def test_all_plugins_are_loaded_once_if_none_is_named() -> None:
    loads: list[str] = []
    plugins = await loaded(plugin("a", "x", loads=loads), plugin("b", "y", "z", loads=loads))
    assert loads == ["a", "b"]
    assert plugins.ids() == ["always-fail", "a", "b"]
    assert isinstance(plugins["a"], AlwaysFailPlugin)


async def test_only_enabled_plugins_are_loaded_in_any_case_of_their_names() -> None:
    loads: list[str] = []
    entries = (plugin("Spark", "x", loads=loads), plugin("b", "x", loads=loads))
    plugins = await loaded(*entries, enabled=(" sPARK ",))
    assert loads == plugins.ids() == ["Spark"]
    with pytest.raises(BadPlugin, match=r"enabled lists 'ray', .*'Spark', 'always-fail', 'b'"):
        await loaded(*entries, enabled=("ray",))


async def test_a_default_must_be_enabled() -> None:
    entries = (plugin("a", "x"), plugin("b", "x"))
    with pytest.raises(BadPlugin, match="names 'b' for 'x', which is not enabled"):
        await loaded(*entries, enabled=("a",), x="b")


async def test_two_plugins_for_a_type_need_a_default() -> None:
    entries = (plugin("a", "x"), plugin("b", "x"))
    with pytest.raises(BadPlugin, match="'a', 'b' all handle tasks of type 'x'"):
        await loaded(*entries)
    assert (await loaded(*entries, x="b")).resolve("x") == "b"


async def test_two_global_defaults_stop_the_start() -> None:
    with pytest.raises(BadPlugin, match="'a', 'b' are all the default"):
        await loaded(plugin("a", "x", is_default=True), plugin("b", "y", is_default=True))


async def test_an_unknown_type_goes_to_the_global_default_or_nowhere() -> None:
    assert (await loaded(plugin("a", "x", is_default=True))).resolve("other") == "a"
    with pytest.raises(UnsupportedTaskType, match=r"type 'other'; the types are always-fail, x"):
        (await loaded(plugin("a", "x"))).resolve("other")


async def test_an_execution_may_ask_for_plugins() -> None:
    plugins = await loaded(plugin("a", "x"), plugin("b", "x"), plugin("c", "y"), x="a")
    assert plugins.resolve("x", ("c", "unknown", "b", "a")) == "b"
    with pytest.raises(NoMatchingPlugin, match=r"'c' handles tasks of type 'x'; those that do are 'a', 'b'"):
        plugins.resolve("x", ("c",))
    assert plugins.resolve("x", ("c",), fail_if_missing=False) == "a"


async def test_a_type_may_be_made_to_fail() -> None:
    class Reader:
        async def read(self) -> TaskTemplate:
            return TaskTemplate("t1", "spark")

    class Context:
        task_reader = Reader()

    plugins = await loaded(plugin("a", "x"), spark="always-fail")
    failing = plugins[plugins.resolve("spark")]
    info = (await failing.handle(cast(TaskExecutionContext, Context()))).info
    assert (info.phase, info.err and info.err.code) == (Phase.PERMANENT_FAILURE, "AlwaysFail")
    assert "'spark'" in str(info)


async def test_quotas_carry_the_names_of_manager_and_plugin() -> None:
    quotas: dict[ResourceNamespace, int] = {}
    registrar = PluginRegistrar(quotas, ResourceNamespace("rcfarm:spark"))
    await registrar.register_resource_quota(ResourceNamespace("cluster"), 3)
    other = PluginRegistrar(quotas, ResourceNamespace("rcfarm:ray"))
    await other.register_resource_quota(ResourceNamespace("cluster"), 1000)
    assert quotas == {"rcfarm:spark:cluster": 3, "rcfarm:ray:cluster": 1000}
    with pytest.raises(BadPlugin, match="rcfarm:spark:cluster is registered twice"):
        await registrar.register_resource_quota(ResourceNamespace("cluster"), 3)
    for quota in (0, 1001, True):
        with pytest.raises(BadPlugin, match="must be 1 to 1000"):
            await registrar.register_resource_quota(ResourceNamespace("other"), quota)


ENTRY = plugin("installed", "x")


def test_installed_distributions_add_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    def register(value: str) -> PluginRegistry:
        points = [EntryPoint("p", value, registry.ENTRY_POINTS)]
        found = {"rcfarm.task_plugins": points}
        monkeypatch.setattr("importlib.metadata.entry_points", lambda group: found.get(group, []))
        plugins = PluginRegistry()
        plugins.register_entry_points()
        return plugins

    with pytest.raises(BadPlugin, match=r"'p' \(no_such_module:x\) can't be imported"):
        register("no_such_module:x")
    with pytest.raises(BadPlugin, match="is no PluginEntry"):
        register("controllers.tasks.registry:MAX_QUOTA")
    monkeypatch.setattr(registry, "INSTALLED", ENTRY, raising=False)
    assert [each.id for each in register("controllers.tasks.registry:INSTALLED").entries()][-1] == "installed"
