"""`rcfarm explain NAME`: why something is as it is, whatever it is.

A name may follow its kind, as in `rc/web`, `task/nightly-1`, `node/n1`, `pod/n1/web`; without one it is looked for
among RCs, tasks and nodes, in this order. What runs on Kubernetes is explained by the groups of commands that know it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar

import msgspec
import typer

from rcfarm.cli.kit.command import Cli, command
from rcfarm.cli.kit.json_views import PodInfo, pod_info
from rcfarm.cli.kit.options import UsageProblem
from rcfarm.cli.kit.output import count, state
from rcfarm.cli.rc import show as rc_show
from rcfarm.cli.task import show as task_show
from rcfarm.operations.errors import NoSuchRC
from rcfarm.operations.fleet import listed
from rcfarm.operations.nodes import NodeError
from rcfarm.operations.rc_snapshot import PodView
from scheduler.label import obstacle
from store.kv.protocol import BadRecord
from store.schema.keys import is_dns_label
from store.schema.records import Health, Intent, Reality, decode
from store.schema.selectors import Selector

app = typer.Typer(rich_markup_mode=None)

R = TypeVar("R", bound=msgspec.Struct)

_ON_KUBERNETES = {
    "framework": "rcfarm framework explain",
    "job": "rcfarm job explain",
    "pytorchjob": "rcfarm job explain",
    "tfjob": "rcfarm job explain",
    "hived": "rcfarm hived explain",
}


class PodOnNode(msgspec.Struct, frozen=True, kw_only=True):
    """One pod of a node. `belongs_to`: its RC or task, in words; `detail`: what its agent says beyond its states."""

    pod_id: str
    belongs_to: str
    pod: PodInfo
    detail: str


class NodeExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """Why a node takes no new pods (`obstacle`, "" when it does), and its pods."""

    node: str
    obstacle: str
    pods: list[PodOnNode]


async def explain(
    cli: Cli,
    name: Annotated[str, typer.Argument(metavar="[KIND/]NAME", help="An RC, a task, a node, or pod/NODE/POD.")],
) -> None:
    """Explain why something is as it is: an RC, a task, a node or a pod."""
    kind, separator, rest = name.partition("/")
    if separator and kind in _ON_KUBERNETES:
        raise UsageProblem(f"{name} runs on Kubernetes: `{_ON_KUBERNETES[kind]} {rest}` explains it")
    kinds: dict[str, Callable[[Cli, str], Awaitable[None]]] = {
        "rc": rc_show.explain,
        "task": task_show.explain,
        "node": _node,
        "pod": _pod,
    }
    if separator:
        if kind not in kinds:
            known = ", ".join([*kinds, *_ON_KUBERNETES])
            raise UsageProblem(f"{name}: {kind!r} is no kind that can be explained; those are {known}")
        await kinds[kind](cli, rest)
        return
    keys = cli.keys
    if is_dns_label(name) and (await cli.store.keys(keys.rc(name))):
        await rc_show.explain(cli, name)
    elif is_dns_label(name) and (await cli.store.keys(keys.task(name))):
        await task_show.explain(cli, name)
    else:
        try:
            await _node(cli, name)
        except NodeError as error:
            raise NoSuchRC(
                f"there is no rc, task or node {name}; what runs on Kubernetes is explained by "
                "`rcfarm framework explain`, `rcfarm job explain` and `rcfarm hived explain`"
            ) from error


async def _node(cli: Cli, name: str) -> None:
    view = await cli.nodes.get(name)
    pods = [await _on_node(cli, name, pod_id) for pod_id in await _pods_of(cli, name)]
    found = NodeExplanation(node=name, obstacle=obstacle(view.state(), Selector.everything()), pods=pods)

    def render() -> None:
        cli.out.line(f"node {name} takes {f'no new pods: {found.obstacle}' if found.obstacle else 'new pods'}")
        rows = [
            (each.pod_id, each.belongs_to, state(each.pod.state), state(each.pod.health), each.detail) for each in pods
        ]
        cli.out.table(("POD", "OF", "STATE", "HEALTH", "DETAIL"), rows, indent=2)

    cli.out.show(found, render)


async def _pod(cli: Cli, place: str) -> None:
    node, _, pod_id = place.partition("/")
    if not node or not pod_id:
        raise UsageProblem(f"pod/{place}: a pod is named by its node and its id, as in pod/n1/web")
    if pod_id not in (known := await _pods_of(cli, node)):
        raise NodeError(f"node {node} has no pod {pod_id}; it has {listed(known) or 'none'}")
    found = await _on_node(cli, node, pod_id)

    def render() -> None:
        pod = found.pod
        cli.out.line(f"pod {pod_id} of {found.belongs_to} on {node} is {pod.state}, its health {pod.health}")
        if found.detail:
            cli.out.hanging("  ", found.detail)
        for process, each in sorted(pod.launchables.items()):
            restarts = f", {count(each.restarts, 'restart')}" if each.restarts else ""
            cli.out.hanging("  ", f"{process}: {each.state}{restarts}{f'; {each.reason}' if each.reason else ''}")

    cli.out.show(found, render)


async def _pods_of(cli: Cli, node: str) -> list[str]:
    """Return the ids of the pods that are ordered for a node, or that its agent still reports."""
    prefixes = (cli.keys.node_intents(node), cli.keys.node_realities(node), cli.keys.node_task_pods(node))
    return sorted({cli.keys.parse_pod(key).pod_id for prefix in prefixes for key in await cli.store.keys(prefix)})


async def _on_node(cli: Cli, node: str, pod_id: str) -> PodOnNode:
    keys = cli.keys
    intent = await _read(cli, Intent, keys.intent(node, pod_id))
    reality = await _read(cli, Reality, keys.reality(node, pod_id)) or await _read(
        cli, Reality, keys.task_pod(node, pod_id)
    )
    rc = intent.rc if intent else reality.rc if reality else ""
    health = await _read(cli, Health, keys.health(rc, node), held=True) if rc else None
    pod = pod_info(PodView(node, intent is not None, intent.labels if intent else {}, health, reality))
    belongs_to = intent.belongs_to if intent else f"rc {rc}" if rc else "-"
    return PodOnNode(pod_id=pod_id, belongs_to=belongs_to, pod=pod, detail="; ".join(pod.details()))


async def _read(cli: Cli, kind: type[R], key: str, *, held: bool = False) -> R | None:
    """Return a record; None if there is none, if it can't be read, or with `held` if nobody holds its key."""
    entry = await cli.store.get(key)
    if entry is None or (held and entry.session is None):
        return None
    try:
        return decode(kind, key, entry.value)
    except BadRecord:  # `rcfarm doctor` names it
        return None


command(app, "explain")(explain)
