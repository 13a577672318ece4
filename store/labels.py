"""The Labeler (the seed's `Labeler`): labels of nodes, pods and RCs.

Where labels live: a node's in its spec, an RC's in its spec (`rc_labels`), a pod's twice, in its RC's placement (where
farms read them) and in its intent (where its agent does); both are written in one transaction. A pod's id is
`<node>/<pod id>`.

Labels are set by merging into what is there, under compare-and-swap: whoever commits on top of an older read is refused
with `TxnConflict`. For an RC that is an edit of its spec: it raises the generation, and is refused while the RC is
being deleted, or another process holds its mutation lock. `set_labels` and `remove_labels` do the round trip, with
retries and an audit event; the `…_txn` forms add to a transaction of the caller, which may touch an object's labels
once. Labels that rcfarm itself lives by (which RC and which pod id a pod is of) can't be changed here.

Reading many: a record that can't be decoded is reported and left out, it never hides its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

import msgspec
import structlog

from store import ops
from store.audit import event_op
from store.keys import BadKey, Keys, is_dns_label, is_node_name
from store.kv import Entry, Op, Store, TxnConflict
from store.mutation import ChangeRefused, unlocked
from store.records import (
    POD_ID_LABEL,
    RC_ID_LABEL,
    BadRecord,
    Intent,
    Labels,
    NodeSpec,
    RCSpec,
    decode,
    decode_labels,
    encode,
)
from store.selectors import BadLabel, Selector, check_labels
from store.transaction import Transaction

log = structlog.get_logger(__name__)

LabelType = Literal["node", "pod", "rc"]
ATTEMPTS = 16
_FIXED: Mapping[LabelType, frozenset[str]] = {
    "node": frozenset(),
    "pod": frozenset({RC_ID_LABEL, POD_ID_LABEL}),
    "rc": frozenset({POD_ID_LABEL, RC_ID_LABEL}),
}


class UnknownObject(LookupError):
    """There is no such node, pod or RC; the message names it."""


class Labeled(NamedTuple):
    """An object and its labels (the seed's `labels.Labeled`)."""

    label_type: LabelType
    id: str
    labels: Labels


class PodLocation(NamedTuple):
    """Where a pod is placed."""

    node: str
    pod_id: str


class LabelMatcher(Protocol):
    """The part of a `Labeler` that only reads (the seed's `LabelMatcher`)."""

    async def get_matches(self, selector: Selector, label_type: LabelType) -> Sequence[Labeled]:
        """Every object of the type whose labels match."""


class _Home(NamedTuple):
    """One stored record that holds an object's labels, and how to write it with others."""

    entry: Entry
    labels: Labels
    encode: Callable[[Labels], bytes]
    conditions: tuple[Op, ...] = ()


class Labeler:
    """Reads and writes labels. `on_bad` is told of every record that can't be decoded, besides the log."""

    def __init__(self, store: Store, keys: Keys, *, on_bad: Callable[[BadRecord], None] | None = None) -> None:
        self._store = store
        self._keys = keys
        self._on_bad = on_bad

    async def set_labels_txn(
        self, txn: Transaction, label_type: LabelType, object_id: str, labels: Mapping[str, str]
    ) -> None:
        """Merge `labels` into the object's, when `txn` commits.

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
        """Merge `labels` into the object's at once, again after each concurrent change.

        Raises `UnknownObject`, `BadLabel`, `ChangeRefused`, and the last `TxnConflict` after so many attempts.
        """
        check_labels(labels)
        await self._change(label_type, object_id, actor, attempts, set_=labels)

    async def remove_labels(
        self, label_type: LabelType, object_id: str, keys: Iterable[str], *, actor: str, attempts: int = ATTEMPTS
    ) -> None:
        """Remove these labels at once. Raises as `set_labels`."""
        await self._change(label_type, object_id, actor, attempts, removed=frozenset(keys))

    async def get_labels(self, label_type: LabelType, object_id: str) -> Labeled:
        """The object's labels. Raises `UnknownObject`, `BadRecord`."""
        homes = await self._homes(label_type, object_id)
        return Labeled(label_type, object_id, homes[0].labels)

    async def get_matches(self, selector: Selector, label_type: LabelType) -> list[Labeled]:
        """Every object of the type whose labels match, in key order; none is an empty list, not an error."""
        listing = await self._store.list(self._prefix(selector, label_type))
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
        for attempt in range(1, attempts + 1):
            txn = Transaction()
            rc_id = await self._change_txn(txn, label_type, object_id, set_=set_ or {}, removed=removed)
            txn.add(event_op(self._keys, "LABELS_CHANGED", details | ({"rc": rc_id} if rc_id else {}), actor=actor))
            try:
                await txn.commit(self._store)
            except TxnConflict:
                if attempt == attempts:
                    raise
            else:
                return

    async def _change_txn(
        self,
        txn: Transaction,
        label_type: LabelType,
        object_id: str,
        *,
        set_: Mapping[str, str] | None = None,
        removed: frozenset[str] = frozenset(),
    ) -> str:
        """Add the change to `txn`; the RC that the object is, or belongs to, or ""."""
        homes = await self._homes(label_type, object_id, changing=True)
        before = homes[0].labels
        after = {key: value for key, value in before.items() if key not in removed} | dict(set_ or {})
        for key in _FIXED[label_type]:
            if after.get(key) != before.get(key):
                raise BadLabel(f"label {key!r} of {label_type} {object_id} says what it is; it can't be changed")
        conditions = (condition for home in homes for condition in home.conditions)
        writes = (ops.cas(home.entry.key, home.encode(after), home.entry.modify_index) for home in homes)
        txn.add(*conditions, *writes)
        return object_id if label_type == "rc" else before.get(RC_ID_LABEL, "")

    async def _homes(self, label_type: LabelType, object_id: str, *, changing: bool = False) -> list[_Home]:
        """The records that hold the object's labels; those of the first one count. `changing`: with the conditions for
        a change, for which it raises `ChangeRefused`."""
        if label_type == "node":
            return [await self._node_home(object_id)]
        if label_type == "rc":
            return [await self._rc_home(object_id, changing)]
        return await self._pod_homes(object_id)

    async def _node_home(self, node: str) -> _Home:
        if not is_node_name(node):
            raise UnknownObject(f"{node!r} is not a node name")
        entry = await self._read(self._keys.node_spec(node), f"node {node!r}")
        spec = decode(NodeSpec, entry.key, entry.value)
        return _Home(entry, spec.labels, lambda labels: encode(msgspec.structs.replace(spec, labels=labels)))

    async def _rc_home(self, rc_id: str, changing: bool) -> _Home:
        if not is_dns_label(rc_id):
            raise UnknownObject(f"{rc_id!r} is not an RC id")
        entry = await self._read(self._keys.spec(rc_id), f"rc {rc_id!r}")
        spec = decode(RCSpec, entry.key, entry.value)
        if changing and spec.deleting:
            raise ChangeRefused(f"rc {rc_id} is being deleted and takes no more changes")
        conditions = (await unlocked(self._store, self._keys, rc_id),) if changing else ()

        def encoded(labels: Labels) -> bytes:
            generation = spec.generation + (labels != spec.rc_labels)
            return encode(msgspec.structs.replace(spec, rc_labels=labels, generation=generation))

        return _Home(entry, spec.rc_labels, encoded, conditions)

    async def _pod_homes(self, object_id: str) -> list[_Home]:
        node, _, pod_id = object_id.partition("/")
        if not (is_node_name(node) and is_dns_label(pod_id)):
            raise UnknownObject(f"{object_id!r} is not a pod; name it as <node>/<pod id>")
        order = await self._read(self._keys.intent(node, pod_id), f"pod {object_id!r}")
        intent = decode(Intent, order.key, order.value)
        entry = await self._read(self._keys.pod(intent.rc, node), f"placement of pod {object_id!r} in rc {intent.rc}")
        return [
            _Home(entry, decode_labels(entry.key, entry.value), encode),
            _Home(order, intent.labels, lambda labels: encode(msgspec.structs.replace(intent, labels=labels))),
        ]

    async def _read(self, key: str, what: str) -> Entry:
        entry = await self._store.get(key)
        if entry is None:
            raise UnknownObject(f"there is no {what} ({key} does not exist)")
        return entry

    def _prefix(self, selector: Selector, label_type: LabelType) -> str:
        """What to list. A selector that asks for the pods of one RC needs that RC's folder only."""
        if label_type == "node":
            return self._keys.nodes
        rc_id = selector.required(RC_ID_LABEL) if label_type == "pod" else None
        return self._keys.rc(rc_id) + "pods/" if rc_id else self._keys.rcs

    def _decoded(self, entry: Entry, label_type: LabelType) -> Labeled | None:
        """The object that the entry is, or None: it is of another type, or can't be decoded, which is reported."""
        try:
            return self._node(entry) if label_type == "node" else self._of_rc(entry, label_type)
        except BadRecord as error:
            log.error("Left out an object whose labels can't be read", key=error.key, reason=error.reason)
            if self._on_bad is not None:
                self._on_bad(error)
            return None

    def _node(self, entry: Entry) -> Labeled | None:
        name, _, leaf = entry.key[len(self._keys.nodes) :].partition("/")
        return Labeled("node", name, decode(NodeSpec, entry.key, entry.value).labels) if leaf == "spec" else None

    def _of_rc(self, entry: Entry, label_type: LabelType) -> Labeled | None:
        try:
            key = self._keys.classify(entry.key)
        except BadKey as error:
            raise BadRecord(entry.key, str(error)) from error
        if label_type == "rc":
            return (
                Labeled("rc", key.rc, decode(RCSpec, entry.key, entry.value).rc_labels) if key.kind == "spec" else None
            )
        return self._pod(entry, key.rc, key.node) if key.kind == "pods" else None

    def _pod(self, entry: Entry, rc_id: str, node: str) -> Labeled:
        labels = decode_labels(entry.key, entry.value)
        if labels.get(RC_ID_LABEL) != rc_id or POD_ID_LABEL not in labels:
            raise BadRecord(entry.key, f"a pod's labels must have {POD_ID_LABEL}, and {RC_ID_LABEL}={rc_id}")
        return Labeled("pod", f"{node}/{labels[POD_ID_LABEL]}", labels)


async def current_pods(rc_id: str, labeler: LabelMatcher) -> list[PodLocation]:
    """All pods managed by an RC with the given id (the seed's `CurrentPods`); empty when there are none."""
    matches = await labeler.get_matches(Selector.parse(f"{RC_ID_LABEL}={rc_id}"), "pod")
    return list(_locations(matches))


def _locations(pods: Iterable[Labeled]) -> Iterator[PodLocation]:
    for pod in pods:
        node, _, pod_id = pod.id.partition("/")
        yield PodLocation(node, pod_id)
