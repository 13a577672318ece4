"""Computed merge patches (RFC 7386) turn one object into the other, and are empty for equal objects."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from store.kube.api.objects import merge_patch_between
from store.kube.api.patches import apply_merge_patch

_names = st.sampled_from("abc")
_values: st.SearchStrategy[Any] = st.recursive(
    st.integers(0, 2) | st.booleans() | st.lists(st.integers(0, 2), max_size=2),
    lambda inner: st.dictionaries(_names, inner, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(_names, _values, max_size=3)


@given(old=objects, new=objects)
def test_a_patch_between_turns_the_one_into_the_other(old: dict[str, Any], new: dict[str, Any]) -> None:
    """`applying_the_patch_gives_the_new_object`."""
    assert apply_merge_patch(old, merge_patch_between(old, new)) == new


@given(old=objects)
def test_nothing_changes_by_an_empty_patch(old: dict[str, Any]) -> None:
    """`equal_objects_need_no_patch`."""
    assert merge_patch_between(old, old) == {}
