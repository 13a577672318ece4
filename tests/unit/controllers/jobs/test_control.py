"""Pods and services of a job: names, the template, our metadata set over it, the Events on the job, and metrics."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest

from controllers.jobs.api import (
    MAX_LABEL,
    BadSpec,
    JobEvent,
    ReplicaSpec,
    RestartPolicy,
    gen_general_name,
    label_value,
)
from controllers.jobs.control import ChildControl, Identity, build_pod, build_service
from store.kube.api.errors import AlreadyExists, Forbidden, NotFound
from store.kube.api.objects import PODS, Object, name_of, uid_of
from store.kube.memory.kube import MemoryKube
from store.kube.memory.rules import NAMESPACES
from store.schema.keys import check_label_value
from tests.support.jobs.train_jobs import INDEX, KIND, TRAIN_JOBS, TYPE, Stored, job_labels, template, train_job

DNS_1035 = r"^[a-z]([-a-z0-9]{0,61}[a-z0-9])?$"


def test_a_name_is_job_type_and_index_in_lower_case() -> None:
    """As in kubeflow; a slash, as in a job's key, becomes a dash."""
    assert gen_general_name("mnist", "Worker", "0") == "mnist-worker-0"
    assert gen_general_name("team/mnist", "PS", 11) == "team-mnist-ps-11"


@pytest.mark.parametrize("job", ["9lives", "a" * 70, "My.Job", "-", "ü", "a" * 61, "job."])
@pytest.mark.parametrize("replica_type", ["Worker", "Parameter_Server", "W" * 60])
def test_a_name_is_always_a_dns_1035_label(job: str, replica_type: str) -> None:
    """A service can be created under it, whatever the job is called."""
    name = gen_general_name(job, replica_type, 3)

    assert re.fullmatch(DNS_1035, name)
    assert name == gen_general_name(job, replica_type, 3)


def test_a_long_name_keeps_the_type_and_the_index() -> None:
    """A list of pods still shows which replica each is."""
    name = gen_general_name("a" * 70, "Worker", 12)

    assert name.endswith("-worker-12")
    assert len(name) == MAX_LABEL


def test_long_names_that_begin_alike_stay_different() -> None:
    """A hash of the whole name is part of it, so two jobs never fight for one pod name by truncation."""
    names = {gen_general_name("a" * 70 + end, "worker", index) for end in ("x", "y") for index in (0, 1)}
    names |= {gen_general_name("a" * 70, "w" * 60 + end, 0) for end in ("x", "y")}

    assert len(names) == 6


@pytest.mark.parametrize("text", ["a" * 80, "a b", "-", "", "x/", "ü" * 70])
def test_a_label_value_is_always_valid(text: str) -> None:
    """The API server accepts it, whatever text it was made from."""
    value = label_value(text)

    check_label_value(value)
    assert len(value) <= MAX_LABEL


def test_label_values_stay_as_they_are_when_they_may() -> None:
    """Hand-written selectors find the job."""
    assert label_value("My.Job_1") == "My.Job_1"
    assert label_value("team/mnist") == "team-mnist"
    assert label_value("a" * 70 + "x") != label_value("a" * 70 + "y")


OWNER = {"apiVersion": "example.dev/v1", "kind": "TrainJob", "name": "train", "uid": "u", "controller": True}
IDENTITY = Identity(train_job(namespace="ns"), OWNER, job_labels(), TYPE, INDEX)

POD = {"metadata": {"name": "train-worker-0"}, **template()}


def pod_from(template: Object, policy: RestartPolicy = "Never", **options: Any) -> tuple[Object, list[JobEvent]]:
    return build_pod(IDENTITY, "Worker", 2, ReplicaSpec(template=template, restart_policy=policy), **options)


def service_from(*ports: Object, container: str = "", **spec: Any) -> Object:
    body = template(containers=[{"name": "main", "ports": list(ports)}], **spec)
    return build_service(IDENTITY, "Worker", 2, ReplicaSpec(template=body), default_container=container)


def test_a_pod_is_named_labelled_and_owned() -> None:
    """Name, namespace, labels and owner are ours, whatever the template has: it can't take a pod from its job. Its own
    labels and annotations are kept.
    """
    body = template()
    theirs = {"labels": {"team": "a", TYPE: "chief"}, "annotations": {"note": "b"}, "namespace": "kube-system"}
    body["metadata"] = {"name": "mine", "generateName": "x-", "ownerReferences": [{}], **theirs}

    pod, warnings = pod_from(body)

    assert pod["metadata"] == {
        "name": "train-worker-2",
        "namespace": "ns",
        "labels": {"team": "a", **job_labels(type="worker", index="2")},
        "annotations": {"note": "b"},
        "ownerReferences": [OWNER],
    }
    assert (pod["apiVersion"], pod["kind"]) == ("v1", "Pod")
    assert warnings == []


def test_unknown_fields_survive_and_the_template_is_untouched() -> None:
    """Fields of newer Kubernetes versions reach the pod; the next replica starts from the same template."""
    body = template(newField={"deep": [1, 2]})
    body["futureField"] = "x"
    before = copy.deepcopy(body)

    pod, _ = pod_from(body, amendments=[lambda pod: pod["spec"]["newField"]["deep"].append(3)])

    assert pod["futureField"] == "x"
    assert pod["spec"]["newField"] == {"deep": [1, 2, 3]}
    assert body == before


@pytest.mark.parametrize(
    ("policy", "written", "result"),
    [
        ("Never", "Never", "Never"),
        ("Always", "Always", "Always"),
        ("OnFailure", "OnFailure", "OnFailure"),
        ("ExitCode", "Never", "Never"),
        ("ExitCode", "Always", "Never"),
    ],
)
def test_the_replicas_restart_policy_counts(policy: RestartPolicy, written: str, result: str) -> None:
    """ExitCode is not a policy of the kubelet, which gets Never. A template's policy without effect is warned of."""
    pod, warnings = pod_from(template(restartPolicy=written), policy)

    assert pod["spec"]["restartPolicy"] == result
    assert [(warning.type, warning.reason) for warning in warnings] == (
        [] if written == result else [("Warning", "SetPodTemplateRestartPolicy")]
    )
    assert all("Always" in warning.message for warning in warnings)


def test_amendments_see_the_finished_pod_in_order() -> None:
    """Name, labels and policy are set; their warnings are returned with the others."""
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
    """The error holds the path of the field."""
    with pytest.raises(BadSpec, match=field):
        pod_from(body)


def test_null_parts_of_a_template_are_empty() -> None:
    """YAML with an empty `labels:` is common."""
    pod, _ = pod_from({"metadata": {"labels": None, "annotations": None}, "spec": None})

    assert pod["metadata"]["labels"] == job_labels(type="worker", index="2")
    assert pod["spec"] == {"restartPolicy": "Never"}


def test_a_service_finds_its_pod_before_it_is_ready() -> None:
    """It is headless and publishes addresses of pods that are not ready, because members look for each other while they
    start.
    """
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


@pytest.mark.parametrize(("name", "port"), [("", 1), ("side", 2), ("missing", 1)])
def test_the_default_containers_ports_count(name: str, port: int) -> None:
    """Without a container of that name, the first one's ports are used, and no error is raised."""
    containers = [{"name": n, "ports": [{"containerPort": p}]} for n, p in (("main", 1), ("side", 2))]
    spec = ReplicaSpec(template={"spec": {"containers": containers}})

    service = build_service(IDENTITY, "Worker", 0, spec, default_container=name)

    assert [entry["port"] for entry in service["spec"]["ports"]] == [port]


@pytest.mark.parametrize(
    ("body", "ports"),
    [
        (
            template(containers=[{"ports": [{"containerPort": 80}]}]),
            [{"port": 80, "targetPort": 80, "protocol": "TCP"}],
        ),
        ({}, []),
        ({"spec": {}}, []),
        (template(containers=[]), []),
        (template(containers=[{"name": "main"}]), []),
    ],
)
def test_a_single_port_needs_no_name_and_a_name_no_port(body: Object, ports: list[Object]) -> None:
    """A port stays as it was written. A headless service without ports still gives the pod its DNS name."""
    assert build_service(IDENTITY, "Worker", 0, ReplicaSpec(template=body))["spec"]["ports"] == ports


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
    """The error holds the path of the field, and comes before any creation."""
    with pytest.raises(BadSpec, match=r"Worker: template\.spec"):
        build_service(IDENTITY, "Worker", 0, ReplicaSpec(template={"spec": spec}))


class Controlled(Stored):
    """A job whose pods are controlled."""

    def __init__(self, api: MemoryKube, job: Object) -> None:
        super().__init__(api, job)
        self.pods = ChildControl(api, PODS, KIND, self.recorder, self.tally)


async def test_a_creation_is_recorded_and_counted() -> None:
    """The Event is on the job, with the pod's name."""
    one = await Controlled.create()

    created = await one.pods.create(one.job, POD)

    assert name_of(created) == "train-worker-0"
    event = one.recorder.events[0]
    assert (event.severity, event.reason, event.about) == (
        "Normal",
        "SuccessfulCreatePod",
        "example.dev/v1 TrainJob train",
    )
    assert "train-worker-0" in event.message
    assert one.tally.figures == ["create Pod ok"]


@pytest.mark.parametrize(("verb", "events"), [("create", 1), ("delete", 2)])
async def test_a_refused_call_is_recorded_and_raised(verb: str, events: int) -> None:
    """`kubectl describe` of the job shows why there is no pod, a quota for instance, or why there is one still."""
    one = await Controlled.create()
    pod = await one.pods.create(one.job, POD) if verb == "delete" else POD
    one.writes.fail = lambda call: Forbidden("exceeded quota: pods=10")

    with pytest.raises(Forbidden):
        await (
            one.pods.create(one.job, POD) if verb == "create" else one.pods.delete(one.job, name_of(pod), uid_of(pod))
        )

    assert len(one.recorder.events) == events
    assert (one.recorder.events[-1].severity, one.recorder.reasons[-1]) == ("Warning", f"Failed{verb.capitalize()}Pod")
    assert "exceeded quota: pods=10" in one.recorder.events[-1].message
    assert one.tally.figures[-1] == f"{verb} Pod failed"


async def test_in_a_terminating_namespace_nothing_is_recorded() -> None:
    """Events can't be created there, either, and everything is being deleted."""
    one = await Controlled.create()
    await one.api.patch(TRAIN_JOBS, "train", "default", {"metadata": {"finalizers": ["example.dev/hold"]}})
    await one.api.delete(NAMESPACES, "default")

    with pytest.raises(Forbidden):
        await one.pods.create(one.job, POD)
    assert one.recorder.events == []


async def test_a_taken_name_is_the_callers_to_judge() -> None:
    """The name may be held by the job's own pod that the cache does not show yet: no Event."""
    one = await Controlled.create()
    await one.pods.create(one.job, POD)
    one.recorder.events.clear()

    with pytest.raises(AlreadyExists):
        await one.pods.create(one.job, POD)
    assert one.recorder.events == []


async def test_a_deletion_is_recorded_with_its_reason() -> None:
    """The deletion is graceful, unless it is forced."""
    one = await Controlled.create()
    pod = await one.pods.create(one.job, POD)
    await one.api.create(PODS, {"target": {"name": "n"}}, "default", name=name_of(pod), subresource="binding")

    assert await one.pods.delete(one.job, name_of(pod), uid_of(pod), announced=False)
    one.pods.announce(one.job, "delete", [name_of(pod)], why="surplus")
    assert one.recorder.events[-1].reason == "SuccessfulDeletePod"
    assert "surplus" in one.recorder.events[-1].message
    assert (await one.api.get(PODS, name_of(pod), "default"))["metadata"]["deletionTimestamp"]

    assert await one.pods.delete(one.job, name_of(pod), uid_of(pod), force=True)
    with pytest.raises(NotFound):
        await one.api.get(PODS, name_of(pod), "default")


async def test_a_successor_of_the_same_name_is_not_deleted() -> None:
    """The deletion names the UID. For an object that is gone already there is no Event."""
    one = await Controlled.create()
    old = await one.pods.create(one.job, POD)
    await one.api.delete(PODS, name_of(old), "default", grace_period=0)
    assert not await one.pods.delete(one.job, name_of(old), uid_of(old))
    new = await one.pods.create(one.job, POD)
    one.recorder.events.clear()

    assert not await one.pods.delete(one.job, name_of(old), uid_of(old))

    assert uid_of(await one.api.get(PODS, name_of(new), "default")) == uid_of(new)
    assert one.recorder.events == []
