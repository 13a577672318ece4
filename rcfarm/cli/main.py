"""The tree of commands. The module of each is imported at first use, so that help and completion are quick."""

from __future__ import annotations

import importlib
import os
import sys
from functools import cache
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command, get_group

USAGE_ERROR = 1  # click exits with 2, which means "not fully placed" here

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
    """Keep fleets in their desired state: services on Consul, owned by redundant farms, and jobs on Kubernetes."""


def _add_group(name: str, module: str, summary: str) -> None:
    """Add a group with the commands of the `app` of `module`."""

    @cache
    def loaded() -> TyperGroup:
        return get_group(importlib.import_module(module).app)

    class LazyGroup(TyperGroup):
        def list_commands(self, ctx: Any) -> list[str]:
            return loaded().list_commands(ctx)

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            return loaded().get_command(ctx, cmd_name)

    group = typer.Typer(cls=LazyGroup, no_args_is_help=True, rich_markup_mode=None)
    app.add_typer(group, name=name, help=summary)


def _add_command(name: str, module: str, summary: str) -> None:
    """Add a command in whose place the only command of the `app` of `module` runs."""

    class LazyCommand(TyperCommand):
        def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
            return get_command(importlib.import_module(module).app).make_context(info_name, args, parent, **extra)

    def replaced() -> None:
        raise AssertionError("a lazy command is replaced before it runs")

    app.command(name, cls=LazyCommand, help=summary)(replaced)


_add_command("dev", "rcfarm.cli.daemons.dev", "Run everything on this machine: store, farm, agents.")
_add_command("farm", "rcfarm.cli.daemons.farm", "Run a farm.")
_add_command("agent", "rcfarm.cli.daemons.agent", "Run this machine's node agent.")
_add_command("jobs", "rcfarm.cli.daemons.jobs", "Run the operator of Frameworks on Kubernetes.")
_add_command("extender", "rcfarm.cli.daemons.extender", "Run HiveD's scheduler extender for kube-scheduler.")
_add_command("barrier", "rcfarm.cli.daemons.barrier", "Make a Framework's pod wait until its gang is whole.")
_add_command("ready", "rcfarm.cli.daemons.ready", "Check whether this machine's daemons are ready.")
_add_command("status", "rcfarm.cli.fleet.status", "Show the fleet at a glance.")
_add_group("rc", "rcfarm.cli.rc.group", "Replication controllers: apply, scale, status, explain, delete.")
_add_group("node", "rcfarm.cli.fleet.node", "Nodes: list, label, cordon.")
_add_group("brake", "rcfarm.cli.fleet.brake", "The brake: while it is on, farms remove nothing.")
_add_group("audit", "rcfarm.cli.fleet.audit", "The audit log: export.")
_add_group("framework", "rcfarm.cli.framework.group", "Frameworks, jobs on Kubernetes: list, explain, start, stop.")
_add_group("hived", "rcfarm.cli.hived.group", "HiveD: validate, show, explain, simulate, snapshot.")
_add_command("doctor", "rcfarm.cli.fleet.doctor", "Check the store and the fleet, and advise.")


def run(usage_error_code: int = USAGE_ERROR) -> None:
    """Run the program. Exits with the command's code, or with `usage_error_code` if the command line is invalid."""
    usage_error = typer.BadParameter.__base__
    assert usage_error is not None
    usage_error.exit_code = usage_error_code  # type: ignore[attr-defined]  # click's UsageError, wherever typer keeps it
    try:
        app(prog_name="rcfarm")
    finally:
        # Flush the output now: in the interpreter's own shutdown, a closed pipe would print a traceback
        try:
            if sys.stdout is not None:  # closed by the caller
                sys.stdout.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
