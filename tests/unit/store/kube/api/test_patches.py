"""Patches of JSON values, and field selectors."""

from __future__ import annotations

from typing import Any

import pytest

from store.kube.api.patches import BadPatch, apply_json_patch, apply_merge_patch, apply_strategic_merge_patch
from store.kube.memory.state import BadFieldSelector, FieldSelector


@pytest.mark.parametrize(
    ("target", "patch", "result"),
    [
        ({"a": "b"}, {"a": "c"}, {"a": "c"}),
        ({"a": "b"}, {"b": "c"}, {"a": "b", "b": "c"}),
        ({"a": "b", "b": "c"}, {"a": None}, {"b": "c"}),
        ({"a": ["b"]}, {"a": "c"}, {"a": "c"}),
        ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
        ({"a": [{"b": "c"}]}, {"a": [1]}, {"a": [1]}),
        (["a", "b"], ["c"], ["c"]),
        ({"e": None}, {"a": 1}, {"e": None, "a": 1}),
        ([1, 2], {"a": "b", "c": None}, {"a": "b"}),
        ({}, {"a": {"bb": {"ccc": None}}}, {"a": {"bb": {}}}),
    ],
)
def test_merge_patch(target: Any, patch: Any, result: Any) -> None:
    """The cases of RFC 7386's appendix."""
    assert apply_merge_patch(target, patch) == result


@pytest.mark.parametrize(
    ("target", "operation", "result"),
    [
        ({"a": 1}, {"op": "add", "path": "/b", "value": 2}, {"a": 1, "b": 2}),
        ({"a": [1, 3]}, {"op": "add", "path": "/a/1", "value": 2}, {"a": [1, 2, 3]}),
        ({"a": [1]}, {"op": "add", "path": "/a/-", "value": 2}, {"a": [1, 2]}),
        ({"a": 1}, {"op": "add", "path": "", "value": 2}, 2),
        ({"a": {"b": 1}}, {"op": "remove", "path": "/a/b"}, {"a": {}}),
        ({"a": [1, 2]}, {"op": "remove", "path": "/a/0"}, {"a": [2]}),
        ({"a/b": {"c~d": 1}}, {"op": "replace", "path": "/a~1b/c~0d", "value": 2}, {"a/b": {"c~d": 2}}),
        ({"a": [{"b": 1}]}, {"op": "replace", "path": "/a/0/b", "value": 2}, {"a": [{"b": 2}]}),
        ({"a": {"b": 1}, "c": {}}, {"op": "move", "from": "/a/b", "path": "/c/d"}, {"a": {}, "c": {"d": 1}}),
        ({"a": 1}, {"op": "copy", "from": "/a", "path": "/b"}, {"a": 1, "b": 1}),
        ({"a": 1}, {"op": "test", "path": "/a", "value": 1}, {"a": 1}),
    ],
)
def test_json_patch(target: Any, operation: Any, result: Any) -> None:
    """Each operation of RFC 6902; nothing is changed in place."""
    before = repr(target)
    assert apply_json_patch(target, [operation]) == result
    assert repr(target) == before


@pytest.mark.parametrize(
    "operation",
    [
        {"op": "remove", "path": "/none"},
        {"op": "replace", "path": "/none", "value": 1},
        {"op": "add", "path": "/none/x", "value": 1},
        {"op": "add", "path": "/list/9", "value": 1},
        {"op": "add", "path": "/text/x", "value": 1},
        {"op": "add", "path": "/list/-1", "value": 1},
        {"op": "add", "path": "x", "value": 1},
        {"op": "add", "path": "/x"},
        {"op": "move", "path": "/x"},
        {"op": "test", "path": "/text", "value": 1},
        {"op": "frob", "path": "/text"},
        {"path": 1},
        "text",
    ],
)
def test_json_patches_that_do_not_apply(operation: Any) -> None:
    """A path that is not there, a test that fails, or no operation at all."""
    with pytest.raises(BadPatch):
        apply_json_patch({"list": [1], "text": "x"}, [operation])


@pytest.mark.parametrize(
    ("target", "patch", "result"),
    [
        (
            {"env": [{"name": "a", "value": "1"}]},
            {"env": [{"name": "b"}]},
            [{"name": "b"}, {"name": "a", "value": "1"}],
        ),
        ({"env": [{"name": "a", "x": 1}]}, {"env": [{"name": "a", "y": 2}]}, [{"name": "a", "x": 1, "y": 2}]),
        ({"env": [{"name": "a"}]}, {"env": [{"name": "a", "$patch": "delete"}]}, []),
        ({"env": [{"name": "a"}]}, {"env": [{"name": "b"}, {"$patch": "replace"}]}, [{"name": "b"}]),
        ({}, {"env": [{"name": "a", "$patch": "delete"}]}, [{"name": "a"}]),
        ({"args": ["a"]}, {"args": ["b"]}, ["b"]),
        ({"finalizers": ["a", "b", "c", "d"]}, {"finalizers": ["d", "x", "b"]}, ["a", "c", "d", "x", "b"]),
        ({"finalizers": ["a"]}, {"finalizers": ["b", "a"]}, ["b", "a"]),
        ({"finalizers": ["a", "b"]}, {"$deleteFromPrimitiveList/finalizers": ["a"]}, ["b"]),
        (
            {"ports": [{"port": 1}, {"port": 2}]},
            {"ports": [{"port": 2, "name": "x"}]},
            [{"port": 1}, {"port": 2, "name": "x"}],
        ),
    ],
)
def test_strategic_merge_patch_of_lists(target: Any, patch: Any, result: Any) -> None:
    """Lists with a key are merged by it, new elements first; others are replaced."""
    merged = apply_strategic_merge_patch(target, patch)
    assert next(iter(merged.values())) == result


def test_strategic_merge_patch_of_maps() -> None:
    """Maps are merged, null removes, and directives replace or empty a map."""
    target = {"a": {"x": 1, "y": 2}, "b": {"x": 1}, "c": {"x": 1}, "d": 1}
    patch = {"a": {"y": None}, "b": {"$patch": "replace", "z": 3}, "c": {"$patch": "delete"}, "d": None}
    assert apply_strategic_merge_patch(target, patch) == {"a": {"x": 1}, "b": {"z": 3}, "c": {}}


@pytest.mark.parametrize("patch", [{"env": [{"value": "x"}]}, {"$retainKeys": ["a"]}, {"$setElementOrder/env": []}])
def test_strategic_merge_patches_that_are_not_understood(patch: Any) -> None:
    """An element without its key, and directives that are not implemented, are refused, never ignored."""
    with pytest.raises(BadPatch):
        apply_strategic_merge_patch({"env": [{"name": "a"}]}, patch)


def test_field_selectors() -> None:
    """All terms must hold; absent fields are empty, and booleans are spelled as in JSON."""
    allowed = ("spec.nodeName", "spec.unschedulable")
    obj = {"spec": {"nodeName": "n1", "unschedulable": True}}
    for text, matches in (
        ("", True),
        ("spec.nodeName=n1", True),
        ("spec.nodeName==n1, spec.unschedulable=true", True),
        ("spec.nodeName!=n1", False),
        ("spec.nodeName=n1,spec.unschedulable=false", False),
    ):
        assert FieldSelector.parse(text, allowed=allowed).matches(obj) is matches
    assert FieldSelector.parse("spec.nodeName=", allowed=allowed).matches({})
    for text in ("spec.other=1", "spec.nodeName", "spec.nodeName=a=b", ","):
        with pytest.raises(BadFieldSelector):
            FieldSelector.parse(text, allowed=allowed)
