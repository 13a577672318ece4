"""A job's pods as one affinity group of HiveD, which gets all of its cells or none; see `scheduler.hived`.

The job asks for it by one annotation, `rcfarm.dev/hived`, in JSON or YAML:

    {virtualCluster: prod, priority: 100, leafCellType: A100, leafCellNumber: {Master: 8, Worker: 8}}

`leafCellNumber` is the number of devices of each pod, by type or one for all; pods of a type without devices take no
part. Each pod gets the request of the extender as an annotation, the resource that enables it, and its kube-scheduler;
its first container sees the devices that it is given. Such a job has no other gang object.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated

import msgspec

from controllers.jobs.api import BadSpec, JobEvent, JobView, decode
from controllers.jobs.control import set_scheduler
from scheduler.hived.contract import (
    MAX_GUARANTEED_PRIORITY,
    OPPORTUNISTIC_PRIORITY,
    POD_LEAF_CELL_ISOLATION,
    POD_SCHEDULING_ENABLE,
    POD_SCHEDULING_SPEC,
    AffinityGroupMember,
    AffinityGroupSpec,
    PodSchedulingSpec,
)
from store.decoding import Undecodable, load_yaml
from store.kube.api.objects import Object, annotations_of

ANNOTATION = "rcfarm.dev/hived"
DEVICES = "NVIDIA_VISIBLE_DEVICES"

_Priority = Annotated[int, msgspec.Meta(ge=OPPORTUNISTIC_PRIORITY, le=MAX_GUARANTEED_PRIORITY)]
_Cells = Annotated[int, msgspec.Meta(ge=0)]


class HivedRequest(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """What a job asks of HiveD. `gang` False: each pod is placed alone, as the pods of a job whose size changes must
    be. `scheduler`: the kube-scheduler of the tenant; "" leaves the template's. The other fields are HiveD's.
    """

    virtual_cluster: Annotated[str, msgspec.Meta(min_length=1)]
    leaf_cell_number: _Cells | dict[str, _Cells]
    priority: _Priority = 0
    leaf_cell_type: str = ""
    pinned_cell_id: str = ""
    lazy_preemption_enable: bool = False
    ignore_k8s_suggested_nodes: bool = msgspec.field(default=True, name="ignoreK8sSuggestedNodes")
    gang: bool = True
    scheduler: str = ""

    def cells(self, replica_type: str) -> int:
        """Return the number of devices of each pod of the type."""
        numbers = self.leaf_cell_number
        return numbers if isinstance(numbers, int) else numbers.get(replica_type, 0)


def hived_request(job: Object) -> HivedRequest | None:
    """Return what the job asks of HiveD, None if it asks for nothing. Raises `BadSpec`."""
    text = annotations_of(job).get(ANNOTATION)
    return None if text is None else _parsed(text)


@lru_cache(maxsize=1024)
def _parsed(text: str) -> HivedRequest:
    path = f"metadata.annotations[{ANNOTATION}]"
    try:
        return decode(load_yaml(text), HivedRequest, path)
    except Undecodable as error:
        raise BadSpec(f"{path}: {error}") from None


def join_affinity_group(pod: Object, replica_type: str, request: HivedRequest, view: JobView) -> JobEvent | None:
    """Write the pod's request into it. Return a warning if the template names another scheduler than the request."""
    cells = request.cells(replica_type)
    if not cells:
        return None
    spec = PodSchedulingSpec(
        virtual_cluster=request.virtual_cluster,
        priority=request.priority,
        pinned_cell_id=request.pinned_cell_id,
        leaf_cell_type=request.leaf_cell_type,
        leaf_cell_number=cells,
        lazy_preemption_enable=request.lazy_preemption_enable,
        ignore_k8s_suggested_nodes=request.ignore_k8s_suggested_nodes,
    )
    written = msgspec.to_builtins(spec)
    del written["affinityGroup"]
    if request.gang:
        members = tuple(
            AffinityGroupMember(other.replicas, request.cells(name))
            for name, other in view.replica_specs.items()
            if other.replicas and request.cells(name)
        )
        name = f"{view.namespace}/{view.name}.{view.kind.lower()}"
        written["affinityGroup"] = msgspec.to_builtins(AffinityGroupSpec(name, members))
    pod["metadata"]["annotations"][POD_SCHEDULING_SPEC] = msgspec.json.encode(written).decode()
    container = pod["spec"]["containers"][0]
    limits = container.setdefault("resources", {}).setdefault("limits", {})
    limits[POD_SCHEDULING_ENABLE] = 1
    variables = container.setdefault("env", [])
    if all(variable.get("name") != DEVICES for variable in variables):
        field = {"fieldPath": f"metadata.annotations['{POD_LEAF_CELL_ISOLATION}']"}
        variables.append({"name": DEVICES, "valueFrom": {"fieldRef": field}})
    return set_scheduler(pod, request.scheduler) if request.scheduler else None
