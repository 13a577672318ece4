"""Applying patches to JSON values: merge patches (RFC 7386), JSON patches (RFC 6902) and strategic merge patches. Pure;
nothing is changed in place, and unpatched parts are shared between the old value and the new one.

A strategic merge patch is a merge patch in which lists that have a key are merged element by element. Each kind's
schema defines the keys of its lists. Implemented are the lists of metadata, conditions, pods, nodes and services; other
lists are replaced whole. The directives `$patch: delete`, `$patch: replace` and `$deleteFromPrimitiveList/…` are
supported; any other one raises `BadPatch`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from store.errors import RcfarmError

_DIRECTIVE = "$patch"
_DELETE_FROM = "$deleteFromPrimitiveList/"
_SETS = frozenset({"finalizers"})  # lists of plain values that are merged as sets
_KEYS: dict[str, tuple[str, ...]] = {  # the first one that an element carries is its key
    "ownerReferences": ("uid",),
    "conditions": ("type",),
    "containers": ("name",),
    "initContainers": ("name",),
    "env": ("name",),
    "volumes": ("name",),
    "volumeMounts": ("mountPath",),
    "volumeDevices": ("devicePath",),
    "ports": ("containerPort", "port"),
    "imagePullSecrets": ("name",),
    "hostAliases": ("ip",),
    "podIPs": ("ip",),
    "addresses": ("type",),
    "topologySpreadConstraints": ("topologyKey",),
}


class BadPatch(RcfarmError, ValueError):
    """A patch that is malformed, or whose paths or tests do not hold."""


def apply_merge_patch(target: Any, patch: Any) -> Any:
    """Apply a patch by RFC 7386: objects are merged, null removes a member, and everything else replaces."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = apply_merge_patch(merged.get(name), value)
    return merged


def apply_json_patch(target: Any, patch: Sequence[Any]) -> Any:
    """Apply a patch by RFC 6902: all operations in order. Raises `BadPatch`."""
    for operation in patch:
        if not isinstance(operation, dict) or not isinstance(operation.get("path"), str):
            raise BadPatch(f"not an operation with a path: {operation!r}")
        path, verb = _pointer(operation["path"]), operation.get("op")
        match verb:
            case "add":
                target = _add(target, path, _value_of(operation))
            case "replace":
                target = _replace(target, path, _value_of(operation))
            case "remove":
                target = _remove(target, path)
            case "move":
                source = _pointer(operation.get("from"))
                target = _add(_remove(target, source), path, _look_up(target, source))
            case "copy":
                target = _add(target, path, _look_up(target, _pointer(operation.get("from"))))
            case "test":
                if _look_up(target, path) != _value_of(operation):
                    raise BadPatch(f"test: {operation['path']!r} has another value")
            case _:
                raise BadPatch(f"unknown operation {verb!r}; use add, remove, replace, move, copy or test")
    return target


def apply_strategic_merge_patch(target: Any, patch: Any) -> Any:
    """Return `target` with the patch applied. Raises `BadPatch`. Nothing is changed in place."""
    if not isinstance(patch, dict):
        return patch
    directive = patch.get(_DIRECTIVE)
    if directive == "replace":
        return _without_directives(patch)
    if directive == "delete":
        return {}
    for name in patch:
        if name.startswith("$") and not name.startswith(_DELETE_FROM):
            raise BadPatch(f"the directive {name}: {patch[name]!r} is not understood")
    merged = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if name.startswith(_DELETE_FROM):
            plain = name.removeprefix(_DELETE_FROM)
            if plain in merged:
                merged[plain] = [each for each in merged[plain] if each not in value]
        elif value is None:
            merged.pop(name, None)
        elif isinstance(value, list):
            merged[name] = _merge_list(name, merged.get(name), value)
        else:
            merged[name] = apply_strategic_merge_patch(merged.get(name), value)
    return merged


def _value_of(operation: dict[str, Any]) -> Any:
    if "value" not in operation:
        raise BadPatch(f"{operation['op']} {operation['path']!r}: the value is missing")
    return operation["value"]


def _pointer(text: Any) -> list[str]:
    """Parse a JSON pointer (RFC 6901)."""
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


def _merge_list(name: str, old: list[Any] | None, patch: list[Any]) -> list[Any]:
    if name in _SETS:
        return _in_order(old or [], {value: value for value in old or ()}, {value: value for value in patch})
    if name not in _KEYS or any(element == {_DIRECTIVE: "replace"} for element in patch):
        return [_without_directives(element) for element in patch if element != {_DIRECTIVE: "replace"}]
    if old is None:
        return [_without_directives(element) for element in patch]
    kept = {_key_of(name, element): element for element in old}
    patched: dict[Any, Any] = {}
    order = list(kept)
    for element in patch:
        key = _key_of(name, element)
        if element.get(_DIRECTIVE) == "delete":
            kept.pop(key, None)
        elif key in kept:
            patched[key] = apply_strategic_merge_patch(kept[key], element)
        else:
            patched[key] = _without_directives(element)
    return _in_order(order, kept, patched)


def _in_order(order: list[Any], kept: dict[Any, Any], patched: dict[Any, Any]) -> list[Any]:
    """Return the patch's elements in its order, merged with the other elements in theirs, as the API server does: an
    old element stays before the patched ones that it preceded, and new elements precede the rest."""
    place = {key: at for at, key in enumerate(order)}
    others = [key for key in order if key in kept and key not in patched]
    merged: list[Any] = []
    for key in patched:
        while others and place[others[0]] < place.get(key, -1):
            merged.append(kept[others.pop(0)])
        merged.append(patched[key])
    return merged + [kept[key] for key in others]


def _key_of(name: str, element: Any) -> Any:
    for key in _KEYS[name]:
        if isinstance(element, dict) and key in element:
            return element[key]
    raise BadPatch(f"{name}: {element!r} does not contain the merge key {' or '.join(_KEYS[name])}")


def _without_directives(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_directives(inner) for name, inner in value.items() if not name.startswith("$")}
    return [_without_directives(inner) for inner in value] if isinstance(value, list) else value
