"""Label selectors in the Kubernetes grammar.

A selector is a comma-separated list of terms, all of which must hold; the empty text selects everything:

    key            the label exists            !key             it does not
    key=value      (or ==) it has the value    key!=value       it has another value, or does not exist
    key in (a,b)   it has one of the values    key notin (a,b)  it has none of them, or does not exist

Invalid text raises `BadSelector`; no term is ever dropped, because that would widen the selection.
`x=1,x=0` selects nothing, and stays writable as text.

Every term is kept as "the label's value, or None when absent, is (or is not) in this set". Equal selectors have equal
canonical text: terms sorted by key, values sorted, `==` written as `=`, and a set of one as an equality.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from store.errors import RcfarmError
from store.schema.keys import check_label_key, check_label_value

_WORD = r"[^\s=!(),<>]+"
_TERM = re.compile(
    rf"""\s*(?:
        !\s*(?P<absent>{_WORD})
      | (?P<key>{_WORD})
        (?: \s*(?P<equality>==?|!=)\s*(?P<value>(?:{_WORD})?)
          | \s+(?P<membership>in|notin)\s*\((?P<values>[^()=!<>]*)\)
        )?
    )\s*""",
    re.VERBOSE,
)
_GRAMMAR = "use key, !key, key=value, key!=value, key in (a,b) or key notin (a,b)"


class BadSelector(RcfarmError, ValueError):
    """Text that is not a selector. `term` is the part at fault; `position` is its first character, counted from 1."""

    def __init__(self, text: str, term: str, position: int, reason: str) -> None:
        self.text = text
        self.term = term
        self.position = position
        super().__init__(f"selector {text!r}: term {term!r} at character {position}: {reason}")


class Requirement(NamedTuple):
    """One term: `labels.get(key) in values` must be equal to `wanted`. None stands for an absent label."""

    key: str
    values: frozenset[str | None]
    wanted: bool

    def __str__(self) -> str:
        if None in self.values:
            return f"!{self.key}" if self.wanted else self.key
        values = sorted(value for value in self.values if value is not None)
        if len(values) == 1:
            return f"{self.key}{'=' if self.wanted else '!='}{values[0]}"
        return f"{self.key} {'in' if self.wanted else 'notin'} ({','.join(values)})"


@dataclass(frozen=True, slots=True)
class Selector:
    """A parsed selector. `str()` is its canonical text, which is also its identity; build one with `Selector.parse`."""

    text: str
    requirements: tuple[Requirement, ...] = field(compare=False, repr=False)

    @classmethod
    def parse(cls, text: str) -> Selector:
        """Read a selector; an empty text is `everything()`. Raises `BadSelector` naming the term at fault."""
        return _parse(text)

    @classmethod
    def everything(cls) -> Selector:
        """Return the selector that matches any labels."""
        return _parse("")

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Return whether every term holds for `labels`."""
        for key, values, wanted in self.requirements:  # noqa: SIM110 (twice as fast as all() here, and it's the hot path)
            if (labels.get(key) in values) is not wanted:
                return False
        return True

    def unmet(self, labels: Mapping[str, str]) -> list[Requirement]:
        """Return the terms that do not hold for `labels`, by key."""
        return [term for term in self.requirements if (labels.get(term.key) in term.values) is not term.wanted]

    def required(self, key: str) -> str | None:
        """Return the only value of a label that can match, or None when no term requires exactly one value."""
        for term in self.requirements:
            if term.key == key and term.wanted and len(term.values) == 1:
                return next(iter(term.values))
        return None

    def __str__(self) -> str:
        return self.text


@lru_cache(maxsize=4096)
def _parse(text: str) -> Selector:
    if not text.strip():
        return Selector("", ())
    requirements: dict[str, Requirement] = {}
    for offset, term in _split(text):
        try:
            requirement = _requirement(term)
        except ValueError as error:
            position = offset + len(term) - len(term.lstrip()) + 1
            raise BadSelector(text, term.strip(), position, str(error)) from None
        requirements[str(requirement)] = requirement
    ordered = sorted(requirements.items(), key=lambda item: (item[1].key, item[0]))
    return Selector(",".join(canonical for canonical, _ in ordered), tuple(each for _, each in ordered))


def _split(text: str) -> Iterator[tuple[int, str]]:
    """Yield the terms with their offsets, cut at the commas that are outside of parentheses."""
    start = depth = 0
    for at, character in enumerate(text):
        if character == "," and depth == 0:
            yield start, text[start:at]
            start = at + 1
        depth += (character == "(") - (character == ")" and depth > 0)
    yield start, text[start:]


def _requirement(term: str) -> Requirement:
    """Read one term. Raises `ValueError` with the reason."""
    if not term.strip():
        raise ValueError("empty; remove the comma")
    found = _TERM.fullmatch(term)
    if found is None:
        raise ValueError(
            "a parenthesis is not closed" if term.count("(") > term.count(")") else f"not a term; {_GRAMMAR}"
        )
    key = found["absent"] or found["key"]
    check_label_key(key)
    if found["equality"]:
        return Requirement(key, _values([found["value"]]), found["equality"] != "!=")
    if found["membership"]:
        if not found["values"].strip():
            raise ValueError("the list of values is empty; name at least one")
        return Requirement(key, _values(found["values"].split(",")), found["membership"] == "in")
    return Requirement(key, frozenset([None]), found["absent"] is not None)


def _values(words: list[str]) -> frozenset[str | None]:
    values = [word.strip() for word in words]
    for value in values:
        check_label_value(value)
    return frozenset(values)
