"""`rcfarm plan` and `rcfarm what-if`: what would happen, step by step, before anything is written.

The farm's own planner decides on a virtual fleet (`rcfarm.farm.preview`): for files that would be applied, or for nodes
that would be drained, lost or added. The digest of a plan stands for the outcome: `rcfarm rc apply --plan DIGEST`
refuses when the farm would do something else by now, and not because something that does not matter has changed.

Nodes are chosen by labels, as farms do by default; what the pool scheduler would reserve is not known here.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Annotated

import msgspec
import typer

from rcfarm.cli import CHANGED_SINCE_PLANNED, NOT_FULLY_PLACED
from rcfarm.cli.kit.command import Cli, command
from rcfarm.cli.kit.options import Files, UsageProblem, parse_pairs, read_files
from rcfarm.cli.kit.output import Output, count, placed
from rcfarm.cli.rc.change import show_differences
from rcfarm.farm.preview import Preview, PreviewInput, Wave, preview
from rcfarm.operations import rc_apply
from rcfarm.operations.errors import BadInput, ChangedSincePlanned, NoSuchRC
from rcfarm.operations.fleet import listed, read_brake
from rcfarm.operations.nodes import NodeView
from rcfarm.operations.rc_apply import Planned
from rcfarm.operations.rc_snapshot import RCSnapshot, pod_id_of
from scheduler.label import LabelScheduler
from scheduler.protocol import Absence, NodeState
from store.kv.protocol import BadRecord, Entry
from store.schema.keys import Keys
from store.schema.records import Intent, RCSpec, Reality, decode, utc_now
from store.schema.selectors import BadSelector, Selector

app = typer.Typer(rich_markup_mode=None)

REFUSED = CHANGED_SINCE_PLANNED
GOOD = frozenset({"converged", "completed"})
SHOWN_NODES = 6
STARTS_IN = 1.0  # seconds until a pod passes, where nothing is known of it
LONGEST_START = 120.0  # seconds: what took longer has stopped passing at some time, or has another agent


class PlanInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The plan of one RC. `action`: create, change, replace or none. `refused`: it would not be whole in the end.
    `starts_in`: seconds that a pod is taken to need until it passes."""

    id: str
    action: str
    refused: bool
    starts_in: float
    preview: Preview


async def plan(cli: Cli, files: Files) -> int:
    """Show what applying files of RCs would do: waves, nodes, time, and what would be left undone.

    Exits with 0 when nothing would change, 2 when something would, and 3 when an RC would not be whole in the end.
    """
    documents = [document for name, raw in read_files(files) for document in rc_apply.load(name, raw)]
    rc_apply.check_distinct(documents)
    planned = [await rc_apply.plan(cli.rcs, document) for document in documents]
    infos = await previews(cli, planned)

    def render() -> None:
        show_differences(cli.out, planned)
        for info in infos:
            _render(cli.out, info)
        cli.out.line(f"plan {digest_of(infos)}: `rcfarm rc apply --plan {digest_of(infos)}` carries out exactly this")

    cli.out.show(infos, render)
    if any(info.refused for info in infos):
        return REFUSED
    return NOT_FULLY_PLACED if any(info.preview.waves or info.action != "none" for info in infos) else 0


async def previews(cli: Cli, planned: Sequence[Planned]) -> list[PlanInfo]:
    """Return the plan of each RC."""
    nodes, brake = await asyncio.gather(cli.nodes.list(), read_brake(cli.store, cli.keys))
    hold = f"the brake is on: {brake.message}" if brake else ""
    found = []
    for each in planned:
        spec = each.new
        if each.old is not None and each.new.manifest != each.old.spec.manifest:
            spec = msgspec.structs.replace(spec, revision=each.old.spec.revision + 1)
        try:
            given, starts_in = await _input(cli, spec, each.document.pod_id, nodes.nodes, hold)
        except BadSelector as error:
            raise BadInput(f"{each.document.at}: rc {spec.id}: node_selector: {error}") from error
        shown = preview(given, starts_in=starts_in)
        refused = shown.state not in GOOD and not spec.disabled
        found.append(
            PlanInfo(id=spec.id, action=each.action, refused=refused, starts_in=round(starts_in, 1), preview=shown)
        )
    return found


async def check_outcome(cli: Cli, planned: Sequence[Planned], digest: str) -> None:
    """Check that the farm would still do what a plan has shown. Raises `ChangedSincePlanned`."""
    now = digest_of(await previews(cli, planned))
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


async def _input(
    cli: Cli, spec: RCSpec, pod_id: str, nodes: Mapping[str, NodeView], hold: str
) -> tuple[PreviewInput, float]:
    """Return the RC with the new spec and the fleet as they are, and how long its pods take to pass."""
    try:
        snap = await cli.rcs.snapshot(spec.id)
    except NoSuchRC:
        snap = RCSnapshot(spec.id)
    pod_id = pod_id_of(snap) or pod_id
    intents = _readable(cli.keys, await cli.rcs.intents(pod_id)).get(pod_id, {})
    scheduler = LabelScheduler(_Nodes({name: view.state() for name, view in nodes.items()}))
    return preview_input(spec, snap, intents, scheduler, hold), await _starts_in(cli, snap)


def preview_input(
    spec: RCSpec, snap: RCSnapshot, intents: Mapping[str, Intent], scheduler: LabelScheduler, hold: str
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
    return PreviewInput(
        spec=spec,
        eligibility=scheduler.eligibility(Selector.parse(spec.node_selector)),
        current=current,
        passing=frozenset(passing - absent.keys()),
        absent=absent,
        taken=tuple(node for node, intent in intents.items() if intent.rc != spec.id),
        hold=hold,
        rollout=snap.rollout,
        now=time.time(),
        moving=snap.status.node_transfer if snap.status else None,
    )


class _Nodes:
    """The nodes as they were read."""

    version = 0

    def __init__(self, states: Mapping[str, NodeState]) -> None:
        self._states = states

    def nodes(self) -> Mapping[str, NodeState]:
        """See `NodeDirectory`."""
        return self._states


def _readable(keys: Keys, entries: Iterable[Entry]) -> dict[str, dict[str, Intent]]:
    """Return the intents that can be read, by pod id and node."""
    found: dict[str, dict[str, Intent]] = {}
    for entry in entries:
        place = keys.parse_pod(entry.key)
        with suppress(BadRecord):  # `rcfarm doctor` names it
            found.setdefault(place.pod_id, {})[place.node] = decode(Intent, entry.key, entry.value)
    return found


async def _starts_in(cli: Cli, snap: RCSnapshot) -> float:
    """Return the median of the seconds that the RC's present pods took from their start until they passed."""
    took = []
    for node, reality in (await cli.rcs.realities(pod_id_of(snap))).items() if snap.pods else ():
        health = snap.health.get(node)
        if health and health.status == "passing" and (started := _started(reality)):
            with suppress(ValueError):
                took.append((datetime.fromisoformat(health.since) - datetime.fromisoformat(started)).total_seconds())
    took = [seconds for seconds in took if 0 <= seconds <= LONGEST_START]
    return max(STARTS_IN, statistics.median(took)) if took else STARTS_IN


def _started(reality: Reality) -> str:
    return max((process.started_at for process in reality.launchables.values()), default="")


class Effect(msgspec.Struct, frozen=True, kw_only=True):
    """What would become of one RC. `before`: its state without the change."""

    id: str
    before: str
    preview: Preview


async def what_if(
    cli: Cli,
    drain: Annotated[str, typer.Option("--drain", metavar="SELECTOR", help="Nodes that would be drained.")] = "",
    lose: Annotated[str, typer.Option("--lose", metavar="NODES", help="Nodes that would die, as in n1,n2.")] = "",
    add: Annotated[int, typer.Option("--add", metavar="N", min=0, help="Nodes that would join.")] = 0,
    label: Annotated[
        list[str] | None, typer.Option("--label", metavar="KEY=VALUE", help="A label of those that join; repeatable.")
    ] = None,
) -> int:
    """Show what would become of the RCs if nodes were drained, lost or added.

    Exits with 0 when no pod would move, 2 when some would, and 3 when an RC would not be whole in the end.
    """
    if not (drain or lose or add):
        raise UsageProblem("say what would happen: --drain SELECTOR, --lose NODES or --add N")
    found, snaps, brake = await asyncio.gather(cli.nodes.list(), cli.rcs.snapshots(), read_brake(cli.store, cli.keys))
    intents = _readable(cli.keys, (await cli.store.list(cli.keys.intents)).entries)
    now = {name: view.state() for name, view in found.nodes.items()}
    then, changed = _changed_nodes(now, drain, lose, add, parse_pairs("--label", label or ()))
    hold = f"the brake is on: {brake.message}" if brake else ""
    before, after = LabelScheduler(_Nodes(now)), LabelScheduler(_Nodes(then))
    effects = []
    for snap in snaps:
        if snap.spec is None or snap.spec.deleting:
            continue
        of_pod = intents.get(pod_id_of(snap), {})
        try:
            is_now = preview(preview_input(snap.spec, snap, of_pod, before, hold))
            would_be = preview(preview_input(snap.spec, snap, of_pod, after, hold))
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
    nodes: Mapping[str, NodeState], drain: str, lose: str, add: int, labels: Mapping[str, str]
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
        rows = [(str(number), _time(wave.after), _what(wave)) for number, wave in enumerate(shown.waves, start=1)]
        out.table(("STEP>", "AFTER>", "WHAT"), rows)
    for reason in shown.reasons:
        out.hanging("  ", f"{reason.code}: {reason.message}")


def _what(wave: Wave) -> str:
    parts = [
        f"{verb} {listed(nodes, SHOWN_NODES)}{of_them}"
        for verb, nodes, of_them in (
            ("add", wave.add, ""),
            ("add beyond the replicas", wave.surge, ""),
            ("change", wave.update, " (canary)" if wave.state == "canary" else ""),
            ("change back", wave.back, ""),
            ("remove", wave.remove, ""),
            ("move", [f"{old} to {new}" for old, new in wave.move], ""),
        )
        if nodes
    ]
    return "; ".join(parts)


def _time(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:g}s"
    return f"{whole // 60}m{whole % 60:02}s"


command(app, "plan")(plan)
command(app, "what-if")(what_if)
