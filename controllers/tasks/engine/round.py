"""Rounds: what is due for one execution is decided, done and committed, one step after the other.

The model: `step` (`controllers.tasks.step`) decides, purely, from the stored state and the outcome of the last action.
The round commits what it decided in one transaction:

    check-session owner      the fence: refused once another engine owns the execution
    cas state                phase, attempts, plugin state, waits, deadlines
    put events               the history, which is also the outbox
    quota operations         tickets and grants of an admission; or the release of units, which grants the next tickets
    unlock owner             once nothing is left to do

and only then performs the action that follows from it. A crash anywhere is a repetition from the stored state.

Before anything is asked for or called, the circuit of the plugin's calls must let the execution through
(`controllers.tasks.circuit`). While it is paused the execution waits: nothing is written, unless a deadline ends
it; and a fault of a call that was let through is dropped.

An answer that is lost (`Unavailable`) leaves it open whether the transaction was applied. The plugin is not called
again then: the state is read, and the same transaction is sent again unless it turns out to be there already. A
conflict of the quota operations alone is decided again from a fresh view of the quotas.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeVar, cast

import msgspec
import structlog

from controllers.tasks.api.errors import IntentConflict, RemoteUnknown, TaskError
from controllers.tasks.api.names import TaskExecutionID, TaskExecutionIdentifier
from controllers.tasks.api.phase import Transition
from controllers.tasks.api.plugin import (
    Plugin,
    PluginProperties,
    PluginStateReader,
    TaskExecutionMetadata,
)
from controllers.tasks.circuit import Circuit
from controllers.tasks.engine.endings import Endings
from controllers.tasks.engine.guard import BadAnswer, PluginError, PluginGuard, PluginHung, Verb
from controllers.tasks.engine.outbox import Outbox
from controllers.tasks.engine.shard import TaskItem, is_settled
from controllers.tasks.engine.workshop import Dependency, TaskContext, Workshop
from controllers.tasks.outcomes import (
    Action,
    Admit,
    Admitted,
    CacheAnswered,
    CleanedUp,
    CleanUp,
    Declared,
    Execution,
    Handle,
    Handled,
    Held,
    LookUp,
    Outcome,
    Outputs,
    Policy,
    RoundFailed,
    Sent,
    Step,
)
from controllers.tasks.resources import QuotaResourceManager
from controllers.tasks.step import MAX_TEXT, step
from scheduler.quota.decide import Wait as QuotaWait
from scheduler.quota.draft import Draft, Request
from scheduler.quota.ledger import QuotaLedger
from store.errors import text_of
from store.kv import ops
from store.kv.group_commit import GroupCommit
from store.kv.protocol import (
    Invalid,
    Op,
    OwnershipLost,
    Store,
    StoreError,
    TooLarge,
    TxnConflict,
    TxnResult,
    Unavailable,
)
from store.redaction import Redactor
from store.schema.keys import Keys
from store.schema.records import StoredRecord, encode
from store.schema.tasks import CacheStatus, TaskSpec, TaskState, Wait
from store.timing import Backoff

log = structlog.get_logger(__name__)

T = TypeVar("T")
R = TypeVar("R", bound=StoredRecord)

STREAK = 16  # steps of one execution in a row before the others of its queue get their turn
FIRST_PAUSE = 0.05  # seconds until a transaction without an answer is looked for
LONGEST_PAUSE = 2.0  # seconds
MAX_STEP_BYTES = 384 * 1024  # of state and events in one transaction, which quotas share
SHORTEST_WAIT = 0.001  # seconds
CACHE_TIMEOUT = 30.0  # seconds per call of the cache
MAX_INTENT = 1024  # characters of an idempotency key
NODE_ID = "n0"  # an execution is one task, so it has one node

Calls = Literal["handle", "clean-up"]  # of a plugin; each kind has a circuit of its own


class Live:
    """An execution that this engine owns. Its `lock` is held during a round.

    `wake`: when it is due by the monotonic clock, which no correction of the wall clock moves; None: only by a
    signal. `signalled`: it is due now. `sent`: the events below this number have left the outbox. `stuck`: a call
    that does not end; no other call is made before it does. `taken`: when it was taken over; None once what the
    former owner wrote has been read. `doubt`: an answer about units was lost, so the view of the quotas may lack some
    that it holds. `last_spec`, `last_state`: as they were read last, for when another client deletes them.
    """

    __slots__ = (
        "doubt",
        "lane",
        "last_spec",
        "last_state",
        "lock",
        "sent",
        "signalled",
        "state",
        "stuck",
        "taken",
        "wake",
    )

    def __init__(self, item: TaskItem, lane: str) -> None:
        self.state = item
        self.lock = asyncio.Lock()
        self.lane = lane
        self.wake: float | None = None
        self.signalled = True
        self.sent = item.state.sent if item.state else 0
        self.stuck: asyncio.Task[Any] | None = None
        self.taken: int | None = None
        self.doubt = False
        self.last_spec: TaskSpec | None = None
        self.last_state: TaskState | None = None
        self.remember()

    def remember(self) -> None:
        """Note the records that exist."""
        item = self.state
        self.last_spec = item.spec.value if item.spec else self.last_spec
        self.last_state = item.state or self.last_state

    @property
    def is_robbed(self) -> bool:
        """Return whether the stored state was deleted by another client."""
        return self.state.state is None and self.last_state is not None

    @property
    def is_stuck(self) -> bool:
        """Return whether a call of the plugin still runs that does not end."""
        return self.stuck is not None and not self.stuck.done()

    def is_due(self, now: float) -> bool:
        """Return whether a round is due at `now`, by the monotonic clock."""
        return self.signalled or (self.wake is not None and now >= self.wake)


@dataclass(frozen=True, slots=True)
class RoundTools:
    """Shared by all rounds of a term. `clock`: monotonic seconds; `wall`: since the epoch. `is_held()`: the session
    is still safe to act under. `signal(id)` makes an execution due. `redactor`: knows the secrets that plugins have
    read. `circuits`: of the calls of each plugin, by its lane and "handle" or "clean-up". `endings`: is notified of
    each execution that has ended."""

    store: Store
    keys: Keys
    session: str
    commits: GroupCommit
    ledger: QuotaLedger
    guard: PluginGuard
    outbox: Outbox
    workshop: Workshop
    policy: Policy
    clock: Callable[[], float]
    wall: Callable[[], float]
    rng: random.Random
    is_held: Callable[[], bool]
    signal: Callable[[str], None]
    dependencies: Callable[[TaskSpec], Mapping[str, Dependency]]
    redactor: Redactor
    circuits: Mapping[tuple[str, Calls], Circuit]
    endings: Endings


class BrokenPlugin(TaskError):
    """The plugin's `get_properties` fails."""

    is_outage = True


def wait_of(wait: QuotaWait, now: float) -> Wait:
    """Return the stored form of a quota's reason."""
    return Wait(wait.code, wait.message, since=now, until=wait.until or 0.0)


def without_secrets(record: R, redactor: Redactor) -> R:
    """Return the record with the values of secrets replaced, the same object if it has none."""
    text = encode(record).decode()
    if redactor.text(text) == text:
        return record
    return msgspec.convert(redactor.value(msgspec.to_builtins(record)), type(record))


class Desk:
    """The fenced writes of one execution, for its rounds and for the calls of its plugin."""

    def __init__(self, live: Live, tools: RoundTools) -> None:
        item = live.state
        assert item.spec is not None
        self.spec = item.spec.value
        self._live, self._tools, self._item = live, tools, item
        self.fence = ops.check_session(tools.keys.task_owner(item.id), tools.session)

    @property
    def state(self) -> TaskState:
        """The state as it is stored now."""
        state = self._item.state
        assert state is not None
        return state

    def decide(self, outcome: Outcome | None) -> Step:
        """Decide what follows from the outcome, at this moment."""
        item, tools = self._item, self._tools
        dependencies = tools.dependencies(self.spec) if self.spec.depends_on else {}
        execution = Execution(self.spec, item.state, dependencies, item.token)
        decided = step(execution, outcome, tools.wall(), tools.policy, tools.rng.random())
        if decided.state is item.state and not decided.events:
            return decided
        events = tuple(without_secrets(event, tools.redactor) for event in decided.events)
        return replace(decided, state=without_secrets(decided.state, tools.redactor), events=events)

    async def admit(self, quotas: Mapping[str, int]) -> Step:
        """Ask for the units that the execution declares, and commit the answer with what follows from it. Raises
        `StoreError`."""
        spec, tools = self.spec, self._tools
        requests = [
            Request(
                resource=resource,
                token=spec.id,
                execution=spec.id,
                units=units,
                project=spec.project,
                domain=spec.domain,
                key=spec.fair_key or spec.project,
                weight=spec.weight,
                priority=spec.priority,
            )
            for resource, units in quotas.items()
        ]
        decided: list[Step] = []
        is_current = False

        def change(draft: Draft) -> list[Op]:
            decided.clear()
            before = draft.size()
            admission = draft.admit(requests)
            now, never = tools.wall(), admission.infeasible
            if never and not is_current:
                return []
            waits = tuple(wait_of(wait, now) for wait in (*admission.waits.values(), *([never] if never else ())))
            decided[:] = [self.decide(Admitted(admission.granted, waits))]
            writes = self._writes(decided[0])
            return writes if len(writes) > 1 or draft.size() > before else []

        await self._transact(change)
        if not decided:  # infeasible, unless the limit was set a moment ago
            await tools.ledger.current()
            is_current = True
            await self._transact(change)
        [answer] = decided
        tools.outbox.add(spec, self._live.sent, answer.state.next_event, answer.events)
        return answer

    def can_wait(self, decided: Step) -> bool:
        """Return whether a decision leaves with the next commit: an admission decides again and commits all of it, and
        the number of sent events is no reason to let the plugin wait for a transaction."""
        if decided.events or decided.release or decided.action is None:
            return False
        return isinstance(decided.action, Admit) or decided.state == self._item.state

    async def commit(self, decided: Step) -> None:
        """Commit what was decided. Raises `StoreError`."""
        tools, item = self._tools, self._item
        is_ended = item.state is not None and item.state.step == "done"
        if decided.release:
            await self._know_units()
        if decided.release and tools.ledger.has(item.id):

            def change(draft: Draft) -> list[Op]:
                left = draft.release(item.id)
                return self._writes(decided, may_unlock=not left)

            await self._transact(change)
        else:
            writes = self._writes(decided)
            if len(writes) > 1:
                await self._apply(writes)
        tools.outbox.add(self.spec, self._live.sent, decided.state.next_event, decided.events)
        if decided.state.step == "done" and not is_ended:
            tools.endings.note(item.id, decided.state)

    def check(self, decided: Step) -> None:
        """Raise `TooLarge` for a step whose writes do not fit a transaction."""
        size = sum(map(ops.encoded_size, self._writes(decided)))
        if size > MAX_STEP_BYTES:
            raise TooLarge(f"{size} bytes of state and events; at most {MAX_STEP_BYTES} are possible in one call")

    async def settle(self) -> None:
        """Release what an ended execution still has, and give up its ownership once its events have left."""
        tools, item, live = self._tools, self._item, self._live
        if item.session != tools.session or tools.outbox.waits_for(item.id):
            return
        await self._know_units()
        while tools.ledger.has(item.id):

            def change(draft: Draft) -> list[Op]:
                draft.release(item.id)
                return [self.fence]

            await self._transact(change)
        if item.session == tools.session:
            decided = self.decide(Sent(live.sent) if live.sent > self.state.sent else None)
            await self._apply(self._writes(decided, may_unlock=True))

    async def _know_units(self) -> None:
        """Read the quotas if an answer about units of this execution was lost: none may stay behind."""
        if self._live.doubt:
            await self._tools.ledger.current()
            self._live.doubt = False

    def _writes(self, decided: Step, *, may_unlock: bool | None = None) -> list[Op]:
        """Return the fenced operations of a step; with the release of the ownership if nothing is left to do."""
        tools, item = self._tools, self._item
        state = decided.state
        sent = min(self._live.sent, state.next_event) if tools.outbox.has_sinks else state.next_event
        if sent > state.sent:
            state = msgspec.structs.replace(state, sent=sent)
        writes = [self.fence]
        if state != item.state:
            index = item.record.modify_index if item.record else 0
            writes.append(ops.cas(tools.keys.task_state(item.id), encode(state), index))
        writes += [ops.put(tools.keys.task_event(item.id, event.n), encode(event)) for event in decided.events]
        if may_unlock is None:
            may_unlock = not tools.ledger.has(item.id)
        if may_unlock and is_settled(self.spec, state):
            owner = encode(item.owner.value) if item.owner else b"{}"
            writes.append(ops.unlock(tools.keys.task_owner(item.id), owner, tools.session))
        return writes

    async def _transact(self, change: Callable[[Draft], list[Op]]) -> None:
        """Apply operations together with decisions about quotas. A holder of units goes first."""
        tools, item = self._tools, self._item
        unit: list[Op] = []

        def recorded(draft: Draft) -> list[Op]:
            unit[:] = change(draft)
            return unit

        async def send() -> TxnResult:
            try:
                return await tools.ledger.transact(recorded, urgent=tools.ledger.holds(item.id))
            except Unavailable:
                self._live.doubt = True
                raise

        await self._until_known(unit, send)

    async def _apply(self, writes: list[Op]) -> None:
        await self._until_known(writes, lambda: self._tools.commits.commit(writes))

    async def _until_known(self, unit: list[Op], send: Callable[[], Awaitable[TxnResult]]) -> None:
        """Send a transaction until it is known to be applied, or refused. Raises `StoreError`."""
        tools, item = self._tools, self._item
        pauses = Backoff(FIRST_PAUSE, LONGEST_PAUSE, rng=tools.rng)
        is_unsure = False
        while True:
            try:
                result = await send()
            except OwnershipLost:
                raise
            except TxnConflict:
                if await self._is_applied(unit):
                    return
                raise
            except Unavailable:
                is_unsure = True
            else:
                item.shard.view.apply(result, unit, origin=item.id)
                return
            while is_unsure:
                await asyncio.sleep(pauses.pause())
                if not tools.is_held():
                    raise Unavailable("the session ended before the store answered")
                try:
                    if await self._is_applied(unit):
                        return
                    is_unsure = False
                except Unavailable:
                    continue

    async def _is_applied(self, unit: Sequence[Op]) -> bool:
        """Return whether the state in the store is the one that was to be written. The view shows the stored one."""
        own = next((op for op in unit if op.verb == "cas"), None)
        if own is None:
            return False
        await self._item.shard.view.refresh_key(own.key)
        entry = await self._tools.store.get(own.key, consistent=True)
        return entry is not None and entry.value == own.value


class RoundIntent:
    """The write-ahead intent of the attempt."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    @property
    def key(self) -> str | None:
        intent = self._desk.state.intent
        return intent.key if intent else None

    async def declare(self, key: str) -> None:
        if not isinstance(key, str) or not 0 < len(key) <= MAX_INTENT:
            raise ValueError(f"an idempotency key is a text of 1 to {MAX_INTENT} characters, not {key!r:.80}")
        if self.key is not None and self.key != key:
            raise IntentConflict(
                f"attempt {self._desk.state.attempt} has declared the key {self.key!r}; it can't declare {key!r}, too"
            )
        if self.key is None:
            await self._desk.commit(self._desk.decide(Declared(key)))


class Rounds:
    """Runs the rounds of owned executions."""

    def __init__(self, tools: RoundTools) -> None:
        self._tools = tools

    async def run(self, live: Live) -> None:
        """Do all that is due. Sets `live.wake`. Raises `StoreError`; the stored state is then the truth, and the round
        is repeated from it."""
        item, tools = live.state, self._tools
        outcome: Outcome | None = None
        circuit: Circuit | None = None
        for _ in range(STREAK):
            if item.spec is None or item.bad is not None or item.session != tools.session or live.is_robbed:
                live.wake = None
                return
            desk = Desk(live, tools)
            decided, outcome = self._decide(desk, outcome)
            if circuit is not None and not self._counts(circuit, item.id, outcome):
                self._sleep(live, desk.decide(None))
                return
            circuit = self._circuit(live, desk, decided.action)
            passes = circuit is None or circuit.passes(item.id)
            if outcome is not None or not passes or not desk.can_wait(decided):
                await desk.commit(decided)
            if not passes:  # a deadline ends the attempt, though its plugin can't be called
                outcome = Held(Wait("PluginPaused", "a deadline has passed while the plugin is paused"))
                if desk.state.step != "running" or desk.decide(outcome).state.step == "running":
                    self._sleep(live, decided)
                    return
                circuit = None
                continue
            while isinstance(decided.action, Admit):
                decided = await desk.admit(decided.action.quotas)
            if decided.action is None:
                self._sleep(live, decided)
                if decided.state.step == "done":
                    await desk.settle()
                return
            if live.is_stuck:
                live.wake = None  # the end of the call makes it due
                return
            outcome = await self._perform(live, desk, decided.action)
        live.signalled = True
        tools.signal(item.id)

    def _sleep(self, live: Live, decided: Step) -> None:
        """Set when the execution is due by the clock."""
        live.wake = None
        if decided.wake is not None:  # never at once: the two clocks differ in their last digits
            live.wake = self._tools.clock() + max(SHORTEST_WAIT, decided.wake - self._tools.wall())

    def _circuit(self, live: Live, desk: Desk, action: Action | None) -> Circuit | None:
        """Return the circuit of the plugin's calls to which the action leads; None for an action without a call, and
        for an abort by force, which ends also when the plugin fails."""
        match action:
            case LookUp() | Admit() | Handle():
                return self._tools.circuits[live.lane, "handle"]
            case CleanUp(steps=steps) if "abort" in steps or "finalize" in steps:
                abort = desk.spec.abort
                return None if abort is not None and abort.force else self._tools.circuits[live.lane, "clean-up"]
        return None

    def _counts(self, circuit: Circuit, execution: str, outcome: Outcome | None) -> bool:
        """Report a call's outcome to its circuit. Return false for a fault of a plugin that is paused."""
        match outcome:
            case RoundFailed(fault=True, message=message):
                return circuit.failed(execution, self._tools.redactor.text(message))
            case CleanedUp(fault=True, abort_error=abort, finalize_error=finalize):
                return circuit.failed(execution, self._tools.redactor.text(abort or finalize))
            case Handled() | RoundFailed() | Held() | CleanedUp():
                circuit.succeeded(execution)
        return True

    @staticmethod
    def _decide(desk: Desk, outcome: Outcome | None) -> tuple[Step, Outcome | None]:
        """Decide what follows. An answer of a plugin that can't be stored is a failed call. Return the outcome, too."""
        if not isinstance(outcome, Handled):
            return desk.decide(outcome), outcome
        try:
            decided = desk.decide(outcome)
            desk.check(decided)
        except Exception as error:  # text that is no Unicode, for example
            message = f"{outcome.plugin} returned what can't be stored: {text_of(error)}"
            failed = RoundFailed(message, code=BadAnswer.code, fault=True)
            return desk.decide(failed), failed
        return decided, outcome

    async def _perform(self, live: Live, desk: Desk, action: Action) -> Outcome:
        """Do what a step asks for. Return its outcome."""
        match action:
            case Handle():
                return await self._handle(live, desk)
            case LookUp(reserve=reserve):
                try:
                    _, context = self._context(live, desk, desk.state.attempt)
                    async with asyncio.timeout(CACHE_TIMEOUT):
                        return await self._tools.workshop.look_up(desk.spec, context, reserve=reserve)
                except Exception as error:
                    log.warning("The cache could not be read", execution=desk.spec.id, error=repr(error))
                    return CacheAnswered("LOOKUP_FAILURE")
            case CleanUp():
                return await self._clean_up(live, desk, action)
        raise TypeError(f"a round can't perform {action!r}")

    async def _handle(self, live: Live, desk: Desk) -> Outcome:
        workshop = self._tools.workshop
        try:
            plugin, context = self._context(live, desk, desk.state.attempt)
        except TaskError as error:
            return RoundFailed(str(error), retryable=error.retryable, code=type(error).__name__, fault=error.is_outage)
        try:
            transition = await self._call(live, plugin, context, "handle", lambda: plugin.handle(context), Transition)
            outputs = None
            if transition.info.phase.is_success():  # the reader that the plugin put is its own code, too
                found = await self._call(live, plugin, context, "handle", partial(workshop.outputs, context), object)
                outputs = cast("Outputs | None", found)
        except PluginError as error:
            cause = error.__cause__
            if isinstance(cause, StoreError) and not isinstance(cause, Invalid | TooLarge):
                raise cause from None  # which the plugin let through; a repetition may help
            if isinstance(cause, RemoteUnknown):
                return Held(Wait("RemoteUnknown", text_of(cause)[:MAX_TEXT], since=self._tools.wall()))
            if isinstance(cause, TaskError):
                code = type(cause).__name__
                return RoundFailed(text_of(cause), retryable=cause.retryable, code=code, fault=error.is_fault)
            return RoundFailed(str(error), code=error.code, fault=error.is_fault)
        manager = context.resource_manager
        refused = manager.waits.values() if isinstance(manager, QuotaResourceManager) else ()
        return Handled(
            transition,
            state_write=context.plugin_state_writer.written,
            raw=tuple(context.events_recorder.recorded),
            outputs=outputs,
            waits=tuple(wait_of(wait, self._tools.wall()) for wait in refused),
            plugin=plugin.get_id(),
            checkpoint=context.output_writer.get_checkpoint_prefix() if transition.info.phase.is_terminal() else "",
        )

    async def _clean_up(self, live: Live, desk: Desk, action: CleanUp) -> Outcome:
        """Do all steps, in order; the error of one does not stop the others."""
        workshop, spec = self._tools.workshop, desk.spec
        errors = {"abort": "", "finalize": ""}
        fault = False
        cache: CacheStatus = ""
        try:
            plugin, context = self._context(live, desk, action.attempt)
        except TaskError as error:  # without a plugin that was called there is nothing to clean up
            was_called = desk.state.plugin or desk.state.intent
            return CleanedUp(finalize_error=str(error) if was_called else "", fault=error.is_outage)
        for each in action.steps:
            if each in ("abort", "finalize"):
                call = plugin.abort if each == "abort" else plugin.finalize
                try:
                    await self._call(live, plugin, context, each, partial(call, context), type(None))
                except PluginError as error:
                    if isinstance(error.__cause__, OwnershipLost):
                        raise error.__cause__ from error
                    errors[each] = str(error)
                    fault = fault or error.is_fault
                    if isinstance(error, PluginHung):
                        break  # the next call would overlap with this one
            elif each == "put_cache":
                cache = "POPULATED" if await self._try(workshop.put_cache(spec, context), spec.id) else "PUT_FAILURE"
            else:
                await self._try(workshop.release_reservation(spec, context), spec.id)
        return CleanedUp(errors["abort"], errors["finalize"], cache, fault)

    async def _try(self, call: Coroutine[Any, Any, None], execution: str) -> bool:
        """Wait for a call to the cache, whose errors are only logged. Return whether it succeeded."""
        try:
            async with asyncio.timeout(CACHE_TIMEOUT):
                await call
        except Exception as error:
            log.warning("The cache failed; going on without it", execution=execution, error=repr(error))
            return False
        return True

    async def _call(
        self,
        live: Live,
        plugin: Plugin,
        context: TaskContext,
        verb: Verb,
        call: Callable[[], Coroutine[Any, Any, T]],
        expected: type[T],
    ) -> T:
        """Return what a call returns. Note a call that hangs, and one that got no answer about units. Raises
        `PluginError`."""
        try:
            return await self._tools.guard.call(plugin.get_id(), verb, live.state.id, call, expected)
        except PluginHung as hung:
            live.stuck = hung.task
            hung.task.add_done_callback(lambda _: self._tools.signal(live.state.id))
            raise
        finally:
            manager = context.resource_manager
            live.doubt |= isinstance(manager, QuotaResourceManager) and manager.is_unsure

    def _context(self, live: Live, desk: Desk, attempt: int) -> tuple[Plugin, TaskContext]:
        """Return the plugin, and the context of a call. Raises `TaskError`."""
        tools, state, spec = self._tools, desk.state, desk.spec
        plugin = tools.workshop.plugin_for(spec, state)
        try:
            properties = plugin.get_properties()
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            raise BrokenPlugin(f"the plugin's get_properties: {type(error).__name__}: {text_of(error)}") from error
        if not isinstance(properties, PluginProperties):
            raise BrokenPlugin(f"the plugin's get_properties returned {type(properties).__name__}")
        identity = TaskExecutionIdentifier(spec.project, spec.domain, spec.id, NODE_ID, spec.name or spec.id, attempt)
        name = TaskExecutionID(identity, properties.name_length)
        context = tools.workshop.context(
            spec,
            TaskExecutionMetadata(spec, state, name, tools.policy.interruptible_failures),
            PluginStateReader(state.plugin_state, state.plugin_state_version),
            plugin=plugin.get_id(),
            signal=partial(tools.signal, spec.id),
            intent=RoundIntent(desk),
            fence=desk.fence,
        )
        return plugin, context
