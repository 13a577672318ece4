"""LabelScheduler: a pod may run wherever the labels match; nothing is reserved.

The model: it answers from a `NodeDirectory`, in memory. An answer is kept per selector until the directory's version
changes, and is the very same object while it stays equal, so asking for ten thousand RCs with a handful of selectors
costs a handful of passes over the nodes.

Keeping a pod and placing one differ: a cordoned or briefly dead node keeps what it has and gets nothing new.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from scheduler.base import Eligibility, NodeDirectory, NodeState, SchedulerError
from store.manifest import Manifest
from store.selectors import Requirement, Selector
from store.view import TreeView

MAX_CACHED = 4096
SHOWN_NODES = 3


class _Answer(NamedTuple):
    version: int
    eligibility: Eligibility


class LabelScheduler:
    """A `Scheduler` by labels only."""

    def __init__(self, directory: NodeDirectory) -> None:
        self._directory = directory
        self._answers: dict[Selector, _Answer] = {}

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
        version = self._directory.version
        answer = self._answers.get(node_selector)
        if answer is not None and answer.version == version:
            return answer.eligibility
        eligibility = _eligibility(self._directory.nodes(), node_selector)
        if answer is not None and answer.eligibility == eligibility:
            eligibility = answer.eligibility
        elif answer is None and len(self._answers) >= MAX_CACHED:
            self._answers.clear()
        self._answers[node_selector] = _Answer(version, eligibility)
        return eligibility

    async def allocate_nodes(
        self, manifest: Manifest, node_selector: Selector, allocation_count: int, force: bool = False
    ) -> Sequence[str]:
        """Always raises `SchedulerError`: every node that can be had is eligible already. The message says what the
        others lack."""
        raise SchedulerError(shortage(node_selector, self._directory, self.explain(manifest, node_selector)))

    async def deallocate_nodes(self, node_selector: Selector, nodes: Iterable[str], *, pod_id: str = "") -> None:
        """Nothing is reserved, so there is nothing to free."""

    def explain(self, manifest: Manifest, node_selector: Selector) -> Mapping[str, str]:
        """For every node that gets no new pod under the selector: why, in words for an operator."""
        nodes = self._directory.nodes()
        return {name: why for name in sorted(nodes) if (why := obstacle(nodes[name], node_selector))}


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
        return "it is lost: its agent has not answered for too long; start the agent, or remove the node"
    if not node.live:
        return "its agent does not answer; start it"
    return ""


def _unmet(term: Requirement, node: NodeState) -> str:
    value = node.labels.get(term.key)
    has = f"no label {term.key}" if value is None else f"{term.key}={value}"
    return f"it has {has}, the selector asks for {term}"


def shortage(selector: Selector, directory: NodeDirectory, reasons: Mapping[str, str]) -> str:
    """A message for when no further node can be had: what was asked for, and what the first nodes lack."""
    wanted = f"selector {str(selector)!r}"
    known = len(directory.nodes())
    if not known:
        return f"{wanted}: no node is registered; start an agent"
    shown = [f"{name}: {why}" for name, why in list(reasons.items())[:SHOWN_NODES]]
    more = [f"and {len(reasons) - SHOWN_NODES} more"] if len(reasons) > SHOWN_NODES else []
    left_out = f"; left out: {'; '.join(shown + more)}" if reasons else ""
    return f"{wanted}: none of the {known} nodes can be allocated beyond those eligible now{left_out}"
