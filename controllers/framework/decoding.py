"""Reading what people wrote: what an absent value is, and errors in their words instead of msgspec's."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any, NamedTuple

_ERROR = re.compile(r"(?P<what>.*?)(?: - at `(?:key` in `)?\$\.?(?P<path>[^`]*)`)?", re.DOTALL)
_MISMATCH = re.compile(r"Expected `(.*?)(?: \| null)?`, got `(.*)`")
_MISSING = re.compile(r"Object missing required field `(?P<field>.*)`")
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<field>.*)`")
_TYPES = {
    "str": "text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "object": "a mapping",
    "array": "a list",
    "null": "nothing",
}


class Explanation(NamedTuple):
    """`path`: of the field, "" for the whole. `is_unknown`: there is no such field."""

    path: str
    what: str
    is_unknown: bool = False


def without_nulls(value: Any, opaque: Collection[str] = ()) -> Any:
    """A copy in which a null field counts as left out; the fields named `opaque` stay as they are."""
    if isinstance(value, dict):
        return {
            name: field if name in opaque else without_nulls(field, opaque)
            for name, field in value.items()
            if field is not None
        }
    return [without_nulls(item, opaque) for item in value] if isinstance(value, list) else value


def explain(error: Exception) -> Explanation:
    """Which field is wrong, and what with it."""
    found = _ERROR.fullmatch(str(error))
    assert found is not None, "the pattern fits any text"
    path, what = found["path"] or "", found["what"]
    if missing := _MISSING.fullmatch(what):
        return Explanation(_join(path, missing["field"]), "is missing")
    if unknown := _UNKNOWN.fullmatch(what):
        return Explanation(_join(path, unknown["field"]), "there is no such field", is_unknown=True)
    if mismatch := _MISMATCH.fullmatch(what):
        wanted, got = (_TYPES.get(name, name) for name in mismatch.groups())
        return Explanation(path, f"expected {wanted}, got {got}")
    return Explanation(path, what)


def _join(path: str, field: str) -> str:
    return f"{path}.{field}" if path else field
