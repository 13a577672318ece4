"""Apply a file to replication controllers: read it, plan, show, carry out.

`load` reads what `rcfarm rc apply` is given, replication controllers with their manifests:

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

`plan` reads the RC and computes its new spec; `carry_out` writes it only if the RC has not changed since, and raises
`ChangedSincePlanned` otherwise, so that the operator gets exactly the confirmed difference.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec
import yaml

from rcfarm.operations.errors import BadInput, ChangedSincePlanned, NoSuchRC, RCExists, RCRefused
from rcfarm.operations.rcs import (
    Damaged,
    ReplicationControllers,
    Stored,
    canonical_selector,
    check_strategy,
    checked,
    with_labels,
    with_manifest,
)
from store.decoding import MAX_FILE_VALUES, Undecodable, converted, load_yaml, problem_of, yaml_documents
from store.kv.protocol import BadRecord
from store.schema import manifest
from store.schema.keys import is_dns_label
from store.schema.records import POD_ID_LABEL, Labels, RCSpec

SHOWN_OF_DAMAGED = 2000  # bytes of an undecodable record

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
        children: list[tuple[str, int, yaml.Node]] = []  # step, line and node
        if isinstance(node, yaml.MappingNode):
            named = [(key, value) for key, value in node.value if isinstance(key, yaml.ScalarNode)]
            children = [(key.value, key.start_mark.line + 1, value) for key, value in named]
        elif isinstance(node, yaml.SequenceNode):
            children = [(str(i), value.start_mark.line + 1, value) for i, value in enumerate(node.value)]
        for step, at, child in children:
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
    """Decode the documents of a file. Raises `BadFile`, which calls the file `name`."""
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
    """Convert a value of the document. Raises msgspec's error with its path turned into a line and a name."""
    try:
        return converted(value, into)
    except Undecodable as error:
        problem, cause = problem_of(error), error
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
        raise source.error(f"unknown field{suggestion}", (*path, problem.unknown)) from cause
    if problem.missing:
        raise source.error(f"the field {problem.missing} is missing", path) from cause
    hint = "; put it in quotes" if problem.wanted == "text" and problem.got != "null" else ""
    raise source.error(problem.what + hint, path) from cause


class Planned(NamedTuple):
    """The effect of a document. `old` None: the RC would be created, or its `damaged` record replaced. The new spec's
    generation is not raised yet."""

    document: RCDocument
    old: Stored | None
    old_manifest: bytes
    new: RCSpec
    damaged: Damaged | None = None

    @property
    def action(self) -> Literal["create", "change", "replace", "none"]:
        if self.damaged is not None:
            return "replace"
        if self.old is None:
            return "create"
        return "none" if self.old.spec == self.new else "change"


async def plan(rcs: ReplicationControllers, document: RCDocument) -> Planned:
    """Return the effect of applying the document. Raises `BadInput` naming the place in the file, `RCRefused`."""
    try:
        old = await rcs.read(document.rc_id)
    except NoSuchRC:
        return Planned(document, None, b"", _at(document, lambda: _created(document)))
    except BadRecord:
        damaged = await rcs.read_damaged(document.rc_id)
        if damaged is None:
            raise ChangedSincePlanned(f"rc {document.rc_id} was changed in the meantime; apply it again") from None
        if damaged.pod_id not in ("", document.pod_id):
            raise BadInput(
                f"{document.at}: manifest.id: it is {document.pod_id!r}, but the pod id of rc {document.rc_id} is "
                f"{damaged.pod_id!r}, and a pod id never changes; give the rc another id"
            ) from None
        return Planned(document, None, b"", _at(document, lambda: _created(document)), damaged)
    if old.spec.deleting:
        raise RCRefused(f"rc {document.rc_id} is being deleted; apply it again once it is gone")
    new = _at(document, lambda: _changed(document, old.spec))
    try:
        old_manifest = await rcs.manifest(old.spec.manifest)
    except NoSuchRC:
        old_manifest = b""
    return Planned(document, old, old_manifest, new)


async def carry_out(rcs: ReplicationControllers, planned: Planned) -> RCSpec:
    """Carry out the plan. Raises `ChangedSincePlanned`, `RCRefused`, `Contended`."""
    document = planned.document
    if planned.damaged is not None:
        return await rcs.replace_damaged(planned.damaged, planned.new, document.raw_manifest)
    if planned.old is None:
        try:
            return await rcs.create_from(planned.new, document.raw_manifest)
        except RCExists as error:
            raise ChangedSincePlanned(
                f"rc {document.rc_id} was created in the meantime; review the difference again"
            ) from error
    try:
        return await rcs.update(
            document.rc_id,
            lambda spec: _changed(document, spec),
            raw_manifest=document.raw_manifest,
            expected_index=planned.old.modify_index,
        )
    except NoSuchRC as error:
        raise ChangedSincePlanned(
            f"rc {document.rc_id} was deleted in the meantime; review the difference again"
        ) from error


def difference(planned: Planned) -> list[str]:
    """Return the changes as lines of a diff of the RC's YAML ("…" between distant parts); empty without a change."""
    if planned.damaged is not None:
        before = planned.damaged.value[:SHOWN_OF_DAMAGED].decode(errors="replace")
        before += "…" if len(planned.damaged.value) > SHOWN_OF_DAMAGED else ""
    else:
        before = "" if planned.old is None else as_yaml(planned.old.spec, planned.old_manifest)
    after = as_yaml(planned.new, planned.document.raw_manifest)
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), n=2, lineterm="")
    without_headers = list(lines)[3:]
    return ["…" if line.startswith("@@") else line for line in without_headers]


def as_yaml(spec: RCSpec, raw_manifest: bytes) -> str:
    """Return the RC as YAML that `rc apply` accepts."""
    try:
        readable = load_yaml(raw_manifest) or f"sha256:{spec.manifest} is not in the store"
    except Undecodable:
        readable = f"sha256:{spec.manifest} can't be read"
    fields: dict[str, Any] = {
        "id": spec.id,
        "replicas": spec.replicas_desired,
        "node_selector": spec.node_selector,
        "allocation_strategy": spec.allocation_strategy,
        "max_unavailable": spec.max_unavailable,
        "disabled": spec.disabled,
        "pod_labels": spec.pod_labels,
        "rc_labels": {key: value for key, value in spec.rc_labels.items() if key != POD_ID_LABEL},
        "manifest": readable,
    }
    return yaml.dump(fields, Dumper=_Readable, sort_keys=False, allow_unicode=True, width=100)


_YAML_TEXT = "tag:yaml.org,2002:str"


class _Readable(yaml.SafeDumper):
    """Writes text of several lines as a literal block."""


_Readable.add_representer(
    str, lambda dumper, text: dumper.represent_scalar(_YAML_TEXT, text, style="|" if "\n" in text else None)
)


def _at(document: RCDocument, build: Callable[[], RCSpec]) -> RCSpec:
    """Return the result of `build`; its errors name the document's place in the file."""
    try:
        return build()
    except BadInput as error:
        raise BadInput(f"{document.at}: {error}") from error


def _created(document: RCDocument) -> RCSpec:
    replicas = document.fields.replicas
    if replicas is None:
        raise BadInput(f"rc {document.rc_id} would be new: replicas: missing; give the number of its pods")
    blank = RCSpec(id=document.rc_id, manifest="", replicas_desired=replicas, rc_labels={POD_ID_LABEL: document.pod_id})
    return _changed(document, blank)


def _changed(document: RCDocument, spec: RCSpec) -> RCSpec:
    fields = document.fields
    spec = with_manifest(document.raw_manifest)(spec)
    spec = with_labels(fields.pod_labels, fields.rc_labels)(spec)
    given: dict[str, Any] = {
        "replicas_desired": fields.replicas,
        "node_selector": None if fields.node_selector is None else canonical_selector(fields.node_selector),
        "allocation_strategy": None
        if fields.allocation_strategy is None
        else check_strategy(fields.allocation_strategy),
        "max_unavailable": fields.max_unavailable,
        "disabled": fields.disabled,
    }
    changes = {field: value for field, value in given.items() if value is not None}
    return checked(msgspec.structs.replace(spec, **changes))
