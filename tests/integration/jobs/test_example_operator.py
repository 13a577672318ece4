"""The example operator, as its readers run it, on a real API server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from store.kube.api.errors import Invalid
from store.kube.api.objects import EVENTS, PODS, SERVICES, Object, Resource, name_of
from store.kube.client.client import KubeClient
from tests.support.kube.control_plane import ControlPlane
from tests.support.kube.hollow.kubelet import HollowKubelet
from tests.support.waiting import until

EXAMPLE = Path(__file__).parents[3] / "examples" / "operator"
TRAIN_JOBS = Resource("example.rcfarm.dev", "v1", "trainjobs", "TrainJob")


def documents(name: str) -> list[Object]:
    return list(yaml.safe_load_all((EXAMPLE / name).read_text()))


def sample(**annotations: dict[str, str]) -> Object:
    """Return the sample. `annotations`: the behaviour of hollow pods by type."""
    (job,) = documents("sample.yaml")
    for replica_type, asked in annotations.items():
        job["spec"]["replicaSpecs"][replica_type]["template"]["metadata"] = {"annotations": asked}
    found: Object = job
    return found


@contextmanager
def operator(kubeconfig: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run the script in its own process. At the end of the test it gets SIGTERM, and must exit cleanly."""
    environ = os.environ | {"PYTHONPATH": str(EXAMPLE.parents[1])}
    command = [sys.executable, str(EXAMPLE / "train_operator.py"), "--kubeconfig", str(kubeconfig), *arguments]
    process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        yield process
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=30)
        assert process.returncode == 0, said.decode()
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def definitions(control_plane: ControlPlane) -> None:
    control_plane.install(*documents("crd.yaml"))


@pytest.fixture
def kubeconfig(control_plane: ControlPlane, namespace: str, tmp_path: Path) -> Path:
    """The kubeconfig of an account with the rights of rbac.yaml."""
    role = next(document for document in documents("rbac.yaml") if document["kind"] == "ClusterRole")
    token = control_plane.create_user(role["rules"], namespace=namespace, everywhere=True)
    return control_plane.write_kubeconfig(tmp_path / "kubeconfig", token=token)


@pytest.fixture
async def kubelet(kube: KubeClient, namespace: str) -> AsyncIterator[HollowKubelet]:
    async with HollowKubelet(kube, namespace=namespace, schedules=True).playing(nodes=2) as kubelet:
        yield kubelet


@pytest.mark.usefixtures("definitions", "kubelet")
async def test_the_sample_succeeds(kube: KubeClient, namespace: str, kubeconfig: Path) -> None:
    """With just the rights of rbac.yaml: pods that know each other, one service, success, no worker left; and nothing
    remains after the job's deletion."""
    chief = {"hollow/exit-code": "0", "hollow/run-seconds": "1"}
    with operator(kubeconfig, "--namespace", namespace, "--lease", f"{namespace}/train-operator"):
        await kube.create(TRAIN_JOBS, sample(Chief=chief), namespace)
        pods = await until(lambda: running_pods(kube, namespace, 4))
        assert [name_of(service) for service in (await kube.list(SERVICES, namespace)).items] == ["sample-chief-0"]
        assert environment(pods["sample-worker-2"]) == {
            "MASTER_ADDR": "sample-chief-0",
            "MASTER_PORT": "29500",
            "WORLD_SIZE": "4",
            "RANK": "3",
        }
        done = await until(lambda: finished(kube, namespace))
        assert [entry["type"] for entry in done["status"]["conditions"]][-1] == "Succeeded"
        await until(lambda: only_pods(kube, namespace, {"sample-chief-0"}))
        await until(lambda: recorded(kube, namespace, {"JobCreated", "SuccessfulCreatePod", "JobSucceeded"}))
        await kube.delete(TRAIN_JOBS, "sample", namespace)
        await until(lambda: nothing_left(kube, namespace))


async def recorded(kube: KubeClient, namespace: str, reasons: set[str]) -> bool:
    """Return whether there are Events with these reasons; they are sent beside the calls that they are about."""
    return reasons <= {event["reason"] for event in (await kube.list(EVENTS, namespace)).items}


@pytest.mark.usefixtures("definitions")
async def test_what_the_schema_can_not_check_is_said_on_the_job(
    kube: KubeClient, namespace: str, kubeconfig: Path
) -> None:
    """A job without its one chief is refused by the API server or, for two chiefs, blocked with the field's name."""
    body = sample()
    del body["spec"]["replicaSpecs"]["Chief"]
    with pytest.raises(Invalid, match=r"replicaSpecs\.Chief"):
        await kube.create(TRAIN_JOBS, body, namespace)
    with operator(kubeconfig, "--namespace", namespace):
        body = sample()
        body["spec"]["replicaSpecs"]["Chief"]["replicas"] = 2
        await kube.create(TRAIN_JOBS, body, namespace)
        blocked = await until(lambda: condition(kube, namespace, "Blocked"))
        assert blocked["message"].startswith("spec.replicaSpecs.Chief.replicas: ")
        assert (await kube.list(PODS, namespace)).items == []


async def running_pods(kube: KubeClient, namespace: str, count: int) -> dict[str, Object] | None:
    found = {name_of(pod): pod for pod in (await kube.list(PODS, namespace)).items}
    return found if len(found) == count and all(pod["status"]["phase"] == "Running" for pod in found.values()) else None


async def only_pods(kube: KubeClient, namespace: str, names: set[str]) -> bool:
    return {name_of(pod) for pod in (await kube.list(PODS, namespace)).items} == names


async def finished(kube: KubeClient, namespace: str) -> Object | None:
    job = await kube.get(TRAIN_JOBS, "sample", namespace)
    return job if (job.get("status") or {}).get("completionTime") else None


async def condition(kube: KubeClient, namespace: str, kind: str) -> Object | None:
    job = await kube.get(TRAIN_JOBS, "sample", namespace)
    found = (job.get("status") or {}).get("conditions") or ()
    return next((entry for entry in found if entry["type"] == kind and entry["status"] == "True"), None)


async def nothing_left(kube: KubeClient, namespace: str) -> bool:
    """Return whether the garbage collector has deleted the job and all its dependents."""
    return not any([(await kube.list(kind, namespace)).items for kind in (TRAIN_JOBS, PODS, SERVICES)])


def environment(pod: Object) -> dict[str, str]:
    return {entry["name"]: entry["value"] for entry in pod["spec"]["containers"][0]["env"]}
