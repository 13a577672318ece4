"""The Labeler (as p2's `Labeler`): labels of nodes, pods and RCs.

Labels are stored in a node's spec, in an RC's spec (`rc_labels`), and twice for a pod: in its RC's placement (where
farms read them) and in its intent (where its agent does); both are written in one transaction. A pod's id is
`<node>/<pod id>`.

Labels are merged into the stored ones, under compare-and-swap: a commit based on an older read is refused with
`TxnConflict`. For an RC the change is an edit of its spec: it raises the generation, and is refused while the RC is
being deleted, or another process holds its mutation lock. `set_labels` and `remove_labels` do the round trip, with
retries and an audit event; the `…_txn` forms add to a transaction of the caller, which may touch an object's labels
once. Labels that rcfarm relies on (a pod's RC and pod id) can't be changed here.

When many objects are read, a record that can't be decoded is reported and left out; the others are returned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

import msgspec
import structlog

from store.errors import RcfarmError
from store.kv import ops
from store.kv.ops import Transaction
from store.kv.protocol import BadRecord, Entry, Op, Store, TxnConflict
from store.schema.audit import ChangeRefused, event_op, unlocked
from store.schema.keys import BadKey, BadLabel, Keys, check_labels, is_dns_label, is_node_name
from store.schema.records import (
    POD_ID_LABEL,
    RC_ID_LABEL,
    Intent,
    Labels,
    NodeSpec,
    RCSpec,
    decode,
    decode_labels,
    encode,
)
from store.schema.selectors import Selector
from store.timing import Backoff, retried

log = structlog.get_logger(__name__)

LabelType = Literal["node", "pod", "rc"]
ATTEMPTS = 16
_FIXED: Mapping[LabelType, frozenset[str]] = {
    "node": frozenset(),
    "pod": frozenset({RC_ID_LABEL, POD_ID_LABEL}),
    "rc": frozenset({POD_ID_LABEL, RC_ID_LABEL}),
}


class UnknownObject(RcfarmError, LookupError):
    """There is no such node, pod or RC; the message names it."""


class Labeled(NamedTuple):
    """An object and its labels (p2's `labels.Labeled`)."""

    label_type: LabelType
    id: str
    labels: Labels


class PodLocation(NamedTuple):
    """The node and the id of a placed pod."""

    node: str
    pod_id: str


class LabelMatcher(Protocol):
    """The read-only part of a `Labeler` (p2's `LabelMatcher`)."""

    async def get_matches(self, selector: Selector, label_type: LabelType) -> Sequence[Labeled]:
        """Return every object of the type whose labels match."""


class _LabelRecord(NamedTuple):
    """One stored record that holds an object's labels, and a function that encodes it with other labels."""

    entry: Entry
    labels: Labels
    encode: Callable[[Labels], bytes]
    conditions: Sequence[Op] = ()


class Labeler:
    """Reads and writes labels. `on_bad` is called for every record that can't be decoded, which is also logged."""

    def __init__(self, store: Store, keys: Keys, *, on_bad: Callable[[BadRecord], None] | None = None) -> None:
        self._store = store
        self._keys = keys
        self._on_bad = on_bad

    async def set_labels_txn(
        self, txn: Transaction, label_type: LabelType, object_id: str, labels: Mapping[str, str]
    ) -> None:
        """Merge `labels` into the object's labels when `txn` commits.

        Raises `UnknownObject`, `BadLabel`, `ChangeRefused`, `TooLarge`.
        """
        check_labels(labels)
        await self._change_txn(txn, label_type, object_id, set_=labels)

    async def remove_labels_txn(
        self, txn: Transaction, label_type: LabelType, object_id: str, keys_to_remove: Iterable[str]
    ) -> None:
        """Remove these labels, as far as the object has them, when `txn` commits. Raises as `set_labels_txn`."""
        await self._change_txn(txn, label_type, object_id, removed=frozenset(keys_to_remove))

    async def set_labels(
        self, label_type: LabelType, object_id: str, labels: Mapping[str, str], *, actor: str, attempts: int = ATTEMPTS
    ) -> None:
        """Merge `labels` into the object's labels at once; retry after each concurrent change.

        Raises `UnknownObject`, `BadLabel`, `ChangeRefused`, and the last `TxnConflict` after `attempts` attempts.
        """
        check_labels(labels)
        await self._change(label_type, object_id, actor, attempts, set_=labels)

    async def remove_labels(
        self, label_type: LabelType, object_id: str, keys: Iterable[str], *, actor: str, attempts: int = ATTEMPTS
    ) -> None:
        """Remove these labels at once. Raises as `set_labels`."""
        await self._change(label_type, object_id, actor, attempts, removed=frozenset(keys))

    async def get_labels(self, label_type: LabelType, object_id: str) -> Labeled:
        """Return the object's labels. Raises `UnknownObject`, `BadRecord`."""
        records = await self._label_records(label_type, object_id)
        return Labeled(label_type, object_id, records[0].labels)

    async def get_matches(self, selector: Selector, label_type: LabelType) -> list[Labeled]:
        """Return every object of the type whose labels match, in key order; none is an empty list, not an error."""
        prefix = self._keys.nodes if label_type == "node" else self._keys.rcs
        if label_type == "pod" and (rc_id := selector.required(RC_ID_LABEL)):
            prefix = self._keys.rc(rc_id) + "pods/"  # only that RC's folder is needed
        listing = await self._store.list(prefix)
        found = (self._decoded(entry, label_type) for entry in listing.entries)
        return [labeled for labeled in found if labeled is not None and selector.matches(labeled.labels)]

    async def _change(
        self,
        label_type: LabelType,
        object_id: str,
        actor: str,
        attempts: int,
        *,
        set_: Mapping[str, str] | None = None,
        removed: frozenset[str] = frozenset(),
    ) -> None:
        details = {"type": label_type, "id": object_id, "set": dict(set_ or {}), "removed": sorted(removed)}

        async def attempt() -> None:
            txn = Transaction()
            rc_id = await self._change_txn(txn, label_type, object_id, set_=set_ or {}, removed=removed)
            txn.add(event_op(self._keys, "LABELS_CHANGED", details | ({"rc": rc_id} if rc_id else {}), actor=actor))
            await txn.commit(self._store)

        await retried(attempt, on=TxnConflict, backoff=Backoff(0.0, 0.0), attempts=attempts)

    async def _change_txn(
        self,
        txn: Transaction,
        label_type: LabelType,
        object_id: str,
        *,
        set_: Mapping[str, str] | None = None,
        removed: frozenset[str] = frozenset(),
    ) -> str:
        """Add the change to `txn`. Return the RC that the object is or belongs to, or ""."""
        records = await self._label_records(label_type, object_id, changing=True)
        before = records[0].labels
        after = {key: value for key, value in before.items() if key not in removed} | dict(set_ or {})
        for key in _FIXED[label_type]:
            if after.get(key) != before.get(key):
                raise BadLabel(f"label {key!r} of {label_type} {object_id} says what it is; it can't be changed")
        conditions = (condition for record in records for condition in record.conditions)
        writes = (ops.cas(record.entry.key, record.encode(after), record.entry.modify_index) for record in records)
        txn.add(*conditions, *writes)
        return object_id if label_type == "rc" else before.get(RC_ID_LABEL, "")

    async def _label_records(
        self, label_type: LabelType, object_id: str, *, changing: bool = False
    ) -> list[_LabelRecord]:
        """Return the records that hold the object's labels; the first one is authoritative. `changing`: include the
        conditions for a change, and raise `ChangeRefused` when it is not allowed."""
        if label_type == "node":
            if not is_node_name(object_id):
                raise UnknownObject(f"{object_id!r} is not a node name")
            entry = await self._read(self._keys.node_spec(object_id), f"node {object_id!r}")
            node = decode(NodeSpec, entry.key, entry.value)
            return [
                _LabelRecord(entry, node.labels, lambda labels: encode(msgspec.structs.replace(node, labels=labels)))
            ]
        if label_type == "rc":
            if not is_dns_label(object_id):
                raise UnknownObject(f"{object_id!r} is not an RC id")
            entry = await self._read(self._keys.spec(object_id), f"rc {object_id!r}")
            spec = decode(RCSpec, entry.key, entry.value)
            if changing and spec.deleting:
                raise ChangeRefused(f"rc {object_id} is being deleted and takes no more changes")
            conditions = await unlocked(self._store, self._keys, object_id) if changing else ()

            def encoded(labels: Labels) -> bytes:
                generation = spec.generation + (labels != spec.rc_labels)
                return encode(msgspec.structs.replace(spec, rc_labels=labels, generation=generation))

            return [_LabelRecord(entry, spec.rc_labels, encoded, conditions)]
        name, _, pod_id = object_id.partition("/")
        if not (is_node_name(name) and is_dns_label(pod_id)):
            raise UnknownObject(f"{object_id!r} is not a pod; name it as <node>/<pod id>")
        stored = await self._read(self._keys.intent(name, pod_id), f"pod {object_id!r}")
        intent = decode(Intent, stored.key, stored.value)
        entry = await self._read(self._keys.pod(intent.rc, name), f"placement of pod {object_id!r} in rc {intent.rc}")
        return [
            _LabelRecord(entry, decode_labels(entry.key, entry.value), encode),
            _LabelRecord(stored, intent.labels, lambda labels: encode(msgspec.structs.replace(intent, labels=labels))),
        ]

    async def _read(self, key: str, what: str) -> Entry:
        entry = await self._store.get(key)
        if entry is None:
            raise UnknownObject(f"there is no {what} ({key} does not exist)")
        return entry

    def _decoded(self, entry: Entry, label_type: LabelType) -> Labeled | None:
        """Return the entry's object, or None for another type or an undecodable record, which is reported."""
        try:
            if label_type == "node":
                name, leaf = self._keys.parse_node(entry.key)
                if leaf != "spec":
                    return None
                return Labeled("node", name, decode(NodeSpec, entry.key, entry.value).labels)
            try:
                key = self._keys.parse_rc(entry.key)
            except BadKey as error:
                raise BadRecord(entry.key, str(error)) from error
            if label_type == "rc" and key.kind == "spec":
                return Labeled("rc", key.rc, decode(RCSpec, entry.key, entry.value).rc_labels)
            if label_type == "rc" or key.kind != "pods":
                return None
            labels = decode_labels(entry.key, entry.value)
            if labels.get(RC_ID_LABEL) != key.rc or POD_ID_LABEL not in labels:
                raise BadRecord(entry.key, f"a pod's labels must have {POD_ID_LABEL}, and {RC_ID_LABEL}={key.rc}")
            return Labeled("pod", f"{key.node}/{labels[POD_ID_LABEL]}", labels)
        except BadRecord as error:
            log.error("Left out an object whose labels can't be decoded", key=error.key, reason=error.reason)
            if self._on_bad is not None:
                self._on_bad(error)
            return None


async def current_pods(rc_id: str, labeler: LabelMatcher) -> list[PodLocation]:
    """Return all pods managed by an RC with the given id (p2's `CurrentPods`); empty when there are none."""
    matches = await labeler.get_matches(Selector.parse(f"{RC_ID_LABEL}={rc_id}"), "pod")
    parts = (pod.id.partition("/") for pod in matches)
    return [PodLocation(node, pod_id) for node, _, pod_id in parts]
