"""`rcfarm extender`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rcfarm.cli.kit.daemon_command import Listen, LogFormat, LogLevel, Set, run_role
from rcfarm.cli.kit.options import Context

app = typer.Typer(rich_markup_mode=None)


@app.command("extender")
def extender(
    config: Annotated[
        str | None,
        typer.Option(
            "--config", "-c", metavar="FILE", help="HiveD's file; default: $CONFIG, or ./hivedscheduler.yaml."
        ),
    ] = None,
    settings: Annotated[Path | None, typer.Option("--settings", metavar="FILE", help="Settings, as TOML.")] = None,
    lease: Annotated[
        str | None,
        typer.Option(
            "--lease", metavar="[NAMESPACE/]NAME|off", help="Lease used for leader election between replicas."
        ),
    ] = None,
    kubeconfig: Annotated[
        str | None,
        typer.Option(
            "--kubeconfig",
            metavar="FILE",
            help="Credentials for the cluster; default: HiveD's file, KUBECONFIG, ~/.kube/config or the pod's own.",
        ),
    ] = None,
    context: Context = None,
    listen: Listen = None,
    log_level: LogLevel = None,
    log_format: LogFormat = None,
    set_: Set = None,
) -> None:
    """Run HiveD's scheduler extender: it places gangs of pods in the cells guaranteed to their tenants."""
    from rcfarm.roles.extender import run_extender

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
