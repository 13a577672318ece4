"""The Scheduler protocol (the seed's `Scheduler`): which nodes a pod may run on.

Two sets, because keeping a pod and placing one are different questions: a blip of a node must not move what runs there,
but nothing new is sent to a node that does not answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from store.manifest import Manifest
from store.records import Capacity, Labels
from store.selectors import Selector
from store.view import TreeView


class SchedulerError(Exception):
    """The scheduler can't do what was asked; the message says why. `left_out`: nodes that can't be allocated now."""

    def __init__(self, message: str, *, left_out: int = 0) -> None:
        super().__init__(message)
        self.left_out = left_out


class NodeState(NamedTuple):
    """One node as the scheduler sees it.

    `live`: its agent holds `alive`. `lost`: dead for longer than `node_lost_after`.
    """

    name: str
    labels: Labels
    capacity: Capacity = Capacity()
    schedulable: bool = True
    evict: bool = False
    live: bool = True
    lost: bool = False


class Absence(NamedTuple):
    """A node whose agent does not hold `alive`. `since`: when this process noticed it; `lost_at`: when its pods become
    replaceable, or became so (`is_lost`). Both in RFC 3339, UTC."""

    since: str
    lost_at: str
    is_lost: bool = False


class NodeDirectory(Protocol):
    """The nodes as they are known now. `version` changes whenever the answer does, so that results can be cached."""

    @property
    def version(self) -> int:
        """Grows with every change of any node."""

    def nodes(self) -> Mapping[str, NodeState]:
        """Every known node by name."""


class Eligibility(NamedTuple):
    """`eligible`: nodes where a pod that is there may stay. `placeable`: nodes that may get a new one.

    `placeable` is in ascending name and always within `eligible`.
    """

    eligible: frozenset[str]
    placeable: tuple[str, ...]


class Scheduler(Protocol):
    """Decides what nodes are appropriate for a pod (the seed's `Scheduler`)."""

    @property
    def version(self) -> int:
        """Grows whenever an answer may be another one than before; an RC that found no node asks again then."""

    async def run(self) -> None:
        """Keep up what the scheduler has to keep up, until cancelled; returns at once when that is nothing."""

    def views(self) -> Sequence[TreeView[Any]]:
        """The views of the store that `run` keeps current."""

    async def eligible_nodes(self, manifest: Manifest, node_selector: Selector) -> Eligibility:
        """The nodes that this RC may schedule the manifest on (the seed's `EligibleNodes`)."""

    async def allocate_nodes(
        self, manifest: Manifest, node_selector: Selector, allocation_count: int, force: bool = False
    ) -> Sequence[str]:
        """Reserve further nodes; they are eligible in subsequent answers (the seed's `AllocateNodes`).

        May return fewer than asked for. `force`: even where the node prefers not to (a transfer off a bad node).
        Raises `SchedulerError` when none can be allocated, saying why.
        """

    async def deallocate_nodes(self, node_selector: Selector, nodes: Iterable[str], *, pod_id: str = "") -> None:
        """The pod is gone from `nodes`, or about to go: free its reservations (the seed's `DeallocateNodes`).

        What is still in use is freed by the call after the pod is gone. `pod_id` "" frees every reservation made under
        the selector there.
        """

    def explain(self, manifest: Manifest, node_selector: Selector) -> Mapping[str, str]:
        """For every node that `placeable` leaves out: why, in words for an operator.

        It looks at each node: for an operator who asks, not for a reconcile.
        """
