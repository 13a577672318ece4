"""Cells: the nodes of physical and virtual trees, and what the trees count.

A cell counts its used leaves by priority, so its own priority is the highest that it counts. Only `chain` and
`occupancy` change cells, and always from a leaf upward, so that every ancestor agrees with its leaves.

A physical leaf has a user (the group whose pods may run on it), a claimant (the preempting group that gets it next),
both, or none; its state follows from the two.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from scheduler.hived.constants import FREE_PRIORITY, OPPORTUNISTIC_PRIORITY

if TYPE_CHECKING:
    from scheduler.hived.chain import Chain
    from scheduler.hived.groups import AffinityGroup
    from scheduler.hived.units import Units
    from scheduler.hived.virtual_cluster import VirtualCluster


class CellState(StrEnum):
    """Of a physical leaf: who uses it, and whether somebody waits for it."""

    FREE = "Free"
    USED = "Used"
    RESERVING = "Reserving"
    RESERVED = "Reserved"


_BY_WEIGHT = (CellState.USED, CellState.RESERVING, CellState.RESERVED)


def combined(states: Iterable[CellState]) -> CellState:
    """The state of a cell by its children's: the most telling one; Free only if all are."""
    found = set(states)
    return next((state for state in _BY_WEIGHT if state in found), CellState.FREE)


class Cell(ABC):
    """What physical and virtual cells share. `used`: leaves by priority, without free ones.

    `units`, `unit`: the units that it is one of, and its number there, if pods are packed into it as one.
    """

    __slots__ = ("address", "chain", "leaves", "level", "unit", "units", "used")

    def __init__(self, chain: Chain, level: int, address: str, leaves: int) -> None:
        self.chain = chain
        self.level = level
        self.address = address
        self.leaves = leaves
        self.used: dict[int, int] = {}
        self.units: Units[Any] | None = None
        self.unit = -1

    @property
    def priority(self) -> int:
        """The highest of its leaves, -2 if all are free."""
        return max(self.used) if self.used else FREE_PRIORITY

    @property
    def cell_type(self) -> str:
        return self.chain.topology.cell_types[self.level - 1]

    @property
    def is_node_level(self) -> bool:
        return self.level == self.chain.topology.node_level

    @property
    @abstractmethod
    def healthy(self) -> bool:
        """Whether nothing that is known speaks against its hardware."""

    def count(self, priority: int, change: int) -> None:
        """Count `change` more of its leaves at a priority, here only."""
        left = self.used.get(priority, 0) + change
        if left:
            self.used[priority] = left
        else:
            del self.used[priority]
        self.touch()

    def touch(self) -> None:
        """Something that a choice among units depends on has changed."""
        if self.units is not None:
            self.units.touch(self.unit)


class PhysicalCell(Cell):
    """A cell of hardware. `index`: its position within its level. `node`: "" above node level.

    `host`: the node-level cell that it is part of; above node level, itself. `bad_nodes`: how many of its nodes are
    bad, kept from node level upward. `virtual`: what it is bound to.
    """

    __slots__ = ("bad_nodes", "children", "host", "index", "node", "parent", "pinned_id", "virtual")

    def __init__(self, chain: Chain, level: int, index: int, address: str, leaves: int) -> None:
        super().__init__(chain, level, address, leaves)
        self.index = index
        self.parent: PhysicalCell | None = None
        self.children: tuple[PhysicalCell, ...] = ()
        self.host: PhysicalCell = self
        self.node = ""
        self.pinned_id = ""
        self.bad_nodes = 0
        self.virtual: VirtualCell | None = None

    @property
    def healthy(self) -> bool:
        return self.host.bad_nodes == 0

    @property
    def opportunistic(self) -> int:
        """How many of its leaves opportunistic pods use."""
        return self.used.get(OPPORTUNISTIC_PRIORITY, 0)

    @property
    def state(self) -> CellState:
        """Of a leaf by its user and claimant; else by its children's."""
        return combined(child.state for child in self.children)

    def count(self, priority: int, change: int) -> None:
        before = self.opportunistic
        super().count(priority, change)
        if priority == OPPORTUNISTIC_PRIORITY:
            self.chain.count_opportunistic(self, before)

    def ancestor(self, level: int) -> PhysicalCell:
        """The cell of that level that it is part of, itself included. Raises LookupError above the top."""
        cell = self
        while cell.level < level:
            if cell.parent is None:
                raise LookupError(f"{self.address} has no ancestor at level {level}")
            cell = cell.parent
        return cell

    def upward(self) -> Iterator[PhysicalCell]:
        """Itself and its ancestors."""
        cell: PhysicalCell | None = self
        while cell is not None:
            yield cell
            cell = cell.parent

    def leaf_cells(self) -> Iterator[PhysicalLeaf]:
        """All its leaves, in tree order."""
        for child in self.children:
            yield from child.leaf_cells()

    def __repr__(self) -> str:
        return f"<{self.cell_type} {self.address}>"


class PhysicalLeaf(PhysicalCell):
    """One device. `device`: its index on the node."""

    __slots__ = ("claimant", "device", "user")

    def __init__(self, chain: Chain, index: int, address: str, device: int) -> None:
        super().__init__(chain, 1, index, address, 1)
        self.device = device
        self.user: AffinityGroup | None = None
        self.claimant: AffinityGroup | None = None

    @property
    def state(self) -> CellState:
        if self.claimant is not None:
            return CellState.RESERVED if self.user is None else CellState.RESERVING
        return CellState.FREE if self.user is None else CellState.USED

    def leaf_cells(self) -> Iterator[PhysicalLeaf]:
        yield self


class VirtualCell(Cell):
    """A cell of a quota. `preassigned`: the top of its tree. `physical`: what it is bound to now.

    `number`: of a preassigned cell that is not pinned, its position among those of its level in its chain and VC.
    """

    __slots__ = ("children", "number", "parent", "physical", "pinned_id", "preassigned", "virtual_cluster")

    def __init__(
        self, virtual_cluster: VirtualCluster, chain: Chain, level: int, address: str, leaves: int, pinned_id: str
    ) -> None:
        super().__init__(chain, level, address, leaves)
        self.virtual_cluster = virtual_cluster
        self.pinned_id = pinned_id
        self.number = -1
        self.preassigned: VirtualCell = self
        self.parent: VirtualCell | None = None
        self.children: tuple[VirtualCell, ...] = ()
        self.physical: PhysicalCell | None = None

    @property
    def healthy(self) -> bool:
        """Bad if what it, or a cell above it on the same node, is bound to is bad; unbound ones count as healthy."""
        cell: VirtualCell | None = self
        while cell is not None and cell.level <= self.chain.topology.node_level:
            if cell.physical is not None:
                return cell.physical.healthy
            cell = cell.parent
        return self.physical is None or self.physical.healthy

    @property
    def host(self) -> VirtualCell:
        """The node-level cell that it is part of, or the preassigned one if that is smaller; above them, itself."""
        cell = self
        while cell.level < cell.chain.topology.node_level and cell.parent is not None:
            cell = cell.parent
        return cell

    def upward(self) -> Iterator[VirtualCell]:
        """Itself and its ancestors."""
        cell: VirtualCell | None = self
        while cell is not None:
            yield cell
            cell = cell.parent

    def leaf_cells(self) -> Iterator[VirtualCell]:
        """All its leaves, in tree order."""
        if not self.children:
            yield self
        for child in self.children:
            yield from child.leaf_cells()

    def __repr__(self) -> str:
        return f"<{self.cell_type} {self.address}>"
