"""The documents of an operator's YAML file, with the line of every field, for messages such as `FILE:7: retries: …`.

Unknown and repeated fields are refused.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

from rcfarm.operations.errors import BadInput
from store.decoding import MAX_FILE_VALUES, Undecodable, converted, plain_yaml_documents, problem_of, yaml_documents

if TYPE_CHECKING:
    import yaml  # takes 15 ms to import; commands that read no file must not pay

Path = tuple[str, ...]
T = TypeVar("T")

STANDARD_INPUT = "standard input"  # the name of a file given as "-"
ANY = "…"  # stands for any one step of a path


class BadFile(BadInput):
    """A file that can't be applied; the message begins with FILE:LINE."""


class Source:
    """One document's place. `at`: "FILE:LINE" of its beginning. `argument`: what an operator writes after -f for the
    file. `lines` returns the line of each path; it is called when the first error needs it."""

    def __init__(self, name: str, line: int, lines: Callable[[], Mapping[Path, int]]) -> None:
        self.name = name
        self.at = f"{name}:{line}"
        self.argument = "-" if name == STANDARD_INPUT else name
        self._lines = lines

    def error(self, message: str, pattern: Path = ()) -> BadFile:
        """Return the error, at the line of the first path that matches the pattern, or of the nearest one above it."""
        for length in range(len(pattern), -1, -1):
            for path, line in self._lines().items():
                if len(path) == length and all(
                    wanted in (step, ANY) for step, wanted in zip(path, pattern, strict=False)
                ):
                    named = ".".join((*path, *pattern[length:]))
                    return BadFile(f"{self.name}:{line}: {named + ': ' if named else ''}{message}")
        raise AssertionError("the empty path always fits")

    def convert(self, value: object, into: type[T], prefix: Path, kinds: Sequence[type[msgspec.Struct]]) -> T:
        """Convert a value of the document. `kinds`: the types whose fields may be meant by an unknown one.

        Raises `BadFile` with the line and the name of the field.
        """
        try:
            return converted(value, into)
        except Undecodable as error:
            problem, cause = problem_of(error), error
        steps = re.findall(r"[^.\[\]]+|(?<=\[)\.\.\.(?=\])", problem.path)  # launchables[...].command[1]
        path = (*prefix, *(ANY if step == "..." else step for step in steps))
        if problem.unknown:
            known_fields = {field.name for kind in kinds for field in msgspec.structs.fields(kind)}
            close = difflib.get_close_matches(problem.unknown, known_fields - {problem.unknown}, n=1)
            suggestion = f"; did you mean {close[0]}?" if close else ""
            raise self.error(f"unknown field{suggestion}", (*path, problem.unknown)) from cause
        if problem.missing:
            raise self.error(f"the field {problem.missing} is missing", path) from cause
        hint = "; put it in quotes" if problem.wanted == "text" and problem.got != "null" else ""
        if problem.wanted == "a number" and problem.got == "text":
            for step in steps:
                value = value.get(step) if isinstance(value, dict) else None
            if isinstance(value, str) and re.fullmatch(r"[\d.]+ *[a-z]+", value):
                hint = f" {value!r}; a time is a number of seconds, without a unit"
        raise self.error(problem.what + hint, path) from cause


class Document(NamedTuple):
    """One document: `value` makes its values, which may be expensive for a large one. It raises `BadFile`."""

    source: Source
    is_mapping: bool
    value: Callable[[], Any]


def read(name: str, raw: bytes, what: str) -> Iterator[Document]:
    """Yield the documents of a file. Raises `BadFile`, which calls the file `name`, also if it has none: `what` says
    what to write."""
    plain = plain_yaml_documents(raw, max_values=MAX_FILE_VALUES)
    for number, (line, fields) in enumerate(plain or ()):
        yield Document(Source(name, line, partial(_lines_of, name, raw, number)), True, partial(dict, fields))
    if not plain:
        yield from _read_any(name, raw, what)


def _read_any(name: str, raw: bytes, what: str) -> Iterator[Document]:
    """Yield the documents of a file of any YAML. Raises as `read`."""
    import yaml

    def value_of(make: Callable[[], Any]) -> Any:
        try:
            return make()
        except Undecodable as error:
            raise _placed(name, error) from error

    found = False
    try:
        for node, make in yaml_documents(raw, max_values=MAX_FILE_VALUES):
            if isinstance(node, yaml.ScalarNode) and node.value == "":
                continue  # nothing between two separators
            found = True
            _lines(name, node)  # refuses a path that occurs twice
            source = Source(name, node.start_mark.line + 1, partial(_lines, name, node))
            yield Document(source, isinstance(node, yaml.MappingNode), partial(value_of, make))
    except Undecodable as error:
        raise _placed(name, error) from error
    if not found:
        raise BadFile(f"{name}:1: the file is empty; write {what}")


def _lines_of(name: str, raw: bytes, number: int) -> Mapping[Path, int]:
    """Return the line of each path in a document of the file. `number` counts them from 0."""
    documents = yaml_documents(raw, max_values=MAX_FILE_VALUES)
    node, _ = next(itertools.islice(documents, number, None))
    return _lines(name, node)


def _lines(name: str, root: yaml.Node) -> Mapping[Path, int]:
    """Return the line of each path. Raises `BadFile` for a path that occurs twice."""
    import yaml

    lines: dict[Path, int] = {(): root.start_mark.line + 1}

    def walk(node: yaml.Node, path: Path) -> None:
        children: list[tuple[str, int, yaml.Node]] = []  # step, line and node
        if isinstance(node, yaml.MappingNode):
            named = [(key, value) for key, value in node.value if isinstance(key, yaml.ScalarNode)]
            children = [(key.value, key.start_mark.line + 1, value) for key, value in named]
        elif isinstance(node, yaml.SequenceNode):
            children = [(str(i), value.start_mark.line + 1, value) for i, value in enumerate(node.value)]
        for step, at, child in children:
            if (*path, step) in lines:
                raise BadFile(f"{name}:{at}: {'.'.join((*path, step))}: given twice; keep one of them")
            lines[(*path, step)] = at
            if not isinstance(child, yaml.ScalarNode):
                walk(child, (*path, step))

    walk(root, ())
    return lines


def _placed(name: str, error: Undecodable) -> BadFile:
    """Return the error with the line number at the front."""
    place = re.fullmatch(r"(.*?)line (\d+)(?:, column \d+)?: (.*)", str(error), re.DOTALL)
    line, problem = (place[2], place[1] + place[3]) if place else ("1", str(error))
    return BadFile(f"{name}:{line}: {problem}")


def changed_lines(before: str, after: str) -> list[str]:
    """Return the changes as lines of a diff ("…" between distant parts); empty without a change."""
    lines = list(difflib.unified_diff(before.splitlines(), after.splitlines(), n=2, lineterm=""))
    return ["…" if line.startswith("@@") else line for line in lines[3:]]
