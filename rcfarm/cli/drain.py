"""`rcfarm node drain | undrain`: take nodes out of service, and say what happens to their pods.

A drain marks its nodes, and the farms move the pods. `--wait` watches the intents of the nodes and the agents' reports,
and of the RCs with pods there, `WATCHED` at a time, what their owners say: nothing is asked in intervals.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from typing import Annotated, NamedTuple

import typer

from rcfarm.cli import NOT_FULLY_PLACED
from rcfarm.cli.kit.command import Cli
from rcfarm.cli.kit.completion import complete_node
from rcfarm.cli.kit.json_views import DrainInfo, node_info
from rcfarm.cli.kit.options import UsageProblem
from rcfarm.cli.kit.output import count
from rcfarm.cli.rc.follow import OBSTACLE_AFTER, Watched, watched
from rcfarm.operations import rc_snapshot
from rcfarm.operations.drains import STAYS, Departure, Kind, PodAt, departures, of_rcs, stuck
from rcfarm.operations.fleet import listed, read_brake
from rcfarm.operations.nodes import NodeView
from rcfarm.operations.rc_snapshot import RCSnapshot
from store.kv.protocol import BadRecord, Entry
from store.schema.records import Brake, Intent, decode
from store.schema.selectors import Selector

WATCHED = 6  # RCs whose owners' reports are watched at once: with the nodes', they share the command's connections
FEW = 3  # nodes that are watched one by one; of more, the whole fleet is
DRAIN_TIMEOUT = 600.0

NodeNames = Annotated[
    list[str] | None, typer.Argument(metavar="NODE...", help="The nodes' names.", autocompletion=complete_node)
]
OfLabels = Annotated[
    str, typer.Option("--selector", "-l", metavar="SELECTOR", help="The nodes whose labels match, as in rack=r7.")
]


async def drain(
    cli: Cli,
    nodes: NodeNames = None,
    selector: OfLabels = "",
    wait: Annotated[bool, typer.Option("--wait", "-w", help="Wait until nothing that should leave is there.")] = False,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", min=0, help="How long --wait waits.")
    ] = DRAIN_TIMEOUT,
) -> int:
    """Send no new pods to nodes, and move theirs away. Each RC keeps as many healthy pods as it must have.

    Exits with 2 when --wait ends with pods that should have left. Interrupting it changes nothing: the drain goes on
    until `rcfarm node undrain`.
    """
    names = await _chosen(cli, nodes or [], selector)
    await cli.nodes.drain(names)
    coming, brake = await forecast(cli, names), await read_brake(cli.store, cli.keys)
    if not cli.out.as_json:
        for name in names:
            cli.out.line(f"node {name} is drained of its pods")
            for line in lines_of([each for each in coming if each.node == name], brake):
                cli.out.hanging("  ", line)
    if not wait:
        if cli.out.as_json:
            cli.out.json(await _info(cli, names, coming))
        return 0
    with cli.out.progress("") as say:
        left, reasons = await _Drain(cli, names, timeout, say).follow()
    complete = not reasons
    if cli.out.as_json:
        cli.out.json(await _info(cli, names, left, complete=complete, reasons=reasons))
    elif complete:
        there = f"; {count(len(left), 'pod')} of daemon sets that tolerate it {'stays' if len(left) == 1 else 'stay'}"
        which = f"node {names[0]} is" if len(names) == 1 else f"all {len(names)} nodes are"
        cli.out.line(f"{which} empty{there if left else ''}")
    else:
        cli.out.line(f"not empty: {count(len(left), 'pod')} left")
        for reason in reasons:
            cli.out.hanging("  ", reason)
        cli.out.line("the drain goes on; `rcfarm node undrain` ends it")
    return 0 if complete else NOT_FULLY_PLACED


async def undrain(cli: Cli, nodes: NodeNames = None, selector: OfLabels = "") -> None:
    """Use nodes again. Pods that have moved stay where they are."""
    names = await _chosen(cli, nodes or [], selector)
    for name in names:
        await cli.nodes.uncordon(name)
    if cli.out.as_json:
        cli.out.json((await _info(cli, names, [])).nodes)
    else:
        for name in names:
            cli.out.line(f"node {name} takes pods again")


async def _chosen(cli: Cli, names: Sequence[str], selector: str) -> list[str]:
    """Return the nodes that are named or match. Raises `UsageProblem`, before anything is changed."""
    if bool(names) == bool(selector):
        raise UsageProblem("name the nodes, or give `-l SELECTOR` to choose them by their labels")
    found = (await cli.nodes.list()).nodes
    if selector:
        wanted = Selector.parse(selector)
        if not (matching := [name for name, node in found.items() if wanted.matches(node.spec.labels)]):
            raise UsageProblem(f"-l {selector}: no node has such labels; `rcfarm node list` shows them all")
        return matching
    if unknown := [name for name in names if name not in found]:
        await cli.nodes.get(unknown[0])  # raises what is wrong with it
    return list(dict.fromkeys(names))


async def forecast(cli: Cli, names: Sequence[str]) -> list[Departure]:
    """Return what happens to the pods of these nodes, node by node."""
    snaps, found = await asyncio.gather(cli.rcs.snapshots(), cli.nodes.list())
    brake = await read_brake(cli.store, cli.keys)
    pods = []
    for name in names:
        pods += of_rcs(snaps, name)
        there = [_pod(cli, entry) for entry in (await cli.store.list(cli.keys.node_intents(name))).entries]
        pods += [pod for pod in there if pod.intent is not None and pod.intent.task]
    return departures(pods, {snap.rc_id: snap for snap in snaps}, found.nodes, brake, names)


def _pod(cli: Cli, entry: Entry) -> PodAt:
    place = cli.keys.parse_pod(entry.key)
    try:
        return PodAt(place.node, place.pod_id, decode(Intent, entry.key, entry.value))
    except BadRecord:  # `rcfarm doctor` names it
        return PodAt(place.node, place.pod_id, None)


def lines_of(pods: Iterable[Departure], brake: Brake | None) -> list[str]:
    """Return a line for each kind of what happens to the pods of one node."""
    by_kind: dict[Kind, list[Departure]] = {}
    for pod in pods:
        by_kind.setdefault(pod.kind, []).append(pod)
    when = "once the brake is released" if brake else "one after the other, each when another one is healthy"
    released = ", once the brake is released" if brake else ""
    words: dict[Kind, str] = {
        "moves": f"will be moved, {when}",
        "leaves": f"will be removed{released}, because daemon sets leave a drained node",
        "tolerant": "will stay, because their daemon sets have `tolerate_drain`",
        "no_place": "will stay, because no other node may take them",
        "static": "will stay, because their strategy is static",
        "disabled": "will stay, because they are disabled",
        "unreadable": "will stay, because their record can't be read",
        "ends": "will stay until they end, except for those of interruptible tasks",
    }
    advice: dict[Kind, str] = {
        "static": "; to have them moved, set `allocation_strategy: dynamic` in their files and apply them with "
        "`rcfarm rc apply -f FILE`",
        "no_place": "; add or uncordon nodes: `rcfarm rc explain RC` has every node",
        "disabled": "; `rcfarm rc enable RC`",
        "unreadable": "; see `rcfarm doctor`",
    }
    lines = []
    for kind, text in words.items():
        if not (found := by_kind.get(kind)):
            continue
        whose = "tasks: " if kind == "ends" else ""
        names = listed(sorted(pod.task or pod.rc for pod in found), shown=10)
        lines.append(f"{text}: {count(len(found), 'pod')} of {whose}{names}{advice.get(kind, '')}")
        waits = sorted({f"{pod.rc} waits for {pod.waits_for}" for pod in found if pod.waits_for and not brake})
        lines += [f"  {wait}" for wait in waits[:5]]
    return lines or ["there is no pod on it"]


async def _info(
    cli: Cli,
    names: Sequence[str],
    pods: list[Departure],
    *,
    complete: bool | None = None,
    reasons: Sequence[str] = (),
) -> DrainInfo:
    found = (await cli.nodes.list()).nodes
    counts = {name: len(await cli.store.keys(cli.keys.node_intents(name))) for name in names}
    nodes = [node_info(found[name], counts[name]) for name in names if name in found]
    return DrainInfo(nodes=nodes, pods=pods, complete=complete, reasons=list(reasons))


class _Look(NamedTuple):
    """What is left: pods, and reports of pods without an intent, which are still stopping."""

    left: list[Departure]
    stopping: list[str]


class _Drain:
    """Follows a drain for at most `timeout` seconds."""

    def __init__(self, cli: Cli, names: Sequence[str], timeout: float, say: Callable[[str], None]) -> None:
        self._cli, self._names, self._timeout, self._say = cli, names, timeout, say
        self._clock = asyncio.get_running_loop().time
        self._end = self._clock() + timeout
        self._changed = asyncio.Event()
        self._folders: dict[str, tuple[AsyncExitStack, Watched]] = {}
        self._snaps: dict[str, RCSnapshot] = {}
        self._stuck_since: dict[str, tuple[str, float]] = {}  # by RC: why, and since when

    async def follow(self) -> tuple[list[Departure], list[str]]:
        """Follow until nothing that should leave is there, until nothing that is left can leave, or until the time
        limit. Return what is left, and why; no reasons where that is as it should be."""
        cli, keys = self._cli, self._cli.keys
        self._snaps = {snap.rc_id: snap for snap in await cli.rcs.snapshots()}
        nodes = (await cli.nodes.list()).nodes
        few = len(self._names) <= FEW
        async with AsyncExitStack() as stack:

            def concerns(key: str) -> bool:
                return key == keys.brake or keys.parse_pod(key).node in self._names

            async def watch(prefixes: Sequence[str]) -> list[Watched]:
                return [
                    await stack.enter_async_context(watched(cli.store, prefix, concerns, self._changed))
                    for prefix in prefixes
                ]

            intents = await watch([keys.node_intents(name) for name in self._names] if few else [keys.intents])
            reports = await watch([keys.node_realities(name) for name in self._names] if few else [keys.realities])
            brake = await watch([keys.brake])
            try:
                while True:
                    self._changed.clear()
                    look = await self._look(intents, reports, brake, nodes)
                    leaving = [pod for pod in look.left if pod.kind not in STAYS and pod.kind != "tolerant"]
                    await self._watch_owners(sorted({pod.rc for pod in leaving} - {""}, key=self._is_stuck))
                    wake = self._judge(leaving)
                    fixed = [pod for pod in leaving if self._is_stuck(pod.rc)]
                    if (not look.stopping and len(fixed) == len(leaving)) or self._clock() >= self._end:
                        return look.left, self._reasons(look, fixed)
                    self._say(self._progress(look, leaving))
                    await intents[0].changed(min(self._end, wake))
            finally:
                for own, _ in self._folders.values():
                    await own.aclose()

    async def _look(
        self, intents: list[Watched], reports: list[Watched], brake: list[Watched], nodes: dict[str, NodeView]
    ) -> _Look:
        cli = self._cli
        pods = [_pod(cli, entry) for entry in await self._entries(intents)]
        for rc_id, (_, tree) in self._folders.items():
            self._snaps[rc_id] = rc_snapshot.snapshot(cli.keys, rc_id, await tree.entries(self._end))
        held: Brake | None = None
        if brakes := await brake[0].entries(self._end):
            try:
                held = decode(Brake, brakes[0].key, brakes[0].value)
            except BadRecord:  # farms hold all the same
                held = Brake(farm="", since="", code="engaged", message="its record can't be read")
        found = departures(pods, self._snaps, nodes, held, self._names)
        there = {(pod.node, pod.pod_id) for pod in pods}
        gone = [cli.keys.parse_pod(entry.key) for entry in await self._entries(reports)]
        stopping = [
            f"{pod.node}/{pod.pod_id}"
            for pod in gone
            if (pod.node, pod.pod_id) not in there and pod.node in nodes and nodes[pod.node].alive is not None
        ]
        return _Look(found, stopping)

    async def _entries(self, trees: list[Watched]) -> list[Entry]:
        found = [entry for tree in trees for entry in await tree.entries(self._end)]
        return [entry for entry in found if self._cli.keys.parse_pod(entry.key).node in self._names]

    async def _watch_owners(self, rc_ids: Sequence[str]) -> None:
        """Watch what the owners of the first RCs say, and of no other."""
        for rc_id in self._folders.keys() - set(rc_ids[:WATCHED]):
            await self._folders.pop(rc_id)[0].aclose()
        for rc_id in rc_ids[:WATCHED]:
            if rc_id not in self._folders:
                own = AsyncExitStack()
                folder = self._cli.keys.rc(rc_id)
                tree = await own.enter_async_context(watched(self._cli.store, folder, event=self._changed))
                self._folders[rc_id] = own, tree
                self._snaps[rc_id] = rc_snapshot.snapshot(self._cli.keys, rc_id, await tree.entries(self._end))

    def _judge(self, leaving: Sequence[Departure]) -> float:
        """Note which owners can't go on, and since when. Return when to judge again without a change."""
        now, wake = self._clock(), self._end
        for rc_id in {pod.rc for pod in leaving} & self._folders.keys():
            why = stuck(self._snaps[rc_id])
            if not why:
                self._stuck_since.pop(rc_id, None)
            elif rc_id not in self._stuck_since:
                self._stuck_since[rc_id] = why, now
            else:
                self._stuck_since[rc_id] = why, self._stuck_since[rc_id][1]
            if why and not self._is_stuck(rc_id):
                wake = min(wake, self._stuck_since[rc_id][1] + OBSTACLE_AFTER)
        return wake

    def _is_stuck(self, rc_id: str) -> bool:
        return rc_id in self._stuck_since and self._clock() >= self._stuck_since[rc_id][1] + OBSTACLE_AFTER

    def _progress(self, look: _Look, leaving: Sequence[Departure]) -> str:
        text = f"{count(len(leaving), 'pod')} to leave" if leaving else "waiting for processes to stop"
        doing = []
        for rc_id in sorted({pod.rc for pod in leaving} & self._folders.keys()):
            status = self._snaps[rc_id].status
            doing += [f"{rc_id}: {reason.message}" for reason in (status.reasons if status else ())][:1]
        waits = [f"{pod.rc} waits for {pod.waits_for}" for pod in leaving if pod.waits_for]
        more = "; ".join(doing[:2] or sorted(set(waits))[:2] or look.stopping[:2])
        return f"{text}; {more}" if more else text

    def _reasons(self, look: _Look, fixed: Sequence[Departure]) -> list[str]:
        """Return why the drain is not complete; nothing if it is."""
        found = []
        for pod in look.left:
            name = f"{pod.node}/{pod.pod_id}"
            of = f"of task {pod.task}" if pod.task else f"of rc {pod.rc}"
            if pod.kind == "tolerant":
                continue
            if pod.kind == "no_place" or pod in fixed:
                why = self._stuck_since.get(pod.rc, ("no other node may take it", 0.0))[0]
                act = pod.act or f"`rcfarm rc explain {pod.rc}`"
                found.append(f"{name} {of} can't move: {why}; {act}")
            elif pod.kind in STAYS:
                words = {"static": "its strategy is static", "disabled": "its RC is disabled"}
                found.append(f"{name} {of} stays: {words.get(pod.kind, 'its record can not be read')}; {pod.act}")
            else:
                status = self._snaps[pod.rc].status if pod.rc in self._snaps else None
                doing = "; ".join(reason.message for reason in status.reasons) if status else ""
                waits = pod.waits_for or doing or "it has not ended"
                act = f"; {pod.act}" if pod.act else ""
                found.append(f"{name} {of} is still there after {self._timeout:g} s: {waits}{act}")
        found += [f"{name} is still stopping after {self._timeout:g} s" for name in look.stopping]
        return found
