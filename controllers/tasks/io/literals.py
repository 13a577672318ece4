"""The JSON form of inputs and outputs, and their digest.

A document is one JSON object, a value for each name. JSON values stand for themselves. Three kinds of object stand for
what JSON lacks, recognized by their field `literal`:

    {"literal": "datetime", "value": "2026-01-01T00:00:00Z"}                        RFC 3339, with its zone
    {"literal": "duration", "seconds": 1.5}
    {"literal": "blob", "uri": "s3://bucket/key", "format": "csv", "hash": "5f0c…"}   format and hash are optional

An object whose `literal` is another word is plain data.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from controllers.tasks.api.data import Blob, Literals
from controllers.tasks.api.errors import BadConfig
from store.decoding import MAX_DEPTH, Undecodable, converted, from_json, json_decoder

_KINDS = frozenset({"datetime", "duration", "blob"})
_encoder = msgspec.json.Encoder(order="sorted")


class _Moment(msgspec.Struct, frozen=True):
    value: datetime


class _Duration(msgspec.Struct, frozen=True):
    seconds: float


class BadLiteral(BadConfig):
    """An input or output that has no JSON form, or a document that is none; the text names the place."""


def encode_literals(values: Literals) -> bytes:
    """Return the document. Equal values give equal bytes in whichever order they come. Raises `BadLiteral`."""
    return _encode(values, hashed=False)


def decode_literals(document: bytes | str) -> dict[str, Any]:
    """Return the values of a document. Raises `BadLiteral`."""
    try:
        plain = from_json(json_decoder(dict[str, Any]), document)
    except Undecodable as error:
        raise BadLiteral(f"not a JSON object of values by name: {error}") from None
    return literals_of(plain)


def literals_of(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a decoded document. Raises `BadLiteral`."""
    return {name: _typed(value, name) for name, value in plain.items()}


def digest_of(values: Literals) -> str:
    """Return the SHA-256 of the values, as hexadecimal digits. The order of names does not matter, at any depth. A blob
    with a hash counts as that hash alone, so that a copy elsewhere is the same input. Raises `BadLiteral`."""
    return hashlib.sha256(_encode(values, hashed=True)).hexdigest()


def _encode(values: Literals, *, hashed: bool) -> bytes:
    plain = _plain(values, "", hashed, MAX_DEPTH)
    try:
        return _encoder.encode(plain)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:  # surrogates, integers beyond JSON's
        raise BadLiteral(f"the values can't be written as JSON: {error}") from None


def _plain(value: Any, place: str, hashed: bool, levels: int) -> Any:
    """Return the JSON form of a value. `place`: its path, for errors."""
    if levels < 1:
        raise BadLiteral(f"{place[:80]}…: nested more than {MAX_DEPTH} levels deep")
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise BadLiteral(f"{place}: {value} has no JSON form")
        return value
    if isinstance(value, Mapping):
        if wrong := [name for name in value if not isinstance(name, str)]:
            raise BadLiteral(f"{place or 'the values'}: the name {wrong[0]!r:.80} is no text")
        return {name: _plain(each, f"{place}.{name}".lstrip("."), hashed, levels - 1) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each, f"{place}[{at}]", hashed, levels - 1) for at, each in enumerate(value)]
    if isinstance(value, datetime):
        if value.utcoffset() is None:
            raise BadLiteral(f"{place}: the time {value} has no zone")
        return {"literal": "datetime", "value": value.astimezone(UTC).isoformat().replace("+00:00", "Z")}
    if isinstance(value, timedelta):
        return {"literal": "duration", "seconds": value.total_seconds()}
    if isinstance(value, Blob):
        if hashed and value.hash:
            return {"literal": "hash", "hash": value.hash}
        return msgspec.to_builtins(value)
    raise BadLiteral(f"{place}: a {type(value).__name__} is no input or output")


def _typed(value: Any, place: str) -> Any:
    """Return the value that a JSON value stands for."""
    if isinstance(value, list):
        return [_typed(each, f"{place}[{at}]") for at, each in enumerate(value)]
    if not isinstance(value, dict):
        return value
    kind = value.get("literal")
    if not isinstance(kind, str) or kind not in _KINDS:
        return {name: _typed(each, f"{place}.{name}") for name, each in value.items()}
    try:
        if kind == "blob":
            return converted(value, Blob)
        if kind == "duration":
            return timedelta(seconds=converted(value, _Duration).seconds)
        moment = converted(value, _Moment).value
        if moment.utcoffset() is None:
            raise Undecodable("the time has no zone")
        return moment.astimezone(UTC)
    except (Undecodable, OverflowError) as error:
        raise BadLiteral(f"{place}: not a {kind}: {error}") from None
