"""Turning an async function into a command on a Kubernetes cluster.

As in `rcfarm.cli.command`: a body is `async def body(cli: KubeCli, …) -> int | None`, its other parameters are the
command's own. The cluster is chosen as kubectl chooses it: `--kubeconfig`, `KUBECONFIG`, `~/.kube/config`, or the pod
that this runs in.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Any, get_type_hints

import typer

from rcfarm.cli.command import log_errors_only
from rcfarm.cli.errors import explain
from rcfarm.cli.output import Format, Output
from store.kube.client import KubeClient
from store.kube.config import current_namespace

Body = Callable[..., Awaitable[int | None]]

KubeconfigOption = Annotated[
    str | None,
    typer.Option("--kubeconfig", metavar="FILE", help="How to reach the cluster; else KUBECONFIG or ~/.kube/config."),
]
ContextOption = Annotated[
    str | None, typer.Option("--context", metavar="NAME", help="A context of the kubeconfig; else its current one.")
]
NamespaceOption = Annotated[
    str | None, typer.Option("--namespace", "-n", metavar="NAME", help="The namespace; else the context's.")
]
OutputOption = Annotated[Format, typer.Option("--output", "-o", help="How to show the result.")]

_COMMON: dict[str, tuple[Any, Any]] = {
    "namespace": (NamespaceOption, None),
    "kubeconfig": (KubeconfigOption, None),
    "context": (ContextOption, None),
    "output": (OutputOption, Format.table),
}


@dataclass(frozen=True, slots=True)
class KubeCli:
    """What a command works with. `namespace`: never ""."""

    api: KubeClient
    namespace: str
    out: Output


def kube_command(group: typer.Typer, name: str, **settings: Any) -> Callable[[Body], Body]:
    """Register a body in a group of commands; `settings` are typer's for a command."""

    def register(body: Body) -> Body:
        group.command(name, **settings)(_as_function(body))
        return body

    return register


def _as_function(body: Body) -> Callable[..., None]:
    """A plain function with the body's own parameters, without `cli`, and the common options."""

    @functools.wraps(body)
    def run(
        namespace: str | None, kubeconfig: str | None, context: str | None, output: Format, **arguments: Any
    ) -> None:
        raise typer.Exit(_run(body, namespace, kubeconfig, context, output, arguments))

    hints = get_type_hints(body, include_extras=True)
    own = [
        parameter.replace(annotation=hints[parameter.name], kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in inspect.signature(body).parameters.values()
        if parameter.name != "cli"
    ]
    shared = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, (annotation, default) in _COMMON.items()
    ]
    run.__signature__ = inspect.Signature([*own, *shared])  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in (*own, *shared)}
    return run


def _run(
    body: Body,
    namespace: str | None,
    kubeconfig: str | None,
    context: str | None,
    output: Format,
    arguments: dict[str, Any],
) -> int:
    log_errors_only()
    out = Output(output)

    async def connected() -> int | None:
        async with await KubeClient.connect(kubeconfig, context=context, user_agent="rcfarm-cli") as api:
            where = namespace or current_namespace(kubeconfig, context=context)
            return await body(KubeCli(api, where, out), **arguments)

    try:
        return asyncio.run(connected()) or 0
    except KeyboardInterrupt:
        out.error("interrupted")
        return 130
    except Exception as error:  # the one place that decides what is a user's error: anything else is raised again
        explained = explain(error)
        if explained is None:
            raise
        out.error(explained.text)
        return explained.exit_code
