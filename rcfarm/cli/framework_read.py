"""Looking at Frameworks: `rcfarm framework list | get | status | explain | history`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated

import typer
import yaml
from rich.text import Text

from controllers.framework.constants import FRAMEWORK_NAME, FRAMEWORKS
from controllers.framework.types import Framework
from controllers.framework.wire import BadFramework, decode_framework
from rcfarm import framework_view
from rcfarm.cli.kube import KubeCli
from rcfarm.cli.output import state
from rcfarm.cli.words import ago, count
from rcfarm.framework_view import Explained, FrameworkInfo, TaskInfo, framework_info, task_infos
from rcfarm.rc_errors import BadInput
from store.kube.api import KubeApi
from store.kube.errors import NotFound
from store.kube.objects import Object, key_of, name_of, uid_of
from store.kube.resources import EVENTS, PODS

PAGE = 500  # objects read at once
_SERVER_FIELDS = ("managedFields", "uid", "resourceVersion", "creationTimestamp", "generation", "selfLink")

FrameworkName = Annotated[str, typer.Argument(metavar="FRAMEWORK", help="The Framework's name.")]


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
        page = await api.list(FRAMEWORKS, namespace, limit=PAGE, continue_token=token)
        items += page.items
        token = page.continue_token
        if not token:
            return items


def _summary(obj: Object) -> FrameworkInfo:
    """One that can't be read is listed, too."""
    try:
        return framework_info(decode_framework(obj))
    except BadFramework as error:
        metadata = obj["metadata"]
        return FrameworkInfo(
            namespace=metadata.get("namespace", ""),
            name=metadata["name"],
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
    columns = ("NAMESPACE", "FRAMEWORK", "STATE", "TASKS>", "RUNNING>", "DONE>", "ATTEMPT>", "OUTCOME", "STARTED")
    rows = [
        (
            each.namespace,
            each.name,
            state(each.state),
            str(each.tasks),
            str(each.running),
            str(each.completed),
            str(each.attempt),
            _outcome(each.code, each.phrase) or (each.problems[0] if each.problems else "-"),
            ago(each.started.isoformat()) if each.started else "-",
        )
        for each in frameworks
    ]
    first = 0 if with_namespace else 1
    cli.out.table(columns[first:], [row[first:] for row in rows])


def _outcome(code: int | None, phrase: str) -> str:
    return "" if code is None else f"{phrase} ({code})"


async def get(cli: KubeCli, framework: FrameworkName) -> None:
    """Show what a Framework desires, as a file that `kubectl apply` takes."""
    obj = await read(cli, framework)
    if cli.out.as_json:
        cli.out.json(obj)
        return
    metadata = {key: value for key, value in obj["metadata"].items() if key not in _SERVER_FIELDS}
    wanted = {"apiVersion": FRAMEWORKS.api_version, "kind": FRAMEWORKS.kind, "metadata": metadata, "spec": obj["spec"]}
    typer.echo(yaml.safe_dump(wanted, sort_keys=False), nl=False)


async def read(cli: KubeCli, name: str) -> Object:
    """The Framework. Raises `BadInput` when there is none."""
    try:
        return await cli.api.get(FRAMEWORKS, name, cli.namespace)
    except NotFound as error:
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
    found = await decoded(cli, framework)
    info, tasks = framework_info(found), task_infos(found)
    cli.out.show({"framework": info, "tasks": tasks}, lambda: _status(cli, info, tasks))


def _status(cli: KubeCli, info: FrameworkInfo, tasks: Sequence[TaskInfo]) -> None:
    cli.out.line(
        Text.assemble(
            f"{info.namespace}/{info.name}  ",
            state(info.state),
            f"  {info.tasks} desired, {info.running} running, {info.completed} completed",
        )
    )
    started = ago(info.started.isoformat()) if info.started else "not yet"
    cli.out.line(f"attempt {info.attempt}, {count(info.retries, 'retry', 'retries')}; started {started}")
    if info.code is not None:
        cli.out.line(f"outcome: {_outcome(info.code, info.phrase)} {info.diagnostics}".rstrip())
    for problem in info.problems:
        cli.out.line(Text.assemble("  ", ("invalid: ", "red"), problem))
    if tasks:
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
                    _outcome(task.code, task.phrase) or "-",
                )
                for task in tasks
            ],
        )


async def explain(cli: KubeCli, framework: FrameworkName) -> None:
    """Explain why a Framework, and each task of it, is not further than it is."""
    found = await decoded(cli, framework)
    pods, warnings = await asyncio.gather(
        cli.api.list(PODS, cli.namespace, label_selector=f"{FRAMEWORK_NAME}={framework}"),
        cli.api.list(EVENTS, cli.namespace, field_selector="type=Warning"),
    )
    names = {framework, *(task.pod for task in task_infos(found))}
    about = [event for event in _in_order(warnings.items) if event.get("involvedObject", {}).get("name") in names]
    reasons = framework_view.explain(found, {name_of(pod): pod for pod in pods.items}, about)
    cli.out.show(reasons, lambda: _explained(cli, framework_info(found), reasons))


def _explained(cli: KubeCli, info: FrameworkInfo, reasons: Sequence[Explained]) -> None:
    cli.out.line(Text.assemble(f"{info.namespace}/{info.name}  ", state(info.state)))
    if not reasons:
        cli.out.line("  nothing holds it up")
        return
    cli.out.table(
        ("SUBJECT", "STATE", "WHY"), [(each.subject, state(each.state), each.reason) for each in reasons], indent=2
    )


async def history(cli: KubeCli, framework: FrameworkName) -> None:
    """Show what happened to a Framework, as its Events tell it. The API server keeps them for about an hour; the
    operator's log has every retry and deletion."""
    obj = await read(cli, framework)
    listed = await cli.api.list(EVENTS, cli.namespace, field_selector=f"involvedObject.uid={uid_of(obj)}")
    events = _in_order(listed.items)
    cli.out.show(events, lambda: _events(cli, events))


def _events(cli: KubeCli, events: Sequence[Object]) -> None:
    if not events:
        cli.out.note("no Events; the API server forgets them after about an hour")
        return
    rows = [
        (ago(_time(event)), event.get("type", ""), event.get("reason", ""), _times(event), event.get("message", ""))
        for event in events
    ]
    cli.out.table(("WHEN", "TYPE", "REASON", "TIMES>", "MESSAGE"), rows)


def _in_order(events: Sequence[Object]) -> list[Object]:
    return sorted(events, key=_time)


def _time(event: Object) -> str:
    return str(event.get("lastTimestamp") or event.get("eventTime") or event["metadata"].get("creationTimestamp") or "")


def _times(event: Object) -> str:
    return str(event.get("count") or 1)
