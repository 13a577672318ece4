"""`rcfarm job`: the commands on training jobs, in the order in which help lists them."""

from __future__ import annotations

import typer

from rcfarm.cli.job import change, explain, logs, show
from rcfarm.cli.kit.command import kube_command

app = typer.Typer(rich_markup_mode=None)

kube_command(app, "list")(show.list_)
kube_command(app, "get")(show.get)
kube_command(app, "status")(show.status)
kube_command(app, "explain")(explain.explain)
kube_command(app, "history")(explain.history)
kube_command(app, "logs")(logs.logs)
kube_command(app, "suspend")(change.suspend)
kube_command(app, "resume")(change.resume)
kube_command(app, "scale")(change.scale)
kube_command(app, "delete")(change.delete)
