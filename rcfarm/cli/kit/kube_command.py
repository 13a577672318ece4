"""Turn async functions into commands on a Kubernetes cluster.

As in `rcfarm.cli.kit.command`, a body is `async def body(cli: KubeCli, …) -> int | None`; its other parameters are the
command's own. The cluster is found as kubectl finds it: `--kubeconfig`, `KUBECONFIG`, `~/.kube/config`, or the service
account of the pod that the command runs in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from rcfarm.cli.kit.command import Body, CommonOptions, exit_code, log_errors_only, registering
from rcfarm.cli.kit.options import Context
from rcfarm.cli.kit.output import Output
from store.kube.client.client import KubeClient
from store.kube.client.credentials import current_namespace

KubeconfigOption = Annotated[
    str | None,
    typer.Option(
        "--kubeconfig", metavar="FILE", help="Credentials for the cluster; default: KUBECONFIG or ~/.kube/config."
    ),
]
NamespaceOption = Annotated[
    str | None, typer.Option("--namespace", "-n", metavar="NAME", help="The namespace; default: the context's.")
]

_COMMON: CommonOptions = {
    "namespace": (NamespaceOption, None),
    "kubeconfig": (KubeconfigOption, None),
    "context": (Context, None),
}


@dataclass(frozen=True, slots=True)
class KubeCli:
    """The context of a command. `namespace` is never ""."""

    api: KubeClient
    namespace: str
    out: Output


def kube_command(group: typer.Typer, name: str) -> Callable[[Body], Body]:
    """Register a body in a group of commands."""

    def start(body: Body, shared: dict[str, Any], arguments: dict[str, Any]) -> int:
        log_errors_only()
        out, kubeconfig, context = Output(shared["output"]), shared["kubeconfig"], shared["context"]

        async def main() -> int | None:
            async with await KubeClient.connect(kubeconfig, context=context, user_agent="rcfarm-cli") as api:
                where = shared["namespace"] or current_namespace(kubeconfig, context=context)
                return await body(KubeCli(api, where, out), **arguments)

        return exit_code(out, main)

    return registering(group, name, _COMMON, start)
