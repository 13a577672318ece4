"""A pod in the scheduler: its states, the events that change them, the calls admitted in each, and a substitute for a
request that became unreadable. Everything here is pure; `cluster_state` acts on changes of state.

A pod that was deleted, has completed or was never seen is Unknown, which is the absence of a status. Binding and Bound
pods hold devices: they are allocated.

A bound pod whose request became unreadable still runs, so its devices are in use. Any user who may annotate a pod can
do that, and it shows only when the next process reads the pod. If the pod's group was read from another of its pods,
that group still has this place; else the pod counts as an opportunistic group of its own, and its former group, once it
is read, loses that place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import msgspec

from scheduler.hived.algorithm import PodScheduleResult
from scheduler.hived.cells.groups import AffinityGroup
from scheduler.hived.contract import (
    OPPORTUNISTIC_PRIORITY,
    POD_SCHEDULING_SPEC,
    AffinityGroupMember,
    AffinityGroupMemberBindInfo,
    AffinityGroupSpec,
    PodBindInfo,
    PodPlacementInfo,
    PodSchedulingSpec,
    extract_pod_bind_info,
    extract_pod_scheduling_spec,
    new_binding_pod,
)
from scheduler.hived.errors import PlatformError, UserError
from store.kube.api.objects import Object, annotations_of, key_of

_NOT_THERE: Final = "it does not exist, has completed, does not ask for HiveD, or was not seen yet"
_UNDECIDED: Final = "it has no node yet; call filter first"

UNKNOWN_TENANT = "unknown"


class PodState(StrEnum):
    """A pod's state, as in HiveD."""

    UNKNOWN = "Unknown"
    WAITING = "Waiting"
    PREEMPTING = "Preempting"
    BINDING = "Binding"
    BOUND = "Bound"


class PodEvent(StrEnum):
    """An event of a pod: a change seen on the API server, or the decision of an admitted call."""

    UNBOUND_SEEN = "unbound pod seen"
    BOUND_SEEN = "bound pod seen"
    GONE = "deleted or completed"
    FILTER_BIND = "filter: bind"
    FILTER_PREEMPT = "filter: preempt"
    FILTER_WAIT = "filter: wait"
    PREEMPT_BIND = "preempt: bind"
    PREEMPT_VICTIMS = "preempt: victims"
    PREEMPT_WAIT = "preempt: wait"


class ExtenderCall(StrEnum):
    """A call of kube-scheduler."""

    FILTER = "filter"
    BIND = "bind"
    PREEMPT = "preempt"


def is_allocated(state: PodState) -> bool:
    """Return whether a pod in this state holds devices (HiveD's `IsAllocated`)."""
    return state in (PodState.BINDING, PodState.BOUND)


_PENDING_EVENTS: Final[Mapping[PodEvent, PodState | None]] = {  # None: unchanged
    PodEvent.UNBOUND_SEEN: None,
    PodEvent.BOUND_SEEN: PodState.BOUND,
    PodEvent.FILTER_BIND: PodState.BINDING,
    PodEvent.FILTER_PREEMPT: None,
    PodEvent.FILTER_WAIT: PodState.WAITING,
    PodEvent.PREEMPT_BIND: None,
    PodEvent.PREEMPT_VICTIMS: PodState.PREEMPTING,
    PodEvent.PREEMPT_WAIT: PodState.WAITING,
}
_TRANSITIONS: Final[Mapping[PodState, Mapping[PodEvent, PodState | None]]] = {
    PodState.UNKNOWN: {PodEvent.UNBOUND_SEEN: PodState.WAITING, PodEvent.BOUND_SEEN: PodState.BOUND},
    PodState.WAITING: _PENDING_EVENTS,
    PodState.PREEMPTING: _PENDING_EVENTS,
    PodState.BINDING: {
        PodEvent.UNBOUND_SEEN: None,
        PodEvent.FILTER_BIND: None,
        PodEvent.BOUND_SEEN: PodState.BOUND,
    },
    PodState.BOUND: {PodEvent.UNBOUND_SEEN: None, PodEvent.BOUND_SEEN: None},
}


def next_state(state: PodState, event: PodEvent) -> PodState:
    """Return the state after an event. Raises `PlatformError` if the event is impossible in this state."""
    if event == PodEvent.GONE:
        return PodState.UNKNOWN
    if event not in _TRANSITIONS[state]:
        raise PlatformError(f"a pod in state {state} met the event {event!r}, which is impossible there")
    return _TRANSITIONS[state][event] or state


def check_admitted(call: ExtenderCall, state: PodState, pod: str, node: str) -> None:
    """Raise `UserError` if the call is not allowed for a pod in this state; kube-scheduler tries again.

    `pod`: its name in the message; `node`: the node that it is allocated on, if any.
    """
    if call == ExtenderCall.BIND:
        problem = _BIND_REFUSED.get(state)
    elif call == ExtenderCall.PREEMPT and state == PodState.BINDING:
        problem = "it is already being bound to node {node}"
    else:
        problem = _DECISION_REFUSED.get(state)
    if problem is not None:
        raise UserError(f"{call} of pod {pod}: {problem.format(node=node)}")


_DECISION_REFUSED: Final = {PodState.UNKNOWN: _NOT_THERE, PodState.BOUND: "it is already bound to node {node}"}
_BIND_REFUSED: Final = {
    PodState.UNKNOWN: _NOT_THERE,
    PodState.WAITING: _UNDECIDED,
    PodState.PREEMPTING: _UNDECIDED,
}


@dataclass(slots=True)
class PodScheduleStatus:
    """The state of one pod (HiveD's `PodScheduleStatus`).

    `pod`: as last passed to the algorithm; for an allocated pod, with its placement in its annotations.
    `pod_bind_attempts`: filters since it began to bind. `pod_schedule_result`: the last decision, if any. `refusal`:
    why the last call for the pod made no decision, or "".
    """

    pod: Object
    pod_state: PodState
    pod_bind_attempts: int = 0
    pod_schedule_result: PodScheduleResult | None = None
    refusal: str = ""


class PodScheduleStatuses(dict[str, PodScheduleStatus]):
    """Statuses by pod UID (HiveD's `PodScheduleStatuses`)."""

    def state(self, uid: str) -> PodState:
        status = self.get(uid)
        return PodState.UNKNOWN if status is None else status.pod_state

    def by_state(self) -> Counter[PodState]:
        """Count the pods in each state."""
        return Counter(status.pod_state for status in self.values())


def stand_in(pod: Object, groups: Iterable[AffinityGroup]) -> Object | None:
    """Return a bound pod with a substitute request. None if its own request is readable, or its placement is not.

    `groups`: the known groups.
    """
    try:
        extract_pod_scheduling_spec(pod)
    except UserError:
        pass
    else:
        return None
    try:
        info = extract_pod_bind_info(pod)
    except UserError:
        return None
    for group in groups:
        slot = group.slot_of(info)
        if slot is not None and slot.pod is None:
            return _with_request(pod, msgspec.structs.replace(group.spec, leaf_cell_number=len(slot.devices)))
    devices = info.leaf_cell_isolation
    alone = AffinityGroupSpec(key_of(pod), (AffinityGroupMember(1, len(devices)),))
    spec = PodSchedulingSpec(
        virtual_cluster=UNKNOWN_TENANT,
        priority=OPPORTUNISTIC_PRIORITY,
        leaf_cell_number=len(devices),
        affinity_group=alone,
    )
    place = AffinityGroupMemberBindInfo((PodPlacementInfo(info.node, devices, ("",) * len(devices)),))
    return new_binding_pod(_with_request(pod, spec), PodBindInfo(info.node, devices, info.cell_chain, (place,)))


def _with_request(pod: Object, spec: PodSchedulingSpec) -> Object:
    annotations = annotations_of(pod) | {POD_SCHEDULING_SPEC: msgspec.json.encode(spec).decode()}
    return pod | {"metadata": pod["metadata"] | {"annotations": annotations}}
