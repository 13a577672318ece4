"""Arguments that several commands on tasks have."""

from __future__ import annotations

from typing import Annotated

import typer

from rcfarm.cli.kit.completion import complete_task

TaskId = Annotated[str, typer.Argument(metavar="TASK", help="The execution's id.", autocompletion=complete_task)]
