"""`rcfarm dev`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rcfarm.cli.kit.daemon_command import Config, Listen, LogFormat, LogLevel, Set, run_role
from rcfarm.cli.kit.options import read_file
from rcfarm.config.settings import Settings
from rcfarm.operations.rc_apply import load

app = typer.Typer(rich_markup_mode=None)


@app.command("dev")
def dev(
    config: Config = None,
    directory: Annotated[
        Path | None,
        typer.Option("--directory", metavar="DIR", help="Directory for the state of the store and the agents."),
    ] = None,
    nodes: Annotated[int, typer.Option("--nodes", metavar="N", min=1, help="How many nodes, each with an agent.")] = 3,
    apply: Annotated[
        list[Path] | None, typer.Option("--apply", metavar="FILE", help="An RC file to apply at the start; repeatable.")
    ] = None,
    listen: Listen = None,
    log_level: LogLevel = "warning",
    log_format: LogFormat = None,
    set_: Set = None,
) -> None:
    """Run a whole fleet in one process on this machine: an embedded store, a farm and a few agents."""
    from rcfarm.roles.dev import run_dev
    from store.open import dev_directory

    def run(settings: Settings) -> int:
        documents = [document for file in apply or () for document in load(str(file), read_file("--apply", file))]
        return run_dev(settings, directory=directory or dev_directory(), nodes=nodes, documents=documents)

    flags = {"web.listen": listen, "log.level": log_level, "log.format": log_format}
    run_role(run, config, flags, set_)
