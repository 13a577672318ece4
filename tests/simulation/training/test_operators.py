"""Operators that stop and start, meet other writers, and have nothing to do: in virtual time."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import datetime, timedelta

import pytest

from controllers.jobs.gang import SCHEDULER_PLUGINS_POD_GROUPS, SchedulerPluginsPodGroup
from controllers.jobs.status import JobStatus, decode_status
from controllers.training import PyTorchJobs, TFJobs
from controllers.training.pytorch import AUTOSCALERS, PYTORCH_JOBS
from store.kube.api.objects import PODS, Object, name_of, uid_of
from store.kube.memory.kube import Call, MemoryKube
from tests.support.jobs.train_jobs import Tally, all_created, loop_clock, memory_kube, operate, running, set_phase
from tests.support.kube.faults.network import Call as Sent
from tests.support.kube.faults.network import MortalKube, Network
from tests.support.training.cluster import Cluster, cluster
from tests.support.training.manifests import pytorch_job, template, tf_job
from tests.support.waiting import until

pytestmark = pytest.mark.looptime

METRICS = [
    {"type": "Resource", "resource": {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 80}}}
]
GANG = SchedulerPluginsPodGroup()


def requests(api: MemoryKube) -> list[Call]:
    """Return the list to which all later calls are appended, apart from watches and those of nodes."""
    calls: list[Call] = []

    def note(call: Call) -> None:
        of_a_node = call.resource.kind == "Node" or (call.resource == PODS and call.subresource)
        if call.verb != "watch" and not of_a_node:
            calls.append(call)

    api.before_call = note
    return calls


def server() -> MemoryKube:
    """Return an API server without nodes that knows PyTorchJobs."""
    api = memory_kube()
    for resource in (PYTORCH_JOBS, AUTOSCALERS):
        api.register(resource, has_status=True)
    return api


async def status(found: Cluster, name: str = "m") -> JobStatus:
    return decode_status((await found.job(name)).get("status"))


def ending(count: int, seconds: int) -> Object:
    """Return replicas whose pods succeed after that many seconds."""
    annotations = {"hollow/exit-code": "0", "hollow/run-seconds": str(seconds)}
    return {"replicas": count, "template": {"metadata": {"annotations": annotations}, **template("pytorch")}}


async def test_a_job_of_four_pods_costs_at_most_18_requests() -> None:
    """From its creation to its success, with services, the status and Events."""
    async with cluster(PyTorchJobs) as found:
        await asyncio.sleep(5)
        await found.create(pytorch_job(Master=ending(1, 60), Worker=3))
        calls = requests(found.api)
        await asyncio.sleep(3600)
        assert len(calls) <= 18, Counter((call.verb, call.resource.kind, call.subresource) for call in calls)
        assert (await status(found)).has("Succeeded")


async def test_a_worker_that_was_deleted_by_hand_comes_back_and_nothing_counts() -> None:
    """Its successor has its name. Nothing fails: the limit is 0."""
    async with cluster(PyTorchJobs) as found:
        await found.create(pytorch_job(Master=1, Worker=2, spec={"runPolicy": {"backoffLimit": 0}}))
        former = (await found.all_running(3))["m-worker-1"]
        await found.api.delete(PODS, "m-worker-1", "default")

        async def replaced() -> bool:
            return uid_of((await found.all_running(3))["m-worker-1"]) != uid_of(former)

        await until(replaced, "another worker 1")
        assert [each.type for each in (await status(found)).conditions] == ["Created", "Running"]
        assert (await status(found)).replica_statuses["Worker"].retries == {}


async def test_a_finished_job_with_a_gang_is_left_alone() -> None:
    """Further syncs make no request and no Event."""
    async with cluster(PyTorchJobs, SCHEDULER_PLUGINS_POD_GROUPS, gang=GANG) as found:
        await found.create(pytorch_job(Worker=ending(2, 10), spec={"runPolicy": {"cleanPodPolicy": "All"}}))
        await found.condition("m", "Succeeded")
        await asyncio.sleep(60)
        assert await found.pods() == await found.services() == await found.named(SCHEDULER_PLUGINS_POD_GROUPS) == {}
        calls = requests(found.api)
        for _ in range(3):
            found.operator.jobs.enqueue("default/m")
            await asyncio.sleep(600)
        assert calls == []


async def test_a_suspended_job_leaves_nothing_and_is_active_until_its_pods_have_ended() -> None:
    """Pods, services, the group and the autoscaler go. A quota that counts active replicas is not freed too early."""
    elastic = {"elasticPolicy": {"minReplicas": 1, "maxReplicas": 4, "metrics": METRICS}}
    async with cluster(PyTorchJobs, SCHEDULER_PLUGINS_POD_GROUPS, gang=GANG) as found:
        await found.create(pytorch_job(Worker=2, spec=elastic))
        await found.all_running(2)
        await found.condition("m", "Running")
        await found.plan("m-worker-0", stop_seconds="20")
        await found.patch("m", {"runPolicy": {"suspend": True}})
        await found.condition("m", "Suspended")
        assert (await status(found)).replica_statuses["Worker"].active > 0

        async def gone() -> bool:
            kinds = (AUTOSCALERS, SCHEDULER_PLUGINS_POD_GROUPS)
            return not any([await found.pods(), await found.services(), *[await found.named(kind) for kind in kinds]])

        await until(gone, "nothing is left")
        await asyncio.sleep(60)
        assert (await status(found)).replica_statuses["Worker"].active == 0
        assert [reason for _, reason, _ in await found.events()].count("PyTorchJobSuspended") == 1


async def test_a_resumed_job_has_the_template_and_the_deadline_of_its_resumption() -> None:
    """Kueue edits the node selector of a job while it is suspended."""
    spec = {"runPolicy": {"suspend": True, "activeDeadlineSeconds": 100}}
    async with cluster(PyTorchJobs) as found:
        job = await found.create(pytorch_job(Worker=1, spec=spec))
        await asyncio.sleep(600)
        assert (await status(found)).start_time is None
        changed = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
        changed["spec"]["nodeSelector"] = {"pool": "a100"}
        await found.patch("m", {"pytorchReplicaSpecs": {"Worker": {"template": changed}}})
        resumed = loop_clock().replace(microsecond=0)
        await found.patch("m", {"runPolicy": {"suspend": False}})
        worker = await until(lambda: found.pod("m-worker-0"), "a worker")
        assert worker["spec"]["nodeSelector"] == {"pool": "a100"}
        failed = await found.condition("m", "Failed", within=150)
        assert (await status(found)).start_time == resumed
        late = datetime.fromisoformat(failed["lastTransitionTime"]) - (resumed + timedelta(seconds=100))
        assert timedelta(0) <= late <= timedelta(seconds=1)


async def test_an_operator_that_dies_among_creations_leaves_the_rest_to_the_next() -> None:
    """No pod is created twice."""
    api = server()
    created: Counter[str] = Counter()

    def note(call: Call) -> None:
        if (call.verb, call.resource) == ("create", PODS):
            created[call.name] += 1

    api.before_call = note
    mortal = MortalKube(api, dies_at=310)
    dying = asyncio.create_task(operate(mortal, PyTorchJobs).run())
    await api.create(PYTORCH_JOBS, pytorch_job(Worker=200), "default")
    await mortal.died.wait()
    dying.cancel()
    assert 50 < created.total() < 150
    async with running(operate(api, PyTorchJobs)):
        await all_created(api, 200)
        await asyncio.sleep(60)
    assert (created.total(), len(created)) == (200, 200)


class Edited(Network):
    """Another client edits the job just before each write of its status arrives."""

    edits = 0

    async def before(self, call: Sent) -> None:
        if (call.verb, call.resource) == ("patch", "pytorchjobs/status") and self.edits < 3:
            self.edits += 1
            await self.inner.patch(PYTORCH_JOBS, "m", "default", {"spec": {"nprocPerNode": str(self.edits)}})


async def test_a_spec_that_changes_under_the_write_of_a_status_repeats_no_action() -> None:
    """The write is repeated onto the new state, and each pod is created once."""
    api = server()
    edited = Edited(api)
    async with running(operate(edited, PyTorchJobs)):
        await api.create(PYTORCH_JOBS, pytorch_job(Worker=2), "default")
        for name in await all_created(api, 2):
            await set_phase(api, name, "Running")

        async def runs() -> bool:
            return decode_status((await api.get(PYTORCH_JOBS, "m", "default")).get("status")).has("Running")

        await until(runs, "m is Running")
        await asyncio.sleep(60)
    assert edited.edits == 3
    assert sorted(call.name for call in edited.calls if (call.verb, call.resource) == ("create", "pods")) == [
        "m-worker-0",
        "m-worker-1",
    ]


async def test_a_new_operator_counts_no_old_job_again() -> None:
    """Ten jobs that run, and one that has ended, are not created or successful a second time."""
    first, second = Tally(), Tally()
    async with cluster(TFJobs, metrics=first) as found:
        for number in range(10):
            await found.create(tf_job(f"j{number}", Worker=1))
        await found.all_running(10)
        await found.plan("j0-worker-0", exit_code="0", run_seconds="0")
        await found.condition("j0", "Succeeded")
        api = found.api
    assert first.figures.count("TFJob created") == 10
    assert first.figures.count("TFJob successful") == 1
    async with running(operate(api, TFJobs, metrics=second)):
        await asyncio.sleep(600)
    assert {name for name in second.figures if not name.startswith("reconciled")} == set()
    assert sorted(map(name_of, (await api.list(PODS)).items)) == [f"j{number}-worker-0" for number in range(10)]
