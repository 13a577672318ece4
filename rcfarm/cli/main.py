"""The tree of commands. Nothing heavy is imported here: `rcfarm --help` must be quick."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from rcfarm.cli.lazy import add_command, add_group

USAGE_ERROR = 1  # click says 2, which is "not fully placed" here

app = typer.Typer(
    name="rcfarm",
    no_args_is_help=True,
    rich_markup_mode=None,  # the plain help costs 60 ms less
    pretty_exceptions_enable=False,  # a traceback with the values of variables could show a token
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"rcfarm {version('rcfarm')}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and stop.")
    ] = False,
) -> None:
    """Keeps fleets in their desired state: services on Consul, owned by redundant farms, and jobs on Kubernetes."""


add_command(app, "dev", "rcfarm.cli.dev", "Run everything on this machine: store, farm, agents.")
add_command(app, "farm", "rcfarm.cli.farm", "Run a farm.")
add_command(app, "agent", "rcfarm.cli.agent", "Run this machine's node agent.")
add_command(app, "jobs", "rcfarm.cli.jobs", "Run the operator of Frameworks on Kubernetes.")
add_command(app, "extender", "rcfarm.cli.extender", "Run HiveD's scheduler extender for kube-scheduler.")
add_command(app, "barrier", "rcfarm.cli.barrier", "Hold a Framework's pod until its gang is whole.")
add_command(app, "ready", "rcfarm.cli.ready", "Check whether this machine's daemons are ready.")
add_command(app, "status", "rcfarm.cli.fleet", "Show the fleet at a glance.")
add_group(app, "rc", "rcfarm.cli.rc", "Replication controllers: apply, scale, status, explain, delete.")
add_group(app, "node", "rcfarm.cli.node", "Nodes: list, label, cordon.")
add_group(app, "brake", "rcfarm.cli.brake", "The brake: while it is on, farms remove nothing.")
add_group(app, "audit", "rcfarm.cli.audit", "The audit log: export.")
add_group(app, "framework", "rcfarm.cli.framework", "Frameworks, jobs on Kubernetes: list, explain, start, stop.")
add_group(app, "hived", "rcfarm.cli.hived", "HiveD: validate, show, explain, simulate, snapshot.")
add_command(app, "doctor", "rcfarm.cli.doctor", "Check the store and the fleet; say what to do.")


def run(usage_error_code: int = USAGE_ERROR) -> None:
    """The program. Exits with the code of the command; with `usage_error_code` when the command line makes no sense."""
    usage_error = typer.BadParameter.__base__
    assert usage_error is not None
    usage_error.exit_code = usage_error_code  # type: ignore[attr-defined]  # click's UsageError, wherever typer keeps it
    try:
        app(prog_name="rcfarm")
    finally:
        _flush()


def _flush() -> None:
    """Write what is left of the output now: at the end of the interpreter, a reader that has gone is a traceback."""
    try:
        if sys.stdout is not None:  # closed by the caller
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
