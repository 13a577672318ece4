"""The tree of commands. The module of each is imported at first use, so that help and completion are quick."""

from __future__ import annotations

import gc
import importlib
import inspect
import os
import sys
from functools import cache
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_group

from rcfarm.cli import ERROR
from store.imports import absent

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


def _add_group(name: str, apps: str, summary: str) -> None:
    """Add a group with the commands of `apps`, as in `rcfarm.cli.rc.commands:app`."""

    class LazyGroup(TyperGroup):
        is_completing = False  # then names and summaries are enough

        def list_commands(self, ctx: Any) -> list[str]:
            return [info.name for info in _loaded(apps).registered_commands if info.name]

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            return _outline(apps, cmd_name) if self.is_completing else _command(apps, cmd_name)

        def shell_complete(self, ctx: Any, incomplete: str) -> Any:
            self.is_completing = True
            return super().shell_complete(ctx, incomplete)

    group = typer.Typer(cls=LazyGroup, no_args_is_help=True, rich_markup_mode=None)
    app.add_typer(group, name=name, help=summary)


def _add_command(name: str, apps: str, summary: str, verbs: str = "") -> None:
    """Add a command that is imported only when it runs, from the module `apps`. `verbs`: the module of a group; if the
    first argument names one of its commands, that runs instead, as in `rcfarm farm forget`."""

    class LazyCommand(TyperCommand):
        def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
            is_verb = bool(verbs and args) and not args[0].startswith("-")
            if is_verb and (verb := _command(verbs, args[0])) is not None:
                return verb.make_context(f"{info_name} {args[0]}", args[1:], parent, **extra)
            return _command(apps, name).make_context(info_name, args, parent, **extra)

    def replaced() -> None:
        raise AssertionError("a lazy command is replaced before it runs")

    app.command(name, cls=LazyCommand, help=summary)(replaced)


@cache
def _loaded(apps: str) -> typer.Typer:
    # Without rich and colorama, which structlog imports for tracebacks that no log here has, and for Windows, and
    # without what Python has itself: a fifth of the time until a command runs
    with absent("rich"), absent("colorama"), absent("typing_extensions"):
        importlib.import_module("structlog")
        importlib.import_module("msgspec")
    module, _, name = apps.partition(":")
    loaded: typer.Typer = getattr(importlib.import_module(module), name)
    if not gc.isenabled():
        gc.freeze()  # what was imported stays, so the collector need not look at it
        gc.enable()
    return loaded


@cache
def _command(apps: str, name: str) -> Any:
    """Return one command, or None: typer takes a millisecond for each that it makes."""
    alone = typer.Typer(rich_markup_mode=None)
    alone.registered_commands = [info for info in _loaded(apps).registered_commands if info.name == name]
    return get_group(alone).commands.get(name)


def _outline(apps: str, name: str) -> TyperCommand:
    """Return a command without its parameters, of which a shell shows the name and the summary."""
    info = next(info for info in _loaded(apps).registered_commands if info.name == name)
    return TyperCommand(name, help=info.help or inspect.getdoc(info.callback), hidden=info.hidden)


_add_command("dev", "rcfarm.cli.daemons.roles:app", "Run everything on this machine: store, farm, engine, agents.")
_add_command("farm", "rcfarm.cli.daemons.roles:app", "Run a farm; forget a dead one.", "rcfarm.cli.fleet:farm_app")
_add_command("agent", "rcfarm.cli.daemons.roles:app", "Run this machine's node agent.")
_add_command("tasks", "rcfarm.cli.daemons.roles:app", "Run a task engine.")
_add_command("jobs", "rcfarm.cli.daemons.roles:app", "Run Frameworks and training jobs on Kubernetes.")
_add_command("extender", "rcfarm.cli.daemons.roles:app", "Run HiveD's scheduler extender for kube-scheduler.")
_add_command("barrier", "rcfarm.cli.daemons.barrier:app", "Make a Framework's pod wait until its gang is whole.")
_add_command("ready", "rcfarm.cli.daemons.ready:app", "Check whether this machine's daemons are ready.")
_add_command("status", "rcfarm.cli.status:app", "Show the fleet at a glance.")
_add_command("events", "rcfarm.cli.events:app", "Show what happened: one timeline of operators, farms, agents.")
_add_command("explain", "rcfarm.cli.explain:app", "Explain why anything is as it is, whatever its kind.")
_add_group("rc", "rcfarm.cli.rc.commands:app", "Replication controllers: apply, scale, status, explain, delete.")
_add_group("ds", "rcfarm.cli.daemon_set:app", "Daemon sets, a pod on each node: create, list, shrink.")
_add_command("plan", "rcfarm.cli.plan:app", "Show what applying files would do, step by step.")
_add_command("what-if", "rcfarm.cli.plan:app", "Show what would follow if nodes or settings were others.")
_add_command("replay", "rcfarm.cli.replay:app", "Decide once more what a farm has decided, and compare.")
_add_group("rollout", "rcfarm.cli.rollout:app", "Rollouts of RCs: status, history, pause, promote, undo.")
_add_command("apply", "rcfarm.cli.apply:app", "Apply files of RCs, tasks, quotas and schedules.")
_add_group("task", "rcfarm.cli.task.commands:app", "Tasks: run, list, status, explain, logs, abort, retry.")
_add_group("quota", "rcfarm.cli.quota:app", "Quotas of tasks: set, list, explain.")
_add_group("schedule", "rcfarm.cli.schedule:app", "Schedules of tasks: apply, list, pause, trigger.")
_add_group("secret", "rcfarm.cli.secret:app", "Secrets of pods in Consul: set, list, delete, policy.")
_add_group("node", "rcfarm.cli.node:app", "Nodes: list, label, cordon, drain, remove.")
_add_group("pod", "rcfarm.cli.pod:app", "Pods of nodes: list, stop, where.")
_add_group("brake", "rcfarm.cli.fleet:brake_app", "The brake: while it is on, farms remove nothing.")
_add_group("audit", "rcfarm.cli.fleet:audit_app", "The audit log: export.")
_add_group("job", "rcfarm.cli.job.commands:app", "Training jobs on Kubernetes: list, explain, logs, scale.")
_add_group(
    "framework", "rcfarm.cli.framework.commands:app", "Frameworks, jobs on Kubernetes: list, explain, start, stop."
)
_add_group("hived", "rcfarm.cli.hived.commands:app", "HiveD: validate, show, explain, simulate, snapshot.")
_add_command("schema", "rcfarm.cli.schema:app", "Print the JSON schema of an RC's file, for editors.")
_add_command("doctor", "rcfarm.cli.fleet:app", "Check the store and the fleet, and advise.")


def run(usage_error_code: int = ERROR) -> None:
    """Run the program. Exits with the command's code, or with `usage_error_code` if the command line is invalid: click
    exits with 2 then, which means "not fully placed" here."""
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
