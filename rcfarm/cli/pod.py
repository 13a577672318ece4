"""`rcfarm pod`: the pods of the fleet, node by node; one of them stopped once; the pod that a process belongs to."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

import typer

from rcfarm.cli import ERROR, NOT_FULLY_PLACED
from rcfarm.cli.kit.command import Cli, command
from rcfarm.cli.kit.completion import complete_node, complete_pod, complete_rc
from rcfarm.cli.kit.json_views import ListedPod, pod_info
from rcfarm.cli.kit.options import DEFAULT_TIMEOUT, Detach, Timeout, UsageProblem, whole_number
from rcfarm.cli.kit.output import state
from rcfarm.cli.rc.follow import report_of, watched
from rcfarm.operations.pods import PodOfFleet, Pods
from store.schema.keys import PodKey
from store.schema.selectors import Selector

app = typer.Typer(rich_markup_mode=None)
MOST_PARENTS = 100  # of a process, that are looked at


async def list_(
    cli: Cli,
    node: Annotated[
        str, typer.Option("--node", metavar="NODE", help="Only of this node.", autocompletion=complete_node)
    ] = "",
    rc: Annotated[str, typer.Option("--rc", metavar="RC", help="Only of this RC.", autocompletion=complete_rc)] = "",
    selector: Annotated[
        str, typer.Option("--selector", "-l", metavar="SELECTOR", help="Only pods whose labels match.")
    ] = "",
) -> None:
    """List the pods of RCs and tasks, by node."""
    wanted = Selector.parse(selector)
    if node:
        await cli.nodes.get(node)  # raises for an unknown one
    if rc:
        await cli.rcs.snapshot(rc)
    found = [
        listed_pod(pod)
        for pod in await _pods(cli).all(node)
        if (not rc or pod.rc == rc) and (not selector or wanted.matches(pod.view.labels))
    ]

    def render() -> None:
        if not found:
            cli.out.note("no such pods" if node or rc or selector else "no pods; create an RC with `rcfarm rc apply`")
        rows = [
            (
                each.node,
                each.pod_id,
                each.rc or f"task {each.task}",
                state(each.state),
                state(each.health) if each.rc else "-",
                str(each.restarts),
                cli.out.brief("; ".join(each.details())) or "-",
            )
            for each in found
        ]
        cli.out.table(("NODE", "POD", "RC", "STATE", "HEALTH", "RESTARTS>", "DETAIL"), rows)

    cli.out.show(found, render, (f"{each.node}/{each.pod_id}" for each in found))


async def stop(
    cli: Cli,
    pod: Annotated[str, typer.Argument(metavar="NODE/POD", help="The pod.", autocompletion=complete_pod)],
    detach: Detach = False,
    timeout: Timeout = DEFAULT_TIMEOUT,
) -> int:
    """Stop the processes of a pod once. Its agent starts them again: the RC still wants the pod.

    It is done at once, whatever the RC's other pods do; `rcfarm rollout restart RC` is the careful way. To have a pod
    stay away, scale the RC, or drain the node.
    """
    node, slash, pod_id = pod.partition("/")
    if not (node and slash and pod_id):
        raise UsageProblem(f"{pod!r} is no pod; write NODE/POD, as in node-1/web; `rcfarm pod list` shows them")
    place = PodKey(node, pod_id)
    before = await _pods(cli).stop(place)
    if detach:
        cli.out.line(f"{pod}: stop requested")
        return 0
    former = {process.pid for process in before.launchables.values()} - {None}
    key, deadline = cli.keys.reality(*place), asyncio.get_running_loop().time() + timeout
    async with watched(cli.store, key) as tree:
        with cli.out.progress(f"{pod}: ") as say:
            while True:
                tree.event.clear()
                found = {entry.key: entry for entry in await tree.entries(deadline)}
                now = report_of(found[key]) if key in found else None
                pids = {process.pid for process in now.launchables.values()} if now else set()
                if now and now.state in ("running", "failed") and not former & pids:
                    break
                if asyncio.get_running_loop().time() >= deadline:
                    cli.out.error(f"pod {pod} is not running again after {timeout:g} seconds; see `rcfarm pod list`")
                    return NOT_FULLY_PLACED
                say(now.state if now else "not reported")
                await tree.changed(deadline)
    seen = next((each for each in await _pods(cli).all(place.node) if each.place == place), None)
    if seen is None:
        cli.out.error(f"pod {pod} is gone: its RC does not want it there any more")
        return NOT_FULLY_PLACED
    info = listed_pod(seen)
    programs = ", ".join(f"{name} as process {process.pid}" for name, process in info.launchables.items())
    cli.out.show(info, lambda: cli.out.line(f"pod {pod} was stopped and runs again: {programs}"))
    return 0 if info.state == "running" else NOT_FULLY_PLACED


async def where(
    cli: Cli,
    of: Annotated[
        list[str], typer.Argument(metavar="[NODE] PID", help="A process of this machine, or of a node's pods.")
    ],
) -> int:
    """Show which pod a process belongs to.

    A process of this machine is looked up by its environment, which a pod's processes inherit, and by its parents and
    session. A process of another machine, with NODE, is found if the agent started it itself.
    """
    if not 1 <= len(of) <= 2:
        raise UsageProblem("write `rcfarm pod where PID`, or `rcfarm pod where NODE PID`")
    pid = whole_number(of[-1])
    pods = _pods(cli)
    if len(of) == 2:
        await cli.nodes.get(of[0])
        found = await pods.with_pid(pid, [of[0]])
        where_ = f"of a pod on {of[0]}, as its agent last reported"
    else:
        variables = _environment(pid)
        if variables is None:
            raise UsageProblem(f"no process {pid} on this machine; for another one: `rcfarm pod where NODE {pid}`")
        found = await _of_this_machine(pods, pid, variables)
        where_ = "of a pod"
    if found is None:
        cli.out.error(f"process {pid} is none {where_}")
        return ERROR
    info = listed_pod(found)
    belongs = f"rc {info.rc}" if info.rc else f"task {info.task}"
    names = [name for name, process in info.launchables.items() if process.pid == pid]
    what = f"{names[0]} of pod" if names else "in pod"
    sentence = f"process {pid} is {what} {info.node}/{info.pod_id}, {belongs}: {info.state}, {info.health}"
    cli.out.show(info, lambda: cli.out.line(sentence))
    return 0


async def _of_this_machine(pods: Pods, pid: int, variables: Mapping[str, str]) -> PodOfFleet | None:
    if (node := variables.get("RCFARM_NODE")) and (pod_id := variables.get("RCFARM_POD_ID")):
        return next((each for each in await pods.all(node) if each.place == PodKey(node, pod_id)), None)
    host = socket.gethostname()
    here = [node for node, alive in (await pods.agents()).items() if alive.agent.rpartition(":")[0] == host]
    for relative in _relatives(pid):
        if found := await pods.with_pid(relative, here):
            return found
    return None


def _environment(pid: int) -> dict[str, str] | None:
    """Return the variables that the process was started with, {} if this user may not read them; None if there is no
    such process."""
    folder = Path(f"/proc/{pid}")
    if pid <= 0 or not folder.is_dir():
        return None
    try:
        raw = (folder / "environ").read_bytes()
    except OSError:
        return {}
    pairs = (item.decode(errors="replace").partition("=") for item in raw.split(b"\0"))
    return {name: value for name, _, value in pairs}


def _relatives(pid: int) -> Iterator[int]:
    """Yield the process, the leaders of its group and session, and its parents with theirs: each once."""
    seen = {0, 1}
    for _ in range(MOST_PARENTS):
        for get in (int, os.getpgid, os.getsid):
            try:
                relative = get(pid)
            except OSError:
                continue
            if relative not in seen:
                seen.add(relative)
                yield relative
        try:
            stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        except OSError:
            return
        pid = int(stat.rpartition(")")[2].split()[1])
        if pid in (0, 1):
            return


def listed_pod(pod: PodOfFleet) -> ListedPod:
    """Return the pod as shown in JSON."""
    info = pod_info(pod.view)
    fields = {field: getattr(info, field) for field in info.__struct_fields__}
    return ListedPod(**fields, pod_id=pod.place.pod_id, rc=pod.rc, task=pod.task, labels=pod.view.labels)


def _pods(cli: Cli) -> Pods:
    return Pods(cli.store, cli.keys, actor=cli.actor)


command(app, "list", lists=True)(list_)
command(app, "stop")(stop)
command(app, "where")(where)
