"""A job's pods or services by replica type and index, as their labels say."""

from __future__ import annotations

from collections.abc import Iterable

import structlog

from store.kube.objects import Object, key_of, labels_of

log = structlog.get_logger(__name__)

_MAX_DIGITS = 18  # Python refuses to convert very long digits; no index comes near


def replica_index(obj: Object, label: str) -> int | None:
    """The index in the object's label; None when there is none, or it is no decimal number ≥ 0."""
    text = labels_of(obj).get(label, "")
    valid = text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS
    return int(text) if valid else None


def slices(objects: Iterable[Object], replicas: int, label: str) -> dict[int, list[Object]]:
    """Objects by index: every index below `replicas`, empty or not, and those at or above it that exist.

    An object without a usable index is in no slice; it is logged.
    """
    found: dict[int, list[Object]] = {index: [] for index in range(replicas)}
    for obj in objects:
        index = replica_index(obj, label)
        if index is None:
            value = labels_of(obj).get(label)
            log.warning(
                "A replica's index can't be read; it is in no slice", object=key_of(obj), label=label, value=value
            )
        else:
            found.setdefault(index, []).append(obj)
    return found


def filter_for_replica_type(objects: Iterable[Object], replica_type: str, label: str) -> list[Object]:
    """Those whose label says the type; labels carry it in lower case."""
    wanted = replica_type.lower()
    return [obj for obj in objects if labels_of(obj).get(label) == wanted]
