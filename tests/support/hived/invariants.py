"""The invariants of the algorithm's state, recomputed from the groups and the leaves upward.

No counter, list or mask of the core is trusted: each is recomputed in the simplest way and compared. A message names
the invariant (P1 to P15 of docs/pages/invariants.md), the cell or group, and both figures. Slow on purpose.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain as concat
from typing import TYPE_CHECKING

from scheduler.hived.cells.cells import Cell, CellState, PhysicalLeaf, VirtualCell
from scheduler.hived.cells.groups import AffinityGroup, GroupState, PodSlot
from scheduler.hived.contract import FREE_PRIORITY, MIN_GUARANTEED_PRIORITY, OPPORTUNISTIC_PRIORITY
from tests.support.hived.chain_invariants import Quotas, at, chain_violations

if TYPE_CHECKING:
    from scheduler.hived.algorithm import HivedAlgorithm
    from scheduler.hived.cells.chain import Chain

Counts = dict[int, int]  # leaves by priority


def violations(algorithm: HivedAlgorithm) -> list[str]:
    """Return a message for each violated invariant. Changes nothing."""
    owners = _Owners.of(algorithm.groups.values())
    quotas = Quotas.of(algorithm)
    chains = algorithm.chains.values()
    return [
        *concat.from_iterable(_group(name, group) for name, group in algorithm.groups.items()),
        *concat.from_iterable(_physical_counts(chain, owners) for chain in chains),
        *concat.from_iterable(chain_violations(chain, algorithm.healthy_nodes, quotas) for chain in chains),
        *_virtual_cells(algorithm, owners),
    ]


@dataclass(slots=True)
class _Owners:
    """The holders of each leaf according to the groups; for virtual leaves, those whose priority counts there."""

    users: dict[PhysicalLeaf, list[AffinityGroup]] = field(default_factory=lambda: defaultdict(list))
    claimants: dict[PhysicalLeaf, list[AffinityGroup]] = field(default_factory=lambda: defaultdict(list))
    virtual: dict[VirtualCell, list[tuple[AffinityGroup, PhysicalLeaf]]] = field(
        default_factory=lambda: defaultdict(list)
    )

    @classmethod
    def of(cls, groups: Iterable[AffinityGroup]) -> _Owners:
        owners = cls()
        for group in groups:
            holders = owners.claimants if group.state is GroupState.PREEMPTING else owners.users
            for slot in group.slots:
                for leaf in slot.leaves:
                    holders[leaf].append(group)
        for holders in (owners.users, owners.claimants):
            for group in {group for found in holders.values() for group in found}:
                owners._add_virtual(group)
        return owners

    def _add_virtual(self, group: AffinityGroup) -> None:
        claims = group.state is GroupState.PREEMPTING
        for slot in group.slots:
            for leaf, virtual in zip(slot.leaves, slot.virtual, strict=False):
                if claims or leaf not in self.claimants:
                    self.virtual[virtual].append((group, leaf))

    def priority(self, leaf: PhysicalLeaf) -> int | None:
        """Return the claimant's priority, else the user's, None if the leaf is free."""
        holders = self.claimants.get(leaf) or self.users.get(leaf)
        return holders[0].priority if holders else None


def _names(groups: Iterable[AffinityGroup]) -> list[str]:
    return [group.name for group in groups]


def _group(name: str, group: AffinityGroup) -> Iterator[str]:
    if name != group.name:
        yield f"P11 group {group.name} is filed as {name}"
    yield from _group_state(group)
    yield from _group_quota(group)
    for slot in group.slots:
        yield from _slot(group, slot)


def _group_state(group: AffinityGroup) -> Iterator[str]:
    claimed = sorted({leaf.claimant.name for slot in group.slots for leaf in slot.leaves if leaf.claimant is not None})
    pods, preempting = len(group.pods()), len(group.preempting_pods)
    match group.state:
        case GroupState.PREEMPTING:
            consistent = not pods and preempting > 0 and claimed in ([], [group.name])
        case GroupState.BEING_PREEMPTED:
            consistent = pods > 0 and not preempting and bool(claimed)
        case GroupState.ALLOCATED:
            consistent = pods > 0 and not preempting and not claimed
    if not consistent:
        yield (
            f"P11 group {group.name} is {group.state} with {pods} pods, {preempting} preempting pods and leaves "
            f"claimed by {claimed}"
        )


def _group_quota(group: AffinityGroup) -> Iterator[str]:
    """P9, and the part of P11 that a group is guaranteed as a whole or not at all."""
    incomplete = [slot.node for slot in group.slots if len(slot.virtual) not in {0, len(slot.leaves)}]
    split = {bool(slot.virtual) for slot in group.slots if slot.leaves}
    if incomplete or len(split) > 1:
        yield f"P11 group {group.name} has virtual leaves for some of its leaves only"
    foreign = sorted(
        virtual.address
        for slot in group.slots
        for virtual in slot.virtual
        if virtual.virtual_cluster.name != group.virtual_cluster
        or virtual.preassigned.pinned_id != group.spec.pinned_cell_id
    )
    if foreign:
        where = f"VC {group.virtual_cluster}, pinned cell {group.spec.pinned_cell_id!r}"
        yield f"P9 group {group.name} of {where} has virtual leaves {foreign}"
    downgraded = group.is_opportunistic and group.spec.priority >= MIN_GUARANTEED_PRIORITY
    if downgraded != (group.lazy_preemption is not None):
        yield (
            f"P2 group {group.name} of priority {group.spec.priority} counts as {group.priority}, "
            f"lazy preemption: {group.lazy_preemption}"
        )


def _slot(group: AffinityGroup, slot: PodSlot) -> Iterator[str]:
    where = f"group {group.name}, pod on {slot.node}"
    if len(slot.devices) != slot.leaf_cell_number or len(set(slot.devices)) != slot.leaf_cell_number:
        yield f"P14 {where}: devices {slot.devices} for {slot.leaf_cell_number} leaf cells"
    devices = [leaf.device for leaf in slot.leaves]
    if len(set(devices)) != len(devices) or not set(devices) <= set(slot.devices):
        yield f"P14 {where}: leaves with devices {devices}, not among {slot.devices}"
    if any(leaf.node != slot.node for leaf in slot.leaves):
        yield f"P14 {where}: leaves on {sorted({leaf.node for leaf in slot.leaves})}"


def _physical_counts(chain: Chain, owners: _Owners) -> Iterator[str]:
    """P1, P2, P3, P11 and P15 of physical cells."""
    expected: dict[Cell, Counts] = {}
    for cell in chain.levels[0]:
        assert isinstance(cell, PhysicalLeaf)
        if cell.user or cell.claimant or cell in owners.users or cell in owners.claimants:
            yield from _leaf(cell, owners)
        priority = owners.priority(cell)
        expected[cell] = {} if priority is None else {priority: 1}
    for level in chain.levels[1:]:
        for parent in level:
            expected[parent] = _sum(expected[child] for child in parent.children)
    for each, counts in expected.items():
        if _differs(each, counts):
            yield _difference(each, counts)


def _leaf(leaf: PhysicalLeaf, owners: _Owners) -> Iterator[str]:
    users, claimants = owners.users.get(leaf, []), owners.claimants.get(leaf, [])
    for role, holder, groups in (("user", leaf.user, users), ("claimant", leaf.claimant, claimants)):
        if len(groups) > 1:
            yield f"P11 leaf {at(leaf)} has more than one {role}: {_names(groups)}"
        if groups != ([] if holder is None else [holder]):
            recorded = None if holder is None else holder.name
            yield f"P1 leaf {at(leaf)} has {role} {recorded}, but groups that hold it so are {_names(groups)}"
    if leaf.state is not _state(leaf):
        yield f"P1 leaf {at(leaf)} is {leaf.state}, not {_state(leaf)}"
    if users and claimants:
        yield from _preemption(leaf, users[0], claimants[0])


def _state(leaf: PhysicalLeaf) -> CellState:
    if leaf.claimant is None:
        return CellState.USED if leaf.user is not None else CellState.FREE
    return CellState.RESERVING if leaf.user is not None else CellState.RESERVED


def _preemption(leaf: PhysicalLeaf, victim: AffinityGroup, preemptor: AffinityGroup) -> Iterator[str]:
    if victim.priority >= preemptor.priority:
        yield (
            f"P15 leaf {at(leaf)}: {preemptor.name} of priority {preemptor.priority} preempts {victim.name} of "
            f"priority {victim.priority}"
        )
    if victim.priority > OPPORTUNISTIC_PRIORITY and victim.virtual_cluster != preemptor.virtual_cluster:
        yield (
            f"P15 leaf {at(leaf)}: {preemptor.name} of VC {preemptor.virtual_cluster} preempts guaranteed "
            f"{victim.name} of VC {victim.virtual_cluster}"
        )


def _sum(counts: Iterable[Counts]) -> Counts:
    used = [one for one in counts if one]
    if len(used) < 2:
        return used[0] if used else {}
    total: Counts = {}
    for one in used:
        for priority, number in one.items():
            total[priority] = total.get(priority, 0) + number
    return total


def _differs(cell: Cell, expected: Counts) -> bool:
    return cell.used != expected or cell.priority != max(expected, default=FREE_PRIORITY)


def _difference(cell: Cell, expected: Counts) -> str:
    return (
        f"P3 cell {at(cell)} counts {cell.used} used leaves by priority and has priority {cell.priority}; its leaves "
        f"are {expected}"
    )


def _virtual_cells(algorithm: HivedAlgorithm, owners: _Owners) -> Iterator[str]:
    for cluster in algorithm.virtual_clusters.values():
        for chain, level, _ in cluster.levels():
            listed = list(cluster.unbound(chain, level))
            unbound = [cell for cell in cluster.at(chain, level) if cell.physical is None]
            if listed != unbound:
                yield f"P7 VC {cluster.name} lists {listed} as not bound in {chain}, which are {unbound}"
        for preassigned in cluster.preassigned:
            messages: list[str] = []
            _virtual(preassigned, owners, messages)
            yield from messages
            mask = preassigned.chain.doomed.get((cluster.name, preassigned.level), 0)
            physical = preassigned.physical
            doomed = physical is not None and bool(mask >> physical.index & 1)
            expected = bool(preassigned.pinned_id) or doomed or bool(preassigned.used)
            if (physical is not None) != expected:
                yield (
                    f"P10 preassigned cell {at(preassigned)}: bound {physical is not None}, pinned "
                    f"{bool(preassigned.pinned_id)}, doomed {doomed}, used {preassigned.used}"
                )
            if preassigned.pinned_id and (physical is None or physical.pinned_id != preassigned.pinned_id):
                yield f"P8 pinned cell {at(preassigned)} is not bound to the cell of id {preassigned.pinned_id}"


def _virtual(cell: VirtualCell, owners: _Owners, messages: list[str]) -> Counts:
    """Add the violations below a virtual cell (P2, P3, P8, P10 and P11) to `messages`. Return the recounted leaves."""
    if cell.children:
        counts = _sum([_virtual(child, owners, messages) for child in cell.children])
    else:
        counts = _virtual_leaf(cell, owners.virtual.get(cell, []), messages)
    if _differs(cell, counts):
        messages.append(_difference(cell, counts))
    if cell.physical is not None and cell.physical.virtual is not cell:
        messages.append(f"P8 virtual cell {at(cell)} is bound to {at(cell.physical)}, which is not bound to it")
    if cell.parent is not None and (counts or cell.physical is not None):
        messages.extend(_binding(cell, cell.parent, counts))
    return counts


def _virtual_leaf(cell: VirtualCell, holders: list[tuple[AffinityGroup, PhysicalLeaf]], messages: list[str]) -> Counts:
    if len(holders) > 1:
        messages.append(f"P11 virtual leaf {at(cell)} is held by {_names(group for group, _ in holders)}")
    for group, leaf in holders:
        if cell.physical is not leaf:
            bound = None if cell.physical is None else at(cell.physical)
            messages.append(f"P8 group {group.name} has {at(leaf)} as {cell.address}, which is bound to {bound}")
    return {holders[0][0].priority: 1} if holders else {}


def _binding(cell: VirtualCell, parent: VirtualCell, counts: Counts) -> Iterator[str]:
    """P8 and P10: a cell below a preassigned one is bound if and only if it is used or shows a bad node."""
    bound = cell.physical is not None
    if bound and parent.physical is None:
        yield f"P8 virtual cell {at(cell)} is bound, its parent is not"
    shows = cell.physical is not None and not cell.physical.healthy and cell.level >= cell.chain.topology.node_level
    if bound != (bool(counts) or shows):
        yield f"P10 virtual cell {at(cell)}: bound {bound}, used {counts}, bad {shows}"
