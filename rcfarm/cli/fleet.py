"""The fleet as a whole: `rcfarm doctor`, `rcfarm brake status | engage | release`, `rcfarm farm forget`,
`rcfarm audit export`."""

from __future__ import annotations

import sys
from typing import Annotated

import msgspec
import typer
from rich.text import Text

from rcfarm.cli import ERROR
from rcfarm.cli.kit.command import Cli, command
from rcfarm.cli.kit.completion import complete_farm, complete_rc
from rcfarm.cli.kit.json_views import BrakeInfo, ForgottenFarm, ReleaseInfo
from rcfarm.cli.kit.options import Since, Until, Yes, confirm, parse_time
from rcfarm.cli.kit.output import ago
from rcfarm.operations.fleet import engage_brake, forget_farm, read_brake, release_brake
from store.kv.protocol import BadRecord
from store.schema import audit

app = typer.Typer(rich_markup_mode=None)
brake_app = typer.Typer(rich_markup_mode=None)
farm_app = typer.Typer(rich_markup_mode=None)
audit_app = typer.Typer(rich_markup_mode=None)

_SIGNS = {"ok": ("✓", "green"), "warning": ("!", "yellow"), "error": ("✗", "red")}


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
    lines = f"the brake is on, {brake.words}\nnothing is removed or moved until `rcfarm brake release`"
    cli.out.show(BrakeInfo(on=True, brake=brake), lambda: cli.out.line(lines))


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


command(app, "doctor", reads_meta=False)(doctor)
command(brake_app, "status")(brake_status)
command(brake_app, "engage")(brake_engage)
command(brake_app, "release")(brake_release)
command(farm_app, "forget")(farm_forget)
command(audit_app, "export")(audit_export)
