"""Operations on nodes: what an operator may change of a node, and all nodes as the store shows them.

A node's `spec` is written by its agent when it starts and by operators. A change here is one transaction
`[cas spec, audit event]`, computed anew after a conflict. An undecodable record hides no neighbour.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from scheduler.base import NodeState
from store import audit, ops
from store.keys import Keys, is_node_name
from store.kv import Entry, Store, TxnConflict
from store.records import BadRecord, NodeAlive, NodeSpec, decode, encode
from store.selectors import check_labels

ATTEMPTS = 8


class NodeError(Exception):
    """An operation on a node that was not done; the message says why."""


class NodeView(NamedTuple):
    """A node. `alive` is its agent's record while the agent holds it, else None; `last` is that record either way."""

    spec: NodeSpec
    alive: NodeAlive | None
    last: NodeAlive | None

    def state(self) -> NodeState:
        """The node as a scheduler sees it, but for how long it has been dead: that nobody can tell from one look."""
        spec = self.spec
        return NodeState(
            spec.name, spec.labels, spec.capacity, spec.schedulable, spec.evict, live=self.alive is not None
        )


class ListedNodes(NamedTuple):
    """Nodes by name, in order, and the records that can't be read."""

    nodes: dict[str, NodeView]
    bad: list[BadRecord]


class Nodes:
    """Reads and changes nodes. `actor` is who the audit log will name. The store's errors pass through."""

    def __init__(
        self, store: Store, keys: Keys, *, actor: str | audit.Actor = "", rng: random.Random | None = None
    ) -> None:
        self._store = store
        self._keys = keys
        self._actor = actor
        self._rng = rng or random.Random()

    async def list(self) -> ListedNodes:
        """Every node."""
        listing = await self._store.list(self._keys.nodes, consistent=True)
        return nodes_of(self._keys, listing.entries)

    async def get(self, name: str) -> NodeView:
        """One node. Raises `NodeError`, `BadRecord`."""
        folder = await self._store.list(self._keys.node(name), consistent=True) if is_node_name(name) else None
        found = nodes_of(self._keys, folder.entries) if folder else ListedNodes({}, [])
        if name in found.nodes:
            return found.nodes[name]
        raise found.bad[0] if found.bad else _unknown(name)

    async def set_labels(self, name: str, labels: Mapping[str, str], removed: Iterable[str] = ()) -> NodeSpec:
        """Merge `labels` into the node's and drop those in `removed`. Raises `NodeError`, `BadLabel`, `BadRecord`."""
        check_labels(labels)
        gone = frozenset(removed)
        details = {"type": "node", "id": name, "set": dict(labels), "removed": sorted(gone)}

        def relabel(spec: NodeSpec) -> NodeSpec:
            kept = {key: value for key, value in spec.labels.items() if key not in gone}
            return msgspec.structs.replace(spec, labels=kept | dict(labels))

        return await self._update(name, relabel, "LABELS_CHANGED", details)

    async def cordon(self, name: str, *, evict: bool = False) -> NodeSpec:
        """No new pods for the node; with `evict`, those that are there should leave, too. Raises `NodeError`."""
        return await self._update(
            name,
            lambda spec: msgspec.structs.replace(spec, schedulable=False, evict=evict),
            "NODE_CORDONED",
            {"node": name, "evict": evict},
        )

    async def uncordon(self, name: str) -> NodeSpec:
        """Use the node again. Raises `NodeError`."""
        return await self._update(
            name,
            lambda spec: msgspec.structs.replace(spec, schedulable=True, evict=False),
            "NODE_UNCORDONED",
            {"node": name},
        )

    async def _update(
        self, name: str, change: Callable[[NodeSpec], NodeSpec], event: str, details: dict[str, Any]
    ) -> NodeSpec:
        """Change a node's spec; a change that changes nothing writes nothing."""
        for attempt in range(ATTEMPTS):
            key = self._keys.node_spec(name)
            entry = await self._store.get(key, consistent=True) if is_node_name(name) else None
            if entry is None:
                raise _unknown(name)
            old = decode(NodeSpec, key, entry.value)
            new = change(old)
            if new == old:
                return old
            writing = [
                ops.cas(key, encode(new), entry.modify_index),
                audit.event_op(self._keys, event, details, actor=self._actor),
            ]
            try:
                await self._store.txn(writing)
            except TxnConflict:
                await asyncio.sleep(self._rng.uniform(0, 0.02 * 2**attempt))
            else:
                return new
        raise NodeError(f"node {name} was changed by others {ATTEMPTS} times while we tried; try again")


def nodes_of(keys: Keys, entries: Iterable[Entry]) -> ListedNodes:
    """The nodes in a listing of `nodes/`. A node without a readable spec is not one."""
    specs: dict[str, NodeSpec] = {}
    agents: dict[str, tuple[NodeAlive, bool]] = {}
    bad: list[BadRecord] = []
    for entry in entries:
        name, _, leaf = entry.key.removeprefix(keys.nodes).partition("/")
        try:
            if leaf == "spec":
                specs[name] = decode(NodeSpec, entry.key, entry.value)
            elif leaf == "alive":
                agents[name] = decode(NodeAlive, entry.key, entry.value), entry.session is not None
            else:
                raise BadRecord(entry.key, "not a key of a node; those are spec and alive")
        except BadRecord as error:
            bad.append(error)
    return ListedNodes({name: _view(specs[name], agents.get(name)) for name in sorted(specs)}, bad)


def _view(spec: NodeSpec, agent: tuple[NodeAlive, bool] | None) -> NodeView:
    record, live = agent or (None, False)
    return NodeView(spec, record if live else None, record)


def _unknown(name: str) -> NodeError:
    return NodeError(f"there is no node {name}; `rcfarm node list` shows those that exist")
