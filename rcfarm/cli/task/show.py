"""Show executions: `rcfarm task list | get | status | explain | history | logs`."""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import typer
from rich.text import Text

from controllers.tasks.step import next_wake
from rcfarm.cli.kit.command import Cli
from rcfarm.cli.kit.options import TaskId, UsageProblem
from rcfarm.cli.kit.output import Output, ago, ahead, count, labels, state, timestamp
from rcfarm.cli.kit.tasks import TaskInfo, WaitInfo, print_reasons, summary, task_info, tasks_of
from rcfarm.cli.pod_logs import (
    PATIENCE,
    Follow,
    LogsSince,
    Place,
    Printer,
    Tail,
    follow,
    log_options,
    show,
)
from rcfarm.cli.quota import Holder, holders_of
from rcfarm.cli.rc.follow import watched
from rcfarm.operations.errors import BadInput, NotFound
from rcfarm.operations.fleet import listed
from rcfarm.operations.quotas import Quotas, QuotaView
from rcfarm.operations.reasons import reasons_of_task
from rcfarm.operations.task_file import TaskFields
from rcfarm.operations.tasks import ENDED, TYPES, TaskView
from store.schema.records import Reason
from store.schema.selectors import Selector
from store.schema.tasks import TaskError, TaskEvent, TaskSpec

STATES = ("waiting", "starting", "running", "stopping", *ENDED, "unreadable")
SHOWN_HOLDERS = 5
FOLLOWED = 64  # executions that are read in search of a ring of dependencies


async def list_(
    cli: Cli,
    selector: Annotated[
        str, typer.Option("--selector", "-l", metavar="SELECTOR", help="Only tasks whose labels match, as in team=web.")
    ] = "",
    only: Annotated[
        str, typer.Option("--state", "-s", metavar="STATE,…", help=f"Only these: {', '.join(STATES)}; live: not ended.")
    ] = "",
    project: Annotated[str, typer.Option("--project", metavar="NAME", help="Only this project.")] = "",
    schedule: Annotated[str, typer.Option("--schedule", metavar="NAME", help="Only those of a schedule.")] = "",
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=0, help="The newest N; 0: all.")] = 100,
) -> None:
    """List executions, the newest first."""
    wanted = Selector.parse(selector)
    states = {each.strip() for each in only.split(",") if each.strip()}
    if unknown := states - {*STATES, "live"}:
        raise UsageProblem(f"--state {only!r}: {listed(sorted(unknown))} is none of {', '.join(STATES)}, live")
    if "live" in states:
        states |= set(STATES) - set(ENDED)
    tasks, found, matching = tasks_of(cli), list[TaskView](), 0
    engines = await tasks.engines()
    async for page in tasks.pages():
        fitting = [
            view
            for view in page
            if (view.spec is None or wanted.matches(view.spec.labels))
            and (not states or view.word in states)
            and (not project or (view.spec is not None and view.spec.project == project))
            and (not schedule or (view.spec is not None and view.spec.schedule == schedule))
        ]
        matching += len(fitting)
        found += fitting
        found = heapq.nlargest(
            limit or len(found), found, key=lambda view: (view.spec.created_at if view.spec else "", view.id)
        )
    shown = [task_info(view, engines) for view in found]
    rows = (
        (
            each.id,
            state(each.state),
            each.type or "-",
            ago(each.created_at),
            each.project or "-",
            str(each.attempt),
            each.engine if each.held else "-",
            labels(each.labels),
            ago(each.ended_at),
            cli.out.brief(each.reason if each.state == "unreadable" else summary(each).partition(": ")[2]),
        )
        for each in shown
    )
    wide = ("+PROJECT", "+ATTEMPT>", "+ENGINE", "+LABELS", "+ENDED")
    columns = ("TASK", "STATE", "TYPE", "CREATED", *wide, "WHY")
    cli.out.show(shown, lambda: cli.out.table(columns, rows), (each.id for each in shown))
    if matching > len(shown):
        cli.out.note(f"the newest {len(shown)} of {count(matching, 'task')}; --limit 0 shows all")
    elif not shown:
        narrowed = selector or only or project or schedule
        cli.out.note("no task matches" if narrowed else "no tasks; run one with `rcfarm task run -f FILE`")


async def get(cli: Cli, task: TaskId) -> None:
    """Show what an execution was asked to do, as a file for `task run`."""
    view = await tasks_of(cli).get(task)
    if view.spec is None:
        raise view.bad["spec"] if "spec" in view.bad else NotFound(f"task {task} is being removed")
    spec = view.spec
    if cli.out.form == "yaml":
        cli.out.text(as_yaml(spec))
        return
    cli.out.show(spec, lambda: cli.out.text(as_yaml(spec)), [task])


def as_yaml(spec: TaskSpec) -> str:
    """Return the execution as YAML that `apply` and `task run` accept."""
    blank, known = TaskSpec(id=spec.id, type=""), TaskFields.__struct_fields__
    given = {name: getattr(spec, name) for name in known if getattr(spec, name) != getattr(blank, name)}
    given.pop("type", None)
    config = given.pop("config", {})
    own: dict[str, Any] = {spec.type: config} if spec.type in TYPES else {"type": spec.type, "config": config}
    plain = msgspec.to_builtins({"task": spec.id, **own, **given})
    import yaml  # takes 15 ms; commands that show no YAML must not pay

    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=100)


async def status(cli: Cli, task: TaskId) -> None:
    """Show an execution's state and the reasons for it."""
    tasks = tasks_of(cli)
    view, engines = await asyncio.gather(tasks.get(task), tasks.engines())
    info = task_info(view, engines)
    cli.out.show(info, lambda: print_status(cli.out, info), [task])


def print_status(out: Output, info: TaskInfo) -> None:
    """Print an execution's state."""
    where = f"  on {info.where}" if info.where else ""
    out.line(Text.assemble(f"{info.id}  ", state(info.state), where))
    if info.state == "unreadable":
        out.hanging("  ", info.reason)
        return
    out.line(facts(info))
    times = [f"{name} {ago(at)}" for name, at in (("running", info.running_at), ("ended", info.ended_at)) if at]
    if times:
        out.line("; ".join(times))
    if info.abort_requested and info.state == "stopping":
        out.line("  an abort was requested")
    print_reasons(out, info.reasons)
    if info.error is not None:
        out.hanging(Text.assemble("  ", (f"{info.error.code}: ", "red")), info.error.message)
    elif info.reason and not info.reasons:
        out.hanging("  ", info.reason)


def facts(info: TaskInfo) -> str:
    """Return type, engine, attempt and age in one line."""
    owner = info.engine if info.held else f"none (last {info.engine})" if info.engine else "none"
    attempt = f"; attempt {info.attempt}" if info.attempt else ""
    return f"type {info.type}; engine: {owner}{attempt}; created {ago(info.created_at)}"


class QuotaUse(msgspec.Struct, frozen=True, kw_only=True):
    """One quota that an execution needs. `units`: that it asks for; `position`: in the queue, 1 is next; 0: it does not
    wait there. `code`: why, of the closed list of reasons. `holders`: who holds units now, the oldest first."""

    resource: str
    units: int
    limit: int | None = None
    used: int = 0
    held: bool = False
    position: int = 0
    waiting: int = 0
    message: str = ""
    holders: list[Holder] = []
    code: str = ""


class TaskExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """An execution, the quotas that it needs, and the executions that it waits for, with their states.

    `why`: the reasons for its state, also for how it ended. `cycle`: executions that wait for each other in a ring,
    from one to itself again, or empty; none of them begins. `wakes_at`: when its engine looks at it again at the latest
    though nothing happens, or "": by its record alone, so a plugin that polls looks sooner.
    """

    task: TaskInfo
    quotas: list[QuotaUse]
    dependencies: dict[str, str]
    cycle: list[str] = []
    wakes_at: str = ""
    why: list[Reason] = []

    def render(self, out: Output) -> None:
        """Print it for people."""
        print_status(out, self.task)
        self.render_waits(out)

    def render_waits(self, out: Output) -> None:
        """Print what is behind the reasons: quotas, and what it depends on."""
        if left := ahead(self.wakes_at):
            out.line(f"  looked at again {left} at the latest, at {self.wakes_at}")
        for each in self.quotas:
            limit = "no limit is set" if each.limit is None else f"{each.used} of {each.limit} units are held"
            own = "it holds" if each.held else "it asks for"
            out.line()
            out.line(f"quota {each.resource}: {limit}; {own} {each.units}")
            if each.position:
                out.line(f"  position {each.position} of {each.waiting} in the queue: {each.message}")
            rows = [(one.execution, str(one.units), ago(one.since)) for one in each.holders[:SHOWN_HOLDERS]]
            if not each.held:
                out.table(("HELD BY", "UNITS>", "SINCE"), rows, indent=2)
                if len(each.holders) > SHOWN_HOLDERS:
                    out.line(f"  and {len(each.holders) - SHOWN_HOLDERS} more; `rcfarm quota explain {each.resource}`")
        if self.dependencies:
            out.line()
            out.table(("WAITS FOR", "STATE"), [(name, state(word)) for name, word in self.dependencies.items()])
        if self.cycle:
            out.line()
            out.line(f"they wait for each other and never begin: {' -> '.join(self.cycle)}; abort one of them")


async def explain(cli: Cli, task: TaskId) -> None:
    """Explain a state: what is waited for, and who holds it."""
    found = await explanation(cli, task)
    cli.out.show(found, lambda: found.render(cli.out))


async def explanation(cli: Cli, task: str) -> TaskExplanation:
    """Return what explains an execution. Raises `NotFound`."""
    tasks = tasks_of(cli)
    view, engines, quotas = await asyncio.gather(tasks.get(task), tasks.engines(), Quotas(cli.store, cli.keys).list())
    info = task_info(view, engines)
    spec = view.spec
    others = spec.depends_on if spec and info.state not in ENDED else ()
    words = await asyncio.gather(*(_word(cli, other) for other in others))
    uses = [] if view.is_ended else [use for quota in quotas if (use := _use(quota, task))]
    by_resource = {quota.resource: quota for quota in quotas}
    known = {use.resource for use in uses}
    for resource, units in (spec.quotas if spec and not view.is_ended else {}).items():
        if resource not in known:
            use = _use(by_resource[resource], task, units) if resource in by_resource else None
            uses.append(use or QuotaUse(resource=resource, units=units))
    info = msgspec.structs.replace(info, reasons=[_current(reason, uses) for reason in info.reasons])
    ended = [reason for reason in reasons_of_task(view) if view.is_ended or view.word == "unreadable"]
    wake = next_wake(spec, view.state, time.time()) if spec and view.state and view.is_held else None
    return TaskExplanation(
        task=info,
        why=[
            *(Reason(each.code, each.message, since=each.since, until=each.until) for each in info.reasons),
            *ended,
        ],
        quotas=uses,
        dependencies=dict(zip(others, words, strict=True)),
        cycle=await _cycle(cli, task) if others else [],
        wakes_at=timestamp(wake or 0.0),
    )


async def _cycle(cli: Cli, first: str) -> list[str]:
    """Return a cycle of unfinished executions that `first` depends on, if there is one at most `FOLLOWED` deep."""
    ways, seen = [[first]], {first}
    for way in ways:
        if len(seen) > FOLLOWED:
            break
        try:
            view = await tasks_of(cli).get(way[-1])
        except NotFound:
            continue
        if view.spec is None or view.is_ended:
            continue
        for other in view.spec.depends_on:
            if other in way:
                return [*way[way.index(other) :], other]
            if other not in seen:
                seen.add(other)
                ways.append([*way, other])
    return []


async def _word(cli: Cli, task_id: str) -> str:
    try:
        return (await tasks_of(cli).get(task_id)).word
    except NotFound:
        return "missing"


def _use(quota: QuotaView, task_id: str, asked: int | None = None) -> QuotaUse | None:
    """Return how an execution uses a quota: it holds units, waits for some, or is to ask for `asked` units. None if it
    does none of these."""
    grant = next((grant for grant in quota.grants if grant.execution == task_id), None)
    ticket = next((ticket for ticket in quota.tickets if ticket.execution == task_id), None)
    request = grant or ticket
    units = request.units if request else asked
    if units is None:
        return None
    wait = quota.waits.get(ticket.token) if ticket and not grant else None
    return QuotaUse(
        resource=quota.resource,
        units=units,
        limit=quota.limit.units if quota.limit else None,
        used=quota.used,
        held=grant is not None,
        position=wait.position if wait else 0,
        waiting=len(quota.tickets),
        message=f"{wait.code}: {wait.message}" if wait else "",
        holders=holders_of(quota),
        code=wait.code if wait else "",
    )


def _current(reason: WaitInfo, uses: list[QuotaUse]) -> WaitInfo:
    """Return a reason of a quota as it is now, with holders and position: the stored one is written only when its code
    changes."""
    use = next((use for use in uses if use.code == reason.code and use.resource in reason.message), None)
    if use is None:
        return reason
    by = f"; held by {listed(holder.execution for holder in use.holders)}" if use.holders else ""
    text = use.message.removeprefix(f"{use.code}: ")
    return msgspec.structs.replace(reason, message=f"{text}{by}; position {use.position} of {use.waiting}")


class EventInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One event of an execution. `attempt` counts from 1."""

    n: int
    at: str
    attempt: int
    kind: str
    phase: str
    reason: str = ""
    error: TaskError | None = None
    details: dict[str, Any] = {}


async def history(
    cli: Cli,
    task: TaskId,
    last: Annotated[int, typer.Option("--last", metavar="N", min=0, help="Only the last N events; 0: all.")] = 100,
) -> None:
    """Show what happened to an execution."""
    events = await tasks_of(cli).history(task)
    if not events:
        await tasks_of(cli).get(task)
        cli.out.note(f"nothing has happened to task {task} yet")
    shown = [
        EventInfo(
            n=event.n,
            at=timestamp(event.at),
            attempt=event.attempt + 1,
            kind=event.kind,
            phase=event.phase,
            reason=event.reason,
            error=event.error,
            details=event.info or {},
        )
        for event in events[-last:]
    ]
    if len(shown) < len(events):
        cli.out.note(f"the last {last} of {len(events)} events; --last 0 shows all")
    rows = []
    for each in shown:
        phase = each.phase.removeprefix("Phase") if each.kind != "retry" else "retry"
        where = TaskInfo(id="", type="", state="", details=each.details).where
        why = f"{each.error.code}: {each.error.message}" if each.error else each.reason
        details = why or (f"on {where}" if where else "")
        rows.append((each.at[:19].replace("T", " "), str(each.attempt), phase, details))
    cli.out.show(shown, lambda: cli.out.table(("TIME (UTC)", "TRY>", "PHASE", "DETAILS"), rows))


class AttemptLog(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one attempt's output. `output`: its last lines; `links`: where all of it is."""

    attempt: int
    where: str
    output: str
    links: list[str]


async def logs(
    cli: Cli,
    task: TaskId,
    attempt: Annotated[int, typer.Option("--attempt", metavar="N", min=0, help="Only this attempt; 0: all.")] = 0,
    follow_: Follow = False,
    since: LogsSince = "",
    tail: Tail = None,
) -> int | None:
    """Show the last lines of output, and where all of it is. With --follow, --since or --tail, show what the task's
    process writes, from its node's agent, as `rc logs` does."""
    tasks = tasks_of(cli)
    if follow_ or since or tail is not None:
        options = log_options(follow=follow_, previous=False, since=since, tail=tail, launchable="")
        place = await _place_of_process(cli, task, attempt, waits=follow_)
        printer = Printer(cli, [place], labels=False, shows_launchable=False)
        return await (follow if follow_ else show)(cli, [place], options, printer)
    view, events = await asyncio.gather(tasks.get(task), tasks.history(task))
    found = [each for each in _attempts(view, events) if attempt in (0, each.attempt)]

    def render() -> None:
        for each in found:
            if len(found) > 1 or each.where:
                cli.out.note(f"attempt {each.attempt}{' on ' + each.where if each.where else ''}:")
            for line in each.output.splitlines():
                cli.out.line(line)
            for link in each.links:
                cli.out.note(f"all of it: {link}")
            if not each.output and not each.links:
                node, slash, _ = each.where.partition("/")
                is_kept = view.spec is not None and view.spec.type == "process" and slash and not view.is_ended
                later = f"its last lines are shown when it has ended; `rcfarm task logs {task} -f` follows it on {node}"
                cli.out.note(later if is_kept else "it wrote nothing, or its plugin does not report it")

    cli.out.show(found, render)
    if not found:
        cli.out.note(f"task {task} has no output yet; it is {view.word}")
    return None


async def _place_of_process(cli: Cli, task: str, attempt: int, *, waits: bool) -> Place:
    """Return the pod of an attempt, 0: of the last one. `waits`: until there is one. Raises `NotFound`, `BadInput`."""
    tasks, noted = tasks_of(cli), False
    async with watched(cli.store, cli.keys.task(task)) as tree:
        while True:
            tree.event.clear()
            view, events = await asyncio.gather(tasks.get(task), tasks.history(task))
            if view.spec is not None and view.spec.type != "process":
                raise BadInput(
                    f"task {task} is of type {view.spec.type}, so no agent has its output; `task logs {task}`"
                )
            for each in reversed(_attempts(view, events)):
                node, slash, pod = each.where.partition("/")
                if attempt in (0, each.attempt) and slash:
                    return Place(node, pod)
            if not waits or view.is_ended:
                what = f"attempt {attempt} of task {task}" if attempt else f"task {task}"
                raise NotFound(f"{what} has had no process on a node; it is {view.word}")
            if not noted:
                cli.out.note(f"task {task} is {view.word}; waiting for its process")
                noted = True
            await tree.changed(asyncio.get_running_loop().time() + PATIENCE)


def _attempts(view: TaskView, events: Sequence[TaskEvent]) -> list[AttemptLog]:
    """Return what is known of the output of each attempt, in order."""
    infos = {event.attempt + 1: event.info for event in events if event.info}
    if view.state is not None and view.state.info:
        infos[view.state.attempt + 1] = view.state.info
    found = []
    for number, info in sorted(infos.items()):
        shown = TaskInfo(id="", type="", state="", details=info)
        links = [str(log["uri"]) for log in info.get("logs") or () if isinstance(log, dict) and log.get("uri")]
        found.append(AttemptLog(attempt=number, where=shown.where, output=shown.output, links=links))
    return found
