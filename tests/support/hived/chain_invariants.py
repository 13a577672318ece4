"""Checks of one chain's bitmasks, free list and guarantees."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain as concat
from typing import TYPE_CHECKING

from scheduler.hived.cells.cells import Cell, PhysicalCell
from scheduler.hived.cells.chain import Chain
from scheduler.hived.contract import OPPORTUNISTIC_PRIORITY

if TYPE_CHECKING:
    from scheduler.hived.algorithm import HivedAlgorithm


@dataclass(slots=True)
class Quotas:
    """Number of unpinned preassigned cells granted to each VC at (chain, level), and number of those bound."""

    granted: Counter[tuple[str, str, int]] = field(default_factory=Counter)
    bound: Counter[tuple[str, str, int]] = field(default_factory=Counter)

    @classmethod
    def of(cls, algorithm: HivedAlgorithm) -> Quotas:
        quotas = cls()
        for name, cells in algorithm.topology.virtual_clusters.items():
            quotas.granted.update((name, cell.chain, cell.level) for cell in cells if not cell.pinned_cell_id)
        for name, cluster in algorithm.virtual_clusters.items():
            for cell in cluster.preassigned:
                if cell.physical is not None and not cell.pinned_id:
                    quotas.bound[name, cell.chain.name, cell.level] += 1
        return quotas


def at(cell: Cell) -> str:
    """Return the chain and address of a cell, for messages."""
    return f"{cell.chain.name} {cell.address}"


def chain_violations(chain: Chain, healthy_nodes: set[str], quotas: Quotas) -> list[str]:
    """Return the violations of P4 to P8 and P10 within one chain."""
    return [
        *_health(chain, healthy_nodes),
        *_physical_bindings(chain),
        *_free_list(chain),
        *_quotas(chain, quotas),
        *_orders(chain, quotas),
        *_doomed(chain),
    ]


def _health(chain: Chain, healthy_nodes: set[str]) -> Iterator[str]:
    """P10: which cells are bad."""
    node_level = chain.topology.node_level
    bad: dict[PhysicalCell, int] = {}
    for number, level in enumerate(chain.levels, 1):
        for cell in level:
            if number <= node_level:
                bad[cell] = int(cell.node not in healthy_nodes)
            else:
                bad[cell] = sum(bad[child] for child in cell.children)
            if cell.healthy != (not bad[cell]) or (number >= node_level and cell.bad_nodes != bad[cell]):
                yield f"P10 cell {at(cell)} counts {cell.bad_nodes} bad nodes of {bad[cell]}, healthy {cell.healthy}"
        healthy = _mask(cell for cell in level if not bad[cell])
        if chain.healthy[number] != healthy:
            yield f"P10 chain {chain.name} level {number}: healthy {chain.healthy[number]:b}, not {healthy:b}"


def _mask(cells: Iterable[PhysicalCell]) -> int:
    return sum(1 << cell.index for cell in cells)


def _physical_bindings(chain: Chain) -> Iterator[str]:
    """P8: bindings are mutual. P10: bad children of a bound cell are bound, too."""
    for cell in concat.from_iterable(chain.levels):
        virtual = cell.virtual
        if virtual is None:
            continue
        if virtual.physical is not cell or virtual.level != cell.level or virtual.chain is not chain:
            bound = None if virtual.physical is None else at(virtual.physical)
            yield f"P8 cell {at(cell)} is bound to {virtual.address}, which is bound to {bound}"
        if virtual.parent is not None and (cell.parent is None or cell.parent.virtual is not virtual.parent):
            yield f"P8 cell {at(cell)} is bound to {virtual.address}, its parent not to that one's parent"
        unbound = [child.address for child in cell.children if not child.healthy and child.virtual is None]
        if unbound and cell.level > chain.topology.node_level:
            yield f"P10 cell {at(cell)} is bound, its bad children {unbound} are not"


@dataclass(slots=True)
class _Cover:
    """The free list recomputed from the bindings: the free cells and all cells inside of free cells, per level."""

    free: list[int]
    obtainable: list[int]
    problems: list[str] = field(default_factory=list)

    def walk(self, cell: PhysicalCell, listed: list[int]) -> None:
        """Visit split cells. Nothing below a free cell, or one bound to a preassigned cell, is either of the two."""
        free = bool(listed[cell.level] >> cell.index & 1)
        allocated = cell.virtual is not None and cell.virtual.parent is None
        if free and allocated:
            self.problems.append(f"P4 cell {at(cell)} is in the free list and bound to a preassigned cell")
        if free or allocated:
            self._end(cell, free)
        elif not cell.children:
            self.problems.append(f"P4 leaf {at(cell)} is neither free nor in a preassigned cell")
        elif all(listed[child.level] >> child.index & 1 for child in cell.children):
            self.problems.append(f"P4 all children of {at(cell)} are in the free list, which should have merged")
        if not free and not allocated:
            for child in cell.children:
                self.walk(child, listed)

    def _end(self, top: PhysicalCell, free: bool) -> None:
        self.free[top.level] |= int(free) << top.index
        below = [top]
        while below:
            cell = below.pop()
            self.obtainable[cell.level] |= int(free) << cell.index
            if free and cell.virtual is not None:
                self.problems.append(f"P4 cell {at(cell)} is bound, but {at(top)} is in the free list")
            if cell is not top and cell.virtual is not None and cell.virtual.parent is None:
                self.problems.append(f"P4 cell {at(cell)} is bound to a preassigned cell inside of {at(top)}")
            below.extend(cell.children)


def _free_list(chain: Chain) -> Iterator[str]:
    """P4 and P5."""
    levels = len(chain.levels) + 1
    cover = _Cover([0] * levels, [0] * levels)
    listed = list(chain.free.free)
    for top in chain.levels[-1]:
        cover.walk(top, listed)
    yield from cover.problems
    for level in range(1, levels):
        if listed[level] != cover.free[level]:
            yield f"P4 chain {chain.name} level {level}: free {listed[level]:b}, reachable {cover.free[level]:b}"
        obtainable = chain.free.obtainable[level]
        if obtainable != cover.obtainable[level]:
            yield f"P5 chain {chain.name} level {level}: obtainable {obtainable:b}, not {cover.obtainable[level]:b}"


def _quotas(chain: Chain, quotas: Quotas) -> Iterator[str]:
    """P6, P7 and the part of P10 that limits a VC's unbound cells to the healthy obtainable ones."""
    top = len(chain.levels)
    left = 0
    for level in range(top, 0, -1):
        where = f"chain {chain.name} level {level}"
        total = 0
        for vc, unbound in _unbound(chain.name, level, quotas).items():
            total += unbound
            yield from _vc_quota(chain, level, vc, unbound)
        if chain.all_vc_free[level] != total:
            yield f"P7 {where}: {chain.all_vc_free[level]} cells free for VCs, not {total}"
        obtainable = chain.free.obtainable[level].bit_count()
        if total > obtainable:
            yield f"P6 {where}: {total} cells are promised, {obtainable} are obtainable"
        fanout = chain.topology.fanouts[level] if level < top else 0
        left = chain.free.free[level].bit_count() + left * fanout - total
        if left < 0:
            yield f"P6 {where}: {-left} fewer cells than promised, after what higher levels need"


def _unbound(chain: str, level: int, quotas: Quotas) -> dict[str, int]:
    return {
        vc: granted - quotas.bound[vc, chain, level]
        for (vc, in_chain, at), granted in quotas.granted.items()
        if in_chain == chain and at == level
    }


def _vc_quota(chain: Chain, level: int, vc: str, unbound: int) -> Iterator[str]:
    where = f"chain {chain.name} level {level}: VC {vc}"
    counted = chain.vc_free[vc][level]
    if counted != unbound or unbound < 0:
        yield f"P7 {where} has {unbound} cells that are not bound, counted as {counted}"
    healthy = (chain.free.obtainable[level] & chain.healthy[level]).bit_count()
    if unbound > healthy:
        yield f"P10 {where} has {unbound} cells that are not bound for {healthy} healthy ones that are free"
    doomed = chain.doomed.get((vc, level), 0).bit_count()
    if doomed and unbound < healthy:
        yield f"P10 {where} has {doomed} doomed cells, though {healthy} healthy ones are free for {unbound} more"


def _orders(chain: Chain, quotas: Quotas) -> Iterator[str]:
    """P3 for the order in which cells are tried: counts of opportunistic leaves at levels that quotas are
    served from.
    """
    levels = [level for _, in_chain, level in quotas.granted if in_chain == chain.name]
    for level in range(min(levels, default=len(chain.levels) + 1), len(chain.levels) + 1):
        cells = chain.levels[level - 1]
        order = list(chain.by_opportunistic(level, _mask(cells)))
        expected = sorted((cell.used.get(OPPORTUNISTIC_PRIORITY, 0), cell.index) for cell in cells)
        if order != expected:
            yield f"P3 chain {chain.name} level {level}: (opportunistic leaves, cell) {order}, not {expected}"


def _doomed(chain: Chain) -> Iterator[str]:
    """P10: which cells are doomed."""
    for (vc, level), mask in chain.doomed.items():
        doomed = [cell for cell in chain.levels[level - 1] if mask >> cell.index & 1]
        if mask != _mask(doomed):
            yield f"P10 chain {chain.name} level {level}: doomed cells {mask:b} of VC {vc} are not all cells"
        for cell in doomed:
            virtual = cell.virtual
            foreign = virtual is None or virtual.parent is not None or virtual.virtual_cluster.name != vc
            if foreign or cell.healthy or cell.pinned_id or (virtual is not None and virtual.used):
                bound = None if virtual is None else f"{virtual.address}, used {virtual.used}"
                yield f"P10 cell {at(cell)}, doomed for VC {vc}, is bound to {bound}, healthy: {cell.healthy}"
