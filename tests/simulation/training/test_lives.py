"""Whole jobs of each kind: an API server in memory, hollow nodes, virtual time."""

from __future__ import annotations

import asyncio
import json

import pytest

from controllers.training.options import TrainingOptions
from controllers.training.pytorch import PyTorchJobs
from controllers.training.tensorflow import TFJobs
from store.kube.api.objects import Object, is_deleting, phase_of
from tests.support.training.cluster import Cluster, cluster
from tests.support.training.manifests import pytorch_job, template, tf_job
from tests.support.waiting import until

pytestmark = pytest.mark.looptime


def lasting(container: str, count: int, **asked: str) -> Object:
    """Return replicas that obey the hollow kubelet's annotations, such as `run_seconds="30"`."""
    annotations = {f"hollow/{name.replace('_', '-')}": value for name, value in asked.items()}
    return {"replicas": count, "template": {"metadata": {"annotations": annotations}, **template(container)}}


async def states(found: Cluster) -> dict[str, str]:
    """Return the phase of each pod that is not being deleted."""
    return {name: phase_of(pod) for name, pod in (await found.pods()).items() if not is_deleting(pod)}


async def test_a_master_and_workers_succeed_with_their_master() -> None:
    """The workers would run for ever. They are kept, as is the original's default."""
    async with cluster(PyTorchJobs) as found:
        master = lasting("pytorch", 1, exit_code="0", run_seconds="30")
        await found.create(pytorch_job(Master=master, Worker=2))
        await found.all_running(3)
        await found.condition("m", "Running")
        assert await found.variable("m-worker-1", "RANK") == "2"
        assert await found.variable("m-worker-1", "MASTER_ADDR") == "m-master-0"
        assert set(await found.services()) == {"m-master-0", "m-worker-0", "m-worker-1"}
        end = await found.condition("m", "Succeeded")
        assert (end["reason"], end["message"]) == ("PyTorchJobSucceeded", "PyTorchJob m is successfully completed.")
        await asyncio.sleep(60)
        assert await states(found) == {"m-master-0": "Succeeded", "m-worker-0": "Running", "m-worker-1": "Running"}


async def test_workers_alone_succeed_together() -> None:
    """Without a master and an elastic policy, the last worker decides."""
    async with cluster(PyTorchJobs) as found:
        await found.create(pytorch_job(Worker=lasting("pytorch", 3, exit_code="0", run_seconds="30")))
        pods = await found.all_running(3)
        assert not any(pod["spec"].get("initContainers") for pod in pods.values())
        assert await found.variable("m-worker-1", "RANK") is None
        await found.condition("m", "Succeeded")
        assert set((await states(found)).values()) == {"Succeeded"}


async def test_an_elastic_job_grows_shrinks_and_ends_with_its_first_worker() -> None:
    """Scaling restarts no pod; existing pods keep what they know; the job is never Restarting or Failed."""
    async with cluster(PyTorchJobs) as found:
        await found.create(pytorch_job(Worker=2, spec={"elasticPolicy": {"minReplicas": 1, "maxReplicas": 4}}))
        first = await found.all_running(2)
        await found.condition("m", "Running")
        await found.patch("m", {"pytorchReplicaSpecs": {"Worker": {"replicas": 4}}})
        grown = await found.all_running(4)
        assert {name: grown[name]["metadata"]["uid"] for name in first} == {
            name: pod["metadata"]["uid"] for name, pod in first.items()
        }
        assert await found.variable("m-worker-3", "PET_NNODES") == "1:4"
        await found.patch("m", {"pytorchReplicaSpecs": {"Worker": {"replicas": 2}}})
        await found.all_running(2)
        await asyncio.sleep(60)
        conditions = (await found.job("m"))["status"]["conditions"]
        assert {each["type"] for each in conditions} <= {"Created", "Running", "Record"}
        await found.plan("m-worker-1", exit_code="0", run_seconds="0")
        await found.condition("m", "Succeeded")


async def test_a_chief_workers_servers_and_an_evaluator_succeed_with_their_chief() -> None:
    """Seven pods and seven services, which all know each other."""
    async with cluster(TFJobs, options=TrainingOptions(cluster_domain="cluster.local")) as found:
        chief = lasting("tensorflow", 1, exit_code="0", run_seconds="30")
        job = tf_job(Chief=chief, PS=2, Worker=3, Evaluator=1, spec={"runPolicy": {"cleanPodPolicy": "All"}})
        await found.create(job)
        pods = await found.all_running(7)
        assert set(pods) == set(await found.services())
        config = json.loads(await found.variable("tf-ps-1", "TF_CONFIG") or "")
        assert config["task"] == {"type": "ps", "index": 1}
        assert {host.split(".")[0] for hosts in config["cluster"].values() for host in hosts} == set(pods)
        await found.condition("tf", "Succeeded")
        await asyncio.sleep(60)
        assert not await found.pods()
        assert not await found.services()


async def test_dynamic_workers_may_fail_and_come_and_go() -> None:
    """A failed worker does not end the job; a new worker's environment says nothing of the others."""
    async with cluster(TFJobs) as found:
        await found.create(tf_job(PS=1, Worker=2, spec={"enableDynamicWorker": True}))
        await found.all_running(3)
        await found.condition("tf", "Running")
        await found.patch("tf", {"tfReplicaSpecs": {"Worker": {"replicas": 3}}})
        await found.all_running(4)
        assert await found.variable("tf-worker-2", "TF_CONFIG") == (
            '{"cluster":{"worker":{"2":"tf-worker-2.default.svc:2222"},"ps":["tf-ps-0.default.svc:2222"]},'
            '"task":{"type":"worker","index":2}}'
        )
        await found.plan("tf-worker-1", exit_code="1", run_seconds="0")
        await asyncio.sleep(300)
        assert (await states(found))["tf-worker-1"] == "Failed"
        conditions = {each["type"]: each["status"] for each in (await found.job("tf"))["status"]["conditions"]}
        assert "Failed" not in conditions
        assert conditions["Running"] == "True"


async def test_a_barrier_that_gives_up_restarts_the_job_as_a_whole() -> None:
    """Its code asks for a retry; with the annotation for it all pods go, so that another job can have their devices."""
    async with cluster(TFJobs) as found:
        asked = {"hollow/barrier.exit-code": "201", "hollow/barrier.run-seconds": "30"}
        worker = lasting("tensorflow", 2) | {"restartPolicy": "ExitCode"}
        worker["template"]["metadata"]["annotations"] = asked
        job = tf_job(Worker=worker)
        job["metadata"]["annotations"] = {"rcfarm.dev/barrier": "600", "rcfarm.dev/restart": "job"}
        await found.create(job)
        first = await until(lambda: found.pod("tf-worker-1"))
        await found.condition("tf", "Restarting")
        await until(found.is_empty, "both pods are gone")
        template = {"metadata": {"annotations": dict.fromkeys(asked)}}
        await found.patch("tf", {"tfReplicaSpecs": {"Worker": {"template": template}}})
        pods = await found.all_running(2)
        assert pods["tf-worker-1"]["metadata"]["uid"] != first["metadata"]["uid"]
        await found.condition("tf", "Running")
