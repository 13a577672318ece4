"""Pods and services of a job: the whole template, our metadata set over it, the Events on the job, and the metrics."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from controllers.jobs.api.names import GroupVersionKind
from controllers.jobs.api.types import BadSpec, JobEvent, ReplicaSpec, RestartPolicy
from controllers.jobs.children.control import ChildControl, Identity, build_pod, build_service
from store.kube.api.errors import AlreadyExists, Forbidden, NotFound, ServerError
from store.kube.api.objects import PODS, Object, name_of, uid_of
from store.kube.memory.kube import MemoryKube
from store.kube.memory.rules import NAMESPACES
from tests.support.jobs.train_jobs import (
    INDEX,
    TRAIN_JOBS,
    TYPE,
    EventLog,
    Tally,
    Writes,
    job_labels,
    memory_kube,
    template,
    train_job,
)

OWNER = {"apiVersion": "example.dev/v1", "kind": "TrainJob", "name": "train", "uid": "u", "controller": True}
IDENTITY = Identity(train_job(namespace="ns"), OWNER, job_labels(), TYPE, INDEX)

POD = {"metadata": {"name": "train-worker-0"}, **template()}


def pod_from(template: Object, policy: RestartPolicy = "Never", **options: Any) -> tuple[Object, list[JobEvent]]:
    return build_pod(IDENTITY, "Worker", 2, ReplicaSpec(template=template, restart_policy=policy), **options)


def service_from(*ports: Object, container: str = "", **spec: Any) -> Object:
    body = template(containers=[{"name": "main", "ports": list(ports)}], **spec)
    return build_service(IDENTITY, "Worker", 2, ReplicaSpec(template=body), default_container=container)


def test_a_pod_is_named_labelled_and_owned() -> None:
    """Name, namespace, labels and owner are ours, whatever the template has."""
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
    """A template can't take a pod from its job by labels; its own labels and annotations are kept."""
    body = template()
    body["metadata"] = {"labels": {"team": "a", TYPE: "chief"}, "annotations": {"note": "b"}}

    pod, _ = pod_from(body)

    assert pod["metadata"]["labels"] == {"team": "a", **job_labels(type="worker", index="2")}
    assert pod["metadata"]["annotations"] == {"note": "b"}


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
    ("policy", "written"), [("Never", "Never"), ("Always", "Always"), ("OnFailure", "OnFailure"), ("ExitCode", "Never")]
)
def test_the_replicas_restart_policy_counts(policy: RestartPolicy, written: str) -> None:
    """ExitCode is not a policy of the kubelet, which gets Never. A template with the same policy causes no warning."""
    pod, warnings = pod_from(template(restartPolicy=written), policy)

    assert pod["spec"]["restartPolicy"] == written
    assert warnings == []


def test_an_overruled_restart_policy_is_warned_of() -> None:
    """The template's policy has no effect, so the job gets a warning."""
    pod, warnings = pod_from(template(restartPolicy="Always"), "ExitCode")

    assert pod["spec"]["restartPolicy"] == "Never"
    assert [(warning.type, warning.reason) for warning in warnings] == [("Warning", "SettedPodTemplateRestartPolicy")]
    assert "Always" in warnings[0].message


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


def test_a_single_port_needs_no_name() -> None:
    """It stays as it was written."""
    assert service_from({"containerPort": 80})["spec"]["ports"] == [{"port": 80, "targetPort": 80, "protocol": "TCP"}]


@pytest.mark.parametrize(("name", "port"), [("", 1), ("side", 2), ("missing", 1)])
def test_the_default_containers_ports_count(name: str, port: int) -> None:
    """Without a container of that name, the first one's ports are used, and no error is raised."""
    containers = [{"name": n, "ports": [{"containerPort": p}]} for n, p in (("main", 1), ("side", 2))]
    spec = ReplicaSpec(template={"spec": {"containers": containers}})

    service = build_service(IDENTITY, "Worker", 0, spec, default_container=name)

    assert [entry["port"] for entry in service["spec"]["ports"]] == [port]


@pytest.mark.parametrize("body", [{}, {"spec": {}}, template(containers=[]), template(containers=[{"name": "main"}])])
def test_without_ports_there_is_a_name_all_the_same(body: Object) -> None:
    """A headless service without ports still gives the pod its DNS name."""
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
    """The error holds the path of the field, and comes before any creation."""
    with pytest.raises(BadSpec, match=r"Worker: template\.spec"):
        build_service(IDENTITY, "Worker", 0, ReplicaSpec(template={"spec": spec}))


class Controlled:
    """A job whose pods are controlled."""

    def __init__(self, api: MemoryKube, job: Object) -> None:
        self.api, self.job = api, job
        self.recorder, self.tally, self.writes = EventLog(), Tally(), Writes(api)
        kind = GroupVersionKind("example.dev", "v1", "TrainJob")
        self.pods = ChildControl(api, PODS, job_kind=kind, recorder=self.recorder, metrics=self.tally)

    @classmethod
    async def create(cls) -> Controlled:
        api = memory_kube()
        return cls(api, await api.create(TRAIN_JOBS, train_job(), "default"))


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


async def test_a_refused_creation_is_recorded_with_the_reason() -> None:
    """`kubectl describe` of the job shows why there is no pod, a quota for instance."""
    one = await Controlled.create()
    one.writes.fail = lambda call: Forbidden("exceeded quota: pods=10")

    with pytest.raises(Forbidden):
        await one.pods.create(one.job, POD)

    assert one.recorder.reasons == ["FailedCreatePod"]
    assert "exceeded quota: pods=10" in one.recorder.events[0].message
    assert one.tally.figures == ["create Pod failed"]


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

    assert await one.pods.delete(one.job, name_of(pod), uid_of(pod), why="surplus")
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


async def test_a_failed_deletion_is_recorded_and_raised() -> None:
    """The Event has the server's message; the caller handles the error."""
    one = await Controlled.create()
    pod = await one.pods.create(one.job, POD)
    one.writes.fail = lambda call: ServerError("etcd is away")

    with pytest.raises(ServerError):
        await one.pods.delete(one.job, name_of(pod), uid_of(pod))
    assert one.recorder.reasons[-1] == "FailedDeletePod"
    assert one.tally.figures[-1] == "delete Pod failed"
