"""Refuse words that plain technical English does not need: `python docs/prose.py [PATH …]`, a part of `make check`.

Read are docstrings, comments and messages (string literals with a space in them) of Python files, and Markdown. Each
hit is printed as `file:line: word: what to write instead`; the exit code is then 1. Quotations pass: text in backticks
or double quotes, fenced blocks of Markdown, and a line that ends with the comment `prose: quoted`.

The model: everything that is not prose is replaced by a barrier character of the same length. So one search over the
whole text finds a phrase across the lines of a docstring, a comment or adjacent literals, and an offset is a line.
"""

from __future__ import annotations

import io
import os
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

REFUSED = {
    r"told": "report, record, notify, log or pass",
    r"tells?\s+of": "report",
    r"anew": "again",
    r"whoever": "the caller, the operator, another process: name the actor",
    r"wish(?:e[sd])?": "desired state; or want",
    r"let\s+go": "release",
    r"may\s+be\s+had": "can be obtained",
    r"is\s+had": "is obtained",
    r"by\s+himself": "alone",
    r"by\s+itself": "alone, automatically; or nothing",
    r"so\s+many": "the number, or N",
    r"meanwhile(?=\s*(?:[.;:!?)\0]|\Z))": "at the same time, since then; or nothing",
    r"is\s+over": "has ended; for a number, exceeds",
    r"there\s+for\s+good": "permanent",
    r"in\s+our\s+eyes": "as far as rcfarm knows; or nothing",
    r"mend(?:s|ed|ing)?": "fix, repair",
    r"hardly\s+meant": "probably a mistake",
    r"typing\s+mistakes?": "typo",
}
MARKER = "prose: quoted"
SKIPPED = frozenset({"site", "build", "dist", "venv", "__pycache__"})  # folders; hidden ones are skipped, too

_CODE, _QUOTE = "\0", "\1"
_SEARCH = re.compile("|".join(rf"\b(?P<w{i}>{each})(?!\w)" for i, each in enumerate(REFUSED)), re.IGNORECASE)
_INSTEAD = dict(zip((f"w{i}" for i in range(len(REFUSED))), REFUSED.values(), strict=True))
_QUOTED = re.compile(
    "|".join(rf"{first}(?:[^{last}\n\0]|\n(?![^\S\n]*\n))*{last}" for first, last in ("``", '""', "“”"))
)
_FENCED = re.compile(r"^[ >]*(```+|~~~+)[^`\n]*\n.*?(?:^[ >]*\1[`~]*[ ]*$|\Z)", re.MULTILINE | re.DOTALL)
_LITERAL = re.compile(r"(?P<open>(?P<prefix>\w*)(?P<quote>\"\"\"|'''|\"|'))(?P<body>.*)(?P=quote)", re.DOTALL)
_DELIMITERS = {getattr(tokenize, name, None) for name in ("FSTRING_START", "FSTRING_END")} - {None}
_MIDDLE = getattr(tokenize, "FSTRING_MIDDLE", None)  # f-strings are tokens in parts from Python 3.12 on


class Hit(NamedTuple):
    """A refused word. `line`: counted from 1, where the word begins."""

    line: int
    word: str
    instead: str


def hits_in_python(source: str) -> list[Hit]:
    """Return the refused words in docstrings, comments and messages of a module."""
    return _hits(source, _prose_of_python(source))


def hits_in_markdown(text: str) -> list[Hit]:
    """Return the refused words in a page."""
    return _hits(text, _FENCED.sub(lambda fenced: _QUOTE * len(fenced[0]), text))


def _hits(source: str, prose: str) -> list[Hit]:
    lines = source.split("\n")
    found = []
    for match in _SEARCH.finditer(_QUOTED.sub(lambda quoted: _QUOTE * len(quoted[0]), prose)):
        line = source.count("\n", 0, match.start()) + 1
        if MARKER not in lines[line - 1] and match.lastgroup is not None:
            found.append(Hit(line, " ".join(match[0].split()), _INSTEAD[match.lastgroup]))
    return found


def _prose_of_python(source: str) -> str:
    """Return a text of the same length in which everything but comments and messages is barriers and white space."""
    starts = [0]
    for line in source.split("\n"):
        starts.append(starts[-1] + len(line) + 1)
    prose = [char if char.isspace() else _CODE for char in source]
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        start, end = (starts[row - 1] + column for row, column in (token.start, token.end))
        text = source[start:end]
        if token.type == tokenize.COMMENT:
            prose[start:end] = text.replace("#", " ")
        elif token.type == tokenize.STRING:
            prose[start:end] = _prose_of_literal(text)
        elif token.type == _MIDDLE:
            prose[start:end] = _unescaped(text) if " " in text else _QUOTE * len(text)
        elif token.type in _DELIMITERS:
            prose[start:end] = " " * len(text)
    return "".join(prose)


def _prose_of_literal(text: str) -> str:
    """Return the literal without its quotes and fields. One that is no prose (a single word, bytes) is all barriers."""
    literal = _LITERAL.fullmatch(text)
    assert literal is not None, text
    prefix, quote, body = literal["prefix"].lower(), literal["quote"], literal["body"]
    if "b" in prefix or (len(quote) == 1 and " " not in body):
        return _CODE * len(text)
    if "r" not in prefix:
        body = _unescaped(body)
    if "f" in prefix:
        body = _without_fields(body)
    return " " * len(literal["open"]) + body + " " * len(quote)


def _unescaped(body: str) -> str:
    return re.sub(r"\\(.)", lambda escape: ' "' if escape[1] == '"' else "  ", body, flags=re.DOTALL)


def _without_fields(body: str) -> str:
    """Replace the replacement fields of an f-string by barriers, except for the messages in them."""
    kept, field = [], ""
    for part in re.findall(r"\{\{|\}\}|.", body, re.DOTALL):
        if not field:
            kept.append("  " if part in ("{{", "}}") else part if part != "{" else "")
            field = part if part == "{" else ""
            continue
        field += part
        if field.count("{") <= field.count("}"):
            kept.append(_QUOTE + _messages_in(field[1:-1]) + _QUOTE)
            field = ""
    return "".join(kept) + _QUOTE * len(field)


def _messages_in(field: str) -> str:
    kept, end = [], 0
    for literal in re.finditer(r"""(['"])((?:(?!\1).)* (?:(?!\1).)*)\1""", field):
        kept.append(_QUOTE * (literal.start() - end) + f" {literal[2]} ")
        end = literal.end()
    return "".join(kept) + _QUOTE * (len(field) - end)


def files_under(paths: Sequence[Path]) -> Iterator[Path]:
    """Yield the Python and Markdown files among and below the paths, in order."""
    for path in paths:
        if path.is_file():
            yield path
        for folder, folders, names in os.walk(path):
            folders[:] = sorted(name for name in folders if name not in SKIPPED and not name.startswith("."))
            yield from (Path(folder, name) for name in sorted(names) if name.endswith((".py", ".md")))


def main(arguments: Sequence[str]) -> int:
    """Print the hits in the given files and folders, by default in the whole repository."""
    root = Path(__file__).resolve().parents[1]
    count = 0
    for path in files_under([Path(argument) for argument in arguments] or [root]):
        text = path.read_text(encoding="utf-8")
        shown = path.relative_to(root) if path.is_relative_to(root) else path
        for hit in hits_in_markdown(text) if path.suffix == ".md" else hits_in_python(text):
            print(f"{shown}:{hit.line}: {hit.word}: {hit.instead}")
            count += 1
    if count:
        print(f"{count} refused words; CONTRIBUTING.md says which words to use", file=sys.stderr)
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
