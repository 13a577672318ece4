"""Who is on which leaf: the only place where leaves change hands.

A leaf counts for its claimant if it has one, else for its user. Whoever it counts for has its virtual leaf, if it is
guaranteed; a victim that gets its leaf back gets it at the virtual leaf that it had.
"""

from __future__ import annotations

from collections.abc import Iterable

from scheduler.hived.cells import PhysicalCell, PhysicalLeaf, VirtualCell
from scheduler.hived.groups import AffinityGroup

Pair = tuple[PhysicalLeaf, VirtualCell | None]


def use(group: AffinityGroup, pairs: Iterable[Pair]) -> None:
    """Free leaves become used."""
    for leaf, virtual in pairs:
        leaf.user = group
        _count(leaf, virtual, group.priority, 1)


def claim(group: AffinityGroup, pairs: Iterable[Pair]) -> None:
    """Leaves become reserved, or reserving while their users are still there."""
    for leaf, virtual in pairs:
        if leaf.user is not None:
            _count(leaf, virtual_of(leaf.user, virtual), leaf.user.priority, -1)
        leaf.claimant = group
        _count(leaf, virtual, group.priority, 1)


def give_up_claims(group: AffinityGroup, pairs: Iterable[Pair]) -> None:
    """Undo `claim`: users that are still there have their leaves back."""
    for leaf, virtual in pairs:
        _count(leaf, virtual, group.priority, -1)
        leaf.claimant = None
        if leaf.user is not None:
            _count(leaf, virtual_of(leaf.user, virtual), leaf.user.priority, 1)


def take_over(group: AffinityGroup, pairs: Iterable[Pair]) -> None:
    """Reserved leaves become used by their claimant."""
    for leaf, _ in pairs:
        leaf.claimant, leaf.user = None, group
        _mark(leaf)


def leave(group: AffinityGroup, pairs: Iterable[Pair]) -> None:
    """The user is gone; a claimed leaf is now reserved."""
    for leaf, virtual in pairs:
        leaf.user = None
        if leaf.claimant is None:
            _count(leaf, virtual, group.priority, -1)
        _mark(leaf)


def become_opportunistic(priority: int, opportunistic: int, pairs: Iterable[Pair]) -> None:
    """Leaves stay in use without their virtual side; claimed ones already count for their claimant."""
    for leaf, virtual in pairs:
        if leaf.claimant is None:
            _count(leaf, virtual, priority, -1)
            _count(leaf, None, opportunistic, 1)


def loosen(virtual: VirtualCell) -> None:
    """Drop the bindings above a virtual leaf that nothing needs any more."""
    chain, cell = virtual.chain, virtual
    while cell.physical is not None and not cell.used:
        if cell.parent is None:
            if not cell.pinned_id and not chain.is_doomed(cell):
                chain.return_preassigned(cell)
            return
        if cell.physical.healthy or cell.level < chain.topology.node_level:
            chain.unbind(cell)
        cell = cell.parent


def virtual_of(user: AffinityGroup, virtual: VirtualCell | None) -> VirtualCell | None:
    """The virtual leaf of a leaf's user, given its claimant's: the same one, unless the user has none."""
    return None if user.is_opportunistic else virtual


def _count(leaf: PhysicalLeaf, virtual: VirtualCell | None, priority: int, change: int) -> None:
    physical: PhysicalCell | None = leaf
    while physical is not None:
        physical.count(priority, change)
        physical = physical.parent
    _mark(leaf)
    if virtual is not None:
        leaf.chain.changed.add(virtual.host)
    while virtual is not None:
        virtual.count(priority, change)
        virtual = virtual.parent


def _mark(leaf: PhysicalLeaf) -> None:
    changed = leaf.chain.changed
    cell = leaf.host
    changed.add(cell)
    while cell.parent is not None:
        cell = cell.parent
        changed.add(cell)
