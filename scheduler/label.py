"""LabelScheduler: a pod may run wherever the labels match; nothing is reserved.

The model: it answers from a `NodeDirectory`, in memory. An answer is kept per selector until the directory's version
changes, and is the very same object while it stays equal, so asking for ten thousand RCs with a handful of selectors
costs a handful of passes over the nodes.

Keeping a pod and placing one differ: a cordoned or briefly dead node keeps what it has and gets nothing new.

Why there is no further node is counted by kind, once per selector and version, too: ten thousand RCs without a node ask
for it at the same time. `explain` gives what each single node lacks, to an operator who asks.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from scheduler.base import Eligibility, NodeDirectory, NodeState, SchedulerError
from store.manifest import Manifest
from store.selectors import Requirement, Selector
from store.view import TreeView

MAX_CACHED = 4096
SHOWN_NODES = 3


class Shortage(NamedTuple):
    """Why no further node can be had. `left_out`: how many nodes there are that can't be allocated."""

    left_out: int
    message: str


@dataclass(slots=True)
class _Answer:
    version: int
    eligibility: Eligibility
    shortage: Shortage | None = None  # counted when it is first asked for


class LabelScheduler:
    """A `Scheduler` by labels only."""

    def __init__(self, directory: NodeDirectory) -> None:
        self._directory = directory
        self._answers: dict[Selector, _Answer] = {}

    @property
    def version(self) -> int:
        """The directory's: answers depend on nothing else."""
        return self._directory.version

    async def run(self) -> None:
        """The directory keeps itself up; there is nothing else."""

    def views(self) -> Sequence[TreeView[Any]]:
        """None: the directory's are its own."""
        return ()

    async def eligible_nodes(self, manifest: Manifest, node_selector: Selector) -> Eligibility:
        """The nodes that match, whatever the manifest asks of them."""
        return self.eligibility(node_selector)

    def eligibility(self, node_selector: Selector) -> Eligibility:
        """What `eligible_nodes` answers; constant time while no node changes."""
        return self._answer(node_selector).eligibility

    async def allocate_nodes(
        self, manifest: Manifest, node_selector: Selector, allocation_count: int, force: bool = False
    ) -> Sequence[str]:
        """Always raises `SchedulerError`: every node that can be had is eligible already. The message says what the
        others lack."""
        answer = self._answer(node_selector)
        if answer.shortage is None:
            answer.shortage = shortage(node_selector, self._directory.nodes())
        raise SchedulerError(answer.shortage.message, left_out=answer.shortage.left_out)

    async def deallocate_nodes(self, node_selector: Selector, nodes: Iterable[str], *, pod_id: str = "") -> None:
        """Nothing is reserved, so there is nothing to free."""

    def explain(self, manifest: Manifest, node_selector: Selector) -> Mapping[str, str]:
        """For every node that gets no new pod under the selector: why, in words for an operator."""
        nodes = self._directory.nodes()
        return {name: why for name in sorted(nodes) if (why := obstacle(nodes[name], node_selector))}

    def _answer(self, selector: Selector) -> _Answer:
        version = self._directory.version
        answer = self._answers.get(selector)
        if answer is not None and answer.version == version:
            return answer
        eligibility = _eligibility(self._directory.nodes(), selector)
        if answer is not None and answer.eligibility == eligibility:
            eligibility = answer.eligibility
        elif answer is None and len(self._answers) >= MAX_CACHED:
            self._answers.clear()
        answer = self._answers[selector] = _Answer(version, eligibility)
        return answer


def _eligibility(nodes: Mapping[str, NodeState], selector: Selector) -> Eligibility:
    eligible = [node for node in nodes.values() if not node.evict and not node.lost and selector.matches(node.labels)]
    placeable = sorted(node.name for node in eligible if node.schedulable and node.live)
    return Eligibility(frozenset(node.name for node in eligible), tuple(placeable))


def obstacle(node: NodeState, selector: Selector) -> str:
    """Why the node gets no new pod under the selector, or "" when it may."""
    unmet = selector.unmet(node.labels)
    if unmet:
        return "; ".join(_unmet(term, node) for term in unmet)
    if node.evict:
        return "it is being emptied; uncordon it to use it again"
    if not node.schedulable:
        return "it is cordoned; uncordon it to use it again"
    if node.lost:
        return "it is lost: its agent has not answered for too long; start the agent"
    if not node.live:
        return "its agent does not answer; start it"
    return ""


def kind_of_obstacle(node: NodeState, selector: Selector) -> str:
    """The kind of `obstacle` that the node has, as in "2 KIND", or ""."""
    if not selector.matches(node.labels):
        return "that do not match"
    if node.evict or not node.schedulable:
        return "cordoned"
    return "" if node.live else "without a live agent"


def _unmet(term: Requirement, node: NodeState) -> str:
    value = node.labels.get(term.key)
    has = f"no label {term.key}" if value is None else f"{term.key}={value}"
    return f"it has {has}, the selector asks for {term}"


def shortage(selector: Selector, nodes: Mapping[str, NodeState]) -> Shortage:
    """What speaks against each of the nodes, counted by kind."""
    kinds: dict[str, list[str]] = {}
    for name, node in nodes.items():
        if kind := kind_of_obstacle(node, selector):
            kinds.setdefault(kind, []).append(name)
    return shortage_of(selector, nodes, kinds, lambda name: obstacle(nodes[name], selector))


def shortage_of(
    selector: Selector, nodes: Mapping[str, NodeState], kinds: Mapping[str, list[str]], why: Callable[[str], str]
) -> Shortage:
    """A message for when no further node can be had: what was asked for, and what the nodes lack.

    `kinds`: the nodes by the kind of what speaks against them; `why` says it of one node, for when there are few.
    """
    wanted = f"selector {str(selector)!r}"
    if not nodes:
        return Shortage(0, f"{wanted}: no node is registered; start an agent")
    count = sum(map(len, kinds.values()))
    message = f"{wanted}: none of the {len(nodes)} nodes can be allocated beyond those eligible now"
    if 0 < count <= SHOWN_NODES:
        names = sorted(name for found in kinds.values() for name in found)
        message += "; left out: " + "; ".join(f"{name}: {why(name)}" for name in names)
    elif count:
        message += "; left out: " + ", ".join(_counted(kind, kinds[kind]) for kind in sorted(kinds))
        message += "; `rcfarm rc explain` gives the reason of each"
    return Shortage(count, message)


def _counted(kind: str, names: list[str]) -> str:
    shown = heapq.nsmallest(SHOWN_NODES, names)
    more = ", …" if len(names) > SHOWN_NODES else ""
    return f"{len(names)} {kind} ({', '.join(shown)}{more})"
