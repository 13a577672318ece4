"""Tests of the form of secrets."""

from __future__ import annotations

import pytest

from store.schema.secrets import BadVariables, parse_variables


def test_lines_are_variables() -> None:
    """Quotes around a whole value go; nothing else is taken away, expanded or escaped."""
    content = b"# comment\n\nA=1\n B = two words \nC='#x'\nD=\"$A\\n\"\nE=\nF=a=b\nG='\nH=1\r\nI=\xc3\xa9"
    assert parse_variables(content) == {
        "A": "1",
        "B": " two words ",
        "C": "#x",
        "D": "$A\\n",
        "E": "",
        "F": "a=b",
        "G": "'",
        "H": "1",
        "I": "é",
    }


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"A=1\nsecret", "line 2: write NAME=value"),
        (b"=secret", "line 1: write NAME=value"),
        (b"1A=secret", "line 1: write NAME=value"),
        (b"A B=secret", "line 1: write NAME=value"),
        (b"A=1\n\nA=secret", "line 3: A is given twice"),
        (b"A=secret\0", "line 1: has a NUL character"),
        (b"A=\xff secret", "not UTF-8 text"),
        (b"A=secret" + b"x" * 65536, "more than 65536 bytes"),
    ],
)
def test_an_invalid_line_is_named_and_not_shown(content: bytes, message: str) -> None:
    with pytest.raises(BadVariables, match=message) as failure:
        parse_variables(content)
    assert "secret" not in str(failure.value)
