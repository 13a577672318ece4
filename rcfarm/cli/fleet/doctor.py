"""`rcfarm doctor`: check the store and the fleet, and advise."""

from __future__ import annotations

import typer
from rich.text import Text

from rcfarm.cli.kit.command import Cli, command
from rcfarm.cli.kit.errors import ERROR
from rcfarm.doctor.checks import examine

app = typer.Typer(rich_markup_mode=None)

_SIGNS = {"ok": ("✓", "green"), "warning": ("!", "yellow"), "error": ("✗", "red")}


async def doctor(cli: Cli) -> int:
    """Check the store and the fleet. Each problem comes with advice; exits with 1 if there is an error."""
    findings = []
    async for finding in examine(cli.store, cli.keys.root):
        findings.append(finding)
        if not cli.out.as_json:
            cli.out.hanging(Text.assemble(_SIGNS[finding.level], f" {finding.check:<12} "), finding.message)
            if finding.advice:
                cli.out.hanging(f"  {'':<12} → ", finding.advice)
    if cli.out.as_json:
        cli.out.json(findings)
    return ERROR if any(finding.level == "error" for finding in findings) else 0


command(app, "doctor", reads_meta=False)(doctor)
