"""The checks of tasks: engines, types, quotas, events that do not leave. Nothing is reported where none are used."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from rcfarm.doctor.findings import Finding, counted, error, ok, warning
from rcfarm.doctor.permissions import permissions
from rcfarm.operations.fleet import listed
from rcfarm.operations.quotas import Quotas, QuotaView
from rcfarm.operations.tasks import TYPES, Engine, Tasks, TaskView, described
from store.kv.protocol import BadRecord, Store
from store.schema.keys import Keys

OPERATORS_TREES = ("tasks", "quota", "schedules")
ENGINES_TREES = ("engines", "task-events", "task-pods", "catalog", "retention")
FAILED_WITHIN = 86400.0  # seconds for which a failed execution is reported
OUTBOX_AFTER = 300.0  # seconds for which the events of an ended execution may wait for a sink
KEPT = 20  # names of one kind
FAILURES = ("task_failed", "task_timed_out")


@dataclass(slots=True)
class TaskCensus:
    """What was found of executions. Of each kind at most `KEPT` ids are kept; `counts` has all of them."""

    counts: Counter[str] = field(default_factory=Counter)
    unclaimable: list[str] = field(default_factory=list)
    failed: dict[str, list[str]] = field(default_factory=dict)  # by code: the executions, each with its error
    unknown_types: Counter[str] = field(default_factory=Counter)
    stuck: list[str] = field(default_factory=list)
    bad: list[BadRecord] = field(default_factory=list)
    asked: dict[str, str] = field(default_factory=dict)  # resource: one execution that asks for it
    lost: dict[str, TaskView | None] = field(default_factory=dict)  # holder of units: its records, if there are any

    def add(self, view: TaskView, engines: Sequence[Engine], known: frozenset[str], now: float) -> None:
        """Count one execution."""
        self.counts["all"] += 1
        self.bad += list(view.bad.values())[: max(0, KEPT - len(self.bad))]
        if view.id in self.lost:
            self.lost[view.id] = view
        spec, state = view.spec, view.state
        if spec is None:
            return
        if state is not None and state.sent < state.next_event and 0 < state.ended_at < now - OUTBOX_AFTER:
            self._keep(self.stuck, "stuck", view.id)
        if view.is_ended:
            if state is not None and state.end_code in FAILURES and state.ended_at > now - FAILED_WITHIN:
                kept = self.failed.setdefault(state.end_code, [])
                self._keep(kept, state.end_code, f"{view.id}: {state.end_message}")
            return
        self.counts["live"] += 1
        for resource in spec.quotas:
            self.asked.setdefault(resource, view.id)
        if spec.type not in known:
            self.unknown_types[spec.type] += 1
        if not view.is_held and not any(engine.takes(spec.labels) for engine in engines):
            self._keep(self.unclaimable, "unclaimable", view.id)

    def _keep(self, kept: list[str], kind: str, task_id: str) -> None:
        self.counts[kind] += 1
        if len(kept) < KEPT:
            kept.append(task_id)


async def examine_tasks(store: Store, keys: Keys) -> list[Finding]:
    """Return the findings on tasks; none where there are neither tasks nor engines nor quotas."""
    tasks = Tasks(store, keys)
    engines, quotas = await tasks.engines(), await Quotas(store, keys).list()
    census, now = TaskCensus(), time.time()
    census.lost = {grant.execution: None for quota in quotas for grant in quota.grants}
    known: frozenset[str] = frozenset()
    async for page in tasks.pages():
        if page and not known:
            known = _installed_types()
        for view in page:
            census.add(view, engines, known, now)
    if not census.counts["all"] and not engines and not quotas:
        return []
    rights = await permissions(
        store,
        keys,
        operators=OPERATORS_TREES,
        daemons=ENGINES_TREES,
        what="everything that concerns tasks",
        who="engines, and agents that run tasks,",
    )
    return [*rights, *judge_tasks(census, engines), *judge_quotas(census, quotas)]


def _installed_types() -> frozenset[str]:
    """Return the types of tasks that have a plugin here."""
    from importlib.metadata import entry_points  # with the registry 20 ms, in vain where there is no task

    from controllers.tasks.registry import ENTRY_POINTS

    return frozenset((*TYPES, *(point.name for point in entry_points(group=ENTRY_POINTS))))


def judge_tasks(census: TaskCensus, engines: Sequence[Engine]) -> list[Finding]:
    """Return the findings on engines and executions."""
    live = [engine.member.engine for engine in engines if engine.live]
    words = f"{len(live)} live ({listed(live)})" if live else "none is live"
    words += f"; {counted(census.counts['live'], 'execution')} in hand"
    found = []
    if number := census.counts["unclaimable"]:
        waiting = f"{number} executions wait for an engine that takes their labels ({listed(census.unclaimable)})"
        found.append(
            error(
                "engines",
                f"{words}; {waiting}",
                "start `rcfarm tasks`, or correct the engines' selectors or the labels",
            )
        )
    elif len(live) == 1:
        found.append(warning("engines", words, "start a second one, so that one may fail"))
    elif live or not census.counts["live"]:
        found.append(ok("engines", words))
    else:
        found.append(error("engines", words, "start `rcfarm tasks`"))
    for engine in engines:
        for pause in engine.member.pauses if engine.live else ():
            advice = "repair it, or what it calls; the engine tries again at most every 60 s, and nothing is lost"
            found.append(error(f"{pause.kind}s", f"on engine {engine.member.engine}, {described(pause)}", advice))
    for code, kept in sorted(census.failed.items()):
        number = census.counts[code]
        verb = "failed" if code == "task_failed" else "timed out"
        text = f"{counted(number, 'task')} {verb} within a day: {'; '.join(kept[:3])}"
        text += f"; and {number - 3} more" if number > 3 else ""
        advice = "see `rcfarm explain task/ID`; `rcfarm task retry ID` runs it again"
        found.append(warning("tasks", text, advice, [code]))
    for kind, number in sorted(census.unknown_types.items())[:KEPT]:
        text = f"{number} executions are of type {kind}, which no plugin installed here handles"
        found.append(warning("task_types", text, "install its plugin where the engines run, or correct the type"))
    if number := census.counts["stuck"]:
        text = f"events of {number} ended executions have not left ({listed(census.stuck)})"
        found.append(warning("outbox", text, "look in the engines' logs for the sink that does not take them"))
    for problem in census.bad:
        _, _, task_id, kind = problem.key.rsplit("/", 3)
        command = {"spec": f"`rcfarm task abort {task_id}`", "state": f"`rcfarm task delete --force {task_id}`"}
        advice = f"correct it, or release what the task holds: {command[kind]}" if kind in command else "correct it"
        found.append(error("task_records", str(problem), advice))
    return found


def judge_quotas(census: TaskCensus, quotas: Sequence[QuotaView]) -> list[Finding]:
    """Return the findings on quotas."""
    found, limited = [], {quota.resource for quota in quotas if quota.limit is not None}
    waiting = {quota.resource: quota.tickets[0].execution for quota in quotas if quota.tickets}
    for resource, task_id in sorted({**waiting, **census.asked}.items()):
        if resource not in limited:
            text = f"task {task_id} asks for units of {resource}, which has no limit, so nothing is granted"
            found.append(error("quotas", text, f"set one: `rcfarm quota set {resource} UNITS`"))
    for quota in quotas:
        if quota.limit is not None and quota.used > quota.limit.units:
            text = f"{quota.used} units of {quota.resource} are held, and the limit is {quota.limit.units}"
            found.append(warning("quotas", text, "it was lowered; no unit is granted until enough are released"))
        for grant in quota.grants:
            holder = census.lost[grant.execution]
            if why := holder.defect if holder else "it does not exist":
                text = f"{grant.units} units of {quota.resource} are held by task {grant.execution}, and {why}"
                advice = holder.remedy if holder else "an engine releases them; `rcfarm tasks` starts one if none runs"
                found.append(error("quotas", text, advice or "correct the record"))
        found += [error("quotas", str(bad), "correct it; until then nothing is granted") for bad in quota.bad]
    if not found and quotas:
        held = sum(quota.used for quota in quotas)
        found.append(ok("quotas", f"{counted(len(quotas), 'quota')}; {counted(held, 'unit')} held"))
    return found
