"""Operators' verbs on executions of tasks, for the CLI and other clients.

The model: an execution is its `spec` key, which only operators write; the engine that owns it writes the rest. Each
change is one transaction of the spec, by compare-and-swap, and an audit event. Nothing here runs or stops anything: the
owner does, as soon as it sees the new spec.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import msgspec

from rcfarm.operations.errors import BadInput, Contended, NotFound, TaskExists, TaskRefused
from rcfarm.operations.fleet import listed
from store.decoding import Undecodable, converted, from_json, json_decoder
from store.kv import ops
from store.kv.protocol import BadRecord, Entry, Op, Store, TxnConflict
from store.schema import audit
from store.schema.keys import BadKey, BadLabel, Keys, all_shards, check_labels, is_dns_label, is_resource_name
from store.schema.manifest import problem_of_variable
from store.schema.records import Labels, decode, encode, rfc3339, utc_now
from store.schema.selectors import BadSelector, Selector
from store.schema.tasks import (
    AbortRequest,
    EngineLoad,
    EngineMember,
    EnginePause,
    TaskEvent,
    TaskOwner,
    TaskSpec,
    TaskState,
    Wait,
)

Word = Literal[
    "waiting", "starting", "running", "stopping", "succeeded", "failed", "timed-out", "aborted", "unreadable"
]

TYPES = ("process", "rc", "http", "python", "pod", "framework")  # the kinds of tasks that rcfarm has
ENDED: tuple[Word, ...] = ("succeeded", "failed", "timed-out", "aborted")
READS = 4  # shards that are read at the same time
MAX_TEXT = 1000  # characters of an operator's reason
_OUTCOMES: dict[str, Word] = {
    "success": "succeeded",
    "failure": "failed",
    "timeout": "timed-out",
    "aborted": "aborted",
}
_PHASES: dict[str, Word] = {"PhaseInitializing": "starting", "PhaseRunning": "running"}
_ID_ALPHABET = "bcdfghjklmnpqrstvwxz2456789"  # no vowels, so that no words occur


class TaskView(NamedTuple):
    """One execution, as it is stored. `spec` None: it can't be read. `owner`: the engine that holds it, or held it
    last. `bad`: what can't be decoded, by the key's last part."""

    id: str
    spec: TaskSpec | None = None
    state: TaskState | None = None
    owner: TaskOwner | None = None
    is_held: bool = False
    bad: Mapping[str, BadRecord] = MappingProxyType({})
    spec_index: int = 0

    @property
    def word(self) -> Word:
        """Return the state in one word."""
        if self.spec is None or self.bad:
            return "unreadable"
        state = self.state
        if state is None or state.rerun < self.spec.rerun:
            return "waiting"
        if state.step == "done":
            return _OUTCOMES.get(state.outcome, "failed")
        if state.step == "cleaning" or self.spec.abort is not None:
            return "stopping"
        return _PHASES.get(state.phase, "waiting")

    @property
    def defect(self) -> str:
        """Return which record is gone or can't be read, so that no engine can work on the execution; "" for none."""
        if self.bad:
            return f"its {' and '.join(sorted(self.bad))} can't be read"
        return "" if self.spec is not None else "its spec was deleted"

    @property
    def remedy(self) -> str:
        """Return the command that releases what an execution with a defect holds; "" if nothing is to do."""
        if "state" in self.bad:
            return f"`rcfarm task delete --force {self.id}`, which stops nothing"
        if self.spec is not None:
            return ""
        if self.state is None or self.state.step != "done":
            return f"`rcfarm task abort {self.id}`"
        return f"`rcfarm task delete {self.id}`" if self.bad else ""

    @property
    def is_ended(self) -> bool:
        """Return whether the execution has ended and is not asked to run again."""
        return self.word in ENDED


Change = Callable[[TaskView, TaskSpec], TaskSpec]


class Engine(NamedTuple):
    """An engine's member record. `live`: it is a member now."""

    member: EngineMember
    live: bool

    def takes(self, labels: Labels) -> bool:
        """Return whether this engine is live and may claim an execution with these labels."""
        try:
            return self.live and Selector.parse(self.member.selector).matches(labels)
        except BadSelector:
            return False


def states_of(loads: Iterable[EngineLoad]) -> dict[str, int]:
    """Return how many executions of these engines are in each state, in one word. Those that have ended, and those that
    no engine owns, are not among them."""
    found = Counter[str]()
    for load in loads:
        for phase, number in load.phases.items():
            found["stopping" if phase == "cleaning" else _PHASES.get(f"Phase{phase}", "waiting")] += number
    return {word: found[word] for word in ("waiting", "starting", "running", "stopping") if found[word]}


def checked(spec: TaskSpec) -> TaskSpec:
    """Return the spec if its fields are valid. Raises `BadInput`."""
    if not is_dns_label(spec.id):
        raise BadInput(f"id: {spec.id!r} is not a DNS label (lower-case letters, digits and '-', at most 63)")
    if not spec.type:
        raise BadInput(f"task {spec.id}: type: missing; name the kind of task, such as process")
    for name in ("project", "domain"):
        if not is_dns_label(value := getattr(spec, name)):
            raise BadInput(f"{name}: {value!r} is not a DNS label (lower-case letters, digits and '-', at most 63)")
    for resource in spec.quotas:
        if not is_resource_name(resource):
            raise BadInput(f"quotas: {resource!r} can't name a resource: use letters, digits and '-_.:'")
    for name in spec.environment:
        if problem := problem_of_variable(name):
            raise BadInput(f"environment: {problem}")
    for other in spec.depends_on:
        if not is_dns_label(other):
            raise BadInput(f"depends_on: {other!r} is not the id of a task")
        if other == spec.id:
            raise BadInput(f"depends_on: task {spec.id} can't wait for itself")
    try:
        check_labels(spec.labels)
    except BadLabel as error:
        raise BadInput(f"labels: {error}") from error
    return spec


def fresh_id(name: str, rng: random.Random) -> str:
    """Return `name` and five random characters: the id of one more execution of the same task."""
    return f"{name[:57].rstrip('-')}-{''.join(rng.choices(_ID_ALPHABET, k=5))}"


def same_request(one: TaskSpec, other: TaskSpec) -> bool:
    """Return whether two specs ask for the same, apart from who submitted them and what became of them since."""
    blank = {"abort": None, "generation": 1, "rerun": 0, "created_at": "", "submitted_by": "", "schedule": ""}
    return msgspec.structs.replace(one, **blank) == msgspec.structs.replace(other, **blank)


class Tasks:
    """Reads and changes executions. `actor`: named in the audit log.

    `StoreError`s pass through every method; the errors of `rcfarm.operations.errors` are named per method.
    """

    def __init__(
        self, store: Store, keys: Keys, *, actor: str | audit.Actor = "", rng: random.Random | None = None
    ) -> None:
        self._store, self._keys, self._actor = store, keys, actor
        self._name = actor.name if isinstance(actor, audit.Actor) else actor
        self._rng = rng or random.Random()

    async def submit(self, spec: TaskSpec) -> TaskSpec:
        """Create an execution and return its spec as written. Raises `BadInput`, `TaskExists`."""
        new = msgspec.structs.replace(checked(spec), created_at=utc_now(), submitted_by=spec.submitted_by or self._name)
        details = {"type": new.type, "project": new.project, "domain": new.domain}
        writing = [
            ops.create(self._keys.task_spec(new.id), encode(new)),
            self._event("TASK_SUBMITTED", new, details),
        ]
        try:
            await self._store.txn(writing)
        except TxnConflict as error:
            raise TaskExists(f"task {new.id} exists already; give the new one another id") from error
        return new

    async def get(self, task_id: str) -> TaskView:
        """Return the execution. Raises `NotFound`."""
        listing = await self._store.list(self._keys.task(task_id), consistent=True)
        views = list(views_of(self._keys, listing.entries))
        if not views:
            raise NotFound(f"there is no task {task_id}; `rcfarm task list` shows those that exist")
        return views[0]

    async def pages(self) -> AsyncIterator[list[TaskView]]:
        """Yield every execution, a few shards at a time, so that a large number is never in memory as a whole."""
        shards = all_shards(self._keys.shards)
        for first in range(0, len(shards), READS):
            some = shards[first : first + READS]
            listings = await asyncio.gather(*(self._store.list(self._keys.task_shard(shard)) for shard in some))
            yield [view for listing in listings for view in views_of(self._keys, listing.entries)]

    async def abort(self, task_id: str, *, reason: str = "", force: bool = False) -> TaskSpec:
        """Ask the owner to stop the execution. Does nothing if that was asked already, except with `force`: end it also
        if its plugin can't stop what it began. A spec that can't be read, or was deleted, is written again with what is
        left of it. Raises `NotFound`, `TaskRefused` when it has ended or its state can't be read, `Contended`."""
        asked = AbortRequest(reason=reason[:MAX_TEXT], by=self._name, at=utc_now(), force=force)

        def change(view: TaskView, spec: TaskSpec) -> TaskSpec:
            if view.is_ended:
                raise TaskRefused(f"task {task_id} has {view.word} already")
            if spec.abort is not None and (spec.abort.force or not force):
                return spec
            return msgspec.structs.replace(spec, abort=asked)

        details = {"reason": asked.reason, "force": force}
        return await self._edit(task_id, "TASK_ABORT_REQUESTED", change, details, may_salvage=True)

    async def retry(self, task_id: str) -> TaskSpec:
        """Run an ended execution again, with all its retries. Raises `NotFound`, `TaskRefused`, `Contended`."""

        def change(view: TaskView, spec: TaskSpec) -> TaskSpec:
            if not view.is_ended:
                raise TaskRefused(f"task {task_id} is {view.word}; only an ended one can run again, so abort it first")
            return msgspec.structs.replace(spec, abort=None, rerun=spec.rerun + 1)

        return await self._edit(task_id, "TASK_RETRIED", change, {})

    async def delete(self, task_id: str, *, force: bool = False) -> None:
        """Remove an ended execution; an engine then removes its records, and releases its units. `force`: whatever its
        state is, and without stopping what it began. Raises `NotFound`, `TaskRefused`, `Contended`."""
        keys = self._keys

        async def attempt() -> None:
            view = await self.get(task_id)
            if not force and "state" in view.bad:
                raise TaskRefused(_lost(task_id))
            is_over = view.state is not None and view.state.step == "done" and "spec" in view.bad
            if not (force or is_over or (view.spec is not None and view.is_ended)):
                raise TaskRefused(f"task {task_id} is {view.word}; only an ended one can be deleted, so abort it first")
            spec = view.spec or TaskSpec(id=task_id, type="")
            removal = [self._event("TASK_DELETED", spec, {"state": view.word, "force": force})]
            if view.spec_index:
                removal.append(ops.delete_cas(keys.task_spec(task_id), view.spec_index))
            if force:  # with a state, an engine that knows the spec would write it again
                removal.append(ops.delete(keys.task_state(task_id)))
            await self._store.txn(removal)

        await ops.retry_conflicts(f"task {task_id}", attempt, rng=self._rng, error=Contended)

    async def history(self, task_id: str) -> list[TaskEvent]:
        """Return what happened, oldest first, without what can't be decoded. Empty for an unknown execution."""
        events = []
        for entry in (await self._store.list(self._keys.events_of(task_id), consistent=True)).entries:
            try:
                events.append(decode(TaskEvent, entry.key, entry.value))
            except BadRecord:
                continue  # `rcfarm doctor` names it
        return events

    async def engines(self) -> list[Engine]:
        """Return the engines with a readable member record, live or not, in order of name."""
        engines = []
        for entry in (await self._store.list(self._keys.engines)).entries:
            try:
                engines.append(Engine(decode(EngineMember, entry.key, entry.value), entry.session is not None))
            except BadRecord:
                continue  # `rcfarm doctor` names it
        return engines

    async def _edit(
        self, task_id: str, event: str, change: Change, details: dict[str, Any], *, may_salvage: bool = False
    ) -> TaskSpec:
        async def attempt() -> TaskSpec:
            view = await self.get(task_id)
            if "state" in view.bad:
                raise TaskRefused(_lost(task_id))
            spec, is_over = view.spec, view.state is not None and view.state.step == "done"
            if spec is None and may_salvage and not is_over:
                entry = await self._store.get(self._keys.task_spec(task_id), consistent=True)
                spec = salvaged(task_id, entry.value if entry else b"", view.state)
                view = view._replace(spec_index=entry.modify_index if entry else 0)
            if spec is None:
                raise view.bad.get("spec") or TaskRefused(f"task {task_id} is being removed")
            new = change(view, spec)
            if new == spec:
                return new
            new = msgspec.structs.replace(new, generation=spec.generation + 1)
            writing = [
                ops.cas(self._keys.task_spec(task_id), encode(new), view.spec_index),
                self._event(event, new, details),
            ]
            await self._store.txn(writing)
            return new

        return await ops.retry_conflicts(f"task {task_id}", attempt, rng=self._rng, error=Contended)

    def _event(self, event: str, spec: TaskSpec, details: dict[str, Any]) -> Op:
        return audit.event_op(
            self._keys, event, {"task": spec.id, "generation": spec.generation, **details}, actor=self._actor
        )


def salvaged(task_id: str, raw: bytes, state: TaskState | None) -> TaskSpec:
    """Return a spec with those fields of a damaged one that can be read, and with what the state knows."""
    try:
        found = from_json(json_decoder(dict[str, Any]), raw)
    except Undecodable:
        found = {}
    fields = {}
    for field in msgspec.structs.fields(TaskSpec):
        if field.name in found and field.name not in ("id", "abort"):
            try:
                fields[field.name] = converted(found[field.name], field.type)
            except Undecodable:
                continue
    spec = TaskSpec(**{"type": state.plugin if state else "", **fields, "id": task_id})
    if state is None:
        return spec
    return msgspec.structs.replace(
        spec,
        plugin=spec.plugin or state.plugin,
        generation=max(spec.generation, state.generation),
        rerun=max(spec.rerun, state.rerun),
    )


def _lost(task_id: str) -> str:
    return (
        f"task {task_id}: its state can't be read, so nothing knows what to stop; correct the record, or give up what "
        f"it began: `rcfarm task delete --force {task_id}`"
    )


def views_of(keys: Keys, entries: Iterable[Entry]) -> list[TaskView]:
    """Return the executions of which these are the entries, in order of id."""
    found: dict[str, TaskView] = {}
    for entry in entries:
        try:
            _, task_id, kind = keys.parse_task(entry.key)
        except BadKey:
            continue
        view = found.setdefault(task_id, TaskView(task_id))
        try:
            if kind == "spec":
                view = view._replace(spec_index=entry.modify_index)
                view = view._replace(spec=decode(TaskSpec, entry.key, entry.value))
            elif kind == "state":
                view = view._replace(state=decode(TaskState, entry.key, entry.value))
            else:
                view = view._replace(is_held=entry.session is not None)
                view = view._replace(owner=decode(TaskOwner, entry.key, entry.value))
        except BadRecord as error:
            view = view._replace(bad={**view.bad, kind: error})
        found[task_id] = view
    return [found[task_id] for task_id in sorted(found)]


def reasons(view: TaskView, engines: Sequence[Engine], now: float | None = None) -> list[Wait]:
    """Return why the execution does not run: its owner's reasons, that its plugin is paused, or that no engine has
    it."""
    if view.spec is None or view.word in (*ENDED, "unreadable"):
        return []
    paused = _paused(view, view.spec, engines)
    found = [*paused, *(view.state.reasons if view.state and view.word != "running" else ())]
    if view.is_held or view.word == "running":
        return found
    live = [engine for engine in engines if engine.live]
    takers = [engine.member.engine for engine in live if engine.takes(view.spec.labels)]
    if takers:
        text = f"no engine owns it yet; {listed(takers)} may claim it"
    elif not live:
        text = "no live engine; start one with `rcfarm tasks`"
    else:
        selectors = listed(f"{each.member.engine} takes {each.member.selector or 'everything'}" for each in live)
        shown = ",".join(f"{key}={value}" for key, value in sorted(view.spec.labels.items())) or "none"
        text = f"no live engine matches its labels ({shown}): {selectors}"
    return [Wait("EngineMissing", text, time.time() if now is None else now), *found]


def _paused(view: TaskView, spec: TaskSpec, engines: Sequence[Engine]) -> list[Wait]:
    """Return the pause of the plugin's calls that the execution needs next, as its owner has published it."""
    if not view.is_held or view.owner is None:
        return []
    state, owner = view.state, view.owner.engine
    calls = "clean-up" if state is not None and state.step == "cleaning" else "handle"
    named = (state.plugin if state is not None else "") or spec.plugin
    for pause in (each for engine in engines if engine.member.engine == owner for each in engine.member.pauses):
        is_its = pause.name == named if named else spec.type in pause.types
        if pause.kind == "plugin" and pause.calls == calls and is_its:
            return [Wait("PluginPaused", f"on engine {owner}, {described(pause)}", pause.since, pause.probe_at)]
    return []


def described(pause: EnginePause) -> str:
    """Return what is paused and why, without times for which a `Wait` has fields."""
    what = {"handle": "takes no calls", "clean-up": "cleans up nothing", "": "takes no events"}[pause.calls]
    since = rfc3339(datetime.fromtimestamp(pause.since, UTC))
    tries = f"{pause.probes} tries since failed, too; " if pause.probes else ""
    return (
        f"{pause.kind} {pause.name} {what} since {since}: it failed for one task after the other; {tries}"
        f"the last error is: {pause.error}"
    )
