"""Execution of a step's actions on an in-memory API server: the requests, their outcomes, and the objects of attempts.

The life of the objects around the pods is in tests/simulation/framework/test_native_frameworks.py.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from controllers.framework.api.types import FRAMEWORKS, Framework, State, TaskId
from controllers.framework.api.wire import decode_framework
from controllers.framework.config import FrameworkConfig
from controllers.framework.executor import build_config_map, build_pod, name_in_dns, perform, service_name
from controllers.framework.step.context import (
    Confirm,
    Create,
    Created,
    CreateFailed,
    Delete,
    DeleteAccepted,
    DeleteFramework,
    Failed,
    Gone,
    NameTaken,
    Outcome,
    Present,
    Step,
)
from controllers.framework.step.step import step
from store.kube.api.errors import Forbidden, NotFound, Unreachable
from store.kube.api.objects import CONFIG_MAPS, PODS, Object, Resource, is_deleting, uid_of
from store.kube.memory.kube import Call, MemoryKube
from tests.support import require
from tests.support.framework.cluster import NAMESPACE, now
from tests.support.framework.world import World, manifest, role

pytestmark = pytest.mark.looptime

FIRST, SECOND = TaskId("worker", 0), TaskId("worker", 1)


class Bench:
    """A Framework `job` of two workers, stepped and executed by the test."""

    def __init__(self, api: MemoryKube, stored: Object) -> None:
        self.api = api
        self.framework: Framework = decode_framework(stored)

    @classmethod
    async def create(cls) -> Bench:
        api = MemoryKube(clock=now, rng=random.Random(1), gc_delay=1.0)
        api.register(FRAMEWORKS, has_status=False)
        body = manifest(role("worker", 2))
        return cls(api, await api.create(FRAMEWORKS, {**body, "metadata": {"name": "job"}}, NAMESPACE))

    def step(self, outcomes: Sequence[Outcome] = ()) -> Step:
        at = datetime.fromtimestamp(now(), UTC)
        config, rng = FrameworkConfig(), random.Random(2)
        asked = step(self.framework, None, {}, now=at, rng=rng, config=config, outcomes=outcomes)
        self.framework = replace(self.framework, status=asked.status)
        return asked

    async def perform(self, *actions: Create | Delete | Confirm | DeleteFramework) -> list[Outcome]:
        return await perform(self.api, self.framework, actions)

    async def begin(self) -> tuple[str, str, str]:
        """Return the UIDs of the attempt's ConfigMap and of its pods."""
        (config_map,) = await self.perform(*self.step().actions)
        assert isinstance(config_map, Created)
        self.step([config_map])
        first, second = await self.perform(Create(FIRST), Create(SECOND))
        assert isinstance(first, Created)
        assert isinstance(second, Created)
        return config_map.uid, first.uid, second.uid

    async def read(self, resource: Resource, name: str) -> Object:
        return await self.api.get(resource, name, NAMESPACE)

    async def bind(self, name: str) -> None:
        """Give the pod a node, so that its deletion waits for a kubelet."""
        target = {"target": {"kind": "Node", "name": "node-1"}}
        await self.api.create(PODS, target, NAMESPACE, name=name, subresource="binding")

    async def is_there(self, resource: Resource, name: str) -> bool:
        try:
            return not is_deleting(await self.read(resource, name))
        except NotFound:
            return False


async def test_a_creation_returns_the_uid() -> None:
    """The ConfigMap is owned by the Framework, the pods by the ConfigMap, each under its UID."""
    bench = await Bench.create()
    config_map, first, second = await bench.begin()

    stored = await bench.read(CONFIG_MAPS, "job-attempt")
    assert (uid_of(stored), stored["metadata"]["ownerReferences"][0]["uid"]) == (config_map, bench.framework.uid)
    for name, uid in (("job-worker-0", first), ("job-worker-1", second)):
        pod = await bench.read(PODS, name)
        assert (uid_of(pod), pod["metadata"]["ownerReferences"][0]["uid"]) == (uid, config_map)


async def test_a_taken_name_is_reported_with_its_holder() -> None:
    """The next step decides whether the holder is an orphan of ours or a stranger."""
    bench = await Bench.create()
    _, first, _ = await bench.begin()

    (outcome,) = await bench.perform(Create(FIRST))
    assert isinstance(outcome, NameTaken)
    assert uid_of(require(outcome.holder)) == first


async def test_one_refusal_disturbs_no_other_creation() -> None:
    """Each action has its own outcome, in order; a refusal keeps its status and message."""
    bench = await Bench.create()
    (config_map,) = await bench.perform(*bench.step().actions)
    bench.step([config_map])

    def refuse_first(call: Call) -> None:
        if (call.verb, call.name) == ("create", "job-worker-0"):
            raise Forbidden("exceeded quota: pods", status=403)

    bench.api.before_call = refuse_first
    refused, created = await bench.perform(Create(FIRST), Create(SECOND))
    assert refused == CreateFailed(FIRST, 403, "exceeded quota: pods")
    assert isinstance(created, Created)


@pytest.mark.parametrize("grace", [None, 0])
async def test_a_successor_is_not_deleted(grace: int | None) -> None:
    """A deletion is of one UID: a later object of the same name stays, also with force."""
    bench = await Bench.create()
    await bench.begin()

    assert await bench.perform(Delete(FIRST, "job-worker-0", "former", grace)) == [Gone("former")]
    assert await bench.perform(Delete(None, "job-attempt", "former")) == [Gone("former")]
    assert await bench.is_there(PODS, "job-worker-0")
    assert await bench.is_there(CONFIG_MAPS, "job-attempt")


async def test_what_a_status_names_is_not_deleted_unless_it_belongs_to_the_framework() -> None:
    """A user who may edit a Framework can write any name and UID into its status; that must not delete other
    objects.
    """
    bench = await Bench.create()
    config_map, first, _ = await bench.begin()
    body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "victim"}}
    victim = uid_of(await bench.api.create(CONFIG_MAPS, body, NAMESPACE))
    reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": "x", "uid": config_map, "controller": True}
    container = {"name": "main", "image": "example.org/task:1"}
    pod = {"metadata": {"name": "other", "ownerReferences": [reference]}, "spec": {"containers": [container]}}
    stranger = uid_of(await bench.api.create(PODS, {"apiVersion": "v1", "kind": "Pod"} | pod, NAMESPACE))

    assert await bench.perform(Delete(None, "victim", victim, confirm=True, check=True)) == [Gone(victim)]
    assert await bench.perform(Delete(FIRST, "other", stranger, 0, check=True)) == [Gone(stranger)]
    assert await bench.is_there(CONFIG_MAPS, "victim")
    assert await bench.is_there(PODS, "other")

    assert await bench.perform(Delete(FIRST, "job-worker-0", first, 0, True, check=True)) == [Gone(first)]
    deleted = await bench.perform(Delete(None, "job-attempt", config_map, check=True))
    assert deleted == [DeleteAccepted(config_map)]
    assert not await bench.is_there(CONFIG_MAPS, "job-attempt")


async def test_a_forged_status_is_checked_before_anything_is_deleted() -> None:
    """An object that is not cached, or whose metadata does not name the Framework, is read before it is deleted."""
    bench = await Bench.create()
    await bench.begin()
    status = require(bench.framework.status)
    forged = msgspec.structs.replace(status.attempt_status, config_map_name="victim", config_map_uid="victims-uid")
    status = msgspec.structs.replace(status, attempt_status=forged, state=State.DELETION_PENDING)
    bench.framework = replace(bench.framework, status=status)
    deletions = [action for action in bench.step().actions if isinstance(action, Delete)]
    assert [(action.name, action.check) for action in deletions] == [("victim", True)]


async def test_a_deletion_gives_a_pod_its_time_and_force_does_not() -> None:
    """An accepted deletion leaves the pod until its kubelet is done; with grace 0 it is gone at once."""
    bench = await Bench.create()
    _, first, _ = await bench.begin()
    await bench.bind("job-worker-0")

    assert await bench.perform(Delete(FIRST, "job-worker-0", first)) == [DeleteAccepted(first)]
    assert await bench.perform(Delete(FIRST, "job-worker-0", first, confirm=True)) == [DeleteAccepted(first)]
    assert is_deleting(await bench.read(PODS, "job-worker-0"))
    assert await bench.perform(Delete(FIRST, "job-worker-0", first, 0, confirm=True)) == [Gone(first)]


async def test_an_attempts_config_map_goes_after_its_pods() -> None:
    """The ConfigMap exists while a pod of the attempt does, so the attempt never seems to have ended early."""
    bench = await Bench.create()
    config_map, _, second = await bench.begin()
    await bench.bind("job-worker-1")

    assert await bench.perform(Delete(None, "job-attempt", config_map)) == [DeleteAccepted(config_map)]
    await asyncio.sleep(60)
    assert is_deleting(await bench.read(PODS, "job-worker-1"))
    assert is_deleting(await bench.read(CONFIG_MAPS, "job-attempt"))
    await bench.perform(Delete(SECOND, "job-worker-1", second, 0))
    await asyncio.sleep(60)
    assert await bench.perform(Confirm(None, "job-attempt", config_map)) == [Gone(config_map)]


async def test_a_completed_framework_goes_after_all_that_it_has() -> None:
    """The deletion is in the foreground, and only of the Framework whose retention has passed."""
    bench = await Bench.create()
    await bench.begin()
    await bench.bind("job-worker-0")

    assert await bench.perform(DeleteFramework("former")) == [Gone("former")]
    assert await bench.is_there(FRAMEWORKS, "job")
    uid = bench.framework.uid
    assert await bench.perform(DeleteFramework(uid)) == [DeleteAccepted(uid)]
    await asyncio.sleep(60)
    assert is_deleting(await bench.read(FRAMEWORKS, "job")), "its pod lives"


async def test_a_quorum_read() -> None:
    """`Present` with the state, `Gone` when another object has the name, `Failed` without an answer."""
    bench = await Bench.create()
    _, first, _ = await bench.begin()

    (present,) = await bench.perform(Confirm(FIRST, "job-worker-0", first))
    assert isinstance(present, Present)
    assert uid_of(present.found) == first
    assert await bench.perform(Confirm(FIRST, "job-worker-0", "former")) == [Gone("former")]

    def hang_up(call: Call) -> None:
        raise Unreachable("connection refused")

    bench.api.before_call = hang_up
    failed = [Failed(first, "connection refused")]
    assert await bench.perform(Confirm(FIRST, "job-worker-0", first)) == failed
    assert await bench.perform(Delete(FIRST, "job-worker-0", first)) == failed
    assert await bench.perform(DeleteFramework(first)) == failed


ORDER = [
    "FC_FRAMEWORK_NAMESPACE",
    "FC_FRAMEWORK_NAME",
    "FC_TASKROLE_NAME",
    "FC_TASK_INDEX",
    "FC_CONFIGMAP_NAME",
    "FC_POD_NAME",
    "FC_FRAMEWORK_UID",
    "FC_FRAMEWORK_ATTEMPT_ID",
    "FC_FRAMEWORK_ATTEMPT_INSTANCE_UID",
    "FC_CONFIGMAP_UID",
    "FC_TASKROLE_UID",
    "FC_TASK_UID",
    "FC_TASK_ATTEMPT_ID",
    "FC_POD_UID",
    "FC_TASK_ATTEMPT_INSTANCE_UID",
]
TEMPLATE: Object = {
    "metadata": {
        "name": "ignored",
        "namespace": "ignored",
        "labels": {"team": "a", "FC_TASK_INDEX": "99", "role-{{FC_TASKROLE_NAME}}": "yes"},
        "annotations": {"note": "{{FC_POD_NAME}} of {{FC_FRAMEWORK_NAMESPACE}} {{FC_UNKNOWN}}"},
        "ownerReferences": [{"apiVersion": "v1", "kind": "Other", "name": "o", "uid": "u"}],
    },
    "spec": {
        "restartPolicy": "Never",
        "hostname": "{{FC_FRAMEWORK_NAME}}-{{FC_TASK_INDEX}}",
        "initContainers": [{"name": "barrier", "image": "b:1"}],
        "containers": [
            {
                "name": "main",
                "env": [{"name": "RANK", "value": "$(FC_TASK_INDEX)"}],
                "terminationMessagePolicy": "File",
                "command": ["run", "{{FC_CONFIGMAP_NAME}}"],
            }
        ],
    },
}


def prepared() -> World:
    world = World(manifest(role("worker", 2, pod=TEMPLATE)))
    world.settle()
    return world


def test_the_pod_of_a_task() -> None:
    """Golden: the whole pod, with placeholders filled in, identity in its metadata and its owner appended."""
    world = prepared()
    status = world.status
    pod = build_pod(world.framework(), TaskId("worker", 1))
    identity = {
        "FC_FRAMEWORK_NAMESPACE": "default",
        "FC_FRAMEWORK_NAME": "job",
        "FC_TASKROLE_NAME": "worker",
        "FC_TASK_INDEX": "1",
        "FC_CONFIGMAP_NAME": "job-attempt",
        "FC_POD_NAME": "job-worker-1",
        "FC_FRAMEWORK_UID": "fw-uid",
        "FC_FRAMEWORK_ATTEMPT_ID": "0",
        "FC_FRAMEWORK_ATTEMPT_INSTANCE_UID": "0_uid-1",
        "FC_CONFIGMAP_UID": "uid-1",
        "FC_TASKROLE_UID": status.roles[0].instance_uid,
        "FC_TASK_UID": world.task(index=1).instance_uid,
        "FC_TASK_ATTEMPT_ID": "0",
    }
    environment = [
        *({"name": name, "value": value} for name, value in identity.items()),
        {"name": "FC_POD_UID", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}},
        {"name": "FC_TASK_ATTEMPT_INSTANCE_UID", "value": "0_$(FC_POD_UID)"},
    ]
    assert pod == {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": "job-worker-1",
            "namespace": "default",
            "labels": {
                "team": "a",
                "role-worker": "yes",
                "FC_FRAMEWORK_NAME": "job",
                "FC_TASKROLE_NAME": "worker",
                "FC_TASK_INDEX": "1",
            },
            "annotations": {"note": "job-worker-1 of default {{FC_UNKNOWN}}", **identity},
            "ownerReferences": [
                {"apiVersion": "v1", "kind": "Other", "name": "o", "uid": "u"},
                {
                    "apiVersion": "v1",
                    "kind": "ConfigMap",
                    "name": "job-attempt",
                    "uid": "uid-1",
                    "controller": True,
                    "blockOwnerDeletion": True,
                },
            ],
        },
        "spec": {
            "restartPolicy": "Never",
            "hostname": "job-1",
            "initContainers": [
                {
                    "name": "barrier",
                    "image": "b:1",
                    "env": environment,
                    "terminationMessagePolicy": "FallbackToLogsOnError",
                }
            ],
            "containers": [
                {
                    "name": "main",
                    "env": [*environment, {"name": "RANK", "value": "$(FC_TASK_INDEX)"}],
                    "terminationMessagePolicy": "File",
                    "command": ["run", "job-attempt"],
                }
            ],
        },
    }
    names = [variable["name"] for variable in pod["spec"]["containers"][0]["env"]]
    assert names == [*ORDER, "RANK"], "15 variables in order, before the user's"
    assert list(pod["metadata"]["annotations"])[1:] == ORDER[:13]


def test_the_template_is_not_changed() -> None:
    """The same template serves every task; the cached Framework is shared."""
    world = prepared()
    first = build_pod(world.framework(), TaskId("worker", 0))
    second = build_pod(world.framework(), TaskId("worker", 1))
    first["spec"]["containers"][0]["env"].clear()
    assert len(second["spec"]["containers"][0]["env"]) == 16
    assert TEMPLATE["spec"]["containers"][0]["env"] == [{"name": "RANK", "value": "$(FC_TASK_INDEX)"}]


def test_the_config_map_of_an_attempt() -> None:
    """Golden: no data, five annotations, the Framework as controller, and the finalizer from its creation."""
    assert build_config_map(prepared().framework()) == {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": "job-attempt",
            "namespace": "default",
            "labels": {"FC_FRAMEWORK_NAME": "job"},
            "annotations": {
                "FC_FRAMEWORK_NAMESPACE": "default",
                "FC_FRAMEWORK_NAME": "job",
                "FC_CONFIGMAP_NAME": "job-attempt",
                "FC_FRAMEWORK_UID": "fw-uid",
                "FC_FRAMEWORK_ATTEMPT_ID": "0",
            },
            "ownerReferences": [
                {
                    "apiVersion": "frameworkcontroller.microsoft.com/v1",
                    "kind": "Framework",
                    "name": "job",
                    "uid": "fw-uid",
                    "controller": True,
                    "blockOwnerDeletion": True,
                }
            ],
            "finalizers": ["foregroundDeletion"],
        },
    }


def test_a_retried_tasks_pod_knows_its_attempt() -> None:
    """The instance UID of an attempt begins with the attempt's id."""
    world = World(manifest(role(retry=(False, 1))))
    world.settle()
    world.finish("job-worker-0", 1)
    world.settle()
    container = world.live["job-worker-0"]["spec"]["containers"][0]
    values = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert values["FC_TASK_ATTEMPT_ID"] == "1"
    assert values["FC_TASK_ATTEMPT_INSTANCE_UID"] == "1_$(FC_POD_UID)"


TEMPLATES_OWN = {"hostname": "mine", "subdomain": "ours"}


def pod_of(name: str, **spec: Any) -> Object:
    return {"metadata": {"name": name}, "spec": {"containers": [], **spec}}


@pytest.mark.parametrize(
    ("name", "service", "template", "named"),
    [
        ("mnist-worker-0", "mnist-worker", {}, {"hostname": "mnist-worker-0", "subdomain": "mnist-worker"}),
        ("mnist-worker-0", "mnist-worker", TEMPLATES_OWN, TEMPLATES_OWN),
        ("mnist-worker-0", "", {}, {}),
        (f"{'a' * 40}-{'b' * 30}-0", "b", {}, {}),
    ],
    ids=["named", "the template has the last word", "no Service", "a name longer than host names are"],
)
def test_the_name_of_a_pod_under_its_service(name: str, service: str, template: Object, named: Object) -> None:
    """The host name is the pod's, the subdomain that of its role's Service; without a valid DNS name the pod is
    unchanged, so that the API server accepts it."""
    pod = pod_of(name, **template)
    name_in_dns(pod, service)
    assert pod == pod_of(name, **named)


@pytest.mark.parametrize(
    ("framework", "role", "expected"),
    [
        ("mnist", "worker", "mnist-worker"),
        ("1mnist", "worker", ""),
        ("a" * 31, "b" * 31, f"{'a' * 31}-{'b' * 31}"),
        ("a" * 32, "b" * 31, ""),
    ],
)
def test_the_names_of_services(framework: str, role: str, expected: str) -> None:
    """They begin with a letter and have at most 63 characters; other names get no Service."""
    assert service_name(framework, role) == expected
