"""`rcfarm hived simulate`: try a change on a copy of the state."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from rcfarm.cli.hived.explain import find_waiting, print_explanation
from rcfarm.cli.hived.snapshot import DEFAULT_EXTENDER, Extender, SnapshotFile, load_snapshot
from rcfarm.cli.kit.command import LocalCli
from rcfarm.cli.kit.errors import NOT_FULLY_PLACED, UsageProblem
from rcfarm.cli.kit.formatting import count
from rcfarm.cli.kit.options import read_file
from scheduler.hived.inspection.simulate import simulate as run_simulation
from scheduler.hived.inspection.snapshot import Snapshot
from store.decoding import MAX_FILE_VALUES, Undecodable, load_yaml_documents
from store.kube.api.objects import Object

_FILES = (".yaml", ".yml", ".json")  # a name with such an ending is a file's, though a pod could have it

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
    state = await load_snapshot(extender, snapshot)
    pods = [each for name in pod or () for each in _pods(state, name)]
    found = run_simulation(state, pods, lose=lose or (), add=add or ())

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
            print_explanation(cli, pod)

    cli.out.show(found, render)
    return NOT_FULLY_PLACED if any(each.verdict in ("wait", "refused") for each in found.pods) else 0


def _pods(snapshot: Snapshot, name: str) -> Sequence[Object]:
    """Return the pods of the file of that name if it exists, else the waiting pod of that name."""
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
    return [_checked(name, number, document) for number, document in enumerate(found, 1)]


def _checked(file: str, number: int, document: object) -> Object:
    """Return the pod with the namespace and UID that the API server would give it. Raises `UsageProblem`."""
    kind = document.get("kind") if isinstance(document, dict) else None
    if not isinstance(document, dict) or kind != "Pod":
        raise UsageProblem(f"--pod {file}: document {number} is not a Pod" + (f", but a {kind}" if kind else ""))
    metadata = document.get("metadata")
    if not isinstance(metadata, dict) or not metadata.get("name"):
        raise UsageProblem(f"--pod {file}: document {number} has no metadata.name")
    spec = document.get("spec")
    named = {"namespace": "default", "uid": f"simulated-{file}-{number}", **metadata}
    return {**document, "metadata": named, "spec": spec if isinstance(spec, dict) else {}}
