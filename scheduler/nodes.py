"""NodeTable: the state of every node for schedulers, from the records under `nodes/`.

The model: a TreeView feeds `apply` with changed records; the table folds a node's `spec` and `alive` into one
`NodeState`, in constant time per change. `version` grows only when some state differs afterwards, so that results
computed from the table stay valid while agents merely renew their records.

A node is *live* while its `alive` key carries a session. It is *lost* once it has been without one for
`node_lost_after` seconds, on this process's clock, counted from when it first saw it so. `run` wakes exactly then; it
reads the tree again before it marks the node lost, because an unreachable store shows no changes, and a lost node's
pods are moved.

All of it lives in one event loop. `on_change` is called there, after the table shows the change.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import NamedTuple

import structlog

from scheduler.protocol import Absence, NodeState
from store.kv.protocol import BadRecord, Store, StoreError
from store.kv.view import Change, RefreshBudget, TreeView, Watched
from store.schema.keys import Keys, is_node_name
from store.schema.records import Capacity, Labels, NodeAlive, NodeSpec, decode, rfc3339

log = structlog.get_logger(__name__)

NODE_LOST_AFTER = 60.0  # seconds
TIMER_SLACK = 1e-6  # seconds: loops may fire a timer early by their clock's resolution
SHOWN_LOST = 20  # nodes named in one message
CONFIRM_PAUSE = 1.0  # seconds between attempts to read the tree before nodes are marked lost

NodeRecord = NodeSpec | NodeAlive


class NodeChange(NamedTuple):
    """A change of one node. `old` is None for a new node, `new` for a removed one."""

    name: str
    old: NodeState | None
    new: NodeState | None

    @property
    def concerns_pods(self) -> bool:
        """Return whether it may affect the pods on the node: a briefly dead node keeps them."""
        old, new = self.old, self.new
        return old is None or new is None or _keeps(old) != _keeps(new)

    @property
    def offered(self) -> NodeState | None:
        """Return the node if it may take pods now that it could not take before, else None."""
        old, new = self.old, self.new
        if new is None or not _takes_pods(new):
            return None
        return None if old is not None and _takes_pods(old) and _keeps(old) == _keeps(new) else new


def _keeps(node: NodeState) -> tuple[Labels, Capacity, bool, bool]:
    """Return the fields that decide on a node's existing pods."""
    return node.labels, node.capacity, node.evict, node.lost


def _takes_pods(node: NodeState) -> bool:
    return node.live and node.schedulable and not node.evict and not node.lost


class NodeTable:
    """A `NodeDirectory` kept current by `apply`. `node_lost_after` in seconds; `clock` is monotonic, in seconds.

    `version` grows with every change of any node.
    """

    def __init__(
        self,
        keys: Keys,
        *,
        node_lost_after: float = NODE_LOST_AFTER,
        clock: Callable[[], float] = time.monotonic,
        on_change: Callable[[list[NodeChange]], None] | None = None,
    ) -> None:
        self._keys = keys
        self._lost_after = node_lost_after
        self._clock = clock
        self._on_change = on_change
        self.version = 0
        self._nodes: dict[str, NodeState] = {}
        self._specs: dict[str, NodeSpec] = {}
        self._live: set[str] = set()
        self._dead_since: dict[str, float] = {}  # not lost yet, longest dead first
        self._lost: set[str] = set()
        self._absences: dict[str, Absence] = {}
        self._next_to_lose = asyncio.Event()

    def nodes(self) -> Mapping[str, NodeState]:
        """Return every known node by name; always current, so don't keep it across an await."""
        return MappingProxyType(self._nodes)

    def absence(self, name: str) -> Absence | None:
        """Return since when the node is dead; None if it is live or unknown."""
        absence = self._absences.get(name)
        return absence._replace(is_lost=name in self._lost) if absence else None

    def apply(self, changes: Iterable[Change[NodeRecord]]) -> None:
        """Apply changed records, from a TreeView's `on_change`."""
        touched: dict[str, None] = {}
        for key, _, new, _ in changes:
            name, leaf = self._keys.parse_node(key)
            touched[name] = None
            if leaf == "alive":
                (self._live.discard if new is None or new.session is None else self._live.add)(name)
            elif new is not None and isinstance(new.value, NodeSpec):
                self._specs[name] = new.value
            elif leaf == "spec":
                self._specs.pop(name, None)
        self._fold(touched)

    async def run(self, confirm: Callable[[], Awaitable[None]]) -> None:
        """Mark nodes lost when they are due, until cancelled.

        `confirm` brings the table up to date with a consistent read; while it raises `StoreError`, no node is lost.
        """
        while True:
            self._next_to_lose.clear()
            first = next(iter(self._dead_since.values()), None)
            remaining = None if first is None else first + self._lost_after - self._clock()
            if remaining is None or remaining > TIMER_SLACK:
                with suppress(TimeoutError):
                    async with asyncio.timeout(remaining):
                        await self._next_to_lose.wait()
                continue  # look again: the node may have come back at the same moment
            try:
                await confirm()
            except StoreError as error:
                log.warning("Could not confirm lost nodes: store read failed", error=str(error))
                await asyncio.sleep(CONFIRM_PAUSE)
            else:
                self.lose_due()

    def lose_due(self) -> None:
        """Mark every node lost that has been dead for long enough by now."""
        now = self._clock() + TIMER_SLACK
        due = [name for name, since in self._dead_since.items() if since + self._lost_after <= now]
        for name in due:
            del self._dead_since[name]
            self._lost.add(name)
        if due:
            shown = due[:SHOWN_LOST]
            log.warning("Nodes lost; their pods may be moved", nodes=shown, count=len(due), seconds=self._lost_after)
        self._fold(due)

    def _fold(self, names: Iterable[str]) -> None:
        """Recompute these nodes and report those whose state differs."""
        changes = []
        for name in names:
            spec = self._specs.get(name)
            if name in self._live or spec is None:
                self._lost.discard(name)
                self._dead_since.pop(name, None)
                self._absences.pop(name, None)
            elif name not in self._lost and name not in self._dead_since:
                self._dead_since[name] = self._clock()
                now = datetime.now(UTC)
                self._absences[name] = Absence(rfc3339(now), rfc3339(now + timedelta(seconds=self._lost_after)))
                if len(self._dead_since) == 1:
                    self._next_to_lose.set()
            old, new = self._nodes.get(name), None
            if spec is not None:
                live, lost = name in self._live, name in self._lost
                new = NodeState(name, spec.labels, spec.capacity, spec.schedulable, spec.evict, live, lost)
            if old == new:
                continue
            if new is None:
                del self._nodes[name]
            else:
                self._nodes[name] = new
            changes.append(NodeChange(name, old, new))
        if not changes:
            return
        self.version += 1
        if self._on_change is not None:
            self._on_change(changes)


class WatchedNodes:
    """A NodeTable and the TreeView that feeds it. Run `run()` as a task; await `synced()` before the first decision."""

    def __init__(
        self,
        store: Store,
        keys: Keys,
        *,
        node_lost_after: float = NODE_LOST_AFTER,
        clock: Callable[[], float] = time.monotonic,
        on_change: Callable[[list[NodeChange]], None] | None = None,
        on_bad: Callable[[BadRecord], None] | None = None,
        budget: RefreshBudget | None = None,
    ) -> None:
        self._keys = keys
        self.table = NodeTable(keys, node_lost_after=node_lost_after, clock=clock, on_change=on_change)
        self.view: TreeView[NodeRecord] = TreeView(
            store,
            keys.nodes,
            self._decode,
            on_change=self.table.apply,
            on_bad=on_bad,
            budget=budget,
            watched=Watched.KEYS,
            whole=False,
            name="nodes",
            clock=clock,
        )

    async def run(self) -> None:
        """Keep the table current until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.view.run(), name="nodes view")
            tasks.create_task(self.table.run(self.view.refresh), name="lost nodes")

    async def synced(self) -> None:
        """Wait until the table shows every node."""
        await self.view.synced()

    def _decode(self, key: str, value: bytes) -> NodeRecord:
        name, leaf = self._keys.parse_node(key)
        if leaf == "alive":
            return decode(NodeAlive, key, value)
        if leaf != "spec" or not is_node_name(name):
            raise BadRecord(key, "not a key of a node; those are spec and alive")
        spec = decode(NodeSpec, key, value)
        if spec.name != name:
            raise BadRecord(key, f"name: {spec.name!r} differs from the key; write it as {name!r}")
        return spec
