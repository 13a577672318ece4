"""Looking at Frameworks: `rcfarm framework list | get | status`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
import yaml
from rich.text import Text

from controllers.framework.codes import NEVER_RETRIED
from controllers.framework.constants import FRAMEWORKS
from controllers.framework.types import Framework
from controllers.framework.wire import BadFramework, decode_framework
from rcfarm.cli.framework_completion import complete_framework
from rcfarm.cli.kube import KubeCli
from rcfarm.cli.output import state
from rcfarm.cli.words import ago, count
from rcfarm.framework_view import FrameworkInfo, FrameworkStatusInfo, framework_info, framework_status_info
from rcfarm.rc_errors import BadInput
from store.kube.api import KubeApi
from store.kube.errors import NotFound
from store.kube.objects import Object, key_of

PAGE = 500  # objects read at once
_SERVER_FIELDS = ("managedFields", "uid", "resourceVersion", "creationTimestamp", "generation", "selfLink")

FrameworkName = Annotated[
    str, typer.Argument(metavar="FRAMEWORK", help="The Framework's name.", autocompletion=complete_framework)
]


async def list_(
    cli: KubeCli,
    all_namespaces: Annotated[bool, typer.Option("--all-namespaces", "-A", help="Of every namespace.")] = False,
) -> None:
    """List the Frameworks."""
    found = [_summary(obj) for obj in await _list(cli.api, "" if all_namespaces else cli.namespace)]
    cli.out.show(found, lambda: _table(cli, found, with_namespace=all_namespaces))


async def _list(api: KubeApi, namespace: str) -> list[Object]:
    items: list[Object] = []
    token = ""
    while True:
        try:
            page = await api.list(FRAMEWORKS, namespace, limit=PAGE, continue_token=token)
        except NotFound:
            await _require_crd(api)
            raise
        items += page.items
        token = page.continue_token
        if not token:
            return items


async def _require_crd(api: KubeApi) -> None:
    """Raises `BadInput` when the cluster has no Frameworks at all."""
    if not await api.served(FRAMEWORKS):
        raise BadInput(
            "this cluster does not know Frameworks: apply deploy/kubernetes/crd.yaml, or start `rcfarm jobs` with the "
            "right to create the CRD; or choose another cluster with --context"
        )


def _summary(obj: Object) -> FrameworkInfo:
    """One that can't be read is listed, too."""
    try:
        return framework_info(decode_framework(obj))
    except BadFramework as error:
        metadata = obj["metadata"]
        return FrameworkInfo(
            namespace=metadata.get("namespace", ""),
            name=metadata.get("name", ""),
            execution_type="",
            state="unreadable",
            attempt=0,
            retries=0,
            tasks=0,
            running=0,
            completed=0,
            problems=[str(error)],
        )


def _table(cli: KubeCli, frameworks: Sequence[FrameworkInfo], *, with_namespace: bool) -> None:
    if not frameworks:
        where = "" if with_namespace else f" in namespace {cli.namespace}"
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
        for each in frameworks
    ]
    first = 0 if with_namespace else 1
    cli.out.table(columns[first:], [row[first:] for row in rows])


def outcome(code: int | None, phrase: str, otherwise: str = "-") -> Text:
    """How an attempt ended, in its colour."""
    if code is None:
        return Text(otherwise)
    style = "" if code in NEVER_RETRIED else "red" if code else "green"
    return Text(f"{phrase} ({code})", style=style)


async def get(cli: KubeCli, framework: FrameworkName) -> None:
    """Show a Framework's spec, as a file for `kubectl apply`."""
    obj = await read(cli, framework)
    if cli.out.as_json:
        cli.out.json(obj)
        return
    metadata = {key: value for key, value in obj["metadata"].items() if key not in _SERVER_FIELDS}
    wanted = {"apiVersion": FRAMEWORKS.api_version, "kind": FRAMEWORKS.kind, "metadata": metadata, "spec": obj["spec"]}
    cli.out.text(yaml.safe_dump(wanted, sort_keys=False))


async def read(cli: KubeCli, name: str) -> Object:
    """The Framework. Raises `BadInput` when there is none."""
    try:
        return await cli.api.get(FRAMEWORKS, name, cli.namespace)
    except NotFound as error:
        await _require_crd(cli.api)
        raise BadInput(
            f"no framework {name} in namespace {cli.namespace}; `rcfarm framework list -A` shows them all"
        ) from error


async def decoded(cli: KubeCli, name: str) -> Framework:
    """Raises `BadInput` for one that does not exist or can't be read."""
    obj = await read(cli, name)
    try:
        return decode_framework(obj)
    except BadFramework as error:
        raise BadInput(f"framework {key_of(obj)}: {error}; correct it and apply it again") from error


async def status(cli: KubeCli, framework: FrameworkName) -> None:
    """Show what became of a Framework and of each of its tasks."""
    found = framework_status_info(await decoded(cli, framework))
    cli.out.show(found, lambda: _status(cli, found))


def _status(cli: KubeCli, found: FrameworkStatusInfo) -> None:
    info = found.framework
    counts = f"  {info.tasks} desired, {info.running} running, {info.completed} completed"
    cli.out.line(Text.assemble(f"{info.namespace}/{info.name}  ", state(info.state), counts))
    cli.out.line(f"attempt {info.attempt}, {count(info.retries, 'retry', 'retries')}; {_times(info)}")
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


def _times(info: FrameworkInfo) -> str:
    if info.started is None:
        return "no operator has taken it up"
    began = f"started {ago(info.started.isoformat())}"
    return f"{began}, completed {ago(info.completed_at.isoformat())}" if info.completed_at else began
