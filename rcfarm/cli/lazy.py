"""Commands and groups whose module is imported only when they are asked for, so that help and completion are quick."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command, get_group


def lazy_group(module: str) -> type[TyperGroup]:
    """A group class that takes its commands from the `app` of `module`, imported at first use."""

    @cache
    def loaded() -> TyperGroup:
        return get_group(importlib.import_module(module).app)

    class LazyGroup(TyperGroup):
        def list_commands(self, ctx: Any) -> list[str]:
            return loaded().list_commands(ctx)

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            return loaded().get_command(ctx, cmd_name)

    return LazyGroup


def lazy_command(module: str) -> type[TyperCommand]:
    """A command class that is replaced by the one command of the `app` of `module` as soon as it is called."""

    class LazyCommand(TyperCommand):
        def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
            return get_command(importlib.import_module(module).app).make_context(info_name, args, parent, **extra)

    return LazyCommand


def add_group(app: typer.Typer, name: str, module: str, summary: str) -> None:
    """Add the group `name`, whose commands are in `module`."""
    group = typer.Typer(cls=lazy_group(module), no_args_is_help=True, rich_markup_mode=None)
    app.add_typer(group, name=name, help=summary)


def add_command(app: typer.Typer, name: str, module: str, summary: str) -> None:
    """Add the command `name`, which is the only one of `module`."""
    app.command(name, cls=lazy_command(module), help=summary)(_replaced)


def _replaced() -> None:
    raise AssertionError("a lazy command is replaced before it runs")
