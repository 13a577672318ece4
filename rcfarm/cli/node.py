"""`rcfarm node`: show nodes, label them, and take them out of service."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from typing import Annotated

import typer
from rich.text import Text

from rcfarm.cli.drain import drain, forecast, lines_of, undrain
from rcfarm.cli.kit.command import Cli, command
from rcfarm.cli.kit.json_views import NodeInfo, NodeRemoval, node_info
from rcfarm.cli.kit.options import NodeName, UsageProblem, Yes, confirm, parse_pairs
from rcfarm.cli.kit.output import ago, capacity, count, labels, state
from rcfarm.operations.fleet import listed, read_brake
from store.kv.protocol import BadRecord
from store.schema.keys import is_node_name
from store.schema.records import Capacity, Intent, decode
from store.schema.selectors import Selector

app = typer.Typer(rich_markup_mode=None)


async def list_(
    cli: Cli,
    selector: Annotated[
        str, typer.Option("--selector", "-l", metavar="SELECTOR", help="Only nodes whose labels match, as in pool=web.")
    ] = "",
) -> None:
    """List the nodes."""
    wanted = Selector.parse(selector)
    found, pods = await asyncio.gather(cli.nodes.list(), _pods(cli))
    shown = {name: node_info(node, pods[name]) for name, node in found.nodes.items()}
    shown = {name: info for name, info in shown.items() if wanted.matches(info.labels)}
    for error in found.bad:
        name = cli.keys.parse_node(error.key).node
        if name not in found.nodes and name not in shown and not selector:
            shown[name] = NodeInfo(
                name=name, live=False, schedulable=False, evict=False, pods=pods[name], labels={}, capacity=Capacity()
            )
        if name in shown:
            shown[name].problems.append(str(error))
        cli.out.note(f"unreadable: {error}")
    rows = [shown[name] for name in sorted(shown)]
    cells = (
        (
            node.name,
            _state(node),
            str(node.pods),
            labels(node.labels),
            capacity(node.capacity),
            node.address or "-",
            _agent(node),
        )
        for node in rows
    )
    columns = ("NODE", "STATE", "PODS>", "LABELS", "CAPACITY", "ADDRESS", "AGENT")
    cli.out.show(rows, lambda: cli.out.table(columns, cells), (node.name for node in rows))
    if not rows:
        cli.out.note(
            f"no node has labels that match {selector}"
            if found.nodes
            else "no nodes; each registers when its agent starts (`rcfarm agent`)"
        )


async def _pods(cli: Cli) -> Counter[str]:
    """Return the number of intents per node."""
    names = await cli.store.keys(cli.keys.intents)
    return Counter(cli.keys.parse_pod(name).node for name in names)


def _state(node: NodeInfo) -> Text:
    if node.problems:
        return state("unreadable")
    words = [] if node.schedulable else ["evicting" if node.evict else "cordoned"]
    if not node.live:
        words.insert(0, "dead")
    return Text(", ").join(state(word) for word in words or ["ready"])


def _agent(node: NodeInfo) -> str:
    if not node.live:
        return f"does not answer ({node.version})" if node.version else "does not answer"
    since = f"since {ago(node.agent_since)}" if node.agent_since else ""
    return " ".join(part for part in (node.version, since) if part) or "-"


async def get(cli: Cli, node: NodeName) -> None:
    """Show one node and what runs there."""
    view = await cli.nodes.get(node)
    pods = []
    for entry in (await cli.store.list(cli.keys.node_intents(node))).entries:
        task, pod_id = "", cli.keys.parse_pod(entry.key).pod_id
        with suppress(BadRecord):  # `rcfarm doctor` names it
            task = decode(Intent, entry.key, entry.value).task
        pods.append(f"{pod_id} (task {task})" if task else pod_id)
    info = node_info(view, len(pods))

    def render() -> None:
        cli.out.line(Text.assemble(f"{info.name}  ", _state(info)))
        cli.out.line(f"labels: {labels(info.labels)}")
        cli.out.line(f"capacity: {capacity(info.capacity)}")
        cli.out.line(f"agent: {_agent(info)}, address {info.address or '-'}")
        if info.limits:
            cli.out.hanging("limits: ", info.limits.words)
        cli.out.line(f"pods: {', '.join(pods) or 'none'}")

    cli.out.show(info, render, [info.name])


async def label(
    cli: Cli,
    node: NodeName,
    changes: Annotated[
        list[str], typer.Argument(metavar="KEY=VALUE | KEY- ...", help="Labels to set; KEY- removes one.")
    ],
) -> None:
    """Set or remove labels of a node."""
    removed = [item[:-1] for item in changes if item.endswith("-") and "=" not in item]
    pairs = parse_pairs("label", [item for item in changes if "=" in item or not item.endswith("-")])
    if both := sorted(pairs.keys() & set(removed)):
        raise UsageProblem(f"label {both[0]}: is both set and removed; do one")
    spec = await cli.nodes.set_labels(node, pairs, removed)
    has = f"the labels {labels(spec.labels)}" if spec.labels else "no labels"
    await _show(cli, node, f"node {node} has {has}")


async def cordon(
    cli: Cli,
    node: NodeName,
    evict: Annotated[
        bool,
        typer.Option(
            "--evict",
            help="Also move pods of dynamic RCs elsewhere and remove those of daemon sets; those of static RCs stay.",
        ),
    ] = False,
) -> None:
    """Send no new pods to a node."""
    await cli.nodes.cordon(node, evict=evict)
    if not evict:
        held = (await _pods(cli))[node]
        stay = f"its {count(held, 'pod')} may stay" if held else "there is no pod on it"
        await _show(cli, node, f"node {node} is cordoned; {stay}")
        return
    cordoned = await forecast(cli, [node])
    await _show(cli, node, f"node {node} is cordoned", *lines_of(cordoned, await read_brake(cli.store, cli.keys)))


async def uncordon(cli: Cli, node: NodeName) -> None:
    """Use a node again."""
    await cli.nodes.uncordon(node)
    await _show(cli, node, f"node {node} takes pods again")


async def remove(
    cli: Cli,
    node: NodeName,
    release_pods: Annotated[
        bool,
        typer.Option(
            "--release-pods",
            help="Also give up the pods that RCs have placed there; their owners place others. End what may still run "
            "on that machine first.",
        ),
    ] = False,
    yes: Yes = False,
) -> None:
    """Forget a dead node: its record, and what its agent has reported. It is refused while the agent lives."""
    there = await cli.nodes.removable(node, release_pods=release_pods)
    also = f" and give up {count(len(there), 'pod')} there" if there else ""
    confirm(f"Forget node {node}{also}?", yes=yes)
    released = await cli.nodes.remove(node, release_pods=release_pods)
    gave_up = f"; {count(len(released), 'pod')} given up: {listed(released, shown=10)}" if released else ""
    info = NodeRemoval(node=node, released=list(released))
    cli.out.show(info, lambda: cli.out.line(f"node {node} is forgotten{gave_up}"))


async def policy(
    cli: Cli,
    node: NodeName,
    exec_: Annotated[
        bool, typer.Option("--exec", help="Also what `rcfarm rc exec` needs: the right to read the audit log.")
    ] = False,
) -> None:
    """Print the Consul policy for a node's agent. It may write the keys of that node alone."""
    if not is_node_name(node):
        raise UsageProblem(f"{node!r} is not a node name: lower-case letters, digits, '-' and '.'")
    keys = cli.keys
    writes = [keys.node(node), keys.node_intents(node), keys.node_realities(node), keys.node_task_pods(node)]
    writes += keys.node_healths(node)
    rules = [f'key "{keys.meta}" {{ policy = "read" }}', f'key_prefix "{keys.manifests}" {{ policy = "read" }}']
    rules += [f'key_prefix "{prefix}" {{ policy = "write" }}' for prefix in writes]
    if exec_:
        rules.append(f'key_prefix "{keys.audit}" {{ policy = "read" }}')
    rules += [f'{kind}_prefix "" {{ policy = "write" }}' for kind in ("session", "service")]
    cli.out.show(rules, lambda: typer.echo("\n".join(rules)))


async def _show(cli: Cli, name: str, sentence: str, *details: str) -> None:
    view, pods = await asyncio.gather(cli.nodes.get(name), _pods(cli))

    def render() -> None:
        cli.out.line(sentence)
        for detail in details:
            cli.out.hanging("  ", detail)

    cli.out.show(node_info(view, pods[name]), render)


command(app, "list", lists=True)(list_)
command(app, "get", lists=True)(get)
command(app, "label", context_settings={"ignore_unknown_options": True})(label)
command(app, "cordon")(cordon)
command(app, "uncordon")(uncordon)
command(app, "drain")(drain)
command(app, "undrain")(undrain)
command(app, "remove")(remove)
command(app, "policy", reads_meta=False)(policy)
