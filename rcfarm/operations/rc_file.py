"""The file that `rcfarm rc apply` reads: replication controllers with their manifests.

    id: hello                     # the manifest's id when absent
    replicas: 3                   # required when the RC is created
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

The manifest is stored as canonical JSON: comments and layout do not change its identity.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import msgspec
import yaml

from rcfarm.operations.errors import BadInput
from store.decoding import MAX_FILE_VALUES, Undecodable, converted, load_yaml, problem_of, yaml_documents
from store.schema import manifest
from store.schema.keys import is_dns_label
from store.schema.records import Labels

Path = tuple[str, ...]
T = TypeVar("T")

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
    """One document's values, with the line of each path."""

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
        """Return the error, at the line of the first path that matches the pattern, or of the nearest one above it."""
        for length in range(len(pattern), -1, -1):
            for path, line in self.lines.items():
                if len(path) == length and all(
                    wanted in (step, _ANY) for step, wanted in zip(path, pattern, strict=False)
                ):
                    named = ".".join((*path, *pattern[length:]))
                    return BadFile(f"{self.name}:{line}: {named + ': ' if named else ''}{message}")
        raise AssertionError("the empty path always fits")


def load(name: str, raw: bytes) -> list[RCDocument]:
    """Read the documents of a file; Errors name it as `name`. Raises `BadFile`."""
    try:
        documents = [
            _document(name, node, value_of)
            for node, value_of in yaml_documents(raw, max_values=MAX_FILE_VALUES)
            if not (isinstance(node, yaml.ScalarNode) and node.value == "")  # nothing between two separators
        ]
    except Undecodable as error:
        # The error's line number goes to the front.
        found = re.fullmatch(r"(.*?)line (\d+)(?:, column \d+)?: (.*)", str(error), re.DOTALL)
        line, what = (found[2], found[1] + found[3]) if found else ("1", str(error))
        raise BadFile(f"{name}:{line}: {what}") from error
    if not documents:
        raise BadFile(f"{name}:1: the file is empty; write an rc with its manifest")
    check_distinct(documents)
    return documents


def check_distinct(documents: Iterable[RCDocument]) -> None:
    """Check that no RC occurs twice in the documents of one or several files. Raises `BadFile`."""
    first: dict[str, RCDocument] = {}
    for document in documents:
        if (earlier := first.setdefault(document.rc_id, document)) is not document:
            raise BadFile(f"{document.at}: rc {document.rc_id} is given twice, first at {earlier.at}")


def is_rc_file(raw: bytes) -> bool:
    """Return whether these bytes, which are not a manifest, look like an RC's file: a mapping with a manifest."""
    try:
        content = load_yaml(raw)
    except Undecodable:
        return False
    return isinstance(content, dict) and isinstance(content.get("manifest"), dict)


def _document(name: str, node: yaml.Node, value_of: Callable[[], Any]) -> RCDocument:
    source = _Source(name, node)
    if not isinstance(node, yaml.MappingNode):
        raise source.error("an rc is a mapping of fields, with at least `manifest`")
    written = value_of()
    if isinstance(written, dict) and {"apiVersion", "kind"} <= written.keys():
        raise source.error(f"this is a Kubernetes object, not an rc; `kubectl apply -f {name}` applies it")
    fields = _convert(source, written, RCFields, ())
    try:
        parsed = manifest.checked(_convert(source, fields.manifest, manifest.Manifest, ("manifest",)))
    except manifest.BadManifest as error:
        path, _, message = str(error).partition(": ")
        raise source.error(message, ("manifest", *path.split("."))) from error
    rc_id = fields.id or parsed.id
    if not is_dns_label(rc_id):
        raise source.error(f"{rc_id!r} is not a DNS label (lower-case letters, digits and '-', at most 63)", ("id",))
    try:
        canonical = json.dumps(
            fields.manifest, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
        ).encode()
    except (TypeError, ValueError) as error:
        raise source.error(
            f"can't be written as JSON ({error}); put dates and the like in quotes", ("manifest",)
        ) from error
    if len(canonical) > manifest.MAX_MANIFEST_BYTES:
        limit = manifest.MAX_MANIFEST_BYTES
        raise source.error(
            f"has {len(canonical)} bytes; the limit is {limit}: move files to an artifact", ("manifest",)
        )
    return RCDocument(f"{name}:{source.lines[()]}", rc_id, parsed.id, fields, canonical)


def _convert(source: _Source, value: object, into: type[T], prefix: Path) -> T:
    try:
        return converted(value, into)
    except Undecodable as error:
        raise _explained(source, error, prefix) from error


def _explained(source: _Source, error: Undecodable, prefix: Path) -> BadFile:
    """Return msgspec's message with its path turned into a line and a name."""
    problem = problem_of(error)
    steps = re.findall(r"[^.\[\]]+|(?<=\[)\.\.\.(?=\])", problem.path)  # launchables[...].command[1]
    path = (*prefix, *(_ANY if step == "..." else step for step in steps))
    if problem.unknown:
        kinds = (
            RCFields,
            manifest.Manifest,
            manifest.Launchable,
            manifest.Artifact,
            manifest.Resources,
            manifest.HealthCheck,
            manifest.HttpCheck,
        )
        known_fields = {field.name for kind in kinds for field in msgspec.structs.fields(kind)}
        close = difflib.get_close_matches(problem.unknown, known_fields, n=1)
        suggestion = f"; did you mean {close[0]}?" if close else ""
        return source.error(f"unknown field{suggestion}", (*path, problem.unknown))
    if problem.missing:
        return source.error(f"the field {problem.missing} is missing", path)
    hint = "; put it in quotes" if problem.wanted == "text" and problem.got != "null" else ""
    return source.error(problem.what + hint, path)


def _children(node: yaml.Node) -> Iterator[tuple[str, int, yaml.Node]]:
    """Yield step, line and node of the items of a mapping or a sequence."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):
                yield key.value, key.start_mark.line + 1, value
    elif isinstance(node, yaml.SequenceNode):
        for number, value in enumerate(node.value):
            yield str(number), value.start_mark.line + 1, value
