"""LabelScheduler: a pod may run wherever the labels match; nothing is reserved.

The model: it answers from a `NodeDirectory`, in memory. An answer is cached per selector until the directory's version
changes, and equal answers are the same object, so ten thousand RCs with a handful of selectors cost a handful of passes
over the nodes.

Keeping a pod and placing one differ: a cordoned or briefly dead node keeps what it has and gets nothing new.

The reasons for a shortage are counted by kind, once per selector and version, too: ten thousand RCs without a node ask
at the same time. `explain` gives the reason for each single node, to an operator.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from scheduler.protocol import Eligibility, NodeDirectory, NodeState, SchedulerError
from store.kv.view import TreeView
from store.schema.manifest import Manifest
from store.schema.selectors import Selector

MAX_CACHED = 4096
SHOWN_NODES = 3


class Shortage(NamedTuple):
    """Why no further node is available. `left_out`: number of nodes that can't be allocated."""

    left_out: int
    message: str


@dataclass(slots=True)
class _Answer:
    version: int
    eligibility: Eligibility
    shortage: Shortage | None = None  # computed on first use


class LabelScheduler:
    """A `Scheduler` by labels only."""

    def __init__(self, directory: NodeDirectory) -> None:
        self.directory = directory
        self._answers: dict[tuple[Selector, bool | None], _Answer] = {}

    @property
    def version(self) -> int:
        """Return the directory's version: answers depend on nothing else."""
        return self.directory.version

    async def run(self) -> None:
        """Do nothing: the directory maintains itself."""

    def views(self) -> Sequence[TreeView[Any]]:
        """Return no views: the directory has its own."""
        return ()

    async def eligible_nodes(self, manifest: Manifest, node_selector: Selector) -> Eligibility:
        """Return the nodes that match, whatever the manifest requests."""
        return self.eligibility(node_selector)

    def eligibility(self, node_selector: Selector) -> Eligibility:
        """Return the answer of `eligible_nodes`; constant time while no node changes."""
        return self._answer(node_selector).eligibility

    def every_node(self, node_selector: Selector, *, tolerate_drain: bool) -> Eligibility:
        """Return where a daemon set has its pods: they stay on lost nodes, and, if they tolerate it, on nodes that are
        being emptied."""
        return self._answer(node_selector, tolerate_drain).eligibility

    async def allocate_nodes(
        self, manifest: Manifest, node_selector: Selector, allocation_count: int, force: bool = False
    ) -> Sequence[str]:
        """Raise `SchedulerError`: every available node is eligible already. The message says why the other nodes are
        not.
        """
        answer = self._answer(node_selector)
        if answer.shortage is None:
            answer.shortage = shortage(node_selector, self.directory.nodes())
        raise SchedulerError(answer.shortage.message, left_out=answer.shortage.left_out)

    async def deallocate_nodes(self, node_selector: Selector, nodes: Iterable[str], *, pod_id: str = "") -> None:
        """Do nothing: nothing is reserved."""

    def explain(self, manifest: Manifest, node_selector: Selector) -> Mapping[str, str]:
        """Return, for every node that gets no new pod under the selector, the reason, in words for an operator."""
        nodes = self.directory.nodes()
        return {name: why for name in sorted(nodes) if (why := obstacle(nodes[name], node_selector))}

    def _answer(self, selector: Selector, tolerate_drain: bool | None = None) -> _Answer:
        """Return the answer for the selector; `tolerate_drain` None: for an RC that is no daemon set."""
        version, key = self.directory.version, (selector, tolerate_drain)
        answer = self._answers.get(key)
        if answer is not None and answer.version == version:
            return answer
        keeps_lost = tolerate_drain is not None
        eligible = [
            node
            for node in self.directory.nodes().values()
            if (tolerate_drain or not node.evict) and (keeps_lost or not node.lost) and selector.matches(node.labels)
        ]
        placeable = sorted(
            node.name for node in eligible if node.schedulable and node.live and not node.evict and not node.lost
        )
        eligibility = Eligibility(frozenset(node.name for node in eligible), tuple(placeable))
        if answer is not None and answer.eligibility == eligibility:
            eligibility = answer.eligibility
        elif answer is None and len(self._answers) >= MAX_CACHED:
            self._answers.clear()
        answer = self._answers[key] = _Answer(version, eligibility)
        return answer


def obstacle(node: NodeState, selector: Selector) -> str:
    """Return why the node gets no new pod under the selector, or ""."""
    unmet = []
    for term in selector.unmet(node.labels):
        value = node.labels.get(term.key)
        has = f"no label {term.key}" if value is None else f"{term.key}={value}"
        unmet.append(f"it has {has}, the selector asks for {term}")
    if unmet:
        return "; ".join(unmet)
    if node.evict:
        return f"it is being emptied; `rcfarm node uncordon {node.name}` uses it again"
    if not node.schedulable:
        return f"it is cordoned; `rcfarm node uncordon {node.name}` uses it again"
    if node.lost:
        return "it is lost: its agent has not answered for too long; start it (`rcfarm agent`)"
    if not node.live:
        return "its agent does not answer; start it (`rcfarm agent`)"
    return ""


def kind_of_obstacle(node: NodeState, selector: Selector) -> str:
    """Return the kind of `obstacle` that the node has, as in "2 KIND", or ""."""
    if not selector.matches(node.labels):
        return "that do not match"
    if node.evict or not node.schedulable:
        return "cordoned"
    return "" if node.live else "without a live agent"


def shortage(selector: Selector, nodes: Mapping[str, NodeState]) -> Shortage:
    """Return the obstacles of all nodes, counted by kind."""
    kinds: dict[str, list[str]] = {}
    for name, node in nodes.items():
        if kind := kind_of_obstacle(node, selector):
            kinds.setdefault(kind, []).append(name)
    return shortage_of(selector, nodes, kinds, lambda name: obstacle(nodes[name], selector))


def shortage_of(
    selector: Selector, nodes: Mapping[str, NodeState], kinds: Mapping[str, list[str]], why: Callable[[str], str]
) -> Shortage:
    """Return the message for a shortage: the request, and the nodes' obstacles.

    `kinds`: the nodes by kind of obstacle; `why` gives one node's obstacle, for when there are few.
    """
    wanted = f"selector {str(selector)!r}"
    if not nodes:
        return Shortage(0, f"{wanted}: no node is registered; start an agent (`rcfarm agent`)")
    count = sum(map(len, kinds.values()))
    message = f"{wanted}: none of the {len(nodes)} nodes can be allocated beyond those eligible now"
    if 0 < count <= SHOWN_NODES:
        names = sorted(name for found in kinds.values() for name in found)
        message += "; left out: " + "; ".join(f"{name}: {why(name)}" for name in names)
    elif count:
        counted = []
        for kind, found in sorted(kinds.items()):
            more = ", …" if len(found) > SHOWN_NODES else ""
            counted.append(f"{len(found)} {kind} ({', '.join(heapq.nsmallest(SHOWN_NODES, found))}{more})")
        message += f"; left out: {', '.join(counted)}; `rcfarm rc explain` gives the reason of each"
    return Shortage(count, message)
