"""`rcfarm task`: the commands on executions of tasks, in the order in which help lists them."""

from __future__ import annotations

import typer

from rcfarm.cli.kit.command import command
from rcfarm.cli.task import change, show

app = typer.Typer(rich_markup_mode=None)

command(app, "run", creates_store=True)(change.run)
command(app, "submit", creates_store=True)(change.submit)
command(app, "list", lists=True)(show.list_)
command(app, "get", lists=True)(show.get)
command(app, "status", lists=True)(show.status)
command(app, "explain")(show.explain)
command(app, "history")(show.history)
command(app, "logs", calls_agents=True)(show.logs)
command(app, "abort")(change.abort)
command(app, "retry")(change.retry)
command(app, "delete")(change.delete)
