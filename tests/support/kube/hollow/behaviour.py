"""What containers of a hollow pod are given, and what they do.

They get the environment that a kubelet would give them: literal values, fields of the pod, and `$(NAME)` in them. A pod
controls its hollow kubelet by annotations, which may be changed while the pod runs:

    hollow/start-seconds   from the binding until it has an address and its first container starts; 0
    hollow/exit-code       how its containers end; separated by commas: one for each start, the last for all later ones
    hollow/run-seconds     how long its containers run; without an exit code for ever, else 0
    hollow/program         a container runs for real: the program that the kubelet has under this name
    hollow/stop-seconds    how long it takes to stop when deleted, at most its grace period; 0
    hollow/stuck           with "true", its deletion never ends

Seconds may be "inf". The first of these for one container are written as `hollow/NAME.exit-code` and so on. Those
without a container's name are for the app containers; init containers end at once with 0 unless they are named.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from store.kube.api.objects import Object, annotations_of

PREFIX = "hollow/"
_REFERENCE = re.compile(r"\$(\$|\(([^()]*)\))")
_SUBSCRIPT = re.compile(r"(metadata\.(?:labels|annotations))\['([^']*)'\]")


class Ended(NamedTuple):
    """The end of a container."""

    code: int
    message: str = ""


class ContainerPlan(NamedTuple):
    """`seconds` of running, then `end`; or `program`, when that is not ""."""

    seconds: float
    end: Ended
    program: str


class PodPlan(NamedTuple):
    """See the annotations of the module."""

    start_seconds: float
    stop_seconds: float
    is_stuck: bool


def pod_plan(pod: Object) -> PodPlan:
    asked = _Asked(pod, "", is_init=False)
    return PodPlan(
        asked.seconds("start-seconds", 0.0), asked.seconds("stop-seconds", 0.0), asked.text("stuck") == "true"
    )


def container_plan(pod: Object, name: str, *, is_init: bool, starts: int) -> ContainerPlan:
    """Return what the container `name` does at its start number `starts`, counted from 0."""
    asked = _Asked(pod, name, is_init=is_init)
    codes = [int(code) for code in asked.text("exit-code").split(",") if code.strip()]
    ends = bool(codes) or is_init
    end = Ended(codes[min(starts, len(codes) - 1)] if codes else 0)
    return ContainerPlan(asked.seconds("run-seconds", 0.0 if ends else math.inf), end, asked.text("program"))


class _Asked:
    """Looks annotations up, the container's own first."""

    def __init__(self, pod: Object, container: str, *, is_init: bool) -> None:
        self._annotations = annotations_of(pod)
        self._prefixes = [f"{PREFIX}{container}."] if container else []
        self._prefixes += [] if is_init else [PREFIX]

    def text(self, name: str) -> str:
        found = (self._annotations.get(prefix + name) for prefix in self._prefixes)
        return next((value for value in found if value is not None), "")

    def seconds(self, name: str, default: float) -> float:
        text = self.text(name)
        return float(text) if text else default


def environment(pod: Object, container: Object) -> dict[str, str]:
    """Return the container's environment. Raises `NotImplementedError` for sources other than fields of the pod."""
    resolved: dict[str, str] = {}
    for variable in container.get("env") or ():
        if source := variable.get("valueFrom"):
            resolved[variable["name"]] = _from_pod(pod, source)
        else:
            resolved[variable["name"]] = expand(variable.get("value") or "", resolved)
    return resolved


def expand(text: str, values: Mapping[str, str]) -> str:
    """Insert the values of earlier variables; `$$` stands for one `$`, and unknown names stay as they are."""

    def replace(found: re.Match[str]) -> str:
        return "$" if found[1] == "$" else values.get(found[2], found[0])

    return _REFERENCE.sub(replace, text)


def _from_pod(pod: Object, source: Mapping[str, Any]) -> str:
    if "fieldRef" not in source:
        raise NotImplementedError(f"a hollow kubelet does not know the source {', '.join(source)} of a variable")
    path = str(source["fieldRef"]["fieldPath"])
    subscript = _SUBSCRIPT.fullmatch(path)
    parts = [*subscript[1].split("."), subscript[2]] if subscript else path.split(".")
    value: Any = pod
    for part in parts:
        value = (value or {}).get(part)
    return "" if value is None else str(value)
