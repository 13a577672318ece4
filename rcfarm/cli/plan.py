"""`rcfarm plan` and `rcfarm what-if`: what would happen, step by step, before anything is written.

The farm's own planner decides on a virtual fleet (`rcfarm.farm.preview`): for files that would be applied, or for nodes
that would be drained, lost or added, and settings that RCs would have. The digest of a plan stands for the outcome:
`rcfarm rc apply --plan DIGEST` refuses when the farm would do something else by now, and not because something that
does not matter has changed.

Nodes are chosen by labels, as farms do by default; what the pool scheduler would reserve is not known here.
"""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Annotated, NamedTuple, TypeVar

import msgspec
import typer

from rcfarm.cli import CHANGED_SINCE_PLANNED, NOT_FULLY_PLACED
from rcfarm.cli.kit.command import Cli, command
from rcfarm.cli.kit.completion import complete_rc
from rcfarm.cli.kit.options import Files, UsageProblem, parse_pairs, read_files
from rcfarm.cli.kit.output import Output, count, placed
from rcfarm.cli.rc.change import SHOWN_UNCHANGED, show_differences
from rcfarm.farm.preview import Preview, PreviewInput, preview
from rcfarm.operations import rc_apply
from rcfarm.operations.analysis import gates
from rcfarm.operations.errors import BadInput, ChangedSincePlanned, NoSuchRC
from rcfarm.operations.fleet import listed, read_brake
from rcfarm.operations.nodes import ListedNodes
from rcfarm.operations.rc_apply import Planned
from rcfarm.operations.rc_snapshot import RCSnapshot, pod_id_of
from scheduler.label import LabelScheduler
from scheduler.protocol import Absence, NodeState
from scheduler.spread import NodeLoads
from store.kv.protocol import BadRecord, Entry
from store.schema.keys import BadLabel, Keys, check_labels
from store.schema.records import Brake, Intent, RCSpec, Reality, decode, utc_now
from store.schema.selectors import BadSelector, Selector

R = TypeVar("R", Intent, Reality)

app = typer.Typer(rich_markup_mode=None)

REFUSED = CHANGED_SINCE_PLANNED
FEW = 16  # RCs that are read one by one
GOOD = frozenset({"converged", "completed"})
SHOWN_NODES = 6
STARTS_IN = 1.0  # seconds until a pod passes, where nothing is known of it
MOST_ADDED = 100_000  # nodes that would join: each takes about 240 bytes here, and time in each RC's plan
LONGEST_START = 120.0  # seconds: what took longer has stopped passing at some time, or has another agent


class PlanInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The plan of one RC. `action`: create, change, replace or none. `refused`: it would not be whole in the end.
    `starts_in`: seconds that a pod is taken to need until it passes. `gates`: the analyses that decide, in words."""

    id: str
    action: str
    refused: bool
    starts_in: float
    preview: Preview
    gates: str = ""


async def plan(cli: Cli, files: Files) -> int:
    """Show what applying files of RCs would do: waves, nodes, time, and what would be left undone.

    Exits with 0 when nothing would change, 2 when something would, and 3 when an RC would not be whole in the end.
    """
    documents = [document for name, raw in read_files(files) for document in rc_apply.load(name, raw)]
    rc_apply.check_distinct(documents)
    if len(documents) > FEW:
        fleet = await _whole_fleet(cli)
        planned = await rc_apply.plan_all(cli.rcs, documents, fleet.snaps)
    else:
        planned = [await rc_apply.plan(cli.rcs, document) for document in documents]
        fleet = await _fleet_of(cli, planned)
    infos = _previews(planned, fleet)

    def render() -> None:
        show_differences(cli.out, planned)
        same = [info for info in infos if not info.preview.waves and not info.refused]
        if len(same) > SHOWN_UNCHANGED:
            cli.out.line(f"{count(len(same), 'RC')}: no pod would change")
        for info in infos:
            if info.preview.waves or info.refused or len(same) <= SHOWN_UNCHANGED:
                _render(cli.out, info)
        digest, of_files = digest_of(infos), " ".join(f"-f {shlex.quote(str(path))}" for path in files)
        cli.out.line(f"plan {digest}: `rcfarm rc apply {of_files} --plan {digest}` carries out exactly this")

    cli.out.show(infos, render)
    if any(info.refused for info in infos):
        return REFUSED
    return NOT_FULLY_PLACED if any(info.preview.waves or info.action != "none" for info in infos) else 0


def _previews(planned: Sequence[Planned], fleet: _Fleet) -> list[PlanInfo]:
    """Return the plan of each RC. Raises `BadInput`."""
    found, scheduler = [], LabelScheduler(fleet.nodes)
    for each in planned:
        spec = each.new
        if each.old is not None and each.new.manifest != each.old.spec.manifest:
            spec = msgspec.structs.replace(spec, revision=each.old.spec.revision + 1)
        snap = fleet.snaps.get(spec.id) or RCSnapshot(spec.id)
        pod_id = pod_id_of(snap) or each.document.pod_id
        starts_in = _starts_in(snap, fleet.realities.get(pod_id, {}))
        try:
            given = preview_input(spec, snap, fleet.intents.get(pod_id, {}), scheduler, fleet.hold, fleet.loads)
        except BadSelector as error:
            raise BadInput(f"{each.document.at}: rc {spec.id}: node_selector: {error}") from error
        shown = preview(given, starts_in=starts_in)
        refused = shown.state not in GOOD and not spec.disabled
        found.append(
            PlanInfo(
                id=spec.id,
                action=each.action,
                refused=refused,
                starts_in=round(starts_in, 1),
                preview=shown,
                gates=gates(spec.policy) if any(wave.state for wave in shown.waves) else "",
            )
        )
    return found


async def check_outcome(cli: Cli, planned: Sequence[Planned], digest: str) -> None:
    """Check that the farm would still do what a plan has shown. Raises `ChangedSincePlanned`."""
    fleet = await (_whole_fleet(cli) if len(planned) > FEW else _fleet_of(cli, planned))
    now = digest_of(_previews(planned, fleet))
    if now != digest:
        raise ChangedSincePlanned(
            f"the outcome would not be that of plan {digest}: it is {now} now; `rcfarm plan` shows it"
        )


def digest_of(infos: Sequence[PlanInfo]) -> str:
    """Return one digest for the outcome of all plans."""
    if len(infos) == 1:
        return infos[0].preview.digest
    import hashlib

    return hashlib.sha256("".join(info.preview.digest for info in infos).encode()).hexdigest()[:16]


class _Nodes:
    """The nodes as they were read."""

    version = 0

    def __init__(self, states: Mapping[str, NodeState]) -> None:
        self._states = states

    def nodes(self) -> Mapping[str, NodeState]:
        """See `NodeDirectory`."""
        return self._states


class _Fleet(NamedTuple):
    """What decides on the pods of RCs, as it was read. `intents`, `realities`: by pod id and node. `hold`: why farms
    remove nothing, or "". `loads`: of all pods."""

    nodes: _Nodes
    snaps: Mapping[str, RCSnapshot]
    intents: Mapping[str, Mapping[str, Intent]]
    realities: Mapping[str, Mapping[str, Reality]]
    hold: str
    loads: NodeLoads


async def _fleet_of(cli: Cli, planned: Sequence[Planned]) -> _Fleet:
    """Read what decides on a few RCs, each on its own."""
    snaps, entries, realities = {}, [], {}

    async def read_rcs() -> None:
        for each in planned:
            rc_id, snap = each.document.rc_id, RCSnapshot(each.document.rc_id)
            with suppress(NoSuchRC):
                snap = await cli.rcs.snapshot(rc_id)
            pod_id = pod_id_of(snap) or each.document.pod_id
            snaps[rc_id] = snap
            entries.extend(await cli.rcs.intents(pod_id))
            realities[pod_id] = await cli.rcs.realities(pod_id) if snap.pods else {}

    _, nodes, brake, placed = await asyncio.gather(
        read_rcs(), cli.nodes.list(), read_brake(cli.store, cli.keys), cli.store.keys(cli.keys.intents)
    )
    loads = NodeLoads(cli.keys.parse_pod(key).node for key in placed)
    return _Fleet(_states(nodes), snaps, _by_pod(cli.keys, Intent, entries), realities, _hold(brake), loads)


async def _whole_fleet(cli: Cli) -> _Fleet:
    """Read what decides on all RCs: whole trees, as ten thousand RCs one by one would take minutes."""
    nodes, snaps, intents, realities, brake = await asyncio.gather(
        cli.nodes.list(),
        cli.rcs.snapshots(),
        cli.store.list(cli.keys.intents),
        cli.store.list(cli.keys.realities),
        read_brake(cli.store, cli.keys),
    )
    return _Fleet(
        _states(nodes),
        {snap.rc_id: snap for snap in snaps},
        _by_pod(cli.keys, Intent, intents.entries),
        _by_pod(cli.keys, Reality, realities.entries),
        _hold(brake),
        NodeLoads(cli.keys.parse_pod(entry.key).node for entry in intents.entries),
    )


def _states(nodes: ListedNodes) -> _Nodes:
    return _Nodes({name: view.state() for name, view in nodes.nodes.items()})


def _hold(brake: Brake | None) -> str:
    return f"the brake is on: {brake.words}" if brake else ""


def _by_pod(keys: Keys, record_type: type[R], entries: Iterable[Entry]) -> dict[str, dict[str, R]]:
    """Return the records that can be read, by pod id and node."""
    found: dict[str, dict[str, R]] = {}
    for entry in entries:
        place = keys.parse_pod(entry.key)
        with suppress(BadRecord):  # `rcfarm doctor` names it
            found.setdefault(place.pod_id, {})[place.node] = decode(record_type, entry.key, entry.value)
    return found


def preview_input(
    spec: RCSpec,
    snap: RCSnapshot,
    intents: Mapping[str, Intent],
    scheduler: LabelScheduler,
    hold: str,
    loads: NodeLoads,
) -> PreviewInput:
    """Return the RC with a spec as its planner would see it. `intents`: those of its pod id, by node."""
    current: dict[str, str | None] = dict.fromkeys(snap.pods)
    current |= {node: intent.manifest for node, intent in intents.items() if intent.rc == spec.id and node in current}
    passing = {
        node
        for node, health in snap.health.items()
        if node in current and health.status == "passing" and health.manifest == current[node]
    }
    nodes, now = scheduler.directory.nodes(), utc_now()
    absent = {
        node: Absence(now, now, is_lost=node not in nodes or nodes[node].lost)
        for node in current
        if node not in nodes or not nodes[node].live
    }
    selector, wave_by = Selector.parse(spec.node_selector), spec.policy.wave_by
    canary = Selector.parse(spec.policy.canary_selector) if spec.policy.canary_selector else None
    if spec.is_daemon_set:
        eligibility = scheduler.every_node(selector, tolerate_drain=spec.tolerate_drain)
    else:
        eligibility = scheduler.eligibility(selector)
    return PreviewInput(
        spec=spec,
        eligibility=eligibility,
        current=current,
        passing=frozenset(passing - absent.keys()),
        absent=absent,
        taken=tuple(node for node, intent in intents.items() if intent.rc != spec.id),
        drained=frozenset(node for node in current if node in nodes and nodes[node].evict),
        domains={name: node.labels[wave_by] for name, node in nodes.items() if wave_by in node.labels}
        if wave_by
        else {},
        hold=hold,
        rollout=snap.rollout,
        now=time.time(),
        moving=snap.status.node_transfer if snap.status else None,
        canary_nodes=frozenset(name for name, node in nodes.items() if canary.matches(node.labels))
        if canary
        else frozenset(),
        loads=loads,
        values={name: node.labels.get(spec.spread, "") for name, node in nodes.items()} if spec.spread else {},
    )


def _starts_in(snap: RCSnapshot, realities: Mapping[str, Reality]) -> float:
    """Return the median of the seconds that the RC's present pods took from their start until they passed."""
    took = []
    for node, reality in realities.items() if snap.pods else ():
        health = snap.health.get(node)
        started = max((process.started_at for process in reality.launchables.values()), default="")
        if health and health.status == "passing" and started:
            with suppress(ValueError):
                took.append((datetime.fromisoformat(health.since) - datetime.fromisoformat(started)).total_seconds())
    took = [seconds for seconds in took if 0 <= seconds <= LONGEST_START]
    if not took:
        return STARTS_IN
    from statistics import median  # 4 ms, in vain where nothing runs yet

    return max(STARTS_IN, median(took))


class Effect(msgspec.Struct, frozen=True, kw_only=True):
    """What would become of one RC. `before`: its state without the change."""

    id: str
    before: str
    preview: Preview


async def what_if(
    cli: Cli,
    drain: Annotated[str, typer.Option("--drain", metavar="SELECTOR", help="Nodes that would be drained.")] = "",
    lose: Annotated[str, typer.Option("--lose", metavar="NODES", help="Nodes that would die, as in n1,n2.")] = "",
    add: Annotated[
        int | None, typer.Option("--add", metavar="N", min=1, max=MOST_ADDED, help="Nodes that would join.")
    ] = None,
    label: Annotated[
        list[str] | None, typer.Option("--label", metavar="KEY=VALUE", help="A label of those that join; repeatable.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="FIELD=VALUE",
            help="A field that RCs would have: replicas, node_selector, allocation_strategy, disabled, or one of "
            "`update`, such as max_unavailable; repeatable.",
        ),
    ] = None,
    rc: Annotated[
        list[str] | None,
        typer.Option("--rc", metavar="RC", help="Only this RC; repeatable; default: all.", autocompletion=complete_rc),
    ] = None,
) -> int:
    """Show what would become of the RCs if nodes were drained, lost or added, or if the RCs had other settings.

    Exits with 0 when no pod would move, 2 when some would, and 3 when an RC would not be whole in the end.
    """
    if not (drain or lose or add or set_):
        raise UsageProblem("say what would happen: --drain SELECTOR, --lose NODES, --add N or --set FIELD=VALUE")
    labels, settings = parse_pairs("--label", label or ()), parse_pairs("--set", set_ or (), "FIELD=VALUE")
    if labels and not add:
        raise UsageProblem("--label: is of the nodes that would join; give --add N, too")
    try:
        check_labels(labels)
    except BadLabel as error:
        raise BadInput(f"--label: {error}") from error
    try:
        change = rc_apply.with_fields(settings)
    except BadInput as error:
        raise BadInput(f"--set {error}") from error
    fleet = await _whole_fleet(cli)
    if unknown := [rc_id for rc_id in rc or () if rc_id not in fleet.snaps]:
        raise BadInput(f"--rc: there is no rc {unknown[0]}; `rcfarm rc list` shows those that exist")
    now = fleet.nodes.nodes()
    then, changed = _changed_nodes(now, drain, lose, add, labels)
    if settings:
        changed = " and ".join(filter(None, (changed, f"with {', '.join(set_ or ())}")))
    before, after = LabelScheduler(fleet.nodes), LabelScheduler(_Nodes(then))
    snaps = [fleet.snaps[rc_id] for rc_id in sorted(set(rc or ()) or fleet.snaps)]
    effects = []
    for snap in snaps:
        if snap.spec is None or snap.spec.deleting:
            continue
        try:
            spec = change(snap.spec)
        except BadInput as error:
            raise BadInput(f"--set: rc {snap.rc_id}: {error}") from error
        of_pod = fleet.intents.get(pod_id_of(snap), {})
        try:
            is_now = preview(preview_input(snap.spec, snap, of_pod, before, fleet.hold, fleet.loads))
            would_be = preview(preview_input(spec, snap, of_pod, after, fleet.hold, fleet.loads))
        except BadSelector as error:
            cli.out.note(f"rc {snap.rc_id} is left out: node_selector: {error}")
            continue
        if (would_be.digest, would_be.state) != (is_now.digest, is_now.state):
            effects.append(Effect(id=snap.rc_id, before=is_now.state, preview=would_be))

    def render() -> None:
        rows = [(each.id, each.before, each.preview.state, _summary(each.preview)) for each in effects]
        cli.out.line(f"{changed}: {count(len(effects), 'RC')} of {len(snaps)} would notice it")
        cli.out.table(("RC", "NOW", "THEN", "WHAT"), rows)
        for each in effects:
            for reason in each.preview.reasons:
                cli.out.hanging("  ", f"{each.id}: {reason.code}: {reason.message}")

    cli.out.show(effects, render)
    if any(each.preview.state not in GOOD and each.preview.state != each.before for each in effects):
        return REFUSED
    return NOT_FULLY_PLACED if effects else 0


def _changed_nodes(
    nodes: Mapping[str, NodeState], drain: str, lose: str, add: int | None, labels: Mapping[str, str]
) -> tuple[dict[str, NodeState], str]:
    """Return the nodes after the change, and the change in words. Raises `BadInput`."""
    then, said = dict(nodes), []
    if drain:
        selector = Selector.parse(drain)
        leaving = sorted(name for name, node in nodes.items() if selector.matches(node.labels))
        if not leaving:
            raise BadInput(f"--drain {drain}: no node has labels that match; `rcfarm node list` shows them")
        then |= {name: nodes[name]._replace(schedulable=False, evict=True) for name in leaving}
        said.append(f"without {listed(leaving, SHOWN_NODES)}, drained")
    if lose:
        lost = sorted({name.strip() for name in lose.split(",") if name.strip()})
        if not lost:
            raise BadInput(f"--lose {lose!r} names no node; write --lose n1,n2")
        if unknown := [name for name in lost if name not in nodes]:
            raise BadInput(f"--lose: there is no node {unknown[0]}; `rcfarm node list` shows those that exist")
        then |= {name: nodes[name]._replace(live=False, lost=True) for name in lost}
        said.append(f"without {listed(lost, SHOWN_NODES)}, lost")
    if add:
        joining = [f"new-{number:0{len(str(add))}}" for number in range(1, add + 1)]
        then |= {name: NodeState(name, dict(labels)) for name in joining}
        said.append(f"with {count(add, 'node')} more")
    return then, " and ".join(said)


def _summary(shown: Preview) -> str:
    moved = sum(len(wave.move) for wave in shown.waves)
    added = sum(len(wave.add) for wave in shown.waves)
    removed = sum(len(wave.remove) for wave in shown.waves)
    changed = sum(len(wave.update) + len(wave.back) for wave in shown.waves)
    parts = [("moved", moved), ("added", added), ("removed", removed), ("changed", changed)]
    counts = ", ".join(f"{count(number, 'pod')} {verb}" for verb, number in parts if number)
    return f"{counts or 'no pod would move'}; {placed(shown.placed, shown.desired)}"


def _render(out: Output, info: PlanInfo) -> None:
    shown = info.preview
    if not shown.waves:
        out.line(f"rc {info.id}: no pod would change; {placed(shown.placed, shown.desired)}")
    else:
        pods = f"{placed(shown.placed, shown.desired)} and {shown.state}"
        length = f"after {_time(shown.seconds)}, if each pod passes within {_time(info.starts_in)}"
        out.line(f"rc {info.id}: {count(len(shown.waves), 'step')}; {pods} {length}")
        rows = []
        for number, wave in enumerate(shown.waves, start=1):
            canary = " (canary)" if wave.state == "canary" else ""
            parts = [
                f"{verb} {listed(nodes, SHOWN_NODES)}{of_them}"
                for verb, nodes, of_them in (
                    ("add", wave.add, ""),
                    ("add beyond the replicas", wave.surge, canary),
                    ("change", wave.update, canary),
                    ("change back", wave.back, ""),
                    ("remove", wave.remove, ""),
                    ("move", [f"{old} to {new}" for old, new in wave.move], ""),
                )
                if nodes
            ]
            rows.append((str(number), _time(wave.after), "; ".join(parts)))
        out.table(("STEP>", "AFTER>", "WHAT"), rows)
    if info.gates:
        out.hanging("  ", info.gates)
    for reason in shown.reasons:
        out.hanging("  ", f"{reason.code}: {reason.message}")


def _time(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:g}s"
    return f"{whole // 60}m{whole % 60:02}s"


command(app, "plan")(plan)
command(app, "what-if")(what_if)
