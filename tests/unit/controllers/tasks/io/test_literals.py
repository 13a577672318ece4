"""The JSON form of inputs and outputs."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from controllers.tasks.api.data import Blob
from controllers.tasks.io.literals import BadLiteral, decode_literals, digest_of, encode_literals

VALUES = {
    "z": [1, 1.5, True, None, "é"],
    "when": datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC),
    "long": timedelta(days=2, microseconds=1),
    "file": {"inner": Blob("s3://b/k", "csv")},
    "plain": {"literal": "else"},
}


def test_values_come_back() -> None:
    assert decode_literals(encode_literals(VALUES)) == VALUES


def test_the_document_is_readable() -> None:
    document = encode_literals({"b": Blob("s3://b/k", hash="h"), "a": timedelta(seconds=1.5)})
    assert document == (
        b'{"a":{"literal":"duration","seconds":1.5},"b":{"format":"","hash":"h","literal":"blob","uri":"s3://b/k"}}'
    )


def test_a_time_of_another_zone_is_the_same_moment() -> None:
    elsewhere = datetime(2026, 1, 2, 5, tzinfo=timezone(timedelta(hours=2)))
    assert digest_of({"t": elsewhere}) == digest_of({"t": datetime(2026, 1, 2, 3, tzinfo=UTC)})


@pytest.mark.parametrize(
    "value",
    [float("nan"), float("inf"), {1: 2}, object(), {"a": [b"x"]}, datetime(2026, 1, 1), "\ud800", [[]] * 3 + [{3}]],
)
def test_what_has_no_json_form_is_refused(value: Any) -> None:
    with pytest.raises(BadLiteral):
        encode_literals({"name": value})


def test_the_error_names_the_place() -> None:
    with pytest.raises(BadLiteral, match=r"a\.b\[1\]: a set is no input or output"):
        encode_literals({"a": {"b": [1, {2}]}})


@pytest.mark.parametrize(
    "document",
    [
        b"",
        b"[]",
        b"{",
        b"\xff",
        b'{"a":' * 300 + b"1" + b"}" * 300,
        b'{"a":{"literal":"datetime","value":"yesterday"}}',
        b'{"a":{"literal":"datetime","value":"2026-01-01T00:00:00"}}',
        b'{"a":{"literal":"duration","seconds":1e300}}',
        b'{"a":{"literal":"blob"}}',
    ],
)
def test_a_broken_document_is_one_error(document: bytes) -> None:
    with pytest.raises(BadLiteral):
        decode_literals(document)


def test_values_nested_without_end_are_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(BadLiteral, match="nested"):
        encode_literals({"a": value})


def test_a_hash_alone_identifies_a_blob() -> None:
    assert digest_of({"f": Blob("s3://a", hash="h")}) == digest_of({"f": Blob("s3://b", "csv", hash="h")})
    assert digest_of({"f": Blob("s3://a", hash="h")}) != digest_of({"f": Blob("s3://a", hash="i")})
    assert digest_of({"f": Blob("s3://a")}) != digest_of({"f": Blob("s3://b")})
    assert digest_of({"n": 1}) != digest_of({"n": 1.0})
    assert digest_of({"n": [1, 2]}) != digest_of({"n": [2, 1]})
