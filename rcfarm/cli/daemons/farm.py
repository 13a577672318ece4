"""`rcfarm farm`."""

from __future__ import annotations

from typing import Annotated

import typer

from rcfarm.cli.kit.daemon_command import Config, Listen, LogFormat, LogLevel, Root, Set, StoreUrl, run_role

app = typer.Typer(rich_markup_mode=None)


@app.command("farm")
def farm(
    config: Config = None,
    store: StoreUrl = None,
    root: Root = None,
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="The farm's name; the host name when absent.")
    ] = None,
    selector: Annotated[
        str | None,
        typer.Option("--selector", metavar="SELECTOR", help="Label selector of the RCs that the farm claims."),
    ] = None,
    scheduler: Annotated[
        str | None, typer.Option("--scheduler", metavar="label|pool|NAME", help="How nodes are chosen.")
    ] = None,
    listen: Listen = None,
    log_level: LogLevel = None,
    log_format: LogFormat = None,
    set_: Set = None,
) -> None:
    """Run a farm: it claims replication controllers and keeps them in their desired state."""
    from rcfarm.roles.farm import run_farm

    flags = {
        "store.url": store,
        "store.root": root,
        "farm.name": name,
        "farm.selector": selector,
        "farm.scheduler": scheduler,
        "web.listen": listen,
        "log.level": log_level,
        "log.format": log_format,
    }
    run_role(run_farm, config, flags, set_)
