"""`rcfarm hived`: the commands on HiveD's configuration and state, in the order in which help lists them."""

from __future__ import annotations

import typer

from rcfarm.cli.hived import config, state
from rcfarm.cli.kit.command import local_command

app = typer.Typer(rich_markup_mode=None)

local_command(app, "validate")(config.validate)
local_command(app, "show")(config.show)
local_command(app, "explain")(state.explain)
local_command(app, "simulate")(state.simulate)
local_command(app, "snapshot")(state.snapshot)
