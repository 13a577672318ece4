"""The RCs as a farm sees them: one `Shard` per watched shard, one `RC` per RC in it.

The model: a `Shard` is a TreeView of `rcs/<shard>/`. Its changes are folded into `RC` objects, which the claimer and
the reconcilers only read. This happens in the event loop, between two awaits, so a reader never sees half a change.
`on_change(rc, what, origin)` notifies the farm which RC changed, how (a `Facet`), and by whom: an RC's own controller
passes the RC's id to `TreeView.apply`.

The health of pods has its own tree, so that agents need no right to write RCs. It is watched by groups of shards: a
`HealthGroup` serves every watched shard in it, and a shard is read only after its group.

Only fields that decisions need are kept: at 10,000 RCs and 30,000 pods they are most of a farm's memory.
"""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import aclosing, contextmanager

import msgspec

from scheduler.spread import NodeLoads
from store.kv.protocol import BadRecord, Store
from store.kv.view import Change, Record, RefreshBudget, TreeView, Watched
from store.schema.keys import BadKey, Keys, health_group, is_dns_label, is_node_name, shard_of
from store.schema.records import (
    POD_ID_LABEL,
    Handover,
    Health,
    Intent,
    Labels,
    Mutation,
    Owner,
    PersonsLock,
    RCSpec,
    RCStatus,
    Revision,
    Rollout,
    RolloutRequest,
    decode,
    decode_labels,
)


class Facet(enum.Flag):
    """The part of an RC that has changed."""

    SPEC = enum.auto()
    OWNER = enum.auto()
    MUTATION = enum.auto()
    STATUS = enum.auto()
    PODS = enum.auto()
    HEALTH = enum.auto()
    ROLLOUT = enum.auto()


RCRecord = (
    RCSpec
    | Owner
    | Mutation
    | PersonsLock
    | RCStatus
    | Rollout
    | RolloutRequest
    | Handover
    | Revision
    | Health
    | Labels
)
_LEAVES: dict[str, tuple[Facet, type[msgspec.Struct]]] = {
    "spec": (Facet.SPEC, RCSpec),
    "owner": (Facet.OWNER, Owner),
    "mutation": (Facet.MUTATION, Mutation),
    "lock": (Facet.MUTATION, PersonsLock),
    "status": (Facet.STATUS, RCStatus),
    "rollout": (Facet.ROLLOUT, Rollout),
    "rollout-request": (Facet.ROLLOUT, RolloutRequest),
    "handover": (Facet.ROLLOUT, Handover),
}
_PER_NODE = {"pods": Facet.PODS, "health": Facet.HEALTH}


class RC:
    """One RC: the records of its folder, joined.

    `bad_spec` is set while the stored spec is undecodable, `bad_pods` names the nodes whose placement is; the RC is
    then left as it is. `pods` and `former_health` are by node; the latter is written by agents of layout 1.
    """

    __slots__ = (
        "bad_pods",
        "bad_spec",
        "former_health",
        "handover",
        "id",
        "lock",
        "mutation",
        "owner",
        "pods",
        "rollout",
        "rollout_request",
        "shard",
        "spec",
        "status",
    )

    def __init__(self, rc_id: str, shard: Shard) -> None:
        self.id = rc_id
        self.shard = shard
        self.spec: Record[RCSpec] | None = None
        self.bad_spec: BadRecord | None = None
        self.owner: Record[Owner] | None = None
        self.mutation: Record[Mutation] | None = None
        self.lock: Record[PersonsLock] | None = None
        self.status: Record[RCStatus] | None = None
        self.rollout: Record[Rollout] | None = None
        self.rollout_request: Record[RolloutRequest] | None = None
        self.handover: Record[Handover] | None = None
        self.pods: dict[str, Record[Labels]] = {}
        self.bad_pods: frozenset[str] = frozenset()
        self.former_health: dict[str, Record[Health]] = {}

    @property
    def session(self) -> str | None:
        """The session that owns the RC."""
        return self.owner.session if self.owner else None

    @property
    def labels(self) -> Labels:
        """The labels that farms' selectors match."""
        return self.spec.value.rc_labels if self.spec else {}

    @property
    def is_gone(self) -> bool:
        """Return whether no record of the RC is left."""
        records = (self.spec, self.owner, self.status, self.mutation, self.lock, self.pods, self.former_health)
        return not (any(records) or self.bad_spec or self.bad_pods)

    @property
    def is_husk(self) -> bool:
        """Return whether only its locks or its status are left: no spec, and no pod that runs, or may run."""
        alive = self.spec or self.bad_spec or self.mutation or self.pods or self.bad_pods or self.former_health
        return bool(self.owner or self.status or self.lock) and not alive

    def verdicts(self) -> dict[str, Health]:
        """Return the live health records of the pods, by node, for any manifest."""
        records = self.shard.health.of(self.id)
        if self.former_health:
            records = self.former_health | {node: record for node, record in records.items() if record.session}
        return {node: record.value for node, record in records.items() if record.session}

    def passing(self, nodes: Iterable[str], manifest: str) -> int:
        """Return the number of pods on `nodes` that are healthy with `manifest`."""
        passing = {
            node for node, one in self.verdicts().items() if one.status == "passing" and one.manifest == manifest
        }
        return len(passing.intersection(nodes))

    def pod_id_on(self, node: str) -> str:
        """Return the id of the pod that the RC has placed on the node, or ""."""
        record = self.pods.get(node)
        return record.value.get(POD_ID_LABEL, "") if record else ""


class HealthGroup:
    """The health of the pods of every RC whose shard is in the group. Run its `view` to keep it current.

    `on_change(rc_id)` is called for each RC of which a verdict changed, whether or not its shard is watched.
    """

    def __init__(
        self,
        name: str,
        store: Store,
        keys: Keys,
        on_change: Callable[[str], None],
        budget: RefreshBudget,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._keys, self._on_change = keys, on_change
        self._by_rc: dict[str, dict[str, Record[Health]]] = {}
        self.view: TreeView[Health] = TreeView(
            store,
            keys.health_group(name),
            self._decode,
            on_change=self._fold,
            budget=budget,
            whole=False,
            name=f"health {name}",
            clock=clock,
        )

    def close(self) -> None:
        """Drop every record, like `Shard.close`."""
        self._by_rc.clear()
        self.view.records.clear()

    def of(self, rc_id: str) -> dict[str, Record[Health]]:
        """Return the records of an RC's pods, by node."""
        return self._by_rc.get(rc_id, {})

    def _decode(self, key: str, value: bytes) -> Health:
        try:
            self._keys.parse_health(key)
        except BadKey as error:
            raise BadRecord(key, str(error).removeprefix(f"{key}: ")) from error
        return decode(Health, key, value)

    def _fold(self, changes: list[Change[Health]]) -> None:
        touched = set()
        for key, old, new, _ in changes:
            if old is None and new is None:
                continue  # an undecodable record was removed
            node, rc_id = self._keys.parse_health(key)
            if new is not None:
                self._by_rc.setdefault(rc_id, {})[node] = new
            elif (records := self._by_rc.get(rc_id)) is not None:
                records.pop(node, None)
                if not records:
                    del self._by_rc[rc_id]
            touched.add(rc_id)
        for rc_id in touched:
            self._on_change(rc_id)


class Shard:
    """One watched shard. `run()` keeps it current; `rcs` holds its RCs by id.

    `claiming` is held while its RCs are being claimed, or the shard is being handed over. `health`: the group with the
    health of its RCs, which the caller runs. `busy()` returns whether RCs wait to be claimed or reconciled: a change of
    another RC would wait behind them, and the farm's own writes would end any watch, so none is begun (see `TreeView`).
    """

    def __init__(
        self,
        name: str,
        store: Store,
        keys: Keys,
        health: HealthGroup,
        on_change: Callable[[RC, Facet, str], None],
        budget: RefreshBudget,
        clock: Callable[[], float] = time.monotonic,
        busy: Callable[[], bool] | None = None,
    ) -> None:
        self.name, self.health = name, health
        self.rcs: dict[str, RC] = {}
        self.claiming = asyncio.Lock()
        self._keys, self._on_change = keys, on_change
        self.view: TreeView[RCRecord] = TreeView(
            store,
            keys.shard(name),
            self._decode,
            on_change=self._fold,
            on_bad=self._note_bad,
            budget=budget,
            watched=Watched.INDEX,
            busy=busy,
            name=f"shard {name}",
            clock=clock,
        )
        self._labels: dict[str, Labels] = {}

    async def run(self) -> None:
        """Keep the shard current until cancelled. It is first read when the health of its pods is known; otherwise a
        farm that has just claimed an RC would report none of its pods as healthy."""
        await self.health.view.synced()
        await self.view.run()

    def close(self) -> None:
        """Drop every record when the farm no longer watches the shard: reference cycles may be exempt from garbage
        collection."""
        self.rcs.clear()
        self.view.records.clear()

    def __iter__(self) -> Iterator[RC]:
        return iter(self.rcs.values())

    def _decode(self, key: str, value: bytes) -> RCRecord:
        rc_id, leaf, node = self._keys.split_rc(key)
        if self.name != (shard := shard_of(rc_id, self._keys.shards)):
            raise BadRecord(key, f"RC {rc_id} belongs to shard {shard}; move the key there")
        if leaf == "spec" and not node:
            spec = decode(RCSpec, key, value)
            if spec.id != rc_id:  # actions go by the id, but the lock guards only the folder
                raise BadRecord(key, f"id: {spec.id!r} is another RC's; write it as {rc_id!r}")
            if not is_dns_label(rc_id):
                message = "is not a DNS label (lower-case letters, digits and '-', at most 63)"
                raise BadRecord(key, f"id: {rc_id!r} {message}")
            return spec
        if leaf in _LEAVES and not node:
            return decode(_LEAVES[leaf][1], key, value)  # type: ignore[return-value]  # one of RCRecord, by the table
        if leaf == "pods" and is_node_name(node):
            labels = decode_labels(key, value)  # equal for all pods of an RC: one copy is kept
            known = self._labels.get(rc_id)
            if known != labels:
                known = self._labels[rc_id] = labels
            return known
        if leaf == "health" and is_node_name(node):
            return decode(Health, key, value)
        if leaf == "revisions" and node.isdecimal():
            return decode(Revision, key, value)
        raise BadRecord(key, "not a key of the layout; move it out of the farm's tree")

    def _state(self, rc_id: str) -> RC:
        state = self.rcs.get(rc_id)
        if state is None:
            state = self.rcs[rc_id] = RC(rc_id, self)
        return state

    def _note_bad(self, error: BadRecord) -> None:
        rc_id, leaf, node = self._keys.split_rc(error.key)
        if not self._is_in_place(error.key):
            return
        state = self._state(rc_id)
        if leaf == "spec":
            state.bad_spec = error
        else:
            state.bad_pods |= {node}
        self._on_change(state, _PER_NODE[leaf] if node else _LEAVES[leaf][0], "")

    def _is_in_place(self, key: str) -> bool:
        """Return whether the key is a spec or a placement: while one is undecodable, nothing is decided about its
        RC."""
        rc_id, leaf, node = self._keys.split_rc(key)
        return key == (self._keys.pod(rc_id, node) if leaf == "pods" and is_node_name(node) else self._keys.spec(rc_id))

    def _fold(self, changes: list[Change[RCRecord]]) -> None:
        touched: dict[str, Facet] = {}
        for key, old, new, _ in changes:
            rc_id, leaf, node = self._keys.split_rc(key)
            if old is None and new is None and not self._is_in_place(key):
                continue  # an undecodable record was removed
            if leaf == "revisions":
                continue  # for people, and for the way back that their commands take
            state = self._state(rc_id)
            if node:
                records = state.pods if leaf == "pods" else state.former_health
                if state.bad_pods and leaf == "pods" and key not in self.view.bad:
                    state.bad_pods -= {node}
                if new is None:
                    records.pop(node, None)
                else:
                    records[node] = new  # type: ignore[assignment]  # the leaf determines the type
            else:
                setattr(state, leaf.replace("-", "_"), new)
                if leaf == "spec":
                    state.bad_spec = self.view.bad.get(key)
            facet = _PER_NODE[leaf] if node else _LEAVES[leaf][0]
            before = touched.get(rc_id)  # a union of flags costs more than all the rest
            touched[rc_id] = facet if before is None or before is facet else before | facet
        for rc_id, facets in touched.items():
            state = self.rcs[rc_id]
            if state.is_gone:
                del self.rcs[rc_id]
                self._labels.pop(rc_id, None)
            self._on_change(state, facets, changes[0].origin)


class Intents:
    """Every intent, by pod id and node, for repairs and to find the RC that has a (node, pod id).

    `on_change(rc_id)` is called for each RC that a change concerns, except the RC whose controller wrote it. Pods of
    tasks concern an RC only by the places that they take.

    `loads` counts them by node. One view for all nodes, which the caller runs. Its budget is small for large fleets,
    because it only finds changes from outside; a farm's own writes are applied at once.
    """

    def __init__(
        self,
        store: Store,
        keys: Keys,
        on_change: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        busy: Callable[[], bool] | None = None,
    ) -> None:
        self.by_pod: dict[str, dict[str, Record[Intent]]] = {}
        self.loads = NodeLoads()
        self._keys, self._on_change = keys, on_change
        self._waiting: dict[str, set[str]] = {}
        self._shared: dict[str, Intent] = {}
        self.view: TreeView[Intent] = TreeView(
            store,
            keys.intents,
            self._decode,
            on_change=self._fold,
            on_bad=self._note_bad,
            budget=RefreshBudget(0.05, 0.1, clock),
            watched=Watched.INDEX,
            busy=busy,
            whole=False,
            name="intents",
            clock=clock,
        )

    def of(self, pod_id: str) -> dict[str, Record[Intent]]:
        """Return the intents of a pod id, by node."""
        return self.by_pod.get(pod_id, {})

    def unreadable(self, pod_id: str) -> list[str]:
        """Return the nodes where the intent of the pod id is undecodable. `of` may still have its last good value."""
        if not self.view.bad:
            return []
        places = map(self._keys.parse_pod, self.view.bad)
        return [place.node for place in places if place.pod_id == pod_id]

    def taken(self, pod_id: str, rc_id: str) -> list[str]:
        """Return the nodes where the pod id belongs to another RC. When one is released, `on_change(rc_id)` is
        called."""
        nodes = [node for node, intent in self.of(pod_id).items() if intent.value.rc != rc_id]
        if nodes:
            self._waiting.setdefault(pod_id, set()).add(rc_id)
        return nodes

    @contextmanager
    def planned(self, nodes: Iterable[str]) -> Iterator[None]:
        """Count pods on these nodes from now on, while they are being written."""
        nodes = list(nodes)
        for node in nodes:
            self.loads.change(node, 1)
        try:
            yield
        finally:
            for node in nodes:
                self.loads.change(node, -1)

    def _decode(self, key: str, value: bytes) -> Intent:
        intent = decode(Intent, key, value)
        if intent.task:
            return intent
        known = self._shared.get(intent.rc)
        if known == intent:
            return known
        self._shared[intent.rc] = intent
        return intent

    def _note_bad(self, error: BadRecord) -> None:
        last_good = self.view.records.get(error.key)
        if last_good is not None and last_good.value.rc:
            self._on_change(last_good.value.rc)

    def _fold(self, changes: list[Change[Intent]]) -> None:
        concerned: set[str] = set()
        for key, old, new, _ in changes:
            node, pod_id = self._keys.parse_pod(key)
            if (old is None) is not (new is None):
                self.loads.change(node, 1 if old is None else -1)
            if old is not None:
                concerned.add(old.value.rc)
            if new is not None:
                concerned.add(new.value.rc)
                self.by_pod.setdefault(pod_id, {})[node] = new
                continue
            nodes = self.by_pod.get(pod_id, {})
            nodes.pop(node, None)
            if not nodes:
                self.by_pod.pop(pod_id, None)
            if old is not None:
                self._shared.pop(old.value.rc, None)
            concerned |= self._waiting.pop(pod_id, set())
        for rc_id in concerned - {changes[0].origin, ""}:
            self._on_change(rc_id)


class HealthChecker:
    """The health of an RC's pods, for programs beside the farm (p2's `HealthChecker`): read once, or watched.

    A verdict counts while its agent holds it, so a pod of a dead node has none, nor has one that its agent has not
    checked yet. Records of agents of key layout 1 are ignored. Reads raise the store's errors; watches continue after
    them.
    """

    def __init__(self, store: Store, keys: Keys) -> None:
        self._store, self._keys = store, keys

    async def service(self, rc_id: str) -> dict[str, Health]:
        """Return the verdicts on the RC's pods, by node."""
        group = self._group(rc_id, lambda changed: None)
        await group.view.refresh()
        return _live(group, rc_id)

    async def pod(self, rc_id: str, node: str) -> Health | None:
        """Return the verdict on the RC's pod on a node."""
        return (await self.service(rc_id)).get(node)

    async def watch_service(self, rc_id: str) -> AsyncGenerator[dict[str, Health]]:
        """Yield the verdicts on the RC's pods, by node: as they are now, then after every change.

        A slow caller misses states in between, never the last one. Close it (`contextlib.aclosing`).
        """
        changed = asyncio.Event()
        group = self._group(rc_id, lambda touched: changed.set() if touched == rc_id else None)
        watching = asyncio.create_task(group.view.run())
        try:
            await group.view.synced()
            last: dict[str, Health] | None = None
            while True:
                changed.clear()
                verdicts = _live(group, rc_id)
                if verdicts != last:
                    last = verdicts
                    yield dict(verdicts)
                await changed.wait()
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def watch_pod(self, rc_id: str, node: str) -> AsyncGenerator[Health | None]:
        """Yield the verdict on the RC's pod on a node: as it is now, then after every change. See `watch_service`."""
        async with aclosing(self.watch_service(rc_id)) as services:
            is_first, last = True, None
            async for verdicts in services:
                verdict = verdicts.get(node)
                if is_first or verdict != last:
                    is_first, last = False, verdict
                    yield verdict

    def _group(self, rc_id: str, on_change: Callable[[str], None]) -> HealthGroup:
        name = health_group(shard_of(rc_id, self._keys.shards))
        return HealthGroup(name, self._store, self._keys, on_change, RefreshBudget())


def _live(group: HealthGroup, rc_id: str) -> dict[str, Health]:
    return {node: record.value for node, record in sorted(group.of(rc_id).items()) if record.session}
