"""`rcfarm agent`."""

from __future__ import annotations

from typing import Annotated

import typer

from rcfarm.cli.kit.daemon_command import Config, Listen, LogFormat, LogLevel, Root, Set, StoreUrl, run_role

app = typer.Typer(rich_markup_mode=None)


@app.command("agent")
def agent(
    config: Config = None,
    store: StoreUrl = None,
    root: Root = None,
    node: Annotated[
        str | None, typer.Option("--node", metavar="NAME", help="The node's name; the host name when absent.")
    ] = None,
    state_dir: Annotated[
        str | None, typer.Option("--state-dir", metavar="DIR", help="Directory for the agent's state.")
    ] = None,
    label: Annotated[
        list[str] | None,
        typer.Option("--label", "-l", metavar="KEY=VALUE", help="A label of the node; may be repeated."),
    ] = None,
    listen: Listen = None,
    log_level: LogLevel = None,
    log_format: LogFormat = None,
    set_: Set = None,
) -> None:
    """Run the node agent: it starts and supervises the pods that farms assign to this machine."""
    from rcfarm.roles.agent import run_agent

    flags = {
        "store.url": store,
        "store.root": root,
        "agent.node": node,
        "agent.state_dir": state_dir,
        "agent.labels": ",".join(label) if label else None,
        "web.listen": listen,
        "log.level": log_level,
        "log.format": log_format,
    }
    run_role(run_agent, config, flags, set_)
