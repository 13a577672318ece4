"""A replication controller: reconciles one RC's pods with its spec (p2's `ReplicationController`).

The model: `meet_desires` reads the views, plans (`rcfarm.farm.planner`), and has the plan written
(`rcfarm.farm.writer`), fenced by the RC's ownership lock.

It is level-triggered: it acts on the state, never on an event, and after a refusal it reads the refused keys and plans
again. It must not run twice at once for one RC; the farm's work queue ensures that.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import msgspec

from rcfarm.farm.handover_driver import LOOK_EVERY as LOOK_AT_OTHER
from rcfarm.farm.handover_driver import HandoverDriver
from rcfarm.farm.manifests import ManifestUnusable
from rcfarm.farm.planner import HEALTH_CODES, SETTLED_AFTER, Plan, PlanInput, plan, preferred
from rcfarm.farm.rollout import Ages, Placement, PodClock, RolloutStep, is_steady
from rcfarm.farm.shard import RC
from rcfarm.farm.transfer import Resting
from rcfarm.farm.writer import Tools, Writer
from scheduler.protocol import Eligibility, SchedulerError
from store.errors import RcfarmError
from store.kv.protocol import OwnershipLost, TxnConflict
from store.kv.view import Record, TreeView
from store.schema import audit
from store.schema.manifest import Manifest
from store.schema.records import (
    POD_ID_LABEL,
    Analysis,
    NodeTransfer,
    RCSpec,
    RCState,
    RCStatus,
    Reason,
    Rollout,
    effective_manifest,
    utc_now,
)
from store.schema.selectors import BadSelector, Selector
from store.timing import Backoff, give_way

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0  # seconds between the attempts of `watch_desires`
RESYNC = 300.0  # seconds after which `watch_desires` reconciles without a change
LOOK_EVERY = 0.5  # seconds between two checks of inputs without a view
REVIEW_AFTER = 5.0, 15.0  # seconds from placing pods on nodes that joined to a whole plan, if nothing else asks for it
NOWHERE = Eligibility(frozenset(), ())


class CannotReconcile(RcfarmError):
    """An error in the RC's records prevents reconciling; a retry helps only after it was changed."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def _selectors(spec: RCSpec) -> list[Selector]:
    """Return the selectors of the nodes and of the canaries. Raises `CannotReconcile`."""
    found = []
    canary = spec.policy.canary_selector
    for field, text in (("node_selector", spec.node_selector), ("update.canary_selector", canary)):
        try:
            found.append(Selector.parse(text))
        except BadSelector as error:
            raise CannotReconcile("bad_selector", f"{field}: {error}") from error
    return found


class Pod(NamedTuple):
    """One pod of an RC (p2's `PodLocation`)."""

    node: str
    pod_id: str


class Outcome(NamedTuple):
    """The state that was reached. `requeue`: another reconcile should follow at once; `wake`: after that many seconds,
    although nothing changed."""

    state: RCState
    requeue: bool = False
    wake: float | None = None


class ReplicationController:
    """One owned RC. `session` holds its lock; `held()` returns whether the session is still safe to act under."""

    def __init__(self, state: RC, tools: Tools, session: str, held: Callable[[], bool] = lambda: True) -> None:
        self.state = state
        self.lock = asyncio.Lock()  # held while `meet_desires` runs
        self.reasons: tuple[Reason, ...] = ()
        self.waits_for: Selector | None = None  # the selector of a missing node
        self._manifests: set[str] = set()
        self._decided: tuple[PlanInput, Plan] | None = None  # until it is written
        self._logged_reasons: tuple[Reason, ...] = ()
        self._pod_clock = PodClock()
        self._matching: tuple[frozenset[str] | None, float] = None, 0.0  # of a daemon set, and since when
        self._known_nodes: frozenset[str] = frozenset()  # of a daemon set: all others have joined since
        self._uniform_since = 0  # the index of the spec whose manifest all pods of a daemon set had
        self.tools, self._session = tools, session
        self._resting = Resting()
        self.writer = Writer(state, tools, session, held)
        self._handover = HandoverDriver(state, tools, self.writer, session)

    @cached_property
    def _rng(self) -> random.Random:
        return random.Random(self.state.id)  # 2.5 KB, of daemon sets alone

    @property
    def is_pending(self) -> bool:
        """Return whether a step is pending, or being decided, so that a change of the brake may affect the RC."""
        return self.lock.locked() or any(reason.code not in HEALTH_CODES for reason in self.reasons)

    def current_pods(self) -> list[Pod]:
        """Return the pods that this RC has placed, by node (p2's `CurrentPods`)."""
        return [Pod(node, self.state.pod_id_on(node)) for node in sorted(self.state.pods)]

    def dropped_manifests(self) -> set[str]:
        """Return the manifests that the spec has named since the last call, but does not name now."""
        current = {self.state.spec.value.manifest} if self.state.spec else set()
        dropped, self._manifests = self._manifests - current, current
        return dropped

    async def watch_desires(self) -> AsyncIterator[Exception]:
        """Reconcile now and whenever an input changes, until cancelled (p2's `WatchDesires`). Yield each error, then
        retry, after a growing pause or at the next change. Once another farm owns the RC, yield the error and end.

        For using a controller without a farm, whose work queue calls `meet_desires` instead. The caller keeps the views
        current, and iterates: nothing happens between an error and the request for the next one.
        """

        wake = asyncio.Event()

        def wake_if(concerns: Callable[[str], bool], keys: Iterable[str], origin: str) -> None:
            if origin != self.state.id and any(map(concerns, keys)):
                wake.set()

        with contextlib.ExitStack() as listening:
            for view, concerns in self._inputs():
                listening.enter_context(view.listening(partial(wake_if, concerns)))
            backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE)
            while True:
                wake.clear()
                seen = self._unannounced()
                try:
                    outcome = await self.meet_desires()
                except OwnershipLost as error:
                    yield error
                    return
                except Exception as error:
                    if not isinstance(error, TxnConflict):
                        yield error
                    pause = backoff.pause()
                else:
                    backoff.reset()
                    pause = 0.0 if outcome.requeue else RESYNC if outcome.wake is None else min(RESYNC, outcome.wake)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        while seen == self._unannounced() and not wake.is_set():
                            with contextlib.suppress(TimeoutError):
                                async with asyncio.timeout(LOOK_EVERY):
                                    await wake.wait()

    def _inputs(self) -> Iterator[tuple[TreeView[Any], Callable[[str], bool]]]:
        """Yield the views of the inputs, each with a predicate for the keys that concern this RC."""
        tools, rc_id = self.tools, self.state.id
        ignored = {tools.keys.status(rc_id), tools.keys.owner(rc_id)}
        yield self.state.shard.view, lambda key: key.startswith(tools.keys.rc(rc_id)) and key not in ignored
        yield self.state.shard.health.view, lambda key: tools.keys.split_health(key).rc == rc_id
        yield tools.intents.view, lambda key: tools.keys.parse_pod(key).pod_id in self._pod_ids()
        for view in tools.scheduler.views():
            yield view, lambda key: True

    def _unannounced(self) -> tuple[object, ...]:
        """Return the inputs without a view: the nodes, by the scheduler's version, and the brake."""
        return self.tools.scheduler.version, self.tools.hold()

    async def meet_desires(self) -> Outcome:
        """Take the next step towards the desired state and write the RC's status. Return the outcome.

        Raises `CannotReconcile`, `OwnershipLost`, `TxnConflict` (the keys have been read again: retry),
        `SchedulerError` and the store's errors.
        """
        if self.state.bad_spec:
            raise CannotReconcile("bad_spec", f"the spec can't be read: {self.state.bad_spec.reason}")
        if self.state.spec is None:
            return Outcome("converged")
        record, spec = self.state.spec, self.state.spec.value
        self.waits_for = None
        if spec.deleting:
            await self._handover.cancel(f"rc {spec.id} is being deleted")
            return await self._delete(record)
        manifest, selector = await self._usable(spec)
        if spec.is_daemon_set:
            self.waits_for = selector  # every node that it may get concerns it
            if await self._place_joined(record, manifest.id, selector):
                return Outcome("progressing", wake=self._rng.uniform(*REVIEW_AFTER))
        await self._confirm_strays(manifest.id)
        given = await self._plan_input(spec, manifest, selector)
        if await self._handover.advance(record, manifest.id, given) or await self._handover.release_orphan(record):
            return Outcome("progressing", requeue=True)
        decision = self._decide(given)
        if decision.missing or (decision.transfer and decision.transfer.new_node is None):
            given, decision = await self._allocate(given, decision, manifest, selector)
        outcome = await self._carry_out(record, manifest.id, given, self._handover.shown(decision), selector)
        if self._handover.active is None:
            return outcome
        return outcome._replace(wake=LOOK_AT_OTHER if outcome.wake is None else min(outcome.wake, LOOK_AT_OTHER))

    async def _usable(self, spec: RCSpec) -> tuple[Manifest, Selector]:
        """Return the spec's manifest and selector. Raises `CannotReconcile` if anything that the plan needs can't be
        read."""
        if self.state.bad_pods:  # they may be pods that run
            keys = [self.tools.keys.pod(self.state.id, node) for node in sorted(self.state.bad_pods)]
            raise CannotReconcile(
                "bad_placement",
                f"{', '.join(keys)} can't be read; repair it (`consul kv put {keys[0]} -`), or, if no such pod runs, "
                f"remove it (`consul kv delete {keys[0]}`)",
            )
        if (key := self.tools.keys.rollout(self.state.id)) in self.state.shard.view.bad:
            raise CannotReconcile(
                "bad_rollout",
                f"{key} can't be read: remove it (`consul kv delete {key}`), and the rollout begins again",
            )
        try:
            manifest = await self.tools.manifests.get(spec.manifest)
        except ManifestUnusable as error:
            raise CannotReconcile("manifest_unusable", str(error)) from error
        others = self._pod_ids() - {manifest.id}
        if others:
            raise CannotReconcile(
                "pod_id_changed",
                f"the manifest's id is {manifest.id!r}, but this RC's pod id is {others.pop()!r}; "
                "a pod id never changes: create another RC for it",
            )
        await give_way()  # many RCs' manifests come with one answer
        return manifest, _selectors(spec)[0]

    async def report(self, state: RCState, reasons: Iterable[Reason]) -> None:
        """Write only the status, if it changed: for errors that prevent a plan."""
        self.reasons = tuple(reasons)
        spec = self.state.spec.value if self.state.spec else None
        status = self.writer.status(
            state,
            spec,
            desired=len(self.state.pods) if spec and spec.is_daemon_set else spec.replicas_desired if spec else 0,
            placed=len(self.state.pods),
            healthy=self.state.passing(self.state.pods, effective_manifest(spec, self._rollout()) if spec else ""),
            reasons=self.reasons,
            node_transfer=self._moving(),
        )
        if status:
            await self.writer.write_status(status)

    async def _place_joined(self, record: Record[RCSpec], pod_id: str, selector: Selector) -> bool:
        """Place the pods of a daemon set on nodes that joined, before anything else is looked at. Return whether there
        were any.

        With thousands of pods a plan takes milliseconds, and a node that joins would wait for one set after the other.
        Where nothing is rolled out, a free node gets the manifest of the spec, whatever else the plan would say.
        """
        spec, rollout, standing = record.value, self._rollout(), self.state.status
        is_rolling = rollout is not None and not (rollout.state == "done" and rollout.is_of(spec))
        if standing is None or spec.disabled or is_rolling:
            return False
        eligibility = self.tools.by_label.every_node(selector, tolerate_drain=spec.tolerate_drain)
        fresh, self._known_nodes = eligibility.eligible - self._known_nodes, eligibility.eligible
        if not fresh:
            return False
        used = self.state.pods, self.tools.intents.of(pod_id), self.tools.intents.unreadable(pod_id)
        unused = {node for node in fresh if not any(node in nodes for nodes in used)}
        joined = tuple(sorted(unused.intersection(eligibility.placeable)))
        if not joined:
            return False
        if rollout is None and self._uniform_since != record.modify_index:
            ours = (intent.value for intent in self.tools.intents.of(pod_id).values() if intent.value.rc == spec.id)
            if any(intent.manifest != spec.manifest for intent in ours):
                return False  # its first rollout is about to begin
            self._uniform_since = record.modify_index
        status = msgspec.structs.replace(
            standing.value,
            state="progressing" if standing.value.state == "converged" else standing.value.state,
            desired=standing.value.desired + len(joined),
            placed=len(self.state.pods) + len(joined),
            updated_at=utc_now(),
        )
        decision = Plan(add=joined, rolled=RolloutStep(spec.manifest, spec.manifest))
        if self.tools.decisions:  # the planner says the same about these nodes alone
            alone = PlanInput(spec, {}, Eligibility(frozenset(joined), joined), rollout=rollout, now=self.tools.now())
            self._decide(alone)
        await self._write(record, pod_id, decision, [*self.state.pods, *joined], status)
        return True

    async def _plan_input(self, spec: RCSpec, manifest: Manifest, selector: Selector) -> PlanInput:
        if spec.is_daemon_set:
            eligibility = self.tools.by_label.every_node(selector, tolerate_drain=spec.tolerate_drain)
        else:
            eligibility = await self.tools.scheduler.eligible_nodes(manifest, selector)
        # Nothing is awaited from here to the plan, so that it sees the views of one moment.
        intents, unreadable = self.tools.intents.of(manifest.id), self.tools.intents.unreadable(manifest.id)
        current, verdicts, silent = dict[str, Placement](), self.state.verdicts(), dict[str, Placement]()
        for node in self.state.pods:
            intent = intents.get(node)
            if intent is None or intent.value.rc != spec.id or node in unreadable:
                current[node] = Placement(None)
                continue
            running, verdict = intent.value.manifest, verdicts.get(node)
            if verdict is None:
                current[node] = silent.get(running) or silent.setdefault(running, Placement(running))
            else:
                health = verdict.status if verdict.manifest == running else "unknown"
                current[node] = Placement(running, health, verdict)
        taken = [
            *self.tools.intents.taken(manifest.id, spec.id),
            *(node for node in unreadable if node not in self.state.pods),
        ]
        absent = {node: absence for node in current if (absence := self.tools.absence(node))}
        rollout = self._rollout()
        request, nodes = self.state.rollout_request, self.tools.by_label.directory.nodes()
        return PlanInput(
            spec=spec,
            current=current,
            eligibility=eligibility,
            taken=taken,
            strays=self._strays(manifest.id),
            hold=self.tools.hold(),
            mutation_holder=self._lock_holder(),
            absent=absent,
            rollout=rollout,
            request=request.value if request else None,
            ages=self._ages(spec, rollout, current, absent),
            drained=[name for name in current if (state := nodes.get(name)) and state.evict]
            if spec.is_daemon_set
            else (),
            unchanged=self._unchanged(eligibility) if spec.is_daemon_set else SETTLED_AFTER,
            domains=self._domains(spec, rollout, current),
            canary_nodes=self._canary_nodes(spec, rollout, current),
            analysis=self.tools.analyses.results(spec.id, rollout) if self.tools.analyses else {},
            now=self.tools.now(),
            preferred=preferred(
                spec, current, taken, eligibility, self.tools.intents.loads, partial(self._label_of, spec.spread)
            ),
            moving=self._moving(),
            resting=self._resting.left(asyncio.get_running_loop().time()),
        )

    def _lock_holder(self) -> str:
        """Return the process or the person that holds the mutation lock, in words, or ""."""
        mutation, lock, key = self.state.mutation, self.state.lock, self.tools.keys.lock(self.state.id)
        if mutation is not None and mutation.session:
            return mutation.value.holder
        if lock is None and key not in self.state.shard.view.bad:
            return ""
        holder = lock.value.holder if lock else "a person whose record can't be read"
        return f"{holder}; `rcfarm rc unlock {self.state.id}` removes the lock"

    def _unchanged(self, eligibility: Eligibility) -> float:
        """Return for how many seconds the nodes that match have been the same, as far as this owner has seen."""
        now = asyncio.get_running_loop().time()
        if self._matching[0] != eligibility.eligible:
            self._matching = eligibility.eligible, now
        return now - self._matching[1]

    def _domains(self, spec: RCSpec, rollout: Rollout | None, current: Mapping[str, Placement]) -> Mapping[str, str]:
        """Return the nodes' values of the label by which waves go, during a rollout."""
        label = spec.policy.wave_by
        if not label or is_steady(spec, rollout, current):
            return {}
        return {node: value for node in current if (value := self._label_of(label, node))}

    def _canary_nodes(self, spec: RCSpec, rollout: Rollout | None, current: Mapping[str, Placement]) -> frozenset[str]:
        """Return the nodes whose pods may be canaries, during a rollout of which not all may."""
        if not spec.policy.canary_selector or is_steady(spec, rollout, current):
            return frozenset()
        (_, selector), nodes = _selectors(spec), self.tools.by_label.directory.nodes()
        return frozenset(node for node in current if node in nodes and selector.matches(nodes[node].labels))

    def _label_of(self, label: str, node: str) -> str:
        known = self.tools.by_label.directory.nodes().get(node)
        return known.labels.get(label, "") if known else ""

    def _moving(self) -> NodeTransfer | None:
        return self.state.status.value.node_transfer if self.state.status else None

    def _rollout(self) -> Rollout | None:
        return self.state.rollout.value if self.state.rollout else None

    def _ages(
        self, spec: RCSpec, rollout: Rollout | None, current: Mapping[str, Placement], absent: Collection[str]
    ) -> Ages:
        """Return how long each pod has been as it is, during a rollout."""
        if is_steady(spec, rollout, current) and self._moving() is None:
            self._pod_clock.forget()
            return Ages()
        now = asyncio.get_running_loop().time()
        return self._pod_clock.read(current, now, spec.policy.min_healthy_time, absent)

    def _analyse(self, rollout: Rollout | None, analyses: Sequence[Analysis]) -> None:
        """Have these analyses of the rollout run from now on, if the RC is still ours."""
        if self.tools.analyses is None:
            return
        if rollout is None or self.state.session != self._session:
            self.tools.analyses.drop(self.state.id)
        else:
            self.tools.analyses.follow(self.state.id, rollout, analyses)

    def _strays(self, pod_id: str) -> list[str]:
        """Return the nodes with an intent of this RC, but without a placement record."""
        intents = self.tools.intents.of(pod_id).items()
        return [node for node, intent in intents if intent.value.rc == self.state.id and node not in self.state.pods]

    async def _confirm_strays(self, pod_id: str) -> None:
        """Read both keys of each stray again, because the views of placements and of intents are not of one moment."""
        for node in self._strays(pod_id):
            await self.state.shard.view.refresh_key(self.tools.keys.pod(self.state.id, node))
            await self.tools.intents.view.refresh_key(self.tools.keys.intent(node, pod_id))

    async def _allocate(
        self, given: PlanInput, decision: Plan, manifest: Manifest, selector: Selector
    ) -> tuple[PlanInput, Plan]:
        """Ask the scheduler for the missing nodes, and plan again with its answer."""
        moving = decision.transfer is not None and decision.transfer.new_node is None
        try:
            await self.tools.scheduler.allocate_nodes(manifest, selector, decision.missing + moving, force=moving)
        except SchedulerError as error:
            self.waits_for = selector
            reasons = decision.reasons
            if moving or error.left_out:  # else the shortage is reason enough
                reasons = (*reasons, Reason("allocation_failed", f"no further node: {error}"))
            return given, replace(decision, reasons=reasons, transfer=None if moving else decision.transfer)
        given = await self._plan_input(given.spec, manifest, selector)
        decision = self._decide(given)
        if decision.missing:
            self.waits_for = selector
        if decision.transfer and decision.transfer.new_node is None:
            self.waits_for = selector
            decision = replace(decision, transfer=None)
        return given, decision

    async def _carry_out(
        self, spec: Record[RCSpec], pod_id: str, given: PlanInput, decision: Plan, selector: Selector
    ) -> Outcome:
        removed, transfer = list(decision.remove), decision.transfer
        self.reasons = decision.reasons  # set before the first await: they determine which changes concern this RC
        if transfer and transfer.stage in ("move", "complete"):
            await self.tools.scheduler.deallocate_nodes(selector, [transfer.old_node], pod_id=pod_id)
            removed.append(transfer.old_node)
        left = removed
        placed = given.current.keys() | {*decision.add, *decision.surge, *decision.adopt}
        if transfer and transfer.new_node and transfer.stage == "rollback":
            left = [*removed, transfer.new_node]
            self._resting.failed(transfer.new_node, asyncio.get_running_loop().time())
        elif transfer and transfer.new_node:
            placed = placed | {transfer.new_node}
        if transfer and transfer.new_node and transfer.stage == "start":
            started = NodeTransfer(audit.new_ulid(), transfer.old_node, transfer.new_node)
            decision = replace(decision, moving=started)
        await self._learn_intents(pod_id, left)
        placed = placed - set(left)
        wanted = effective_manifest(spec.value, decision.rolled.record or given.rollout)
        status = self.writer.status(
            decision.state,
            spec.value,
            desired=decision.desired,
            placed=len(placed),
            healthy=self.state.passing(placed - {*decision.repair, *decision.update}, wanted),
            reasons=decision.reasons,
            completed=decision.completed,
            node_transfer=decision.moving,
        )
        new = [transfer.new_node] if transfer and transfer.new_node and transfer.stage in ("move", "start") else []
        with self.tools.intents.planned((*decision.add, *decision.surge, *new)):
            await self._write(spec, pod_id, decision, placed, status)
        self._analyse(decision.rolled.record or given.rollout, decision.rolled.analyse)
        if left:
            await self.tools.scheduler.deallocate_nodes(selector, left, pod_id=pod_id)
        goes_on = decision.update or (decision.remove and not decision.rolled.is_settled)
        return Outcome(decision.state, requeue=bool(transfer or decision.adopt or goes_on), wake=decision.wake)

    def _decide(self, given: PlanInput) -> Plan:
        """Plan. What is carried out may lack what the scheduler did not allocate; the log keeps the plan itself."""
        decision = plan(given)
        self._decided = given, decision
        return decision

    async def _write(
        self, spec: Record[RCSpec], pod_id: str, decision: Plan, placed: Collection[str], status: RCStatus | None
    ) -> str:
        """Write a plan. Log the decision behind it, if it changes something or has other reasons than the one before.
        Return its id in the decision log, "" if it is not logged."""
        log, (given, decided), self._decided = self.tools.decisions, self._decided or (None, decision), None
        if not log or not given or not (decided.is_change or decided.reasons != self._logged_reasons):
            await self.writer.write_plan(spec, pod_id, decision, placed, status)
            return ""
        self._logged_reasons = decided.reasons
        recorded, index = log.record(self.state.id, given, decided), 0
        logged = recorded.id if recorded else ""
        try:
            index = await self.writer.write_plan(spec, pod_id, decision, placed, status, logged)
        finally:
            if recorded:
                log.written(recorded, index)
        return logged

    async def _delete(self, spec: Record[RCSpec]) -> Outcome:
        """Remove the RC's pods and intents, then its folder: in this order, so that no pod is left without an owner."""
        state = self.state
        self._analyse(None, ())
        pod_id = min(self._pod_ids(), default="")
        await self._confirm_strays(pod_id)
        for node in list(state.pods):
            await self._learn_intents(state.pod_id_on(node), [node])
        current = {node: Placement(None) for node in state.pods}
        given = PlanInput(spec.value, current, NOWHERE, strays=self._strays(pod_id), hold=self.tools.hold())
        decision = self._decide(given)
        self.reasons = decision.reasons
        pod_ids = {state.pod_id_on(node) or pod_id for node in decision.remove}
        left = len(current.keys() - set(decision.remove))
        status = self.writer.status(
            decision.state, spec.value, desired=0, placed=left, healthy=0, reasons=decision.reasons
        )
        logged = await self._write(spec, pod_id, decision, (), status)
        try:
            selector = Selector.parse(spec.value.node_selector)
        except BadSelector:  # the RC can still be deleted
            selector = Selector.everything()
        for one in pod_ids:
            await self.tools.scheduler.deallocate_nodes(selector, decision.remove, pod_id=one)
        if decision.state == "deleting" and not state.pods:
            await self.writer.remove_folder(spec, logged)
        return Outcome(decision.state)

    async def _learn_intents(self, pod_id: str, nodes: list[str]) -> None:
        """Read intents that the view does not show (yet), so that a removal leaves none behind."""
        for node in nodes:
            if node not in self.tools.intents.of(pod_id):
                await self.tools.intents.view.refresh_key(self.tools.keys.intent(node, pod_id))

    def _pod_ids(self) -> set[str]:
        """Return this RC's pod ids, from its label and from one of its pods: normally one, or none yet."""
        labels = self.state.spec.value.rc_labels if self.state.spec else {}
        placed = next((self.state.pod_id_on(node) for node in self.state.pods), "")
        return {labels.get(POD_ID_LABEL, ""), placed} - {""}
