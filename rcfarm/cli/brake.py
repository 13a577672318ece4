"""`rcfarm brake`: while it is on, the farms remove nothing."""

from __future__ import annotations

import typer

from rcfarm.cli.arguments import Yes, confirm
from rcfarm.cli.command import Cli, command
from rcfarm.cli.views import BrakeInfo, ReleaseInfo
from rcfarm.cli.words import ago
from rcfarm.overview import read_brake, release_brake
from store.records import BadRecord

app = typer.Typer(rich_markup_mode=None)


async def status(cli: Cli) -> None:
    """Show whether the brake is on, and why."""
    brake = await read_brake(cli.store, cli.keys)

    def render() -> None:
        if brake is None:
            cli.out.line("the brake is off: farms remove what is not desired any more")
            return
        cli.out.line(f"the brake is on since {ago(brake.since)} ({brake.code}, found by {brake.farm}): {brake.message}")
        cli.out.line("nothing is removed or moved; restore the desired state, or confirm it: `rcfarm brake release`")

    cli.out.show(BrakeInfo(on=brake is not None, brake=brake), render)


async def release(cli: Cli, yes: Yes = False) -> None:
    """Confirm that the desired state is meant: removals go on."""
    found = await _found(cli)
    if found:
        confirm(f"{found}. Is that meant? Farms will remove pods accordingly.", yes=yes)
    released = await release_brake(cli.store, cli.keys, actor=cli.actor)
    sentence = "the brake is released: removals go on" if released else "the brake is not on"
    cli.out.show(ReleaseInfo(released=released), lambda: cli.out.line(sentence))


async def _found(cli: Cli) -> str:
    """What put the brake on; "" when it is off. A record that can't be read must not keep anyone from releasing it."""
    try:
        brake = await read_brake(cli.store, cli.keys)
    except BadRecord as error:
        return f"The brake is on, and why can't be read ({error})"
    return brake.message if brake else ""


command(app, "status")(status)
command(app, "release")(release)
