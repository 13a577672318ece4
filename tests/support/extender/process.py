"""A `HivedScheduler` in virtual time, on an API server in memory; the test acts as kube-scheduler, kubelets and users.

`ScriptedAlgorithm` returns scripted decisions and checks that calls for each pod come in a legal order; it serves to
test the process. Stories of both use the process with the real algorithm.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from typing import Any

from controllers.extender.pod_states import PodState
from controllers.extender.scheduler import HivedScheduler
from controllers.extender.wire import (
    ExtenderArgs,
    ExtenderBindingArgs,
    ExtenderBindingResult,
    ExtenderFilterResult,
    ExtenderPreemptionArgs,
    ExtenderPreemptionResult,
    MetaVictims,
)
from scheduler.hived.algorithm import (
    Decision,
    HivedAlgorithm,
    PodPreemptInfo,
    PodScheduleResult,
    PodWaitInfo,
    SchedulingPhase,
)
from scheduler.hived.cells.topology import Topology
from scheduler.hived.contract import (
    POD_SCHEDULING_SPEC,
    AffinityGroupMemberBindInfo,
    PodBindInfo,
    PodPlacementInfo,
    PodSchedulingSpec,
    extract_pod_bind_info,
    new_binding_pod,
)
from store.kube.api.objects import NODES, PODS, Object, annotations_of, key_of, name_of, uid_of
from store.kube.memory.kube import Call, MemoryKube
from tests.support import require
from tests.support.hived.cluster import node_object, pod_object
from tests.support.waiting import loop_time

NAMESPACE = "default"
BEGAN = 1_700_000_000.0
SPEC = "virtualCluster: a\npriority: 0\nleafCellNumber: 1\n"


def waits(reason: str = "full") -> PodScheduleResult:
    return PodScheduleResult(pod_wait_info=PodWaitInfo(reason))


def binds(node: str, *devices: int) -> PodScheduleResult:
    """Return a decision for one pod that is a group of its own."""
    devices = devices or (0,)
    placement = PodPlacementInfo(node, devices, ("",) * len(devices))
    return PodScheduleResult(
        pod_bind_info=PodBindInfo(node, devices, "chain", (AffinityGroupMemberBindInfo((placement,)),))
    )


def preempts(node: str, *victims: Object, elsewhere: tuple[Object, ...] = ()) -> PodScheduleResult:
    return PodScheduleResult(pod_preempt_info=PodPreemptInfo(node, victims, elsewhere))


def placed(pod: Object, node: str, *devices: int) -> Object:
    """Return the pod as it is once bound."""
    info = require(binds(node, *devices).pod_bind_info)
    return new_binding_pod(pod, info)


class ScriptedAlgorithm(HivedAlgorithm):
    """`decisions`: by pod name; a pod without one waits. `heard`: the calls, in words, in order."""

    def __init__(self) -> None:
        self.decisions: dict[str, PodScheduleResult | Exception] = {}
        self.heard: list[str] = []
        self.unallocated: dict[str, Object] = {}
        self.allocated: dict[str, Object] = {}
        super().__init__(Topology({}, {}))

    def schedule(self, pod: Object, suggested_nodes: Collection[str], phase: SchedulingPhase) -> Decision:
        assert uid_of(pod) in self.unallocated, f"{key_of(pod)} was not announced"
        self.heard.append(f"{phase} {name_of(pod)}")
        result = self.decisions.get(name_of(pod), waits())
        if isinstance(result, Exception):
            raise result
        return Decision(pod, PodSchedulingSpec("any"), result)

    def commit(self, decision: Decision) -> Object:
        pod = new_binding_pod(decision.pod, require(decision.result.pod_bind_info))
        self.restore(pod)
        return pod

    def add_node(self, node: Object) -> None:
        self.heard.append(f"add node {name_of(node)}")

    def delete_node(self, node: Object) -> None:
        self.heard.append(f"delete node {name_of(node)}")

    def add_unallocated_pod(self, pod: Object) -> None:
        assert uid_of(pod) not in self.unallocated.keys() | self.allocated.keys(), f"{key_of(pod)} twice"
        self.unallocated[uid_of(pod)] = pod
        self.heard.append(f"add {name_of(pod)}")

    def delete_unallocated_pod(self, pod: Object) -> None:
        del self.unallocated[uid_of(pod)]
        self.heard.append(f"delete {name_of(pod)}")

    def restore(self, pod: Object) -> None:
        assert uid_of(pod) not in self.allocated, f"{key_of(pod)} twice"
        node = extract_pod_bind_info(pod).node
        self.unallocated.pop(uid_of(pod), None)
        self.allocated[uid_of(pod)] = pod
        self.heard.append(f"place {name_of(pod)} on {node}")

    def delete_allocated_pod(self, pod: Object) -> None:
        del self.allocated[uid_of(pod)]
        self.heard.append(f"release {name_of(pod)}")


class Recorder:
    """Keeps events: (reason, name of the object, message)."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str, str]] = []

    def event(self, obj: Object, event_type: str, reason: str, message: str, *, api_version: str, kind: str) -> None:
        self.events.append((reason, name_of(obj), message))


class Process:
    """One process of a scheduler over `api`. Others may follow on the same API server.

    `nodes`: the names that `filter` and `preempt` suggest by default.
    """

    def __init__(
        self, algorithm: HivedAlgorithm, *, api: MemoryKube | None = None, nodes: Collection[str] = (), **how: Any
    ) -> None:
        self.api = api or MemoryKube(clock=lambda: BEGAN + loop_time(), rng=random.Random(7))
        self.recorder = Recorder()
        self.nodes = nodes
        self.scheduler = HivedScheduler(
            self.api, algorithm, recorder=self.recorder, clock=loop_time, rng=random.Random(1), **how
        )

    @asynccontextmanager
    async def running(self, *, ready: bool = True) -> AsyncIterator[Process]:
        """Run the scheduler for as long as the block; it ends as abruptly as by a kill."""
        async with asyncio.TaskGroup() as group:
            task = group.create_task(self.scheduler.run())
            try:
                if ready:
                    await self.scheduler.ready.wait()
                yield self
            finally:
                task.cancel()

    async def add_nodes(self, *names: str) -> None:
        for name in names:
            await self.api.create(NODES, node_object(name))
        await self.settled()

    async def add_pod(self, name: str, spec: str = SPEC, **changes: Any) -> Object:
        """Create a waiting pod, and wait until a running scheduler has seen it. `changes`: of its spec."""
        pod = pod_object(name, {POD_SCHEDULING_SPEC: spec})
        pod["metadata"]["namespace"] = NAMESPACE
        pod["spec"] |= changes
        created = await self.api.create(PODS, pod, NAMESPACE)
        await self.settled()
        return created

    async def read(self, name: str) -> Object:
        return await self.api.get(PODS, name, NAMESPACE)

    async def bind_by_hand(self, name: str, node: str, annotations: Mapping[str, str] | None = None) -> None:
        """Bind the pod as a user would by hand."""
        body = {"metadata": {"name": name, "annotations": dict(annotations or {})}, "target": {"name": node}}
        await self.api.create(PODS, body, NAMESPACE, name=name, subresource="binding")
        await self.settled()

    async def bind_as(self, decided: Object) -> None:
        """Bind the pod as another process decided."""
        await self.bind_by_hand(name_of(decided), decided["spec"]["nodeName"], annotations_of(decided))

    async def complete(self, name: str, phase: str = "Succeeded") -> None:
        await self.api.patch(PODS, name, NAMESPACE, {"status": {"phase": phase}}, subresource="status")
        await self.settled()

    async def delete(self, name: str) -> None:
        """Delete a pod as its user and its kubelet would."""
        await self.api.delete(PODS, name, NAMESPACE, grace_period=0)
        await self.settled()

    async def settled(self) -> None:
        """Wait until the scheduler has seen all writes."""
        for _ in range(10):
            await asyncio.sleep(0)

    async def filter(self, pod: Object, nodes: Collection[str] | None = None) -> ExtenderFilterResult:
        return await self.scheduler.filter(ExtenderArgs(pod, self.nodes if nodes is None else nodes))

    async def bind(self, pod: Object, node: str) -> ExtenderBindingResult:
        return await self.scheduler.bind(ExtenderBindingArgs(name_of(pod), NAMESPACE, uid_of(pod), node))

    async def preempt(self, pod: Object, nodes: Collection[str] | None = None) -> ExtenderPreemptionResult:
        nodes = self.nodes if nodes is None else nodes
        return await self.scheduler.preempt(ExtenderPreemptionArgs(pod, {node: MetaVictims(()) for node in nodes}))

    async def attempt(self, pod: Object, nodes: Collection[str] | None = None, *, preempts: bool = True) -> str:
        """Make one attempt of kube-scheduler to place the pod. Return the node it was bound to, or ""."""
        answer = await self.filter(pod, nodes)
        if answer.node_names:
            await self.bind(pod, answer.node_names[0])
            await self.settled()
            return answer.node_names[0]
        if preempts:
            await self.preempt(pod, nodes)
        return ""

    def state(self, pod: Object) -> PodState:
        return self.scheduler.view.statuses.state(uid_of(pod))


Before = Callable[[Call], Any]


def on_binding(act: Before) -> Before:
    """Return a hook of `MemoryKube` that acts on Bindings only."""
    return lambda call: act(call) if call.subresource == "binding" else None
