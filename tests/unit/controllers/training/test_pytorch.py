"""What the operator of PyTorchJobs reads from a job and writes into its pods."""

from __future__ import annotations

from typing import Any

import pytest

from controllers.jobs.api import BadSpec
from controllers.jobs.control import build_service
from controllers.training.options import InitContainers, TrainingOptions
from controllers.training.pytorch import PyTorchJobs
from store.kube.api.objects import Object, labels_of, name_of
from store.kube.memory.kube import MemoryKube
from tests.support.training.manifests import built_pod, environment, pytorch_job, template


@pytest.fixture
def operator() -> PyTorchJobs:
    return PyTorchJobs(MemoryKube())


def with_options(**options: Any) -> PyTorchJobs:
    return PyTorchJobs(MemoryKube(), options=TrainingOptions(**options))


def service(operator: PyTorchJobs, job: Object, replica_type: str, index: int = 0) -> Object:
    spec, container = operator.view(job).replica_specs[replica_type], operator.default_container
    return build_service(operator.jobs.identity(job), replica_type, index, spec, default_container=container)


def test_pods_carry_the_five_labels_and_the_master_its_role(operator: PyTorchJobs) -> None:
    """The role is a label of the master's pod alone, and of no service."""
    job = pytorch_job(Master=1, Worker=2)
    common = {
        "training.kubeflow.org/operator-name": "pytorchjob-controller",
        "training.kubeflow.org/job-name": "m",
        "training.kubeflow.org/replica-type": "worker",
        "training.kubeflow.org/replica-index": "1",
    }
    assert labels_of(built_pod(operator, job, "Worker", 1)) == common
    assert labels_of(service(operator, job, "Worker", 1)) == common
    assert service(operator, job, "Worker", 1)["spec"]["selector"] == common
    master = {"training.kubeflow.org/replica-type": "master", "training.kubeflow.org/replica-index": "0"}
    assert labels_of(service(operator, job, "Master")) == common | master
    role = {"training.kubeflow.org/job-role": "master"}
    assert labels_of(built_pod(operator, job, "Master")) == common | master | role


def test_without_a_master_the_first_worker_has_its_role_and_nothing_waits(operator: PyTorchJobs) -> None:
    """The first of two workers is found as the master; neither has an init container."""
    pods = [built_pod(operator, pytorch_job(Worker=2), "Worker", index) for index in (0, 1)]
    assert [labels_of(pod).get("training.kubeflow.org/job-role") for pod in pods] == ["master", None]
    assert not any("initContainers" in pod["spec"] for pod in pods)


def test_labels_of_the_template_are_kept_unless_they_are_ours(operator: PyTorchJobs) -> None:
    job = pytorch_job(Worker=1)
    written = {"training.kubeflow.org/replica-type": "x", "team": "vision"}
    job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["metadata"] = {"labels": written}
    labels = labels_of(built_pod(operator, job, "Worker"))
    assert (labels["training.kubeflow.org/replica-type"], labels["team"]) == ("worker", "vision")


def test_legacy_labels_are_added_when_asked() -> None:
    """The five labels without a prefix of the training-operator before 1.6, on top of the others."""
    labels = labels_of(built_pod(with_options(legacy_labels=True), pytorch_job(Master=1), "Master"))
    legacy = {name: value for name, value in labels.items() if "/" not in name}
    assert legacy == {
        "group-name": "kubeflow.org",
        "job-name": "m",
        "replica-type": "master",
        "replica-index": "0",
        "job-role": "master",
    }
    worker = labels_of(built_pod(with_options(legacy_labels=True), pytorch_job(Master=1, Worker=1), "Worker"))
    assert "job-role" not in worker


def test_a_name_of_63_characters_gives_names_that_fit(operator: PyTorchJobs) -> None:
    """The master's address is the name of its service."""
    job = pytorch_job("a" * 63, Master=1, Worker=1)
    worker = built_pod(operator, job, "Worker")
    assert len(name_of(worker)) <= 63
    assert dict(environment(worker))["MASTER_ADDR"] == name_of(service(operator, job, "Master"))


def test_a_job_without_ports_gets_the_default_port_in_pod_and_service(operator: PyTorchJobs) -> None:
    job = pytorch_job(Master=1)
    assert built_pod(operator, job, "Master")["spec"]["containers"][0]["ports"] == [
        {"name": "pytorchjob-port", "containerPort": 23456}
    ]
    assert [(port["name"], port["port"]) for port in service(operator, job, "Master")["spec"]["ports"]] == [
        ("pytorchjob-port", 23456)
    ]


def test_own_ports_of_the_container_count(operator: PyTorchJobs) -> None:
    """The port under the original's name is the master's port; the service has all ports."""
    ports = {"metrics": 9090, "pytorchjob-port": 1234}
    job = pytorch_job(Master={"template": template("pytorch", ports=ports)}, Worker=1)
    assert dict(environment(built_pod(operator, job, "Worker")))["MASTER_PORT"] == "1234"
    served = service(operator, job, "Master")["spec"]["ports"]
    assert {port["name"]: port["port"] for port in served} == ports


def test_ranks_count_pods_and_the_world_counts_processes(operator: PyTorchJobs) -> None:
    """The second of two workers, with four processes in each pod."""
    found = environment(built_pod(operator, pytorch_job(Master=1, Worker=2, spec={"nprocPerNode": "4"}), "Worker", 1))
    assert found == [
        ("PYTHONUNBUFFERED", "1"),
        ("MASTER_PORT", "23456"),
        ("PET_MASTER_PORT", "23456"),
        ("MASTER_ADDR", "m-master-0"),
        ("PET_MASTER_ADDR", "m-master-0"),
        ("WORLD_SIZE", "12"),
        ("RANK", "2"),
        ("PET_NODE_RANK", "2"),
        ("PET_NPROC_PER_NODE", "4"),
        ("PET_NNODES", "3"),
    ]


def test_without_a_number_of_processes_each_pod_counts_once(operator: PyTorchJobs) -> None:
    found = dict(environment(built_pod(operator, pytorch_job(Master=1, Worker=2), "Worker")))
    assert (found["WORLD_SIZE"], found["PET_NPROC_PER_NODE"]) == ("3", "auto")


def test_our_variables_come_after_those_of_the_template(operator: PyTorchJobs) -> None:
    """The kubelet takes the last of two variables of one name."""
    env = [{"name": "RANK", "value": "9"}]
    job = pytorch_job(Master={"template": template("pytorch", env=env)})
    found = environment(built_pod(operator, job, "Master"))
    assert [value for name, value in found if name == "RANK"] == ["9", "0"]


def test_every_container_has_the_variables_but_no_init_container(operator: PyTorchJobs) -> None:
    job = pytorch_job(Master=1)
    spec = job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
    spec["containers"].append({"name": "logger", "image": "logger:1"})
    spec["initContainers"] = [{"name": "fetch", "image": "fetch:1"}]
    pod = built_pod(operator, job, "Master")
    assert environment(pod, 0) == environment(pod, 1) != []
    assert pod["spec"]["initContainers"] == [{"name": "fetch", "image": "fetch:1"}]


def test_elastic_workers_get_their_rendezvous(operator: PyTorchJobs) -> None:
    """Without a master they have neither a rank nor a world."""
    options = [{"key": "a", "value": "1"}, {"key": "b", "value": "2"}]
    policy = {"minReplicas": 1, "maxReplicas": 4, "rdzvConf": options, "maxRestarts": 3}
    found = environment(built_pod(operator, pytorch_job(Worker=2, spec={"elasticPolicy": policy}), "Worker"))
    assert found == [
        ("PYTHONUNBUFFERED", "1"),
        ("PET_NPROC_PER_NODE", "auto"),
        ("PET_RDZV_ENDPOINT", "m-worker-0:23456"),
        ("PET_RDZV_BACKEND", "c10d"),
        ("PET_NNODES", "1:4"),
        ("PET_MAX_RESTARTS", "3"),
        ("PET_RDZV_CONF", "a=1,b=2"),
    ]


def elastic(operator: PyTorchJobs, **policy: Any) -> dict[str, str]:
    job = pytorch_job(Worker=2, spec={"elasticPolicy": policy})
    return dict(environment(built_pod(operator, job, "Worker")))


def test_an_empty_list_of_rendezvous_options_is_no_variable(operator: PyTorchJobs) -> None:
    assert "PET_RDZV_CONF" not in elastic(operator, rdzvConf=[])


def test_standalone_is_an_empty_text(operator: PyTorchJobs) -> None:
    assert elastic(operator, standalone=True)["PET_STANDALONE"] == ""
    assert "PET_STANDALONE" not in elastic(operator, standalone=False)


def test_a_given_rendezvous_host_and_port_are_the_endpoint(operator: PyTorchJobs) -> None:
    assert elastic(operator, rdzvHost="etcd", rdzvPort=2379)["PET_RDZV_ENDPOINT"] == "etcd:2379"


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        ({}, "2:2"),
        ({"minReplicas": 1}, "1:1"),
        ({"maxReplicas": 5}, "5:5"),
        ({"minReplicas": 1, "maxReplicas": 5}, "1:5"),
    ],
)
def test_a_missing_bound_is_the_other_and_both_are_the_workers(
    operator: PyTorchJobs, bounds: dict[str, int], expected: str
) -> None:
    assert elastic(operator, **bounds)["PET_NNODES"] == expected


def test_no_workers_make_a_world_of_one(operator: PyTorchJobs) -> None:
    """Zero replicas mean that there is no such type."""
    found = dict(environment(built_pod(operator, pytorch_job(Master=1, Worker=0), "Master")))
    assert (found["WORLD_SIZE"], found["PET_NNODES"]) == ("1", "1")
    assert operator.view(pytorch_job(Master=1, Worker=0)).replica_specs["Worker"].replicas == 0


def test_workers_alone_can_have_worker_0_as_their_master() -> None:
    """An option; not for elastic jobs, which have their own rendezvous."""
    operator = with_options(worker_master=True)
    found = dict(environment(built_pod(operator, pytorch_job(Worker=2), "Worker", 1)))
    assert (found["MASTER_ADDR"], found["RANK"], found["WORLD_SIZE"]) == ("m-worker-0", "1", "2")
    assert "MASTER_ADDR" not in elastic(operator, minReplicas=1)


def test_workers_wait_for_their_master_after_the_init_containers_of_the_template() -> None:
    """The master waits for nothing."""
    operator = with_options(init_containers=InitContainers("busybox:1", 7))
    job = pytorch_job(Master=1, Worker=1)
    job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["initContainers"] = [
        {"name": "fetch", "image": "f"}
    ]
    first, waiting = built_pod(operator, job, "Worker")["spec"]["initContainers"]
    assert (first["name"], waiting["name"], waiting["image"]) == ("fetch", "init-pytorch", "busybox:1")
    assert waiting["imagePullPolicy"] == "IfNotPresent"
    assert waiting["resources"] == {
        "limits": {"cpu": "100m", "memory": "20Mi"},
        "requests": {"cpu": "50m", "memory": "10Mi"},
    }
    script = waiting["command"][-1]
    assert "nslookup m-master-0" in script
    assert "seq 7" in script
    assert "initContainers" not in built_pod(operator, job, "Master")["spec"]


def test_without_init_containers_workers_are_created_after_their_master() -> None:
    """The operator waits in their place, unless a gang needs all pods at once."""
    operator = with_options(init_containers=None)
    job = pytorch_job(Master=1, Worker=1)
    assert "initContainers" not in built_pod(operator, job, "Worker")["spec"]
    assert operator.view(job).create_after == {"Worker": "Master"}
    assert not PyTorchJobs(MemoryKube()).view(job).create_after


def test_istio_is_refused_only_where_the_template_is_silent() -> None:
    """An annotation or a label of the template decides."""
    operator, job = with_options(disable_istio=True), pytorch_job(Worker=1)
    key = "sidecar.istio.io/inject"
    assert built_pod(operator, job, "Worker")["metadata"]["annotations"] == {key: "false"}
    for field in ("annotations", "labels"):
        job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["metadata"] = {field: {key: "true"}}
        metadata = built_pod(operator, job, "Worker")["metadata"]
        assert [entry[key] for entry in (metadata["annotations"], metadata["labels"]) if key in entry] == ["true"]


def test_the_autoscaler_scales_the_job_between_its_bounds(operator: PyTorchJobs) -> None:
    """Exactly the fields of the original; none without metrics."""
    metrics = [{"type": "Resource", "resource": {"name": "cpu", "target": {"type": "Utilization"}}}]
    job = pytorch_job(Worker=2, spec={"elasticPolicy": {"minReplicas": 1, "maxReplicas": 4, "metrics": metrics}})
    assert operator.companion_body(job, operator.view(job)) == {
        "spec": {
            "scaleTargetRef": {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "name": "m"},
            "minReplicas": 1,
            "maxReplicas": 4,
            "metrics": metrics,
        }
    }
    assert autoscaler(operator, metrics=None) is None
    assert (autoscaler(operator, metrics=[]) or {})["spec"].keys() == {"scaleTargetRef", "minReplicas", "maxReplicas"}


def autoscaler(operator: PyTorchJobs, **policy: Any) -> Object | None:
    job = pytorch_job(Worker=2, spec={"elasticPolicy": policy})
    return operator.companion_body(job, operator.view(job))


def test_success_and_wording_follow_the_form_of_the_job(operator: PyTorchJobs) -> None:
    """Any elastic worker decides, else all; with a master the messages leave the namespace out."""
    assert operator.view(pytorch_job(Worker=2)).success_rule == "AllWorkers"
    assert operator.view(pytorch_job(Worker=2, spec={"elasticPolicy": {}})).success_rule == "AnyWorker"
    running = [operator.view(job).wording.running for job in (pytorch_job(Master=1), pytorch_job(Worker=1))]
    assert running == ["{kind} {name} is running.", "{kind} {namespace}/{name} is running."]


def test_a_job_of_another_controller_is_not_ours(operator: PyTorchJobs) -> None:
    """Only an absent controller and the original's name mean this operator, not even an empty one."""

    def managed(**policy: Any) -> bool:
        return operator.manages(pytorch_job(Worker=1, spec={"runPolicy": policy}))

    assert managed()
    assert managed(managedBy="kubeflow.org/training-operator")
    assert not managed(managedBy="kueue.x-k8s.io/multikueue")
    assert not managed(managedBy="")


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (pytorch_job(Master=2), "Master.replicas: a PyTorchJob has one master, not 2"),
        (pytorch_job(Master=0, Worker=1), "Master.replicas: a PyTorchJob has one master, not 0"),
        (pytorch_job(Master=1, Chief=1), "spec.pytorchReplicaSpecs.Chief: a PyTorchJob has no such type"),
        (pytorch_job(Master=1, spec={"elasticPolicy": {}}), "spec.elasticPolicy: only workers are elastic"),
        (
            pytorch_job(Worker=1, spec={"nprocPerNode": "2", "elasticPolicy": {"nProcPerNode": 2}}),
            "spec.elasticPolicy.nProcPerNode: spec.nprocPerNode is given, too",
        ),
        (pytorch_job(Worker=1, spec={"elasticPolicy": {"minReplicas": "one"}}), "spec.elasticPolicy.minReplicas"),
    ],
)
def test_an_invalid_pytorch_job_is_refused_with_its_field(operator: PyTorchJobs, job: Object, message: str) -> None:
    with pytest.raises(BadSpec, match="spec") as error:
        operator.view(job)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("spec", "warning"),
    [
        ({"elasticPolicy": {"minReplicas": 5, "maxReplicas": 3}}, "minReplicas: 5 is more than maxReplicas, 3"),
        ({"elasticPolicy": {"maxReplicas": 1}}, "maxReplicas: 1 is less than the 2 workers"),
        ({"elasticPolicy": {"nProcPerNode": 2}}, "nProcPerNode is deprecated"),
        ({"nprocPerNode": "some"}, "spec.nprocPerNode: 'some' is neither a positive number nor one of"),
        ({"nprocPerNode": "0"}, "spec.nprocPerNode: '0' is neither"),
    ],
)
def test_what_can_hardly_be_meant_is_a_warning(operator: PyTorchJobs, spec: Object, warning: str) -> None:
    job = pytorch_job(Worker=2, spec=spec)
    assert any(warning in found for found in operator.check(job, operator.replicas(job)))


@pytest.mark.parametrize("processes", ["gpu", "1"])
def test_a_sound_job_has_no_warning(operator: PyTorchJobs, processes: str) -> None:
    spec = {"nprocPerNode": processes, "elasticPolicy": {"minReplicas": 2, "maxReplicas": 2}}
    job = pytorch_job(Master=1, Worker=2, spec=spec)
    assert operator.check(job, operator.replicas(job)) == []
