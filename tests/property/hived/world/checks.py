"""Checks of a state, of an answer, and of two states that should agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from scheduler.hived.algorithm import HivedAlgorithm, PodPreemptInfo, PodScheduleResult, SchedulingPhase
from scheduler.hived.cells.cells import PhysicalLeaf, UnitIndex, Units
from scheduler.hived.cells.groups import AffinityGroup, GroupState
from scheduler.hived.contract import PodBindInfo, extract_pod_bind_info
from scheduler.hived.errors import UserError
from store.kube.api.objects import name_of
from tests.support.hived.cluster import PREEMPTING, Cluster, Job, ownership, place, snapshot
from tests.support.hived.invariants import violations


class Violation(AssertionError):
    """A violated invariant."""


def demand(holds: bool, message: object) -> None:
    if not holds:
        raise Violation(message)


# states


def check_state(cluster: Cluster, forged: Collection[str]) -> None:
    """Check the invariants, and that the algorithm's state agrees with the cluster's."""
    demand(not (found := violations(cluster.algorithm)), found)
    everyone = {id(cell.units): cell.units for cell in _cells(cluster.algorithm) if cell.units}
    for turn, units in enumerate(everyone.values(), len(cluster.waiting) + len(cluster.bound)):
        _check_units(units, turn)
    _check_pods(cluster, forged)


def _cells(algorithm: HivedAlgorithm) -> Iterator[Any]:
    for chain in algorithm.chains.values():
        for level in chain.levels:
            yield from level
    for virtual_cluster in algorithm.virtual_clusters.values():
        below = list(virtual_cluster.preassigned)
        while below:
            cell = below.pop()
            yield cell
            below.extend(cell.children)


def _check_units(units: Units[Any], turn: int) -> None:
    """P3 for the buckets of units: check one kind of index at each turn."""
    bad = sum(1 << unit for unit, cell in enumerate(units.cells) if not cell.healthy)
    demand(units.bad == bad, "P10 which units are bad")
    index = (units.for_opportunistic, lambda: units.for_guaranteed(1), lambda: units.for_guaranteed(-1))[turn % 3]()
    fresh = UnitIndex(index.ranking, units.cells)
    if index.keys != fresh.keys or index.buckets != fresh.buckets:
        raise Violation(f"P3 units are kept by {index.keys}, not {fresh.keys}")


def _check_pods(cluster: Cluster, forged: Collection[str]) -> None:
    """Check that every pod has its decided place, no device has two pods, and nothing is kept of deleted pods."""
    holders: dict[tuple[str, int], str] = {}
    kept = {name_of(slot.pod): slot for group in cluster.groups.values() for slot in group.slots if slot.pod}
    for name, pod in cluster.bound.items():
        if name in forged:
            continue
        info = extract_pod_bind_info(pod)
        for device in info.leaf_cell_isolation:
            other = holders.setdefault((info.node, device), name)
            demand(other == name, "P11 a device has two pods")
        slot = kept.get(name)
        if slot is None or (slot.node, slot.devices) != (info.node, info.leaf_cell_isolation):
            raise Violation(f"P13 {name} was given {info.node}:{info.leaf_cell_isolation}, but has {slot}")
    for group in cluster.groups.values():
        members = {member.leaf_cell_number: member.pod_number for member in group.spec.affinity_group.members}
        places = Counter(slot.leaf_cell_number for slot in group.slots)
        whole = places == members or any(name_of(pod) in forged for pod in group.pods())
        demand(whole, "P11 a group has other places than members")
    demand(kept.keys() <= cluster.bound.keys(), "P11 a pod that is gone is kept")
    preempting = {name_of(pod) for group in cluster.groups.values() for pod in group.preempting_pods.values()}
    demand(preempting <= cluster.waiting.keys(), "P11 a pod that is gone preempts")


# answers


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, and the state before it. `priorities`: the effective priority and VC of each group."""

    job: Job
    leaves: int
    suggested: Sequence[str]
    phase: SchedulingPhase
    state: GroupState | None
    before: dict[str, Any]
    priorities: dict[str, tuple[int, str]]

    @classmethod
    def now(
        cls, algorithm: HivedAlgorithm, job: Job, leaves: int, suggested: Sequence[str], phase: SchedulingPhase
    ) -> Asked:
        group = algorithm.groups.get(job.name)
        priorities = {found.name: (found.priority, found.virtual_cluster) for found in algorithm.groups.values()}
        state = group.state if group else None
        return cls(job, leaves, suggested, phase, state, snapshot(algorithm), priorities)


def describe(result: PodScheduleResult) -> str:
    """Return an answer as text."""
    if result.pod_wait_info is not None:
        return f"wait, {result.pod_wait_info.reason}"
    if result.pod_preempt_info is not None:
        return f"preempt {sorted(name_of(pod) for pod in result.pod_preempt_info.victim_pods)}"
    assert result.pod_bind_info is not None
    return f"bind {place(result.pod_bind_info.node, result.pod_bind_info.leaf_cell_isolation)}"


def check_refusal(algorithm: HivedAlgorithm, asked: Asked, error: UserError) -> None:
    """Check that the request is invalid, and that refusing it has changed nothing."""
    demand(bool(mistakes(algorithm, asked.job, asked.leaves)), f"refused without a mistake: {error}")
    demand(snapshot(algorithm) == asked.before, f"P12 refused, but changed: {changes(asked.before, algorithm)}")


def mistakes(algorithm: HivedAlgorithm, job: Job, leaves: int) -> list[str]:
    """Return the errors of a request, by HiveD's checks of the annotation."""
    group = algorithm.groups.get(job.name)
    if group is not None:
        return _disagreements(group, job, leaves)
    cells = algorithm.topology.virtual_clusters.get(job.virtual_cluster)
    if cells is None:
        return ["no such virtual cluster"]
    if job.pinned:
        return [] if any(cell.pinned_cell_id == job.pinned for cell in cells) else ["not a pinned cell of the VC"]
    chains = algorithm.topology.chains
    anywhere = {chain.leaf_cell_type for chain in chains.values()}
    own = {chains[cell.chain].leaf_cell_type for cell in cells if not cell.pinned_cell_id}
    offered = anywhere if job.priority < 0 else own
    known = job.leaf_type in offered if job.leaf_type else bool(offered)
    return [] if known else ["no such leaf type"]


def _disagreements(group: AffinityGroup, job: Job, leaves: int) -> list[str]:
    spec = group.spec
    members = tuple((member.pod_number, member.leaf_cell_number) for member in spec.affinity_group.members)
    theirs = (
        *(spec.virtual_cluster, spec.priority, spec.leaf_cell_type, spec.pinned_cell_id, members),
        *(spec.lazy_preemption_enable, spec.ignore_k8s_suggested_nodes),
    )
    ours = (
        *(job.virtual_cluster, job.priority, job.leaf_type, job.pinned, tuple(sorted(job.members, key=_leaves_of))),
        *(job.lazy, job.ignore),
    )
    slots = [slot for slot in group.slots if slot.leaf_cell_number == leaves and slot.pod is None]
    return [] if theirs == ours and slots else [f"the group is {theirs}, with free places {slots}"]


def _leaves_of(member: tuple[int, int]) -> int:
    return member[1]


def check_answer(cluster: Cluster, asked: Asked, result: PodScheduleResult) -> None:
    """Check P12, P14, P15 and P19 of an answer of the algorithm."""
    algorithm = cluster.algorithm
    demand(not (found := mistakes(algorithm, asked.job, asked.leaves)), f"answered in spite of {found}")
    answers = (result.pod_wait_info, result.pod_preempt_info, result.pod_bind_info)
    demand(sum(answer is not None for answer in answers) == 1, f"P19 {result}")
    may_change = asked.phase is PREEMPTING and (result.pod_wait_info is None or asked.state is GroupState.PREEMPTING)
    may_change |= asked.state is GroupState.PREEMPTING
    if not may_change:
        demand(snapshot(algorithm) == asked.before, f"P12 {describe(result)}: {changes(asked.before, algorithm)}")
    if result.pod_preempt_info is not None:
        _check_victims(cluster, asked, result.pod_preempt_info)
    if result.pod_bind_info is not None:
        _check_place(cluster, asked, result.pod_bind_info)
    group = algorithm.groups.get(asked.job.name)
    if group is not None and group.state is GroupState.PREEMPTING and asked.phase is PREEMPTING:
        for slot in group.slots:
            _check_node(algorithm, asked, slot.node)


def check_downgrades(cluster: Cluster, asked: Asked) -> None:
    """P15 for groups that lose their quota: they allow it, are weaker, and of the same tenant."""
    for name, (priority, virtual_cluster) in asked.priorities.items():
        group = cluster.groups.get(name)
        if group is not None and group.priority < priority:
            weaker = priority < asked.job.priority and virtual_cluster == asked.job.virtual_cluster
            demand(weaker and group.spec.lazy_preemption_enable, f"P15 {name} of {priority} was downgraded")


def _check_victims(cluster: Cluster, asked: Asked, info: PodPreemptInfo) -> None:
    demand(bool(info.victim_pods), "P19 preemption without victims")
    for victim in info.victim_pods:
        name = name_of(victim)
        demand(name in cluster.bound, f"P15 victim {name} is not bound")
        node = cluster.bound[name]["spec"]["nodeName"]
        demand(node == info.node, f"P15 victim {name} is on {node}, not on {info.node}")
        group = next(group for group in cluster.groups.values() if any(pod is victim for pod in group.pods()))
        priority, virtual_cluster = asked.priorities[group.name]
        own = priority < 0 or virtual_cluster == asked.job.virtual_cluster
        demand(priority < asked.job.priority and own, f"P15 victim {name} of {priority} in {virtual_cluster}")


def _check_place(cluster: Cluster, asked: Asked, info: PodBindInfo) -> None:
    """P14 for the whole gang, in bind info of a new group."""
    placements = [pod for member in info.affinity_group_bind_info for pod in member.pod_placements]
    own = [pod for pod in placements if pod.physical_leaf_cell_indices == info.leaf_cell_isolation]
    demand(any(pod.physical_node == info.node for pod in own), f"P14 {info} has another place than its group has")
    demand(len(info.leaf_cell_isolation) == asked.leaves, f"P14 {info} for {asked.leaves} leaves")
    if asked.state is not None and asked.state is not GroupState.PREEMPTING:
        return
    sizes = Counter(len(pod.physical_leaf_cell_indices) for pod in placements)
    members = Counter({leaves: pods for pods, leaves in asked.job.members})
    demand(sizes == members, f"P11 {sizes} for {asked.job.members}")
    used = [(pod.physical_node, device) for pod in placements for device in pod.physical_leaf_cell_indices]
    demand(len(set(used)) == len(used), f"P14 devices are given twice: {used}")
    chain = cluster.algorithm.chains[info.cell_chain]
    leaves = {(leaf.node, leaf.device): leaf for leaf in chain.levels[0] if isinstance(leaf, PhysicalLeaf)}
    for node, device in used:
        demand((node, device) in leaves, f"P14 {info.cell_chain} has no {node}:{device}")
        _check_leaf(asked, leaves[node, device])
        if asked.state is None or asked.phase is PREEMPTING:
            _check_node(cluster.algorithm, asked, node)


def _check_leaf(asked: Asked, leaf: PhysicalLeaf) -> None:
    job = asked.job
    above = [leaf, *_ancestors(leaf)]
    demand(not job.pinned or any(cell.pinned_id == job.pinned for cell in above), f"P14 {leaf.address} is not pinned")
    right = not job.leaf_type or job.pinned or leaf.cell_type == job.leaf_type
    demand(bool(right), f"P14 {leaf.address} is of type {leaf.cell_type}")


def _ancestors(cell: Any) -> Iterator[Any]:
    while (cell := cell.parent) is not None:
        yield cell


def _check_node(algorithm: HivedAlgorithm, asked: Asked, node: str) -> None:
    demand(node in algorithm.healthy_nodes, f"P14 {node} is bad")
    demand(asked.job.ignore or node in asked.suggested, f"P14 {node} was not suggested")


# two states


def changes(before: dict[str, Any], algorithm: HivedAlgorithm) -> dict[str, Any]:
    """Return the differences as (before, after)."""
    after = snapshot(algorithm)
    return {
        key: (before.get(key), after.get(key))
        for key in (*before, *(key for key in after if key not in before))
        if before.get(key) != after.get(key)
    }


def users(cluster: Cluster) -> dict[str, str]:
    """Return the group that uses each leaf."""
    leaves = (leaf for chain in cluster.algorithm.chains.values() for leaf in chain.levels[0])
    return {
        f"{leaf.node}:{leaf.device}": leaf.user.name for leaf in leaves if isinstance(leaf, PhysicalLeaf) and leaf.user
    }


def check_same_users(first: Cluster, second: Cluster) -> None:
    """P17 for the users of leaves."""
    demand(users(first) == users(second), f"P17 {users(first)}, and in another order {users(second)}")


def check_same_recovery(first: Cluster, second: Cluster) -> None:
    """P17: the order of recovery does not matter."""
    one, other = ownership(first.algorithm), ownership(second.algorithm)
    differences = {key: (one.get(key), other.get(key)) for key in {*one, *other} if one.get(key) != other.get(key)}
    demand(not differences, f"P17 the order of recovery matters: {differences}")


def check_recovery(before: Cluster, first: Cluster, second: Cluster) -> None:
    """P17: running groups keep their devices and priorities, and the order does not matter.

    If a group had been downgraded, more groups run than have quota. Then its former and present owners contend, and
    among equals the first recovered gets it: only the devices are certain.
    """
    check_same_users(before, first)
    check_same_users(first, second)
    if any(group.lazy_preemption for group in before.groups.values()):
        return
    check_same_recovery(first, second)
    for group in before.groups.values():
        if group.state is not GroupState.PREEMPTING:
            other = first.groups[group.name]
            same = group.priority == other.priority
            demand(same, f"P17 {group.name} of {group.priority} is {other.priority} after a restart")
