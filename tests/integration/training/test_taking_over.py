"""Installing and taking over: definitions that come, go and are replaced, and jobs that began under the original."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from controllers.training.kinds import KINDS
from controllers.training.pytorch import PYTORCH_JOBS
from store.kube.api.objects import PODS, SERVICES, Object, name_of, resource_version_of, uid_of
from tests.support.jobs.replicas import until
from tests.support.kube.control_plane import ControlPlane
from tests.support.kube.control_plane import until as wait_until
from tests.support.kube.shipped_manifests import documents
from tests.support.programs.daemon import DaemonLives
from tests.support.training.real import FOLDER, TrainingCluster, apply, example, original_crd

CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
DONE = {"exit_code": 0, "run_seconds": 0.5}
FOREVER = {"run_seconds": "inf", "exit_code": 143}


def remove(plane: ControlPlane, name: str) -> None:
    """Delete a definition, with all its jobs, if it is there."""
    if plane.exists(f"{CRDS}/{name}"):
        plane.request("DELETE", f"{CRDS}/{name}")
        wait_until(lambda: not plane.exists(f"{CRDS}/{name}"), f"{name} deleted")


@pytest.fixture
def shipped(plane: ControlPlane) -> Iterator[list[Object]]:
    """Our definitions. The original's are back afterwards."""
    folder = FOLDER / "training" / "crds"
    yield [found for path in sorted(folder.glob("*.yaml")) for found in documents(path)]
    for kind in KINDS:
        remove(plane, f"{kind.resource.plural}.{kind.resource.group}")
    plane.install(*map(original_crd, KINDS))


async def test_a_job_of_the_original_goes_on_without_a_restart(cluster: TrainingCluster, operator: DaemonLives) -> None:
    """Names, labels, owner references and status are the original's: nothing is created, deleted or patched, and the
    status stays as it was until something happens. Then the job ends as if nothing else had ever run it."""
    operator.kill()
    job = await cluster.create(example("pytorch", Master=FOREVER, Worker=FOREVER))
    for replica_type, count in (("Master", 1), ("Worker", 2)):
        for index in range(count):
            await create_as_the_original(cluster, job, replica_type, index)
    names = ("mnist-master-0", "mnist-worker-0", "mnist-worker-1")
    await cluster.until_pods("Running", *names)
    await cluster.api.patch(PYTORCH_JOBS, "mnist", cluster.namespace, {"status": ORIGINAL_STATUS}, subresource="status")
    before, stored = await children(cluster), (await cluster.get(job))["status"]
    operator.start()
    await asyncio.to_thread(operator.process.until_ready)
    await until(lambda: asyncio.to_thread(has_synced, operator), "a sync")
    assert await children(cluster) == before
    after = (await cluster.get(job))["status"]
    assert {name: after[name] for name in ("conditions", "startTime")} == {
        name: stored[name] for name in ("conditions", "startTime")
    }
    await cluster.end("mnist-master-0", 0)
    await cluster.until(job, "Succeeded")
    await cluster.until_pods("Succeeded", "mnist-master-0")


def has_synced(operator: DaemonLives) -> bool:
    _, metrics = operator.process.get("/metrics")
    name = 'rcfarm_job_reconcile_duration_seconds_count{kind="PyTorchJob",result="ok"} '
    return any(line.startswith(name) and float(line.split()[-1]) > 0 for line in metrics.splitlines())


async def children(cluster: TrainingCluster) -> dict[str, str]:
    """Return the versions of pods and services, which any change would change."""
    objects = [each for kind in (PODS, SERVICES) for each in (await cluster.api.list(kind, cluster.namespace)).items]
    return {f"{uid_of(each)} {name_of(each)}": resource_version_of(each) for each in objects}


ORIGINAL_STATUS: Object = {
    "conditions": [
        {
            "type": kind,
            "status": "True",
            "reason": f"PyTorchJob{kind}",
            "message": message,
            "lastUpdateTime": "2026-01-02T03:04:05Z",
            "lastTransitionTime": "2026-01-02T03:04:05Z",
        }
        for kind, message in (
            ("Created", "PyTorchJob mnist is created."),
            ("Running", "PyTorchJob mnist is running."),
        )
    ],
    "replicaStatuses": {
        "Master": {
            "active": 1,
            "selector": "training.kubeflow.org/job-name=mnist,"
            "training.kubeflow.org/operator-name=pytorchjob-controller,training.kubeflow.org/replica-type=master",
        },
        "Worker": {
            "active": 2,
            "selector": "training.kubeflow.org/job-name=mnist,"
            "training.kubeflow.org/operator-name=pytorchjob-controller,training.kubeflow.org/replica-type=worker",
        },
    },
    "startTime": "2026-01-02T03:04:05Z",
}


async def create_as_the_original(cluster: TrainingCluster, job: Object, replica_type: str, index: int) -> None:
    """Create a pod and its service with the names, labels and owner reference that the original gives them."""
    labels = {
        "training.kubeflow.org/operator-name": "pytorchjob-controller",
        "training.kubeflow.org/job-name": name_of(job),
        "training.kubeflow.org/replica-type": replica_type.lower(),
        "training.kubeflow.org/replica-index": str(index),
    }
    owner = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "name": name_of(job),
        "uid": uid_of(job),
        "controller": True,
        "blockOwnerDeletion": True,
    }
    spec = job["spec"]["pytorchReplicaSpecs"][replica_type]
    metadata = {"name": f"{name_of(job)}-{replica_type.lower()}-{index}", "ownerReferences": [owner], "labels": labels}
    role = {"training.kubeflow.org/job-role": "master"} if replica_type == "Master" else {}
    template = spec["template"]
    pod = {
        "metadata": metadata | {"labels": labels | role, "annotations": template["metadata"]["annotations"]},
        "spec": template["spec"] | {"restartPolicy": spec["restartPolicy"]},
    }
    await cluster.api.create(PODS, pod, cluster.namespace)
    ports = [{"name": "pytorchjob-port", "port": 23456}]
    service = {"metadata": metadata, "spec": {"clusterIP": "None", "selector": labels, "ports": ports}}
    await cluster.api.create(SERVICES, service, cluster.namespace)


async def test_kinds_are_picked_up_when_their_definitions_come(
    cluster: TrainingCluster, plane: ControlPlane, operator: DaemonLives, shipped: list[Object]
) -> None:
    """Without any definition the operator says so. Ours is applied, and jobs run without a restart; it keeps fields of
    pods that the original's drops. A kind that is still absent is no problem."""

    def ready() -> str:
        return operator.process.get("/readyz")[1]

    for kind in KINDS:
        await asyncio.to_thread(remove, plane, f"{kind.resource.plural}.{kind.resource.group}")
    await until(lambda: asyncio.to_thread(lambda: "serves none of framework, pytorchjob, tfjob" in ready()), "none")
    await asyncio.to_thread(apply, plane, shipped[0])
    await until(lambda: asyncio.to_thread(lambda: "[+] jobs pytorchjob pods" in ready()), "one kind")
    assert "[+] jobs tfjob: the API server does not serve tfjobs.kubeflow.org" in ready()
    job = example("pytorch", Master=DONE, Worker=DONE)
    for spec in job["spec"]["pytorchReplicaSpecs"].values():
        spec["template"]["spec"]["shareProcessNamespace"] = True
    await cluster.create(job)
    pods = await until(lambda: all_three(cluster), "all pods")
    assert all(pod["spec"]["shareProcessNamespace"] for pod in pods.values())
    await cluster.until(job, "Succeeded")
    assert operator.process.get("/readyz")[0] == 200


async def all_three(cluster: TrainingCluster) -> dict[str, Object] | None:
    pods = await cluster.pods()
    return pods if len(pods) == 3 else None
