"""`rcfarm ready`: the health check of containers and scripts; see `rcfarm.daemon.readiness`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rcfarm.cli.kit.help import HelpfulCommand
from rcfarm.daemon.readiness import PORTS, VARIABLE, BadListener, check

app = typer.Typer(rich_markup_mode=None)


@app.command("ready", cls=HelpfulCommand)
def ready(
    role: Annotated[
        str,
        typer.Argument(metavar="ROLE", help=f"Only this role: {', '.join(PORTS)}. Default: each that runs here."),
    ] = "",
    listen: Annotated[
        str | None,
        typer.Option(
            "--listen", envvar=VARIABLE, metavar="HOST:PORT", help="The daemon's address; default: the role's port."
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", metavar="FILE", help="The daemon's settings, as TOML.")
    ] = None,
) -> None:
    """Report whether the daemons of this machine, or of this container, are ready.

    Exits with 0 if each daemon that runs here is ready, and with 1 otherwise.
    """
    if role and role not in PORTS:
        raise typer.BadParameter(f"{role} has no listener; write one of {', '.join(PORTS)}", param_hint="ROLE")
    token = ""
    if config is not None:
        from rcfarm.config.settings import BadSettings
        from rcfarm.config.sources import load
        from rcfarm.daemon.listener import read_token

        try:
            web = load(config).web
            listen, token = listen or web.listen, read_token(web)
        except BadSettings as error:
            raise typer.BadParameter(str(error), param_hint="--config") from error
    try:
        code = check(role, listen, token)
    except BadListener as error:
        typer.echo(f"error: {error}", err=True)
        code = 1
    raise typer.Exit(code)
