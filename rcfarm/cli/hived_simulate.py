"""`rcfarm hived simulate`: what would happen if."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from rcfarm.cli.arguments import read_file
from rcfarm.cli.errors import NOT_FULLY_PLACED, UsageProblem
from rcfarm.cli.hived_explain import find_waiting, print_explanation
from rcfarm.cli.hived_snapshot import DEFAULT_EXTENDER, Extender, SnapshotFile, load_snapshot
from rcfarm.cli.local import LocalCli
from rcfarm.cli.words import count
from scheduler.hived.simulate import Simulation
from scheduler.hived.simulate import simulate as run_simulation
from scheduler.hived.snapshot import Snapshot
from store.decoding import MAX_FILE_VALUES, Undecodable, load_yaml_documents
from store.kube.objects import Object

_FILES = (".yaml", ".yml", ".json")  # a name that ends so is no pod's, though it could be

Pods = Annotated[
    list[str] | None,
    typer.Option(
        "--pod", metavar="FILE|POD", help="Pods of a YAML file, or a waiting one: NAMESPACE/NAME. May repeat."
    ),
]
Lose = Annotated[list[str] | None, typer.Option("--lose", metavar="NODE", help="A node that goes bad. May repeat.")]
Add = Annotated[
    list[str] | None,
    typer.Option("--add", metavar="CELL_TYPE=NODE[,NODE...]", help="A physical cell that is added. May repeat."),
]


async def simulate(
    cli: LocalCli,
    pod: Pods = None,
    lose: Lose = None,
    add: Add = None,
    extender: Extender = DEFAULT_EXTENDER,
    snapshot: SnapshotFile = None,
) -> int:
    """Try lost nodes, added cells or new pods on a copy. The extender's own state is not touched. Exits with 2 when a
    pod would have to wait."""
    if not (pod or lose or add):
        raise UsageProblem("nothing to simulate: give --pod, --lose or --add")
    state = await load_snapshot(extender, snapshot)
    pods = [each for name in pod or () for each in _pods(state, name)]
    found = run_simulation(state, pods, lose=lose or (), add=add or ())
    cli.out.show(found, lambda: _print(cli, found))
    return NOT_FULLY_PLACED if any(each.verdict in ("wait", "refused") for each in found.pods) else 0


def _pods(snapshot: Snapshot, name: str) -> Sequence[Object]:
    """Those of a file if there is one, else the waiting one of that name."""
    path = Path(name)
    if name != "-" and not path.exists():
        if path.suffix in _FILES:
            raise UsageProblem(f"--pod {name}: there is no such file")
        return [find_waiting(snapshot, name).pod]
    try:
        read = load_yaml_documents(read_file("--pod", path), max_values=MAX_FILE_VALUES)
    except Undecodable as error:
        raise UsageProblem(f"--pod {name}: {error}") from error
    documents = [document for document in read if document is not None]
    found = [each for document in documents for each in _items(document)]
    return [_checked(name, number, document) for number, document in enumerate(found, 1)]


def _items(document: object) -> Iterable[object]:
    """The objects of a `List`, as kubectl takes it, or the one that it is."""
    items = document.get("items") if isinstance(document, dict) and document.get("kind") == "List" else None
    return items if isinstance(items, list) else [document]


def _checked(file: str, number: int, document: object) -> Object:
    """A pod with what the scheduler needs: before the API server has given it a namespace and a UID."""
    kind = document.get("kind") if isinstance(document, dict) else None
    if not isinstance(document, dict) or kind != "Pod":
        raise UsageProblem(f"--pod {file}: document {number} is not a Pod" + (f", but a {kind}" if kind else ""))
    metadata = document.get("metadata")
    if not isinstance(metadata, dict) or not metadata.get("name"):
        raise UsageProblem(f"--pod {file}: document {number} has no metadata.name")
    spec = document.get("spec")
    named = {"namespace": "default", "uid": f"simulated-{file}-{number}", **metadata}
    return {**document, "metadata": named, "spec": spec if isinstance(spec, dict) else {}}


def _print(cli: LocalCli, found: Simulation) -> None:
    if found.lost_nodes:
        _print_loss(cli, found)
    for quota in found.unserved_quotas:
        was = f", {quota.before} before" if quota.before != quota.cells else ", as before"
        cli.out.line(
            f"{quota.virtual_cluster}: no healthy hardware is left for {quota.cells} of its {quota.cell_type} in chain "
            f"{quota.chain}{was}"
        )
    for pod in found.pods:
        print_explanation(cli, pod)


def _print_loss(cli: LocalCli, found: Simulation) -> None:
    nodes = ", ".join(found.lost_nodes)
    if not found.hit_groups:
        cli.out.line(f"no pod is on {nodes}")
        return
    cli.out.line(f"{count(len(found.hit_groups), 'group')} on {nodes}:")
    for group in found.hit_groups:
        cli.out.line(f"  {group.group} of {group.virtual_cluster}, priority {group.priority}: {', '.join(group.pods)}")
    if not found.unserved_quotas:
        cli.out.line("what virtual clusters have not used yet can still be served")
