"""`rcfarm schema`: the form of the files that operators write, for editors."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from rcfarm.cli.kit.command import LocalCli, local_command
from rcfarm.cli.kit.options import UsageProblem
from rcfarm.operations.file_schema import KINDS, json_schema

app = typer.Typer(rich_markup_mode=None)


async def schema(
    cli: LocalCli,
    kind: Annotated[str, typer.Argument(metavar="[rc|manifest]", help="The kind of file.")] = "rc",
) -> None:
    """Print the JSON schema of the file of an RC, or of a manifest.

    An editor with a YAML language server completes a file that begins with

      # yaml-language-server: $schema=rc.schema.json
    """
    if kind not in KINDS:
        raise UsageProblem(f"{kind!r} is not a kind of file; there are {' and '.join(KINDS)}")
    typer.echo(json.dumps(json_schema(kind), indent=2, ensure_ascii=False))


local_command(app, "schema")(schema)
