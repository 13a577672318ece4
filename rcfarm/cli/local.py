"""Turning an async function into a command that needs neither a store nor a cluster.

As in `rcfarm.cli.command`: a body is `async def body(cli: LocalCli, …) -> int | None`, its other parameters are the
command's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import typer

from rcfarm.cli.command import Body, exit_code, log_errors_only, registering
from rcfarm.cli.output import Output


@dataclass(frozen=True, slots=True)
class LocalCli:
    """What a command works with."""

    out: Output


def local_command(group: typer.Typer, name: str) -> Callable[[Body], Body]:
    """Register a body in a group of commands."""
    return registering(group, name, {}, _run)


def _run(body: Body, shared: dict[str, Any], arguments: dict[str, Any]) -> int:
    log_errors_only()
    out = Output(shared["output"])

    async def main() -> int | None:
        return await body(LocalCli(out), **arguments)

    return exit_code(out, main)
