"""Commands on the state of a HiveD extender: `rcfarm hived explain | simulate | snapshot`.

The state is a snapshot, fetched from a running extender or read from a file. `explain` says why a pod waits; `simulate`
tries a change on a copy.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from rcfarm.cli import NOT_FULLY_PLACED
from rcfarm.cli.hived.source import DEFAULT_EXTENDER, Extender, SnapshotFile, fetch, load_snapshot
from rcfarm.cli.kit.command import LocalCli
from rcfarm.cli.kit.options import UsageProblem, read_file
from rcfarm.cli.kit.output import Output, count, state
from scheduler.hived.cells.groups import GroupState
from scheduler.hived.inspection import explain as explaining
from scheduler.hived.inspection.snapshot import SavedGroup, Snapshot, WaitingPod
from store.decoding import MAX_FILE_VALUES, Undecodable, load_yaml_documents
from store.kube.api.objects import Object, key_of

SHOWN = 5  # waiting pods that an error names
_FILES = (".yaml", ".yml", ".json")  # a name with such an ending is a file's, though a pod could have it

PodName = Annotated[str, typer.Argument(metavar="POD", help="NAMESPACE/NAME, or NAME in the namespace `default`.")]
Pods = Annotated[
    list[str] | None,
    typer.Option(
        "--pod", metavar="FILE|POD", help="Pods of a YAML file, or a waiting pod: NAMESPACE/NAME. May repeat."
    ),
]
Lose = Annotated[list[str] | None, typer.Option("--lose", metavar="NODE", help="A node that is lost. May repeat.")]
Add = Annotated[
    list[str] | None,
    typer.Option("--add", metavar="CELL_TYPE=NODE[,NODE...]", help="A physical cell to add. May repeat."),
]


async def explain(
    cli: LocalCli, pod: PodName, extender: Extender = DEFAULT_EXTENDER, snapshot: SnapshotFile = None
) -> None:
    """Explain why a pod waits. For each chain: the cells considered, what excluded them, and the pods to preempt."""
    saved = await load_snapshot(extender, snapshot)
    waiting = find_waiting(saved, pod)
    found = explaining.explain(explaining.restored(saved), waiting.pod)

    def render() -> None:
        print_explanation(cli.out, found)
        if waiting.reason:
            cli.out.line()
            cli.out.line(last_answer(waiting))

    cli.out.show(found, render)


def last_answer(waiting: WaitingPod) -> str:
    """Return what kube-scheduler was answered last about the pod."""
    return f"The last answer to kube-scheduler ({waiting.state}): {waiting.reason}"


def pods_named(snapshot: Snapshot, name: str) -> list[str]:
    """Return the keys of the pods of this name that wait or have a place, in all namespaces, in order."""
    waiting = [each.pod for each in snapshot.waiting]
    placed = [slot.pod for group in snapshot.saved_groups() for slot in group.slots if slot.pod is not None]
    return sorted({key for pod in (*waiting, *placed) if (key := key_of(pod)).rpartition("/")[2] == name})


def placed_pod(snapshot: Snapshot, key: str) -> explaining.PodExplanation | None:
    """Return what explains a pod that has its place, None if it has none. `code`: "" unless the place is in danger."""
    groups = snapshot.saved_groups()
    for group in groups:
        for slot in group.slots:
            if slot.pod is not None and key_of(slot.pod) == key:
                is_chased = group.state is GroupState.BEING_PREEMPTED
                return explaining.PodExplanation(
                    pod=key,
                    group=group.spec.affinity_group.name,
                    virtual_cluster=group.spec.virtual_cluster,
                    priority=group.spec.priority,
                    verdict="placed",
                    summary=f"it is on {slot.node}: {','.join(map(str, slot.devices))}, in {_standing(group, groups)}",
                    places=[f"{slot.node}: {','.join(map(str, slot.devices))}"],
                    code="gpu_being_preempted" if is_chased else "gpu_quota_lost" if group.preemptor else "",
                )
    return None


def find_waiting(snapshot: Snapshot, pod: str) -> WaitingPod:
    """Return the waiting pod. Raises `UsageProblem` if that pod does not wait."""
    key = pod if "/" in pod else f"default/{pod}"
    for waiting in snapshot.waiting:
        if key_of(waiting.pod) == key:
            return waiting
    if found := placed_pod(snapshot, key):
        raise UsageProblem(f"pod {key} has its place: {found.summary}")
    name = key.partition("/")[2]  # those with the same name come first: users often forget the namespace
    keys = sorted((key_of(each.pod) for each in snapshot.waiting), key=lambda each: each.partition("/")[2] != name)
    more = f" and {len(keys) - SHOWN} more" if len(keys) > SHOWN else ""
    waiting_pods = f"these wait: {', '.join(keys[:SHOWN])}{more}" if keys else "no pod waits"
    raise UsageProblem(
        f"the extender knows no pod {key}: it does not exist, has ended, is not enabled for HiveD, or was not bound by "
        f"the extender; {waiting_pods}"
    )


def _standing(group: SavedGroup, groups: Sequence[SavedGroup]) -> str:
    """Describe a placed group, and whether it may keep its place."""
    named = f"affinity group {group.spec.affinity_group.name}"
    if group.state is GroupState.BEING_PREEMPTED:
        taken = _devices(group)
        preemptors = [each for each in groups if each.state is GroupState.PREEMPTING and _devices(each) & taken]
        names = ", ".join(each.spec.affinity_group.name for each in preemptors)
        return f"{named}, which is being preempted by {names}"
    if group.preemptor:
        named += ", which has lost its quota and runs on as an opportunistic one"
    return (
        f"{named}; if it is still Pending, it is being bound: its Events, or the extender's log, say what blocks that"
    )


def _devices(group: SavedGroup) -> set[tuple[str, int]]:
    return {(slot.node, device) for slot in group.slots for device in slot.devices}


def print_explanation(out: Output, found: explaining.PodExplanation) -> None:
    """Print the verdict, then the findings behind it."""
    out.line(Text.assemble((f"{found.pod}: ", "bold"), state(found.verdict), f": {found.summary}"))
    print_findings(out, found)


def print_findings(out: Output, found: explaining.PodExplanation) -> None:
    """Print what is behind the verdict."""
    if found.needs:
        out.line(f"  group {found.group} of {found.virtual_cluster}, priority {found.priority}, needs {found.needs}")
    for place in found.places:
        out.line(f"  place {place}")
    for victim in found.victims:
        effect = "takes the quota, not the devices, of" if victim.downgraded else "waits for"
        who = f"group {victim.group} of {victim.virtual_cluster}, priority {victim.priority}: {', '.join(victim.pods)}"
        out.line(f"  {effect} {who}")
    for chain in found.chains:
        out.line(Text.assemble("Chain ", (chain.chain, "bold"), f", {chain.scope}"))
        out.line(f"  {chain.outcome}")
        if chain.usable_cells:
            out.line(f"  {count(chain.usable_cells, 'cell')} could take the smallest pod")
        for excluded in chain.excluded:
            more = excluded.cells - len(excluded.examples)
            names = "; ".join(excluded.examples) + (f"; and {more} more" if more else "")
            out.line(f"  {count(excluded.cells, 'cell')} excluded, {excluded.reason}: {names}")
    for hint in found.hints:
        out.line(f"Hint: {hint}")


async def simulate(
    cli: LocalCli,
    pod: Pods = None,
    lose: Lose = None,
    add: Add = None,
    extender: Extender = DEFAULT_EXTENDER,
    snapshot: SnapshotFile = None,
) -> int:
    """Try lost nodes, added cells or new pods on a copy. The extender's own state does not change. Exits with 2 if a
    pod would have to wait."""
    if not (pod or lose or add):
        raise UsageProblem("nothing to simulate: give --pod, --lose or --add")
    saved = await load_snapshot(extender, snapshot)
    pods = [each for name in pod or () for each in _pods(saved, name)]
    found = explaining.simulate(saved, pods, lose=lose or (), add=add or ())

    def render() -> None:
        nodes = ", ".join(found.lost_nodes)
        if nodes and not found.hit_groups:
            cli.out.line(f"no pod is on {nodes}")
        elif nodes:
            cli.out.line(f"{count(len(found.hit_groups), 'group')} on {nodes}:")
            for group in found.hit_groups:
                pods_of = ", ".join(group.pods)
                cli.out.line(f"  {group.group} of {group.virtual_cluster}, priority {group.priority}: {pods_of}")
            if not found.unserved_quotas:
                cli.out.line("the unused quota of all virtual clusters can still be served")
        for quota in found.unserved_quotas:
            was = f", {quota.before} before" if quota.before != quota.cells else ", as before"
            cli.out.line(
                f"{quota.virtual_cluster}: no healthy hardware is left for {quota.cells} of its {quota.cell_type} in "
                f"chain {quota.chain}{was}"
            )
        for pod in found.pods:
            print_explanation(cli.out, pod)

    cli.out.show(found, render)
    return NOT_FULLY_PLACED if any(each.verdict in ("wait", "refused") for each in found.pods) else 0


def _pods(snapshot: Snapshot, name: str) -> Sequence[Object]:
    """Return the pods of the file of that name if it exists, each with the namespace and UID that the API server would
    give it; else the waiting pod of that name. Raises `UsageProblem`."""
    path = Path(name)
    if name != "-" and not path.exists():
        if path.suffix in _FILES:
            raise UsageProblem(f"--pod {name}: there is no such file")
        return [find_waiting(snapshot, name).pod]
    try:
        read = load_yaml_documents(read_file("--pod", path), max_values=MAX_FILE_VALUES)
    except Undecodable as error:
        raise UsageProblem(f"--pod {name}: {error}") from error
    found: list[object] = []
    for document in read:
        is_list = isinstance(document, dict) and document.get("kind") == "List"  # as kubectl accepts it
        items = document.get("items") if is_list else None
        if document is not None:
            found += items if isinstance(items, list) else [document]
    pods = []
    for number, document in enumerate(found, 1):
        kind = document.get("kind") if isinstance(document, dict) else None
        if not isinstance(document, dict) or kind != "Pod":
            raise UsageProblem(f"--pod {name}: document {number} is not a Pod" + (f", but a {kind}" if kind else ""))
        metadata, spec = document.get("metadata"), document.get("spec")
        if not isinstance(metadata, dict) or not metadata.get("name"):
            raise UsageProblem(f"--pod {name}: document {number} has no metadata.name")
        named = {"namespace": "default", "uid": f"simulated-{name}-{number}", **metadata}
        pods.append({**document, "metadata": named, "spec": spec if isinstance(spec, dict) else {}})
    return pods


async def snapshot(cli: LocalCli, extender: Extender = DEFAULT_EXTENDER) -> None:
    """Print the whole state of a running extender as JSON. It has the configuration, healthy nodes, groups and waiting
    pods. `explain` and `simulate` read it with --snapshot.
    """
    sys.stdout.buffer.write(await fetch(extender))
    sys.stdout.buffer.write(b"\n")
