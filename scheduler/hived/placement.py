"""A placement: where every pod of a gang would be, and what has to change for that."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from scheduler.hived.cells import PhysicalCell, PhysicalLeaf, VirtualCell
from scheduler.hived.chain import Chain
from scheduler.hived.groups import AffinityGroup, PodSlot, claimants_of, users_of


@dataclass(frozen=True, slots=True)
class PodPlace:
    """One pod's leaves; `virtual` goes with them, empty for an opportunistic pod."""

    leaves: tuple[PhysicalLeaf, ...]
    virtual: tuple[VirtualCell, ...] = ()

    def slot(self) -> PodSlot:
        """The same as part of a group."""
        return PodSlot(
            leaf_cell_number=len(self.leaves),
            node=self.leaves[0].node,
            devices=tuple(leaf.device for leaf in self.leaves),
            leaves=self.leaves,
            preassigned_types=tuple(cell.preassigned.cell_type for cell in self.virtual) or ("",) * len(self.leaves),
            virtual=self.virtual,
        )


@dataclass(frozen=True, slots=True)
class Placement:
    """A whole gang's. `downgraded`: groups that keep their devices but lose their quota to it (lazy preemption)."""

    chain: Chain
    places: tuple[PodPlace, ...]
    downgraded: tuple[AffinityGroup, ...] = ()

    def leaves(self) -> Iterator[PhysicalLeaf]:
        for place in self.places:
            yield from place.leaves

    def victims(self) -> list[AffinityGroup]:
        """The groups whose pods are on these leaves, in the order of the placement."""
        return users_of(self.leaves())

    def preemptors(self) -> list[AffinityGroup]:
        """The groups that have claimed some of these leaves."""
        return claimants_of(self.leaves())

    def bindings(self) -> Iterator[tuple[VirtualCell, PhysicalCell]]:
        """Every pair that must be bound, parents before their children."""
        seen: set[VirtualCell] = set()
        for place in self.places:
            for leaf, virtual in zip(place.leaves, place.virtual, strict=bool(place.virtual)):
                path: list[tuple[VirtualCell, PhysicalCell]] = []
                cell: VirtualCell | None = virtual
                physical: PhysicalCell | None = leaf
                while cell is not None and physical is not None and cell not in seen:
                    seen.add(cell)
                    path.append((cell, physical))
                    cell, physical = cell.parent, physical.parent
                yield from reversed(path)
