"""Inspection: HiveD's view of groups and cells, as snapshots that block no decisions.

The answers have HiveD's fields, in the order of hivedscheduler's `pkg/api/types.go`.

The model: the JSON of all answers is kept in pieces, so that a change re-encodes only the pieces that show it, and the
core records what has changed. A request refreshes stale pieces for at most `SLICE` seconds at a time and yields to the
event loop in between. As soon as a slice ends with nothing stale, the references to all pieces are copied in the same
step: a snapshot of one moment, made by copying pointers. Later changes make pieces stale again; answers being sent are
not affected.

A node-level cell with everything below it is one piece; so is a preassigned cell below node level. A cell above those
is two pieces, one before and one after its children's. The pieces of a list of trees, in order, form a JSON array.

Requests refresh one after the other; later ones find little to do. Until the first request nothing is rendered.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, Literal, NamedTuple, TypeVar

import msgspec

from scheduler.hived.algorithm import HivedAlgorithm
from scheduler.hived.cells.cells import CellState, PhysicalCell, PhysicalLeaf, VirtualCell, combined
from scheduler.hived.cells.groups import AffinityGroup
from scheduler.hived.contract import OPPORTUNISTIC_PRIORITY
from scheduler.hived.errors import UserError
from scheduler.hived.inspection.snapshot import WaitingPod, save_group, separated, take_snapshot
from store.kube.api.objects import format_time, uid_of

SLICE = 0.001  # seconds of rendering without yielding
HEALTHY = "Healthy"
BAD = "Bad"
OPPORTUNISTIC_SUFFIX = "-opp"
_CHILDREN = b'"cellChildren":['  # unambiguous: quotes inside a JSON string are escaped
_encode = msgspec.json.Encoder().encode


class _CellStatus(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel", gc=False):
    """Fields of both kinds of cells. `leaf_cell_type` is set on top cells only."""

    leaf_cell_type: str = ""
    cell_type: str
    is_node_level: bool = False
    cell_address: str
    cell_state: str
    cell_healthiness: str
    cell_priority: int


class PhysicalCellStatus(_CellStatus, kw_only=True, omit_defaults=True, rename="camel", gc=False):
    """A physical cell. `vc`, `virtual_cell`: the tenant that has it now, and the virtual cell bound to it."""

    cell_children: list[PhysicalCellStatus] | None = None
    vc: str = ""
    virtual_cell: VirtualCellStatus | None = None


class VirtualCellStatus(_CellStatus, kw_only=True, omit_defaults=True, rename="camel", gc=False):
    """A virtual cell. `physical_cell`: the physical cell bound to it, without its children."""

    cell_children: list[VirtualCellStatus] | None = None
    physical_cell: PhysicalCellStatus | None = None


S = TypeVar("S", PhysicalCellStatus, VirtualCellStatus)


def physical_status(cell: PhysicalCell, state: CellState) -> PhysicalCellStatus:
    """Return the status of a cell without its children."""
    status = _bare_physical(cell, state)
    if cell.virtual is not None:
        status.virtual_cell = _bare(VirtualCellStatus, cell.virtual, state)
    return status


def physical_tree(cell: PhysicalCell) -> tuple[PhysicalCellStatus, CellState]:
    """Return the status and the state of a cell with all below it."""
    if not cell.children:
        return physical_status(cell, cell.state), cell.state
    children = [physical_tree(child) for child in cell.children]
    state = combined(below for _, below in children)
    status = physical_status(cell, state)
    status.cell_children = [child for child, _ in children]
    return status, state


def virtual_status(cell: VirtualCell, state: CellState) -> VirtualCellStatus:
    """Return the status of a cell without its children. `state`: of the physical cell bound to it."""
    status = _bare(VirtualCellStatus, cell, state)
    if cell.physical is not None:
        status.physical_cell = _bare_physical(cell.physical, state)
    return status


def virtual_tree(cell: VirtualCell) -> VirtualCellStatus:
    """Return the status of a cell with all below it."""
    status = virtual_status(cell, CellState.FREE if cell.physical is None else cell.physical.state)
    if cell.children:
        status.cell_children = [virtual_tree(child) for child in cell.children]
    return status


def opportunistic_status(leaf: PhysicalLeaf) -> VirtualCellStatus:
    """Return the status of an opportunistic leaf as one of the cells of the tenant that uses it."""
    physical = _bare_physical(leaf, leaf.state)
    return VirtualCellStatus(
        leaf_cell_type=physical.leaf_cell_type,
        cell_type=physical.cell_type,
        cell_address=leaf.address + OPPORTUNISTIC_SUFFIX,
        cell_state=CellState.USED,
        cell_healthiness=physical.cell_healthiness,
        cell_priority=OPPORTUNISTIC_PRIORITY,
        physical_cell=physical,
    )


def opportunistic_user(cell: PhysicalCell) -> str:
    """Return the tenant whose opportunistic pod has the leaf, or ""."""
    if isinstance(cell, PhysicalLeaf) and cell.user is not None and OPPORTUNISTIC_PRIORITY in cell.used:
        return cell.user.virtual_cluster
    return ""


def _bare_physical(cell: PhysicalCell, state: CellState) -> PhysicalCellStatus:
    status = _bare(PhysicalCellStatus, cell, state)
    status.vc = opportunistic_user(cell) or ("" if cell.virtual is None else cell.virtual.virtual_cluster.name)
    return status


def _bare(kind: type[S], cell: PhysicalCell | VirtualCell, state: CellState) -> S:
    chain = cell.chain.topology
    return kind(
        leaf_cell_type=chain.leaf_cell_type if cell.parent is None else "",
        cell_type=cell.cell_type,
        is_node_level=cell.is_node_level,
        cell_address=cell.address,
        cell_state=state,
        cell_healthiness=HEALTHY if cell.healthy else BAD,
        cell_priority=cell.priority,
    )


class GroupMetadata(msgspec.Struct):
    name: str


class LazyPreemption(msgspec.Struct, rename="camel"):
    """The last downgrade. `preemption_time`: in Kubernetes' time format."""

    preemptor: str
    preemption_time: str


class AffinityGroupStatus(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """`physical_placement`: device indices by node. `virtual_placement`: leaf addresses by preassigned cell.

    `priority`: as requested, even if the group was downgraded.
    """

    vc: str
    priority: int
    state: str
    physical_placement: dict[str, list[int]] = {}
    virtual_placement: dict[str, list[str]] = {}
    allocated_pods: list[str] = []
    preempting_pods: list[str] = []
    lazy_preemption_status: LazyPreemption | None = None


class AffinityGroupInfo(msgspec.Struct):
    """A group's name and status."""

    metadata: GroupMetadata
    status: AffinityGroupStatus


def group_info(group: AffinityGroup) -> AffinityGroupInfo:
    """Return the group's current status."""
    physical: dict[str, list[int]] = {}
    virtual: dict[str, list[str]] = {}
    for slot in group.slots:
        physical.setdefault(slot.node, []).extend(slot.devices)
        for cell in slot.virtual:
            virtual.setdefault(cell.preassigned.address, []).append(cell.address)
    lazy = group.lazy_preemption
    status = AffinityGroupStatus(
        vc=group.virtual_cluster,
        priority=group.spec.priority,
        state=group.state,
        physical_placement=physical,
        virtual_placement=virtual,
        allocated_pods=[uid_of(pod) for pod in group.pods()],
        preempting_pods=list(group.preempting_pods),
        lazy_preemption_status=None
        if lazy is None
        else LazyPreemption(lazy.preemptor, format_time(lazy.preemption_time)),
    )
    return AffinityGroupInfo(GroupMetadata(group.name), status)


C = TypeVar("C", PhysicalCell, VirtualCell)


class CellPieces(ABC, Generic[C]):
    """The pieces of `arrays`, in order, all stale at first.

    `pieces` is current except for stale cells. `bounds`: where each array begins, and where the last one ends.
    """

    def __init__(self, arrays: Sequence[Iterable[C]]) -> None:
        self.pieces: list[bytes] = []
        self.bounds: list[int] = []
        self._places: dict[C, tuple[int, int]] = {}
        self._first: set[C] = set()
        self._stale: list[set[C]] = []  # by number of levels above the one-piece cells: children are refreshed first
        for tops in arrays:
            self.bounds.append(len(self.pieces))
            for number, top in enumerate(tops):
                self._lay_out(top, is_first=number == 0)
        self.bounds.append(len(self.pieces))

    def _lay_out(self, cell: C, *, is_first: bool) -> None:
        begin = len(self.pieces)
        self.pieces.append(b"")
        if is_first:
            self._first.add(cell)
        if _height(cell):
            for number, child in enumerate(cell.children):
                self._lay_out(child, is_first=number == 0)
            self.pieces.append(b"")
        self._places[cell] = begin, len(self.pieces) - 1
        self.mark(cell)

    def mark(self, cell: C) -> None:
        """Mark a cell of one or more pieces as stale."""
        height = _height(cell)
        while len(self._stale) <= height:
            self._stale.append(set())
        self._stale[height].add(cell)

    def refresh_one(self) -> bool:
        """Re-encode one stale cell. Return False if none is stale."""
        cells = next((stale for stale in self._stale if stale), None)
        if cells is None:
            return False
        cell = cells.pop()
        begin, end = self._places[cell]
        comma = b"" if cell in self._first else b","
        if begin == end:
            self.pieces[begin] = comma + self._whole(cell)
        else:
            status = self._alone(cell)
            status.cell_children = []
            before, bracket, after = _encode(status).partition(_CHILDREN)
            self.pieces[begin], self.pieces[end] = comma + before + bracket, after
        return True

    @abstractmethod
    def _whole(self, cell: C) -> bytes:
        """Return the JSON of a one-piece cell."""

    @abstractmethod
    def _alone(self, cell: C) -> PhysicalCellStatus | VirtualCellStatus:
        """Return the status of a two-piece cell, without its children."""


class PhysicalPieces(CellPieces[PhysicalCell]):
    """Pieces of the physical trees. `opportunistic`: by tenant and by the node's position in `pieces`, the
    comma-separated JSON of the cells that inspection shows for the tenant's opportunistic pods. `states`: of the cells
    at node level and above, as of their last refresh.
    """

    def __init__(self, tops: Iterable[PhysicalCell]) -> None:
        self.opportunistic: dict[str, dict[int, bytes]] = {}
        self.states: dict[PhysicalCell, CellState] = {}
        super().__init__([tops])

    def _whole(self, cell: PhysicalCell) -> bytes:
        status, self.states[cell] = physical_tree(cell)
        by_tenant: dict[str, list[PhysicalLeaf]] = {}
        if cell.opportunistic:
            for leaf in cell.leaf_cells():
                if tenant := opportunistic_user(leaf):
                    by_tenant.setdefault(tenant, []).append(leaf)
        place, _ = self._places[cell]
        for tenant in self.opportunistic:
            self.opportunistic[tenant].pop(place, None)
        for tenant, leaves in by_tenant.items():
            shown = b",".join(_encode(opportunistic_status(leaf)) for leaf in leaves)
            self.opportunistic.setdefault(tenant, {})[place] = shown
        return _encode(status)

    def _alone(self, cell: PhysicalCell) -> PhysicalCellStatus:
        state = self.states[cell] = combined(self.states[child] for child in cell.children)
        return physical_status(cell, state)


class VirtualPieces(CellPieces[VirtualCell]):
    """Pieces with one array for each tenant. Refresh `physical` before a cell here."""

    def __init__(self, arrays: Sequence[Iterable[VirtualCell]], physical: PhysicalPieces) -> None:
        self._physical = physical
        super().__init__(arrays)

    def _whole(self, cell: VirtualCell) -> bytes:
        return _encode(virtual_tree(cell))

    def _alone(self, cell: VirtualCell) -> VirtualCellStatus:
        bound = cell.physical
        return virtual_status(cell, CellState.FREE if bound is None else self._physical.states[bound])


def _height(cell: PhysicalCell | VirtualCell) -> int:
    """Return the number of levels above the one-piece cells."""
    return max(0, cell.level - cell.chain.topology.node_level)


class CellSnapshot(NamedTuple):
    """All cells at one moment, as pieces of JSON text. `virtual`: by tenant; `opportunistic`: the cells that a tenant's
    opportunistic pods use, by tenant and by the node's position in `physical`."""

    physical: list[bytes]
    virtual: dict[str, list[bytes]]
    opportunistic: dict[str, dict[int, bytes]]

    def physical_array(self) -> Iterator[bytes]:
        yield b"["
        yield from self.physical
        yield b"]"

    def virtual_array(self, name: str) -> Iterator[bytes]:
        """Yield the cells of a tenant, then those of its opportunistic pods in configuration order."""
        cells = self.virtual.get(name, [])
        yield b"["
        yield from cells
        comma = b"," if cells else b""
        for _, piece in sorted(self.opportunistic.get(name, {}).items()):
            yield comma + piece
            comma = b","
        yield b"]"

    def virtual_object(self) -> Iterator[bytes]:
        comma = b"{"
        for name in dict.fromkeys([*self.virtual, *self.opportunistic]):
            yield comma + _encode(name) + b":"
            yield from self.virtual_array(name)
            comma = b","
        yield b"{}" if comma == b"{" else b"}"

    def cluster_object(self) -> Iterator[bytes]:
        yield b'{"physicalCluster":'
        yield from self.physical_array()
        yield b',"virtualClusters":'
        yield from self.virtual_object()
        yield b"}"


class Inspected:
    """An algorithm with its pieces for inspection. Creating it for a large cluster takes a while; a thread may do it
    before the algorithm is shared. `config`: the text of the file that it was built from.
    """

    def __init__(self, algorithm: HivedAlgorithm, config: str = "") -> None:
        self.algorithm, self.config = algorithm, config
        self.cells = _Cells(algorithm)
        self.groups = _Groups(algorithm)


class Inspection:
    """Answers for one algorithm at a time. `waiting`: returns the pods without a place. `clock`: seconds.

    `check`: raises `NotNow` until the initial state is loaded; before that, every cell would appear free or bad.
    """

    def __init__(
        self,
        inspected: Inspected,
        waiting: Callable[[], list[WaitingPod]] = list,
        clock: Callable[[], float] = time.perf_counter,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._inspected, self._waiting, self._clock, self._check = inspected, waiting, clock, check
        self._turn = asyncio.Lock()

    def follow(self, inspected: Inspected) -> None:
        """Answer for another algorithm from now on."""
        self._inspected = inspected

    async def affinity_groups(self) -> Iterable[bytes]:
        async with self._turn:
            await self._settled("groups")
            return self._inspected.groups.snapshot()

    async def affinity_group(self, name: str) -> Iterable[bytes]:
        self._check()
        group = self._inspected.algorithm.groups.get(name)
        if group is None:
            raise UserError(f"affinity group {name} is unknown; a group that waits has no cells and is not listed")
        return [_encode(group_info(group))]

    async def cluster_status(self) -> Iterable[bytes]:
        return (await self._snapshot()).cluster_object()

    async def physical_cluster(self) -> Iterable[bytes]:
        return (await self._snapshot()).physical_array()

    async def virtual_clusters(self) -> Iterable[bytes]:
        return (await self._snapshot()).virtual_object()

    async def virtual_cluster(self, name: str) -> Iterable[bytes]:
        if name not in self._inspected.algorithm.virtual_clusters:
            raise UserError(f"virtual cluster {name} is not in the configuration")
        return (await self._snapshot()).virtual_array(name)

    async def snapshot(self) -> Iterable[bytes]:
        async with self._turn:
            await self._settled("groups")
            inspected = self._inspected
            saved = inspected.groups.saved()
            return take_snapshot(inspected.algorithm, inspected.config, self._waiting(), saved).pieces()

    async def _snapshot(self) -> CellSnapshot:
        async with self._turn:
            await self._settled("cells")
            return self._inspected.cells.snapshot()

    async def _settled(self, which: Literal["cells", "groups"]) -> None:
        """Return in the same step in which nothing is stale. Raises what `check` raises, at any step."""
        while True:
            self._check()
            inspected = self._inspected  # at each step: `follow` may replace it
            refresh_one = (inspected.cells if which == "cells" else inspected.groups).refresh_one
            until = self._clock() + SLICE
            while refresh_one():
                if self._clock() > until:
                    break
            else:
                return
            await asyncio.sleep(0)


class _Cells:
    """The pieces of all cells of an algorithm, and which of them are stale."""

    def __init__(self, algorithm: HivedAlgorithm) -> None:
        self._chains = list(algorithm.chains.values())
        for chain in self._chains:
            chain.changed.clear()  # all pieces are stale at first
        self._tenants = list(algorithm.virtual_clusters)
        self._physical = PhysicalPieces(top for chain in self._chains for top in chain.levels[-1])
        preassigned = [tenant.preassigned for tenant in algorithm.virtual_clusters.values()]
        self._virtual = VirtualPieces(preassigned, self._physical)

    def refresh_one(self) -> bool:
        """Do one small step of refreshing. Return False if nothing is stale."""
        for chain in self._chains:
            if not chain.changed:
                continue
            cell = chain.changed.pop()  # stale, with every cell whose JSON shows its binding
            if isinstance(cell, VirtualCell):
                self._virtual.mark(cell)
            elif isinstance(cell, PhysicalCell):
                whole = cell if cell.level > chain.topology.node_level else cell.host
                self._physical.mark(whole)
                self._mark_bound(whole)
            return True
        return self._physical.refresh_one() or self._virtual.refresh_one()

    def snapshot(self) -> CellSnapshot:
        pieces, bounds = self._virtual.pieces, self._virtual.bounds
        return CellSnapshot(
            self._physical.pieces.copy(),
            {name: pieces[bounds[number] : bounds[number + 1]] for number, name in enumerate(self._tenants)},
            {name: shown.copy() for name, shown in self._physical.opportunistic.items() if shown},
        )

    def _mark_bound(self, cell: PhysicalCell) -> None:
        if cell.virtual is not None:
            self._virtual.mark(cell.virtual.host)
        if cell.level <= cell.chain.topology.node_level:
            for child in cell.children:
                self._mark_bound(child)


class _Groups:
    """The pieces of all groups, by name: as HiveD's API shows them, and as saved in a snapshot."""

    def __init__(self, algorithm: HivedAlgorithm) -> None:
        self._groups, self._changed = algorithm.groups, algorithm.changed_groups
        self._pieces: dict[str, bytes] = {}
        self._saved: dict[str, bytes] = {}
        self._changed.update(self._groups)

    def refresh_one(self) -> bool:
        if not self._changed:
            return False
        name = self._changed.pop()
        if name in self._groups:
            self._pieces[name] = _encode(group_info(self._groups[name]))
            self._saved[name] = save_group(self._groups[name])
        return True

    def snapshot(self) -> Iterable[bytes]:
        """Return the list of all groups, oldest first; null if there are none, as in HiveD."""
        self._forget_deleted()
        names, pieces = list(self._groups), self._pieces.copy()
        if not names:
            return [b'{"items":null}']
        return itertools.chain([b'{"items":['], separated(pieces[name] for name in names), [b"]}"])

    def saved(self) -> list[bytes]:
        """Return the snapshot form of each group, oldest first."""
        self._forget_deleted()
        return [self._saved[name] for name in self._groups]

    def _forget_deleted(self) -> None:
        if len(self._pieces) > 2 * len(self._groups):
            self._pieces = {name: self._pieces[name] for name in self._groups}
            self._saved = {name: self._saved[name] for name in self._groups}
