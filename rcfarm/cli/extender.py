"""`rcfarm extender`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rcfarm.cli.arguments import Context
from rcfarm.cli.daemons import Listen, LogFormat, LogLevel, Set, run_role

app = typer.Typer(rich_markup_mode=None)


@app.command("extender")
def extender(
    config: Annotated[
        str | None,
        typer.Option(
            "--config", "-c", metavar="FILE", help="HiveD's file; else what CONFIG says, or ./hivedscheduler.yaml."
        ),
    ] = None,
    settings: Annotated[Path | None, typer.Option("--settings", metavar="FILE", help="Settings, as TOML.")] = None,
    lease: Annotated[
        str | None,
        typer.Option(
            "--lease", metavar="[NAMESPACE/]NAME|off", help="Under which Lease one of several replicas answers."
        ),
    ] = None,
    kubeconfig: Annotated[
        str | None,
        typer.Option(
            "--kubeconfig",
            metavar="FILE",
            help="How to reach the cluster; else as HiveD's file says, KUBECONFIG, ~/.kube/config or the pod's.",
        ),
    ] = None,
    context: Context = None,
    listen: Listen = None,
    log_level: LogLevel = None,
    log_format: LogFormat = None,
    set_: Set = None,
) -> None:
    """Run HiveD's scheduler extender: it places gangs of pods in the cells that their tenants are guaranteed."""
    from rcfarm.extender_role import run_extender

    flags = {
        "extender.config": config,
        "extender.lease": lease,
        "kube.kubeconfig": kubeconfig,
        "kube.context": context,
        "web.listen": listen,
        "log.level": log_level,
        "log.format": log_format,
    }
    run_role(run_extender, settings, flags, set_)
