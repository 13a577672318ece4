"""`rcfarm hived`: the commands on HiveD's configuration and state, in the order in which help lists them."""

from __future__ import annotations

import typer

from rcfarm.cli import hived_explain, hived_file, hived_show, hived_simulate, hived_snapshot
from rcfarm.cli.local import local_command

app = typer.Typer(rich_markup_mode=None)

local_command(app, "validate")(hived_file.validate)
local_command(app, "show")(hived_show.show)
local_command(app, "explain")(hived_explain.explain)
local_command(app, "simulate")(hived_simulate.simulate)
local_command(app, "snapshot")(hived_snapshot.snapshot)
