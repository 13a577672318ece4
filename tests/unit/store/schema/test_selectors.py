"""Selectors: the Kubernetes grammar, canonical text as identity, and errors that name the term."""

from __future__ import annotations

import pytest

from store.schema.keys import BadLabel, check_label_key, check_labels
from store.schema.selectors import BadSelector, Selector

LABELS = {"a": "1", "b": "", "zone": "eu", "example.org/role": "web"}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "  ",
        "a",
        "!c",
        "a=1",
        "a==1",
        "a = 1 , b =",
        "b=",
        "a!=2",
        "c!=2",
        "zone in (eu,us)",
        "zone in(eu)",
        "zone notin (us)",
        "c notin (x,y)",
        "b in (,x)",
        "example.org/role=web",
        "a=1,zone in (eu,us),!c,b",
    ],
)
def test_matching_selectors(text: str) -> None:
    """Terms are ANDed; absent keys satisfy `!=` and `notin`; the empty text matches everything."""
    assert Selector.parse(text).matches(LABELS)


@pytest.mark.parametrize(
    "text", ["c", "!a", "a=2", "a!=1", "b!=", "zone in (us)", "zone notin (eu,us)", "c in (x)", "a=1,zone=us", "c="]
)
def test_selectors_that_do_not_match(text: str) -> None:
    """One term that does not hold is enough."""
    assert not Selector.parse(text).matches(LABELS)


def test_canonical_text_is_the_identity() -> None:
    """Spelling and order do not matter: equal selectors are equal keys of a dict and have one text."""
    spellings = ["b in (y,x),a=1,!c", "!c, a==1, b in (x,y,x)", "a=1,a=1,!c,b in ( y , x )"]
    selectors = {Selector.parse(text) for text in spellings}
    assert [str(selector) for selector in selectors] == ["a=1,b in (x,y),!c"]
    assert str(Selector.everything()) == str(Selector.parse("  ")) == ""


@pytest.mark.parametrize(
    ("text", "term", "position"),
    [
        (",", "", 1),
        ("a=1,", "", 5),
        ("a=1,,b=2", "", 5),
        ("a=1,b~2", "b~2", 5),
        ("a=1,  b>2", "b>2", 7),
        ("a b", "a b", 1),
        ("a=1 2", "a=1 2", 1),
        ("x in (a,b", "x in (a,b", 1),
        ("x in ()", "x in ()", 1),
        ("x in (a b)", "x in (a b)", 1),
        ("ok,x in (a),y)", "y)", 13),
        ("x notin a", "x notin a", 1),
        ("-a=1", "-a=1", 1),
        ("a=-1", "a=-1", 1),
        ("Example.org/a=1", "Example.org/a=1", 1),
        ("a/b/c=1", "a/b/c=1", 1),
        ("a=" + "x" * 64, "a=" + "x" * 64, 1),
        ("!", "!", 1),
        ("=1", "=1", 1),
    ],
)
def test_an_invalid_term_raises_and_is_named(text: str, term: str, position: int) -> None:
    """Nothing is dropped; p2 ignored bad terms, which widened the selection to everything."""
    with pytest.raises(BadSelector) as caught:
        Selector.parse(text)
    assert (caught.value.term, caught.value.position) == (term, position)
    assert f"term {term!r} at character {position}" in str(caught.value)


def test_unmet_names_the_terms_that_fail() -> None:
    """Each failing term is named in canonical text."""
    unmet = Selector.parse("a=2,zone=eu,c").unmet(LABELS)
    assert [str(term) for term in unmet] == ["a=2", "c"]


@pytest.mark.parametrize(
    ("text", "value"),
    [("a=1,b", "1"), ("a in (1)", "1"), ("a in (1,2)", None), ("a!=1", None), ("!a", None), ("", None)],
)
def test_required_is_the_only_value_that_can_match(text: str, value: str | None) -> None:
    """An index by that label may be used for the selector exactly then."""
    assert Selector.parse(text).required("a") == value


def test_labels_are_checked_by_the_kubernetes_rules() -> None:
    """A bad key or value is refused with its name and the rule."""
    check_labels({"pool": "web", "example.org/a_b.c": "", "x": "1"})
    for key in ("", "a b", "/a", "a/", "_a", "a" * 64, "ex_ample.org/a"):
        with pytest.raises(BadLabel, match="label key"):
            check_label_key(key)
    with pytest.raises(BadLabel, match="label value 'a b'"):
        check_labels({"pool": "a b"})
