"""A small fleet for tests: live nodes, RCs, and farms, over any store.

`Fleet` writes the operator's and the agents' records; the farms are real.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterable, Mapping

from rcfarm.config.settings import FarmSettings
from rcfarm.farm.farm import Farm
from rcfarm.operations.rcs import ReplicationControllers
from rcfarm.telemetry.prometheus import FarmMetrics
from scheduler.label import LabelScheduler
from scheduler.protocol import NodeDirectory, Scheduler
from store.kv import ops
from store.kv.protocol import Session, SessionSpec, Store
from store.kv.session import SessionKeeper
from store.schema.keys import Keys
from store.schema.records import (
    AuditEvent,
    Health,
    HealthState,
    Intent,
    Labels,
    NodeAlive,
    NodeSpec,
    RCSpec,
    RCStatus,
    Reality,
    decode,
    encode,
)
from tests.support.waiting import background

PATIENCE = 30.0  # seconds that a condition may take before the test fails


def manifest(pod_id: str, **extra: object) -> bytes:
    """Return a manifest that parses; `extra` gives it another digest."""
    return json.dumps(
        {"id": pod_id, "launchables": {"main": {"command": ["sleep", "1000"]}}, "config": dict(extra)}
    ).encode()


class Fleet:
    """Writes what operators and agents write, and reads what farms wrote."""

    def __init__(self, store: Store, keys: Keys) -> None:
        self.store, self.keys = store, keys
        self.rcs = ReplicationControllers(store, keys, actor="test")
        self._agents: dict[str, Session] = {}
        self._shared: Session | None = None

    async def add_nodes(self, names: Iterable[str], labels: Labels | None = None) -> None:
        """Register nodes; their agents share one session of a day."""
        if self._shared is None:
            self._shared = await self.store.create_session(SessionSpec("agents", ttl=86400.0, check_ttl=None))
        writes = []
        for name in names:
            self._agents[name] = self._shared
            writes.append(ops.put(self.keys.node_spec(name), encode(NodeSpec(name=name, labels=labels or {}))))
            alive = encode(NodeAlive(agent=name, since="2026-01-01T00:00:00Z"))
            writes.append(ops.lock(self.keys.node_alive(name), alive, self._shared.id))
        for start in range(0, len(writes), 64):
            await self.store.txn(writes[start : start + 64])

    def session_of(self, name: str) -> str:
        """Return the session of the node's agent."""
        return self._agents[name].id

    async def relabel(self, name: str, labels: Labels, **fields: bool) -> None:
        """Replace a node's labels; `schedulable=False`, `evict=True` cordon it."""
        spec = NodeSpec(name=name, labels=labels, **fields)  # type: ignore[arg-type]
        await self.store.put(self.keys.node_spec(name), encode(spec))

    async def kill_node(self, name: str) -> None:
        """Let the agent die: `alive` loses its session."""
        await self.store.txn(
            [ops.unlock(self.keys.node_alive(name), b'{"agent":"x","since":""}', self._agents[name].id)]
        )

    async def set_health(self, rc_id: str, health: Mapping[str, HealthState], *, manifest: str = "") -> None:
        """Write the health of the RC's pods as agents do; by default of the manifest that each intent names."""
        pod_id = (await self.rcs.get(rc_id)).rc_labels["pod_id"]
        for node, status in health.items():
            intent = await self.intent(node, pod_id)
            running = manifest or (intent.manifest if intent else "")
            key = self.keys.health(rc_id, node)
            await self.store.txn([ops.lock(key, encode(Health(status, running)), self._agents[node].id)])

    async def create(self, rc_id: str, replicas: int, *, pod_id: str = "", **fields: object) -> RCSpec:
        """Create an RC with its own manifest."""
        raw = manifest(pod_id or rc_id)
        return await self.rcs.create(raw, rc_id=rc_id, replicas=replicas, **fields)  # type: ignore[arg-type]

    async def nodes_of(self, rc_id: str) -> list[str]:
        """Return the nodes of the RC's placements, in order."""
        prefix = self.keys.rc(rc_id) + "pods/"
        return [key.removeprefix(prefix) for key in await self.store.keys(prefix)]

    async def intent(self, node: str, pod_id: str) -> Intent | None:
        entry = await self.store.get(self.keys.intent(node, pod_id))
        return decode(Intent, entry.key, entry.value) if entry else None

    async def intents_of(self, pod_id: str) -> dict[str, Intent]:
        """Return every intent of a pod id, by node."""
        found = {}
        for entry in (await self.store.list(self.keys.intents)).entries:
            node, _, name = entry.key.removeprefix(self.keys.intents).partition("/")
            if name == pod_id:
                found[node] = decode(Intent, entry.key, entry.value)
        return found

    async def status(self, rc_id: str) -> RCStatus | None:
        entry = await self.store.get(self.keys.status(rc_id))
        return decode(RCStatus, entry.key, entry.value) if entry else None

    async def reality(self, node: str, pod_id: str) -> Reality | None:
        entry = await self.store.get(self.keys.reality(node, pod_id))
        return decode(Reality, entry.key, entry.value) if entry else None

    async def owner_session(self, rc_id: str) -> str | None:
        entry = await self.store.get(self.keys.owner(rc_id))
        return entry.session if entry else None

    async def audit(self, rc_id: str, event_type: str = "REPLICATION_CONTROLLER_RETARGET") -> list[AuditEvent]:
        """Return the RC's events of a type, in the order in which they were written."""
        entries = sorted((await self.store.list(self.keys.audit)).entries, key=lambda entry: entry.create_index)
        events = [decode(AuditEvent, entry.key, entry.value) for entry in entries]
        return [e for e in events if e.event_type == event_type and e.event_details.get("rc") == rc_id]

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait, by watching the tree, until `condition()` (it may be async) is true."""
        index = 0
        async with asyncio.timeout(PATIENCE):
            while True:
                outcome = condition()
                if asyncio.iscoroutine(outcome):
                    outcome = await outcome
                if outcome:
                    return
                # The tree wakes us; conditions on a farm's memory are polled, too.
                listing = await self.store.watch(self.keys.root + "/", index, 0.05)
                index = listing.index

    async def until_placed(self, rc_id: str, nodes: list[str]) -> None:
        """Wait until the RC's placements and its status agree on `nodes`."""

        async def placed() -> bool:
            status = await self.status(rc_id)
            return await self.nodes_of(rc_id) == nodes and status is not None and status.placed == len(nodes)

        await self.until(placed)

    async def until_state(self, rc_id: str, state: str) -> RCStatus:
        """Wait for a state in the RC's status."""

        async def reached() -> bool:
            status = await self.status(rc_id)
            return status is not None and status.state == state

        await self.until(reached)
        status = await self.status(rc_id)
        assert status is not None
        return status


@contextlib.asynccontextmanager
async def running_farm(
    store: Store,
    keys: Keys,
    name: str = "farm-a",
    *,
    make_scheduler: Callable[[NodeDirectory], Scheduler] = LabelScheduler,
    keeper: SessionKeeper | None = None,
    **settings: object,
) -> AsyncIterator[Farm]:
    """Yield a running farm; it is stopped cleanly at the end."""
    clock = asyncio.get_running_loop().time  # so that it works on virtual time, too
    keeper = keeper or SessionKeeper(store, SessionSpec(f"farm {name}"), clock=clock)
    farm_settings = FarmSettings(name=name, **settings)  # type: ignore[arg-type]
    farm = Farm(store, keys, farm_settings, keeper, make_scheduler, metrics=FarmMetrics(), clock=clock)
    async with background(farm.start()):
        yield farm
