"""Apply a file to replication controllers: read it, plan, show, carry out.

`load` reads what `rcfarm rc apply` is given, replication controllers with their manifests:

    id: hello                     # the manifest's id when absent
    replicas: 3                   # required when the RC is created; all: a pod on each node (a daemon set)
    node_selector: pool=web
    allocation_strategy: static   # or dynamic
    max_unavailable: 1
    tolerate_drain: false         # for a daemon set
    spread: rack                  # a label of nodes: as few pods as possible with one value of it
    disabled: false
    update: {canary: 1, max_surge: 0, min_healthy_time: 10, …}    # how a changed manifest is rolled out
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
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, NamedTuple

import msgspec

from rcfarm.operations.analysis import problem_of_all
from rcfarm.operations.documents import BadFile, Document, Path, Source, changed_lines, read
from rcfarm.operations.errors import BadInput, ChangedSincePlanned, NoSuchRC, RCExists, RCRefused
from rcfarm.operations.rc_snapshot import RCSnapshot
from rcfarm.operations.rc_spec import (
    RESTARTED,
    Change,
    canonical_json,
    canonical_selector,
    check_strategy,
    checked,
    with_labels,
    with_manifest,
)
from rcfarm.operations.rcs import Damaged, ReplicationControllers, Stored
from store.decoding import Undecodable, converted, load_yaml, problem_of, without_nulls
from store.kv.protocol import BadRecord
from store.schema import manifest
from store.schema.keys import is_dns_label
from store.schema.records import (
    ALL_NODES,
    POD_ID_LABEL,
    Analysis,
    Count,
    HttpAnalysis,
    Labels,
    PrometheusAnalysis,
    RCSpec,
    Seconds,
    Share,
    UpdatePolicy,
)

SHOWN_OF_DAMAGED = 2000  # bytes of an undecodable record
ALL = "all"  # replicas, as they are written for a daemon set
_AMOUNTS = frozenset({"canary", "max_unavailable", "max_surge"})
_YAML_TEXT = "tag:yaml.org,2002:str"


class UpdateFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A number of pods may be a share of the replicas, as in `25%`."""

    canary: Count | Share | None = None
    """How many pods get it first; 0: waves begin at once. Default: 1."""

    canary_selector: str | None = None
    """The labels of the nodes whose pods get it first, such as `rack=r1`. A share, as in `canary: 100%`, is one of
    these pods then. Default: any node."""

    max_unavailable: Count | Share | None = None
    """How many pods may be away at a time. A share is rounded down. Default: 1."""

    max_surge: Count | Share | None = None
    """How many pods may exist beyond `replicas`, on further nodes, while it lasts. Default: 0."""

    min_healthy_time: Seconds | None = None
    """Seconds for which a pod must pass its check without interruption to count. Default: 10."""

    healthy_deadline: Seconds | None = None
    """Seconds within which a changed pod must count, else the rollout is taken back. Default: 300."""

    progress_deadline: Seconds | None = None
    """Seconds within which a further pod must count. Default: 600."""

    auto_promote: bool | None = None
    """Whether it goes on from the canary alone. Default: true; else it waits for `rcfarm rollout promote`."""

    auto_revert: bool | None = None
    """Whether what fails is taken back. Default: true."""

    soak: Seconds | None = None
    """Seconds from the last pod to the end. Default: 0."""

    wave_by: str | None = None
    """A label of nodes: after the canary, the pods on nodes with one value of it are changed before those with the
    next."""

    analysis: list[dict[str, Any]] | None = None
    """What must succeed besides."""


class HttpFields(HttpAnalysis, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`http` of an analysis."""


class PrometheusFields(PrometheusAnalysis, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`prometheus` of an analysis."""


class AnalysisFields(Analysis, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of `update.analysis`."""

    http: HttpFields | None = None
    prometheus: PrometheusFields | None = None


class RCFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One document, as written. What is left out stays as it is, in a new RC as its default."""

    manifest: dict[str, Any]
    """The pod that runs on each node that is chosen."""

    id: str | None = None
    """The RC's name, a DNS label. Default: the manifest's `id`. A name that exists is changed."""

    replicas: Any = None  # a whole number or `all`
    """How many pods, or `all` for a pod on each node that matches. Default: what the RC has, 0 for a new one."""

    node_selector: str | None = None
    """The labels of the nodes that may take pods, such as `tier=web,zone in (a, b)`. Default: every node."""

    allocation_strategy: str | None = None
    """`static`: pods stay on their nodes. `dynamic`: pods of nodes that are lost or do not match any more are moved.
    Default: `static`."""

    max_unavailable: int | None = None
    """Former place of `update.max_unavailable`, which counts."""

    tolerate_drain: bool | None = None
    """Whether the pods of a daemon set stay on nodes that are being emptied. Default: false."""

    spread: str | None = None
    """A label of nodes over whose values the pods are spread, such as `rack`. Default: over the nodes alone."""

    disabled: bool | None = None
    """Whether the RC is frozen: nothing is added, removed or repaired. Default: false."""

    update: UpdateFields | None = None
    """How a changed manifest is rolled out."""

    pod_labels: Labels | None = None
    """Labels of the pods."""

    rc_labels: Labels | None = None
    """Labels of the RC, for selectors of farms and of commands."""


STRUCTS: dict[str, type[msgspec.Struct]] = {
    "The file": RCFields,
    "update": UpdateFields,
    "update.analysis": AnalysisFields,
    "update.analysis.http": HttpFields,
    "update.analysis.prometheus": PrometheusFields,
    "manifest": manifest.Manifest,
    "launchables": manifest.Launchable,
    "launchables.artifact": manifest.Artifact,
    "launchables.env_from": manifest.EnvFrom,
    "launchables.resources": manifest.Resources,
    "health": manifest.HealthCheck,
    "health.http": manifest.HttpCheck,
    "health.tcp": manifest.TcpCheck,
    "health.exec": manifest.ExecCheck,
}
"""Each struct of a file, by where it stands."""
_KINDS = tuple(STRUCTS.values())


class RCDocument(NamedTuple):
    """One RC of a file. `at`: "FILE:LINE" of its beginning. `raw_manifest`: the bytes to store."""

    at: str
    rc_id: str
    pod_id: str
    fields: RCFields
    raw_manifest: bytes


def load(name: str, raw: bytes) -> list[RCDocument]:
    """Decode the documents of a file. Raises `BadFile`, which calls the file `name`."""
    found = [rc_document(document) for document in read(name, raw, "an rc with its manifest")]
    check_distinct(found)
    return found


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


def rc_document(document: Document) -> RCDocument:
    """Return the RC that a document describes. Raises `BadFile`."""
    source = document.source
    if not document.is_mapping:
        raise source.error("an rc is a mapping of fields, with at least `manifest`")
    written = document.value()
    other = next((kind for kind in ("schedule", "quota", "task") if isinstance(written, dict) and kind in written), "")
    if other:
        raise source.error(
            f"this is a {other}, not an rc; `rcfarm apply -f {source.argument}` applies every kind", (other,)
        )
    return rc_entry(source, written)


def rc_entry(source: Source, written: object, prefix: Path = ()) -> RCDocument:
    """Return the RC that a value describes, which is at `prefix` in its document. Raises `BadFile`."""
    if isinstance(written, dict) and {"apiVersion", "kind"} <= written.keys():
        raise source.error(
            f"this is a Kubernetes object, not an rc; `kubectl apply -f {source.argument}` applies it", prefix
        )
    fields, typed = typed_entry(source, written, prefix)
    try:
        parsed = manifest.checked(typed, as_written=True)
    except manifest.BadManifest as error:
        path, _, message = str(error).partition(": ")
        raise source.error(message, (*prefix, "manifest", *path.split("."))) from error
    rc_id = fields.id or parsed.id
    if not is_dns_label(rc_id):
        problem = f"{rc_id!r} is not a DNS label (lower-case letters, digits and '-', at most 63)"
        raise source.error(problem, (*prefix, "id"))
    at = (*prefix, "manifest")
    try:
        canonical = canonical_json(fields.manifest)
    except (TypeError, ValueError) as error:
        raise source.error(f"can't be written as JSON ({error}); put dates and the like in quotes", at) from error
    if len(canonical) > manifest.MAX_MANIFEST_BYTES:
        limit = manifest.MAX_MANIFEST_BYTES
        raise source.error(f"has {len(canonical)} bytes; the limit is {limit}: move files to an artifact", at)
    return RCDocument(source.at, rc_id, parsed.id, fields, canonical)


def typed_entry(source: Source, written: object, prefix: Path) -> tuple[RCFields, manifest.Manifest]:
    """Return the fields and the manifest, of which only the names and types of fields are checked. Raises `BadFile`."""
    fields = source.convert(written, RCFields, prefix, _KINDS)
    try:
        if fields.replicas is not None:
            replicas_of(fields.replicas)
    except BadInput as error:
        raise source.error(str(error), (*prefix, "replicas")) from error
    at, analyses = (*prefix, "update", "analysis"), (fields.update and fields.update.analysis) or []
    typed = [source.convert(entry, AnalysisFields, (*at, str(number)), _KINDS) for number, entry in enumerate(analyses)]
    if problem := problem_of_all(typed):
        raise source.error(problem.text, (*at, *filter(None, problem.field.split("."))))
    return fields, source.convert(fields.manifest, manifest.Manifest, (*prefix, "manifest"), _KINDS)


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
        return _planned(document, None, b"")
    except BadRecord:
        damaged = await rcs.read_damaged(document.rc_id)
        if damaged is None:
            raise ChangedSincePlanned(
                f"rc {document.rc_id} was changed in the meantime; run the command again"
            ) from None
        if damaged.pod_id not in ("", document.pod_id):
            raise BadInput(
                f"{document.at}: manifest.id: it is {document.pod_id!r}, but the pod id of rc {document.rc_id} is "
                f"{damaged.pod_id!r}, and a pod id never changes; give the rc another id"
            ) from None
        return _planned(document, None, b"")._replace(damaged=damaged)
    try:
        old_manifest = await rcs.manifest(old.spec.manifest)
    except NoSuchRC:
        old_manifest = b""
    return _planned(document, old, old_manifest)


async def plan_all(
    rcs: ReplicationControllers, documents: Sequence[RCDocument], snaps: Mapping[str, RCSnapshot]
) -> list[Planned]:
    """Return the effect of each document as `plan` does, for many RCs: `snaps` has all that exist. Raises as `plan`."""
    manifests = await rcs.manifests()
    found = []
    for document in documents:
        snap = snaps.get(document.rc_id)
        if snap is None or snap.spec is None:
            found.append(await plan(rcs, document) if snap else _planned(document, None, b""))
        else:
            old = Stored(snap.spec, snap.spec_index)
            found.append(_planned(document, old, manifests.get(snap.spec.manifest, b"")))
    return found


def _planned(document: RCDocument, old: Stored | None, old_manifest: bytes) -> Planned:
    """Return the effect of a document on what is there. Raises `BadInput`, `RCRefused`."""
    if old is not None and old.spec.deleting:
        raise RCRefused(
            f"rc {document.rc_id} is being deleted; apply the file again when it is gone: "
            f"`rcfarm rc status {document.rc_id} --watch` shows that"
        )
    mark = ""  # of a restart: a file that was not changed must not restart the pods again
    with suppress(manifest.BadManifest):
        mark = manifest.parse(old_manifest).restarted_at if old_manifest else ""
    if mark and RESTARTED not in document.fields.manifest:
        document = document._replace(raw_manifest=canonical_json({**document.fields.manifest, RESTARTED: mark}))
    try:
        if old is None and document.fields.replicas is None:
            raise BadInput(f"rc {document.rc_id} would be new: replicas: missing; give the number of its pods")
        blank = RCSpec(id=document.rc_id, manifest="", replicas_desired=0, rc_labels={POD_ID_LABEL: document.pod_id})
        return Planned(document, old, old_manifest, changed(document, old.spec if old else blank))
    except BadInput as error:
        raise BadInput(f"{document.at}: {error}") from error


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
            lambda spec: changed(document, spec),
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
    return changed_lines(before, after)


def as_yaml(spec: RCSpec, raw_manifest: bytes) -> str:
    """Return the RC as YAML that `rc apply` accepts."""
    try:
        readable = load_yaml(raw_manifest) or f"sha256:{spec.manifest} is not in the store"
    except Undecodable:
        readable = f"sha256:{spec.manifest} can't be read"
    written, defaults = msgspec.to_builtins(spec.policy), msgspec.to_builtins(UpdatePolicy())
    entries = [without_nulls(entry) for entry in written.pop("analysis")]
    update = {  # the fields that differ from their defaults, as a file has them
        name: int(value) if isinstance(value, str) and value.isdecimal() else value
        for name, value in written.items()
        if value != defaults[name]
    }
    if entries:
        update["analysis"] = [{name: value for name, value in entry.items() if value != ""} for entry in entries]
    fields: dict[str, Any] = {
        "id": spec.id,
        "replicas": ALL if spec.is_daemon_set else spec.replicas_desired,
        "node_selector": spec.node_selector,
        "allocation_strategy": spec.allocation_strategy,
        **({} if spec.policy.max_unavailable is not None else {"max_unavailable": spec.max_unavailable}),
        **({"tolerate_drain": True} if spec.tolerate_drain else {}),
        **({"spread": spec.spread} if spec.spread else {}),
        "disabled": spec.disabled,
        **({"update": update} if update else {}),
        "pod_labels": spec.pod_labels,
        "rc_labels": {key: value for key, value in spec.rc_labels.items() if key != POD_ID_LABEL},
        "manifest": readable,
    }
    import yaml  # takes 15 ms; commands that show no YAML must not pay

    class Readable(yaml.SafeDumper):
        """Writes text of several lines as a literal block."""

    Readable.add_representer(
        str, lambda dumper, text: dumper.represent_scalar(_YAML_TEXT, text, style="|" if "\n" in text else None)
    )
    return yaml.dump(fields, Dumper=Readable, sort_keys=False, allow_unicode=True, width=100)


def replicas_of(written: Any) -> int:
    """Return a number of replicas from how it is written. Raises `BadInput`, whose message does not name the field."""
    if written == ALL:
        return ALL_NODES
    if not isinstance(written, int) or isinstance(written, bool):
        raise BadInput(f"expected a whole number or `{ALL}`, got {json.dumps(written, default=str)[:40]}")
    if written >= ALL_NODES:
        raise BadInput(f"{written} is more than {ALL_NODES - 1}; use `{ALL}` for a pod on each node")
    return written


def changed(document: RCDocument, spec: RCSpec) -> RCSpec:
    """Return the spec with what the document asks for, at the same generation. Raises `BadInput`."""
    fields = document.fields
    spec = with_manifest(document.raw_manifest)(spec)
    spec = with_labels(fields.pod_labels, fields.rc_labels)(spec)
    given: dict[str, Any] = {
        "replicas_desired": None if fields.replicas is None else replicas_of(fields.replicas),
        "node_selector": None if fields.node_selector is None else canonical_selector(fields.node_selector),
        "allocation_strategy": None
        if fields.allocation_strategy is None
        else check_strategy(fields.allocation_strategy),
        "max_unavailable": fields.max_unavailable,
        "tolerate_drain": fields.tolerate_drain,
        "spread": fields.spread,
        "disabled": fields.disabled,
    }
    if fields.update is not None:
        policy = {name: value for name, value in msgspec.structs.asdict(fields.update).items() if value is not None}
        if "max_unavailable" in policy and fields.max_unavailable is not None:
            raise BadInput("update.max_unavailable: max_unavailable is given beside it; keep one of them")
        policy |= {name: str(policy[name]) for name in _AMOUNTS & policy.keys()}
        if "analysis" in policy:
            policy["analysis"] = msgspec.convert(policy["analysis"], tuple[Analysis, ...])
        if "canary_selector" in policy:
            policy["canary_selector"] = canonical_selector(policy["canary_selector"], "update.canary_selector")
        given["update"] = msgspec.structs.replace(spec.policy, **policy) if policy else None
    changes = {field: value for field, value in given.items() if value is not None}
    return checked(msgspec.structs.replace(spec, **changes))


_SETTABLE = ("replicas", "node_selector", "allocation_strategy", "disabled")  # besides the fields of `update`


def with_fields(texts: Mapping[str, str]) -> Change:
    """Return a change of the fields that are given as texts, under their names in a file: `replicas`, `node_selector`,
    `allocation_strategy`, `disabled`, and the fields of `update`, with or without `update.` before them. Raises
    `BadInput`, at once or when applied."""
    own, update = (
        {field.name: field.type for field in msgspec.structs.fields(kind)} for kind in (RCFields, UpdateFields)
    )
    types = {**{name: own[name] for name in _SETTABLE}, **update, "replicas": int | None}
    del types["analysis"]
    given: dict[str, Any] = {}
    for written, text in texts.items():
        name = written.removeprefix("update.") if written.removeprefix("update.") in update else written
        if name not in types:
            close = difflib.get_close_matches(name.removeprefix("update."), types, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            raise BadInput(f"{written}: unknown field; {hint}it is one of {', '.join(types)}")
        if name in given:
            raise BadInput(f"{name}: given twice; keep one of them")
        try:
            value: Any = int(text) if name in _AMOUNTS and text.isdecimal() else text
            if (name, text) != ("replicas", ALL):
                value = converted(value, types[name], strict=False)
            given[name] = replicas_of(value) if name == "replicas" and value is not None else value
        except BadInput as error:
            raise BadInput(f"{name}: {error}") from error
        except Undecodable as error:
            raise BadInput(f"{name}: {text!r}: {problem_of(error).what}") from error
        if given[name] is None:
            raise BadInput(f"{name}: {text!r} is no value; leave the field out to keep what the rc has")
    counts = {name: str(value) if name in _AMOUNTS else value for name, value in given.items() if name in update}
    changes = {"replicas_desired" if name == "replicas" else name: given[name] for name in _SETTABLE if name in given}
    if "node_selector" in changes:
        changes["node_selector"] = canonical_selector(changes["node_selector"])
    if "canary_selector" in counts:
        counts["canary_selector"] = canonical_selector(counts["canary_selector"], "canary_selector")
    if "allocation_strategy" in changes:
        changes["allocation_strategy"] = check_strategy(changes["allocation_strategy"])

    def change(spec: RCSpec) -> RCSpec:
        policy = {"update": msgspec.structs.replace(spec.policy, **counts)} if counts else {}
        return checked(msgspec.structs.replace(spec, **changes, **policy))

    return change
