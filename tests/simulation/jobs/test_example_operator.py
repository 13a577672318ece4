"""The example operator in virtual time, on an API server in memory. The tutorial shows parts of this file."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml

from store.kube.api import PODS, SERVICES, NotFound, Object, uid_of
from store.kube.leaderelection import Election, FencedApi
from store.kube.memory import MemoryKube
from tests.support.kube.faults.network import ScriptedKube
from tests.support.kube.hollow.kubelet import HollowKubelet
from tests.support.kube.shipped_manifests import documents, rights
from tests.support.modules import load_module

pytestmark = pytest.mark.looptime

EXAMPLE = Path(__file__).parents[3] / "examples" / "operator"
VERBS = {"replace": "update"}  # as the API's authorizers call it
FINALIZERS = {("example.rcfarm.dev", "trainjobs/finalizers", "update")}  # an admission plugin asks for it, no call does


train_operator = load_module(EXAMPLE / "train_operator.py")
TrainJobs = train_operator.TrainJobs


def sample() -> Object:
    found: Object = yaml.safe_load((EXAMPLE / "sample.yaml").read_text())
    return found


async def test_a_chief_that_was_killed_starts_again() -> None:
    """Exit code 137 is retried: the job is Restarting, and a new pod gets the same name."""
    loop = asyncio.get_running_loop()
    api = MemoryKube(clock=loop.time)
    api.register(TrainJobs.resource, has_status=True)
    operator = TrainJobs(api, clock=lambda: datetime.fromtimestamp(loop.time(), UTC), timer=loop.time)
    running = asyncio.create_task(operator.run())

    await api.create(TrainJobs.resource, sample(), "default")
    await asyncio.sleep(1)
    killed = await api.get(PODS, "sample-chief-0", "default")
    container = {"name": "main", "state": {"terminated": {"exitCode": 137}}}
    status = {"phase": "Failed", "containerStatuses": [container]}
    await api.patch(PODS, "sample-chief-0", "default", {"status": status}, subresource="status")
    await asyncio.sleep(60)

    job = await api.get(TrainJobs.resource, "sample", "default")
    assert job["status"]["conditions"][-1]["type"] == "Restarting"
    again = await api.get(PODS, "sample-chief-0", "default")
    assert again["metadata"]["uid"] != killed["metadata"]["uid"]
    running.cancel()


async def test_each_right_has_its_use_and_each_use_its_right() -> None:
    """A life with every kind of event: a taken name, a deleted pod, an orphaned pod, success, the end of the time to
    live. The calls made are exactly those that rbac.yaml allows."""
    loop = asyncio.get_running_loop()
    server = MemoryKube(clock=loop.time)
    server.register(TrainJobs.resource, has_status=True)
    api = ScriptedKube(server)
    election = Election(api, "default", "train-operator", "a", clock=loop.time)
    fenced = FencedApi(api, election)
    operator = TrainJobs(fenced, clock=lambda: datetime.fromtimestamp(loop.time(), UTC), timer=loop.time)
    kubelet = HollowKubelet(server, clock=loop.time, schedules=True)
    await kubelet.add_nodes(1)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(kubelet.run()), group.create_task(election.run(operator.run))]
        await live(server)
        for task in tasks:
            task.cancel()
    used = {(call.group, call.resource, VERBS.get(call.verb, call.verb)) for call in api.calls if call.verb != "served"}
    granted = rights(*(document for document in documents(EXAMPLE / "rbac.yaml") if document["kind"] == "ClusterRole"))
    assert granted >= FINALIZERS
    assert one_for_children(used) == one_for_children(granted - FINALIZERS)


def one_for_children(found: set[tuple[str, str, str]]) -> set[tuple[str, str, str]]:
    """Map services to pods, which share one rule."""
    return {(group, "pods" if resource == "services" else resource, verb) for group, resource, verb in found}


async def live(server: MemoryKube) -> None:
    """Live the life of one TrainJob."""
    stranger: Object = {"metadata": {"name": "sample-worker-0"}, "spec": {"containers": [{"name": "x", "image": "x"}]}}
    await server.create(PODS, stranger, "default")
    job = sample()
    job["spec"]["runPolicy"]["ttlSecondsAfterFinished"] = 60
    template = job["spec"]["replicaSpecs"]["Chief"]["template"]
    template["metadata"] = {"annotations": {"hollow/exit-code": "0", "hollow/run-seconds": "400"}}
    await server.create(TrainJobs.resource, job, "default")
    await asyncio.sleep(60)
    for _ in range(3):
        await server.delete(PODS, "sample-worker-0", "default", grace_period=0)
        await asyncio.sleep(60)
    await server.patch(PODS, "sample-worker-0", "default", {"metadata": {"ownerReferences": None}})
    await asyncio.sleep(60)
    job["spec"]["replicaSpecs"]["Worker"]["replicas"] = 1
    await server.patch(TrainJobs.resource, "sample", "default", {"spec": job["spec"]})
    async with asyncio.timeout(600):
        while (await server.list(TrainJobs.resource, "default")).items:
            await asyncio.sleep(1)


@asynccontextmanager
async def operated(job: Object) -> AsyncIterator[MemoryKube]:
    """Run the operator for the duration of the block, which begins five seconds after the job."""
    loop = asyncio.get_running_loop()
    api = MemoryKube(clock=loop.time)
    api.register(TrainJobs.resource, has_status=True)
    operator = TrainJobs(api, clock=lambda: datetime.fromtimestamp(loop.time(), UTC), timer=loop.time)
    running = asyncio.create_task(operator.run())
    await api.create(TrainJobs.resource, job, "default")
    await asyncio.sleep(5)
    yield api
    running.cancel()


async def test_a_job_needs_its_one_chief() -> None:
    """The condition names the field; once it is corrected the job goes on."""
    job = sample()
    job["spec"]["replicaSpecs"]["Chief"]["replicas"] = 2
    async with operated(job) as api:
        blocked = (await api.get(TrainJobs.resource, "sample", "default"))["status"]["conditions"][-1]
        assert (blocked["type"], blocked["status"], blocked["reason"]) == ("Blocked", "True", "InvalidSpec")
        assert "exactly one chief" in blocked["message"]
        assert not (await api.list(PODS, "default")).items

        corrected = {"spec": {"replicaSpecs": {"Chief": {"replicas": 1}}}}
        await api.patch(TrainJobs.resource, "sample", "default", corrected)
        await asyncio.sleep(60)
        assert len((await api.list(PODS, "default")).items) == 4
        conditions = (await api.get(TrainJobs.resource, "sample", "default"))["status"]["conditions"]
        assert {entry["type"]: entry["status"] for entry in conditions}["Blocked"] == "False"


async def test_only_the_chief_has_a_service() -> None:
    """A deleted service of a job is created again, also after an interruption of the operator."""
    async with operated(sample()) as api:
        (first,) = (await api.list(SERVICES, "default")).items
        await api.delete(SERVICES, "sample-chief-0", "default")
        await asyncio.sleep(5)
        assert uid_of(await api.get(SERVICES, "sample-chief-0", "default")) != uid_of(first)
        with pytest.raises(NotFound):
            await api.get(SERVICES, "sample-worker-0", "default")
