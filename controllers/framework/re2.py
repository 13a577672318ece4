r"""RE2 patterns, compiled by Python's `re`: patterns written for frameworkcontroller mean the same here.

The syntaxes look alike but differ in details: RE2's classes are ASCII, its `$` is only the end of the text, its flags
may stand anywhere, `[[:alpha:]]` and `\Q…\E` have a meaning, `{,3}` has none, and references and look-around do not
exist. Each atom is translated on its own and carries its flags with it.

What can't be translated is refused: Unicode classes (`\pL`) and single bytes (`\C`). Python's matching is not
linear in the length of the text, so a pattern such as `(a+)+$` can be slow; patterns come from the operator's own
configuration and texts are short. Source: the syntax page of github.com/google/re2.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

Ranges = list[tuple[int, int]]

_LAST = 0x10FFFF
_DIGIT: Ranges = [(0x30, 0x39)]
_SPACE: Ranges = [(0x09, 0x0A), (0x0C, 0x0D), (0x20, 0x20)]
_UPPER: Ranges = [(0x41, 0x5A)]
_LOWER: Ranges = [(0x61, 0x7A)]
_WORD: Ranges = [*_DIGIT, *_UPPER, (0x5F, 0x5F), *_LOWER]
_PERL = {"d": _DIGIT, "s": _SPACE, "w": _WORD}
_POSIX: dict[str, Ranges] = {
    "alnum": [*_DIGIT, *_UPPER, *_LOWER],
    "alpha": [*_UPPER, *_LOWER],
    "ascii": [(0x00, 0x7F)],
    "blank": [(0x09, 0x09), (0x20, 0x20)],
    "cntrl": [(0x00, 0x1F), (0x7F, 0x7F)],
    "digit": _DIGIT,
    "graph": [(0x21, 0x7E)],
    "lower": _LOWER,
    "print": [(0x20, 0x7E)],
    "punct": [(0x21, 0x2F), (0x3A, 0x40), (0x5B, 0x60), (0x7B, 0x7E)],
    "space": [(0x09, 0x0D), (0x20, 0x20)],
    "upper": _UPPER,
    "word": _WORD,
    "xdigit": [*_DIGIT, (0x41, 0x46), (0x61, 0x66)],
}
_CONTROL = {"a": 0x07, "f": 0x0C, "t": 0x09, "n": 0x0A, "r": 0x0D, "v": 0x0B}
_ASSERTIONS = {"A": r"\A", "z": r"\Z", "b": r"(?a:\b)", "B": r"(?a:\B)"}
_CODE = re.compile(r"x\{(?P<braced>[0-9A-Fa-f]+)\}|x(?P<hex>[0-9A-Fa-f]{2})|(?P<octal>0[0-7]{0,2}|[1-7][0-7]{1,2})")
_GROUP = re.compile(r"\?(?:P?<(?P<name>\w+)>|(?P<on>[imsU]*)(?:-(?P<off>[imsU]+))?(?P<end>[:)]))")
_REPEAT = re.compile(r"[*+?]|\{\d+(?:,\d*)?\}")
_QUOTED = re.compile(r"Q(.*?)(?:\\E|\Z)", re.DOTALL)
_POSIX_CLASS = re.compile(r"\[:(?P<negated>\^?)(?P<name>\w+):\]")


def compile_re2(pattern: str) -> re.Pattern[str]:
    """Compile for an unanchored search. Raises `ValueError`, which names what is not RE2 or not supported."""
    try:
        return re.compile(_Translation(pattern).translate())
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"not a valid regular expression: {error}") from error


class _Translation:
    """Reads a pattern from left to right. `flags` are those of the innermost open group."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.at = 0
        self.flags: frozenset[str] = frozenset()
        self.outer: list[frozenset[str]] = []

    def translate(self) -> str:
        """Translate each parenthesis, each assertion, and each atom with its repetition."""
        parts: list[str] = []
        while self.at < len(self.pattern):
            char = self._take()
            match char:
                case "(":
                    part = self._open()
                case ")":
                    if not self.outer:
                        raise ValueError(f"')' at {self.at - 1} closes nothing")
                    self.flags = self.outer.pop()
                    part = self._repeated(")")
                case "|":
                    part = "|"
                case "^":
                    part = "(?m:^)" if "m" in self.flags else r"\A"
                case "$":
                    part = "(?m:$)" if "m" in self.flags else r"\Z"
                case ".":
                    part = self._repeated("(?s:.)" if "s" in self.flags else r"[^\n]")
                case "[":
                    part = self._repeated(self._folded(self._class()))
                case "\\":
                    if quoted := self._match(_QUOTED):
                        literals = [self._folded(re.escape(literal)) for literal in quoted[1]]
                        part = "".join([*literals[:-1], *(self._repeated(last) for last in literals[-1:])])
                    elif self.pattern[self.at : self.at + 1] in _ASSERTIONS:
                        part = _ASSERTIONS[self._take()]
                    else:
                        part = self._repeated(self._folded(_set(self._escaped())))
                case "*" | "+" | "?":
                    raise ValueError(f"nothing to repeat before {char!r} at {self.at - 1}")
                case _:
                    part = self._repeated(self._folded(re.escape(char)))
            parts.append(part)
        if self.outer:
            raise ValueError("a '(' is not closed")
        return "".join(parts)

    def _take(self) -> str:
        if self.at >= len(self.pattern):
            raise ValueError("the pattern ends early")
        self.at += 1
        return self.pattern[self.at - 1]

    def _match(self, expression: re.Pattern[str]) -> re.Match[str] | None:
        found = expression.match(self.pattern, self.at)
        if found:
            self.at = found.end()
        return found

    def _folded(self, atom: str) -> str:
        return f"(?i:{atom})" if "i" in self.flags else atom

    def _repeated(self, atom: str) -> str:
        found = self._match(_REPEAT)
        if found is None:
            return atom
        lazy = self.pattern.startswith("?", self.at)
        self.at += lazy
        if _REPEAT.match(self.pattern, self.at):
            raise ValueError(f"repeated twice at {self.at}")
        return f"{atom}{found[0]}{'?' if lazy != ('U' in self.flags) else ''}"

    def _open(self) -> str:
        if not self.pattern.startswith("?", self.at):
            self.outer.append(self.flags)
            return "("
        start = self.at - 1
        found = self._match(_GROUP)
        if found is None:
            raise ValueError(f"{self.pattern[start : start + 4]!r} at {start} is not supported by RE2")
        if found["name"]:
            self.outer.append(self.flags)
            return f"(?P<{found['name']}>"
        flags = (self.flags | set(found["on"])) - set(found["off"] or "")
        if found["end"] == ")":  # for the rest of the group that it is in
            self.flags = flags
            return ""
        self.outer.append(self.flags)
        self.flags = flags
        return "(?:"

    def _escaped(self) -> Ranges:
        """Read what follows a backslash, inside or outside of a class. Return the characters that it matches."""
        if code := self._match(_CODE):
            value = int(code["octal"], 8) if code["octal"] else int(code["braced"] or code["hex"], 16)
            if value > _LAST:
                raise ValueError(f"\\{code[0]} is not a character")
            return [(value, value)]
        char = self._take()
        if char in _CONTROL:
            return [(_CONTROL[char], _CONTROL[char])]
        if char.lower() in _PERL:
            ranges = _PERL[char.lower()]
            return ranges if char.islower() else _complement(ranges)
        if char.isalnum() and char.isascii():
            raise ValueError(f"\\{char} at {self.at - 2} is not supported")
        return [(ord(char), ord(char))]

    def _class(self) -> str:
        negated = self.pattern.startswith("^", self.at)
        self.at += negated
        ranges: Ranges = []
        first = True
        while first or not self.pattern.startswith("]", self.at):
            first = False
            if posix := self._match(_POSIX_CLASS):
                if posix["name"] not in _POSIX:
                    raise ValueError(f"{posix[0]} is not a class of characters")
                named = _POSIX[posix["name"]]
                ranges += _complement(named) if posix["negated"] else named
                continue
            low = self._class_char()
            if not self.pattern.startswith("-", self.at) or self.pattern.startswith("-]", self.at):
                ranges += low
                continue
            self.at += 1
            high = self._class_char()
            if len(low) > 1 or len(high) > 1 or high[0][1] < low[0][0]:
                raise ValueError(f"a bad range of characters ends at {self.at}")
            ranges.append((low[0][0], high[0][1]))
        self.at += 1
        return _set(_complement(ranges) if negated else ranges)

    def _class_char(self) -> Ranges:
        char = self._take()
        return self._escaped() if char == "\\" else [(ord(char), ord(char))]


def _complement(ranges: Ranges) -> Ranges:
    missing: Ranges = []
    after = 0
    for low, high in sorted(ranges):
        if low > after:
            missing.append((after, low - 1))
        after = max(after, high + 1)
    return [*missing, (after, _LAST)] if after <= _LAST else missing


def _set(ranges: Sequence[tuple[int, int]]) -> str:
    if not ranges:
        return r"(?!)"  # the complement of everything
    items = (f"\\U{low:08x}" if low == high else f"\\U{low:08x}-\\U{high:08x}" for low, high in ranges)
    return f"[{''.join(items)}]"
