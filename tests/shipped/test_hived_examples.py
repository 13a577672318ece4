"""The example files are valid and within their quotas, and a Framework's pods carry HiveD's annotation."""

from __future__ import annotations

from collections import Counter

import pytest

from scheduler.hived.config.resolve import resolve
from scheduler.hived.contract import (
    GROUP,
    POD_LEAF_CELL_ISOLATION,
    POD_SCHEDULING_SPEC,
    PodSchedulingSpec,
    extract_pod_scheduling_spec,
    is_hived_enabled,
)
from store.kube.api.objects import Object, name_of
from tests.support.extender.manifests import COMPLETE, EXAMPLES, configuration, example_pods, framework_pods
from tests.support.kube.shipped_manifests import documents

TOPOLOGY = resolve(configuration(EXAMPLES / "hived.yaml"))
CLASSES = {name_of(found): found["value"] for found in documents(COMPLETE / "priority-classes.yaml")}
FILES = ["guaranteed.yaml", "opportunistic.yaml", "gang.yaml"]


def all_pods() -> list[Object]:
    return [*(pod for file in FILES for pod in example_pods(file)), *framework_pods()]


def spec_of(pod: Object) -> PodSchedulingSpec:
    return extract_pod_scheduling_spec(pod)


def leaves(virtual_cluster: str, leaf_type: str) -> int:
    """Return the number of devices of a type that a tenant is guaranteed without its pinned cells."""
    return sum(
        TOPOLOGY.chains[cell.chain].leaves_at(cell.level)
        for cell in TOPOLOGY.virtual_clusters[virtual_cluster]
        if not cell.pinned_cell_id and TOPOLOGY.chains[cell.chain].leaf_cell_type == leaf_type
    )


def test_two_tenants_and_what_is_left() -> None:
    """28 of 32 A100 belong to a tenant, eight of them pinned; one socket belongs to none."""
    assert list(TOPOLOGY.virtual_clusters) == ["prod", "research"]
    assert leaves("prod", "A100") + leaves("research", "A100") == 20
    assert TOPOLOGY.chains["A100-RACK"].pinned == {"prod-serving": (3, 3)}
    assert leaves("prod", "T4") == leaves("research", "T4") == 4


@pytest.mark.parametrize("pod", all_pods(), ids=name_of)
def test_each_pod_goes_through_the_kube_scheduler_of_its_tenant(pod: Object) -> None:
    """It asks for HiveD, its tenant exists, and its Kubernetes priority equals HiveD's."""
    spec = spec_of(pod)
    assert is_hived_enabled(pod)
    assert spec.virtual_cluster in TOPOLOGY.virtual_clusters
    assert pod["spec"]["schedulerName"] == f"hived-{spec.virtual_cluster}"
    assert CLASSES[pod["spec"]["priorityClassName"]] == spec.priority


@pytest.mark.parametrize("pod", all_pods(), ids=name_of)
def test_each_container_gets_its_devices(pod: Object) -> None:
    """It gets them from the annotation written at bind time, not by requesting devices from the kubelet."""
    (container,) = pod["spec"]["containers"]
    from_annotation = {"fieldRef": {"fieldPath": f"metadata.annotations['{POD_LEAF_CELL_ISOLATION}']"}}
    assert {"name": "NVIDIA_VISIBLE_DEVICES", "valueFrom": from_annotation} in container["env"]
    assert not any(resource.startswith("nvidia.com/") for resource in container["resources"]["limits"])


@pytest.mark.parametrize("pods", [example_pods("gang.yaml"), framework_pods()], ids=["pods", "framework"])
def test_a_gang_matches_its_members(pods: list[Object]) -> None:
    """All its pods name one group and agree on it, each size occurs as often as the members say, and together they fit
    their tenant's quota.
    """
    specs = [spec_of(pod) for pod in pods]
    (group,) = {spec.affinity_group for spec in specs}
    assert Counter(spec.leaf_cell_number for spec in specs) == {
        member.leaf_cell_number: member.pod_number for member in group.members
    }
    assert group.name.startswith("default/")
    assert sum(spec.leaf_cell_number for spec in specs) <= leaves(specs[0].virtual_cluster, specs[0].leaf_cell_type)


def test_the_operator_passes_the_annotations_on() -> None:
    """A task's pod carries its template's HiveD annotation, with the gang named after the Framework, and the operator's
    own.
    """
    for pod in framework_pods():
        annotations = pod["metadata"]["annotations"]
        assert [name for name in annotations if name.startswith(GROUP)] == [POD_SCHEDULING_SPEC]
        assert spec_of(pod).affinity_group.name == "default/bert"
        assert annotations["FC_FRAMEWORK_NAME"] == "bert"
