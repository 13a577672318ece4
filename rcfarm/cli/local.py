"""Turning an async function into a command that needs neither a store nor a cluster.

As in `rcfarm.cli.command`: a body is `async def body(cli: LocalCli, …) -> int | None`, its other parameters are the
command's own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import typer

from rcfarm.cli.command import Body, OutputOption, exit_code, log_errors_only, with_options
from rcfarm.cli.output import Format, Output


@dataclass(frozen=True, slots=True)
class LocalCli:
    """What a command works with."""

    out: Output


def local_command(group: typer.Typer, name: str, **settings: Any) -> Callable[[Body], Body]:
    """Register a body in a group of commands; `settings` are typer's for a command."""

    def register(body: Body) -> Body:
        group.command(name, **settings)(_as_function(body))
        return body

    return register


def _as_function(body: Body) -> Callable[..., None]:
    """A plain function with the body's own parameters, without `cli`, and `--output`."""

    @functools.wraps(body)
    def run(output: Format, **arguments: Any) -> None:
        log_errors_only()
        out = Output(output)

        async def main() -> int | None:
            return await body(LocalCli(out), **arguments)

        raise typer.Exit(exit_code(out, main))

    return with_options(run, body, {"output": (OutputOption, Format.table)})
