"""Nodes, manifests and stored reservations for tests of the PoolScheduler."""

from __future__ import annotations

from collections.abc import Mapping

from scheduler.pool.ledger import NodeReservations, Reservation, fits, total
from scheduler.protocol import NodeState
from store.kv.protocol import Store
from store.schema.keys import Keys
from store.schema.manifest import Launchable, Manifest, Resources, digest
from store.schema.records import Capacity, Intent, decode, encode

GIB = 1024**3


class Directory:
    """A NodeDirectory that a test changes."""

    def __init__(self, *nodes: NodeState) -> None:
        self._nodes: dict[str, NodeState] = {}
        self.version = 0
        for node in nodes:
            self.put(node)

    def nodes(self) -> Mapping[str, NodeState]:
        return self._nodes

    def put(self, node: NodeState) -> None:
        self._nodes[node.name] = node
        self.version += 1

    def change(self, name: str, **fields: object) -> None:
        self.put(self._nodes[name]._replace(**fields))  # type: ignore[arg-type]


def pool_node(name: str, cpu: int = 4000, memory: int = 16 * GIB, pool: str = "web", **devices: int) -> NodeState:
    return NodeState(name, {"pool": pool}, Capacity(cpu, memory, devices))


def manifest(pod_id: str, cpu: int = 0, memory: int = 0, **devices: int) -> Manifest:
    resources = Resources(cpu=cpu, memory=memory, devices=devices)
    return Manifest(id=pod_id, launchables={"main": Launchable(command=["true"], resources=resources)})


async def place(store: Store, keys: Keys, node: str, pod: Manifest, rc_id: str = "web") -> None:
    """Write the pod's intent and manifest, as its RC's owner does."""
    raw = encode(pod)
    await store.put(keys.manifest(digest(raw)), raw)
    await store.put(keys.intent(node, pod.id), encode(Intent(manifest=digest(raw), rc=rc_id, shard="00")))


async def reserved(store: Store, keys: Keys) -> dict[str, dict[str, Reservation]]:
    """Return what the store says is reserved, by node and pod id."""
    listing = await store.list(keys.pools)
    return {
        entry.key.removeprefix(keys.pools): decode(NodeReservations, entry.key, entry.value).pods
        for entry in listing.entries
    }


def overcommitted(pods: Mapping[str, Reservation], capacity: Capacity) -> bool:
    return not fits(total(held.request for held in pods.values()), Capacity(), capacity)
