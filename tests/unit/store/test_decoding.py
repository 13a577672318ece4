"""What is wrong with a value, in words of the caller's; YAML as nodes."""

from __future__ import annotations

from datetime import date
from typing import Any

import msgspec
import pytest
import yaml

from store.decoding import (
    MAX_DEPTH,
    NotYaml,
    Problem,
    Undecodable,
    converted,
    from_json,
    json_decoder,
    plain_yaml_documents,
    problem_of,
    without_nulls,
    yaml_documents,
    yaml_node,
)


class Part(msgspec.Struct, forbid_unknown_fields=True):
    """A part of the value."""

    size: int
    names: list[str] = []


class Whole(msgspec.Struct):
    """The value."""

    parts: list[Part]


@pytest.mark.parametrize(
    ("value", "field", "what"),
    [
        ([], "", "expected a mapping, got a list"),
        ({}, "parts", "is missing"),
        ({"parts": [{}]}, "parts[0].size", "is missing"),
        ({"parts": [{"size": "x"}]}, "parts[0].size", "expected a whole number, got text"),
        ({"parts": [{"size": 1, "names": [True]}]}, "parts[0].names[0]", "expected text, got true or false"),
        ({"parts": [{"size": 1, "colour": 2}]}, "parts[0].colour", "there is no such field"),
    ],
)
def test_a_problem_names_the_field(value: Any, field: str, what: str) -> None:
    """The path of the field, and the problem in YAML's terms."""
    with pytest.raises(Undecodable) as caught:
        converted(value, Whole)
    problem = problem_of(caught.value)
    assert (problem.field, problem.what) == (field, what)


def test_any_message_is_a_problem() -> None:
    """One that msgspec did not write is passed on."""
    assert problem_of(ValueError("too\nlate")) == Problem("", "too\nlate")
    assert problem_of(ValueError("too late")).what == "too late"


def test_json_of_a_type() -> None:
    """The decoder of a type is made once; broken text and a wrong type fail alike."""
    assert json_decoder(Part) is json_decoder(Part)
    assert from_json(json_decoder(Part), b'{"size": 1}') == Part(1)
    for text in (b"{", b"\xff", b'{"size": "\xff"}', b"[" * 5000, b"[]"):
        with pytest.raises(Undecodable):
            from_json(json_decoder(Part), text)


def test_depth_is_bounded_on_request() -> None:
    """A caller whose type bounds the depth can do without the search for brackets."""
    text = b"[" * 300 + b"]" * 300
    with pytest.raises(Undecodable, match="nested more than 200 levels deep"):
        from_json(json_decoder(Any), text)
    assert from_json(json_decoder(Any), text, check_depth=False)


def test_null_fields_are_left_out() -> None:
    """At any depth, but not in the fields named."""
    value = {"a": None, "b": [{"c": None, "d": 1}, None], "template": {"e": None}}
    assert without_nulls(value, {"template"}) == {"b": [{"d": 1}, None], "template": {"e": None}}


def test_documents_have_nodes_and_values() -> None:
    """The nodes know their lines."""
    found = list(yaml_documents("a: 1\n---\n- b\n"))
    assert [node.start_mark.line for node, _ in found] == [0, 2]
    assert [value_of() for _, value_of in found] == [{"a": 1}, ["b"]]
    for text in ("a: [", "a: 2001-99-99", "[1]: 2"):
        with pytest.raises(NotYaml, match="not valid YAML: "):
            [value_of() for _, value_of in yaml_documents(text)]


def test_plain_documents_have_lines_and_values() -> None:
    """A text with anything unusual, or with an error, is left to the reader that knows all of YAML."""
    text = "a: 1\n---\n# b\nb: [yes, 'no', {c: ~}]\nd: 2001-12-24\n"
    second = {"b": [True, "no", {"c": None}], "d": date(2001, 12, 24)}
    assert plain_yaml_documents(text) == [(1, {"a": 1}), (4, second)]
    assert plain_yaml_documents("# nothing\n") == []
    for other in (
        "- a",
        "a: &a 1",
        "a: !!str 1",
        "<<: {a: 1}",
        "1: 2",
        "{a: 1, a: 2}",
        "[a]: 1",
        "a: [",
        "a: 2001-99-99",
    ):
        assert plain_yaml_documents(other) is None, other
    assert plain_yaml_documents("{a: [1, 2]}", max_values=5) == [(1, {"a": [1, 2]})]
    assert plain_yaml_documents("{a: [1, 2]}", max_values=4) is None
    assert plain_yaml_documents("a: " + "[" * MAX_DEPTH + "]" * MAX_DEPTH) is None


def test_a_single_document_has_one_node() -> None:
    """None for an empty text; a second document is an error."""
    node = yaml_node("a: 1")
    assert isinstance(node, yaml.MappingNode)
    assert yaml_node("") is None
    for text in ("a: 1\n---\nb: 2", "a: ["):
        with pytest.raises(NotYaml, match="not valid YAML: line "):
            yaml_node(text)
    with pytest.raises(Undecodable, match="more than 2 values"):
        yaml_node("[1, 2]", max_values=2)
