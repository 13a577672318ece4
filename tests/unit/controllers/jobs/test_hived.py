"""Jobs that ask HiveD for cells: what their pods carry, as the extender reads it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from controllers.jobs.api import HIVED_ANNOTATION, BadSpec, JobView, hived_request
from controllers.jobs.gang import join_affinity_group
from scheduler.hived.contract import (
    POD_SCHEDULING_ENABLE,
    POD_SCHEDULING_SPEC,
    AffinityGroupMember,
    extract_pod_scheduling_spec,
    is_interested,
)
from store.kube.api.objects import Object
from store.kube.memory.kube import MemoryKube
from tests.support.jobs.decisions import job
from tests.support.jobs.train_jobs import TrainJobs, condition, create, memory_kube, operate, read, running, train_job

REQUEST = """
{virtualCluster: prod, priority: 100, leafCellType: A100, leafCellNumber: {Master: 4, Worker: 8}, scheduler: s}
"""


def asking(text: str) -> Object:
    return {"metadata": {"name": "train", "namespace": "ml", "annotations": {HIVED_ANNOTATION: text}}}


def view(**replicas: int) -> JobView:
    return replace(job(**replicas), namespace="ml")


def decorated(replica_type: str, text: str = REQUEST, **container: Any) -> Object:
    pod: Object = {
        "metadata": {"name": "train-0", "namespace": "ml", "uid": "u", "annotations": {}},
        "spec": {"containers": [{"name": "main", **container}]},
    }
    request = hived_request(asking(text))
    assert request is not None
    assert join_affinity_group(pod, replica_type, request, view(Master=1, Worker=3, PS=2)) is None
    return pod


def test_given_cells_by_type_then_the_pods_are_one_group_of_their_sizes() -> None:
    """The extender accepts the request; the group's name is unique among namespaces and kinds."""
    pod = decorated("Worker")
    assert is_interested(pod)
    spec = extract_pod_scheduling_spec(pod)
    assert (spec.virtual_cluster, spec.priority, spec.leaf_cell_type, spec.leaf_cell_number) == ("prod", 100, "A100", 8)
    assert spec.affinity_group.name == "ml/train.trainjob"
    assert spec.affinity_group.members == (AffinityGroupMember(1, 4), AffinityGroupMember(3, 8))
    assert pod["spec"]["schedulerName"] == "s"
    devices = pod["spec"]["containers"][0]["env"][-1]
    assert devices["name"] == "NVIDIA_VISIBLE_DEVICES"
    assert "pod-leaf-cell-isolation" in devices["valueFrom"]["fieldRef"]["fieldPath"]


def test_given_a_type_without_cells_then_its_pods_take_no_part() -> None:
    pod = decorated("PS")
    assert not is_interested(pod)
    assert POD_SCHEDULING_SPEC not in pod["metadata"]["annotations"]


def test_given_no_gang_then_each_pod_is_placed_alone() -> None:
    """A job whose number of replicas changes can't be one group: its pods would disagree on the members."""
    spec = extract_pod_scheduling_spec(decorated("Worker", "{virtualCluster: v, leafCellNumber: 1, gang: false}"))
    assert [member.pod_number for member in spec.affinity_group.members] == [1]


def test_the_template_keeps_its_own_devices_and_limits() -> None:
    own = {"name": "NVIDIA_VISIBLE_DEVICES", "value": "0"}
    container = decorated("Worker", env=[own], resources={"limits": {"cpu": 1}})["spec"]["containers"][0]
    assert container["env"] == [own]
    assert container["resources"]["limits"] == {"cpu": 1, POD_SCHEDULING_ENABLE: 1}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{virtualCluster: v}", "leafCellNumber"),
        ("{virtualCluster: '', leafCellNumber: 1}", "virtualCluster"),
        ("{virtualCluster: v, leafCellNumber: 1, priority: 2000}", "priority"),
        ("{virtualCluster: v, leafCellNumber: 1, affinityGroup: {}}", "affinityGroup"),
        ("{virtualCluster: v, leafCellNumber: {Worker: -1}}", "leafCellNumber"),
        ("[", "YAML"),
    ],
)
def test_a_bad_request_is_refused_by_its_field(text: str, problem: str) -> None:
    with pytest.raises(BadSpec, match=r"annotations\[rcfarm.dev/hived\]") as refused:
        hived_request(asking(text))
    assert problem in str(refused.value)


@pytest.mark.looptime
async def test_given_a_bad_request_then_the_job_is_blocked_until_it_is_corrected() -> None:
    api: MemoryKube = memory_kube()
    async with running(operate(api, TrainJobs)):
        asked = train_job(Worker=1)
        asked["metadata"]["annotations"] = {HIVED_ANNOTATION: "{}"}
        await create(api, asked)
        blocked = await condition(api, "Blocked")
        assert "virtualCluster" in blocked["message"]
        annotations = {HIVED_ANNOTATION: "{virtualCluster: v, leafCellNumber: 1}"}
        await api.patch(TrainJobs.resource, "train", "default", {"metadata": {"annotations": annotations}})
        await condition(api, "Created")
    assert (await read(api))["status"]["conditions"][0]["type"] == "Blocked"
