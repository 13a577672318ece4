"""`rcfarm hived explain`: why a pod waits."""

from __future__ import annotations

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
from scheduler.hived.simulate import restored
from scheduler.hived.snapshot import Snapshot, WaitingPod
from store.kube.objects import key_of

PodName = Annotated[str, typer.Argument(metavar="POD", help="NAMESPACE/NAME, or NAME in the namespace `default`.")]


async def explain(
    cli: LocalCli, pod: PodName, extender: Extender = DEFAULT_EXTENDER, snapshot: SnapshotFile = None
) -> None:
    """Why a pod waits: in each chain, which cells were considered and what excluded them, and who would have to go."""
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
    for place, group in _places(snapshot):
        if place[0] == key:
            raise UsageProblem(
                f"pod {key} has its place: it is on {place[1]}, in affinity group {group}; if it is still Pending, it "
                "is being bound: its Events, or the extender's log, say what is in the way"
            )
    names = ", ".join(key_of(waiting.pod) for waiting in snapshot.waiting[:5])
    raise UsageProblem(
        f"the extender knows no pod {key}: it is not there, has ended, is not enabled for HiveD, or was bound by "
        f"somebody else; {'these wait: ' + names if names else 'no pod waits'}"
    )


def _places(snapshot: Snapshot) -> list[tuple[tuple[str, str], str]]:
    found = []
    for group in snapshot.saved_groups():
        for slot in group.slots:
            if slot.pod is not None:
                devices = ",".join(map(str, slot.devices))
                found.append(((key_of(slot.pod), f"{slot.node}: {devices}"), group.spec.affinity_group.name))
    return found


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
