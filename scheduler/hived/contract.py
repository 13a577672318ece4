"""What pods, nodes and annotations say to HiveD: names on the wire, requests, and the placements that HiveD writes.

Pods are Kubernetes objects and are never changed. An invalid annotation is a `UserError` that names the pod, the
annotation and the field; whether a virtual cluster, pinned cell or type exists is checked elsewhere. Parsed annotations
are cached by text: the pods of a group repeat them, and each is parsed again at every attempt.

Annotations are parsed as HiveD's `FromYaml` does: YAML 1.1 without strictness. JSON is tried first: it is valid YAML,
it is what we write, and it parses about twenty times faster. In YAML a text field takes its scalar as written (a
virtual cluster `8` is "8"), null means absent, unknown fields are ignored, and the last of repeated fields counts.

Any user who can create a pod can write these texts, so aliases, which expand small texts, are refused, and so are texts
that are nested too deeply, have too many values or too long a number (see `store.decoding`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Annotated, Any, Final, Generic, TypeVar

import msgspec
import yaml

from scheduler.hived.errors import UserError
from store.decoding import NotYaml, Undecodable, converted, from_json, problem_of, yaml_node
from store.errors import RcfarmError
from store.kube.api.objects import Object, annotations_of, has_ended, key_of
from store.quantity import parse_quantity

GROUP: Final = "hivedscheduler.microsoft.com"
POD_SCHEDULING_ENABLE: Final = f"{GROUP}/pod-scheduling-enable"  # the resource whose limit > 0 enables a pod
POD_SCHEDULING_SPEC: Final = f"{GROUP}/pod-scheduling-spec"
POD_BIND_INFO: Final = f"{GROUP}/pod-bind-info"
POD_LEAF_CELL_ISOLATION: Final = f"{GROUP}/pod-leaf-cell-isolation"
OLD_POD_GPU_ISOLATION: Final = f"{GROUP}/pod-gpu-isolation"  # on pods that an early HiveD bound

FREE_PRIORITY: Final = -2
OPPORTUNISTIC_PRIORITY: Final = -1
MIN_GUARANTEED_PRIORITY: Final = 0
MAX_GUARANTEED_PRIORITY: Final = 1000


T = TypeVar("T")

MAX_GROUP_PODS = 4096  # a larger group can't be bound: each pod's annotations hold all placements, within
MAX_ANNOTATIONS = 256 * 1024  # bytes: Kubernetes' limit for all annotations of a pod
MAX_YAML = 32 * 1024  # characters that are not JSON: parsing them takes a tenth of a second and blocks the event loop
MAX_KEPT = 8 * 1024  # characters of the longest request whose parsed form is cached

Int32 = Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]  # as in HiveD; larger values can't be expressed in JSON


class AffinityGroupMember(msgspec.Struct, frozen=True, rename="camel"):
    """A number of the group's pods, each with the same number of leaf cells."""

    pod_number: Int32
    leaf_cell_number: Int32


class AffinityGroupSpec(msgspec.Struct, frozen=True, rename="camel"):
    """Pods that are placed all or none. Members of equal `leaf_cell_number` are merged, ascending by it."""

    name: str
    members: tuple[AffinityGroupMember, ...]


_ON_ITS_OWN = AffinityGroupSpec("", ())


class PodSchedulingSpec(msgspec.Struct, frozen=True, rename="camel"):
    """The annotation `pod-scheduling-spec`, with HiveD's defaults. `priority` -1 is opportunistic."""

    virtual_cluster: str
    priority: Int32 = 0
    pinned_cell_id: str = ""
    leaf_cell_type: str = ""
    leaf_cell_number: Int32 = 0
    gang_release_enable: bool = False
    lazy_preemption_enable: bool = False
    ignore_k8s_suggested_nodes: bool = msgspec.field(default=True, name="ignoreK8sSuggestedNodes")
    affinity_group: AffinityGroupSpec = _ON_ITS_OWN


class PodPlacementInfo(msgspec.Struct, frozen=True, rename="camel", gc=False):
    """Placement of one pod of the group. `preassigned_cell_types` has a type per leaf, all "" if opportunistic."""

    physical_node: str
    physical_leaf_cell_indices: tuple[Int32, ...]
    preassigned_cell_types: tuple[str, ...] = ()


class AffinityGroupMemberBindInfo(msgspec.Struct, frozen=True, rename="camel", gc=False):
    """The placements of all pods of one `leaf_cell_number`."""

    pod_placements: tuple[PodPlacementInfo, ...]


class PodBindInfo(msgspec.Struct, frozen=True, rename="camel"):
    """The annotation `pod-bind-info`: the places of this pod and its group, so that any pod can restore the group."""

    node: str
    leaf_cell_isolation: tuple[Int32, ...]
    cell_chain: str
    affinity_group_bind_info: tuple[AffinityGroupMemberBindInfo, ...]


GroupBindInfo = tuple[AffinityGroupMemberBindInfo, ...]


class _WrittenBindInfo(msgspec.Struct, rename="camel"):
    """Bind info with an undecoded group part, which `_group_bind_info` decodes once for all pods of a group."""

    node: str
    leaf_cell_isolation: tuple[Int32, ...]
    cell_chain: str
    affinity_group_bind_info: msgspec.Raw


_NULL = "tag:yaml.org,2002:null"
_OLD_NAMES = {
    "gpuType": "leafCellType",
    "gpuNumber": "leafCellNumber",
    "gpuIsolation": "leafCellIsolation",
    "physicalGpuIndices": "physicalLeafCellIndices",
}
_OLD_NAME = re.compile(rf"({'|'.join(_OLD_NAMES)})(?=[\"']?\s*:)")


class InvalidAnnotation(RcfarmError, ValueError):
    """An unusable text. The message names the field, if one is at fault, the problem and what to do."""


def with_new_names(text: str) -> str:
    """Rename the fields of early HiveD versions to today's names. A value that looks like one stays."""
    if "gpu" not in text and "Gpu" not in text:
        return text
    return _OLD_NAME.sub(lambda match: _OLD_NAMES[match[0]], text)


class AnnotationReader(Generic[T]):
    """Parser of texts into a msgspec type. `text_fields`: names of fields, at any depth, that hold text. `max_yaml`:
    the most characters of a text that is not JSON.
    """

    def __init__(self, kind: type[T], *text_fields: str, max_yaml: int) -> None:
        self._kind, self._max_yaml = kind, max_yaml
        self._decoder = msgspec.json.Decoder(kind)
        self._text_fields = frozenset(text_fields)

    def read(self, text: str) -> T:
        """Parse one text. Raises `InvalidAnnotation`."""
        try:
            return from_json(self._decoder, text)
        except Undecodable:
            pass  # not JSON, or JSON with values that only the YAML rules accept
        if len(text) > self._max_yaml:
            raise InvalidAnnotation(f"has {len(text)} characters, as YAML it may have {self._max_yaml}; write JSON")
        try:
            node = yaml_node(text)
        except Undecodable as error:
            raise InvalidAnnotation(f"is {error}" if isinstance(error, NotYaml) else str(error)) from None
        try:
            return converted(_Nodes(self._text_fields).value(node), self._kind)
        except Undecodable as error:
            problem = problem_of(error)
            if problem.missing:
                raise InvalidAnnotation(f"{problem.field}: {problem.what}") from None
            text = problem.text.replace("`", "")  # types under their JSON names
            raise InvalidAnnotation(": ".join(filter(None, (problem.path, text[:1].lower() + text[1:])))) from None


class _Nodes:
    """Converter of one text's YAML nodes into values."""

    def __init__(self, text_fields: frozenset[str]) -> None:
        self._text_fields = text_fields
        self._constructor = yaml.constructor.SafeConstructor()
        self._seen: set[int] = set()

    def value(self, node: yaml.Node | None, is_text: bool = False) -> Any:
        if node is None or node.tag == _NULL:
            return None
        if id(node) in self._seen:
            raise InvalidAnnotation(f"{_at(node)}: aliases (*) are not allowed; write it out")
        self._seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            values = {
                self._key(key): self.value(value, self._key(key) in self._text_fields) for key, value in node.value
            }
            return {key: value for key, value in values.items() if value is not None}
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, is_text) for item in node.value]
        if is_text:
            return node.value
        try:
            return self._constructor.construct_object(node)
        except Exception:  # `!!bool x`, `!!int ""`, `!!binary é`: each raises its own type
            raise InvalidAnnotation(f"{_at(node)}: {str(node.value)[:100]!r} can't be read") from None

    def _key(self, node: yaml.Node) -> str:
        if not isinstance(node, yaml.ScalarNode):
            raise InvalidAnnotation(f"{_at(node)}: a list or map can't be the name of a field")
        return str(node.value)


def _at(node: yaml.Node) -> str:
    return f"line {node.start_mark.line + 1}, column {node.start_mark.column + 1}"


def is_live(pod: Object) -> bool:
    """Return whether the pod has neither succeeded nor failed; the scheduler treats one that has as deleted."""
    return not has_ended(pod)


def is_hived_enabled(pod: Object) -> bool:
    """Return whether any container's limit of `pod-scheduling-enable` is above zero."""
    spec = pod.get("spec") or {}
    containers = [*(spec.get("initContainers") or ()), *(spec.get("containers") or ())]
    for container in containers:
        limits = (container.get("resources") or {}).get("limits") or {}
        with suppress(ValueError):  # not a quantity: enables nothing
            if POD_SCHEDULING_ENABLE in limits and parse_quantity(limits[POD_SCHEDULING_ENABLE]) > 0:
                return True
    return False


def is_interested(pod: Object) -> bool:
    """Return whether the pod is live and asks for HiveD."""
    return is_live(pod) and is_hived_enabled(pod)


def is_bound(pod: Object) -> bool:
    """Return whether the pod is live on a node, and holds its cells."""
    return bool((pod.get("spec") or {}).get("nodeName")) and is_live(pod)


def extract_pod_scheduling_spec(pod: Object) -> PodSchedulingSpec:
    """Return the pod's request. Raises `UserError`."""
    with _blaming(pod, POD_SCHEDULING_SPEC):
        text = _annotation(pod, POD_SCHEDULING_SPEC, "set it to the pod's virtual cluster and number of leaf cells")
        if len(text) > MAX_KEPT:
            return _of_group(_read_spec(text), key_of(pod))
        return _scheduling_spec(text, key_of(pod))


def extract_pod_bind_info(pod: Object) -> PodBindInfo:
    """Return the placement of the pod and its group. Raises `UserError`: a user may bind a pod by hand."""
    with _blaming(pod, POD_BIND_INFO):
        return _bind_info(_annotation(pod, POD_BIND_INFO, "HiveD has not placed this pod; delete it if it should have"))


def extract_pod_bind_annotations(pod: Object) -> dict[str, str]:
    """Return the annotations to write with a pod's binding: its devices, and its group's placement.

    A pod that an early HiveD placed gets them under today's names.
    """
    annotations = annotations_of(pod)
    isolation = annotations.get(POD_LEAF_CELL_ISOLATION, annotations.get(OLD_POD_GPU_ISOLATION, ""))
    return {
        POD_LEAF_CELL_ISOLATION: isolation,
        POD_BIND_INFO: with_new_names(annotations.get(POD_BIND_INFO, "")),
    }


def new_binding_pod(pod: Object, info: PodBindInfo) -> Object:
    """Return the pod as it will be when bound. Unchanged parts are shared with `pod`.

    Raises `UserError` for a group so large that Kubernetes would reject the annotation.
    """
    annotations = {
        **annotations_of(pod),
        POD_LEAF_CELL_ISOLATION: ",".join(map(str, info.leaf_cell_isolation)),
        POD_BIND_INFO: msgspec.json.encode(info).decode(),
    }
    size = sum(len(name) + len(value) for name, value in annotations.items())
    if size > MAX_ANNOTATIONS:
        raise UserError(
            f"pod {key_of(pod)}: with the place of its whole affinity group it would have {size} bytes of annotations, "
            f"Kubernetes allows {MAX_ANNOTATIONS}; use a smaller group, or fewer pods with more leaf cells each"
        )
    return {
        **pod,
        "metadata": {**pod["metadata"], "annotations": annotations},
        "spec": {**pod["spec"], "nodeName": info.node},
    }


@contextmanager
def _blaming(pod: Object, annotation: str) -> Iterator[None]:
    try:
        yield
    except InvalidAnnotation as error:
        raise UserError(f"pod {key_of(pod)}: annotation {annotation}: {error}") from None


def _annotation(pod: Object, name: str, advice: str) -> str:
    text = annotations_of(pod).get(name)
    if not isinstance(text, str) or not text.strip():
        raise InvalidAnnotation(f"is missing or empty: {advice}")
    return text


_spec_reader = AnnotationReader(
    PodSchedulingSpec, "virtualCluster", "pinnedCellId", "leafCellType", "name", max_yaml=MAX_YAML
)
_bind_info_reader = AnnotationReader(
    PodBindInfo, "node", "cellChain", "physicalNode", "preassignedCellTypes", max_yaml=MAX_YAML
)
_written_bind_info = msgspec.json.Decoder(_WrittenBindInfo)
_written_group = msgspec.json.Decoder(GroupBindInfo)


@lru_cache(maxsize=16384)
def _scheduling_spec(text: str, own_group: str) -> PodSchedulingSpec:
    """Parse a request. `own_group`: the group name of a pod without affinity group."""
    return _of_group(_written_spec(text), own_group)


def _of_group(spec: PodSchedulingSpec, own_group: str) -> PodSchedulingSpec:
    if spec.affinity_group is not _ON_ITS_OWN:
        return spec
    alone = AffinityGroupSpec(own_group, (AffinityGroupMember(1, spec.leaf_cell_number),))
    return msgspec.structs.replace(spec, affinity_group=alone)


def _read_spec(text: str) -> PodSchedulingSpec:
    spec = _spec_reader.read(with_new_names(text))
    if not spec.virtual_cluster:
        raise InvalidAnnotation("virtualCluster: is empty; name the virtual cluster that the pod runs in")
    if not OPPORTUNISTIC_PRIORITY <= spec.priority <= MAX_GUARANTEED_PRIORITY:
        raise InvalidAnnotation(
            f"priority: {spec.priority} is out of range; give {OPPORTUNISTIC_PRIORITY} for an opportunistic pod "
            f"or 0 to {MAX_GUARANTEED_PRIORITY} for a guaranteed one"
        )
    if spec.pinned_cell_id and spec.priority == OPPORTUNISTIC_PRIORITY:
        raise InvalidAnnotation(
            f"pinnedCellId: {spec.pinned_cell_id!r} can't be used by an opportunistic pod; "
            "leave it out or give a priority of at least 0"
        )
    _check_at_least_one("leafCellNumber", spec.leaf_cell_number)
    if spec.affinity_group is _ON_ITS_OWN:
        return spec
    group = spec.affinity_group
    if not group.name:
        raise InvalidAnnotation("affinityGroup.name: is empty; name the group, or leave affinityGroup out")
    for number, member in enumerate(group.members):
        _check_at_least_one(f"affinityGroup.members[{number}].podNumber", member.pod_number)
        _check_at_least_one(f"affinityGroup.members[{number}].leafCellNumber", member.leaf_cell_number)
    pods = sum(member.pod_number for member in group.members)
    if pods > MAX_GROUP_PODS:
        raise InvalidAnnotation(f"affinityGroup.members: are {pods} pods; a group can have at most {MAX_GROUP_PODS}")
    if all(member.leaf_cell_number != spec.leaf_cell_number for member in group.members):
        raise InvalidAnnotation(
            f"affinityGroup.members: none has the pod's own leafCellNumber {spec.leaf_cell_number}; "
            "add the pod itself to the members"
        )
    numbers: dict[int, int] = {}
    for member in spec.affinity_group.members:
        numbers[member.leaf_cell_number] = numbers.get(member.leaf_cell_number, 0) + member.pod_number
    merged = AffinityGroupSpec(
        spec.affinity_group.name, tuple(AffinityGroupMember(numbers[leaves], leaves) for leaves in sorted(numbers))
    )
    return msgspec.structs.replace(spec, affinity_group=merged)


_written_spec = lru_cache(maxsize=4096)(_read_spec)


def _check_at_least_one(field: str, number: int) -> None:
    if number < 1:
        raise InvalidAnnotation(f"{field}: is {number or '0 or missing'}; give at least 1")


@lru_cache(maxsize=1024)
def _bind_info(text: str) -> PodBindInfo:
    text = with_new_names(text)
    try:
        written = from_json(_written_bind_info, text)
        group = _group_bind_info(bytes(written.affinity_group_bind_info))
        info = PodBindInfo(written.node, written.leaf_cell_isolation, written.cell_chain, group)
    except Undecodable:  # not in the form that we write
        info = _bind_info_reader.read(text)
        info = msgspec.structs.replace(info, affinity_group_bind_info=_checked_group(info.affinity_group_bind_info))
    if not info.node:
        raise InvalidAnnotation("node: is empty")
    placements = (placement for member in info.affinity_group_bind_info for placement in member.pod_placements)
    own = (info.node, info.leaf_cell_isolation)
    if own not in ((placement.physical_node, placement.physical_leaf_cell_indices) for placement in placements):
        raise InvalidAnnotation(
            f"affinityGroupBindInfo: does not place a pod on leafCellIsolation {list(info.leaf_cell_isolation)} "
            f"of node {info.node}, as the annotation itself does"
        )
    return info


@lru_cache(maxsize=256)
def _group_bind_info(text: bytes) -> GroupBindInfo:
    return _checked_group(from_json(_written_group, text))


def _checked_group(group: GroupBindInfo) -> GroupBindInfo:
    """Return the group with a preassigned type per leaf; early HiveD wrote none. Raises `InvalidAnnotation`."""
    checked = []
    leaves: set[tuple[str, int]] = set()
    for number, member in enumerate(group):
        field = f"affinityGroupBindInfo[{number}].podPlacements"
        sizes = {len(placement.physical_leaf_cell_indices) for placement in member.pod_placements}
        if len(sizes) != 1 or 0 in sizes:
            raise InvalidAnnotation(
                f"{field}: must be pods with equal numbers of physicalLeafCellIndices, at least one"
            )
        placements = []
        for placement in member.pod_placements:
            leaves.update((placement.physical_node, index) for index in placement.physical_leaf_cell_indices)
            if len(placement.preassigned_cell_types) not in (0, *sizes):
                raise InvalidAnnotation(f"{field}: preassignedCellTypes must name a type for each leaf cell")
            if not placement.preassigned_cell_types:
                none = ("",) * len(placement.physical_leaf_cell_indices)
                placement = msgspec.structs.replace(placement, preassigned_cell_types=none)
            placements.append(placement)
        checked.append(AffinityGroupMemberBindInfo(tuple(placements)))
    if len(leaves) != sum(len(p.physical_leaf_cell_indices) for member in group for p in member.pod_placements):
        raise InvalidAnnotation("affinityGroupBindInfo: places two pods of the group on one leaf cell")
    return tuple(checked)


def why_bad(node: Object) -> str:
    """Return why a node is bad, "" for one that is Ready and not cordoned."""
    if (node.get("spec") or {}).get("unschedulable"):
        return "it is cordoned"
    conditions = (node.get("status") or {}).get("conditions") or ()
    is_ready = any(condition.get("type") == "Ready" and condition.get("status") == "True" for condition in conditions)
    return "" if is_ready else "it is not Ready"
