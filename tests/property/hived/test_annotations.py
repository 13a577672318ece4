"""Annotations of pods, with any text."""

from __future__ import annotations

import json
from contextlib import suppress

import yaml
from hypothesis import given
from hypothesis import strategies as st

from scheduler.hived.contract import (
    POD_BIND_INFO,
    POD_SCHEDULING_SPEC,
    AffinityGroupMemberBindInfo,
    PodBindInfo,
    PodPlacementInfo,
    extract_pod_bind_info,
    extract_pod_scheduling_spec,
    new_binding_pod,
)
from scheduler.hived.errors import UserError
from store.kube.api.objects import Object

FIELDS = [
    "virtualCluster",
    "priority",
    "leafCellNumber",
    "lazyPreemptionEnable",
    "affinityGroup",
    "name",
    "members",
    "podNumber",
    "node",
    "leafCellIsolation",
    "cellChain",
    "affinityGroupBindInfo",
    "podPlacements",
    "physicalNode",
    "physicalLeafCellIndices",
    "preassignedCellTypes",
]

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=6),
    max_leaves=20,
)
texts = st.one_of(
    st.text(),
    st.text(alphabet="[]{}:,-? \n\t&*!|>'\"#%@`a1"),
    values.map(lambda value: yaml.safe_dump(value)),
    values.map(lambda value: json.dumps(value)),
)

names = st.text(alphabet="a8-./: é\"'#{", min_size=1, max_size=8) | st.sampled_from(["gpuType", "null", "8", "1e3"])


@st.composite
def bind_infos(draw: st.DrawFn) -> PodBindInfo:
    """Groups of one to three pods per size, on devices of their own."""
    members, device = [], 0
    for size in draw(st.lists(st.integers(1, 4), min_size=1, max_size=3, unique=True)):
        placements = []
        for _ in range(draw(st.integers(1, 3))):
            indices = tuple(range(device, device := device + size))
            types = (draw(st.sampled_from(["", "8", "DGX"])),) * size
            placements.append(PodPlacementInfo(draw(names), indices, types))
        members.append(AffinityGroupMemberBindInfo(tuple(placements)))
    own = draw(st.sampled_from([placement for member in members for placement in member.pod_placements]))
    return PodBindInfo(own.physical_node, own.physical_leaf_cell_indices, draw(names), tuple(members))


def pod(**annotations: str) -> Object:
    return {"metadata": {"namespace": "n", "name": "p", "uid": "u", "annotations": annotations}, "spec": {}}


@given(texts)
def test_any_text_is_parsed_or_a_user_error(text: str) -> None:
    """P20: a text is parsed, or it is a user error."""
    subject = pod(**{POD_SCHEDULING_SPEC: text, POD_BIND_INFO: text})
    for extract in (extract_pod_scheduling_spec, extract_pod_bind_info):
        with suppress(UserError):
            assert extract(subject)


@given(bind_infos())
def test_bind_info_reads_back(info: PodBindInfo) -> None:
    """Written bind info is read back unchanged: as JSON, and as HiveD's YAML."""
    bound = new_binding_pod(pod(), info)
    assert extract_pod_bind_info(bound) == info
    text = yaml.safe_dump(json.loads(bound["metadata"]["annotations"][POD_BIND_INFO]), allow_unicode=True)
    assert extract_pod_bind_info(pod(**{POD_BIND_INFO: text})) == info
