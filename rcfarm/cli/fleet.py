"""The fleet as a whole: `rcfarm status | doctor`, `rcfarm brake status | engage | release`, `rcfarm farm forget`,
`rcfarm audit export`."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Annotated

import msgspec
import typer
from rich.text import Text

from rcfarm.cli import ERROR
from rcfarm.cli.kit.command import Cli, command
from rcfarm.cli.kit.completion import complete_farm, complete_rc
from rcfarm.cli.kit.json_views import (
    BrakeInfo,
    EngineInfo,
    FarmInfo,
    FleetInfo,
    ForgottenFarm,
    NodeTrouble,
    ReleaseInfo,
    TasksInfo,
    farm_info,
    rc_info,
    tasks_info,
)
from rcfarm.cli.kit.options import Since, Until, Yes, confirm, parse_time
from rcfarm.cli.kit.output import Output, ago, count, state, times, timestamp
from rcfarm.cli.kit.reasons import in_brief
from rcfarm.cli.kit.tasks import tasks_of
from rcfarm.operations.fleet import (
    PodsWithoutRC,
    engage_brake,
    forget_farm,
    ids_with_spec,
    pods_without_rc,
    read_brake,
    read_farms,
    release_brake,
)
from rcfarm.operations.rc_snapshot import TROUBLE
from rcfarm.operations.reasons import full_disks, reasons_of_node
from rcfarm.operations.schedules import Schedules
from store.kv.protocol import BadRecord
from store.schema import audit
from store.schema.records import Brake, Reality, decode

app = typer.Typer(rich_markup_mode=None)
brake_app = typer.Typer(rich_markup_mode=None)
farm_app = typer.Typer(rich_markup_mode=None)
audit_app = typer.Typer(rich_markup_mode=None)

_SIGNS = {"ok": ("✓", "green"), "warning": ("!", "yellow"), "error": ("✗", "red")}
_WELL = ("converged", "completed", "progressing", "disabled", "deleting")
_TROUBLE = TROUBLE | {"rollout_stuck"}
SHOWN = 10


async def status(cli: Cli) -> None:
    """Show the fleet at a glance: farms, nodes, RCs, tasks and problems."""
    (snaps, farms, nodes, (brake, bad_brake)), engines, schedules = await asyncio.gather(
        asyncio.gather(cli.rcs.snapshots(), read_farms(cli.store, cli.keys), cli.nodes.list(), _brake(cli)),
        tasks_of(cli).engines(),
        Schedules(cli.store, cli.keys).list(),
    )
    lost = await pods_without_rc(cli.store, cli.keys, ids_with_spec(snaps))
    rcs = [rc_info(snap, farms.farms) for snap in snaps]
    full = full_disks(snaps, await _task_pods(cli))
    owned = Counter(rc.owner.farm for rc in rcs if rc.owner and rc.owner.held)
    bad = [*bad_brake, *farms.bad, *nodes.bad, *(error for snap in snaps for error in snap.bad.values())]
    bad += [error for view in schedules for error in view.bad]
    info = FleetInfo(
        rcs=len(rcs),
        rcs_by_state=dict(sorted(Counter(rc.state for rc in rcs).items())),
        pods_desired=sum(rc.replicas_desired for rc in rcs),
        pods_placed=sum(rc.placed for rc in rcs),
        pods_healthy=sum(rc.healthy for rc in rcs),
        farms=[farm_info(farm, owned[farm.member.farm]) for farm in farms.farms],
        nodes=len(nodes.nodes),
        nodes_live=sum(node.alive is not None for node in nodes.nodes.values()),
        nodes_cordoned=sum(not node.spec.schedulable for node in nodes.nodes.values()),
        troubled=[rc for rc in rcs if rc.state not in _WELL or any(why.code in _TROUBLE for why in rc.reasons)],
        troubled_nodes=[
            NodeTrouble(name=name, reasons=reasons_of_node(node, full.get(name)))
            for name, node in nodes.nodes.items()
            if node.alive is None or name in full
        ],
        unreadable=[str(error) for error in bad],
        pods_without_rc=lost.rcs,
        brake=brake,
        tasks=tasks_info(engines, schedules),
    )

    def render() -> None:
        out = cli.out
        if info.brake:
            out.line(Text.assemble(("BRAKE ON", "yellow"), f" since {ago(info.brake.since)}: {info.brake.words}"))
            out.line("  nothing is removed; see `rcfarm brake status`")
        if info.pods_without_rc:
            out.line(Text.assemble(("LOST     ", "red"), str(PodsWithoutRC(info.pods_without_rc))))
        live = [farm for farm in info.farms if farm.live]
        cordoned = f", {info.nodes_cordoned} cordoned" if info.nodes_cordoned else ""
        out.line(f"farms  {len(live)} live{_dead(len(info.farms) - len(live))}")
        out.line(f"nodes  {info.nodes_live} live{_dead(info.nodes - info.nodes_live)}{cordoned}")
        out.line(f"pods   {info.pods_desired} desired, {info.pods_placed} placed, {info.pods_healthy} healthy")
        states = [Text.assemble(f"{number} ", state(name)) for name, number in info.rcs_by_state.items()]
        out.line(Text.assemble("rcs    ", Text(", ").join(states) if states else "none"))
        if info.tasks:
            out.hanging("tasks  ", _in_hand(info.tasks))
        if info.farms:
            out.line()
            _show_members(out, "FARM", info.farms)
        if info.tasks and info.tasks.engines:
            out.line()
            _show_members(out, "ENGINE", info.tasks.engines)
            for engine in info.tasks.engines:
                for text in engine.paused:
                    out.hanging(Text.assemble(("paused ", "red")), f"on engine {engine.name}, {text}")
        if info.troubled:
            out.line()
            troubled = info.troubled[:SHOWN]
            rows = [
                (
                    rc.id,
                    state(rc.state),
                    f"{rc.placed}/{rc.replicas_desired}" if rc.state != "unreadable" else "-",
                    str(rc.healthy),
                    "; ".join(f"{reason.code}: {reason.message}{times(reason)}" for reason in rc.reasons),
                )
                for rc in troubled
            ]
            out.table(("RC", "STATE", "PLACED>", "HEALTHY>", "WHY"), rows)
            if len(info.troubled) > SHOWN:
                out.line(f"and {count(len(info.troubled) - SHOWN, 'other')}; see `rcfarm rc list`")
        if info.troubled_nodes:
            out.line()
            out.table(("NODE", "WHY"), [(node.name, in_brief(node.reasons)) for node in info.troubled_nodes[:SHOWN]])
            if len(info.troubled_nodes) > SHOWN:
                out.line(f"and {count(len(info.troubled_nodes) - SHOWN, 'other')}; see `rcfarm node list`")
        failures = info.tasks.failures if info.tasks else []
        if failures:
            out.line()
            ended = [(each.id, ago(timestamp(each.at)), f"{each.code}: {each.message}") for each in failures[:SHOWN]]
            out.table(("TASK", "ENDED", "WHY"), ended)
        for text in info.unreadable:
            out.line(Text.assemble(("unreadable: ", "red"), text))

    cli.out.show(info, render)


async def _task_pods(cli: Cli) -> list[tuple[str, Reality]]:
    """Return the agents' reports on the pods of tasks, each with its node. RCs' pods report a full disk by health."""
    found = []
    for entry in (await cli.store.list(cli.keys.task_pods)).entries:
        with contextlib.suppress(BadRecord):  # `rcfarm doctor` names it
            found.append((cli.keys.parse_pod(entry.key).node, decode(Reality, entry.key, entry.value)))
    return found


def _show_members(out: Output, title: str, members: Sequence[FarmInfo | EngineInfo]) -> None:
    rows = [
        (each.name, state("live" if each.live else "dead"), str(each.owned), each.selector or "-", ago(each.since))
        for each in members
    ]
    out.table((title, "STATE", "OWNS>", "SELECTOR", "SINCE"), rows)


def _in_hand(tasks: TasksInfo) -> Text:
    """Return what the engines have in hand, and how many schedules there are, in a line."""
    live = sum(each.live for each in tasks.engines)
    found = [Text(f"{count(live, 'engine')} live{_dead(len(tasks.engines) - live)}", "" if live else "red")]
    if live:
        states = [Text.assemble(f"{number} ", state(word)) for word, number in tasks.by_state.items()]
        found.append(Text(", ").join(states) if states else Text("nothing in hand"))
        found += [Text(f"{number} wait: {code}") for code, number in tasks.waits.items()]
        if undelivered := sum(each.undelivered for each in tasks.engines):
            found.append(Text(f"{undelivered} with events that a sink has not taken"))
    else:
        found.append(Text("start one with `rcfarm tasks`"))
    if tasks.schedules:
        paused = f", {tasks.schedules_paused} paused" if tasks.schedules_paused else ""
        found.append(Text(f"{count(tasks.schedules, 'schedule')}{paused}"))
    return Text("; ").join(found)


async def _brake(cli: Cli) -> tuple[Brake | None, list[BadRecord]]:
    """Return the brake, and the error if its record can't be read: farms then treat the brake as on."""
    try:
        return await read_brake(cli.store, cli.keys), []
    except BadRecord as error:
        return None, [error]


def _dead(number: int) -> str:
    return f", {number} dead" if number else ""


async def doctor(cli: Cli) -> int:
    """Check the store and the fleet. Each problem comes with advice; exits with 1 if there is an error."""
    from rcfarm.doctor.checks import examine  # brings every backend along

    findings = []
    async for finding in examine(cli.store, cli.keys.root):
        findings.append(finding)
        if not cli.out.as_json:
            codes = f" ({', '.join(finding.codes)})" if finding.codes else ""
            cli.out.hanging(Text.assemble(_SIGNS[finding.level], f" {finding.check:<12} "), finding.message + codes)
            if finding.advice:
                cli.out.hanging(f"  {'':<12} → ", finding.advice)
    if cli.out.as_json:
        cli.out.json(findings)
    return ERROR if any(finding.level == "error" for finding in findings) else 0


async def brake_status(cli: Cli) -> None:
    """Show whether the brake is on, and why."""
    found = await read_brake(cli.store, cli.keys)

    def render() -> None:
        if found is None:
            cli.out.line("the brake is off: farms remove pods that are no longer desired")
            return
        who = "" if found.by else f" ({found.code}, found by {found.farm})"
        cli.out.line(f"the brake is on since {ago(found.since)}{who}: {found.words}")
        end = (
            "`rcfarm brake release` ends it"
            if found.by
            else "restore the desired state, or confirm it: `rcfarm brake release`"
        )
        cli.out.line(f"nothing is removed or moved; {end}")

    cli.out.show(BrakeInfo(on=found is not None, brake=found), render)


async def brake_engage(
    cli: Cli,
    reason: Annotated[
        str, typer.Option("--reason", metavar="TEXT", help="Why; everybody who meets the brake is shown it.")
    ],
) -> None:
    """Have the farms remove and move nothing, until it is released. Adding and repairing go on."""
    brake = await engage_brake(cli.store, cli.keys, reason, actor=cli.actor)

    def render() -> None:
        cli.out.line(f"the brake is on, {brake.words}")
        cli.out.line("nothing is removed or moved until `rcfarm brake release`")

    cli.out.show(BrakeInfo(on=True, brake=brake), render)


async def brake_release(cli: Cli, yes: Yes = False) -> None:
    """Confirm the desired state. Farms remove pods again."""
    try:
        record = await read_brake(cli.store, cli.keys)
        found = f"The brake is on: {record.words}" if record else ""
    except BadRecord as error:  # an unreadable record must not prevent the release
        found = f"The brake is on, but its record can't be read ({error})"
    if found:
        confirm(f"{found}. Release it? Farms then remove pods as the desired state says.", yes=yes)
    released = await release_brake(cli.store, cli.keys, actor=cli.actor)
    sentence = "the brake is released; removals resume" if released else "the brake is not on"
    cli.out.show(ReleaseInfo(released=released), lambda: cli.out.line(sentence))


async def farm_forget(
    cli: Cli,
    farm: Annotated[str, typer.Argument(metavar="NAME", help="The farm's name.", autocompletion=complete_farm)],
) -> None:
    """Remove the record of a farm that is gone for good. It is refused while the farm lives."""
    await forget_farm(cli.store, cli.keys, farm, actor=cli.actor)
    cli.out.show(ForgottenFarm(farm=farm), lambda: cli.out.line(f"farm {farm} is forgotten"))


async def audit_export(
    cli: Cli,
    since: Since = "",
    until: Until = "",
    rc: Annotated[
        str, typer.Option("--rc", metavar="RC", help="Only events of this RC.", autocompletion=complete_rc)
    ] = "",
) -> None:
    """Write the events to standard output, as JSON lines. The oldest comes first.

    The log is read page by page, so that one of any size can be exported.
    """
    start, end = parse_time("--since", since), parse_time("--until", until)
    async for page in audit.pages(cli.store, cli.keys, since=start, until=end, rc=rc or None):
        lines = [msgspec.json.encode({"key": key} | msgspec.to_builtins(event)) + b"\n" for key, event in page]
        sys.stdout.buffer.write(b"".join(lines))
    sys.stdout.buffer.flush()


command(app, "status")(status)
command(app, "doctor", reads_meta=False)(doctor)
command(brake_app, "status")(brake_status)
command(brake_app, "engage")(brake_engage)
command(brake_app, "release")(brake_release)
command(farm_app, "forget")(farm_forget)
command(audit_app, "export")(audit_export)
