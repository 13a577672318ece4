"""Who is on which leaf: the only place where leaves change hands.

A leaf counts for its claimant if it has one, else for its user. Whoever it counts for has its virtual leaf, if it is
guaranteed; a victim that gets its leaf back gets it at the virtual leaf that it had.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from scheduler.hived.cells import PhysicalLeaf, VirtualCell
from scheduler.hived.constants import OPPORTUNISTIC_PRIORITY
from scheduler.hived.groups import AffinityGroup, users_of

Pair = tuple[PhysicalLeaf, VirtualCell | None]


def use(group: AffinityGroup, pairs: Iterable[Pair]) -> None:
    """Free leaves become used."""
    priority = group.priority
    for leaf, virtual in pairs:
        leaf.user = group
        _count(leaf, virtual, priority, 1)


def claim(group: AffinityGroup, pairs: Sequence[Pair]) -> None:
    """Leaves become reserved, or reserving while their users are still there."""
    _count_users(pairs, -1)
    priority = group.priority
    for leaf, virtual in pairs:
        leaf.claimant = group
        _count(leaf, virtual, priority, 1)


def give_up_claims(group: AffinityGroup, pairs: Sequence[Pair]) -> None:
    """Undo `claim`: users that are still there have their leaves back."""
    priority = group.priority
    for leaf, virtual in pairs:
        _count(leaf, virtual, priority, -1)
        leaf.claimant = None
    _count_users(pairs, 1)


def take_over(group: AffinityGroup, pairs: Iterable[Pair]) -> None:
    """Reserved leaves become used by their claimant."""
    for leaf, _ in pairs:
        leaf.claimant, leaf.user = None, group
        _mark(leaf)


def leave(group: AffinityGroup, pairs: Iterable[Pair]) -> None:
    """The user is gone; a claimed leaf is now reserved."""
    priority = group.priority
    for leaf, virtual in pairs:
        leaf.user = None
        if leaf.claimant is None:
            _count(leaf, virtual, priority, -1)
        _mark(leaf)


def become_opportunistic(priority: int, pairs: Iterable[Pair]) -> None:
    """Leaves used at a priority stay in use without their virtual side; claimed ones count for their claimant."""
    for leaf, virtual in pairs:
        if leaf.claimant is None:
            _count(leaf, virtual, priority, -1)
            _count(leaf, None, OPPORTUNISTIC_PRIORITY, 1)


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


def _count_users(pairs: Sequence[Pair], change: int) -> None:
    """Count the users of claimed leaves. A user's virtual leaf is its claimant's, unless the user has none."""
    priorities = {user: user.priority for user in users_of(leaf for leaf, _ in pairs)}
    for leaf, virtual in pairs:
        if leaf.user is not None:
            priority = priorities[leaf.user]
            _count(leaf, None if priority == OPPORTUNISTIC_PRIORITY else virtual, priority, change)


def _count(leaf: PhysicalLeaf, virtual: VirtualCell | None, priority: int, change: int) -> None:
    for cell in leaf.upward():
        cell.count(priority, change)
    _mark(leaf)
    if virtual is not None:
        leaf.chain.changed.add(virtual.host)
        for above in virtual.upward():
            above.count(priority, change)


def _mark(leaf: PhysicalLeaf) -> None:
    leaf.chain.changed.update(leaf.host.upward())
