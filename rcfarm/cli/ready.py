"""`rcfarm ready`: the health check of containers and scripts; see `rcfarm.readiness`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rcfarm.readiness import VARIABLE, BadListener, check
from rcfarm.role_ports import PORTS

app = typer.Typer(rich_markup_mode=None)


@app.command("ready")
def ready(
    role: Annotated[
        str,
        typer.Argument(metavar="[ROLE]", help=f"Only this one: {', '.join(PORTS)}. Default: each one that runs here."),
    ] = "",
    listen: Annotated[
        str | None,
        typer.Option("--listen", envvar=VARIABLE, metavar="HOST:PORT", help="Where it listens; else the role's port."),
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", metavar="FILE", help="The daemon's settings, as TOML.")
    ] = None,
) -> None:
    """Tell whether the daemons of this machine, or of this container, are ready.

    Exits with 0 when each one that runs here is ready, and with 1 otherwise.
    """
    if role and role not in PORTS:
        raise typer.BadParameter(f"{role} has no listener; write one of {', '.join(PORTS)}", param_hint="ROLE")
    token = ""
    if config is not None:
        configured, token = _configured(config)
        listen = listen or configured
    try:
        code = check(role, listen, token)
    except BadListener as error:
        typer.echo(f"error: {error}", err=True)
        code = 1
    raise typer.Exit(code)


def _configured(config: Path) -> tuple[str, str]:
    """What a settings file says of the listener, and its token."""
    from rcfarm.config import BadSettings
    from rcfarm.config_sources import load
    from rcfarm.web import read_token

    try:
        settings = load(config)
        return settings.web.listen, read_token(settings.web)
    except BadSettings as error:
        raise typer.BadParameter(str(error), param_hint="--config") from error
