"""The environment that a kubelet gives to a container: literal values, fields of the pod, and `$(NAME)` in them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from store.kube.api.objects import Object

_REFERENCE = re.compile(r"\$(\$|\(([^()]*)\))")
_SUBSCRIPT = re.compile(r"(metadata\.(?:labels|annotations))\['([^']*)'\]")


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
