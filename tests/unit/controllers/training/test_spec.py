"""What makes a training job of any kind invalid, and what is defaulted."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from controllers.jobs.api import BadSpec
from controllers.training.pytorch import PyTorchJobs
from store.kube.api.objects import Object
from store.kube.memory.kube import MemoryKube
from tests.support.training.manifests import pytorch_job, template

FIELD = "spec.pytorchReplicaSpecs"


@pytest.fixture
def operator() -> PyTorchJobs:
    return PyTorchJobs(MemoryKube())


def refusal(operator: PyTorchJobs, job: Object) -> str:
    with pytest.raises(BadSpec) as error:
        operator.view(job)
    return str(error.value)


def containers(*found: Any) -> Object:
    return pytorch_job(Worker={"template": {"spec": {"containers": list(found)}}})


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (pytorch_job("1m", Worker=1), "metadata.name: services can't be named after '1m'"),
        (pytorch_job("m.n", Worker=1), "metadata.name: services can't be named after 'm.n'"),
        (pytorch_job("a" * 64, Worker=1), "metadata.name: services can't be named after"),
        (pytorch_job(), f"{FIELD}: expected an object with at least one replica type"),
        (pytorch_job(Worker={"template": None}), f"{FIELD}.Worker.template: expected a pod template"),
        (pytorch_job(Worker={"template": {"spec": None}}), f"{FIELD}.Worker.template: expected a pod template"),
        (containers(), f"{FIELD}.Worker.template.spec.containers: expected at least one container"),
        (containers("x"), f"{FIELD}.Worker.template.spec.containers: expected a list of objects"),
        (containers({"name": "pytorch"}), f"{FIELD}.Worker.template.spec.containers[0].image: the container 'pytorch'"),
        (containers({"name": "main", "image": "x"}), "containers: no container has the name 'pytorch'"),
        (
            containers({"name": "pytorch", "image": "x", "ports": [1]}),
            "containers[0].ports: expected a list of objects",
        ),
        (containers({"name": "pytorch", "image": "x", "env": {"A": "1"}}), "containers[0].env: expected a list"),
        (pytorch_job(Master=1, Worker=10_000), f"{FIELD}: 10001 replicas are more than the 10000 that a job may have"),
        (
            pytorch_job(Worker={"template": {"spec": {"containers": [], "initContainers": {"name": "x"}}}}),
            f"{FIELD}.Worker.template.spec.initContainers: expected a list of objects",
        ),
        (pytorch_job(Worker={"replicas": -1}), f"{FIELD}.Worker.replicas"),
        (pytorch_job(Worker={"restartPolicy": "Sometimes"}), f"{FIELD}.Worker.restartPolicy"),
        (pytorch_job(Worker=1, worker=1), f"{FIELD}: worker and Worker are the same type; keep one of them"),
        (pytorch_job(Worker=1, spec={"runPolicy": {"cleanPodPolicy": "Foo"}}), "spec.runPolicy.cleanPodPolicy"),
        (pytorch_job(Worker=1, spec={"runPolicy": {"backoffLimit": -1}}), "spec.runPolicy.backoffLimit"),
        (pytorch_job(Worker=1, spec={"runPolicy": []}), "spec.runPolicy"),
        (pytorch_job(Worker=1, spec={"nprocPerNode": 4}), "spec.nprocPerNode"),
    ],
)
def test_an_invalid_job_is_refused_with_its_field(operator: PyTorchJobs, job: Object, message: str) -> None:
    assert message in refusal(operator, job)


def test_a_job_of_the_most_replicas_is_accepted(operator: PyTorchJobs) -> None:
    assert operator.view(pytorch_job(Master=1, Worker=9_999)).replica_specs["Worker"].replicas == 9_999


def test_a_replica_spec_that_is_null_is_refused(operator: PyTorchJobs) -> None:
    job = pytorch_job(Worker=1)
    job["spec"]["pytorchReplicaSpecs"]["Master"] = None
    assert refusal(operator, job) == f"{FIELD}.Master: expected an object with a pod template"


def test_defaults_are_applied_to_a_copy(operator: PyTorchJobs) -> None:
    """Null and empty fields count as absent; the job in the cache stays as it is."""
    job = pytorch_job(master={"replicas": None, "restartPolicy": ""}, spec={"runPolicy": {"cleanPodPolicy": None}})
    before = copy.deepcopy(job)
    view = operator.view(job)
    assert (view.replica_specs["Master"].replicas, view.replica_specs["Master"].restart_policy) == (1, "OnFailure")
    assert view.run_policy.clean_pod_policy == "None"
    assert job == before


def test_a_default_port_goes_to_the_container_that_trains(operator: PyTorchJobs) -> None:
    """Wherever it stands, after its other ports."""
    job = pytorch_job(Worker={"template": template("pytorch", ports={"metrics": 9090})})
    spec = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    spec["containers"].insert(0, {"name": "first", "image": "x"})
    ports = [entry.get("ports") for entry in operator.replicas(job)["Worker"].template["spec"]["containers"]]
    own, added = {"name": "metrics", "containerPort": 9090}, {"name": "pytorchjob-port", "containerPort": 23456}
    assert ports == [None, [own, added]]


def test_names_that_had_to_be_shortened_are_a_warning(operator: PyTorchJobs) -> None:
    """It shows one of them, so that its pods can be found."""
    job = pytorch_job("a" * 60, Worker=2)
    (warning,) = operator.check(job, operator.replicas(job))
    assert warning.startswith(
        "metadata.name: with Worker and 1 it is longer than a service's name may be; the pod is aaa"
    )


def test_fields_at_an_early_operators_place_are_warnings(operator: PyTorchJobs) -> None:
    """Each names both places."""
    job = pytorch_job(Worker=1, spec={"cleanPodPolicy": "All", "backoffLimit": 2, "nprocPerNode": "0"})
    assert list(operator.view(job).warnings[:2]) == [
        f"spec.{field} has no effect: move it to spec.runPolicy.{field}" for field in ("backoffLimit", "cleanPodPolicy")
    ]
    assert len(operator.view(job).warnings) == 3
