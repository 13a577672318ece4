"""The file that `rcfarm rc apply` reads: replication controllers with their manifests, as people write them.

    id: hello                     # the manifest's id when absent
    replicas: 3                   # needed when the RC is created
    node_selector: pool=web
    allocation_strategy: static   # or dynamic
    max_unavailable: 1
    disabled: false
    pod_labels: {tier: web}
    rc_labels: {team: shop}
    manifest:
      id: hello
      launchables: …

A field that is left out keeps the value that the RC has, and has its default when the RC is created: an omission never
widens a selector or undoes a `scale`. Several documents, separated by `---`, are several RCs. Unknown and repeated
fields are refused; every error names the file, the line and the field.

The manifest is stored as canonical JSON of what is written here: comments and layout do not change its identity.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import msgspec
import yaml

from rcfarm.rc_errors import BadInput
from store import manifest
from store.decoding import (
    MAX_FILE_VALUES,
    Undecodable,
    check_yaml,
    converted,
    load_yaml,
    yaml_loader,
    yaml_reason,
)
from store.keys import is_dns_label
from store.records import Labels

Path = tuple[str, ...]
T = TypeVar("T")

_MSGSPEC_ERROR = re.compile(r"(?P<what>.*?)(?: - at `(?:key` in `)?\$(?P<path>[^`]*)`)?", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<field>.*)`")
_MISSING = re.compile(r"Object missing required field `(?P<field>.*)`")
_MISMATCH = re.compile(r"Expected `(.*?)(?: \| null)?`, got `(.*)`")
_TYPES = {
    "str": "text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "object": "a mapping",
    "array": "a list",
}
_ANY = "…"  # stands for any one step of a path


class RCFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One document, as written. None: left out."""

    manifest: dict[str, Any]
    id: str | None = None
    replicas: int | None = None
    node_selector: str | None = None
    allocation_strategy: str | None = None
    max_unavailable: int | None = None
    disabled: bool | None = None
    pod_labels: Labels | None = None
    rc_labels: Labels | None = None


class RCDocument(NamedTuple):
    """One RC of a file. `at`: "FILE:LINE" of its beginning. `raw_manifest`: the bytes to store."""

    at: str
    rc_id: str
    pod_id: str
    fields: RCFields
    raw_manifest: bytes


class BadFile(BadInput):
    """A file that can't be applied; the message begins with FILE:LINE."""


class _Source:
    """One document's values, and the line that each path is on."""

    def __init__(self, name: str, node: yaml.Node) -> None:
        self.name = name
        self.lines: dict[Path, int] = {(): node.start_mark.line + 1}
        self._walk(node, ())

    def _walk(self, node: yaml.Node, path: Path) -> None:
        for step, at, child in _children(node):
            if (*path, step) in self.lines:
                raise BadFile(f"{self.name}:{at}: {'.'.join((*path, step))}: given twice; keep one of them")
            self.lines[(*path, step)] = at
            self._walk(child, (*path, step))

    def error(self, message: str, pattern: Path = ()) -> BadFile:
        """The error, at the line of the first path that fits the pattern, or of the nearest one above it."""
        for length in range(len(pattern), -1, -1):
            for path, line in self.lines.items():
                if _fits(path, pattern[:length]):
                    named = ".".join((*path, *pattern[length:]))
                    return BadFile(f"{self.name}:{line}: {named + ': ' if named else ''}{message}")
        raise AssertionError("the empty path always fits")


def load(name: str, raw: bytes) -> list[RCDocument]:
    """Read the documents of a file; `name` is how errors call it. Raises `BadFile`."""
    documents = [_document(name, loader, node) for loader, node in _nodes(name, raw)]
    if not documents:
        raise BadFile(f"{name}:1: the file is empty; write an rc with its manifest")
    check_distinct(documents)
    return documents


def check_distinct(documents: Iterable[RCDocument]) -> None:
    """Check that no RC is in the documents, of one file or several, twice. Raises `BadFile`."""
    first: dict[str, RCDocument] = {}
    for document in documents:
        if (earlier := first.setdefault(document.rc_id, document)) is not document:
            raise BadFile(f"{document.at}: rc {document.rc_id} is given twice, first at {earlier.at}")


def is_rc_file(raw: bytes) -> bool:
    """Return whether this, which is no manifest, looks like an RC's file: a mapping that holds a manifest."""
    try:
        content = load_yaml(raw)
    except Undecodable:
        return False
    return isinstance(content, dict) and isinstance(content.get("manifest"), dict)


def _nodes(name: str, raw: bytes) -> Iterator[tuple[Any, yaml.Node]]:
    try:
        check_yaml(raw, max_values=MAX_FILE_VALUES)
        loader = yaml_loader()(raw)
        while loader.check_node():
            node = loader.get_node()
            if not (isinstance(node, yaml.ScalarNode) and node.value == ""):  # nothing between two separators
                yield loader, node
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise BadFile(f"{name}:{mark.line + 1 if mark else 1}: not valid YAML: {error.problem}") from error
    except Undecodable as error:
        raise _unread(name, str(error)) from error
    except (yaml.YAMLError, UnicodeError) as error:
        raise BadFile(f"{name}:1: not valid YAML: {yaml_reason(error)}") from error


def _unread(name: str, message: str) -> BadFile:
    """The error of a text that can't be read, its line moved to where a file's line is written."""
    found = re.fullmatch(r"(?P<before>.*?)line (?P<line>\d+)(?:, column \d+)?: (?P<what>.*)", message, re.DOTALL)
    if found is None:
        return BadFile(f"{name}:1: {message}")
    return BadFile(f"{name}:{found['line']}: {found['before']}{found['what']}")


def _document(name: str, loader: Any, node: yaml.Node) -> RCDocument:
    source = _Source(name, node)
    if not isinstance(node, yaml.MappingNode):
        raise source.error("an rc is a mapping of fields, with at least `manifest`")
    try:
        written = loader.construct_document(node)
    except Exception as error:  # a date that there isn't, a list as a key: each its own
        raise _unread(name, f"not valid YAML: {yaml_reason(error)}") from error
    fields = _convert(source, written, RCFields, ())
    parsed = _manifest(source, fields.manifest)
    rc_id = fields.id or parsed.id
    if not is_dns_label(rc_id):
        raise source.error(f"{rc_id!r} is not a DNS label (lower-case letters, digits and '-', at most 63)", ("id",))
    return RCDocument(f"{name}:{source.lines[()]}", rc_id, parsed.id, fields, _canonical(source, fields.manifest))


def _manifest(source: _Source, fields: Mapping[str, Any]) -> manifest.Manifest:
    try:
        return manifest.checked(_convert(source, fields, manifest.Manifest, ("manifest",)))
    except manifest.BadManifest as error:
        path, _, message = str(error).partition(": ")
        raise source.error(message, ("manifest", *path.split("."))) from error


def _canonical(source: _Source, fields: Mapping[str, Any]) -> bytes:
    try:
        raw = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise source.error(
            f"can't be written as JSON ({error}); put dates and the like in quotes", ("manifest",)
        ) from error
    if len(raw) > manifest.MAX_MANIFEST_BYTES:
        limit = manifest.MAX_MANIFEST_BYTES
        raise source.error(f"has {len(raw)} bytes; the limit is {limit}: move files to an artifact", ("manifest",))
    return raw


def _convert(source: _Source, value: object, into: type[T], prefix: Path) -> T:
    try:
        return converted(value, into)
    except Undecodable as error:
        raise _explained(source, str(error), prefix) from error


def _explained(source: _Source, text: str, prefix: Path) -> BadFile:
    """msgspec's message with its path turned into a line and a name."""
    found = _MSGSPEC_ERROR.fullmatch(text)
    assert found is not None, "the pattern fits any text"
    path = (*prefix, *_steps(found["path"] or ""))
    if unknown := _UNKNOWN.fullmatch(found["what"]):
        return source.error(f"unknown field{_suggestion(unknown['field'])}", (*path, unknown["field"]))
    if missing := _MISSING.fullmatch(found["what"]):
        return source.error(f"the field {missing['field']} is missing", path)
    if mismatch := _MISMATCH.fullmatch(found["what"]):
        wanted, got = (_TYPES.get(name, name) for name in mismatch.groups())
        hint = "; put it in quotes" if wanted == "text" and got != "null" else ""
        return source.error(f"expected {wanted}, got {got}{hint}", path)
    return source.error(found["what"], path)


def _suggestion(field: str) -> str:
    close = difflib.get_close_matches(field, _known_fields(), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _known_fields() -> set[str]:
    kinds = (
        RCFields,
        manifest.Manifest,
        manifest.Launchable,
        manifest.Artifact,
        manifest.Resources,
        manifest.HealthCheck,
        manifest.HttpCheck,
    )
    return {field.name for kind in kinds for field in msgspec.structs.fields(kind)}


def _steps(path: str) -> Path:
    """`.launchables[...].command[1]` → ("launchables", "…", "command", "1")."""
    return tuple(_ANY if step == "..." else step for step in re.findall(r"[^.\[\]]+|(?<=\[)\.\.\.(?=\])", path))


def _fits(path: Path, pattern: Path) -> bool:
    return len(path) == len(pattern) and all(wanted in (step, _ANY) for step, wanted in zip(path, pattern, strict=True))


def _children(node: yaml.Node) -> Iterator[tuple[str, int, yaml.Node]]:
    """Step, line and node of what a mapping or a sequence holds."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):
                yield key.value, key.start_mark.line + 1, value
    elif isinstance(node, yaml.SequenceNode):
        for number, value in enumerate(node.value):
            yield str(number), value.start_mark.line + 1, value
