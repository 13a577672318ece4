"""`rcfarm hived`: the commands on HiveD's configuration, in the order in which help lists them."""

from __future__ import annotations

import typer

from rcfarm.cli import hived_file, hived_show
from rcfarm.cli.local import local_command

app = typer.Typer(rich_markup_mode=None)

local_command(app, "validate")(hived_file.validate)
local_command(app, "show")(hived_show.show)
