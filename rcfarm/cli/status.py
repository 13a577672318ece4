"""The fleet at a glance: `rcfarm status`."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence

import typer
from rich.text import Text

from rcfarm.cli.kit.command import Cli, command
from rcfarm.cli.kit.json_views import (
    EngineInfo,
    FarmInfo,
    FleetInfo,
    NodeTrouble,
    TasksInfo,
    farm_info,
    rc_info,
    tasks_info,
)
from rcfarm.cli.kit.output import Output, ago, count, state, times, timestamp
from rcfarm.cli.kit.reasons import in_brief
from rcfarm.cli.kit.tasks import tasks_of
from rcfarm.cli.kit.watch import Watch, keep_showing
from rcfarm.operations.fleet import PodsWithoutRC, ids_with_spec, pods_without_rc, rarest, read_brake, read_farms
from rcfarm.operations.rc_snapshot import TROUBLE
from rcfarm.operations.reasons import full_disks, reasons_of_node
from rcfarm.operations.schedules import Schedules
from store.kv.protocol import BadRecord
from store.schema.records import Brake, Reality, decode

app = typer.Typer(rich_markup_mode=None)

_WELL = ("converged", "completed", "progressing", "disabled", "deleting")
_TROUBLE = TROUBLE | {"rollout_stuck"}
SHOWN = 10


async def status(cli: Cli, watch: Watch = False) -> int:
    """Show the fleet at a glance: farms, nodes, RCs, tasks and problems."""
    if watch:
        keys = cli.keys
        trees = (keys.rcs, keys.healths, keys.nodes, keys.farms, keys.engines, keys.brake)
        return await keep_showing(cli, trees, lambda: _read(cli), _render, _items)
    info = await _read(cli)
    cli.out.show(info, lambda: _render(cli.out, info))
    return 0


async def _read(cli: Cli) -> FleetInfo:
    (snaps, farms, nodes, (brake, bad_brake)), engines, schedules = await asyncio.gather(
        asyncio.gather(cli.rcs.snapshots(), read_farms(cli.store, cli.keys), cli.nodes.list(), _brake(cli)),
        tasks_of(cli).engines(),
        Schedules(cli.store, cli.keys).list(),
    )
    lost = await pods_without_rc(cli.store, cli.keys, ids_with_spec(snaps))
    rcs = [rc_info(snap, farms.farms) for snap in snaps]
    task_pods = []  # those of RCs report a full disk by their health
    for entry in (await cli.store.list(cli.keys.task_pods)).entries:
        with contextlib.suppress(BadRecord):  # `rcfarm doctor` names it
            task_pods.append((cli.keys.parse_pod(entry.key).node, decode(Reality, entry.key, entry.value)))
    full = full_disks(snaps, task_pods)
    owned = Counter(rc.owner.farm for rc in rcs if rc.owner and rc.owner.held)
    bad = [*bad_brake, *farms.bad, *nodes.bad, *(error for snap in snaps for error in snap.bad.values())]
    bad += [error for view in schedules for error in view.bad]
    return FleetInfo(
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


def _render(out: Output, info: FleetInfo) -> None:
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
        troubled = rarest(info.troubled, lambda rc: (rc.state, tuple(reason.code for reason in rc.reasons)), SHOWN)
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
        nodes = rarest(info.troubled_nodes, lambda node: tuple(reason.code for reason in node.reasons), SHOWN)
        out.table(("NODE", "WHY"), [(node.name, in_brief(node.reasons)) for node in nodes])
        if len(info.troubled_nodes) > SHOWN:
            out.line(f"and {count(len(info.troubled_nodes) - SHOWN, 'other')}; see `rcfarm node list`")
    failures = info.tasks.failures if info.tasks else []
    if failures:
        out.line()
        ended = [(each.id, ago(timestamp(each.at)), f"{each.code}: {each.message}") for each in failures[:SHOWN]]
        out.table(("TASK", "ENDED", "WHY"), ended)
    for text in info.unreadable:
        out.line(Text.assemble(("unreadable: ", "red"), text))


def _items(info: FleetInfo) -> Mapping[str, str]:
    """Return the parts of the fleet, each in a line that changes only when that part does."""
    live = [farm for farm in info.farms if farm.live]
    states = ", ".join(f"{number} {name}" for name, number in info.rcs_by_state.items()) or "none"
    items = {
        "brake": f"on: {info.brake.words}" if info.brake else "off",
        "farms": f"{len(live)} live{_dead(len(info.farms) - len(live))}",
        "nodes": f"{info.nodes_live} live{_dead(info.nodes - info.nodes_live)}, {info.nodes_cordoned} cordoned",
        "pods": f"{info.pods_desired} desired, {info.pods_placed} placed, {info.pods_healthy} healthy",
        "rcs": states,
    }
    if info.tasks:
        items["tasks"] = ", ".join(f"{number} {word}" for word, number in info.tasks.by_state.items()) or "none in hand"
    for rc in info.troubled:
        codes = ", ".join(sorted({reason.code for reason in rc.reasons}))
        items[f"rc {rc.id}"] = f"{rc.state}, {rc.counts}" + (f" ({codes})" if codes else "")
    for node in info.troubled_nodes:
        items[f"node {node.name}"] = in_brief(node.reasons)
    for number, rc_id in enumerate(info.pods_without_rc):
        items[f"lost {number}"] = f"pods of rc {rc_id}, which is not in the store"
    return items


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


command(app, "status")(status)
