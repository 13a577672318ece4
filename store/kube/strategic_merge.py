"""Strategic merge patches: like merge patches, but lists of the kinds that have a key are merged element by element.

Which list has which key is part of each kind's schema. Known here are the lists of metadata, conditions, and pods,
nodes and services; other lists are replaced whole. Of the directives, `$patch: delete`, `$patch: replace` and
`$deleteFromPrimitiveList/…` are understood; any other one raises `BadPatch`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from store.kube.patches import BadPatch

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


def apply_strategic_merge_patch(target: Any, patch: Any) -> Any:
    """`target` with the patch applied; raises `BadPatch`. Nothing is changed in place."""
    if not isinstance(patch, dict):
        return patch
    directive = patch.get(_DIRECTIVE)
    if directive == "replace":
        return _without_directives(patch)
    if directive == "delete":
        return {}
    _refuse_others(patch)
    merged = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if name.startswith(_DELETE_FROM):
            _remove_plain_values(merged, name.removeprefix(_DELETE_FROM), value)
        elif value is None:
            merged.pop(name, None)
        elif isinstance(value, list):
            merged[name] = _merge_list(name, merged.get(name), value)
        else:
            merged[name] = apply_strategic_merge_patch(merged.get(name), value)
    return merged


def _refuse_others(patch: dict[str, Any]) -> None:
    for name in patch:
        if name.startswith("$") and not name.startswith(_DELETE_FROM):
            raise BadPatch(f"the directive {name}: {patch[name]!r} is not understood")


def _remove_plain_values(merged: dict[str, Any], name: str, values: list[Any]) -> None:
    if name in merged:
        merged[name] = [value for value in merged[name] if value not in values]


def _merge_list(name: str, old: list[Any] | None, patch: list[Any]) -> list[Any]:
    if name in _SETS:
        return _in_order(old or [], {value: value for value in old or ()}, {value: value for value in patch})
    if name not in _KEYS or any(element == {_DIRECTIVE: "replace"} for element in patch):
        return _all_without_directives(element for element in patch if element != {_DIRECTIVE: "replace"})
    if old is None:
        return _all_without_directives(patch)
    return _merge_by_key(name, old, patch)


def _merge_by_key(name: str, old: list[Any], patch: list[Any]) -> list[Any]:
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
    """Elements of the patch in its order, among them the others in theirs: an old one goes before an element of the
    patch that it was before, and elements that are new go before all that is left. So does the API server."""
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
    return _all_without_directives(value) if isinstance(value, list) else value


def _all_without_directives(values: Iterable[Any]) -> list[Any]:
    return [_without_directives(value) for value in values]
