"""The shipped rights of the extender are exactly those that it uses."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest
import yaml

from controllers.extender.scheduler import HivedScheduler
from scheduler.hived.algorithm import HivedAlgorithm
from store.kube.api.objects import POD_DISRUPTION_BUDGETS, Object, is_deleting, uid_of
from store.kube.events import EventRecorder
from store.kube.memory.kube import Call
from tests.support.extender.manifests import extender_object
from tests.support.extender.process import BEGAN, NAMESPACE, Process, on_binding
from tests.support.hived.cluster import topology_of
from tests.support.kube.faults.network import ScriptedKube
from tests.support.kube.shipped_manifests import rights
from tests.support.waiting import loop_time

pytestmark = pytest.mark.looptime

ONE_NODE = """
physicalCluster:
  cellTypes: {HOST: {childCellType: GPU, childCellNumber: 2, isNodeLevel: true}}
  physicalCells: [{cellType: HOST, cellAddress: n0}]
virtualClusters: {a: {virtualCells: [{cellType: HOST, cellNumber: 1}]}}
"""


FOR_ALL_PODS: Object = {
    "metadata": {"name": "all"},
    "spec": {"selector": {"matchExpressions": [{"key": "none", "operator": "DoesNotExist"}]}},
}


def request(priority: int) -> str:
    return f"virtualCluster: a\npriority: {priority}\nleafCellNumber: 2\n"


async def test_each_right_has_its_use_and_each_use_its_right() -> None:
    """A binding refused because it is already done, an Eviction for a stronger pod, Events about its victim and,
    repeatedly, about a budget that protects it. The calls made are exactly those that the rules allow."""
    algorithm = HivedAlgorithm(topology_of(yaml.safe_load(ONE_NODE)))
    process = Process(algorithm, nodes=["n0"])
    api = ScriptedKube(process.api)
    recorder = EventRecorder(api, "rcfarm-extender", clock=lambda: BEGAN + loop_time())
    process.scheduler = HivedScheduler(
        api, algorithm, recorder=recorder, evict_victims="always", clock=loop_time, rng=random.Random(1)
    )
    async with process.running(), asyncio.TaskGroup() as group:
        telling = group.create_task(recorder.run())
        await process.add_nodes("n0")
        await live(process)
        telling.cancel()
    used = {(call.group, call.resource, call.verb) for call in api.calls if call.verb != "served"}
    assert used == rights(extender_object("ClusterRole"))


async def live(process: Process) -> None:
    """Bind a pod, then a stronger pod requests its devices, which a budget protects for a while."""
    weak = await process.add_pod("weak", request(0))
    await process.filter(weak)
    process.api.before_call = on_binding(bind_just_before(process, weak))
    await process.bind(weak, "n0")
    await process.complete("weak", "Running")
    await process.api.create(POD_DISRUPTION_BUDGETS, FOR_ALL_PODS, NAMESPACE)
    strong = await process.add_pod("strong", request(1))
    assert not await process.attempt(strong)
    await asyncio.sleep(60)
    await process.api.delete(POD_DISRUPTION_BUDGETS, "all", NAMESPACE)
    await asyncio.sleep(60)
    assert is_deleting(await process.read("weak"))
    await process.delete("weak")
    assert await process.attempt(strong) == "n0"
    await asyncio.sleep(60)


def bind_just_before(process: Process, pod: Object) -> Callable[[Call], Awaitable[None]]:
    """Post the same Binding from another process, so that ours is refused and the pod has to be read."""
    status = process.scheduler.view.statuses.get(uid_of(pod))
    assert status is not None

    async def bind(_: Call) -> None:
        process.api.before_call = None
        await process.bind_as(status.pod)

    return bind
