"""Whole stories of a cluster with the real algorithm in its process: restarts, gangs, preemption, users' changes."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

from controllers.extender.pod_states import PodState
from scheduler.hived.algorithm import HivedAlgorithm
from scheduler.hived.contract import POD_BIND_INFO, POD_SCHEDULING_SPEC, extract_pod_bind_info, is_live
from scheduler.hived.errors import NotNow, UserError
from store.kube.api.errors import KubeError, Unreachable
from store.kube.api.objects import NODES, PODS, Object, annotations_of, is_deleting, name_of, uid_of
from store.kube.memory.kube import Call
from tests.support.extender.process import NAMESPACE, Process, on_binding
from tests.support.hived.cluster import Job, ownership, topology_of
from tests.support.hived.design_cluster import quota, regular
from tests.support.hived.invariants import violations

pytestmark = pytest.mark.looptime

NODE_NAMES = tuple(f"n{number}" for number in range(4))
CONFIG = regular("GPU 2 PAIR 2 BOX*", NODE_NAMES, prod=quota(("BOX", 2)), test=quota(("BOX.PAIR", 3)))


def algorithm() -> HivedAlgorithm:
    return HivedAlgorithm(topology_of(CONFIG))


def spec_of(job: Job, leaves: int) -> str:
    return annotations_of(job.pod("any", leaves))[POD_SCHEDULING_SPEC]


def gang(name: str, pods: int, leaves: int, *, vc: str = "prod", priority: int = 0, lazy: bool = False) -> Job:
    return Job(name, vc, priority, ((pods, leaves),), lazy=lazy, ignore=True)


async def add(process: Process, job: Job) -> list[Object]:
    return [
        await process.add_pod(f"{job.name}-{number}", spec_of(job, leaves))
        for pods, leaves in job.members
        for number in range(pods)
    ]


@pytest.fixture
async def process() -> AsyncIterator[Process]:
    one = Process(algorithm(), nodes=NODE_NAMES)
    async with one.running():
        await one.add_nodes(*NODE_NAMES)
        yield one


async def used(process: Process) -> Counter[tuple[str, int]]:
    """Count the live pods on each device, by their annotations; without pods that are left out."""
    held: Counter[tuple[str, int]] = Counter()
    for pod in (await process.api.list(PODS, NAMESPACE)).items:
        if pod["spec"].get("nodeName") and is_live(pod) and uid_of(pod) not in process.scheduler.view.left_out:
            info = extract_pod_bind_info(pod)
            held.update((info.node, device) for device in info.leaf_cell_isolation)
    return held


async def test_a_kill_between_binding_and_bound(process: Process) -> None:
    """A decision that was not written is lost with the process; the next one decides again, once per pod."""
    pods = await add(process, gang("g", 2, 4))
    answers = [await process.filter(pod) for pod in pods]
    assert all(answer.node_names for answer in answers)
    await process.bind(pods[0], (answers[0].node_names or ("",))[0])
    async with Process(algorithm(), api=process.api, nodes=NODE_NAMES).running() as successor:
        assert [successor.state(pod) for pod in pods] == [PodState.BOUND, PodState.WAITING]
        assert await successor.attempt(pods[1])
        assert set((await used(successor)).values()) == {1}
        assert len(await used(successor)) == 8


async def test_a_binding_that_a_predecessor_posts_late(process: Process) -> None:
    """It reaches the API server after the successor decided otherwise: the pod's annotations count."""
    (pod,) = await add(process, gang("g", 1, 4))
    (node,) = (await process.filter(pod)).node_names or ("",)
    async with Process(algorithm(), api=process.api, nodes=NODE_NAMES).running() as successor:
        blocker = gang("h", 1, 4)
        await successor.attempt((await add(successor, blocker))[0])
        (other,) = (await successor.filter(pod)).node_names or ("",)
        assert other != node
        await process.delete("h-0")
        await process.bind(pod, node)
        await successor.settled()
        assert successor.state(pod) is PodState.BOUND
        assert [slot.node for slot in successor.scheduler.algorithm.groups["g"].slots] == [node]


async def test_a_late_binding_after_a_decision_that_was_not_used(process: Process) -> None:
    """`preempt` found a free place for the next filter to take; the predecessor's Binding comes first."""
    (pod,) = await add(process, gang("g", 1, 4))
    (node,) = (await process.filter(pod)).node_names or ("",)
    async with Process(algorithm(), api=process.api, nodes=NODE_NAMES).running() as successor:
        await successor.attempt((await add(successor, gang("h", 1, 4)))[0])
        await successor.preempt(pod)
        await process.bind(pod, node)
        await successor.settled()
        assert successor.state(pod) is PodState.BOUND
        assert [slot.node for slot in successor.scheduler.algorithm.groups["g"].slots] == [node]


async def place(process: Process, job: Job) -> None:
    for pod in await add(process, job):
        assert await process.attempt(pod)


def quota_lost(process: Process) -> list[tuple[str, str]]:
    """Return the Events on lost quota: (pod, the first part of the message)."""
    return [(name, message.partition(":")[0]) for reason, name, message in process.recorder.events if "Quota" in reason]


async def test_a_group_that_only_loses_quota_gets_an_event(process: Process) -> None:
    """Lazy preemption evicts no pod, but later preemptors may: each pod of the group gets an Event."""
    await place(process, gang("g", 2, 4, lazy=True))
    await place(process, gang("h", 2, 4, priority=5))
    message = "Affinity group g lost its quota to pod default/h-0"
    assert quota_lost(process) == [("g-0", message), ("g-1", message)]


async def test_a_group_that_loses_quota_to_a_preemptor_gets_an_event(process: Process) -> None:
    """When the place is claimed, not when it is only found; other groups are evicted for it."""
    await place(process, gang("g", 2, 4, lazy=True))
    await place(process, gang("full", 1, 4, priority=-1))
    await place(process, gang("few", 1, 1, priority=-1))
    (pod,) = await add(process, gang("h", 1, 4, priority=5))
    assert (await process.filter(pod)).failed_nodes
    assert quota_lost(process) == []
    assert (await process.preempt(pod)).node_name_to_meta_victims
    assert [name for name, _ in quota_lost(process)] == ["g-0", "g-1"]


async def test_a_group_that_loses_quota_to_a_configuration_gets_an_event(process: Process) -> None:
    """The configuration is applied while the jobs run."""
    await place(process, gang("g", 2, 4))
    smaller = {**CONFIG, "virtualClusters": {**CONFIG["virtualClusters"], "prod": {"virtualCells": []}}}
    await process.scheduler.replace(lambda: HivedAlgorithm(topology_of(smaller)))
    message = "Affinity group g lost its quota to another configuration"
    assert quota_lost(process) == [("g-0", message), ("g-1", message)]


@pytest.mark.parametrize("seed", range(8))
async def test_recovery_in_any_order(process: Process, seed: int) -> None:
    """P17: lists are in the order of names, watches in the order of events; each successor finds the same owners."""
    rng = random.Random(seed)
    jobs = [
        gang("a", 2, 2),
        gang("b", 1, 3),
        gang("c", 3, 1, vc="test"),
        gang("d", 2, 1, vc="test", priority=-1),
        gang("e", 1, 4, priority=-1),
    ]
    for job in rng.sample(jobs, len(jobs)):
        names = rng.sample(range(1000), job.members[0][0])
        for number in names:
            pod = await process.add_pod(f"p{number}-{job.name}", spec_of(job, job.members[0][1]))
            await process.attempt(pod, preempts=False)
    assert len(process.scheduler.algorithm.groups) >= 4
    before = ownership(process.scheduler.algorithm)
    async with Process(algorithm(), api=process.api, nodes=NODE_NAMES).running() as successor:
        assert ownership(successor.scheduler.algorithm) == before


@pytest.mark.parametrize("spoilt", [None, "{", "gangReleaseEnable: !!bool x"])
async def test_a_request_that_becomes_invalid_while_its_pod_runs(process: Process, spoilt: str | None) -> None:
    """The next process can't parse it, and yet gives the pod's devices to no other pod; the pod's deletion
    frees them.
    """
    pods = await add(process, gang("a", 4, 4, priority=-1))
    for pod in pods:
        await process.attempt(pod)
    for name in ("a-0", "a-2"):
        await process.api.patch(PODS, name, NAMESPACE, {"metadata": {"annotations": {POD_SCHEDULING_SPEC: spoilt}}})
    async with Process(algorithm(), api=process.api, nodes=NODE_NAMES).running() as successor:
        assert [successor.state(pod) for pod in pods] == [PodState.BOUND] * 4
        assert [reason for reason, _, _ in successor.recorder.events] == ["HivedPodWithoutRequest"] * 2
        late = [await successor.add_pod(f"b{number}", spec_of(Job("b", "prod", -1, ()), 4)) for number in range(4)]
        assert [await successor.attempt(pod) for pod in late] == [""] * 4
        for name in ("a-1", "a-3"):
            await successor.delete(name)
        for pod in late:
            await successor.attempt(pod)
        assert set((await used(successor)).values()) == {1}
        assert violations(successor.scheduler.algorithm) == []
        for name in ("a-0", "a-2"):
            await successor.delete(name)
        assert all([successor.state(pod) is PodState.BOUND or await successor.attempt(pod) for pod in late])


async def test_pods_and_nodes_in_either_order(process: Process) -> None:
    """A bound pod may be seen before its node; the result is the same as the other way round."""
    for pod in await add(process, gang("a", 2, 4)):
        await process.attempt(pod)
    before = ownership(process.scheduler.algorithm)
    nodes = (await process.api.list(NODES)).items
    for node in nodes:
        await process.api.delete(NODES, name_of(node))
    async with Process(algorithm(), api=process.api, nodes=NODE_NAMES).running() as successor:
        assert not successor.scheduler.algorithm.healthy_nodes
        await successor.add_nodes(*NODE_NAMES)
        assert ownership(successor.scheduler.algorithm) == before


@pytest.mark.parametrize("asks", [True, False])
async def test_a_guaranteed_gang_preempts(process: Process, asks: bool) -> None:
    """Opportunistic pods fill the cluster and are evicted for a gang with quota, whether or not kube-scheduler calls
    preempt.
    """
    for number in range(16):
        (pod,) = await add(process, gang(f"o{number}", 1, 1, priority=-1))
        assert await process.attempt(pod)
    pods = await add(process, gang("g", 2, 4))
    for _ in range(60):
        await asyncio.sleep(1)
        for pod in pods:
            if process.state(pod) is PodState.BOUND:
                continue
            answer = await process.filter(pod)
            if answer.node_names:
                await process.bind(pod, answer.node_names[0])
            elif asks:
                found = (await process.preempt(pod)).node_name_to_meta_victims or {}
                uids = {uid for victims in found.values() for uid in victims.pods}
                for victim in (await process.api.list(PODS, NAMESPACE)).items:
                    if uid_of(victim) in uids:
                        await process.api.delete(PODS, name_of(victim), NAMESPACE, uid=uid_of(victim))
        for leaving in (await process.api.list(PODS, NAMESPACE)).items:
            if is_deleting(leaving):
                await process.delete(name_of(leaving))
    assert [process.state(pod) for pod in pods] == [PodState.BOUND] * 2
    held = await used(process)
    assert len(held) == 16
    assert set(held.values()) == {1}


class Chaos:
    """Users, kubelets, kube-scheduler and an API server that loses answers, all at random."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.process = Process(algorithm(), nodes=NODE_NAMES)
        self.api = self.process.api
        self.numbers = iter(range(10_000))
        self.decided: dict[str, str] = {}  # by UID of a Binding pod: the node of its first answer

    async def run(self, steps: int) -> None:
        await self.process.add_nodes(*NODE_NAMES)
        while steps > 0:
            async with self.process.running():
                for _ in range(min(steps, self.rng.randint(20, 60))):
                    await self.step()
                    steps -= 1
            self.api.before_call = self.api.after_call = None
            self.process = Process(algorithm(), api=self.api, nodes=NODE_NAMES)
            self.decided.clear()

    async def step(self) -> None:
        actions = [(self.schedule, 10), (self.create, 4), (self.end, 3), (self.by_hand, 1), (self.flap, 2)]
        actions += [(self.lose, 1), (self.rename, 1), (self.reconfigure, 1)]
        (act,) = self.rng.choices([act for act, _ in actions], [weight for _, weight in actions])
        await act()
        await self.process.settled()
        held = await used(self.process)
        assert not [device for device, count in held.items() if count > 1], held
        assert violations(self.process.scheduler.algorithm) == []

    async def pods(self) -> list[Object]:
        return list((await self.api.list(PODS, NAMESPACE)).items)

    async def schedule(self) -> None:
        """P13, P19: an answer has exactly one part, and a Binding pod has one node."""
        waiting = [pod for pod in await self.pods() if not pod["spec"].get("nodeName")]
        if not waiting:
            return
        pod, nodes = self.rng.choice(waiting), self.rng.sample(NODE_NAMES, self.rng.randint(1, 4))
        try:
            answer = await self.process.filter(pod, nodes)
            assert bool(answer.node_names) != bool(answer.failed_nodes)
            if answer.node_names:
                assert self.decided.setdefault(uid_of(pod), answer.node_names[0]) == answer.node_names[0]
                if self.rng.random() < 0.7:
                    await self.process.bind(pod, answer.node_names[0])
            elif self.rng.random() < 0.5:
                await self.process.preempt(pod, nodes)
        except (UserError, NotNow):
            pass

    async def create(self) -> None:
        number = next(self.numbers)
        name, pods = f"j{number}", self.rng.randint(1, 3)
        vc, priority = self.rng.choice(["prod", "test"]), self.rng.choice([-1, 0, 1, 2])
        job = gang(name, pods, self.rng.randint(1, 3), vc=vc, priority=priority, lazy=self.rng.random() < 0.5)
        if self.rng.random() < 0.1:
            await self.process.add_pod(name, self.rng.choice(["{", "", "virtualCluster: prod", "virtualCluster: [8"]))
        else:
            await add(self.process, job)

    async def end(self) -> None:
        if pods := await self.pods():
            pod = self.rng.choice(pods)
            if self.rng.random() < 0.3:
                await self.process.complete(name_of(pod), self.rng.choice(["Succeeded", "Failed"]))
            await self.process.delete(name_of(pod))
            self.decided.pop(uid_of(pod), None)

    async def by_hand(self) -> None:
        waiting = [pod for pod in await self.pods() if not pod["spec"].get("nodeName")]
        if waiting:
            forged = self.rng.choice([{}, {POD_BIND_INFO: "{"}, {POD_BIND_INFO: "node: n0"}])
            pod = self.rng.choice(waiting)
            self.api.before_call = self.api.after_call = None
            await self.process.bind_by_hand(name_of(pod), self.rng.choice(NODE_NAMES), forged)

    async def flap(self) -> None:
        name = self.rng.choice(NODE_NAMES)
        ready = {"type": "Ready", "status": self.rng.choice(["True", "True", "False", "Unknown"])}
        await self.api.patch(NODES, name, "", {"status": {"conditions": [ready]}}, subresource="status")
        await self.api.patch(NODES, name, "", {"spec": {"unschedulable": self.rng.random() < 0.1}})

    async def lose(self) -> None:
        """The next Binding gets no answer."""

        def once(call: Call) -> None:
            self.api.before_call = self.api.after_call = None
            raise Unreachable("connection reset")

        if self.rng.random() < 0.5:
            self.api.before_call = on_binding(once)
        else:
            self.api.after_call = on_binding(once)

    async def rename(self) -> None:
        """Change a pod's request, at any time of its life."""
        if pods := await self.pods():
            change: dict[str, Any] = {POD_SCHEDULING_SPEC: self.rng.choice([None, "virtualCluster: test", "{"])}
            name = name_of(self.rng.choice(pods))
            await self.api.patch(PODS, name, NAMESPACE, {"metadata": {"annotations": change}})

    async def reconfigure(self) -> None:
        await self.process.scheduler.replace(algorithm)


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_happens(seed: int) -> None:
    """P13, P19, P20: through random work, faults, restarts and users' mistakes, no device is held by two live pods,
    each answer has one part, nothing ever stops, and when all pods are deleted everything is free.
    """
    chaos = Chaos(seed)
    await chaos.run(250)
    async with chaos.process.running() as process:
        for pod in await chaos.pods():
            try:
                await process.delete(name_of(pod))
            except KubeError as error:
                raise AssertionError(name_of(pod)) from error
        assert not process.scheduler.view.statuses
        assert process.scheduler.algorithm.groups == {}
        assert process.scheduler.informers.pods.handler_failures == 0
