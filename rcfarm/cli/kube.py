"""Turning an async function into a command on a Kubernetes cluster.

As in `rcfarm.cli.command`: a body is `async def body(cli: KubeCli, …) -> int | None`, its other parameters are the
command's own. The cluster is chosen as kubectl chooses it: `--kubeconfig`, `KUBECONFIG`, `~/.kube/config`, or the pod
that this runs in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from rcfarm.cli.arguments import Context
from rcfarm.cli.command import Body, CommonOptions, exit_code, log_errors_only, registering
from rcfarm.cli.output import Output
from store.kube.client import KubeClient
from store.kube.config import current_namespace

KubeconfigOption = Annotated[
    str | None,
    typer.Option("--kubeconfig", metavar="FILE", help="How to reach the cluster; else KUBECONFIG or ~/.kube/config."),
]
NamespaceOption = Annotated[
    str | None, typer.Option("--namespace", "-n", metavar="NAME", help="The namespace; else the context's.")
]

_COMMON: CommonOptions = {
    "namespace": (NamespaceOption, None),
    "kubeconfig": (KubeconfigOption, None),
    "context": (Context, None),
}


@dataclass(frozen=True, slots=True)
class KubeCli:
    """What a command works with. `namespace`: never ""."""

    api: KubeClient
    namespace: str
    out: Output


def kube_command(group: typer.Typer, name: str) -> Callable[[Body], Body]:
    """Register a body in a group of commands."""
    return registering(group, name, _COMMON, _run)


def _run(body: Body, shared: dict[str, Any], arguments: dict[str, Any]) -> int:
    log_errors_only()
    out, kubeconfig, context = Output(shared["output"]), shared["kubeconfig"], shared["context"]

    async def connected() -> int | None:
        async with await KubeClient.connect(kubeconfig, context=context, user_agent="rcfarm-cli") as api:
            where = shared["namespace"] or current_namespace(kubeconfig, context=context)
            return await body(KubeCli(api, where, out), **arguments)

    return exit_code(out, connected)
