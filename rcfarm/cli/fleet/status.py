"""`rcfarm status`: the fleet at a glance."""

from __future__ import annotations

import asyncio
from collections import Counter

import typer
from rich.text import Text

from rcfarm.cli.kit.command import Cli, command
from rcfarm.cli.kit.formatting import ago, count, times
from rcfarm.cli.kit.json_views import FleetInfo, farm_info, rc_info
from rcfarm.cli.kit.output import state
from rcfarm.operations.fleet import PodsWithoutRC, ids_with_spec, pods_without_rc, read_brake, read_farms
from rcfarm.operations.rc_snapshot import TROUBLE
from store.kv.protocol import BadRecord
from store.schema.records import Brake

app = typer.Typer(rich_markup_mode=None)

_WELL = ("converged", "completed", "progressing", "disabled", "deleting")
SHOWN = 10


async def status(cli: Cli) -> None:
    """Show the fleet at a glance: farms, nodes, RCs and problems."""
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

    def render() -> None:
        out = cli.out
        if info.brake:
            out.line(Text.assemble(("BRAKE ON", "yellow"), f" since {ago(info.brake.since)}: {info.brake.message}"))
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
        if info.farms:
            out.line()
            rows = [
                (
                    farm.name,
                    state("live" if farm.live else "dead"),
                    str(farm.owned),
                    farm.selector or "-",
                    ago(farm.since),
                )
                for farm in info.farms
            ]
            out.table(("FARM", "STATE", "OWNS>", "SELECTOR", "SINCE"), rows)
        if info.troubled:
            out.line()
            troubled = info.troubled[:SHOWN]
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
            if len(info.troubled) > SHOWN:
                out.line(f"and {count(len(info.troubled) - SHOWN, 'other')}; see `rcfarm rc list`")
        for text in info.unreadable:
            out.line(Text.assemble(("unreadable: ", "red"), text))

    cli.out.show(info, render)


async def _brake(cli: Cli) -> tuple[Brake | None, list[BadRecord]]:
    """Return the brake, and the error if its record can't be read: farms then treat the brake as on."""
    try:
        return await read_brake(cli.store, cli.keys), []
    except BadRecord as error:
        return None, [error]


def _dead(number: int) -> str:
    return f", {number} dead" if number else ""


command(app, "status")(status)
