"""Pods and services of a job: the template whole, and what makes them ours over it."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from controllers.job_objects import Identity, build_pod, build_service
from controllers.job_types import BadSpec, JobEvent, ReplicaSpec, RestartPolicy
from store.kube.objects import Object
from tests.support.train_jobs import INDEX, TYPE, job_labels, template, train_job

OWNER = {"apiVersion": "example.dev/v1", "kind": "TrainJob", "name": "train", "uid": "u", "controller": True}
IDENTITY = Identity(train_job(namespace="ns"), OWNER, job_labels(), TYPE, INDEX)


def pod_from(template: Object, policy: RestartPolicy = "Never", **options: Any) -> tuple[Object, list[JobEvent]]:
    return build_pod(IDENTITY, "Worker", 2, ReplicaSpec(template=template, restart_policy=policy), **options)


def service_from(*ports: Object, container: str = "", **spec: Any) -> Object:
    body = template(containers=[{"name": "main", "ports": list(ports)}], **spec)
    return build_service(IDENTITY, "Worker", 2, ReplicaSpec(template=body), default_container=container)


def test_a_pod_is_named_labelled_and_owned() -> None:
    """Our name, namespace, labels and owner, whatever the template says of them."""
    body = template()
    body["metadata"] = {"name": "mine", "generateName": "x-", "namespace": "kube-system", "ownerReferences": [{}]}

    pod, warnings = pod_from(body)

    assert pod["metadata"] == {
        "name": "train-worker-2",
        "namespace": "ns",
        "labels": job_labels(type="worker", index="2"),
        "annotations": {},
        "ownerReferences": [OWNER],
    }
    assert (pod["apiVersion"], pod["kind"]) == ("v1", "Pod")
    assert warnings == []


def test_our_labels_win_and_others_stay() -> None:
    """A template can't steal a pod from its job by labels; its own labels and annotations are kept."""
    body = template()
    body["metadata"] = {"labels": {"team": "a", TYPE: "chief"}, "annotations": {"note": "b"}}

    pod, _ = pod_from(body)

    assert pod["metadata"]["labels"] == {"team": "a", **job_labels(type="worker", index="2")}
    assert pod["metadata"]["annotations"] == {"note": "b"}


def test_unknown_fields_survive_and_the_template_is_untouched() -> None:
    """Fields of a Kubernetes that we do not know reach the pod; the next replica starts from the same template."""
    body = template(newField={"deep": [1, 2]})
    body["futureField"] = "x"
    before = copy.deepcopy(body)

    pod, _ = pod_from(body, amendments=[lambda pod: pod["spec"]["newField"]["deep"].append(3)])

    assert pod["futureField"] == "x"
    assert pod["spec"]["newField"] == {"deep": [1, 2, 3]}
    assert body == before


@pytest.mark.parametrize(
    ("policy", "written"), [("Never", "Never"), ("Always", "Always"), ("OnFailure", "OnFailure"), ("ExitCode", "Never")]
)
def test_the_replicas_restart_policy_counts(policy: RestartPolicy, written: str) -> None:
    """ExitCode is ours alone; to the kubelet it means Never. A template that says the same is no reason to warn."""
    pod, warnings = pod_from(template(restartPolicy=written), policy)

    assert pod["spec"]["restartPolicy"] == written
    assert warnings == []


def test_an_overruled_restart_policy_is_warned_of() -> None:
    """It was meant for something, and will not happen."""
    pod, warnings = pod_from(template(restartPolicy="Always"), "ExitCode")

    assert pod["spec"]["restartPolicy"] == "Never"
    assert [(warning.type, warning.reason) for warning in warnings] == [("Warning", "SettedPodTemplateRestartPolicy")]
    assert "Always" in warnings[0].message


def test_amendments_see_the_finished_pod_in_order() -> None:
    """Name, labels and policy are there; what they warn of comes with the rest."""
    seen: list[str] = []
    warning = JobEvent("Warning", "Odd", "odd")

    def first(pod: Object) -> None:
        seen.append(f"1 {pod['metadata']['name']} {pod['spec']['restartPolicy']}")

    def second(pod: Object) -> JobEvent:
        seen.append("2")
        return warning

    _, warnings = pod_from(template(), amendments=[first, second])

    assert seen == ["1 train-worker-2 Never", "2"]
    assert warnings == [warning]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"metadata": "x"}, "Worker: template.metadata"),
        ({"spec": [1]}, "Worker: template.spec"),
        ({"metadata": {"labels": "a=b"}}, "Worker: template.metadata.labels"),
        ({"metadata": {"annotations": ["a"]}}, "Worker: template.metadata.annotations"),
    ],
)
def test_a_template_that_is_none_is_refused(body: Object, field: str) -> None:
    """With the path of the field that is wrong."""
    with pytest.raises(BadSpec, match=field):
        pod_from(body)


def test_null_parts_of_a_template_are_empty() -> None:
    """YAML with an empty `labels:` is everyday."""
    pod, _ = pod_from({"metadata": {"labels": None, "annotations": None}, "spec": None})

    assert pod["metadata"]["labels"] == job_labels(type="worker", index="2")
    assert pod["spec"] == {"restartPolicy": "Never"}


def test_a_service_finds_its_pod_before_it_is_ready() -> None:
    """Headless, publishing addresses of pods that are not ready: members look for each other while they start."""
    service = service_from({"name": "rpc", "containerPort": 2222})
    pod, _ = pod_from(template())

    assert service["metadata"]["name"] == pod["metadata"]["name"]
    assert service["spec"] == {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": job_labels(type="worker", index="2"),
        "ports": [{"name": "rpc", "port": 2222, "targetPort": 2222, "protocol": "TCP"}],
    }
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()


def test_ports_keep_their_order_protocol_and_number() -> None:
    """Unnamed ports get names where there are several; a port that is listed twice is one."""
    service = service_from(
        {"containerPort": 9000},
        {"name": "rpc", "containerPort": 2222},
        {"containerPort": 9000, "protocol": "UDP"},
        {"name": "again", "containerPort": 2222, "protocol": "TCP"},
    )

    assert [(port["name"], port["port"], port["protocol"]) for port in service["spec"]["ports"]] == [
        ("tcp-9000", 9000, "TCP"),
        ("rpc", 2222, "TCP"),
        ("udp-9000", 9000, "UDP"),
    ]


def test_a_single_port_needs_no_name() -> None:
    """It stays as it was written."""
    assert service_from({"containerPort": 80})["spec"]["ports"] == [{"port": 80, "targetPort": 80, "protocol": "TCP"}]


@pytest.mark.parametrize(("name", "port"), [("", 1), ("side", 2), ("missing", 1)])
def test_the_default_containers_ports_count(name: str, port: int) -> None:
    """The first container's when there is none of that name: no error for ever, as in the reference."""
    containers = [{"name": n, "ports": [{"containerPort": p}]} for n, p in (("main", 1), ("side", 2))]
    spec = ReplicaSpec(template={"spec": {"containers": containers}})

    service = build_service(IDENTITY, "Worker", 0, spec, default_container=name)

    assert [entry["port"] for entry in service["spec"]["ports"]] == [port]


@pytest.mark.parametrize("body", [{}, {"spec": {}}, template(containers=[]), template(containers=[{"name": "main"}])])
def test_without_ports_there_is_a_name_all_the_same(body: Object) -> None:
    """A headless service without ports still gives the pod its name in DNS."""
    assert build_service(IDENTITY, "Worker", 0, ReplicaSpec(template=body))["spec"]["ports"] == []


@pytest.mark.parametrize(
    "spec",
    [
        {"containers": ["main"]},
        {"containers": {"name": "main"}},
        {"containers": [{"name": "main", "ports": [{"name": "rpc"}]}]},
        {"containers": [{"name": "main", "ports": "2222"}]},
    ],
)
def test_ports_that_are_none_are_refused(spec: Object) -> None:
    """With the path of the field, before anything is created."""
    with pytest.raises(BadSpec, match=r"Worker: template\.spec"):
        build_service(IDENTITY, "Worker", 0, ReplicaSpec(template={"spec": spec}))
