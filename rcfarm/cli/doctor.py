"""`rcfarm doctor`: is everything as it should be, and if not, what to do."""

from __future__ import annotations

import typer
from rich.text import Text

from rcfarm.cli.command import Cli, command
from rcfarm.cli.errors import ERROR
from rcfarm.doctor import examine
from rcfarm.finding import Finding

app = typer.Typer(rich_markup_mode=None)

_SIGNS = {"ok": ("✓", "green"), "warning": ("!", "yellow"), "error": ("✗", "red")}


async def doctor(cli: Cli) -> int:
    """Check the store and the fleet, line by line, and say what to do; exits with 1 when something is wrong."""
    findings = []
    async for finding in examine(cli.store, cli.keys.root):
        findings.append(finding)
        if not cli.out.as_json:
            _print(cli, finding)
    if cli.out.as_json:
        cli.out.json(findings)
    return ERROR if any(finding.level == "error" for finding in findings) else 0


def _print(cli: Cli, finding: Finding) -> None:
    cli.out.hanging(Text.assemble(_SIGNS[finding.level], f" {finding.check:<12} "), finding.message)
    if finding.advice:
        cli.out.hanging(f"  {'':<12} → ", finding.advice)


command(app, "doctor", reads_meta=False)(doctor)
