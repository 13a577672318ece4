"""`rcfarm rc`: the commands on replication controllers, in the order in which help lists them."""

from __future__ import annotations

import typer

from rcfarm.cli.kit.command import command
from rcfarm.cli.rc import change, edit, history, lock, logs, restore, revise, show, status

app = typer.Typer(rich_markup_mode=None)

command(app, "apply", creates_store=True)(change.apply)
command(app, "create", creates_store=True)(change.create)
command(app, "edit")(edit.edit)
command(app, "list", lists=True)(show.list_)
command(app, "get", lists=True)(show.get)
command(app, "status", lists=True)(status.status)
command(app, "explain")(show.explain)
command(app, "history")(history.history)
command(app, "owner")(show.owner)
command(app, "logs", calls_agents=True)(logs.logs)
command(app, "exec", calls_agents=True)(logs.exec_)
# A negative number must reach the check that explains it instead of being parsed as an option.
command(app, "scale", context_settings={"ignore_unknown_options": True})(change.scale)
command(app, "enable")(change.enable)
command(app, "disable")(change.disable)
command(app, "restart")(revise.restart)
command(app, "rollback")(revise.undo)
command(app, "lock")(lock.lock)
command(app, "unlock")(lock.unlock)
command(app, "delete")(change.delete)
command(app, "restore", lists=True)(restore.restore)
