"""`rcfarm status`: the fleet at a glance."""

from __future__ import annotations

import asyncio
from collections import Counter

import typer
from rich.text import Text

from rcfarm.cli.command import Cli, command
from rcfarm.cli.output import state
from rcfarm.cli.views import FleetInfo, farm_info, rc_info
from rcfarm.cli.words import ago, count, times
from rcfarm.overview import PodsWithoutRC, ids_with_spec, pods_without_rc, read_brake, read_farms
from rcfarm.pod_health import TROUBLE
from store.records import BadRecord, Brake

app = typer.Typer(rich_markup_mode=None)

_WELL = ("converged", "completed", "progressing", "disabled", "deleting")
SHOWN = 10


async def status(cli: Cli) -> None:
    """Show the fleet at a glance: farms, nodes, RCs, and what is wrong."""
    snaps, farms, nodes, (brake, bad_brake) = await asyncio.gather(
        cli.rcs.snapshots(), read_farms(cli.store, cli.keys), cli.nodes.list(), _brake(cli)
    )
    lost = await pods_without_rc(cli.store, cli.keys, ids_with_spec(snaps))
    rcs = [rc_info(snap, farms.farms) for snap in snaps]
    owned = Counter(rc.owner.farm for rc in rcs if rc.owner and rc.owner.held)
    bad = [*bad_brake, *farms.bad, *nodes.bad, *(error for snap in snaps for error in snap.bad.values())]
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
        troubled=[rc for rc in rcs if rc.state not in _WELL or any(why.code in TROUBLE for why in rc.reasons)],
        unreadable=[str(error) for error in bad],
        pods_without_rc=lost.rcs,
        brake=brake,
    )
    cli.out.show(info, lambda: _render(cli, info))


async def _brake(cli: Cli) -> tuple[Brake | None, list[BadRecord]]:
    """The brake, and its record when that can't be read: the farms then take the brake for on."""
    try:
        return await read_brake(cli.store, cli.keys), []
    except BadRecord as error:
        return None, [error]


def _render(cli: Cli, fleet: FleetInfo) -> None:
    out = cli.out
    if fleet.brake:
        out.line(Text.assemble(("BRAKE ON", "yellow"), f" since {ago(fleet.brake.since)}: {fleet.brake.message}"))
        out.line("  nothing is removed; see `rcfarm brake status`")
    if fleet.pods_without_rc:
        out.line(Text.assemble(("LOST     ", "red"), str(PodsWithoutRC(fleet.pods_without_rc))))
    live = [farm for farm in fleet.farms if farm.live]
    cordoned = f", {fleet.nodes_cordoned} cordoned" if fleet.nodes_cordoned else ""
    out.line(f"farms  {len(live)} live{_dead(len(fleet.farms) - len(live))}")
    out.line(f"nodes  {fleet.nodes_live} live{_dead(fleet.nodes - fleet.nodes_live)}{cordoned}")
    out.line(f"pods   {fleet.pods_desired} desired, {fleet.pods_placed} placed, {fleet.pods_healthy} healthy")
    states = [Text.assemble(f"{number} ", state(name)) for name, number in fleet.rcs_by_state.items()]
    out.line(Text.assemble("rcs    ", Text(", ").join(states) if states else "none"))
    if fleet.farms:
        out.line()
        rows = [
            (
                farm.name,
                state("live" if farm.live else "dead"),
                str(farm.owned),
                farm.selector or "-",
                ago(farm.since),
            )
            for farm in fleet.farms
        ]
        out.table(("FARM", "STATE", "OWNS>", "SELECTOR", "SINCE"), rows)
    if fleet.troubled:
        out.line()
        troubled = fleet.troubled[:SHOWN]
        rows2 = [
            (
                rc.id,
                state(rc.state),
                f"{rc.placed}/{rc.replicas_desired}" if rc.state != "unreadable" else "-",
                str(rc.healthy),
                "; ".join(reason.message + times(reason) for reason in rc.reasons),
            )
            for rc in troubled
        ]
        out.table(("RC", "STATE", "PLACED>", "HEALTHY>", "WHY"), rows2)
        if len(fleet.troubled) > SHOWN:
            out.line(f"and {count(len(fleet.troubled) - SHOWN, 'other')}; see `rcfarm rc list`")
    for text in fleet.unreadable:
        out.line(Text.assemble(("unreadable: ", "red"), text))


def _dead(number: int) -> str:
    return f", {number} dead" if number else ""


command(app, "status")(status)
