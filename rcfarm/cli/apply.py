"""`rcfarm apply`: files of RCs, tasks, quotas and schedules.

Everything is read and checked before the first write. Quotas come first, then RCs, tasks and schedules.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated, NamedTuple

import msgspec
import typer
import yaml

from rcfarm.cli.kit.command import Cli, command
from rcfarm.cli.kit.json_views import Outcome
from rcfarm.cli.kit.options import (
    DEFAULT_TIMEOUT,
    DEFAULT_WAIT_HEALTHY,
    Detach,
    Files,
    Timeout,
    WaitHealthy,
    Yes,
    confirm,
)
from rcfarm.cli.kit.output import count
from rcfarm.cli.kit.tasks import tasks_of
from rcfarm.cli.rc import change as rc_change
from rcfarm.cli.rc.several import exit_code
from rcfarm.cli.schedule import as_file
from rcfarm.cli.task.change import loaded
from rcfarm.cli.task.show import as_yaml
from rcfarm.operations import rc_apply
from rcfarm.operations.documents import changed_lines
from rcfarm.operations.errors import NotFound, TaskRefused
from rcfarm.operations.quotas import Quotas
from rcfarm.operations.schedules import Schedules, same_schedule, with_pause
from rcfarm.operations.task_file import Contents
from rcfarm.operations.tasks import same_request

app = typer.Typer(rich_markup_mode=None)


class Applied(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one object that is no RC. `kind`: task, quota or schedule."""

    kind: str
    id: str
    action: str


class Everything(msgspec.Struct, frozen=True, kw_only=True):
    """What became of each document."""

    rcs: list[Outcome]
    others: list[Applied]


class _Other(NamedTuple):
    """A document that is no RC, its action, and the difference as lines."""

    kind: str
    name: str
    action: str
    before: str
    after: str


async def apply(
    cli: Cli,
    files: Files,
    yes: Yes = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the difference and stop.")] = False,
    detach: Detach = False,
    timeout: Timeout = DEFAULT_TIMEOUT,
    wait_healthy: WaitHealthy = DEFAULT_WAIT_HEALTHY,
) -> int:
    """Create or change RCs, quotas and schedules, and submit tasks. Shows the difference first.

    RCs are followed until they are placed and healthy; tasks are not (`rcfarm task run` follows them).
    """
    contents = loaded(files)
    plans = [await rc_apply.plan(cli.rcs, document) for document in contents.rcs]
    others = await _planned(cli, contents)
    rc_change.show_differences(cli.out, plans)
    for other in others:
        if other.action == "unchanged":
            cli.out.note(f"{other.kind} {other.name}: nothing to change")
            continue
        cli.out.note(f"{other.kind} {other.name} will be {other.action}:")
        rc_change.show_lines(cli.out, changed_lines(other.before, other.after))
    if dry_run:
        return 0
    changes = sum(plan.action != "none" for plan in plans) + sum(other.action != "unchanged" for other in others)
    if changes:
        confirm(f"Apply {count(changes, 'change')}?", yes=yes)
        await cli.prepare()
    done = {(other.kind, other.name) for other in others if other.action != "unchanged"}
    for quota in contents.quotas:
        await Quotas(cli.store, cli.keys, actor=cli.actor).set(quota.resource, quota.limit)
    outcomes = await rc_change.carried_out(cli, plans, detach=detach, timeout=timeout, wait_healthy=wait_healthy)
    for task in contents.tasks:
        if ("task", task.spec.id) in done:
            await tasks_of(cli).submit(task.spec)
    for schedule in contents.schedules:
        await Schedules(cli.store, cli.keys, actor=cli.actor).apply(schedule.spec, paused=schedule.paused)
    applied = [Applied(kind=other.kind, id=other.name, action=other.action) for other in others]

    def render() -> None:
        rc_change.report(cli.out, outcomes)
        for each in applied:
            cli.out.line(f"{each.kind} {each.id} {each.action}")

    cli.out.show(Everything(rcs=outcomes, others=applied), render)
    return exit_code(outcomes)


async def _planned(cli: Cli, contents: Contents) -> list[_Other]:
    """Return what is to be done with each quota, task and schedule. Raises `TaskRefused`."""
    quotas = Quotas(cli.store, cli.keys)
    found = []
    for quota in contents.quotas:
        limit = await quotas.limit(quota.resource)
        action = "created" if limit is None else "unchanged" if limit == quota.limit else "changed"
        found.append(_Other("quota", quota.resource, action, _text(limit), _text(quota.limit)))
    for task in contents.tasks:
        spec, action = task.spec, "submitted"
        with suppress(NotFound):
            view = await tasks_of(cli).get(spec.id)
            if view.spec is None or not same_request(view.spec, spec):
                raise TaskRefused(
                    f"task {spec.id} exists ({view.word}) and differs from the file: a task never changes; give the "
                    f"new one another id, or delete the old one (`rcfarm task delete {spec.id}`)"
                )
            action = "unchanged"
        found.append(_Other("task", spec.id, action, "", as_yaml(spec)))
    schedules = {each.name: each for each in await Schedules(cli.store, cli.keys).list()} if contents.schedules else {}
    for document in contents.schedules:
        existing = schedules.get(document.spec.name)
        before = existing.spec if existing else None
        wanted = with_pause(document.spec, before, document.paused)
        same = before is not None and same_schedule(before, wanted)
        action = "unchanged" if same else "changed" if existing else "created"
        found.append(_Other("schedule", wanted.name, action, as_file(before) if before else "", as_file(wanted)))
    return found


def _text(record: msgspec.Struct | None) -> str:
    if record is None:
        return ""
    fields = msgspec.to_builtins(record)
    shown = {name: value for name, value in fields.items() if value not in (None, "", {}, [], 0, False)}
    return yaml.safe_dump(shown, sort_keys=False, allow_unicode=True, width=100)


command(app, "apply", creates_store=True)(apply)
