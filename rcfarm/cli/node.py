"""`rcfarm node`: looking at nodes, labelling them, and taking them out of service."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.text import Text

from rcfarm.cli.arguments import NodeName, parse_pairs
from rcfarm.cli.command import Cli, command
from rcfarm.cli.errors import UsageProblem
from rcfarm.cli.output import state
from rcfarm.cli.views import NodeInfo, node_info, unreadable_node
from rcfarm.cli.words import ago, capacity, count, labels
from store.keys import is_node_name
from store.selectors import Selector

app = typer.Typer(rich_markup_mode=None)


async def list_(
    cli: Cli,
    selector: Annotated[
        str, typer.Option("--selector", "-l", metavar="SELECTOR", help="Only nodes whose labels match, as in pool=web.")
    ] = "",
) -> None:
    """List the nodes."""
    wanted = Selector.parse(selector)
    listed, pods = await asyncio.gather(cli.nodes.list(), _pods(cli))
    shown = {name: node_info(node, pods[name]) for name, node in listed.nodes.items()}
    shown = {name: info for name, info in shown.items() if wanted.matches(info.labels)}
    for error in listed.bad:
        name = error.key.removeprefix(cli.keys.nodes).partition("/")[0]
        if name not in listed.nodes and not selector:
            shown.setdefault(name, unreadable_node(name, pods[name]))
        if name in shown:
            shown[name].problems.append(str(error))
        cli.out.note(f"unreadable: {error}")
    rows = [shown[name] for name in sorted(shown)]
    cli.out.show(rows, lambda: _table(cli, rows))


async def _pods(cli: Cli) -> Counter[str]:
    """How many pods are ordered per node."""
    names = await cli.store.keys(cli.keys.intents)
    return Counter(name.removeprefix(cli.keys.intents).partition("/")[0] for name in names)


def _table(cli: Cli, nodes: Sequence[NodeInfo]) -> None:
    if not nodes:
        cli.out.note("no nodes; each registers when its agent starts (`rcfarm agent`)")
        return
    rows = [
        (
            node.name,
            _state(node),
            str(node.pods),
            labels(node.labels),
            capacity(node.capacity),
            node.address or "-",
            _agent(node),
        )
        for node in nodes
    ]
    cli.out.table(("NODE", "STATE", "PODS>", "LABELS", "CAPACITY", "ADDRESS", "AGENT"), rows)


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
    prefix = cli.keys.node_intents(node)
    pods = [name.removeprefix(prefix) for name in await cli.store.keys(prefix)]
    info = node_info(view, len(pods))

    def render() -> None:
        cli.out.line(Text.assemble(f"{info.name}  ", _state(info)))
        cli.out.line(f"labels: {labels(info.labels)}")
        cli.out.line(f"capacity: {capacity(info.capacity)}")
        cli.out.line(f"agent: {_agent(info)}, address {info.address or '-'}")
        cli.out.line(f"pods: {', '.join(pods) or 'none'}")

    cli.out.show(info, render)


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
    await _show(cli, node, f"node {node} has the labels {labels(spec.labels)}")


async def cordon(
    cli: Cli,
    node: NodeName,
    evict: Annotated[bool, typer.Option("--evict", help="Pods of dynamic RCs should leave, too.")] = False,
) -> None:
    """Send no new pods to a node."""
    await cli.nodes.cordon(node, evict=evict)
    held = (await _pods(cli))[node]
    leaving = (
        f"its {count(held, 'pod')} will be moved where the RC is dynamic"
        if evict
        else f"its {count(held, 'pod')} may stay"
    )
    await _show(cli, node, f"node {node} is cordoned; {leaving}")


async def uncordon(cli: Cli, node: NodeName) -> None:
    """Use a node again."""
    await cli.nodes.uncordon(node)
    await _show(cli, node, f"node {node} takes pods again")


async def policy(cli: Cli, node: NodeName) -> None:
    """Print the policy for the Consul token of a node's agent: it may write the keys of that node alone."""
    if not is_node_name(node):
        raise UsageProblem(f"{node!r} is not a node name: lower-case letters, digits, '-' and '.'")
    keys = cli.keys
    writes = [keys.node(node), keys.node_intents(node), keys.node_realities(node), *keys.node_healths(node)]
    rules = [f'key "{keys.meta}" {{ policy = "read" }}', f'key_prefix "{keys.manifests}" {{ policy = "read" }}']
    rules += [f'key_prefix "{prefix}" {{ policy = "write" }}' for prefix in writes]
    rules += [f'{kind}_prefix "" {{ policy = "write" }}' for kind in ("session", "service")]
    cli.out.show(rules, lambda: typer.echo("\n".join(rules)))


async def _show(cli: Cli, name: str, sentence: str) -> None:
    view, pods = await asyncio.gather(cli.nodes.get(name), _pods(cli))
    cli.out.show(node_info(view, pods[name]), lambda: cli.out.line(sentence))


command(app, "list")(list_)
command(app, "get")(get)
command(app, "label", context_settings={"ignore_unknown_options": True})(label)
command(app, "cordon")(cordon)
command(app, "uncordon")(uncordon)
command(app, "policy", reads_meta=False)(policy)
