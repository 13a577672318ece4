"""`rcfarm jobs`."""

from __future__ import annotations

from typing import Annotated

import typer

from rcfarm.cli.kit.daemon_command import Config, Listen, LogFormat, LogLevel, Set, run_role
from rcfarm.cli.kit.options import Context

app = typer.Typer(rich_markup_mode=None)


@app.command("jobs")
def jobs(
    config: Config = None,
    namespace: Annotated[
        list[str] | None,
        typer.Option(
            "--namespace", "-n", metavar="NAME|all", help="Namespace to watch for Frameworks; may be repeated."
        ),
    ] = None,
    lease: Annotated[
        str | None,
        typer.Option(
            "--lease", metavar="[NAMESPACE/]NAME|off", help="Lease used for leader election between replicas."
        ),
    ] = None,
    mode: Annotated[
        str | None, typer.Option("--mode", metavar="compatible|native", help="Which form of the CRD is installed.")
    ] = None,
    kubeconfig: Annotated[
        str | None,
        typer.Option(
            "--kubeconfig",
            metavar="FILE",
            help="Credentials for the cluster; default: KUBECONFIG, ~/.kube/config or the pod's own.",
        ),
    ] = None,
    context: Context = None,
    framework_config: Annotated[
        str | None,
        typer.Option("--framework-config", metavar="FILE", help="A frameworkcontroller.yaml to take settings from."),
    ] = None,
    listen: Listen = None,
    log_level: LogLevel = None,
    log_format: LogFormat = None,
    set_: Set = None,
) -> None:
    """Run the Framework operator: it runs gangs of tasks on Kubernetes to completion."""
    from rcfarm.roles.jobs import run_jobs

    flags = {
        "kube.namespaces": ",".join(namespace) if namespace else None,
        "kube.kubeconfig": kubeconfig,
        "kube.context": context,
        "jobs.lease": lease,
        "jobs.mode": mode,
        "jobs.framework_config": framework_config,
        "web.listen": listen,
        "log.level": log_level,
        "log.format": log_format,
    }
    run_role(run_jobs, config, flags, set_)
