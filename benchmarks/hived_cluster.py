"""Common parts of HiveD's benchmarks: a cluster of 8-GPU nodes in racks, eight tenants, and gangs that start and end.

The load is mixed: single pods and gangs of up to 64 GPUs, a fifth opportunistic, priorities 0 to 9, half of the
guaranteed ones may be downgraded, a tenth heed kube-scheduler's suggestions. Each group has its own annotations, as
YAML, like those that users write. Everything is derived from a random seed.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ParamSpec, TypeVar

from scheduler.hived.algorithm import Decision, HivedAlgorithm, SchedulingPhase
from scheduler.hived.config.file import read_config
from scheduler.hived.config.resolve import resolve
from scheduler.hived.contract import POD_SCHEDULING_ENABLE, POD_SCHEDULING_SPEC, PodBindInfo
from store.kube.api.objects import Object, uid_of

GPUS = 8
RACK = 8  # nodes
TENANTS = 8
SHAPES = {  # members as (pods, GPUs of each): how often
    ((1, 1),): 30,
    ((1, 2),): 15,
    ((1, 4),): 10,
    ((1, 8),): 15,
    ((4, 2),): 5,
    ((2, 8),): 8,
    ((4, 8),): 8,
    ((8, 8),): 4,
    ((1, 2), (4, 8)): 3,
    ((1, 1), (2, 4), (1, 8)): 2,
}
CELL_TYPES = """\
physicalCluster:
  cellTypes:
    PAIR: {childCellType: GPU, childCellNumber: 2}
    QUAD: {childCellType: PAIR, childCellNumber: 2}
    HOST: {childCellType: QUAD, childCellNumber: 2, isNodeLevel: true}
    RACK: {childCellType: HOST, childCellNumber: 8}
  physicalCells:
"""

P = ParamSpec("P")
T = TypeVar("T")


def node_names(nodes: int) -> list[str]:
    return [f"gpu-{number:05}" for number in range(nodes)]


def config_text(nodes: int) -> str:
    """Return HiveD's file for a cluster. Each tenant has whole racks, hosts and quads; an eighth has no owner."""
    names, racks = node_names(nodes), nodes // RACK
    lines = [CELL_TYPES]
    for first in range(0, nodes, RACK):
        lines.append("  - cellType: RACK\n    cellChildren:\n")
        lines += [f"    - cellAddress: {name}\n" for name in names[first : first + RACK]]
    lines.append("virtualClusters:\n")
    for number in range(TENANTS):
        quota = {"RACK": racks // 16, "RACK.HOST": racks // 4, "RACK.HOST.QUAD": racks // 4}
        lines.append(f"  {tenant(number)}:\n    virtualCells:\n")
        lines += [f"    - {{cellType: {kind}, cellNumber: {cells}}}\n" for kind, cells in quota.items()]
    return "".join(lines)


def tenant(number: int) -> str:
    return f"tenant-{number}"


def node(name: str) -> Object:
    """Return a healthy node."""
    return {"metadata": {"name": name}, "spec": {}, "status": {"conditions": [{"type": "Ready", "status": "True"}]}}


class Gangs:
    """An endless supply of groups, each a list of its pods."""

    def __init__(self, seed: int, name: str = "job") -> None:
        self._rng = random.Random(seed)
        self._name = name
        self._made = 0

    def next(self) -> list[Object]:
        rng, self._made = self._rng, self._made + 1
        (shape,) = rng.choices([*SHAPES], [*SHAPES.values()])
        name = f"{self._name}-{self._made}"
        members = "".join(f"  - podNumber: {pods}\n    leafCellNumber: {gpus}\n" for pods, gpus in shape)
        text = (
            f"virtualCluster: {tenant(rng.randrange(TENANTS))}\n"
            f"priority: {-1 if rng.random() < 0.2 else rng.randrange(10)}\n"
            f"lazyPreemptionEnable: {str(rng.random() < 0.5).lower()}\n"
            f"ignoreK8sSuggestedNodes: {str(rng.random() >= 0.1).lower()}\n"
            f"affinityGroup:\n  name: {name}\n  members:\n{members}leafCellType: GPU\nleafCellNumber: "
        )
        sizes = [gpus for pods, gpus in shape for _ in range(pods)]
        return [pod(f"{name}-{number}", f"{text}{gpus}\n") for number, gpus in enumerate(sizes)]


def pod(name: str, text: str) -> Object:
    return {
        "metadata": {"namespace": "default", "name": name, "uid": name, "annotations": {POD_SCHEDULING_SPEC: text}},
        "spec": {
            "containers": [
                {"name": "main", "image": "example.org/train:1", "resources": {"limits": {POD_SCHEDULING_ENABLE: "1"}}}
            ]
        },
        "status": {"phase": "Pending"},
    }


class Stopwatch:
    """Milliseconds by operation."""

    def __init__(self) -> None:
        self.took: defaultdict[str, list[float]] = defaultdict(list)

    def time(self, what: str, work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        begin = time.perf_counter()
        result = work(*arguments, **named)
        self.took[what].append((time.perf_counter() - begin) * 1000)
        return result

    def figures(self, what: str) -> dict[str, float]:
        """Return the median, 99th percentile, maximum and number of samples."""
        took = self.took[what]
        quantiles = statistics.quantiles(took, n=100, method="inclusive") if len(took) > 1 else took * 99
        named = {"p50": quantiles[49], "p99": quantiles[98], "max": max(took), "samples": len(took)}
        return {name: round(value, 3) for name, value in named.items()}


@contextmanager
def seconds(figures: dict[str, float], name: str) -> Iterator[None]:
    """Record how long the block took."""
    begin = time.perf_counter()
    yield
    figures[name] = round(time.perf_counter() - begin, 2)


class Cluster:
    """An algorithm with all nodes healthy, and the groups that it has placed."""

    def __init__(self, nodes: int, *, seed: int = 1) -> None:
        self.built: dict[str, float] = {}
        self.names = node_names(nodes)
        text = config_text(nodes)
        with seconds(self.built, "read_s"):
            config = read_config(text, environ={}, home=Path("/nonexistent"))
        with seconds(self.built, "resolve_s"):
            topology = resolve(config)
        with seconds(self.built, "construct_s"):
            self.algorithm = HivedAlgorithm(topology)
        with seconds(self.built, "healthy_s"):
            for name in self.names:
                self.algorithm.add_node(node(name))
        self.size = nodes * GPUS
        self.used = 0
        self.watch = Stopwatch()
        self.outcomes: defaultdict[str, int] = defaultdict(int)
        self._gangs = Gangs(seed)
        self._rng = random.Random(seed)
        self._bound: dict[str, dict[str, tuple[Object, PodBindInfo]]] = {}  # group -> uid -> where
        self._order: list[str] = []  # groups that have been placed; those that have ended are dropped when met

    def fill(self, share: float) -> None:
        """Submit groups until that share of the cluster is in use."""
        refused = 0
        while self.used < share * self.size and refused < 200:
            refused = 0 if self.submit() else refused + 1

    def turn(self, share: float) -> None:
        """Submit a group; end others while more than that share of the cluster is in use."""
        while self.used > share * self.size:
            self._end(self._any())
        self.submit()

    def bound(self) -> list[Object]:
        """Return all placed pods, as annotated."""
        return [pod for group in self._bound.values() for pod, _ in group.values()]

    def break_nodes(self, share: float) -> None:
        """Break twice that share of the nodes, and repair half of them soon after."""
        names = self._rng.sample(self.names, 2 * round(share * len(self.names)))
        for name in names:
            self.watch.time("node_bad", self.algorithm.delete_node, node(name))
        for name in names[::2]:
            self.watch.time("node_healthy", self.algorithm.add_node, node(name))

    def submit(self) -> bool:
        """Schedule a new group, as kube-scheduler would: filter, and preempt if it must. False if it has to wait."""
        pods = self._gangs.next()
        for number, waiting in enumerate(pods):
            self.algorithm.add_unallocated_pod(waiting)
            if not self._place(waiting, "decide" if number == 0 else "follow"):
                self.algorithm.delete_unallocated_pod(waiting)
                return False
        return True

    def _place(self, waiting: Object, what: str) -> bool:
        phase = SchedulingPhase.FILTERING
        while True:
            decision = self._schedule(waiting, phase, what)
            result = decision.result
            if result.pod_bind_info is not None:
                self._commit(decision, result.pod_bind_info)
                return True
            if result.pod_preempt_info is None:
                self.outcomes["wait"] += 1
                return False
            if phase is SchedulingPhase.PREEMPTING:
                self.outcomes["preempt"] += 1
                for victim in result.pod_preempt_info.victim_pods:
                    self._delete(uid_of(victim))
            phase = SchedulingPhase.PREEMPTING

    def _schedule(self, waiting: Object, phase: SchedulingPhase, what: str) -> Decision:
        return self.watch.time(what, self.algorithm.schedule, waiting, self.names, phase)

    def _commit(self, decision: Decision, info: PodBindInfo) -> None:
        self.outcomes["bind"] += 1
        bound = self.watch.time("commit", self.algorithm.commit, decision)
        group = uid_of(bound).rpartition("-")[0]
        if group not in self._bound:
            self._bound[group] = {}
            self._order.append(group)
        self._bound[group][uid_of(bound)] = bound, info
        self.used += len(info.leaf_cell_isolation)

    def _any(self) -> str:
        """Return a random group that has not ended."""
        while True:
            at = self._rng.randrange(len(self._order))
            if self._order[at] in self._bound:
                return self._order[at]
            self._order[at] = self._order[-1]
            self._order.pop()

    def _end(self, group: str) -> None:
        for uid in list(self._bound[group]):
            self._delete(uid)

    def _delete(self, uid: str) -> None:
        group = uid.rpartition("-")[0]
        bound, info = self._bound[group].pop(uid)
        self.watch.time("delete_allocated", self.algorithm.delete_allocated_pod, bound)
        self.used -= len(info.leaf_cell_isolation)
        if not self._bound[group]:
            del self._bound[group]
