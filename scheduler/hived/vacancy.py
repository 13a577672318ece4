"""Packing that needs no victim: units and leaves of a quota, chosen by who sits on their hardware.

A quota that is free is no proof of free devices: opportunistic pods may use them. Where a bound unit has free leaves,
each unbound virtual leaf in it stands for the physical one that it would be mapped to, and counts only if no pod uses
that one. An unbound unit may get any cell, so all of its leaves count, and the mapping shows whether it was right.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from scheduler.hived.cells import Cell, PhysicalCell, PhysicalLeaf, VirtualCell
from scheduler.hived.chain import Chain
from scheduler.hived.constants import OPPORTUNISTIC_PRIORITY
from scheduler.hived.units import Key, TightestFit, Units, mask_of


class VacantFit(TightestFit):
    """The unit that is left with the fewest free leaves; those that pods of other quotas use are not free."""

    def __init__(self) -> None:
        super().__init__(OPPORTUNISTIC_PRIORITY)

    def key(self, cell: Cell) -> Key:
        key = super().key(cell)
        if not isinstance(cell, VirtualCell) or cell.physical is None:
            return key
        available = min(key.available, cell.leaves - sum(cell.physical.used.values()))
        return Key(available, 0, available)


def vacant_leaves(unit: VirtualCell) -> int:
    """The mask of the leaves of a unit, in tree order, that are mapped, or would be, to devices that no pod uses."""
    vacant: list[bool] = []
    _collect(unit, unit.physical, vacant)
    return mask_of((position for position, is_vacant in enumerate(vacant) if is_vacant), len(vacant))


def _collect(cell: VirtualCell, physical: PhysicalCell | None, vacant: list[bool]) -> None:
    if not cell.children:
        vacant.append(not isinstance(physical, PhysicalLeaf) or physical.user is None)
        return
    others = [] if physical is None else [child for child in physical.children if child.virtual is None]
    unbound = iter(sorted(others, key=lambda child: child.opportunistic))  # as a mapping takes them
    for child in cell.children:
        _collect(child, child.physical or next(unbound, None), vacant)


def vacant_devices(chain: Chain) -> int:
    """How many devices of a chain no pod uses and no gang has claimed."""
    return sum(cell.leaves - sum(cell.used.values()) for cell in chain.levels[-1])


def competitors(units: Units[VirtualCell], chosen: Collection[int], displacing: Sequence[int]) -> int:
    """The mask of the units to do without after some of those `chosen` displaced pods: these, and the unbound ones that
    would be mapped among the same physical cells and were not chosen. The mapping takes the emptiest cells first.
    """
    taken = frozenset(chosen)
    pools = {pool for unit in displacing if (pool := _pool(units.cells[unit])) is not None}
    rivals = (unit for unit, cell in enumerate(units.cells) if unit not in taken and _pool(cell) in pools)
    return mask_of((*displacing, *rivals), len(units.cells))


def _pool(unit: VirtualCell) -> VirtualCell | int | None:
    """What the units that are mapped among the same cells share: the bound cell above them, or the level of their
    preassigned cells; None for a bound unit.
    """
    if unit.physical is not None:
        return None
    cell = unit
    while cell.parent is not None and cell.physical is None:
        cell = cell.parent
    return cell if cell.physical is not None else cell.level
