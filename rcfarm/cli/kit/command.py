"""Turn async functions into commands.

A command's body is `async def body(cli: Cli, …) -> int | None`: its other parameters are the command's own arguments
and options; it returns the exit code (None: 0). `command` adds the common options, opens and closes the store, and
turns every error that a user can cause into one line on standard error.
"""

from __future__ import annotations

import asyncio
import functools
import getpass
import inspect
import logging
import os
import socket
import sys
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_type_hints

import structlog
import typer
from typer.core import TyperCommand

from rcfarm.cli.kit.errors import explain
from rcfarm.cli.kit.options import read_file
from rcfarm.cli.kit.output import Format, Output
from rcfarm.operations.fleet import ensure_meta, read_meta
from rcfarm.operations.nodes import Nodes
from rcfarm.operations.rcs import ReplicationControllers
from store import open as opening
from store.consul.store import ConsulStore
from store.kv.protocol import Store
from store.schema.audit import Actor
from store.schema.keys import Keys

MAX_CONNECTIONS = 16  # an operator's commands run beside a farm and an agent, and Consul counts them together

Body = Callable[..., Awaitable[int | None]]
CommonOptions = Mapping[str, tuple[Any, Any]]  # annotation and default by name
Start = Callable[[Body, dict[str, Any], dict[str, Any]], int]  # with the common options' values and the body's own

StoreOption = Annotated[
    str,
    typer.Option(
        "--store",
        envvar=["RCFARM_STORE", "RCFARM_STORE_URL"],
        metavar="URL",
        show_default=False,
        help="consul://HOST:PORT, consuls://… or embedded:DIR; else CONSUL_HTTP_ADDR, else the local `rcfarm dev`.",
    ),
]
RootOption = Annotated[
    str, typer.Option("--root", envvar="RCFARM_STORE_ROOT", metavar="PREFIX", help="First part of every key.")
]
TokenFileOption = Annotated[
    Path | None,
    typer.Option(
        "--token-file", metavar="FILE", help="File that holds the store's token; else CONSUL_HTTP_TOKEN[_FILE]."
    ),
]
OutputOption = Annotated[Format, typer.Option("--output", "-o", help="How to show the result.")]


class Options(NamedTuple):
    """The options that every command has."""

    store: str = ""
    root: str = "rcfarm"
    token_file: Path | None = None
    output: Format = Format.table


@dataclass(frozen=True, slots=True)
class Cli:
    """The context of a command. `keys` follow the layout in the store's `meta`; `actor` is for the audit log."""

    store: Store
    keys: Keys
    rcs: ReplicationControllers
    nodes: Nodes
    out: Output
    actor: Actor

    async def prepare(self) -> None:
        """Write `meta`, which fixes the layout, if the store is new. Call this before the first write."""
        await ensure_meta(self.store, self.keys)


def command(
    group: typer.Typer, name: str, *, reads_meta: bool = True, creates_store: bool = False, **settings: Any
) -> Callable[[Body], Body]:
    """Register a body in a group of commands; `settings` are typer's for a command.

    With `reads_meta` false, `meta` is not read before the body runs, and its keys have the default layout. With
    `creates_store`, an embedded store that does not exist is created, unless the command is run with `--dry-run`.
    """

    def start(body: Body, shared: dict[str, Any], arguments: dict[str, Any]) -> int:
        creates = creates_store and not arguments.get("dry_run")
        return run_body(body, Options(**shared), arguments, reads_meta, creates)

    common = {"store": (StoreOption, ""), "root": (RootOption, "rcfarm"), "token_file": (TokenFileOption, None)}
    return registering(group, name, common, start, **settings)


def registering(
    group: typer.Typer, name: str, common: CommonOptions, start: Start, **settings: Any
) -> Callable[[Body], Body]:
    """Return a decorator that registers a body as a command of a group. The command has the body's own parameters
    (without `cli`), the options of its kind (`common`), and `--output`. `start` runs it; `settings` are typer's."""
    options = {**common, "output": (OutputOption, Format.table)}

    def register(body: Body) -> Body:
        @functools.wraps(body)
        def run(**arguments: Any) -> None:
            shared = {option: arguments.pop(option) for option in options}
            raise typer.Exit(start(body, shared, arguments))

        group.command(name, cls=OnceEach, **settings)(_with_options(run, body, options))
        return body

    return register


class OnceEach(TyperCommand):
    """A command that rejects an option given twice, unless it may be repeated: silently dropping one of the two values
    could change the wrong object."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and not ctx.resilient_parsing:
            _, _, order = self.make_parser(ctx).parse_args(args=list(args))
            for option in order:
                takes_one = option.param_type_name == "option" and not (option.multiple or option.is_flag)  # type: ignore[attr-defined]
                if takes_one and order.count(option) > 1:
                    ctx.fail(f"{' / '.join(option.opts)} is given {order.count(option)} times; give it once")
        return super().parse_args(ctx, args)


def _with_options(run: Callable[..., None], body: Body, common: CommonOptions) -> Callable[..., None]:
    """Give `run` the signature that typer should see."""
    hints = get_type_hints(body, include_extras=True)
    own = [
        parameter.replace(annotation=hints[parameter.name], kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in inspect.signature(body).parameters.values()
        if parameter.name != "cli"
    ]
    shared = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, (annotation, default) in common.items()
    ]
    run.__signature__ = inspect.Signature([*own, *shared])  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in (*own, *shared)}
    return run


def run_body(
    body: Body, options: Options, arguments: dict[str, Any], reads_meta: bool = True, creates_store: bool = False
) -> int:
    """Run a body to its end. Return the exit code."""
    log_errors_only()
    out = Output(options.output)

    async def main() -> int | None:
        store = open_store(options, create=creates_store)
        try:
            meta, accessor = await asyncio.gather(
                read_meta(store, Keys(options.root)) if reads_meta else asyncio.sleep(0),
                store.token_accessor() if isinstance(store, ConsulStore) else asyncio.sleep(0, ""),
            )
            keys = Keys(options.root, meta.shards) if meta else Keys(options.root)
            actor = Actor(whoami(), os.getuid(), accessor)
            rcs, nodes = ReplicationControllers(store, keys, actor=actor), Nodes(store, keys, actor=actor)
            return await body(Cli(store, keys, rcs, nodes, out, actor), **arguments)
        finally:
            await store.close()

    return exit_code(out, main)


def exit_code(out: Output, main: Callable[[], Coroutine[Any, Any, int | None]]) -> int:
    """Run `main` and return the exit code. Every error that a user can cause is printed as one line."""
    try:
        return asyncio.run(main()) or 0
    except KeyboardInterrupt:
        out.error("interrupted")
        return 130
    except Exception as error:  # the one place that decides which errors are the user's; others are raised again
        explained = explain(error)
        if explained is None:
            raise
        out.error(explained.text)
        return explained.exit_code


def log_errors_only() -> None:
    """Log errors only: a command reports through its output; the modules' logs are for daemons."""
    if not structlog.is_configured():
        structlog.configure(
            wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
            logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        )


def open_store(options: Options, *, create: bool = False) -> Store:
    """Open the store that the options name. A token file takes precedence over the environment's token.

    `create`: create an embedded store that does not exist.
    Raises `UsageProblem` for a token file that can't be read, and the errors of `store.open`.
    """
    environ = dict(os.environ)
    if options.token_file is not None:
        read_file("--token-file", options.token_file)
        environ.pop("CONSUL_HTTP_TOKEN", None)
        environ["CONSUL_HTTP_TOKEN_FILE"] = str(options.token_file)
    return opening.open_store(options.store or None, environ=environ, max_connections=MAX_CONNECTIONS, create=create)


def whoami() -> str:
    """Return the user and machine for the audit log."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container without a user database
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


@dataclass(frozen=True, slots=True)
class LocalCli:
    """The context of a command."""

    out: Output


def local_command(group: typer.Typer, name: str) -> Callable[[Body], Body]:
    """Register a body in a group of commands."""

    def start(body: Body, shared: dict[str, Any], arguments: dict[str, Any]) -> int:
        log_errors_only()
        out = Output(shared["output"])

        async def main() -> int | None:
            return await body(LocalCli(out), **arguments)

        return exit_code(out, main)

    return registering(group, name, {}, start)
