"""Changes of a replication controller, as pure functions from spec to spec.

A `Change` may be applied more than once (the store's operations compute it again after a conflict), so it has no side
effects. Invalid values raise `BadInput`, which names the field and what to do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, cast, get_args

import msgspec

from rcfarm.operations.errors import BadInput
from store.schema import manifest, selectors
from store.schema.keys import is_dns_label
from store.schema.records import POD_ID_LABEL, RC_ID_LABEL, Labels, RCSpec

Change = Callable[[RCSpec], RCSpec]
Strategy = Literal["static", "dynamic"]


def differences(old: RCSpec, new: RCSpec) -> dict[str, Any]:
    """Return field → [old, new] for the fields that differ, without the generation, which every change raises."""
    before, after = msgspec.structs.asdict(old), msgspec.structs.asdict(new)
    return {
        field: [before[field], after[field]]
        for field in before
        if before[field] != after[field] and field != "generation"
    }


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
    if not is_dns_label(spec.id):
        raise BadInput(f"id: {spec.id!r} is not a DNS label (lower-case letters, digits and '-', at most 63)")
    check_replicas(spec.replicas_desired)
    if spec.max_unavailable < 1:
        raise BadInput(
            f"max_unavailable: {spec.max_unavailable} is below 1, so that no change could ever be rolled out"
        )
    return spec


def check_replicas(replicas: int) -> None:
    if replicas < 0:
        raise BadInput(f"replicas: {replicas} is negative; use 0 to remove every pod")


def check_strategy(allocation_strategy: str) -> Strategy:
    for strategy in get_args(Strategy):
        if strategy == allocation_strategy:
            return cast(Strategy, strategy)
    raise BadInput(f"allocation_strategy: {allocation_strategy!r} is neither static nor dynamic")


def canonical_selector(text: str) -> str:
    """Return the selector in its canonical text. Raises `BadInput` for an invalid term."""
    try:
        return str(selectors.Selector.parse(text))
    except selectors.BadSelector as error:
        raise BadInput(f"node_selector: {error}") from error


def check_labels(field: str, labels: Labels, *, pod_id: str = "") -> Labels:
    """Return a copy of the labels if clients may set them. `pod_id`: the only value allowed for the label `pod_id`.

    Raises `BadInput`.
    """
    if RC_ID_LABEL in labels:
        raise BadInput(f"{field}: {RC_ID_LABEL} is set by rcfarm; remove it")
    if labels.get(POD_ID_LABEL, pod_id) != pod_id:
        raise BadInput(f"{field}: {POD_ID_LABEL} is set by rcfarm from the manifest's id; remove it")
    try:
        selectors.check_labels(labels)
    except selectors.BadLabel as error:
        raise BadInput(f"{field}: {error}") from error
    return dict(labels)


def parse_manifest(raw_manifest: bytes) -> manifest.Manifest:
    try:
        return manifest.parse(raw_manifest)
    except manifest.BadManifest as error:
        raise BadInput(f"manifest: {error}") from error
