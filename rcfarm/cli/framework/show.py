"""Show Frameworks: `rcfarm framework list | get | status`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from controllers.framework.api.types import FRAMEWORKS, NEVER_RETRIED, Framework, State
from controllers.framework.api.wire import BadFramework, decode_framework
from rcfarm.cli.kit.command import KubeCli
from rcfarm.cli.kit.completion import complete_framework
from rcfarm.cli.kit.jobs import AllNamespaces, read_all, show_manifest
from rcfarm.cli.kit.output import ago, count, state
from rcfarm.operations.errors import BadInput
from rcfarm.reports.framework import FrameworkInfo, framework_info, framework_status_info
from store.kube.api.errors import NotFound
from store.kube.api.objects import Object, key_of, name_of, namespace_of
from store.kube.api.protocol import KubeApi

FrameworkName = Annotated[
    str, typer.Argument(metavar="FRAMEWORK", help="The Framework's name.", autocompletion=complete_framework)
]


async def list_(cli: KubeCli, all_namespaces: AllNamespaces = False) -> None:
    """List the Frameworks."""
    try:
        objects = await read_all(cli.api, FRAMEWORKS, "" if all_namespaces else cli.namespace)
    except NotFound:
        await _require_crd(cli.api)
        raise
    found = []
    for obj in objects:
        try:
            found.append(framework_info(decode_framework(obj)))
        except BadFramework as error:
            namespace, name = namespace_of(obj), name_of(obj)
            found.append(FrameworkInfo(namespace=namespace, name=name, state="unreadable", problems=[str(error)]))

    def render() -> None:
        if not found:
            where = "" if all_namespaces else f" in namespace {cli.namespace}"
            cli.out.note(f"no Frameworks{where}; create one with `kubectl apply -f FILE`")
            return
        columns = ("NAMESPACE", "FRAMEWORK", "STATE", "TASKS>", "RUNNING>", "DONE>", "ATTEMPT>", "STARTED", "OUTCOME")
        rows = [
            (
                each.namespace,
                each.name,
                state(each.state),
                str(each.tasks),
                str(each.running),
                str(each.completed),
                str(each.attempt),
                ago(each.started.isoformat()) if each.started else "-",
                outcome(each.code, each.phrase, each.problems[0] if each.problems else "-"),
            )
            for each in found
        ]
        first = 0 if all_namespaces else 1
        cli.out.table(columns[first:], [row[first:] for row in rows])

    cli.out.show(found, render)


async def _require_crd(api: KubeApi) -> None:
    """Raise `BadInput` if the cluster does not serve Frameworks."""
    if not await api.served(FRAMEWORKS):
        raise BadInput(
            "this cluster has no CRD for Frameworks: apply deploy/kubernetes/crd.yaml, or start `rcfarm jobs "
            "--kinds framework` with the right to create it; or choose another cluster with --context"
        )


def outcome(code: int | None, phrase: str, otherwise: str = "-") -> Text:
    """Return the outcome of an attempt, coloured."""
    if code is None:
        return Text(otherwise)
    style = "" if code in NEVER_RETRIED else "red" if code else "green"
    return Text(f"{phrase} ({code})", style=style)


async def get(cli: KubeCli, framework: FrameworkName) -> None:
    """Show a Framework's spec, as a file for `kubectl apply`."""
    show_manifest(cli, FRAMEWORKS, await read(cli, framework))


async def read(cli: KubeCli, name: str) -> Object:
    """Return the Framework. Raises `BadInput` if there is none."""
    try:
        return await cli.api.get(FRAMEWORKS, name, cli.namespace)
    except NotFound as error:
        await _require_crd(cli.api)
        raise BadInput(
            f"no framework {name} in namespace {cli.namespace}; `rcfarm framework list -A` shows them all"
        ) from error


async def decoded(cli: KubeCli, name: str) -> Framework:
    """Return the decoded Framework. Raises `BadInput` if it does not exist or can't be read."""
    return decoded_from(await read(cli, name))


def decoded_from(obj: Object) -> Framework:
    """Decode a Framework. Raises `BadInput`, which names it."""
    try:
        return decode_framework(obj)
    except BadFramework as error:
        raise BadInput(f"framework {key_of(obj)}: {error}; correct it and apply it again") from error


def is_completed(framework: Framework) -> bool:
    """Return whether the Framework has ended for good."""
    return framework.status is not None and framework.status.state == State.COMPLETED


async def status(cli: KubeCli, framework: FrameworkName) -> None:
    """Show the status of a Framework and of each of its tasks."""
    found = framework_status_info(await decoded(cli, framework))

    def render() -> None:
        info = found.framework
        counts = f"  {info.tasks} desired, {info.running} running, {info.completed} completed"
        cli.out.line(Text.assemble(f"{info.namespace}/{info.name}  ", state(info.state), counts))
        began = f"started {ago(info.started.isoformat())}" if info.started else "no operator has taken it up"
        ended = f", completed {ago(info.completed_at.isoformat())}" if info.started and info.completed_at else ""
        cli.out.line(f"attempt {info.attempt}, {count(info.retries, 'retry', 'retries')}; {began}{ended}")
        if info.code is not None:
            cli.out.line(Text.assemble("outcome: ", outcome(info.code, info.phrase), f" {info.diagnostics}".rstrip()))
        for problem in info.problems:
            cli.out.line(Text.assemble(("problem: ", "red"), problem))
        if found.tasks:
            cli.out.line()
            cli.out.table(
                ("TASK", "STATE", "ATTEMPT>", "NODE", "ADDRESS", "OUTCOME"),
                [
                    (
                        f"{task.role}-{task.index}" + (" (leaving)" if task.leaving else ""),
                        state(task.state),
                        str(task.attempt),
                        task.node or "-",
                        task.address or "-",
                        outcome(task.code, task.phrase),
                    )
                    for task in found.tasks
                ],
            )

    cli.out.show(found, render)
