"""Lives of training jobs, as users of the original write them, on a real control plane with the original's definitions.

The operator is `rcfarm jobs` under the shipped rights; pods run on hollow nodes.
"""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime

from controllers.training.pytorch import PYTORCH_JOBS
from store.kube.api.objects import Object, labels_of, name_of, uid_of
from tests.support.jobs.replicas import until
from tests.support.kube.control_plane import ControlPlane
from tests.support.programs.daemon import DaemonLives
from tests.support.training.real import TrainingCluster, example

DONE = {"exit_code": 0, "run_seconds": 0.5}
FOREVER = {"run_seconds": "inf", "exit_code": 143}


def variables(pod: Object) -> dict[str, str]:
    return {each["name"]: each.get("value", "") for each in pod["spec"]["containers"][0].get("env") or ()}


async def test_a_master_and_workers_succeed(cluster: TrainingCluster, operator: DaemonLives) -> None:
    """Pods, services, labels and environment are the original's; the job ends with its master, and only then do workers
    stop that still run. It is counted once under the original's names."""
    job = example("pytorch", Master={"run_seconds": 1, "exit_code": 0}, Worker=FOREVER)
    await cluster.create(job)
    names = ("mnist-master-0", "mnist-worker-0", "mnist-worker-1")
    pods = await cluster.until_pods("Running", *names)
    assert await cluster.services() == set(names)
    worker = pods["mnist-worker-1"]
    assert {name.rpartition("/")[2]: value for name, value in labels_of(worker).items()} == {
        "operator-name": "pytorchjob-controller",
        "job-name": "mnist",
        "replica-type": "worker",
        "replica-index": "1",
    }
    found = {"MASTER_ADDR": "mnist-master-0", "MASTER_PORT": "23456", "WORLD_SIZE": "3", "RANK": "2"}
    assert found.items() <= variables(worker).items()
    assert [each["name"] for each in worker["spec"]["initContainers"]] == ["init-pytorch"]
    assert "initContainers" not in pods["mnist-master-0"]["spec"]
    status = await cluster.until(job, "Succeeded")
    assert [(each.type, each.status) for each in status.conditions if each.type in ("Created", "Running")] == [
        ("Created", "True"),
        ("Running", "False"),
    ]
    assert status.completion_time is not None
    await cluster.until_pods("Succeeded", "mnist-master-0")
    await until(lambda: has_services(cluster, "mnist-master-0"), "the services of workers gone")
    metrics = await asyncio.to_thread(operator.process.get, "/metrics")
    for outcome in ("created", "successful"):
        series = (
            f'training_operator_jobs_{outcome}_total{{framework="pytorch",job_namespace="{cluster.namespace}"}} 1.0'
        )
        assert series in metrics[1]


async def test_elastic_workers_are_scaled_and_the_first_to_succeed_ends_the_job(
    cluster: TrainingCluster, plane: ControlPlane
) -> None:
    """`kubectl scale` adds a worker, which nobody else notices; kubectl shows the number that runs."""
    job = example("elastic", Worker=FOREVER)
    await cluster.create(job)
    await cluster.until_pods("Running", "elastic-worker-0", "elastic-worker-1")
    path = f"{PYTORCH_JOBS.path(cluster.namespace, 'elastic')}/scale"
    change = {"spec": {"replicas": 3}}
    await asyncio.to_thread(plane.request, "PATCH", path, change, content_type="application/merge-patch+json")
    pods = await cluster.until_pods("Running", *(f"elastic-worker-{number}" for number in range(3)))
    assert variables(pods["elastic-worker-2"])["PET_RDZV_ENDPOINT"] == "elastic-worker-0:23456"
    assert variables(pods["elastic-worker-2"])["PET_NNODES"] == "2:4"

    async def shows_three() -> bool:
        seen = await asyncio.to_thread(plane.request, "GET", path)
        return bool(seen["status"]["replicas"] == 3)

    await until(shows_three, "three active in the scale")
    scale = await asyncio.to_thread(plane.request, "GET", path)
    assert "training.kubeflow.org/replica-type=worker" in scale["status"]["selector"]
    await cluster.end("elastic-worker-1", 0)
    await cluster.until(job, "Succeeded")
    assert not {"Failed", "Restarting"} & {each.type for each in (await cluster.status(job)).conditions}


async def test_a_chief_with_workers_servers_and_an_evaluator_succeeds(cluster: TrainingCluster) -> None:
    """Each replica knows the whole cluster; the job ends with its chief, and servers that never end are stopped."""
    job = example("tensorflow", Chief=DONE | {"run_seconds": 1}, Worker=DONE, PS=FOREVER, Evaluator=FOREVER)
    await cluster.create(job)
    names = ["chief-0", "evaluator-0", "ps-0", "ps-1", "worker-0", "worker-1"]
    await until(lambda: cluster.services(), "services")
    pod = await until(lambda: one(cluster, "estimator-worker-1"), "the second worker")
    config = json.loads(variables(pod)["TF_CONFIG"])
    assert config["task"] == {"type": "worker", "index": 1}
    where = f"{cluster.namespace}.svc:2222"
    assert config["cluster"]["ps"] == [f"estimator-ps-0.{where}", f"estimator-ps-1.{where}"]
    assert sorted(config["cluster"]) == ["chief", "evaluator", "ps", "worker"]
    status = await cluster.until(job, "Succeeded")
    assert status.replica_statuses["Chief"].succeeded == 1
    await cluster.until_pods("Succeeded", *(f"estimator-{name}" for name in names if name[0] in "cw"))


async def has_services(cluster: TrainingCluster, *names: str) -> bool:
    return await cluster.services() == set(names)


async def one(cluster: TrainingCluster, name: str) -> Object | None:
    return (await cluster.pods()).get(name)


async def test_workers_that_fail_are_restarted_and_succeed(cluster: TrainingCluster) -> None:
    """Their kubelet restarts them in place, which is no failure of a pod, and the job succeeds."""
    job = example("pytorch", Master=FOREVER, Worker={"exit_code": "1,0", "run_seconds": 0.3})
    await cluster.create(job)

    async def have_succeeded() -> bool:
        pods = [pod for name, pod in (await cluster.pods()).items() if "worker" in name]
        return len(pods) == 2 and all(pod["status"]["phase"] == "Succeeded" for pod in pods)

    await until(have_succeeded, "the workers' success")
    for pod in (await cluster.pods()).values():
        (container,) = pod["status"]["containerStatuses"]
        assert container["restartCount"] == int("worker" in name_of(pod))
    await cluster.end("mnist-master-0", 0)
    status = await cluster.until(job, "Succeeded")
    assert not any(each.failures for each in status.replica_statuses["Worker"].retries.values())


async def test_failures_are_counted_across_operators(cluster: TrainingCluster, operator: DaemonLives) -> None:
    """The definition drops all status fields that the original does not have. Still a new operator knows of the failure
    before, and the one after the limit ends the job."""
    job = example("pytorch", Master=FOREVER, Worker=FOREVER)
    job["spec"]["runPolicy"]["backoffLimit"] = 1
    job["spec"]["pytorchReplicaSpecs"]["Worker"]["restartPolicy"] = "ExitCode"
    await cluster.create(job)
    await cluster.until_pods("Running", "mnist-master-0", "mnist-worker-0", "mnist-worker-1")
    await cluster.end("mnist-worker-0", 137)

    async def is_counted() -> bool:
        retries = (await cluster.status(job)).replica_statuses["Worker"].retries
        return "0" in retries and retries["0"].failures == 1

    await until(is_counted, "counted")
    operator.kill()
    operator.start()
    await cluster.end("mnist-worker-1", 137)
    status = await cluster.until(job, "Failed")
    assert "backoff limit" in status.conditions[-1].message
    assert status.conditions[-1].reason == "PyTorchJobFailed"
    assert status.completion_time is not None


async def test_a_deadline_and_a_time_to_live_are_kept(cluster: TrainingCluster) -> None:
    """Without any event a job fails at its deadline, and is deleted with everything of it after its time to
    live."""
    job = example("pytorch", Master=FOREVER, Worker=FOREVER)
    job["spec"]["runPolicy"] |= {"activeDeadlineSeconds": 2, "ttlSecondsAfterFinished": 1, "cleanPodPolicy": "All"}
    await cluster.create(job)
    status = await cluster.until(job, "Failed")
    assert "longer than specified deadline" in status.conditions[-1].message
    assert status.start_time is not None
    assert status.completion_time is not None
    assert 1 <= (status.completion_time - status.start_time).total_seconds() <= 4
    await cluster.until_gone(job)
    assert 0.5 <= (datetime.now(UTC) - status.completion_time).total_seconds() <= 6
    await cluster.until_pods("none")
    await until(lambda: has_services(cluster), "no service")


async def test_a_job_is_suspended_and_resumed(cluster: TrainingCluster) -> None:
    """Kueue's way: born suspended, started with another template, suspended again, resumed: each time with new pods."""
    job = example("pytorch", Master=FOREVER, Worker=FOREVER)
    job["spec"]["runPolicy"]["suspend"] = True
    await cluster.create(job)
    status = await cluster.until(job, "Suspended")
    assert status.start_time is None
    assert await cluster.pods() == {}
    await cluster.change(job, runPolicy={"suspend": False})
    names = ("mnist-master-0", "mnist-worker-0", "mnist-worker-1")
    first = await cluster.until_pods("Running", *names)
    assert (await cluster.until(job, "Running")).start_time is not None
    await cluster.change(job, runPolicy={"suspend": True})
    await cluster.until_pods("none")
    await until(lambda: has_services(cluster), "no service")
    await cluster.until(job, "Suspended")
    await until(lambda: is_quiet(cluster, job), "no active replica")
    await cluster.change(job, runPolicy={"suspend": False})
    second = await cluster.until_pods("Running", *names)
    assert not {uid_of(pod) for pod in first.values()} & {uid_of(pod) for pod in second.values()}
    assert (await cluster.until(job, "Running")).start_time is not None


async def is_quiet(cluster: TrainingCluster, job: Object) -> bool:
    """Return whether the status has no active replica: only then is the quota free for another job."""
    return not any(each.active for each in (await cluster.status(job)).replica_statuses.values())


async def test_an_invalid_job_is_blocked_and_delays_no_other(cluster: TrainingCluster) -> None:
    """What the original refuses by a webhook is said on the job, with the field, until it is corrected."""
    bad = example("elastic", Worker=DONE)
    bad["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]["name"] = "other"
    good = example("pytorch", Master=DONE, Worker=DONE)
    await cluster.create(bad)
    await cluster.create(good)
    await cluster.until(good, "Succeeded")
    status = await cluster.until(bad, "Blocked")
    assert "spec.pytorchReplicaSpecs.Worker" in status.conditions[-1].message
    containers = example("elastic")["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    await cluster.change(bad, pytorchReplicaSpecs={"Worker": {"template": {"spec": {"containers": containers}}}})
    await cluster.until(bad, "Succeeded")
