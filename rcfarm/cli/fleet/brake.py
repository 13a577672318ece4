"""`rcfarm brake`: while it is on, the farms remove nothing."""

from __future__ import annotations

import typer

from rcfarm.cli.kit.command import Cli, command
from rcfarm.cli.kit.formatting import ago
from rcfarm.cli.kit.json_views import BrakeInfo, ReleaseInfo
from rcfarm.cli.kit.options import Yes, confirm
from rcfarm.operations.fleet import read_brake, release_brake
from store.kv.protocol import BadRecord

app = typer.Typer(rich_markup_mode=None)


async def status(cli: Cli) -> None:
    """Show whether the brake is on, and why."""
    brake = await read_brake(cli.store, cli.keys)

    def render() -> None:
        if brake is None:
            cli.out.line("the brake is off: farms remove pods that are no longer desired")
            return
        cli.out.line(f"the brake is on since {ago(brake.since)} ({brake.code}, found by {brake.farm}): {brake.message}")
        cli.out.line("nothing is removed or moved; restore the desired state, or confirm it: `rcfarm brake release`")

    cli.out.show(BrakeInfo(on=brake is not None, brake=brake), render)


async def release(cli: Cli, yes: Yes = False) -> None:
    """Confirm the desired state. Farms remove pods again."""
    try:
        brake = await read_brake(cli.store, cli.keys)
        found = brake.message if brake else ""
    except BadRecord as error:  # an unreadable record must not prevent the release
        found = f"The brake is on, but its record can't be read ({error})"
    if found:
        confirm(f"{found}. Is that intended? Farms will remove pods accordingly.", yes=yes)
    released = await release_brake(cli.store, cli.keys, actor=cli.actor)
    sentence = "the brake is released; removals resume" if released else "the brake is not on"
    cli.out.show(ReleaseInfo(released=released), lambda: cli.out.line(sentence))


command(app, "status")(status)
command(app, "release")(release)
