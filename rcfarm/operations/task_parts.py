"""Check the plugin's own part of a task in a file, without running the plugin: with the line of every field.

The kinds of tasks that rcfarm has are checked; the part of another plugin's task is taken as it is. What only an engine
knows is left to it: the remote systems of `http` and their defaults, the functions of `python`, and what the Kubernetes
API server says of a pod.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from controllers.tasks.api.errors import BadConfig
from rcfarm.operations import rc_apply
from rcfarm.operations.documents import ANY, Path, Source

_INPUT = re.compile(r"\{\{\s*+[.$]Inputs\.([^}\s]{1,256}+)\s*+\}\}", re.IGNORECASE)
_TEMPLATE = re.compile(r"\{\{\s*+[.$]\w")
_WITH_INPUTS = ("process", "rc", "http", "python", "pod")  # the kinds whose texts may insert inputs
_DEFAULTS = {"create": {"path": ""}, "get": {"path": ""}, "phases": {"-": "running"}}  # what a remote may have


def check_part(source: Source, kind: str, written: Mapping[str, Any], inputs: Mapping[str, Any], path: Path) -> None:
    """Check the part that is at `path` in the document. Raises `BadFile`.

    The plugins are imported late: they are slow to import, and few commands need them.
    """
    try:
        match kind:
            case "process":
                from controllers.tasks.plugins.process import ProcessConfig, check_process
                from store.schema.manifest import Artifact, Resources

                check_process(source.convert(written, ProcessConfig, path, (ProcessConfig, Artifact, Resources)))
            case "rc":
                from controllers.tasks.plugins.rc import DeployConfig, check_deploy

                config = source.convert(written, DeployConfig, path, (DeployConfig,))
                check_deploy(config)
                check_rc = rc_apply.typed_entry if _has_template(config.rc) else rc_apply.rc_entry
                check_rc(source, config.rc, (*path, "rc"))
            case "http":
                from controllers.tasks.plugins.http_api import HttpTask, LogLink, Request, Search

                http = {**_DEFAULTS, **written}
                source.convert(http, HttpTask, path, (HttpTask, Search, Request, LogLink)).check()
            case "python":
                from controllers.tasks.plugins.python import PythonTask, check_python

                check_python(source.convert(written, PythonTask, path, (PythonTask,)))
            case "pod":
                from controllers.tasks.plugins.pod import PodConfig, checked_containers

                pod = source.convert(written, PodConfig, path, (PodConfig,))
                checked_containers(pod.pod, pod.primary)
            case "framework":
                from controllers.tasks.plugins.framework import FrameworkConfig, check_framework

                framework = source.convert(written, FrameworkConfig, path, (FrameworkConfig,)).framework
                check_framework(framework, "each")
    except BadConfig as error:
        at, _, message = str(error).removeprefix("config").removeprefix(".").partition(": ")
        raise source.error(message, (*path, *re.findall(r"[^.\[\]]+", at.replace("...", ANY)))) from error
    if inputs and kind in _WITH_INPUTS:  # without any, the inputs are a file that only the engine reads
        for where, name in _inputs_in(written, path):
            if name not in inputs:
                raise source.error(f"there is no input {name!r} (inputs: {', '.join(sorted(inputs))})", where)


def _inputs_in(value: Any, path: Path) -> Iterator[tuple[Path, str]]:
    """Yield the path and the name of each input that a text inserts."""
    if isinstance(value, str):
        yield from ((path, name) for name in _INPUT.findall(value))
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _inputs_in(each, (*path, str(key)))
    elif isinstance(value, list):
        for number, each in enumerate(value):
            yield from _inputs_in(each, (*path, str(number)))


def _has_template(value: Any) -> bool:
    if isinstance(value, str):
        return _TEMPLATE.search(value) is not None
    if isinstance(value, dict):
        return any(map(_has_template, value.values()))
    return isinstance(value, list) and any(map(_has_template, value))
