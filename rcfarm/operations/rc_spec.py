"""Which specs of RCs are valid, and the changes that several verbs make of them. Pure.

A `Change` is a function from spec to spec, as it may be applied more than once. Invalid values raise `BadInput`, which
names the field and what to do.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Literal, cast, get_args

import msgspec

from rcfarm.operations.analysis import problem_of_all
from rcfarm.operations.errors import BadInput
from store.decoding import load_yaml
from store.schema import keys, manifest, selectors
from store.schema.records import ALL_NODES, POD_ID_LABEL, RC_ID_LABEL, Labels, RCSpec, UpdatePolicy

Change = Callable[[RCSpec], RCSpec]
Strategy = Literal["static", "dynamic"]

RESTARTED = "restarted_at"  # the manifest's field with the mark


def with_manifest(raw_manifest: bytes) -> Change:
    """Return a change to another manifest with the same pod id. Raises `BadInput`, at once or when applied."""
    parsed = parse_manifest(raw_manifest)

    def change(spec: RCSpec) -> RCSpec:
        pod_id = spec.rc_labels.get(POD_ID_LABEL, parsed.id)
        if parsed.id != pod_id:
            raise BadInput(
                f"manifest: its id is {parsed.id!r}, but rc {spec.id} runs {pod_id!r}, and that can't be changed; "
                f"create another rc for {parsed.id!r}"
            )
        return msgspec.structs.replace(spec, manifest=manifest.digest(raw_manifest))

    return change


def marked(raw_manifest: bytes, restarted_at: str) -> bytes:
    """Return the manifest with a mark of a restart, in canonical JSON. Raises `BadInput`."""
    parse_manifest(raw_manifest)
    return canonical_json({**load_yaml(raw_manifest), RESTARTED: restarted_at})


def canonical_json(fields: object) -> bytes:
    """Return a manifest's bytes: comments and layout do not change its identity. Raises `TypeError`, `ValueError`."""
    return json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def with_labels(pod_labels: Labels | None, rc_labels: Labels | None) -> Change:
    """Return a change of the labels that are not None. Raises `BadInput`, at once or when applied."""
    checked_pod_labels = None if pod_labels is None else check_labels("pod_labels", pod_labels)

    def change(spec: RCSpec) -> RCSpec:
        kept = {POD_ID_LABEL: spec.rc_labels[POD_ID_LABEL]} if POD_ID_LABEL in spec.rc_labels else {}
        return msgspec.structs.replace(
            spec,
            pod_labels=spec.pod_labels if checked_pod_labels is None else checked_pod_labels,
            rc_labels=spec.rc_labels
            if rc_labels is None
            else {**check_labels("rc_labels", rc_labels, pod_id=kept.get(POD_ID_LABEL, "")), **kept},
        )

    return change


def checked(spec: RCSpec) -> RCSpec:
    """Return the spec if its fields are valid. Raises `BadInput`."""
    if not keys.is_dns_label(spec.id):
        raise BadInput(f"id: {spec.id!r} is not a DNS label (lower-case letters, digits and '-', at most 63)")
    check_replicas(spec.replicas_desired)
    if spec.max_unavailable < 1:
        raise BadInput(
            f"max_unavailable: {spec.max_unavailable} is below 1, so that no change could ever be rolled out"
        )
    check_update(spec.policy)
    check_daemon_set(spec)
    return spec


def check_update(policy: UpdatePolicy) -> None:
    """Check that a rollout by this policy can end. Raises `BadInput`."""
    if policy.max_unavailable in ("0", "0%") and not policy.surges:
        raise BadInput(
            "update.max_unavailable: 0, and update.max_surge is 0, too, so that no change could ever be rolled out; "
            "raise one of them"
        )
    names = ("min_healthy_time", "healthy_deadline", "progress_deadline")
    for shorter, longer in itertools.pairwise(names):
        low, high = getattr(policy, shorter), getattr(policy, longer)
        if low >= high:
            raise BadInput(
                f"update.{longer}: {high:g} s is not longer than update.{shorter}, which is {low:g} s, so that every "
                "rollout would fail; raise it"
            )
    for name in ("canary", "max_unavailable", "max_surge"):
        share = getattr(policy, name) or ""
        if share.endswith("%") and int(share[:-1]) > 100:
            raise BadInput(f"update.{name}: {share} is more than all pods; give 0% to 100%, or a number")
    if canonical_selector(policy.canary_selector, "update.canary_selector"):
        wanted = f"update.canary_selector: {policy.canary_selector!r}, but update"
        if policy.canary in ("0", "0%"):
            raise BadInput(f"{wanted}.canary is {policy.canary}, so that there is no canary; leave one of them out")
        if policy.max_unavailable in ("0", "0%"):
            raise BadInput(
                f"{wanted}.max_unavailable is {policy.max_unavailable}, and canaries are changed in place; "
                "raise it, or leave canary_selector out"
            )
    if problem := problem_of_all(policy.analysis):
        raise BadInput(f"update.analysis{'.' * bool(problem.field)}{problem.field}: {problem.text}")


def check_daemon_set(spec: RCSpec) -> None:
    """Check that a daemon set asks for nothing that it can't have, and nothing else for what only it has. Raises
    `BadInput`."""
    if spec.is_daemon_set:
        if spec.policy.surges:
            surge = spec.policy.max_surge
            raise BadInput(f"update.max_surge: {surge}, but with `replicas: all` no node is left for it; leave it out")
        if spec.allocation_strategy == "dynamic":
            raise BadInput("allocation_strategy: dynamic, but `replicas: all` moves no pod; leave it out")
        if spec.spread:
            raise BadInput(f"spread: {spec.spread}, but `replicas: all` has a pod on each node; leave it out")
    elif spec.tolerate_drain:
        raise BadInput("tolerate_drain: only `replicas: all` has it; leave it out")
    for field, label in (("spread", spec.spread), ("update.wave_by", spec.policy.wave_by)):
        try:
            keys.check_label_key(label or "none")
        except keys.BadLabel as error:
            raise BadInput(f"{field}: {error}") from error


def check_replicas(replicas: int) -> None:
    if replicas < 0:
        raise BadInput(f"replicas: {replicas} is negative; use 0 to remove every pod")
    if replicas > ALL_NODES:
        raise BadInput(f"replicas: {replicas} is more than {ALL_NODES - 1}")


def check_strategy(allocation_strategy: str) -> Strategy:
    for strategy in get_args(Strategy):
        if strategy == allocation_strategy:
            return cast(Strategy, strategy)
    raise BadInput(f"allocation_strategy: {allocation_strategy!r} is neither static nor dynamic")


def canonical_selector(text: str, field: str = "node_selector") -> str:
    """Return the selector in its canonical text. Raises `BadInput`, which names the field, for an invalid term."""
    try:
        return str(selectors.Selector.parse(text))
    except selectors.BadSelector as error:
        raise BadInput(f"{field}: {error}") from error


def check_labels(field: str, labels: Labels, *, pod_id: str = "") -> Labels:
    """Return a copy of the labels if clients may set them. `pod_id`: the only value allowed for the label `pod_id`.

    Raises `BadInput`.
    """
    if RC_ID_LABEL in labels:
        raise BadInput(f"{field}: {RC_ID_LABEL} is set by rcfarm; remove it")
    if labels.get(POD_ID_LABEL, pod_id) != pod_id:
        raise BadInput(f"{field}: {POD_ID_LABEL} is set by rcfarm from the manifest's id; remove it")
    try:
        keys.check_labels(labels)
    except keys.BadLabel as error:
        raise BadInput(f"{field}: {error}") from error
    return dict(labels)


def parse_manifest(raw_manifest: bytes) -> manifest.Manifest:
    try:
        return manifest.parse(raw_manifest)
    except manifest.BadManifest as error:
        raise BadInput(f"manifest: {error}") from error
