"""`rcfarm quota`: limits of what tasks may use at the same time, who holds it, and who waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, TypeVar

import msgspec
import typer

from rcfarm.cli.kit.command import Cli, command
from rcfarm.cli.kit.completion import complete_quota
from rcfarm.cli.kit.options import UsageProblem, Yes, confirm, parse_pairs, whole_number
from rcfarm.cli.kit.output import Output, ago, ahead, count, timestamp
from rcfarm.operations.errors import NotFound
from rcfarm.operations.quotas import Quotas, QuotaView
from rcfarm.operations.tasks import Tasks
from store.schema.quota import QuotaLimit, Rate

T = TypeVar("T")

CHECKED_HOLDERS = 100  # whose records `explain` reads

app = typer.Typer(rich_markup_mode=None)

Resource = Annotated[
    str, typer.Argument(metavar="RESOURCE", help="The resource's name, such as gpu.", autocompletion=complete_quota)
]


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """An execution that holds units, and since when. `defect`: why no engine can work on it, so that no engine releases
    them; "" for most."""

    execution: str
    token: str
    units: int
    project: str
    key: str
    since: str
    defect: str = ""


class Waiter(msgspec.Struct, frozen=True, kw_only=True):
    """An execution that waits for units. `position`: 1 is next, if nothing else changes. `until`: when a rate limit
    permits it, or ""."""

    execution: str
    token: str
    units: int
    project: str
    key: str
    priority: int
    position: int
    code: str
    message: str
    since: str
    until: str


class QuotaInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One quota. `limit` None: none is set, so nothing is granted. `bad`: records that can't be read."""

    resource: str
    limit: QuotaLimit | None
    used: int
    holders: list[Holder]
    waiters: list[Waiter]
    bad: list[str] = []

    def render(self, out: Output) -> None:
        """Print it for people."""
        units = "no limit is set" if self.limit is None else f"{self.used} of {count(self.limit.units, 'unit')} held"
        out.line(f"{self.resource}: {units}, {len(self.waiters)} waiting")
        for line in _caps(self.limit) if self.limit else ():
            out.line(f"  {line}")
        for problem in self.bad:
            out.hanging("  ", problem)
        if self.holders:
            out.line()
            rows = [(one.execution, str(one.units), one.key, ago(one.since)) for one in self.holders]
            out.table(("HELD BY", "UNITS>", "KEY", "SINCE"), rows)
        for holder in self.holders:
            if holder.defect:
                why = f"{holder.defect}; see `rcfarm task explain {holder.execution}`"
                out.hanging("  ", f"{holder.execution} holds units that no engine releases: {why}")
        if self.waiters:
            out.line()
            waiting = []
            for one in self.waiters:
                left = ahead(one.until)
                why = f"{one.code}: {one.message}{f' ({left})' if left else ''}"
                waiting.append((str(one.position), one.execution, str(one.units), one.key, ago(one.since), why))
            out.table(("NEXT>", "WAITING", "UNITS>", "KEY", "SINCE", "WHY"), waiting)


def _caps(limit: QuotaLimit) -> list[str]:
    found = [limit.description] if limit.description else []
    if limit.project_units is not None:
        found.append(f"at most {limit.project_units} per project")
    if limit.namespace_units is not None:
        found.append(f"at most {limit.namespace_units} per project and domain")
    found += [f"at most {units} for key {key}" for key, units in sorted(limit.keys.items())]
    found += [f"weight {weight:g} for key {key}" for key, weight in sorted(limit.weights.items())]
    found += [f"at most {_rate(limit.rate)}"] if limit.rate else []
    found += [f"at most {_rate(rate)} for key {key}" for key, rate in sorted(limit.key_rates.items())]
    return found


def _rate(rate: Rate) -> str:
    burst = f", {rate.burst} at once" if rate.burst is not None else ""
    return f"{count(rate.count, 'grant')} in {rate.per:g} s{burst}"


def holders_of(view: QuotaView) -> list[Holder]:
    """Return who holds units, the oldest first."""
    return [
        Holder(
            execution=grant.execution,
            token=grant.token,
            units=grant.units,
            project=grant.project,
            key=grant.key,
            since=timestamp(grant.since),
        )
        for grant in view.grants
    ]


def quota_info(view: QuotaView) -> QuotaInfo:
    """Return a quota as it is shown."""
    waiters = [
        Waiter(
            execution=ticket.execution,
            token=ticket.token,
            units=ticket.units,
            project=ticket.project,
            key=ticket.key,
            priority=ticket.priority,
            position=wait.position,
            code=wait.code,
            message=wait.message,
            since=timestamp(ticket.since),
            until=timestamp(wait.until or 0.0),
        )
        for ticket in view.tickets
        if (wait := view.waits.get(ticket.token))
    ]
    return QuotaInfo(
        resource=view.resource,
        limit=view.limit,
        used=view.used,
        holders=holders_of(view),
        waiters=sorted(waiters, key=lambda waiter: waiter.position),
        bad=[str(error) for error in view.bad],
    )


async def set_(
    cli: Cli,
    resource: Resource,
    units: Annotated[
        int, typer.Argument(metavar="UNITS", parser=whole_number, help="How many units may be held at once.")
    ],
    project_units: Annotated[
        int | None, typer.Option("--project-units", metavar="N", min=0, help="At most this many per project.")
    ] = None,
    namespace_units: Annotated[
        int | None,
        typer.Option("--namespace-units", metavar="N", min=0, help="At most this many per project and domain."),
    ] = None,
    keys: Annotated[
        list[str] | None, typer.Option("--key", metavar="KEY=N", help="At most this many for a key; may be repeated.")
    ] = None,
    weights: Annotated[
        list[str] | None,
        typer.Option("--weight", metavar="KEY=WEIGHT", help="A key's part in the fair share; may be repeated."),
    ] = None,
    rate: Annotated[
        str | None, typer.Option("--rate", metavar="N/SECONDS", help="At most N grants in that time; 0: no bound.")
    ] = None,
    description: Annotated[str | None, typer.Option("--description", metavar="TEXT", help="For people.")] = None,
) -> None:
    """Set a quota: what tasks may use of a resource at once. What is not given stays as it is."""
    if units < 0:
        raise UsageProblem(f"{units} units: the number is negative; 0 grants nothing")
    quotas = Quotas(cli.store, cli.keys, actor=cli.actor)
    old = await quotas.limit(resource) or QuotaLimit(units=units)
    of_keys, of_weights = _numbers("--key", keys or [], int), _numbers("--weight", weights or [], float)
    bound = old.rate if rate is None else None
    if rate is not None and rate != "0":
        number, _, per = rate.partition("/")
        try:
            bound = msgspec.convert({"count": int(number), "per": float(per or 1)}, Rate)
        except (ValueError, msgspec.ValidationError) as error:
            raise UsageProblem(f"--rate {rate!r}: write grants per seconds, such as 10/60") from error
    new = msgspec.structs.replace(
        old,
        units=units,
        project_units=old.project_units if project_units is None else project_units,
        namespace_units=old.namespace_units if namespace_units is None else namespace_units,
        keys={**old.keys, **of_keys},
        weights={**old.weights, **of_weights},
        rate=bound,
        description=old.description if description is None else description,
    )
    await cli.prepare()
    before = await quotas.set(resource, new)
    was = "it had none" if before is None else f"it had {before.units}"
    unchanged = before == new
    cli.out.show(
        quota_info(await quotas.get(resource)),
        lambda: cli.out.line(f"quota {resource}: {count(units, 'unit')} ({'unchanged' if unchanged else was})"),
    )


def _numbers(option: str, items: list[str], kind: Callable[[str], T]) -> dict[str, T]:
    found = {}
    for key, value in parse_pairs(option, items, "KEY=NUMBER").items():
        try:
            found[key] = kind(value)
        except ValueError as error:
            raise UsageProblem(f"{option} {key}={value}: {value!r} is not a number") from error
    return found


async def list_(cli: Cli) -> None:
    """List the quotas."""
    found = [quota_info(view) for view in await Quotas(cli.store, cli.keys).list()]
    rows = (
        (
            each.resource,
            str(each.used),
            str(each.limit.units) if each.limit else "none",
            str(len(each.holders)),
            str(len(each.waiters)),
            "; ".join([*each.bad, *(_caps(each.limit) if each.limit else ())]) or "-",
        )
        for each in found
    )
    columns = ("RESOURCE", "HELD>", "LIMIT>", "HOLDERS>", "WAITING>", "RULES")
    cli.out.show(found, lambda: cli.out.table(columns, rows), (each.resource for each in found))
    if not found:
        cli.out.note("no quotas; set one with `rcfarm quota set RESOURCE UNITS`")


async def explain(cli: Cli, resource: Resource) -> None:
    """Show who holds units, who waits, and why."""
    info = quota_info(await Quotas(cli.store, cli.keys).get(resource))
    tasks = Tasks(cli.store, cli.keys)
    defects = await asyncio.gather(*(_defect(tasks, one.execution) for one in info.holders[:CHECKED_HOLDERS]))
    for at, defect in enumerate(defects):
        info.holders[at] = msgspec.structs.replace(info.holders[at], defect=defect)
    cli.out.show(info, lambda: info.render(cli.out))


async def _defect(tasks: Tasks, execution: str) -> str:
    try:
        return (await tasks.get(execution)).defect
    except NotFound:
        return "it does not exist"


async def delete(cli: Cli, resource: Resource, yes: Yes = False) -> None:
    """Remove a quota that is not in use."""
    confirm(f"Delete quota {resource}?", yes=yes)
    await Quotas(cli.store, cli.keys, actor=cli.actor).delete(resource)
    cli.out.show({"resource": resource, "action": "deleted"}, lambda: cli.out.line(f"quota {resource} deleted"))


command(app, "set", creates_store=True, context_settings={"ignore_unknown_options": True})(set_)
command(app, "list", lists=True)(list_)
command(app, "explain")(explain)
command(app, "delete")(delete)
