"""Jobs that ran under the training-operator: it is stopped, ours is started, and nothing happens to them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from controllers.jobs.gang import SCHEDULER_PLUGINS_POD_GROUPS, SchedulerPluginsPodGroup
from controllers.training import PyTorchJobs
from controllers.training.pytorch import AUTOSCALERS
from store.kube.api.objects import PODS, SERVICES, Object, phase_of
from store.kube.memory.kube import MemoryKube
from tests.support.jobs.train_jobs import Writes, loop_clock, memory_kube, operate, running
from tests.support.kube.hollow.kubelet import HollowKubelet
from tests.support.training.cluster import Cluster
from tests.support.training.manifests import pytorch_job
from tests.support.waiting import until

pytestmark = pytest.mark.looptime

METRICS = [{"type": "Resource", "resource": {"name": "cpu", "target": {"type": "AverageValue", "averageValue": "0.5"}}}]
ELASTIC = {"elasticPolicy": {"minReplicas": 1, "maxReplicas": 4, "metrics": METRICS}}


async def as_the_original_leaves_it(api: MemoryKube, kubelet: HollowKubelet, job: Object, pods: int) -> None:
    """Run the job until its pods run, and bring all of its objects into the form that the training-operator writes."""
    operator = operate(api, PyTorchJobs, gang=SchedulerPluginsPodGroup())
    async with running(operator):
        cluster = Cluster(api, operator, kubelet)
        await cluster.create(job)
        await cluster.all_running(pods)
        await cluster.condition("m", "Running")
        await asyncio.sleep(60)
    for pod in await cluster.pods():
        await api.patch(PODS, pod, "default", {"metadata": {"annotations": {"rcfarm.dev/replicas": None}}})
    for service in await cluster.services():
        ports = [{"name": "pytorchjob-port", "port": 23456}]
        await api.patch(SERVICES, service, "default", {"spec": {"publishNotReadyAddresses": None, "ports": ports}})
    status = {"lastReconcileTime": None, "conditions": (await cluster.job("m"))["status"]["conditions"]}
    await api.patch(PyTorchJobs.resource, "m", "default", {"status": status}, subresource="status")
    for scaler in await cluster.named(AUTOSCALERS):  # the API server writes quantities in its own form
        target = {"type": "AverageValue", "averageValue": "500m"}
        metrics: Any = [{"type": "Resource", "resource": {"name": "cpu", "target": target}}]
        await api.patch(AUTOSCALERS, scaler, "default", {"spec": {"metrics": metrics}})


@pytest.mark.parametrize(
    ("job", "pods"),
    [
        pytest.param(pytorch_job(Master=1, Worker=2), 3, id="master and workers"),
        pytest.param(pytorch_job(Worker=2, spec=ELASTIC), 2, id="elastic, with an autoscaler"),
    ],
)
async def test_given_a_running_job_of_the_original_when_ours_starts_then_it_writes_nothing(
    job: Object, pods: int
) -> None:
    """No pod, service, PodGroup or autoscaler is created, deleted or changed, and no status written, for an hour. Then
    the job goes on as ours."""
    api = memory_kube()
    api.register(PyTorchJobs.resource, has_status=True)
    kubelet = HollowKubelet(api, clock=lambda: loop_clock().timestamp(), schedules=True)
    await kubelet.add_nodes(1)
    async with asyncio.TaskGroup() as group:
        playing = group.create_task(kubelet.run())
        await as_the_original_leaves_it(api, kubelet, job, pods)
        assert (await api.list(SCHEDULER_PLUGINS_POD_GROUPS)).items[0]["metadata"].get("labels") is None
        writes = Writes(api)
        operator = operate(api, PyTorchJobs, gang=SchedulerPluginsPodGroup())
        async with running(operator):
            await asyncio.sleep(3600)
            assert [(call.verb, call.resource.plural, call.name) for call in writes.calls] == []
            cluster = Cluster(api, operator, kubelet)
            await api.delete(PODS, "m-worker-1", "default", grace_period=0)

            async def back() -> bool:
                found = (await cluster.pods()).get("m-worker-1")
                return found is not None and phase_of(found) == "Running"

            await until(back, "the worker is back")
        playing.cancel()
