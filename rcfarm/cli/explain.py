"""`rcfarm explain NAME`: why something is as it is, whatever it is.

A name may follow its kind, as in `rc/web`, `task/nightly-1`, `node/n1`, `pod/n1/web`, `framework/default/train`,
`gpu/default/train-worker-0`. Without one it is looked for among all kinds but pods, at the same time. Each kind has one
server: the store, the Kubernetes API, HiveD's extender. One that is not configured or does not answer stops no other;
it is named. Every kind is shown in the same way: its state, the reasons, and then what only this kind has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
import typer
from rich.text import Text

from rcfarm.cli.hived.source import DEFAULT_EXTENDER, Extender, SnapshotFile, load_snapshot
from rcfarm.cli.kit.command import AnyCli, Cli, any_command
from rcfarm.cli.kit.jobs import LeaseOption, grouped
from rcfarm.cli.kit.json_views import PodInfo, pod_info
from rcfarm.cli.kit.options import UsageProblem
from rcfarm.cli.kit.output import count, state
from rcfarm.cli.kit.reasons import print_reasons
from rcfarm.cli.rc.show import explanation as rc_explanation
from rcfarm.cli.rc.show import print_last_words
from rcfarm.operations.fleet import listed
from rcfarm.operations.nodes import NodeError
from rcfarm.operations.rc_snapshot import PodView
from rcfarm.operations.reasons import ReasonInfo, reason_info, reasons_of_node
from store.errors import RcfarmError
from store.kube.api.errors import NoConfig, NotFound
from store.kv.protocol import BadRecord
from store.schema.keys import is_dns_label, is_node_name
from store.schema.records import NO_SPACE, Health, Intent, Reality, Reason, decode

app = typer.Typer(rich_markup_mode=None)

PATIENCE = 10.0  # seconds for which one server may take to answer a search

R = TypeVar("R", bound=msgspec.Struct)

_SENT_ELSEWHERE = {"job": "rcfarm job explain", "pytorchjob": "rcfarm job explain", "tfjob": "rcfarm job explain"}
_STORE_KINDS = ("rc", "task", "node")


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """Why something is as it is. `kind`: rc, task, node, pod, framework or gpu. `name`: without its kind. `state`: in
    one word. `summary`: the state in a sentence. `reasons`: empty if all is as it should be.

    `details`: what only this kind has, as `rc explain`, `task explain`, `framework explain` or `hived explain` print
    it; of a node and a pod, see NodeDetails and PodOnNode.
    """

    kind: str
    name: str
    state: str
    summary: str
    reasons: list[ReasonInfo]
    details: Any = None


class PodOnNode(msgspec.Struct, frozen=True, kw_only=True):
    """One pod of a node. `belongs_to`: its RC or task, in words; `detail`: what its agent says beyond its states."""

    pod_id: str
    belongs_to: str
    pod: PodInfo
    detail: str


class NodeDetails(msgspec.Struct, frozen=True, kw_only=True):
    """The pods that are ordered for a node, or that its agent still reports."""

    pods: list[PodOnNode]


class Found(NamedTuple):
    """What explains something, and what prints its details for people."""

    explanation: Explanation
    render_details: Callable[[], None]


async def explain(
    cli: AnyCli,
    name: Annotated[
        str,
        typer.Argument(
            metavar="[KIND/]NAME",
            help="rc/RC, task/ID, node/NODE, pod/NODE/POD, framework/[NAMESPACE/]NAME, gpu/[NAMESPACE/]POD, or a name.",
        ),
    ],
    extender: Extender = DEFAULT_EXTENDER,
    snapshot: SnapshotFile = None,
    lease: LeaseOption = "rcfarm-jobs",
) -> None:
    """Explain why something is as it is: an RC, a task, a node, a pod, a Framework or a pod of HiveD. Shows its state,
    each reason with its code, since when, when it is looked at again, and what to do."""

    async def in_store(find: Callable[[Cli, str], Awaitable[Found]], rest: str) -> Found:
        async with cli.store() as opened:
            return await find(opened, rest)

    finders: dict[str, Callable[[str], Awaitable[Found]]] = {
        "rc": lambda rest: in_store(_rc, rest),
        "task": lambda rest: in_store(_task, rest),
        "node": lambda rest: in_store(_node, rest),
        "pod": lambda rest: in_store(_pod, rest),
        "framework": lambda rest: _framework(cli, rest, lease),
        "gpu": lambda rest: _gpu(cli, rest, extender, snapshot),
    }
    kind, separator, rest = name.partition("/")
    if not (rest if separator else name):
        raise UsageProblem(f"{name!r} names nothing; give a name, or KIND/NAME as in node/n1")
    if not separator:
        kind, _, rest = (await _search(cli, name, extender, snapshot)).partition("/")
    elif kind in _SENT_ELSEWHERE:
        raise UsageProblem(f"{name} is a training job: `{_SENT_ELSEWHERE[kind]} {rest}` explains it")
    elif kind not in finders:
        known = ", ".join([*finders, *_SENT_ELSEWHERE])
        raise UsageProblem(f"{name}: {kind!r} is no kind that can be explained; those are {known}")
    found, details = await finders[kind](rest)

    def render() -> None:
        cli.out.line(Text.assemble(f"{found.kind} {found.name} is ", state(found.state), f": {found.summary}"))
        print_reasons(cli.out, found.reasons)
        if not found.reasons:
            cli.out.line("  no known problem")
        details()

    cli.out.show(found, render)


async def _search(cli: AnyCli, name: str, extender: str, snapshot: Path | None) -> str:
    """Return the only thing of this name, with its kind. Raises `UsageProblem` if there is none, or several."""

    async def in_store() -> list[str]:
        async with cli.store() as opened:
            store, keys, found = opened.store, opened.keys, []
            if is_dns_label(name):
                found += [f"rc/{name}"] if await store.keys(keys.rc(name)) else []
                found += [f"task/{name}"] if await store.keys(keys.task(name)) else []
            if is_node_name(name) and await store.keys(keys.node(name)):
                found.append(f"node/{name}")
            return found

    async def in_cluster() -> list[str]:
        async with cli.cluster() as opened:
            from controllers.framework.api.types import FRAMEWORKS  # in vain where there is no cluster

            try:
                await opened.api.get(FRAMEWORKS, name, opened.namespace)
            except NotFound:
                return []
            return [f"framework/{opened.namespace}/{name}"]

    async def in_extender() -> list[str]:
        saved = await load_snapshot(extender, snapshot)
        from rcfarm.cli.hived.state import pods_named  # 30 ms, in vain where there is no extender

        return [f"gpu/{key}" for key in pods_named(saved, name)]

    places: dict[str, Callable[[], Awaitable[list[str]]]] = {
        ", ".join(_STORE_KINDS): in_store,
        "framework": in_cluster,
        "gpu": in_extender,
    }
    answers = await asyncio.gather(*(_asked(search) for search in places.values()))
    found = [each for answer in answers if isinstance(answer, list) for each in answer]
    away = {kinds: str(answer) for kinds, answer in zip(places, answers, strict=True) if isinstance(answer, Exception)}
    silent = [  # nothing names the server, so that it is most likely not used here
        kinds
        for kinds, answer in zip(places, answers, strict=True)
        if isinstance(answer, NoConfig) or (isinstance(answer, UsageProblem) and extender == DEFAULT_EXTENDER)
    ]
    if len(found) == 1:
        if silent:
            cli.out.note(f"not searched, because not configured: {', '.join(silent)}")
        for kinds, problem in away.items():
            if kinds not in silent:
                cli.out.note(f"not searched: {kinds}: {problem}")
        return found[0]
    if found:
        raise UsageProblem(
            f"{name} may be {' or '.join(found)}: name one with its kind, as in `rcfarm explain {found[0]}`"
        )
    searched = [kinds for kinds in places if kinds not in away]
    text = f"there is no {' or '.join(', '.join(searched).rsplit(', ', 1))} named {name!r}" if searched else f"{name!r}"
    text += "".join(f"; {kinds} could not be searched: {away[kinds]}" for kinds in away if kinds not in silent)
    text += f"; not searched, because not configured: {', '.join(silent)}" if silent else ""
    raise UsageProblem(f"{text}; a pod of a node is named like pod/n1/web")


async def _asked(search: Callable[[], Awaitable[list[str]]]) -> list[str] | Exception:
    """Return what a search has found, or why it could not be made."""
    try:
        async with asyncio.timeout(PATIENCE):
            return await search()
    except TimeoutError:
        return TimeoutError(f"no answer within {PATIENCE:g} s")
    except RcfarmError as error:
        return error


async def _rc(cli: Cli, name: str) -> Found:
    found = await rc_explanation(cli, name)
    explanation = Explanation(
        kind="rc",
        name=name,
        state=found.rc.state,
        summary=found.rc.counts,
        reasons=[reason_info(reason, RC=name) for reason in found.why],
        details=found,
    )
    return Found(explanation, lambda: found.render_places(cli.out))


async def _task(cli: Cli, name: str) -> Found:
    from rcfarm.cli.task.show import explanation as explanation_of  # 30 ms, which only tasks need
    from rcfarm.cli.task.show import facts

    found = await explanation_of(cli, name)
    explanation = Explanation(
        kind="task",
        name=name,
        state=found.task.state,
        summary=facts(found.task),
        reasons=[reason_info(reason, ID=name) for reason in found.why],
        details=found,
    )
    return Found(explanation, lambda: found.render_waits(cli.out))


async def _node(cli: Cli, name: str) -> Found:
    try:
        view = await cli.nodes.get(name)
    except BadRecord as error:
        reason = reason_info(Reason("unreadable", str(error), (name,)))
        text = "its record can't be read, so it takes no new pods"
        return Found(
            Explanation(kind="node", name=name, state="unreadable", summary=text, reasons=[reason]), lambda: None
        )
    pods = [await _on_node(cli, name, pod_id) for pod_id in await _pods_of(cli, name)]
    reports = {each.detail: each.pod for each in pods if NO_SPACE in f"{each.pod.reason} {each.pod.cause}"}
    full = next((_full_disk(name, pod) for pod in reports.values()), None)
    reasons = reasons_of_node(view, full)
    words = {"node_dead": "dead", "node_evicting": "evicting", "node_cordoned": "cordoned", "disk_full": "full"}
    takes = "no new pods" if view.alive is None or not view.spec.schedulable or view.spec.evict else "new pods"
    explanation = Explanation(
        kind="node",
        name=name,
        state=words[reasons[0].code] if reasons else "ready",
        summary=f"it takes {takes}, and has {count(len(pods), 'pod')}",
        reasons=[reason_info(reason) for reason in reasons],
        details=NodeDetails(pods=pods),
    )
    rows = ((each.pod_id, each.belongs_to, state(each.pod.state), state(each.pod.health), each.detail) for each in pods)
    return Found(explanation, lambda: cli.out.table(("POD", "OF", "STATE", "HEALTH", "DETAIL"), rows, indent=2))


def _full_disk(node: str, pod: PodInfo) -> Reason:
    cause = pod.cause if NO_SPACE in pod.cause else pod.reason
    return Reason("disk_full", cause, (node,), pod.health_since)


async def _pod(cli: Cli, place: str) -> Found:
    node, _, pod_id = place.partition("/")
    if not node or not pod_id:
        raise UsageProblem(f"pod/{place}: a pod is named by its node and its id, as in pod/n1/web")
    if pod_id not in (known := await _pods_of(cli, node)):
        await cli.nodes.get(node)  # raises if there is none
        raise NodeError(f"node {node} has no pod {pod_id}; it has {listed(known) or 'none'}")
    found = await _on_node(cli, node, pod_id)
    pod = found.pod  # its reasons have the codes that its RC has for it
    code = pod.condition if pod.condition in ("blocked", "crashing", "failed", "restarted") else ""
    if not code and pod.state != "completed" and pod.health != "passing":
        code = "starting" if pod.health == "unknown" else "unhealthy"
    text = "; ".join(pod.details()) or f"its health is {pod.health}"
    reasons = [Reason(code, text, (node,), pod.health_since)] if code else []
    if NO_SPACE in f"{pod.reason} {pod.cause}":
        reasons = [_full_disk(node, pod)]
    explanation = Explanation(
        kind="pod",
        name=place,
        state=pod.state,
        summary=f"of {found.belongs_to}, its health is {pod.health}",
        reasons=[reason_info(reason) for reason in reasons],
        details=found,
    )

    def render() -> None:
        for process, each in sorted(pod.launchables.items()):
            restarts = f", {count(each.restarts, 'restart')}" if each.restarts else ""
            cli.out.hanging("  ", f"{process}: {each.state}{restarts}{f'; {each.reason}' if each.reason else ''}")
        if used := pod.used():
            cli.out.line(f"  used: {used}")
        print_last_words(cli.out, [pod])

    return Found(explanation, render)


async def _framework(cli: AnyCli, name: str, lease: str) -> Found:
    namespace, _, short = name.rpartition("/")
    async with cli.cluster() as opened:
        from rcfarm.cli.framework.explain import (
            explanation as explanation_of,
        )  # 50 ms, in vain where there is no cluster

        if namespace:
            opened = opened._replace(namespace=namespace)
        info, reasons = await explanation_of(opened, short, lease)
    explanation = Explanation(
        kind="framework",
        name=f"{info.namespace}/{info.name}",
        state=info.state,
        summary=f"attempt {info.attempt}; {count(info.tasks, 'task')}, {info.running} running, {info.completed} ended",
        reasons=[
            reason_info(
                Reason(each.code, each.reason, since=each.since, until=each.until),
                "" if subject == "framework" else subject,
                NAME=f"{info.name} -n {info.namespace}",
            )
            for subject, each in grouped(reasons)
        ],
        details=reasons,
    )
    return Found(explanation, lambda: None)


async def _gpu(cli: AnyCli, name: str, extender: str, snapshot: Path | None) -> Found:
    from rcfarm.cli.hived import state as hived  # 30 ms, which only these pods need
    from scheduler.hived.inspection.explain import explain as why_it_waits
    from scheduler.hived.inspection.explain import restored

    key = name if "/" in name else f"default/{name}"
    saved = await load_snapshot(extender, snapshot)
    waiting, found = None, hived.placed_pod(saved, key)
    if found is None:
        waiting = hived.find_waiting(saved, key)
        found = why_it_waits(restored(saved), waiting.pod)
    explanation = Explanation(
        kind="gpu",
        name=key,
        state=found.verdict if found.verdict in ("placed", "refused") else "waiting",
        summary=found.summary,
        reasons=[reason_info(Reason(found.code, found.summary), POD=key)] if found.code else [],
        details=found,
    )

    def render() -> None:
        hived.print_findings(cli.out, found)
        if waiting is not None and waiting.reason:
            cli.out.line(hived.last_answer(waiting))

    return Found(explanation, render)


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


any_command(app, "explain")(explain)
