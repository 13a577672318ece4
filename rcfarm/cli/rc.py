"""`rcfarm rc`: the commands on replication controllers, in the order in which help lists them."""

from __future__ import annotations

import typer

from rcfarm.cli import rc_change, rc_read
from rcfarm.cli.command import command

app = typer.Typer(rich_markup_mode=None)

command(app, "apply")(rc_change.apply)
command(app, "create")(rc_change.create)
command(app, "list")(rc_read.list_)
command(app, "get")(rc_read.get)
command(app, "status")(rc_read.status)
command(app, "explain")(rc_read.explain)
command(app, "history")(rc_read.history)
command(app, "owner")(rc_read.owner)
# A negative number is to reach the check that explains it, and not to be taken for an option.
command(app, "scale", context_settings={"ignore_unknown_options": True})(rc_change.scale)
command(app, "enable")(rc_change.enable)
command(app, "disable")(rc_change.disable)
command(app, "delete")(rc_change.delete)
