"""The objects of attempts, in their wire form. The life of those around the pods is in
tests/simulation/framework/test_native_frameworks.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from controllers.framework.api.types import TaskId
from controllers.framework.objects import build_config_map, build_pod, name_in_dns, service_name
from store.kube.api.objects import Object
from tests.support.framework.world import World, manifest, role

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


def pod_of(name: str, **spec: Any) -> Object:
    return {"metadata": {"name": name}, "spec": {"containers": [], **spec}}


def test_a_pod_is_named_under_its_service() -> None:
    """The host name is the pod's, the subdomain that of its role's Service."""
    named = pod_of("mnist-worker-0")
    name_in_dns(named, "mnist-worker")
    assert named == pod_of("mnist-worker-0", hostname="mnist-worker-0", subdomain="mnist-worker")


def test_the_template_has_the_last_word() -> None:
    """A host name or subdomain in the template is kept."""
    named = pod_of("mnist-worker-0", hostname="mine", subdomain="ours")
    name_in_dns(named, "mnist-worker")
    assert named == pod_of("mnist-worker-0", hostname="mine", subdomain="ours")


@pytest.mark.parametrize(
    ("name", "service"),
    [("mnist-worker-0", ""), (f"{'a' * 40}-{'b' * 30}-0", "b")],
    ids=["no Service", "a name longer than host names are"],
)
def test_a_pod_that_can_not_be_named(name: str, service: str) -> None:
    """Without a valid DNS name the pod is unchanged, so that the API server accepts it."""
    unnamed = pod_of(name)
    name_in_dns(unnamed, service)
    assert unnamed == pod_of(name)


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
