"""Turning an async function into a command on a Kubernetes cluster.

As in `rcfarm.cli.command`: a body is `async def body(cli: KubeCli, …) -> int | None`, its other parameters are the
command's own. The cluster is chosen as kubectl chooses it: `--kubeconfig`, `KUBECONFIG`, `~/.kube/config`, or the pod
that this runs in.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from rcfarm.cli.command import Body, exit_code, log_errors_only, with_options
from rcfarm.cli.output import Format, Output
from store.kube.client import KubeClient
from store.kube.config import current_namespace

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

    return with_options(run, body, _COMMON)


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

    return exit_code(out, connected)
