"""A cluster for HiveD's algorithm: its configuration, pods and nodes as Kubernetes objects, and a driver.

`Cluster` acts as the pod state machine of a scheduler: it announces pods, has them scheduled, reports bound pods to the
algorithm and keeps every pod. It makes no decisions. `snapshot` and `ownership` return the state.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from scheduler.hived.algorithm import Decision, HivedAlgorithm, PodScheduleResult, SchedulingPhase
from scheduler.hived.cells.cells import PhysicalLeaf, VirtualCell
from scheduler.hived.cells.groups import AffinityGroup
from scheduler.hived.cells.topology import Topology
from scheduler.hived.config.file import read_config
from scheduler.hived.config.resolve import resolve
from scheduler.hived.contract import POD_SCHEDULING_ENABLE, POD_SCHEDULING_SPEC, PodBindInfo
from store.kube.api.objects import Object, name_of

FILTERING = SchedulingPhase.FILTERING
PREEMPTING = SchedulingPhase.PREEMPTING


def topology_of(config: Object) -> Topology:
    """Resolve a configuration, given as in the file."""
    return _resolved(json.dumps(config))


@lru_cache(maxsize=64)
def _resolved(text: str) -> Topology:
    return resolve(read_config(text, environ={}, home=Path("/nonexistent")))


def place(node: str, devices: Iterable[int]) -> str:
    """Return a pod's place as text: `node:0-3,8`, devices in the order of the placement, ascending runs folded."""
    runs: list[list[int]] = []
    for device in devices:
        if runs and device == runs[-1][-1] + 1:
            runs[-1].append(device)
        else:
            runs.append([device])
    return f"{node}:" + ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def node_object(name: str, *, ready: bool = True, cordoned: bool = False) -> Object:
    """Return a node as the API server shows it."""
    return {
        "metadata": {"name": name, "uid": name},
        "spec": {"unschedulable": True} if cordoned else {},
        "status": {"conditions": [{"type": "Ready", "status": "True" if ready else "False"}]},
    }


def pod_object(name: str, annotations: Mapping[str, str] | None = None, *, node: str = "") -> Object:
    """Return a pod that is enabled for HiveD. Its UID is its name. `node`: bound there."""
    spec: Object = {
        "schedulerName": "hivedscheduler",
        "containers": [
            {"name": "main", "image": "example/train", "resources": {"limits": {POD_SCHEDULING_ENABLE: "1"}}}
        ],
    }
    if node:
        spec["nodeName"] = node
    metadata = {"name": name, "namespace": "test", "uid": name, "annotations": dict(annotations or {})}
    return {"metadata": metadata, "spec": spec, "status": {"phase": "Pending"}}


@dataclass(frozen=True, slots=True)
class Job:
    """An affinity group as its owner requests it. `members`: (pods, leaves of each) pairs; empty for pods without a
    group.

    `leaf_type` "" is any; `lazy`: may be downgraded; `ignore`: kube-scheduler's suggestions do not count.
    """

    name: str
    virtual_cluster: str
    priority: int
    members: tuple[tuple[int, int], ...] = ((1, 1),)
    leaf_type: str = ""
    pinned: str = ""
    lazy: bool = True
    ignore: bool = False

    def spec(self, leaves: int) -> Object:
        """Return the annotation `pod-scheduling-spec` of a pod with that many leaves, before encoding."""
        members = [{"podNumber": pods, "leafCellNumber": number} for pods, number in self.members]
        return {
            "virtualCluster": self.virtual_cluster,
            "priority": self.priority,
            "pinnedCellId": self.pinned,
            "leafCellType": self.leaf_type,
            "leafCellNumber": leaves,
            "lazyPreemptionEnable": self.lazy,
            "ignoreK8sSuggestedNodes": self.ignore,
            "affinityGroup": {"name": self.name, "members": members} if members else None,
        }

    def pod(self, name: str, leaves: int) -> Object:
        """Return one of its pods, before it is scheduled."""
        return pod_object(name, {POD_SCHEDULING_SPEC: yaml.safe_dump(self.spec(leaves))})


@dataclass(frozen=True, slots=True)
class Answer:
    """The algorithm's answer for a pod."""

    pod: str
    result: PodScheduleResult

    @property
    def waits(self) -> bool:
        return self.result.pod_wait_info is not None

    @property
    def reason(self) -> str:
        """Return why it waits, "" if it does not."""
        return self.result.pod_wait_info.reason if self.result.pod_wait_info else ""

    @property
    def bind_info(self) -> PodBindInfo:
        assert self.result.pod_bind_info is not None, self
        return self.result.pod_bind_info

    @property
    def node(self) -> str:
        return self.bind_info.node

    @property
    def devices(self) -> tuple[int, ...]:
        return self.bind_info.leaf_cell_isolation

    @property
    def place(self) -> str:
        """Return the place as text, "" if the pod is not bound."""
        return place(self.node, self.devices) if self.result.pod_bind_info else ""

    @property
    def victims(self) -> set[str]:
        """Return the names of the victims, empty if the answer is not a preemption."""
        return (
            {name_of(pod) for pod in self.result.pod_preempt_info.victim_pods}
            if self.result.pod_preempt_info
            else set()
        )


@dataclass
class Cluster:
    """Drives one `HivedAlgorithm`. `waiting`: pods without a place by name, `bound`: those with one, as annotated.

    `healthy`: whether all nodes exist and are ready from the start.
    """

    config: Object
    healthy: bool = True
    now: float = 1000.0
    algorithm: HivedAlgorithm = field(init=False)
    waiting: dict[str, Object] = field(default_factory=dict)
    bound: dict[str, Object] = field(default_factory=dict)
    nodes: dict[str, Object] = field(default_factory=dict)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.algorithm = HivedAlgorithm(topology_of(self.config), clock=lambda: self.now)
        if self.healthy:
            self.heal(*self.node_names)

    @property
    def node_names(self) -> list[str]:
        """Return every node of the configuration, in its order, each once."""
        chains = self.algorithm.topology.chains.values()
        return list(dict.fromkeys(node for chain in chains for node in chain.nodes))

    # nodes

    def heal(self, *names: str) -> None:
        """Report these nodes as schedulable and ready."""
        for name in names:
            self._set_node(node_object(name))

    def break_(self, *names: str) -> None:
        """Report these nodes as not ready."""
        for name in names:
            self._set_node(node_object(name, ready=False))

    def cordon(self, *names: str) -> None:
        """Report these nodes as ready, but cordoned."""
        for name in names:
            self._set_node(node_object(name, cordoned=True))

    def remove_node(self, name: str) -> None:
        """Report the node as deleted."""
        self.algorithm.delete_node(self.nodes.pop(name))

    def _set_node(self, node: Object) -> None:
        self.nodes[name_of(node)] = node
        self.algorithm.add_node(node)

    # pods

    def ask(
        self,
        job: Job,
        leaves: int | None = None,
        *,
        pod: str = "",
        suggested: Collection[str] | None = None,
        phase: SchedulingPhase = PREEMPTING,
    ) -> Answer:
        """Schedule a new pod of a job, or again the named one; a pod that may be bound is then allocated.

        `leaves`: which of its members, the only one by default. `suggested`: all nodes by default.
        """
        if leaves is None:
            ((_, leaves),) = job.members
        name = pod or f"{job.name}-{next(self._numbers)}"
        if name not in self.waiting:
            self.announce(job.pod(name, leaves))
        return self.schedule(name, suggested=suggested, phase=phase)

    def announce(self, pod: Object) -> None:
        """Report a pod without a place."""
        self.waiting[name_of(pod)] = pod
        self.algorithm.add_unallocated_pod(pod)

    def schedule(
        self, name: str, *, suggested: Collection[str] | None = None, phase: SchedulingPhase = PREEMPTING
    ) -> Answer:
        """Schedule a waiting pod; if it may be bound, it is then allocated."""
        pod = self.waiting[name]
        nodes = self.node_names if suggested is None else suggested
        decision = self.algorithm.schedule(pod, nodes, phase)
        if decision.result.pod_bind_info is not None:
            self.commit(decision)
        return Answer(name, decision.result)

    def commit(self, decision: Decision) -> None:
        """Bind a waiting pod as was decided."""
        name = name_of(decision.pod)
        self.bound[name] = self.algorithm.commit(decision)
        del self.waiting[name]

    def ask_all(self, job: Job, **how: Any) -> list[Answer]:
        """Schedule every pod of a job, in the order of its members."""
        return [self.ask(job, leaves, **how) for pods, leaves in job.members for _ in range(pods)]

    def recover(self, *pods: Object) -> None:
        """Report bound pods."""
        for pod in pods:
            self.bound[name_of(pod)] = pod
            self.algorithm.restore(pod)

    def delete(self, *names: str) -> None:
        """Report these pods, bound or not, as deleted."""
        for name in names:
            if name in self.bound:
                self.algorithm.delete_allocated_pod(self.bound.pop(name))
            else:
                self.algorithm.delete_unallocated_pod(self.waiting.pop(name))

    def delete_group(self, name: str) -> None:
        """Report all bound pods of a group as deleted."""
        self.delete(*(name_of(pod) for pod in self.group(name).pods()))

    def restarted(
        self, config: Object | None = None, order: Callable[[list[Object]], Iterable[Object]] = iter
    ) -> Cluster:
        """Return a new process over the same nodes and bound pods, optionally with another configuration; pods in that
        order.
        """
        other = Cluster(self.config if config is None else config, healthy=False, now=self.now)
        for node in self.nodes.values():
            other.nodes[name_of(node)] = node
            other.algorithm.add_node(node)
        other.heal(*(name for name in other.node_names if name not in self.nodes))
        other.recover(*order(list(copy.deepcopy(self.bound).values())))
        return other

    # state

    @property
    def groups(self) -> dict[str, AffinityGroup]:
        return self.algorithm.groups

    def group(self, name: str) -> AffinityGroup:
        return self.algorithm.groups[name]

    def places(self, group: str) -> list[str]:
        """Return the places of a group's pods as texts."""
        return [place(slot.node, slot.devices) for slot in self.group(group).slots]

    def leaves(self, node: str) -> list[PhysicalLeaf]:
        """Return every leaf on a node, in configuration order."""
        chains = self.algorithm.chains.values()
        return [
            leaf for chain in chains for leaf in chain.levels[0] if leaf.node == node and isinstance(leaf, PhysicalLeaf)
        ]

    def preassigned(self, virtual_cluster: str, chain: str) -> list[VirtualCell]:
        """Return the unpinned cells of a VC's quota in a chain."""
        cells = self.algorithm.virtual_clusters[virtual_cluster].preassigned
        return [cell for cell in cells if cell.chain.name == chain and not cell.pinned_id]


def snapshot(algorithm: HivedAlgorithm) -> dict[str, Any]:
    """Return all state that a decision may depend on, comparable: cells, bindings, free lists, quotas, groups."""
    found: dict[str, Any] = {}
    for chain in algorithm.chains.values():
        for cell in itertools.chain.from_iterable(chain.levels):
            bound = cell.virtual.address if cell.virtual else ""
            owners = (_name(cell.user), _name(cell.claimant)) if isinstance(cell, PhysicalLeaf) else ()
            found[f"{chain.name} {cell.level} {cell.index}"] = (dict(cell.used), bound, cell.bad_nodes, owners)
        found[f"{chain.name} free"] = (list(chain.free.free), list(chain.free.obtainable), list(chain.healthy))
        found[f"{chain.name} quota"] = ({vc: list(free) for vc, free in chain.vc_free.items()}, list(chain.all_vc_free))
        found[f"{chain.name} doomed"] = {key: mask for key, mask in chain.doomed.items() if mask}
    for cluster in algorithm.virtual_clusters.values():
        for virtual in itertools.chain.from_iterable(map(_virtual_cells, cluster.preassigned)):
            found[virtual.address] = (dict(virtual.used), virtual.physical.address if virtual.physical else "")
    for group in algorithm.groups.values():
        found[f"group {group.name}"] = _group(group)
    return found


def ownership(algorithm: HivedAlgorithm) -> dict[str, Any]:
    """Return the owners: for each leaf in use (by node and device) its group, claimant, priority and the VC whose quota
    it counts in; for each group its state and slots. Which virtual cells of its VC a group has is ignored.
    """
    found: dict[str, Any] = {}
    for chain in algorithm.chains.values():
        for leaf in chain.levels[0]:
            assert isinstance(leaf, PhysicalLeaf)
            if leaf.used or leaf.user or leaf.claimant:
                cluster = leaf.virtual.virtual_cluster.name if leaf.virtual and leaf.virtual.used else ""
                found[f"{leaf.node}:{leaf.device}"] = (_name(leaf.user), _name(leaf.claimant), leaf.priority, cluster)
    for group in algorithm.groups.values():
        slots = sorted((slot.node, slot.devices, name_of(slot.pod) if slot.pod else "") for slot in group.slots)
        found[f"group {group.name}"] = (group.state, group.priority, slots)
    return found


def _name(group: AffinityGroup | None) -> str:
    return group.name if group else ""


def _group(group: AffinityGroup) -> tuple[Any, ...]:
    slots = [
        (slot.node, slot.devices, tuple(cell.address for cell in slot.virtual), name_of(slot.pod) if slot.pod else "")
        for slot in group.slots
    ]
    lazy = group.lazy_preemption.preemptor if group.lazy_preemption else ""
    return (group.state, group.priority, slots, sorted(group.preempting_pods), lazy)


def _virtual_cells(cell: VirtualCell) -> Iterable[VirtualCell]:
    yield cell
    for child in cell.children:
        yield from _virtual_cells(child)
