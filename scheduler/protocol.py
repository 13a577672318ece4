"""The Scheduler protocol (p2's `Scheduler`): which nodes a pod may run on.

It returns two sets, because keeping a pod and placing one differ: a brief outage of a node must not move its pods, but
nothing new is sent to a node that does not answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from store.errors import RcfarmError
from store.kv.view import TreeView
from store.schema.manifest import Manifest
from store.schema.records import Capacity, Labels
from store.schema.selectors import Selector


class SchedulerError(RcfarmError):
    """A request that the scheduler can't fulfil, with the reason. `left_out`: nodes that can't be allocated now."""

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
    """The currently known nodes. While `version` stays the same, results computed from the nodes can be cached."""

    @property
    def version(self) -> int:
        """Return a number that grows with every change of any node."""

    def nodes(self) -> Mapping[str, NodeState]:
        """Return every known node by name."""


class Eligibility(NamedTuple):
    """`eligible`: nodes where an existing pod may stay. `placeable`: nodes that may get a new one.

    `placeable` is ascending by name and always within `eligible`.
    """

    eligible: frozenset[str]
    placeable: tuple[str, ...]


class Scheduler(Protocol):
    """Decides which nodes are appropriate for a pod (p2's `Scheduler`)."""

    @property
    def version(self) -> int:
        """Return a number that grows whenever an answer may differ from before; an RC that found no node asks again
        then.
        """

    async def run(self) -> None:
        """Maintain the scheduler's state until cancelled; return at once if it has none."""

    def views(self) -> Sequence[TreeView[Any]]:
        """Return the views of the store that `run` keeps current."""

    async def eligible_nodes(self, manifest: Manifest, node_selector: Selector) -> Eligibility:
        """Return the nodes that this RC may schedule the manifest on (p2's `EligibleNodes`)."""

    async def allocate_nodes(
        self, manifest: Manifest, node_selector: Selector, allocation_count: int, force: bool = False
    ) -> Sequence[str]:
        """Reserve further nodes; they are eligible in subsequent answers (p2's `AllocateNodes`).

        May return fewer than requested. `force`: even where the node prefers not to (a transfer off a bad node). Raises
        `SchedulerError` with the reason if none can be allocated.
        """

    async def deallocate_nodes(self, node_selector: Selector, nodes: Iterable[str], *, pod_id: str = "") -> None:
        """Free the reservations of a pod that is gone from `nodes`, or about to go (p2's `DeallocateNodes`).

        A reservation still in use is freed by the call after the pod is gone. `pod_id` "" frees every reservation made
        under the selector on these nodes.
        """

    def explain(self, manifest: Manifest, node_selector: Selector) -> Mapping[str, str]:
        """Return, for every node that `placeable` leaves out, the reason, in words for an operator.

        It inspects each node, so do not call it in a reconcile.
        """
