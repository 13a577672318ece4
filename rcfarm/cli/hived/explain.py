"""`rcfarm hived explain`: the reasons why a pod waits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.text import Text

from rcfarm.cli.hived.snapshot import DEFAULT_EXTENDER, Extender, SnapshotFile, load_snapshot
from rcfarm.cli.kit.command import LocalCli
from rcfarm.cli.kit.errors import UsageProblem
from rcfarm.cli.kit.formatting import count
from rcfarm.cli.kit.output import state
from scheduler.hived.cells.groups import GroupState
from scheduler.hived.inspection.explain import PodExplanation
from scheduler.hived.inspection.explain import explain as explain_pod
from scheduler.hived.inspection.simulate import restored
from scheduler.hived.inspection.snapshot import SavedGroup, Snapshot, WaitingPod
from store.kube.api.objects import key_of

SHOWN = 5  # waiting pods that an error names

PodName = Annotated[str, typer.Argument(metavar="POD", help="NAMESPACE/NAME, or NAME in the namespace `default`.")]


async def explain(
    cli: LocalCli, pod: PodName, extender: Extender = DEFAULT_EXTENDER, snapshot: SnapshotFile = None
) -> None:
    """Explain why a pod waits. For each chain: the cells considered, what excluded them, and the pods to preempt."""
    state_of = await load_snapshot(extender, snapshot)
    waiting = find_waiting(state_of, pod)
    found = explain_pod(restored(state_of), waiting.pod)

    def render() -> None:
        print_explanation(cli, found)
        if waiting.reason:
            cli.out.line()
            cli.out.line(f"The last answer to kube-scheduler ({waiting.state}): {waiting.reason}")

    cli.out.show(found, render)


def find_waiting(snapshot: Snapshot, pod: str) -> WaitingPod:
    """Return the waiting pod. Raises `UsageProblem` if that pod does not wait."""
    key = pod if "/" in pod else f"default/{pod}"
    for waiting in snapshot.waiting:
        if key_of(waiting.pod) == key:
            return waiting
    groups = snapshot.saved_groups()
    for group in groups:
        for slot in group.slots:
            if slot.pod is not None and key_of(slot.pod) == key:
                place = f"it is on {slot.node}: {','.join(map(str, slot.devices))}"
                raise UsageProblem(f"pod {key} has its place: {place}, in {_standing(group, groups)}")
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


def print_explanation(cli: LocalCli, found: PodExplanation) -> None:
    """Print the verdict, then the findings behind it."""
    cli.out.line(Text.assemble((f"{found.pod}: ", "bold"), state(found.verdict), f": {found.summary}"))
    if found.needs:
        cli.out.line(
            f"  group {found.group} of {found.virtual_cluster}, priority {found.priority}, needs {found.needs}"
        )
    for place in found.places:
        cli.out.line(f"  place {place}")
    for victim in found.victims:
        effect = "takes the quota, not the devices, of" if victim.downgraded else "waits for"
        who = f"group {victim.group} of {victim.virtual_cluster}, priority {victim.priority}: {', '.join(victim.pods)}"
        cli.out.line(f"  {effect} {who}")
    for chain in found.chains:
        cli.out.line(Text.assemble("Chain ", (chain.chain, "bold"), f", {chain.scope}"))
        cli.out.line(f"  {chain.outcome}")
        if chain.usable_cells:
            cli.out.line(f"  {count(chain.usable_cells, 'cell')} could take the smallest pod")
        for excluded in chain.excluded:
            more = excluded.cells - len(excluded.examples)
            names = "; ".join(excluded.examples) + (f"; and {more} more" if more else "")
            cli.out.line(f"  {count(excluded.cells, 'cell')} excluded, {excluded.reason}: {names}")
    for hint in found.hints:
        cli.out.line(f"Hint: {hint}")
