"""What the operator of TFJobs reads from a job and writes into its pods."""

from __future__ import annotations

import json
from typing import Any

import pytest

from controllers.jobs.api import BadSpec
from controllers.training.options import TrainingOptions
from controllers.training.tensorflow import TFJobs
from store.kube.api.objects import Object, labels_of
from store.kube.memory.kube import MemoryKube
from tests.support.training.manifests import built_pod, environment, template, tf_job

DYNAMIC = {"enableDynamicWorker": True}


@pytest.fixture
def operator() -> TFJobs:
    return TFJobs(MemoryKube())


def config(operator: TFJobs, job: Object, replica_type: str, index: int = 0) -> str:
    (value,) = (
        value for name, value in environment(built_pod(operator, job, replica_type, index)) if name == "TF_CONFIG"
    )
    return value


def test_a_single_worker_gets_no_configuration(operator: TFJobs) -> None:
    """TensorFlow runs locally without it. A type without replicas does not count."""
    for job in (tf_job(Worker=1), tf_job(Worker=None), tf_job(Worker=1, PS=0)):
        assert environment(built_pod(operator, job, "Worker")) == []


def test_the_configuration_of_a_worker_is_exactly_the_original_text(operator: TFJobs) -> None:
    job = tf_job(PS=1, Worker=2)
    job["metadata"]["namespace"] = "n"
    assert config(operator, job, "Worker", 1) == (
        '{"cluster":{"ps":["tf-ps-0.n.svc:2222"],"worker":["tf-worker-0.n.svc:2222","tf-worker-1.n.svc:2222"]},'
        '"task":{"type":"worker","index":1},"environment":"cloud"}'
    )


def test_the_domain_of_the_cluster_ends_every_address() -> None:
    operator = TFJobs(MemoryKube(), options=TrainingOptions(cluster_domain="cluster.local"))
    cluster = json.loads(config(operator, tf_job(PS=1, Worker=2), "PS"))["cluster"]
    hosts = [host for hosts in cluster.values() for host in hosts]
    assert len(hosts) == 3
    assert all(host.endswith(".svc.cluster.local:2222") for host in hosts)


def test_a_dynamic_worker_knows_itself_and_the_servers(operator: TFJobs) -> None:
    """Its own address is under its index, as a text; there is no environment."""
    assert config(operator, tf_job(PS=1, Worker=2, spec=DYNAMIC), "Worker", 1) == (
        '{"cluster":{"worker":{"1":"tf-worker-1.default.svc:2222"},"ps":["tf-ps-0.default.svc:2222"]},'
        '"task":{"type":"worker","index":1}}'
    )


def test_a_server_of_dynamic_workers_knows_only_itself(operator: TFJobs) -> None:
    assert config(operator, tf_job(PS=2, Worker=2, spec=DYNAMIC), "PS", 1) == (
        '{"cluster":{"worker":{},"ps":["tf-ps-1.default.svc:2222"]},"task":{"type":"ps","index":1}}'
    )


def test_a_dynamic_worker_without_servers_has_null_for_them(operator: TFJobs) -> None:
    assert '"ps":null' in config(operator, tf_job(Worker=2, spec=DYNAMIC), "Worker")


def test_a_chief_of_dynamic_workers_knows_itself_and_the_servers(operator: TFJobs) -> None:
    """The original gives it an empty cluster, with which it can't work."""
    assert config(operator, tf_job(Chief=1, PS=1, Worker=2, spec=DYNAMIC), "Chief") == (
        '{"cluster":{"worker":{},"ps":["tf-ps-0.default.svc:2222"],"chief":{"0":"tf-chief-0.default.svc:2222"}},'
        '"task":{"type":"chief","index":0}}'
    )


def test_only_the_container_that_trains_is_configured_after_its_own_variables(operator: TFJobs) -> None:
    job = tf_job(Worker=2)
    spec = template("tensorflow", env=[{"name": "TF_CONFIG", "value": "{}"}])["spec"]
    spec["containers"].insert(0, {"name": "logger", "image": "logger:1"})
    job["spec"]["tfReplicaSpecs"]["Worker"]["template"] = {"spec": spec}
    pod = built_pod(operator, job, "Worker")
    assert environment(pod, 0) == []
    assert [value[:10] for _, value in environment(pod, 1)] == ["{}", '{"cluster"']
    assert "initContainers" not in pod["spec"]


def test_each_type_has_its_own_port(operator: TFJobs) -> None:
    servers = {"replicas": 1, "template": template("tensorflow", ports={"tfjob-port": 3333})}
    cluster = json.loads(config(operator, tf_job(PS=servers, Worker=1), "Worker"))["cluster"]
    assert cluster == {"ps": ["tf-ps-0.default.svc:3333"], "worker": ["tf-worker-0.default.svc:2222"]}
    pod = built_pod(operator, tf_job(Worker=1), "Worker")
    assert pod["spec"]["containers"][0]["ports"] == [{"name": "tfjob-port", "containerPort": 2222}]


def test_a_type_in_another_case_is_the_known_one(operator: TFJobs) -> None:
    """The spec itself stays as it is."""
    job = tf_job(worker=2, ps=1)
    assert set(operator.view(job).replica_specs) == {"Worker", "PS"}
    assert '"worker":["tf-worker-0' in config(operator, job, "Worker")
    assert set(job["spec"]["tfReplicaSpecs"]) == {"worker", "ps"}


@pytest.mark.parametrize(
    ("types", "masters"),
    [
        ({"Chief": 1, "Worker": 1}, ["Chief"]),
        ({"Master": 1, "Worker": 1}, ["Master"]),
        ({"PS": 1, "Worker": 1}, ["Worker"]),
        ({"Chief": 0, "Worker": 1}, ["Worker"]),
    ],
)
def test_the_chief_or_else_the_first_worker_has_the_role_of_the_master(
    operator: TFJobs, types: dict[str, int], masters: list[str]
) -> None:
    job = tf_job(spec=None, **types)
    pods = {kind: built_pod(operator, job, kind) for kind, count in types.items() if count}
    assert [kind for kind, pod in pods.items() if "training.kubeflow.org/job-role" in labels_of(pod)] == masters
    assert labels_of(pods["Worker"])["training.kubeflow.org/operator-name"] == "tfjob-controller"


def test_dynamic_workers_may_fail_and_change_in_number(operator: TFJobs) -> None:
    dynamic, fixed = operator.view(tf_job(Worker=2, spec=DYNAMIC)), operator.view(tf_job(Worker=2))
    assert (dynamic.ignored_types, dynamic.fixed_size) == (("Worker",), False)
    assert (fixed.ignored_types, fixed.fixed_size) == ((), True)


def test_success_policies_are_the_original_ones(operator: TFJobs) -> None:
    """Worker 0 decides, or all workers; another policy is refused."""
    rules = [operator.view(tf_job(Worker=2, spec={"successPolicy": each})).success_rule for each in ("", "AllWorkers")]
    assert rules == ["FirstWorker", "AllWorkers"]
    with pytest.raises(BadSpec, match=r"spec\.successPolicy: 'All' is not one of AllWorkers"):
        operator.view(tf_job(Worker=2, spec={"successPolicy": "All"}))


def test_a_chief_and_a_master_are_refused(operator: TFJobs) -> None:
    with pytest.raises(BadSpec, match=r"spec\.tfReplicaSpecs\.Master: Chief is given, too"):
        operator.view(tf_job(Chief=1, Master=1))


@pytest.mark.parametrize("replica_type", ["a/b", "Größe", "", "-", "x" * 64])
def test_a_type_that_no_label_can_hold_is_refused(operator: TFJobs, replica_type: str) -> None:
    replicas: dict[str, Any] = {replica_type: 1, "Worker": 1}
    with pytest.raises(BadSpec, match="pods can't be labelled with the replica type"):
        operator.view(tf_job(**replicas))


def test_unknown_types_that_differ_in_case_only_are_refused(operator: TFJobs) -> None:
    """Their pods would have the same names."""
    with pytest.raises(BadSpec, match="tfReplicaSpecs: foo and Foo are the same type"):
        operator.view(tf_job(foo=1, Foo=1))


def test_a_type_that_tensorflow_does_not_know_is_a_warning(operator: TFJobs) -> None:
    """It gets pods, as under the original, and their failures end nothing."""
    view = operator.view(tf_job(Worker=1, Logger=1, spec=DYNAMIC))
    assert "Logger" in view.replica_specs
    assert set(view.ignored_types) == {"Logger", "Worker"}
    (warning,) = view.warnings
    assert warning.startswith("spec.tfReplicaSpecs.Logger: not one of Chief, Master, PS, Worker, Evaluator; its pods")


def defaults(operator: TFJobs, **spec: Any) -> tuple[str, str]:
    view = operator.view(tf_job(Worker=1, spec=spec))
    return view.replica_specs["Worker"].restart_policy, view.run_policy.clean_pod_policy


def test_defaults_are_the_original_ones(operator: TFJobs) -> None:
    """Never restart; keep all pods, unless the operator's option says otherwise."""
    assert defaults(operator) == ("Never", "None")
    cleaning = TFJobs(MemoryKube(), options=TrainingOptions(default_clean_pod_policy="Running"))
    assert defaults(cleaning) == ("Never", "Running")
    assert defaults(cleaning, runPolicy={"cleanPodPolicy": "All"}) == ("Never", "All")
    assert defaults(cleaning, runPolicy=None) == ("Never", "Running")
