"""Inspection: HiveD's view of groups and cells, as snapshots that block no decisions.

The model: the JSON of all answers is kept in pieces, and the core records what has changed. A request refreshes stale
pieces for at most `SLICE` seconds at a time and yields to the event loop in between. As soon as a slice ends with
nothing stale, the references to all pieces are copied in the same step: a snapshot of one moment, made by copying
pointers. Later changes make pieces stale again; answers being sent are not affected.

Requests refresh one after the other; later ones find little to do. Until the first request nothing is rendered.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import msgspec

from scheduler.hived.algorithm import HivedAlgorithm
from scheduler.hived.cells.cells import PhysicalCell, VirtualCell
from scheduler.hived.errors import UserError
from scheduler.hived.inspection.json_fragments import PhysicalPieces, VirtualPieces
from scheduler.hived.inspection.snapshot import WaitingPod, save_group, take_snapshot
from scheduler.hived.inspection.status import group_info

SLICE = 0.001  # seconds of rendering without yielding

_encode = msgspec.json.Encoder().encode


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
            await self._settled(self._refresh_group)
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
            await self._settled(self._refresh_group)
            inspected = self._inspected
            saved = inspected.groups.saved()
            return take_snapshot(inspected.algorithm, inspected.config, self._waiting(), saved).pieces()

    async def _snapshot(self) -> CellSnapshot:
        async with self._turn:
            await self._settled(self._refresh_cell)
            return self._inspected.cells.snapshot()

    def _refresh_cell(self) -> bool:
        return self._inspected.cells.refresh_one()  # reads the attribute at each step: `follow` may replace it

    def _refresh_group(self) -> bool:
        return self._inspected.groups.refresh_one()

    async def _settled(self, refresh_one: Callable[[], bool]) -> None:
        """Return in the same step in which nothing is stale. Raises what `check` raises, at any step."""
        while True:
            self._check()
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

    def snapshot(self) -> Iterator[bytes]:
        """Return the list of all groups, oldest first; null if there are none, as in HiveD."""
        self._forget_deleted()
        return _listed(list(self._groups), self._pieces.copy())

    def saved(self) -> list[bytes]:
        """Return the snapshot form of each group, oldest first."""
        self._forget_deleted()
        return [self._saved[name] for name in self._groups]

    def _forget_deleted(self) -> None:
        if len(self._pieces) > 2 * len(self._groups):
            self._pieces = {name: self._pieces[name] for name in self._groups}
            self._saved = {name: self._saved[name] for name in self._groups}


def _listed(names: list[str], pieces: dict[str, bytes]) -> Iterator[bytes]:
    if not names:
        yield b'{"items":null}'
        return
    before = b'{"items":['
    for name in names:
        yield before + pieces[name]
        before = b","
    yield b"]}"
