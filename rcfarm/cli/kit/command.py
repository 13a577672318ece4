"""Turn async functions into commands.

A command's body is `async def body(cli: …, …) -> int | None`: its other parameters are the command's own arguments
and options; it returns the exit code (None: 0). The four kinds of commands differ in `cli` and in their options:

- `command`: on the store (`Cli`);
- `kube_command`: on a Kubernetes cluster (`KubeCli`), found as kubectl finds it: `--kubeconfig`, `KUBECONFIG`,
  `~/.kube/config`, or the service account of the pod that the command runs in;
- `local_command`: on files, or on a daemon that an option of its own names (`LocalCli`);
- `any_command`: on whichever of these its arguments need, opened then (`AnyCli`).

What a command has opened is closed when its body ends. An error that a user, a store or the network can cause becomes
one line on standard error. Any other is a bug in rcfarm and keeps its traceback.
"""

from __future__ import annotations

import asyncio
import functools
import getpass
import inspect
import logging
import os
import re
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, get_type_hints

import structlog
import typer

from rcfarm.cli import CHANGED_SINCE_PLANNED, ERROR
from rcfarm.cli.kit.help import HelpfulCommand
from rcfarm.cli.kit.options import Context, read_file
from rcfarm.cli.kit.output import Format, ListFormat, Output
from rcfarm.operations.errors import BadInput, ChangedSincePlanned
from rcfarm.operations.fleet import ensure_meta, read_meta
from rcfarm.operations.nodes import Nodes
from rcfarm.operations.rcs import ReplicationControllers
from store.errors import RcfarmError
from store.kube.api.errors import Unauthorized
from store.kv.protocol import BadRecord, Store, Unavailable
from store.schema.audit import Actor
from store.schema.keys import Keys

if TYPE_CHECKING:
    from store.kube.client.client import KubeClient

MAX_CONNECTIONS = 16  # an operator's commands run beside a farm and an agent, and Consul counts them together

Body = Callable[..., Awaitable[int | None]]
Opened = Callable[[Output, dict[str, Any], dict[str, Any]], AbstractAsyncContextManager[Any]]

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
_STORE = {"store": (StoreOption, ""), "root": (RootOption, "rcfarm"), "token_file": (TokenFileOption, None)}


def _agent_file(flag: str, variable: str, text: str) -> tuple[Any, None]:
    option = typer.Option(flag, metavar="FILE", envvar=f"RCFARM_LISTENER_{variable}", help=text)
    return Annotated[Path | None, option], None


_AGENTS = {
    "agent_token_file": _agent_file(
        "--agent-token-file",
        "TOKEN_FILE",
        "File that holds the token of the agents; default: that of the agent on this machine.",
    ),
    "agent_ca": _agent_file("--agent-ca", "CA_FILE", "Authority of the agents' certificates."),
    "agent_cert": _agent_file("--agent-cert", "CERT_FILE", "Own certificate for the agents."),
    "agent_key": _agent_file("--agent-key", "KEY_FILE", "Key of that certificate."),
}

NamespaceOption = Annotated[
    str | None, typer.Option("--namespace", "-n", metavar="NAME", help="The namespace; default: the context's.")
]
KubeconfigOption = Annotated[
    str | None,
    typer.Option(
        "--kubeconfig", metavar="FILE", help="Credentials for the cluster; default: KUBECONFIG or ~/.kube/config."
    ),
]
_CLUSTER = {"namespace": (NamespaceOption, None), "kubeconfig": (KubeconfigOption, None), "context": (Context, None)}

# What an error is about: the object that it names, else the one of the command line; the field that it names
_OBJECT = re.compile(r"(?:there is no |no deleted )?((?:rc|node|task|quota|schedule|manifest|framework|job) [^\s:;,]+)")
_KINDS = ("rc", "node", "task", "quota", "schedule", "framework", "job")
_FIELD = re.compile(r"(?:\S+:\d+: )?(?:rc \S+[^:]*: )?([a-z_]+(?:\.[a-z_0-9]+)*): ")

_SHOW = typer.Option("--output", "-o", help="How to show the result.")
_OUTPUT = {"output": (Annotated[Format, _SHOW], Format.table)}
_LIST_OUTPUT = {"output": (Annotated[ListFormat, _SHOW], ListFormat.table)}


class StoreOptions(NamedTuple):
    """The options that name the store and the part of it that rcfarm uses."""

    store: str = ""
    root: str = "rcfarm"
    token_file: Path | None = None


class AgentOptions(NamedTuple):
    """The options of a command that calls agents: the files of its credentials."""

    token_file: Path | None = None
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None


@dataclass(slots=True)
class Cli:
    """The context of a command on the store. `keys` follow the layout in the store's `meta`; `actor` is for the audit
    log; `agents` is empty unless the command calls agents.

    `is_new`: there is no such embedded store yet. Until `prepare`, an empty one in memory takes its place, so that a
    command whose input is refused creates nothing.
    """

    out: Output
    options: StoreOptions
    store: Store
    is_new: bool
    agents: AgentOptions
    keys: Keys = field(init=False)
    actor: Actor = field(init=False)
    rcs: ReplicationControllers = field(init=False)
    nodes: Nodes = field(init=False)

    async def read_layout(self, *, reads_meta: bool = True) -> None:
        """Set the fields that depend on the store."""
        accessor_of = getattr(self.store, "token_accessor", None)  # only Consul's store has tokens with owners
        meta, accessor = await asyncio.gather(
            read_meta(self.store, Keys(self.options.root)) if reads_meta else asyncio.sleep(0),
            accessor_of() if accessor_of else asyncio.sleep(0, ""),
        )
        self.keys = Keys(self.options.root, meta.shards) if meta else Keys(self.options.root)
        self.actor = Actor(whoami(), os.getuid(), accessor)
        self.rcs = ReplicationControllers(self.store, self.keys, actor=self.actor)
        self.nodes = Nodes(self.store, self.keys, actor=self.actor)

    async def prepare(self) -> None:
        """Create the store if it is new, and write `meta`, which fixes the layout. Call this after all checks, before
        the first write."""
        if self.is_new:
            stand_in, self.store = self.store, open_store(self.options, create=True)
            self.is_new = False
            await stand_in.close()
            await self.read_layout()
        await ensure_meta(self.store, self.keys)


class KubeCli(NamedTuple):
    """The context of a command on a cluster. `namespace` is never ""."""

    api: KubeClient
    namespace: str
    out: Output


class LocalCli(NamedTuple):
    """The context of a command that opens nothing."""

    out: Output


class AnyCli(NamedTuple):
    """The context of a command that opens a store, a cluster, both or neither. Opening raises their errors."""

    out: Output
    store: Callable[[], AbstractAsyncContextManager[Cli]]
    cluster: Callable[[], AbstractAsyncContextManager[KubeCli]]


def command(
    group: typer.Typer,
    name: str,
    *,
    reads_meta: bool = True,
    creates_store: bool = False,
    calls_agents: bool = False,
    lists: bool = False,
    **settings: Any,
) -> Callable[[Body], Body]:
    """Register a body in a group of commands; `settings` are typer's for a command.

    With `lists`, the command shows named objects: `-o wide` shows more of them, and `-o name` only their names.
    With `reads_meta` false, `meta` is not read before the body runs, and its keys have the default layout. With
    `creates_store`, `Cli.prepare` creates an embedded store that does not exist; not so with `--dry-run`. With
    `calls_agents`, the command has the options of `Cli.agents`.
    """

    def opened(out: Output, shared: dict[str, Any], arguments: dict[str, Any]) -> AbstractAsyncContextManager[Cli]:
        may_create = creates_store and not arguments.get("dry_run")
        agents = AgentOptions(*(shared.pop(option) for option in _AGENTS)) if calls_agents else AgentOptions()
        return _on_store(out, StoreOptions(**shared), agents, reads_meta=reads_meta, may_create=may_create)

    common = {**_AGENTS, **_STORE} if calls_agents else _STORE
    return _registering(group, name, common, opened, lists=lists, **settings)


@asynccontextmanager
async def _on_store(
    out: Output,
    options: StoreOptions,
    agents: AgentOptions,
    *,
    reads_meta: bool = True,
    may_create: bool = False,
) -> AsyncIterator[Cli]:
    is_new = False
    try:
        store = open_store(options)
    except Unavailable:
        is_new = may_create and options.store.startswith("embedded:")
        if not is_new:
            raise
        store = open_store(options._replace(store="memory:"))
    cli = Cli(out, options, store, is_new, agents)
    try:
        await cli.read_layout(reads_meta=reads_meta)
        yield cli
    finally:
        await cli.store.close()


def kube_command(group: typer.Typer, name: str, **settings: Any) -> Callable[[Body], Body]:
    """Register a body in a group of commands; `settings` are typer's for a command."""

    return _registering(group, name, _CLUSTER, lambda out, shared, _: _on_cluster(out, shared), **settings)


@asynccontextmanager
async def _on_cluster(out: Output, shared: Mapping[str, Any]) -> AsyncIterator[KubeCli]:
    from store.kube.client.credentials import current_namespace, find_access

    kubeconfig, context = shared["kubeconfig"], shared["context"]
    source = find_access(kubeconfig, context=context)
    from store.kube.client.client import KubeClient  # 0.1 s, in vain where no cluster is configured
    from store.kube.client.transport import Credentials

    async with KubeClient(await Credentials.open(source), user_agent="rcfarm-cli") as api:
        yield KubeCli(api, shared["namespace"] or current_namespace(kubeconfig, context=context), out)


def local_command(group: typer.Typer, name: str) -> Callable[[Body], Body]:
    """Register a body in a group of commands."""
    return _registering(group, name, {}, lambda out, _, __: nullcontext(LocalCli(out)))


def any_command(group: typer.Typer, name: str) -> Callable[[Body], Body]:
    """Register a body in a group of commands."""

    def opened(out: Output, shared: dict[str, Any], _: dict[str, Any]) -> AbstractAsyncContextManager[AnyCli]:
        options = StoreOptions(**{option: shared[option] for option in _STORE})
        return nullcontext(
            AnyCli(out, lambda: _on_store(out, options, AgentOptions()), lambda: _on_cluster(out, shared))
        )

    return _registering(group, name, {**_STORE, **_CLUSTER}, opened)


def _registering(
    group: typer.Typer,
    name: str,
    common: Mapping[str, tuple[Any, Any]],
    opened: Opened,
    *,
    lists: bool = False,
    **settings: Any,
) -> Callable[[Body], Body]:
    """Return a decorator that registers a body as a command of a group.

    The command has the body's own parameters (without `cli`), the options of its kind (`common`: annotation and default
    by name), and `--output`. `opened` makes the body's context from the values of both. `settings` are typer's.
    """
    options = {**common, **(_LIST_OUTPUT if lists else _OUTPUT)}

    def register(body: Body) -> Body:
        @functools.wraps(body)
        def run(**arguments: Any) -> None:
            shared = {option: arguments.pop(option) for option in options}
            out = Output(shared.pop("output"))

            async def main() -> int | None:
                async with opened(out, shared, arguments) as cli:
                    return await body(cli, **arguments)

            if not structlog.is_configured():  # a command reports through its output; the modules' logs are for daemons
                structlog.configure(
                    wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
                    logger_factory=structlog.PrintLoggerFactory(sys.stderr),
                )
            raise typer.Exit(exit_code(out, main, arguments))

        hints = get_type_hints(body, include_extras=True)
        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters = [
            parameter.replace(annotation=hints[parameter.name], kind=keyword)
            for parameter in inspect.signature(body).parameters.values()
            if parameter.name != "cli"
        ]
        parameters += [
            inspect.Parameter(option, keyword, default=default, annotation=annotation)
            for option, (annotation, default) in options.items()
        ]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what typer should see
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        group.command(name, cls=OnceEach, **settings)(run)
        return body

    return register


class OnceEach(HelpfulCommand):
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


def exit_code(
    out: Output,
    main: Callable[[], Coroutine[Any, Any, int | None]],
    arguments: Mapping[str, Any] = MappingProxyType({}),
) -> int:
    """Run `main` and return the exit code. `arguments`: the command's own, for the object that an error is about."""
    try:
        return asyncio.run(main()) or 0
    except KeyboardInterrupt:
        out.error("interrupted", exit_code=130)
        return 130
    except RcfarmError as error:
        line, code = explain(error)
        named = _OBJECT.match(str(error))
        field = _FIELD.match(str(error)) if isinstance(error, BadInput) else None
        values = {kind: arguments.get(kind) for kind in _KINDS}
        names = {kind: value if isinstance(value, list) else [value] for kind, value in values.items() if value}
        given = [f"{kind} {each[0]}" for kind, each in names.items() if len(each) == 1]
        about = named[1] if named else given[0] if given else ""
        out.error(line, about=about, field=field[1] if field else "", exit_code=code)
        return code


def explain(error: RcfarmError) -> tuple[str, int]:
    """Return the line that is shown for an error, and the exit code."""
    if isinstance(error, BadRecord):
        return f"{error}; `rcfarm doctor` lists every record that can't be read", ERROR
    if isinstance(error, Unauthorized):
        why = "the API server does not accept these credentials: log in again, or choose another --context"
        return f"{error}; {why}", ERROR
    return str(error), CHANGED_SINCE_PLANNED if isinstance(error, ChangedSincePlanned) else ERROR


def open_store(options: StoreOptions, *, create: bool = False) -> Store:
    """Open the store that the options name. A token file takes precedence over the environment's token.

    `create`: create an embedded store that does not exist.
    Raises `UsageProblem` for a token file that can't be read, and the errors of `store.open`.
    """
    from store import open as opening  # its HTTP client takes as long to import as all the rest: not for help

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
