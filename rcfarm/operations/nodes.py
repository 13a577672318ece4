"""Operations on nodes: an operator's changes, and listings.

A node's `spec` is written by its agent at the start and by operators. A change here is one transaction `[cas spec,
audit event]`, computed again after a conflict. An undecodable record does not affect others.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from scheduler.protocol import NodeState
from store.errors import RcfarmError
from store.kv import ops
from store.kv.protocol import BadRecord, Entry, Op, Store
from store.schema import audit
from store.schema.keys import Keys, check_labels, is_node_name
from store.schema.records import Intent, NodeAlive, NodeSpec, decode, encode

SHOWN = 5  # pods named in an error
AT_ONCE = 30  # nodes that are marked in one transaction


class NodeError(RcfarmError):
    """An operation on a node failed; nothing was written."""


class NodeView(NamedTuple):
    """A node. `alive` is its agent's record while the agent holds it, else None; `last` is that record either way."""

    spec: NodeSpec
    alive: NodeAlive | None
    last: NodeAlive | None

    def state(self) -> NodeState:
        """Return the node's state for a scheduler, without the time since it is dead, which one read does not show."""
        spec = self.spec
        return NodeState(
            spec.name, spec.labels, spec.capacity, spec.schedulable, spec.evict, live=self.alive is not None
        )


class _PodThere(NamedTuple):
    """A pod on a node: its name for people, and the operations that give it up."""

    label: str
    removing: list[Op]


class ListedNodes(NamedTuple):
    """Nodes by name, in order, and the undecodable records."""

    nodes: dict[str, NodeView]
    bad: list[BadRecord]


class Nodes:
    """Reads and changes nodes. `actor`: named in the audit log. The store's errors pass through."""

    def __init__(
        self, store: Store, keys: Keys, *, actor: str | audit.Actor = "", rng: random.Random | None = None
    ) -> None:
        self._store = store
        self._keys = keys
        self._actor = actor
        self._rng = rng or random.Random()

    async def list(self) -> ListedNodes:
        """Return every node."""
        listing = await self._store.list(self._keys.nodes, consistent=True)
        return nodes_of(self._keys, listing.entries)

    async def get(self, name: str) -> NodeView:
        """Return one node. Raises `NodeError`, `BadRecord`."""
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
        """Place no new pods on the node; with `evict`, also move its pods away. Raises `NodeError`."""
        return await self._update(
            name,
            lambda spec: msgspec.structs.replace(spec, schedulable=False, evict=evict),
            "NODE_CORDONED",
            {"node": name, "evict": evict},
        )

    async def drain(self, names: Sequence[str]) -> None:
        """Mark several nodes to be emptied, together, so that no pod moves from one to another. Raises `NodeError`."""
        for start in range(0, len(names), AT_ONCE) if len(names) > AT_ONCE else ():
            await self._mark(names[start : start + AT_ONCE], evict=False)
        for start in range(0, len(names), AT_ONCE):
            await self._mark(names[start : start + AT_ONCE], evict=True)

    async def _mark(self, names: Sequence[str], *, evict: bool) -> None:
        """Cordon nodes in one transaction; those that are cordoned so already are left as they are."""

        async def attempt() -> None:
            writing: list[Op] = []
            for name in names:
                key = self._keys.node_spec(name)
                entry = await self._store.get(key, consistent=True)
                if entry is None:
                    raise _unknown(name)
                old = decode(NodeSpec, key, entry.value)
                new = msgspec.structs.replace(old, schedulable=False, evict=evict or old.evict)
                if new != old:
                    details = {"node": name, "evict": new.evict}
                    writing.append(ops.cas(key, encode(new), entry.modify_index))
                    writing.append(audit.event_op(self._keys, "NODE_CORDONED", details, actor=self._actor))
            if writing:
                await self._store.txn(writing)

        await ops.retry_conflicts(f"node {names[0]}", attempt, rng=self._rng, error=NodeError)

    async def uncordon(self, name: str) -> NodeSpec:
        """Use the node again. Raises `NodeError`."""
        return await self._update(
            name,
            lambda spec: msgspec.structs.replace(spec, schedulable=True, evict=False),
            "NODE_UNCORDONED",
            {"node": name},
        )

    async def removable(self, name: str, *, release_pods: bool = False) -> Sequence[str]:
        """Return the pods that the removal of the node would give up, as `POD (rc RC)`. Raises `NodeError` where the
        node may not be removed: while its agent lives, or while pods are placed there and are not released."""
        return [found.label for found in (await self._placed(name, release_pods))[1]]

    async def remove(self, name: str, *, release_pods: bool = False) -> Sequence[str]:
        """Forget a dead node, with what its agent has reported. Return the pods that were given up.

        With `release_pods`, the placements on the node are removed first, so that the owners of their RCs place other
        pods. Every transaction is refused once an agent holds the node. Raises as `removable`.
        """

        async def attempt() -> Sequence[str]:
            still_dead, found = await self._placed(name, release_pods)
            for pod in found:
                await self._store.txn([*still_dead, ops.check_not_exists(self._keys.brake), *pod.removing])
            keys = self._keys
            trees = [keys.node_realities(name), keys.node_task_pods(name), *keys.node_healths(name), keys.node(name)]
            details = {"node": name, "released": [pod.label for pod in found]}
            event = audit.event_op(keys, "NODE_REMOVED", details, actor=self._actor)
            removing = [*map(ops.delete_tree, trees), ops.delete(keys.reservations(name)), event]
            await self._store.txn([*still_dead, *removing])
            return [pod.label for pod in found]

        return await ops.retry_conflicts(f"node {name}", attempt, rng=self._rng, error=NodeError)

    async def _placed(self, name: str, release_pods: bool) -> tuple[Sequence[Op], Sequence[_PodThere]]:
        """Return the checks that the node is still as it was read, and its pods. Raises as `removable`."""
        keys, store = self._keys, self._store
        folder = (await store.list(keys.node(name), consistent=True)).entries if is_node_name(name) else ()
        if not folder:
            raise _unknown(name)
        alive = next((entry for entry in folder if entry.key == keys.node_alive(name)), None)
        if alive is not None and alive.session:
            raise NodeError(
                f"node {name}: its agent lives; move its pods away with `rcfarm node drain {name} --wait`, stop the "
                f"agent, and then run `rcfarm node remove {name}`"
            )
        still_dead = [ops.check_index(entry.key, entry.modify_index) for entry in folder]
        still_dead += [] if alive else [ops.check_not_exists(keys.node_alive(name))]
        found = []
        for entry in (await store.list(keys.node_intents(name), consistent=True)).entries:
            intent = decode(Intent, entry.key, entry.value)
            if intent.task:
                raise NodeError(
                    f"node {name}: a pod of task {intent.task} is there; `rcfarm task abort {intent.task}` ends it"
                )
            details = {"rc": intent.rc, "added": [], "removed": [name], "why": "node removed"}
            event = audit.event_op(keys, "REPLICATION_CONTROLLER_RETARGET", details, actor=self._actor)
            placement = ops.delete(keys.pod(intent.rc, name))
            removing = [ops.delete_cas(entry.key, entry.modify_index), placement, event]
            pod_id = keys.parse_pod(entry.key).pod_id
            found.append(_PodThere(f"{pod_id} (rc {intent.rc})", removing))
        if found and not release_pods:
            raise NodeError(
                f"node {name}: {len(found)} {'pod is' if len(found) == 1 else 'pods are'} placed there: "
                f"{', '.join(pod.label for pod in found[:SHOWN])}{' and others' if len(found) > SHOWN else ''}; "
                f"`rcfarm node drain {name} --wait` moves those of dynamic RCs, and "
                f"`rcfarm node remove {name} --release-pods` gives up the others"
            )
        if found and await store.get(keys.brake, consistent=True) is not None:
            raise NodeError(f"node {name}: the brake is on, so its pods are not given up; see `rcfarm brake status`")
        return still_dead, found

    async def _update(
        self, name: str, change: Callable[[NodeSpec], NodeSpec], event: str, details: dict[str, Any]
    ) -> NodeSpec:
        """Change a node's spec; a change that changes nothing writes nothing."""
        key = self._keys.node_spec(name)

        async def attempt() -> NodeSpec:
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
            await self._store.txn(writing)
            return new

        return await ops.retry_conflicts(f"node {name}", attempt, rng=self._rng, error=NodeError)


def nodes_of(keys: Keys, entries: Iterable[Entry]) -> ListedNodes:
    """Return the nodes in a listing of `nodes/`; those without a readable spec are left out."""
    specs: dict[str, NodeSpec] = {}
    agents: dict[str, tuple[NodeAlive, bool]] = {}
    bad: list[BadRecord] = []
    for entry in entries:
        name, leaf = keys.parse_node(entry.key)
        try:
            if leaf == "spec":
                specs[name] = decode(NodeSpec, entry.key, entry.value)
            elif leaf == "alive":
                agents[name] = decode(NodeAlive, entry.key, entry.value), entry.session is not None
            else:
                raise BadRecord(entry.key, "not a key of a node; those are spec and alive")
        except BadRecord as error:
            bad.append(error)
    nodes = {}
    for name in sorted(specs):
        agent, is_live = agents.get(name, (None, False))
        nodes[name] = NodeView(specs[name], agent if is_live else None, agent)
    return ListedNodes(nodes, bad)


def _unknown(name: str) -> NodeError:
    return NodeError(f"there is no node {name}; `rcfarm node list` shows those that exist")
