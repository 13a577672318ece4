"""A pod's annotations for HiveD, and those that HiveD writes."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import yaml

from scheduler.hived.contract import (
    OLD_POD_GPU_ISOLATION,
    POD_BIND_INFO,
    POD_LEAF_CELL_ISOLATION,
    POD_SCHEDULING_ENABLE,
    POD_SCHEDULING_SPEC,
    AffinityGroupMember,
    AffinityGroupMemberBindInfo,
    AffinityGroupSpec,
    PodBindInfo,
    PodPlacementInfo,
    PodSchedulingSpec,
    _scheduling_spec,
    _written_spec,
    extract_pod_bind_annotations,
    extract_pod_bind_info,
    extract_pod_scheduling_spec,
    is_bound,
    is_hived_enabled,
    is_interested,
    is_live,
    new_binding_pod,
)
from scheduler.hived.errors import UserError
from store.kube.api.objects import Object

INFO = PodBindInfo(
    "node-1",
    (1, 3, 0),
    "DGX",
    (
        AffinityGroupMemberBindInfo((PodPlacementInfo("node-0", (0,), ("DGX",)),)),
        AffinityGroupMemberBindInfo(
            (
                PodPlacementInfo("node-0", (4, 5, 6), ("DGX", "DGX", "DGX")),
                PodPlacementInfo("node-1", (1, 3, 0), ("DGX", "DGX", "DGX")),
            )
        ),
    ),
)

HIVED_BIND_INFO = """\
node: node-1
leafCellIsolation:
- 1
- 3
- 0
cellChain: 8
affinityGroupBindInfo:
- podPlacements:
  - physicalNode: node-1
    physicalLeafCellIndices: [1, 3, 0]
    preassignedCellTypes: ["", "", ""]
"""


def pod(**annotations: Any) -> Object:
    """Return a pod; `spec` and `info` are annotations, in JSON unless they are texts."""
    names = {"spec": POD_SCHEDULING_SPEC, "info": POD_BIND_INFO, "isolation": POD_LEAF_CELL_ISOLATION}
    texts = {names[name]: value if isinstance(value, str) else json.dumps(value) for name, value in annotations.items()}
    return {"metadata": {"namespace": "team", "name": "train-0", "uid": "u1", "annotations": texts}, "spec": {}}


def spec_of(text: Any) -> PodSchedulingSpec:
    return extract_pod_scheduling_spec(pod(spec=text))


def test_defaults() -> None:
    """A minimal pod is guaranteed, at the lowest priority, takes any type, and is a group of its own."""
    assert spec_of("virtualCluster: research\nleafCellNumber: 2\n") == PodSchedulingSpec(
        virtual_cluster="research",
        priority=0,
        pinned_cell_id="",
        leaf_cell_type="",
        leaf_cell_number=2,
        gang_release_enable=False,
        lazy_preemption_enable=False,
        ignore_k8s_suggested_nodes=True,
        affinity_group=AffinityGroupSpec("team/train-0", (AffinityGroupMember(1, 2),)),
    )


def test_the_default_group_is_each_pods_own() -> None:
    """Two pods with the same text are in different groups."""
    other = pod(spec="{virtualCluster: a, leafCellNumber: 1}")
    other["metadata"]["name"] = "train-1"
    assert spec_of("{virtualCluster: a, leafCellNumber: 1}").affinity_group.name == "team/train-0"
    assert extract_pod_scheduling_spec(other).affinity_group.name == "team/train-1"


@pytest.mark.parametrize("dump", [json.dumps, yaml.safe_dump, lambda fields: json.dumps(fields, indent="\t")])
def test_all_fields(dump: Any) -> None:
    """Every field is parsed, in JSON and in YAML; members with equal leaves are merged, ascending by leaves."""
    members = [
        {"podNumber": 2, "leafCellNumber": 8},
        {"podNumber": 1, "leafCellNumber": 1},
        {"podNumber": 3, "leafCellNumber": 8},
    ]
    fields = {
        "virtualCluster": "a",
        "priority": 7,
        "pinnedCellId": "p",
        "leafCellType": "K80",
        "leafCellNumber": 8,
        "gangReleaseEnable": True,
        "lazyPreemptionEnable": True,
        "ignoreK8sSuggestedNodes": False,
        "affinityGroup": {"name": "g", "members": members},
        "somethingNew": {"of": ["later", None]},
    }
    group = AffinityGroupSpec("g", (AffinityGroupMember(1, 1), AffinityGroupMember(5, 8)))
    assert spec_of(dump(fields)) == PodSchedulingSpec("a", 7, "p", "K80", 8, True, True, False, group)


@pytest.mark.parametrize(
    "text", ['{"virtualCluster": 010, "leafCellNumber": 1}', "virtualCluster: 010\nleafCellNumber: 1"]
)
def test_texts_are_raw_scalars(text: str) -> None:
    """A value that looks like a number stays the text as written."""
    assert spec_of(text).virtual_cluster == "010"


def test_yaml_is_that_of_hived() -> None:
    """YAML 1.1's booleans; null is absent; the last of repeated fields counts."""
    spec = spec_of(
        "virtualCluster: yes\nleafCellNumber: 1\nleafCellNumber: 2\nlazyPreemptionEnable: yes\n"
        "ignoreK8sSuggestedNodes: ~\npriority: null\nleafCellType:\naffinityGroup: null"
    )
    assert spec == PodSchedulingSpec(
        "yes", 0, "", "", 2, False, True, True, AffinityGroupSpec("team/train-0", (AffinityGroupMember(1, 2),))
    )


def test_old_names() -> None:
    """Field names of early HiveD versions are accepted."""
    spec = spec_of(
        "{virtualCluster: a, gpuType: K80, gpuNumber: 2, "
        "affinityGroup: {name: g, members: [{podNumber: 1, gpuNumber: 2}]}}"
    )
    assert (spec.leaf_cell_type, spec.leaf_cell_number) == ("K80", 2)
    assert spec.affinity_group.members == (AffinityGroupMember(1, 2),)


def test_old_names_are_those_of_fields_only() -> None:
    """A cell type may have the name of an old field."""
    assert spec_of('{"virtualCluster": "a", "gpuType" : "gpuType", "gpuNumber": 1}').leaf_cell_type == "gpuType"
    assert spec_of("virtualCluster: a\n'gpuType': my-gpuType-1\ngpuNumber: 1").leaf_cell_type == "my-gpuType-1"


FAULTS = {
    "": "is missing or empty",
    " \n": "is missing or empty",
    "null": "expected object, got null",
    "just words": "expected object, got str",
    "[1]": "expected object, got array",
    "{": "is not valid YAML: line 2",
    "a: b: c": "is not valid YAML: line 1, column 5",
    "leafCellNumber: 1": "virtualCluster: is missing",
    "{virtualCluster: '', leafCellNumber: 1}": "virtualCluster: is empty",
    "{virtualCluster: a}": "leafCellNumber: is 0 or missing; give at least 1",
    "{virtualCluster: a, leafCellNumber: -1}": "leafCellNumber: is -1; give at least 1",
    "{virtualCluster: a, leafCellNumber: '1'}": "leafCellNumber: expected int, got str",
    "{virtualCluster: a, leafCellNumber: 2147483648}": "leafCellNumber: expected int <= 2147483647",
    '{"virtualCluster": "a", "leafCellNumber": 99999999999999999999}': "leafCellNumber: expected int <= 2147483647",
    "{virtualCluster: a, leafCellNumber: 1.5}": "leafCellNumber: expected int, got float",
    "{virtualCluster: a, leafCellNumber: 2001-99-99}": "can't be read",
    "{virtualCluster: a, leafCellNumber: !!python/name:os.system x}": "can't be read",
    "{virtualCluster: [a], leafCellNumber: 1}": "virtualCluster: expected str, got array",
    "{virtualCluster: a, leafCellNumber: 1, priority: 1001}": "priority: 1001 is out of range",
    "{virtualCluster: a, leafCellNumber: 1, priority: -2}": "priority: -2 is out of range",
    "{virtualCluster: a, leafCellNumber: 1, priority: -1, pinnedCellId: p}": "pinnedCellId: 'p' can't be used",
    "{virtualCluster: a, leafCellNumber: 1, lazyPreemptionEnable: 3}": "lazyPreemptionEnable: expected bool, got int",
    "{virtualCluster: a, leafCellNumber: 1, affinityGroup: {members: []}}": "affinityGroup.name: is missing",
    "{virtualCluster: a, leafCellNumber: 1, affinityGroup: {name: g}}": "affinityGroup.members: is missing",
    "{virtualCluster: a, leafCellNumber: 1, affinityGroup: {name: '', members: []}}": "affinityGroup.name: is empty",
    "{virtualCluster: a, leafCellNumber: 1, affinityGroup: {name: g, members: []}}": "none has the pod's own",
    "{virtualCluster: a, leafCellNumber: 1, affinityGroup: {name: g, members: [{podNumber: 1, leafCellNumber: 2}]}}": (
        "affinityGroup.members: none has the pod's own leafCellNumber 1"
    ),
    "{virtualCluster: a, leafCellNumber: 1, affinityGroup: {name: g, members: [{podNumber: 0, leafCellNumber: 1}]}}": (
        r"affinityGroup.members\[0\].podNumber: is 0"
    ),
    "{virtualCluster: a, leafCellNumber: 1, affinityGroup: {name: g, members: [{podNumber: 1, leafCellNumber: 0}]}}": (
        r"affinityGroup.members\[0\].leafCellNumber: is 0"
    ),
    "{virtualCluster: a, leafCellNumber: 1, affinityGroup: {name: g, members: "
    "[{podNumber: 4096, leafCellNumber: 1}, {podNumber: 1, leafCellNumber: 1}]}}": (
        "affinityGroup.members: are 4097 pods; a group can have at most 4096"
    ),
    "{virtualCluster: &x a, leafCellNumber: 1, pinnedCellId: *x}": r"aliases \(\*\) are not allowed",
    "{[a]: 1}": "can't be the name of a field",
    "[" * 20_000: "nested more than 200 levels deep",
    "- " * 15_000: "nested more than 200 levels deep",
    "{virtualCluster: a, leafCellNumber: 1, lazyPreemptionEnable: !!bool x}": "line 1, column 62: 'x' can't be read",
    "{virtualCluster: a, leafCellNumber: 1, priority: !!int ''}": "column 50: '' can't be read",
    "{virtualCluster: a, leafCellNumber: 1, priority: !!timestamp x}": "column 50: 'x' can't be read",
    "{virtualCluster: a, leafCellNumber: 1, priority: 1" + ":1" * 15_000 + "}": "priority: expected int, got str",
    "virtualCluster: a\n#" + "x" * 33_000: "has 33019 characters, as YAML it may have 32768; write JSON",
    "[" * 9_000 + "]" * 9_000: "nested more than 200 levels deep",
}


@pytest.mark.parametrize(("text", "problem"), FAULTS.items(), ids=range(len(FAULTS)))
def test_invalid_requests(text: str, problem: str) -> None:
    """Every problem is a user error that names the pod, the annotation and the field."""
    with pytest.raises(UserError, match=problem) as caught:
        spec_of(text)
    assert str(caught.value).startswith(f"pod team/train-0: annotation {POD_SCHEDULING_SPEC}: ")
    assert len(str(caught.value)) < 500


def test_a_pod_without_annotations() -> None:
    """The error names the missing annotation; a value that is no text counts as missing."""
    with pytest.raises(UserError, match="pod-scheduling-spec: is missing"):
        extract_pod_scheduling_spec({"metadata": {"namespace": "team", "name": "x"}})
    with pytest.raises(UserError, match="pod-bind-info: is missing or empty: HiveD has not placed this pod"):
        extract_pod_bind_info({"metadata": {"name": "x", "annotations": {POD_BIND_INFO: 3}}})


def test_a_binding_pod_has_its_group_s_placement() -> None:
    """It has its node and the two annotations, which parse back to the same values; the original pod is unchanged."""
    waiting = pod(spec="{}")
    before = copy.deepcopy(waiting)
    binding = new_binding_pod(waiting, INFO)
    assert waiting == before
    assert binding["spec"] == {"nodeName": "node-1"}
    assert binding["metadata"]["annotations"].keys() == {POD_SCHEDULING_SPEC, POD_LEAF_CELL_ISOLATION, POD_BIND_INFO}
    assert binding["metadata"]["annotations"][POD_LEAF_CELL_ISOLATION] == "1,3,0"
    assert extract_pod_bind_info(binding) == INFO
    assert extract_pod_bind_annotations(binding) == {
        name: binding["metadata"]["annotations"][name] for name in (POD_LEAF_CELL_ISOLATION, POD_BIND_INFO)
    }


def test_a_group_that_does_not_fit_into_an_annotation() -> None:
    """Its owner gets an error; otherwise the group would hold its place while the API server refuses every binding."""
    placements = tuple(PodPlacementInfo(f"node-{number}", tuple(range(8)), ("DGX",) * 8) for number in range(2000))
    info = PodBindInfo("node-0", tuple(range(8)), "DGX", (AffinityGroupMemberBindInfo(placements),))
    with pytest.raises(UserError, match=r"pod team/train-0: .* Kubernetes allows 262144; use a smaller group"):
        new_binding_pod(pod(), info)


def test_a_pod_without_annotations_can_be_bound() -> None:
    """The annotations are created."""
    bare = {"metadata": {"name": "x"}, "spec": {}}
    assert extract_pod_bind_info(new_binding_pod(bare, INFO)) == INFO


def test_bind_info_has_the_names_that_hived_reads() -> None:
    """Its text, which is valid YAML, has HiveD's fields and types."""
    types = ["DGX", "DGX", "DGX"]
    places = [("node-0", [0], ["DGX"]), ("node-0", [4, 5, 6], types), ("node-1", [1, 3, 0], types)]
    first, *others = [
        {"physicalNode": node, "physicalLeafCellIndices": indices, "preassignedCellTypes": cell_types}
        for node, indices, cell_types in places
    ]
    text = new_binding_pod(pod(), INFO)["metadata"]["annotations"][POD_BIND_INFO]
    assert yaml.safe_load(text) == {
        "node": "node-1",
        "leafCellIsolation": [1, 3, 0],
        "cellChain": "DGX",
        "affinityGroupBindInfo": [{"podPlacements": [first]}, {"podPlacements": others}],
    }


def test_bind_info_that_hived_wrote() -> None:
    """Pods bound by HiveD are recovered: its YAML is parsed, with texts as written."""
    assert extract_pod_bind_info(pod(info=HIVED_BIND_INFO)) == PodBindInfo(
        "node-1", (1, 3, 0), "8", (AffinityGroupMemberBindInfo((PodPlacementInfo("node-1", (1, 3, 0), ("", "", "")),)),)
    )


def test_bind_info_that_an_early_hived_wrote() -> None:
    """Old names, and no preassigned types, as for an opportunistic pod. Binding again writes today's names."""
    text = HIVED_BIND_INFO.replace("leafCellIsolation", "gpuIsolation").replace("LeafCell", "Gpu")
    text = text.replace('    preassignedCellTypes: ["", "", ""]\n', "")
    old = pod(info=text)
    old["metadata"]["annotations"][OLD_POD_GPU_ISOLATION] = "1,3,0"
    assert extract_pod_bind_info(old) == extract_pod_bind_info(pod(info=HIVED_BIND_INFO))
    again = extract_pod_bind_annotations(old)
    assert again[POD_LEAF_CELL_ISOLATION] == "1,3,0"
    assert "physicalLeafCellIndices" in again[POD_BIND_INFO]
    assert "pu" not in again[POD_BIND_INFO]


def placed(*indices: list[int], **fields: Any) -> dict[str, Any]:
    """Return bind info of pods on one node, our pod first."""
    placements = [{"physicalNode": "n", "physicalLeafCellIndices": each} for each in indices]
    group = [{"podPlacements": placements}]
    return {"node": "n", "leafCellIsolation": [0], "cellChain": "c", "affinityGroupBindInfo": group, **fields}


@pytest.mark.parametrize(
    ("info", "problem"),
    [
        ("", "is missing or empty: HiveD has not placed this pod"),
        ("{}", "node: is missing"),
        (placed([0], node=""), "node: is empty"),
        (placed([0], node="m"), "affinityGroupBindInfo: does not place a pod on leafCellIsolation"),
        (placed([0], leafCellIsolation=[1]), r"does not place a pod on leafCellIsolation \[1\] of node n"),
        (placed([0], affinityGroupBindInfo=[]), "does not place a pod"),
        (placed([0], affinityGroupBindInfo=3), "affinityGroupBindInfo: expected array, got int"),
        (placed([0], [2**31]), "physicalLeafCellIndices.*: expected int <= 2147483647"),
        (placed([0], leafCellIsolation=["0"]), "leafCellIsolation.*: expected int, got str"),
        (placed([0], [0]), "places two pods of the group on one leaf cell"),
        (placed([0], [1, 2]), r"affinityGroupBindInfo\[0\].podPlacements: must be pods with equal numbers"),
        (placed(), "must be pods with equal numbers"),
        (placed([]), "at least one"),
        (
            placed(
                [0],
                affinityGroupBindInfo=[
                    {
                        "podPlacements": [
                            {"physicalNode": "n", "physicalLeafCellIndices": [0], "preassignedCellTypes": ["a", "b"]}
                        ]
                    }
                ],
            ),
            "preassignedCellTypes must name a type for each leaf cell",
        ),
    ],
)
def test_invalid_bind_info(info: Any, problem: str) -> None:
    """A pod that was bound by hand, or whose annotation was changed, is a user error."""
    for text in (info, info if isinstance(info, str) else yaml.safe_dump(info)):
        with pytest.raises(UserError, match=problem) as caught:
            extract_pod_bind_info(pod(info=text))
        assert str(caught.value).startswith(f"pod team/train-0: annotation {POD_BIND_INFO}: ")


def test_a_group_s_placement_is_shared() -> None:
    """Every pod carries its whole group's placement; it is kept once, or a gang of 1,000 would hold a million."""
    first = extract_pod_bind_info(new_binding_pod(pod(), INFO))
    second = new_binding_pod(pod(), PodBindInfo("node-0", (4, 5, 6), INFO.cell_chain, INFO.affinity_group_bind_info))
    assert extract_pod_bind_info(second).affinity_group_bind_info is first.affinity_group_bind_info


def with_limit(value: Any, containers: str = "containers") -> Object:
    return {"spec": {containers: [{"name": "x"}, {"resources": {"limits": {POD_SCHEDULING_ENABLE: value}}}]}}


@pytest.mark.parametrize("value", [1, "1", "1k", "500m"])
@pytest.mark.parametrize("containers", ["containers", "initContainers"])
def test_enabled(value: Any, containers: str) -> None:
    """A limit above zero, in any notation and any container, enables."""
    assert is_hived_enabled(with_limit(value, containers))


@pytest.mark.parametrize(
    "disabled",
    [{}, {"spec": None}, {"spec": {"containers": None}}, with_limit("0"), with_limit("-1"), with_limit("many")],
)
def test_not_enabled(disabled: Object) -> None:
    """No such limit, none above zero, or none that is a quantity."""
    assert not is_hived_enabled(disabled)


@pytest.mark.parametrize(
    ("phase", "node", "expected"),
    [
        ("Pending", "", "live"),
        ("Running", "n", "live bound"),
        ("Succeeded", "n", ""),
        ("Failed", "", ""),
        (None, "n", "live bound"),
    ],
)
def test_life(phase: str | None, node: str, expected: str) -> None:
    """A completed pod is neither bound nor waiting, and of no interest."""
    subject = with_limit("1")
    subject["spec"]["nodeName"] = node
    if phase:
        subject["status"] = {"phase": phase}
    found = {"live": is_live, "bound": is_bound}
    assert {name for name, holds in found.items() if holds(subject)} == set(expected.split())
    assert is_interested(subject) is is_live(subject)


def test_long_requests_are_not_kept() -> None:
    """Texts that users may write repeatedly do not fill memory; in JSON they may be long."""
    before = _scheduling_spec.cache_info().currsize, _written_spec.cache_info().currsize
    for number in range(10):
        assert (
            spec_of(f'{{"virtualCluster":"a","leafCellNumber":1,"x":"{number}{"x" * 200_000}"}}').leaf_cell_number == 1
        )
    assert (_scheduling_spec.cache_info().currsize, _written_spec.cache_info().currsize) == before
