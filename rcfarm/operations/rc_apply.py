"""Apply a file to an RC: plan, show, carry out.

`plan` reads the RC and computes its new spec; `carry_out` writes it only if the RC has not changed since, and raises
`ChangedSincePlanned` otherwise, so that the operator gets exactly the confirmed difference.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import msgspec
import yaml

from rcfarm.operations import rc_changes
from rcfarm.operations.errors import BadInput, ChangedSincePlanned, NoSuchRC, RCExists, RCRefused
from rcfarm.operations.rc_file import RCDocument
from rcfarm.operations.rcs import Damaged, ReplicationControllers, Stored
from store.decoding import Undecodable, load_yaml
from store.kv.protocol import BadRecord
from store.schema.records import POD_ID_LABEL, RCSpec

SHOWN_OF_DAMAGED = 2000  # bytes of an undecodable record


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
        return await _replacing(rcs, document)
    if old.spec.deleting:
        raise RCRefused(f"rc {document.rc_id} is being deleted; apply it again once it is gone")
    new = _at(document, lambda: _changed(document, old.spec))
    try:
        old_manifest = await rcs.manifest(old.spec.manifest)
    except NoSuchRC:
        old_manifest = b""
    return Planned(document, old, old_manifest, new)


async def _replacing(rcs: ReplicationControllers, document: RCDocument) -> Planned:
    """Plan to replace the undecodable record of an RC, from the file alone."""
    damaged = await rcs.read_damaged(document.rc_id)
    if damaged is None:
        raise ChangedSincePlanned(f"rc {document.rc_id} was changed in the meantime; apply it again")
    if damaged.pod_id not in ("", document.pod_id):
        raise BadInput(
            f"{document.at}: manifest.id: it is {document.pod_id!r}, but the pod id of rc {document.rc_id} is "
            f"{damaged.pod_id!r}, and a pod id never changes; give the rc another id"
        )
    return Planned(document, None, b"", _at(document, lambda: _created(document)), damaged)


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
    spec = rc_changes.with_manifest(document.raw_manifest)(spec)
    spec = rc_changes.with_labels(fields.pod_labels, fields.rc_labels)(spec)
    given: dict[str, Any] = {
        "replicas_desired": fields.replicas,
        "node_selector": _if_given(rc_changes.canonical_selector, fields.node_selector),
        "allocation_strategy": _if_given(rc_changes.check_strategy, fields.allocation_strategy),
        "max_unavailable": fields.max_unavailable,
        "disabled": fields.disabled,
    }
    changes = {field: value for field, value in given.items() if value is not None}
    return rc_changes.checked(msgspec.structs.replace(spec, **changes))


def _if_given(check: Callable[[str], str], text: str | None) -> str | None:
    return None if text is None else check(text)
