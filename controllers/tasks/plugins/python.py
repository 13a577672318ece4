"""`python`: a function of the engine's own Python, found by an entry point of the group `rcfarm.task_functions`.

The function is called in a thread with the task's inputs as keywords. A mapping that it returns has the outputs by
name; another value is the output `result`; None is no outputs. It runs at least once, as all calls of
`controllers.tasks.patterns.sync`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any

import msgspec

from controllers.tasks.api.errors import BadConfig, TaskError
from controllers.tasks.api.plugin import PluginEntry, TaskTemplate, plugin_entry
from controllers.tasks.patterns.sync import SyncCall, SyncConfig, SyncPlugin
from store.redaction import Redactor

PLUGIN_ID = "python"
FUNCTIONS = "rcfarm.task_functions"


class PythonTask(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The task's own part. `function`: the name of the entry point. `timeout`: seconds, 0 for the plugin's setting."""

    function: str
    timeout: float = 0.0


class FunctionNotLoaded(TaskError):
    """The function's module can't be imported."""

    retryable = False


class PythonPlugin(SyncPlugin):
    """Runs `python` tasks. `functions`: by name; by default those of the entry points."""

    id = PLUGIN_ID

    def __init__(
        self,
        config: SyncConfig | None = None,
        *,
        functions: Mapping[str, Callable[..., Any]] | None = None,
        redactor: Redactor | None = None,
    ) -> None:
        super().__init__(redactor=redactor)
        self._settings, self._functions = config or SyncConfig(), functions

    def get_config(self) -> SyncConfig:
        """Return the settings."""
        return self._settings

    def timeout(self, task: TaskTemplate) -> float:
        """Return the task's time limit, in seconds. Raises `BadConfig`."""
        config = task.config_as(PythonTask)
        check_python(config)
        return config.timeout or super().timeout(task)

    def do(self, call: SyncCall) -> Mapping[str, Any]:
        """Call the function. Raises `BadConfig` for an unknown function, or inputs that it does not take."""
        name = call.task.config_as(PythonTask).function
        if self._functions is not None:
            function, known = self._functions.get(name), sorted(self._functions)
        else:
            points = {point.name: point for point in entry_points(group=FUNCTIONS)}
            known = sorted(points)
            try:
                function = points[name].load() if name in points else None
            except Exception as error:
                raise FunctionNotLoaded(f"function {name} can't be loaded: {error!r}") from error
        if function is None:
            raise BadConfig(f"config.function: {name!r:.100} is not one of {', '.join(known) or 'none'} ({FUNCTIONS})")
        if not callable(function):
            raise BadConfig(f"config.function: the entry point {name} is no function")
        try:
            inspect.signature(function).bind(**call.inputs)
        except TypeError as error:
            raise BadConfig(f"function {name}: {error} (inputs: {', '.join(sorted(call.inputs)) or 'none'})") from None
        result = function(**call.inputs)
        if result is None:
            return {}
        return result if isinstance(result, Mapping) else {"result": result}


def check_python(config: PythonTask) -> None:
    """Check what no engine can change. Which functions there are, only the engine knows. Raises `BadConfig`."""
    if not 0 <= config.timeout < float("inf"):
        raise BadConfig(f"config.timeout: {config.timeout:g} is not a number of seconds from 0 on")


def python_entry(config: SyncConfig | None = None, *, redactor: Redactor | None = None) -> PluginEntry:
    """Return the entry of the plugin."""
    return plugin_entry(lambda: PythonPlugin(config, redactor=redactor), PLUGIN_ID, (PLUGIN_ID,))
