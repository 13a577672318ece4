"""Field selectors: comma-separated `path=value`, `path==value` or `path!=value`, all of which must hold.

A field that is absent has the empty value. Which paths may be asked for depends on the kind; the server refuses others.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from store.kube.objects import Object

_TERM = re.compile(r"\s*(?P<path>[^=!,\s]+)\s*(?P<operator>==?|!=)\s*(?P<value>[^=!,]*?)\s*")


class BadFieldSelector(ValueError):
    """Text that is not a field selector, or that asks for a path that can't be selected by."""


class FieldTerm(NamedTuple):
    """The field at `path` must have the value, or with `wanted` False must not have it."""

    path: str
    value: str
    wanted: bool


@dataclass(frozen=True, slots=True)
class FieldSelector:
    """Build one with `parse`."""

    terms: tuple[FieldTerm, ...]

    @classmethod
    def parse(cls, text: str, *, allowed: Collection[str]) -> FieldSelector:
        """Read a selector; the empty text selects everything. Raises `BadFieldSelector`."""
        return cls(tuple(_terms(text, allowed)))

    def matches(self, obj: Object) -> bool:
        return all((field_at(obj, term.path) == term.value) is term.wanted for term in self.terms)


def _terms(text: str, allowed: Collection[str]) -> Iterator[FieldTerm]:
    for part in text.split(",") if text.strip() else ():
        found = _TERM.fullmatch(part)
        if found is None:
            raise BadFieldSelector(f"field selector {text!r}: {part!r} is not a term; use path=value or path!=value")
        if found["path"] not in allowed:
            choice = ", ".join(sorted(allowed))
            raise BadFieldSelector(f"field selector {text!r}: no selection by {found['path']!r}; use one of {choice}")
        yield FieldTerm(found["path"], found["value"], found["operator"] != "!=")


def field_at(obj: Object, path: str) -> str:
    """The value at a dotted path as text, "" when it is absent."""
    value: object = obj
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    if isinstance(value, bool):
        return "true" if value else "false"
    return "" if value is None else str(value)
