"""HiveD's scheduling algorithm: a model of the cluster built from reported objects, and placement decisions on it.

One writer calls the methods, one after another; pods and nodes are Kubernetes objects and are never changed. `schedule`
plans without changing anything, except that a Preempting-phase decision claims leaves at once. `commit` applies a bind
result and writes it into the pod's annotations, which only `restore` reads, for pods that an earlier process placed.
All other methods report changes. Groups that wait are not kept: after a restart only what runs is known.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from enum import StrEnum

import structlog

from scheduler.hived.cells.cells import PhysicalCell, PhysicalLeaf
from scheduler.hived.cells.chain import Chain, VirtualCluster
from scheduler.hived.cells.groups import AffinityGroup, Allocations, GroupState, Placement, PodSlot, users_of
from scheduler.hived.cells.topology import Topology
from scheduler.hived.contract import (
    OPPORTUNISTIC_PRIORITY,
    AffinityGroupMemberBindInfo,
    PodBindInfo,
    PodPlacementInfo,
    PodSchedulingSpec,
    extract_pod_bind_info,
    extract_pod_scheduling_spec,
    new_binding_pod,
    why_bad,
)
from scheduler.hived.errors import UserError
from scheduler.hived.planning.planner import new_request, plan
from scheduler.hived.planning.recovery import is_contested, preassigned_cells, read_slots, recover
from store.kube.api.objects import Object, key_of, name_of, uid_of


class SchedulingPhase(StrEnum):
    """The call of kube-scheduler for which a decision is made: only Preempting may claim used leaves."""

    FILTERING = "Filtering"
    PREEMPTING = "Preempting"


@dataclass(frozen=True, slots=True)
class PodWaitInfo:
    """The pod must wait. `reason` is for the pod's owner (HiveD's `PodWaitInfo`)."""

    reason: str


@dataclass(frozen=True, slots=True)
class PodPreemptInfo:
    """The victims: `victim_pods` are those of one node, the first in configuration order that has any.

    Never empty. kube-scheduler takes victims of one node only; once they are gone, the next call names those of the
    next node. `elsewhere` has the victims of all other nodes.
    """

    node: str
    victim_pods: tuple[Object, ...]
    elsewhere: tuple[Object, ...] = ()


@dataclass(frozen=True, slots=True)
class PodScheduleResult:
    """The answer for a pod: exactly one of the first three is set (HiveD's `PodScheduleResult`).

    `downgraded`: the groups that keep their devices but lose their quota to the pod's group by this decision.
    """

    pod_wait_info: PodWaitInfo | None = None
    pod_preempt_info: PodPreemptInfo | None = None
    pod_bind_info: PodBindInfo | None = None
    downgraded: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Decision:
    """The result for a pod, with what `commit` needs to apply a bind result.

    `spec`: the pod's request. `placement`: of the whole group, if the pod is the first of it to be bound.
    """

    pod: Object
    spec: PodSchedulingSpec
    result: PodScheduleResult
    placement: Placement | None = None


_log = structlog.get_logger(__name__)


class HivedAlgorithm:
    """Makes decisions (HiveD's `SchedulerAlgorithm`). Every node is bad until it is reported healthy.

    Leaves are keyed by node and device index; no two chains share a device. `clock` returns seconds since the epoch.
    `groups`: those that have or have claimed leaf cells, by name. `changed_groups`: the names of groups changed since
    the caller last cleared the set, without deleted groups.
    """

    def __init__(self, topology: Topology, clock: Callable[[], float] = time.time) -> None:
        self.topology = topology
        self.chains = {name: Chain(chain) for name, chain in topology.chains.items()}
        self.virtual_clusters = {
            name: VirtualCluster(name, cells, self.chains) for name, cells in topology.virtual_clusters.items()
        }
        self.healthy_nodes: set[str] = set()
        self._allocations = Allocations(self.chains, clock)
        self.groups, self.changed_groups = self._allocations.groups, self._allocations.changed
        self._nodes: dict[str, list[PhysicalCell]] = {}
        self.leaves: dict[tuple[str, int], PhysicalLeaf] = {}
        self._group_of: dict[str, str] = {}  # by a pod's UID: its annotations may be edited after they were read
        for chain in self.chains.values():
            for tenant in self.virtual_clusters.values():
                chain.grant(tenant)
            for leaf in chain.levels[0]:
                assert isinstance(leaf, PhysicalLeaf)
                self.leaves[leaf.node, leaf.device] = leaf
            for node in chain.levels[chain.topology.node_level - 1]:
                self._nodes.setdefault(node.node, []).append(node)
                chain.set_healthy(node, healthy=False)
            chain.settle()

    def schedule(self, pod: Object, suggested_nodes: Collection[str], phase: SchedulingPhase) -> Decision:
        """Decide on a pod that is not allocated. Raises `UserError`, `PlatformError`.

        A wait or bind result changes nothing, unless the pod's group has claimed leaves before.
        """
        spec = extract_pod_scheduling_spec(pod)
        group = self.groups.get(spec.affinity_group.name)
        if group is not None:
            check_agreement(pod, spec, group)
            if group.state is GroupState.PREEMPTING:
                is_usable = all(leaf.healthy for leaf in group.leaves())
                # in a filter call kube-scheduler suggests no nodes that are still full
                if is_usable and phase is SchedulingPhase.PREEMPTING and not group.spec.ignore_k8s_suggested_nodes:
                    is_usable = {slot.node for slot in group.slots} <= set(suggested_nodes)
                if not is_usable:
                    self._allocations.cancel(group)
                    group = None
        if group is None:
            try:
                request = new_request(spec, suggested_nodes, self.chains, self.virtual_clusters)
            except UserError as error:
                raise UserError(f"pod {key_of(pod)}: {error}") from None
            found = plan(request)
            if not isinstance(found, Placement):
                reasons = "; ".join(f"chain {failure.chain}: {failure.reason}" for failure in found)
                return Decision(pod, spec, _wait(reasons))
            slots, victims = _slots(found), found.victims()
            downgraded = tuple(group.name for group in found.downgraded if group not in victims)
            preempt = _preempt(victims, self._nodes)
            if preempt is None:
                slot = next(slot for slot in slots if slot.leaf_cell_number == spec.leaf_cell_number)
                bind = replace(_bind(slot, slots, found.chain.name), downgraded=downgraded)
                return Decision(pod, spec, bind, found)
            if phase is SchedulingPhase.PREEMPTING:
                self._add_preempting(pod, self._allocations.preempt(spec, found, slots))
                preempt = replace(preempt, downgraded=downgraded)
            return Decision(pod, spec, preempt)
        if group.state is GroupState.BEING_PREEMPTED:
            why = f"affinity group {group.name} is being preempted: its other pods must go first"
            return Decision(pod, spec, _wait(why))
        free = free_slots(pod, spec, group)
        if group.state is GroupState.PREEMPTING:
            self._add_preempting(pod, group)
            result = _preempt(users_of(group.leaves()), self._nodes) or _bind(free[0], group.slots, group.chain)
            return Decision(pod, spec, result)
        place = next((slot for slot in free if not is_contested(slot, self.leaves)), None)
        result = _wait(why_contested(free, group)) if place is None else _bind(place, group.slots, group.chain)
        return Decision(pod, spec, result)

    def commit(self, decision: Decision) -> Object:
        """Apply a bind result. Return the pod as it will be when bound, with the decision in its annotations.

        A decision is valid only until the next call of any method: commit it at once, or drop it. Raises `UserError`,
        and changes nothing, if the group is too large for an annotation.
        """
        info, placement = decision.result.pod_bind_info, decision.placement
        assert info is not None, "only a bind result can be applied"
        pod = new_binding_pod(decision.pod, info)
        if placement is not None:
            assert not placement.victims(), "a decision is committed before any other call"
            group = self._allocations.allocate(decision.spec, placement, _slots(placement))
        else:
            group = self.groups[decision.spec.affinity_group.name]
            if group.state is GroupState.PREEMPTING:
                self._allocations.confirm(group)
        slot = group.slot_of(info)
        assert slot is not None, "the decision was made for this group"
        self._occupy(slot, pod, group)
        return pod

    def _add_preempting(self, pod: Object, group: AffinityGroup) -> None:
        group.preempting_pods[uid_of(pod)] = pod
        self._group_of[uid_of(pod)] = group.name
        self.changed_groups.add(group.name)

    def add_node(self, node: Object) -> None:
        """Add or update a node."""
        self._set_health(name_of(node), healthy=not why_bad(node))

    def delete_node(self, node: Object) -> None:
        self._set_health(name_of(node), healthy=False)

    def _set_health(self, name: str, *, healthy: bool) -> None:
        if healthy == (name in self.healthy_nodes):
            return
        if healthy:
            self.healthy_nodes.add(name)
        else:
            self.healthy_nodes.discard(name)
        for cell in self._nodes.get(name, ()):
            cell.chain.set_healthy(cell, healthy=healthy)
            cell.chain.settle()

    def set_health(self, healthy_nodes: Collection[str]) -> None:
        """Replace the set of healthy nodes: `add_node` and `delete_node` for all nodes at once."""
        self.healthy_nodes = set(healthy_nodes)
        for name, cells in self._nodes.items():
            for cell in cells:
                cell.chain.set_healthy(cell, healthy=name in self.healthy_nodes)
        for chain in self.chains.values():
            chain.settle()

    def restore_group(
        self,
        spec: PodSchedulingSpec,
        placement: Placement,
        slots: list[PodSlot],
        preempting_pods: Collection[Object] = (),
    ) -> AffinityGroup:
        """Restore a group at its former placement. A group with preempting pods claims leaves, so restore the users of
        those leaves first.
        """
        put = self._allocations.preempt if preempting_pods else self._allocations.allocate
        group = put(spec, placement, slots)
        self._group_of.update((uid_of(pod), group.name) for pod in group.pods())
        for pod in preempting_pods:
            self._add_preempting(pod, group)
        return group

    def add_unallocated_pod(self, pod: Object) -> None:
        """Keep nothing: a group is known from its first decision on."""

    def delete_unallocated_pod(self, pod: Object) -> None:
        """Remove a pod that was never allocated. Never raises."""
        group = self.groups.get(self._group_of.pop(uid_of(pod), ""))
        if group is not None and uid_of(pod) in group.preempting_pods:
            del group.preempting_pods[uid_of(pod)]
            self.changed_groups.add(group.name)
            if not group.preempting_pods:
                self._allocations.cancel(group)

    def restore(self, pod: Object) -> None:
        """Add a pod that was found bound, with the place in its annotations. The first one restores its whole group.

        Raises `UserError` if they are unreadable, or the place is another pod's.
        """
        spec, info = extract_pod_scheduling_spec(pod), extract_pod_bind_info(pod)
        group = self.groups.get(spec.affinity_group.name)
        if group is not None and group.state is GroupState.PREEMPTING:
            if group.slot_of(info) is not None and not any(leaf.user for leaf in group.leaves()):
                self._allocations.confirm(group)
            else:
                self._allocations.cancel(group)
                group = None
        if group is None:
            group = self._recover(pod, spec, info)
        slot = group.slot_of(info)
        if slot is None or (slot.pod is not None and uid_of(slot.pod) != uid_of(pod)):
            raise UserError(
                f"pod {key_of(pod)}: leaf cells {list(info.leaf_cell_isolation)} of node {info.node} are "
                f"{'not a place' if slot is None else 'already taken by another pod'} of affinity group {group.name}; "
                "it runs beside what is scheduled: delete it"
            )
        try:
            check_agreement(pod, spec, group)
        except UserError as error:
            _log.warning("Pod's spec differs from that of its group", group=group.name, reason=str(error))
        self._occupy(slot, pod, group)

    def _occupy(self, slot: PodSlot, pod: Object, group: AffinityGroup) -> None:
        slot.pod = pod
        self._group_of[uid_of(pod)] = group.name
        self.changed_groups.add(group.name)

    def delete_allocated_pod(self, pod: Object) -> None:
        """Remove a pod that had a place. Unknown pods are ignored."""
        group = self.groups.get(self._group_of.pop(uid_of(pod), ""))
        if group is None:
            return
        slot = next((slot for slot in group.slots if slot.pod and uid_of(slot.pod) == uid_of(pod)), None)
        if slot is not None:
            slot.pod = None
            self.changed_groups.add(group.name)
            if not group.pods():
                self._allocations.release(group)

    def _recover(self, pod: Object, spec: PodSchedulingSpec, info: PodBindInfo) -> AffinityGroup:
        slots, notes = read_slots(info, self.leaves)
        tenant = self.virtual_clusters.get(spec.virtual_cluster)
        for cell in preassigned_cells(slots):
            cell.chain.undoom_around(cell)
            if tenant is not None:
                cell.chain.undoom_of(tenant, cell.level, 1)
        found = recover(spec, slots, tenant, self.chains)
        if found.lost and found.placement.chain.undoom_all():
            found = recover(spec, slots, tenant, self.chains)
        for slot, place in zip(slots, found.placement.places, strict=True):
            slot.virtual = place.virtual
        for note in notes:
            _log.warning("Group lost leaf cells", group=spec.affinity_group.name, pod=key_of(pod), reason=note)
        if found.lost:
            _log.warning("Group continues without its quota", group=spec.affinity_group.name, reason=found.lost)
        group = self._allocations.allocate(spec, found.placement, slots)
        group.is_contested = any(is_contested(slot, self.leaves) for slot in slots)
        if group.is_contested:
            _log.error("Two groups use the same devices; delete the pods of one", group=group.name, pod=key_of(pod))
        if group.is_opportunistic and spec.priority > OPPORTUNISTIC_PRIORITY:
            self._allocations.lose_quota(group, preemptor=group.name)
        for chain in self.chains.values():
            chain.settle()
        return group


def check_agreement(pod: Object, spec: PodSchedulingSpec, group: AffinityGroup) -> None:
    """Check that the pod's spec agrees with its group's. Raises `UserError`."""
    for field, ours, theirs in (
        ("virtualCluster", spec.virtual_cluster, group.spec.virtual_cluster),
        ("priority", spec.priority, group.spec.priority),
        ("affinityGroup.members", _members(spec), _members(group.spec)),
        ("leafCellType", spec.leaf_cell_type, group.spec.leaf_cell_type),
        ("pinnedCellId", spec.pinned_cell_id, group.spec.pinned_cell_id),
        ("lazyPreemptionEnable", spec.lazy_preemption_enable, group.spec.lazy_preemption_enable),
        ("ignoreK8sSuggestedNodes", spec.ignore_k8s_suggested_nodes, group.spec.ignore_k8s_suggested_nodes),
    ):
        if ours != theirs:
            raise UserError(
                f"pod {key_of(pod)}: {field} {_value(ours)} is not that of the other pods of affinity group "
                f"{group.name}, {_value(theirs)}; give all pods of a group the same, or this one a group of its own"
            )


def _value(value: object) -> str:
    """Return the value as YAML writes it, or "none" if it was left out."""
    return str(value).lower() if isinstance(value, bool) else str(value) or "none"


def _members(spec: PodSchedulingSpec) -> str:
    return ", ".join(f"{member.pod_number}x{member.leaf_cell_number}" for member in spec.affinity_group.members)


def free_slots(pod: Object, spec: PodSchedulingSpec, group: AffinityGroup) -> list[PodSlot]:
    """Return the group's slots of the pod's size that have no pod, at least one. Raises `UserError`."""
    slots = [slot for slot in group.slots if slot.leaf_cell_number == spec.leaf_cell_number and slot.pod is None]
    if slots:
        return slots
    raise UserError(
        f"pod {key_of(pod)}: affinity group {group.name} ({_members(group.spec)}) already has all its pods of "
        f"{spec.leaf_cell_number} leaf cells; delete one of them, or give this one a group of its own"
    )


def why_contested(slots: list[PodSlot], group: AffinityGroup) -> str:
    """Return the reason why these slots are not given to any pod."""
    return (
        f"affinity group {group.name} has a place for it on {', '.join(slot.node for slot in slots)}, but other pods "
        "used leaf cells there when the group was recovered; delete all its pods so that it is scheduled again"
    )


def _slots(placement: Placement) -> list[PodSlot]:
    """Return the placement's slots, ascending by leaf cells."""
    return sorted((place.slot() for place in placement.places), key=lambda slot: slot.leaf_cell_number)


def _wait(reason: str) -> PodScheduleResult:
    return PodScheduleResult(pod_wait_info=PodWaitInfo(reason))


def _bind(slot: PodSlot, slots: list[PodSlot], chain: str) -> PodScheduleResult:
    """Return one of a group's slots as a result. `slots`: all slots of the group."""
    by_size: dict[int, list[PodPlacementInfo]] = {}
    for each in slots:
        placement = PodPlacementInfo(each.node, each.devices, each.preassigned_types)
        by_size.setdefault(each.leaf_cell_number, []).append(placement)
    members = tuple(AffinityGroupMemberBindInfo(tuple(placements)) for placements in by_size.values())
    return PodScheduleResult(pod_bind_info=PodBindInfo(slot.node, slot.devices, chain, members))


def _preempt(victims: list[AffinityGroup], nodes: dict[str, list[PhysicalCell]]) -> PodScheduleResult | None:
    """Return the victims' pods on the first node, in configuration order, that has any; None without victims."""
    places = [(slot.node, slot.pod) for victim in victims for slot in victim.slots if slot.pod is not None]
    if not places:
        return None
    order = {name: cells[0].index for name in {node for node, _ in places} if (cells := nodes.get(name))}
    first = min((node for node, _ in places), key=lambda node: (order.get(node, len(nodes)), node))
    pods = tuple(pod for node, pod in places if node == first)
    elsewhere = tuple(pod for node, pod in places if node != first)
    return PodScheduleResult(pod_preempt_info=PodPreemptInfo(first, pods, elsewhere))
