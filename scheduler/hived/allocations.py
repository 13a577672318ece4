"""The groups that have a place, and every way in which they get, share and lose it. Only applies what was decided.

Allocated -> BeingPreempted while others claim its leaves -> gone with its last pod
Preempting (claims leaves) -> Allocated with its first pod, or gone when it is cancelled

Each method leaves the chain settled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from scheduler.hived import occupancy
from scheduler.hived.cells import VirtualCell
from scheduler.hived.chain import Chain
from scheduler.hived.groups import AffinityGroup, GroupState, LazyPreemptionStatus, PodSlot, users_of
from scheduler.hived.placement import Placement
from scheduler.hived.pod_contract import PodSchedulingSpec


class Allocations:
    """`groups` by name. `changed`: names of those that look different since somebody last cleared it. `clock`: seconds
    since the epoch.
    """

    def __init__(self, chains: dict[str, Chain], clock: Callable[[], float]) -> None:
        self.groups: dict[str, AffinityGroup] = {}
        self.changed: set[str] = set()
        self._chains = chains
        self._clock = clock

    def allocate(self, spec: PodSchedulingSpec, placement: Placement, slots: list[PodSlot]) -> AffinityGroup:
        """A group gets its place at once: nobody uses it; whoever has only claimed it gives way."""
        group = self._enter(spec, placement, slots, GroupState.ALLOCATED)
        occupancy.use(group, group.pairs())
        self._after(placement)
        return group

    def preempt(self, spec: PodSchedulingSpec, placement: Placement, slots: list[PodSlot]) -> AffinityGroup:
        """A group claims its place: it gets it when its victims are gone."""
        group = self._enter(spec, placement, slots, GroupState.PREEMPTING)
        for victim in placement.victims():
            victim.state = GroupState.BEING_PREEMPTED
            self.changed.add(victim.name)
        occupancy.claim(group, group.pairs())
        self._after(placement)
        return group

    def _enter(
        self, spec: PodSchedulingSpec, placement: Placement, slots: list[PodSlot], state: GroupState
    ) -> AffinityGroup:
        for preemptor in placement.preemptors():
            self._withdraw(preemptor)
        name = spec.affinity_group.name
        for group in placement.downgraded:
            self._downgrade(group, preemptor=name)
        self._bind(placement)
        self.groups[name] = AffinityGroup(name, spec, placement.chain.name, state, slots)
        self.changed.add(name)
        return self.groups[name]

    def _bind(self, placement: Placement) -> None:
        chain = placement.chain
        for virtual, physical in placement.bindings():
            if virtual.physical is physical:
                if virtual.parent is None:
                    chain.use_doomed(virtual)
            elif virtual.parent is None:
                chain.preassign(virtual, physical)
            else:
                chain.bind(virtual, physical)

    def _after(self, placement: Placement) -> None:
        for top in dict.fromkeys(virtual.preassigned for place in placement.places for virtual in place.virtual):
            placement.chain.adopt_bad(top)
        placement.chain.settle()

    def confirm(self, group: AffinityGroup) -> None:
        """A preempting group's victims are gone, and its first pod is there."""
        occupancy.take_over(group, group.pairs())
        group.state = GroupState.ALLOCATED
        group.preempting_pods.clear()
        self.changed.add(group.name)

    def cancel(self, group: AffinityGroup) -> None:
        """A preempting group gives up: its victims that are still there have all their leaves back."""
        self._withdraw(group)
        self._chains[group.chain].settle()

    def _withdraw(self, group: AffinityGroup) -> None:
        pairs = group.pairs()
        occupancy.give_up_claims(group, pairs)
        self._drop(group)
        for victim in users_of(group.leaves()):
            if not any(leaf.claimant for leaf in victim.leaves()):
                victim.state = GroupState.ALLOCATED
                self.changed.add(victim.name)
        _loosen(virtual for _, virtual in pairs)

    def _drop(self, group: AffinityGroup) -> None:
        del self.groups[group.name]
        self.changed.discard(group.name)

    def release(self, group: AffinityGroup) -> None:
        """A group's last pod is gone: its leaves are free, or reserved for who claimed them."""
        pairs = group.pairs()
        occupancy.leave(group, pairs)
        self._drop(group)
        _loosen(virtual for _, virtual in pairs)
        self._chains[group.chain].settle()

    def _downgrade(self, group: AffinityGroup, *, preemptor: str) -> None:
        """Lazy preemption: a group loses its quota and keeps its devices, as an opportunistic one."""
        pairs = group.pairs()
        occupancy.become_opportunistic(group.priority, pairs)
        self.lose_quota(group, preemptor=preemptor)
        _loosen(virtual for _, virtual in pairs)

    def lose_quota(self, group: AffinityGroup, *, preemptor: str) -> None:
        """A group that holds no virtual leaves (any more) is marked so; one that recovery had none for, by itself."""
        for slot in group.slots:
            slot.virtual = ()
        group.lazy_preemption = LazyPreemptionStatus(preemptor, self._clock())
        self.changed.add(group.name)


def _loosen(virtual: Iterable[VirtualCell | None]) -> None:
    for cell in virtual:
        if cell is not None:
            occupancy.loosen(cell)
