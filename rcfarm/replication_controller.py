"""A replication controller: brings one RC's pods to what its spec desires (the seed's `ReplicationController`).

The model: `meet_desires` looks at what the views show now, plans (`rcfarm.planner`), and commits the plan as one unit,
or as several when it is too large for one. Each unit begins with `check-session` on the RC's ownership lock: the
fence. The store refuses the unit whole when another farm has the RC, however long this process was paused in between.
A unit that removes or rewrites anything also checks that the spec is still the one that was planned for.

It is level-triggered: it never acts on an event, only on the state, and after a refusal it reads what the refusal named
and plans anew. It is not safe to run it twice at once for one RC; the farm's work queue sees to that.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import msgspec
import structlog

from rcfarm.commit import GroupCommit
from rcfarm.fleet import RC, Intents
from rcfarm.manifests import Manifests, ManifestUnusable
from rcfarm.planner import Placement, Plan, Situation, Transfer, plan
from rcfarm.pod_health import HEALTH_CODES
from scheduler.base import Absence, Eligibility, Scheduler, SchedulerError
from store import audit, ops
from store.keys import Keys
from store.kv import MAX_TXN_OPS, Op, OpFailure, OwnershipLost, Store, TxnConflict
from store.manifest import Manifest
from store.records import (
    POD_ID_LABEL,
    RC_ID_LABEL,
    Intent,
    Labels,
    Mutation,
    RCSpec,
    RCState,
    RCStatus,
    Reason,
    encode,
    utc_now,
)
from store.selectors import BadSelector, Selector
from store.view import TreeView

log = structlog.get_logger(__name__)

NODES_IN_AUDIT = 100  # an event names at most so many nodes
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 5.0  # seconds between the attempts of `watch_desires`
RESYNC = 300.0  # seconds after which it looks though nothing has changed
LOOK_EVERY = 0.5  # seconds between two looks at what no view announces
NOWHERE = Eligibility(frozenset(), ())


class CannotReconcile(Exception):
    """Something about this RC makes it impossible to act on; trying again helps only after it was changed."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Pod(NamedTuple):
    """One pod of an RC (the seed's `PodLocation`)."""

    node: str
    pod_id: str


@dataclass(frozen=True, slots=True)
class Tools:
    """What all RCs of a farm share. `hold()` answers why nothing may be removed, or ""; `absence(node)` since when the
    node is dead, or None.
    """

    store: Store
    keys: Keys
    farm: str
    scheduler: Scheduler
    manifests: Manifests
    intents: Intents
    commits: GroupCommit
    hold: Callable[[], str] = lambda: ""
    absence: Callable[[str], Absence | None] = lambda node: None


@dataclass(slots=True)
class _Unit:
    """The operations on a few nodes that must be applied together, and what they do, for the audit log."""

    ops: list[Op]
    added: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)


class ReplicationController:
    """One owned RC. `session` is the one that holds its lock; `held()` tells whether that is still safe to rely on."""

    def __init__(self, state: RC, tools: Tools, session: str, held: Callable[[], bool] = lambda: True) -> None:
        self.state = state
        self.applying = False  # while our own writes are folded into the views
        self.released = False  # given back, or lost: nothing may be written any more
        self.unfinished = False  # there may be more to do at once
        self.lock = asyncio.Lock()  # held while `meet_desires` runs
        self.reasons: tuple[Reason, ...] = ()
        self.waits_for: Selector | None = None  # where a node is missing
        self._manifests: set[str] = set()
        self.tools, self._session, self._held = tools, session, held
        self._spec_index = 0  # of the spec that is being acted on
        self._wake = asyncio.Event()

    @property
    def token(self) -> int:
        """The fencing token: how often the RC's lock was acquired."""
        return self.state.owner.lock_index if self.state.owner else 0

    @property
    def concerned(self) -> bool:
        """Whether a change of the brake may make a difference: something is wanted, or being decided."""
        return self.lock.locked() or any(reason.code not in HEALTH_CODES for reason in self.reasons)

    def current_pods(self) -> list[Pod]:
        """The pods that this RC has placed, by node (the seed's `CurrentPods`)."""
        return [Pod(node, self._pod_id_on(node)) for node in sorted(self.state.pods)]

    def dropped_manifests(self) -> set[str]:
        """The manifests that the spec has named since the last call, and does not name now."""
        current = {self.state.spec.value.manifest} if self.state.spec else set()
        dropped, self._manifests = self._manifests - current, current
        return dropped

    def wake(self) -> None:
        """Have `watch_desires` look again at once."""
        self._wake.set()

    async def watch_desires(self) -> AsyncIterator[Exception]:
        """Meet the desires now and whenever something that they depend on changes, until cancelled; yields each error
        (the seed's `WatchDesires`), then tries again, after a growing pause or at the next change. Once another farm
        has the RC, it yields that, and ends.

        For using a controller without a farm, whose work queue calls `meet_desires` instead. The caller keeps the views
        current, and iterates: nothing is done between an error and the request for the next one.
        """
        with contextlib.ExitStack() as listening:
            for view, concerns in self._inputs():
                listening.enter_context(view.listening(partial(self._noticed, concerns)))
            failures = 0
            while True:
                self._wake.clear()
                seen = self._unannounced()
                try:
                    await self.meet_desires()
                except OwnershipLost as error:
                    yield error
                    return
                except Exception as error:
                    failures += 1
                    if not isinstance(error, TxnConflict):
                        yield error
                    pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(failures, 10))
                else:
                    failures, pause = 0, 0.0 if self.unfinished else RESYNC
                await self._something_new(seen, pause)

    def _inputs(self) -> Iterator[tuple[TreeView[Any], Callable[[str], bool]]]:
        """The views that the desires depend on, and which of their keys concern this RC."""
        tools, rc_id = self.tools, self.state.id
        ignored = {tools.keys.status(rc_id), tools.keys.owner(rc_id)}
        yield self.state.shard.view, lambda key: key.startswith(tools.keys.rc(rc_id)) and key not in ignored
        yield self.state.shard.health.view, lambda key: key.endswith(f"/{rc_id}")
        yield tools.intents.view, lambda key: key.rpartition("/")[2] in self._names()
        for view in tools.scheduler.views():
            yield view, lambda key: True

    def _names(self) -> set[str]:
        return self._pod_ids(self.state.spec.value) if self.state.spec else set()

    def _noticed(self, concerns: Callable[[str], bool], keys: Iterable[str]) -> None:
        if not self.applying and any(map(concerns, keys)):
            self._wake.set()

    def _unannounced(self) -> tuple[object, ...]:
        """What the desires depend on and no view announces: the nodes, by the scheduler's version, and the brake."""
        return self.tools.scheduler.version, self.tools.hold()

    async def _something_new(self, seen: tuple[object, ...], within: float) -> None:
        """Wait for something to act on, at most `within` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within):
                while seen == self._unannounced():
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(LOOK_EVERY):
                            await self._wake.wait()
                            return

    async def meet_desires(self) -> RCState:
        """Take the next step towards what the spec desires and record the outcome in the RC's status.

        Answers the state reached. Raises `CannotReconcile`, `OwnershipLost`, `TxnConflict` (read again already: try
        again), `SchedulerError` and the store's errors.
        """
        if self.state.bad_spec:
            raise CannotReconcile("bad_spec", f"the spec can't be read: {self.state.bad_spec.reason}")
        if self.state.spec is None:
            return "converged"
        spec, self._spec_index = self.state.spec.value, self.state.spec.modify_index
        self.waits_for = None
        if spec.deleting:
            return await self._delete(spec)
        self._check_placements()
        manifest = await self._manifest(spec)
        selector = _selector(spec)
        await self._confirm_strays(manifest.id)
        situation = await self._situation(spec, manifest, selector)
        decision = plan(situation)
        if decision.missing or (decision.transfer and decision.transfer.new_node is None):
            situation, decision = await self._allocate(situation, decision, manifest, selector)
        await self._carry_out(spec, manifest.id, situation, decision, selector)
        return decision.state

    async def report(self, state: RCState, reasons: Iterable[Reason]) -> None:
        """Write the status alone, if it says anything new: for what stopped a plan from being made."""
        spec = self.state.spec.value if self.state.spec else None
        status = self._status(
            state,
            spec.generation if spec else 0,
            spec.replicas_desired if spec else 0,
            len(self.state.pods),
            self._healthy(self.state.pods, spec.manifest if spec else ""),
            tuple(reasons),
        )
        if status:
            await self._commit([self._fence(), self._status_op(status)])

    async def clear(self) -> None:
        """Remove what is left of an RC without spec and pods. Raises what `Store.txn` raises."""
        without_spec = ops.check_not_exists(self.tools.keys.spec(self.state.id))
        await self._commit([self._fence(), without_spec, ops.delete_tree(self.tools.keys.rc(self.state.id))])

    async def _manifest(self, spec: RCSpec) -> Manifest:
        try:
            manifest = await self.tools.manifests.get(spec.manifest)
        except ManifestUnusable as error:
            raise CannotReconcile("manifest_unusable", str(error)) from error
        others = self._pod_ids(spec) - {manifest.id}
        if others:
            raise CannotReconcile(
                "pod_id_changed",
                f"the manifest's id is {manifest.id!r}, but this RC's pods are called {others.pop()!r}; "
                "a pod id never changes: create another RC for it",
            )
        return manifest

    def _check_placements(self) -> None:
        """A placement that can't be read may be a pod that runs: nothing is decided without it."""
        if self.state.bad_pods:
            keys = [self.tools.keys.pod(self.state.id, node) for node in sorted(self.state.bad_pods)]
            raise CannotReconcile(
                "bad_placement",
                f"{', '.join(keys)} can't be read; repair it (`consul kv put {keys[0]} -`), or, if no such pod runs, "
                f"remove it (`consul kv delete {keys[0]}`)",
            )

    async def _situation(self, spec: RCSpec, manifest: Manifest, selector: Selector) -> Situation:
        eligibility = await self.tools.scheduler.eligible_nodes(manifest, selector)
        # From here to the plan nothing is awaited: it is made from one moment's views.
        intents, unreadable = self.tools.intents.of(manifest.id), self.tools.intents.unreadable(manifest.id)
        current: dict[str, Placement] = {}
        for node in self.state.pods:
            intent = intents.get(node)
            if intent is None or intent.value.rc != spec.id or node in unreadable:
                current[node] = Placement(None)
            else:
                running = intent.value.manifest
                current[node] = Placement(running, self.state.health_of(node, running), self.state.verdict(node))
        mutation = self.state.mutation
        return Situation(
            spec=spec,
            current=current,
            eligibility=eligibility,
            taken=[
                *self.tools.intents.taken(manifest.id, spec.id),
                *(node for node in unreadable if node not in self.state.pods),
            ],
            strays=self._strays(manifest.id),
            hold=self.tools.hold(),
            mutation_holder=mutation.value.holder if mutation and mutation.session else "",
            absent={node: absence for node in current if (absence := self.tools.absence(node))},
        )

    def _strays(self, pod_id: str) -> list[str]:
        """Nodes with an intent of this RC, but without the record of the placement."""
        intents = self.tools.intents.of(pod_id).items()
        return [node for node, intent in intents if intent.value.rc == self.state.id and node not in self.state.pods]

    async def _confirm_strays(self, pod_id: str) -> None:
        """The views of placements and of intents are not of one moment: look whether what seems a stray is one."""
        for node in self._strays(pod_id):
            await self.state.shard.view.refresh_key(self.tools.keys.pod(self.state.id, node))
            await self.tools.intents.view.refresh_key(self.tools.keys.intent(node, pod_id))

    async def _allocate(
        self, situation: Situation, decision: Plan, manifest: Manifest, selector: Selector
    ) -> tuple[Situation, Plan]:
        """Ask the scheduler for the nodes that are missing, and plan again with what it gave."""
        moving = decision.transfer is not None and decision.transfer.new_node is None
        try:
            await self.tools.scheduler.allocate_nodes(manifest, selector, decision.missing + moving, force=moving)
        except SchedulerError as error:
            self.waits_for = selector
            reasons = decision.reasons
            if moving or error.left_out:  # else the shortage says it all
                reasons = (*reasons, Reason("allocation_failed", f"no further node: {error}"))
            return situation, replace(decision, reasons=reasons, transfer=None if moving else decision.transfer)
        situation = await self._situation(situation.spec, manifest, selector)
        decision = plan(situation)
        if decision.missing:
            self.waits_for = selector
        if decision.transfer and decision.transfer.new_node is None:
            self.waits_for = selector
            decision = replace(decision, transfer=None)
        return situation, decision

    async def _carry_out(
        self, spec: RCSpec, pod_id: str, situation: Situation, decision: Plan, selector: Selector
    ) -> None:
        removed, transfer = list(decision.remove), decision.transfer
        self.reasons = decision.reasons  # before anything is awaited: they tell which changes concern this RC
        if transfer:
            await self.tools.scheduler.deallocate_nodes(selector, [transfer.old_node], pod_id=pod_id)
        left = [*removed, *([transfer.old_node] if transfer else [])]
        await self._learn_intents(pod_id, left)
        placed = (situation.current.keys() | {*decision.add, *decision.adopt}) - set(removed)
        if transfer and transfer.new_node:
            placed = (placed - {transfer.old_node}) | {transfer.new_node}
        units = self._units(spec, pod_id, decision)
        status = self._status(
            decision.state,
            spec.generation,
            spec.replicas_desired,
            len(placed),
            self._healthy(placed - set(decision.repair), spec.manifest),
            decision.reasons,
            decision.completed,
        )
        await self._commit_plan(spec, units, sorted(placed), status)
        if left:
            await self.tools.scheduler.deallocate_nodes(selector, left, pod_id=pod_id)
        self.unfinished = bool(transfer or decision.adopt)

    def _units(self, spec: RCSpec, pod_id: str, decision: Plan) -> list[_Unit]:
        units = [_Unit(self._place(spec, pod_id, node), added=[node]) for node in decision.add]
        units += [_Unit(self._take_up(spec, pod_id, node), added=[node]) for node in decision.adopt]
        units += [_Unit(self._unplace(node, pod_id), removed=[node]) for node in decision.remove]
        units += [_Unit([self._rewrite(spec, pod_id, node)]) for node in decision.repair]
        if decision.transfer and decision.transfer.new_node:
            units.append(self._swap(spec, pod_id, decision.transfer, decision.transfer.new_node))
        return units

    def _swap(self, spec: RCSpec, pod_id: str, transfer: Transfer, new_node: str) -> _Unit:
        """Move one pod, under the mutation lock, which is taken and given back in the same transaction."""
        key = self.tools.keys.mutation(spec.id)
        holder = Mutation(self.tools.farm, f"moves a pod off {transfer.old_node}", utc_now())
        return _Unit(
            [
                ops.lock(key, encode(holder), self._session),
                *self._unplace(transfer.old_node, pod_id),
                *self._place(spec, pod_id, new_node),
                ops.delete(key),
            ],
            added=[new_node],
            removed=[transfer.old_node],
        )

    def _place(self, spec: RCSpec, pod_id: str, node: str) -> list[Op]:
        labels = self._pod_labels(spec, pod_id)
        return [
            ops.create(self.tools.keys.pod(spec.id, node), encode(labels)),
            ops.create(self.tools.keys.intent(node, pod_id), encode(self._intent(spec, labels))),
        ]

    def _take_up(self, spec: RCSpec, pod_id: str, node: str) -> list[Op]:
        """Place what runs already: its intent stays as it is, so that the agent has nothing to do."""
        index, _ = self._intent_at(node, pod_id)
        return [
            ops.create(self.tools.keys.pod(spec.id, node), encode(self._pod_labels(spec, pod_id))),
            ops.check_index(self.tools.keys.intent(node, pod_id), index),
        ]

    def _unplace(self, node: str, pod_id: str) -> list[Op]:
        """Remove a placement with its intent; if that is another RC's by now, it is left as it is seen."""
        pod_id = self._pod_id_on(node) or pod_id
        removing = [ops.delete(self.tools.keys.pod(self.state.id, node))]
        index, is_ours = self._intent_at(node, pod_id)
        if index:
            act = ops.delete_cas if is_ours else ops.check_index
            removing.append(act(self.tools.keys.intent(node, pod_id), index))
        return removing

    def _rewrite(self, spec: RCSpec, pod_id: str, node: str) -> Op:
        index, is_ours = self._intent_at(node, pod_id)
        value = encode(self._intent(spec, self._pod_labels(spec, pod_id)))
        return ops.cas(self.tools.keys.intent(node, pod_id), value, index if is_ours else 0)

    def _intent_at(self, node: str, pod_id: str) -> tuple[int, bool]:
        """The index of an intent (0: there is none), and whether it is ours to change.

        Only placements of ours are asked about, so one that can't be read was ours, too.
        """
        index = self.tools.intents.view.bad_index(self.tools.keys.intent(node, pod_id))
        intent = self.tools.intents.of(pod_id).get(node)
        if index or intent is None:
            return index, True
        return intent.modify_index, intent.value.rc == self.state.id

    def _pod_labels(self, spec: RCSpec, pod_id: str) -> Labels:
        return {**spec.pod_labels, POD_ID_LABEL: pod_id, RC_ID_LABEL: spec.id}

    def _intent(self, spec: RCSpec, labels: Labels) -> Intent:
        return Intent(manifest=spec.manifest, rc=spec.id, shard=self.state.shard.name, token=self.token, labels=labels)

    def _pod_id_on(self, node: str) -> str:
        record = self.state.pods.get(node)
        return record.value.get(POD_ID_LABEL, "") if record else ""

    def _pod_ids(self, spec: RCSpec) -> set[str]:
        """What this RC's pods are called, by its label and by a pod that it has: one name, or none yet."""
        placed = next((self._pod_id_on(node) for node in self.state.pods), "")
        return {spec.rc_labels.get(POD_ID_LABEL, ""), placed} - {""}

    async def _learn_intents(self, pod_id: str, nodes: list[str]) -> None:
        """An intent that the view does not show (yet) may exist: look before a removal leaves it behind."""
        for node in nodes:
            if node not in self.tools.intents.of(pod_id):
                await self.tools.intents.view.refresh_key(self.tools.keys.intent(node, pod_id))

    async def _commit_plan(self, spec: RCSpec, units: list[_Unit], placed: list[str], status: RCStatus | None) -> None:
        """Commit the plan, a transaction's worth at a time; the status goes along, or last if there are several."""
        head = [self._fence()]
        if any(unit.removed or not unit.added for unit in units):
            head.append(ops.check_index(self.tools.keys.spec(spec.id), self._spec_index))
        if any(unit.removed for unit in units):
            head.append(ops.check_not_exists(self.tools.keys.brake))
        chunks = _chunks(units, MAX_TXN_OPS - len(head) - 2)
        closing = [self._status_op(status)] if status else []
        together = closing if len(chunks) == 1 else []
        writings = [
            [*head, *(op for unit in chunk for op in unit.ops), *self._audit(spec, chunk, placed), *together]
            for chunk in chunks
        ]
        outcomes = await asyncio.gather(*(self._commit(writing) for writing in writings), return_exceptions=True)
        for outcome in outcomes:
            if outcome is not None:
                raise outcome
        if closing and not together:
            await self._commit([self._fence(), *closing])

    def _audit(self, spec: RCSpec, units: list[_Unit], placed: list[str]) -> list[Op]:
        added = [node for unit in units for node in unit.added]
        removed = [node for unit in units for node in unit.removed]
        details: dict[str, Any] = {"rc": spec.id, "token": self.token}
        if added or removed:
            details |= {"added": added, "removed": removed, "nodes": placed[:NODES_IN_AUDIT], "node_count": len(placed)}
            event = "REPLICATION_CONTROLLER_RETARGET"
        else:
            details |= {"manifest": spec.manifest, "intents": sum(len(unit.ops) for unit in units)}
            event = "REPLICATION_CONTROLLER_REPAIR"
        return [audit.event_op(self.tools.keys, event, details, actor=self.tools.farm)]

    async def _delete(self, spec: RCSpec) -> RCState:
        """Empty the RC, then remove its folder: pods and intents first, so that nothing is left without an owner."""
        pod_id = min(self._pod_ids(spec), default="")
        await self._confirm_strays(pod_id)
        for node in list(self.state.pods):
            await self._learn_intents(self._pod_id_on(node), [node])
        current = {node: Placement(None) for node in self.state.pods}
        decision = plan(Situation(spec, current, NOWHERE, strays=self._strays(pod_id), hold=self.tools.hold()))
        self.reasons = decision.reasons
        pod_ids = {self._pod_id_on(node) or pod_id for node in decision.remove}
        units = self._units(spec, pod_id, decision)
        left = len(current.keys() - set(decision.remove))
        status = self._status(decision.state, spec.generation, 0, left, 0, decision.reasons)
        await self._commit_plan(spec, units, [], status)
        for one in pod_ids:
            await self.tools.scheduler.deallocate_nodes(_any_selector(spec), decision.remove, pod_id=one)
        if decision.state == "deleting" and not self.state.pods:
            await self._remove_folder(spec)
        return decision.state

    async def _remove_folder(self, spec: RCSpec) -> None:
        """Remove what is left. A live agent takes its own verdicts away; those of dead agents are ours to remove."""
        verdicts = self.state.shard.health.of(spec.id).items()
        stale = [ops.delete(self.tools.keys.health(spec.id, node)) for node, health in verdicts if not health.session]
        for start in range(0, len(stale), MAX_TXN_OPS - 1):
            await self._commit([self._fence(), *stale[start : start + MAX_TXN_OPS - 1]])
        details = {"rc": spec.id, "token": self.token}
        await self._commit(
            [
                self._fence(),
                ops.check_index(self.tools.keys.spec(spec.id), self._spec_index),
                ops.check_not_exists(self.tools.keys.brake),
                ops.delete_tree(self.tools.keys.rc(spec.id)),
                audit.event_op(self.tools.keys, "REPLICATION_CONTROLLER_DELETED", details, actor=self.tools.farm),
            ]
        )

    def _healthy(self, nodes: Iterable[str], manifest: str) -> int:
        return sum(self.state.health_of(node, manifest) == "passing" for node in nodes)

    def _status(
        self,
        state: RCState,
        generation: int,
        desired: int,
        placed: int,
        healthy: int,
        reasons: tuple[Reason, ...],
        completed: int = 0,
    ) -> RCStatus | None:
        """The status to write, or None when the one that stands says the same."""
        status = RCStatus(
            state=state,
            generation=generation,
            desired=desired,
            placed=placed,
            healthy=healthy,
            farm=self.tools.farm,
            token=self.token,
            reasons=list(reasons),
            completed=completed,
        )
        standing = self.state.status
        if standing and msgspec.structs.replace(standing.value, updated_at="") == status:
            return None
        return msgspec.structs.replace(status, updated_at=utc_now())

    def _status_op(self, status: RCStatus) -> Op:
        return ops.put(self.tools.keys.status(self.state.id), encode(status))

    def _fence(self) -> Op:
        return ops.check_session(self.tools.keys.owner(self.state.id), self._session)

    async def _commit(self, writing: list[Op]) -> None:
        """Commit one unit and show it to the views. A refusal is looked into before it is raised."""
        if not self._held():
            raise OwnershipLost([OpFailure(0, "our lease may have ended")])
        try:
            result = await self.tools.commits.commit(writing)
        except OwnershipLost:
            raise
        except TxnConflict as conflict:
            await self._look_again([writing[failure.op_index].key for failure in conflict.failures])
            raise
        self.applying = True
        try:
            self.state.shard.view.apply(result, writing)
            self.tools.intents.view.apply(result, writing)
        finally:
            self.applying = False

    async def _look_again(self, keys: Iterable[str]) -> None:
        for key in keys:
            for view in (self.state.shard.view, self.tools.intents.view):
                if key.startswith(view.prefix):
                    await view.refresh_key(key)


def _chunks(units: list[_Unit], room: int) -> list[list[_Unit]]:
    """Split into runs of units whose operations fit into `room`."""
    chunks: list[list[_Unit]] = []
    left = 0
    for unit in units:
        if len(unit.ops) > left:
            chunks.append([])
            left = room
        chunks[-1].append(unit)
        left -= len(unit.ops)
    return chunks


def _selector(spec: RCSpec) -> Selector:
    try:
        return Selector.parse(spec.node_selector)
    except BadSelector as error:
        raise CannotReconcile("bad_selector", f"node_selector: {error}") from error


def _any_selector(spec: RCSpec) -> Selector:
    """The selector for freeing reservations: an RC with an unreadable one can still be deleted."""
    try:
        return Selector.parse(spec.node_selector)
    except BadSelector:
        return Selector.everything()
