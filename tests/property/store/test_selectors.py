"""Selectors against a direct reading of the grammar's meaning."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from store.schema.selectors import BadSelector, Selector

keys = st.sampled_from(["a", "b", "in", "notin", "example.org/c"])
values = st.sampled_from(["", "x", "y", "in"])
operators = st.sampled_from(["exists", "absent", "=", "==", "!=", "in", "notin"])
terms = st.tuples(keys, operators, st.lists(values, min_size=2, max_size=3))
labels = st.dictionaries(keys, values)


def _written(term: tuple[str, str, list[str]]) -> str:
    key, operator, values = term
    if operator in ("exists", "absent"):
        return key if operator == "exists" else f"!{key}"
    if operator in ("in", "notin"):
        return f"{key} {operator} ({','.join(values)})"
    return f"{key}{operator}{values[0]}"


def _holds(term: tuple[str, str, list[str]], labels: dict[str, str]) -> bool:
    key, operator, values = term
    match operator:
        case "exists":
            return key in labels
        case "absent":
            return key not in labels
        case "=" | "==":
            return key in labels and labels[key] == values[0]
        case "!=":
            return key not in labels or labels[key] != values[0]
        case "in":
            return key in labels and labels[key] in values
        case _:
            return key not in labels or labels[key] not in values


@given(st.lists(terms, max_size=4), labels)
def test_meaning(written: list[tuple[str, str, list[str]]], labels: dict[str, str]) -> None:
    """A selector matches exactly when each of its terms holds."""
    selector = Selector.parse(",".join(map(_written, written)))
    assert selector.matches(labels) == all(_holds(term, labels) for term in written)
    assert selector.matches(labels) == (not selector.unmet(labels))


@given(st.lists(terms, max_size=4))
def test_canonical_text_is_a_fixed_point(written: list[tuple[str, str, list[str]]]) -> None:
    """Parsing the canonical text gives the same selector, and the order of the terms does not matter."""
    selector = Selector.parse(",".join(map(_written, written)))
    assert Selector.parse(str(selector)) == selector
    assert str(Selector.parse(",".join(map(_written, reversed(written))))) == str(selector)


@given(st.text(alphabet="ab=!,() ><in-/\t", max_size=20))
def test_no_text_widens_to_everything(text: str) -> None:
    """Any text is refused, is blank, or restricts something."""
    try:
        selector = Selector.parse(text)
    except BadSelector:
        return
    assert selector.requirements or not text.strip()
