"""`rcfarm framework`: the commands on Frameworks, in the order in which help lists them."""

from __future__ import annotations

import typer

from rcfarm.cli import framework_change, framework_read, framework_why
from rcfarm.cli.kube import kube_command

app = typer.Typer(rich_markup_mode=None)

kube_command(app, "list")(framework_read.list_)
kube_command(app, "get")(framework_read.get)
kube_command(app, "status")(framework_read.status)
kube_command(app, "explain")(framework_why.explain)
kube_command(app, "history")(framework_why.history)
kube_command(app, "start")(framework_change.start)
kube_command(app, "rescale")(framework_change.rescale)
kube_command(app, "stop")(framework_change.stop)
