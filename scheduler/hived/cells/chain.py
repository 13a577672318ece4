"""A chain: the physical trees of one top type, with free cells, health, and each tenant's guarantee.

A virtual cluster is the cells that a tenant is guaranteed, as trees of the same shape; it may have some in several
chains.

Binding follows one rule, so that it can be checked and undone. A preassigned cell is bound while it is pinned, doomed,
or used. A cell below a bound one is bound while it is used by guaranteed pods, or while it is bad and no smaller than a
node, so that the tenant sees the failure and packs elsewhere.

Doomed cells: when fewer healthy cells are obtainable at a level than one tenant may still ask for, its surplus cells
are bound to bad ones. `settle` restores this after every change, level by level from the top.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from scheduler.hived.cells.cells import Cell, PhysicalCell, PhysicalLeaf, Units, VirtualCell
from scheduler.hived.cells.topology import ChainTopology, FreeList, PreassignedCell, bits, span


class Chain:
    """Cells and books of one chain. Sequences by level have an unused index 0, except `levels`.

    `levels[level - 1]`: all cells of a level. `healthy[level]`: mask of those without a bad node. `vc_free[vc][level]`:
    unbound preassigned cells of a virtual cluster, `all_vc_free[level]` of all. `doomed[vc, level]`: mask of the bad
    cells that a virtual cluster has to take. `nodes`: its node-level cells as units for opportunistic pods;
    `node_numbers`: the position of each by name. `changed`: cells changed since the caller last cleared it, none inside
    a node or a unit.
    """

    def __init__(self, topology: ChainTopology) -> None:
        self.topology = topology
        self.name = topology.name
        self.levels = _grow(self, topology)
        self.free = FreeList.whole(topology)
        self.healthy = self.free.obtainable.copy()
        self.vc_free: dict[str, list[int]] = {}
        self.all_vc_free = [0] * (topology.top_level + 1)
        self.doomed: dict[tuple[str, int], int] = {}
        self.changed: set[Cell] = set()
        self.nodes: Units[PhysicalCell] = Units()
        self._tenants: list[tuple[int, VirtualCluster]] = []  # (level, whose movable cells are there), top level first
        self._opportunistic: list[dict[int, int]] = [{} for _ in self.all_vc_free]
        self._lowest_counted = topology.top_level + 1
        self.node_numbers = {name: number for number, name in enumerate(topology.nodes)}
        for cell in self.levels[topology.node_level - 1]:
            self.nodes.add(cell)

    def grant(self, virtual_cluster: VirtualCluster) -> None:
        """Add a tenant's quota, before anything is used. Pinned cells are bound permanently."""
        free = self.vc_free.setdefault(virtual_cluster.name, [0] * len(self.all_vc_free))
        for chain, level, number in virtual_cluster.levels():
            if chain == self.name:
                free[level] += number
                self.all_vc_free[level] += number
                self._tenants.append((level, virtual_cluster))
                self._lowest_counted = min(self._lowest_counted, level)
        self._tenants.sort(key=lambda tenant: -tenant[0])
        for cell in virtual_cluster.preassigned:
            if cell.chain is self and cell.pinned_id:
                level, index = self.topology.pinned[cell.pinned_id]
                physical = self.levels[level - 1][index]
                physical.pinned_id = cell.pinned_id
                self.free.take(level, index)
                self.bind(cell, physical)

    def bind(self, virtual: VirtualCell, physical: PhysicalCell) -> None:
        virtual.physical, physical.virtual = physical, virtual
        virtual.touch()
        self._note(virtual, physical)

    def unbind(self, virtual: VirtualCell) -> None:
        physical = virtual.physical
        assert physical is not None
        virtual.physical = physical.virtual = None
        virtual.touch()
        self._note(virtual, physical)

    def preassign(self, virtual: VirtualCell, physical: PhysicalCell) -> None:
        """Bind a preassigned cell to an obtainable physical one."""
        self.free.take(physical.level, physical.index)
        self._count_free(virtual, -1)
        self.bind(virtual, physical)

    def return_preassigned(self, virtual: VirtualCell) -> None:
        """Undo `preassign`, with all bindings below."""
        physical = virtual.physical
        assert physical is not None
        for child in virtual.children:
            self._unbind_tree(child)
        self.unbind(virtual)
        self._count_free(virtual, 1)
        self.free.give_back(physical.level, physical.index)

    def adopt_bad(self, virtual: VirtualCell) -> None:
        """Bind the bad cells below a bound cell, down to nodes, to unbound cells below its virtual side."""
        physical = virtual.physical
        if physical is None or physical.healthy or physical.level <= self.topology.node_level:
            return
        for child in physical.children:
            if not child.healthy and child.virtual is None:
                self.bind(next(cell for cell in virtual.children if cell.physical is None), child)
            if child.virtual is not None:
                self.adopt_bad(child.virtual)

    def is_doomed(self, virtual: VirtualCell) -> bool:
        physical = virtual.physical
        doomed = self.doomed.get((virtual.virtual_cluster.name, virtual.level), 0)
        return physical is not None and virtual.number >= 0 and bool(doomed >> physical.index & 1)

    def use_doomed(self, virtual: VirtualCell) -> None:
        """Clear the doomed mark of a preassigned cell that comes into use."""
        if self.is_doomed(virtual):
            assert virtual.physical is not None
            self.doomed[virtual.virtual_cluster.name, virtual.level] ^= 1 << virtual.physical.index

    def undoom(self, virtual: VirtualCell) -> None:
        """Release a doomed cell; `settle` must follow."""
        self.use_doomed(virtual)
        self.return_preassigned(virtual)

    def undoom_around(self, physical: PhysicalCell) -> None:
        """Release the doomed cells that overlap with a physical one: around it, itself, or inside it."""
        for cell in physical.upward():
            if cell.virtual is not None and self.is_doomed(cell.virtual):
                self.undoom(cell.virtual)
        for (_, level), mask in list(self.doomed.items()):
            if mask and level < physical.level:
                for index in bits(mask & self.free.cells_below(physical.level, physical.index, level)):
                    self._undoom_at(level, index)

    def undoom_of(self, tenant: VirtualCluster, level: int, number: int) -> None:
        """Release up to `number` doomed cells of a tenant."""
        for _ in range(number):
            doomed = self.doomed.get((tenant.name, level), 0)
            if doomed:
                self._undoom_at(level, doomed.bit_length() - 1)

    def undoom_all(self) -> bool:
        """Release all doomed cells. Return whether there were any."""
        found = [(level, index) for (_, level), mask in self.doomed.items() for index in bits(mask)]
        for level, index in found:
            self._undoom_at(level, index)
        return bool(found)

    def set_healthy(self, node: PhysicalCell, *, healthy: bool) -> None:
        """Record a node's health; `settle` must follow."""
        if node.healthy == healthy:
            return
        for cell in node.upward():
            cell.bad_nodes += -1 if healthy else 1
        for level in range(1, node.level):
            cells = self.free.cells_below(node.level, node.index, level)
            self.healthy[level] = self.healthy[level] | cells if healthy else self.healthy[level] & ~cells
        for cell in node.upward():
            bit = 1 << cell.index
            self.healthy[cell.level] = (
                self.healthy[cell.level] | bit if cell.healthy else self.healthy[cell.level] & ~bit
            )
            self.changed.add(cell)
        node.touch()
        self._touch_tenants(node)
        if healthy:
            for cell in node.upward():
                virtual = cell.virtual
                if cell.healthy and virtual is not None and virtual.parent is not None and not virtual.used:
                    self.unbind(virtual)
        else:
            bound = next((cell.virtual for cell in node.upward() if cell.virtual is not None), None)
            if bound is not None:
                self.adopt_bad(bound)

    def _touch_tenants(self, cell: PhysicalCell) -> None:
        if cell.virtual is not None:
            cell.virtual.touch()
            self.changed.add(cell.virtual.host)
        for child in cell.children:
            self._touch_tenants(child)

    def settle(self) -> None:
        """Doom cells where required and release doomed cells where possible. Releasing only frees cells, so one pass
        each suffices.
        """
        if not any(self.doomed.values()) and self.healthy[-1].bit_count() == len(self.levels[-1]):
            return
        while sum(self._undo_doomed(level, tenant) for level, tenant in self._tenants):
            pass
        counted = healthy = 0
        for level, tenant in self._tenants:
            if level != counted:
                counted, healthy = level, self._healthy_obtainable(level)
            while self.vc_free[tenant.name][level] > healthy:
                self.doom(tenant.last_unbound(self.name, level), self._bad_to_give(level))
                healthy = self._healthy_obtainable(level)

    def _healthy_obtainable(self, level: int) -> int:
        return (self.healthy[level] & self.free.obtainable[level]).bit_count()

    def _undo_doomed(self, level: int, tenant: VirtualCluster) -> int:
        """Release a tenant's doomed cells of a level where possible. Return their number."""
        doomed = before = self.doomed.get((tenant.name, level), 0)
        for index in bits(doomed & self.healthy[level]):
            self._undoom_at(level, index)
            doomed ^= 1 << index
        while doomed and self.vc_free[tenant.name][level] < self._healthy_obtainable(level):
            last = doomed.bit_length() - 1
            self._undoom_at(level, last)
            doomed ^= 1 << last
        return (before ^ doomed).bit_count()

    def _undoom_at(self, level: int, index: int) -> None:
        virtual = self.levels[level - 1][index].virtual
        assert virtual is not None
        self.undoom(virtual)

    def doom(self, virtual: VirtualCell, physical: PhysicalCell) -> None:
        """Bind a preassigned cell to a bad obtainable physical one."""
        self.preassign(virtual, physical)
        key = virtual.virtual_cluster.name, virtual.level
        self.doomed[key] = self.doomed.get(key, 0) | 1 << physical.index
        self.adopt_bad(virtual)

    def _bad_to_give(self, level: int) -> PhysicalCell:
        """Return a bad cell that can be taken without breaking a guarantee: a free one, else by the smallest split.

        There is one whenever a tenant's free cells outnumber the healthy ones, as long as the books are safe.
        """
        bad = self.free.obtainable[level] & ~self.healthy[level]
        splittable = self.free.splittable(self.all_vc_free)
        for source in range(level, self.topology.top_level + 1):
            if source > level and splittable[source] < 1:
                break  # a split from here or above takes one cell of this level, and none can be spared
            for index in bits(self.free.free[source] & ~self.healthy[source]):
                inside = bad & self.free.cells_below(source, index, level)
                return self.levels[level - 1][next(bits(inside))]
        raise AssertionError(f"chain {self.name}: no bad cell of level {level} can be given")

    def count_opportunistic(self, cell: PhysicalCell, before: int) -> None:
        """Update the index of cells by number of opportunistic leaves, at levels that quotas are served from."""
        if cell.level < self._lowest_counted:
            return
        masks, bit = self._opportunistic[cell.level], 1 << cell.index
        if before:
            masks[before] &= ~bit
        if cell.opportunistic:
            masks[cell.opportunistic] = masks.get(cell.opportunistic, 0) | bit

    def by_opportunistic(self, level: int, candidates: int) -> Iterator[tuple[int, int]]:
        """Yield (opportunistic leaves, index) of candidates, fewest first, then in configuration order."""
        used = {count: hit for count, mask in self._opportunistic[level].items() if (hit := candidates & mask)}
        clean = candidates
        for hit in used.values():
            clean ^= hit
        yield from ((0, index) for index in bits(clean))
        for count in sorted(used):
            yield from ((count, index) for index in bits(used[count]))

    def _count_free(self, virtual: VirtualCell, change: int) -> None:
        virtual.virtual_cluster.note_bound(virtual, bound=change < 0)
        self.vc_free[virtual.virtual_cluster.name][virtual.level] += change
        self.all_vc_free[virtual.level] += change

    def _unbind_tree(self, virtual: VirtualCell) -> None:
        if virtual.physical is not None:
            for child in virtual.children:
                self._unbind_tree(child)
            self.unbind(virtual)

    def _note(self, virtual: VirtualCell, physical: PhysicalCell) -> None:
        self.changed.add(virtual.host)
        self.changed.add(physical if physical.level > self.topology.node_level else physical.host)


def _grow(chain: Chain, topology: ChainTopology) -> tuple[list[PhysicalCell], ...]:
    """Create all cells of a chain, level by level, with every node healthy."""
    leaves: list[PhysicalCell] = [
        PhysicalLeaf(chain, index, address, topology.leaf_indices[index])
        for index, address in enumerate(topology.addresses[0])
    ]
    levels = [leaves]
    for level in range(2, topology.top_level + 1):
        size, fanout = topology.leaves_at(level), topology.fanouts[level - 1]
        cells = [
            PhysicalCell(chain, level, index, address, size)
            for index, address in enumerate(topology.addresses[level - 1])
        ]
        for cell in cells:
            cell.children = tuple(levels[-1][cell.index * fanout : (cell.index + 1) * fanout])
            for child in cell.children:
                child.parent = cell
        levels.append(cells)
    for node, name in zip(levels[topology.node_level - 1], topology.nodes, strict=True):
        _settle_on(node, node, name)
    return tuple(levels)


def _settle_on(cell: PhysicalCell, host: PhysicalCell, node: str) -> None:
    cell.host, cell.node = host, node
    for child in cell.children:
        _settle_on(child, host, node)


class VirtualCluster:
    """One tenant. `preassigned`: its cells in configuration order, pinned cells last.

    `quotas`: the units of its movable cells by chain; `pinned`: those of each pinned cell by ID.
    """

    def __init__(self, name: str, cells: Sequence[PreassignedCell], chains: Mapping[str, Chain]) -> None:
        self.name = name
        self.preassigned: list[VirtualCell] = []
        self.quotas: dict[str, Units[VirtualCell]] = {}
        self.pinned: dict[str, Units[VirtualCell]] = {}
        self._by_level: dict[tuple[str, int], list[VirtualCell]] = {}
        self._unbound: dict[tuple[str, int], int] = {}
        for cell in cells:
            virtual = self._grow(chains[cell.chain], cell)
            self.preassigned.append(virtual)
            if cell.pinned_cell_id:
                units = self.pinned.setdefault(cell.pinned_cell_id, Units())
            else:
                siblings = self._by_level.setdefault((cell.chain, cell.level), [])
                virtual.number = len(siblings)
                siblings.append(virtual)
                units = self.quotas.setdefault(cell.chain, Units())
            for unit in _units_of(virtual):
                units.add(unit)
        for key, at_level in self._by_level.items():
            self._unbound[key] = span(0, len(at_level))

    def _grow(self, chain: Chain, cell: PreassignedCell) -> VirtualCell:
        """Create the whole tree of a preassigned cell. Indices in addresses run on within a level of the tree."""
        leaves = chain.topology.leaves_at(cell.level)
        top = VirtualCell(self, chain, cell.level, cell.address, leaves, cell.pinned_cell_id)
        parents = [top]
        for level in range(cell.level - 1, 0, -1):
            fanout = chain.topology.fanouts[level]
            leaves //= fanout
            below: list[VirtualCell] = []
            for parent in parents:
                first = len(below)
                for index in range(first, first + fanout):
                    child = VirtualCell(self, chain, level, f"{parent.address}/{index}", leaves, cell.pinned_cell_id)
                    child.parent, child.preassigned = parent, top
                    below.append(child)
                parent.children = tuple(below[first:])
            parents = below
        return top

    def levels(self) -> Iterator[tuple[str, int, int]]:
        """Yield chain, level and number of its movable preassigned cells."""
        for (chain, level), cells in self._by_level.items():
            yield chain, level, len(cells)

    def at(self, chain: str, level: int) -> Sequence[VirtualCell]:
        """Return its movable preassigned cells of a level, in configuration order."""
        return self._by_level.get((chain, level), ())

    def unbound(self, chain: str, level: int) -> Iterator[VirtualCell]:
        """Return its unbound movable preassigned cells of a level, in configuration order."""
        return (self._by_level[chain, level][number] for number in bits(self._unbound.get((chain, level), 0)))

    def last_unbound(self, chain: str, level: int) -> VirtualCell:
        """Return the last unbound cell of a level. Raises `IndexError` if there is none."""
        return self._by_level[chain, level][self._unbound[chain, level].bit_length() - 1]

    def note_bound(self, cell: VirtualCell, *, bound: bool) -> None:
        """Record that a movable preassigned cell was bound or unbound; called by the chain."""
        bit = 1 << cell.number
        if bound:
            self._unbound[cell.chain.name, cell.level] &= ~bit
        else:
            self._unbound[cell.chain.name, cell.level] |= bit


def _units_of(cell: VirtualCell) -> Iterator[VirtualCell]:
    if cell.level <= cell.chain.topology.node_level:
        yield cell
    else:
        for child in cell.children:
            yield from _units_of(child)
