"""Affinity groups: pods that are placed all or none, and the leaves that they hold or claim.

A `Placement` is the place of a group that is not entered yet, with the changes that it needs. `Allocations` enters it:

Allocated -> BeingPreempted while another group claims its leaves -> deleted with its last pod
Preempting (claims leaves) -> Allocated with its first pod, or deleted when it is cancelled

Each of its methods leaves the chain settled. Only this module changes the users and claimants of leaves. A leaf counts
for its claimant if it has one, else for its user. That group, if guaranteed, has the virtual leaf; a victim that gets
its leaf back gets it at its former virtual leaf.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from scheduler.hived.cells.cells import PhysicalCell, PhysicalLeaf, VirtualCell
from scheduler.hived.cells.chain import Chain
from scheduler.hived.contract import OPPORTUNISTIC_PRIORITY, PodBindInfo, PodSchedulingSpec
from store.kube.api.objects import Object

Pair = tuple[PhysicalLeaf, VirtualCell | None]


class GroupState(StrEnum):
    """A group's state, as in HiveD's API. Waiting groups are not tracked."""

    ALLOCATED = "Allocated"
    PREEMPTING = "Preempting"
    BEING_PREEMPTED = "BeingPreempted"


@dataclass(slots=True)
class PodSlot:
    """The place of one pod of a group. `preassigned_types`: type of each device's preassigned cell, "" without quota; a
    downgraded group keeps them, so that recovery does not depend on which of its pods is found first.

    `leaves` and `virtual` go together; a leaf that a new configuration lacks is left out of both, and `virtual` is
    empty for an opportunistic or downgraded group.
    """

    leaf_cell_number: int
    node: str
    devices: tuple[int, ...]
    leaves: tuple[PhysicalLeaf, ...]
    preassigned_types: tuple[str, ...]
    virtual: tuple[VirtualCell, ...] = ()
    pod: Object | None = None


@dataclass(slots=True)
class LazyPreemptionStatus:
    """The group that took this group's quota while it kept its devices, and when (seconds since the epoch)."""

    preemptor: str
    preemption_time: float


@dataclass(slots=True, eq=False)
class AffinityGroup:
    """A group with its place. `slots` ascend by `leaf_cell_number`; `preempting_pods` by UID.

    `is_contested`: another group had some of its devices at recovery, so pods of both may share them.
    """

    name: str
    spec: PodSchedulingSpec
    chain: str
    state: GroupState
    slots: list[PodSlot]
    preempting_pods: dict[str, Object] = field(default_factory=dict)
    lazy_preemption: LazyPreemptionStatus | None = None
    is_contested: bool = False

    @property
    def virtual_cluster(self) -> str:
        return self.spec.virtual_cluster

    @property
    def priority(self) -> int:
        """Return the effective priority: -1 for opportunistic and downgraded groups."""
        return OPPORTUNISTIC_PRIORITY if self.is_opportunistic else self.spec.priority

    @property
    def is_opportunistic(self) -> bool:
        return not any(slot.virtual for slot in self.slots)

    def pairs(self) -> list[Pair]:
        """Return its leaves, each with its virtual leaf or None."""
        return [
            (leaf, slot.virtual[number] if slot.virtual else None)
            for slot in self.slots
            for number, leaf in enumerate(slot.leaves)
        ]

    def leaves(self) -> Iterator[PhysicalLeaf]:
        """Yield the leaves of all its slots, in order."""
        for slot in self.slots:
            yield from slot.leaves

    def pods(self) -> list[Object]:
        """Return its allocated pods."""
        return [slot.pod for slot in self.slots if slot.pod is not None]

    def slot_of(self, info: PodBindInfo) -> PodSlot | None:
        """Return the slot that matches a pod's bind info by node and devices, or None."""
        own = (info.node, info.leaf_cell_isolation)
        return next((slot for slot in self.slots if (slot.node, slot.devices) == own), None)


def users_of(leaves: Iterable[PhysicalLeaf]) -> list[AffinityGroup]:
    """Return the groups whose pods are on some leaves, each once, in the order of the leaves."""
    return list(dict.fromkeys(leaf.user for leaf in leaves if leaf.user is not None))


def claimants_of(leaves: Iterable[PhysicalLeaf]) -> list[AffinityGroup]:
    """Return the groups that have claimed some leaves, each once, in the order of the leaves."""
    return list(dict.fromkeys(leaf.claimant for leaf in leaves if leaf.claimant is not None))


@dataclass(frozen=True, slots=True)
class PodPlace:
    """The leaves of one pod, with their virtual leaves; `virtual` is empty for an opportunistic pod."""

    leaves: tuple[PhysicalLeaf, ...]
    virtual: tuple[VirtualCell, ...] = ()

    def slot(self) -> PodSlot:
        """Return the place as a slot of a group."""
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
    """The places of a whole gang. `downgraded`: groups that keep their devices but lose quota to it (lazy
    preemption).
    """

    chain: Chain
    places: tuple[PodPlace, ...]
    downgraded: tuple[AffinityGroup, ...] = ()

    def leaves(self) -> Iterator[PhysicalLeaf]:
        for place in self.places:
            yield from place.leaves

    def victims(self) -> list[AffinityGroup]:
        """Return the groups whose pods are on these leaves, in the order of the placement."""
        return users_of(self.leaves())

    def bindings(self) -> Iterator[tuple[VirtualCell, PhysicalCell]]:
        """Yield every pair that must be bound, parents before their children."""
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


class Allocations:
    """`groups` by name. `changed`: names of groups changed since the caller last cleared it. `clock` returns seconds
    since the epoch.
    """

    def __init__(self, chains: dict[str, Chain], clock: Callable[[], float]) -> None:
        self.groups: dict[str, AffinityGroup] = {}
        self.changed: set[str] = set()
        self._chains = chains
        self._clock = clock

    def allocate(self, spec: PodSchedulingSpec, placement: Placement, slots: list[PodSlot]) -> AffinityGroup:
        """Allocate unused leaves to a group. Groups that only claimed them are cancelled."""
        group = self._enter(spec, placement, slots, GroupState.ALLOCATED)
        priority = group.priority
        for leaf, virtual in group.pairs():
            leaf.user = group
            _count(leaf, virtual, priority, 1)
        self._after(placement)
        return group

    def preempt(self, spec: PodSchedulingSpec, placement: Placement, slots: list[PodSlot]) -> AffinityGroup:
        """Claim leaves for a group, which gets them once its victims are deleted."""
        group = self._enter(spec, placement, slots, GroupState.PREEMPTING)
        for victim in placement.victims():
            victim.state = GroupState.BEING_PREEMPTED
            self.changed.add(victim.name)
        pairs, priority = group.pairs(), group.priority
        _count_users(pairs, -1)
        for leaf, virtual in pairs:
            leaf.claimant = group
            _count(leaf, virtual, priority, 1)
        self._after(placement)
        return group

    def _enter(
        self, spec: PodSchedulingSpec, placement: Placement, slots: list[PodSlot], state: GroupState
    ) -> AffinityGroup:
        for preemptor in claimants_of(placement.leaves()):
            self._withdraw(preemptor)
        name = spec.affinity_group.name
        for group in placement.downgraded:
            # Downgrade a group (lazy preemption): it loses its quota and keeps its devices, as an opportunistic group
            pairs, priority = group.pairs(), group.priority
            for leaf, former in pairs:
                if leaf.claimant is None:  # claimed leaves still count for their claimant
                    _count(leaf, former, priority, -1)
                    _count(leaf, None, OPPORTUNISTIC_PRIORITY, 1)
            self.lose_quota(group, preemptor=name)
            _loosen(pairs)
        chain = placement.chain
        for virtual, physical in placement.bindings():
            if virtual.physical is physical:
                if virtual.parent is None:
                    chain.use_doomed(virtual)
            elif virtual.parent is None:
                chain.preassign(virtual, physical)
            else:
                chain.bind(virtual, physical)
        self.groups[name] = AffinityGroup(name, spec, placement.chain.name, state, slots)
        self.changed.add(name)
        return self.groups[name]

    def _after(self, placement: Placement) -> None:
        for top in dict.fromkeys(virtual.preassigned for place in placement.places for virtual in place.virtual):
            placement.chain.adopt_bad(top)
        placement.chain.settle()

    def confirm(self, group: AffinityGroup) -> None:
        """Allocate its claimed leaves to a preempting group whose victims are deleted and whose first pod is bound."""
        for leaf in group.leaves():
            leaf.claimant, leaf.user = None, group
            _mark(leaf)
        group.state = GroupState.ALLOCATED
        group.preempting_pods.clear()
        self.changed.add(group.name)

    def cancel(self, group: AffinityGroup) -> None:
        """Cancel a preempting group. Its remaining victims keep all their leaves."""
        self._withdraw(group)
        self._chains[group.chain].settle()

    def _withdraw(self, group: AffinityGroup) -> None:
        pairs, priority = group.pairs(), group.priority
        for leaf, virtual in pairs:
            _count(leaf, virtual, priority, -1)
            leaf.claimant = None
        _count_users(pairs, 1)
        self._drop(group)
        for victim in users_of(group.leaves()):
            if not any(leaf.claimant for leaf in victim.leaves()):
                victim.state = GroupState.ALLOCATED
                self.changed.add(victim.name)
        _loosen(pairs)

    def _drop(self, group: AffinityGroup) -> None:
        del self.groups[group.name]
        self.changed.discard(group.name)

    def release(self, group: AffinityGroup) -> None:
        """Delete a group whose last pod is deleted. Its leaves become free, or reserved for their claimants."""
        pairs, priority = group.pairs(), group.priority
        for leaf, virtual in pairs:
            leaf.user = None
            if leaf.claimant is None:
                _count(leaf, virtual, priority, -1)
            _mark(leaf)
        self._drop(group)
        _loosen(pairs)
        self._chains[group.chain].settle()

    def lose_quota(self, group: AffinityGroup, *, preemptor: str) -> None:
        """Record that a group without virtual leaves lost its quota; `preemptor` is its own name if recovery found no
        quota.
        """
        for slot in group.slots:
            slot.virtual = ()
        group.lazy_preemption = LazyPreemptionStatus(preemptor, self._clock())
        self.changed.add(group.name)


def _loosen(pairs: Iterable[Pair]) -> None:
    """Drop the bindings above virtual leaves that are no longer needed."""
    for _, virtual in pairs:
        cell = virtual
        while cell is not None and cell.physical is not None and not cell.used:
            chain, above = cell.chain, cell.parent
            if above is None:
                if not cell.pinned_id and not chain.is_doomed(cell):
                    chain.return_preassigned(cell)
            elif cell.physical.healthy or cell.level < chain.topology.node_level:
                chain.unbind(cell)
            cell = above


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
