"""Change executions: `rcfarm task run | submit | abort | retry | delete`.

An execution is followed to its end by watching its records. That is read-only: interrupting it leaves the execution as
it is.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Callable, Iterable
from datetime import datetime
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from rcfarm.cli import ERROR, NOT_FINISHED
from rcfarm.cli.kit.command import Cli
from rcfarm.cli.kit.options import TaskId, UsageProblem, Yes, confirm, read_files
from rcfarm.cli.kit.output import Output, seconds
from rcfarm.cli.kit.tasks import TaskInfo, print_reasons, summary, task_info, tasks_of
from rcfarm.cli.rc.follow import watched
from rcfarm.operations import task_file
from rcfarm.operations.errors import NotFound
from rcfarm.operations.tasks import ENDED, fresh_id, reasons, views_of
from store.schema.tasks import TaskSpec

NOTE_AFTER = 2.0  # seconds without an owner before a note says so
FOREVER = 1e8  # seconds

Files = Annotated[
    list[Path] | None,
    typer.Option("--file", "-f", metavar="FILE", help='YAML with tasks; "-" is standard input; may be repeated.'),
]
Command = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[FILE | -- COMMAND…]",
        help="A file, as with -f; or a program to run on a node, and its arguments.",
        show_default=False,
    ),
]
Id = Annotated[str, typer.Option("--id", metavar="ID", help="The execution's id, in place of the file's.")]
New = Annotated[
    bool, typer.Option("--new", "-n", help="Under a new id each time: the file's, and five random characters.")
]
TaskTimeout = Annotated[
    float, typer.Option("--timeout", metavar="SECONDS", min=0, help="How long to wait for the end; 0: until it comes.")
]


class TaskOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a command did to an execution. `finished`: None if it was not followed."""

    id: str
    action: str
    task: TaskInfo | None = None
    finished: bool | None = None


async def submit(cli: Cli, command: Command = None, files: Files = None, task_id: Id = "", new: New = False) -> None:
    """Submit tasks, and do not wait for them."""
    outcomes = [
        TaskOutcome(id=spec.id, action="submitted", task=await _info(cli, spec.id))
        for spec in await _submitted(cli, command, files, task_id, new)
    ]
    _show(cli.out, outcomes)


async def run(
    cli: Cli,
    command: Command = None,
    files: Files = None,
    task_id: Id = "",
    new: New = False,
    timeout: TaskTimeout = 0.0,
) -> int:
    """Submit tasks and follow them to the end.

    Exits with 0 when all have succeeded, 1 when one has not, 2 when --timeout ends before they do. Ctrl-C ends
    the command, not the tasks.
    """
    specs = await _submitted(cli, command, files, task_id, new)
    began = asyncio.get_running_loop().time()
    outcomes = []
    for spec in specs:
        left = max(0.001, began + timeout - asyncio.get_running_loop().time()) if timeout else 0.0
        outcomes.append(await _followed(cli, spec.id, "submitted", left))
    return _ended(cli, outcomes)


async def abort(
    cli: Cli,
    task: TaskId,
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why; shown in its history.")] = "",
    force: Annotated[
        bool,
        typer.Option("--force", help="End it also if its plugin can't stop the work, which may then go on."),
    ] = False,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Do not wait for its end.")] = False,
    timeout: TaskTimeout = 60.0,
) -> int:
    """Stop an execution: it ends as aborted."""
    await tasks_of(cli).abort(task, reason=reason, force=force)
    if detach:
        return _ended(cli, [TaskOutcome(id=task, action="asked to stop", task=await _info(cli, task))])
    outcome = await _followed(cli, task, "asked to stop", timeout)
    _show(cli.out, [outcome])
    return 0 if outcome.finished else NOT_FINISHED


async def retry(
    cli: Cli,
    task: TaskId,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Do not wait for its end.")] = False,
    timeout: TaskTimeout = 0.0,
) -> int:
    """Run an ended execution again, under the same id."""
    await tasks_of(cli).retry(task)
    if detach:
        return _ended(cli, [TaskOutcome(id=task, action="started again", task=await _info(cli, task))])
    return _ended(cli, [await _followed(cli, task, "started again", timeout)])


async def delete(
    cli: Cli,
    task: TaskId,
    force: Annotated[
        bool,
        typer.Option("--force", help="Also one that has not ended, without stopping its work, which may then go on."),
    ] = False,
    yes: Yes = False,
) -> None:
    """Remove an ended execution and its history."""
    doubt = " What it began is not stopped." if force else ""
    confirm(f"Delete task {task} and its history?{doubt}", yes=yes)
    await tasks_of(cli).delete(task, force=force)
    cli.out.show(TaskOutcome(id=task, action="deleted"), lambda: cli.out.line(f"task {task} deleted"))


async def _submitted(
    cli: Cli, command: list[str] | None, files: list[Path] | None, task_id: str, new: bool
) -> list[TaskSpec]:
    """Submit what the command line asks for. Raises `UsageProblem`, and the errors of `task_file` and `submit`."""
    rng = random.SystemRandom()
    if not files and command is not None and len(command) == 1 and command[0].endswith((".yaml", ".yml")):
        files, command = [Path(command[0])], None
    if bool(command) == bool(files):
        raise UsageProblem("give either a file of tasks, or a program: `rcfarm task run -- echo hello`")
    if command:
        name = re.sub(r"[^a-z0-9-]", "-", Path(command[0]).name.lower()).strip("-")[:50] or "task"
        chosen = task_id or fresh_id(name, rng)
        specs = [TaskSpec(id=chosen, type="process", name=name, config={"command": command})]
    else:
        found = loaded(files or ())
        if found.rcs or found.quotas or found.schedules:
            raise UsageProblem("the files hold other things than tasks; `rcfarm apply -f FILE` applies all of them")
        specs = [document.spec for document in found.tasks]
        if task_id and len(specs) != 1:
            raise UsageProblem(f"--id {task_id}: the files hold {len(specs)} tasks; give one")
        specs = [msgspec.structs.replace(spec, id=task_id or spec.id) for spec in specs]
    if new:
        specs = [msgspec.structs.replace(spec, id=fresh_id(spec.id, rng), name=spec.name or spec.id) for spec in specs]
    await cli.prepare()
    return [await tasks_of(cli).submit(spec) for spec in specs]


def loaded(files: Iterable[Path]) -> task_file.Contents:
    """Return the documents of the files of a command line. Raises `BadFile`, `UsageProblem`."""
    return task_file.joined([task_file.load(name, raw) for name, raw in read_files(files)])


async def _followed(cli: Cli, task_id: str, action: str, timeout: float) -> TaskOutcome:
    with cli.out.progress(f"task {task_id}: ") as say:
        try:
            info = await until_ended(cli, task_id, timeout=timeout, say=say)
        except asyncio.CancelledError:
            cli.out.note(f"no longer waiting; task {task_id} goes on, and `rcfarm task abort {task_id}` stops it")
            raise
    return TaskOutcome(id=task_id, action=action, task=info, finished=info.state in ENDED)


async def until_ended(cli: Cli, task_id: str, *, timeout: float, say: Callable[[str], None]) -> TaskInfo:
    """Return the execution when it has ended, or after `timeout` seconds (0: no limit). `say` is called with each line
    of progress. Raises `NotFound` if it is deleted."""
    clock = asyncio.get_running_loop().time
    began = clock()
    end, noted = began + (timeout or FOREVER), False
    async with watched(cli.store, cli.keys.task(task_id)) as tree:
        while True:
            tree.event.clear()
            views = views_of(cli.keys, await tree.entries(end))
            if not views:
                raise NotFound(f"task {task_id} was deleted")
            view, info = views[0], task_info(views[0])
            if view.is_held or view.is_ended:
                say(summary(info))
            if view.is_ended or info.state == "unreadable" or clock() >= end:
                return info
            lonely = not view.is_held and not noted
            if lonely and clock() >= began + NOTE_AFTER:
                noted = True
                waits = reasons(view, await tasks_of(cli).engines())
                cli.out.note(f"task {view.id} waits: {waits[0].message if waits else 'no engine owns it'}")
            await tree.changed(min(end, began + NOTE_AFTER) if lonely and not noted else end)


async def _info(cli: Cli, task_id: str) -> TaskInfo:
    return task_info(await tasks_of(cli).get(task_id))


def _ended(cli: Cli, outcomes: list[TaskOutcome]) -> int:
    """Show the outcomes. Return the exit code."""
    _show(cli.out, outcomes)
    followed = [each for each in outcomes if each.finished is not None]
    if any(each.finished and each.task and each.task.state != "succeeded" for each in followed):
        return ERROR
    return NOT_FINISHED if any(not each.finished for each in followed) else 0


def _show(out: Output, outcomes: list[TaskOutcome]) -> None:
    def render() -> None:
        for outcome in outcomes:
            info = outcome.task
            if outcome.finished is None or info is None:
                out.line(f"task {outcome.id} {outcome.action}")
                continue
            if not outcome.finished:
                out.line(f"task {outcome.id} has not ended: it is {info.state}")
                print_reasons(out, info.reasons)
                continue
            took = ""
            if info.queued_at and info.ended_at:
                duration = datetime.fromisoformat(info.ended_at) - datetime.fromisoformat(info.queued_at)
                took = f" after {seconds(duration.total_seconds())}"
            out.line(f"task {outcome.id} {info.state}{took}")
            if info.error is not None:
                out.hanging("  ", f"{info.error.code}: {info.error.message}")
            elif info.reason:
                out.hanging("  ", info.reason)
            for line in info.output.splitlines():
                out.hanging("  | ", line)

    out.show(outcomes[0] if len(outcomes) == 1 else outcomes, render)
