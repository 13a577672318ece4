"""`rcfarm schedule`: when tasks are submitted again and again."""

from __future__ import annotations

import time
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Annotated, Any
from zoneinfo import ZoneInfo

import msgspec
import typer
import yaml

from controllers.tasks.schedule import BadSchedule, upcoming
from rcfarm.cli.kit.command import Cli, command
from rcfarm.cli.kit.completion import complete_schedule
from rcfarm.cli.kit.options import UsageProblem, Yes, confirm
from rcfarm.cli.kit.output import Output, ago, ahead, timestamp
from rcfarm.cli.task.change import loaded
from rcfarm.cli.task.show import as_yaml
from rcfarm.operations.schedules import Schedules, ScheduleView, task_of
from store.schema.schedules import ScheduleSpec

app = typer.Typer(rich_markup_mode=None)

NEXT = 3  # runs that are shown
OPTIONS = (  # in the order in which a document has them
    "time_zone",
    "overlap",
    "missed",
    "max_missed",
    "start_deadline",
    "keep_succeeded",
    "keep_failed",
    "paused",
)

Name = Annotated[str, typer.Argument(metavar="SCHEDULE", help="The schedule's name.", autocompletion=complete_schedule)]


class SkipInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Runs that did not begin, and why; `moment`: of the last of them."""

    code: str
    message: str
    moment: str
    count: int


class ScheduleInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One schedule. `next`: the next runs, in UTC; none while it is paused. `spec` None: it can't be read (`bad`)."""

    name: str
    spec: ScheduleSpec | None
    paused: bool
    next: list[str]
    last: str
    last_moment: str
    waiting: bool
    active: list[str]
    skips: list[SkipInfo]
    bad: list[str]

    def render(self, out: Output) -> None:
        """Print it for people."""
        out.line(f"{self.name}: {self.summary}")
        for problem in self.bad:
            out.hanging("  ", problem)
        if self.spec is None:
            return
        spec = self.spec
        for expression in spec.cron:
            out.line(f"  cron     {expression} ({spec.time_zone})")
        out.line(f"  task     {spec.task.type}")
        out.line(f"  overlap  {spec.overlap}, missed {spec.missed}")
        kept = " and ".join(
            f"{'all' if most is None else most} {which}"
            for which, most in (("succeeded", spec.keep_succeeded), ("failed", spec.keep_failed))
        )
        out.line(f"  keeps    {kept}")
        if self.last:
            out.line(f"  last     {self.last}, {ago(self.last_moment)}")
        if self.waiting:
            out.line("  waiting  a run begins when the execution that it replaces has ended")
        for number, moment in enumerate(self.next):
            at = datetime.fromisoformat(moment)
            there, here = at.astimezone(ZoneInfo(spec.time_zone)), at.astimezone()
            local = "" if there.utcoffset() == here.utcoffset() else f"; here {here:%a %Y-%m-%d %H:%M %Z}"
            out.line(f"  {'' if number else 'next':9}{there:%a %Y-%m-%d %H:%M %Z}{local}")
        for skip in self.skips:
            counted = f"{skip.count} runs up to " if skip.count > 1 else ""
            out.hanging("  skipped  ", f"{counted}{skip.moment}: {skip.code}: {skip.message}")

    @property
    def summary(self) -> str:
        """Return its state in a few words."""
        if self.spec is None or self.bad:
            return "can't be read"
        if self.paused:
            return "paused"
        return f"next run {ahead(self.next[0]) or 'now'}" if self.next else "never runs"


def schedule_info(view: ScheduleView) -> ScheduleInfo:
    """Return a schedule as it is shown."""
    spec, state = view.spec, view.state
    moments: list[float] = []
    bad = [str(error) for error in view.bad]
    if spec is not None and not spec.paused:
        try:
            moments = list(islice(upcoming(spec, max(time.time(), spec.since)), NEXT))
        except BadSchedule as error:
            bad.append(str(error))
    return ScheduleInfo(
        name=view.name,
        spec=spec,
        paused=spec is not None and spec.paused,
        next=[timestamp(moment) for moment in moments],
        last=state.last,
        last_moment=timestamp(state.last_moment),
        waiting=bool(state.pending),
        active=list(state.active),
        skips=[
            SkipInfo(code=skip.code, message=skip.message, moment=timestamp(skip.moment), count=skip.count)
            for skip in state.skips
        ],
        bad=bad,
    )


def as_file(spec: ScheduleSpec) -> str:
    """Return the schedule as a document of a file that `apply` reads."""
    empty = ScheduleSpec(name="", cron=("",), task=spec.task)
    written: dict[str, Any] = {
        "schedule": spec.name,
        "cron": spec.cron[0] if len(spec.cron) == 1 else list(spec.cron),
        **{name: getattr(spec, name) for name in OPTIONS if getattr(spec, name) != getattr(empty, name)},
    }
    written["task"] = yaml.safe_load(as_yaml(task_of(spec)))
    del written["task"]["task"]  # its id
    return yaml.safe_dump(written, sort_keys=False, allow_unicode=True, width=100)


async def apply(
    cli: Cli,
    files: Annotated[
        list[Path],
        typer.Option(
            "--file", "-f", metavar="FILE", help='YAML with schedules; "-" is standard input; may be repeated.'
        ),
    ],
) -> None:
    """Create or change the schedules of files.

    `rcfarm apply` shows the difference first.
    """
    contents = loaded(files)
    if not contents.schedules or contents.rcs or contents.tasks or contents.quotas:
        raise UsageProblem("the files hold other things than schedules; `rcfarm apply -f FILE` applies all of them")
    await cli.prepare()
    schedules = _schedules(cli)
    done = {each.spec.name: await schedules.apply(each.spec, paused=each.paused) for each in contents.schedules}
    shown = [{"schedule": name, "action": action} for name, action in done.items()]
    lines = "\n".join(f"schedule {name} {action}" for name, action in done.items())
    cli.out.show(shown, lambda: cli.out.line(lines))


async def list_(cli: Cli) -> None:
    """List the schedules."""
    found = [schedule_info(view) for view in await _schedules(cli).list()]
    rows = (
        (
            each.name,
            ", ".join(each.spec.cron) if each.spec else "-",
            each.spec.time_zone if each.spec else "-",
            each.summary,
            each.last or "-",
            each.spec.task.type if each.spec else "-",
            each.spec.overlap if each.spec else "-",
            each.next[0] if each.next else "-",
        )
        for each in found
    )
    columns = ("SCHEDULE", "CRON", "ZONE", "STATE", "LAST", "+TYPE", "+OVERLAP", "+NEXT (UTC)")
    cli.out.show(found, lambda: cli.out.table(columns, rows), (each.name for each in found))
    if not found:
        cli.out.note("no schedules; write one as a file and run `rcfarm schedule apply -f FILE`")


async def get(cli: Cli, name: Name) -> None:
    """Show one schedule, its next runs, and those that were skipped.

    Runs are shown in the schedule's and in the local time zone.
    """
    info = schedule_info(await _schedules(cli).get(name))
    cli.out.show(info, lambda: info.render(cli.out), [name])


async def pause(cli: Cli, name: Name) -> None:
    """Begin no more runs. Executions that run go on."""
    changed = await _schedules(cli).pause(name)
    _report(cli, name, "paused" if changed else "unchanged")


async def resume(cli: Cli, name: Name) -> None:
    """Begin runs again, those after now."""
    changed = await _schedules(cli).resume(name)
    _report(cli, name, "resumed" if changed else "unchanged")


async def trigger(
    cli: Cli,
    name: Name,
    force: Annotated[
        bool, typer.Option("--force", help="Submit it whatever the overlap rule says, beside executions that run.")
    ] = False,
) -> None:
    """Submit the task now, under the schedule's overlap rule.

    While an execution of the schedule has not ended, `forbid` refuses; `replace` aborts it, and the task is submitted
    when it has ended.
    """
    task, aborted = await _schedules(cli).trigger(name, force=force)
    sentence = f"task {task} submitted; `rcfarm task status {task}` shows it"
    if aborted:
        sentence = f"task {task} begins when {', '.join(aborted)}, which it replaces, has ended"
    shown = {"schedule": name, "action": "triggered", "task": task, "aborted": list(aborted)}
    cli.out.show(shown, lambda: cli.out.line(sentence))


async def delete(cli: Cli, name: Name, yes: Yes = False) -> None:
    """Remove a schedule. Its executions stay."""
    confirm(f"Delete schedule {name}?", yes=yes)
    await _schedules(cli).delete(name)
    _report(cli, name, "deleted")


def _schedules(cli: Cli) -> Schedules:
    return Schedules(cli.store, cli.keys, actor=cli.actor)


def _report(cli: Cli, name: str, action: str) -> None:
    cli.out.show({"schedule": name, "action": action}, lambda: cli.out.line(f"schedule {name} {action}"))


command(app, "apply", creates_store=True)(apply)
command(app, "list", lists=True)(list_)
command(app, "get", lists=True)(get)
command(app, "pause")(pause)
command(app, "resume")(resume)
command(app, "trigger")(trigger)
command(app, "delete")(delete)
