"""The node in the store: its spec, and the `alive` key that the agent holds under its session.

The model: one task reconciles both keys with a view of the node's folder: it creates or merges the spec, locks `alive`,
and then waits until the session is lost or the folder changes. Writers read `session` right before they write; it is
None unless `alive` is held under a session that is safe to act under.

The spec has two authors. The agent only writes a field when its own setting differs from its last write (kept on disk),
so an operator's changes since then stay: labels, a cordon, a capacity.

The session of an agent that was killed would keep the node locked until its lease ends. The state directory's lock
proves that agent dead, so its session, recorded on disk, is ended at once.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from contextlib import suppress

import msgspec
import structlog

from rcfarm.agent.errors import describe_os_error
from rcfarm.agent.state import NodeRecord, StateDir
from rcfarm.config.agent import AgentSettings
from store.kv import ops
from store.kv.protocol import BadRecord, Op, SessionExpired, Store, StoreError, TxnConflict
from store.kv.session import SessionKeeper
from store.kv.view import TreeView
from store.schema.keys import Keys
from store.schema.records import Capacity, NodeAlive, NodeSpec, decode, encode

log = structlog.get_logger(__name__)

_RETRY = 1.0  # seconds after a refusal whose end no event announces


def merged_spec(live: NodeSpec | None, name: str, own: NodeRecord, applied: NodeRecord) -> NodeSpec:
    """Return the desired spec: `live` with the changes between the settings `applied` earlier and `own`.

    Settings that did not change leave their fields as they are.
    """
    if live is None:
        return NodeSpec(name=name, labels=own.labels, capacity=_capacity(Capacity(), own, NodeRecord()))
    labels = {key: value for key, value in live.labels.items() if key in own.labels or value != applied.labels.get(key)}
    labels |= {key: value for key, value in own.labels.items() if applied.labels.get(key) != value}
    return msgspec.structs.replace(live, labels=labels, capacity=_capacity(live.capacity, own, applied))


def _capacity(live: Capacity, own: NodeRecord, applied: NodeRecord) -> Capacity:
    fields = ("cpu", "memory", "devices")
    changed = {field: getattr(own, field) for field in fields if getattr(own, field) != getattr(applied, field)}
    return msgspec.structs.replace(live, **changed)


class Registration:
    """Keeps the node registered.

    `on_registered` is called, in the loop, each time `alive` was taken. `problem`: why the node is not registered.
    `alive`: the record, which may be changed before `run`.

    `tree` names the tree that the node is registered in, "" before the first registration. It changes when the agent
    had to create the node's spec, or another process has created it again: then the store was emptied or replaced.
    `tree_index`: the create index of the node's spec in it.
    """

    def __init__(
        self,
        store: Store,
        keys: Keys,
        settings: AgentSettings,
        state: StateDir,
        keeper: SessionKeeper,
        alive: NodeAlive,
        on_registered: Callable[[], None],
    ) -> None:
        self.tree = ""
        self.tree_index = 0
        self.problem = "the node is not registered yet"
        self._store, self._keys, self._state = store, keys, state
        self._node = settings.node
        self._keeper = keeper
        self.alive = alive
        self._on_registered = on_registered
        capacity = settings.capacity()
        self._own = NodeRecord(
            labels=settings.labels,
            cpu=capacity.cpu,
            memory=capacity.memory,
            devices=capacity.devices,
            shards=keys.shards,
        )
        self._applied = NodeRecord()
        self._is_created = False
        self._session: str | None = None
        self._changed = asyncio.Event()
        self._registered = asyncio.Event()
        self.view: TreeView[NodeSpec | NodeAlive] = TreeView(
            store, keys.node(self._node), self._decode, on_change=lambda changes: self._changed.set(), name="own node"
        )

    @property
    def session(self) -> str | None:
        """The session that holds `alive`, while it is safe to act under it; else None."""
        return self._session if self._session == self._keeper.session_id else None

    async def held(self) -> str:
        """Wait until the node is registered. Return the session."""
        while (session := self.session) is None:
            self._registered.clear()
            await self._registered.wait()
        return session

    async def run(self) -> None:
        """Keep the node registered until cancelled. The caller runs `keeper` and ends its session."""
        self._applied = self._state.load_node()
        if self._applied.session:
            try:
                await self._store.destroy_session(self._applied.session)
            except StoreError as error:
                log.warning(
                    "The former agent's session could not be ended; its lease will expire",
                    node=self._node,
                    error=str(error),
                )
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.view.run())
            await self.view.synced()
            while True:
                session = await self._keeper.held()
                lost = tasks.create_task(self._keeper.lost(session))
                try:
                    await self._keep(session, lost)
                finally:
                    self._session = None
                    lost.cancel()

    async def _keep(self, session: str, lost: asyncio.Task[None]) -> None:
        """Take `alive` and keep it until `lost` is done."""
        lost.add_done_callback(lambda task: self._changed.set())
        while not lost.done():
            self._changed.clear()
            try:
                pause = await self._reconcile(session)
            except SessionExpired:
                pause = _RETRY  # the keeper notices it, too
            except StoreError as error:
                self._failed(str(error))
                pause = _RETRY
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._changed.wait()

    async def _reconcile(self, session: str) -> float | None:
        """Write the missing changes. Return the seconds until the next attempt, or None to wait for a change."""
        writing = self._missing(session)
        if writing:
            self._session = None
            creates = any(op.verb == "cas" and op.index == 0 for op in writing)
            try:
                self.view.apply(await self._store.txn(writing), writing)
                self._is_created |= creates
            except TxnConflict as conflict:
                self._failed(f"another agent may have registered this node: {conflict}")
                await self.view.refresh()
                return _RETRY
        if self._holder() != session:
            record = self.view.records.get(self._keys.node_alive(self._node))
            alive, holder = record.value if record else None, "an unknown one"
            if isinstance(alive, NodeAlive):
                holder = f"{alive.agent} at {alive.address}, since {alive.since}"
            self._failed(f"the node is held by another agent: {holder}; stop that one, or rename this")
            return None
        if self._session is None:
            entry = await self._store.get(self._keys.node_spec(self._node), consistent=True)
            index = entry.create_index if entry else 0
            if self._is_created or index != self._applied.tree_index or not self._applied.tree:
                # The index alone is not enough: a store that was emptied may assign the same one again.
                self._applied = msgspec.structs.replace(self._applied, tree=f"{index}-{secrets.token_hex(4)}")
            self._is_created = False
            self.tree, self.tree_index = self._applied.tree, index
            self._applied = msgspec.structs.replace(self._own, session=session, tree=self.tree, tree_index=index)
            try:
                self._state.save_node(self._applied)
            except OSError as error:  # the next agent only has to wait for the lease
                log.warning(
                    "The registration could not be recorded on disk", reason=describe_os_error(error, "node.json")
                )
            self._session, self.problem = session, ""
            self._registered.set()
            log.info("Node registered", node=self._node, session=session)
            self._on_registered()
        return None

    def _missing(self, session: str) -> list[Op]:
        """Return the operations that bring the node's folder to its desired state; none while another agent holds
        it."""
        holder = self._holder()
        if holder not in (None, session):
            return []
        writing: list[Op] = []
        key = self._keys.node_spec(self._node)
        if key not in self.view.bad:  # an undecodable spec is left for its author to repair
            record = self.view.records.get(key)
            live = record.value if record is not None and isinstance(record.value, NodeSpec) else None
            spec = merged_spec(live, self._node, self._own, self._applied)
            if spec != live:
                writing.append(ops.cas(key, encode(spec), record.modify_index if record else 0))
        if holder is None:
            writing.append(ops.lock(self._keys.node_alive(self._node), encode(self.alive), session))
        return writing

    def _holder(self) -> str | None:
        record = self.view.records.get(self._keys.node_alive(self._node))
        return record.session if record else None

    def _failed(self, problem: str) -> None:
        self._session = None
        if problem != self.problem:
            log.warning("The node could not be registered", node=self._node, reason=problem)
        self.problem = problem

    def _decode(self, key: str, value: bytes) -> NodeSpec | NodeAlive:
        if key == self._keys.node_spec(self._node):
            return decode(NodeSpec, key, value)
        if key == self._keys.node_alive(self._node):
            return decode(NodeAlive, key, value)
        raise BadRecord(key, "not a key of a node; those are spec and alive")
