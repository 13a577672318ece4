"""`rcfarm hived explain`: why a pod waits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.text import Text

from rcfarm.cli.errors import UsageProblem
from rcfarm.cli.hived_snapshot import DEFAULT_EXTENDER, Extender, SnapshotFile, load_snapshot
from rcfarm.cli.local import LocalCli
from rcfarm.cli.output import state
from rcfarm.cli.words import count
from scheduler.hived.explain import ChainFinding, PodExplanation, Victim
from scheduler.hived.explain import explain as explain_pod
from scheduler.hived.groups import GroupState
from scheduler.hived.simulate import restored
from scheduler.hived.snapshot import SavedGroup, SavedSlot, Snapshot, WaitingPod
from store.kube.objects import key_of

SHOWN = 5  # waiting pods that an error names

PodName = Annotated[str, typer.Argument(metavar="POD", help="NAMESPACE/NAME, or NAME in the namespace `default`.")]


async def explain(
    cli: LocalCli, pod: PodName, extender: Extender = DEFAULT_EXTENDER, snapshot: SnapshotFile = None
) -> None:
    """Explain why a pod waits. For each chain: the cells that were considered, what excluded them, and which pods
    would have to go."""
    state_of = await load_snapshot(extender, snapshot)
    waiting = find_waiting(state_of, pod)
    found = explain_pod(restored(state_of), waiting.pod)
    cli.out.show(found, lambda: _print(cli, found, waiting))


def find_waiting(snapshot: Snapshot, pod: str) -> WaitingPod:
    """Raises `UsageProblem` for a pod that does not wait."""
    key = pod if "/" in pod else f"default/{pod}"
    for waiting in snapshot.waiting:
        if key_of(waiting.pod) == key:
            return waiting
    groups = snapshot.saved_groups()
    for group in groups:
        for slot in group.slots:
            if slot.pod is not None and key_of(slot.pod) == key:
                raise UsageProblem(f"pod {key} has its place: {_place(slot)}, in {_standing(group, groups)}")
    raise UsageProblem(
        f"the extender knows no pod {key}: it is not there, has ended, is not enabled for HiveD, or was bound by "
        f"somebody else; {_who_waits(snapshot, key)}"
    )


def _place(slot: SavedSlot) -> str:
    return f"it is on {slot.node}: {','.join(map(str, slot.devices))}"


def _standing(group: SavedGroup, groups: Sequence[SavedGroup]) -> str:
    """A group with a place, and whether it may keep it."""
    named = f"affinity group {group.spec.affinity_group.name}"
    if group.state is GroupState.BEING_PREEMPTED:
        return f"{named}, which is being preempted by {', '.join(_claimants(group, groups))}"
    if group.preemptor:
        named += ", which has lost its quota and runs on as an opportunistic one"
    return (
        f"{named}; if it is still Pending, it is being bound: its Events, or the extender's log, say what is in the way"
    )


def _claimants(victim: SavedGroup, groups: Sequence[SavedGroup]) -> list[str]:
    wanted = _devices(victim)
    claiming = [group for group in groups if group.state is GroupState.PREEMPTING and _devices(group) & wanted]
    return [group.spec.affinity_group.name for group in claiming]


def _devices(group: SavedGroup) -> set[tuple[str, int]]:
    return {(slot.node, device) for slot in group.slots for device in slot.devices}


def _who_waits(snapshot: Snapshot, key: str) -> str:
    """Those of the same name first: of a pod that is asked about, the namespace is forgotten easily."""
    name = key.partition("/")[2]
    keys = sorted((key_of(each.pod) for each in snapshot.waiting), key=lambda each: each.partition("/")[2] != name)
    more = f" and {len(keys) - SHOWN} more" if len(keys) > SHOWN else ""
    return f"these wait: {', '.join(keys[:SHOWN])}{more}" if keys else "no pod waits"


def _print(cli: LocalCli, found: PodExplanation, waiting: WaitingPod) -> None:
    print_explanation(cli, found)
    if waiting.reason:
        cli.out.line()
        cli.out.line(f"The last answer to kube-scheduler ({waiting.state}): {waiting.reason}")


def print_explanation(cli: LocalCli, found: PodExplanation) -> None:
    """The verdict first, then what it rests on."""
    cli.out.line(Text.assemble((f"{found.pod}: ", "bold"), state(found.verdict), f": {found.summary}"))
    if found.needs:
        cli.out.line(
            f"  group {found.group} of {found.virtual_cluster}, priority {found.priority}, needs {found.needs}"
        )
    for place in found.places:
        cli.out.line(f"  place {place}")
    for victim in found.victims:
        cli.out.line(f"  {_victim(victim)}")
    for chain in found.chains:
        _print_chain(cli, chain)
    for hint in found.hints:
        cli.out.line(f"Hint: {hint}")


def _victim(victim: Victim) -> str:
    who = f"group {victim.group} of {victim.virtual_cluster}, priority {victim.priority}: {', '.join(victim.pods)}"
    return f"{'takes the quota, not the devices, of' if victim.downgraded else 'waits for'} {who}"


def _print_chain(cli: LocalCli, chain: ChainFinding) -> None:
    cli.out.line(Text.assemble("Chain ", (chain.chain, "bold"), f", {chain.scope}"))
    cli.out.line(f"  {chain.outcome}")
    if chain.usable_cells:
        cli.out.line(f"  {count(chain.usable_cells, 'cell')} could take the smallest pod")
    for excluded in chain.excluded:
        more = excluded.cells - len(excluded.examples)
        names = "; ".join(excluded.examples) + (f"; and {more} more" if more else "")
        cli.out.line(f"  {count(excluded.cells, 'cell')} excluded, {excluded.reason}: {names}")
