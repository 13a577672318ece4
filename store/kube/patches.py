"""Applying patches to JSON values: merge patches (RFC 7386) and JSON patches (RFC 6902). Pure; nothing is changed in
place, and what a patch leaves alone is shared between the old value and the new one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class BadPatch(ValueError):
    """A patch that is malformed, or whose paths or tests do not hold."""


def apply_merge_patch(target: Any, patch: Any) -> Any:
    """RFC 7386: objects are merged, null removes a member, and everything else replaces."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = apply_merge_patch(merged.get(name), value)
    return merged


def merge_patch_between(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """The smallest merge patch that turns `old` into `new`; {} when they are equal. What is gone is written as null."""
    patch: dict[str, Any] = {name: None for name in old if name not in new}
    for name, value in new.items():
        before = old.get(name)
        if isinstance(value, dict) and isinstance(before, dict):
            if inner := merge_patch_between(before, value):
                patch[name] = inner
        elif name not in old or value != before:
            patch[name] = value
    return patch


def apply_json_patch(target: Any, patch: Sequence[Any]) -> Any:
    """RFC 6902: all operations in order, or `BadPatch`."""
    for operation in patch:
        target = _apply_operation(target, operation)
    return target


def _apply_operation(target: Any, operation: Any) -> Any:
    if not isinstance(operation, dict) or not isinstance(operation.get("path"), str):
        raise BadPatch(f"not an operation with a path: {operation!r}")
    path, verb = _pointer(operation["path"]), operation.get("op")
    match verb:
        case "add":
            return _add(target, path, _value_of(operation))
        case "replace":
            return _replace(target, path, _value_of(operation))
        case "remove":
            return _remove(target, path)
        case "move":
            source = _pointer(operation.get("from"))
            return _add(_remove(target, source), path, _look_up(target, source))
        case "copy":
            return _add(target, path, _look_up(target, _pointer(operation.get("from"))))
        case "test":
            if _look_up(target, path) != _value_of(operation):
                raise BadPatch(f"test: {operation['path']!r} has another value")
            return target
    raise BadPatch(f"unknown operation {verb!r}; use add, remove, replace, move, copy or test")


def _value_of(operation: dict[str, Any]) -> Any:
    if "value" not in operation:
        raise BadPatch(f"{operation['op']} {operation['path']!r}: the value is missing")
    return operation["value"]


def _pointer(text: Any) -> list[str]:
    """RFC 6901."""
    if not isinstance(text, str) or (text and not text.startswith("/")):
        raise BadPatch(f"not a JSON pointer: {text!r}")
    return [part.replace("~1", "/").replace("~0", "~") for part in text.split("/")[1:]]


def _look_up(target: Any, path: list[str]) -> Any:
    for part in path:
        if isinstance(target, list):
            target = target[_index(part, len(target) - 1)]
        elif isinstance(target, dict) and part in target:
            target = target[part]
        else:
            raise BadPatch(f"nothing at {part!r}")
    return target


def _index(part: str, highest: int) -> int:
    if not part.isdecimal() or int(part) > highest:
        raise BadPatch(f"no such index: {part!r}")
    return int(part)


def _add(target: Any, path: list[str], value: Any) -> Any:
    if not path:
        return value
    parent, name = _look_up(target, path[:-1]), path[-1]
    if isinstance(parent, list):
        at = len(parent) if name == "-" else _index(name, len(parent))
        return _replace(target, path[:-1], [*parent[:at], value, *parent[at:]])
    if not isinstance(parent, dict):
        raise BadPatch(f"{'/'.join(path[:-1])!r} is no object")
    return _replace(target, path[:-1], parent | {name: value})


def _remove(target: Any, path: list[str]) -> Any:
    _look_up(target, path)
    if not path:
        return None
    parent, name = _look_up(target, path[:-1]), path[-1]
    if isinstance(parent, list):
        at = int(name)
        return _replace(target, path[:-1], parent[:at] + parent[at + 1 :])
    return _replace(target, path[:-1], {key: value for key, value in parent.items() if key != name})


def _replace(target: Any, path: list[str], value: Any) -> Any:
    _look_up(target, path)
    if not path:
        return value
    inner = _replace(_look_up(target, path[:1]), path[1:], value)
    if isinstance(target, list):
        at = int(path[0])
        return [*target[:at], inner, *target[at + 1 :]]
    return target | {path[0]: inner}
